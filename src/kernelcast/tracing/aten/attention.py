"""Scaled dot-product attention, forward and backward, by the library that PyTorch takes on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.tracing.aten.table import OpSettings, launch, number_format, pointwise, rule
from kernelcast.tracing.traced import Op, Tensor

# where bias, dropout and is_causal are among the arguments, by position; None: the op has none
_FORWARD: dict[str, tuple[int | None, int, int]] = {
    "_scaled_dot_product_cudnn_attention": (3, 5, 6),
    "_scaled_dot_product_efficient_attention": (3, 5, 6),
    "_scaled_dot_product_flash_attention": (None, 3, 4),
    "_scaled_dot_product_flash_attention_for_cpu": (None, 3, 4),
    "_scaled_dot_product_fused_attention_overrideable": (3, 4, 5),
}
_BACKWARD: dict[str, tuple[int | None, int, int]] = {
    "_scaled_dot_product_cudnn_attention_backward": (8, 13, 14),
    "_scaled_dot_product_flash_attention_backward": (None, 10, 11),
    "_scaled_dot_product_efficient_attention_backward": (4, 9, 11),
    "_scaled_dot_product_fused_attention_overrideable_backward": (4, 12, 13),
}
_BIAS_ALIGNMENT = 8  # elements: where rows of a bias start for the memory-efficient kernel
_FLASH_SIZE = 256  # of the largest head that FlashAttention 2 takes; and cuDNN 9.19 on Hopper
_CUDNN_SIZE = 128  # cuDNN elsewhere


@dataclass(frozen=True)
class _Attention:
    """The arguments that decide the backend and its time."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dropout: float
    causal: bool
    learned: bool  # the bias wants a gradient
    backward: bool

    @classmethod
    def of(cls, op: Op) -> _Attention:
        backward = op.name in _BACKWARD
        bias_at, dropout_at, causal_at = (_BACKWARD if backward else _FORWARD)[op.name]
        query, key, value = op.arguments[1:4] if backward else op.arguments[:3]
        bias = op.argument(bias_at, "attn_bias") if bias_at is not None else None
        return cls(
            query=query,
            key=key,
            value=value,
            bias=bias if isinstance(bias, Tensor) else None,
            dropout=float(op.argument(dropout_at, "dropout_p", 0.0) or 0.0),
            causal=bool(op.argument(causal_at, "is_causal", False)) and query.shape[2] > 1,
            learned="efficient" in op.name,
            backward=backward,
        )

    @property
    def half(self) -> bool:
        return self.query.dtype in ("fp16", "bf16")

    @property
    def pairs(self) -> int:
        batch, heads, queries, _ = self.query.shape
        return batch * heads * queries * self.key.shape[2]

    def backend(self, capability: str) -> str:
        """The first in PyTorch's order whose checks pass (sdp_utils.cpp, 2.11): cuDNN on Hopper and data-centre
        Blackwell, FlashAttention 2, the memory-efficient kernel, and math."""
        first = capability.partition(".")[0]
        major = int(first) if first.isdigit() else 8  # gfx942: ROCm's PyTorch has FlashAttention 2 as well (AOTriton)
        takes_half = self.half and major >= 8
        if takes_half and major in (9, 10) and self._cudnn(_FLASH_SIZE if major == 9 else _CUDNN_SIZE):
            return "cudnn"
        if takes_half and self._flash(capability):
            return "fa2"
        return "efficient" if self._efficient(major) else "math"

    def _cudnn(self, largest: int) -> bool:
        size, width, keys = self.query.shape[3], self.value.shape[3], self.key.shape[2]
        sizes = max(size, width) <= largest or (size, width) == (192, 128)
        single = keys == 1 or (self.dropout > 0 and self.query.shape[2] == 1)
        return not self.learned and sizes and size % 8 == width % 8 == 0 and not single

    def _flash(self, capability: str) -> bool:
        size, width = self.query.shape[3], self.value.shape[3]
        square = not self.causal or self.query.shape[2] == self.key.shape[2]
        small = capability in ("8.6", "8.9", "12.0", "12.1")  # shared memory for gradients of heads up to 192, or 256
        narrow = size <= 192 or (size > 224 and self.dropout == 0) or not (small and self.backward)
        return self.bias is None and not self.learned and size == width <= _FLASH_SIZE and square and narrow

    def _efficient(self, major: int) -> bool:
        same_heads = self.query.shape[1] == self.key.shape[1]
        grain = 8 if self.half else 4
        known = self.query.dtype in ("fp16", "fp32") or (self.query.dtype == "bf16" and major >= 8)
        return same_heads and known and all(x.shape[3] % grain == 0 for x in (self.query, self.value))

    @property
    def bias_layout(self) -> str:
        """The layout of the bias, by the axes that it has in memory."""
        if self.bias is None:
            return "none"
        has = [size > 1 and step != 0 for size, step in zip(self.bias.shape, self.bias.stride, strict=True)]
        batch, heads, queries = ([False] * 4 + has)[-4:-1]
        if not queries and self.query.shape[2] > 1:
            return "keys"
        return {(True, True): "full", (False, True): "heads", (True, False): "batch"}.get((batch, heads), "shared")

    def sizes(self) -> dict[str, Any]:
        batch, heads, length, size = self.query.shape
        keys = self.key.shape[2]
        # is_causal counts from the first key: later ones are seen by none
        keys = min(keys, length) if self.causal else keys
        return {"batch": batch, "q_heads": heads, "kv_heads": self.key.shape[1], "q_len": length, "kv_len": keys,
                "head_dim": size, "causal": self.causal and keys == length}  # fmt: skip


@rule(*_FORWARD)
def _forward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    call = _Attention.of(op)
    backend = call.backend(settings.capability)
    if backend == "math":
        yield from _parts(call, settings)
        return
    if backend == "efficient":
        yield from _padding(call)
    yield _kernel(call, backend, "attention")


@rule(*_BACKWARD)
def _backward(op: Op, settings: OpSettings) -> Iterator[Launch]:
    """grad_out, query, key, ...; gradients of each."""
    call = _Attention.of(op)
    backend = call.backend(settings.capability)
    if backend == "math":
        yield from _parts_backward(call, settings)
        return
    wanted = op.argument(10, "grad_input_mask", ()) if call.learned else ()
    yield _kernel(call, backend, "attention_backward", bool(wanted and wanted[3] and call.bias is not None))


def _kernel(call: _Attention, backend: str, kernel: str, bias_gradient: bool = False) -> Launch:
    dtype = call.query.dtype
    one_query = call.query.shape[2] == 1  # whose bias is a number a key, next to nothing beside the key itself
    if backend != "efficient" and (call.bias is None or one_query) and call.dropout == 0:
        return launch("attention", kernel, **call.sizes(), backend=backend, dtype=dtype)
    more = {"bias_gradient": True} if bias_gradient else {}
    return launch("attention", f"masked_{kernel}", **call.sizes(), bias=call.bias_layout, dropout=call.dropout > 0,
                  backend=backend, dtype=dtype, **more)  # fmt: skip


def _padding(call: _Attention) -> Iterator[Launch]:
    """A bias whose rows do not start at multiples of 8 elements is copied to one whose rows do."""
    bias = call.bias
    if bias is None or all(step % _BIAS_ALIGNMENT == 0 for step in bias.stride[:-1]):
        return
    yield launch("attention", "fill", rows=max(1, bias.distinct // bias.cols), dtype=number_format(bias),
                 cols=-(-bias.cols // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT)  # fmt: skip
    yield pointwise("attention", bias.distinct, number_format(bias), read_bytes=bias.bytes, written_bytes=bias.bytes,
                    tensors=1, access="strided", axes=2)  # fmt: skip


def _products(call: _Attention, settings: OpSettings) -> Callable[[int, int, int], Launch]:
    """A product over all heads, by its m, n and k; 16 bits are multiplied as fp32."""
    batch, heads = call.query.shape[:2]
    dtype = "tf32" if settings.tf32 else "fp32"

    def product(m: int, n: int, k: int) -> Launch:
        return launch("attention", "bmm", batch=batch * heads, m=m, n=n, k=k, dtype=dtype)

    return product


def _cast(x: Tensor, back: bool = False) -> Iterator[Launch]:
    if x.dtype in ("fp16", "bf16"):
        formats = ("fp32", x.dtype) if back else (x.dtype, "fp32")
        yield launch("attention", "copy", rows=x.rows, cols=x.cols, dtype=formats[0], to=formats[1])


def _scores(call: _Attention, read: float, written: float) -> Launch:
    """An element-wise kernel over the scores, which are fp32; bytes of each."""
    pairs = call.pairs
    return pointwise("attention", pairs, "fp32", cols=call.key.shape[2], read_bytes=read * pairs,
                     written_bytes=written * pairs)  # fmt: skip


def _parts(call: _Attention, settings: OpSettings) -> Iterator[Launch]:
    """_scaled_dot_product_attention_math."""
    product = _products(call, settings)
    (_, _, length, size), keys = call.query.shape, call.key.shape[2]
    for x in (call.query, call.key, call.value):
        yield from _cast(x)
    for x in (call.query, call.key):
        yield launch("attention", "scale", rows=x.rows, cols=x.cols, dtype="fp32")
    yield product(length, keys, size)
    if call.bias is not None or call.causal:
        yield _scores(call, read=8.0, written=4.0)
    yield from _safe(call.pairs // keys, keys, "fp32")
    if call.dropout > 0:
        yield launch("attention", "dropout", rows=call.pairs // keys, cols=keys, dtype="fp32")
    yield product(length, call.value.shape[3], keys)
    if call.half:  # the weights are returned in the format of the query too
        yield launch("attention", "copy", rows=call.pairs // keys, cols=keys, dtype="fp32", to=call.query.dtype)
    yield from _cast(call.query, back=True)


def _parts_backward(call: _Attention, settings: OpSettings) -> Iterator[Launch]:
    """The same, through autograd: two products for each of the forward's."""
    product = _products(call, settings)
    (_, _, length, size), keys, width = call.query.shape, call.key.shape[2], call.value.shape[3]
    yield from _cast(call.query)
    yield product(keys, width, length)
    yield product(length, keys, width)
    if call.dropout > 0:
        yield launch("attention", "dropout_backward", rows=call.pairs // keys, cols=keys, dtype="fp32")
    yield launch("attention", "softmax_backward", rows=call.pairs // keys, cols=keys, dtype="fp32")
    yield product(keys, size, length)
    yield product(length, size, keys)
    for x in (call.query, call.key):
        yield launch("attention", "scale", rows=x.rows, cols=x.cols, dtype="fp32")
    for x in (call.query, call.key, call.value):
        yield from _cast(x, back=True)


def _safe(rows: int, cols: int, dtype: str) -> Iterator[Launch]:
    """Softmax, and zeros for rows of which all is hidden: a comparison, its conjunction, a choice."""
    width = 4.0 if dtype == "fp32" else 2.0
    cells = rows * cols
    yield launch("softmax", "softmax", rows=rows, cols=cols, dtype=dtype)
    yield pointwise("softmax", cells, dtype, read_bytes=width * cells, written_bytes=1.0 * cells, cols=cols)
    yield launch("softmax", "reduce_sum", rows=rows, cols=cols, axis="cols", dtype="bf16")
    yield pointwise("softmax", cells, dtype, read_bytes=(width + 1 / cols) * cells, written_bytes=width * cells,
                    tensors=2, access="strided", axes=2, cols=cols)  # fmt: skip


@rule("_safe_softmax")
def _safe_softmax(op: Op, settings: OpSettings) -> Iterator[Launch]:
    x = op.inputs[0]
    yield from _safe(x.rows, x.cols, number_format(x))
