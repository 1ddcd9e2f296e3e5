"""What is fitted and what is tested: a split never shows its test rows, nor their kin, to the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import unknown
from kernelcast.measured.folds import TEST_FOLD, shape_fold
from kernelcast_lab.fit.fit import TWINS

Columns = Mapping[str, NDArray[Any]]
Mask = NDArray[np.bool_]

GENERATIONS = {
    "A100": ("a100_sxm",),
    "L40S": ("l40s",),
    "H100+H200": ("h100_sxm", "h200_sxm"),
    "B200+B300+GB200": ("b200_sxm", "b300_sxm", "gb200"),
}


@dataclass(frozen=True)
class Task:
    """Rows that are scored together."""

    name: str
    family: str
    rows: Callable[[Columns], Mask]


def _source(name: str, **words: tuple[str, ...]) -> Callable[[Columns], Mask]:
    def rows(columns: Columns) -> Mask:
        keep = columns["source"] == name
        for column, allowed in words.items():
            keep = keep & np.isin(columns[column].astype(str), allowed)
        return np.asarray(keep, dtype=bool)

    return rows


def _attention(decode: bool) -> Callable[[Columns], Mask]:
    return lambda columns: (columns["page_size"] > 0) == decode


TASKS = (
    Task("GEMM bf16+fp8", "gemm", _source("aiconfigurator", op=("gemm",), dtype=("bf16", "fp8"))),
    Task("attention prefill", "attention", _attention(decode=False)),
    Task("attention decode", "attention", _attention(decode=True)),
    Task("fused MoE", "moe", _source("aiconfigurator")),
)


@dataclass(frozen=True)
class Split:
    """One fit and one test. ``label``: what was left out. ``note``: which rows the test keeps."""

    name: str
    label: str
    train: Mask
    test: Mask


def shapes(columns: Columns) -> Iterator[Split]:
    """A tenth of the shapes out, on every GPU and stack: the tenth that shipped weights never saw."""
    test = shape_fold(columns) == TEST_FOLD
    yield Split("shapes", "new shapes", ~test, test)


def gpu_out(columns: Columns, gpu: str = "h200_sxm") -> Iterator[Split]:
    """Every campaign on one GPU (and its twin) out."""
    out = next((pair for pair in TWINS if gpu in pair), (gpu,))
    test = np.isin(columns["gpu"].astype(str), out)
    yield Split("gpu", "+".join(out), ~test, test)


def generation(columns: Columns) -> Iterator[Split]:
    """Every GPU of one architecture out; the test keeps kernel sources that other generations have too."""
    place = columns["gpu"].astype(str)
    source = columns["kernel_source"].astype(str)
    for label, gpus in GENERATIONS.items():
        test = np.isin(place, gpus)
        if test.any():
            shared = np.isin(source, np.unique(source[~test]))
            yield Split("generation", label, ~test, test & shared)


def stack(columns: Columns) -> Iterator[Split]:
    """Every campaign of one framework out."""
    name = columns["stack"].astype(str)
    for out in ("vllm", "sglang", "trtllm"):
        test = name == out
        if test.any() and (~test).any():
            yield Split("stack", out, ~test, test)


SPLITS: Mapping[str, Callable[[Columns], Iterator[Split]]] = {
    "shapes": shapes,
    "gpu": gpu_out,
    "generation": generation,
    "stack": stack,
}


def splits(names: tuple[str, ...], columns: Columns) -> Iterator[Split]:
    for name in names:
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        yield from SPLITS[name](columns)
