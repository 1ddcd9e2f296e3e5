"""Measuring power without a GPU: readings, windows, plans, journals."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kernelcast.collect.power_meter import GpuState, Idle, Nvml, measured, summary
from kernelcast.collect.session import Session, read_lines
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu

power = pytest.importorskip("kernelcast_lab.collect.power", reason="needs torch")

STATE = GpuState(490.0, 1980, 3201, 40, 4)


class Meter:
    """A counter that moves every 20 ms, at 500 W."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def energy_j(self) -> float:
        return 7.0 + 500 * 0.02 * int((time.perf_counter() - self.start) / 0.02)

    def state(self) -> GpuState:
        return STATE


class Steps:
    def push(self) -> int:
        time.sleep(0.005)
        return 10

    def finish(self) -> None:
        pass


def test_watts_are_counted_between_changes_of_the_counter() -> None:
    # the counter moves by 30 J every 0.1 s: 300 W, whatever the window's ends are
    energy = [(at * 0.01, 30.0 * (at // 10)) for at in range(100)]
    found = summary(energy, [(0.3, STATE), (0.4, STATE)], 0.15, 0.85)
    assert found["power_w"] == pytest.approx(300) and found["updates"] == 7
    assert found["sm_mhz"] == 1980 and found["reasons"] == 4


def test_without_a_counter_the_readings_of_the_moment_count_and_without_both_nothing_does() -> None:
    assert summary([], [(0.2, STATE)], 0.1, 0.9)["power_w"] == 490
    with pytest.raises(KernelcastError, match="neither energy nor power"):
        summary([], [], 0.1, 0.9)


def test_a_load_is_measured_while_it_repeats() -> None:
    found = measured(Steps(), Meter(), warm_s=0.05, window_s=0.25)
    assert found["power_w"] == pytest.approx(500, rel=0.15)
    assert found["seconds_per_call"] == pytest.approx(found["window_s"] / found["calls"], rel=1e-3)
    assert measured(Idle(), Meter(), 0.05, 0.2)["seconds_per_call"] is None


def test_a_machine_without_the_driver_is_told_so() -> None:
    try:
        Nvml()
    except KernelcastError as error:
        assert "libnvidia-ml" in str(error) or "driver" in str(error)


def test_the_plan_mixes_all_kinds_and_is_the_same_again() -> None:
    jobs = power.plan(gpu("h200_sxm"))
    assert [job.key for job in jobs] == [job.key for job in power.plan(gpu("h200_sxm"))]
    assert len({job.key for job in jobs}) == len(jobs) > 200
    assert {"gemm", "attention", "decode", "memory", "idle", "duty", "tiny", "zeros"} <= {job.family for job in jobs}
    assert {"gemm", "attention", "memory"} <= {job.family for job in jobs[:30]}  # any prefix is useful
    formats = {job.parameters.get("dtype") for job in jobs if job.family == "gemm"}
    assert {"bf16", "fp16", "fp8", "tf32", "fp32"} <= formats


def test_one_job_that_fails_costs_no_other_and_a_second_run_goes_on(tmp_path: Path) -> None:
    asked: list[str] = []

    class Device:
        def measure(self, job: Any) -> dict[str, Any]:
            asked.append(job.key)
            if len(asked) == 3:
                raise RuntimeError("out of\nmemory")
            return {"power_w": 400.0, "seconds_per_call": 2e-3 if job.parameters else None, "sm_mhz": 1900.0}

        def describe(self, batch: Any) -> list[dict[str, Any]]:
            return []

    jobs = power.plan(gpu("h200_sxm"))[:8]
    lines, clock = tmp_path / "power.progress.jsonl", iter(range(1000))
    done = Session(Device(), lines, 8.0, clock=lambda: float(next(clock))).run(jobs)
    assert done.failed == 1 and 3 <= done.done < len(jobs)
    lines.write_text(lines.read_text() + '{"key": "cut')  # as a kill leaves it
    done = Session(Device(), lines).run(jobs)
    assert (done.done, done.failed) == (len(jobs), 1)
    assert len(asked) == len(jobs) == len(set(asked))
    records = read_lines(lines)
    assert json.dumps(records[2]["error"]) == '"RuntimeError: out of memory"'
    assert power.write_power(records, tmp_path / "power.parquet", gpu("h200_sxm"), {}) == len(jobs) - 1
    with pytest.raises(KernelcastError, match="nothing was measured"):
        power.write_power([], tmp_path / "none.parquet", gpu("h200_sxm"), {})
