"""The passes of a workload as columns: chunks of prompts, and the decode steps that are predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kernelcast.kernels.work import Array
from kernelcast.networks.batch import Batch, Batches, Rows
from kernelcast.networks.forward import Deployment
from kernelcast.serving.workload import Request, Workload, sampled_steps


@dataclass(frozen=True)
class Steps:
    """Passes of the prefill, each different one once, then those of decode steps. ``counts``: how many each stands for;
    ``order``: of the prefill's passes one after another, the row of each; ``count``: of decode steps."""

    batches: Batches
    counts: Array
    decodes: NDArray[np.bool_]
    order: Rows
    count: int

    def drafted(self, draft_tokens: int) -> Steps:
        """Of the draft model: its prefill, and one pass in the middle of the decode for all of its guesses."""
        prefills, decodes = np.flatnonzero(~self.decodes), np.flatnonzero(self.decodes)
        middle = self.batches.batch(int(decodes[len(decodes) // 2]))
        one = Batches.of([Batch(len(middle.new) * (1,), middle.past)])
        return replace(
            self,
            batches=Batches.joined([self.batches.take(prefills), one]),
            counts=np.append(self.counts[prefills], float(self.count * draft_tokens)),
            decodes=np.append(self.decodes[prefills], True),
        )


def steps_of(workload: Workload) -> Steps:
    if workload.even is None:
        prefills, order = _listed(workload.prefills())
        decodes = workload.decodes()
        return _steps(prefills, order, tuple(step for step, _ in decodes), Batches.of([batch for _, batch in decodes]))
    gained = workload.gained
    end = math.ceil((workload.even.outputs - 1) / gained)
    steps = sampled_steps(1, end) if end else ()
    return _even_steps(len(workload.inputs), workload.even, workload.chunk or 0, steps, gained, workload.checked)


def images_of(workload: Workload, tower: Deployment) -> Steps:
    """What a tower reads of a workload: one pass, before any prompt."""
    (images,) = (one for one in workload.images if one.tower is tower)
    read = _evenly([(images.sequences, images.patches, 0)])
    return Steps(read, np.ones(1), np.zeros(1, dtype=bool), np.zeros(1, dtype=np.intp), 0)


def _steps(prefills: Batches, order: Rows, steps: tuple[int, ...], decodes: Batches) -> Steps:
    counts = np.concatenate([np.bincount(order, minlength=len(prefills)), step_weights(steps)])
    phases = np.arange(len(counts)) >= len(prefills)
    return Steps(Batches.joined([prefills, decodes]), counts, phases, order, steps[-1] if steps else 0)


def _listed(batches: Sequence[Batch]) -> tuple[Batches, Rows]:
    """The different ones, and the row of each."""
    known: dict[Batch, int] = {}
    order = [known.setdefault(batch, len(known)) for batch in batches]
    return Batches.of(list(known)), np.array(order, dtype=np.intp)


@lru_cache(maxsize=4096)  # deployments are asked the same
def _even_steps(batch: int, one: Request, chunk: int, steps: tuple[int, ...], gained: float, checked: int) -> Steps:
    """Of requests that are all alike."""
    tokens = one.inputs - one.cached
    prefills, order = _chunks(batch, tokens, one.cached, min(chunk or batch * tokens, batch * tokens))
    decodes = [(batch, checked, one.inputs + int((step - 1) * gained)) for step in steps]
    return _steps(prefills, order, steps, _evenly(decodes, checked))


@lru_cache(maxsize=4096)  # and outputs of several lengths of the same prompts
def _chunks(batch: int, tokens: int, past: int, chunk: int) -> tuple[Batches, Rows]:
    """Prompts of one size, end to end, cut every ``chunk`` tokens: passes that begin at the same place of a prompt and
    are as long are alike."""
    starts = np.arange(0, batch * tokens, chunk)
    sizes = np.minimum(chunk, batch * tokens - starts)
    _, first, order = np.unique(starts % tokens * (chunk + 1) + sizes, return_index=True, return_inverse=True)
    whole = (starts % tokens == 0) & (sizes % tokens == 0)
    if (whole | (sizes <= tokens - starts % tokens)).all():  # each has whole prompts, or a part of one
        sequences = np.where(whole, sizes // tokens, 1)
        new = np.where(whole, tokens, sizes)
        return Batches.evenly(sequences[first], new[first], past + (starts % tokens)[first]), order
    return Batches.of([_chunk(int(starts[at]) % tokens, int(sizes[at]), tokens, past) for at in first]), order


def _chunk(start: int, size: int, tokens: int, past: int) -> Batch:
    """``size`` tokens from place ``start`` of a prompt on."""
    first = min(size, tokens - start)
    whole, last = divmod(size - first, tokens)
    new = (first, *(whole * (tokens,)), *((last,) if last else ()))
    return Batch(new, (past + start, *((len(new) - 1) * (past,))))


def _evenly(rows: Sequence[tuple[int, int, int]], head_rows: int = 1) -> Batches:
    """Of (sequences, new, past) of each."""
    sequences, new, past = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Batches.evenly(sequences, new, past, head_rows)


@lru_cache(maxsize=1024)
def step_weights(steps: tuple[int, ...]) -> Array:
    """How many steps each predicted step stands for: the trapezoid rule, exact where time grows evenly."""
    if not steps:
        return np.empty(0)
    every = np.arange(1, steps[-1] + 1)
    return np.array([np.interp(every, steps, row).sum() for row in np.eye(len(steps))])
