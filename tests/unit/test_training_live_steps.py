"""Training steps of four layers that this project timed on an H200 (``validation/training_h200``)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelcast.hardware import gpu
from kernelcast.models.catalogue import model
from kernelcast.stacks.training_stack import training_stack
from kernelcast.training.job import Recompute, TrainingJob, precision
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.transformer_step import forecast

LIVE = json.loads((Path(__file__).parents[2] / "validation" / "training_h200" / "steps.json").read_text())
PURE = precision("bf16_pure")
# Tensorwise scales of tensors in bf16 (torchao): no fp32 weights, and none kept in 8 bits
FP8 = replace(
    precision("fp8_current"), main_parameter_bytes=0.0, gradient_bytes=PURE.gradient_bytes,
    state_bytes=PURE.state_bytes, weight_copies=0.0,
)  # fmt: skip


def job(step: dict[str, Any]) -> TrainingJob:
    llama = model("llama-3.1-8b")
    four = replace(llama, layers=(replace(llama.layers[0], count=4),), tied_embeddings=True)  # one table: the head's
    again = step["recompute"]
    return TrainingJob(
        model=four, gpu=gpu(LIVE["gpu"]), layout=TrainingLayout(), seq=step["seq"], micro_batch=step["micro_batch"],
        # a loop of forward, backward and update: gradients are not clipped, nothing is loaded or logged
        stack=replace(training_stack({"eager": "torchtitan_eager", "compile": "torchtitan"}[step["mode"]]),
                      gradient_passes=0.0, step_s=0.0),
        precision=FP8 if step["precision"] == "fp8" else precision(step["precision"]),
        recompute=Recompute(again) if again in ("none", "full") else Recompute("selective", modules=(again,)),
    )  # fmt: skip


def test_steps_of_four_layers() -> None:
    steps = [forecast(job(step)) for step in LIVE["steps"]]
    measured = np.array([step["seconds"] for step in LIVE["steps"]])
    errors = np.array([step.time_s for step in steps]) / measured - 1
    assert np.abs(errors).mean() < 0.06
    assert np.abs(errors).max() < 0.10
    inside = [step.low_s <= seconds <= step.high_s for step, seconds in zip(steps, measured, strict=True)]
    assert np.mean(inside) >= 0.8


@pytest.mark.parametrize("what, other", [("compile", "eager"), ("fp8", "bf16_pure")])
def test_the_faster_of_two_is_forecast_to_be(what: str, other: str) -> None:
    first = LIVE["steps"][1 if what == "compile" else 2]
    second = LIVE["steps"][0 if what == "compile" else 1]
    assert first["seconds"] < second["seconds"]
    assert forecast(job(first)).time_s < forecast(job(second)).time_s
