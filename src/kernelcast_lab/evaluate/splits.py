"""What is fitted and what is tested: the test rows of a split, and their siblings, are held out of the fit.

A protocol says which rows of a family are split, how, and under which names the test rows are scored: those of the main
table, and the splits that the sources' authors, or the questions of users, call for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import gpu
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.fit.fit import TWINS

Columns = Mapping[str, NDArray[Any]]
Mask = NDArray[np.bool_]
Rows = Callable[[Columns], Mask]

MAIN = "main table"
GENERATIONS = {  # the GPUs that are scored; every GPU of their compute capabilities is left out with them
    "A100": ("a100_sxm",),
    "L40S": ("l40s",),
    "Hopper": ("h100_sxm", "h200_sxm"),
    "Blackwell": ("b200_sxm", "b300_sxm", "gb200", "gb300"),
    "RTX Blackwell": ("rtx_pro_6000_server",),
}


@dataclass(frozen=True)
class Split:
    """One fit and one test. ``label``: what was left out."""

    name: str
    label: str
    train: Mask
    test: Mask


Splitter = Callable[[Columns], Iterator[Split]]


@dataclass(frozen=True)
class Protocol:
    """Rows of one family, how to split them, and how the test rows are named in the table."""

    name: str
    family: str
    rows: Rows
    splits: Splitter
    groups: Callable[[Columns], Mapping[str, Mask]]


# ---- splits ----


def shapes(columns: Columns) -> Iterator[Split]:
    """A tenth of the shapes out, on every GPU and stack: the tenth that shipped weights never saw."""
    test = shape_fold(columns) == TEST_FOLD
    yield Split("shapes", "new shapes", ~test, test)


def gpu_out(columns: Columns, name: str = "h200_sxm") -> Iterator[Split]:
    """Every campaign on one GPU (and its twin) out."""
    out = next((pair for pair in TWINS if name in pair), (name,))
    test = np.isin(columns["gpu"].astype(str), out)
    yield Split("gpu", "+".join(out), ~test, test)


def generation(columns: Columns) -> Iterator[Split]:
    """Every GPU of a generation out, one generation at a time."""
    yield from (generation_out(columns, label) for label in GENERATIONS)


def generation_out(columns: Columns, label: str) -> Split:
    """Every GPU of one generation out; the test keeps kernel sources that other generations have too."""
    train = ~among(columns["gpu"], of_generation(label, set(columns["gpu"])))
    shared = among(columns["kernel_source"], set(columns["kernel_source"][train]))
    return Split("generation", label, train, among(columns["gpu"], GENERATIONS[label]) & shared)


def of_generation(label: str, gpus: Collection[str]) -> list[str]:
    """Of these GPUs those with a compute capability of this generation."""
    capabilities = {gpu(name).compute_capability for name in GENERATIONS[label]}
    return [name for name in gpus if gpu(name).compute_capability in capabilities]


def among(values: NDArray[Any], wanted: Collection[Any]) -> Mask:
    """Where a column has one of these. Not by ``np.isin``, which would sort millions of kernels' long names."""
    known = set(wanted)
    return np.fromiter((value in known for value in values), dtype=bool, count=len(values))


def _each_out(name: str, column: str, only: Sequence[str] | None = None) -> Splitter:
    """Every row with one value of a column out, a value at a time; default: each of its values."""

    def splits(columns: Columns) -> Iterator[Split]:
        values = columns[column].astype(str)
        for value in np.unique(values) if only is None else only:
            test = values == value
            if not test.all():
                yield Split(name, str(value), ~test, test)

    return splits


def _source_split(columns: Columns) -> Iterator[Split]:
    group = columns["split"].astype(str)
    yield Split("own split", "train -> test", group == "train", group == "test")


SPLITS: Mapping[str, Splitter] = {
    "shapes": shapes,
    "gpu": gpu_out,
    "generation": generation,
    "stack": _each_out("stack", "stack", ("vllm", "sglang", "trtllm")),
}

# ---- rows, and the names they are scored under ----


def _source(name: str, **allowed_values: tuple[str, ...]) -> Rows:
    def rows(columns: Columns) -> Mask:
        keep = columns["source"] == name
        for column, allowed in allowed_values.items():
            keep = keep & np.isin(columns[column].astype(str), allowed)
        return np.asarray(keep, dtype=bool)

    return rows


def _attention(decode: bool) -> Rows:
    return lambda columns: (columns["page_size"] > 0) == decode


def _ops(*names: str) -> Rows:
    return _source("aiconfigurator", op=names)


def _layer(op: str, decode: bool) -> Rows:
    return lambda columns: (columns["op"] == op) & _attention(decode)(columns)


def _experts(wide: bool) -> Rows:
    """Fused layers as one rank of a few runs them, or what wide expert parallelism runs behind its exchange."""
    sent, measured = ("deepep_contiguous", "deepep_masked", "wideep_cutlass"), _source("aiconfigurator")
    return lambda columns: measured(columns) & (among(columns["backend"], sent) == wide)


def _every_row(columns: Columns) -> Mask:
    return np.ones(len(columns["op"]), dtype=bool)


def _nvidia(columns: Columns) -> Mask:
    amd = np.array([str(g).startswith("mi") for g in columns["gpu"]])
    return np.asarray((columns["source"] == "neusight") & ~amd, dtype=bool)


def _neusight_groups(columns: Columns) -> Mapping[str, Mask]:
    op = columns["op"].astype(str)
    names = {"bmm": "BMM", "gemm": "linear", "softmax": "softmax", "layernorm": "layer norm"}
    return {label: op == name for name, label in names.items()} | {"element-wise": ~np.isin(op, [*names, "conv2d"])}


def _fp8_groups(columns: Columns) -> Mapping[str, Mask]:
    unseen = np.isin(columns["gpu"].astype(str), ("h100_sxm", "h200_sxm"))
    return {"overall": _every_row(columns), "unseen H100, H200": unseen, "seen H20, H800": ~unseen}


def _all(name: str) -> Callable[[Columns], Mapping[str, Mask]]:
    return lambda columns: {name: _every_row(columns)}


def _by_op(columns: Columns) -> Mapping[str, Mask]:
    op = columns["op"].astype(str)
    return {str(name): op == name for name in np.unique(op)}


# Of the main table: rows that are scored together, by family and name.
TASKS: Mapping[str, Mapping[str, Rows]] = {
    "gemm": {"GEMM bf16+fp8": _source("aiconfigurator", op=("gemm",), dtype=("bf16", "fp8"))},
    "attention": {"attention prefill": _attention(decode=False), "attention decode": _attention(decode=True)},
    "moe": {"fused MoE": _experts(wide=False)},
}
# Layers of frontier models: scored only where named, since reading and fitting them takes as long again.
FRONTIER: Mapping[str, Mapping[str, Rows]] = {
    "mla_layer": {"latent layer prefill": _attention(decode=False), "latent layer decode": _attention(decode=True)},
    "sparse_attention": {
        "DSA layer prefill": _layer("dsa_layer", decode=False),
        "DSA layer decode": _layer("dsa_layer", decode=True),
        "compressed layer prefill": _layer("compressed_layer", decode=False),
        "compressed layer decode": _layer("compressed_layer", decode=True),
        "block-sparse layer prefill": _layer("block_sparse_layer", decode=False),
        "block-sparse layer decode": _layer("block_sparse_layer", decode=True),
        "parts of sparse layers": _ops("mqa_logits", "index_topk", "sparse_mla"),
    },
    "linear_attention": {"linear attention": _source("aiconfigurator")},
    "deepep": {"DeepEP": _ops("deepep_dispatch", "deepep_combine"),
               "NVLink all-to-all": _ops("alltoall_prepare", "alltoall_dispatch", "alltoall_combine")},
    "moe": {"wide experts": _experts(wide=True)},
}  # fmt: skip
TASK_NAMES, FRONTIER_NAMES = (
    tuple(name for tasks in families.values() for name in tasks) for families in (TASKS, FRONTIER)
)
KNOWN_TASKS = (*TASK_NAMES, *FRONTIER_NAMES)


def main_tables(splits: Sequence[str], tasks: Sequence[str]) -> list[Protocol]:
    """One a family that has some of these tasks. Wide experts are fitted apart from fused MoE: of a sample of both they
    would be one row in a hundred."""
    families = [*TASKS.items(), *FRONTIER.items()]
    return [_main_table(family, known, splits, tasks) for family, known in families if set(known) & set(tasks)]


def _main_table(family: str, known: Mapping[str, Rows], splits: Sequence[str], tasks: Sequence[str]) -> Protocol:
    """All known tasks are fitted on, whichever of them are scored."""
    return Protocol(
        MAIN,
        family,
        rows=lambda columns: np.any([rows(columns) for rows in known.values()], axis=0),
        splits=lambda columns: (split for name in splits for split in SPLITS[name](columns)),
        groups=lambda columns: {name: rows(columns) for name, rows in known.items() if name in tasks},
    )


SOURCES = (
    Protocol("PipeWeave fp8 GEMM", "gemm", _source("pipeweave"), _source_split, _fp8_groups),
    Protocol("NeuSight fp32 ops", "gemm", _nvidia, _source_split, _neusight_groups),
    Protocol("NeuSight fp32 ops", "memory", _nvidia, _source_split, _neusight_groups),
    Protocol("PipeWeave MoE w13, one GPU out", "moe_gemm", _source("pipeweave"), _each_out("gpu", "gpu"), _all("w13")),
    Protocol("Vidur layers, new token counts", "memory", _source("vidur"), shapes, _by_op),
    Protocol("collectives, new sizes", "collective", _every_row, shapes, _by_op),
    Protocol(
        "collectives, one fabric out",  # a GPU and its link together: every campaign on one GPU
        "collective",
        _source("aiconfigurator"),
        _each_out("fabric", "gpu", ("a100_sxm", "h100_sxm", "l40s")),
        _all("all collectives"),
    ),
)
