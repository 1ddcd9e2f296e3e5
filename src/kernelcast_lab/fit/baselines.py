"""Train the published baselines, PipeWeave and NeuSight, on measured calls with PyTorch.

Each fit gives a model of one family that answers questions at once; ``merged`` joins families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernelcast.calls.table import BadRows, grouped
from kernelcast.efficiency.baselines import neusight, pipeweave
from kernelcast.efficiency.baselines.family_net import FamilyNet, words_of
from kernelcast.efficiency.baselines.roofline import bytes_s
from kernelcast.efficiency.network import Encoder, Floats, Layers
from kernelcast.efficiency.predictor import Question
from kernelcast.errors import KernelcastError
from kernelcast.kernels import REGISTRY
from kernelcast.machine.analyse import analyse
from kernelcast.tables import turns_of
from kernelcast_lab.fit.dataset import Columns

PIPEWEAVE_HIDDEN = (256, 128, 64)
PIPEWEAVE_DROPOUT = 0.1
NEUSIGHT_HIDDEN = (256, 256, 256, 256)
_LEARNING_RATE = 1e-3
_BATCH = 512
_CHUNK_CALLS = 8192

Rows = NDArray[Any]
Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, row numbers) -> loss of these rows."""


def fit_pipeweave(
    columns: Columns, family: str, *, epochs: int, seed: int, rows: Rows | None = None
) -> pipeweave.Pipeweave:
    """PipeWeave's network of one family, on the rows of a mask or of row numbers (default: all)."""
    if family == "collective":  # the original has a random forest a GPU there
        raise KernelcastError("PipeWeave's network is for kernels of one GPU: it has no pipe for a link")
    values, words, efficiency = [], [], []
    names: tuple[str, ...] = ()
    for question, latency_s in questions(columns, family, rows):
        found = pipeweave.inputs(question)
        names = found.names
        values.append(found.values)
        words += [words_of(question)] * len(latency_s)
        efficiency.append(found.theoretical_s / latency_s)
    data = _encoded(names, np.concatenate(values), words)
    target = np.clip(np.concatenate(efficiency), pipeweave.LEAST_EFFICIENCY, 1 - pipeweave.LEAST_EFFICIENCY)
    truth = _on_device(target)

    def relative_error(out: Tensor, at: Tensor) -> Tensor:
        return ((torch.sigmoid(out[:, 0]) - truth[at]).abs() / truth[at]).mean()

    middle = float(np.median(target))
    net = _trained(
        data,
        lambda: NormNet(data.encoder.width, PIPEWEAVE_HIDDEN, [np.log(middle / (1 - middle))], PIPEWEAVE_DROPOUT),
        relative_error,
        epochs,
        seed,
    )
    return pipeweave.Pipeweave({family: FamilyNet(data.encoder, net.exported())})


def fit_neusight(
    columns: Columns, family: str, *, epochs: int, seed: int, rows: Rows | None = None
) -> neusight.Neusight:
    """NeuSight's network of one family, on the rows of a mask or of row numbers (default: all)."""
    if family not in neusight.FAMILIES:
        raise KernelcastError(f"NeuSight has no network for {family}: to it, that is memory-bound")
    parts, words = [], []
    for question, latency_s in questions(columns, family, rows):
        parts.append(_kernels(question, latency_s))
        words += [words_of(question)] * len(latency_s)
    known = _joined(parts)
    # One row a kernel: a call of several has as many, and its time is their sum.
    flat = known.values.reshape(-1, len(neusight.NAMES))
    depth = known.values.shape[1]
    data = _encoded(neusight.NAMES, flat, [word for word in words for _ in range(depth)])
    waves, tile_s = _on_device(known.waves), _on_device(known.tile_s)
    rest, truth = _on_device(known.rest_s), _on_device(known.latency_s)

    def smape(out: Tensor, at: Tensor) -> Tensor:
        raw = torch.sigmoid(out[..., 0]) - torch.sigmoid(out[..., 1]) / waves[at]
        # Below its floor a utilisation has no slope; let it feel the one above, so that it finds its way back.
        utilisation = raw + (raw.clamp(min=neusight.LEAST_UTILISATION) - raw).detach()
        time = rest[at] + (waves[at] * tile_s[at] / utilisation).sum(dim=1)
        return (2 * (time - truth[at]).abs() / (time + truth[at])).mean()

    net = _trained(
        Encoded(data.encoder, data.inputs.reshape(len(truth), depth, -1)),
        lambda: NormNet(data.encoder.width, NEUSIGHT_HIDDEN, [1.0, -2.0], 0.0, normed=False),  # utilisation above 0
        smape,
        epochs,
        seed,
    )
    return neusight.Neusight({family: FamilyNet(data.encoder, net.exported())})


def questions(columns: Columns, family: str, rows: Rows | None) -> Iterator[tuple[Question, NDArray[np.float64]]]:
    """The measured calls of a family, in groups that agree in all words, and their times in seconds."""
    ops = {op for op, kernel in REGISTRY.items() if kernel.family == family}
    chosen = np.arange(len(columns["op"])) if rows is None else np.arange(len(columns["op"]))[rows]
    chosen = chosen[[op in ops for op in columns["op"][chosen]]]
    if len(chosen) < 2:
        raise KernelcastError(f"{len(chosen)} measured calls of the family {family}: too few to fit")
    part = {name: column[chosen] for name, column in columns.items()}
    turns = turns_of(part)  # what L2 kept may change which tile is best
    bad = BadRows()
    for kernel, place, at, calls in grouped(part, None, bad):
        for start in range(0, len(at), _CHUNK_CALLS):
            chunk, here = calls.part(start, start + _CHUNK_CALLS), at[start : start + _CHUNK_CALLS]
            ranked = [analyse(work, place, turns=turns.part(here), keep=1) for work in kernel.work(chunk, place)]
            latency_us = np.asarray(part["latency_us"][here], dtype=np.float64)
            yield Question(kernel, chunk, place, ranked), latency_us * 1e-6
    if bad.found:
        raise KernelcastError(bad.text())


@dataclass(frozen=True)
class Kernels:
    """What NeuSight's law sees of many calls: (calls, kernels with tiles) arrays, and what is added as it is."""

    values: NDArray[np.float32]  # (calls, kernels, 4)
    waves: NDArray[np.float64]
    tile_s: NDArray[np.float64]
    rest_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]


def _kernels(question: Question, latency_s: NDArray[np.float64]) -> Kernels:
    tiled, others = neusight.split(question)
    found = [neusight.tiles(phase, question.gpu) for phase in tiled]
    rest = np.zeros(len(latency_s))
    for phase in others:
        rest = rest + bytes_s(phase, question.gpu)
    return Kernels(
        values=np.stack([f.values for f in found], axis=1),
        waves=np.stack([f.waves for f in found], axis=1),
        tile_s=np.stack([f.roofline_s for f in found], axis=1),
        rest_s=rest,
        latency_s=latency_s,
    )


def _joined(parts: Sequence[Kernels]) -> Kernels:
    """Rows of all parts; an op with fewer kernels repeats its last one with nothing to do."""
    depth = max(part.waves.shape[1] for part in parts)

    def stacked(name: str, mode: Any, **how: Any) -> NDArray[Any]:
        arrays = [getattr(part, name) for part in parts]
        wide = [((0, 0), (0, depth - a.shape[1]), (0, 0))[: a.ndim] for a in arrays]
        return np.concatenate([np.pad(a, pad, mode, **how) for a, pad in zip(arrays, wide, strict=True)])

    return Kernels(
        values=stacked("values", "edge"),
        waves=stacked("waves", "edge"),
        tile_s=stacked("tile_s", "constant"),
        rest_s=np.concatenate([part.rest_s for part in parts]),
        latency_s=np.concatenate([part.latency_s for part in parts]),
    )


@dataclass(frozen=True)
class Encoded:
    """All rows as the network sees them, standardised numbers and one-hot words."""

    encoder: Encoder
    inputs: Floats


def _encoded(names: tuple[str, ...], values: Floats, words: Sequence[dict[str, str]]) -> Encoded:
    names_of_words = dict.fromkeys(name for word in words for name in word)
    vocabulary = {name: tuple(sorted({word[name] for word in words if name in word})) for name in names_of_words}
    scale = values.std(axis=0, dtype=np.float64).astype(np.float32)
    encoder = Encoder(
        names=names,
        low=values.min(axis=0),
        high=values.max(axis=0),
        mean=values.mean(axis=0, dtype=np.float64).astype(np.float32),
        scale=np.where(scale < 1e-6, np.float32(1), scale),
        vocabulary=vocabulary,
    )
    rows = np.zeros((len(values), encoder.width), dtype=np.float32)
    rows[:, : len(names)] = encoder.numbers(values)
    for name, columns in encoder.word_columns().items():
        where = dict(zip(vocabulary[name], columns, strict=True))
        named = [at for at, word in enumerate(words) if name in word]
        rows[named, [where[words[at][name]] for at in named]] = 1.0
    return Encoded(encoder, rows)


class NormNet(nn.Module):
    """Linear, batch norm, ReLU and dropout a layer; at rest the same function as the ``Layers`` it exports."""

    def __init__(
        self, inputs: int, hidden: tuple[int, ...], first_guess: Sequence[float], dropout: float, normed: bool = True
    ) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((inputs, *hidden)))
        self.last = nn.Linear(hidden[-1], len(first_guess))
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in hidden) if normed else None
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():
            self.last.bias.copy_(torch.tensor(list(first_guess)))

    def forward(self, rows: Tensor) -> Tensor:
        for at, linear in enumerate(self.linears):
            rows = linear(rows)
            if self.norms is not None:
                rows = self.norms[at](rows)
            rows = self.dropout(torch.relu(rows))
        out: Tensor = self.last(rows)
        return out

    def exported(self) -> Layers:
        """Plain layers: a norm at rest is a scale and a shift, which its linear layer takes in."""
        weights, biases = [], []
        for at, linear in enumerate((*self.linears, self.last)):
            weight, bias = (_array(x).astype(np.float64) for x in (linear.weight, linear.bias))
            if self.norms is not None and at < len(self.norms):
                norm: Any = self.norms[at]
                scale = _array(norm.weight) / np.sqrt(_array(norm.running_var).astype(np.float64) + norm.eps)
                weight, bias = weight * scale[:, None], (bias - _array(norm.running_mean)) * scale + _array(norm.bias)
            weights.append(np.ascontiguousarray(weight.T, dtype=np.float32))
            biases.append(bias.astype(np.float32))
        return Layers(tuple(weights), tuple(biases))


def _array(values: Any) -> NDArray[Any]:
    return values.detach().cpu().numpy()


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _on_device(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(_device())


def _trained(data: Encoded, make: Callable[[], NormNet], loss_of: Loss, epochs: int, seed: int) -> NormNet:
    """AdamW at PipeWeave's rate, eased to 0 by a cosine; the caller's random state is left as it was."""
    device = _device()
    inputs = _on_device(data.inputs)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = make().to(device)
        steps = max(1, len(inputs) // _BATCH)
        optimiser = torch.optim.AdamW(net.parameters(), lr=_LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=max(1, epochs * steps))
        net.train()
        for _ in range(epochs):
            for at in torch.randperm(len(inputs)).to(device).tensor_split(steps):  # no batch is left with one row
                optimiser.zero_grad(set_to_none=True)
                loss: Any = loss_of(net(inputs[at]), at)  # Any: backward has no types
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimiser.step()
                schedule.step()
    net.eval()
    return net
