"""Record every ATen op of a run on meta tensors: shapes, strides and formats, no memory and no arithmetic."""

from __future__ import annotations

import bisect
import re
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kernelcast.errors import KernelcastError
from kernelcast.tracing.cuda_like import CUDA_KERNELS, channels_last_out, on_meta
from kernelcast.tracing.frames import PythonCalls, line_here
from kernelcast.tracing.traced import Op, OpType, Phase, Tensor
from kernelcast.tracing.values import KnownValues, tensors_of

_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8", torch.int64: "int64", torch.int32: "int32",
    torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool", torch.complex64: "complex64",
    torch.complex128: "complex128",
}  # fmt: skip
# Memory that is allocated and not written, or bookkeeping of autograd: nothing is launched.
_HOST_ONLY = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "detach_", "alias",
    "lift_fresh", "lift", "set_", "resize_", "_local_scalar_dense", "is_same_size", "_has_compatible_shallow_copy_type",
    "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "device", "_unsafe_view", "_reshape_alias",
    "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "equal",
    "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "as_strided_",
    "transpose_", "t_", "squeeze_", "unsqueeze_", "swapdims_", "swapaxes_",
}  # fmt: skip
_META = torch.device("meta")
_EVEN = "tokens are assumed to be routed evenly to experts"
_MASKED = "captured as it is: transformers then builds attention masks, for which attention runs other kernels"
_ROUTER = re.compile(r"router|gat(e|ing)|moe|mlp|ffn|feed_forward|expert", re.IGNORECASE)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Records the ops, and the lifetime of every storage, for the peak of memory."""

    def __init__(self, attention: str = "fused") -> None:
        super().__init__()
        self._attention = attention
        self.ops: list[Op] = []
        self.phase: Phase = "forward"
        self.calls = PythonCalls()
        self._counted = 0  # calls of the phases before
        self.python_calls: dict[str, int] = {}
        self.modules: list[str] = []
        self.module_calls: dict[str, int] = {}
        self.lives: list[tuple[int, int, int]] = []  # (ops so far, storage, bytes; negative when it is freed)
        self._numbers: dict[int, tuple[int, Any]] = {}  # of storages, by address while they live
        self.values = KnownValues()
        self._count = 0
        self._sequence: list[
            tuple[int, str]
        ] = []  # autograd's sequence numbers in the forward pass, and the module then

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls.pause()
        try:
            return self._handle(func, args, kwargs)
        finally:
            self.calls.resume()

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        options = dict(kwargs or {})
        space, _, name = str(func._schema.name).partition("::")
        if space == "profiler":
            return func(*args, **options)
        if name == "_local_scalar_dense":
            return self.scalar(args[0])
        if _on_host(args, options):
            return func(*args, **options)
        if options.get("device") is not None:
            options["device"] = _META
        args = tree_map(self._on_meta, args)
        decomposed = self._decomposed(name, func, args, options)
        if decomposed is not NotImplemented:
            return decomposed
        out = self._run(name, func, args, options)
        outputs = tensors_of(out)
        self.values.follow(name, func, args, options, out, self._routes())
        self._record(name, func, args, options, outputs)
        return out

    def begin(self, phase: Phase) -> None:
        """Ops from here on are of this phase."""
        self._count_calls()
        self.phase = phase

    def _count_calls(self) -> None:
        made = self.calls.count - self._counted
        if made:
            self.python_calls[self.phase] = self.python_calls.get(self.phase, 0) + made
        self._counted = self.calls.count

    def end(self) -> None:
        """The step is over."""
        self._count_calls()

    def recorded(self, masked: bool) -> dict[str, Any]:
        """Fields of the trace. ``masked``: attention has masks that only a captured step has."""
        notes = [_EVEN] * self.values.even_routing + [_MASKED] * masked
        counted = {"module_calls": self.module_calls, "python_calls": self.python_calls}
        return {"ops": tuple(self.ops), "notes": tuple(notes), **counted}

    def forget_ops(self) -> None:
        """Drop what was recorded so far (preparation); live storages stay."""
        self.calls.count = self._counted = 0
        self.python_calls.clear()
        self.ops.clear()
        self.module_calls.clear()
        self.lives = [
            (0, number, memory().nbytes()) for number, memory in self._numbers.values() if memory() is not None
        ]

    def _decomposed(self, name: str, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Decompose ops that reach the recorder whole under inference_mode, as autograd would."""
        if not torch.is_inference_mode_enabled():
            return NotImplemented
        kernels = CUDA_KERNELS[self._attention]
        kernel = kernels.get(name) or kernels.get(f"{name}.{func._overloadname}")
        if kernel is None and not func._can_decompose():
            return NotImplemented
        with self:
            return kernel(*args, **options) if kernel else func.decompose(*args, **options)

    def _record(self, name: str, func: Any, args: Any, options: dict[str, Any], outputs: list[torch.Tensor]) -> None:
        arguments = tuple(tree_map(self._plain, args))
        given = {key: self._plain(value) for key, value in options.items() if key not in ("device", "layout")}
        results = tuple(self.tensor(leaf) for leaf in outputs)
        op_type = self._op_type(name, func, args, outputs)
        # nodes of the backward pass run with gradients off; what checkpointing runs again inside one, with them on
        inside = self.phase == "backward" and torch._C._current_autograd_node() is not None
        again = inside and torch.is_grad_enabled()
        self.ops.append(
            Op(name, arguments, given, results, op_type, self.phase, self._module(), self.calls.count, again)
        )

    def _module(self) -> str:
        """The module that runs; in the backward pass the one whose forward made the gradient's node."""
        if self.modules or self.phase != "backward":
            path = self.modules[-1] if self.modules else ""
            if self.phase == "forward":
                self._sequence.append((torch._C._autograd._get_sequence_nr(), path))
            return path
        node = torch._C._current_autograd_node()
        if node is None or not self._sequence:
            return ""
        at = bisect.bisect_right(self._sequence, (node._sequence_nr(), "\uffff"))
        return self._sequence[max(0, at - 1)][1]

    def _op_type(self, name: str, func: Any, args: Any, outputs: list[torch.Tensor]) -> OpType:
        if name in _HOST_ONLY:
            return "host"
        if func._schema.is_mutable:
            return "kernel"
        if all(out.numel() == 0 for out in outputs):
            return "host"
        if not _aliases(func):
            return "kernel"
        given = {leaf.untyped_storage()._cdata for leaf in tensors_of(args)}
        return "view" if all(out.untyped_storage()._cdata in given for out in outputs) else "kernel"

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, torch.dtype):
            return _DTYPES.get(value, str(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._plain(item) for item in value)
        return value

    def tensor(self, value: torch.Tensor) -> Tensor:
        """Shape, strides and format of a tensor, its storage numbered."""
        dtype = _DTYPES.get(value.dtype)
        if dtype is None:
            raise KernelcastError(f"cannot trace tensors of the format {value.dtype}")
        return Tensor(tuple(value.shape), tuple(value.stride()), dtype, self.storage(value))

    def storage(self, value: torch.Tensor) -> int:
        """The number of a tensor's storage; the lifetime of a new storage begins here."""
        memory = value.untyped_storage()
        at = memory._cdata
        if at not in self._numbers:
            self._count += 1
            number, size = self._count, memory.nbytes()
            self.lives.append((len(self.ops), number, size))
            self._numbers[at] = (number, weakref.ref(memory, self._freed(at, number, size)))
        return self._numbers[at][0]

    def storages(self, tree: Any) -> set[int]:
        return {self.storage(x) for x in tensors_in(tree)}

    def _freed(self, at: int, number: int, size: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self.lives.append((len(self.ops), number, -size))
            if self._numbers.get(at, (0,))[0] == number:
                del self._numbers[at]

        return gone

    def _on_meta(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return value
        moved = on_meta(value)
        self.values.know(moved, value)
        return moved

    def _run(self, name: str, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """The op on meta tensors, or on known values where those decide the shape of its result."""
        if torch.Tag.dynamic_output_shape in func.tags:
            result = self._sized_by_values(name, func, args, options)
            if result is not NotImplemented:
                return result
        if name == "equal":
            result = self.values.run(func, args, options)
            return self._refuse("compares the values of tensors (torch.equal)") if result is None else result
        if name == "_ctc_loss_backward":
            return torch.empty_like(args[1])
        try:
            out = func(*args, **options)
            return channels_last_out(out, *args[:2]) if name == "convolution" else out
        except NotImplementedError as error:
            if not func._schema.is_mutable or func._schema.returns:
                line = line_here()
                raise KernelcastError(f"{line}cannot trace the op {func._schema.name}: {_first_line(error)}") from None
            return None  # it writes its inputs (a fused optimizer), which a meta tensor does not show

    def _routes(self) -> bool:
        """Whether the module that runs routes tokens to experts, by its name."""
        return bool(self.modules) and _ROUTER.search(self.modules[-1].rpartition(".")[2]) is not None

    def _sized_by_values(self, name: str, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Ops whose output shape depends on values: nonzero, x[mask], ..."""
        if name in ("index", "_unsafe_index"):
            masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
            if not masks:
                return NotImplemented
            indices = [index for x in args[1] for index in self._nonzero(x)]
            return func(args[0], indices)
        if name == "masked_select":
            known = self.values.sizes(args[1])
            if known is not None:
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
                return args[0].new_empty(int(known.expand(shape).sum()))
        if name == "_ctc_loss":
            return self._ctc_loss(args)
        if name == "repeat_interleave" and options.get("output_size") is not None:
            return args[0].new_empty(options["output_size"])
        sized = all(self.values.sizes(x) is not None for x in tensors_of((args, options)))
        real_results = self.values.run(func, args, options) if sized else None
        if real_results is None:
            self._refuse(f"needs the values of a tensor to know the size of the result of {name}")
        made = tree_map(lambda leaf: on_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf, real_results)
        for value, real in zip(tensors_of(made), tensors_of(real_results), strict=True):
            self.values.know(value, real)
        return made

    def _ctc_loss(self, args: Any) -> Any:
        """A loss a sample, and what the backward pass needs: as long as the longest target."""
        scores, targets, _, lengths = args[:4]
        known = self.values.sizes(lengths) if isinstance(lengths, torch.Tensor) else lengths
        longest = targets.shape[-1] if known is None or not len(known) else int(max(known))
        batch = scores.shape[1] if scores.dim() == 3 else 1
        return scores.new_empty(batch), scores.new_empty(batch, scores.shape[0], 2 * longest + 1)

    def _nonzero(self, index: Any) -> list[Any]:
        """A boolean mask among indices becomes the indices where it is set (nonzero runs first on a GPU)."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        if self.values.sizes(index) is None:
            self._refuse("takes the elements that a mask chooses (x[mask]), of which the data say how many they are")
        with self:
            return list(torch.ops.aten.nonzero(index).unbind(1))

    def scalar(self, value: torch.Tensor) -> Any:
        """item() of a tensor: known where it comes from constants, else refused."""
        # a meta input is good for branches (is there padding?), but not for sizes
        real = self.values.of(value) if value.dtype == torch.bool else self.values.sizes(value)
        if real is None:
            self._refuse("needs the value of a tensor (item(), bool(), or a Python if)")
        return real.item()

    def listed(self, func: Any, value: torch.Tensor, *args: Any) -> Any:
        """tolist() and numpy() of a tensor."""
        real = self.values.sizes(value)
        if real is None:
            self._refuse(f"needs the values of a tensor ({func.__name__}())")
        return func(real, *args)

    def _refuse(self, what: str) -> NoReturn:
        where = f" in {self.modules[-1]}" if self.modules and self.modules[-1] else ""
        raise KernelcastError(
            f"{line_here()}cannot trace{where}: the program {what}, which depends on the data; whole numbers that are "
            "given as inputs on the CPU are known, and torch.where keeps sizes fixed"
        )


def _on_host(args: Any, options: dict[str, Any]) -> bool:
    """An op among tensors that the program keeps on the CPU (an optimizer's steps): it runs there, for real."""
    leaves = tensors_of((args, options))
    device = options.get("device")
    if any(leaf.device.type == "meta" for leaf in leaves):
        return False
    on_cpu = device is not None and torch.device(device).type == "cpu"
    return on_cpu or (bool(leaves) and device is None)


def _aliases(func: Any) -> bool:
    """Whether the op may return one of its inputs: reshape, to, contiguous."""
    return any(result.alias_info is not None for result in func._schema.returns) or func.is_view


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
