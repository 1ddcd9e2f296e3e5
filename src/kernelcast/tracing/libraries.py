"""Libraries that a CPU-only PyTorch would not import."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import torch

# What torchvision's Python code asks of its compiled half while it is imported.
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def make_torchvision_importable() -> None:
    """torchvision built for GPUs does not import beside a PyTorch without them (its compiled half does not load), and
    transformers imports it: then the ops that it looks for are declared. They cannot run, but nothing here runs."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    places = importlib.util.find_spec("torchvision").submodule_search_locations or ()  # type: ignore[union-attr]
    for compiled in (path for place in places for path in Path(place).glob("_C*.so")):
        with contextlib.suppress(OSError, RuntimeError):
            torch.ops.load_library(str(compiled))
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
