"""Whole attention layers and the parts of sparse ones, by hand: FLOPs, bytes, what runs where; their tables' traps.

Every number of a table here is invented.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demand import of, one, works
from measured_files import write_parquet

import kernelcast as kc
from kernelcast.ops.work import Work
from kernelcast_lab import data as lab

DECODE: dict[str, Any] = {"batch": 4, "q_len": 1, "kv_len": 1025, "q_heads": 16}
PREFILL: dict[str, Any] = {"batch": 1, "q_len": 1024, "kv_len": 1024, "q_heads": 16}
V4: dict[str, Any] = {"hidden": 4096, "q_rank": 1024, "q_heads": 64}


def products(found: tuple[Work, ...]) -> list[float]:
    """Useful FLOPs of the kernels on matrix units, in turn."""
    return [of(work, "useful_flops") for work in found if np.any(np.asarray(work.tensor_flops) > 0)]


def seconds(op: str, **values: Any) -> float:
    return kc.predict(kc.kernel(op, **values), "h200_sxm", kc.Conditions(predictor="generic")).time_s


def test_flops_and_bytes_of_a_latent_decode() -> None:
    found = works("mla_layer", **DECODE)
    # 4 tokens: down to 1536 + 512 + 64 columns, up to 16 heads of 128 + 64; each head's 128 into the latent of 512;
    # attention of 16 heads to 1025 latents of 576, values of 512; 512 out to 128 a head; 16 x 128 to the model.
    assert products(found) == [
        2 * 4 * 7168 * 2112,
        2 * 4 * 1536 * 3072,
        2 * 4 * 16 * 128 * 512,
        2 * 4 * 16 * 512 * 128,
        2 * 4 * 16 * 1025 * (576 + 512),
        2 * 4 * 2048 * 7168,
    ]
    weights = 2 * (7168 * 2112 + 1536 * 3072 + 2 * 16 * 128 * 512 + 2048 * 7168)
    cache = 2 * 576 * 4 * (1024 + 1)  # the past is read, one token of each request written
    assert sum(of(work, "streamed_bytes") for work in found) == weights + cache


def test_flops_of_a_latent_prefill() -> None:
    # Keys (128) and values (128) of 16 heads from the latents; 1024 x 1025 / 2 pairs, 192 + 128 each.
    assert products(works("mla_layer", **PREFILL)) == [
        2 * 1024 * 7168 * 2112,
        2 * 1024 * 1536 * 3072,
        2 * 1024 * 512 * 16 * 256,
        2 * 16 * (1024 * 1025 / 2) * 320,
        2 * 1024 * 2048 * 7168,
    ]
    # A model without a latent of its queries projects them from the hidden states.
    assert products(works("mla_layer", **PREFILL, q_rank=0))[:2] == [2 * 1024 * 7168 * 576, 2 * 1024 * 7168 * 3072]


def test_a_cached_prompt_is_expanded_too() -> None:
    chunk = products(works("mla_layer", batch=2, q_len=256, kv_len=1024, q_heads=16))
    assert chunk[2] == 2 * (2 * 1024) * 512 * 16 * 256


def test_narrow_projections_quantise_and_chains_launch_more() -> None:
    def launches(**values: Any) -> float:
        return sum(of(work, "launches") for work in works("mla_layer", **DECODE, **values))

    # Three linear layers, one kernel before each; the absorbed products stay in 16 bits.
    assert launches(dtype="fp8_block", stack="vllm") == launches(stack="vllm") + 3
    assert launches(fused=False) == launches() + 24


def test_attention_multiplies_in_the_cache_s_format_where_its_kernel_does() -> None:
    def formats(on: str, **values: Any) -> set[str]:
        return {work.tensor_dtype for work in works("mla_layer", on, **DECODE, kv_dtype="fp8", **values)}

    assert formats("b200_sxm", backend="trtllm") == {"bf16", "fp8"}
    assert formats("h100_sxm", backend="flashmla") == {"bf16", "fp8"}
    assert formats("h100_sxm", backend="fa3") == {"bf16"}


def test_indexer_of_a_sparse_layer() -> None:
    call: dict[str, Any] = {"batch": 2, "q_len": 1, "kv_len": 65536, "q_heads": 16}
    found, without = (products(works("dsa_layer", **call, indexer=on)) for on in (True, False))
    # A key of 128 and 64 weights beside the latents; 64 queries of 128 beside the heads'; 64 x 128 a key of 65,536.
    assert found[0] - without[0] == 2 * 2 * 7168 * (128 + 64)
    assert found[1] - without[1] == 2 * 2 * 1536 * 64 * 128
    assert found[4] == 2 * 2 * 64 * 128 * 65536 and len(without) == len(found) - 1
    assert found[5] == without[4] == 2 * 2 * 16 * 2048 * (576 + 512)  # attention to the chosen


def test_short_prefill_of_a_sparse_layer() -> None:
    # 16 heads of 192 + 128 over 1024 x 1025 / 2 pairs where SGLang expands; as many latents where others do not.
    pairs = 1024 * 1025 / 2
    assert 2 * 16 * pairs * 320 in products(works("dsa_layer", **PREFILL, stack="sglang"))
    sparse = products(works("dsa_layer", **PREFILL, stack="vllm"))
    assert 2 * 64 * 128 * pairs in sparse
    assert 2 * 16 * 1024 * np.ceil(pairs / 1024) * (576 + 512) in sparse


@pytest.mark.parametrize(("ratio", "chosen"), [(4, 512), (128, 65536 / 128)])
def test_compressed_decode_attends_to_the_window_and_compressed_keys(ratio: int, chosen: float) -> None:
    call = {"batch": 8, "q_len": 1, "kv_len": 65536, **V4}
    found = products(works("compressed_layer", **call, compress_ratio=ratio))
    scores = 2 * 8 * 64 * 128 * 65536 / 4
    assert found[2:-3] == ([scores] if ratio == 4 else [])
    # Of 64 heads, keys that are values too; 8 groups of 8 heads to 1024 each, then all to the model.
    assert found[-3:] == [
        2 * 8 * 64 * (128 + chosen) * (512 + 512),
        2 * 8 * 8 * (8 * 512) * 1024,
        2 * 8 * (8 * 1024) * 4096,
    ]


def test_projections_of_compressed_keys() -> None:
    # Query and key: 1024 + 512. Ratio 128: value and gate of 512. Ratio 4: of two windows, and the indexer's of 128,
    # and its 64 weights.
    call = {"batch": 8, "q_len": 1, "kv_len": 4096, **V4}
    columns = {0: 1536, 128: 1536 + 2 * 512, 4: 1536 + 2 * 2 * 512 + 2 * 2 * 128 + 64}
    for ratio, width in columns.items():
        assert products(works("compressed_layer", **call, compress_ratio=ratio))[0] == 2 * 8 * 4096 * width


def test_blocks_of_keys() -> None:
    found = products(works("block_sparse_layer", batch=4, q_len=1, kv_len=65536, q_heads=64, kv_heads=4))
    # Queries, keys and values of 128; 4 index queries and a key; 16 blocks of 128 keys.
    assert found == [
        2 * 4 * 6144 * (64 + 8 + 5) * 128,
        2 * 4 * 4 * 128 * 65536,
        2 * 4 * 64 * (16 * 128) * 256,
        2 * 4 * 6144 * 64 * 128,
    ]


def test_parts_of_sparse_attention() -> None:
    call: dict[str, Any] = {"batch": 2, "q_len": 1024, "kv_len": 4096}
    pairs = 2 * (1024 * 3072 + 1024 * 1025 / 2)
    scores = one("mqa_logits", **call, index_heads=32)
    assert of(scores, "useful_flops") == 2 * 32 * 128 * pairs
    assert of(scores, "streamed_bytes") == 2 * 4096 * (128 + 4)  # fp8 and a scale
    choice = one("index_topk", **call)
    assert of(choice, "activation_bytes") == 4 * pairs + 4 * 2 * 1024 * 2048
    # Every token may choose others: L2 gives them all, DRAM each latent once.
    attention = works("sparse_mla", **call, q_heads=128)[0]
    assert of(attention, "useful_flops") == 2 * 128 * (2 * 1024 * 2048) * (576 + 512)
    assert of(attention, "streamed_bytes") == 2 * 4096 * 576 * 2
    # All 65536 / 128 compressed keys of a decode, and the last 128 tokens.
    wide: dict[str, Any] = {"q_heads": 64, "topk": 0, "compress_ratio": 128, "window": 128, "rope_dim": 0}
    attention = works("sparse_mla", batch=2, q_len=1, kv_len=65536, **wide)[0]
    assert of(attention, "useful_flops") == 2 * 64 * 2 * (512 + 128) * (512 + 512)


def test_sglang_walks_all_keys_of_a_prefill_of_blocks() -> None:
    call: dict[str, Any] = {"batch": 1, "q_len": 4, "q_heads": 16, "kv_heads": 1}
    near, far = (seconds("block_sparse_layer", **call, kv_len=n, stack="sglang") for n in (65536, 1 << 20))
    assert far > 10 * near
    assert seconds("block_sparse_layer", **call, kv_len=1 << 20, stack="vllm") < far / 5


LAYERS: dict[str, dict[str, Any]] = {
    "mla_layer": {"q_heads": 16},
    "dsa_layer": {"q_heads": 16},
    "compressed_layer": {**V4, "compress_ratio": 4},
    "block_sparse_layer": {"q_heads": 16, "kv_heads": 1},
}


@pytest.mark.parametrize("op", LAYERS)
@pytest.mark.parametrize("new", [1, 512])
def test_more_work_is_not_faster(op: str, new: int) -> None:
    lengths = [new * 2**n for n in range(1, 11)]
    times = [seconds(op, batch=4, q_len=new, kv_len=length, **LAYERS[op]) for length in lengths]
    assert times == sorted(times)
    times = [seconds(op, batch=2**n, q_len=new, kv_len=8192, **LAYERS[op]) for n in range(9)]
    assert times == sorted(times)


@pytest.mark.parametrize("op", LAYERS)
def test_equal_lengths_as_a_list(op: str) -> None:
    same = seconds(op, batch=3, q_len=2, kv_len=4096, **LAYERS[op])
    assert seconds(op, q_lens=[2, 2, 2], kv_lens=[4096] * 3, **LAYERS[op]) == pytest.approx(same)


def module_rows(**columns: list[Any]) -> dict[str, list[Any]]:
    """Rows of a layer's table."""
    count = len(columns["latency_us"])
    alike = {
        "framework": "VLLM", "version": "0.24.0", "origin": "base", "op_name": "mla_context_module",
        "model": "deepseek-ai/DeepSeek-V3", "architecture": "DeepseekV3ForCausalLM", "mla_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16", "gemm_type": "bfloat16", "num_heads": 16, "batch_size": 1, "tp_size": 1,
        "step": 0, "table": "mla_context_module_perf",
    }  # fmt: skip
    return {**{name: [value] * count for name, value in alike.items()}, **columns}


def test_latent_tables_say_how_norms_ran_and_where_weights_are_absorbed(tmp_path: Path) -> None:
    rows = module_rows(
        gpu=["b200_sxm", "h200_sxm", "h200_sxm"],
        kernel_source=["FLASH_ATTN", "FLASH_ATTN", "FLASHMLA"],
        isl=[512, 512, 64],
        latency_us=[90.0, 180.0, 120.0],
    )
    write_parquet(tmp_path / "aiconfigurator/mla_context_module.parquet", rows)
    found = lab.read(tmp_path, "aiconfigurator/mla_context_module").columns
    told = {tuple(found[name][row] for name in ("gpu", "backend", "absorbed", "fused")) for row in range(3)}
    assert told == {
        ("b200_sxm", "fa4", "no", 1),
        ("h200_sxm", "fa3", "no", 0),
        ("h200_sxm", "flashmla", "yes", 0),
    }


def test_time_of_the_host_is_left_out(tmp_path: Path) -> None:
    rows = module_rows(
        gpu=["h200_sxm"] * 6,
        framework=["SGLang"] * 6,
        table=["dsa_context_module_perf"] * 6,
        op_name=["dsa_context_module"] * 6,
        architecture=["GlmMoeDsaForCausalLM"] * 6,
        kernel_source=["sglang_dsa_indexer_flashmla_sparse"] * 6,
        isl=[4, 16, 64, 2048, 4096, 1],
        step=[4096, 4096, 4096, 4096, 4096, 8192],
        # The host's time is about 800 us: up to half as much again says nothing, and few tokens never do.
        latency_us=[800.0, 810.0, 3000.0, 1100.0, 4000.0, 900.0],
    )
    write_parquet(tmp_path / "aiconfigurator/sparse_attention_context.parquet", rows)
    found = lab.read(tmp_path, "aiconfigurator/sparse_attention_context")
    assert found.dropped == {"eager": 4, "prefill_of_one": 1}
    assert [found.columns[name][0] for name in ("op", "q_len", "kv_len", "hidden", "v_dim", "index_heads")] == [
        "dsa_layer", 4096, 8192, 6144, 256, 32,
    ]  # fmt: skip
