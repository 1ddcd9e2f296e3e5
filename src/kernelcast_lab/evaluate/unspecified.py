"""What it costs to leave parameters unspecified: held-out shapes, forecast with all parameters and with fewer.

Up to ``CONFIGURATION_ROWS`` calls of each measured configuration are forecast. ``error`` and ``ratio`` weight
configurations equally; ``by_calls`` weights each by how many of its calls the tables have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.data.measurements import filled
from kernelcast_lab.fit.families import EAGER

Columns = Mapping[str, NDArray[Any]]
CONFIGURATION_ROWS = 40
LEFT_OUT = (("backend",), ("page_size",), ("backend", "page_size"), ("stack",))
FAMILIES = ("attention", "mla", "moe", "gemm")
_NOT_INPUTS = ("latency_us", "source", "kernel_source", "split")
_CONFIGURATION = ("op", "gpu", "stack", "backend", "dtype", "kv_dtype")
_LEAST_ERROR = 0.02  # below it a ratio of errors says little


def gpu_out(columns: Columns, family: str, gpu_id: str, rows: int) -> list[dict[str, Any]]:
    """The same on a GPU that a fit on so many rows did not see."""
    from kernelcast_lab.evaluate.run import Evaluation, Fitted
    from kernelcast_lab.fit.fit import fit_rows

    members = np.asarray(columns["gpu"] == gpu_id)
    if not members.any():
        raise KernelcastError(f"no measured call of {family} on {gpu_id}")
    seen = np.flatnonzero(~members)
    settings = Evaluation(rows=rows).settings_for(family, len(seen))
    conditions = Conditions(predictor=Fitted(fit_rows(columns, family, seen, settings)))
    return left_out({name: column[members] for name, column in columns.items()}, family, conditions)


def left_out(columns: Columns, family: str, conditions: Conditions = DEFAULT) -> list[dict[str, Any]]:
    """A line for each set of parameters that is left out: errors without them, in percent, over those with them."""
    rows, weights = _rows(columns)
    if not len(rows):
        return []
    test = {name: column[rows] for name, column in columns.items()}
    configurations = _codes(test, [name for name in _CONFIGURATION if name in test])
    whole = _forecast(test, (), conditions)
    lines = [_line(family, (), whole, whole, test, configurations, weights)]
    for parameters in LEFT_OUT:
        known = [parameter for parameter in parameters if parameter in test and filled(test[parameter])]
        if len(known) == len(parameters):
            lines.append(
                _line(family, parameters, whole, _forecast(test, parameters, conditions), test, configurations, weights)
            )
    return lines


def _rows(columns: Columns) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Held-out rows of every configuration, and how many calls each stands for; events around an op are no kernels."""
    rows = np.flatnonzero((shape_fold(columns) == TEST_FOLD) & (columns["stack"] != EAGER))
    rows = np.random.default_rng(0).permutation(rows)
    part = {name: column[rows] for name, column in columns.items()}
    code = _codes(part, [name for name in _CONFIGURATION if name in part])
    order = np.argsort(code, kind="stable")
    position = np.arange(len(order)) - np.searchsorted(code[order], code[order])
    taken = order[position < CONFIGURATION_ROWS]
    stands_for = np.bincount(code)[code[taken]] / np.bincount(code[taken])[code[taken]]
    sorting = np.argsort(rows[taken])
    return rows[taken][sorting], stands_for[sorting]


def _codes(columns: Columns, names: Sequence[str]) -> NDArray[np.intp]:
    paged = np.nan_to_num(columns["page_size"]) > 0 if "page_size" in columns else np.zeros(len(columns["op"]))
    joined = [
        " ".join(map(str, parameters)) for parameters in zip(paged, *(columns[name] for name in names), strict=True)
    ]
    return np.unique(joined, return_inverse=True)[1]


def _forecast(test: Columns, parameters: Sequence[str], conditions: Conditions) -> Columns:
    calls = {name: column for name, column in test.items() if name not in (*parameters, *_NOT_INPUTS)}
    forecast, bad = predict_columns(calls, None, conditions)
    if bad.messages:
        raise KernelcastError(bad.text())
    return forecast


def _line(
    family: str, parameters: Sequence[str], whole: Columns, result: Columns, test: Columns,
    configurations: NDArray[np.intp], weights: NDArray[np.float64],
) -> dict[str, Any]:  # fmt: skip
    truth = test["latency_us"]
    before, after = (np.abs(each["predicted_us"] / truth - 1) for each in (whole, result))
    sums = [np.bincount(configurations, errors) / np.bincount(configurations) for errors in (before, after)]
    ratios = sums[1] / np.maximum(sums[0], _LEAST_ERROR)
    inside = (result["low_us"] <= truth) & (truth <= result["high_us"])
    return {
        "family": family,
        "left_out": " ".join(parameters) or "nothing",
        "calls": len(truth),
        "kinds": len(ratios),
        "error": 100 * float(after.mean()),
        "ratio": float(after.mean() / before.mean()),
        "by_calls": float(np.average(after, weights=weights) / np.average(before, weights=weights)),
        "kinds_over_2": int((ratios > 2).sum()),
        "inside": 100 * float(inside.mean()),
    }
