"""AIConfigurator's files: each rule counted, names and units turned into ours, versions in order.

All files are made here; every number in them is invented.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from measured_files import imported, no_bad_row, rows_of, write_parquet

from kernelcast_lab import data as lab
from kernelcast_lab.data.aiconfigurator import version_key

AIC = "aic-core/src/aiconfigurator_core/systems/data"


@pytest.fixture
def aic(tmp_path: Path) -> Path:
    """A checkout with one GPU of the catalogue, one unknown, two versions, and rows for each rule."""
    root = tmp_path / "aiconfigurator"
    gemm: dict[str, list[Any]] = {
        "framework": ["VLLM"] * 7,
        "version": ["0.9.0"] * 7,
        "device": ["NVIDIA H100 80GB HBM3"] * 7,
        "op_name": ["gemm"] * 7,
        "kernel_source": ["vllm_default"] * 7,
        "gemm_dtype": ["bfloat16", "bfloat16", "fp8", "fp8_static", "fp8_block", "int8_wo", "bfloat16"],
        "m": [128, 128, 64, 64, 64, 64, 8192],
        "n": [1024, 1024, 512, 512, 512, 512, 8192],
        "k": [2048, 2048, 512, 512, 512, 512, 8192],
        "latency": [0.010, 0.030, 0.012, 0.011, 0.060, 0.010, 0.001],
    }
    write_parquet(root / AIC / "h100_sxm/gemm/vllm/0.10.0/gemm_perf.parquet", gemm)
    write_parquet(root / AIC / "h100_sxm/gemm/vllm/0.9.0/gemm_perf.parquet", gemm)
    write_parquet(root / AIC / "warp9/gemm/vllm/0.10.0/gemm_perf.parquet", {k: v[:2] for k, v in gemm.items()})
    attention: dict[str, list[Any]] = {
        "kernel_source": ["vllm_flash_attn", "triton"],
        "batch_size": [2, 4],
        "isl": [1, 1],
        "num_heads": [8, 8],
        "num_key_value_heads": [0, 2],
        "head_dim": [128, 64],
        "attn_dtype": ["bfloat16", "bfloat16"],
        "kv_cache_dtype": ["bfloat16", "fp8"],
        "step": [1023, 7],
        "latency": [0.02, 0.02],
    }
    write_parquet(root / AIC / "h100_sxm/attention/vllm/0.10.0/generation_attention_perf.parquet", attention)
    context = {**attention, "isl": [512, 300], "step": [0, 0], "window_size": [0, 128], "latency": [1.0, 1.0]}
    write_parquet(root / AIC / "a100_sxm/attention/vllm/0.10.0/context_attention_perf.parquet", context)
    comm: dict[str, list[Any]] = {
        "op_name": ["all_gather", "alltoall", "all_reduce"],
        "kernel_source": ["NCCL"] * 3,
        "nccl_dtype": ["half", "half", "int8"],
        "num_gpus": [4, 8, 2],
        "message_size": [1000, 4096, 512],
        "latency": [0.02, 0.03, 0.04],
    }
    write_parquet(root / AIC / "h100_sxm/comm/nccl/2.29.0/nccl_perf.parquet", comm)
    custom: dict[str, list[Any]] = {
        "op_name": ["all_reduce"] * 2,
        "kernel_source": ["vLLM_custom_graph", "vLLM_custom_eager"],
        "allreduce_dtype": ["bfloat16"] * 2,
        "num_gpus": [2, 2],
        "message_size": [256, 256],
        "latency": [0.01, 0.05],
    }
    write_parquet(root / AIC / "h100_sxm/comm/vllm/0.10.0/custom_allreduce_perf.parquet", custom)
    moe: dict[str, list[Any]] = {
        "kernel_source": ["moe_torch_flow_nongated", "moe_torch_flow", "moe_torch_flow", "moe_torch_flow", "triton"],
        "moe_dtype": ["bfloat16", "fp8", "w4a16_mxfp4", "bfloat16", "bfloat16"],
        "num_tokens": [16] * 5,
        "hidden_size": [2048, 2048, 2048, 2048, 4096],
        "inter_size": [1024, 1024, 1024, 1024, 2688],
        "topk": [2, 2, 2, 2, 22],
        "num_experts": [8, 8, 8, 8, 512],
        "moe_tp_size": [1, 2, 1, 1, 1],
        "moe_ep_size": [1, 4, 1, 1, 1],
        "distribution": ["balanced", "power_law_1.2", "balanced", "uniform", "power_law_1.01"],
        "latency": [1.0, 1.0, 1.0, 1.0, 9.0],
    }
    write_parquet(root / AIC / "h100_sxm/moe/trtllm/1.3.0rc9/moe_perf.parquet", moe)
    gdn: dict[str, list[Any]] = {
        "phase": ["context", "generation", "context", "context"],
        "kernel_source": ["chunk_gated_delta_rule_flashinfer", "fused_recurrent_gated_delta_rule_packed_decode",
                          "causal_conv1d_fn", "another"],
        "batch_size": [2, 8, 2, 2],
        "seq_len": [1024, 1, 1024, 1024],
        "d_conv": [4] * 4,
        "num_k_heads": [16] * 4,
        "head_k_dim": [128] * 4,
        "num_v_heads": [32] * 4,
        "head_v_dim": [128] * 4,
        "latency": [0.1, 0.01, 0.03, 1.0],
    }  # fmt: skip
    write_parquet(root / AIC / "h100_sxm/linear_attention/vllm/0.24.0/gdn_perf.parquet", gdn)
    write_parquet(root / AIC / "h100_sxm/linear_attention/trtllm/1.3.0/gdn_perf.parquet", gdn)
    return root


def test_aiconfigurator_gemm_rules_are_counted(aic: Path, tmp_path: Path) -> None:
    tables = imported("aiconfigurator", aic, tmp_path / "out")
    assert tables["gemm"]["dropped"] == {
        "unknown_gpu": 2,
        "older_version": 7,  # 0.9.0 is older than 0.10.0
        "eager": 1,
        "unknown_dtype": 1,
        "duplicate": 1,
        "faster_than_physics": 1,  # 8192^3 in 1 us
    }
    found = lab.read(tmp_path / "out", "aiconfigurator/gemm")
    no_bad_row(found)
    rows = {(r["dtype"], r["kernel_source"]): r for r in rows_of(found)}
    assert len(found) == tables["gemm"]["rows"] == len(rows) == 3
    bf16 = rows["bf16", "vllm_default"]
    assert bf16["latency_us"] == pytest.approx(20.0)  # ms to us, the median of 10 and 30
    assert bf16["gpu"] == "h100_sxm" and bf16["stack"] == "vllm" and bf16["version"] == "0.10.0"
    assert bf16["campaign"] == "aiconfigurator/h100_sxm/vllm/0.10.0" and bf16["rotation"] == 6
    assert ("fp8", "vllm_default (static scale)") in rows


def test_aiconfigurator_attention_lengths_and_backends(aic: Path, tmp_path: Path) -> None:
    imported("aiconfigurator", aic, tmp_path / "out")
    decode = rows_of(lab.read(tmp_path / "out", "aiconfigurator/attention_generation"))
    by_backend = {row["backend"]: row for row in decode}
    first = by_backend["fa3"]  # a name without a version, on Hopper
    assert (first["q_len"], first["kv_len"], first["kv_heads"]) == (1, 1024, 8)  # step + 1; 0 heads: as many
    assert first["page_size"] == 64 and first["causal"] == 1 and first["rotation"] == 1
    assert by_backend["triton"]["kv_dtype"] == "fp8" and by_backend["triton"]["dtype"] == "bf16"
    prefill = {row["backend"]: row for row in rows_of(lab.read(tmp_path / "out", "aiconfigurator/attention_context"))}
    assert (prefill["fa2"]["q_len"], prefill["fa2"]["kv_len"], prefill["fa2"]["page_size"]) == (512, 512, 0)
    assert prefill["triton"]["window"] == 128


def test_aiconfigurator_collectives_count_elements(aic: Path, tmp_path: Path) -> None:
    tables = imported("aiconfigurator", aic, tmp_path / "out")
    assert tables["comm"]["dropped"] == {"eager": 1}
    found = lab.read(tmp_path / "out", "aiconfigurator/comm")
    no_bad_row(found)
    rows = {(r["op"], r["stack"]): r for r in rows_of(found)}
    assert rows["all_gather", "nccl"]["bytes"] == 2000 and rows["all_gather", "nccl"]["dtype"] == "fp16"
    assert rows["all_to_all", "nccl"]["bytes"] == 8192
    assert rows["all_reduce", "nccl"]["bytes"] == 512 and rows["all_reduce", "nccl"]["dtype"] == "int8"
    assert rows["all_reduce", "vllm"]["bytes"] == 512 and rows["all_reduce", "vllm"]["dtype"] == "bf16"


def test_aiconfigurator_linear_attention(aic: Path, tmp_path: Path) -> None:
    tables = imported("aiconfigurator", aic, tmp_path / "out")
    assert tables["linear_attention"]["dropped"] == {"no_kernel_family": 2}
    found = lab.read(tmp_path / "out", "aiconfigurator/linear_attention")
    no_bad_row(found)
    rows = {(r["op"], r["q_len"], r["stack"]): r for r in rows_of(found)}
    prefill, decode = rows["gated_delta", 1024, "vllm"], rows["gated_delta", 1, "vllm"]
    assert (prefill["kernel"], prefill["backend"], prefill["qk_norm"]) == ("chunked", "flashinfer", 0)
    assert (decode["kernel"], decode["batch"], decode["state_dtype"]) == ("recurrent", 8, "fp32")
    conv = rows["causal_conv1d", 1024, "vllm"]
    assert conv["channels"] == (2 * 16 + 32) * 128 and conv["width"] == 4 and conv["rotation"] == 1


def test_aiconfigurator_moe(aic: Path, tmp_path: Path) -> None:
    tables = imported("aiconfigurator", aic, tmp_path / "out")
    assert tables["moe"]["dropped"] == {"unknown_distribution": 1}
    rows = {(r["dtype"], r["experts"]): r for r in rows_of(lab.read(tmp_path / "out", "aiconfigurator/moe"))}
    assert rows["bf16", 8]["gated"] == 0 and rows["bf16", 8]["skew"] == 0
    assert rows["fp8", 8] == {**rows["fp8", 8], "gated": 1, "skew": 1.2, "tp": 2, "ep": 4, "tokens": 16, "inter": 1024}
    assert rows["bf16", 512]["gated"] == 0  # Nemotron-H has no gate, whatever the kernel is called
    assert rows["fp8", 8]["version"] == "1.3.0rc9"


def test_trtllm_gemm_fills_l2(tmp_path: Path) -> None:
    """As many sets of weights as fill L2 (50 MiB on an H100), at most five: 8192 x 4096 x 2 bytes is 64 MiB."""
    columns: dict[str, list[Any]] = {
        "kernel_source": ["torch_flow"] * 3,
        "gemm_dtype": ["bfloat16", "fp8", "bfloat16"],
        "m": [1] * 3,
        "n": [8192, 8192, 1024],
        "k": [4096, 4096, 1024],
        "latency": [1.0] * 3,
    }
    write_parquet(tmp_path / "systems/data/h100_sxm/gemm/trtllm/1.0.0/gemm_perf.parquet", columns)
    imported("aiconfigurator", tmp_path, tmp_path / "out")
    rows = {(r["dtype"], r["n"]): r["rotation"] for r in rows_of(lab.read(tmp_path / "out", "aiconfigurator/gemm"))}
    assert rows == {("bf16", 8192): 1, ("fp8", 8192): 2, ("bf16", 1024): 5}


def test_versions_in_order() -> None:
    ordered = ["0.5.6.post2", "0.5.9", "0.5.10", "1.0.0", "1.3.0rc9", "1.3.0rc15", "1.3.0", "1.3.0.post1", "1.3.1"]
    assert sorted(set(ordered), key=version_key) == ordered
