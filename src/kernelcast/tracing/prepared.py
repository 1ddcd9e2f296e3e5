"""A model while it is traced: on meta tensors, in its mode, its modules named; afterwards it is as it was."""

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
from kernelcast.tracing.cuda_like import on_meta
from kernelcast.tracing.record import Recorder
from kernelcast.tracing.values import Values


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what PyTorch says of compiled modules under the hooks that name modules. What is drawn at random in
    Python (layers left out) is the same every time."""
    drawn, arrays = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using `torch.compile")
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(arrays)


@contextlib.contextmanager
def as_traced(module: nn.Module, mode: str, recorder: Recorder) -> Iterator[None]:
    """The model as it is traced; afterwards it is as it was."""
    with (
        _weights_on_meta(module, recorder.values),
        _put(module, mode),
        _named_modules(module, recorder),
        torch.device("meta"),
    ):
        yield


@contextlib.contextmanager
def _weights_on_meta(module: nn.Module, values: Values) -> Iterator[None]:
    """The model's parameters and buffers as meta tensors while tracing; its own come back untouched."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    same: dict[int, Any] = {}  # tied weights stay tied
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is None or value.device.type == "meta":
                    continue
                if nn.parameter.is_lazy(value):
                    raise KernelcastError(f"{type(part).__name__} has no sizes yet: run the model once before tracing")
                if id(value) not in same:
                    bare, weight = on_meta(value), isinstance(value, nn.Parameter)
                    if not value.is_floating_point():  # tables of positions
                        values.know(bare, value)
                    same[id(value)] = nn.Parameter(bare, value.requires_grad) if weight else bare
                changed.append((table, name, value))
                table[name] = same[id(value)]
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
def _put(module: nn.Module, mode: str) -> Iterator[None]:
    """In training or evaluation mode, and back to what each part was in."""
    were = [(part, part.training) for part in module.modules()]
    module.train(mode == "training")
    try:
        yield
    finally:
        for part, was in were:
            part.training = was
