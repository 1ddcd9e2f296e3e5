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
from kernelcast.kernels.attention_backward import AttentionBackward
from kernelcast.kernels.base import Calls, Conflicts, Kernel, Words, choice, conflict, flag, grain, size
from kernelcast.kernels.efficient_backward import efficient_backward
from kernelcast.kernels.flash import flash_works
from kernelcast.kernels.requests import Requests, equal_heads, head_conflicts, length_conflicts, length_hints
from kernelcast.kernels.work import Array, Work, Works

BACKENDS = ("efficient", "cudnn", "fa2")
# Which axes of [batch, heads, queries, keys] a bias has; it is the same along the others.
BIASES = {
    "none": (), "full": ("batch", "q_heads", "q_len", "kv_len"), "heads": ("q_heads", "q_len", "kv_len"),
    "batch": ("batch", "q_len", "kv_len"), "shared": ("q_len", "kv_len"), "keys": ("batch", "kv_len"),
}  # fmt: skip
# Philox 4x32-10: four random numbers from ten rounds of two wide products (two instructions each), four XORs and two
# sums; and for each number a conversion, a comparison and a product.
PHILOX_INSTRUCTIONS = 10 * 10 / 4 + 3
_BIAS_INSTRUCTIONS = 2.0  # a score: from shared memory to a register, and a sum
# mma.sync multiplies fp32 as three products of tf32, of high and low parts (OpMultiplyAddFastF32).
_PRODUCTS_OF_FP32 = 3.0


class _Masked(Kernel):
    """What forward and backward have in common."""

    family = "masked_attention"
    dtypes = ("fp32", "fp16", "bf16")
    listed_last: ClassVar[tuple[str, ...]] = ("causal", "bias", "dropout", "backend")

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
    def kinds(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        return {
            **calls.choices,
            "mask": np.where(calls["causal"] > 0, "causal", "none").astype(object),
            "dropped": np.where(calls["dropout"] > 0, "yes", "no").astype(object),
        }

    @classmethod
    def usual(cls, words: Words, gpu: Gpu) -> dict[str, str | None]:
        return {**words, "backend": words["backend"] or "efficient"}

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
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        read = np.log2(bias_elements(calls) + 1)
        known = {"log_bias": read, "dropout": calls["dropout"], "grain_keys": grain(calls["kv_len"])}
        return length_hints(calls, equal_heads(calls)) | known


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
        attended, *merge = flash_works(gpu, _plain(calls), Requests.of(calls), equal_heads(calls))
        return (*with_scores(attended, calls, gpu), *merge)


class MaskedAttentionBackward(_Masked):
    """Gradients with respect to Q, K and V, and to the bias where it wants one."""

    op = "masked_attention_backward"
    examples = (
        {"batch": 8, "q_len": 512, "kv_len": 512, "q_heads": 16, "head_dim": 64, "bias": "full", "bias_gradient": True},
        {"batch": 8, "q_len": 1024, "kv_len": 1024, "q_heads": 12, "head_dim": 64, "causal": True, "dropout": True,
         "backend": "fa2"},
    )  # fmt: skip
    listed_last = (*_Masked.listed_last, "bias_gradient")

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
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return super().hints(calls, gpu) | {"bias_gradient": calls["bias_gradient"], "backward": np.ones(calls.count)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        if (calls.choice("backend") or "efficient") == "efficient":
            works = efficient_backward(gpu, calls, _PRODUCTS_OF_FP32)
        else:
            works = AttentionBackward.work(calls, gpu)
        return tuple(one for work in works for one in (with_scores(work, calls, gpu) if _has_scores(work) else (work,)))


def bias_elements(calls: Calls) -> Array:
    """Numbers of the bias in memory."""
    axes = BIASES[calls.choice("bias")]
    return np.prod([calls[axis] for axis in axes], axis=0) if axes else np.zeros(calls.count)


def _plain(calls: Calls) -> Calls:
    """The same as ``attention`` takes it: not paged, and fp32 in the format that its products run in."""
    choices = {**calls.choices, "backend": calls.choice("backend") or "efficient"}
    if choices["dtype"] == "fp32":
        choices["dtype"] = "tf32"
    none = np.zeros(calls.count)
    return replace(calls, choices=choices, numbers={**calls.numbers, "page_size": none, "window": none})


def _has_scores(work: Work) -> bool:
    return "tile_q" in work.tile


def with_scores(work: Work, calls: Calls, gpu: Gpu) -> Works:
    """An attention kernel that reads a bias for each score, drops some, and multiplies fp32."""
    each = np.asarray(work.xu_ops)  # an exponential a score
    if gpu.compute_capability.startswith("10.") and calls.choice("backend") != "efficient":
        each = each * 2  # half of them by polynomial
    biased = float(calls.choice("bias") != "none")
    gradient = calls["bias_gradient"] if "bias_gradient" in calls.numbers else np.zeros(calls.count)
    passes = biased * (1 + gradient)
    moved = (bias_elements(calls) + gradient * _scores(calls)) * calls.dtype.act_bytes
    emulated = _PRODUCTS_OF_FP32 if calls.choice("dtype") == "fp32" and work.tensor_dtype == "tf32" else 1.0
    instructions = calls["dropout"] * PHILOX_INSTRUCTIONS + passes * _BIAS_INSTRUCTIONS
    changed = replace(
        work,
        tensor_flops=np.asarray(work.tensor_flops) * emulated,
        l2_bytes=np.asarray(work.l2_bytes) + each * passes * calls.dtype.act_bytes,
        smem_bytes=np.asarray(work.smem_bytes) + each * biased * 2 * calls.dtype.act_bytes,
        other_warp_instructions=np.asarray(work.other_warp_instructions) + each * instructions / gpu.warp_threads,
        activation_bytes=np.asarray(work.activation_bytes) + moved,
    )
    return (changed,)


def _scores(calls: Calls) -> Array:
    return calls["batch"] * calls["q_heads"] * calls["q_len"] * calls["kv_len"]
