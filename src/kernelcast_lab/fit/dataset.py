"""Measured calls as features and targets, one dataset a family."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.evidence import configurations_of
from kernelcast.forecast.features import aligned
from kernelcast.forecast.learned import Learned
from kernelcast.forecast.predict import predictor_input
from kernelcast.forecast.predict_table import rotations_of
from kernelcast.forecast.predictor import Predictor, PredictorInput
from kernelcast.forecast.prior import sharers
from kernelcast.forecast.table import BadRows, grouped
from kernelcast_lab.data.folds import AT_LEAST

Columns = Mapping[str, NDArray[Any]]
_CHUNK_CALLS = 8192
_SHARE_CALLS = 65_536
_TIMES = ("estimate_s", "bound_s", "latency_s", "rows", "at_least", "shared")


@dataclass(frozen=True)
class Dataset:
    """One row a measured call. ``choices``: the categorical inputs; ``rows`` index the source columns."""

    family: str
    names: tuple[str, ...]
    values: NDArray[np.float32]
    choices: Mapping[str, NDArray[Any]]
    estimate_s: NDArray[np.float64]
    bound_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    rows: NDArray[np.intp]
    at_least: NDArray[np.bool_]  # the measured time is a lower limit
    shared: NDArray[Any]  # format, stack and configuration, between tabs: whose errors are correlated

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def target(self) -> NDArray[np.float64]:
        """What the network learns: the log of measured over generic time."""
        return np.log(np.maximum(self.latency_s, self.bound_s) / self.estimate_s)

    def choice(self, name: str) -> NDArray[Any]:
        """A categorical column; None in all rows where it is not given."""
        return self.choices.get(name, np.full(len(self), None, dtype=object))

    def select(self, keep: NDArray[Any]) -> Dataset:
        """The rows of a mask or of row numbers."""
        choices = {name: column[keep] for name, column in self.choices.items()}
        return replace(self, choices=choices, **{name: getattr(self, name)[keep] for name in ("values", *_TIMES)})


def build(columns: Columns, family: str, workers: int = 1) -> Dataset:
    """Features of every row of ``family`` in canonical columns, by that many processes."""
    count = len(columns["op"])
    shares = np.array_split(np.arange(count), max(1, -(-count // _SHARE_CALLS)))  # for any number of workers the same
    parts = ({name: column[at] for name, column in columns.items()} for at in shares)
    if workers <= 1 or len(shares) == 1:
        return _join([_build(part, family, at) for part, at in zip(parts, shares, strict=True)])
    # spawned: a fork of a process that has threads, or a GPU, may hang
    with ProcessPoolExecutor(min(workers, len(shares)), multiprocessing.get_context("spawn")) as pool:
        return _join(list(pool.map(_build, parts, itertools.repeat(family), shares)))


def predictor_inputs(
    columns: Columns, family: str, predictor: Predictor
) -> Iterator[tuple[PredictorInput, NDArray[np.intp]]]:
    """Predictor inputs of the calls of a family, in groups that agree in all choices; and their rows."""
    bad = BadRows()
    rotations = rotations_of(columns)  # what L2 kept may change which tile is best
    for kernel, target, rows, calls in grouped(columns, None, bad):
        if kernel.family != family:
            continue
        for start in range(0, len(rows), _CHUNK_CALLS):
            at = rows[start : start + _CHUNK_CALLS]
            yield (
                predictor_input(kernel, calls.part(start, start + _CHUNK_CALLS), target, rotations.part(at), predictor),
                at,
            )
    if bad.messages:
        raise KernelcastError(bad.text())


def _build(columns: Columns, family: str, numbered: NDArray[np.intp]) -> Dataset:
    parts = []
    for question, at in predictor_inputs(columns, family, Learned()):
        choices = {**question.choices, "gpu": question.gpu.id}
        result = question.features
        part = Dataset(
            family=family,
            names=result.names,
            values=result.values,
            choices={name: np.full(len(at), choice, dtype=object) for name, choice in choices.items()},
            estimate_s=result.estimate_s,
            bound_s=result.bound_s,
            latency_s=np.asarray(columns["latency_us"][at], dtype=np.float64) * 1e-6,
            rows=numbered[at],
            at_least=columns[AT_LEAST][at] > 0 if AT_LEAST in columns else np.zeros(len(at), dtype=bool),
            shared=_shared(question),
        )
        parts.append(part)
    if not parts:
        raise KernelcastError(f"no measured call of the family {family}")
    return _join(parts)


def _shared(question: PredictorInput) -> NDArray[Any]:
    """The groups whose errors are correlated with those of each call."""
    result = np.empty(question.calls.count, dtype=object)
    for rows, choices in configurations_of(question.kernel, question.calls):
        full = {**question.kernel.with_defaults(choices, question.gpu), "op": question.kernel.op}
        result[slice(None) if rows is None else rows] = "\t".join(sharers(full))
    return result


def _join(parts: list[Dataset]) -> Dataset:
    """Rows of all parts; a feature or choice that an op lacks is 0 or None there."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    choices = dict.fromkeys(name for part in parts for name in part.choices)
    return Dataset(
        family=parts[0].family,
        names=names,
        values=np.concatenate([aligned(part.names, part.values, names) for part in parts]),
        choices={name: np.concatenate([part.choice(name) for part in parts]) for name in choices},
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _TIMES},
    )
