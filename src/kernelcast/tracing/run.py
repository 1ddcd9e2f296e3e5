"""Trace one step: forward, and for training backward and the optimizer, of any PyTorch model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from kernelcast.errors import KernelcastError
from kernelcast.tracing.cuda_like import CudaLike, check_attention, gpu_present, on_meta
from kernelcast.tracing.precision import DTYPES, OPTIMIZERS, MakeOptimizer, Plain, check_precision, optimizer_of
from kernelcast.tracing.prepared import as_traced, quiet
from kernelcast.tracing.record import Recorder, tensors_in
from kernelcast.tracing.traced import Footprint, Gradient, Trace
from kernelcast.tracing.where import line_of

Mode = Literal["inference", "training"]
_MIXED = ("expected scalar type", "must have the same dtype", "have different dtypes", "Unsupported dtype")
MODES = ("inference", "training")


def trace(
    model: nn.Module | Callable[..., Any],
    inputs: Any,
    mode: Mode = "inference",
    *,
    optimizer: str | MakeOptimizer | None = "adamw",
    loss: Callable[[Any], Any] | None = None,
    accumulate: int = 1,
    attention: str = "fused",
    graph: bool = False,
    precision: str = "pure",
    dtype: str = "bf16",
    name: str | None = None,
) -> Trace:
    """Every ATen op of one step of ``model`` on ``inputs``, without a GPU, memory or arithmetic.

    ``inputs``: a tensor, a sequence of arguments, or a mapping of keyword arguments; real tensors or ``meta`` ones,
    only their shapes and formats count. ``mode="training"`` adds the backward pass of ``loss(output)`` (default: the
    output's ``loss`` where it has one, else the mean of the first tensor) and a step of ``optimizer``: a name, a
    function of the parameters, or None to leave it out. ``accumulate``: passes before the step. ``attention``:
    ``fused`` (one kernel, as scaled_dot_product_attention runs) or ``math``. ``graph``: the step is captured in a CUDA
    graph, where some libraries take another way than eagerly. ``precision``: ``pure`` (the model as it is),
    ``mixed`` (fp32 master weights and moments beside 16-bit weights) or ``autocast`` (an fp32 model's products in
    ``dtype``).
    """
    model = _bare(model)
    _check(mode, accumulate, attention, optimizer, dtype)
    recorder = Recorder(attention)
    gpu = CudaLike(recorder.values, recorder.listed)
    module = model if isinstance(model, nn.Module) else nn.Module()  # a function has no weights
    with gpu_present(attention, graph), as_traced(module, mode, recorder):
        weights = list(module.parameters())
        check_precision(precision, mode, weights)
        given = tree_map(lambda leaf: _meta(leaf, recorder), inputs)
        held, fed = recorder.storages((weights, list(module.buffers()))), recorder.storages(given)
        step = _Step(model, given, recorder, gpu, loss, precision, DTYPES[dtype])
        with _told(recorder), quiet(), recorder, gpu, recorder.calls:
            made = step.training(weights, optimizer, accumulate) if mode == "training" else step.inference()
        recorder.end()
        gradients = _gradients(weights, recorder)
        owned = {"optimizer": recorder.storages(made), "gradients": [number for number, _ in gradients]}
        owned |= {"inputs": fed, "parameters": held}
    named = type(module).__name__ if module is model else str(getattr(model, "__name__", "function"))
    return Trace(
        name=name or named,
        mode=mode,
        parameters=sum(x.numel() for x in weights),
        parameter_tensors=len(weights),
        footprint=_footprint(recorder, owned),
        gradients=tuple(found for _, found in gradients),
        nodes=step.nodes,
        **recorder.recorded(),
        **_sizes(given, accumulate),
        **_tp_plan(module),
    )


def _tp_plan(module: nn.Module) -> dict[str, Any]:
    """Of Hugging Face's models: how their modules are cut for tensor parallelism."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    own, base = getattr(type(module), "_tp_plan", None), getattr(text, "base_model_tp_plan", None)
    return {"tp_plan": {**(base or {}), **(own if isinstance(own, dict) else {})}}


def _bare(model: Any) -> Any:
    """The model inside what runs it on several GPUs or compiles it."""
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


def _check(mode: str, accumulate: int, attention: str, optimizer: Any, dtype: str) -> None:
    if dtype not in DTYPES:
        raise KernelcastError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if mode not in MODES:
        raise KernelcastError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if accumulate < 1:
        raise KernelcastError(f"accumulate must be 1 or more passes, not {accumulate}")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise KernelcastError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}, or a function")
    check_attention(attention)


class _Step:
    """One step under way."""

    def __init__(
        self, model: Any, given: Any, recorder: Recorder, gpu: CudaLike, loss: Any, precision: str, narrow: torch.dtype,
    ) -> None:  # fmt: skip
        self.model, self.given, self.recorder, self.gpu, self.loss = model, given, recorder, gpu, loss
        self.precision, self.narrow = precision, narrow
        self.nodes = 0  # of autograd's graphs that ran backward

    def _call(self) -> Any:
        if isinstance(self.given, Mapping):
            return self.model(**self.given)
        if isinstance(self.given, Sequence):
            return self.model(*self.given)
        return self.model(self.given)

    def inference(self) -> list[Any]:
        with torch.no_grad(), self._autocast():
            self._call()
        return []

    def _autocast(self) -> Any:
        return torch.autocast("cuda", self.narrow) if self.precision == "autocast" else contextlib.nullcontext()

    def training(self, weights: list[Any], optimizer: Any, accumulate: int) -> list[Any]:
        """Forward, loss and backward ``accumulate`` times, then the optimizer; its states."""
        made = self._optimizer(weights, optimizer)
        for _ in range(accumulate):
            self.recorder.begin("forward")
            with self._autocast():
                loss = self._loss(self._call())
            self.nodes += _nodes(loss)
            self.recorder.begin("backward")
            loss.backward()
            self.gpu.forget()
            del loss
        if made is None:
            return []
        self.recorder.begin("optimizer")
        made.step()
        return made.states()

    def _optimizer(self, weights: list[Any], optimizer: Any) -> Plain | None:
        """The optimizer after its first step, which is not counted."""
        if optimizer is None:
            return None
        if not any(x.requires_grad for x in weights):
            raise KernelcastError("nothing to optimise: the model has no parameters to train; give optimizer=None")
        made = optimizer_of(weights, optimizer, self.precision)
        made.prepare()
        self.recorder.forget_ops()
        return made

    def _loss(self, output: Any) -> Any:
        found: Any = self.loss(output) if self.loss is not None else getattr(output, "loss", None)
        if found is None and self.loss is None:
            tensors = [x for x in tensors_in(output) if x.is_floating_point()]
            if not tensors:
                raise KernelcastError("no loss to train on: the output holds no tensor of floating-point numbers")
            found = tensors[0].mean()
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shaped = isinstance(found, torch.Tensor)
            told = f"a tensor of shape {tuple(found.shape)}" if shaped else type(found).__name__
            raise KernelcastError(f"a loss is one number, not {told}; give loss=, a function of the output")
        if not found.requires_grad:
            raise KernelcastError("the loss depends on no parameter, so there is no backward pass to trace")
        return found


def _nodes(loss: torch.Tensor) -> int:
    """Of the graph that leads to the loss: one a differentiable op, and one a parameter, which takes the gradient."""
    seen: set[Any] = {loss.grad_fn} - {None}
    rest = list(seen)
    while rest:
        for node, _ in rest.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                rest.append(node)
    return len(seen)


@contextlib.contextmanager
def _told(recorder: Recorder) -> Iterator[None]:
    """What goes wrong inside a model, in one line that says where."""
    try:
        yield
    except KernelcastError:
        raise
    except Exception as error:
        where = recorder.modules[-1] if recorder.modules else ""
        last = f", after {recorder.ops[-1].name}" if recorder.ops else ""
        text = (" ".join(str(error).split()) or type(error).__name__)[:300]
        if any(words in text for words in _MIXED):
            text += "; in fp32 (--dtype) or inside autocast (--precision) a model may take formats that it mixes here"
        raise KernelcastError(
            f"{line_of(error)}the model does not trace{' in ' + where if where else ''}{last}: {text}"
        ) from error


def _meta(value: Any, recorder: Recorder) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "meta":
        if not value.is_floating_point() and not value.is_complex():
            recorder.values.assume(value)
        return value
    moved = on_meta(value)
    if value.is_floating_point():  # what it holds is data, on which a program must not branch
        return moved.requires_grad_(value.requires_grad)
    recorder.values.know(moved, value)
    return moved


def _gradients(weights: list[Any], recorder: Recorder) -> list[tuple[int, Gradient]]:
    """Each parameter's gradient with the last op of the backward pass that writes it."""
    mine = {recorder.storage(x.grad): x.grad for x in weights if x.grad is not None}
    ready = dict.fromkeys(mine, 0)
    for at, op in enumerate(recorder.ops):
        if op.phase == "backward":
            ready.update((out.storage, at) for out in op.outputs if out.storage in mine)
    found = [
        (number, Gradient(grad.numel() * grad.element_size(), grad.numel(), ready[number]))
        for number, grad in mine.items()
    ]
    return sorted(found, key=lambda pair: pair[1].ready)


def _footprint(recorder: Recorder, owned: Mapping[str, Iterable[int]]) -> Footprint:
    """What lives when most does, by what it is; what is of no kind are activations."""
    kinds = {number: kind for kind, own in owned.items() for number in own}
    alive: dict[int, int] = {}
    total = most = 0
    at_peak: dict[int, int] = {}
    for _, number, size in sorted(recorder.lives, key=lambda life: life[0]):
        total += size
        if size >= 0:
            alive[number] = size
        else:
            alive.pop(number, None)
        if total > most:
            most, at_peak = total, dict(alive)
    parts: Counter[str] = Counter()
    for number, size in at_peak.items():
        parts[kinds.get(number, "activations")] += size
    return Footprint(**parts)


def _sizes(given: Any, accumulate: int) -> dict[str, Any]:
    """Samples and tokens: of the first tensor of whole numbers with two axes, else its first axis alone."""
    tensors = [x for x in tensors_in(given) if x.dim()]
    ids = [x for x in tensors if not x.is_floating_point() and x.dim() == 2]
    if ids:
        return {"samples": accumulate * ids[0].shape[0], "tokens": accumulate * ids[0].numel()}
    return {"samples": accumulate * tensors[0].shape[0], "tokens": 0} if tensors else {}
