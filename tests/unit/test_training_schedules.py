"""Schedules of a pipeline for many jobs at once: the bubbles that papers give, and the simulation of one."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcast.training import pipeline
from kernelcast.training.pipeline import WEIGHT
from kernelcast.training.schedules import dual_pipe_end, stage_ends, tasks_of

F, B, W = 1.0, 1.2, 0.8  # seconds of a forward pass, of the gradients of inputs and of weights


def even(parts: int, jobs: int = 1) -> np.ndarray:
    return np.array([np.full((parts, jobs), each) for each in (F, B, W)])


def end(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> float:
    parts = stages * virtual
    send_s = np.zeros((parts - 1, 1))
    return float(stage_ends(schedule, stages, micro_batches, virtual, even(parts), send_s).max())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_a_pass_of_every_other_stage(schedule: str) -> None:
    """(p - 1)(F + B + W): Narayanan et al. 2021, section 2.2."""
    assert end(schedule, 4, 12) == pytest.approx(12 * (F + B + W) + 3 * (F + B + W))


def test_interleaving_divides_the_bubble_by_the_virtual_stages() -> None:
    """v parts of a stage, each 1 / v of its time."""
    whole = F + B + W
    for virtual in (2, 4):
        assert end("interleaved", 4, 16, virtual) / virtual == pytest.approx(16 * whole + 3 * whole / virtual)


def test_zero_bubble_h1_fills_the_bubble_with_gradients_of_weights() -> None:
    """(p - 1)(F + B - W): Qi et al. (arXiv 2401.10241), table 2."""
    assert end("zb-h1", 4, 12) == pytest.approx(12 * (F + B + W) + 3 * (F + B - W))


def test_zero_bubble_h1_holds_no_more_activations_than_1f1b() -> None:
    for stage, (zero, plain) in enumerate(zip(tasks_of("zb-h1", 4, 12), tasks_of("1f1b", 4, 12), strict=True)):
        assert [task for task in zero if task.what != WEIGHT] == plain, stage
        assert len(zero) == 36


def test_dual_pipe() -> None:
    """(p / 2 - 1)(F&B + B - 3 W), B with W in it (DeepSeek-V3, arXiv 2412.19437, table 2)."""
    both = F + (B + W)
    assert dual_pipe_end(8, 20, even(8))[0, 0] == pytest.approx(20 * (F + B + W) + 3 * (both + (B + W) - 3 * W))


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)])
@pytest.mark.parametrize("micro_batches", [4, 12, 40, 96])
def test_as_the_simulation_of_uneven_stages_with_links(schedule: str, virtual: int, micro_batches: int) -> None:
    """Long schedules too, of which the middle is not run."""
    rng, parts, jobs = np.random.default_rng(0), 4 * virtual, 3
    times_s, send_s = rng.uniform(0.5, 1.5, (3, parts, jobs)), rng.uniform(0, 0.2, (parts - 1, jobs))
    ends = stage_ends(schedule, 4, micro_batches, virtual, times_s, send_s)
    order = pipeline.orders(schedule, 4, micro_batches, virtual)
    for at in range(jobs):
        backward = (times_s[1] + times_s[2])[:, at].tolist()
        timing = pipeline.PipelineTimes(times_s[0, :, at].tolist(), backward, backward, send_s[:, at].tolist())
        expected = pipeline.run(order, timing, micro_batches).ends_s
        assert ends[:, at] == pytest.approx(expected, rel=0.01)
