"""Train the networks of one family with PyTorch, on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernelcast.forecast.learned import without_gpu
from kernelcast.forecast.network import Encoder, Floats, Layers
from kernelcast_lab.fit.dataset import Columns, Dataset
from kernelcast_lab.fit.families import EAGER
from kernelcast_lab.fit.recipes import Training

LOW, HIGH, CEILING = 0.1, 0.9, 0.07  # quantiles of time: the 80% interval, and what the best 7% reach
Progress = Callable[[int, int, str], None]  # done, of how many, and a message


Role = Literal["main", "finetune", "transfer", "ceiling"]  # finetune: a main network, trained further


def encoder_of(data: Dataset) -> Encoder:
    """Ranges, scales and vocabulary of these rows."""
    return encoder(data.names, data.values, data.values.std(axis=0), data.choices)


def encoder(names: tuple[str, ...], values: Floats, deviation: NDArray[Any], choices: Columns) -> Encoder:
    """The same of numbers, their standard deviations, and categorical columns."""
    known = {
        name: tuple(sorted({str(choice) for choice in column if choice is not None}))
        for name, column in choices.items()
    }
    return Encoder(
        names=names,
        low=values.min(axis=0),
        high=values.max(axis=0),
        mean=values.mean(axis=0, dtype=np.float64).astype(np.float32),
        scale=np.where(deviation < 1e-6, 1.0, deviation).astype(np.float32),
        vocabulary={name: result for name, result in known.items() if result},
    )


def codes_of(choices: Columns, encoder: Encoder) -> NDArray[np.int64]:
    """(rows, choices) input column of each choice; -1 where it is not given or not known."""
    places = {
        name: dict(zip(encoder.vocabulary[name], at, strict=True)) for name, at in encoder.category_columns().items()
    }
    codes = [
        np.fromiter((where.get(choice, -1) for choice in choices[name]), dtype=np.int64, count=len(choices[name]))
        for name, where in places.items()
    ]
    return np.stack(codes, axis=1)


class Net(nn.Module):
    """Linear layers with ReLU between, optional batch norm and dropout; in evaluation mode equal to what it exports."""

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        outputs: int,
        *,
        normed: bool = False,
        dropout: float = 0.0,
        first_guess: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((inputs, *hidden, outputs)))
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) if normed else nn.Identity() for size in hidden)
        self.dropout = nn.Dropout(dropout)
        if first_guess is not None:
            with torch.no_grad():
                self.linears[-1].bias.copy_(torch.tensor(list(first_guess)))  # type: ignore[operator]

    def forward(self, rows: Tensor) -> Tensor:
        for linear, norm in zip(self.linears[:-1], self.norms, strict=True):
            rows = self.dropout(torch.relu(norm(linear(rows))))
        out: Tensor = self.linears[-1](rows)
        return out

    def take(self, layers: Layers) -> None:
        """The weights of plain layers."""
        with torch.no_grad():
            for linear, weight, bias in zip(self.linears, layers.weights, layers.biases, strict=True):
                linear.weight.copy_(torch.from_numpy(weight.T))  # type: ignore[operator]
                linear.bias.copy_(torch.from_numpy(bias))  # type: ignore[operator]

    def exported(self) -> Layers:
        """Plain layers: a norm in evaluation mode is folded into its linear layer."""
        weights, biases = [], []
        for linear, norm in zip_longest(self.linears, self.norms):
            weight, bias = (_array(x) for x in (linear.weight, linear.bias))
            if isinstance(norm, nn.BatchNorm1d):
                scale = _array(norm.weight) / np.sqrt(_array(norm.running_var) + norm.eps)
                weight, bias = weight * scale[:, None], (bias - _array(norm.running_mean)) * scale + _array(norm.bias)
            weights.append(np.ascontiguousarray(weight.T, dtype=np.float32))
            biases.append(bias.astype(np.float32))
        return Layers(tuple(weights), tuple(biases))


def _array(values: Any) -> NDArray[np.float64]:
    return values.detach().cpu().numpy().astype(np.float64)


def pinball(error: Tensor, quantile: float) -> Tensor:
    """Losses whose mean is least at the quantile; error = truth - prediction."""
    return torch.maximum(quantile * error, (quantile - 1) * error)


def _loss(out: Tensor, truth: Tensor, at_least: Tensor) -> Tensor:
    """Mean relative error of the middle, and pinball losses of the interval around it.

    Of a row whose time is only known to be at least this long, what counts is how far the middle is below it. Rows are
    weighted rather than picked: a GPU need not wait until it is known how many there are.
    """
    middle = out[:, 0]
    low = middle.detach() - nn.functional.softplus(out[:, 1])
    high = middle.detach() + nn.functional.softplus(out[:, 2])
    each = (truth - middle).abs() + pinball(truth - low, LOW) + pinball(truth - high, HIGH)
    known = (~at_least).to(truth.dtype)
    short = torch.relu(truth - middle) * at_least
    return (each * known).sum() / known.sum().clamp(min=1) + short.mean()


def _ceiling_loss(out: Tensor, truth: Tensor, at_least: Tensor) -> Tensor:
    return pinball(truth - out[:, 0], CEILING).mean()


class _Rows:
    """The dataset on the device, and batches of it with dropout of its choices."""

    def __init__(self, data: Dataset, encoder: Encoder, recipe: Training, role: Role) -> None:
        numbers = encoder.numbers(data.values)
        named = role in ("main", "finetune")
        self.numbers = on_device(numbers if named else without_gpu(encoder, numbers))
        names = list(encoder.category_columns())
        choices = {name: data.choice(name) for name in names}
        self.codes = on_device(codes_of(choices, encoder) - len(encoder.names)) if role != "ceiling" else None
        self.eager = on_device(np.asarray(data.choice("stack") == EAGER, dtype=bool))
        self.noise = recipe.noise
        self.truth = on_device(data.target.astype(np.float32))
        self.at_least = on_device(data.at_least)
        unnamed = recipe.gpu_dropout if named else 1.0
        rates = [unnamed if name == "gpu" else recipe.word_dropout for name in names]
        self.rates = torch.tensor(rates, device=device())
        self.stack = names.index("stack") if "stack" in names else None
        self.known = encoder.width - len(encoder.names)

    def inputs(self, at: Tensor) -> Tensor:
        numbers = self.numbers[at]
        if self.noise:
            numbers = numbers + self.noise * torch.randn_like(numbers)
        hot = torch.zeros(len(at), self.known + 1, device=device())
        if self.codes is not None:
            codes = self.codes[at]
            gone = torch.rand(codes.shape, device=device()) < self.rates
            if self.stack is not None:
                gone[:, self.stack] &= ~self.eager[at]
            hot.scatter_(1, torch.where(gone | (codes < 0), self.known, codes), 1.0)
        return torch.cat([numbers, hot[:, : self.known]], dim=1)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device())


def train(
    data: Dataset,
    encoder: Encoder,
    recipe: Training,
    role: Role = "main",
    progress: Progress | None = None,
    start: Layers | None = None,
) -> Layers:
    """One network, from ``start`` where it is given. transfer: without a trace of the GPU. ceiling: the fast quantile,
    from physics alone."""
    torch.manual_seed(recipe.seed)
    rows = _Rows(data, encoder, recipe, role)
    net = Net(encoder.width, recipe.hidden, 1 if role == "ceiling" else 3).to(device())
    if start is not None:
        net.take(start)
    steps = max(1, -(-len(data) // recipe.batch))
    # fused: one pass over the weights; a step on a CPU takes two fifths less
    optimiser = torch.optim.AdamW(
        net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=max(20, recipe.epochs * steps), pct_start=0.1
    )
    loss_of = _ceiling_loss if role == "ceiling" else _loss

    def loss(at: Tensor) -> Tensor:
        return loss_of(net(rows.inputs(at)), rows.truth[at], rows.at_least[at])

    for epoch in range(recipe.epochs):
        order = torch.randperm(len(data), device=device())
        total = train_epoch(torch.split(order, recipe.batch), loss, net, optimiser, schedule)
        if progress:
            progress(epoch + 1, recipe.epochs, f"loss {float(total) / steps:.4f}")
    return net.exported()


def train_epoch(
    batches: Iterable[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    net: Net,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Tensor:
    """A step of the optimiser for each batch of row numbers; the sum of their losses."""
    total = torch.zeros((), device=device())
    for at in batches:
        optimiser.zero_grad(set_to_none=True)
        loss: Any = loss_of(at)  # Any: backward has no types
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        total += loss.detach()
    return total
