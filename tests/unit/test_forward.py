"""One pass of a model by hand: which kernels each GPU launches, with which sizes and how often."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, Launch
from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch import Batch
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment, forward
from kernelcast.models import model, model_ids
from kernelcast.models.layers import Dense, LayerRun, Mamba2, Parallel
from kernelcast.models.precision import Precision
from kernelcast.stacks import stack, stack_ids

MIXERS = ("attention", "mla", "mla_layer", "dsa_layer", "compressed_layer", "block_sparse_layer", "gated_delta", "kda",
          "mamba2")  # fmt: skip
PROMPTS = Batch(new=(100, 200), past=(0, 0))  # 300 tokens
DECODE = Batch(new=(1, 1, 1), past=(50, 60, 70))  # 3 tokens


def deployed(name: str, *, on: str = "h100_sxm", engine: str = "vllm", dtype: str | None = None,
             **layout: Any) -> Deployment:  # fmt: skip
    found = model(name)
    return Deployment(found, kc.gpu(on), stack(engine), Precision.of(found, dtype), Layout(**layout))


def calls_of(name: str, batch: Batch, **how: Any) -> list[Launch]:
    return forward(deployed(name, **how), batch)


def of(calls: list[Launch], op: str, part: str | None = None) -> list[dict[str, Any]]:
    """The parameters of these calls, each with its ``count``."""
    chosen = (call for call in calls if call.op == op and part in (None, call.part))
    return [{**call.arguments, "count": call.count} for call in chosen]


def sizes(calls: list[Launch], op: str, part: str | None, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(found[name] for name in names) for found in of(calls, op, part)]


def products(calls: list[Launch], part: str) -> list[tuple[Any, ...]]:
    return sizes(calls, "gemm", part, "m", "n", "k", "count")


def flops(calls: list[Launch]) -> float:
    """2 m n k of every product; of experts 2 x tokens x topk x (gate, up, down) on this GPU's share."""
    total = sum(2 * m * n * k * count for m, n, k, count in sizes(calls, "gemm", None, "m", "n", "k", "count"))
    for each in of(calls, "moe"):
        cut = each["tp"] * each["ep"]
        total += each["count"] * 2 * each["tokens"] * each["topk"] * 3 * each["hidden"] * each["inter"] / cut
    return total


# ---- Llama: 32 layers, width 4096, 32 heads of 128 over 8 key-value heads, MLP 14336, vocabulary 128256 ----


def test_products_of_llama_on_one_gpu() -> None:
    calls = calls_of("llama-3.1-8b", PROMPTS)
    # q, k, v as one: (32 + 2 x 8) heads x 128 = 6144 columns; out: 32 x 128 = 4096 deep
    assert products(calls, "projections") == [(300, 6144, 4096, 32), (300, 4096, 4096, 32)]
    # gate and up as one: 2 x 14336 = 28672
    assert products(calls, "mlp") == [(300, 28672, 4096, 32), (300, 4096, 14336, 32)]
    assert sizes(calls, "silu_mul", "activation", "rows", "cols", "count") == [(300, 14336, 32)]


def test_products_of_llama_cut_over_four() -> None:
    calls = calls_of("llama-3.1-8b", PROMPTS, tp=4)
    # 8 heads and 2 key-value heads a GPU: (8 + 2 x 2) x 128 = 1536; out: 8 x 128 = 1024 deep, 4096 wide on every GPU
    assert products(calls, "projections") == [(300, 1536, 4096, 32), (300, 4096, 1024, 32)]
    # 14336 / 4 = 3584, gate and up 7168
    assert products(calls, "mlp") == [(300, 7168, 4096, 32), (300, 4096, 3584, 32)]
    heads = sizes(calls, "attention", "attention", "q_heads", "kv_heads", "head_dim", "count")
    assert heads == [(8, 2, 128, 32)]
    assert sizes(calls, "rope", "rotary", "tokens", "q_heads", "kv_heads", "head_dim", "count") == [
        (300, 8, 2, 128, 32)
    ]


def test_more_gpus_than_key_value_heads_keep_one_each() -> None:
    # 32 / 16 = 2 heads; 8 key-value heads on 16 GPUs: one on each, two GPUs hold the same: (2 + 2 x 1) x 128 = 512
    calls = calls_of("llama-3.1-8b", PROMPTS, tp=16)
    assert products(calls, "projections")[0] == (300, 512, 4096, 32)
    assert sizes(calls, "attention", None, "q_heads", "kv_heads") == [(2, 1)]


def test_norms_add_the_residual_where_the_stack_fuses_it() -> None:
    # one before each half of a layer, and the last one
    fused = of(calls_of("llama-3.1-8b", PROMPTS), "rmsnorm")
    assert [(n["rows"], n["cols"], n["residual"], n["count"]) for n in fused] == [
        (300, 4096, True, 32), (300, 4096, True, 32), (300, 4096, True, 1),
    ]  # fmt: skip
    apart = replace(stack("vllm"), fused_residual=False)
    calls = forward(replace(deployed("llama-3.1-8b"), stack=apart), PROMPTS)
    assert not any(n.get("residual") for n in of(calls, "rmsnorm"))
    assert sum(n["count"] for n in of(calls, "rmsnorm")) == 65
    assert sizes(calls, "add", "residual", "rows", "cols", "count") == 2 * [(300, 4096, 32)]


def test_plain_pytorch_runs_norms_rotations_and_gelu_kernel_by_kernel() -> None:
    torch = stack("torch")
    calls = forward(replace(deployed("llama-3.1-8b"), stack=torch), PROMPTS)
    norms = [call.arguments for call in calls if call.part == "norms"]
    # two norms a layer and the last: to fp32, squares, sums, epsilon, root, by row, back, by the weight
    assert [n["op"] for n in norms[:8]] == [
        "copy", "scale", "reduce_sum", "scale", "rsqrt", "pointwise", "copy", "pointwise",
    ]  # fmt: skip
    assert len(norms) == 3 * 8 and not of(calls, "rmsnorm")
    assert [(n["rows"], n["cols"]) for n in norms[2:5]] == [(300, 4096), (300, 1), (300, 1)]
    assert (norms[6]["dtype"], norms[6]["to"]) == ("fp32", "bf16")
    # queries of 32 heads and keys of 8: times the cosine, half negated, joined, times the sine, added
    turned = [call.arguments for call in calls if call.part == "rotary"]
    assert [(t["rows"], t["cols"]) for t in turned[:2] + turned[5:7]] == [
        (300 * 32, 128), (300 * 32, 64), (300 * 8, 128), (300 * 8, 64),
    ]  # fmt: skip
    gpt = forward(Deployment(model("gpt2-xl"), kc.gpu("h100_sxm"), torch), PROMPTS)
    assert [call.op for call in gpt if call.part == "activation"] == [
        "pow", "scale", "add", "scale", "tanh", "scale", "scale", "mul",
    ]  # fmt: skip
    assert not any(call.part == "cache" for call in calls)  # nothing is cached before


def test_a_stack_that_joins_and_fuses_nothing() -> None:
    plain = replace(stack("vllm"), joined_projections=False, fused_activation=False)
    calls = forward(replace(deployed("llama-3.1-8b"), stack=plain), PROMPTS)
    # q 32 x 128, k and v 8 x 128 each; gate and up are two products of 14336
    assert [n for _, n, _, _ in products(calls, "projections")] == [4096, 1024, 1024, 4096]
    assert products(calls, "mlp") == [(300, 14336, 4096, 64), (300, 4096, 14336, 32)]
    assert [call.op for call in calls if call.part == "activation"] == ["silu", "mul"]
    assert flops(calls) == flops(calls_of("llama-3.1-8b", PROMPTS))


def test_all_reduces_are_two_a_layer_and_one_for_the_embedding() -> None:
    reduced = of(calls_of("llama-3.1-8b", PROMPTS, tp=4), "all_reduce")
    assert sum(r["count"] for r in reduced) == 2 * 32 + 1
    # 300 tokens x 4096 x 2 bytes
    assert {(r["bytes"], r["world"]) for r in reduced} == {(300 * 4096 * 2, 4)}


def test_sequence_parallel_scatters_and_gathers_in_place_of_all_reduce() -> None:
    calls = calls_of("llama-3.1-8b", PROMPTS, tp=4, sequence_parallel=True)
    assert not of(calls, "all_reduce")
    for op in ("reduce_scatter", "all_gather"):
        moved = [r for r in of(calls, op) if r["bytes"] == 300 * 4096 * 2]
        assert sum(r["count"] for r in moved) == 65


def test_one_gpu_communicates_nothing() -> None:
    for batch in (PROMPTS, DECODE):
        assert not [call for call in calls_of("llama-3.1-8b", batch) if call.part == "communication"]


def test_the_head_has_one_row_a_sequence() -> None:
    # 2 prompts of 300 tokens: 2 rows; 128256 / 4 = 32064 columns on each of 4 GPUs
    assert products(calls_of("llama-3.1-8b", PROMPTS), "head") == [(2, 128256, 4096, 1)]
    calls = calls_of("llama-3.1-8b", PROMPTS, tp=4)
    assert products(calls, "head") == [(2, 32064, 4096, 1)]
    # the logits of all GPUs: 2 x 128256 x 2 bytes
    gathered = sizes(calls, "all_gather", "communication", "bytes", "world", "count")
    assert gathered == [(2 * 128256 * 2, 4, 1)]
    every = replace(stack("vllm"), head_rows="all")
    assert products(forward(replace(deployed("llama-3.1-8b"), stack=every), PROMPTS), "head")[0][0] == 300


def test_attention_sees_new_and_past_tokens() -> None:
    prefill, decode = (of(calls_of("llama-3.1-8b", batch), "attention")[0] for batch in (PROMPTS, DECODE))
    assert (prefill["q_lens"], prefill["kv_lens"], prefill["page_size"]) == ((100, 200), (100, 200), 0)
    # a new token sees itself and its past: 51, 61, 71, in pages
    assert (decode["q_lens"], decode["kv_lens"], decode["page_size"]) == ((1, 1, 1), (51, 61, 71), 16)
    alike = of(calls_of("llama-3.1-8b", Batch((4, 4), (8, 8))), "attention")[0]
    assert (alike["batch"], alike["q_len"], alike["kv_len"]) == (2, 4, 12)
    assert "q_lens" not in alike


@pytest.mark.parametrize("tp", [1, 4])
def test_flops_of_a_dense_model_are_two_for_each_weight_and_token(tp: int) -> None:
    # Every matrix is in one product, the embedding table in none; in a decode step the head has a row a token.
    # 8,030,261,248 weights - 128256 x 4096 of the embedding - 65 norms x 4096 = 7,504,658,432
    matrices = model("llama-3.1-8b").parameters.total - 128256 * 4096 - 65 * 4096
    assert matrices == 7_504_658_432
    assert flops(calls_of("llama-3.1-8b", DECODE, tp=tp)) * tp == 2 * 3 * matrices


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 4, "ep": 2}])
def test_flops_of_mixtral_are_two_for_each_weight_that_a_token_uses(layout: dict[str, int]) -> None:
    # 2 of 8 experts; the router (4096 x 8 x 32 layers) runs whole on every GPU
    arch, gpus = model("mixtral-8x7b"), layout.get("tp", 1)
    router = 2 * 3 * 4096 * 8 * 32
    matrices = arch.active_parameters.total - 32000 * 4096 - 65 * 4096
    assert flops(calls_of("mixtral-8x7b", DECODE, **layout)) * gpus == 2 * 3 * matrices + (gpus - 1) * router


# ---- what other families add ----


def test_qwen3_norms_each_head_of_queries_and_keys() -> None:
    # Qwen3-8B: 36 layers, 32 heads of 128 over 8; 300 tokens x 32 and x 8 rows of 128
    older = {"engine": "vllm==0.19"}
    heads = [n for n in of(calls_of("qwen3-8b", PROMPTS, **older), "rmsnorm") if n["cols"] == 128]
    assert [(n["rows"], n["count"]) for n in heads] == [(300 * 32, 36), (300 * 8, 36)]
    sharded = [n for n in of(calls_of("qwen3-8b", PROMPTS, tp=4, **older), "rmsnorm") if n["cols"] == 128]
    assert [(n["rows"], n["count"]) for n in sharded] == [(300 * 8, 36), (300 * 2, 36)]


def test_norms_of_heads_are_compiled_since_vllm_0_22() -> None:
    """One pass over queries and keys for the sums of squares; the rotation multiplies with them."""
    calls = calls_of("qwen3-8b", PROMPTS)
    sums = [n for n in of(calls, "pointwise") if n["cols"] == 128]
    assert [(n["rows"], n["count"]) for n in sums] == [(300 * (32 + 8), 36)]
    assert not [n for n in of(calls, "rmsnorm") if n["cols"] == 128]


def test_gemma_2_has_windows_in_half_its_layers_and_four_norms() -> None:
    calls = calls_of("gemma-2-9b", PROMPTS)  # 42 layers, every other with a window of 4096
    assert sorted(sizes(calls, "attention", None, "window", "count")) == [(0, 21), (4096, 21)]
    norms = of(calls, "rmsnorm")
    assert sum(n["count"] for n in norms) == 4 * 42 + 1
    assert sum(n["count"] for n in norms if n.get("residual")) == 2 * 42 + 1  # the residual joins two of the four
    assert {call.op for call in calls if call.part == "activation"} == {"gelu_tanh_mul"}


def test_experts_of_mixtral_are_one_call_a_layer() -> None:
    calls = calls_of("mixtral-8x7b", PROMPTS, tp=2)
    (experts,) = of(calls, "moe")
    told = {name: experts[name] for name in ("tokens", "hidden", "inter", "experts", "topk", "tp", "ep", "count")}
    assert told == {
        "tokens": 300, "hidden": 4096, "inter": 14336, "experts": 8, "topk": 2, "tp": 2, "ep": 1, "count": 32,
    }  # fmt: skip
    assert products(calls, "router") == [(300, 8, 4096, 32)]
    assert not products(calls, "mlp") and not products(calls, "shared experts")
    assert sum(r["count"] for r in of(calls, "all_reduce")) == 2 * 32 + 1


def test_deepseek_v3_begins_with_dense_layers_and_has_a_shared_expert() -> None:
    calls = calls_of("deepseek-v3", PROMPTS, tp=8)
    # 3 dense layers of 18432 / 8 = 2304 (gate and up 4608), 58 with experts
    assert products(calls, "mlp") == [(300, 4608, 7168, 3), (300, 7168, 2304, 3)]
    assert sizes(calls, "moe", "experts", "experts", "topk", "inter", "tp", "count") == [(256, 8, 2048, 8, 58)]
    # one shared expert of 2048 / 8 = 256, gate and up 512
    assert products(calls, "shared experts") == [(300, 512, 7168, 58), (300, 7168, 256, 58)]
    assert {m["dtype"] for m in of(calls, "moe")} == {"fp8_block"}  # as its checkpoint is stored
    assert {g["dtype"] for g in of(calls, "gemm", "router")} == {"bf16"}


def test_mla_is_expanded_in_prefill_and_absorbed_in_decode() -> None:
    prefill, decode = (calls_of("deepseek-v3", batch, tp=8, engine="torch") for batch in (PROMPTS, DECODE))
    # 128 / 8 = 16 heads. Down: 1536 + 512 + 64 = 2112, whole; queries up: 16 x (128 + 64) = 3072;
    # keys and values up: 16 x (128 + 128) = 4096 from 512; out: 16 x 128 = 2048 deep
    expected = [(300, 2112, 7168), (300, 3072, 1536), (300, 4096, 512), (300, 7168, 2048)]
    assert [p[:3] for p in products(prefill, "projections")] == 2 * expected  # dense layers, then the others
    assert {m["absorbed"] for m in of(prefill, "mla")} == {"no"} and not of(prefill, "bmm")
    # absorbed: each head's queries 128 -> 512 into the latent, and its values 512 -> 128 out of it
    assert {m["absorbed"] for m in of(decode, "mla")} == {"yes"}
    assert sizes(decode, "bmm", "projections", "batch", "m", "n", "k") == 2 * [(16, 3, 512, 128), (16, 3, 128, 512)]
    assert [p[:3] for p in products(decode, "projections")] == 2 * [(3, 2112, 7168), (3, 3072, 1536), (3, 7168, 2048)]
    assert sum(m["count"] for m in of(decode, "mla")) == 61


def test_a_chunk_of_mla_expands_the_latents_of_its_past_too() -> None:
    # 64 new tokens after 1000: keys and values of 1064
    calls = calls_of("deepseek-v3", Batch((64,), (1000,)), tp=8, engine="torch")
    assert (1064, 4096, 512) in [p[:3] for p in products(calls, "projections")]


def test_engines_run_latent_attention_as_the_layer_that_was_measured() -> None:
    prefill, decode = (calls_of("deepseek-v3", batch, tp=8, engine="trtllm") for batch in (PROMPTS, DECODE))
    names = ("q_heads", "hidden", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim", "absorbed", "dtype")
    assert sizes(decode, "mla_layer", "attention", *names) == 2 * [
        (16, 7168, 1536, 512, 128, 64, 128, "yes", "fp8_block")
    ]
    assert {found["absorbed"] for found in of(prefill, "mla_layer")} == {"no"}
    assert not products(decode, "projections")  # they are inside
    assert sum(found["count"] for found in of(decode, "mla_layer")) == 61


def test_sparse_attention_tells_its_indexer() -> None:
    calls = calls_of("deepseek-v3.2", DECODE, tp=8, engine="sglang")
    names = ("q_heads", "index_heads", "index_dim", "index_topk", "indexer")
    assert set(sizes(calls, "dsa_layer", None, *names)) == {(16, 64, 128, 2048, True)}
    assert sum(found["count"] for found in of(calls, "dsa_layer")) == 61


def test_mamba_layers_have_one_half_each() -> None:
    place = deployed("nemotron-h-8b", tp=2)
    calls = forward(place, DECODE)
    mixers = [run.layer.attention for run in place.model.layers for _ in range(run.count)]
    scans = [mixer for mixer in mixers if isinstance(mixer, Mamba2)]
    (found,) = of(calls, "mamba2")
    assert found["count"] == len(scans) and found["heads"] == scans[0].heads // 2
    assert found["groups"] == scans[0].groups // 2 and found["state"] == scans[0].state
    # z, x, B and C, dt: what in_proj yields, half of it
    assert (3, scans[0].in_width // 2, place.model.hidden, len(scans)) in products(calls, "projections")
    # one norm a half, and the last
    halves = sum(run.count * run.layer.sublayers for run in place.model.layers)
    hidden = [n for n in of(calls, "rmsnorm") if n["cols"] == place.model.hidden and n["rows"] == 3]
    assert sum(n["count"] for n in hidden) == halves + 1


def test_gpt2_has_a_plain_mlp_and_learned_positions() -> None:
    calls = calls_of("gpt2", PROMPTS)  # 12 layers of 768, MLP 3072
    assert products(calls, "mlp") == [(300, 3072, 768, 12), (300, 768, 3072, 12)]
    assert sizes(calls, "gelu_tanh", "activation", "rows", "cols", "count") == [(300, 3072, 12)]
    assert sizes(calls, "add", "embedding", "rows", "cols", "count") == [(300, 768, 1)]
    assert not of(calls, "rope")
    assert sum(n["count"] for n in of(calls, "layernorm")) == 2 * 12 + 1


def test_bert_sees_both_ways_and_ends_in_a_pooler() -> None:
    calls = calls_of("bert-base", PROMPTS)
    assert [a["causal"] for a in of(calls, "attention")] == [False]
    # words + positions + segments: two sums; a norm over them beside two a layer
    assert sizes(calls, "add", "embedding", "count") == [(2,)]
    assert sum(n["count"] for n in of(calls, "layernorm")) == 2 * 12 + 1
    # one row a sequence through 768 x 768; no vocabulary and nothing sampled
    assert products(calls, "head") == [(2, 768, 768, 1)]
    assert not [call for call in calls if call.part == "sampling"]


# ---- layouts ----


def test_expert_parallel_deals_experts_out() -> None:
    (experts,) = of(calls_of("qwen3-30b-a3b", PROMPTS, tp=4, ep=4), "moe")
    assert (experts["tp"], experts["ep"], experts["tokens"]) == (1, 4, 300)
    (half,) = of(calls_of("qwen3-30b-a3b", PROMPTS, tp=4, ep=2), "moe")
    assert (half["tp"], half["ep"]) == (2, 2)  # two GPUs cut each expert: 768 / 2


def test_experts_may_be_dealt_out_in_a_model_that_begins_dense() -> None:
    calls = calls_of("deepseek-v3", PROMPTS, tp=8, ep=8)
    assert sizes(calls, "moe", None, "tp", "ep", "count") == [(1, 8, 58)]
    assert products(calls, "mlp")[0] == (300, 4608, 7168, 3)  # the dense layers are still cut by tp


def test_attention_dp_exchanges_tokens_with_the_experts() -> None:
    calls = calls_of("qwen3-30b-a3b", DECODE, dp=4, ep=4)
    # attention is whole on each rank, and no layer is summed over GPUs
    assert sizes(calls, "attention", None, "q_heads", "kv_heads") == [(32, 4)]
    assert not of(calls, "all_reduce")
    # experts see the tokens of all 4 ranks: 12
    assert sizes(calls, "moe", None, "tokens", "tp", "ep") == [(12, 1, 4)]
    # vLLM: every GPU gets all 12 tokens of 2048 x 2 bytes, and a sum is scattered back
    for op in ("all_gather", "reduce_scatter"):
        found = [row for row in sizes(calls, op, None, "bytes", "world", "count") if row[2] == 48]
        assert found == [(12 * 2048 * 2, 4, 48)]


@pytest.mark.parametrize(("batch", "mode", "kernel"), [(DECODE, "low_latency", "deepep_masked"),
                                                       (PROMPTS, "normal", "deepep_contiguous")])  # fmt: skip
def test_sglang_sends_tokens_by_deepep(batch: Batch, mode: str, kernel: str) -> None:
    calls = calls_of("deepseek-v3", batch, engine="sglang", dp=16, ep=16)
    # a rank's own tokens; 16 GPUs in two nodes
    names = ("tokens", "topk", "experts", "world", "nodes", "fabric", "mode", "dtype", "count")
    own = (batch.tokens, 8, 256, 16, 2, "ib_ndr", mode)
    assert sizes(calls, "deepep_dispatch", None, *names) == [(*own, "fp8_block", 58)]
    assert sizes(calls, "deepep_combine", None, *names) == [(*own, "bf16", 58)]
    assert sizes(calls, "moe", None, "tokens", "ep", "backend") == [(16 * batch.tokens, 16, kernel)]


def test_another_exchange_may_be_asked_for() -> None:
    place = deployed("qwen3-30b-a3b", dp=4, ep=4)
    calls = forward(replace(place, stack=replace(place.stack, exchange="nccl")), DECODE)
    # out and back, each layer: 3 tokens to min(8, 4) GPUs, 2048 x 2 bytes each
    assert sizes(calls, "all_to_all", None, "bytes", "world", "count") == 2 * [(3 * 4 * 2048 * 2, 4, 48)]


def test_a_link_of_ones_own_is_used_inside_a_node() -> None:
    (inside,) = of(calls_of("llama-3.1-8b", DECODE, on="l40s", tp=4, link="pcie4_shared"), "all_reduce", None)[:1]
    assert inside["fabric"] == "pcie4_shared"


def test_pipeline_stages_send_what_is_between_layers() -> None:
    calls = calls_of("llama-3.1-8b", PROMPTS, pp=4)
    assert sizes(calls, "send_recv", "communication", "bytes", "count") == [(300 * 4096 * 2, 3)]
    assert sum(a["count"] for a in of(calls, "attention")) == 32  # all stages together


def test_a_group_beyond_one_node_uses_the_network_between() -> None:
    inside, beyond = (of(calls_of("llama-3.1-8b", DECODE, tp=tp), "all_reduce")[0] for tp in (8, 16))
    assert "fabric" not in inside
    assert beyond["fabric"] == "ib_ndr"


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("llama-3.1-8b", {"tp": 3}, "tp 3 does not divide the 32 heads of llama-3.1-8b"),
        ("phi-3-medium", {"tp": 4}, "tp 4 and the 10 key-value heads of phi-3-medium: neither divides the other"),
        ("llama-3.1-8b", {"tp": 2, "ep": 2}, "ep 2: llama-3.1-8b has no experts"),
        ("mixtral-8x7b", {"tp": 16, "ep": 16}, "ep 16 does not divide 8 experts"),
        ("mixtral-8x7b", {"ep": 2}, "ep 2 does not divide the 1 GPUs of tp x dp"),
        ("llama-3.1-8b", {"pp": 33}, "pp 33 is more than the 32 layers"),
        ("llama-3.1-8b", {"tp": 0}, "tp must be a whole number of 1 or more, not 0"),
        (
            "qwen3-next-80b-a3b",
            {"tp": 3},
            "tp 3 does not divide the 16 key heads of qwen3-next-80b-a3b's",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(name: str, layout: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelcastError, match=re.escape(said)) as error:
        deployed(name, **layout)
    assert "\n" not in str(error.value)


def test_an_unknown_activation_is_refused() -> None:
    arch = model("gpt2")
    (run,) = arch.layers
    assert isinstance(run.layer.mlp, Dense)
    odd = replace(arch, layers=(LayerRun(12, replace(run.layer, mlp=replace(run.layer.mlp, activation="mish"))),))
    with pytest.raises(KernelcastError, match="no kernel for the activation 'mish'; known: silu"):
        forward(replace(deployed("gpt2"), model=odd), PROMPTS)


@pytest.mark.parametrize(("new", "past"), [((), ()), ((1, 1), (0,)), ((0,), (5,)), ((1,), (-1,))])
def test_a_batch_without_tokens_is_refused(new: tuple[int, ...], past: tuple[int, ...]) -> None:
    with pytest.raises(KernelcastError, match="batch"):
        Batch(new, past)


# ---- every model ----


@pytest.mark.parametrize("name", ["gemma-2-9b", "deepseek-v3", "llama-4-maverick"])
def test_in_order_is_the_same_work_layer_by_layer(name: str) -> None:
    def work(calls: list[Launch]) -> Counter[tuple[Any, ...]]:
        total: Counter[tuple[Any, ...]] = Counter()
        for call in calls:
            total[(call.part, call.call)] += int(call.count)
        return total

    place = deployed(name, tp=8)
    together, ordered = forward(place, DECODE), forward(place, DECODE, in_order=True)
    assert work(together) == work(ordered)
    mixers = [call for call in ordered if call.part == "attention"]
    assert len(mixers) == model(name).layer_count > len([call for call in together if call.part == "attention"])


@pytest.mark.parametrize("engine", stack_ids())
def test_every_bundled_model_gives_calls_that_can_be_predicted(engine: str) -> None:
    gpu, every = kc.gpu("h100_sxm"), dict[Call, None]()
    for name in model_ids():
        place = deployed(name, engine=engine)
        for batch in (PROMPTS, DECODE):
            calls = forward(place, batch)
            mixers = sum(call.count for call in calls if call.op in MIXERS)
            layers = [layer.attention for layer in model(name).expand() if layer.attention]
            assert mixers == sum(2 if isinstance(mixer, Parallel) else 1 for mixer in layers)
            every |= dict.fromkeys(call.call for call in calls)
    for call in every:
        kc.kernel(call.op, **dict(call.parameters))  # refuses what the op does not take
    times = Times(gpu)
    times.predict(every)
    spans = [times[call].interval for call in every]
    assert all(0 < span.low <= span.value <= span.high for span in spans)


def test_a_layer_in_order_begins_each_half_with_its_norm() -> None:
    calls = [call.part for call in forward(deployed("llama-3.1-8b"), DECODE, in_order=True)]
    one = ["norms", "projections", "rotary", "attention", "projections", "norms", "mlp", "activation", "mlp"]
    assert calls[1 : 1 + 2 * len(one)] == one + one


def test_uneven_experts_take_longer() -> None:
    balanced = replace(deployed("mixtral-8x7b", on="h200_sxm", tp=2), routing="balanced")
    uneven = replace(balanced, skew=1.2)
    times = Times(balanced.gpu)
    both = [next(c.call for c in forward(place, PROMPTS) if c.op == "moe") for place in (balanced, uneven)]
    times.predict(both)
    assert both[1].arguments["skew"] == 1.2 and "skew" not in both[0].arguments
    assert times[both[1]].interval.value > times[both[0]].interval.value


def test_a_checkpoint_is_served_as_it_is_stored_unless_told_otherwise() -> None:
    """As `kernelcast infer` does: DeepSeek-V3 ships in block-scaled fp8, gpt-oss with 4-bit experts."""
    chip = kc.gpu("h200_sxm")
    stored = {name: Deployment(model(name), chip, stack("vllm")).precision for name in ("deepseek-v3", "gpt-oss-20b")}
    assert stored == {name: Precision.of(model(name)) for name in stored}
    assert (stored["deepseek-v3"].weights, stored["gpt-oss-20b"].expert_weights) == ("fp8_block", "mxfp4")
