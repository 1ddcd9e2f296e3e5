"""Tables of kernel calls: columns in, columns out, row order kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.calls.call import ROTATIONS
from kernelcast.calls.cells import missing, numbers_in
from kernelcast.calls.table import BadRows, Rows, as_columns, grouped
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.machine.limits import Turns
from kernelcast.predict import DEFAULT, Conditions, Predictions, check_gpu, predict_calls, predict_kinds, too_large_text

OUTPUT = (
    "predicted_us", "low_us", "high_us", "ceiling_us", "bound_us", "bound_by", "support",
    "evidence_calls", "evidence_error", "answered_as",
)  # fmt: skip
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
    standings: NDArray[Any] | None = None,
    launches: NDArray[Any] | None = None,
) -> tuple[dict[str, NDArray[Any]], BadRows]:
    """The output columns and what was wrong; bad rows have NaN and None. ``standings`` (what each row rests
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
            output[name][rows] = values[at] * 1e6
        output["bound_by"][rows] = np.array(PIPELINES, dtype=object)[np.argmax(found.limits_s, axis=0)][at]
        output["support"][rows] = found.support[at]
        _add_evidence(output, rows, found.standing[at])
        if standings is not None:
            standings[rows] = found.standing[at]
        if launches is not None:
            launches[rows] = found.launches[at]
    return output, bad


def _add_evidence(output: dict[str, NDArray[Any]], rows: Rows, standings: NDArray[Any]) -> None:
    """What the rows rest on; a group has few different standings."""
    for standing in dict.fromkeys(standings.tolist()):
        own = rows[standings == standing]
        entry = standing.entry
        output["answered_as"][own] = standing.text
        output["evidence_calls"][own] = entry.calls if entry else 0
        output["evidence_error"][own] = np.nan if entry is None or entry.error is None else entry.error


def answered(
    columns: Mapping[str, NDArray[Any]], chip: Gpu | None, conditions: Conditions, bad: BadRows, details: bool = False
) -> Iterator[tuple[Rows, Rows, Predictions]]:
    """Good rows in groups, their places in the group's predictions, and these. What is wrong goes to ``bad``."""
    turns = turns_of(columns, conditions)
    for kernel, place, rows, calls in grouped(columns, chip, bad):
        own = turns.part(rows)
        try:
            if details:
                parts = list(predict_kinds(kernel, calls, place, conditions, own))
            else:
                parts = [(np.arange(calls.count), predict_calls(kernel, calls, place, conditions, turns=own))]
        except KernelcastError as error:  # the whole group asks for what the GPU lacks
            bad.add(rows, str(error))
            continue
        for members, found in parts:
            at, large = rows[members], found.too_large(place)
            for row, footprint in zip(at[large], found.footprint_bytes[large], strict=True):
                bad.add([row], too_large_text(kernel.op, float(footprint), place))
            yield at[~large], np.flatnonzero(~large), found


def turns_of(columns: Mapping[str, NDArray[Any]], conditions: Conditions = DEFAULT) -> Turns:
    """Columns of their own may say what the conditions say for all; an empty cell leaves it to them."""

    def told(name: str) -> NDArray[np.float64] | float:
        if name not in columns:
            return float(getattr(conditions, name))
        values = numbers_in(columns[name], missing(columns[name]), flag=False)
        return np.where(values >= 1, values, getattr(conditions, name))

    return Turns(*map(told, ROTATIONS))
