"""Vidur (github microsoft/vidur, MIT): fp16 layers of models by tokens and tensor parallelism, and collectives.

Times come from CUPTI in whole microseconds: the small ones are coarse. Layers run as Sarathi-Serve has them: linear
layers, additions, embeddings, LayerNorm and GELU of PyTorch, the other kernels those of vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast.files import text
from kernelcast_lab.data.checkout import Part, collectives, medians, parts, relation
from kernelcast_lab.data.mapping import OpMap, TableMap

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SOURCE = "vidur"
LOOKS_FOR = "data/profiling/compute/GPU/ORG/MODEL/mlp.csv, data/profiling/network/FABRIC/all_reduce.csv"
_DTYPE = "'fp16'"
_HEAD = "(n_embd / n_head)"
_TORCH, _VLLM = "'torch'", "'vllm'"
_PHI = "model = 'microsoft/phi-2'"  # the one model with LayerNorm, GELU and parallel blocks


def _gemm(layer: str, n: str, k: str) -> OpMap:
    return OpMap("gemm", {"m": "num_tokens", "n": n, "k": k}, _DTYPE, f"op = '{layer}'", _TORCH)


def _rows(op: str, where: str, cols: str, stack: str) -> OpMap:
    return OpMap(op, {"rows": "num_tokens", "cols": cols}, _DTYPE, where, stack)


def _layers() -> tuple[OpMap, ...]:
    up = "n_expanded_embd * (CASE WHEN use_gated_mlp THEN 2 ELSE 1 END) / tp"
    norms = "op IN ('input_layernorm', 'post_attention_layernorm')"
    rope = {"tokens": "num_tokens", "q_heads": "n_head / tp", "kv_heads": "n_kv_head / tp", "head_dim": _HEAD}
    embedding = {"tokens": "num_tokens", "hidden": "n_embd", "vocab": "vocab_size"}
    return (
        _gemm("attn_pre_proj", f"(n_head + 2 * n_kv_head) * {_HEAD} / tp", "n_embd"),
        _gemm("attn_post_proj", "n_embd", "n_embd / tp"),
        _gemm("mlp_up_proj", up, "n_embd"),
        _gemm("mlp_down_proj", "n_embd", "n_expanded_embd / tp"),
        _rows("rmsnorm", f"{norms} AND NOT ({_PHI})", "n_embd", _VLLM),
        _rows("layernorm", f"{norms} AND {_PHI}", "n_embd", _TORCH),
        _rows("silu_mul", "op = 'mlp_act' AND use_gated_mlp", "n_expanded_embd / tp", _VLLM),
        _rows("gelu", "op = 'mlp_act' AND NOT use_gated_mlp", "n_expanded_embd / tp", _TORCH),
        _rows("add", "op = 'add'", "n_embd", _TORCH),
        OpMap("rope", rope, _DTYPE, "op = 'attn_rope'", _VLLM),
        OpMap("embedding", embedding, _DTYPE, "op = 'emb'", _TORCH),
    )


def _network() -> TableMap:
    # ``size`` is in bytes: read as elements, an A100's all-reduce would beat NVLink (397 of 300 GB/s).
    moved = {"bytes": "size", "world": "world"}
    ops = tuple(OpMap(op, moved, _DTYPE, f"op = '{op}'") for op in ("all_reduce", "send_recv"))
    gpu_name = (
        "CASE fabric WHEN 'a100_pairwise_nvlink' THEN 'a100_pcie' WHEN 'h100_pairwise_nvlink' THEN 'h100_nvl'"
        " ELSE split_part(fabric, '_', 1) END"
    )
    drops = (
        ("between_nodes", "devices_per_node < world"),
        # send_recv of the two pairwise fabrics is the same file.
        ("copied", "fabric = 'h100_pairwise_nvlink' AND op = 'send_recv'"),
        # Pairs of linked GPUs: more than two also cross PCIe. The A40 pair runs at 4 GB/s.
        ("unclear_fabric", "fabric LIKE '%pairwise%' AND (world > 2 OR fabric LIKE 'a40%')"),
    )
    return TableMap(SOURCE, ops, gpu=gpu_name, stack="'nccl'", kernel_source="'nccl ' || fabric", drops=drops)


def tables() -> dict[str, TableMap]:
    drops = (
        ("not_one_kernel", "op = 'emb' AND tp > 1"),  # a mask around the lookup
        ("not_one_kernel", f"op = 'add' AND {_PHI}"),  # three tensors, two kernels
    )
    layers = TableMap(SOURCE, _layers(), kernel_source="op", drops=drops)
    return {"layers": layers, "network": _network()}


def find(path: Path) -> list[Part]:
    """The tables of a checkout; none when it is not one."""
    root = next((path / p for p in ("data/profiling", "profiling", ".") if (path / p / "compute").is_dir()), path)
    results: list[tuple[str, Path, dict[str, str]]] = []
    for file in sorted(root.glob("compute/*/*/*/mlp.csv")):
        gpu_name, organisation, model, _ = file.relative_to(root / "compute").parts
        results.append(("layers", file, {"gpu": gpu_name, "model": f"{organisation}/{model}"}))
    for op in ("all_reduce", "send_recv"):
        for file in sorted(root.glob(f"network/*/{op}.csv")):
            results.append(("network", file, {"fabric": file.parent.name, "op": op}))
    return parts(results)


def rows(connection: DuckDBPyConnection, part: Part) -> str:
    """The part under the names that ``tables`` maps: a row a layer instead of a column; ms to microseconds."""
    if part.table == "network":
        return collectives(connection, part, "size", "latency_us")
    needed = ("num_tokens", "num_tensor_parallel_workers", "n_embd", "n_head", "n_kv_head", "n_expanded_embd")
    layers = []
    for op in medians(connection):
        cells = {
            "tp": "r.num_tensor_parallel_workers",
            "op": text(op),
            "latency_us": f'r."time_stats.{op}.median" * 1000',
        }
        layers.append(relation(connection, part, cells, needed=needed))
    return " UNION ALL BY NAME ".join(layers) or relation(connection, part, {}, needed=(*needed, "time_stats"))
