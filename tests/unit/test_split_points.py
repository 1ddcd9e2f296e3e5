"""Disaggregated points of a table: how their workers are cut, and how a static point answers them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelcast.stacks import stack
from kernelcast_lab.data.serving import ServingPoint, SplitPoint, as_recipes
from kernelcast_lab.evaluate.serving_points import _loop_service, static_point, static_points

POINT = ServingPoint(
    source="aiconfigurator", id="one", gpu="h200_sxm", stack="trtllm", version=None, model="meta-llama/Llama-3.1-8B",
    tp=1, pp=1, dp=1, moe_tp=None, moe_ep=None, weights="bf16", experts="bf16", input_tokens=1000, output_tokens=500,
    concurrency=48, batch=24, ttft_s=0.5, tpot_s=0.01,
)  # fmt: skip
SPLIT = SplitPoint(POINT, replace(POINT, batch=1), decode_workers=2, prefill_workers=3)


def wide(dp: int, ep: int | None, **more: object) -> ServingPoint:
    words = {
        "stack": "sglang",
        "gpu": "gb200",
        "public": True,
        "dp": dp,
        "moe_tp": dp // (ep or 1),
        "moe_ep": ep,
        "batch": 8,
    }
    return replace(POINT, **{**words, **more})  # type: ignore[arg-type]


def test_workers_of_sglang_are_cut_as_their_recipes_say() -> None:
    tray, rack = as_recipes(wide(4, 1)), as_recipes(wide(32, 1))
    assert (tray.tp, tray.dp, tray.moe_tp, tray.moe_ep, tray.batch) == (4, 1, 4, 1, 32)
    assert (rack.tp, rack.dp, rack.moe_tp, rack.moe_ep, rack.batch) == (1, 32, 1, 32, 8)
    for other in (
        wide(32, 32),
        wide(4, 1, public=False),
        wide(4, 1, stack="trtllm"),
        wide(1, None),
        wide(8, 1, gpu="b200_sxm"),
    ):
        assert as_recipes(other) is other


def test_a_static_point_holds_each_workers_part_of_the_requests() -> None:
    """48 requests on two workers that decode; 16 prompts of 1,000 tokens in 16,384, of which each of three workers gets
    its part of the 48: 16."""
    found = static_point(SPLIT)
    assert found.pools.prefill.batch == 16
    assert found.pools.decode.batch == 24
    assert (found.pools.prefill.count, found.pools.decode.count) == (3, 2)
    assert (found.pools.input_tokens, found.pools.output_tokens) == (1000, 500)
    public = static_point(replace(SPLIT, decode=replace(POINT, public=True)))
    assert (public.pools.input_tokens, public.pools.output_tokens) == (900, 450)  # drawn from 0.8 to 1
    (compared,), left = static_points([SPLIT])
    assert not left
    assert compared.predicted_s == found.tpot.value
    assert (compared.measured_s, compared.low_s, compared.high_s) == (0.01, found.tpot.low, found.tpot.high)


def test_what_does_not_fit_is_left_out() -> None:
    large = replace(SPLIT, decode=replace(POINT, concurrency=10**6))
    found, left = static_points([large])
    assert found == []
    assert sum(left.values()) == 1


@pytest.mark.parametrize(("public", "share"), [(True, 0.1), (False, 1.0)])
def test_workers_that_decode_tell_tokens_in_larger_pieces(public: bool, share: float) -> None:
    """TensorRT-LLM's public recipes: 100 tokens a piece where it decodes alone, 10 where it does all."""
    point = replace(SPLIT, decode=replace(POINT, public=public), prefill=replace(POINT, public=public))
    service = _loop_service(point, stack, {})
    usual = stack("trtllm").sequence_s
    assert service.pool.deployment.stack.sequence_s == pytest.approx(share * usual)
    assert service.prefill is not None
    assert service.prefill.deployment.stack.sequence_s == usual
