"""One static batch by hand: who decodes when, what adds up to what, what fits, and what is refused."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.networks import LayerRun, kernel_times, model
from kernelcast.networks.forward import Batch, Deployment, forward
from kernelcast.networks.precision import Precision
from kernelcast.networks.stack import Stack, stack
from kernelcast.parallel import Layout
from kernelcast.report import infer as report
from kernelcast.serving.infer import _Plan, infer, infer_many, largest_batch
from kernelcast.serving.memory import cache_bytes, memory, read_weight_bytes, weight_bytes
from kernelcast.serving.result import Inference
from kernelcast.serving.workload import Speculation, Workload
from kernelcast.tables import predict_columns

LLAMA = "llama-3.1-8b"


def quiet() -> Stack:
    """vLLM with a host that takes no time."""
    engine = stack("vllm")
    nothing: dict[str, Any] = {f.name: 0.0 for f in fields(engine) if f.name.endswith("_s")}
    return replace(engine, **nothing)


def deployed(name: str = LLAMA, *, on: str = "h100_sxm", engine: Stack | None = None, dtype: str | None = None,
             cache: str | None = None, **layout: Any) -> Deployment:  # fmt: skip
    found = model(name)
    return Deployment(found, kc.gpu(on), engine or stack("vllm"), Precision.of(found, dtype, cache), Layout(**layout))


def times(found: Inference) -> dict[tuple[str, str], float]:
    return {(share.phase, share.part): share.time_s for share in found.shares}


def refusal(deployment: Deployment, workload: Workload) -> str:
    with pytest.raises(KernelcastError) as error:
        infer(deployment, workload)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- parts and totals ----


@pytest.mark.parametrize(
    ("name", "how", "workload"),
    [
        (LLAMA, {"tp": 2}, Workload.equal(4, 512, 64)),
        (LLAMA, {"pp": 2, "micro_batches": 2}, Workload.equal(4, 512, 64, chunk=700)),
        ("qwen3-30b-a3b", {"dp": 2, "ep": 2}, Workload((100, 900, 30), (5, 60, 1))),
        (LLAMA, {}, Workload.equal(2, 512, 64, speculation=Speculation(4, 0.8, deployed("llama-3.2-1b")))),
        ("bert-base", {}, Workload.equal(8, 128, 1)),
    ],
)
def test_parts_sum_to_the_total(name: str, how: dict[str, Any], workload: Workload) -> None:
    found = infer(deployed(name, **how), workload)
    for phase, span in (("prefill", found.prefill), ("decode", found.decode)):
        parts = sum(share.time_s for share in found.shares if share.phase == phase)
        assert parts == pytest.approx(span.time_s, rel=1e-12)
    assert found.total.time_s == found.prefill.time_s + found.decode.time_s
    told = report.fields(found)
    assert sum(part["time_s"] for part in told["breakdown"]) == pytest.approx(told["total_s"], rel=1e-12)
    assert told["prefill_s"] + told["decode_s"] == told["total_s"]
    used = told["memory"]
    assert told["memory_bytes"] == sum(
        used[f"{name}_bytes"] for name in ("weights", "cache", "activation", "stack")
    )  # fmt: skip
    for span in (found.prefill, found.decode, found.total, found.step, found.tpot):
        assert span.low_s <= span.time_s <= span.high_s
    assert found.prefill.low_s < found.prefill.time_s < found.prefill.high_s


def test_twice_the_layers_take_twice_the_layer_time() -> None:
    one = deployed(engine=quiet())
    (run,) = one.model.layers
    found = [
        infer(replace(one, model=replace(one.model, layers=(LayerRun(n * 16, run.layer),))), Workload.equal(2, 300, 20))
        for n in (1, 2, 3)
    ]
    first, second = times(found[0]), times(found[1])
    for phase in ("prefill", "decode"):
        for part in ("projections", "mlp", "attention", "activation", "rotary"):  # nothing of these outside layers
            assert second[phase, part] == 2 * first[phase, part] > 0
        for part in ("embedding", "head", "sampling"):
            assert second[phase, part] == first[phase, part] > 0
    totals = [f.total.time_s for f in found]
    assert totals[2] - totals[1] == pytest.approx(totals[1] - totals[0], rel=1e-9)


def test_the_host_adds_its_times_to_every_pass() -> None:
    # 3 prefill chunks of 100 and 9 decode steps, each 1 ms and 2 ms of host; kernels wait for no launch
    engine = replace(quiet(), prefill_s=1e-3, step_s=2e-3)
    workload = Workload.equal(1, 300, 10, chunk=100)
    slow, fast = infer(deployed(engine=engine), workload), infer(deployed(engine=quiet()), workload)
    assert slow.prefill.time_s - fast.prefill.time_s == pytest.approx(3 * 1e-3)
    assert slow.decode.time_s - fast.decode.time_s == pytest.approx(9 * 2e-3)
    assert times(slow)["decode", "host"] == pytest.approx(18e-3)


def test_a_graph_has_gaps_and_no_launches() -> None:
    # one decode step of n kernels: a graph adds n gaps; without one the host's launches count where they are longer
    workload = Workload.equal(1, 10, 2)
    kernels = sum(call.count for call in forward(deployed(), Batch((1,), (10,))))
    gaps = infer(deployed(engine=replace(quiet(), graphs=True, gap_s=1e-6, launch_s=1.0)), workload)
    assert times(gaps)["decode", "host"] == pytest.approx(kernels * 1e-6)
    launches = infer(deployed(engine=replace(quiet(), graphs=False, gap_s=1.0, launch_s=1e-3)), workload)
    assert launches.decode.time_s == pytest.approx(kernels * 1e-3)  # 1 ms a kernel is longer than any of them


def test_one_way_of_no_cut_is_like_another() -> None:
    workload = Workload.equal(2, 100, 10)
    plain = infer(deployed(), workload)
    assert not [share for share in plain.shares if share.part == "communication"]
    assert infer(deployed(tp=1, sequence_parallel=True), workload).total == plain.total


def test_a_request_listed_twice_is_a_batch_of_two() -> None:
    listed, batch = infer_many([(deployed(), Workload((700, 700), (30, 30))), (deployed(), Workload.equal(2, 700, 30))])
    assert listed.total == batch.total
    assert listed.shares == batch.shares
    assert listed.memory == batch.memory


def test_rates_follow_from_the_times() -> None:
    found = infer(deployed(tp=2), Workload((100, 300), (11, 51)))
    assert (found.steps, found.output_tokens) == (50, 62)
    assert found.tpot.time_s == pytest.approx(found.decode.time_s / 50)
    assert found.ttft_s == found.prefill.time_s
    told = report.fields(found)
    assert told["tokens_per_s"] == pytest.approx(62 / told["total_s"])
    assert told["tokens_per_s_per_gpu"] == pytest.approx(told["tokens_per_s"] / 2)
    assert told["requests_per_s"] == pytest.approx(2 / told["total_s"])


def test_mfu_counts_two_flops_a_weight_and_token() -> None:
    # 1000 prompts' tokens + 9 decoded through 7,504,658,432 - 525,336,576 weights of layers; 10 rows of the head
    found = infer(deployed(), Workload.equal(1, 1000, 10))
    layers = 7_504_658_432 - 128256 * 4096
    assert found.flops == 2 * layers * 1009 + 2 * 128256 * 4096 * 10
    peak = 132 * 4096 * 1.83e9
    assert found.mfu == pytest.approx(found.flops / found.total.time_s / peak)


def test_mfu_of_a_gpu_without_bf16_is_of_its_fp16() -> None:
    gpu = kc.gpu("v100_sxm")
    assert gpu.tensor_flops_per_s("bf16") == 0
    found = infer(deployed("llama-2-7b", on="v100_sxm", dtype="fp16"), Workload.equal(1, 100, 2))
    assert found.mfu == pytest.approx(found.flops / found.total.time_s / gpu.tensor_flops_per_s("fp16"))


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    # Mixtral, one token: 2 of 8 experts, and no embedding table
    place = deployed("mixtral-8x7b", on="b200_sxm")
    expert = 3 * 4096 * 14336
    assert weight_bytes(place) - read_weight_bytes(place, 1) == 2 * (32 * 6 * expert + 32000 * 4096)
    # 2 tokens miss an expert with (6/8)^2: 4.5 of 8 unread
    assert weight_bytes(place) - read_weight_bytes(place, 2) == 2 * (32 * 4.5 * expert + 32000 * 4096)
    assert 0 < infer(place, Workload.equal(1, 100, 20)).bandwidth_use < 1


def test_requests_that_end_early_are_not_read_on() -> None:
    # one request of 101 tokens out beside 63 of 2: the 63 caches are read in one step of 100
    place = deployed()
    mixed = infer(place, Workload((4000, *(63 * (4000,))), (101, *(63 * (2,))), chunk=8192))
    weights = 100 * read_weight_bytes(place, (100 + 63) / 100)
    assert mixed.decode_bytes == pytest.approx(weights + 131_072 * (100 * 4050 + 63 * 4001))
    assert mixed.bandwidth_use < 1


# ---- prefill ----


def test_a_prefill_is_one_pass_unless_it_is_cut() -> None:
    assert Workload((5, 3), (1, 1)).prefills() == [Batch((5, 3), (0, 0))]
    assert Workload((5, 3), (1, 1), chunk=8).prefills() == [Batch((5, 3), (0, 0))]
    assert Workload((5, 3), (1, 1), cached=(2, 0)).prefills() == [Batch((3, 3), (2, 0))]


def test_chunks_take_the_prompts_in_turn() -> None:
    # 5 + 3 in fours: 4 of the first; its last with 3 of the second
    assert Workload((5, 3), (1, 1), chunk=4).prefills() == [Batch((4,), (0,)), Batch((1, 3), (4, 0))]
    # (10 - 2) + 3 + (6 - 1) = 16 new tokens in fives: 5 after 2; 3 after 7 and 2 after 0; 1 after 2 and 4 after 1;
    # and the last one after 5
    uneven = Workload((10, 3, 6), (1, 1, 1), cached=(2, 0, 1), chunk=5).prefills()
    assert uneven == [Batch((5,), (2,)), Batch((3, 2), (7, 0)), Batch((1, 4), (2, 1)), Batch((1,), (5,))]
    # a chunk of one token: each with all before it
    single = Workload((2, 1), (1, 1), chunk=1).prefills()
    assert single == [Batch((1,), (0,)), Batch((1,), (1,)), Batch((1,), (0,))]


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 101, 999, 1000])
def test_chunks_cover_every_token_once(chunk: int) -> None:
    workload = Workload((100, 650, 250), (1, 1, 1), cached=(10, 0, 249), chunk=chunk)
    passes = workload.prefills()
    assert [batch.tokens for batch in passes[:-1]] == (len(passes) - 1) * [min(chunk, 90 + 650 + 1)]
    seen = [place for b in passes for n, past in zip(b.new, b.past, strict=True) for place in range(past, past + n)]
    assert seen == [*range(10, 100), *range(650), 249]


def test_a_chunked_prefill_is_the_sum_of_its_passes() -> None:
    place = deployed(engine=quiet())
    whole = infer(place, Workload.equal(1, 300, 1, chunk=200)).prefill.time_s
    # the second chunk is a prompt of 300 whose first 200 tokens are cached
    parts = [infer(place, Workload.equal(1, n, 1, cached=c)).prefill.time_s for n, c in ((200, 0), (300, 200))]
    assert whole == pytest.approx(sum(parts), rel=1e-12)


# ---- decode ----


def test_requests_leave_when_they_have_their_tokens() -> None:
    # the first token comes from the prefill: outputs 3, 1, 5 take 2, 0 and 4 steps
    steps = Workload((10, 20, 30), (3, 1, 5)).decodes()
    assert steps == [
        (1, Batch((1, 1), (10, 30))), (2, Batch((1, 1), (11, 31))), (3, Batch((1,), (32,))), (4, Batch((1,), (33,))),
    ]  # fmt: skip


def test_one_output_token_needs_no_decode() -> None:
    found = infer(deployed(), Workload.equal(2, 100, 1))
    assert Workload.equal(2, 100, 1).decodes() == []
    assert (found.steps, found.decode.time_s, found.tpot.time_s) == (0, 0.0, 0.0)
    assert found.total == found.prefill


def test_few_steps_are_predicted_one_by_one() -> None:
    # outputs 3 and 5: steps 1 and 2 with both, 3 and 4 with one; each as if it were the only one
    place = deployed(engine=quiet())
    found = infer(place, Workload((100, 100), (3, 5)))
    known = kernel_times.KernelTimes(place.gpu)
    total = 0.0
    for past in ((100, 100), (101, 101), (102,), (103,)):
        calls = forward(place, Batch(len(past) * (1,), past))
        known.learn(calls)
        total += sum(known[call].time_s * call.count for call in calls)
    assert found.decode.time_s == pytest.approx(total, rel=1e-12)


def test_predicted_steps_stand_for_all_of_a_line() -> None:
    # 299 steps, the first 99 with two requests: every weight on its own stretch, and exact for t = 1 and t = step
    plan = _Plan(deployed(), Workload((10, 10), (100, 300)))
    steps = np.array([step for step, _ in plan.decodes])
    weights = np.array([weight for weight, _ in plan._weighted()])
    assert len(steps) < 30
    for first, last in ((1, 99), (100, 299)):
        inside = (steps >= first) & (steps <= last)
        assert steps[inside][[0, -1]].tolist() == [first, last]
        assert weights[inside].sum() == pytest.approx(last - first + 1)
        assert weights[inside] @ steps[inside] == pytest.approx((first + last) * (last - first + 1) / 2)


def test_steps_between_lie_near_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload((500, 2000), (200, 400))
    sampled = infer(deployed(), workload).decode.time_s
    monkeypatch.setattr("kernelcast.serving.workload._SAMPLED_STEPS", 1000)
    assert sampled == pytest.approx(infer(deployed(), workload).decode.time_s, rel=0.01)


# ---- speculation ----


@pytest.mark.parametrize(
    ("draft_tokens", "acceptance", "expected"),
    [(2, 0.5, 1.75), (4, 0.8, 3.3616), (3, 1.0, 4.0), (3, 0.0, 1.0)],  # 1 + 0.5 + 0.25; (1 - 0.8^5) / 0.2
)
def test_tokens_a_speculative_step_gives(draft_tokens: int, acceptance: float, expected: float) -> None:
    assert Speculation(draft_tokens, acceptance).tokens_per_step == pytest.approx(expected)


def test_speculation_takes_fewer_and_wider_steps() -> None:
    # 128 tokens after the first at 1.75 a step: 74 steps, each with the 2 guesses and one token of its own
    workload = Workload.equal(1, 1000, 129, speculation=Speculation(2, 0.5))
    steps = workload.decodes()
    assert steps[0] == (1, Batch((3,), (1000,), head_rows=3))  # all three are checked
    assert steps[-1] == (74, Batch((3,), (1000 + int(73 * 1.75),), head_rows=3))
    found, plain = infer(deployed(), workload), infer(deployed(), Workload.equal(1, 1000, 129))
    assert (found.steps, plain.steps) == (74, 128)
    assert found.decode.time_s < plain.decode.time_s
    assert found.tpot.time_s == pytest.approx(found.decode.time_s / 128)
    assert found.step.time_s == pytest.approx(found.decode.time_s / 74)
    assert found.step.time_s > plain.step.time_s


def test_a_draft_model_runs_once_a_guess() -> None:
    free = Workload.equal(1, 1000, 129, speculation=Speculation(2, 0.5))
    draft = deployed("llama-3.2-1b", engine=quiet())
    paid = replace(free, speculation=Speculation(2, 0.5, draft))
    place = deployed(engine=quiet())
    without, found = infer(place, free), infer(place, paid)
    share, first = (next(s for s in found.shares if (s.phase, s.part) == (phase, "draft model"))
                    for phase in ("decode", "prefill"))  # fmt: skip
    assert found.prefill.time_s - without.prefill.time_s == pytest.approx(first.time_s)  # it reads the prompt too
    beside = weight_bytes(draft) + cache_bytes(draft, 1129)
    assert found.memory.used_bytes - without.memory.used_bytes == pytest.approx(beside)
    assert found.decode.time_s - without.decode.time_s == pytest.approx(share.time_s)
    # 74 steps x 2 guesses of a pass of the small model
    launched = sum(call.count for call in forward(draft, Batch((1,), (1000,))))
    assert share.kernels == pytest.approx(74 * 2 * launched)


@pytest.mark.parametrize(("tokens", "acceptance"), [(0, 0.5), (2, -0.1), (2, 1.1)])
def test_speculation_that_cannot_be_is_refused(tokens: int, acceptance: float) -> None:
    with pytest.raises(KernelcastError):
        Speculation(tokens, acceptance)


# ---- memory ----


def test_weights_of_llama() -> None:
    # 8,030,261,248 weights of 2 bytes; cut over two, the 65 norms of 4096 stay whole on each
    assert weight_bytes(deployed()) == 8_030_261_248 * 2
    assert weight_bytes(deployed(tp=2)) == (8_030_261_248 - 65 * 4096) + 65 * 4096 * 2
    # fp8: layers a byte each; embedding, head (128256 x 4096 each) and norms keep 2
    kept = 2 * 128256 * 4096 + 65 * 4096
    assert weight_bytes(deployed(dtype="fp8")) == 8_030_261_248 + kept
    # two stages: half of the layers, and the embedding or the head
    ends = 2 * 128256 * 4096
    assert weight_bytes(deployed(pp=2)) == (8_030_261_248 - ends) + ends


def test_a_token_of_llama_takes_128_kib_of_cache() -> None:
    # keys and values x 8 heads x 128 x 32 layers x 2 bytes
    assert cache_bytes(deployed(), 1) == 2 * 8 * 128 * 32 * 2 == 131_072
    assert cache_bytes(deployed(), 1000) == 131_072_000
    assert cache_bytes(deployed(cache="fp8"), 1) == 65_536
    # cut by tp until each GPU has one head
    assert [cache_bytes(deployed(tp=tp), 1) for tp in (2, 8, 16)] == [65_536, 16_384, 16_384]
    assert cache_bytes(deployed(pp=4), 1) == cache_bytes(deployed(dp=4), 1) == 32_768


def test_a_latent_is_not_cut() -> None:
    # (512 + 64) x 61 layers x 2 bytes on every GPU
    for tp in (1, 8):
        assert cache_bytes(deployed("deepseek-v3", tp=tp), 1) == 576 * 61 * 2


def test_a_window_caps_the_cache() -> None:
    # Gemma 2 9B: 42 layers, half with a window of 4096; keys and values of 8 heads x 256 x 2 bytes
    assert cache_bytes(deployed("gemma-2-9b"), 8000) == 21 * (4096 + 8000) * 2 * 8 * 256 * 2
    assert cache_bytes(deployed("gemma-2-9b"), 4000) == 42 * 4000 * 2 * 8 * 256 * 2


def test_an_encoder_has_no_cache() -> None:
    assert cache_bytes(deployed("bert-base"), 512) == 0


def test_activations_are_of_the_widest_layer_or_the_logits() -> None:
    # 1000 tokens x (4 x 4096 + 3 x 14336) x 2 bytes; 1000 rows of logits are 1000 x 128256 x (4 + 2)
    place = deployed()
    assert memory(place, {}, 1000, 1).activation_bytes == 1000 * (4 * 4096 + 3 * 14336) * 2
    assert memory(place, {}, 1000, 1000).activation_bytes == 1000 * 128256 * 6


def test_memory_holds_every_request_at_its_end() -> None:
    found = infer(deployed(), Workload((100, 300), (11, 51))).memory
    assert found.cache_bytes == (111 + 351) * 131_072
    assert found.activation_bytes == max(400 * (4 * 4096 + 3 * 14336) * 2, 2 * 128256 * 6)
    assert found.stack_bytes == stack("vllm").reserved_bytes
    assert found.available_bytes == stack("vllm").used_share * kc.gpu("h100_sxm").dram_bytes
    assert found.used_bytes + found.free_bytes == pytest.approx(found.available_bytes)


@pytest.mark.parametrize(
    ("how", "workload"),
    [
        ({}, Workload.equal(1000, 1024, 128)),
        ({}, Workload.equal(1000, 1024, 128, cached=1000)),
        ({}, Workload.equal(1000, 1024, 128, chunk=2048)),
        ({"tp": 2}, Workload.equal(2000, 2048, 512)),
    ],
)
def test_the_refusal_says_by_how_much_and_what_fits(how: dict[str, Any], workload: Workload) -> None:
    place = deployed(**how)
    said = refusal(place, workload)
    largest = int(re.findall(r"the largest batch of this kind is (\d+)$", said)[0])
    assert largest == largest_batch(place, workload) > 0

    def of(batch: int) -> Workload:
        first = (workload.inputs[0], workload.outputs[0], workload.past[0])
        return Workload.equal(batch, *first, chunk=workload.chunk)

    assert infer(place, of(largest)).memory.free_bytes >= 0
    assert "GiB more than" in refusal(place, of(largest + 1))


def test_the_refusal_counts_every_use() -> None:
    # 1000 x (1024 + 128) tokens: weights 15.0 GiB, cache 1152 x 128 KiB x 1000 = 140.6, activations 1,024,000 tokens
    # x 59392 numbers x 2 bytes = 113.3
    engine, gib = stack("vllm"), 2**30
    said = refusal(deployed(), Workload.equal(1000, 1024, 128))
    assert "weights 15.0, KV cache 140.6, activations 113.3" in said
    used = 8_030_261_248 * 2 + 1_152_000 * 131_072 + 1_024_000 * 59_392 * 2 + engine.reserved_bytes
    missing = used - engine.used_share * kc.gpu("h100_sxm").dram_bytes
    assert f"{missing / gib:.1f} GiB more than" in said


def test_weights_that_are_too_large_say_so() -> None:
    said = refusal(deployed("llama-3.1-70b"), Workload.equal(1, 100, 10))
    assert "its weights alone are too large" in said and "--tp" in said
    assert infer(deployed("llama-3.1-70b", tp=4), Workload.equal(1, 100, 10)).memory.free_bytes > 0


def test_a_request_too_long_for_memory_says_what_to_do() -> None:
    # one request of 128k tokens on 24 GB: the weights fit, its cache of 16 GiB does not
    said = refusal(deployed(on="l4"), Workload.equal(1, 130_000, 1000, chunk=2048))
    assert "take fewer or shorter requests" in said


def test_the_largest_batch_of_a_small_model_is_found_at_once() -> None:
    # each of half a million requests: 2 tokens x keys and values x 768 x 12 layers x 2 bytes of cache, and a row of
    # 50272 logits x 6 bytes
    place, engine = deployed("opt-125m", on="b200_sxm"), stack("vllm")
    free = engine.used_share * place.gpu.dram_bytes - engine.reserved_bytes - weight_bytes(place)
    assert largest_batch(place, Workload.equal(1, 1, 1)) == free // (2 * 2 * 768 * 12 * 2 + 50272 * 6) > 400_000


# ---- pipelines ----


def test_stages_one_after_another_take_as_long_as_one_gpu() -> None:
    workload = Workload.equal(2, 300, 20)
    one, two = (times(infer(deployed(engine=quiet(), pp=pp), workload)) for pp in (1, 2))
    sent = {key: value for key, value in two.items() if key not in one}
    assert set(sent) == {("prefill", "communication"), ("decode", "communication")}
    assert {key: two[key] for key in one} == one


def test_micro_batches_fill_the_stages() -> None:
    # 8 requests as 4 of 2 over 2 stages: a stage's time is half a pass; 4 + 1 of them for the prefill, and in decode
    # each of the 4 in turn, with no stage idle
    whole = infer(deployed(engine=quiet(), pp=2, micro_batches=4), Workload.equal(8, 300, 20))
    part = infer(deployed(engine=quiet(), pp=2), Workload.equal(2, 300, 20))
    assert whole.prefill.time_s == pytest.approx(part.prefill.time_s * (4 + 2 - 1) / 2)
    assert whole.decode.time_s == pytest.approx(part.decode.time_s * 4 / 2)


def test_attention_dp_runs_a_part_of_the_batch_on_each_rank() -> None:
    # 8 requests over 2 ranks of a dense model: as 4 on one GPU
    cut = infer(deployed(engine=quiet(), dp=2), Workload.equal(8, 300, 20))
    four = infer(deployed(engine=quiet()), Workload.equal(4, 300, 20))
    assert cut.total.time_s == pytest.approx(four.total.time_s)
    assert cut.tokens_per_s == pytest.approx(2 * four.tokens_per_s)


# ---- refusals ----


def test_an_encoder_writes_nothing() -> None:
    assert "bert-base is an encoder" in refusal(deployed("bert-base"), Workload.equal(1, 100, 2))


def test_the_context_is_a_limit() -> None:
    # Llama 3.1: 131,072 tokens, prompt and output together
    assert "131,073 tokens exceeds the context of llama-3.1-8b, 131,072" in refusal(
        deployed(), Workload.equal(1, 131_000, 73, chunk=2048)
    )
    assert infer(deployed(), Workload.equal(1, 131_000, 72, chunk=2048)).steps == 71
    # an encoder writes none: its 512 positions are all for the prompt
    assert infer(deployed("bert-base"), Workload.equal(1, 512, 1)).prefill.time_s > 0
    assert "513 tokens exceeds the context of bert-base, 512" in refusal(
        deployed("bert-base"), Workload.equal(1, 513, 1)
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "cached", "chunk", "said"),
    [
        ((), (), (), 0, "give one of each"),
        ((1, 2), (1,), (), 0, "2 prompts and 1 outputs"),
        ((0,), (1,), (), 0, "at least one input token"),
        ((1,), (0,), (), 0, "one output token"),
        ((5, 5), (1, 1), (1,), 0, "1 cached prefixes for 2 prompts"),
        ((5,), (1,), (5,), 0, "cached tokens must be fewer"),
        ((5,), (1,), (), -1, "not -1"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    inputs: tuple[int, ...], outputs: tuple[int, ...], cached: tuple[int, ...], chunk: int, said: str
) -> None:
    with pytest.raises(KernelcastError, match=said):
        Workload(inputs, outputs, cached, chunk)


def test_a_format_that_the_gpu_lacks_is_refused_in_its_words() -> None:
    said = refusal(deployed(on="a100_sxm", dtype="fp8"), Workload.equal(1, 100, 2))
    assert said.startswith("a100_sxm has no fp8 matrix arithmetic; it has")
    assert "row" not in said  # of a table that nobody gave


# ---- many at once ----


def test_many_at_once_are_as_one_by_one() -> None:
    cases = [
        (deployed(), Workload.equal(1, 100, 10)),
        (deployed(on="a100_sxm"), Workload.equal(1, 100, 10)),
        (deployed("qwen3-8b"), Workload((50, 500), (3, 30))),
        (deployed(tp=2), Workload.equal(1, 100, 10)),
    ]
    assert infer_many(cases) == [infer(*case) for case in cases]


def test_shared_calls_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = predict_columns

    def counted(columns: Any, *more: Any) -> Any:
        asked.append(len(columns["op"]))
        return real(columns, *more)

    monkeypatch.setattr(kernel_times, "predict_columns", counted)
    one = (deployed(), Workload.equal(1, 100, 10))
    (alone,) = infer_many([one])
    rows = asked.pop()
    first, second = infer_many([one, (deployed(), Workload.equal(1, 100, 10))])
    assert asked == [rows]  # one table, no longer than for one
    assert first == second == alone
    asked.clear()
    infer_many([one, (deployed(), Workload.equal(1, 100, 10, cached=50))])
    assert len(asked) == 1 and rows < asked[0] < 2 * rows  # the decode steps are shared


def test_skip_is_told_of_what_is_refused() -> None:
    told: dict[int, str] = {}
    good = (deployed(), Workload.equal(1, 100, 10))
    cases = [
        (deployed(), Workload.equal(9999, 1024, 128)),
        good,
        (deployed(on="a100_sxm", dtype="fp8"), Workload.equal(1, 100, 10)),
        (deployed(on="a100_sxm"), Workload.equal(1, 100, 10)),
    ]
    found = infer_many(cases, skip=lambda at, error: told.update({at: str(error)}))
    assert found == [infer(*good), infer(*cases[3])]
    assert set(told) == {0, 2}
    assert "GiB more than" in told[0]
    assert "a100_sxm has no fp8" in told[2]
    with pytest.raises(KernelcastError):
        infer_many(cases)


def test_micro_batches_that_do_not_exist_cost_nothing() -> None:
    few, many = (infer(deployed(pp=2, micro_batches=n, engine=quiet()), Workload.equal(2, 512, 8)) for n in (2, 8))
    assert few.total == many.total
    # two stages, two micro-batches: the prefill has (2 + 2 - 1) / 2 times a micro-batch's work
    one = infer(deployed(pp=2, engine=quiet()), Workload.equal(1, 512, 1))
    assert few.prefill.time_s == pytest.approx(one.prefill.time_s * 1.5)


def test_long_prefills_of_an_l40_are_limited_by_its_power() -> None:
    # 0.34 TFLOP/J x 300 W = 102 TFLOP/s; 65,536 tokens by 6.98e9 weights, and 8 rows of the head
    found = infer(deployed(on="l40", engine=quiet()), Workload.equal(8, 8192, 1))
    parts = {share.part: share.time_s for share in found.shares}
    products = parts["mlp"] + parts["projections"] + parts["head"]
    layers = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    flops = 2 * 65536 * layers + 2 * 8 * 4096 * 128256
    assert products + parts["power limit"] == pytest.approx(flops / 102e12)
    short = infer(deployed(on="l40", engine=quiet()), Workload.equal(1, 128, 1))
    assert not any(share.part == "power limit" for share in short.shares)
    # nobody measured what products in 8 bits need
    narrow = infer(deployed(on="l40", dtype="fp8"), Workload.equal(16, 4096, 1))
    assert not any(share.part == "power limit" for share in narrow.shares)
    assert sum(parts.values()) == pytest.approx(found.total.time_s)
