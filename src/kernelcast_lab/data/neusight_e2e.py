"""Whole models as NeuSight measured them: ``neusight/e2e``, one row a model, mode, size and GPU.

fp32 in PyTorch 2.1, attention in parts. Before each of 25 runs the caching allocator is emptied; the mean of the
fastest five forward passes, and of the fastest five backward passes, add up to ``measured_s``. The loss lies between
the two and is not timed, and gradients are added to those of the run before (github sitar-lab/NeuSight,
neusight/Tracing/trace.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast_lab.data.shared import read_rows

Mode = Literal["inference", "training"]
_MODES: dict[str, Mode] = {"inf": "inference", "train": "training"}


@dataclass(frozen=True)
class ModelCase:
    """One measured case. ``batch`` is of all GPUs together; ``neusight_s``: what NeuSight predicted, where it did."""

    gpu: str
    model: str
    mode: Mode
    seq: int
    batch: int
    fused: bool
    parallelism: str  # none, or dp4, tp4, pp4_1 (stages, microbatches)
    gpus: int
    vendor: str
    measured_s: float
    forward_s: float | None  # None where the source has the sum only
    backward_s: float | None
    neusight_s: float | None

    @property
    def single(self) -> bool:
        return self.parallelism == "none"


def model_cases(folder: Path | str | None) -> list[ModelCase]:
    """Every row with a measured time."""
    return [_case(row) for row in read_rows(folder, "neusight/e2e") if row["measured_ms"]]


def _case(row: Mapping[str, Any]) -> ModelCase:
    if row["mode"] not in _MODES:
        raise KernelcastError(f"neusight/e2e: mode {row['mode']!r} is neither {' nor '.join(_MODES)}")
    forward_s = _seconds(row["measured_fw_ms"])
    return ModelCase(
        gpu=gpu(str(row["gpu_name"])).id,
        model=str(row["model"]),
        mode=_MODES[row["mode"]],
        seq=int(row["seq"]),
        batch=int(row["batch"]),
        fused=bool(row["fused"]),
        parallelism=str(row["parallelism"]),
        gpus=int(row["num_gpus"]),
        vendor=str(row["vendor"]),
        measured_s=float(row["measured_ms"]) * 1e-3,
        forward_s=forward_s,
        backward_s=None if forward_s is None else _seconds(row["measured_bw_ms"], zero=0.0),
        neusight_s=_seconds(row["neusight_ms"]),
    )


def _seconds(cell: float | None, zero: float | None = None) -> float | None:
    """Milliseconds in seconds; an empty cell, or a 0 that stands for one, is not a time."""
    return cell * 1e-3 if cell else None if cell is None else zero
