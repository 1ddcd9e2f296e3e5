"""Prompts read by one pool and decoded by another: bytes that are handed over, rates, and what limits, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from deployments import deployed

import kernelcast as kc
from kernelcast.app.report.infer import fields, print_inference
from kernelcast.app.report.json import to_json
from kernelcast.errors import KernelcastError
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import fabric
from kernelcast.inference.batch import Batch
from kernelcast.inference.disaggregated import (
    Disaggregated,
    KvTransfer,
    PhaseWorkers,
    balanced,
    infer_disaggregated,
    kv_send,
    kv_transfer_bytes,
    port_bytes,
    send_time,
    transfer_fabric,
)
from kernelcast.inference.forward import Deployment, forward
from kernelcast.inference.infer import infer
from kernelcast.inference.workload import Speculation, Workload
from kernelcast.results import Interval
from kernelcast.serving.service import EnginePool, Service, engine_settings
from kernelcast.serving.step_times import StepLimits, StepTimes, step_time_tables
from kernelcast.stacks import stack

LLAMA_TOKEN = 32 * 2 * 8 * 128 * 2  # layers, keys and values, heads, their width, bytes: 131,072
V3_TOKEN = 61 * (512 + 64) * 2  # layers, latent and rotated key, bytes: 70,272
INPUT, OUTPUT = 1000, 100


@cache
def answer(prompts: int = 2, readers: int = 1, requests: int = 16, decoders: int = 1, tp: int = 1) -> Disaggregated:
    pools = PhaseWorkers(deployed(), prompts, readers), PhaseWorkers(deployed(tp=tp), requests, decoders)
    return infer_disaggregated(*pools, INPUT, OUTPUT)


# ---- bytes ----


@pytest.mark.parametrize(
    ("readers", "decoders", "whole", "busiest"),
    [
        ({}, {}, 1.0, 1.0),  # one port each
        ({"tp": 4}, {"tp": 4}, 1.0, 1 / 4),  # two of eight heads a GPU
        ({"tp": 4}, {"tp": 2}, 1.0, 1 / 2),  # two GPUs get what four send
        ({"tp": 2}, {"tp": 8}, 1.0, 1 / 2),  # two send what eight get
        ({"tp": 2, "pp": 2}, {"tp": 4}, 1.0, 1 / 4),  # stages have their layers' part
        ({"tp": 8}, {"tp": 16}, 2.0, 2 / 8),  # each of eight heads lies on two of sixteen GPUs
    ],
)
def test_heads_are_handed_over_to_the_gpus_that_have_them(
    readers: dict[str, Any], decoders: dict[str, Any], whole: float, busiest: float
) -> None:
    prefill, decode = deployed(**readers), deployed(**decoders)
    assert kv_transfer_bytes(decode, INPUT) == pytest.approx(whole * INPUT * LLAMA_TOKEN)
    assert port_bytes(prefill, decode, INPUT) == pytest.approx(busiest * INPUT * LLAMA_TOKEN)


def latent(**layout: Any) -> Deployment:
    return deployed("deepseek-v3", on="b200_sxm", engine=stack("sglang"), cache="bf16", **layout)


@pytest.mark.parametrize(
    ("readers", "decoders", "copies", "busiest"),
    [
        ({"tp": 8}, {"tp": 8}, 8, 1.0),  # a latent is not cut: every GPU has it whole, and sends it to its like
        ({"tp": 8}, {"dp": 8, "ep": 8}, 1, 1.0),  # one rank of one GPU gets it
        ({"dp": 8, "ep": 8}, {"tp": 8}, 8, 8.0),  # one GPU sends it to eight
    ],
)
def test_a_latent_goes_whole_to_every_gpu(
    readers: dict[str, Any], decoders: dict[str, Any], copies: int, busiest: float
) -> None:
    assert kv_transfer_bytes(latent(**decoders), INPUT) == pytest.approx(copies * INPUT * V3_TOKEN)
    assert port_bytes(latent(**readers), latent(**decoders), INPUT) == pytest.approx(busiest * INPUT * V3_TOKEN)


def test_prompts_that_end_together_share_ports() -> None:
    """Three leave one rank of four GPUs at once, and come to different ranks of one GPU; then two to the same."""
    prefill, decode = deployed(tp=4), deployed()
    each = INPUT * LLAMA_TOKEN
    assert port_bytes(prefill, decode, INPUT, sent=3, received=1) == pytest.approx(max(3 / 4, 1.0) * each)
    assert port_bytes(prefill, decode, INPUT, sent=5, received=1) == pytest.approx(5 / 4 * each)
    assert port_bytes(prefill, decode, INPUT, sent=3, received=2) == pytest.approx(2 * each)


def test_an_fp8_cache_is_half_and_a_window_is_all_that_a_layer_keeps() -> None:
    assert kv_transfer_bytes(deployed(cache="fp8"), INPUT) == pytest.approx(INPUT * LLAMA_TOKEN / 2)
    short, long = (kv_transfer_bytes(deployed("gpt-oss-120b"), tokens) for tokens in (1000, 2000))
    # Of 36 layers every second has a window of 128: 18 more thousand tokens, of 8 heads of 64, keys and values.
    assert long - short == pytest.approx(18 * 1000 * 2 * 8 * 64 * 2)


# ---- time ----


def test_a_hand_over_takes_no_less_than_its_bytes_and_the_latency_of_the_fabric() -> None:
    place, times = deployed(), Times(kc.gpu("h100_sxm"))
    for name in ("ib_ndr", "ib_hdr"):
        link = fabric(name)
        large, small = kv_send(2**30, name), kv_send(1, name)
        times.predict([large.call, small.call])
        assert send_time(large, times).low >= 2**30 / link.bytes_per_s
        assert send_time(large, times).value < 3 * 2**30 / link.bytes_per_s
        assert send_time(small, times).value >= link.latency_s
    assert transfer_fabric(place, None) == "ib_ndr"
    assert transfer_fabric(place, "ib_hdr") == "ib_hdr"
    assert transfer_fabric(deployed(on="gb200"), None) is None  # NVLink reaches across the rack


def test_what_is_more_than_a_piece_is_sent_in_several() -> None:
    whole, half = kv_send(2**33, "ib_ndr"), kv_send(2**32, "ib_ndr")
    assert (whole.count, half.count) == (2, 1)
    assert whole.call == half.call
    times = Times(kc.gpu("h100_sxm"))
    times.predict([whole.call])
    assert send_time(whole, times) == send_time(half, times) * 2


def test_a_slower_fabric_delays_the_first_token_alone() -> None:
    pools = PhaseWorkers(deployed(), 2), PhaseWorkers(deployed(), 16)
    fast, slow = (infer_disaggregated(*pools, INPUT, OUTPUT, transfer=name) for name in ("ib_ndr", "ib_hdr"))
    later_s = slow.kv_transfer.time.value - fast.kv_transfer.time.value
    assert later_s > 0
    assert slow.ttft.value - fast.ttft.value == pytest.approx(later_s)
    assert slow.tpot == fast.tpot
    assert slow.requests_per_s == fast.requests_per_s


def test_both_phases_are_those_of_infer() -> None:
    """Two prompts at a time; sixteen requests that decode, 99 steps after their prompts."""
    found = answer()
    reads, whole = (infer(deployed(), Workload.equal(n, INPUT, out)) for n, out in ((2, 1), (16, OUTPUT)))
    assert found.prefill.value == reads.prefill.value
    # a fifth to both sides for what deployments are off beyond their kernels, which errs on its own
    for end in ("low", "high"):
        kernels, whole_s = (getattr(span, end) / reads.prefill.value - 1 for span in (reads.prefill, found.prefill))
        assert whole_s**2 == pytest.approx(kernels**2 + 0.2**2)
    assert found.tpot.value == pytest.approx(whole.tpot.value)
    assert found.decode.value == pytest.approx(99 * found.tpot.value)
    assert found.decode_batch.steps == 99


@pytest.mark.parametrize("end", ["value", "low", "high"])
def test_the_first_token_has_prefill_hand_over_and_a_step(end: str) -> None:
    found = answer()
    parts = [getattr(span, end) for span in (found.prefill, found.kv_transfer.time, found.step)]
    assert getattr(found.ttft, end) == pytest.approx(sum(parts))
    assert getattr(found.total, end) == pytest.approx(sum(parts) + getattr(found.decode, end))


def test_prompts_of_an_early_step_wait_less() -> None:
    """Steps of 1,000 tokens read four prompts one by one: the last cache leaves alone."""
    pools = PhaseWorkers(deployed(), 4), PhaseWorkers(deployed(), 16)
    one_by_one, at_once = (infer_disaggregated(*pools, INPUT, OUTPUT, chunk=chunk) for chunk in (INPUT, 0))
    assert one_by_one.kv_transfer.port_bytes == pytest.approx(INPUT * LLAMA_TOKEN)
    assert at_once.kv_transfer.port_bytes == pytest.approx(4 * INPUT * LLAMA_TOKEN)
    assert one_by_one.mean_ttft_s < 0.8 * one_by_one.ttft.value
    assert at_once.mean_ttft_s == pytest.approx(at_once.ttft.value)


# ---- rates ----


def told(prefill_s: float, sent_s: float, step_s: float, prefill: PhaseWorkers, decode: PhaseWorkers) -> Disaggregated:
    """An answer with times of our own, twice as long at the high end and half as long at the low one."""
    found = infer_disaggregated(prefill, decode, INPUT, OUTPUT)
    span = {name: Interval(s, s / 2, 2 * s) for name, s in (("prefill", prefill_s), ("sent", sent_s), ("step", step_s))}
    handed: KvTransfer = replace(found.kv_transfer, time=span["sent"], sending=span["sent"], receiving=span["sent"])
    decodes = replace(found.decode_batch, decode=span["step"] * 99)
    return replace(
        found,
        prefill_batch=replace(found.prefill_batch, prefill=span["prefill"]),
        decode_batch=decodes,
        kv_transfer=handed,
    )


def test_the_slower_pool_limits() -> None:
    """Two workers read 4 prompts in 0.5 s: 16 a second. Three hold 50 requests for 100 steps of 0.02 s: 75 a second."""
    found = told(0.5, 0.01, 0.02, PhaseWorkers(deployed(), 4, 2), PhaseWorkers(deployed(), 50, 3))
    assert found.rates["prefill"].value == pytest.approx(2 * 4 / 0.5)
    assert found.rates["decode"].value == pytest.approx(3 * 50 / (100 * 0.02))
    assert found.limited_by == "prefill"
    assert found.requests_per_s.value == pytest.approx(16)
    # 0.5 s is 0.25 to 1 by kernels; a fifth more on its own: -sqrt(.25^2 + .1^2), +sqrt(.5^2 + .1^2)
    ends_s = 0.5 + math.hypot(0.5, 0.1), 0.5 - math.hypot(0.25, 0.1)
    assert (found.requests_per_s.low, found.requests_per_s.high) == pytest.approx((8 / ends_s[0], 8 / ends_s[1]))
    assert found.tokens_per_s.value == pytest.approx(16 * OUTPUT)
    assert found.tokens_per_s_per_gpu.value == pytest.approx(16 * OUTPUT / 5)
    assert found.busy("prefill") == pytest.approx(1)
    assert found.busy("decode") == pytest.approx(16 / 75)
    assert found.held_requests == pytest.approx(50 * 16 / 75)
    # One decode worker takes 25 a second, one prefill worker gives 8.
    assert found.prefill_per_decode == pytest.approx(25 / 8)


def test_decode_or_ports_may_limit_too() -> None:
    pools = PhaseWorkers(deployed(), 4, 2), PhaseWorkers(deployed(), 10)
    assert told(0.1, 0.001, 0.02, *pools).limited_by == "decode"  # 80 a second are read, 5 decoded
    found = told(0.1, 4.0, 0.002, *pools)  # 8 caches leave in 4 s, and each takes 4 s to come
    assert found.limited_by == "handover"
    assert found.requests_per_s.value == pytest.approx(1 / 4)


def test_workers_add_up_and_balanced_pools_are_both_busy() -> None:
    one, three = answer(), answer(readers=3)
    assert three.rates["prefill"].value == pytest.approx(3 * one.rates["prefill"].value)
    assert three.rates["decode"] == one.rates["decode"]
    assert three.prefill_per_decode == pytest.approx(one.prefill_per_decode)
    enough = answer(readers=math.ceil(one.prefill_per_decode))
    assert enough.limited_by == "decode"
    assert enough.busy("decode") == 1


def test_a_pipeline_has_a_batch_in_every_stage() -> None:
    """Two stages: twice the prompts in the time of a batch; requests that decode are dealt out to both."""
    piped = infer_disaggregated(PhaseWorkers(deployed(pp=2), 2), PhaseWorkers(deployed(pp=2), 16), INPUT, OUTPUT)
    assert piped.rates["prefill"].value == pytest.approx(2 * 2 / piped.prefill.value)
    assert len(piped.decode_batch.workload.inputs) == 8
    assert piped.rates["decode"].value == pytest.approx(16 / (100 * piped.step.value))
    assert piped.request_energy is None


def test_decode_workers_that_wait_for_prompts_hold_fewer() -> None:
    """Until what they hold is what comes in the time that a request stays."""
    crowded = answer(prompts=1, requests=256)
    assert crowded.limited_by == "prefill"
    found = balanced(crowded)
    stays_s = found.step.value + found.decode.value
    assert found.pools.decode.batch == pytest.approx(found.rates["prefill"].value * stays_s, abs=1)
    assert found.pools.decode.batch < crowded.held_requests
    assert found.tpot.value < crowded.tpot.value
    enough = answer(readers=9)
    assert balanced(enough) is enough


def test_guessed_tokens_shorten_decode_alone() -> None:
    """Two of three guesses each step, all right: 3 tokens a step, so 33 steps for 99 tokens."""
    pools = PhaseWorkers(deployed(), 2), PhaseWorkers(deployed(), 16)
    found, plain = (
        infer_disaggregated(*pools, INPUT, OUTPUT, speculation=guess) for guess in (Speculation(2, 1.0), None)
    )
    assert found.decode_batch.steps == 33
    assert found.prefill == plain.prefill
    assert found.rates["decode"].value == pytest.approx(16 / (34 * found.step.value))


# ---- memory, refusals, what is told ----


def test_memory_of_both_pools() -> None:
    """Two prompts and the token they give, twice where one batch is read while another leaves; sixteen requests."""
    found = answer()
    assert found.prefill_memory["cache"] == pytest.approx(2 * (INPUT + 1) * LLAMA_TOKEN)
    assert found.prefill_memory["handover"] == found.prefill_memory["cache"]
    assert found.decode_memory["cache"] == pytest.approx(16 * (INPUT + OUTPUT) * LLAMA_TOKEN)
    assert "handover" not in found.decode_memory.parts
    assert found.prefill_memory["weights"] == found.decode_memory["weights"]


@pytest.mark.parametrize(
    ("prefill", "decode", "outputs", "said"),
    [
        (deployed(), deployed("qwen3-8b"), 8, "one model"),
        (deployed(), deployed(cache="fp8"), 8, "in one format, not in bf16 and fp8"),
        (deployed(), deployed(), 1, "2 output tokens or more"),
        (deployed("bert-large-uncased"), deployed("bert-large-uncased"), 8, "encoder"),
    ],
)
def test_pools_that_do_not_go_together(prefill: Deployment, decode: Deployment, outputs: int, said: str) -> None:
    with pytest.raises(KernelcastError, match=said) as error:
        infer_disaggregated(PhaseWorkers(prefill), PhaseWorkers(decode), 100, outputs)
    assert "\n" not in str(error.value)


def test_what_does_not_fit_names_its_pool() -> None:
    small, large = PhaseWorkers(deployed(), 1), PhaseWorkers(deployed(), 100_000)
    with pytest.raises(KernelcastError, match=r"the decode pool: llama-3\.1-8b on 1 x h100_sxm needs"):
        infer_disaggregated(small, large, INPUT, OUTPUT)
    with pytest.raises(KernelcastError, match="the prefill pool"):
        infer_disaggregated(PhaseWorkers(deployed(), 400), small, INPUT, OUTPUT)  # 400 fit once, not twice
    with pytest.raises(KernelcastError, match="batch of a pool must be 1 or more, not 0"):
        PhaseWorkers(deployed(), 0)


def test_shares_add_up_to_both_phases_and_the_hand_over() -> None:
    found = answer()
    sums: dict[str, float] = {}
    for share in found.shares:
        sums[share.phase] = sums.get(share.phase, 0.0) + share.time_s
    expected = {"prefill": found.prefill, "handover": found.kv_transfer.time, "decode": found.decode}
    assert sums == pytest.approx({phase: span.value for phase, span in expected.items()})
    assert found.rests_on.calls > 1000
    assert found.support in ("seen", "near")


def test_energy_is_that_of_both_phases() -> None:
    """A request's part of its batch of two, and of the hundred steps that it shares with fifteen others."""
    found = answer()
    assert found.prefill_batch.energy is not None
    assert found.request_energy is not None
    drawn = found.decode_batch.energies["decode"]
    assert drawn is not None
    expected = found.prefill_batch.energy.value / 2 + drawn.joules.value * 100 / 99 / 16
    assert found.request_energy.value == pytest.approx(expected)


def test_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(tp=2)
    keys = json.loads(to_json(fields(found)))
    for name in ("ttft_s", "tpot_s", "prefill_s", "handover_s", "requests_per_s", "tokens_per_s"):
        assert keys[f"{name}_low"] <= keys[name] <= keys[f"{name}_high"]
    assert keys["gpus"] == 3
    assert keys["prefill"]["layout"] == {"tp": 1, "pp": 1, "dp": 1, "ep": 1}
    assert keys["decode"]["gpus"] == 2
    assert keys["decode"]["memory_bytes"] == sum(
        keys["decode"]["memory"][f"{part}_bytes"] for part in ("weights", "cache", "activation", "stack")
    )
    assert keys["handover"]["bytes_per_request"] == pytest.approx(INPUT * LLAMA_TOKEN)
    assert {line["phase"] for line in keys["breakdown"]} == {"prefill", "handover", "decode"}
    print_inference(found)
    text = capsys.readouterr().out
    assert "time to first token" in text
    assert f"limited    by the {found.limited_by} workers" in text
    assert max(map(len, text.splitlines())) <= 100


# ---- the same in simulate ----


def test_simulate_hands_over_what_the_busiest_port_takes() -> None:
    """From one rank of one GPU to eight GPUs, each of which wants the whole latent."""
    readers, decoders = latent(dp=8, ep=8), latent(tp=8)
    service = Service(EnginePool(decoders, engine_settings(decoders)), EnginePool(readers, engine_settings(readers)))
    times = Times(readers.gpu)
    one = kv_send(8 * 4096 * V3_TOKEN, "ib_ndr")
    times.predict([one.call])
    assert step_time_tables().transfer_s(service, 4096) == pytest.approx(send_time(one, times).value)


def test_a_step_that_decodes_has_the_kernels_of_decode() -> None:
    """SGLang's ranks send tokens by DeepEP's low-latency kernels where they decode, by its normal ones to read."""
    place = latent(dp=8, ep=8)
    batch = Batch(64 * (1,), 64 * (1024,))
    modes = {dict(one.call.parameters)["mode"] for one in forward(place, batch) if one.op == "deepep_dispatch"}
    assert modes == {"low_latency"}
    steps = StepTimes(place, StepLimits(512, 64, 2048, 64 * 2048))
    static = infer(place, Workload.equal(8 * 64, 1024, 2, cached=1023, chunk=0))  # one step of eight such ranks
    assert static.steps == 1
    kernels_s = static.decode.value - 64 * place.stack.sequence_s  # the host's part is the engine's
    assert steps.decode(64, 64 * 1024) == pytest.approx(kernels_s, rel=0.03)
    assert steps.mixed(0, 0.0, 64, 0.0, 1) > 1.2 * static.decode.value
