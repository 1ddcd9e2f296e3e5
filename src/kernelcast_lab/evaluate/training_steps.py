"""Training steps of four layers that this project timed on an H200 (``validation/training_h200``), as training jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelcast.hardware import gpu
from kernelcast.models.catalogue import model
from kernelcast.stacks.training_stack import training_stack
from kernelcast.training.job import Recompute, TrainingJob, precision
from kernelcast.training.layout import TrainingLayout

MEASURED = Path(__file__).parents[3] / "validation" / "training_h200" / "steps.json"
_STACKS = {"eager": "torchtitan_eager", "compile": "torchtitan"}


def timed_steps() -> Sequence[Mapping[str, Any]]:
    """Empty where the file is not there."""
    return json.loads(MEASURED.read_text(encoding="utf-8"))["steps"] if MEASURED.exists() else ()


def job_of(step: Mapping[str, Any]) -> TrainingJob:
    """A loop of forward, backward and update: nothing is clipped, loaded or logged. Of the tables only the head is."""
    llama, again = model("llama-3.1-8b"), step["recompute"]
    if step["precision"] == "fp8":  # tensors of one scale made from bf16 ones (torchao): no others are kept
        kept = {name: getattr(precision("bf16_pure"), name)
                for name in ("main_parameter_bytes", "gradient_bytes", "state_bytes", "weight_copies")}  # fmt: skip
        formats = replace(precision("fp8_current"), **kept)
    else:
        formats = precision(step["precision"])
    return TrainingJob(
        model=replace(llama, layers=(replace(llama.layers[0], count=4),), tied_embeddings=True),
        gpu=gpu("h200_sxm"), layout=TrainingLayout(), seq=step["seq"], micro_batch=step["micro_batch"],
        stack=replace(training_stack(_STACKS[step["mode"]]), gradient_passes=0.0, step_s=0.0), precision=formats,
        recompute=Recompute(again) if again in ("none", "full") else Recompute("selective", modules=(again,)),
    )  # fmt: skip
