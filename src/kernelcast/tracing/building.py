"""While a model is built: nothing is computed or held but what small tensors of whole numbers hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kernelcast.tracing.cuda_like import CudaLike, gpu_present
from kernelcast.tracing.record import Recorder
from kernelcast.tracing.values import Values


@contextmanager
def building() -> Iterator[Values]:
    """A model's weights are made on meta, as tensors sent to a GPU are; random whole numbers are drawn for real, the
    same every time: what a person draws as an input is what the model is given."""
    recorder = Recorder()
    recorder.values.draws = True
    gpu = CudaLike(recorder.values, recorder.listed)
    with gpu_present(), torch.random.fork_rng(devices=[]), torch.device("meta"), recorder, gpu:
        torch.manual_seed(0)
        yield recorder.values


def held(value: Any, values: Values) -> Any:
    """What a tensor of whole numbers holds, where that is known."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.device.type != "meta":
        return value
    known = values.of(value)
    return value if known is None else known.clone()


def hold_buffers(model: nn.Module, values: Values) -> None:
    """Tables of positions and the like as what they hold."""
    for part in model.modules():
        part._buffers.update({key: held(x, values) for key, x in part._buffers.items()})
