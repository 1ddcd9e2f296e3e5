"""Swept Triton configs of MoE layers and GEMMs: what ``collect --family moe-config`` measured, packed into one file.

A sweep is one shape and one kernel (``plain``, ``swift``; see measure/fused_moe.py) with the times of both grouped
GEMMs for each config. Times are kept to 0.05%. ``phase``: ``main`` shapes were swept over the whole space and are only
ever tested on; ``train`` shapes, of other models, have a random sample of configs; ``dense`` are single GEMMs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast_lab.data.folds import AT_LEAST

CONFIG_FIELDS = ("block_m", "block_n", "block_k", "group_m", "warps", "stages")
_GRAIN = 1 / 1024  # of log2 of a microsecond: 0.07%
_SHAPE = ("phase", "kernel", "name", "tokens", "experts", "topk", "hidden", "inter", "dense", "routings")
_FINAL = ("first_s", "second_s", "total_s", "low_s", "high_s")

Floats = NDArray[np.float64]
Configs = NDArray[np.int64]  # (configs, 6) in the order of CONFIG_FIELDS


@dataclass(frozen=True)
class Timed:
    """Configs and their times in seconds. ``low`` and ``high``: the quartiles of the rounds, where there were many."""

    configs: Configs
    total_s: Floats
    low_s: Floats
    high_s: Floats

    def of(self, config: Sequence[int]) -> float:
        """NaN where this config was not timed."""
        hit = np.flatnonzero((self.configs == np.asarray(config)).all(axis=1))
        return float(self.total_s[hit[0]]) if len(hit) else float("nan")


@dataclass(frozen=True)
class Sweep:
    """One kernel on one shape. ``active`` experts and ``blocks`` (by block_m) are means of the routings drawn."""

    phase: str
    kernel: str
    name: str
    tokens: int
    experts: int
    topk: int
    hidden: int
    inter: int
    dense: bool
    routings: int
    active: float
    blocks: dict[int, float]
    configs: Configs
    w13_s: Floats
    w2_s: Floats
    finals: Timed | None  # the best 20 and the engines' defaults again, 15 rounds in turn
    layers: Timed | None  # whole layers in a CUDA graph

    @property
    def key(self) -> str:
        return f"{self.name}@{self.tokens}"

    @property
    def total_s(self) -> Floats:
        return self.w13_s + self.w2_s


def pack_sweeps(records: Iterable[dict[str, Any]], path: Path, about: dict[str, Any]) -> None:
    """The collector's records (shape and finals) as one compact file."""
    records = list(records)
    finals = {r["shape"]: r for r in records if r["kind"] == "finals"}
    arrays: dict[str, Any] = {"config": [], "times": [], "finals": [], "layers": []}
    heads = []
    for shape in (r for r in records if r["kind"] == "shape"):
        rows = sorted(shape["rows"])
        arrays["config"].append(np.array([r[:6] for r in rows], dtype=np.int64))
        arrays["times"].append(np.array([r[6:8] for r in rows]))
        again = finals.get(shape["shape"]) if shape["phase"] == "main" else None
        chosen = [r for r in again["rows"] if r["kernel"] == shape["kernel"]] if again else []
        layers = [r[1:] for r in again["layers"] if r[0] == shape["kernel"]] if again else []
        arrays["finals"] += [[*r["config"], *(r[name] for name in _FINAL)] for r in chosen]
        arrays["layers"] += layers
        blocks = {str(bm): float(np.mean(b)) for bm, b in shape["blocks"].items()}
        active = float(np.mean(shape["active"])) if shape["active"] else 1.0
        counts = {"rows": len(rows), "finals": len(chosen), "layers": len(layers)}
        heads.append({name: shape[name] for name in _SHAPE} | {"active": active, "blocks": blocks} | counts)
    np.savez_compressed(
        path,
        head=np.frombuffer(json.dumps({"about": about, "shapes": heads}).encode(), dtype=np.uint8),
        config=np.concatenate(arrays["config"]).astype(np.uint16).T,
        times=_coded(np.concatenate(arrays["times"])).T,
        finals=np.array(arrays["finals"], dtype=np.float32),
        layers=np.array(arrays["layers"], dtype=np.float32),
    )


def read_sweeps(path: Path) -> list[Sweep]:
    """What ``pack_sweeps`` wrote."""
    if not path.is_file():
        raise KernelcastError(f"no swept configs at {path}")
    with np.load(path) as packed:
        head = json.loads(packed["head"].tobytes())
        config = packed["config"].T.astype(np.int64)
        times = np.exp2(packed["times"].T.astype(np.float64) * _GRAIN) * 1e-6
        finals, layers = packed["finals"].astype(np.float64), packed["layers"].astype(np.float64)
    results, at = [], {"rows": 0, "finals": 0, "layers": 0}
    for shape in head["shapes"]:
        slices = {name: slice(start, start + shape.pop(name)) for name, start in at.items()}
        at = {name: part.stop for name, part in slices.items()}
        seconds = times[slices["rows"]] * (1.0, 0.0 if shape["dense"] else 1.0)
        again, whole = finals[slices["finals"]], layers[slices["layers"]]
        shape["blocks"] = {int(bm): b for bm, b in shape["blocks"].items()}
        results.append(
            Sweep(
                **shape,
                configs=config[slices["rows"]],
                w13_s=seconds[:, 0],
                w2_s=seconds[:, 1],
                finals=Timed(again[:, :6].astype(np.int64), *again[:, 8:11].T) if len(again) else None,
                layers=Timed(whole[:, :6].astype(np.int64), *whole[:, 6:9].T) if len(whole) else None,
            )
        )
    return results


def about_sweeps(path: Path) -> dict[str, Any]:
    """Where a file of sweeps comes from."""
    with np.load(path) as packed:
        result: dict[str, Any] = json.loads(packed["head"].tobytes())["about"]
    return result


def _coded(seconds: Floats) -> NDArray[np.uint16]:
    """log2 of microseconds in steps of ``_GRAIN``; a time of 0 (no second GEMM) is 0."""
    return np.rint(np.log2(np.maximum(seconds * 1e6, 1.0)) / _GRAIN).astype(np.uint16)


# ---- Sweeps as calls of ``moe_gemm`` in the canonical columns that fits and predictions take.


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
    names = {"op": "moe_gemm", "dtype": "bf16", "stack": None, "gpu": "h200_sxm", "source": "kernelcast"}
    numbers = {"tokens": sweep.tokens, "experts": sweep.experts, "topk": sweep.topk, "k": k, "n": n}
    result: Columns = {name: np.full(count, value, dtype=object) for name, value in names.items()}
    result |= {name: np.full(count, float(value)) for name, value in numbers.items()}
    result |= {name: sweep.configs[:, at].astype(np.float64) for at, name in enumerate(CONFIG_FIELDS)}
    return result | {"second": np.full(count, np.nan if second is None else second), "latency_us": seconds * 1e6}


def training_rows(root: Path) -> list[Columns]:
    """Rows of the sweeps in a folder that a fit may see: the plain kernel on shapes that are not for testing."""
    files = sorted(root.glob(SWEEPS))
    return [rows_of(s for s in read_sweeps(file) if s.phase == "train" and s.kernel == "plain") for file in files]


def models_tested(columns: Mapping[str, NDArray[Any]], root: Path) -> NDArray[np.bool_]:
    """Rows of the models whose layers the sweeps in a folder are tested on, on any GPU and with any config."""
    sizes = ("experts", "topk", "k", "n")
    have = np.stack([columns[name] for name in sizes], axis=1)
    result = np.zeros(len(have), dtype=bool)
    for file in sorted(root.glob(SWEEPS)):
        for s in {(s.experts, s.topk, s.hidden, s.inter) for s in read_sweeps(file) if s.phase == "main"}:
            experts, topk, hidden, inter = s
            for k, n in ((hidden, 2 * inter), (inter, hidden)):
                result |= (have == (experts, topk, k, n)).all(axis=1)
    return result


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
    for gpu_id in sorted({str(name) for name in columns["gpu"][given]}):
        here = np.flatnonzero(columns["gpu"][given] == gpu_id)
        tried = np.unique(space[here], axis=0)
        _, of_shape = np.unique(shapes[here], axis=0, return_inverse=True)
        for shape in range(of_shape.max() + 1):
            listed = here[of_shape == shape]
            others = tried[~(tried[:, None] == space[listed][None]).all(axis=2).any(axis=1)]
            picked = others[draw.permutation(len(others))[:a_shape]]
            rows += [given[listed[0]]] * len(picked)
            configs.append(picked)
            limits += [WITHIN * columns["latency_us"][given[listed]].min()] * len(picked)
    slower = {name: column[rows] for name, column in columns.items()}
    slower |= {name: np.concatenate(configs)[:, at] for at, name in enumerate(CONFIG_FIELDS)}
    return slower | {"latency_us": np.array(limits), AT_LEAST: np.ones(len(rows))}
