"""Meta tensors run the CPU's ops of PyTorch; here is what a CUDA GPU does instead, op by op.

Fused dropout and attention, autocast, tensors sent to "cuda", multi-tensor optimizers: without a GPU PyTorch would
decompose each of them into other ops than those that run.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from kernelcast.errors import KernelcastError
from kernelcast.tracing.cuda_ops import CUDA_OPS, FAST_PATH, META_KERNELS, attention_in_parts, fused_attention
from kernelcast.tracing.values import KnownValues

_META, _CUDA = torch.device("meta"), "cuda"

# What torch.autocast does on CUDA (docs, "CUDA Op-Specific Behavior"): products in the narrow format, sums in fp32.
_NARROW = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "addmv", "mv", "einsum",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu", "chain_matmul",
    "scaled_dot_product_attention", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm", "gru",
    "rnn_tanh", "rnn_relu",
}  # fmt: skip
_WIDE = {
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cosh",
    "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv",
    "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10",
    "log_softmax", "log1p", "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss", "multi_margin_loss",
    "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "rsqrt", "sinh",
    "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "renorm", "tan",
    "triplet_margin_loss", "cross_entropy_loss", "nll_loss_nd", "huber_loss", "logsumexp", "ctc_loss",
    "linalg_vector_norm", "linalg_norm", "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "upsample_linear1d",
}  # fmt: skip

_LISTED = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_MADE = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_FINITE = {torch.isfinite: True, torch.Tensor.isfinite: True, torch.isnan: False, torch.Tensor.isnan: False,
           torch.isinf: False, torch.Tensor.isinf: False}  # fmt: skip


def on_meta(value: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same sizes and format."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)


def channels_last_out(out: torch.Tensor, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The output of a convolution as cuDNN writes it: channels last where the input or the weight is."""
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if any(suggest_memory_format(x) == memory_format for x in (given, weight)):
            return torch.empty_like(out, memory_format=memory_format)
    return out


class CudaFunctionMode(TorchFunctionMode):
    """PyTorch's Python functions as on a GPU: autocast, and tensors moved to the device."""

    def __init__(self, values: KnownValues, listed: Callable[..., Any]) -> None:
        super().__init__()
        self._values, self._listed = values, listed
        self._narrowed = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = {name: _device_here(value) for name, value in kwargs.items()} if kwargs else {}
        args = tuple([_device_here(value) for value in args])
        format_ = _autocast_format()
        if format_ is None:
            if len(self._narrowed):
                self.forget()
        else:
            args, options = self._autocast(getattr(func, "__name__", ""), args, options, format_)
        if func is torch.Tensor.backward:  # a mode is off inside what it handles: recomputed code must still see it
            with self:
                return _backward(*args, **options)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.__format__ and args[0].dim() == 0:  # a number in a text
            return format(args[0].item(), *args[1:])
        if func in _LISTED:
            return self._listed(func, *args)
        if func in _MADE and options.get("device", _META) == _META:
            return self._constant(func, args, {name: x for name, x in options.items() if name != "device"})
        if func in _INDEXED:
            args = (args[0], self._index(args[1]), *args[2:])
        if func in _FINITE:
            return self._finite(func, args, options)
        return func(*args, **options)

    def _finite(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Values are assumed to be finite: programs check before they clamp."""
        result = func(*args, **options)
        if result.device.type == "meta":
            self._values.know_everywhere(result, _FINITE[func])
        return result

    def _index(self, index: Any) -> Any:
        """Lists of numbers among indices, which PyTorch would send to the device unrecorded."""
        if isinstance(index, tuple):
            return tuple(self._index(part) for part in index)
        if isinstance(index, list) and index and all(isinstance(part, (int, bool)) for part in index):
            return self._constant(torch.tensor, (index,), {})
        return index

    def _constant(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Constants of the program: their values are known."""
        if func is torch.Tensor.new_tensor:
            options = {"dtype": args[0].dtype, **options}
            func, args = torch.tensor, args[1:]
        if args and isinstance(args[0], torch.Tensor):
            return func(*args, **options)
        with torch.device("cpu"):
            real = func(*args, **options)
        made = on_meta(real)
        self._values.know(made, real)
        return made.requires_grad_() if real.requires_grad else made

    def _autocast(self, name: str, args: Any, options: dict[str, Any], format_: torch.dtype) -> tuple[Any, Any]:
        if name in _NARROW:
            return tree_map(lambda x: self._narrow(x, format_), (args, options))
        if name == "sum":  # adds in fp32 as it reads
            narrow = isinstance(args[0], torch.Tensor) and args[0].dtype in (torch.float16, torch.bfloat16)
            return args, {"dtype": torch.float32, **options} if narrow else options
        if name in _WIDE:
            return tree_map(_widened, (args, options))
        return args, options

    def _narrow(self, value: Any, format_: torch.dtype) -> Any:
        """In the narrow format; a weight is cast once and kept, as autocast's cache does."""
        floats = {torch.float32, torch.float16, torch.bfloat16}
        if not isinstance(value, torch.Tensor) or value.dtype not in floats - {format_}:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(format_)
        if value not in self._narrowed:
            self._narrowed[value] = value.to(format_)
        return self._narrowed[value]

    def forget(self) -> None:
        """Autocast's cache ends with its context; what the backward pass needs of it lives on in autograd's graph."""
        self._narrowed = WeakTensorKeyDictionary()


def _backward(
    loss: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _widened(value: Any) -> Any:
    narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value


def _autocast_format() -> torch.dtype | None:
    return next((torch.get_autocast_dtype(on) for on in ("cuda", "cpu") if torch.is_autocast_enabled(on)), None)


def _dropout(input: Any, p: float, train: bool) -> Any:
    """Fused dropout: on a GPU one kernel, which writes a mask too."""
    if not train or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _device_here(value: Any) -> Any:
    """Tensors that a program sends to a GPU stay where tracing happens."""
    if not isinstance(value, (str, torch.device)):
        return value
    named = value.type if isinstance(value, torch.device) else value
    return _META if named.partition(":")[0] == "cuda" else value


# Ops that PyTorch decomposes unless a GPU is there; registered with the dispatcher, so that all calls get here.
CUDA_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    name: {"dropout": _dropout, "scaled_dot_product_attention": attention, **CUDA_OPS}
    for name, attention in (("fused", fused_attention), ("math", attention_in_parts))
}


@contextlib.contextmanager
def _dispatched(attention: str) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    table = [(*entry, "AutogradMeta") for entry in CUDA_KERNELS[attention].items()]
    table += [(*entry, "Meta") for entry in META_KERNELS.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Overriding a previously registered kernel", which is what we mean
        for name, function, key in table:
            library.impl(name, function, key, allow_override=True)  # PyTorch itself has some of these in Python
    try:
        yield
    finally:
        library._destroy()


# PyTorch's functions that are Python themselves would be handed to a mode whole, which is off inside them; so that it
# sees the ops that they are made of, they find none.
_GUARDS = [
    (module, name)
    for module in ("torch.nn.functional", "torch.functional")
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
]


# What programs ask of autocast on the device of a tensor, which is "meta" here.
_AUTOCAST = ("torch.is_autocast_enabled", "torch.get_autocast_dtype", "torch.amp.autocast_mode.autocast.__init__")


def _of_a_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for which "meta" is "cuda"."""

    @functools.wraps(function)
    def answer(*args: Any, **options: Any) -> Any:
        args = tuple([_CUDA if isinstance(value, str) and value == "meta" else value for value in args])
        return function(*args, **{name: _CUDA if value == "meta" else value for name, value in options.items()})

    return answer


class StreamCapture:
    """torch.cuda.is_current_stream_capturing. ``masks``: whether transformers asked before it left an attention mask
    out: while a stream is captured it cannot look for padding, and always builds one (masking_utils.py)."""

    _ASKING = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")

    def __init__(self, captured: bool) -> None:
        self.captured, self.masks = captured, False

    def __call__(self) -> bool:
        frame = sys._getframe(1)
        for _ in range(4):  # is_cuda_stream_capturing, is_tracing, and what asks
            self.masks |= frame.f_globals.get("__name__") in self._ASKING
            frame = frame.f_back or frame
        return self.captured


@contextlib.contextmanager
def gpu_present(attention: str = "fused", capture: StreamCapture | None = None) -> Iterator[None]:
    """PyTorch's checks see a GPU: autocast to bf16, fused and multi-tensor optimizers, and whether the step is being
    captured in a CUDA graph (None: not), which some libraries check."""
    devices: Callable[[], list[str]] = lambda: ["cuda", "cpu", "meta"]  # noqa: E731
    optimizer = "torch.optim.optimizer"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_dispatched(attention))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code is traced as written
        for name, answer in (
            (f"{optimizer}._get_fused_kernels_supported_devices", devices),
            (f"{optimizer}._get_foreach_kernels_supported_devices", devices),
            ("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", devices),
            ("torch.amp.autocast_mode.torch.cuda.is_bf16_supported", lambda *_, **__: True),
            ("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
            ("torch.cuda.is_available", lambda: True),
            ("torch.cuda.current_device", lambda: 0),
            ("torch.cuda.is_current_stream_capturing", capture or StreamCapture(False)),
            ("torch.cuda.synchronize", lambda *_, **__: None),
            ("torch.cuda.set_device", lambda *_, **__: None),
            ("torch.cuda.empty_cache", lambda: None),
            ("torch.nn.parallel.data_parallel._get_available_device_type", lambda: None),  # the model as on one GPU
            ("torch.cuda.get_device_capability", lambda *_, **__: (9, 0)),
            *((name, _of_a_gpu(pkgutil.resolve_name(name))) for name in _AUTOCAST),
            *FAST_PATH,
            *((f"{module}.{name}", lambda *_: False) for module, name in _GUARDS),
        ):
            with contextlib.suppress(AttributeError, ModuleNotFoundError):  # of another release of PyTorch
                stack.enter_context(mock.patch(name, answer))
        yield


def check_attention(name: str) -> None:
    """fused: one kernel; math: products, softmax and masks one after another, as SDPA's last resort."""
    if name not in CUDA_KERNELS:
        raise KernelcastError(f"attention must be one of {', '.join(CUDA_KERNELS)}, not {name!r}")
