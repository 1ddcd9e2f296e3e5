"""Protocols of the sources' own: the splits that their authors, or the questions of users, call for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kernelcast.measured.folds import TEST_FOLD, shape_fold
from kernelcast_lab.evaluate.splits import Columns, Mask, Split


@dataclass(frozen=True)
class Protocol:
    """Rows of one family, how to split them, and how the test rows are named in the table."""

    name: str
    family: str
    rows: Callable[[Columns], Mask]
    splits: Callable[[Columns], Iterator[Split]]
    groups: Callable[[Columns], Mapping[str, Mask]]


def _own_split(columns: Columns) -> Iterator[Split]:
    kind = columns["split"].astype(str)
    yield Split("own split", "train -> test", kind == "train", kind == "test")


def _new_shapes(columns: Columns) -> Iterator[Split]:
    test = shape_fold(columns) == TEST_FOLD
    yield Split("shapes", "new shapes", ~test, test)


def _one_gpu_out(columns: Columns) -> Iterator[Split]:
    place = columns["gpu"].astype(str)
    for name in np.unique(place):
        yield Split("gpu", str(name), place != name, place == name)


def _one_fabric_out(columns: Columns) -> Iterator[Split]:
    """A GPU and its link out together: every campaign on one GPU."""
    place = columns["gpu"].astype(str)
    for name in ("a100_sxm", "h100_sxm", "l40s"):
        if (place == name).any():
            yield Split("fabric", name, place != name, place == name)


def _neusight_groups(columns: Columns) -> Mapping[str, Mask]:
    op = columns["op"].astype(str)
    names = {"bmm": "BMM", "gemm": "linear", "softmax": "softmax", "layernorm": "layer norm"}
    found = {label: op == name for name, label in names.items() if (op == name).any()}
    rest = ~np.isin(op, [*names, "conv2d"])
    return {**found, **({"element-wise": rest} if rest.any() else {})}


def _fp8_groups(columns: Columns) -> Mapping[str, Mask]:
    unseen = np.isin(columns["gpu"].astype(str), ("h100_sxm", "h200_sxm"))
    return {"overall": np.ones(len(unseen), dtype=bool), "unseen H100, H200": unseen, "seen H20, H800": ~unseen}


def _all(name: str) -> Callable[[Columns], Mapping[str, Mask]]:
    return lambda columns: {name: np.ones(len(columns["op"]), dtype=bool)}


def _by_op(columns: Columns) -> Mapping[str, Mask]:
    op = columns["op"].astype(str)
    return {str(name): op == name for name in np.unique(op)}


def _of(source: str) -> Callable[[Columns], Mask]:
    return lambda columns: np.asarray(columns["source"] == source, dtype=bool)


def _nvidia(columns: Columns) -> Mask:
    amd = np.array([str(g).startswith("mi") for g in columns["gpu"]])
    return np.asarray((columns["source"] == "neusight") & ~amd, dtype=bool)


PROTOCOLS = (
    Protocol("PipeWeave fp8 GEMM", "gemm", _of("pipeweave"), _own_split, _fp8_groups),
    Protocol("NeuSight fp32 ops", "gemm", _nvidia, _own_split, _neusight_groups),
    Protocol("NeuSight fp32 ops", "memory", _nvidia, _own_split, _neusight_groups),
    Protocol("PipeWeave MoE w13, one GPU out", "moe_gemm", _of("pipeweave"), _one_gpu_out, _all("w13")),
    Protocol("Vidur layers, new token counts", "memory", _of("vidur"), _new_shapes, _by_op),
    Protocol("collectives, new sizes", "collective", lambda c: np.ones(len(c["op"]), dtype=bool), _new_shapes, _by_op),
    Protocol(
        "collectives, one fabric out", "collective", _of("aiconfigurator"), _one_fabric_out, _all("all collectives")
    ),
)
