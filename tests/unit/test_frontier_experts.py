"""Experts as deployed, by hand: how tokens reach them and come back, which kernel runs, how uneven they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deployments import deployed

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Launch
from kernelcast.inference.batch import Batch
from kernelcast.inference.deployment import EXPECTED_SKEW, Deployment, Layout
from kernelcast.inference.forward import forward
from kernelcast.inference.layers import ALL2ALL_BACKENDS
from kernelcast.inference.memory import read_weight_bytes
from kernelcast.stacks import stack

HIDDEN = 7168  # of DeepSeek-V3: 256 experts, 8 a token, weights in fp8 by blocks
# What one rank has:
PROMPTS = Batch(new=(100, 200), past=(0, 0))  # 300 tokens
DECODE = Batch(new=(1, 1, 1), past=(50, 60, 70))  # 3 tokens


def place(exchange: str, name: str = "deepseek-v3", on: str = "h200_sxm", moe_backend: str = "",
          **layout: Any) -> Deployment:  # fmt: skip
    engine = replace(stack("sglang"), exchange=exchange, moe_backend=moe_backend)
    return deployed(name, on=on, engine=engine, **{"dp": 8, "ep": 8, **layout})


def around(calls: list[Launch]) -> list[dict[str, Any]]:
    """The words of what goes between GPUs on both sides of the experts, and of the experts."""
    at = next(i for i, call in enumerate(calls) if call.op == "moe")
    near = [call for call in calls[at - 2 : at + 2] if call.part == "communication" or call.op == "moe"]
    assert {call.count for call in near} == {calls[at].count}  # in every layer that has experts
    return [{"op": call.op, **call.arguments} for call in near]


def told(found: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(words.get(name) for name in names) for words in found if words["op"] != "moe"]


def experts(found: list[dict[str, Any]]) -> dict[str, Any]:
    (words,) = (words for words in found if words["op"] == "moe")
    return words


# ---- the four exchanges ----


def test_nccl_sends_a_token_to_each_gpu_that_holds_one_of_its_experts() -> None:
    found = around(forward(place("nccl"), DECODE))
    # 3 tokens to min(8, 8) GPUs; there as the experts take them, a byte a number, and back in bf16
    sent = 3 * 8 * HIDDEN
    assert told(found, "op", "bytes", "world") == [("all_to_all", sent, 8), ("all_to_all", 2 * sent, 8)]
    assert experts(found)["tokens"] == 8 * 3  # of all ranks
    wide = around(forward(place("nccl", "kimi-k2.5", moe_backend="marlin"), DECODE))  # weights alone are narrow
    assert told(wide, "bytes") == 2 * [(2 * sent,)]
    few = around(forward(place("nccl", tp=4, dp=2, ep=2), DECODE))  # to 2 GPUs, and 4 share a rank's tokens
    assert told(few, "bytes", "world") == [(3 * 2 * HIDDEN // 4, 8), (3 * 2 * HIDDEN // 4 * 2, 8)]


def test_allgather_brings_every_token_to_every_gpu() -> None:
    found = around(forward(place("allgather"), PROMPTS))
    everything = 8 * 300 * HIDDEN * 2
    assert told(found, "op", "bytes", "world") == [("all_gather", everything, 8), ("reduce_scatter", everything, 8)]
    assert experts(found)["backend"] == "triton"


@pytest.mark.parametrize(
    ("batch", "tokens", "mode", "kernel"),
    [(PROMPTS, 300, "normal", "deepep_contiguous"), (DECODE, 3, "low_latency", "deepep_masked")],
)
def test_deepep_within_a_node(batch: Batch, tokens: int, mode: str, kernel: str) -> None:
    found = around(forward(place("deepep"), batch))
    assert told(found, "op", "tokens", "mode", "dtype", "world") == [
        ("deepep_dispatch", tokens, mode, "fp8_block", 8), ("deepep_combine", tokens, mode, "bf16", 8),
    ]  # fmt: skip
    assert told(found, "nodes", "fabric") == 2 * [(None, None)]
    assert told(found, "hidden", "topk", "experts", "stack") == 2 * [(HIDDEN, 8, 256, "sglang")]
    assert experts(found)["backend"] == kernel


def test_deepep_over_two_nodes_and_its_usual_kernels_in_other_formats() -> None:
    found = around(forward(place("deepep", tp=2, ep=16), DECODE))
    # two GPUs share the 3 tokens of a rank: 2 and 1
    assert told(found, "tokens", "world", "nodes", "fabric") == 2 * [(2, 16, 2, "ib_ndr")]
    four = around(forward(place("deepep", dp=32, ep=32, between_nodes="ib_xdr"), DECODE))
    assert told(four, "nodes", "fabric") == 2 * [(4, "ib_xdr")]
    narrow = around(forward(place("deepep", "deepseek-r1-nvfp4", "b200_sxm"), DECODE))
    assert (told(narrow, "dtype"), experts(narrow)["backend"]) == ([("fp8_block",), ("bf16",)], "trtllm")
    wide = around(forward(place("deepep", "kimi-k2.5"), DECODE))
    assert told(wide, "dtype") == [("bf16",), ("bf16",)]


def test_alltoall_over_nvlink_and_gathered_tokens_elsewhere() -> None:
    found = around(forward(place("alltoall"), DECODE))
    ops = ["alltoall_prepare", "alltoall_dispatch", "alltoall_combine"]
    assert told(found, "op", "dtype") == list(zip(ops, ("bf16", "fp8", "bf16"), strict=True))
    assert told(found, "tokens", "world", "stack") == 3 * [(3, 8, "trtllm")]
    narrow = around(forward(place("alltoall", "deepseek-r1-nvfp4", "b200_sxm"), DECODE))
    assert told(narrow, "dtype") == [("bf16",), ("nvfp4",), ("bf16",)]
    beyond = around(forward(place("alltoall", dp=16, ep=16), DECODE))
    assert beyond == around(forward(place("allgather", dp=16, ep=16), DECODE))
    assert told(beyond, "op", "fabric") == [("all_gather", "ib_ndr"), ("reduce_scatter", "ib_ndr")]
    pcie = around(forward(place("alltoall", "qwen3-30b-a3b", "rtx_pro_6000_server"), DECODE))
    assert told(pcie, "op") == [("all_gather",), ("reduce_scatter",)]


def test_tokens_are_gathered_as_the_engine_quantised_them() -> None:
    """TensorRT-LLM quantises before it gathers: a byte a number in fp8, 3 tokens of 8 ranks; sums are in bf16."""
    gathered = replace(stack("trtllm"), exchange="allgather")
    found = around(forward(deployed("qwen3-30b-a3b", on="h100_sxm", engine=gathered, dtype="fp8", dp=8, ep=8), DECODE))
    assert told([found[0], found[-1]], "op", "bytes") == [("all_gather", 24 * 2048), ("reduce_scatter", 24 * 2048 * 2)]


def test_a_rack_of_gb200_is_one_domain() -> None:
    found = around(forward(place("alltoall", on="gb200", dp=16, ep=16), DECODE))
    assert next(words["op"] for words in found) == "alltoall_prepare"
    within = around(forward(place("deepep", on="gb200", dp=16, ep=16), DECODE))
    assert told(within, "world", "nodes", "fabric") == 2 * [(16, None, None)]


@pytest.mark.parametrize("exchange", [name for name in ALL2ALL_BACKENDS if name != "nccl"])
def test_experts_that_are_cut_see_every_token(exchange: str) -> None:
    found = around(forward(place(exchange, ep=1), DECODE))
    assert told(found, "op", "bytes") == [(op, 8 * 3 * HIDDEN * 2) for op in ("all_gather", "reduce_scatter")]
    assert (experts(found)["tp"], experts(found)["backend"]) == (8, "triton")


def test_nothing_is_exchanged_where_one_rank_has_every_token() -> None:
    for exchange in ALL2ALL_BACKENDS:
        calls = forward(place(exchange, tp=8, dp=1), DECODE)
        sent = {call.op for call in calls if call.part == "communication"}
        assert sent == {"all_reduce", "all_gather"}  # of layers that are cut, and of the head
        assert not any("deepep" in str(call.arguments.get("backend")) for call in calls)


def test_a_kernel_that_was_asked_for_wins_over_the_exchanges() -> None:
    for batch in (PROMPTS, DECODE):
        found = around(forward(place("deepep", moe_backend="deepgemm"), batch))
        assert (experts(found)["backend"], experts(found)["dtype"]) == ("deepgemm", "fp8_block")
        assert found[0]["op"] == "deepep_dispatch"  # which the exchange goes on to be


# ---- how tokens choose experts ----


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, {"skew": EXPECTED_SKEW}),
        ({"routing": "expected"}, {"skew": EXPECTED_SKEW}),
        ({"routing": "random"}, {"routing": "random"}),
        ({"routing": "balanced"}, {"routing": "balanced"}),
        ({"skew": 1.01}, {"skew": 1.01}),
        ({"skew": 0.6, "routing": "balanced"}, {"skew": 0.6}),  # a power law stands in for the routing
    ],
)
def test_how_tokens_choose_experts_in_the_words_of_a_call(given: dict[str, Any], words: dict[str, Any]) -> None:
    where = replace(deployed("qwen3-30b-a3b"), **given)
    (call,) = (call for call in forward(where, DECODE) if call.op == "moe")
    assert {name: call.arguments[name] for name in ("skew", "routing") if name in call.arguments} == words


def test_copies_of_one_sequence_read_the_experts_of_one() -> None:
    """16 decodes, 2 of 8 experts each, read 8 x (1 - (3/4)^16) = 7.9 of them where they differ, 2 where not; the
    tokens of a prompt differ."""
    place = replace(deployed("mixtral-8x7b", tp=4), routing="identical")
    other = replace(place, routing="expected")
    prompts, decodes = Batch(16 * (512,), 16 * (0,)), Batch(16 * (1,), 16 * (512,))

    def sizes(where: Deployment, batch: Batch) -> tuple[Any, ...]:
        (call,) = (call for call in forward(where, batch) if call.op == "moe")
        return tuple(call.arguments.get(name) for name in ("tokens", "experts", "topk", "skew", "routing"))

    assert sizes(place, decodes) == (16, 2, 2, None, "balanced")
    assert sizes(other, decodes) == (16, 8, 2, EXPECTED_SKEW, None)
    assert sizes(place, prompts) == sizes(other, prompts) == (16 * 512, 8, 2, EXPECTED_SKEW, None)
    one_expert = 32 * 3 * 4096 * 14336 * 2 / 4  # in 32 layers, bf16, of a GPU
    read = [read_weight_bytes(where, 16) for where in (place, other)]
    assert read[1] - read[0] == pytest.approx((8 * (1 - 0.75**16) - 2) * one_expert)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"routing": "even"}, "unknown routing 'even'; known: balanced, expected, identical, random"),
        (
            {"routing": "identical", "layout": Layout(tp=2, ep=2)},
            "routing identical: copies of one sequence meet on the ranks of its experts; leave out ep",
        ),
        ({"skew": -0.5}, "skew must be 0 or more, not -0.5"),
    ],
)
def test_bad_routing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelcastError) as error:
        replace(deployed("qwen3-30b-a3b"), **given)
    assert str(error.value) == said
