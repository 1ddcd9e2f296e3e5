"""Train the networks of one family with PyTorch, on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernelcast.efficiency.learned import without_gpu
from kernelcast.efficiency.network import Encoder, Layers
from kernelcast_lab.fit.dataset import Dataset

LOW, HIGH, CEILING = 0.1, 0.9, 0.07  # quantiles of time: the 80% interval, and what the best 7% reach
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. The dropouts are the share of rows that do not see their GPU, or another word."""

    hidden: tuple[int, ...] = (256, 256, 128)
    epochs: int = 60
    batch: int = 4096
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    gpu_dropout: float = 0.3
    word_dropout: float = 0.1
    noise: float = 0.0  # on the standardised numbers, so that the network stays smooth
    seed: int = 0


Kind = Literal["main", "transfer", "ceiling"]
EAGER = "torch_eager"  # times with launch overhead: never to be taken for those of an unknown stack


def encoder_of(data: Dataset) -> Encoder:
    """Ranges, scales and vocabulary of these rows."""
    low, high = data.values.min(axis=0), data.values.max(axis=0)
    scale = data.values.std(axis=0)
    vocabulary = {
        name: tuple(sorted({str(word) for word in column if word is not None})) for name, column in data.words.items()
    }
    return Encoder(
        names=data.names,
        low=low,
        high=high,
        mean=data.values.mean(axis=0, dtype=np.float64).astype(np.float32),
        scale=np.where(scale < 1e-6, 1.0, scale).astype(np.float32),
        vocabulary={name: words for name, words in vocabulary.items() if words},
    )


def codes_of(data: Dataset, encoder: Encoder) -> NDArray[np.int64]:
    """(rows, word names) input column of each word; -1 where it is not given or not known."""
    columns = encoder.word_columns()
    codes = np.full((len(data), len(columns)), -1, dtype=np.int64)
    for at, (name, places) in enumerate(columns.items()):
        where = dict(zip(encoder.vocabulary[name], places, strict=True))
        codes[:, at] = [where.get(word, -1) for word in data.words.get(name, np.full(len(data), None))]
    return codes


class Net(nn.Module):
    """The same layers as ``Layers``, to be trained."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        sizes = (inputs, *hidden, outputs)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            rows = torch.relu(layer(rows))
        out: Tensor = self.layers[-1](rows)
        return out

    def exported(self) -> Layers:
        named = {name: value.detach().float().cpu().numpy() for name, value in self.named_parameters()}
        count = len(self.layers)
        return Layers(
            tuple(named[f"layers.{i}.weight"].T.copy() for i in range(count)),
            tuple(named[f"layers.{i}.bias"] for i in range(count)),
        )


def pinball(error: Tensor, quantile: float) -> Tensor:
    """Loss whose minimum is the quantile; error = truth - prediction."""
    return torch.maximum(quantile * error, (quantile - 1) * error).mean()


def _loss(out: Tensor, truth: Tensor, at_least: Tensor) -> Tensor:
    """Mean relative error of the middle, and pinball losses of the interval around it.

    Of a row whose time is only known to be at least this long, what counts is how far the middle is below it.
    """
    short = torch.relu(truth - out[:, 0])[at_least].sum() / len(truth)
    out, truth = out[~at_least], truth[~at_least]
    middle = out[:, 0]
    low = middle.detach() - nn.functional.softplus(out[:, 1])
    high = middle.detach() + nn.functional.softplus(out[:, 2])
    return (truth - middle).abs().mean() + pinball(truth - low, LOW) + pinball(truth - high, HIGH) + short


def _ceiling_loss(out: Tensor, truth: Tensor, at_least: Tensor) -> Tensor:
    return pinball(truth - out[:, 0], CEILING)


class _Rows:
    """The dataset on the device, and batches of it with words dropped."""

    def __init__(self, data: Dataset, encoder: Encoder, recipe: Recipe, device: torch.device, kind: Kind) -> None:
        numbers = encoder.numbers(data.values)
        self.numbers = torch.from_numpy(numbers if kind == "main" else without_gpu(encoder, numbers)).to(device)
        self.codes = torch.from_numpy(codes_of(data, encoder)).to(device) if kind != "ceiling" else None
        eager = np.array([word == EAGER for word in data.words.get("stack", np.full(len(data), None))])
        self.eager = torch.from_numpy(eager).to(device)
        self.noise = recipe.noise
        self.truth = torch.from_numpy(data.target.astype(np.float32)).to(device)
        self.at_least = torch.from_numpy(data.at_least).to(device)
        names = list(encoder.word_columns())
        unnamed = recipe.gpu_dropout if kind == "main" else 1.0
        rates = [unnamed if name == "gpu" else recipe.word_dropout for name in names]
        self.stack = names.index("stack") if "stack" in names else None
        self.rates = torch.tensor(rates, device=device)
        self.extra = encoder.width - len(encoder.names)
        self.start = len(encoder.names)
        self.device = device

    def inputs(self, at: Tensor, drop: bool) -> Tensor:
        numbers = self.numbers[at]
        if drop and self.noise:
            numbers = numbers + self.noise * torch.randn_like(numbers)
        hot = torch.zeros(len(at), self.extra + 1, device=self.device)
        if self.codes is not None:
            codes = self.codes[at] - self.start
            if drop:
                gone = torch.rand(codes.shape, device=self.device) < self.rates
                if self.stack is not None:
                    gone[:, self.stack] &= ~self.eager[at]
                codes = torch.where(gone, -1, codes)
            hot.scatter_(1, torch.where(codes < 0, self.extra, codes), 1.0)
        return torch.cat([numbers, hot[:, : self.extra]], dim=1)


def train(
    data: Dataset, encoder: Encoder, recipe: Recipe, kind: Kind = "main", progress: Progress | None = None
) -> Layers:
    """One network. transfer: without a trace of the GPU. ceiling: the fast quantile, from physics alone."""
    torch.manual_seed(recipe.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = _Rows(data, encoder, recipe, device, kind)
    net = Net(encoder.width, recipe.hidden, 1 if kind == "ceiling" else 3).to(device)
    steps = max(1, -(-len(data) // recipe.batch))
    optimiser = torch.optim.AdamW(net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=max(20, recipe.epochs * steps), pct_start=0.1
    )
    loss_of: Any = _ceiling_loss if kind == "ceiling" else _loss
    for epoch in range(recipe.epochs):
        order = torch.randperm(len(data), device=device)
        total = torch.zeros((), device=device)
        for step in range(steps):
            at = order[step * recipe.batch : (step + 1) * recipe.batch]
            loss = loss_of(net(rows.inputs(at, drop=True)), rows.truth[at], rows.at_least[at])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.detach()
        if progress:
            progress(epoch + 1, recipe.epochs, float(total) / steps)
    return net.exported()
