"""Measured runs: what their forecasts are made of, what scales do to predictions, files and their errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.app.questions.simulate import ServiceParameters
from kernelcast.collect.calibrate.run_files import read_input, static_batch
from kernelcast.collect.calibrate.runs import PASS_NOISE, batch_run, benchmark_run
from kernelcast.collect.calibrate.scales import calibrate_runs, empty_calibration, prior_sds
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calibration import Calibration, Scale, host_key, load_calibration
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.inference.infer import Inference, infer
from kernelcast.serving.bench import read_bench
from kernelcast.serving.simulate import simulate
from kernelcast.serving.step_times import step_time_tables

H200 = kc.gpu("h200_sxm")
RUN = {"model": "llama-3.1-8b", "stack": "vllm", "batch": 8, "input_len": 2048, "output_len": 64}


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def inferred(tmp_path: Path, conditions: Conditions = DEFAULT, **words: Any) -> Inference:
    found = read_input(written(tmp_path / "one.json", {**RUN, "ttft_s": 1.0, **words}))
    return infer(*static_batch(found.records[0], H200), conditions)


def scaled(**scales: Scale) -> Conditions:
    calibration = empty_calibration(H200, DEFAULT)
    return Conditions(
        calibration=replace(calibration, scales={name.replace("_", " "): s for name, s in scales.items()})
    )


# ---- breakdown ----


def test_parts_of_a_batch_add_up_to_its_forecast(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{}, {"stack": "torch", "batch": 1, "input_len": 16}]  # the second waits for its host
    for words in cases:
        found = inferred(tmp_path, **words)
        told = {"prefill_s": found.prefill, "decode_s": found.decode, "total_s": found.total}
        run = batch_run("one", found, {name: span.value for name, span in told.items()})
        assert [one.error for one in run.seen] == pytest.approx([0.0] * 3, abs=1e-12)
    tpot = batch_run("one", found, {"tpot_s": found.tpot.value}).seen[0]
    assert tpot.error == pytest.approx(0.0, abs=1e-12) and tpot.noise == PASS_NOISE


def test_each_phase_sees_its_own_kernels(tmp_path: Path) -> None:
    found = inferred(tmp_path)
    prefill, decode = (batch_run("one", found, {what: 1.0}).seen[0].shares for what in ("ttft_s", "tpot_s"))
    assert "attention bf16 prefill vllm" in prefill and "attention bf16 decode vllm" not in prefill
    assert "attention bf16 decode vllm" in decode and "attention bf16 prefill vllm" not in decode
    assert prefill["gemm bf16 vllm, tensor"] > 5 * prefill["gemm bf16 vllm, bytes"]
    assert decode["gemm bf16 vllm, bytes"] > 5 * decode["gemm bf16 vllm, tensor"]
    assert sum(decode.values()) == pytest.approx(1.0) and decode[host_key("vllm")] > 0.01


def test_a_prefill_moves_no_decode_attention(tmp_path: Path) -> None:
    found = inferred(tmp_path)
    run = batch_run("one", found, {"ttft_s": 1.3 * found.ttft_s})
    calibration, seen = calibrate_runs(empty_calibration(H200, DEFAULT), [run])
    assert "attention bf16 prefill vllm" in calibration.scales
    assert "attention bf16 decode vllm" not in calibration.scales
    assert {"attention decode", "moe", "collective"} <= set(seen.unseen) and "gemm" not in seen.unseen
    after = inferred(tmp_path, Conditions(calibration=calibration))
    assert abs(after.ttft_s / (1.3 * found.ttft_s) - 1) < 0.12  # between, by the noise of a pass and the priors


def test_a_calibrated_forecast_is_what_the_solve_said(tmp_path: Path) -> None:
    """Scales that runs were solved with are those that predictions apply: same times, both ways."""
    found = inferred(tmp_path)
    run = batch_run("one", found, {"ttft_s": 1.2 * found.ttft_s, "tpot_s": 1.1 * found.tpot.value})
    calibration, seen = calibrate_runs(empty_calibration(H200, DEFAULT), [run])
    after = inferred(tmp_path, Conditions(calibration=calibration))
    told = {line.what: line.measured_s * (1 + line.error_after) for line in seen.lines}
    assert after.ttft_s == pytest.approx(told["ttft_s"], rel=2e-3)  # but for calls that a bound holds
    assert after.tpot.value == pytest.approx(told["tpot_s"], rel=2e-3)


def test_what_watts_bind_is_as_long_however_fast_its_kernels_are(tmp_path: Path) -> None:
    """An L20's prefill: its products wait for the clock, so a shorter run says nothing of them."""
    there = inferred(tmp_path)
    place, workload = replace(there.deployment, gpu=kc.gpu("l20")), there.workload
    before = infer(place, workload)
    assert sum(share.time_s for share in before.shares if share.part == "power limit") > 0.05 * before.ttft_s
    calibration, seen = calibrate_runs(
        empty_calibration(place.gpu, DEFAULT), [batch_run("one", before, {"ttft_s": 0.9 * before.ttft_s})]
    )
    scale = calibration.scales["gemm bf16 vllm, tensor"]
    assert abs(scale.log_scale) < 0.01 and scale.reach > 0.95
    after = infer(place, workload, Conditions(calibration=calibration))
    # kernels that a factor would take below their bound stay at it, which the solution does not know: up to 1%
    told = seen.lines[0].measured_s * (1 + seen.lines[0].error_after)
    assert told * (1 - 1e-3) <= after.ttft_s <= told * (1 + 1e-2)


def test_runs_make_a_forecast_surer_on_a_gpu_that_was_not_measured(tmp_path: Path) -> None:
    there = inferred(tmp_path)
    place, workload = replace(there.deployment, gpu=kc.gpu("gb10")), there.workload
    before = infer(place, workload)
    run = batch_run("one", before, {"ttft_s": 0.9 * before.ttft_s, "tpot_s": 0.9 * before.tpot.value})
    calibration, _ = calibrate_runs(empty_calibration(place.gpu, DEFAULT), [run])
    after = infer(place, workload, Conditions(calibration=calibration))
    for one, narrower in (("prefill", 0.6), ("decode", 0.8)):
        spans = [getattr(found, one) for found in (before, after)]
        width = [np.log(span.high_s / span.low_s) for span in spans]
        assert width[1] < narrower * width[0] and spans[1].time_s / spans[0].time_s == pytest.approx(0.9, abs=0.03)


# ---- scales on predictions ----


def test_a_scale_multiplies_what_it_names() -> None:
    decode = {"batch": 8, "q_len": 1, "kv_len": 2048, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16"}
    prefill = {**decode, "q_len": 2048}
    conditions = scaled(attention_bf16_decode_vllm=Scale(np.log(1.5), 0.05, 0.1, 0.5, 1))
    for words, factor in ((decode, 1.5), (prefill, 1.0)):
        call = kc.Attention(**words, stack="vllm")
        before, after = kc.predict(call, H200), kc.predict(call, H200, conditions)
        assert after.time_s == pytest.approx(factor * before.time_s)
    other = kc.Attention(**decode, stack="sglang")
    assert kc.predict(other, H200, conditions).time_s == kc.predict(other, H200).time_s


def test_a_product_has_a_part_of_each_limit_without_a_jump() -> None:
    sizes = np.unique(np.geomspace(1, 16384, 200).round())
    table = {"op": np.full(len(sizes), "gemm", dtype=object), "m": sizes, "n": np.full(len(sizes), 4096.0),
             "k": np.full(len(sizes), 4096.0), "dtype": np.full(len(sizes), "bf16", dtype=object),
             "stack": np.full(len(sizes), "vllm", dtype=object)}  # fmt: skip
    scales = {"gemm bf16 vllm, tensor": Scale(np.log(1.4)), "gemm bf16 vllm, bytes": Scale(np.log(1.1))}
    conditions = Conditions(calibration=replace(empty_calibration(H200, DEFAULT), scales=scales))
    before, after = (predict_columns(table, H200, c)[0]["predicted_us"] for c in (DEFAULT, conditions))
    ratio = after / before
    assert ratio[0] == pytest.approx(1.1, abs=0.005) and ratio[-1] == pytest.approx(1.4, abs=0.04)
    assert np.abs(np.diff(ratio)).max() < 0.03


def test_the_interval_keeps_what_single_calls_are_off_by() -> None:
    """On a measured GPU runs narrow a call's interval no further than the errors of its kind; on another they do."""
    call = kc.Gemm(m=4096, n=4096, k=4096, dtype="bf16", stack="vllm")
    for name, narrower in (("h200_sxm", 0.999), ("gb10", 0.6)):
        chip = kc.gpu(name)
        calibration = empty_calibration(chip, DEFAULT)
        scales = {f"gemm bf16 vllm, {part}": Scale(0.0, 0.01, 0.3, 0.5, 3) for part in ("tensor", "bytes")}
        after = kc.predict(call, chip, Conditions(calibration=replace(calibration, scales=scales)))
        before = kc.predict(call, chip)
        assert after.match.entry is not None and after.match.entry.error is not None
        kept = after.match.entry.error * 1.606
        assert np.log(after.high_s / after.time_s) >= min(kept, np.log(before.high_s / before.time_s)) * 0.999
        assert np.log(after.high_s / after.low_s) <= max(narrower, 0.0) * np.log(before.high_s / before.low_s) * 1.002


def test_a_bound_holds() -> None:
    call = kc.Gemm(m=8192, n=8192, k=8192, dtype="bf16", stack="vllm")
    scales = {"gemm bf16 vllm, tensor": Scale(np.log(0.1)), "gemm bf16 vllm, bytes": Scale(np.log(0.1))}
    found = kc.predict(call, H200, Conditions(calibration=replace(empty_calibration(H200, DEFAULT), scales=scales)))
    assert found.time_s == found.bound_s


def test_the_host_is_scaled_where_it_is(tmp_path: Path) -> None:
    conditions = scaled(host_vllm=Scale(np.log(2.0), 0.1, 0.4, 0.1, 1))
    before, after = inferred(tmp_path), inferred(tmp_path, conditions)
    hosts = [sum(s.time_s for s in one.shares if s.part == "host") for one in (before, after)]
    assert hosts[1] == pytest.approx(2 * hosts[0])
    assert after.total.value - before.total.value == pytest.approx(hosts[0])


# ---- a served benchmark ----


def test_a_benchmark_of_a_slower_server_is_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products 1.2 times as long as forecast, as a simulation with such scales serves."""
    monkeypatch.chdir(tmp_path)
    from kernelcast.app.cli import main

    predictor_input = ["simulate", "llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "6", "--num-prompts", "60",
           "--requests-out", "plain.csv", "--no-intervals"]  # fmt: skip
    assert main(predictor_input) == 0
    bench = read_bench(Path("plain.csv"))
    service = ServiceParameters(gpu="h100_sxm").service("llama-3.1-8b", bench.load)
    chip = kc.gpu("h100_sxm")
    truth = {f"gemm bf16 vllm, {part}": Scale(np.log(1.2)) for part in ("bytes", "tensor")}
    slow = Conditions(calibration=replace(empty_calibration(chip, DEFAULT), scales=truth))
    served = simulate(service, bench.load, slow, tables=step_time_tables(slow), intervals=False)
    metrics = {name: served.metrics[name] for name in ("mean_ttft_ms", "mean_tpot_ms")}
    run = benchmark_run(replace(bench, metrics=metrics), service, DEFAULT)
    shares = run.seen[1].shares
    assert run.seen[1].what == "mean_tpot_s" and run.seen[1].error < -0.1
    assert shares["gemm bf16 vllm, bytes"] > 0.5 > shares["attention bf16 decode vllm"] > 0
    calibration, seen = calibrate_runs(empty_calibration(chip, DEFAULT), [run])
    assert calibration.scales["gemm bf16 vllm, bytes"].log_scale > 0.03
    assert all(abs(line.error_after) < 0.6 * abs(line.error_before) for line in seen.lines)


# ---- files ----


def test_a_file_keeps_scales_and_an_old_one_has_none(tmp_path: Path) -> None:
    path = tmp_path / "cal"
    scales = {"gemm bf16 vllm, tensor": Scale(0.1, 0.02, 0.1, 0.4, 2), "host vllm": Scale(0.3, 0.2, 0.4, 0.1, 2)}
    made = replace(empty_calibration(H200, DEFAULT), scales=scales)
    made.save(path)
    assert load_calibration(path).scales == scales
    raw = path.read_bytes()
    old = Calibration(H200.id, made.predictor, made.kernelcast, {})
    old.save(path)
    without = path.read_bytes().replace(b', \\"scales\\": {}', b"").replace(b'"format":"2"', b'"format":"1"')
    head = len(without) - 8
    path.write_bytes(head.to_bytes(8, "little") + without[8:])
    assert load_calibration(path).scales == {}
    for broken in (b'\\"sd\\": 0.02', b'\\"sd\\": 9.02'), (b'\\"prior_sd\\"', b'\\"prior_xx\\"'):
        path.write_bytes(raw.replace(*broken))
        with pytest.raises(KernelcastError, match="a broken calibration"):
            load_calibration(path)


def test_runs_of_all_kinds_are_recognised(tmp_path: Path) -> None:
    runs = [{**RUN, "ttft_s": 0.4}, {**RUN, "tpot_s": 0.007, "name": "mine"}]
    lines = "\n".join(map(json.dumps, runs))
    for name, content in (("a.json", runs), ("b.jsonl", lines), ("c.json", runs[0])):
        found = read_input(written(tmp_path / name, content))
        assert found.content == "runs" and found.records[0].measured == {"ttft_s": 0.4}
    calls = '{"op": "gemm", "m": 1, "n": 1, "k": 1, "latency_us": 3}\n'
    assert read_input(written(tmp_path / "d.jsonl", calls)).content == "calls"
    assert read_input(written(tmp_path / "e.csv", "op,m,latency_us\ngemm,1,2\n")).content == "calls"
    served = "arrival_s,first_token_s,last_token_s,input_tokens,output_tokens\n0,1,2,3,4\n"
    assert read_input(written(tmp_path / "f.csv", served)).content == "bench"
    vllm = {"request_throughput": 1.0, "completed": 3, "mean_ttft_ms": 20.0}
    assert read_input(written(tmp_path / "g.json", vllm)).content == "bench"
    step = read_input(written(tmp_path / "h.json", {"model": "a.py:f", "mode": "training", "time_s": 1.0})).records[0]
    assert step.workload == "step"
    zoo = read_input(Path(__file__).parents[2] / "validation" / "zoo" / "h200_sxm.json.gz")
    assert zoo.records[0].parameters["gpu"] == "NVIDIA H200" and zoo.records[0].measured["kernel_time_s"] < 1
    models = read_input(Path(__file__).parents[2] / "validation" / "models_h200_sxm.json.gz")
    assert len(models.records) == 45 and "28 decode steps" in models.left_out[0]
    for one in (zoo, models):
        assert len({record.name for record in one.records}) == len(one.records)


def test_lists_of_lengths_are_a_ragged_batch(tmp_path: Path) -> None:
    words = {**RUN, "input_len": [100, 200, 300], "ttft_s": 1.0, "draft_tokens": 2}
    del words["batch"]
    record = read_input(written(tmp_path / "a.json", words)).records[0]
    _, workload = static_batch(record, H200)
    assert workload.inputs == (100, 200, 300) and workload.outputs == (64, 64, 64)
    assert workload.speculation is not None and workload.speculation.draft_tokens == 2
    with pytest.raises(KernelcastError, match="must be as many"):
        static_batch(replace(record, parameters={**record.parameters, "batch": 2}), H200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputlen": 3, "ttft_s": 1.0}, r"run 1: unknown key 'inputlen' \(did you mean input_len"),
        ({"ttft_ms": 3.0}, r"unknown key 'ttft_ms' \(did you mean ttft_s"),
        ({}, "no measured time: give ttft_s or prefill_s"),
        ({"ttft_s": -1}, "ttft_s must be a positive number of seconds, not -1"),
        ({"ttft_s": True}, "ttft_s must be a positive number"),
        ({"ttft_s": 1.0, "tp": "two"}, "tp must be a whole number, 0 or more, not 'two'"),
        ({"ttft_s": 1.0, "prefill_s": 1.0}, "are one time"),
        ({"ttft_s": 1.0, "model": None}, "model must be a text"),
        ({"time_s": 1.0, "mode": "training"}, "unknown key 'stack'"),
    ],
)
def test_a_run_that_is_wrong_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelcastError, match=message):
        read_input(written(tmp_path / "a.json", {**RUN, **change}))


def test_files_that_are_none(tmp_path: Path) -> None:
    for content, message in (
        ("", "is not JSON: it is empty"),
        ("{", "is not JSON: line 1"),
        ("[1]", "a run is an object of JSON"),
        ('{"cases": [{}]}', "not a file of measured models"),
        ('{"stack": "vllm", "ttft_s": 1}', "does not name its model"),
    ):
        with pytest.raises(KernelcastError, match=message):
            read_input(written(tmp_path / "a.json", content))
    with pytest.raises(KernelcastError, match="no file"):
        read_input(tmp_path / "none.json")
    found = inferred(tmp_path)
    with pytest.raises(KernelcastError, match="two runs are called 'x'"):
        calibrate_runs(empty_calibration(H200, DEFAULT), 2 * [batch_run("x", found, {"ttft_s": 1.0})])


def test_priors_are_the_forecasts_own_intervals(tmp_path: Path) -> None:
    """Narrow where the GPU was measured, wide where it was not."""
    there = inferred(tmp_path)
    place, workload = replace(there.deployment, gpu=kc.gpu("gb10")), there.workload
    runs = [batch_run("x", found, {"ttft_s": 1.0}) for found in (there, infer(place, workload))]
    known, new = (prior_sds([run])["gemm bf16 vllm, tensor"] for run in runs)
    assert 0.02 < known < 0.1 < 2 * known < new
