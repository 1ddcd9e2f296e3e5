"""Which calls to measure: for each family realistic and space-filling ones, in an order that any prefix is useful.

Choosing needs no GPU and no PyTorch. The same seed gives the same calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.calibrate.fit import farthest_first
from kernelcast.efficiency.features import aligned
from kernelcast.efficiency.learned import Learned
from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.kernels import Kernel, kernel, parameters_of
from kernelcast.kernels.base import columns_of
from kernelcast.machine.analyse import IN_A_MODEL
from kernelcast.measure.families import FAMILIES, SHARES
from kernelcast.measure.shapes import Draw
from kernelcast.predict import Conditions, ask, group_key, predict_many

LONGEST_S = 8e-3  # longer calls teach little for their time
_TRIES = 20  # draws for one call, before a family is taken to be exhausted


@dataclass(frozen=True)
class Wanted:
    """One call to measure. ``warm``: with what the L2 kept of the same call, rather than from DRAM."""

    family: str
    call: Kernel
    warm: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """What was given, op first."""
        values = {name: getattr(self.call, name) for name in parameters_of(type(self.call))}
        return {"op": self.call.op, **{name: value for name, value in values.items() if value is not None}}

    @property
    def key(self) -> str:
        """Names the call in files of results."""
        told = json.dumps([self.parameters, self.warm], sort_keys=True, default=str)
        return hashlib.sha256(told.encode()).hexdigest()[:20]


def choose(
    target: Gpu,
    calls: int,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    warm_share: float = 0.0,
    seed: int = 0,
) -> list[Wanted]:
    """``calls`` different calls for this GPU, families mixed throughout by their shares."""
    for name in (*only, *without):
        if name not in FAMILIES:
            raise unknown("family", name, FAMILIES)
    names = [name for name in FAMILIES if (not only or name in only) and name not in without]
    if not names:
        raise KernelcastError("no family is left to measure")
    total = sum(SHARES[name] for name in names)
    ordered = _mixed([_drawn(name, target, max(1, round(calls * SHARES[name] / total)), seed) for name in names])
    rng = np.random.default_rng(seed)
    again = [replace(wanted, warm=True) for wanted in ordered if rng.random() < warm_share]
    return ordered[:calls] + again


def most_telling(candidates: Sequence[Wanted], target: Gpu, count: int) -> list[Wanted]:
    """The ``count`` candidates that teach most about a GPU, each family by its share: those that lie farthest apart in
    what the machine says of them, so ordered that any prefix is spread out too."""
    groups: dict[str, list[Wanted]] = {}
    for wanted in candidates:
        groups.setdefault(wanted.family, []).append(wanted)
    found = []
    for members in groups.values():
        share = max(1, round(count * len(members) / len(candidates)))
        picked = farthest_first(_features(members, target), min(share, len(members)))
        found.append([members[at] for at in picked])
    return _mixed(found)[:count]


def _mixed(families: Sequence[Sequence[Wanted]]) -> list[Wanted]:
    """Each family evenly over the whole, in its order, so that a prefix has every family by its share."""
    placed = [((at + 0.5) / len(each), wanted) for each in families for at, wanted in enumerate(each)]
    return [wanted for _, wanted in sorted(placed, key=lambda pair: (pair[0], pair[1].family))]


def _drawn(name: str, target: Gpu, count: int, seed: int) -> list[Wanted]:
    """Different calls of one family that this GPU can run, in random order."""
    draw = Draw(int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:8], 16))
    found: dict[str, Wanted] = {}
    misses = 0
    while len(found) < count and misses < _TRIES * count:
        batch = []
        for _ in range(min(256, count)):
            try:
                batch.append(Wanted(name, kernel(**FAMILIES[name](draw))))
            except KernelcastError:
                misses += 1  # sizes that do not go together
        fits = _runnable([wanted.call for wanted in batch], target)
        for wanted, good in zip(batch, fits, strict=True):
            if good and wanted.key not in found:
                found[wanted.key] = wanted
            else:
                misses += 1
    return list(found.values())[:count]


def _runnable(calls: Sequence[Kernel], target: Gpu) -> list[bool]:
    """Whether each call fits this GPU's memory, formats and our patience."""
    conditions = Conditions(predictor="generic")
    try:
        return [found.time_s <= LONGEST_S for found in predict_many(calls, target, conditions)]
    except KernelcastError:  # of one of them
        if len(calls) == 1:
            return [False]
        half = len(calls) // 2
        return _runnable(calls[:half], target) + _runnable(calls[half:], target)


def _features(members: Sequence[Wanted], target: Gpu) -> NDArray[np.float64]:
    """One row a call, each column to unit spread; words count as one step each."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for at, wanted in enumerate(members):
        groups.setdefault(group_key(wanted.call), []).append(at)
    parts = []
    for rows in groups.values():
        calls = [members[i].call for i in rows]
        parts.append((rows, ask(type(calls[0]), columns_of(calls), target, IN_A_MODEL, Learned()).features))
    names = tuple(dict.fromkeys(name for _, found in parts for name in found.names))
    values = np.zeros((len(members), len(names) + len(parts)))
    for at, (rows, found) in enumerate(parts):
        values[rows, : len(names)] = aligned(found.names, found.values, names)
        values[rows, len(names) + at] = 1.0
    spread = values.std(axis=0)
    return values / np.where(spread < 1e-9, 1.0, spread)
