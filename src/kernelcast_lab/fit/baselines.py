"""Train the published baselines, PipeWeave and NeuSight, on measured calls with PyTorch.

Each fit gives a predictor of one family; ``merged`` joins families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernelcast.errors import KernelcastError
from kernelcast.forecast.network import Encoder, Floats
from kernelcast.forecast.predictor import PredictorInput
from kernelcast.ops import REGISTRY
from kernelcast_lab.baselines import Roofline, neusight, pipeweave
from kernelcast_lab.baselines.family_net import FamilyNet, categorical_inputs
from kernelcast_lab.baselines.roofline import bytes_s
from kernelcast_lab.fit import dataset
from kernelcast_lab.fit.dataset import Columns
from kernelcast_lab.fit.train import Net, codes_of, device, encoder, on_device, train_epoch

PIPEWEAVE_HIDDEN = (256, 128, 64)
PIPEWEAVE_DROPOUT = 0.1
NEUSIGHT_HIDDEN = (256, 256, 256, 256)
_LEARNING_RATE = 1e-3
_BATCH = 512

Rows = NDArray[Any]
GroupChoices = list[tuple[dict[str, str], int]]  # of each group of calls, and how many rows it has
Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, row numbers) -> loss of these rows."""


def fit_pipeweave(
    columns: Columns, family: str, *, epochs: int, seed: int, rows: Rows | None = None
) -> pipeweave.Pipeweave:
    """PipeWeave's network of one family, on the rows of a mask or of row numbers (default: all)."""
    if family == "collective":  # the original has a random forest a GPU there
        raise KernelcastError("PipeWeave's network is for kernels of one GPU: it has no pipe for a link")
    result, efficiency, choices = [], [], []
    for question, latency_s in measured_inputs(columns, family, rows):
        result.append(pipeweave.inputs(question))
        efficiency.append(result[-1].theoretical_s / latency_s)
        choices.append((categorical_inputs(question), len(latency_s)))
    known, inputs = _encoded(result[0].names, np.concatenate([part.values for part in result]), choices)
    target = np.clip(np.concatenate(efficiency), pipeweave.LEAST_EFFICIENCY, 1 - pipeweave.LEAST_EFFICIENCY)
    truth = _floats(target)

    def relative_error(out: Tensor, at: Tensor) -> Tensor:
        return ((torch.sigmoid(out[:, 0]) - truth[at]).abs() / truth[at]).mean()

    middle = float(np.median(target))
    guess = [np.log(middle / (1 - middle))]

    def make() -> Net:
        return Net(known.width, PIPEWEAVE_HIDDEN, 1, normed=True, dropout=PIPEWEAVE_DROPOUT, first_guess=guess)

    net = _trained(inputs, make, relative_error, epochs, seed)
    return pipeweave.Pipeweave({family: FamilyNet(known, net.exported())})


def fit_neusight(
    columns: Columns, family: str, *, epochs: int, seed: int, rows: Rows | None = None
) -> neusight.Neusight:
    """NeuSight's network of one family, on the rows of a mask or of row numbers (default: all)."""
    if family not in neusight.FAMILIES:
        raise KernelcastError(f"NeuSight has no network for {family}: to it, that is memory-bound")
    tiles, rests, times, choices = [], [], [], []
    for question, latency_s in measured_inputs(columns, family, rows):
        tiled, others = neusight.split(question)
        tiles.append([neusight.tiles(phase, question.gpu) for phase in tiled])
        rests.append(sum((bytes_s(phase, question.gpu) for phase in others), start=np.zeros(len(latency_s))))
        times.append(latency_s)
        choices.append(categorical_inputs(question))
    depth = max(map(len, tiles))
    for result in tiles:  # an op with fewer kernels repeats its last one with nothing to do
        result += [replace(result[-1], roofline_s=np.zeros_like(result[-1].roofline_s))] * (depth - len(result))

    def each(name: str) -> NDArray[Any]:
        """(calls, kernels, …) of one field of the tiles."""
        return np.concatenate([np.stack([getattr(tile, name) for tile in result], axis=1) for result in tiles])

    # One row a kernel: a call of several has as many, and its time is their sum.
    counted = [(choice, depth * len(latency_s)) for choice, latency_s in zip(choices, times, strict=True)]
    known, inputs = _encoded(neusight.NAMES, each("values").reshape(-1, len(neusight.NAMES)), counted)
    waves, tile_s = _floats(each("waves")), _floats(each("roofline_s"))
    rest, truth = _floats(np.concatenate(rests)), _floats(np.concatenate(times))

    def smape(out: Tensor, at: Tensor) -> Tensor:
        raw = torch.sigmoid(out[..., 0]) - torch.sigmoid(out[..., 1]) / waves[at]
        # Below its floor a utilisation has no slope; let it feel the one above, so that it finds its way back.
        utilisation = raw + (raw.clamp(min=neusight.LEAST_UTILISATION) - raw).detach()
        time = rest[at] + (waves[at] * tile_s[at] / utilisation).sum(dim=1)
        return (2 * (time - truth[at]).abs() / (time + truth[at])).mean()

    def make() -> Net:
        return Net(known.width, NEUSIGHT_HIDDEN, 2, first_guess=[1.0, -2.0])  # utilisation above 0

    net = _trained(inputs.reshape(len(truth), depth, -1), make, smape, epochs, seed)
    return neusight.Neusight({family: FamilyNet(known, net.exported())})


def measured_inputs(
    columns: Columns, family: str, rows: Rows | None
) -> Iterator[tuple[PredictorInput, NDArray[np.float64]]]:
    """The measured calls of a family, in groups that agree in all choices, and their times in seconds."""
    ops = {op for op, kernel in REGISTRY.items() if kernel.family == family}
    chosen = np.arange(len(columns["op"])) if rows is None else np.arange(len(columns["op"]))[rows]
    chosen = chosen[[op in ops for op in columns["op"][chosen]]]
    if len(chosen) < 2:
        raise KernelcastError(f"{len(chosen)} measured calls of the family {family}: too few to fit")
    part = {name: column[chosen] for name, column in columns.items()}
    for question, at in dataset.predictor_inputs(part, family, Roofline()):
        yield question, np.asarray(part["latency_us"][at], dtype=np.float64) * 1e-6


def _encoded(names: tuple[str, ...], values: Floats, choices: GroupChoices) -> tuple[Encoder, Floats]:
    """All rows as the network sees them, standardised numbers and one-hot choices."""
    named = dict.fromkeys(name for choice, _ in choices for name in choice)
    columns = {
        name: np.concatenate([np.full(count, choice.get(name), dtype=object) for choice, count in choices])
        for name in named
    }
    known = encoder(names, values, values.std(axis=0, dtype=np.float64), columns)
    inputs = np.zeros((len(values), known.width + 1), dtype=np.float32)
    inputs[:, : len(names)] = known.numbers(values)
    inputs[np.arange(len(values))[:, None], codes_of(columns, known)] = 1.0  # the last column: not given
    return known, inputs[:, :-1]


def _floats(values: NDArray[Any]) -> Tensor:
    return on_device(values.astype(np.float32))


def _trained(inputs: Floats, make: Callable[[], Net], loss_of: Loss, epochs: int, seed: int) -> Net:
    """AdamW at PipeWeave's rate, eased to 0 by a cosine; the caller's random state is left as it was."""
    rows = on_device(inputs)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = make().to(device())
        steps = max(1, len(rows) // _BATCH)
        optimiser = torch.optim.AdamW(net.parameters(), lr=_LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=max(1, epochs * steps))
        net.train()
        for _ in range(epochs):
            batches = torch.randperm(len(rows)).to(device()).tensor_split(steps)  # no batch is left with one row
            train_epoch(batches, lambda at: loss_of(net(rows[at]), at), net, optimiser, schedule)
    net.eval()
    return net
