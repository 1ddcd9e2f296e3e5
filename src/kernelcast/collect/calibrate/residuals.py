"""Measured calls and their predictions: the residuals that a calibration is fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.files import open_table
from kernelcast.forecast import Predictor, PredictorInput
from kernelcast.forecast.calibration import LEAST_WIDTH, REACH, categorical_inputs
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.features import GPU_FEATURES, KEEP, aligned
from kernelcast.forecast.learned import hidden_units
from kernelcast.forecast.predict import CHUNK_CALLS, by_configuration, predictor_input
from kernelcast.forecast.predict_table import add_too_fast, rotations_of
from kernelcast.forecast.prior import CallPoints, Prior, sharers, with_hidden
from kernelcast.forecast.table import BadRows, Rows, grouped
from kernelcast.hardware import Gpu, gpu
from kernelcast.machine.limits import Rotation
from kernelcast.ops.base import Calls, Kernel

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Residuals:
    """One family's measured calls. Rows are in a canonical order, independent of the file's."""

    family: str
    names: tuple[str, ...]
    values: NDArray[np.float32]
    hidden: NDArray[np.float32]  # units of the networks
    shared: tuple[tuple[str, str, str], ...]  # by code: format, stack and configuration
    code: NDArray[np.intp]  # index of each row in ``shared``
    leaning: NDArray[np.float64]  # log of predicted over generic time
    time_s: NDArray[np.float64]
    low: NDArray[np.float64]  # the predictor's interval, as logs of time
    high: NDArray[np.float64]
    bound_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.code)

    @property
    def target(self) -> NDArray[np.float64]:
        """Log of measured over predicted; clipped at the bound, below which no prediction goes."""
        return np.log(np.maximum(self.latency_s, self.bound_s) / self.time_s)

    @property
    def width(self) -> NDArray[np.float64]:
        """The standard deviation of the predictor's interval, the unit of errors."""
        return np.maximum((self.low + self.high) / (2 * REACH), LEAST_WIDTH)

    def placed(self, prior: Prior) -> CallPoints:
        """The calls as a prior sees them, in the digits that a file keeps."""
        position = prior.positions(*with_hidden(self.names, self.values, self.hidden))
        position = position.astype(np.float16).astype(np.float64)
        return CallPoints.of(position, self.leaning, self.shared, self.code)

    def percent(self, correction: NDArray[np.float64]) -> NDArray[np.float64]:
        """Error of each call, in percent of the measured time, with this correction."""
        time = np.maximum(self.time_s * np.exp(correction), self.bound_s)
        return np.abs(time / self.latency_s - 1) * 100


def read_measured(path: Path) -> dict[str, NDArray[Any]]:
    """The columns of a table of measurements: calls, latency_us, and where given gpu and rotations."""
    with open_table(path) as source:
        for name in ("op", "latency_us"):
            if name not in source.types:
                have = ", ".join(source.types)
                raise KernelcastError(f"{path}: a table of measurements needs a column '{name}'; this has {have}")
        return source.columns("latency_us", "rotation", "input_rotation")


def measured_gpu(columns: Columns, wanted: Gpu | None) -> Gpu:
    """The GPU that was measured: ``target``, or the only GPU in the table."""
    if "gpu" not in columns:
        if wanted is None:
            raise KernelcastError("which GPU was measured? give it with `gpu`, or in a column 'gpu'")
        return wanted
    cells = {str(cell).strip() for cell in columns["gpu"] if cell is not None and str(cell).strip()}
    names = (wanted.id, wanted.known_as) if wanted else ()  # from a file, not in the catalogue
    gpus = sorted({wanted.known_as if wanted and cell in names else gpu(cell).id for cell in cells})
    if len(gpus) > 1:
        raise KernelcastError(f"measurements of {len(gpus)} GPUs ({', '.join(gpus)}): a calibration is of one")
    if not gpus:
        return measured_gpu({}, wanted)
    if wanted is not None and gpus[0] != wanted.known_as:
        raise KernelcastError(f"the table was measured on {gpus[0]}, not on {wanted.id}")
    return wanted or gpu(gpus[0])


def latencies_us(columns: Columns, bad: BadRows) -> NDArray[np.float64]:
    """The measured times; invalid ones go to ``bad``."""
    cells = columns["latency_us"]
    plain = cells.filled(np.nan) if isinstance(cells, np.ma.MaskedArray) and cells.dtype.kind == "f" else cells
    values = np.array([_number(cell) for cell in plain], dtype=np.float64)
    bad.add(np.flatnonzero(~(np.isfinite(values) & (values > 0))), "latency_us must be a positive number")
    return values


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return np.nan


def residuals(
    columns: Columns, target: Gpu, base: Predictor, conditions: Conditions, bad: BadRows
) -> dict[str, Residuals]:
    """Predictions of ``base`` for every valid row, by family."""
    latency = latencies_us(columns, bad) * 1e-6
    add_too_fast(dict(columns), latency * 1e6, target, bad)
    dropped = np.zeros(len(latency), dtype=bool)
    dropped[list(bad.messages)] = True
    parts: dict[str, list[Residuals]] = {}
    for at, part in _estimates(columns, target, base, conditions, bad, latency):
        parts.setdefault(part.family, []).append(select(part, ~dropped[at]))
    joined = {family: _ordered(_joined(members)) for family, members in sorted(parts.items())}
    return {family: members for family, members in joined.items() if len(members)}


def predictions(
    columns: Columns, target: Gpu, base: Predictor, conditions: Conditions
) -> dict[str, tuple[Residuals, NDArray[np.intp]]]:
    """The same for calls that are not measured yet, with their rows; bad rows are left out."""
    parts: dict[str, list[tuple[Rows, Residuals]]] = {}
    for at, part in _estimates(columns, target, base, conditions, BadRows(), None):
        parts.setdefault(part.family, []).append((at, part))
    return {
        family: (_joined([part for _, part in members]), np.concatenate([at for at, _ in members]))
        for family, members in sorted(parts.items())
    }


def _estimates(
    columns: Columns, target: Gpu, base: Predictor, conditions: Conditions, bad: BadRows,
    latency: NDArray[np.float64] | None,
) -> Iterator[tuple[Rows, Residuals]]:  # fmt: skip
    """Rows of each configuration and the predictions of ``base``; without measured times residuals are zero."""
    rotations = rotations_of(columns, conditions)
    for kernel, device, rows, calls in grouped(columns, target, bad):
        for at, inputs in predictor_inputs(kernel, rows, calls, device, rotations, base):
            estimate, features = base.estimate(inputs), inputs.features
            yield (
                at,
                Residuals(
                    family=kernel.family,
                    names=features.names,
                    values=features.values,
                    hidden=hidden_units(base, inputs),
                    shared=(sharers(categorical_inputs(inputs)),),
                    code=np.zeros(len(at), dtype=np.intp),
                    leaning=np.log(estimate.time_s / features.estimate_s),
                    time_s=estimate.time_s,
                    low=np.log(estimate.time_s / estimate.low_s),
                    high=np.log(estimate.high_s / estimate.time_s),
                    bound_s=inputs.bound_s,
                    latency_s=estimate.time_s if latency is None else latency[at],
                ),
            )


def predictor_inputs(
    kernel: type[Kernel], rows: Rows, calls: Calls, device: Gpu, rotations: Rotation, base: Predictor
) -> Iterator[tuple[Rows, PredictorInput]]:
    """The calls for ``base``, grouped by the configuration that answers them, and their rows in the table."""
    for selected, match in by_configuration(kernel, calls, device, base):
        members = np.arange(calls.count) if selected is None else selected
        for start in range(0, len(members), CHUNK_CALLS):
            at = members[start : start + CHUNK_CALLS]
            part, sets = calls.take(at), rotations.part(rows[at])
            yield rows[at], predictor_input(kernel, part, device, sets, base, match=match, keep=KEEP)


_TIMES = ("leaning", "time_s", "low", "high", "bound_s", "latency_s")


def select(rows: Residuals, keep: NDArray[Any]) -> Residuals:
    taken: dict[str, Any] = {name: getattr(rows, name)[keep] for name in ("values", "hidden", "code", *_TIMES)}
    return replace(rows, **taken)


def _joined(parts: list[Residuals]) -> Residuals:
    """One table; features that an op lacks are 0, and features that identify the GPU are dropped."""
    names = tuple(n for n in dict.fromkeys(n for part in parts for n in part.names) if n not in GPU_FEATURES)
    keys = [part.shared[0] for part in parts]
    labels = sorted(set(keys))
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _TIMES}
    return Residuals(
        family=parts[0].family,
        names=names,
        values=np.concatenate([aligned(part.names, part.values, names) for part in parts]),
        hidden=np.concatenate([part.hidden for part in parts]),
        shared=tuple(labels),
        code=np.concatenate([np.full(len(part), labels.index(key)) for part, key in zip(parts, keys, strict=True)]),
        **columns,
    )


def _ordered(rows: Residuals) -> Residuals:
    """Rows sorted by configuration, features and time, independent of the file's order."""
    return select(rows, np.lexsort((rows.latency_s, *rows.values.T[::-1], rows.code)))


def shapes(rows: Residuals) -> NDArray[np.intp]:
    """A number for each row, in random order: calls with the same features (another stack, or twice) share theirs."""
    _, shape = np.unique(rows.values, axis=0, return_inverse=True)
    order = np.random.default_rng(0).permutation(int(shape.max()) + 1)
    return np.asarray(order[shape.reshape(-1)], dtype=np.intp)
