"""masked_attention and masked_attention_backward: attention with a bias, dropout or in fp32, as PyTorch runs it.

Plain attention in 16 bits is ``attention``. This adds a bias on every score (a mask of 0 and -inf, or learned), random
numbers for dropout, and PyTorch's memory-efficient kernel (mem_eff_attention/kernel_forward.h and kernel_backward.h,
from xFormers, CUTLASS), which runs what FlashAttention 2 and cuDNN do not: fp32, and gradients of biases.

Forward, a CTA of that kernel takes 64 queries of a head (32 of wide heads) and loops over the keys. Backward, it takes
tiles of keys of one head and loops over the queries of each; the keys of a head are split where heads do not fill the
GPU; dQ is added up in global memory. Nothing is prefetched, scores pass through shared memory, and iterators check
every index: a step takes thousands of cycles, with one to four CTAs per SM to hide them. Registers and shared memory
are those an H200 reports, cycles of a step are from calls with one CTA per SM, instructions from calls that fill it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import TCGEN05
from kernelcast.ops.attention_backward import AttentionBackward
from kernelcast.ops.base import (
    Calls,
    Configuration,
    ConfigurationColumns,
    Conflicts,
    choice,
    conflict,
    flag,
    grain,
    labels,
)
from kernelcast.ops.dtypes import find_dtype, matmul_pipe, supports_dtype
from kernelcast.ops.flash import flash_works, kv_steps, visible_pairs
from kernelcast.ops.kernel_selection import default_backend
from kernelcast.ops.reduce import reduction
from kernelcast.ops.requests import EqualRequests, RequestBatch, equal_heads
from kernelcast.ops.vector import ACCUMULATOR_BYTES, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

BACKENDS = ("efficient", "cudnn", "fa2")
# Which axes of [batch, heads, queries, keys] a bias has; it is the same along the others.
BIASES = {
    "none": (), "full": ("batch", "q_heads", "q_len", "kv_len"), "heads": ("q_heads", "q_len", "kv_len"),
    "batch": ("batch", "q_len", "kv_len"), "shared": ("q_len", "kv_len"), "keys": ("batch", "kv_len"),
}  # fmt: skip
# Philox 4x32-10: four random numbers from ten rounds of two wide products (two instructions each), four XORs and two
# sums; and for each number a conversion, a comparison and a product. The memory-efficient kernels go over the scores
# again for them, the backward one computing their offsets.
_PHILOX = 10 * 10 / 4
PHILOX_INSTRUCTIONS = {"cudnn": _PHILOX, "fa2": _PHILOX + 3, "efficient": _PHILOX + 20}
PHILOX_BACKWARD_INSTRUCTIONS = {**PHILOX_INSTRUCTIONS, "efficient": _PHILOX + 60}
# Backward of the others, for each score and number of a head: operands of five products from shared memory, sums of dQ.
_SCORE_BACKWARD_INSTRUCTIONS = 0.4
# A score: address, load, conversion, sum; cuDNN loads single numbers where rows of the bias are not aligned.
_BIAS_INSTRUCTIONS = {"cudnn": 18.0, "fa2": 0.0, "efficient": 25.0}
_ODD_BIAS_INSTRUCTIONS = 44.0
# Cycles of a step of the memory-efficient kernels, whose threads have 32 scores each.
_DROPPED_CYCLES, _BIAS_CYCLES = 3500.0, 2300.0
# mma.sync multiplies fp32 as three products of tf32, of high and low parts (OpMultiplyAddFastF32).
_PRODUCTS_OF_FP32 = 3.0


class _Masked(EqualRequests):
    """Parameters of forward and backward."""

    family = "masked_attention"
    dtypes = ("fp32", "fp16", "bf16")
    trailing_parameters: ClassVar[tuple[str, ...]] = ("causal", "bias", "dropout", "backend")

    causal: bool = flag("causal mask", default=False)
    bias: str = choice("bias added to the scores, by its axes", tuple(BIASES), default="none")
    dropout: bool = flag("dropout of the scores", default=False)
    backend: str | None = choice("attention backend, default: efficient", BACKENDS, default=None)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        return {**super().configuration(calls), "dropped": labels(calls["dropout"] > 0)}

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        backend = configuration["backend"] or default_backend(cls.op, gpu, str(configuration["dtype"]))
        return {**configuration, "backend": backend}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        name, wide = calls.choice("backend") or "efficient", calls.choice("dtype") == "fp32"
        every = np.ones(calls.count, dtype=bool)
        return (
            super().conflicts(calls)
            or conflict(every & (wide and name != "efficient"), f"{name} has no attention in fp32", {})
            or conflict(every & (name == "fa2" and calls.choice("bias") != "none"), "fa2 takes no bias", {})
        )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        read = np.log2(bias_elements(calls) + 1)
        known = {"log_bias": read, "dropout": calls["dropout"], "grain_keys": grain(calls["kv_len"])}
        return super().shape_features(calls, gpu) | known


class MaskedAttention(_Masked):
    """Softmax(Q Kᵀ + bias) V with dropout, for a batch of equal requests."""

    op = "masked_attention"
    examples = (
        {"batch": 8, "q_len": 512, "kv_len": 512, "q_heads": 16, "head_dim": 64, "bias": "heads"},
        {"batch": 16, "q_len": 197, "kv_len": 197, "q_heads": 12, "head_dim": 64, "dtype": "fp32"},
        {"batch": 8, "q_len": 1024, "kv_len": 1024, "q_heads": 12, "head_dim": 64, "causal": True, "dropout": True,
         "backend": "fa2"},
    )  # fmt: skip

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        plain = _plain(gpu, calls)
        attended, *merge = flash_works(gpu, plain, RequestBatch.of(calls), equal_heads(plain))
        if _backend(calls) == "efficient":
            attended = efficient_forward(gpu, calls, attended)
        return with_scores(_read_unpadded(attended, calls), calls, gpu), *merge


class MaskedAttentionBackward(_Masked):
    """Gradients of masked_attention: Q, K and V, and optionally the bias."""

    op = "masked_attention_backward"
    examples = (
        {"batch": 8, "q_len": 512, "kv_len": 512, "q_heads": 16, "head_dim": 64, "bias": "full", "bias_gradient": True},
        {"batch": 8, "q_len": 1024, "kv_len": 1024, "q_heads": 12, "head_dim": 64, "causal": True, "dropout": True,
         "backend": "fa2"},
    )  # fmt: skip
    trailing_parameters = (*_Masked.trailing_parameters, "bias_gradient")

    bias_gradient: bool = flag("compute the gradient of the bias too", default=False)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        lost = (calls["bias_gradient"] > 0) & (calls.choice("bias") == "none")
        elsewhere = (calls["bias_gradient"] > 0) & ((calls.choice("backend") or "efficient") != "efficient")
        return (
            super().conflicts(calls)
            or conflict(lost, "a gradient of the bias needs a bias", {})
            or conflict(elsewhere, "only the backend efficient gives the gradient of a bias", {})
        )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().shape_features(calls, gpu) | {
            "bias_gradient": calls["bias_gradient"],
            "backward": np.ones(calls.count),
        }

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        if _backend(calls) == "efficient":
            works = efficient_backward(gpu, calls)
        else:
            padded = replace(calls, numbers={**calls.numbers, "head_dim": padded_heads(calls)})
            works = tuple(_read_unpadded(work, calls) for work in AttentionBackward.work(padded, gpu))
        return tuple(with_scores(work, calls, gpu) if "tile_q" in work.tile else work for work in works)


def bias_elements(calls: Calls) -> Array:
    """Elements of the bias in memory."""
    axes = BIASES[calls.choice("bias")]
    return np.prod([calls[axis] for axis in axes], axis=0) if axes else np.zeros(calls.count)


def _plain(gpu: Gpu, calls: Calls) -> Calls:
    """The calls as ``attention`` takes them: not paged, and fp32 in the dtype of its products."""
    choices = {**calls.choices, "backend": {"fa2": "fa2_dropout"}.get(_backend(calls), _backend(calls))}
    choices["dtype"] = multiplied_as(gpu, choices["dtype"])
    none = np.zeros(calls.count)
    numbers = {**calls.numbers, "page_size": none, "window": none, "head_dim": padded_heads(calls)}
    return replace(calls, choices=choices, numbers=numbers)


def padded_heads(calls: Calls) -> Array:
    """Head dimension after padding: FlashAttention 2 is compiled for 32, 64, 96, 128, 192 and 256, cuDNN for multiples
    of 64; the memory-efficient kernel pads each product separately."""
    dim, backend = calls["head_dim"], _backend(calls)
    if backend == "efficient":
        return dim
    wide = ceil_div(dim, 64.0) * 64.0
    return np.where((backend == "fa2") & (dim <= 96), ceil_div(dim, 32.0) * 32.0, wide)


def _read_unpadded(work: Work, calls: Calls) -> Work:
    """Memory traffic and useful FLOPs without padding."""
    share = calls["head_dim"] / padded_heads(calls)
    return replace(
        work,
        streamed_bytes=np.asarray(work.streamed_bytes) * share,
        activation_bytes=np.asarray(work.activation_bytes) * share,
        useful_flops=np.asarray(work.useful_flops) * share,
    )


def _backend(calls: Calls) -> str:
    return calls.choice("backend") or "efficient"


def with_scores(work: Work, calls: Calls, gpu: Gpu) -> Work:
    """An attention kernel that also reads a bias, applies dropout, and multiplies fp32."""
    each, backend = np.asarray(work.xu_ops), _backend(calls)  # an exponential a score
    if gpu.instruction_path == TCGEN05 and backend != "efficient" and work.mean_steps is not None:
        each = each * 2  # the forward pass computes half of them by polynomial
    biased = float(calls.choice("bias") != "none")
    gradient = calls["bias_gradient"] if "bias_gradient" in calls.numbers else np.zeros(calls.count)
    passes = biased * (1 + gradient)
    moved = (bias_elements(calls) + gradient * _scores(calls)) * calls.dtype.act_bytes
    emulated = _PRODUCTS_OF_FP32 if multiplied_as(gpu, calls.choice("dtype")) == "tf32" else 1.0
    odd = (backend == "cudnn") & (np.mod(calls["kv_len"], 2) > 0)
    dropped = (PHILOX_BACKWARD_INSTRUCTIONS if "bias_gradient" in calls.numbers else PHILOX_INSTRUCTIONS)[backend]
    read = np.where(odd, _ODD_BIAS_INSTRUCTIONS, _BIAS_INSTRUCTIONS[backend])
    instructions = calls["dropout"] * dropped + passes * read
    if backend != "efficient" and "bias_gradient" in calls.numbers:
        instructions = instructions + _SCORE_BACKWARD_INSTRUCTIONS * padded_heads(calls)
    waited = calls["dropout"] * _DROPPED_CYCLES + biased * _BIAS_CYCLES if backend == "efficient" else 0.0
    return replace(
        work,
        tensor_flops=np.asarray(work.tensor_flops) * emulated,
        l2_bytes=np.asarray(work.l2_bytes) + each * passes * calls.dtype.act_bytes,
        smem_bytes=np.asarray(work.smem_bytes) + each * biased * 2 * calls.dtype.act_bytes,
        other_warp_instructions=np.asarray(work.other_warp_instructions) + each * instructions / gpu.warp_threads,
        activation_bytes=np.asarray(work.activation_bytes) + moved,
        step_cycles=np.asarray(work.step_cycles) + waited,
    )


def _scores(calls: Calls) -> Array:
    return calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"]


_PRODUCTS = 5.0
_SCORE_FLOPS = 6.0
_ENOUGH_HEADS = 256.0  # of a batch: above, short keys are not split
_ROW_BYTES = 8.0  # log-sum and row sum of dO · O, fp32
_SLOTS = 200.0  # CTAs that may keep gradients in global memory
_ROW_THREADS, _ROW_ELEMENTS = 128.0, 512.0  # a CTA of the passes before the backward kernel


@dataclass(frozen=True)
class _Kernel:
    """A compiled kernel (generate_kernels.py, SM80 and above), for heads up to ``size``; or that of each call."""

    size: Number
    queries: Number  # of a tile
    keys: Number
    registers: Number
    smem_bytes: Number
    step_cycles: Number  # of a CTA alone on its SM

    @property
    def threads(self) -> Number:
        return self.queries * self.keys / 32


# half, then fp32; the last also takes wider heads, in parts
_FORWARD = {
    True: (_Kernel(64, 64, 64, 128, 18944, 5400), _Kernel(128, 64, 128, 128, 52224, 9500),
           _Kernel(256, 32, 128, 122, 51200, 16400)),
    False: (_Kernel(64, 64, 64, 168, 36352, 13500), _Kernel(128, 64, 128, 244, 86016, 20000),
            _Kernel(256, 32, 128, 168, 76288, 41000)),
}  # fmt: skip
_BACKWARD = {
    True: (_Kernel(32, 64, 64, 165, 34560, 17000), _Kernel(64, 64, 64, 167, 42240, 17500),
           _Kernel(128, 128, 128, 128, 133632, 41000), _Kernel(256, 128, 64, 170, 60928, 118000)),
    False: (_Kernel(32, 64, 64, 232, 53504, 25000), _Kernel(64, 64, 64, 232, 53504, 27500),
            _Kernel(128, 128, 64, 224, 121344, 66000), _Kernel(256, 128, 64, 230, 121344, 143000)),
}  # fmt: skip
# Instructions per score: a constant, and per head dimension. fp32 is split into high and low parts.
_FORWARD_INSTRUCTIONS = {True: (22.0, 0.42), False: (100.0, 1.4)}
_BACKWARD_INSTRUCTIONS = {True: (75.0, 1.3), False: (400.0, 1.8)}


def _chosen(kernels: tuple[_Kernel, ...], dim: Array) -> _Kernel:
    """The kernel of each call; heads wider than the last take it in parts."""
    names = [field.name for field in fields(_Kernel)]
    fits = [dim <= kernel.size for kernel in kernels[:-1]]
    columns = {name: [float(getattr(kernel, name)) for kernel in kernels] for name in names}
    chosen = _Kernel(**{name: np.select(fits, column[:-1], column[-1]) for name, column in columns.items()})
    parts = np.maximum(1.0, ceil_div(dim, kernels[-1].size))
    return replace(chosen, size=chosen.size * parts, step_cycles=chosen.step_cycles * parts)


def multiplied_as(gpu: Gpu, name: str) -> str:
    """fp32 runs on tensor cores as tf32, where the GPU has it."""
    return "tf32" if name == "fp32" and supports_dtype(gpu, "tf32") else name


def efficient_forward(gpu: Gpu, calls: Calls, work: Work) -> Work:
    """``work``: of a kernel with these tiles that hides its steps; heads are padded to the compiled sizes."""
    dim, scores, half = calls["head_dim"], np.asarray(work.xu_ops), calls.dtype.act_bytes < 4
    kernel, (a_score, a_number) = _chosen(_FORWARD[half], dim), _FORWARD_INSTRUCTIONS[half]
    wide = ceil_div(dim, 32.0) * 32.0 + ceil_div(dim, kernel.keys) * kernel.keys
    instructions = scores * (a_score + a_number * kernel.size) / gpu.warp_threads
    return replace(
        work,
        tensor_flops=2 * scores * wide if np.any(work.tensor_flops) else 0.0,
        smem_bytes=np.asarray(work.smem_bytes) + scores * (ACCUMULATOR_BYTES + 2 * calls.dtype.act_bytes),
        other_warp_instructions=np.asarray(work.other_warp_instructions) + instructions,
        threads=kernel.threads,
        registers_per_thread=kernel.registers,
        smem_bytes_per_cta=np.minimum(kernel.smem_bytes, gpu.smem_bytes_per_cta),
        step_cycles=kernel.step_cycles,
        task_cycles=0.0,
    )


def efficient_backward(gpu: Gpu, calls: Calls) -> Works:
    """The kernel, zeros for dQ's sums before it, and in fp32 the row sums of dO · O (16-bit kernels compute them
    inside)."""
    half, rows = calls.dtype.act_bytes < 4, calls["batch"] * calls["q_heads"] * calls["q_len"]
    gradients, elements = _gradients(gpu, calls, half), rows * calls["head_dim"]
    ctas, number = ceil_div(elements, _ROW_ELEMENTS), elements * ACCUMULATOR_BYTES
    cleared = vector_kernel(gpu, tasks=ctas, threads=_ROW_THREADS, moved_bytes=number)
    if half:
        return cleared, gradients
    product = vector_kernel(gpu, tasks=ctas, threads=_ROW_THREADS, moved_bytes=3 * number, flops=elements)
    return product, reduction(gpu, calls["head_dim"], rows, ACCUMULATOR_BYTES, launches=2.0), cleared, gradients


def _splits(kernel: _Kernel, lanes: Array, keys: Array, half: bool) -> Array:
    """CTAs that share the keys of a head."""
    tiles = ceil_div(keys, kernel.keys)
    splits = np.where((lanes >= _ENOUGH_HEADS) & (keys <= 2 * kernel.keys), 1.0, tiles)
    kept = (kernel.size > 128) & half  # gradients of keys that do not fit registers, nor, as in fp32, the output
    return np.where(kept, np.clip(np.floor(_SLOTS / lanes), 1.0, splits), splits)


def _gradients(gpu: Gpu, calls: Calls, half: bool) -> Work:
    queries, keys, dim, causal = (calls[x] for x in ("q_len", "kv_len", "head_dim", "causal"))
    dtype = find_dtype(multiplied_as(gpu, calls.choice("dtype")))
    on_tensor = matmul_pipe(gpu, dtype.name) == "tensor"
    lanes, none = calls["batch"] * calls["q_heads"], np.zeros_like(queries)
    kernel, (a_score, a_number) = _chosen(_BACKWARD[half], dim), _BACKWARD_INSTRUCTIONS[half]
    tile_q, tile_kv = np.asarray(kernel.queries), np.asarray(kernel.keys)
    q_tiles, kv_tiles = ceil_div(queries, tile_q), ceil_div(keys, tile_kv)
    splits = _splits(kernel, lanes, keys, half)
    mean = kv_steps(queries, keys, none + 1, tile_q, tile_kv, causal, none) / splits  # steps of the mean task
    scores = mean * tile_q * tile_kv
    flops = 2 * _PRODUCTS * scores * kernel.size
    longest = q_tiles * ceil_div(kv_tiles, splits)
    width = dtype.act_bytes
    kept_bytes = np.where((kernel.size > 128) & half, ACCUMULATOR_BYTES, width)
    q_bytes = queries * dim * (2 * width + ACCUMULATOR_BYTES) + queries * _ROW_BYTES
    return Work(
        tasks=lanes * splits,
        schedule="longest_first",
        longest=longest / mean,
        shortest=np.where(causal > 0, ceil_div(q_tiles, kv_tiles) / mean, 1.0),
        longest_count=np.where(causal > 0, lanes, lanes * splits),
        tensor_flops=flops if on_tensor else 0.0,
        tensor_dtype=dtype.math,
        fma_flops=scores * _SCORE_FLOPS + (0.0 if on_tensor else flops),
        xu_ops=scores,
        other_warp_instructions=scores * (a_score + a_number * kernel.size) / gpu.warp_threads,
        smem_bytes=mean * (dim * (6 * tile_q + 3 * tile_kv) + 5 * tile_q * tile_kv) * width,
        l2_bytes=mean * tile_q * (dim * (2 * width + 2 * ACCUMULATOR_BYTES) + _ROW_BYTES)
        + kv_tiles / splits * 2 * tile_kv * dim * (width + kept_bytes),
        activation_bytes=lanes * (q_bytes + 2 * keys * dim * (width + kept_bytes)),
        threads=kernel.threads,
        registers_per_thread=kernel.registers,
        smem_bytes_per_cta=np.minimum(kernel.smem_bytes, gpu.smem_bytes_per_cta),
        serial_steps=longest,
        mean_steps=mean,
        step_cycles=kernel.step_cycles,
        useful_flops=lanes * visible_pairs(queries, keys, causal, none) * 2 * _PRODUCTS * dim,
        tile={"tile_q": tile_q, "tile_kv": tile_kv, "kv_splits": splits},
    )
