"""GPUs side by side: figures against arithmetic and `infer`, the order, what-ifs, slopes, and training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from deployments import deployed

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.hardware import changed
from kernelcast.inference.deployment import Layout
from kernelcast.inference.infer import Inference, infer
from kernelcast.inference.memory import largest_batch
from kernelcast.inference.workload import Workload
from kernelcast.models import model
from kernelcast.results import Interval
from kernelcast.search.compare.candidates import ServingScenario, chosen_gpus
from kernelcast.search.compare.compare import Comparison, Row, ServingForecast, compare_gpus
from kernelcast.search.compare.sensitivity import sensitivity
from kernelcast.stacks import stack

SMALL = "llama-3.1-8b"


def rows(found: Comparison) -> dict[str, Row]:
    return {row.gpu.id if not row.gpu.changes else row.gpu.label: row for row in found.rows}


def best(found: Comparison, name: str) -> ServingForecast:
    one = rows(found)[name].best
    assert one is not None
    return one


# ---- figures ----
def test_a_static_batch_is_what_infer_says() -> None:
    one = best(kc.compare(SMALL, "h100_sxm", batch=8, max_gpus=1), "h100_sxm")
    told = infer(one.deployment, Workload.equal(8, 1024, 128))
    assert (one.ttft, one.tpot, one.e2el) == (told.prefill, told.tpot, told.total)
    assert one.tokens_per_s == pytest.approx(told.tokens_per_s) and one.memory.used_bytes == told.memory.used_bytes
    assert one.support == told.support


def test_dollars_are_hours_times_price() -> None:
    one = best(kc.compare(SMALL, "h100_sxm", batch=8, price=["h100_sxm=3.6"]), "h100_sxm")
    # 3.6 USD an hour are 0.001 USD a second, a GPU
    assert one.usd_per_million == pytest.approx(one.gpus * 0.001 * 1e6 / one.tokens_per_s)
    assert best(kc.compare(SMALL, "h200_nvl", batch=8), "h200_nvl").usd_per_million is None


def test_in_turn_every_prompt_is_read_once_and_every_token_written() -> None:
    asked: dict[str, Any] = {"input_len": 512, "output_len": 64, "max_gpus": 1}
    one = best(kc.compare(SMALL, "h100_sxm", **asked), "h100_sxm")
    batch, place = one.batch, one.deployment
    prompts = infer(place, Workload.equal(16, 512, 1)).prefill.value / 16  # 8,192 tokens a step
    decode = infer(place, Workload.equal(batch, 512, 64, cached=511)).decode.value
    assert one.requests_per_s == pytest.approx(batch / (batch * prompts + decode))
    assert one.tpot.value == pytest.approx((decode + (batch - 1) * prompts) / 63)
    alone = infer(place, Workload.equal(1, 512, 1)).prefill.value
    assert one.ttft.value == pytest.approx(alone + decode / 63 * (batch - 1) / batch)
    assert batch == min(1024, largest_batch(place, Workload.equal(1, 512, 64)))


def test_one_request_at_a_time_is_a_batch_of_one() -> None:
    one = best(kc.compare(SMALL, "h100_sxm", by="latency", max_gpus=1), "h100_sxm")
    told = infer(one.deployment, Workload.equal(1, 1024, 128))
    assert one.batch == 1
    assert (one.ttft.value, one.tpot.value) == pytest.approx((told.ttft_s, told.tpot.value))


def test_a_rate_takes_as_few_engines_as_carry_it() -> None:
    found = kc.compare(SMALL, "h100_sxm", rate=60.0, tpot="40ms")
    one = best(found, "h100_sxm")
    assert rows(found)["h100_sxm"].meets and one.tokens_per_s == pytest.approx(60 * 128)
    each = one.requests_per_s / one.replicas
    assert each * (one.replicas - 1) < 60 <= each * one.replicas
    small = kc.compare(SMALL, "h100_sxm", rate=60000.0)
    assert not rows(small)["h100_sxm"].meets and best(small, "h100_sxm").gpus > 8


def test_goals_are_kept_where_some_batch_keeps_them() -> None:
    free, held = (best(kc.compare(SMALL, "h100_sxm", tpot=limit), "h100_sxm") for limit in (None, "20ms"))
    assert free.tpot.value > 0.02 >= held.tpot.value and held.late is None
    assert held.tokens_per_s < free.tokens_per_s and held.batch < free.batch
    broken = kc.compare(SMALL, "h100_sxm,l40s", tpot="0.5ms")
    assert not any(row.meets for row in broken.rows)
    shares = [row.best.share(row.best.late) for row in broken.rows if row.best and row.best.late]
    assert shares == sorted(shares)  # the nearest first


# ---- the best ----
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (SMALL, {}),
        (SMALL, {"tpot": "15ms", "ttft": "100ms"}),
        (SMALL, {"rate": 40.0, "tpot": "30ms"}),
        (SMALL, {"batch": 16, "by": "latency"}),
        ("qwen3-30b-a3b", {"tpot": "20ms"}),
        ("qwen3-30b-a3b", {"rate": 10.0}),  # rough times take too small a batch to carry it
    ],
)
def test_what_is_left_out_is_no_better(name: str, asked: dict[str, Any]) -> None:
    few, all_of = (kc.compare(name, "h100_sxm,l40s,b200_sxm", thorough=every, **asked) for every in (False, True))
    assert few.forecasts <= all_of.forecasts
    for chip in rows(few):
        one, other = (best(found, chip).order[:3] for found in (few, all_of))  # goals, and what the order is by
        assert one == pytest.approx(other, rel=0.01)


def test_the_order_is_by_what_is_asked() -> None:
    names = "a100_sxm,h100_sxm,h200_sxm"
    values: dict[str, Callable[[ServingForecast], Any]] = {
        "dollars": lambda one: one.usd_per_million,
        "latency": lambda one: one.e2el.value,
        "throughput": lambda one: -one.tokens_per_s,
    }
    for by, value in values.items():
        found = [value(one) for one in kc.compare(SMALL, names, by=by).fitting]
        assert found == sorted(found), by
    mixed = kc.compare(SMALL, "h200_nvl,h800_sxm,l40s,h100_sxm")
    priced = [row.best.usd_per_million is not None for row in mixed.rows if row.best]
    assert priced == [True, True, False, False]  # without a price last, by throughput a GPU
    last = [row.best.tokens_per_s / row.best.gpus for row in mixed.rows[2:] if row.best]
    assert last == sorted(last, reverse=True)


def test_formats_are_those_that_a_gpu_has() -> None:
    found = kc.compare(SMALL, "h100_sxm,a100_sxm,t4", formats="all", batch=1)
    able: dict[str, list[str]] = {}
    for row in found.rows:
        able.setdefault(row.gpu.id, []).extend([row.best.deployment.precision.weights] if row.best else [])
    assert set(able["h100_sxm"]) == {"bf16", "fp8", "int8", "int4"} and set(able["a100_sxm"]) == {
        "bf16",
        "int8",
        "int4",
    }
    assert "fp16" in able["t4"] and not {"bf16", "fp8", "nvfp4"} & set(able["t4"])
    assert able["a100_sxm"][0] in ("int8", "int4") and able["h100_sxm"][0] in ("fp8", "int8", "int4")  # the best first
    assert len(found.rows) == 3 * 5
    own = kc.compare(SMALL, "h100_sxm,t4")
    assert best(own, "h100_sxm").deployment.precision.label == "bf16"
    assert best(own, "t4").deployment.precision.label == "fp16"  # as engines fall back to
    asked = rows(kc.compare(SMALL, "t4,l4", formats="fp8"))["t4"]
    assert asked.best is None and "no fp8" in asked.why


def test_what_does_not_fit_says_by_how_much() -> None:
    found = kc.compare("llama-3.3-70b", "h100_sxm,a2")
    unfit = rows(found)["a2"]
    assert found.rows[-1].gpu.id == "a2" and unfit.memory is not None
    # 8 GPUs: an eighth of 70.55e9 weights in bf16 and more, of 92% of the 15,356 MiB that are listed
    assert unfit.memory["weights"] == pytest.approx(70.55e9 * 2 / 8, rel=0.01)
    assert unfit.why == f"needs {unfit.memory.used_bytes / 2**30:.1f} GiB a GPU on 8 of them, has 13.4"
    with pytest.raises(KernelcastError, match="fits on no GPU of 2 within max_gpus=1: a100_sxm, the nearest, needs"):
        kc.compare("llama-3.3-70b", "a2,a100_sxm", max_gpus=1)


# ---- what-ifs and slopes ----
def test_a_what_if_is_a_row_of_its_own_and_no_worse() -> None:
    found = kc.compare(SMALL, "h100_sxm", batch=4, what_if=["dram_bytes_per_s*1.5", "dram_bytes_per_s*1.5,sm_count*2"])
    plain, faster, both = sorted((row for row in found.rows), key=lambda row: len(row.gpu.changes))
    assert faster.gpu.changes == {"dram_bytes_per_s": 1.5 * plain.gpu.dram_bytes_per_s}
    assert both.gpu.sm_count == 2 * plain.gpu.sm_count
    totals = [row.best.e2el.value for row in (plain, faster, both) if row.best]
    assert totals == sorted(totals, reverse=True) and totals[1] < totals[0]


def test_factors_and_numbers_of_a_gpu() -> None:
    chip = kc.gpu("h100_sxm")
    assert changed(chip, ["tensor_flops_per_clk_sm*2"]).tensor_flops_per_s("fp8") == 2 * chip.tensor_flops_per_s("fp8")
    assert changed(chip, ["sm_count*1.01"]).sm_count == 133  # 133.32
    assert changed(chip, ["l2_bytes = 1e8"]).l2_bytes == 100_000_000
    assert changed(chip, ["dram_bytes_per_s*1"]) is chip
    with pytest.raises(KernelcastError, match="has no clock_sustained_hz to multiply"):
        changed(replace(chip, clock_sustained_hz=None), ["clock_sustained_hz*2"])


def test_more_of_a_spec_buys_what_its_share_of_the_time_is() -> None:
    scenario = ServingScenario(
        model=model(SMALL), gpus=chosen_gpus("h100_sxm"), stack=stack("vllm"), batch=1, by="latency", max_gpus=1
    )
    one = compare_gpus(scenario).fitting[0]
    gains = {gain.spec: gain.percent for gain in sensitivity([one])[0]}
    assert all(0 <= value <= 1.05 for value in gains.values())
    assert max(gains, key=lambda spec: gains[spec]) == "DRAM bandwidth"  # one request reads all weights for a token
    assert gains["DRAM bandwidth"] > 0.4 and gains["link"] == 0 == gains["DRAM capacity"]
    # the slope is what a forecast of 10% more shows
    chip = changed(kc.gpu("h100_sxm"), ["dram_bytes_per_s*1.1"])
    faster = infer(replace(one.deployment, gpu=chip), Workload.equal(1, 1024, 128)).total.value
    assert math.log(one.e2el.value / faster) / math.log(1.1) == pytest.approx(gains["DRAM bandwidth"], abs=0.05)


def test_full_memory_holds_more_when_it_is_larger() -> None:
    found = kc.compare("llama-3.3-70b", "b200_sxm", max_gpus=1, output_len=512)
    one = found.fitting[0]
    gains = {gain.spec: gain.percent for gain in sensitivity([one])[0]}
    # weights take 141 of 171 GB: a tenth more memory is more than half again as many requests
    assert one.candidate.full and gains["DRAM capacity"] > 0.5


# ---- energy ----
def test_joules_are_told_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose forecast says 640 J for 8 requests of 128 tokens: 0.625 MJ a million."""
    monkeypatch.setattr(Inference, "energy", None, raising=False)
    assert best(kc.compare(SMALL, "h100_sxm", batch=8, max_gpus=1), "h100_sxm").joules_per_million is None
    monkeypatch.setattr(Inference, "energy", property(lambda self: Interval(640.0, 600.0, 700.0)))
    found = best(kc.compare(SMALL, "h100_sxm", batch=8, max_gpus=1, by="joules"), "h100_sxm").joules_per_million
    assert found is not None and found.value == pytest.approx(640 / 8 / 128 * 1e6)


# ---- refusals ----
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": "h2000"}, "unknown gpu 'h2000'"),
        ({"gpus": ()}, "no GPU to compare"),
        ({"what_if": ["drm_bytes*2"]}, "unknown GPU field 'drm_bytes'"),
        ({"what_if": ["dram_bytes_per_s"]}, "what_if= takes FIELD=NUMBER or FIELD"),
        ({"by": "luck"}, "unknown by="),
        ({"batch": 0}, "batch= is 1 or more"),
        ({"rate": -1.0}, "rate= is a number of requests"),
        ({"batch": 1, "rate": 1.0}, "not both"),
        ({"input_len": 200_000}, "exceeds the context"),
        ({"max_gpus": 0}, "max_gpus= is 1 or more"),
        ({"formats": "fp7"}, "unknown number format of weights"),
        ({"kv_dtype": "int4"}, "unknown number format of the KV cache"),
        ({"batch": 10**6}, "has no room for a batch of 1,000,000"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelcastError, match=said):
        kc.compare(SMALL, **{"gpus": "h100_sxm", **asked})


def test_engines_that_are_cut_by_stages_take_turns() -> None:
    place = deployed(SMALL, on="h100_sxm", pp=2, micro_batches=2)
    assert place.layout == Layout(pp=2, micro_batches=2)
    found = kc.compare("llama-3.3-70b", "l40s", thorough=True)
    assert best(found, "l40s").deployment.layout.micro_batches == best(found, "l40s").deployment.layout.pp
