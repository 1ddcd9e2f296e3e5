"""Kernels of linear layers and vectors in the passes of a training step, on one rank, and tensor parallel exchanges.

The backward pass of a linear layer is two products: the gradient of its input (dgrad) and of its
weight (wgrad), which zero-bubble schedules run apart. Memory-bound kernels that a stack fuses are timed as a copy of as
many bytes as they move.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelcast.forecast.calls import Call, Launch
from kernelcast.hardware.gpu import WGMMA
from kernelcast.ops.dtypes import find_dtype
from kernelcast.training.job import TrainingJob
from kernelcast.training.layout import ProcessGroup

PASSES = ("forward", "backward", "wgrad", "recompute")  # of a unit
TENSOR, CONTEXT, EXPERT = "tensor parallel", "context parallel", "expert parallel"

# Values read and written for each element of a tensor, by fused kernels and by those of eager PyTorch.
_NORM = {True: (2.0, 3.0), False: (16.0, 30.0)}  # forward: x, y; backward: dy, x, dx. Eager: to fp32 and back, op by op
_RESIDUAL = {True: (3.0, 3.0), False: (3.0, 3.0)}  # two read, one written; gradients of both branches are added
_GATED = {True: (3.0, 5.0), False: (5.0, 12.0)}  # gate and up; their gradients
# of gpt-oss: two clamps, a scaled sigmoid, an offset, two products and the router's weight, each a kernel of its own
_CLAMPED = (19.0, 33.0)
_PLAIN = {True: (2.0, 3.0), False: (2.0, 3.0)}
# Time over that of a copy of as many bytes. B200: 5.33 TB/s of memory-bound kernels of a training step (SimuMax, the
# same file as below: 0.666 of 8 TB/s); copies reach 6.8 here.
OVER_COPY = 1.25
# Of the traffic of a sum in fp32 what its product does not hide: 4,096 tokens on B200, gradients of weights take 6 and
# 14% longer than those of inputs (57,344 x 8,192; 16,384 x 16,384; SimuMax, configs/system/b200_bf16_ceperm.json)
ACCUMULATION = 0.6
# Products whose sums are promoted to fp32 every 128 of the inner axis: the gradients in 8 bits on Hopper (recipe.py,
# fp8_gemm_dgrad and fp8_gemm_wgrad: use_split_accumulator), as those that are scaled by blocks.
SPLIT_SUMS = {"fp8": "fp8_block"}
# Of a launch from Python: experts' products, and their casts, are launched one by one in C++ (TE's GroupedLinear).
LOOP = 1 / 3


@dataclass(frozen=True, slots=True)
class Kernel:
    """``count`` times the call's time; ``launches``: what the host launches."""

    part: str
    call: Call
    count: float = 1.0
    launches: float = 1.0


@dataclass(frozen=True)
class Exchange:
    """Collectives one after another. ``beside``: kernels of the same pass that run meanwhile. ``pieces``: it goes in so
    many pieces, the first of which waits (or is waited for); 0: nothing depends on it."""

    part: str
    launches: tuple[Launch, ...]
    beside: tuple[Kernel, ...] = ()
    pieces: int = 0


@dataclass
class Pass:
    kernels: list[Kernel] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)


@dataclass
class Unit:
    """The passes of a layer, of the embedding, or of the head. ``syncs``: of the host with the GPU, forward. What the
    host calls beside kernels goes with ``linears`` and ``tensors``."""

    forward: Pass = field(default_factory=Pass)
    backward: Pass = field(default_factory=Pass)  # dgrad
    wgrad: Pass = field(default_factory=Pass)
    syncs: int = 0
    linears: float = 0.0
    tensors: float = 0.0  # of parameters
    recompute: Pass = field(default_factory=Pass)  # selective; whole layers run their forward pass again


class LayerKernels:
    """Launches of a job, added to the unit at hand."""

    def __init__(self, job: TrainingJob) -> None:
        self.job, self.model, self.layout, self.stack = job, job.model, job.layout, job.stack
        self.formats, self.gpu = job.precision, job.gpu
        self.tp, self.cp = job.layout.tp, job.layout.cp
        self.tokens = job.rank_tokens  # of a tensor parallel group
        self.hidden = job.model.hidden
        self.apart = job.layout.sequence_parallel and self.tp > 1
        self.outside = -(-self.tokens // self.tp) if self.apart else self.tokens  # rows of norms and residuals
        self.vectors = job.precision.activations
        self.width_bytes = find_dtype(self.vectors).act_bytes
        self.narrow = job.precision.scaling != ""
        self.adapted = job.lora is not None
        self.joins = self.stack.joined_projections or job.model.model_type in self.stack.joined_models
        self.drops = dict(self.stack.dropout).get(job.model.model_type, "").split()
        self.modules: tuple[str, ...] = ()
        self.norm_op = job.model.layers[0].layer.norms.op
        self.unit = Unit()

    # ---- kernels ----

    @contextlib.contextmanager
    def module(self, *names: str) -> Iterator[None]:
        """What is launched inside belongs to these modules, which selective recomputation names."""
        before, self.modules = self.modules, (*self.modules, *names)
        yield
        self.modules = before

    @property
    def again(self) -> bool:
        recompute = self.job.recompute
        return recompute.mode == "selective" and any(name in recompute.modules for name in self.modules)

    def run(self, part: str, call: Call, count: float = 1.0, launches: float = 1.0) -> Kernel:
        """In the forward pass, and again where it is recomputed."""
        kernel = Kernel(part, call, count, launches)
        self.unit.forward.kernels.append(kernel)
        if self.again and (share := self._share_again(part, call)):
            self.unit.recompute.kernels.append(Kernel(part, call, count * share, launches * share))
        return kernel

    def _share_again(self, part: str, call: Call) -> float:
        """Of a kernel of a recomputed module: torchtitan's per-op checkpointing keeps what attention and every second
        product give (torchtitan, distributed/activation_checkpoint.py)."""
        if any(name in self.job.recompute.modules for name in self.modules if name != "op"):
            return 1.0
        return 0.0 if part == "attention" else 0.5 if call.op == "gemm" else 1.0

    def back(self, part: str, call: Call, count: float = 1.0, launches: float = 1.0, weight: bool = False) -> Kernel:
        kernel = Kernel(part, call, count, launches)
        (self.unit.wgrad if weight else self.unit.backward).kernels.append(kernel)
        return kernel

    def moved(self, rows: float, cols: float, values: float) -> tuple[Call, float]:
        """A kernel that reads and writes ``values`` numbers for each element: as a copy, which does two and is closer
        to DRAM's rate than kernels that reduce, transpose or read several tensors."""
        call = Call.of("copy", {"rows": max(1, round(rows)), "cols": max(1, round(cols)), "dtype": self.vectors,
                                "stack": "torch"})  # fmt: skip
        return call, OVER_COPY * values / 2

    def vector(self, part: str, rows: float, cols: float, values: tuple[float, float], module: str = "",
               **sizes: int) -> None:  # fmt: skip
        """A memory-bound kernel and its gradient, or what a ``module`` launches by the stack's data; ``sizes``: what
        its ops name beside rows and cols."""
        forward, backward = values
        if rows * cols < 1:
            return
        if module in self.stack.kernels:
            known = {"rows": max(1, round(rows)), "cols": max(1, round(cols)), **sizes}
            for name, emit in (("forward", self.run), ("backward", self.back))[: 1 + (backward > 0)]:
                for given in self.stack.kernels[module][name]:
                    self._launch(emit, part, given, known)
            return
        call, count = self.moved(rows, cols, forward)
        self.run(part, call, count, max(1.0, forward / 3))
        if backward:
            self.back(part, call, count * backward / forward, max(1.0, backward / 3))

    def _launch(self, emit: Callable[..., Kernel], part: str, given: Mapping[str, Any], sizes: dict[str, int]) -> None:
        """One op of a module. A cast to the same format launches nothing."""
        named: dict[str, Any] = {"activations": self.vectors, **sizes}
        shape = {} if "tokens" in given else {name: sizes[name] for name in ("rows", "cols")}
        own = {name: value for name, value in given.items() if name not in ("op", "times")}
        own |= {k: named[v] for k, v in own.items() if k != "axis" and isinstance(v, str) and v in named}
        call = Call.of(given["op"], {"dtype": self.vectors, "stack": "torch", **shape, **own})
        if call.op != "copy" or own.get("to") != call.arguments["dtype"]:
            emit(part, call, given.get("times", 1.0), given.get("times", 1.0))

    def gemm(self, m: float, n: float, k: float, dtype: str, layout: str = "tn") -> Call:
        """Narrow formats are multiplied with both operands K-major: they are cast in both layouts."""
        return Call.of("gemm", {"m": max(1, round(m)), "n": max(1, round(n)), "k": max(1, round(k)), "dtype": dtype,
                                "layout": None if layout == "tn" or find_dtype(dtype).act_bytes < 2 else layout,
                                "stack": "torch"})  # fmt: skip

    def cast(self, part: str, rows: float, cols: float, what: str, fused: bool = False, count: float = 1.0,
             between: bool = False) -> None:  # fmt: skip
        """Of an input (forward) or of an output's gradient (backward) to the format of the products; ``between``:
        both products of experts."""
        if not self.narrow or (part == "experts" and self.stack.fused_experts and between):
            return
        read, written, behind_norm = self.formats.casts[what]
        values = (behind_norm if fused and self.stack.fused_norms else read + written) / self.width_bytes
        if values:
            call, moved = self.moved(rows, cols, values)
            emit = self.run if what == "input" else self.back
            emit(part, call, moved * count, count * (1.0 + (read > self.width_bytes)) * (1.0 if count == 1 else LOOP))

    # ---- linear layers ----

    def linear(self, part: str, n: int, k: int, *, rows: float = 0.0, target: str = "", column: bool = True,
               behind_norm: bool = False, narrow: bool = True, count: float = 1.0, launches: float = 1.0,
               gather: bool = True, bias: bool = False, inner: bool = False,
               ) -> tuple[Kernel, Kernel, Kernel | None]:  # fmt: skip
        """Rows of k numbers to n numbers on this rank; ``column``: sharded over its outputs (tensor parallelism gathers
        its input), else over its inputs (sums are scattered)."""
        rows, times = rows or self.tokens, count if rows else 1.0  # of its own rows each; else of the same
        formats = (self.formats.forward, self.formats.dgrad, self.formats.wgrad)
        forward, dgrad, wgrad = formats if narrow else (self.vectors if self.vectors != "fp32" else "tf32",) * 3
        if self.gpu.instruction_path == WGMMA:  # Transformer Engine's split accumulator: sums leave the tensor cores
            dgrad, wgrad = (SPLIT_SUMS.get(each, each) for each in (dgrad, wgrad))
        if narrow:
            self.cast(part, rows, k, "input", behind_norm, times, inner and not column)
        self._dequantise(part, n, k, count)
        self.unit.linears += launches
        self.unit.tensors += launches * (1 + bias) * (not self.adapted)
        first = self.run(part, self.gemm(rows, n, k, forward), count, launches)
        if bias and "bias" in self.stack.kernels:
            for _ in range(round(launches)):
                self.vector(part, rows, n, (0.0, 1.0), "bias")
        elif bias and not self.stack.fused_activation:  # its gradient, which others join to the product or to a cast
            call, moved = self.moved(rows, n, 1.0)
            self.back(part, call, moved * count)
        if narrow:
            self.cast(part, rows, n, "gradient", count=times, between=inner and column)
        second = self.back(part, self.gemm(rows, k, n, dgrad, "nn"), count, launches)
        third = None
        if not self.adapted:
            third = self.back(part, self.gemm(n, k, rows, wgrad, "nt"), count, launches, weight=True)
            self._accumulate(part, n, k, count)
        elif target in (self.job.lora.targets if self.job.lora else ()):
            self._adapter(part, rows, n, k, count)
        if narrow and not (inner and self.stack.fused_experts):
            for emit in (self.run, self.back, self.back)[: 2 + (third is not None)]:
                self._swizzle(emit, part, rows, k, count)
        if gather:
            self._tensor_parallel(column, first, second, third)
        return first, second, third

    def _dequantise(self, part: str, n: int, k: int, count: float) -> None:
        """A frozen base that is stored in fewer bits than its products read (QLoRA) is made wide in both passes."""
        lora = self.job.lora
        if lora is None or not lora.base or self.narrow:
            return
        stored = find_dtype(lora.base).weight_bytes
        if stored < self.width_bytes:
            call, moved = self.moved(n, k, stored / self.width_bytes + 1.0)
            self.run(part, call, moved * count)
            self.back(part, call, moved * count)

    def _swizzle(self, emit: Callable[..., Kernel], part: str, rows: float, k: int, count: float) -> None:
        """Scales of 32 (16) numbers into the order that a product reads, a kernel of its own for both operands
        (Transformer Engine, swizzle_scaling_factors)."""
        if self.formats.scaling in ("mx", "nvfp4"):
            call, moved = self.moved(rows, k / 32, 1.0)
            emit(part, call, 2 * moved * count, 2 * count * (1.0 if count == 1 else LOOP))

    def _accumulate(self, part: str, n: int, k: int, count: float) -> None:
        """The sum of gradients over micro-batches: the product adds to it, which its arithmetic hides in part; or a
        kernel of its own, where there is more than one micro-batch."""
        each = self.formats.gradient_bytes
        if self.stack.fused_gradient_accumulation:
            values = ACCUMULATION * (2 * each - 2.0) / self.width_bytes
        else:
            values = (2 * each + self.width_bytes) / self.width_bytes * (self.layout.micro_batches > 1)
        if not values:
            return
        call, moved = self.moved(n, k, values)
        self.back(part, call, moved * count, float(not self.stack.fused_gradient_accumulation), weight=True)

    def _adapter(self, part: str, rows: float, n: int, k: int, count: float) -> None:
        """Down to the rank and up, added to the layer's output."""
        rank = self.job.lora.rank if self.job.lora else 0
        self.unit.linears += 2
        self.unit.tensors += 2
        dtype = self.vectors
        for out, inner in ((rank, k), (n, rank)):
            self.run(part, self.gemm(rows, out, inner, dtype), count)
            self.back(part, self.gemm(rows, inner, out, dtype, "nn"), count)
            self.back(part, self.gemm(out, inner, rows, dtype, "nt"), count, weight=True)
        for width, emit in ((n, self.run), (k, self.back)):
            call, moved = self.moved(rows, width, 3.0)
            emit(part, call, moved * count)

    def _tensor_parallel(self, column: bool, first: Kernel, second: Kernel, third: Kernel | None) -> None:
        """Collectives of one linear layer. With sequence parallelism the input of a column layer is all-gathered and
        the output of a row layer reduce-scattered, and the reverse in the backward pass. There the gather of a column
        layer's input, which wgrad needs, runs beside dgrad, and the scatter of its gradient beside wgrad
        (Megatron-LM, LinearWithGradAccumulationAndAsyncCommunication). With tp_overlap the others go chunk by chunk
        beside their product (Transformer Engine's user buffers, AsyncTP)."""
        if self.tp == 1:
            return
        size = self.tokens * self.hidden * self.width_bytes
        if not self.apart:  # an all-reduce forward of a row layer, backward of a column layer (beside wgrad)
            if column:
                self._exchange("backward", "all_reduce", size, (third,) if third else ())
            else:
                self._exchange("forward", "all_reduce", size)
            return
        pieces, chunks = (self.tp, True) if self.job.tp_overlap else (0, False)
        if column:
            self._exchange("forward", "all_gather", size, (first,) if chunks else (), pieces)
            if third is not None:
                self._exchange("backward", "all_gather", size, (second,))
            self._exchange("backward", "reduce_scatter", size, (third,) if third else (second,) * chunks,
                           0 if third else pieces)  # fmt: skip
        else:
            self._exchange("forward", "reduce_scatter", size, (first,) if chunks else (), pieces)
            self._exchange("backward", "all_gather", size, (second,) if chunks else (), pieces)

    def _exchange(self, name: str, op: str, size: float, beside: tuple[Kernel, ...] = (), pieces: int = 0,
                  part: str = TENSOR, group: ProcessGroup | None = None) -> None:  # fmt: skip
        group = group or self.layout.group("tp")
        self._send(name, part, tuple(group.launches(op, size, self.vectors, self.gpu)), beside, pieces)

    def _send(self, name: str, part: str, launches: tuple[Launch, ...], beside: tuple[Kernel, ...] = (),
              pieces: int = 0) -> None:  # fmt: skip
        if not launches:
            return
        exchange = Exchange(part, launches, beside, pieces)
        getattr(self.unit, name).exchanges.append(exchange)
        if name == "forward" and self.again:
            self.unit.recompute.exchanges.append(exchange)

    def norm(self, rows: float = 0.0, cols: float = 0.0, op: str = "rmsnorm") -> None:
        self.unit.tensors += (2 if op == "layernorm" else 1) * (not self.adapted)
        with self.module("layernorm"):
            self.vector("norms", rows or self.outside, cols or self.hidden, _NORM[self.stack.fused_norms], op)

    def dropout(self, where: str, rows: float, cols: float) -> None:
        if where in self.drops:
            self.vector("residual", rows, cols, (2.5, 2.5), "dropout")

    def residual(self) -> None:
        self.dropout("residual", self.outside, self.hidden)
        self.vector("residual", self.outside, self.hidden, _RESIDUAL[self.stack.fused_residual], "residual")

    def fork(self, readers: float) -> None:
        """Gradients of so many layers that read the same tensor, added."""
        for _ in range(round(readers) - 1 if "fork" in self.stack.kernels else 0):
            self.vector("residual", self.outside, self.hidden, (0.0, 3.0), "fork")

    def activation(self, part: str, rows: float, width: int, gated: bool, clamped: bool = False,
                   name: str = "") -> None:  # fmt: skip
        values = (_GATED if gated else _PLAIN)[self.stack.fused_activation]
        if clamped:  # gpt-oss, the only experts with biases
            values = _CLAMPED
        if clamped or not self.stack.kernels:
            self.vector(part, rows, width, values)
            return
        self.vector(part, rows, width, _PLAIN[False], name if name in self.stack.kernels else "gelu")
        if gated:
            self.vector(part, rows, width, _RESIDUAL[False], "gate")
