"""Training steps of four layers that this project timed on an H200 (``validation/training_h200``)."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcast.training.transformer_step import forecast
from kernelcast_lab.evaluate.training_steps import job_of, timed_steps


def test_steps_of_four_layers() -> None:
    steps = [forecast(job_of(step)) for step in timed_steps()]
    measured = np.array([step["seconds"] for step in timed_steps()])
    errors = np.array([step.time_s for step in steps]) / measured - 1
    assert np.abs(errors).mean() < 0.06
    assert np.abs(errors).max() < 0.10
    inside = [step.low_s <= seconds <= step.high_s for step, seconds in zip(steps, measured, strict=True)]
    assert np.mean(inside) >= 0.8


@pytest.mark.parametrize(("first", "second"), [(1, 0), (2, 1)])
def test_the_faster_of_two_is_forecast_to_be(first: int, second: int) -> None:
    """Compiled against eager, fp8 against bf16."""
    faster, slower = (timed_steps()[at] for at in (first, second))
    assert faster["seconds"] < slower["seconds"]
    assert forecast(job_of(faster)).time_s < forecast(job_of(slower)).time_s
