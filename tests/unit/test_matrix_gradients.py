"""Hand-worked demand of the gradients that are matrix products: attention and convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from demand import of, whole, works

import kernelcast as kc
from kernelcast.hardware import gpu
from kernelcast.ops import kernel

H100 = gpu("h100_sxm")


# ---- attention ----

HEADS: dict[str, Any] = {"batch": 2, "q_heads": 32, "head_dim": 128}


def test_attention_backward_tiles_under_the_mask() -> None:
    # FlashAttention-3, head 128, causal: tiles of 64 queries by 128 keys. 512 tokens are 4 tiles of keys and 8 of
    # queries; tile j of keys is seen from query tile 2j on: 8 + 6 + 4 + 2 = 20 steps
    sums, grads, narrow = works("attention_backward", **HEADS, q_len=512, kv_len=512)
    assert (of(grads, "tasks"), of(grads, "serial_steps")) == (2 * 32 * 4, 8)
    step = 5 * 2 * 64 * 128 * 128  # five products
    assert whole(grads, "tensor_flops") == 64 * 20 * step
    assert of(grads, "longest") == 8 / 5 and of(grads, "shortest") == 2 / 5 and of(grads, "longest_count") == 64
    assert of(grads, "useful_flops") == 64 * (512 * 513 / 2) * 5 * 2 * 128
    assert whole(grads, "xu_ops") == 64 * 20 * 64 * 128
    rows = 64 * 512
    # Q and dO in (bf16), dQ added in fp32, log-sum and D; K, V in and dK, dV out
    assert of(grads, "activation_bytes") == rows * (128 * (2 + 2 + 4) + 8) + 4 * rows * 128 * 2
    # O and dO in, D out and dQ cleared; dQ from fp32 to bf16
    assert of(sums, "activation_bytes") == rows * (128 * (2 + 2 + 4) + 4)
    assert of(narrow, "activation_bytes") == rows * 128 * (4 + 2)


def test_attention_backward_without_a_mask() -> None:
    # tiles of 80 queries: ceil(512 / 80) = 7 steps for each of 4 tiles of keys
    _, grads, _ = works("attention_backward", **HEADS, q_len=512, kv_len=512, causal=False)
    assert whole(grads, "tensor_flops") == 64 * 4 * 7 * 5 * 2 * 80 * 128 * 128
    assert of(grads, "longest") == of(grads, "shortest") == 1 and of(grads, "longest_count") == 64 * 4


def test_attention_backward_counts_the_tiles_that_a_loop_counts() -> None:
    for queries, keys in ((700, 700), (100, 900), (1, 1), (513, 1000)):
        _, grads, _ = works("attention_backward", **HEADS, q_len=queries, kv_len=keys)
        steps, starts = 0, []
        for first in range(0, keys, 128):
            start = max(0, first - (keys - queries)) // 64
            starts.append(start)
            steps += -(-queries // 64) - start
        assert whole(grads, "tensor_flops") == pytest.approx(64 * steps * 5 * 2 * 64 * 128 * 128)
        mean = steps / len(starts)
        assert of(grads, "shortest") == pytest.approx((-(-queries // 64) - starts[-1]) / mean)
        assert of(grads, "longest_count") == 64 * starts.count(0)


def test_attention_backward_of_grouped_heads() -> None:
    shape = {**HEADS, "q_len": 512, "kv_len": 512, "kv_heads": 8}
    kv = 2 * 8 * 512 * 128  # numbers of K, and of V
    rows = 64 * 512
    q_bytes = rows * (128 * 8 + 8)
    # FlashAttention-2 writes dK and dV of all 32 heads, then sums groups of four
    _, grads, _, joined = works("attention_backward", **shape, backend="fa2")
    assert of(grads, "activation_bytes") == q_bytes + 2 * kv * 2 + 2 * 4 * kv * 2
    assert of(joined, "activation_bytes") == 2 * (4 * kv * 2 + kv * 2) and of(joined, "launches") == 2
    # FlashAttention-3 adds them in fp32, then converts
    _, grads, _, joined = works("attention_backward", **shape, backend="fa3")
    assert of(grads, "activation_bytes") == q_bytes + 2 * kv * 2 + 2 * kv * 4
    assert of(joined, "activation_bytes") == 2 * kv * (4 + 2)


def test_attention_backward_tiles_of_each_generation() -> None:
    def tile(on: str, **more: Any) -> tuple[float, float]:
        work = works("attention_backward", on, **{**HEADS, "q_len": 512, "kv_len": 512, **more})[1]
        return float(np.ravel(work.tile["tile_q"])[0]), float(np.ravel(work.tile["tile_kv"])[0])

    assert tile("a100_sxm") == (64, 128)  # 163 KB a CTA
    assert tile("l40s") == (64, 64)  # 99 KB
    assert tile("b200_sxm") == (128, 128)
    assert tile("h100_sxm", head_dim=64) == (128, 128)
    assert tile("h100_sxm", head_dim=256) == (64, 80)


def test_attention_backward_costs_more_than_twice_the_forward() -> None:
    shape = {**HEADS, "q_len": 8192, "kv_len": 8192}
    physics = kc.Conditions(predictor="generic")
    forward, backward = (
        kc.predict(kernel(op, **shape), "h100_sxm", physics) for op in ("attention", "attention_backward")
    )
    assert 2 < backward.time_s / forward.time_s < 4
    assert backward.support == "extrapolated"  # no weights: physics, and it says so


def test_attention_backward_refuses() -> None:
    with pytest.raises(kc.KernelcastError, match="unknown backend 'flashinfer'"):
        kernel("attention_backward", **HEADS, q_len=1, kv_len=1, backend="flashinfer")
    with pytest.raises(kc.KernelcastError, match="no multiple of kv_heads"):
        kernel("attention_backward", **HEADS, q_len=1, kv_len=1, kv_heads=5)
    with pytest.raises(kc.KernelcastError, match="kv_len >= q_len"):
        kernel("attention_backward", **HEADS, q_len=2, kv_len=1)
