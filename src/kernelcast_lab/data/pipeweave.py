"""PipeWeave (github zksainx/pipeweave, Apache-2.0): fp8 GEMM, the first GEMM of a Triton MoE layer, collectives."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast_lab.data.checkout import Part, collectives, parts, relation
from kernelcast_lab.data.mapping import OpMap, TableMap

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SOURCE = "pipeweave"
LOOKS_FOR = "dataset/gemm_fp8_train.csv, dataset/collective/GPU/all_reduce.csv"


def _moe_gemm(blocks: bool) -> OpMap:
    """One grouped GEMM, tokens by the experts' [hidden, n]. Read once a kernel family of this name exists."""
    sizes = {"tokens": "M", "experts": "E", "topk": "topk", "k": "H", "n": "2 * N"}  # w13: gate and up
    tile = {f"block_{side}": f"BLOCK_SIZE_{side.upper()}" for side in "mnk"}
    launch = {"group_m": "GROUP_SIZE_M", "warps": "num_warps", "stages": "num_stages"}
    return OpMap("moe_gemm", {**sizes, **tile, **launch} if blocks else sizes, "'bf16'")


def tables() -> dict[str, TableMap]:
    sizes = {"m": "M", "n": "N", "k": "K"}
    # Blocks of 128 by 128 scales (DeepGEMM), as SGLang calls it on Hopper.
    fp8, bf16 = OpMap("gemm", sizes, "'fp8_block'"), OpMap("gemm", sizes, "'bf16'")
    moved = {"bytes": "size_bytes", "world": "world"}
    return {
        "gemm": TableMap(SOURCE, (bf16,), stack="'torch'", kernel_source="'cublas'", split="split"),
        "gemm_fp8": TableMap(SOURCE, (fp8,), kernel_source="'deepgemm'", split="split"),
        "moe": TableMap(SOURCE, (_moe_gemm(blocks=False),), stack="'sglang'", kernel_source="'fused_moe_w13'"),
        "moe_dse": TableMap(SOURCE, (_moe_gemm(blocks=True),), stack="'sglang'", kernel_source="'fused_moe_w13'"),
        "collectives": TableMap(
            SOURCE,
            tuple(OpMap(op, moved, "'fp16'", f"op = '{op}'") for op in ("all_reduce", "send_recv")),
            stack="'nccl'",
            kernel_source="'nccl'",
            latency_us="latency_us_median",
            drops=(("between_nodes", "devices_per_node < world"),),
        ),
    }


def find(path: Path) -> list[Part]:
    """The tables of a checkout; none when it is not one."""
    results: list[tuple[str, Path, dict[str, str]]] = []
    for table, split in itertools.product(("gemm", "gemm_fp8"), ("train", "test")):
        file = path / "dataset" / f"{table}_{split}.csv"
        if file.is_file():
            results.append((table, file, {"split": split}))
    for file in sorted(path.glob("dataset/collective/*/*.csv")):
        results.append(("collectives", file, {"gpu": file.parent.name, "op": file.stem}))
    for file in sorted(path.glob("pipetuning_test/moe_dse/moe_dse_*.csv")):
        gpu_name = file.stem.removeprefix("moe_dse_").rsplit("_", 1)[0]
        results.append(("moe_dse", file, {"gpu": gpu_name}))
    return parts(results)


def rows(connection: DuckDBPyConnection, part: Part) -> str:
    """The part under the names that ``tables`` maps; avg_duration is in microseconds, collectives are in ms."""
    if part.table == "collectives":
        return collectives(connection, part, "size_bytes", "latency_us_median")
    cells = {"latency_us": "r.avg_duration"}
    if part.table == "moe_dse":
        return relation(connection, part, cells, needed=("M", "E", "topk", "H", "N", "avg_duration"))
    return relation(
        connection, part, {**cells, "gpu": "r.hardware"}, needed=("M", "N", "K", "avg_duration", "hardware")
    )
