"""Trace one step: forward, and for training backward and the optimizer, of any PyTorch model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from kernelcast.errors import KernelcastError
from kernelcast.tracing.cuda_like import CudaFunctionMode, StreamCapture, check_attention, gpu_present, on_meta
from kernelcast.tracing.frames import line_of
from kernelcast.tracing.meta_model import as_traced, quiet
from kernelcast.tracing.record import Recorder, tensors_in
from kernelcast.tracing.traced import Footprint, Gradient, Trace

# pure: weights, gradients and moments in the model's format, as ``torch.optim`` does to a model that was converted.
# mixed: weights and gradients in 16 bits, beside them master weights and moments in fp32, as Megatron's and DeepSpeed's
# optimizers for bf16 keep them: 2 + 2 + 4 + 4 + 4 bytes a parameter with AdamW. The step reads the 16-bit gradients,
# updates the master weights and writes them back as 16-bit copies.
# autocast: weights, gradients and moments in fp32; products inside torch.autocast, which casts each weight once a pass.
PRECISIONS = ("pure", "mixed", "autocast")
MODES = ("inference", "training")
Mode = Literal["inference", "training"]
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "adamw-foreach": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "adam": lambda weights: torch.optim.Adam(weights, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3, fused=True),
    "sgd-momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
}
_NARROW = (torch.bfloat16, torch.float16)
_DTYPE_MISMATCH = ("expected scalar type", "must have the same dtype", "have different dtypes", "Unsupported dtype")


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
    graph, where some libraries run other ops than eagerly. ``precision``: ``pure`` (the model as it is),
    ``mixed`` (fp32 master weights and moments beside 16-bit weights) or ``autocast`` (an fp32 model's products in
    ``dtype``).
    """
    model = _unwrapped(model)
    check_options(mode, accumulate, attention, optimizer, precision, dtype)
    recorder = Recorder(attention)
    gpu = CudaFunctionMode(recorder.values, recorder.listed)
    module = model if isinstance(model, nn.Module) else nn.Module()  # a function has no weights
    capture = StreamCapture(graph)
    with gpu_present(attention, capture), as_traced(module, mode, recorder):
        weights = list(module.parameters())
        _check_weights(precision, mode, weights)
        meta_inputs = tree_map(lambda leaf: _meta(leaf, recorder), inputs)
        stored = recorder.storages((weights, list(module.buffers())))
        owned: dict[str, Iterable[int]] = {"inputs": recorder.storages(meta_inputs), "parameters": stored}
        step = _TracedStep(model, meta_inputs, recorder, gpu, loss, precision, DTYPES[dtype])
        with _located_errors(recorder), quiet(), recorder, gpu, recorder.calls:
            states = step.training(weights, optimizer, accumulate) if mode == "training" else step.inference()
        recorder.end()
        gradients = _gradients(weights, recorder)
        frozen = tuple(recorder.tensor(x) for x in weights if x.grad is None)
        owned = {"optimizer": recorder.storages(states), "gradients": [number for number, _ in gradients], **owned}
    default_name = type(module).__name__ if module is model else str(getattr(model, "__name__", "function"))
    return Trace(
        name=name or default_name,
        mode=mode,
        parameters=sum(x.numel() for x in weights),
        parameter_tensors=len(weights),
        footprint=_footprint(recorder, owned),
        gradients=tuple(gradient for _, gradient in gradients),
        frozen=frozen,
        nodes=step.nodes,
        unmasked=capture.masks and not graph,
        **recorder.recorded(capture.masks and graph),
        **_sizes(meta_inputs, accumulate),
        **_tp_plan(module),
    )


def _tp_plan(module: nn.Module) -> dict[str, Any]:
    """The tensor parallel plan of a Hugging Face model."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    of_class, base = getattr(type(module), "_tp_plan", None), getattr(text, "base_model_tp_plan", None)
    return {"tp_plan": {**(base or {}), **(of_class if isinstance(of_class, dict) else {})}}


def _unwrapped(model: Any) -> Any:
    """The model inside what runs it on several GPUs or compiles it."""
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


def check_options(mode: str, accumulate: int, attention: str, optimizer: Any, precision: str, dtype: str) -> None:
    """Refuse options that no step has, before anything is built."""
    names = {"mode": (mode, MODES), "precision": (precision, PRECISIONS), "dtype": (dtype, DTYPES)}
    for name, (value, known) in names.items():
        if value not in known:
            raise KernelcastError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    if accumulate < 1:
        raise KernelcastError(f"accumulate must be 1 or more passes, not {accumulate}")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise KernelcastError(f"unknown optimizer {optimizer!r}; known: {', '.join(OPTIMIZERS)}, or a function")
    check_attention(attention)
    if precision == "autocast" and DTYPES[dtype] not in _NARROW:
        raise KernelcastError(f"precision 'autocast' runs products in bf16 or fp16, not {dtype}")


def _check_weights(precision: str, mode: str, weights: list[Any]) -> None:
    """Whether weights of these formats can be trained so."""
    narrow = any(x.dtype in _NARROW for x in weights)
    if precision == "mixed" and mode != "training":
        raise KernelcastError("precision 'mixed' is of training: master weights are the optimizer's")
    if precision == "mixed" and not narrow:
        raise KernelcastError("precision 'mixed' keeps weights in 16 bits: convert the model, as with .bfloat16()")
    if precision == "autocast" and narrow:
        raise KernelcastError("precision 'autocast' keeps weights in fp32: convert the model with .float()")


def call_model(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, Sequence) else model(inputs)


@dataclass
class _TracedStep:
    """One step while it runs."""

    model: Any
    inputs: Any
    recorder: Recorder
    gpu: CudaFunctionMode
    loss: Any
    precision: str
    dtype: torch.dtype
    nodes: int = 0  # of autograd's graphs that ran backward

    def inference(self) -> list[Any]:
        with torch.no_grad(), self._autocast():
            call_model(self.model, self.inputs)
        return []

    def _autocast(self) -> Any:
        return torch.autocast("cuda", self.dtype) if self.precision == "autocast" else contextlib.nullcontext()

    def training(self, weights: list[Any], optimizer: Any, accumulate: int) -> list[Any]:
        """Forward, loss and backward ``accumulate`` times, then the optimizer; its states."""
        stepper = self._optimizer(weights, optimizer)
        for _ in range(accumulate):
            self.recorder.begin("forward")
            with self._autocast():
                loss = self._loss(call_model(self.model, self.inputs))
            self.nodes += _nodes(loss)
            self.recorder.begin("backward")
            loss.backward()
            self.gpu.forget()
            del loss
        if stepper is None:
            return []
        self.recorder.begin("optimizer")
        stepper.step()
        return stepper.states()

    def _optimizer(self, weights: list[Any], optimizer: Any) -> ModelOptimizer | None:
        """The optimizer after its first step, which is not counted."""
        if optimizer is None:
            return None
        if not any(x.requires_grad for x in weights):
            raise KernelcastError("nothing to optimise: the model has no parameters to train; give optimizer=None")
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        stepper = (MasterWeightOptimizer if self.precision == "mixed" else ModelOptimizer)(weights, make)
        stepper.prepare()
        self.recorder.forget_ops()
        return stepper

    def _loss(self, output: Any) -> Any:
        loss: Any = self.loss(output) if self.loss is not None else getattr(output, "loss", None)
        if loss is None and self.loss is None:
            tensors = [x for x in tensors_in(output) if x.is_floating_point()]
            if not tensors:
                raise KernelcastError("no loss to train on: the output holds no tensor of floating-point numbers")
            loss = tensors[0].mean()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, torch.Tensor)
            what = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
            raise KernelcastError(f"a loss is one number, not {what}; give loss=, a function of the output")
        if not loss.requires_grad:
            raise KernelcastError("the loss depends on no parameter, so there is no backward pass to trace")
        return loss


def _nodes(loss: torch.Tensor) -> int:
    """Nodes of the autograd graph of the loss: one per differentiable op, and one per parameter that accumulates a
    gradient."""
    seen: set[Any] = {loss.grad_fn} - {None}
    rest = list(seen)
    while rest:
        for node, _ in rest.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                rest.append(node)
    return len(seen)


@contextlib.contextmanager
def _located_errors(recorder: Recorder) -> Iterator[None]:
    """An error inside a model, in one line that says where."""
    try:
        yield
    except KernelcastError:
        raise
    except Exception as error:
        where = recorder.modules[-1] if recorder.modules else ""
        last = f", after {recorder.ops[-1].name}" if recorder.ops else ""
        text = (" ".join(str(error).split()) or type(error).__name__)[:300]
        if any(part in text for part in _DTYPE_MISMATCH):
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
    if value.is_floating_point():  # its values are data-dependent: a program must not branch on them
        return moved.requires_grad_(value.requires_grad)
    recorder.values.know(moved, value)
    return moved


def _gradients(weights: list[Any], recorder: Recorder) -> list[tuple[int, Gradient]]:
    """Each parameter's gradient with the last op of the backward pass that writes it."""
    by_storage = {recorder.storage(x.grad): x.grad for x in weights if x.grad is not None}
    ready = dict.fromkeys(by_storage, 0)
    for at, op in enumerate(recorder.ops):
        if op.phase == "backward":
            ready.update((out.storage, at) for out in op.outputs if out.storage in by_storage)
    gradients = [
        (number, Gradient(grad.numel() * grad.element_size(), grad.numel(), ready[number]))
        for number, grad in by_storage.items()
    ]
    return sorted(gradients, key=lambda pair: pair[1].ready)


def _footprint(recorder: Recorder, owned: Mapping[str, Iterable[int]]) -> Footprint:
    """Bytes alive at the peak, by part; all other bytes are activations."""
    owners = {number: part for part, numbers in owned.items() for number in numbers}
    alive: dict[int, int] = {}
    total = peak = 0
    at_peak: dict[int, int] = {}
    for _, number, size in sorted(recorder.lives, key=lambda life: life[0]):
        total += size
        if size >= 0:
            alive[number] = size
        else:
            alive.pop(number, None)
        if total > peak:
            peak, at_peak = total, dict(alive)
    parts: Counter[str] = Counter()
    for number, size in at_peak.items():
        parts[owners.get(number, "activations")] += size
    return Footprint(**parts)


def _sizes(inputs: Any, accumulate: int) -> dict[str, Any]:
    """Samples and tokens: of the first tensor of whole numbers with two axes, else its first axis alone."""
    tensors = [x for x in tensors_in(inputs) if x.dim()]
    ids = [x for x in tensors if not x.is_floating_point() and x.dim() == 2]
    if ids:
        return {"samples": accumulate * ids[0].shape[0], "tokens": accumulate * ids[0].numel()}
    return {"samples": accumulate * tensors[0].shape[0], "tokens": 0} if tensors else {}


# ---- optimizers


class ModelOptimizer:
    """An optimizer on the weights themselves."""

    def __init__(self, weights: list[Any], make: MakeOptimizer) -> None:
        self.weights, self.optimizer = weights, make(weights)

    def prepare(self) -> None:
        """A first step, which makes the states and is not counted: every later one has them."""
        for x in self.weights:
            x.grad = torch.empty_like(x) if x.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.optimizer.step()

    def states(self) -> list[Any]:
        return list(self.optimizer.state.values())


class MasterWeightOptimizer(ModelOptimizer):
    """An optimizer on fp32 copies of the weights."""

    def __init__(self, weights: list[Any], make: MakeOptimizer) -> None:
        self.trained = [x for x in weights if x.requires_grad]
        with torch.no_grad():
            self.masters = [torch.nn.Parameter(torch.empty_like(x, dtype=torch.float32)) for x in self.trained]
        super().__init__(self.masters, make)

    def step(self) -> None:
        with torch.no_grad():
            used = [(x, master) for x, master in zip(self.trained, self.masters, strict=True) if x.grad is not None]
            if not self._fused(used):  # gradients are widened first, as a program on top of any optimizer has to
                wide = [torch.empty_like(master) for _, master in used]
                torch._foreach_copy_(wide, [x.grad for x, _ in used])
                for (_, master), gradient in zip(used, wide, strict=True):
                    master.grad = gradient
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            torch._foreach_copy_([x for x, _ in used], [master for _, master in used])

    def _fused(self, used: list[tuple[Any, Any]]) -> bool:
        """PyTorch's fused kernels on 16-bit gradients, as those of Apex and Transformer Engine read them."""
        group = self.optimizer.param_groups[0]
        states = [self.optimizer.state.get(master, {}) for _, master in used]
        cls = type(self.optimizer)
        if not group.get("fused") or cls not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
            return False
        masters, gradients = [master for _, master in used], [x.grad for x, _ in used]
        common = {"lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": False}
        if cls is torch.optim.SGD:
            moments = [state["momentum_buffer"] for state in states] if group["momentum"] else []
            torch._fused_sgd_(masters, gradients, moments, momentum=group["momentum"], dampening=0.0, nesterov=False,
                              is_first_step=False, **common)  # fmt: skip
            return True
        run = torch._fused_adamw_ if cls is torch.optim.AdamW else torch._fused_adam_
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        run(masters, gradients, first, second, [], steps, beta1=beta1, beta2=beta2, eps=group["eps"], amsgrad=False,
            **common)  # fmt: skip
        return True

    def states(self) -> list[Any]:
        return [*super().states(), *self.masters]
