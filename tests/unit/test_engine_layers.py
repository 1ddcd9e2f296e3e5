"""What serving engines add to a layer, and what short tasks wait for: the arithmetic written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from demand import of, works
from deployments import deployed, times

import kernelcast as kc
from kernelcast.forecast.predictor import sustained_start_s, work_times
from kernelcast.hardware import gpu
from kernelcast.inference.batch import Batch
from kernelcast.inference.forward import forward
from kernelcast.inference.infer import infer
from kernelcast.inference.workload import Workload
from kernelcast.machine import analyse
from kernelcast.ops.work import Work
from kernelcast.stacks import stack

H100 = gpu("h100_sxm")
DECODE: dict[str, Any] = {"batch": 4, "q_len": 1, "kv_len": 1024, "q_heads": 32, "kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(("stack", "kernels"), [("vllm", 1), ("sglang", 1), ("trtllm", 4)])
def test_an_engine_quantises_activations_before_a_narrow_product(stack: str, kernels: int) -> None:
    quantise, product = works("gemm", m=512, n=4096, k=2048, dtype="fp8", stack=stack)
    assert of(quantise, "tasks") == 512  # a row a CTA
    assert of(quantise, "activation_bytes") == 512 * 2048 * (2 + 1)  # bf16 in, fp8 out
    assert of(quantise, "launches") == kernels
    assert of(product, "useful_flops") == 2 * 512 * 4096 * 2048


@pytest.mark.parametrize(
    "call", [{"dtype": "bf16", "stack": "vllm"}, {"dtype": "fp8"}, {"dtype": "fp8", "stack": "torch"}]
)
def test_nothing_is_quantised_where_no_engine_does(call: dict[str, str]) -> None:
    assert len(works("gemm", m=512, n=4096, k=2048, **call)) == 1


@pytest.mark.parametrize(
    ("call", "elements", "written_bytes", "kernels"),
    [
        ({"dtype": "bf16", "stack": "vllm"}, 2 * 8 * 128, 2, 2),  # K and V of 8 heads
        ({"dtype": "bf16", "stack": "sglang", "kv_dtype": "fp8"}, 2 * 8 * 128, 1, 3),  # and a conversion
        ({"dtype": "fp8", "stack": "vllm"}, 2 * 8 * 128, 1, 3),  # and Q's
        ({"dtype": "bf16", "stack": "trtllm"}, (2 * 8 + 32) * 128, 2, 2),  # Q is rotated in the same pass
    ],
)
def test_an_engine_writes_new_keys_and_values(
    call: dict[str, str], elements: int, written_bytes: int, kernels: int
) -> None:
    *_, move = works("attention", **DECODE, page_size=16, **call)
    assert of(move, "tasks") == 4  # tokens
    assert of(move, "streamed_bytes") == 4 * elements * written_bytes
    assert of(move, "launches") == kernels


def test_without_an_engine_attention_writes_no_cache() -> None:
    alone = works("attention", **DECODE, page_size=16)
    assert len(works("attention", **DECODE, page_size=16, stack="vllm")) == len(alone) + 1


def test_tensorrt_llm_shares_keys_among_32_query_heads_at_most() -> None:
    def tasks(stack: str, q_heads: int) -> float:
        call: dict[str, Any] = {
            "batch": 200,
            "q_len": 1,
            "kv_len": 128,
            "q_heads": q_heads,
            "kv_heads": 1,
            "head_dim": 128,
        }
        return of(works("attention", **call, page_size=16, backend="trtllm", stack=stack)[0], "tasks")

    assert tasks("trtllm", 32) == tasks("vllm", 32) == 200  # a request a task
    assert tasks("vllm", 64) == 200
    assert tasks("trtllm", 64) == 200 * 64  # every query head walks the keys alone


def test_rounds_of_tasks_take_their_set_up_and_their_steps() -> None:
    work = Work(tasks=np.array([[300.0]]), task_cycles=4000.0, serial_steps=10.0, step_cycles=300.0,
                threads=1024.0, registers_per_thread=64.0)  # fmt: skip
    (found,) = analyse(work, H100)
    assert found.ctas_per_sm[0] == 1  # 64 x 1024 registers fill an SM
    rounds = 3  # 300 tasks on 132 SMs
    setup, steps = rounds * 4000 / H100.clock_boost_hz, rounds * 10 * 300 / H100.clock_boost_hz
    assert found.setup_s[0] == pytest.approx(setup)
    assert found.step_s[0] == pytest.approx(steps)
    # there is no other work: the time is the launch floor, the set-ups and the steps
    assert work_times([found], H100)[0][0] == pytest.approx(sustained_start_s(H100) + setup + steps)
    assert found.bound[0] == pytest.approx(H100.launch_floor_s)  # the bound knows neither


def test_a_stack_that_was_never_measured_is_a_step_from_the_data() -> None:
    def support(stack: str) -> str:
        return kc.predict(kc.kernel("attention", **DECODE, page_size=16, stack=stack), "h100_sxm").support

    assert support("vllm") == "seen"
    assert support("torch_eager") == "near"


def test_a_layer_whose_input_comes_quantised_is_the_product_alone() -> None:
    whole, ready = (
        kc.kernel("gemm", m=16, n=4096, k=4096, dtype="fp8", stack="trtllm", inputs=how) for how in (None, "ready")
    )
    counts = [len(kc.predict(call, H100, kc.Conditions(predictor="generic")).kernels) for call in (whole, ready)]
    assert counts == [2, 1]
    assert kc.predict(ready, H100).time_s < kc.predict(whole, H100).time_s


def test_what_attention_writes_is_quantised_by_a_kernel_of_its_own() -> None:
    """torch.compile joins quantisation with norms and activations; attention is between its pieces."""
    place = deployed(engine=stack("vllm"), dtype="fp8")
    inputs = [
        (dict(launch.call.parameters)["k"], dict(launch.call.parameters).get("inputs"))
        for launch in forward(place, Batch((64,), (0,)))
        if launch.op == "gemm" and launch.part != "head"
    ]
    assert inputs == [(4096, "ready"), (4096, None), (4096, "ready"), (14336, "ready")]  # q, k, v; o; gate, up; down


@pytest.mark.parametrize(
    ("engine", "gpu_id", "attention", "experts"),
    [
        ("vllm", "h100_sxm", "fa3", "triton"),
        ("vllm==0.12", "h100_sxm", "fa3", "triton"),
        ("vllm==0.11", "h100_sxm", "fa3", "marlin"),  # Triton's kernels of mxfp4 were not in its packages
        ("vllm==0.11", "a100_sxm", "triton", "marlin"),  # FlashAttention 2 takes no sinks
        ("sglang", "a100_sxm", "triton", "triton"),
    ],
)
def test_gpt_oss_runs_in_the_kernels_of_the_release(engine: str, gpu_id: str, attention: str, experts: str) -> None:
    launches = forward(deployed("gpt-oss-20b", on=gpu_id, engine=stack(engine)), Batch((1,), (1000,)))
    backends = {each.op: dict(each.call.parameters).get("backend") for each in launches}
    assert (backends["attention"], backends["moe"]) == (attention, experts)
    dense = forward(deployed("llama-3.1-8b", on="a100_sxm", engine=stack("vllm")), Batch((1,), (1000,)))
    assert {dict(each.call.parameters).get("backend") for each in dense if each.op == "attention"} == {"fa2"}


def test_marlins_experts_reach_on_hopper_what_the_campaigns_measured_at_most() -> None:
    """gpt-oss-20b: 24 layers, a step of 8,192 tokens by four experts of 3 x 2880 x 2880 at 232 TFLOP/s."""
    place = deployed("gpt-oss-20b", on="h100_sxm", engine=stack("vllm==0.11"))
    least_s = 24 * 8192 * 4 * 2 * 3 * 2880**2 / 2.32e14
    free = replace(place, stack=replace(place.stack, reaches=()))
    capped_s, free_s = (
        times(infer(each, Workload.equal(1, 8192, 2)))[("prefill", "experts")] for each in (place, free)
    )
    assert capped_s == pytest.approx(least_s) and free_s < 0.6 * capped_s
    decodes = [times(infer(each, Workload.equal(8, 64, 2)))[("decode", "experts")] for each in (place, free)]
    assert decodes[0] == decodes[1]  # bound by memory


def test_deepseek_v2_chooses_experts_by_pytorchs_ops_in_vllm() -> None:
    """A router without a bias is not fused there: two selections and three kernels of the compiler a layer."""
    v2, v3 = "deepseek-v2-lite", "moonlight-16b-a3b"
    for model, engine, more in ((v2, "vllm", 5), (v2, "sglang", 0), (v3, "vllm", 0)):
        where = deployed(model, on="h200_sxm", engine=stack(engine))
        launches = [each for each in forward(where, Batch((64,), (0,))) if each.part == "router"]
        layers = sum(each.count for each in launches if each.op == "gemm")
        assert layers == 26 and sum(each.count for each in launches) == (1 + more) * layers
