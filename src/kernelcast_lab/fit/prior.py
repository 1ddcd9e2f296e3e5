"""The prior of a family's errors, learned on GPUs that were left out of fits.

Each of those is a task: from some of its calls, predict the errors of others. The shares of the variance and the
metrics minimise the loss over all tasks; few parameters, so that they hold on the next GPU too (a network instead of
the metric was better on the tasks and worse on generations that were no task).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kernelcast.forecast.prior import SHARERS, SMOOTH, Prior, plain_prior
from kernelcast_lab.fit.dataset import Dataset
from kernelcast_lab.fit.train import Progress, device, on_device

_LEAST_TASKS, _LEAST_ROWS = 2, 600  # below that nothing is learned
_MOST_ROWS = 6000  # of a task
_MEASURED, _TESTED = 256, 192  # calls of a task
_TOGETHER = 4  # tasks a step
_STEPS, _LEARNING_RATE = 300, 0.03
_FEWEST, _EACH = 3, 300  # measured calls of a format, from and to
_WILD = 4.0  # errors beyond that many widths count as that
_DEGREES = 4.0
_JITTER, _NOTHING = 1e-5, 1e4


@dataclass(frozen=True)
class Task:
    """A GPU that was left out: errors in units of the width, and what the networks corrected."""

    generation: str
    data: Dataset
    error: NDArray[np.float64]
    leaning: NDArray[np.float64]

    def sample(self, seed: int) -> Task:
        if len(self.error) <= _MOST_ROWS:
            return self
        picked = np.sort(np.random.default_rng(seed).choice(len(self.error), _MOST_ROWS, replace=False))
        return Task(self.generation, self.data.select(picked), self.error[picked], self.leaning[picked])


class _Rows:
    """A task on the device."""

    def __init__(self, task: Task, prior: Prior) -> None:
        self.positions = on_device(prior.positions(task.data.names, task.data.values).astype(np.float32))
        self.error = on_device(np.clip(task.error, -_WILD, _WILD).astype(np.float32))
        self.leaning = on_device(task.leaning.astype(np.float32))
        choices = np.array([shared.split("\t") for shared in task.data.shared])
        codes = [np.unique(choices[:, at], return_inverse=True)[1].reshape(-1) for at in range(choices.shape[1])]
        self.codes = on_device(np.stack(codes, axis=1).astype(np.int64))
        self.formats = [np.flatnonzero(codes[0] == form) for form in np.unique(codes[0])]

    def draw(self, rng: np.random.Generator) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
        """Measured calls, of some formats, few or many of each; test calls; and padding."""
        each = int(np.exp(rng.uniform(np.log(_FEWEST), np.log(_EACH))))
        formats = self.formats
        if len(formats) > 1 and rng.random() < 0.5:
            formats = [form for form in formats if rng.random() < 0.6] or formats[:1]
        parts = [rng.choice(form, min(each, len(form)), replace=False) for form in formats]
        measured = rng.permutation(np.concatenate(parts))[:_MEASURED]
        rest = np.setdiff1d(np.arange(len(self.error)), measured)
        tested = rng.choice(rest, _TESTED, replace=len(rest) < _TESTED)
        fill = np.zeros(_MEASURED, dtype=np.float32)
        fill[len(measured) :] = _NOTHING
        return np.concatenate([measured, np.zeros(_MEASURED - len(measured), dtype=np.intp)]), tested, fill


class _Shares(nn.Module):
    """Shares of the variance and metrics, as logs."""

    def __init__(self, prior: Prior) -> None:
        super().__init__()
        shares = [*prior.biases, *prior.smooth, prior.leaning, prior.noise]
        self.shares = nn.Parameter(torch.tensor(np.log(shares), dtype=torch.float32))
        self.metric = nn.Parameter(torch.tensor(np.log(prior.metric)))

    def covariance(self, each: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
        """(tasks, rows, columns), as ``Prior.covariance`` has it."""
        (positions, leaning, codes), (positions_, leaning_, codes_) = each, other
        share, metric = self.shares.exp(), self.metric.exp()
        form, stack, configuration = ((codes[:, :, None, at] == codes_[:, None, :, at]).float() for at in range(3))
        result = share[0] + share[1] * form + share[2] * stack + share[3] * configuration
        for part, gate in enumerate((torch.ones_like(form), form, configuration)):
            left, right = positions * metric[part], positions_ * metric[part]
            squared = (left**2).sum(-1)[:, :, None] + (right**2).sum(-1)[:, None] - 2 * left @ right.transpose(1, 2)
            scaled = (3 * squared).clamp(min=1e-8).sqrt()
            result = result + share[len(SHARERS) + part] * gate * (1 + scaled) * torch.exp(-scaled)
        return result + share[-2] * leaning[:, :, None] * leaning_[:, None]

    def loss(self, measured: Sequence[Tensor], tested: Sequence[Tensor], fill: Tensor) -> Tensor:
        """Of the errors of test calls, as predicted from those of measured calls."""
        (*known, error), (*wanted, truth) = measured, tested
        noise = self.shares[-1].exp()
        among = self.covariance(known, known) + torch.diag_embed(noise + _JITTER + fill)
        factor = torch.linalg.cholesky(among)
        across = self.covariance(wanted, known)
        solved = torch.cholesky_solve(error[:, :, None], factor)
        left = truth - (across @ solved)[:, :, 0]
        taken = torch.linalg.solve_triangular(factor, across.transpose(1, 2), upper=False)
        share = self.shares.exp()
        members = share[:-2].sum() + share[-2] * wanted[1] ** 2
        variance = (members - (taken**2).sum(1)).clamp(min=1e-6) + noise
        likely = 0.5 * torch.log(variance) + (_DEGREES + 1) / 2 * torch.log1p(left**2 / (_DEGREES * variance))
        return likely.mean() + left.abs().mean()


def learn_prior(tasks: Sequence[Task], seed: int = 0, progress: Progress | None = None) -> Prior | None:
    """The prior that fits these GPUs best; None where there are too few of them."""
    tasks = [task.sample(seed) for task in tasks if len(task.error) >= _LEAST_ROWS]
    if len({task.generation for task in tasks}) < _LEAST_TASKS:
        return None
    values = np.concatenate([task.data.values for task in tasks])
    spread = values.std(axis=0, dtype=np.float64)
    scale = np.where(spread < 1e-6, 1.0, spread).astype(np.float32)
    start = plain_prior(tasks[0].data.names, values.mean(axis=0, dtype=np.float64).astype(np.float32), scale)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows = [_Rows(task, start) for task in tasks]
    often = np.array([1 / sum(other.generation == task.generation for other in tasks) for task in tasks])
    shares = _Shares(start).to(device())
    optimiser = torch.optim.Adam(shares.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _LEARNING_RATE, total_steps=_STEPS, pct_start=0.15)
    for step in range(_STEPS):
        drawn = [rows[at] for at in rng.choice(len(rows), _TOGETHER, p=often / often.sum())]
        picks = [each.draw(rng) for each in drawn]
        measured, tested = (
            [torch.stack([getattr(each, name)[on_device(pick[side])] for each, pick in zip(drawn, picks, strict=True)])
             for name in ("positions", "leaning", "codes", "error")]
            for side in (0, 1)
        )  # fmt: skip
        loss = shares.loss(measured, tested, on_device(np.stack([fill for _, _, fill in picks])))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(shares.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if progress and step % 25 == 24:
            progress(step + 1, _STEPS, f"loss {float(loss.detach()):.3f}")
    result = shares.shares.detach().exp().cpu().numpy().astype(np.float64)
    assert len(result) == len(SHARERS) + len(SMOOTH) + 2
    return start.of([round(float(share), 6) for share in result], shares.metric.detach().exp().cpu().numpy())
