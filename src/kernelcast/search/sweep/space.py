"""Settings by number: the n-th of a sweep is worked out from n, so that nobody holds a list of them.

A *place* is a model on GPUs (model, GPU, stack, formats, layout); a setting is a place and the sizes of a batch. Places
are numbered with the model slowest and the layout fastest, settings with the place slowest: neighbours share kernels.
Of a sampled sweep the n-th setting is drawn by a hash of n and the seed; places are dealt out evenly, in order.
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
from kernelcast.search.sweep.file import CUTS, SIZES, WORDS, Integers, Sweep
from kernelcast.search.sweep.where import Where

_BLOCK = 1 << 18  # settings that constraints are worked out for at once
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
class Block:
    """Settings in columns: where each is, and its sizes."""

    places: Integers
    sizes: Mapping[str, Integers]

    def __len__(self) -> int:
        return len(self.places)

    def take(self, rows: NDArray[Any]) -> Block:
        return Block(self.places[rows], {name: column[rows] for name, column in self.sizes.items()})


class Space:
    """All settings of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._inner = (len(sweep.gpus), len(sweep.stacks), len(sweep.dtypes), len(sweep.kv_dtypes), len(sweep.skews))
        per_model = [math.prod(self._inner) * len(cuts) for cuts in sweep.layouts]
        self._ends = np.cumsum(per_model)
        fixed = {*WORDS, *CUTS, "gpus", "skew"}
        constraints = sweep.constraints()
        self._of_places = [one for one in constraints if one.names <= fixed]
        self._of_settings = [one for one in constraints if not one.names <= fixed]
        self._kept = self._keeping() if self._of_places else None
        places = len(self._kept) if self._kept is not None else int(self._ends[-1])
        self.place_count = places
        grid = places * math.prod(values.count for values in sweep.sizes.values())
        self.size = (sweep.samples or grid) if places else 0  # before constraints on sizes
        if self.size > _MOST:
            raise KernelcastError(f"{self.size:,} settings are more than can be tried: give samples = 1000000")

    # ---- places ----
    def _keeping(self) -> Integers:
        total, found = int(self._ends[-1]), []
        for start in range(0, total, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, total))
            found.append(numbers[_all_hold(self._of_places, self.place_columns(numbers))])
        return np.concatenate(found)

    def codes(self, places: Integers) -> tuple[Integers, ...]:
        """Of each place: which model, GPU, stack, format, format of the cache, skew and layout."""
        models = np.searchsorted(self._ends, places, side="right")
        rest = places - np.concatenate([[0], self._ends])[models]
        cuts = np.array([len(cuts) for cuts in self.sweep.layouts])[models]
        found = [rest % cuts]
        rest = rest // cuts
        for count in reversed(self._inner):
            found.append(rest % count)
            rest = rest // count
        return models, *reversed(found)

    @cached_property
    def _cuts(self) -> tuple[Integers, Integers]:
        """Layouts of all models in one table, and where each model's begin."""
        starts = np.cumsum([0, *(len(cuts) for cuts in self.sweep.layouts)])
        return np.array([cut for cuts in self.sweep.layouts for cut in cuts], dtype=np.int64), starts

    def cuts(self, models: Integers, layouts: Integers) -> Integers:
        """(places, numbers of CUTS)."""
        table, starts = self._cuts
        return table[starts[models] + layouts]

    def place_columns(self, places: Integers) -> dict[str, NDArray[Any]]:
        """Words and numbers of places, by the names of columns."""
        models, *named, skews, layouts = self.codes(places)
        known = self.sweep.words
        found: dict[str, NDArray[Any]] = {
            name: np.array(known[name], dtype=object)[codes]
            for name, codes in zip(WORDS, (models, *named), strict=True)
        }
        cuts = self.cuts(models, layouts)
        found |= {name: cuts[:, at] for at, name in enumerate(CUTS)}
        return found | {"gpus": found["tp"] * found["pp"] * found["dp"], "skew": np.array(self.sweep.skews)[skews]}

    # ---- settings ----
    def columns(self, block: Block) -> dict[str, NDArray[Any]]:
        """Of each setting: its place's columns and its sizes."""
        unique, which = np.unique(block.places, return_inverse=True)
        return {name: column[which] for name, column in self.place_columns(unique).items()} | dict(block.sizes)

    def between(self, start: int, stop: int) -> Block:
        """The settings of these numbers that keep the constraints, in order."""
        parts = [self._kept_of(np.arange(at, min(at + _BLOCK, stop))) for at in range(start, stop, _BLOCK)]
        sizes = {name: np.concatenate([part.sizes[name] for _, part in parts]) for name in SIZES}
        return Block(np.concatenate([part.places for _, part in parts]), sizes)

    def _kept_of(self, numbers: Integers) -> tuple[Integers, Block]:
        """Of these numbers, those that keep the constraints, and their settings."""
        if self.sweep.samples is None:
            block = self._grid(numbers)
            rows = self._holding(block)
            return numbers[rows], block.take(rows)
        block = self._drawn(numbers, 0)
        held = self._holding(block)
        for again in range(1, _TRIES):
            left = np.flatnonzero(~held)
            if not len(left):
                return numbers, block
            other = self._drawn(numbers[left], again)
            good = self._holding(other)
            block.places[left[good]] = other.places[good]
            for name in SIZES:
                block.sizes[name][left[good]] = other.sizes[name][good]
            held[left[good]] = True
        return numbers[held], block.take(held)

    def _holding(self, block: Block) -> NDArray[np.bool_]:
        if not self._of_settings:
            return np.ones(len(block), dtype=bool)
        return _all_hold(self._of_settings, self.columns(block))

    def _grid(self, numbers: Integers) -> Block:
        sizes, rest = {}, numbers
        for name in reversed(SIZES):
            values = self.sweep.sizes[name]
            sizes[name] = values.at(rest % values.count)
            rest = rest // values.count
        return Block(self._place(rest), sizes)

    def _drawn(self, numbers: Integers, again: int) -> Block:
        def share(which: int) -> NDArray[np.float64]:
            return _uniform(numbers, self.sweep.seed, again * (len(SIZES) + 1) + which)

        dealt = ((numbers + share(0)) * (self.place_count / self.size)).astype(np.int64)
        places = self._place(np.minimum(dealt, self.place_count - 1))
        return Block(places, {name: self.sweep.sizes[name].drawn(share(at + 1)) for at, name in enumerate(SIZES)})

    def _place(self, at: Integers) -> Integers:
        return at if self._kept is None else self._kept[at]

    # ---- chunks ----
    def chunks(self, size: int) -> Iterator[Chunk]:
        """All settings, cut into parts of ``size``."""
        if not self._of_settings:
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
        return sum(chunk.count for chunk in self.chunks(_BLOCK)) if self._of_settings else self.size


def _all_hold(constraints: list[Where], columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    return np.logical_and.reduce([one.holds(columns) for one in constraints])


def _uniform(numbers: Integers, seed: int, stream: int) -> NDArray[np.float64]:
    """In [0, 1), by the number alone: SplitMix64 (Steele et al., OOPSLA 2014), whatever NumPy's generators become."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        mixed = _mixed(np.uint64(seed & (2**64 - 1)) * golden + np.uint64(stream + 1))
        found = _mixed(_mixed(numbers.astype(np.uint64) * golden + mixed))
    return (found >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
