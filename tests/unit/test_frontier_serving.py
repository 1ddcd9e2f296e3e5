"""How frontier models are served: kernels that others beat, prompts that wait for other ranks, guesses by the model's
own layers, ops that are many calls of Python."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from deployments import deployed, quiet
from test_engine import asked

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.inference.deployment import Deployment
from kernelcast.inference.infer import Inference, faster_kernels, infer
from kernelcast.inference.workload import Speculation, Workload
from kernelcast.models.architecture import draft_of
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import RequestTimes, StepLog
from kernelcast.serving.service import EnginePool, Service, engine_settings
from kernelcast.serving.simulate import Cluster, simulate
from kernelcast.serving.step_times import StepTimeTables, step_time_tables
from kernelcast.stacks import stack

# ---- kernels that others beat ----


def answered(moe_backend: str = "", dtype: str = "fp8") -> Inference:
    engine = replace(stack("vllm"), moe_backend=moe_backend)
    return infer(deployed("qwen3-30b-a3b", on="h200_sxm", engine=engine, dtype=dtype), Workload.equal(1, 1024, 16))


def test_a_kernel_that_others_beat_by_far_is_used_and_told() -> None:
    """vLLM's CUTLASS experts in fp8 on Hopper were measured at several times what others take in numbers as wide."""
    found = answered("cutlass")
    told = {one.phase: one for one in faster_kernels(found)}
    decode = told["decode"]
    assert dict(decode.call.parameters)["backend"] == "cutlass"
    assert decode.time_s > 2 * decode.other_s
    other = dict(decode.other.parameters)
    assert other["dtype"] in ("fp8", "fp8_block", "int8")  # as wide
    sizes = ("tokens", "hidden", "inter", "experts", "topk", "tp", "ep", "skew")
    assert all(other[name] == dict(decode.call.parameters)[name] for name in sizes)
    runs, faster = decode.as_dict()["runs"], decode.as_dict()["faster"]
    assert runs == {"stack": "vllm", "backend": "cutlass", "dtype": "fp8"} and faster != runs
    assert "experts take" in decode.text and f"{decode.other_s * 1e6:,.0f}" in decode.text
    # it is what runs: the pass has its time, in each of 48 layers
    experts_s = sum(share.time_s for share in found.shares if (share.phase, share.part) == ("decode", "experts"))
    assert experts_s == pytest.approx(15 * 48 * decode.time_s, rel=0.05)


def test_the_usual_kernels_have_none_that_beat_them_by_far() -> None:
    assert faster_kernels(answered()) == []
    assert faster_kernels(answered(dtype="bf16")) == []
    dense = infer(deployed(on="h200_sxm", dtype="fp8"), Workload.equal(1, 64, 2))
    assert faster_kernels(dense) == []  # no experts


def test_what_is_kept_of_one_gpu_is_not_told_of_another() -> None:
    found = answered("cutlass")
    told = faster_kernels(found)
    deployment = found.deployment
    faster = replace(deployment, gpu=deployment.gpu.replace(dram_bytes_per_s=1.5 * deployment.gpu.dram_bytes_per_s))
    times_s = [one.time_s for one in faster_kernels(infer(faster, found.workload))]
    assert times_s and times_s[-1] < told[-1].time_s  # decode reads weights
    assert faster_kernels(answered("cutlass")) == told == faster_kernels(found)


# ---- prompts that wait for other ranks ----


@cache
def two_ranks() -> tuple[Deployment, StepTimeTables]:
    engine = replace(stack("trtllm"), request_s=0.0, front_s=0.0, token_s=0.0)
    return deployed("qwen3-30b-a3b", engine=engine, dp=2, ep=2), step_time_tables()


def ran(wait: int, load: Load) -> tuple[RequestTimes, StepLog]:
    """By a scheduler that does not work ahead: who comes during a step may run in the next."""
    place, tables = two_ranks()
    own = engine_settings(place, {"dp_wait": wait, "async_scheduling": False, "chunked_prefill": True})
    fleet = Cluster(Service(EnginePool(place, own)), load, tables)
    fleet.run()
    return RequestTimes.of(fleet.requests, load), fleet.step_log


ALONE = asked([0.0, 0.0, 1.0], [64, 64, 512], [400, 400, 10])  # one decodes on each rank; then a prompt comes
BOTH = asked([0.0, 0.0, 1.0, 1.01], [64, 64, 512, 512], [400, 400, 10, 10])  # and one for the other rank


def steps_between(notes: StepLog, arrival_s: float) -> int:
    """Decode steps from the first that begins after an arrival to the one that reads its prompt."""
    stretches = zip(notes.start_s, notes.steps, notes.prompt_tokens, strict=True)
    later = [(steps, prompts) for start_s, steps, prompts in stretches if start_s >= arrival_s]
    reading = next(at for at, (_, prompts) in enumerate(later) if prompts)
    return sum(steps for steps, _ in later[:reading])


@pytest.mark.parametrize("wait", [0, 1, 20])
def test_a_prompt_waits_for_other_ranks_for_so_many_steps(wait: int) -> None:
    served, notes = ran(wait, ALONE)
    assert steps_between(notes, 1.0) == wait
    assert served.done.all()
    plain, _ = ran(0, ALONE)
    step_s = float(plain.tpot_s[0])
    assert served.ttft_s[2] - plain.ttft_s[2] == pytest.approx(wait * step_s, rel=0.15, abs=1e-9)


def test_prompts_of_both_ranks_are_read_in_one_step() -> None:
    """The second comes while the first waits: those that decode wait once, not twice."""
    apart, one_by_one = ran(0, BOTH)
    together, at_once = ran(60, BOTH)
    assert max(one_by_one.prompt_tokens) == 512 and max(at_once.prompt_tokens) == 1024
    assert steps_between(at_once, 1.0) < 60
    assert together.ttft_s[2] > apart.ttft_s[2]
    assert together.ttft_s[3] < apart.ttft_s[3]  # whom the first kept waiting
    assert together.last_token_s[0] < apart.last_token_s[0]
    long = [sum(count[gap_s > 0.02]) for gap_s, count, _ in (notes.gaps() for notes in (one_by_one, at_once))]
    assert long[1] < long[0]  # gaps with a prompt in them: steps alone take 7 ms


def test_waiting_needs_other_ranks_and_a_number_of_steps() -> None:
    place = deployed()
    plain, held = (
        simulate(
            Service(EnginePool(place, engine_settings(place, {"dp_wait": wait}))), ALONE, intervals=False
        ).request_times
        for wait in (0, 30)
    )
    assert (plain.last_token_s == held.last_token_s).all()  # one rank waits for nobody
    with pytest.raises(KernelcastError, match="dp_wait must be 0 or more, not -1"):
        engine_settings(place, {"dp_wait": -1})


# ---- guesses by the model's own layers ----


@cache
def r1() -> Deployment:
    return deployed("deepseek-r1", on="h200_sxm", tp=8)


def guesses(acceptance: float, *, own: bool) -> Speculation:
    return Speculation(3, acceptance, replace(r1(), model=draft_of(r1().model)) if own else None)


def test_own_layers_that_guess_well_are_worth_their_time_in_infer() -> None:
    plain, free, own, wrong = (
        infer(r1(), Workload.equal(4, 512, 33, speculation=how))
        for how in (None, guesses(0.7, own=False), guesses(0.7, own=True), guesses(0.0, own=True))
    )
    times = [one.tpot.value for one in (free, own, plain, wrong)]
    assert times == sorted(times) and len(set(times)) == 4
    # (1 - 0.7^4) / (1 - 0.7) = 2.533 tokens a step: 32 take 13 steps; where every guess is wrong, one a step
    assert own.tpot.value == pytest.approx(own.step.value * 13 / 32)
    assert wrong.tpot.value == wrong.step.value
    # a step drafts three times: each is one layer of 61, what joins it, and the head
    drafting_s = own.step.value - free.step.value
    assert 3 / 61 * plain.step.value < drafting_s < 12 / 61 * plain.step.value
    assert own.prefill.value > plain.prefill.value == free.prefill.value  # it reads the prompt too
    assert own.memory["weights"] > plain.memory["weights"]


def test_own_layers_that_guess_well_are_worth_their_time_under_load() -> None:
    load, tables = asked(np.zeros(6), 6 * [512], 6 * [40], concurrency=3), step_time_tables()
    pool = EnginePool(r1(), engine_settings(r1(), {"max_num_seqs": 4}))
    plain, free, own = (
        simulate(Service(pool, speculation=how), load, intervals=False, tables=tables).metrics["mean_tpot_ms"]
        for how in (None, guesses(0.7, own=False), guesses(0.7, own=True))
    )
    assert free < own < plain


# ---- ops that are many calls of Python ----


def test_host_time_of_an_op_is_its_own_or_that_of_all() -> None:
    engine = replace(stack("sglang"), launch_s=1e-5, eager_ops=(("moe", 1e-3), ("mla_layer", 5e-4)))
    assert [engine.launching_s(op) for op in ("moe", "mla_layer", "gemm")] == [1e-3, 5e-4, 1e-5]
    slow = engine.with_host(3.0)
    assert [slow.launching_s(op) for op in ("moe", "mla_layer", "gemm")] == pytest.approx([3e-3, 1.5e-3, 3e-5])
    assert engine.with_host(1.0) is engine


def test_prompts_without_a_graph_wait_for_it_and_steps_with_one_do_not() -> None:
    """48 layers of experts at 10 ms each are 0.48 s, far more than the kernels of 1,024 tokens take."""
    plain = replace(quiet(), graph_prompts=False)
    slow = replace(plain, eager_ops=(("moe", 1e-2),))
    before, after = (
        infer(deployed("qwen3-30b-a3b", engine=engine), Workload.equal(1, 1024, 9)) for engine in (plain, slow)
    )
    assert before.prefill.value < 0.1
    assert after.prefill.value == pytest.approx(48 * 1e-2)
    assert after.step.value == before.step.value
    dense = [infer(deployed(engine=engine), Workload.equal(1, 1024, 2)).prefill for engine in (plain, slow)]
    assert dense[0] == dense[1]  # no such op


def test_an_engine_under_load_waits_for_it_too() -> None:
    load, waits = asked([0.0], [2048], [2]), []
    for eager in ((), (("moe", 1e-2),)):
        place = deployed("qwen3-30b-a3b", engine=replace(quiet(), graph_prompts=False, eager_ops=eager))
        found = simulate(Service(EnginePool(place, engine_settings(place, {"max_num_batched_tokens": 2048}))), load,
                         intervals=False)  # fmt: skip
        waits.append(float(found.request_times.ttft_s[0]))
    assert waits[0] < 0.1 and waits[1] == pytest.approx(48 * 1e-2, rel=1e-3)


def test_gpt_oss_by_the_backend_that_tensorrt_llm_benchmarks_keeps_its_8_bit_activations() -> None:
    """On Blackwell the performance overview runs CUTLASS, the default is trtllm-gen: both with 8 bits, neither with the
    16 bits of the checkpoint, which take four times as long."""
    kernels_s = {}
    for backend in (None, "trtllm", "cutlass", "triton"):
        found = kc.infer("gpt-oss-20b", gpu="b200_sxm", stack="trtllm", batch=2048, input_len=1000, output_len=8,
                         kv_dtype="fp8", moe_backend=backend)  # fmt: skip
        kernels_s[backend] = sum(x.time_s for x in found.shares if x.phase == "decode" and x.part != "host")
    assert kernels_s["trtllm"] == kernels_s[None]
    assert kernels_s["cutlass"] < 1.5 * kernels_s[None]
    assert kernels_s["triton"] > 1.5 * kernels_s[None]  # with 16 bits
