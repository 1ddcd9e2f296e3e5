"""Which measured tables each family is fitted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.files import text
from kernelcast.forecast.predictor import sustained_start_s
from kernelcast.hardware import gpu
from kernelcast.ops import REGISTRY
from kernelcast_lab.data import Measurements, merged, read_all
from kernelcast_lab.data.config_sweeps import models_tested, slower_rows, training_rows
from kernelcast_lab.data.folds import AT_LEAST
from kernelcast_lab.data.measurements import Columns
from kernelcast_lab.data.shared import root_path
from kernelcast_lab.fit.recipes import Data, recipe

Roots = Path | Sequence[Path] | None
_NOT_FITTED = ("campaign", "version")  # names of runs


def family_rows(roots: Roots, family: str, data: Data | None = None, sample: float | None = None) -> Measurements:
    """Every measured row of a family that its recipe does not leave out, from every table of one folder or several."""
    data = data or recipe(family).data
    ops = sorted(op for op, cls in REGISTRY.items() if cls.family == family)
    result = merged(read_all(root, ops=ops, where=_wanted(data), sample=sample) for root in folders_of(roots))
    if not len(result) or not data.sources:
        return result
    return result.select(np.isin(result.columns["source"].astype(str), data.sources))


def _wanted(data: Data) -> str | None:
    """In SQL over canonical columns, the rows whose kernels are not left out."""
    return " AND ".join(f"kernel_source NOT LIKE {text(f'%{part}%')}" for part in data.leave_out) or None


def family_columns(roots: Roots, family: str, sample: float | None = None, data: Data | None = None) -> Columns:
    """The same without what no fit looks at."""
    measured = family_rows(roots, family, data, sample).columns
    return {name: column for name, column in measured.items() if name not in _NOT_FITTED}


def folders_of(roots: Roots) -> list[Path]:
    return [root_path(root) for root in (roots if isinstance(roots, Sequence) else [roots])]


def may_be_fitted(columns: Mapping[str, NDArray[Any]], data: Data) -> NDArray[np.bool_]:
    """Rows outside of the splits that sources test on."""
    tested = np.zeros(len(columns["op"]), dtype=bool)
    for source, split in (pair.split() for pair in data.not_fitted):
        tested |= np.asarray((columns["source"] == source) & (columns["split"] == split))
    still = [str(name).startswith(data.fitted_still) for name in columns["gpu"]]
    return ~tested | np.array(still, dtype=bool)


def fitted_columns(roots: Roots, family: str, sample: float | None = None, data: Data | None = None) -> Columns:
    """What weights that ship are fitted on: no test split of NeuSight, and long event-timed calls as kernels too."""
    data = data or recipe(family).data
    measured = family_columns(roots, family, sample, data)
    keep = may_be_fitted(measured, data)
    kept = {name: column[keep] for name, column in measured.items()}
    return with_kernels(kept) if data.event_timed else kept


def fitting_columns(roots: Roots, family: str, data: Data | None = None) -> Columns:
    """What a family is fitted on: its measured rows, and the swept Triton configs."""
    data = data or recipe(family).data
    columns = fitted_columns(roots, family, data=data)
    folders = folders_of(roots)
    if not data.sweeps or not len(columns["op"]):
        return columns
    tested = np.any([models_tested(columns, folder) for folder in folders], axis=0)
    columns = {name: column[~tested] for name, column in columns.items()}
    best_only = np.isin(columns["source"].astype(str), data.slower_of)
    swept = [rows for folder in folders for rows in training_rows(folder)]
    parts = [columns, *swept]
    if best_only.any():
        parts.append(slower_rows({name: column[best_only] for name, column in columns.items()}, data.slower_configs))
    flags = [part.pop(AT_LEAST, np.zeros(len(part["op"]))) for part in parts]
    return {**merged(Measurements(part, family) for part in parts).columns, AT_LEAST: np.concatenate(flags)}


# ---- Long calls timed by events around one op are kernels like those of a traced step: the same rows under that
# stack. Events around one op hold the host's launch too: latency = kernel + host. The shortest row of an op on a GPU
# is next to nothing but that. In a call of several times as long it matters little, and what is left when it is taken
# off is the kernel. Without these rows a network knows fp32 kernels of old GPUs only with launches inside.


EAGER = "torch_eager"  # times with launch overhead: never to be taken for those of an unknown stack
KERNELS = "torch"  # the stack whose times are those of kernels alone
_LONG = 4.0  # times the shortest row: 1% of noise in the host's time is then 0.3% of the call


def with_kernels(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The rows, and behind them every long event-timed one as its kernel."""
    eager = np.asarray(columns["stack"] == EAGER)
    keep = np.zeros(len(eager), dtype=bool)
    kernel_us = np.array(columns["latency_us"], dtype=np.float64)
    gpu_ids, ops = columns["gpu"].astype(str), columns["op"].astype(str)
    for gpu_id in np.unique(gpu_ids[eager]) if eager.any() else ():
        for op in np.unique(ops[eager & (gpu_ids == gpu_id)]):
            rows = np.flatnonzero(eager & (gpu_ids == gpu_id) & (ops == op))
            shortest_us = float(kernel_us[rows].min())
            host_us = max(0.0, shortest_us - sustained_start_s(gpu(str(gpu_id))) * 1e6)
            long = rows[kernel_us[rows] > _LONG * shortest_us]
            keep[long] = True
            kernel_us[long] -= host_us
    again = {name: column[keep] for name, column in columns.items()}
    again["latency_us"] = kernel_us[keep]
    again["stack"] = np.full(int(keep.sum()), KERNELS, dtype=object)
    return {name: np.concatenate([column, again[name]]) for name, column in columns.items()}
