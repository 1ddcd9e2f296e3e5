"""AIConfigurator's repository: systems/data/GPU/family/framework/version/TABLE_perf.parquet (once: GPU/framework/
version/TABLE_perf.txt). Of each table the newest version that measured in full is the one to use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast_lab.data.checkout import Part, counts, parts, relation

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
_TABLES = {
    "context_attention": "attention_context",
    "generation_attention": "attention_generation",
    "encoder_attention": "attention_encoder",
    "context_mla": "mla_context",
    "generation_mla": "mla_generation",
    "wideep_context_mla": "mla_context",
    "wideep_generation_mla": "mla_generation",
    "nccl": "comm",
    "custom_allreduce": "comm",
    "trtllm_alltoall": "comm",
    "computescale": "quantize",
    "scale_matrix": "quantize",
    "gdn": "linear_attention",
}


def find(path: Path) -> list[Part]:
    """The tables of a checkout; none when it is not one."""
    for place in _PLACES:
        root = path / place
        files = sorted({file for pattern in _PATTERNS for file in root.glob(pattern)}) if root.is_dir() else []
        if files:
            return parts(_labelled(root, file) for file in files)
    return []


def _labelled(root: Path, file: Path) -> tuple[str, Path, Mapping[str, str]]:
    chip, *_, framework, version, name = file.relative_to(root).parts
    stem = name.rsplit("_perf.", 1)[0]
    labels = {"gpu": chip, "framework": framework, "version": version, "table": f"{stem}_perf"}
    return _TABLES.get(stem, stem), file, labels


def rows(connection: DuckDBPyConnection, part: Part) -> str:
    """The part with times in microseconds and ``origin``: base, older, or newer_partial."""
    found = counts(connection)
    origins = _origins(part, {path: found.get(str(path), 0) for path, _ in part.files})
    marked = Part(part.table, tuple((path, {**labels, "origin": origins[path]}) for path, labels in part.files))
    return relation(connection, marked, {"latency_us": "r.latency * 1000"}, needed=("latency",))


def _origins(part: Part, sizes: Mapping[Path, int]) -> dict[Path, str]:
    """By GPU, framework and table: the newest full version is the base."""
    groups: dict[tuple[str, ...], list[tuple[tuple[tuple[int, int], ...], Path]]] = {}
    for path, labels in part.files:
        key = (labels["gpu"], labels["framework"], labels["table"])
        groups.setdefault(key, []).append((version_key(labels["version"]), path))
    origins: dict[Path, str] = {}
    for versions in groups.values():
        most = max(sizes[path] for _, path in versions)
        base = max(age for age, path in versions if sizes[path] >= _FULL * most)
        for age, path in versions:
            origins[path] = "base" if age == base else "older" if age < base else "newer_partial"
    return origins


def version_key(version: str) -> tuple[tuple[int, int], ...]:
    """0.5.9 < 0.5.10, 1.3.0rc15 < 1.3.0 < 1.3.0.post1."""
    words = {"rc": -1, "dev": -2, "a": -4, "b": -3, "post": 2}
    tokens = re.findall(r"\d+|[a-z]+", version.lower())
    return (*((1, int(t)) if t.isdigit() else (words.get(t, 0), 0) for t in tokens), (0, 0))
