"""Sweeps as calls of ``moe_gemm`` in the canonical columns that fits and predictions take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.measured.folds import AT_LEAST
from kernelcast_lab.tuning.config_sweeps import CONFIG_FIELDS, Sweep, read_sweeps

Columns = dict[str, NDArray[Any]]
SWEEPS = "moe_configs_*.npz"  # files of sweeps in a folder
WITHIN = 1.01  # of the best: what the public table lists


def first_and_second(sweep: Sweep) -> tuple[Columns, Columns]:
    """The layer's two grouped GEMMs, one row a config."""
    first = _columns(sweep, n=2 * sweep.inter, k=sweep.hidden, second=None, seconds=sweep.w13_s)
    return first, _columns(sweep, n=sweep.hidden, k=sweep.inter, second=1.0, seconds=sweep.w2_s)


def rows_of(sweeps: Iterable[Sweep]) -> Columns:
    """All rows of MoE sweeps."""
    parts = [part for sweep in sweeps for part in first_and_second(sweep)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _columns(sweep: Sweep, *, n: int, k: int, second: float | None, seconds: NDArray[np.float64]) -> Columns:
    count = len(sweep.configs)
    words = {"op": "moe_gemm", "dtype": "bf16", "stack": None, "gpu": "h200_sxm", "source": "kernelcast"}
    numbers = {"tokens": sweep.tokens, "experts": sweep.experts, "topk": sweep.topk, "k": k, "n": n}
    found: Columns = {name: np.full(count, word, dtype=object) for name, word in words.items()}
    found |= {name: np.full(count, float(value)) for name, value in numbers.items()}
    found |= {name: sweep.configs[:, at].astype(np.float64) for at, name in enumerate(CONFIG_FIELDS)}
    return found | {"second": np.full(count, np.nan if second is None else second), "latency_us": seconds * 1e6}


def training_rows(root: Path) -> list[Columns]:
    """Rows of the sweeps in a folder that a fit may see: the plain kernel on shapes that are not for testing."""
    files = sorted(root.glob(SWEEPS))
    return [rows_of(s for s in read_sweeps(file) if s.phase == "train" and s.kernel == "plain") for file in files]


def models_tested(columns: Mapping[str, NDArray[Any]], root: Path) -> NDArray[np.bool_]:
    """Rows of the models whose layers the sweeps in a folder are tested on, on any GPU and with any config."""
    sizes = ("experts", "topk", "k", "n")
    have = np.stack([columns[name] for name in sizes], axis=1)
    found = np.zeros(len(have), dtype=bool)
    for file in sorted(root.glob(SWEEPS)):
        for s in {(s.experts, s.topk, s.hidden, s.inter) for s in read_sweeps(file) if s.phase == "main"}:
            experts, topk, hidden, inter = s
            for k, n in ((hidden, 2 * inter), (inter, hidden)):
                found |= (have == (experts, topk, k, n)).all(axis=1)
    return found


def slower_rows(columns: Mapping[str, NDArray[Any]], a_shape: int, seed: int = 0) -> Columns:
    """Configs that a public table leaves out, as calls that take at least as long as the worst it would list.

    A table of the configs within 1% of each shape's best says of the others only that they are slower. Those that
    it lists for another shape of the same GPU were in the space it searched: ``a_shape`` of them for each shape.
    """
    draw = np.random.default_rng(seed)
    given = np.flatnonzero(~np.isnan(columns["block_m"]))
    space = np.stack([columns[name][given] for name in CONFIG_FIELDS], axis=1)
    shapes = np.stack([columns[name][given] for name in ("tokens", "experts", "topk", "k", "n")], axis=1)
    rows, configs, limits = [], [], []
    for place in sorted({str(name) for name in columns["gpu"][given]}):
        here = np.flatnonzero(columns["gpu"][given] == place)
        tried = np.unique(space[here], axis=0)
        _, of_shape = np.unique(shapes[here], axis=0, return_inverse=True)
        for shape in range(of_shape.max() + 1):
            listed = here[of_shape == shape]
            others = tried[~(tried[:, None] == space[listed][None]).all(axis=2).any(axis=1)]
            picked = others[draw.permutation(len(others))[:a_shape]]
            rows += [given[listed[0]]] * len(picked)
            configs.append(picked)
            limits += [WITHIN * columns["latency_us"][given[listed]].min()] * len(picked)
    found = {name: column[rows] for name, column in columns.items()}
    found |= {name: np.concatenate(configs)[:, at] for at, name in enumerate(CONFIG_FIELDS)}
    return found | {"latency_us": np.array(limits), AT_LEAST: np.ones(len(rows))}
