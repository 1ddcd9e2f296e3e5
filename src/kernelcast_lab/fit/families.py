"""Which measured tables each family is fitted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.kernels import REGISTRY
from kernelcast.measured.folds import AT_LEAST
from kernelcast.measured.query import Columns
from kernelcast_lab.data import Measurements, merged, read_all
from kernelcast_lab.data.config_rows import models_tested, slower_rows, training_rows
from kernelcast_lab.data.shared import root_path
from kernelcast_lab.fit.event_timed import with_kernels

Roots = Path | Sequence[Path] | None
# A static scale leaves the quantisation of the input out, which a call cannot say: two times for one call.
_LEFT_OUT = "kernel_source NOT LIKE '%static scale%'"
_SLOWER_A_SHAPE = 48  # configs that a table of the best leaves out, for each of its shapes
_NOT_FITTED = ("campaign", "version", "q_lens", "kv_lens")  # names of runs; no table has ragged batches yet

FAMILIES = ("gemm", "attention", "attention_backward", "moe", "mla", "moe_gemm", "memory", "collective", "conv2d")
# NeuSight's test split is never fitted on: it is what the figures on its ops and its whole models are made on. Of AMD's
# matrix products there is no other split, so those are.
_TESTED = ("neusight", "test")
_AMD = "mi"


def family_rows(roots: Roots, family: str, sample: float | None = None) -> Measurements:
    """Every measured row of a family, from every table that has some, of one folder or several."""
    ops = sorted(op for op, cls in REGISTRY.items() if cls.family == family)
    return merged(read_all(root, ops=ops, where=_LEFT_OUT, sample=sample) for root in folders_of(roots))


def family_columns(roots: Roots, family: str, sample: float | None = None) -> Columns:
    """The same without what no fit looks at."""
    found = family_rows(roots, family, sample).columns
    return {name: column for name, column in found.items() if name not in _NOT_FITTED}


def folders_of(roots: Roots) -> list[Path]:
    return [root_path(root) for root in (roots if isinstance(roots, Sequence) else [roots])]


def may_be_fitted(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """Rows outside of NeuSight's test split."""
    tested = np.asarray((columns["source"] == _TESTED[0]) & (columns["split"] == _TESTED[1]))
    amd = np.array([str(name).startswith(_AMD) for name in columns["gpu"]], dtype=bool)
    return ~tested | amd


def fitted_columns(roots: Roots, family: str, sample: float | None = None) -> Columns:
    """What weights that ship are fitted on: no test split of NeuSight, and long event-timed calls as kernels too."""
    found = family_columns(roots, family, sample)
    keep = may_be_fitted(found)
    return with_kernels({name: column[keep] for name, column in found.items()})


def fitting_columns(roots: Roots, family: str) -> Columns:
    """What a family is fitted on: its measured rows, and of Triton configs what only sweeps tell."""
    columns = fitted_columns(roots, family)
    if family != "moe_gemm":
        return columns
    folders = folders_of(roots)
    tested = np.any([models_tested(columns, folder) for folder in folders], axis=0)
    columns = {name: column[~tested] for name, column in columns.items()}
    best_only = columns["source"] == "pipeweave"  # its table of swept configs lists those near the best
    slower = slower_rows({name: column[best_only] for name, column in columns.items()}, _SLOWER_A_SHAPE)
    flags = slower.pop(AT_LEAST)
    swept = [rows for folder in folders for rows in training_rows(folder)]
    found = merged(Measurements(rows, "moe_gemm") for rows in (columns, *swept, slower)).columns
    known = np.zeros(len(found["op"]) - len(flags))
    return {**found, AT_LEAST: np.concatenate([known, flags])}
