"""Which calls to measure: for each family realistic and space-filling ones, in an order that any prefix is useful.

A plan needs no GPU and no PyTorch. The same seed gives the same plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.kernels import Kernel, kernel, parameters_of
from kernelcast.measure import families
from kernelcast.measure.shapes import Draw
from kernelcast.predict import Conditions, predict_many

LONGEST_S = 8e-3  # longer calls teach little for their time
_TRIES = 20  # draws for one call, before a family is taken to be exhausted


@dataclass(frozen=True)
class Planned:
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


Family = Callable[[Draw], Mapping[str, Any]]
FAMILIES: Mapping[str, Family] = families.FAMILIES
SHARES: Mapping[str, float] = families.SHARES


def plan(
    target: Gpu,
    calls: int,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    warm_share: float = 0.0,
    seed: int = 0,
) -> list[Planned]:
    """``calls`` different calls for this GPU, families mixed throughout by their shares."""
    for name in (*only, *without):
        if name not in FAMILIES:
            raise unknown("family", name, FAMILIES)
    chosen = [name for name in FAMILIES if (not only or name in only) and name not in without]
    if not chosen:
        raise KernelcastError("no family is left to measure")
    total = sum(SHARES[name] for name in chosen)
    found: list[tuple[float, Planned]] = []
    for name in chosen:
        count = max(1, round(calls * SHARES[name] / total))
        members = _drawn(name, target, count, seed)
        # evenly over the whole plan, so that a prefix has every family by its share
        found += [((at + 0.5) / len(members), member) for at, member in enumerate(members)]
    ordered = [member for _, member in sorted(found, key=lambda pair: (pair[0], pair[1].family, pair[1].key))]
    rng = np.random.default_rng(seed)
    again = [Planned(p.family, p.call, warm=True) for p in ordered if rng.random() < warm_share]
    return ordered[:calls] + again


def _drawn(name: str, target: Gpu, count: int, seed: int) -> list[Planned]:
    """Different calls of one family that this GPU can run, in random order."""
    draw = Draw(int(hashlib.sha256(f"{seed} {name}".encode()).hexdigest()[:8], 16))
    found: dict[str, Planned] = {}
    misses = 0
    while len(found) < count and misses < _TRIES * count:
        batch = []
        for _ in range(min(256, count)):
            try:
                batch.append(Planned(name, kernel(**FAMILIES[name](draw))))
            except KernelcastError:
                misses += 1  # sizes that do not go together
        fits = _runnable([p.call for p in batch], target)
        for member, good in zip(batch, fits, strict=True):
            if good and member.key not in found:
                found[member.key] = member
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
