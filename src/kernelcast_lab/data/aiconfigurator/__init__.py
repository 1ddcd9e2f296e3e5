"""AIConfigurator (github ai-dynamo/aiconfigurator, Apache-2.0): kernels as serving engines call them.

One folder a GPU, family, framework and version under systems/data (once: GPU/framework/version/TABLE_perf.txt), one
Parquet file a table, times in ms. Of each table the newest version that measured in full is the one to use. How it
measures: CUDA-graph replay, 3 warm-ups, 6 replays averaged, no L2 flush. Only GEMM rotates its weights; attention,
MLA and MoE find again in L2 what fits there (L40S decode times beat DRAM by up to 4.6 times).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast_lab.data.aiconfigurator import kernels, modules, wide_ep
from kernelcast_lab.data.aiconfigurator.common import SOURCE
from kernelcast_lab.data.checkout import Part, counts, parts, relation
from kernelcast_lab.data.mapping import TableMap

__all__ = ["LOOKS_FOR", "SOURCE", "find", "rows", "tables", "version_key"]

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

LOOKS_FOR = "systems/data/GPU/FAMILY/FRAMEWORK/VERSION/TABLE_perf.parquet"
_PLACES = (
    "aic-core/src/aiconfigurator_core/systems/data",
    "src/aiconfigurator/systems/data",
    "systems/data",
    "data",
    ".",
)
_PATTERNS = ("*/*/*/*/*_perf.parquet", "*/*/*/*_perf.parquet", "*/*/*/*_perf.txt")
_FULL = 0.5  # a version with this share of the most rows measured in full
# Names of files that are not those of tables.
_TABLES = dict.fromkeys(("nccl", "custom_allreduce", "trtllm_alltoall"), "comm")
_TABLES |= {"computescale": "quantize", "scale_matrix": "quantize"}
_TABLES |= dict.fromkeys(("gdn", "kda", "mamba2"), "linear_attention")
_TABLES |= {f"{phase}_attention": f"attention_{phase}" for phase in ("context", "generation", "encoder")}
_TABLES |= {f"{wide}{phase}_mla": f"mla_{phase}" for wide in ("", "wideep_") for phase in ("context", "generation")}


def tables() -> dict[str, TableMap]:
    """Tables by name. Those without ops have no kernel family."""
    return {**kernels.tables(), **kernels.linear_tables(), **modules.tables(), **wide_ep.tables()}


def find(path: Path) -> list[Part]:
    """The tables of a checkout; none when it is not one."""
    for subfolder in _PLACES:
        root = path / subfolder
        files = sorted({file for pattern in _PATTERNS for file in root.glob(pattern)}) if root.is_dir() else []
        if files:
            return parts(_labelled(root, file) for file in files)
    return []


def _labelled(root: Path, file: Path) -> tuple[str, Path, Mapping[str, str]]:
    gpu_name, *_, framework, version, name = file.relative_to(root).parts
    stem = name.rsplit("_perf.", 1)[0]
    labels = {"gpu": gpu_name, "framework": framework, "version": version, "table": f"{stem}_perf"}
    return _TABLES.get(stem, stem), file, labels


def rows(connection: DuckDBPyConnection, part: Part) -> str:
    """The part with times in microseconds and ``origin``: base, older, or newer_partial."""
    result = counts(connection)
    origins = _origins(part, {path: result.get(str(path), 0) for path, _ in part.files})
    marked = Part(part.table, tuple((path, {**labels, "origin": origins[path]}) for path, labels in part.files))
    return relation(connection, marked, {"latency_us": "r.latency * 1000"}, needed=("latency",))


def _origins(part: Part, sizes: Mapping[Path, int]) -> dict[Path, str]:
    """By GPU, framework and table: the newest full version is the base."""
    groups: dict[tuple[str, ...], list[tuple[tuple[tuple[int, int], ...], Path]]] = defaultdict(list)
    for path, labels in part.files:
        groups[labels["gpu"], labels["framework"], labels["table"]].append((version_key(labels["version"]), path))
    origins: dict[Path, str] = {}
    for versions in groups.values():
        most = max(sizes[path] for _, path in versions)
        base = max(age for age, path in versions if sizes[path] >= _FULL * most)
        for age, path in versions:
            origins[path] = "base" if age == base else "older" if age < base else "newer_partial"
    return origins


def version_key(version: str) -> tuple[tuple[int, int], ...]:
    """0.5.9 < 0.5.10, 1.3.0rc15 < 1.3.0 < 1.3.0.post1."""
    names = {"rc": -1, "dev": -2, "a": -4, "b": -3, "post": 2}
    tokens = re.findall(r"\d+|[a-z]+", version.lower())
    return (*((1, int(t)) if t.isdigit() else (names.get(t, 0), 0) for t in tokens), (0, 0))
