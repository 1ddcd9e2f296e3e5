"""Measured calls as features and targets, one dataset a family."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.calls.table import BadRows, grouped
from kernelcast.efficiency.features import Features, aligned
from kernelcast.efficiency.learned import Learned
from kernelcast.errors import KernelcastError
from kernelcast.kernels.base import parameters_of
from kernelcast.measured.folds import AT_LEAST
from kernelcast.predict import ask
from kernelcast.tables import turns_of

Columns = Mapping[str, NDArray[Any]]
_CHUNK_CALLS = 8192


@dataclass(frozen=True)
class Dataset:
    """One row a measured call. ``words`` are what the network may know by name; ``rows`` index the source columns."""

    family: str
    names: tuple[str, ...]
    values: NDArray[np.float32]
    words: Mapping[str, NDArray[Any]]
    estimate_s: NDArray[np.float64]
    bound_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    rows: NDArray[np.intp]
    at_least: NDArray[np.bool_]  # the true time is this or more, nobody knows how much

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def target(self) -> NDArray[np.float64]:
        """What the network learns: the log of measured over generic time."""
        return np.log(np.maximum(self.latency_s, self.bound_s) / self.estimate_s)

    def select(self, keep: NDArray[Any]) -> Dataset:
        """The rows of a mask or of row numbers."""
        return Dataset(
            self.family,
            self.names,
            self.values[keep],
            {name: column[keep] for name, column in self.words.items()},
            self.estimate_s[keep],
            self.bound_s[keep],
            self.latency_s[keep],
            self.rows[keep],
            self.at_least[keep],
        )


def build(columns: Columns, family: str, workers: int = 1) -> Dataset:
    """Features of every row of ``family`` in canonical columns, by that many processes."""
    if workers <= 1:
        return _build(columns, family, np.arange(len(columns["op"])))
    shares = np.array_split(np.arange(len(columns["op"])), workers)
    with ProcessPoolExecutor(workers) as pool:
        jobs = [pool.submit(_build, {n: c[at] for n, c in columns.items()}, family, at) for at in shares]
        return _join([job.result() for job in jobs])


def _build(columns: Columns, family: str, numbered: NDArray[np.intp]) -> Dataset:
    parts: list[Dataset] = []
    bad = BadRows()
    turns = turns_of(columns)
    for kernel, place, rows, calls in grouped(columns, None, bad):
        if kernel.family != family:
            continue
        for start in range(0, len(rows), _CHUNK_CALLS):
            part = calls.part(start, start + _CHUNK_CALLS)
            at = rows[start : start + _CHUNK_CALLS]
            found = ask(kernel, part, place, turns.part(at), Learned()).features
            words = {p.name: calls.choices.get(p.name) for p in parameters_of(kernel).values() if p.kind == "choice"}
            parts.append(_dataset(family, found, {**words, "op": kernel.op, "gpu": place.id}, columns, at, numbered))
    if bad.found:
        raise KernelcastError(bad.text())
    if not parts:
        raise KernelcastError(f"no measured call of the family {family}")
    return _join(parts)


def _dataset(
    family: str,
    found: Features,
    words: Mapping[str, Any],
    columns: Columns,
    at: NDArray[np.intp],
    numbered: NDArray[np.intp],
) -> Dataset:
    return Dataset(
        family=family,
        names=found.names,
        values=found.values,
        words={name: np.full(len(at), word, dtype=object) for name, word in words.items()},
        estimate_s=found.estimate_s,
        bound_s=found.bound_s,
        latency_s=np.asarray(columns["latency_us"][at], dtype=np.float64) * 1e-6,
        rows=numbered[at],
        at_least=columns[AT_LEAST][at] > 0 if AT_LEAST in columns else np.zeros(len(at), dtype=bool),
    )


def _join(parts: list[Dataset]) -> Dataset:
    """Rows of all parts; a feature or word that an op lacks is 0 or None there."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    words = tuple(dict.fromkeys(name for part in parts for name in part.words))
    return Dataset(
        family=parts[0].family,
        names=names,
        values=np.concatenate([aligned(part.names, part.values, names) for part in parts]),
        words={
            name: np.concatenate([part.words.get(name, np.full(len(part), None, dtype=object)) for part in parts])
            for name in words
        },
        estimate_s=np.concatenate([part.estimate_s for part in parts]),
        bound_s=np.concatenate([part.bound_s for part in parts]),
        latency_s=np.concatenate([part.latency_s for part in parts]),
        rows=np.concatenate([part.rows for part in parts]),
        at_least=np.concatenate([part.at_least for part in parts]),
    )


def pack(path: Path, columns: Columns) -> None:
    """Canonical columns in one compact file, to fit on a machine that has no tables."""
    packed: dict[str, NDArray[Any]] = {}
    for name, column in columns.items():
        if column.dtype == object:
            known, codes = np.unique(np.array(["" if v is None else str(v) for v in column]), return_inverse=True)
            packed[f"word:{name}"], packed[f"code:{name}"] = known, codes.astype(np.uint16)
        else:
            packed[f"number:{name}"] = np.asarray(column, dtype=np.float64)
    np.savez_compressed(path, **packed)  # type: ignore[arg-type]


def unpack(path: Path) -> dict[str, NDArray[Any]]:
    """What ``pack`` wrote."""
    columns: dict[str, NDArray[Any]] = {}
    with np.load(path) as packed:
        for key in packed.files:
            kind, _, name = key.partition(":")
            if kind == "number":
                columns[name] = packed[key]
            elif kind == "code":
                words = packed[f"word:{name}"].astype(object)
                words[words == ""] = None
                columns[name] = words[packed[key]]
    return columns
