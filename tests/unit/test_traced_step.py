"""A traced step: sums, the host's clock, the power limit, and what the command says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.app.cli import main
from kernelcast.app.report import trace as report
from kernelcast.errors import KernelcastError
from kernelcast.results import support_of
from kernelcast.schedule.timeline import COSTS, host, host_ids, stream_ends
from kernelcast.tracing.traced import Footprint, Op, Tensor, Trace
from kernelcast.training.step import run_step

H200 = kc.gpu("h200_sxm")


def dense(*shape: int, dtype: str = "bf16") -> Tensor:
    steps = [int(np.prod(shape[at + 1 :])) for at in range(len(shape))]
    return Tensor(shape, tuple(steps), dtype, 1)


def product(m: int, phase: Any = "forward", width: int = 4096) -> Op:
    return Op("mm", (dense(m, width), dense(width, width)), {}, (dense(m, width),), "kernel", phase, "layer")


def traced(*ops: Op, **more: Any) -> Trace:
    return Trace("made by hand", "training", ops, 4096 * 4096, 1, Footprint(parameters=2 * 4096 * 4096), **more)


def test_a_stream_waits_for_its_launch_and_for_the_kernel_before() -> None:
    # launched at 0, 1, 2 and 10; each takes 3: ends 3, 6, 9, then idle until 10
    assert stream_ends(np.array([0.0, 1, 2, 10]), np.array([3.0, 3, 3, 3])).tolist() == [3, 6, 9, 13]


def test_parts_add_up_and_phases_follow_one_another() -> None:
    step = run_step(traced(product(4096), product(4096, "backward"), product(64, "optimizer")), H200)
    assert sum(share.time_s for share in step.shares) == pytest.approx(step.kernel_time_s)
    assert sum(step.phase_s(phase) for phase in ("forward", "backward", "optimizer")) == pytest.approx(step.time_s)
    assert step.low_s < step.time_s < step.high_s
    assert step.flops == 2 * 4096**3 * 2 + 2 * 64 * 4096**2
    assert step.coverage == 1.0


def test_phases_of_accumulated_gradients_are_those_of_all_passes() -> None:
    # forward, backward, forward, backward: kernels follow one another, each phase has the time of its own
    once = [*(product(8192) for _ in range(8)), *(product(8192, "backward") for _ in range(8))]
    step = run_step(traced(*once, *once), H200)
    for phase in ("forward", "backward"):
        assert step.phase_s(phase) == pytest.approx(step.phase_kernel_s(phase), rel=0.1)
    assert step.phase_s("forward") + step.phase_s("backward") == pytest.approx(step.time_s)


def test_a_layout_that_does_not_fit_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["trace", "gpt2", "--mode", "training", "--gpu", "t4", "--dtype", "fp16", "--dp", "2", "--seq", "1024"]
    assert main([*line, "--batch", "1"]) == 0
    assert main([*line, "--batch", "16"]) == 3
    assert "misses by" in capsys.readouterr().out


def test_small_kernels_are_launch_bound_and_a_graph_helps() -> None:
    small = traced(*(product(1, width=64) for _ in range(100)))
    eager, graph = run_step(small, H200), run_step(small, H200, graph=True)
    assert eager.launch_bound and not graph.launch_bound
    machine = host("server")
    launches_s = machine.launch_s * sum(kernel.launches for kernel in eager.kernels)
    assert small.mode == "training"  # so that autograd records each
    assert eager.time_s == pytest.approx(machine.step_s + 100 * machine.recorded_s + launches_s, rel=0.02)
    assert graph.time_s < eager.time_s / 1.5
    large = traced(*(product(8192) for _ in range(100)))
    assert not run_step(large, H200).launch_bound


def test_products_run_no_faster_than_power_allows() -> None:
    trace = traced(product(16384))
    cool = run_step(trace, H200.replace(power_w=2000.0))
    board = run_step(trace, H200)
    # 2 x 16384 x 4096^2 FLOPs at 1.1e12 a joule and 700 W
    assert board.kernel_time_s == pytest.approx(2 * 16384 * 4096**2 / (1.1e12 * 700))
    assert cool.kernel_time_s < board.kernel_time_s
    # at half of the watts a FLOP costs less, for the voltage falls with the clock: slower, but not twice as slow
    hot = run_step(trace, H200.replace(power_w=350.0))
    assert 1.2 * board.kernel_time_s < hot.kernel_time_s < 2 * board.kernel_time_s
    assert hot.energy is not None and hot.energy.value <= 350.0 * hot.time_s


def test_what_it_holds_and_whether_it_fits() -> None:
    step = run_step(traced(product(64)), H200)
    assert step.memory.fits and step.memory.used_bytes == pytest.approx(1.05 * 2 * 4096**2 + 1.2e9)
    large = replace(step.trace, footprint=Footprint(parameters=200 * 10**9))
    assert not run_step(large, H200, oversized=True).memory.fits
    with pytest.raises(KernelcastError, match=r"needs 196\.7 GiB at its peak \(parameters 186\.3\), 56\.3 GiB more"):
        run_step(large, H200)


def test_an_op_without_a_rule_is_listed() -> None:
    odd = Op("my_op", (dense(4096, 4096),), {}, (dense(4096, 4096),), "kernel", "forward", "")
    step = run_step(traced(product(64), odd), H200)
    assert list(step.by_bytes) == ["my_op"] and 0 < step.coverage < 1
    assert report.fields(step)["costed_by_bytes"]["my_op"] > 0


def test_a_run_is_told_by_the_support_that_nine_tenths_reach() -> None:
    assert support_of([(9.0, "seen"), (1.0, "extrapolated")]) == "seen"
    assert support_of([(8.9, "seen"), (0.2, "near"), (0.9, "extrapolated")]) == "near"
    assert support_of([(5.0, "seen"), (5.0, "extrapolated")]) == "extrapolated"


def test_utilisation_is_of_the_model_and_of_the_hardware() -> None:
    again = replace(product(4096, "backward"), recomputed=True)
    step = run_step(traced(product(4096), again, product(4096, "backward"), product(4096, "backward")), H200)
    assert step.model_flops == 3 * 2 * 4096**3 and step.flops == 4 * 2 * 4096**3
    assert step.mfu == pytest.approx(step.model_flops / step.time_s / H200.tensor_flops_per_s("bf16"))
    assert step.hfu == pytest.approx(step.mfu * 4 / 3)
    assert "HFU" in report.utilisation(step)
    assert "HFU" not in report.utilisation(run_step(traced(product(4096)), H200))


def test_utilisation_is_of_the_peak_of_the_format() -> None:
    wide = tuple(dense(4096, 4096, dtype="fp32") for _ in range(3))
    found = traced(Op("mm", wide[:2], {}, wide[2:], "kernel", "forward", "layer"))
    plain, tensor = run_step(found, H200), run_step(found, H200, tf32=True)
    assert plain.mfu == pytest.approx(2 * 4096**3 / plain.time_s / H200.fma_flops_per_s("fp32"))
    assert tensor.mfu == pytest.approx(2 * 4096**3 / tensor.time_s / H200.tensor_flops_per_s("tf32"))


def test_nothing_launched_is_refused() -> None:
    with pytest.raises(KernelcastError, match="launches no kernel"):
        run_step(traced(), H200)


@pytest.mark.parametrize("name", host_ids())
def test_every_host_file_reads(name: str) -> None:
    found = host(name)
    assert found.sources and found.gap_s > 0 and found.graph_s > 0
    assert all(getattr(found, cost) >= 0 for cost in COSTS)
    with pytest.raises(KernelcastError, match="unknown host"):
        host("toaster")


MODEL = """
import torch
from torch import nn

def build(batch, seq):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, torch.randn(batch, seq, 64)

def wrong(batch):
    return nn.Linear(64, 64), torch.randn(batch, 32)

def alone():
    return nn.Linear(64, 64)

def asks(width):
    return nn.Linear(width, width)

def fails():
    raise ValueError("no such thing")

def branches():
    class Model(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x
    return Model(), torch.randn(4)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def test_the_command_tells_a_file_s_model(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["trace", f"{file}:build", "--mode", "training", "--batch", "4", "--seq", "32", "--gpu", "h200_sxm"]
    assert main([*words, "--json", "--trace", str(tmp_path / "line.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    for key in ("time_s", "kernel_time_s", "forward_s", "backward_s", "optimizer_s", "launch_bound", "breakdown"):
        assert key in told
    assert told["launch_bound"] is True
    assert sum(part["time_s"] for part in told["breakdown"]) == pytest.approx(told["kernel_time_s"])
    # two products of 128 x 64 x 256 forward; their weights' gradients, and one gradient of the input between them
    assert told["flops"] == 2 * 128 * 64 * 256 * 5
    events = json.loads((tmp_path / "line.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"addmm", "gelu", "_fused_adamw_"}
    assert main(words) == 0
    assert "launch-bound" in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--zero", "1"], ["--pp", "2", "--micro-batches", "4"]], ids=" ".join)
def test_phases_of_many_gpus_add_up(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "gpt2", "--mode", "training", "--batch", "2", "--seq", "128", "--gpu", "h100_sxm", "--dp", "2"]
    assert main([*words, *more, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    phases = sum(told[f"{phase}_s"] for phase in ("forward", "backward", "optimizer"))
    assert phases == pytest.approx(told["kernel_time_s"], rel=0.02)
    assert told["launch_bound"] is True and told["kernel_time_s"] < told["time_s"]


def test_a_bundled_model_on_many_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "gpt2", "--mode", "training", "--batch", "2", "--seq", "128", "--gpu", "h100_sxm", "--dp", "8"]
    assert main([*words, "--zero", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == 8 and told["tokens"] == 8 * 2 * 128
    assert sum(told["parts_s"].values()) == pytest.approx(told["time_s"])
    assert main([*words]) == 0
    assert "dp 8" in capsys.readouterr().out


@pytest.mark.parametrize(("more", "text"), [
    (["--tp", "5"], "--tp 5 does not divide the 12 heads of gpt2"),
    (["--pp", "15"], "--pp 15 exceeds the 12 layers of gpt2, its embedding and its head"),
    (["--pp", "4", "--virtual-stages", "4", "--schedule", "interleaved", "--micro-batches", "4"],
     "--pp x --virtual-stages 16 exceeds the 12 layers of gpt2"),
])  # fmt: skip
def test_layouts_that_a_config_cannot_have_are_refused_before_tracing(
    more: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelcast.app.questions.trace.trace_step", lambda *_: pytest.fail("it was traced"))
    assert main(["trace", "gpt2", "--mode", "training", "--gpu", "h100_sxm", *more]) == 2
    assert text in capsys.readouterr().err


def test_a_training_step_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["trace", "gpt2", "--mode", "training", "--seq", "64", "--gpu", "h100_sxm"]) == 0
    table = capsys.readouterr().out.partition(" part ")[2].partition("memory ")[0]
    assert "\n element-wise " in table and "\n optimizer " in table  # no name is broken in two
    assert not re.search(r"^ +\d*%", table, re.MULTILINE)  # nor a share


@pytest.mark.parametrize(("words", "text"), [
    ([":wrong"], "does not trace, after t: "),
    ([":alone"], "gives a model without inputs"),
    ([":asks"], "requires width; it may take batch, seq, dtype, mode"),
    ([":fails"], "fails: ValueError: no such thing"),
    ([":branches"], "needs the value of a tensor"),
    ([":missing"], "has no function 'missing'"),
    ([""], "which function builds the model?"),
    ([":build", "--mode", "tuning"], "mode must be one of inference, training"),
    ([":build", "--batch", "0"], "batch must be 1 or more"),
    ([":build", "--dtype", "fp7"], "unknown dtype 'fp7'"),
    ([":build", "--gpu", "h900"], "unknown gpu 'h900'"),
    # flags that contradict each other, before the model is built
    ([":fails", "--dp", "2"], "--dp is of training: add --mode training"),
    ([":fails", "--accumulate", "2"], "--accumulate is of training"),
    ([":fails", "--checkpointing"], "--checkpointing is of training"),
    ([":fails", "--mode", "training", "--zero", "3"], "--zero 3 shards over the dp ranks: give dp of 2 or more"),
    ([":fails", "--mode", "training", "--dp", "2", "--accumulate", "2"], "--accumulate does not go with --dp"),
    ([":fails", "--mode", "training", "--schedule", "gpipe"], "give --pp of 2 or more"),
    ([":fails", "--mode", "training", "--tp-plan", "hf"], "give --tp of 2 or more"),
    ([":fails", "--mode", "training", "--tp", "2", "--tp-plan", "none.toml"], "none.toml is no plan"),
    ([":fails", "--mode", "training", "--sequence-parallel"], "needs tp of 2 or more"),
    ([":fails", "--mode", "training", "--optimizer", "lion"], "unknown optimizer 'lion'"),
    ([":fails", "--attention", "flash"], "attention must be one of"),
    ([":fails", "--host", "toaster"], "unknown host 'toaster'"),
    ([":build", "--mode", "training", "--checkpointing"], "gives no Hugging Face model that supports it"),
])  # fmt: skip
def test_wrong_input_is_one_line(file: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, *more = words
    gpu = [] if "--gpu" in more else ["--gpu", "h200_sxm"]
    assert main(["trace", f"{file}{first}", *gpu, *more]) == 2
    told = capsys.readouterr()
    assert text in told.err and told.err.count("\n") == 1 and not told.out


def test_a_config_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 8}')
    assert main(["trace", str(path), "--gpu", "h200_sxm"]) == 2
    assert "has no model_type" in capsys.readouterr().err
    assert main(["trace", "gpt2", "--seq", "4096", "--gpu", "h200_sxm"]) == 2
    assert "exceeds the 1,024 positions" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("kernelcast.app.questions.trace.importlib.util.find_spec", lambda name: None)
    assert main(["trace", f"{file}:build", "--gpu", "h200_sxm"]) == 2
    assert "tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'" in capsys.readouterr().err
