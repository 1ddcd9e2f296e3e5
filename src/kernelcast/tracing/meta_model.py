"""A model on meta tensors: while it is built, and while it is traced; afterwards it is as it was."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from kernelcast.errors import KernelcastError
from kernelcast.tracing.cuda_like import CudaFunctionMode, gpu_present, on_meta
from kernelcast.tracing.record import Recorder
from kernelcast.tracing.values import KnownValues


@contextlib.contextmanager
def building() -> Iterator[KnownValues]:
    """While a model is built its weights are made on meta, as tensors sent to a GPU are. Random integers are drawn for
    real, the same every time: what a user draws as an input is what the model is given."""
    recorder = Recorder()
    recorder.values.draws = True
    gpu = CudaFunctionMode(recorder.values, recorder.listed)
    with gpu_present(), torch.random.fork_rng(devices=[]), torch.device("meta"), recorder, gpu:
        torch.manual_seed(0)
        yield recorder.values


def with_values(value: Any, values: KnownValues) -> Any:
    """An integer tensor with its values, where they are known."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.device.type != "meta":
        return value
    known = values.of(value)
    return value if known is None else known.clone()


def fill_buffers(model: nn.Module, values: KnownValues) -> None:
    """Tables of positions and the like with their values."""
    for part in model.modules():
        part._buffers.update({key: with_values(x, values) for key, x in part._buffers.items()})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without PyTorch's warnings of compiled modules under the hooks that name modules; Python's random numbers (layers
    that are dropped) are the same every time."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using `torch.compile")
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextlib.contextmanager
def as_traced(module: nn.Module, mode: str, recorder: Recorder) -> Iterator[None]:
    """The model as it is traced; afterwards it is as it was."""
    with (
        _weights_on_meta(module, recorder.values),
        _in_mode(module, mode),
        _named_modules(module, recorder),
        torch.device("meta"),
    ):
        yield


@contextlib.contextmanager
def _weights_on_meta(module: nn.Module, values: KnownValues) -> Iterator[None]:
    """The model's parameters and buffers as meta tensors while tracing; the real ones come back untouched."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    moved: dict[int, Any] = {}  # tied weights stay tied
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is None or value.device.type == "meta":
                    continue
                if nn.parameter.is_lazy(value):
                    raise KernelcastError(f"{type(part).__name__} has no sizes yet: run the model once before tracing")
                if id(value) not in moved:
                    bare, weight = on_meta(value), isinstance(value, nn.Parameter)
                    if not value.is_floating_point():  # tables of positions
                        values.know(bare, value)
                    moved[id(value)] = nn.Parameter(bare, value.requires_grad) if weight else bare
                changed.append((table, name, value))
                table[name] = moved[id(value)]
    gradients = [(x, x.grad) for x in module.parameters()]
    for x, _ in gradients:
        x.grad = None
    try:
        yield
    finally:
        for x, gradient in gradients:
            x.grad = gradient
        for table, name, value in changed:
            table[name] = value


@contextlib.contextmanager
def _named_modules(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keeps the path of the module that runs."""
    paths = {
        id(part): path.replace("._orig_mod", "").removeprefix("_orig_mod.") for path, part in module.named_modules()
    }

    def enter(part: nn.Module, _: Any) -> None:
        recorder.modules.append(paths.get(id(part), type(part).__name__))
        recorder.module_calls[recorder.phase] = recorder.module_calls.get(recorder.phase, 0) + 1

    def leave(part: nn.Module, _: Any, __: Any) -> None:
        recorder.modules.pop()

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=False),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _in_mode(module: nn.Module, mode: str) -> Iterator[None]:
    """Training or evaluation mode; restores the mode of each module afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(mode == "training")
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
