"""masked_attention and masked_attention_backward: attention with a bias, dropout or in fp32, as PyTorch runs it.

Plain attention in 16 bits is ``attention``. What is here beside it: a number added to every score (a mask of 0 and
-inf, or a learned bias), random numbers for every score (dropout), and PyTorch's memory-efficient kernel
(CUTLASS, from xFormers), which takes what FlashAttention 2 and cuDNN do not: fp32, and biases that want a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.hardware.paths import TCGEN05
from kernelcast.ops.attention_backward import AttentionBackward
from kernelcast.ops.base import Calls, Configuration, Conflicts, Kernel, choice, conflict, flag, grain, size
from kernelcast.ops.efficient import efficient_backward, efficient_forward, multiplied_as
from kernelcast.ops.flash import flash_works
from kernelcast.ops.kernel_selection import default_backend
from kernelcast.ops.requests import Requests, equal_heads, head_conflicts, length_conflicts, length_features
from kernelcast.ops.work import Array, Work, Works, ceil_div

BACKENDS = ("efficient", "cudnn", "fa2")
# Which axes of [batch, heads, queries, keys] a bias has; it is the same along the others.
BIASES = {
    "none": (), "full": ("batch", "q_heads", "q_len", "kv_len"), "heads": ("q_heads", "q_len", "kv_len"),
    "batch": ("batch", "q_len", "kv_len"), "shared": ("q_len", "kv_len"), "keys": ("batch", "kv_len"),
}  # fmt: skip
# Philox 4x32-10: four random numbers from ten rounds of two wide products (two instructions each), four XORs and two
# sums; and for each number a conversion, a comparison and a product. The memory-efficient kernels go over the scores
# again for them, the backward one computing where in the sequence each stands.
_PHILOX = 10 * 10 / 4
PHILOX_INSTRUCTIONS = {"cudnn": _PHILOX, "fa2": _PHILOX + 3, "efficient": _PHILOX + 20}
PHILOX_BACKWARD_INSTRUCTIONS = {**PHILOX_INSTRUCTIONS, "efficient": _PHILOX + 60}
# Backward of the others, for each score and number of a head: operands of five products from shared memory, sums of dQ.
_BACKWARD_INSTRUCTIONS = 0.4
# A score: address, load, conversion, sum; cuDNN loads single numbers where rows of the bias are not aligned.
_BIAS_INSTRUCTIONS = {"cudnn": 18.0, "fa2": 0.0, "efficient": 25.0}
_ODD_BIAS_INSTRUCTIONS = 44.0
# Cycles of a step of the memory-efficient kernels, whose threads have 32 scores each.
_DROPPED_CYCLES, _BIAS_CYCLES = 3500.0, 2300.0
# mma.sync multiplies fp32 as three products of tf32, of high and low parts (OpMultiplyAddFastF32).
_PRODUCTS_OF_FP32 = 3.0


class _Masked(Kernel):
    """What forward and backward have in common."""

    family = "masked_attention"
    dtypes = ("fp32", "fp16", "bf16")
    trailing_parameters: ClassVar[tuple[str, ...]] = ("causal", "bias", "dropout", "backend")

    batch: int = size("requests")
    q_len: int = size("queries a request")
    kv_len: int = size("keys a request")
    q_heads: int = size("query heads", high=65536)
    kv_heads: int | None = size("KV heads; fewer than q_heads is GQA, default: as many", default=None, high=65536)
    head_dim: int = size("size of a head", high=4096)
    causal: bool = flag("each token sees itself and what is before it", default=False)
    bias: str = choice("what is added to the scores, by the axes that it has", tuple(BIASES), default="none")
    dropout: bool = flag("scores are dropped at random", default=False)
    backend: str | None = choice("library, default: efficient", BACKENDS, default=None)

    @classmethod
    def configuration(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        return {
            **calls.choices,
            "mask": np.where(calls["causal"] > 0, "causal", "none").astype(object),
            "dropped": np.where(calls["dropout"] > 0, "yes", "no").astype(object),
        }

    @classmethod
    def with_defaults(cls, words: Configuration, gpu: Gpu) -> dict[str, str | None]:
        return {**words, "backend": words["backend"] or default_backend(cls.op, gpu, str(words["dtype"]))}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        name, wide = calls.choice("backend") or "efficient", calls.choice("dtype") == "fp32"
        every = np.ones(calls.count, dtype=bool)
        return (
            head_conflicts(calls)
            or length_conflicts(calls, cls.op)
            or conflict(every & (wide and name != "efficient"), f"{name} has no attention in fp32", {})
            or conflict(every & (name == "fa2" and calls.choice("bias") != "none"), "fa2 takes no bias", {})
        )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        read = np.log2(bias_elements(calls) + 1)
        known = {"log_bias": read, "dropout": calls["dropout"], "grain_keys": grain(calls["kv_len"])}
        return length_features(calls, equal_heads(calls)) | known


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
        attended, *merge = flash_works(gpu, plain, Requests.of(calls), equal_heads(plain))
        if _backend(calls) == "efficient":
            attended = efficient_forward(gpu, calls, attended)
        return with_scores(_read_unpadded(attended, calls), calls, gpu), *merge


class MaskedAttentionBackward(_Masked):
    """Gradients with respect to Q, K and V, and to the bias where it wants one."""

    op = "masked_attention_backward"
    examples = (
        {"batch": 8, "q_len": 512, "kv_len": 512, "q_heads": 16, "head_dim": 64, "bias": "full", "bias_gradient": True},
        {"batch": 8, "q_len": 1024, "kv_len": 1024, "q_heads": 12, "head_dim": 64, "causal": True, "dropout": True,
         "backend": "fa2"},
    )  # fmt: skip
    trailing_parameters = (*_Masked.trailing_parameters, "bias_gradient")

    bias_gradient: bool = flag("of the bias too, a number for each score", default=False)

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
    """Numbers of the bias in memory."""
    axes = BIASES[calls.choice("bias")]
    return np.prod([calls[axis] for axis in axes], axis=0) if axes else np.zeros(calls.count)


def _plain(gpu: Gpu, calls: Calls) -> Calls:
    """The same as ``attention`` takes it: not paged, and fp32 in the format that its products run in."""
    choices = {**calls.choices, "backend": {"fa2": "fa2_dropout"}.get(_backend(calls), _backend(calls))}
    choices["dtype"] = multiplied_as(gpu, choices["dtype"])
    none = np.zeros(calls.count)
    numbers = {**calls.numbers, "page_size": none, "window": none, "head_dim": padded_heads(calls)}
    return replace(calls, choices=choices, numbers=numbers)


def padded_heads(calls: Calls) -> Array:
    """What heads count as in a kernel: FlashAttention 2 is compiled for 32, 64, 96, 128, 192 and 256, cuDNN for
    multiples of 64; the memory-efficient kernel pads each product in its own way."""
    dim, backend = calls["head_dim"], _backend(calls)
    if backend == "efficient":
        return dim
    wide = ceil_div(dim, 64.0) * 64.0
    return np.where((backend == "fa2") & (dim <= 96), ceil_div(dim, 32.0) * 32.0, wide)


def _read_unpadded(work: Work, calls: Calls) -> Work:
    """Memory has heads as they are."""
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
    """An attention kernel that reads a bias for each score, drops some, and multiplies fp32."""
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
        instructions = instructions + _BACKWARD_INSTRUCTIONS * padded_heads(calls)
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
