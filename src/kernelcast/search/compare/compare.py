"""GPUs side by side: the best way to run a model on each, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.results import Shown
from kernelcast.search.compare.asked import Asked
from kernelcast.search.compare.candidates import Candidate, Unfit, between, candidates
from kernelcast.search.compare.served import Served, forecast

_REFINED = 2  # layouts of a GPU whose batches are looked at more finely


@dataclass(frozen=True, eq=False)
class Row:
    """A GPU: its best way, or why there is none."""

    gpu: Gpu
    best: Served | None
    unfit: Unfit | None = None
    refused: bool = False  # it fits, but cannot be forecast

    @property
    def meets(self) -> bool:
        """Whether it does all that is asked."""
        return self.best is not None and self.best.late is None and self.best.carries


@dataclass(frozen=True, eq=False)
class Comparison(Shown):
    """Rows in order: those that do what is asked, those that do not, those that do not fit."""

    asked: Asked
    rows: tuple[Row, ...]
    forecasts: int  # candidates that were looked at

    @property
    def fitting(self) -> list[Served]:
        return [row.best for row in self.rows if row.best is not None]


def compare_asked(asked: Asked, *, thorough: bool = False) -> Comparison:
    """Every GPU at its best; refuses a model that fits on none. ``thorough``: forecast every layout that fits."""
    ways = [candidates(asked, chip, thorough=thorough) for chip in asked.gpus]
    flat = [way for found in ways if not isinstance(found, Unfit) for way in found]
    if not flat:
        unfit = [(chip, way) for chip, way in zip(asked.gpus, ways, strict=True) if isinstance(way, Unfit)]
        raise KernelcastError(_nowhere(asked, unfit))
    served = iter(forecast(asked, flat))
    found = [[] if isinstance(own, Unfit) else [next(served) for _ in own] for own in ways]
    finer = [_finer(asked, own) for own in found]
    served = iter(forecast(asked, [way for own in finer for way in own]))
    for own, more in zip(found, finer, strict=True):
        own += [next(served) for _ in more]
    rows = [
        Row(chip, None, own) if isinstance(own, Unfit) else _best(chip, members)
        for chip, own, members in zip(asked.gpus, ways, found, strict=True)
    ]
    if not any(row.best for row in rows):
        raise KernelcastError(next(row.unfit.why for row in rows if row.unfit and row.refused))
    return Comparison(asked, tuple(sorted(rows, key=_place)), len(flat) + sum(map(len, finer)))


def _finer(asked: Asked, found: Sequence[Served | KernelcastError]) -> list[Candidate]:
    """Where a limit or a rate decides on the batch: sizes between those that were looked at, of the best layouts."""
    if not asked.steady or (asked.rate is None and not asked.goals):
        return []
    best: dict[int, Served] = {}
    for one in sorted((one for one in found if isinstance(one, Served)), key=order):
        best.setdefault(id(one.way.deployment), one)
    return [way for one in list(best.values())[:_REFINED] for way in between(one.way)]


def _best(chip: Gpu, found: Sequence[Served | KernelcastError]) -> Row:
    able = [one for one in found if isinstance(one, Served)]
    if able:
        return Row(chip, min(able, key=order))
    return Row(chip, None, Unfit(str(found[0])), refused=True)


def order(found: Served) -> tuple[float, ...]:
    """What makes one way better than another, less is better: keeping the goals and carrying the rate, then what is
    asked for, then latency."""
    asked, broken = found.asked, found.late
    missed = 0.0 if broken is None else found.share(broken)
    over = 0.0 if found.carries else found.gpus / asked.max_gpus
    return (max(missed, over), *_value(found), found.e2el.value)


def _value(found: Served) -> tuple[float, ...]:
    """What the order is by, less is better; where nobody knows it, after all others, throughput a GPU."""
    each = -found.tokens_per_s / found.gpus
    match found.asked.by or "dollars":
        case "latency":
            return 0.0, found.e2el.value, each
        case "throughput":
            return 0.0, -found.requests_per_s, each
        case "joules":
            spent = found.joules_per_million
            known = None if spent is None else spent.value
        case _:
            known = found.usd_per_million
    return (0.0, known, each) if known is not None else (1.0, each, each)


def _place(row: Row) -> tuple[float, ...]:
    return (math.inf,) if row.best is None else order(row.best)


def _nowhere(asked: Asked, unfit: Sequence[tuple[Gpu, Unfit]]) -> str:
    """One line: the GPU that comes nearest, and what would help."""
    lacking = [one for one in unfit if one[1].memory is not None]
    chip, nearest = min(
        lacking or unfit, key=lambda one: one[1].memory.missing_bytes if one[1].memory is not None else math.inf
    )
    which = "the nearest" if len(unfit) > 1 else "the only one asked for"
    return (
        f"{asked.model.name} fits on no GPU of {len(unfit)} within --max-gpus {asked.max_gpus}: {chip.id}, {which}, "
        f"{nearest.why}; more GPUs, a smaller format (--formats fp8) or a smaller batch may fit"
    )
