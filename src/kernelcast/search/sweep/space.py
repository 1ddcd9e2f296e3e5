"""Settings by number: the n-th of a sweep is computed from n, so no list of them is kept.

A setting is a deployment (model, GPU, stack, formats, layout) and the sizes of a batch. Deployments are numbered with
the model slowest and the layout fastest, settings with the deployment slowest: neighbours share kernels. Of a sampled
sweep the n-th setting is drawn by a hash of n and the seed; deployments are drawn evenly, in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.search.sweep.constraint import Constraint
from kernelcast.search.sweep.file import LAYOUT, NAMES, SIZES, Integers, Sweep

_BLOCK = 1 << 18  # settings that constraints are evaluated on at once
_TRIES = 64  # draws of a sampled setting until its constraints hold
_MOST = 10**10  # settings that constraints are tried on


@dataclass(frozen=True)
class Chunk:
    """Settings from number ``first`` on, which lie between two numbers of the space before constraints."""

    number: int
    start: int
    stop: int
    first: int
    count: int


@dataclass(frozen=True)
class SettingBlock:
    """Settings in columns: the number of each deployment, and its sizes."""

    deployments: Integers
    sizes: Mapping[str, Integers]

    def take(self, rows: NDArray[Any]) -> SettingBlock:
        return SettingBlock(self.deployments[rows], {name: column[rows] for name, column in self.sizes.items()})


class Space:
    """All settings of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._inner = (len(sweep.gpus), len(sweep.stacks), len(sweep.dtypes), len(sweep.kv_dtypes), len(sweep.skews))
        self._layout_counts = np.array([len(layouts) for layouts in sweep.layouts])
        self._ends = np.cumsum(math.prod(self._inner) * self._layout_counts)
        fixed = {*NAMES, *LAYOUT, "gpus", "skew"}
        constraints = sweep.constraints()
        on_deployments = [each for each in constraints if each.names <= fixed]
        self._on_settings = [each for each in constraints if not each.names <= fixed]
        self._kept = self._keeping(on_deployments) if on_deployments else None
        count = len(self._kept) if self._kept is not None else int(self._ends[-1])
        self.deployment_count = count
        grid = count * math.prod(values.count for values in sweep.sizes.values())
        self.size = (sweep.samples or grid) if count else 0  # before constraints on sizes
        if self.size > _MOST:
            raise KernelcastError(f"{self.size:,} settings are more than can be tried: give samples = 1000000")

    # ---- deployments ----
    def _keeping(self, constraints: list[Constraint]) -> Integers:
        total, kept = int(self._ends[-1]), []
        for start in range(0, total, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, total))
            kept.append(numbers[_all_hold(constraints, self.deployment_columns(numbers))])
        return np.concatenate(kept)

    def codes(self, deployments: Integers) -> tuple[Integers, ...]:
        """Indices of each deployment: model, GPU, stack, format, format of the cache, skew and layout."""
        models = np.searchsorted(self._ends, deployments, side="right")
        rest = deployments - np.concatenate([[0], self._ends])[models]
        codes = []
        for count in (self._layout_counts[models], *reversed(self._inner)):
            codes.append(rest % count)
            rest = rest // count
        return models, *reversed(codes)

    @cached_property
    def _layout_table(self) -> tuple[Integers, Integers]:
        """Layouts of all models in one table, and where each model's begin."""
        table = [values for layouts in self.sweep.layouts for values in layouts]
        return np.array(table, dtype=np.int64), np.cumsum([0, *self._layout_counts])

    def layout_values(self, models: Integers, layouts: Integers) -> Integers:
        """(deployments, numbers by LAYOUT)."""
        table, starts = self._layout_table
        return table[starts[models] + layouts]

    def deployment_columns(self, deployments: Integers) -> dict[str, NDArray[Any]]:
        """Names and numbers of deployments, by column."""
        models, *named, skews, layouts = self.codes(deployments)
        values = self.sweep.names
        columns: dict[str, NDArray[Any]] = {
            name: np.array(values[name], dtype=object)[codes]
            for name, codes in zip(NAMES, (models, *named), strict=True)
        }
        columns |= dict(zip(LAYOUT, self.layout_values(models, layouts).T, strict=True))
        gpus = columns["tp"] * columns["pp"] * columns["dp"]
        return columns | {"gpus": gpus, "skew": np.array(self.sweep.skews)[skews]}

    # ---- settings ----
    def columns(self, block: SettingBlock) -> dict[str, NDArray[Any]]:
        """The columns of each setting: its deployment's and its sizes."""
        unique, which = np.unique(block.deployments, return_inverse=True)
        return {name: column[which] for name, column in self.deployment_columns(unique).items()} | dict(block.sizes)

    def between(self, start: int, stop: int) -> SettingBlock:
        """The settings of these numbers that keep the constraints, in order."""
        parts = [self._kept_of(np.arange(at, min(at + _BLOCK, stop)))[1] for at in range(start, stop, _BLOCK)]
        sizes = {name: np.concatenate([part.sizes[name] for part in parts]) for name in SIZES}
        return SettingBlock(np.concatenate([part.deployments for part in parts]), sizes)

    def _kept_of(self, numbers: Integers) -> tuple[Integers, SettingBlock]:
        """The numbers whose settings keep the constraints, and these settings."""
        sampled = self.sweep.samples is not None
        block = self._sample(numbers, 0) if sampled else self._grid(numbers)
        kept = self._holds(block)
        for again in range(1, _TRIES) if sampled else ():
            missing = np.flatnonzero(~kept)
            if not len(missing):
                break
            other = self._sample(numbers[missing], again)
            good = self._holds(other)
            block.deployments[missing[good]] = other.deployments[good]
            for name in SIZES:
                block.sizes[name][missing[good]] = other.sizes[name][good]
            kept[missing[good]] = True
        return numbers[kept], block.take(kept)

    def _holds(self, block: SettingBlock) -> NDArray[np.bool_]:
        if not self._on_settings:
            return np.ones(len(block.deployments), dtype=bool)
        return _all_hold(self._on_settings, self.columns(block))

    def _grid(self, numbers: Integers) -> SettingBlock:
        sizes, rest = {}, numbers
        for name in reversed(SIZES):
            values = self.sweep.sizes[name]
            sizes[name] = values.at(rest % values.count)
            rest = rest // values.count
        return SettingBlock(self._deployment(rest), sizes)

    def _sample(self, numbers: Integers, again: int) -> SettingBlock:
        def uniform(which: int) -> NDArray[np.float64]:
            return _uniform(numbers, self.sweep.seed, again * (len(SIZES) + 1) + which)

        drawn = ((numbers + uniform(0)) * (self.deployment_count / self.size)).astype(np.int64)
        deployments = self._deployment(np.minimum(drawn, self.deployment_count - 1))
        sizes = {name: self.sweep.sizes[name].sample(uniform(at + 1)) for at, name in enumerate(SIZES)}
        return SettingBlock(deployments, sizes)

    def _deployment(self, at: Integers) -> Integers:
        return at if self._kept is None else self._kept[at]

    # ---- chunks ----
    def chunks(self, size: int) -> Iterator[Chunk]:
        """All settings in parts of ``size``."""
        if not self._on_settings:
            for at, start in enumerate(range(0, self.size, size)):
                stop = min(start + size, self.size)
                yield Chunk(at, start, stop, start, stop - start)
            return
        waiting, begun, first, number = 0, 0, 0, 0
        for start in range(0, self.size, _BLOCK):
            kept, _ = self._kept_of(np.arange(start, min(start + _BLOCK, self.size)))
            for end in kept[size - waiting - 1 :: size]:
                yield Chunk(number, begun, int(end) + 1, first, size)
                number, first, begun = number + 1, first + size, int(end) + 1
            waiting = (waiting + len(kept)) % size
        if waiting:
            yield Chunk(number, begun, self.size, first, waiting)

    @cached_property
    def count(self) -> int:
        """Settings that keep all constraints."""
        return sum(chunk.count for chunk in self.chunks(_BLOCK)) if self._on_settings else self.size


def _all_hold(constraints: list[Constraint], columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    return np.logical_and.reduce([each.holds(columns) for each in constraints])


def _uniform(numbers: Integers, seed: int, stream: int) -> NDArray[np.float64]:
    """In [0, 1), by the number alone: SplitMix64 (Steele et al., OOPSLA 2014), independent of NumPy's generators."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = _mixed(np.uint64(seed & (2**64 - 1)) * golden + np.uint64(stream + 1))
        bits = _mixed(_mixed(numbers.astype(np.uint64) * golden + mixed))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
