"""What a run loses beside its steps, and energy of a step."""

from __future__ import annotations

import math

import pytest

import kernelcast as kc
from kernelcast.app.questions.training_job import training_precision
from kernelcast.training.run import Failures


def test_goodput_of_checkpoints_and_failures() -> None:
    """100 steps of 10 s, then 25 s to write: 1000/1025. 16,384 GPUs that fail every 50,700 hours: one failure in
    11,140 s, which loses 600 s and half of 1,025 s."""
    assert Failures().goodput(10, 16384) == 1
    assert Failures(100, 25).goodput(10, 16384) == pytest.approx(1000 / 1025)
    between_s = 50_700 * 3600 / 16384
    lost = between_s / (between_s + 600 + 512.5)
    assert Failures(100, 25, 50_700).goodput(10, 16384) == pytest.approx(1000 / 1025 * lost)
    assert 0.85 < 1000 / 1025 * lost < 0.95  # Llama 3: more than 90% effective training time


def test_the_slowest_gpu_counts() -> None:
    assert Failures(jitter=0.01).goodput(10, 1) == 1
    assert Failures(jitter=0.01).goodput(10, 1024) == pytest.approx(1 / (1 + 0.01 * math.sqrt(2 * math.log(1024))))


def test_failures_need_checkpoints() -> None:
    with pytest.raises(kc.KernelcastError, match="needs"):
        Failures(mtbf_hours=1000)
    with pytest.raises(kc.KernelcastError, match="0 or more"):
        Failures(every=-1)


def test_a_step_draws_no_more_than_its_gpus_may() -> None:
    run = kc.train("llama-3.2-1b", gpus="2xh100_sxm", global_batch=8)
    assert run.step_energy is not None
    watts = run.step_energy.value / run.step.time_s / 2
    assert 100 < watts <= 700 * 1.001


@pytest.mark.parametrize(
    ("name", "id"),
    [("delayed", "fp8_delayed"), ("bf16_with_fp8_current_scaling_mixed", "fp8_current"), ("blockwise", "fp8_block"),
     ("bf16_with_mxfp8_mixed", "mxfp8"), ("bf16_with_nvfp4_mixed", "nvfp4"), ("FP8-SC", "fp8_sc"), ("bf16", "bf16"),
     ("bf16_with_fp8_subchannel_scaling_mixed", "fp8_block")],
)  # fmt: skip
def test_recipes_by_the_names_of_other_projects(name: str, id: str) -> None:
    assert training_precision(name) == id
