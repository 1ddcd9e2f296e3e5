"""Tables of kernel calls: columns in, columns out, row order kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.call import ROTATIONS
from kernelcast.forecast.call_table import BadRows, Rows, as_columns, grouped
from kernelcast.forecast.cells import missing, numbers_in
from kernelcast.forecast.distinct import different
from kernelcast.forecast.predict import (
    DEFAULT,
    THREADS,
    Conditions,
    Predictions,
    begin_calls,
    check_gpu,
    predict_by_configuration,
    too_large_text,
)  # fmt: skip
from kernelcast.hardware import Gpu, gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.machine.limits import Rotation
from kernelcast.ops.base import Kernel

OUTPUT = (
    "predicted_us", "low_us", "high_us", "ceiling_us", "bound_us", "bound_by", "support",
    "evidence_calls", "evidence_error", "answered_as",
)  # fmt: skip
_PIPELINES = np.array(PIPELINES, dtype=object)
_AHEAD = 8  # groups that are begun while an earlier one is waited for
_NUMBERS = ("evidence_calls", "evidence_error")


def predict_table(
    table: Mapping[str, Any],
    target: Gpu | str | None = None,
    conditions: Conditions = DEFAULT,
    *,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Add predicted_us, low_us, high_us, ceiling_us, bound_us, bound_by, support and what it rests on to a table.

    evidence_calls: calls of this kind that were measured; evidence_error: mean error on those that no fit saw, as a
    share; answered_as: the words that were filled in or changed, empty where the call was answered as it was asked.

    ``table``: columns by name (lists or arrays; a pandas or Polars frame or an Arrow table will do): ``op``, the
    op's parameters, ``dtype``, and, unless ``target`` is given, ``gpu``. An empty cell means not given. A bad
    row is an error that names it; with ``skip_bad`` its results are empty (NaN, None) instead.
    """
    columns = as_columns(table)
    output, bad = predict_columns(columns, target, conditions)
    if bad.found and not skip_bad:
        raise KernelcastError(bad.text())
    return {**columns, **output}


def predict_columns(
    columns: Mapping[str, NDArray[Any]],
    target: Gpu | str | None,
    conditions: Conditions = DEFAULT,
    matches: NDArray[Any] | None = None,
    launches: NDArray[Any] | None = None,
) -> tuple[dict[str, NDArray[Any]], BadRows]:
    """The output columns and what was wrong; bad rows have NaN and None. ``matches`` (what each row rests
    on) and ``launches`` (kernels that it launches), where given, are filled in."""
    if "op" not in columns:
        raise KernelcastError(f"the table needs a column 'op'; it has {', '.join(columns) or 'no columns'}")
    chip = gpu(target) if target is not None else None
    if chip is None and "gpu" not in columns:
        raise KernelcastError("which GPU? give one, or a column 'gpu'")
    if chip is not None:
        check_gpu(conditions, chip)
    count = len(columns["op"])
    output: dict[str, NDArray[Any]] = {
        name: np.full(count, np.nan) if name.endswith("_us") or name in _NUMBERS else np.full(count, None, dtype=object)
        for name in OUTPUT
    }
    bad = BadRows()
    for rows, at, found in answered(columns, chip, conditions, bad):
        for name in (name for name in OUTPUT if name.endswith("_us")):
            values = getattr(found, name.replace("predicted_us", "time_us").replace("_us", "_s"))
            output[name][rows] = (values * 1e6)[at]
        output["bound_by"][rows] = _PIPELINES[np.argmax(found.limits_s, axis=0)][at]
        output["support"][rows] = found.support[at]
        for name, told in _evidence(found.match).items():
            output[name][rows] = told[at] if len(told) > 1 else told
        if matches is not None:
            matches[rows] = found.match[at]
        if launches is not None:
            launches[rows] = found.launches[at]
    return output, bad


def _evidence(matches: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """What the calls rest on, by column; a group has few different matches. One entry: the same for all."""
    given = matches.tolist()
    code = {match: number for number, match in enumerate(dict.fromkeys(given))}
    entries = [match.entry for match in code]
    errors = [None if entry is None else entry.error for entry in entries]
    which = np.fromiter(map(code.__getitem__, given), dtype=np.intp, count=len(given)) if len(code) > 1 else [0]
    return {
        "answered_as": np.array([match.text for match in code], dtype=object)[which],
        "evidence_calls": np.array([entry.calls if entry else 0.0 for entry in entries])[which],
        "evidence_error": np.array([np.nan if error is None else error for error in errors])[which],
    }


def answered(
    columns: Mapping[str, NDArray[Any]], chip: Gpu | None, conditions: Conditions, bad: BadRows, details: bool = False
) -> Iterator[tuple[Rows, Rows, Predictions]]:
    """Good rows in groups, their places in the group's predictions, and these. What is wrong goes to ``bad``."""
    begun: deque[Group] = deque()
    with ThreadPoolExecutor(THREADS) as pool:  # groups run side by side; no thread starts before it has work
        for group in _groups(columns, chip, conditions, bad, details, pool):
            begun.append(group)
            if len(begun) > _AHEAD:
                yield from _good(begun.popleft(), bad)
        while begun:
            yield from _good(begun.popleft(), bad)


@dataclass(frozen=True)
class Group:
    """Rows of one op, GPU and choices: ``wait`` for their predictions, with each row's place among them."""

    kernel: type[Kernel]
    place: Gpu
    rows: Rows
    wait: Callable[[], Iterable[tuple[Rows, Rows, Predictions]]]


def _groups(
    columns: Mapping[str, NDArray[Any]], chip: Gpu | None, conditions: Conditions, bad: BadRows, details: bool,
    pool: Executor,
) -> Iterator[Group]:  # fmt: skip
    rotations = rotations_of(columns, conditions)
    for kernel, place, rows, calls in grouped(columns, chip, bad):
        own = rotations.part(rows)
        if details:
            kinds = predict_by_configuration(kernel, calls, place, conditions, own)
            yield Group(kernel, place, rows, partial(_by_configuration, rows, kinds))
            continue
        first, alike = different(calls, (own.weights, own.inputs))
        if first is not None:
            calls, own = calls.take(first), own.part(first)
        begun = begin_calls(kernel, calls, place, conditions, own, pool)
        yield Group(kernel, place, rows, partial(_together, rows, alike, begun))


def _by_configuration(
    rows: Rows, kinds: Iterable[tuple[Rows, Predictions]]
) -> Iterator[tuple[Rows, Rows, Predictions]]:
    for members, found in kinds:
        yield rows[members], np.arange(len(members)), found


def _together(rows: Rows, alike: Rows, begun: Callable[[], Predictions]) -> Iterator[tuple[Rows, Rows, Predictions]]:
    yield rows, alike, begun()


def _good(group: Group, bad: BadRows) -> Iterator[tuple[Rows, Rows, Predictions]]:
    """What the GPU's memory holds."""
    try:
        parts = list(group.wait())
    except KernelcastError as error:  # the whole group asks for what the GPU lacks
        bad.add(group.rows, str(error))
        return
    for rows, at, found in parts:
        large = found.too_large(group.place)
        if large.any():
            too = large[at]
            for row, footprint in zip(rows[too], found.footprint_bytes[at[too]], strict=True):
                bad.add([row], too_large_text(group.kernel.op, float(footprint), group.place))
            rows, at = rows[~too], at[~too]
        yield rows, at, found


def rotations_of(columns: Mapping[str, NDArray[Any]], conditions: Conditions = DEFAULT) -> Rotation:
    """Columns of their own may say what the conditions say for all; an empty cell leaves it to them."""

    def told(name: str) -> NDArray[np.float64] | float:
        if name not in columns:
            return float(getattr(conditions, name))
        values = numbers_in(columns[name], missing(columns[name]), flag=False)
        return np.where(values >= 1, values, getattr(conditions, name))

    return Rotation(*map(told, ROTATIONS))
