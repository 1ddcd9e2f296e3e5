"""Attention with bias, dropout and in fp32; products of groups; lists of tensors: demand worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
from demand import of, one, whole, works

from kernelcast.errors import KernelcastError
from kernelcast.ops import kernel
from kernelcast.ops.grouped import active_experts, random_blocks
from kernelcast.ops.masked_attention import PHILOX_INSTRUCTIONS

T5: dict[str, Any] = {"batch": 8, "q_len": 512, "kv_len": 512, "q_heads": 16, "head_dim": 64}
SCORES = 8 * 16 * 512 * 512


def test_the_memory_efficient_kernel_takes_64_queries_a_task_and_never_splits() -> None:
    plain = one("masked_attention", **T5)
    assert of(plain, "tasks") == 8 * 16 * 512 / 64
    assert whole(plain, "tensor_flops") == 2 * SCORES * (64 + 64)
    assert whole(plain, "xu_ops") == SCORES
    one("masked_attention", batch=1, q_len=1, kv_len=65536, q_heads=1, head_dim=64)  # no merge of parts


def test_a_bias_is_read_once_from_memory_and_once_a_score_from_l2() -> None:
    plain, heads = one("masked_attention", **T5), one("masked_attention", **T5, bias="heads")
    assert of(heads, "activation_bytes") - of(plain, "activation_bytes") == 16 * 512 * 512 * 2
    assert whole(heads, "l2_bytes") - whole(plain, "l2_bytes") == SCORES * 2
    keys = one("masked_attention", **T5, bias="keys")
    assert of(keys, "activation_bytes") - of(plain, "activation_bytes") == 8 * 512 * 2
    full = one("masked_attention", **T5, bias="full")
    assert of(full, "activation_bytes") - of(plain, "activation_bytes") == SCORES * 2


def test_dropout_makes_a_random_number_a_score() -> None:
    plain, dropped = (one("masked_attention", **T5, dropout=x) for x in (False, True))
    more = whole(dropped, "other_warp_instructions") - whole(plain, "other_warp_instructions")
    assert more == pytest.approx(SCORES / 32 * PHILOX_INSTRUCTIONS["efficient"])


def test_fp32_is_three_products_of_tf32() -> None:
    wide, half = (one("masked_attention", **T5, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert wide.tensor_dtype == "tf32"
    assert whole(wide, "tensor_flops") == 3 * whole(half, "tensor_flops")
    assert of(wide, "activation_bytes") == 2 * of(half, "activation_bytes")


def test_heads_count_as_the_kernel_that_takes_them() -> None:
    # 80: queries by keys over 96, weights by values 128 wide; backward: all five products 128
    wide = one("masked_attention", **{**T5, "head_dim": 80})
    assert whole(wide, "tensor_flops") == 2 * SCORES * (96 + 128)
    assert whole(works("masked_attention_backward", **{**T5, "head_dim": 80})[-1], "tensor_flops") == 10 * SCORES * 128
    assert of(one("masked_attention", **{**T5, "head_dim": 160}), "tasks") == 8 * 16 * 512 / 32  # 32 queries


def test_cudnn_reads_odd_rows_of_a_bias_number_by_number() -> None:
    def instructions(keys: int, bias: str) -> float:
        call: dict[str, Any] = {**T5, "kv_len": keys, "backend": "cudnn", "bias": bias}
        return whole(works("masked_attention", **call)[0], "other_warp_instructions")

    aligned, odd = (instructions(x, "full") - instructions(x, "none") for x in (512, 511))
    assert odd == pytest.approx(aligned * 44 / 18)


def test_the_gradient_of_a_bias_is_written_for_every_score() -> None:
    without, with_it = (
        works("masked_attention_backward", **T5, bias="heads", bias_gradient=x)[-1] for x in (False, True)
    )
    assert of(with_it, "activation_bytes") - of(without, "activation_bytes") == SCORES * 2
    assert whole(without, "tensor_flops") == 2 * 5 * SCORES * 64


def test_heads_that_do_not_fill_the_gpu_are_split_by_their_keys() -> None:
    # 128 heads: each of the 512 / 64 tiles of keys is a task; 256 heads and short keys: none is split
    assert of(works("masked_attention_backward", **T5)[-1], "tasks") == 8 * 16 * 8
    many = {**T5, "batch": 16, "q_len": 128, "kv_len": 128}
    assert of(works("masked_attention_backward", **many)[-1], "tasks") == 16 * 16
    # heads wider than 128 keep the keys' gradients in global memory, for 200 tasks at most
    assert of(works("masked_attention_backward", **{**T5, "head_dim": 256})[-1], "tasks") == 8 * 16


@pytest.mark.parametrize(("values", "wrong"), [
    ({"backend": "cudnn", "dtype": "fp32"}, "cudnn has no attention in fp32"),
    ({"backend": "fa2", "bias": "full"}, "fa2 takes no bias"),
])  # fmt: skip
def test_what_a_library_does_not_have_is_refused(values: dict[str, str], wrong: str) -> None:
    with pytest.raises(KernelcastError, match=wrong):
        kernel("masked_attention", **T5, **values)
    with pytest.raises(KernelcastError, match="needs a bias"):
        kernel("masked_attention_backward", **T5, bias_gradient=True)


def test_groups_of_rows_read_the_weights_of_those_that_have_any() -> None:
    import numpy as np

    rows, groups, n, k = 8192, 8, 28672, 4096
    addresses, product = works("grouped_mm", rows=rows, groups=groups, n=n, k=k)
    assert of(addresses, "tasks") == 1
    one_each = (np.array([float(rows)]), np.array([float(groups)]), np.ones(1))
    blocks = float(np.ceil(random_blocks(*one_each, np.array([128.0])))[0])
    assert of(product, "tasks") == blocks * n / 256
    assert of(product, "streamed_bytes") == pytest.approx(float(active_experts(*one_each)[0]) * n * k * 2)
    assert of(product, "useful_flops") == 2 * rows * n * k
    # 4096 / 64 rows a group: the small tile
    _, small = works("grouped_mm", rows=4096, groups=64, n=2048, k=1024)
    assert float(np.asarray(small.tile["block_m"])[0]) == 64


def test_groups_of_the_inner_axis_write_a_product_each() -> None:
    rows, groups, n, m = 32768, 128, 2048, 768
    _, product = works("grouped_mm", rows=rows, groups=groups, n=n, k=m, layout="nt")
    assert of(product, "tasks") == groups * (m / 128) * (n / 256)
    assert of(product, "activation_bytes") == rows * (m + n) * 2 + groups * m * n * 2
    assert of(product, "useful_flops") == 2 * rows * n * m


def test_a_list_of_tensors_is_cut_into_chunks() -> None:
    update = one("foreach", function="lerp", elements=8 * 100_000, tensors=8, dtype="fp32")
    assert of(update, "tasks") == 8 * 2  # 100,000 elements: a chunk of 65,536 and the rest
    assert of(update, "activation_bytes") == 8 * 100_000 * 4 * 3
    exact = one("foreach", function="lerp", elements=8 * 100_000, tensors=8, chunks=20, dtype="fp32")
    assert of(exact, "tasks") == 20
    copied = one("foreach", function="copy", elements=1 << 20, dtype="fp32", to="bf16")
    assert of(copied, "activation_bytes") == (1 << 20) * 6
    sums, joined = works("foreach", function="norm", elements=8 * 100_000, tensors=8, dtype="fp32")
    assert (of(sums, "activation_bytes"), of(joined, "tasks")) == (8 * 100_000 * 4, 8)
