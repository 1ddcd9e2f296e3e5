"""The host's costs: counted by op, fitted to programs, read from a file; and what they do to a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.schedule.timeline import COSTS, host, usual_host
from kernelcast.tracing.traced import Footprint, Op, Tensor, Trace
from kernelcast.training.step import host_counts, launch_costs, launching_s, run_step

torch = pytest.importorskip("torch")
from kernelcast.collect.host import (  # noqa: E402
    ProgramTimes,
    fitted,
    programs,
    timed_programs,
    write_host,
)

H200 = kc.gpu("h200_sxm")
GAPS = {"gap_s": 1e-6, "graph_gap_s": 9e-7, "graph_s": 1e-5}
X = Tensor((64, 64), (64, 1), "bf16", 1)


def op(name: str, kind: str, phase: str, at: int = 0) -> Op:
    return Op(name, (X, X), {}, (X,), kind, phase, "", at)  # type: ignore[arg-type]


def step_of(mode: str = "training") -> Trace:
    """Two kernels and a view forward, with 10 and 30 calls of Python; two kernels and a view back; an update."""
    ops = (
        op("add", "kernel", "forward", 10), op("view", "view", "forward", 10), op("mul", "kernel", "forward", 40),
        op("mul", "kernel", "backward", 40), op("view", "view", "backward", 40), op("mul", "kernel", "backward", 40),
        op("add", "kernel", "optimizer", 45), op("add", "kernel", "optimizer", 45),
    )  # fmt: skip
    return Trace("m", mode, ops, 100, 7, Footprint())  # type: ignore[arg-type]


def test_what_the_host_does_is_counted_where_it_does_it() -> None:
    counts = host_counts(step_of())
    assert {name: list(map(float, column)) for name, column in counts.items()} == {
        "step_s": [1, 0, 0, 0, 0, 0, 0, 0],
        "view_s": [0, 1, 0, 0, 0, 0, 0, 0],
        "python_s": [10, 0, 30, 0, 0, 0, 5, 0],
        "recorded_s": [1, 0, 1, 0, 0, 0, 0, 0],
        "backward_s": [0, 0, 0, 1, 0, 1, 0, 0],
        "backward_view_s": [0, 0, 0, 0, 1, 0, 0, 0],
        "parameter_s": [0, 0, 0, 0, 0, 0, 7, 0],
    }
    assert sum(host_counts(step_of("inference"))["recorded_s"]) == 0


def test_costs_are_counts_times_seconds_and_kernels_come_on_top() -> None:
    costs_s: dict[str, Any] = {name: 10.0**-at for at, name in enumerate(COSTS, 3)} | {"step_s": 1e-6}
    machine = replace(host("server"), **costs_s)
    costs = launch_costs(step_of(), machine)
    first = machine.step_s + 10 * machine.python_s + machine.recorded_s
    assert costs[0] == pytest.approx(first)
    step = run_step(step_of(), H200, on=machine)
    assert step.launched_s[0] == pytest.approx(first + machine.launch_s)
    assert step.launched_s[-1] == pytest.approx(costs.sum() + 6 * machine.launch_s)


def test_a_program_does_no_more_around_few_ops_than_in_them() -> None:
    """Ten calls of Python, an op that autograd records, and so on: a loop around them costs as much at most."""
    machine = replace(host("server"), step_s=1.0)
    ops = launch_costs(step_of(), replace(machine, step_s=1e-12)).sum()
    kernels = sum(op.op_type == "kernel" for op in step_of().ops)
    assert launch_costs(step_of(), machine).sum() == pytest.approx(2 * ops + kernels * machine.launch_s)


def test_the_first_kernel_of_an_op_passes_the_dispatcher_and_others_the_library_alone() -> None:
    machine = host("server")
    assert launching_s(1, machine) == machine.launch_s
    assert launching_s(4, machine) == pytest.approx(machine.launch_s + 3 * machine.series_s)
    assert launching_s(4, replace(machine, series_s=0.0)) == pytest.approx(4 * machine.launch_s)


def test_a_gpu_is_in_a_server_of_its_years() -> None:
    """1.18 x 1.19: instructions per clock of the two generations of cores between Cascade Lake and Sapphire Rapids."""
    assert [usual_host(name).id for name in ("h200_sxm", "b200_sxm", "rtx_4090")] == ["server"] * 3
    older = usual_host("a100_sxm")
    assert older.id == usual_host("t4").id == usual_host("v100_sxm").id == "server_2019"
    for name in COSTS:
        assert getattr(older, name) / getattr(host("server"), name) == pytest.approx(1.18 * 1.19, rel=0.02), name
    assert older.gap_s == host("server").gap_s  # of the GPU
    assert all(name in kc.gpu_ids() for name in older.gpus)


def test_a_slower_host_is_in_the_interval_and_in_the_margin() -> None:
    narrow = replace(host("server"), faster=0.01, slower=0.01)
    wide = replace(narrow, faster=0.4, slower=0.8)
    tight, loose = (run_step(step_of(), H200, on=machine) for machine in (narrow, wide))
    assert tight.launch_bound and tight.time_s == loose.time_s
    assert loose.high_s == pytest.approx(1.8 * loose.time_s, rel=0.02)  # all of the time is the host's
    assert loose.low_s == pytest.approx(0.6 * loose.time_s, rel=0.02)
    assert tight.high_s < 1.03 * tight.time_s
    assert loose.margin == pytest.approx(loose.launched_s[-1] / loose.busy_s.sum())
    assert loose.margins == pytest.approx((0.6 * loose.margin, 1.8 * loose.margin))
    graph = run_step(step_of(), H200, on=wide, graph=True)
    assert graph.margin == 0 and graph.high_s < 1.4 * graph.time_s


def _programs(planted: dict[str, float], seed: int, count: int = 40) -> list[ProgramTimes]:
    """Random programs on a host that takes so many times what the usual one does."""
    usual, rng = host("server"), np.random.default_rng(seed)
    found = []
    for at in range(count):
        counts = {name: float(rng.integers(0, 400)) for name in COSTS} | {"step_s": 1.0}
        seconds = sum(getattr(usual, name) * planted[name] * counts[name] for name in COSTS)
        found.append(ProgramTimes(str(at), tuple(seconds * rng.normal(1, 0.03, 9)), counts))
    return found


def test_a_fit_finds_how_fast_a_host_is() -> None:
    found = fitted(_programs(dict.fromkeys(COSTS, 0.6), 0), GAPS)
    for name in COSTS:
        assert getattr(found, name) == pytest.approx(0.6 * getattr(host("server"), name), rel=0.1), name
    assert 0.05 <= found.faster < 0.15 and 0.05 <= found.slower < 0.15
    assert "off by" in dict(found.sources)["programs"]


def test_a_fit_follows_other_proportions() -> None:
    """Not all the way: so that few programs do not turn them over; but new programs are forecast well."""
    planted = dict(zip(COSTS, (1.0, 0.5, 2.0, 1.5, 0.7, 1.2, 0.8, 1.0), strict=True))
    found = fitted(_programs(planted, 0), GAPS)
    usual = host("server")
    assert found.launch_s < 0.75 * usual.launch_s and found.view_s > 1.2 * usual.view_s
    for new in _programs(planted, 1, 10):
        told = sum(getattr(found, name) * new.counts[name] for name in COSTS)
        assert told == pytest.approx(new.median_s, rel=0.15)


def test_costs_never_fall_below_nothing() -> None:
    """Programs that views make faster cannot be; the rest is fitted as well as it may be."""
    counts = dict.fromkeys(COSTS, 0.0) | {"step_s": 1.0, "launch_s": 100.0}
    fast = ProgramTimes("many views", (1e-3,), counts | {"view_s": 1000.0})
    slow = ProgramTimes("no view", (3e-3,), counts)
    found = fitted([fast, slow], GAPS)
    assert 0 < found.view_s < host("server").view_s / 5
    assert all(getattr(found, name) > 0 for name in COSTS)


def test_a_host_is_written_and_read_again(tmp_path: Path) -> None:
    made = replace(host("server"), id="mine", launch_s=12.34e-6, sources=(("date", "today"),))
    path = tmp_path / "Mine.toml"
    with pytest.raises(KernelcastError, match=r"no file .*collect --host"):
        host(str(path))
    write_host(made, tmp_path / "mine.toml")
    again = host(str(tmp_path / "mine.toml"))
    assert again.launch_s == pytest.approx(12.3e-6) and dict(again.sources) == {"date": "today"}
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(KernelcastError, match=r"bad\.toml"):
        host(str(tmp_path / "bad.toml"))
    (tmp_path / "short.toml").write_text('name = "x"')
    with pytest.raises(KernelcastError, match=r"short\.toml: missing .*launch_s"):
        host(str(tmp_path / "short.toml"))


def test_programs_of_the_host_are_small_and_differ() -> None:
    """Each has much of something that another has little of."""
    with torch.device("meta"):
        made = list(programs())
    counts = {}
    for name, model, inputs in made:
        trace = kc.trace(model, inputs)
        found = {key: float(np.sum(value)) for key, value in host_counts(trace).items()}
        counts[name] = found | {"kernels": float(len(trace.kernels))}
        assert len(trace.kernels) > 50
        step = run_step(trace, H200)
        assert step.margin > 2, name  # the GPU is nearly idle
    assert counts["loop"]["python_s"] < 0.2 * counts["loop"]["kernels"]
    assert counts["residual"]["python_s"] > 4 * counts["residual"]["kernels"]
    assert counts["residual"]["view_s"] == 0 < counts["encoder by hand"]["view_s"]


def test_programs_are_run_and_traced_where_they_are() -> None:
    """On a CPU its own arithmetic counts too, so that only the way through is tested: real steps, real counts."""
    timed = timed_programs(H200, torch.device("cpu"), rounds=2, repeats=1)
    assert [one.name for one in timed][:2] == ["encoder, inference", "encoder, training"]
    for one in timed:
        assert len(one.seconds) == 2 and all(seconds > 0 for seconds in one.seconds)
        assert one.counts["launch_s"] >= 80 and set(one.counts) == set(COSTS)
        assert (one.counts["backward_s"] > 0) == one.name.endswith("training")
    found = fitted(timed, GAPS)
    assert all(getattr(found, name) > 0 for name in COSTS)
