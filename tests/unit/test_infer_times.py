"""Times of one static batch by hand: what adds up to what, rates, stages and ranks, and many batches at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from deployments import LLAMA, deployed, quiet, times

import kernelcast as kc
from kernelcast.app.report import infer as report
from kernelcast.errors import KernelcastError
from kernelcast.forecast import predict_table as memo
from kernelcast.forecast.predict_table import forecast_table
from kernelcast.inference.batch import Batch
from kernelcast.inference.forward import forward
from kernelcast.inference.infer import infer, infer_many
from kernelcast.inference.memory import read_weight_bytes, weight_bytes
from kernelcast.inference.workload import Speculation, Workload
from kernelcast.models import model
from kernelcast.models.layers import LatentAttention, LayerRun, SelfAttention
from kernelcast.stacks import stack

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
        assert parts == pytest.approx(span.value, rel=1e-12)
    assert found.total.value == found.prefill.value + found.decode.value
    told = report.fields(found)
    assert sum(part["time_s"] for part in told["breakdown"]) == pytest.approx(told["total_s"], rel=1e-12)
    assert told["prefill_s"] + told["decode_s"] == told["total_s"]
    used = told["memory"]
    assert told["memory_bytes"] == sum(
        used[f"{name}_bytes"] for name in ("weights", "cache", "activation", "stack")
    )  # fmt: skip
    for span in (found.prefill, found.decode, found.total, found.step, found.tpot):
        assert span.low <= span.value <= span.high
    assert found.prefill.low < found.prefill.value < found.prefill.high


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
    totals = [f.total.value for f in found]
    assert totals[2] - totals[1] == pytest.approx(totals[1] - totals[0], rel=1e-9)


def test_the_host_adds_its_times_to_every_pass() -> None:
    # 3 prefill chunks of 100 and 9 decode steps, each 1 ms and 2 ms of host; kernels wait for no launch
    engine = replace(quiet(), prefill_s=1e-3, step_s=2e-3)
    workload = Workload.equal(1, 300, 10, chunk=100)
    slow, fast = infer(deployed(engine=engine), workload), infer(deployed(engine=quiet()), workload)
    assert slow.prefill.value - fast.prefill.value == pytest.approx(3 * 1e-3)
    assert slow.decode.value - fast.decode.value == pytest.approx(9 * 2e-3)
    assert times(slow)["decode", "host"] == pytest.approx(18e-3)


def test_a_graph_has_gaps_and_no_launches() -> None:
    # one decode step of n kernels: a graph adds n gaps; without one the host's launches count where they are longer
    workload = Workload.equal(1, 10, 2)
    kernels = sum(call.count for call in forward(deployed(), Batch((1,), (10,))))
    gaps = infer(deployed(engine=replace(quiet(), graphs=True, gap_s=1e-6, launch_s=1.0)), workload)
    assert times(gaps)["decode", "host"] == pytest.approx(kernels * 1e-6)
    launches = infer(deployed(engine=replace(quiet(), graphs=False, gap_s=1.0, launch_s=1e-3)), workload)
    assert launches.decode.value == pytest.approx(kernels * 1e-3)  # 1 ms a kernel is longer than any of them


def test_a_decode_step_beyond_the_largest_captured_size_is_launched_kernel_by_kernel() -> None:
    # vLLM captures up to 512 tokens: 512 sequences are a graph, 513 are not; one launch of 10 ms is longer than a step
    engine = replace(quiet(), graphs=True, gap_s=1e-6, launch_s=1e-2)
    for batch, each_s in ((512, 1e-6), (513, 1e-2)):
        kernels = sum(call.count for call in forward(deployed(), Batch(batch * (1,), batch * (10,))))
        found = infer(deployed(engine=engine), Workload.equal(batch, 10, 2))
        kernels_s = found.decode.value - times(found)["decode", "host"]
        waits_s = kernels * each_s - (kernels_s if batch > 512 else 0.0)
        assert times(found)["decode", "host"] == pytest.approx(waits_s)


def test_captured_sizes_are_tokens_of_vllm_and_sequences_of_engines_that_capture_decodes_alone() -> None:
    # 200 sequences that verify 3 draft tokens each are 800 tokens
    assert [stack(name).replays(800, 200, decodes=True) for name in ("vllm", "sglang", "trtllm")] == [False, True, True]
    assert [stack(name).replays(2100, 2100, decodes=True) for name in ("vllm", "sglang", "trtllm")] == 3 * [False]
    assert [stack(name).replays(500, 1, decodes=False) for name in ("vllm", "sglang", "trtllm")] == [True, False, False]


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
    assert found.tpot.value == pytest.approx(found.decode.value / 50)
    assert found.ttft_s == found.prefill.value
    told = report.fields(found)
    assert told["tokens_per_s"] == pytest.approx(62 / told["total_s"])
    assert told["tokens_per_s_per_gpu"] == pytest.approx(told["tokens_per_s"] / 2)
    assert told["requests_per_s"] == pytest.approx(2 / told["total_s"])


def test_mfu_counts_two_flops_a_weight_and_token_and_attention() -> None:
    # 1000 prompts' tokens + 9 decoded through 7,504,658,432 - 525,336,576 weights of layers; 10 rows of the head;
    # scores and values of 32 heads of 128 in 32 layers: 1000 queries over 1000 keys, then one over 1001 .. 1009
    found = infer(deployed(), Workload.equal(1, 1000, 10))
    layers = 7_504_658_432 - 128256 * 4096
    pairs = 1000 * 1000 + sum(range(1001, 1010))
    assert found.flops == 2 * layers * 1009 + 2 * 128256 * 4096 * 10 + 32 * 4 * 32 * 128 * pairs
    peak = 132 * 4096 * 1.83e9
    assert found.mfu == pytest.approx(found.flops / found.total.value / peak)


def test_mfu_of_a_gpu_without_bf16_is_of_its_fp16() -> None:
    gpu = kc.gpu("v100_sxm")
    assert gpu.tensor_flops_per_s("bf16") == 0
    found = infer(deployed("llama-2-7b", on="v100_sxm", dtype="fp16"), Workload.equal(1, 100, 2))
    assert found.mfu == pytest.approx(found.flops / found.total.value / gpu.tensor_flops_per_s("fp16"))


def test_mfu_is_relative_to_the_peak_of_each_format() -> None:
    # FP8 products of the layers at the FP8 peak of an H100; the head and attention at that of bf16
    work, gpu = Workload.equal(1, 1000, 1), kc.gpu("h100_sxm")
    found = infer(deployed(dtype="fp8"), work)
    layers = 2 * (7_504_658_432 - 128256 * 4096) * 1000
    at_peak_s = layers / gpu.tensor_flops_per_s("fp8") + (found.flops - layers) / gpu.tensor_flops_per_s("bf16")
    assert found.mfu == pytest.approx(at_peak_s / found.total.value)


def test_a_window_and_a_selection_bound_the_keys_that_attention_counts() -> None:
    # 8 heads of 64: 4 FLOPs for each of 512 columns and key; a window of 100 of 1,000 keys
    assert SelfAttention(8, 2, 64).query_flops(1000) == 4 * 512 * 1000
    assert SelfAttention(8, 2, 64, window=100).query_flops(1000) == 4 * 512 * 100
    # DeepSeek-V3.2: 128 heads of 192 and 128 over 2,048 keys; its indexer's 64 heads of 128 score all 10,000
    sparse = next(r.layer.attention for r in model("deepseek-v3.2").layers)
    assert isinstance(sparse, LatentAttention)
    assert sparse.query_flops(10_000) == 2 * 128 * (192 + 128) * 2048 + 2 * 64 * 128 * 10_000


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


def test_long_prefills_of_an_l40_are_limited_by_its_power() -> None:
    # 0.34 TFLOP/J x 300 W = 102 TFLOP/s; 65,536 tokens by 6.98e9 weights; 8 rows of the head wait for DRAM anyway
    found = infer(deployed(on="l40", engine=quiet()), Workload.equal(8, 8192, 1))
    parts = {share.part: share.time_s for share in found.shares}
    products = parts["mlp"] + parts["projections"]
    layers = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert products + parts["power limit"] == pytest.approx(2 * 65536 * layers / 102e12)
    short = infer(deployed(on="l40", engine=quiet()), Workload.equal(1, 128, 1))
    assert not any(share.part == "power limit" for share in short.shares)
    # nobody measured what products in 8 bits need
    narrow = infer(deployed(on="l40", dtype="fp8"), Workload.equal(16, 4096, 1))
    assert not any(share.part == "power limit" for share in narrow.shares)
    assert sum(parts.values()) == pytest.approx(found.total.value)


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
    assert whole.prefill.value == pytest.approx(part.prefill.value * (4 + 2 - 1) / 2)
    assert whole.decode.value == pytest.approx(part.decode.value * 4 / 2)


def test_attention_dp_runs_a_part_of_the_batch_on_each_rank() -> None:
    # 8 requests over 2 ranks of a dense model: as 4 on one GPU
    cut = infer(deployed(engine=quiet(), dp=2), Workload.equal(8, 300, 20))
    four = infer(deployed(engine=quiet()), Workload.equal(4, 300, 20))
    assert cut.total.value == pytest.approx(four.total.value)
    assert cut.tokens_per_s == pytest.approx(2 * four.tokens_per_s)


def test_micro_batches_that_do_not_exist_cost_nothing() -> None:
    few, many = (infer(deployed(pp=2, micro_batches=n, engine=quiet()), Workload.equal(2, 512, 8)) for n in (2, 8))
    assert few.total == many.total
    # two stages, two micro-batches: the prefill has (2 + 2 - 1) / 2 times a micro-batch's work
    one = infer(deployed(pp=2, engine=quiet()), Workload.equal(1, 512, 1))
    assert few.prefill.value == pytest.approx(one.prefill.value * 1.5)


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
    real = forecast_table

    def counted(columns: Any, *more: Any, **options: Any) -> Any:
        asked.append(len(columns["op"]))
        return real(columns, *more, **options)

    monkeypatch.setattr(memo, "forecast_table", counted)
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
