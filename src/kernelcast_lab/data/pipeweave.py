"""PipeWeave (github zksainx/pipeweave, Apache-2.0): fp8 GEMM, the first GEMM of a Triton MoE layer, collectives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast_lab.data.checkout import Part, columns, parts, relation
from kernelcast_lab.data.mapping import OpMap, TableMap

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SOURCE = "pipeweave"
LOOKS_FOR = "dataset/gemm_fp8_train.csv, dataset/collective/GPU/all_reduce.csv"


def _moe_gemm(blocks: bool) -> OpMap:
    """One grouped GEMM, tokens by the experts' [hidden, n]. Read once a kernel family of this name exists."""
    sizes = {"tokens": "M", "experts": "E", "topk": "topk", "k": "H", "n": "2 * N"}  # w13: gate and up
    tile = {
        "block_m": "BLOCK_SIZE_M",
        "block_n": "BLOCK_SIZE_N",
        "block_k": "BLOCK_SIZE_K",
        "group_m": "GROUP_SIZE_M",
        "warps": "num_warps",
        "stages": "num_stages",
    }
    return OpMap("moe_gemm", {**sizes, **tile} if blocks else sizes, "'bf16'")


def tables() -> dict[str, TableMap]:
    # Blocks of 128 by 128 scales (DeepGEMM), as SGLang calls it on Hopper.
    fp8 = OpMap("gemm", {"m": "M", "n": "N", "k": "K"}, "'fp8_block'")
    collectives = tuple(
        OpMap(op, {"bytes": "size_bytes", "world": "world"}, "'fp16'", f"op = '{op}'")
        for op in ("all_reduce", "send_recv")
    )
    bf16 = OpMap("gemm", {"m": "M", "n": "N", "k": "K"}, "'bf16'")
    return {
        "gemm": TableMap(SOURCE, (bf16,), stack="'torch'", kernel_source="'cublas'", split="split"),
        "gemm_fp8": TableMap(SOURCE, (fp8,), stack="NULL", kernel_source="'deepgemm'", split="split"),
        "moe": TableMap(SOURCE, (_moe_gemm(blocks=False),), stack="'sglang'", kernel_source="'fused_moe_w13'"),
        "moe_dse": TableMap(SOURCE, (_moe_gemm(blocks=True),), stack="'sglang'", kernel_source="'fused_moe_w13'"),
        "collectives": TableMap(
            SOURCE,
            collectives,
            stack="'nccl'",
            kernel_source="'nccl'",
            latency_us="latency_us_median",
            drops=(("between_nodes", "devices_per_node < world"),),
        ),
    }


def find(path: Path) -> list[Part]:
    """The tables of a checkout; none when it is not one."""
    found: list[tuple[str, Path, dict[str, str]]] = []
    for table in ("gemm", "gemm_fp8"):
        for split in ("train", "test"):
            file = path / "dataset" / f"{table}_{split}.csv"
            if file.is_file():
                found.append((table, file, {"split": split}))
    for file in sorted(path.glob("dataset/collective/*/*.csv")):
        found.append(("collectives", file, {"gpu": file.parent.name, "op": file.stem}))
    for file in sorted(path.glob("pipetuning_test/moe_dse/moe_dse_*.csv")):
        chip = file.stem.removeprefix("moe_dse_").rsplit("_", 1)[0]
        found.append(("moe_dse", file, {"gpu": chip}))
    return parts(found)


def rows(connection: DuckDBPyConnection, part: Part) -> str:
    """The part under the names that ``tables`` maps; avg_duration is in microseconds, collectives are in ms."""
    if part.table == "collectives":
        present = columns(connection)
        times = [op for op in ("all_reduce", "send_recv") if f"time_stats.{op}.median" in present]
        cells = ", ".join(f'r."time_stats.{op}.median"' for op in times) or "NULL"
        own = {"size_bytes": "r.size", "world": "r.num_workers", "latency_us_median": f"coalesce({cells}, NULL) * 1000"}
        return relation(connection, part, own, needed=("size", "num_workers", "devices_per_node"))
    own = {"latency_us": "r.avg_duration"}
    if part.table == "moe_dse":
        return relation(connection, part, own, needed=("M", "E", "topk", "H", "N", "avg_duration"))
    return relation(connection, part, {**own, "gpu": "r.hardware"}, needed=("M", "N", "K", "avg_duration", "hardware"))
