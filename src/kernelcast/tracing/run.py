"""Trace one step: forward, and for training backward and the optimizer, of any PyTorch model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from kernelcast.errors import KernelcastError
from kernelcast.networks.traced import Footprint, Gradient, Trace
from kernelcast.tracing.cuda_like import CudaLike, check_attention, gpu_present
from kernelcast.tracing.record import Recorder

Mode = Literal["inference", "training"]
MODES = ("inference", "training")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "adamw-foreach": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "adam": lambda weights: torch.optim.Adam(weights, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3, fused=True),
    "sgd-momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
}
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


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
    name: str | None = None,
) -> Trace:
    """Every ATen op of one step of ``model`` on ``inputs``, without a GPU, memory or arithmetic.

    ``inputs``: a tensor, a sequence of arguments, or a mapping of keyword arguments; real tensors or ``meta`` ones,
    only their shapes and formats count. ``mode="training"`` adds the backward pass of ``loss(output)`` (default: the
    output's ``loss`` where it has one, else the mean of the first tensor) and a step of ``optimizer``: a name, a
    function of the parameters, or None to leave it out. ``accumulate``: passes before the step. ``attention``:
    ``fused`` (one kernel, as scaled_dot_product_attention runs) or ``math``. ``graph``: the step is captured in a CUDA
    graph, where some libraries take another way than eagerly.
    """
    _check(mode, accumulate, attention, optimizer)
    recorder, gpu = Recorder(), CudaLike(attention)
    module = model if isinstance(model, nn.Module) else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(gpu_present(graph))
        if module is not None:
            stack.enter_context(_weights_on_meta(module))
            stack.enter_context(_put(module, mode))
        stack.enter_context(_named_modules(module, recorder))
        weights = list(module.parameters()) if module is not None else []
        stack.enter_context(torch.device("meta"))
        given = tree_map(lambda leaf: _meta(leaf, recorder), inputs)
        held = [recorder.storage(x) for x in (*weights, *(module.buffers() if module is not None else ()))]
        fed = [recorder.storage(x) for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
        step = _Step(model, given, recorder, gpu, loss)
        with _told(recorder), recorder, gpu:
            made = step.training(weights, optimizer, accumulate) if mode == "training" else step.inference()
        gradients = _gradients(weights, recorder) if mode == "training" else ()
        states = {recorder.storage(x) for x in tree_leaves(made) if isinstance(x, torch.Tensor)}
        footprint = _footprint(recorder, set(held), set(fed), {g[0] for g in gradients}, states)
    return Trace(
        name=name or (type(module).__name__ if module is not None else getattr(model, "__name__", "function")),
        mode=mode,
        ops=tuple(recorder.ops),
        parameters=sum(x.numel() for x in weights),
        parameter_tensors=len(weights),
        footprint=footprint,
        gradients=tuple(found for _, found in gradients),
        module_calls=recorder.module_calls,
        **_sizes(given, accumulate),
    )


def _check(mode: str, accumulate: int, attention: str, optimizer: Any) -> None:
    if mode not in MODES:
        raise KernelcastError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if accumulate < 1:
        raise KernelcastError(f"accumulate must be 1 or more passes, not {accumulate}")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise KernelcastError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}, or a function")
    check_attention(attention)


class _Step:
    """One step under way."""

    def __init__(self, model: Any, given: Any, recorder: Recorder, gpu: CudaLike, loss: Any) -> None:
        self.model, self.given, self.recorder, self.gpu, self.loss = model, given, recorder, gpu, loss

    def _call(self) -> Any:
        if isinstance(self.given, Mapping):
            return self.model(**self.given)
        if isinstance(self.given, Sequence):
            return self.model(*self.given)
        return self.model(self.given)

    def inference(self) -> None:
        with torch.no_grad():
            self._call()

    def training(self, weights: list[Any], optimizer: Any, accumulate: int) -> Any:
        """Forward, loss and backward ``accumulate`` times, then the optimizer; its states."""
        made = self._optimizer(weights, optimizer)
        for _ in range(accumulate):
            self.recorder.phase = "forward"
            loss = self._loss(self._call())
            self.recorder.phase = "backward"
            _backward(loss)
            self.gpu.forget()
            del loss
        if made is None:
            return []
        self.recorder.phase = "optimizer"
        made.step()
        return list(made.state.values())

    def _optimizer(self, weights: list[Any], optimizer: Any) -> torch.optim.Optimizer | None:
        """The optimizer after a first step, which makes its states and is not counted: every later one has them."""
        if optimizer is None:
            return None
        if not any(x.requires_grad for x in weights):
            raise KernelcastError("nothing to optimise: the model has no parameters to train; give optimizer=None")
        made = (OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer)(weights)
        for x in weights:
            x.grad = torch.empty_like(x) if x.requires_grad else None
        made.step()
        made.zero_grad(set_to_none=True)
        self.recorder.forget_ops()
        return made

    def _loss(self, output: Any) -> Any:
        if self.loss is not None:
            found = self.loss(output)
        else:
            found = getattr(output, "loss", None)
            if found is None:
                tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
                if not tensors:
                    raise KernelcastError("no loss to train on: the output holds no tensor of floating-point numbers")
                found = tensors[0].mean()
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise KernelcastError(f"a loss is one number, not {_told_shape(found)}; give loss=, a function of the output")
        if not found.requires_grad:
            raise KernelcastError("the loss depends on no parameter, so there is no backward pass to trace")
        return found


def _backward(loss: torch.Tensor) -> None:
    """As ``loss.backward()``, which would leave the modes of tracing: layers that are checkpointed run their forward
    again in it, and must take the same way as before."""
    first = torch.ones_like(loss, memory_format=torch.preserve_format)
    torch.autograd.graph._engine_run_backward(
        (loss,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _told_shape(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


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
        text = " ".join(str(error).split()) or type(error).__name__
        raise KernelcastError(f"the model does not trace{' in ' + where if where else ''}{last}: {text[:300]}") from error


def _meta(value: Any, recorder: Recorder) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "meta":
        return value
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    recorder.know(moved, value.detach())
    return moved.requires_grad_(value.requires_grad) if value.is_floating_point() else moved


@contextlib.contextmanager
def _weights_on_meta(module: nn.Module) -> Iterator[None]:
    """The model's parameters and buffers as meta tensors while tracing; its own come back untouched."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    same: dict[int, Any] = {}  # tied weights stay tied
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, value in table.items():
                if value is None or value.device.type == "meta":
                    continue
                if id(value) not in same:
                    bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                    made = nn.Parameter(bare, value.requires_grad) if isinstance(value, nn.Parameter) else bare
                    same[id(value)] = made
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
def _named_modules(module: nn.Module | None, recorder: Recorder) -> Iterator[None]:
    """Keeps the path of the module that runs."""
    paths = {id(part): path for path, part in module.named_modules()} if module is not None else {}

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


def _gradients(weights: list[Any], recorder: Recorder) -> list[tuple[int, Gradient]]:
    """Each parameter's gradient with the last op of the backward pass that writes it."""
    mine = {recorder.storage(x.grad): x.grad for x in weights if x.grad is not None}
    ready = dict.fromkeys(mine, 0)
    for at, op in enumerate(recorder.ops):
        if op.phase != "backward":
            continue
        for out in op.outputs:
            if out.storage in ready:
                ready[out.storage] = at
    found = [
        (number, Gradient(grad.numel() * grad.element_size(), grad.numel(), ready[number]))
        for number, grad in mine.items()
    ]
    return sorted(found, key=lambda pair: pair[1].ready)


def _footprint(recorder: Recorder, held: set[int], fed: set[int], grads: set[int], states: set[int]) -> Footprint:
    """What lives when most does, by what it is."""
    order = sorted(range(len(recorder.lives)), key=lambda i: recorder.lives[i][0])
    alive: dict[int, int] = {}
    total = most = 0
    at_peak: dict[int, int] = {}
    for i in order:
        _, number, size = recorder.lives[i]
        total += size
        if size >= 0:
            alive[number] = size
        else:
            alive.pop(number, None)
        if total > most:
            most, at_peak = total, dict(alive)
    parts = {"parameters": 0, "gradients": 0, "optimizer": 0, "inputs": 0, "activations": 0}
    kinds = ((held, "parameters"), (fed, "inputs"), (grads, "gradients"), (states, "optimizer"))
    for number, size in at_peak.items():
        parts[next((kind for members, kind in kinds if number in members), "activations")] += size
    return Footprint(**parts)


def _sizes(given: Any, accumulate: int) -> dict[str, int]:
    """Samples and tokens: of the first tensor of whole numbers with two axes, else its first axis alone."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor) and x.dim()]
    ids = [x for x in tensors if not x.is_floating_point() and x.dim() == 2]
    if ids:
        return {"samples": accumulate * ids[0].shape[0], "tokens": accumulate * ids[0].numel()}
    return {"samples": accumulate * tensors[0].shape[0], "tokens": 0} if tensors else {}
