"""Measured data: the schema follows the registry, units are right, every left-out row is counted, imports are whole.

All files are made here, in the layout of the public repositories; every number in them is invented.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import numpy as np
import pytest

from kernelcast.cli import app
from kernelcast.cli import data as cli_data
from kernelcast.errors import KernelcastError
from kernelcast.kernels import REGISTRY, Kernel, parameters_of
from kernelcast.kernels.base import size
from kernelcast.lab import data as lab
from kernelcast.lab.data.aiconfigurator_files import version_key
from kernelcast.lab.data.build import EVERYTHING
from kernelcast.lab.data.importing import IMPORTERS, import_checkout, import_tables, left_out_whole
from kernelcast.lab.data.rules import RULES, rule_of
from kernelcast.tables import predict_columns

AIC = "aic-core/src/aiconfigurator_core/systems/data"
SLOW_US = 1e6  # slower than any bound of the small calls here


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """A small Parquet file; numbers, words and None as Python has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(zip(*columns.values(), strict=True))
    marks = ", ".join("(" + ", ".join("?" * len(columns)) + ")" for _ in rows)
    names = ", ".join(f'"{name}"' for name in columns)
    with duckdb.connect() as connection:
        relation = f"SELECT * FROM (VALUES {marks}) AS t({names})"
        connection.execute(f"COPY ({relation}) TO '{path}' (FORMAT parquet)", [cell for row in rows for cell in row])


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")


def rows_of(found: lab.Measurements) -> list[dict[str, Any]]:
    """Rows as dictionaries of what is given."""
    names = list(found.columns)
    cells = zip(*(found.columns[n].tolist() for n in names), strict=True)
    return [{n: v for n, v in zip(names, row, strict=True) if v is not None and v == v} for row in cells]


def no_bad_row(found: lab.Measurements) -> None:
    _, bad = predict_columns(found.columns, None)
    assert not bad.found, bad.text()


# --- schema


def test_schema_is_the_registry() -> None:
    columns = lab.columns_of()
    for kernel in REGISTRY.values():
        assert set(parameters_of(kernel)) <= set(columns)
    assert columns["m"] == "BIGINT" and columns["skew"] == "DOUBLE" and columns["causal"] == "BOOLEAN"
    assert columns["q_lens"] == "VARCHAR" and columns["latency_us"] == "DOUBLE"
    assert set(lab.columns_of(["gemm"])) >= {"op", "m", "n", "k", "dtype", "stack", "gpu", "campaign", "rotation"}
    assert "topk" not in lab.columns_of(["gemm"])


def test_a_new_kernel_needs_no_edit() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Trial(Kernel):
        op: ClassVar[str] = "trial_op"
        sprockets: int = size("how many")

    try:
        assert lab.columns_of(["trial_op"])["sprockets"] == "BIGINT"
    finally:
        del REGISTRY["trial_op"]


def test_every_mapping_names_parameters_that_exist() -> None:
    for name, mapping in lab.kernel_tables().items():
        for op in mapping.ops:
            if op.op in REGISTRY:
                assert set(op.parameters) <= set(parameters_of(REGISTRY[op.op])), f"{name}: {op.op}"
        assert {rule for rule, _ in mapping.drops} <= set(RULES)


def test_the_prediction_path_does_not_import_the_lab() -> None:
    for path in (Path(lab.__file__).parents[2]).glob("**/*.py"):
        if {"lab", "cli"} & set(path.parts):
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("from kernelcast.lab", "import kernelcast.lab"))], path


# --- AIConfigurator


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
    write_parquet(root / AIC / "h100_sxm/linear_attention/sglang/0.5/kda_perf.parquet", {"phase": ["x", "y"]})
    return root


def imported(source: str, checkout: Path, target: Path) -> dict[str, dict[str, Any]]:
    summary = import_checkout(source, checkout, target)
    return {line["table"].split("/")[1]: line for line in summary["tables"]}


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
    assert tables["kda"] == {**tables["kda"], "rows": 0, "output": None, "dropped": {"no_kernel_family": 2}}
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
    assert tables["linear_attention"]["dropped"] == {"no_kernel_family": 1, "part_of_op": 4}
    found = lab.read(tmp_path / "out", "aiconfigurator/linear_attention")
    no_bad_row(found)
    rows = {(r["op"], r["q_len"]): r for r in rows_of(found)}
    prefill, decode = rows["gated_delta", 1024], rows["gated_delta", 1]
    assert (prefill["kernel"], prefill["backend"], prefill["qk_norm"]) == ("chunked", "flashinfer", 0)
    assert (decode["kernel"], decode["batch"], decode["state_dtype"]) == ("recurrent", 8, "fp32")
    conv = rows["causal_conv1d", 1024]
    assert conv["channels"] == (2 * 16 + 32) * 128 and conv["width"] == 4 and conv["rotation"] == 1


def test_aiconfigurator_moe(aic: Path, tmp_path: Path) -> None:
    tables = imported("aiconfigurator", aic, tmp_path / "out")
    assert tables["moe"]["dropped"] == {"unknown_distribution": 1, "unknown_dtype": 1}
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


# --- NeuSight


def test_neusight_import(tmp_path: Path) -> None:
    data = tmp_path / "NeuSight/scripts/asplos/data"
    common: dict[str, list[Any]] = {"Torch Version": ["p2.1.0"] * 2, "Kernel Name": ["volta_sgemm_64x64_nn"] * 2}
    linear: dict[str, list[Any]] = {
        "OPName": ["linear"] * 2,
        "Latency": [0.5, 0.7],
        "Device": ["Tesla T4"] * 2,
        **common,
    }
    shape = {"B": [1, 1], "M": [58, 60], "N": [13, 14], "K": [141, 150]}
    write_csv(data / "dataset/train/collect/linear/p2.1.0/Tesla T4.csv", {**linear, **shape})
    vector: dict[str, list[Any]] = {
        "OPName": ["mulu", "pow"],
        "Latency": [0.5, 0.7],
        "Device": ["Tesla T4", "Tesla T4"],
        **common,
    }
    write_csv(data / "dataset/test/vec.csv", {**vector, "B": [128, 8], "H": [64, 8]})
    tables = imported("neusight", tmp_path / "NeuSight", tmp_path / "out")
    assert tables["ops"]["dropped"] == {"no_kernel_family": 1}  # pow of two tensors
    found = lab.read(tmp_path / "out", "neusight/ops")
    no_bad_row(found)
    rows = rows_of(found)
    gemm = next(r for r in rows if r["op"] == "gemm" and r["m"] == 58)
    assert (gemm["n"], gemm["k"]) == (141, 13)  # N is the contraction
    assert gemm["latency_us"] == pytest.approx(500) and gemm["gpu"] == "t4" and gemm["dtype"] == "fp32"
    assert gemm["split"] == "train" and gemm["version"] == "2.1.0" and gemm["stack"] == "torch_eager"
    scale = next(r for r in rows if r["op"] == "scale")
    assert (scale["rows"], scale["cols"], scale["split"], scale["kernel_source"]) == (128, 64, "test", "mulu")


# --- PipeWeave


def pipeweave(root: Path) -> Path:
    gemm: dict[str, list[Any]] = {
        "M": [96, 384],
        "N": [512, 2048],
        "K": [256, 1536],
        "avg_duration": [11.5, 40.0],
        "hardware": ["NVIDIA H100", "NVIDIA H20"],
        "tc_bf16": [4096, 592],
    }
    write_csv(root / "dataset/gemm_fp8_test.csv", gemm)
    write_csv(root / "dataset/gemm_fp8_train.csv", {k: v[1:] for k, v in gemm.items()})
    for op in ("all_reduce", "send_recv"):
        columns: dict[str, list[Any]] = {
            f"time_stats.{op}.mean": [0.09, 0.2],
            f"time_stats.{op}.median": [0.08, 0.1],
            "rank": [0, 0],
            "num_workers": [2, 16],
            "size": [2048, 4096],
            "collective": [op, op],
            "devices_per_node": [2, 8],
        }
        write_csv(root / "dataset/collective/RTX PRO 6000 S" / f"{op}.csv", columns)
    return root


def test_pipeweave_import(tmp_path: Path) -> None:
    tables = imported("pipeweave", pipeweave(tmp_path / "pw"), tmp_path / "out")
    assert tables["collectives"]["dropped"] == {"between_nodes": 2}
    rows = rows_of(lab.read(tmp_path / "out", "pipeweave/gemm_fp8"))
    assert sorted((r["gpu"], r["split"], r["latency_us"]) for r in rows) == [
        ("h100_sxm", "test", 11.5),
        ("h20", "test", 40.0),
        ("h20", "train", 40.0),
    ]
    assert {r["dtype"] for r in rows} == {"fp8_block"}
    reduce = next(r for r in rows_of(lab.read(tmp_path / "out", "pipeweave/collectives")) if r["op"] == "all_reduce")
    assert reduce["bytes"] == 2048 and reduce["latency_us"] == pytest.approx(80)  # bytes as they are; the median
    assert reduce["gpu"] == "rtx_pro_6000_server" and reduce["world"] == 2


# --- Vidur


def test_vidur_import(tmp_path: Path) -> None:
    profiling = tmp_path / "vidur/data/profiling"
    layers = ("emb", "input_layernorm", "attn_pre_proj", "attn_rope", "mlp_up_proj", "mlp_act", "mlp_down_proj", "add")
    columns: dict[str, list[Any]] = {f"time_stats.{layer}.median": [0.5, 0.5] for layer in layers}
    columns |= {"n_head": [32, 32], "n_kv_head": [8, 8], "n_embd": [4096, 4096], "n_expanded_embd": [11008, 11008]}
    columns |= {"vocab_size": [32000, 32000], "use_gated_mlp": [True, True]}
    columns |= {"num_tokens": [16, 16], "num_tensor_parallel_workers": [1, 2]}
    write_csv(profiling / "compute/a40/org/model-7b/mlp.csv", columns)
    for fabric, op in (("a100_dgx", "all_reduce"), ("h100_pairwise_nvlink", "send_recv")):
        network: dict[str, list[Any]] = {
            f"time_stats.{op}.median": [0.05, 0.06],
            "num_workers": [2, 2],
            "size": [2048, 4096],
            "devices_per_node": [2, 1],
        }
        write_csv(profiling / "network" / fabric / f"{op}.csv", network)
    tables = imported("vidur", tmp_path / "vidur", tmp_path / "out")
    assert tables["layers"]["dropped"] == {"not_one_kernel": 1, "duplicate": 2}  # emb at tp 2; norm and add, any tp
    assert tables["network"]["dropped"] == {"between_nodes": 2, "copied": 1}
    found = lab.read(tmp_path / "out", "vidur/layers")
    no_bad_row(found)
    rows = {(r["op"], r["kernel_source"], r.get("n", r.get("q_heads"))): r for r in rows_of(found)}
    assert rows["gemm", "attn_pre_proj", 6144]["k"] == 4096  # (32 + 2 * 8) * 128
    assert rows["gemm", "mlp_up_proj", 11008]["latency_us"] == pytest.approx(500)  # gate and up, halved by tp 2
    assert rows["rope", "attn_rope", 16] == {**rows["rope", "attn_rope", 16], "kv_heads": 4, "head_dim": 128}
    assert rows["rmsnorm", "input_layernorm", None]["stack"] == "vllm"
    reduce = rows_of(lab.read(tmp_path / "out", "vidur/network"))[0]
    assert reduce["bytes"] == 2048 and reduce["gpu"] == "a100_sxm"  # the size is in bytes already


# --- importing


@pytest.mark.parametrize("source", sorted(IMPORTERS))
def test_a_wrong_folder_is_refused_with_what_was_looked_for(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(KernelcastError, match=r"empty is no checkout of .*: no .*(csv|parquet)"):
        import_checkout(source, tmp_path / "empty", tmp_path / "out")
    with pytest.raises(KernelcastError, match="no folder"):
        import_checkout(source, tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_half_written(tmp_path: Path) -> None:
    checkout = pipeweave(tmp_path / "pw")
    (checkout / "dataset/gemm_fp8_train.csv").write_text("M,N\n1,2\n")
    (checkout / "dataset/gemm_fp8_test.csv").unlink()
    with pytest.raises(KernelcastError, match="no column K, avg_duration, hardware"):
        import_checkout("pipeweave", checkout, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_import_is_replaced_only_when_asked(tmp_path: Path) -> None:
    checkout = pipeweave(tmp_path / "pw")
    import_checkout("pipeweave", checkout, tmp_path / "out")
    with pytest.raises(KernelcastError, match="exists already"):
        import_checkout("pipeweave", checkout, tmp_path / "out")
    import_checkout("pipeweave", checkout, tmp_path / "out", replace=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["pipeweave"]


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "systems/data/h100_sxm/gemm/vllm/1.0/gemm_perf.parquet"
    file.parent.mkdir(parents=True)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(KernelcastError, match="Git LFS pointer"):
        import_checkout("aiconfigurator", tmp_path, tmp_path / "out")


def test_unknown_source(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match=r"unknown source 'vidurr' \(did you mean vidur"):
        import_checkout("vidurr", tmp_path, tmp_path / "out")


# --- reading


@pytest.fixture
def cleaned(tmp_path: Path) -> Iterator[Path]:
    """A folder of cleaned tables: 2,000 GEMMs in the columns of PipeWeave's, one table that is not of kernels."""
    count = 2000
    columns: dict[str, list[Any]] = {
        "M": [1 + i for i in range(count)],
        "N": [512] * count,
        "K": [256] * count,
        "gpu": ["H20" if i % 2 else "H100" for i in range(count)],
        "split": ["train"] * count,
        "latency_us": [SLOW_US] * count,
    }
    columns["latency_us"][7], columns["latency_us"][8] = float("nan"), -1.0
    write_parquet(tmp_path / "tables/pipeweave/gemm_fp8.parquet", columns)
    write_parquet(tmp_path / "tables/pipeweave/e2e_real.parquet", {"gpu": ["H20", None], "total_s": [1.5, None]})
    write_parquet(tmp_path / "tables/raw/x.parquet", {"a": [1]})
    yield tmp_path / "tables"


def test_tables_and_plain_columns(cleaned: Path) -> None:
    assert lab.tables(cleaned) == ["pipeweave/e2e_real", "pipeweave/gemm_fp8"]
    plain = lab.read_table(cleaned, "pipeweave/e2e_real")
    assert plain["gpu"].tolist() == ["H20", None] and np.isnan(plain["total_s"][1])
    with pytest.raises(KernelcastError, match="read_table gives its columns"):
        lab.read(cleaned, "pipeweave/e2e_real")
    with pytest.raises(KernelcastError, match="unknown table 'pipeweave/gemm'"):
        lab.read(cleaned, "pipeweave/gemm")


def test_the_folder_can_come_from_the_environment(cleaned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELCAST_DATA", str(cleaned))
    assert len(lab.read_all(ops=["gemm"], gpus=["NVIDIA H20"])) == 999
    monkeypatch.delenv("KERNELCAST_DATA")
    with pytest.raises(KernelcastError, match="set KERNELCAST_DATA"):
        lab.tables()


def test_choosing_rows(cleaned: Path) -> None:
    everything = lab.read(cleaned, "pipeweave/gemm_fp8")
    assert len(everything) == 1998 and everything.dropped == {"bad_latency": 2}
    assert len(lab.read(cleaned, "pipeweave/gemm_fp8", where="m <= 5")) == 5
    assert len(lab.read(cleaned, "pipeweave/gemm_fp8", ops=["moe"])) == 0
    tenth = lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.1)
    assert 120 < len(tenth) < 280
    assert lab.data_hash(tenth.columns) == lab.data_hash(lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.1).columns)
    other = lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.1, seed=1)
    assert lab.data_hash(tenth.columns) != lab.data_hash(other.columns)
    assert 120 < len(lab.read(cleaned, "pipeweave/gemm_fp8", sample=200)) < 280
    with pytest.raises(KernelcastError, match="sample must be"):
        lab.read(cleaned, "pipeweave/gemm_fp8", sample=0)
    with pytest.raises(KernelcastError, match="sprockets"):
        lab.read(cleaned, "pipeweave/gemm_fp8", where="sprockets = 1")


def test_cleaned_tables_become_canonical_files(cleaned: Path, tmp_path: Path) -> None:
    summary = import_tables(cleaned, tmp_path / "out")
    assert [line["rows"] for line in summary["tables"]] == [1998]
    direct = lab.read(cleaned, "pipeweave/gemm_fp8", sample=0.2, gpus=["h20"])
    stored = lab.read(tmp_path / "out", "pipeweave/gemm_fp8", sample=0.2, gpus=["NVIDIA H20"])
    assert len(direct) and lab.data_hash(direct.columns) == lab.data_hash(stored.columns)
    assert stored.dropped == {"bad_latency": 2} and stored.source == "pipeweave"
    assert left_out_whole(tmp_path / "out") == []
    with duckdb.connect() as connection:
        file = tmp_path / "out/pipeweave/gemm_fp8.parquet"
        kinds = {row[0]: row[1] for row in connection.execute(f"DESCRIBE SELECT * FROM '{file}'").fetchall()}
    assert kinds == lab.columns_of()


def test_merging_fills_what_a_table_lacks() -> None:
    def one(op: str, **cells: float) -> lab.Measurements:
        columns: dict[str, Any] = {"op": np.array([op], dtype=object), "gpu": np.array(["h20"], dtype=object)}
        columns |= {name: np.array([value]) for name, value in cells.items()}
        return lab.Measurements(columns, op, {op: {"duplicate": 1}})

    both = lab.merged([one("gemm", m=1.0), one("add", rows=2.0)])
    assert both.columns["op"].tolist() == ["gemm", "add"] and both.dropped == {"duplicate": 2}
    assert np.isnan(both.columns["rows"][0]) and np.isnan(both.columns["m"][1])
    assert both.source == "gemm, add" and both.ops == ("add", "gemm") and both.gpus == ("h20",)


def test_data_hash_names_the_rows() -> None:
    columns = {"op": np.array(["a", "b"], dtype=object), "m": np.array([1.0, 2.0])}
    same = lab.data_hash(columns)
    assert same == lab.data_hash({name: column[::-1] for name, column in reversed(columns.items())})
    assert same == lab.data_hash({**columns, "m": np.array([1, 2]), "new": np.array([np.nan, np.nan])})
    assert same != lab.data_hash({**columns, "m": np.array([2.0, 1.0])})
    assert same != lab.data_hash({name: column[:1] for name, column in columns.items()})
    assert same != lab.data_hash({"op": columns["op"], "k": columns["m"]})


def test_messages_of_the_table_reader_have_rules() -> None:
    calls: dict[str, list[Any]] = {
        "op": ["gemm", "gemm", "gemm", "moe", "gemm", "gemm"],
        "gpu": ["a100_sxm"] * 6,
        "dtype": ["fp8", "bf16", "bf16", "bf16", "bf16", "fp9"],
        "m": [1, 0, 2**30, None, None, 1],
        "n": [1, 1, 2**30, None, 1, 1],
        "k": [1, 1, 2**10, None, 1, 1],
        **{name: [None, None, None, 8, None, None] for name in ("tokens", "hidden", "inter", "experts", "topk")},
        "ep": [None, None, None, 3, None, None],
    }
    columns = {name: np.array(cells, dtype=object) for name, cells in calls.items()}
    _, bad = predict_columns(columns, None)
    assert {row: rule_of(message) for row, message in bad.found.items()} == {
        0: "not_on_gpu", 1: "out_of_range", 2: "too_large", 3: "conflict", 4: "missing_parameter", 5: "unknown_dtype",
    }  # fmt: skip


def test_choice_has_defaults() -> None:
    assert dataclasses.asdict(EVERYTHING) == {"ops": None, "gpus": None, "where": None, "sample": None, "seed": 0}


# --- the command line


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run ``kernelcast data …`` in this process: exit code, standard output, standard error."""
    others = tuple(module for module in app.COMMANDS if module is not cli_data)
    monkeypatch.setattr(app, "COMMANDS", (*others, cli_data))

    def call(*arguments: object) -> tuple[int, str, str]:
        code = app.main(["data", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def test_cli_import_list_show(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = run("import", "pipeweave", pipeweave(tmp_path / "pw"), "-o", tmp_path / "out", "--json")
    assert code == 0 and "table 1 of 2, collectives (2 files)" in err
    assert {line["table"]: line["rows"] for line in json.loads(out)["tables"]} == {
        "pipeweave/collectives": 2,
        "pipeweave/gemm_fp8": 3,
    }
    code, out, _ = run("list", tmp_path / "out")
    assert (
        code == 0 and "pipeweave/gemm_fp8" in out and "between_nodes" in out and max(map(len, out.splitlines())) <= 100
    )
    code, out, _ = run("list", tmp_path / "out", "--json")
    assert {line["table"]: line["ops"] for line in json.loads(out)}["pipeweave/gemm_fp8"] == {"gemm": 3}
    code, out, _ = run("show", tmp_path / "out/pipeweave/collectives.parquet")
    assert code == 0 and "rtx_pro_6000_server" in out and RULES["between_nodes"][:30] in out
    code, out, _ = run("show", tmp_path / "out/pipeweave/collectives.parquet", "--json")
    assert json.loads(out)["reasons"] == {"between_nodes": RULES["between_nodes"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "pipeweave", "{tmp}", "-o", "{tmp}/out"], "is no checkout of pipeweave: no dataset/gemm_fp8"),
        (["import", "pipeweav", "{tmp}", "-o", "{tmp}/out"], "did you mean pipeweave?"),
        (["import", "tables", "{tmp}", "-o", "{tmp}/out"], "has no tables of kernels"),
        (["import", "vidur", "{tmp}"], "missing --output"),
        (["list", "{tmp}"], "has no SOURCE/TABLE.parquet"),
        (["list", "{tmp}/nowhere"], "no folder"),
        (["show", "{tmp}/nothing.parquet"], "no file"),
        (["show", "{tmp}/words.txt"], "not readable as Parquet"),
        (["shwo"], "did you mean show?"),
    ],
)
def test_cli_errors_are_one_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "words.txt").write_text("words")
    code, out, err = run(*(word.replace("{tmp}", str(tmp_path)) for word in arguments))
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["import", "list", "show"])
def test_cli_examples_run(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, _ = run(command, "--help")
    lines = [line.strip() for line in out.partition("Example:")[2].splitlines() if line.strip()]
    assert any(line.startswith(f"kernelcast data {command}") for line in lines)
    for line in lines:
        if line.startswith("kernelcast data "):
            assert run(*shlex.split(line)[2:])[0] == 0
        else:
            subprocess.run(["bash", "-ec", line], check=True)


# --- the real folder, where there is one

REAL = os.environ.get("KERNELCAST_DATA")


@pytest.mark.skipif(not REAL, reason="KERNELCAST_DATA names no folder of measured tables")
@pytest.mark.parametrize("name", lab.tables(REAL) if REAL else ["none"])
def test_every_real_table(name: str) -> None:
    mapping = lab.kernel_tables().get(name)
    if mapping is None:
        assert lab.read_table(REAL, name)
        return
    found = lab.read(REAL, name, sample=2000)
    if not any(op.op in REGISTRY for op in mapping.ops):
        assert set(found.dropped) == {"no_kernel_family"} and not len(found)
        return
    assert len(found) > 0
    no_bad_row(found)
    assert set(found.dropped) <= set(RULES)
