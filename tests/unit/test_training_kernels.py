"""Hand-worked demand of the kernels of a training step: gradients, optimizers, reductions, movement."""

from __future__ import annotations

import pytest
from demand import of, one, whole, works

import kernelcast as kc
from kernelcast.ops import kernel

EXACT = 1e-12
MATRIX = 4096 * 4096


# ---- norms ----


def test_layernorm_backward_reads_its_tensors_twice() -> None:
    dx, weights = works("layernorm_backward", rows=4096, cols=4096)
    # a CTA of 128 threads a row: x and dy in, dx out (bf16), mean and 1/σ of each row in fp32
    assert (of(dx, "tasks"), of(dx, "threads")) == (4096, 128)
    assert of(dx, "activation_bytes") == 3 * MATRIX * 2 + 4096 * 2 * 4
    assert of(dx, "streamed_bytes") == 4096 * 2  # the weight
    # from L2: x and dy a second time, and the weight once for each of 132 SMs
    l2 = 5 * MATRIX * 2 + 4096 * 8 + 132 * 4096 * 2
    assert whole(dx, "l2_bytes") == pytest.approx(l2, rel=EXACT)
    assert whole(dx, "fma_flops") == pytest.approx(14 * MATRIX)
    # 4096 / 32 columns: 128 CTAs of 32 x 32 threads, each down all rows; x and dy in, two gradients out
    assert (of(weights, "tasks"), of(weights, "threads")) == (128, 1024)
    assert of(weights, "activation_bytes") == 2 * MATRIX * 2 + 4096 * 8 + 2 * 4096 * 2
    assert of(weights, "useful_flops") == 5 * MATRIX
    assert of(weights, "serial_steps") == 4096 / (32 * 8) + 1


def test_rmsnorm_backward_of_few_rows_uses_fewer_warps() -> None:
    dx, weights = works("rmsnorm_backward", rows=100, cols=1000, dtype="fp32")
    assert of(dx, "activation_bytes") == 3 * 100_000 * 4 + 100 * 4
    assert (of(weights, "tasks"), of(weights, "threads")) == (32, 8 * 32)  # 1000 / 32 = 31.25; under 128 rows 8 warps
    assert of(weights, "activation_bytes") == 2 * 100_000 * 4 + 100 * 4 + 1000 * 4


def test_norm_backward_of_many_rows_sums_parts() -> None:
    # 131,072 rows, 1,024 columns: 32 columns of CTAs are fewer than half of 132 SMs, so rows are shared out, 32 a CTA,
    # up to 32,768 CTAs: 1,024 parts of each of two gradients, which two sums join
    _, weights, joined = works("layernorm_backward", rows=131072, cols=1024)
    assert of(weights, "tasks") == 32 * 1024
    assert of(weights, "threads") == 32
    parts = 1024 * 2 * 1024 * 2  # bytes
    assert of(weights, "activation_bytes") == 2 * 131072 * 1024 * 2 + 131072 * 8 + parts
    assert of(joined, "launches") == 2
    assert of(joined, "activation_bytes") == parts + 2 * 1024 * 2
    assert len(works("layernorm_backward", rows=131072, cols=8192)) == 2  # 256 columns of CTAs fill the GPU


# ---- softmax and the loss ----


def test_softmax_backward_multiplies_first() -> None:
    product, rows = works("softmax_backward", rows=1000, cols=8192)
    tensor = 1000 * 8192 * 2
    assert of(product, "activation_bytes") == 3 * tensor  # y and dy in, their product out
    assert of(rows, "activation_bytes") == 3 * tensor  # the product and y in, dx out
    assert of(rows, "tasks") == 1000
    assert whole(rows, "l2_bytes") == pytest.approx(3 * tensor)  # 16 KiB of a row stay in shared memory
    assert of(rows, "smem_bytes") == pytest.approx(2 * 16384 + (2 * 32 + 1) * 128)  # in and out; one sum of 32 warps
    assert of(rows, "fma_flops") == 3 * 8192 and of(rows, "xu_ops") == 0


def test_log_softmax_backward_of_a_vocabulary_reads_dy_twice() -> None:
    work = one("log_softmax_backward", rows=64, cols=128256)  # 250 KiB of bf16: no shared memory holds it
    tensor = 64 * 128256 * 2
    assert of(work, "activation_bytes") == 3 * tensor
    assert whole(work, "l2_bytes") == pytest.approx(4 * tensor)
    assert of(work, "xu_ops") == 128256  # exp(y)
    short = one("log_softmax_backward", rows=1000, cols=64)
    assert of(short, "tasks") == 125 and of(short, "smem_bytes") == 0  # 8 rows a CTA, as forward


def test_log_softmax_needs_one_exp() -> None:
    assert of(one("log_softmax", rows=10, cols=32768), "xu_ops") == 32768 + 1  # and a logarithm a row
    assert of(one("softmax", rows=10, cols=32768), "xu_ops") == 2 * 32768 + 1
    log, plain = one("log_softmax", rows=10, cols=512), one("softmax", rows=10, cols=512)
    assert of(log, "xu_ops") == of(plain, "xu_ops")


@pytest.mark.parametrize(("rows", "threads"), [(1, 32), (4096, 256), (6000, 512), (1 << 20, 1024)])
def test_nll_loss_is_one_cta(rows: int, threads: int) -> None:
    # 2^round(log2(rows / 16)): 256; 6000 / 16 = 375 is nearer to 512 (log2 8.55)
    work = one("nll_loss", rows=rows, cols=128256)
    assert (of(work, "tasks"), of(work, "threads")) == (1, threads)
    assert of(work, "activation_bytes") == rows * (32 + 8) + 2 * 2  # a sector and an int64 a row; loss and weight
    assert of(one("nll_loss", rows=64, cols=10), "activation_bytes") == 64 * (20 + 8) + 4  # a row of 10 is 20 bytes


# ---- embedding ----


def test_embedding_backward_sorts_many_tokens() -> None:
    fill, sort, sums, scatter = works("embedding_backward", tokens=8192, hidden=4096, vocab=128256)
    assert of(fill, "activation_bytes") == 128256 * 4096 * 2  # zeros
    # ids below 128,256 have 17 bits: 3 passes of 8, and 7 small kernels
    assert of(sort, "launches") == 3 + 7
    assert of(sort, "activation_bytes") == 8192 * 8 * (4 * 3 + 7)
    # all tokens may differ: 8192 segments in fp32, four CTAs of 1,024 a row
    assert of(sums, "tasks") == of(scatter, "tasks") == 8192 * 4
    assert of(sums, "activation_bytes") == 8192 * (4096 * (2 + 4) + 16)
    assert of(scatter, "activation_bytes") == 8192 * (4096 * (4 + 2) + 16)


def test_embedding_backward_of_repeated_tokens() -> None:
    # 100 ids for 8,192 tokens: 82 times each, in 9 segments of up to ten
    _, _, sums, scatter = works("embedding_backward", tokens=8192, hidden=64, vocab=100)
    assert of(sums, "activation_bytes") == 8192 * 64 * 2 + 900 * 64 * 4 + 8192 * 16
    assert of(scatter, "activation_bytes") == 900 * 64 * 4 + 100 * 64 * 2 + 8192 * 16


def test_embedding_backward_of_few_tokens_does_not_sort() -> None:
    _, gather = works("embedding_backward", tokens=3072, hidden=1000, vocab=50257)
    assert (of(gather, "tasks"), of(gather, "threads")) == (32, 1024)  # 1000 / 32 = 31.25
    # gradients in; 3072 rows of the table read and written; the ids
    assert of(gather, "activation_bytes") == 3 * 3072 * 1000 * 2 + 3072 * 8
    assert len(works("embedding_backward", tokens=3073, hidden=1000, vocab=50257)) == 4


# ---- element-wise ----


@pytest.mark.parametrize(
    ("op", "bytes_per_element"),
    [("silu_backward", 6), ("gelu_backward", 6), ("gelu_tanh_backward", 6), ("relu_backward", 6),
     ("tanh_backward", 6), ("sigmoid_backward", 6), ("dropout_backward", 5), ("cat", 4)],
)  # fmt: skip
def test_bytes_of_an_element(op: str, bytes_per_element: int) -> None:
    """bf16: 2 bytes for each tensor read or written, 1 for a boolean one."""
    assert of(one(op, rows=64, cols=64), "activation_bytes") == 64 * 64 * bytes_per_element


# ---- optimizers ----


def test_adamw() -> None:
    # 100 tensors of 1,000,000: each 15.3 chunks of 65,536, so 16; 1,600 CTAs of 512 threads, 320 a launch
    steps, update = works("adamw", elements=10**8, tensors=100)
    assert (of(steps, "tasks"), of(steps, "launches"), of(steps, "activation_bytes")) == (100, 1, 100 * 8)
    assert (of(update, "tasks"), of(update, "threads"), of(update, "launches")) == (1600, 512, 5)
    assert of(update, "activation_bytes") == 10**8 * 7 * 2  # p, g, m, v in; p, m, v out
    assert whole(update, "xu_ops") == pytest.approx(3 * 10**8)  # a root, two quotients
    assert of(update, "serial_steps") == 65536 / (512 * 4)


def test_adamw_states_in_fp32() -> None:
    _, update = works("adamw", elements=10**6, state_dtype="fp32")
    assert of(update, "activation_bytes") == 10**6 * (3 * 2 + 4 * 4)
    _, same = works("adamw", elements=10**6, dtype="fp32")
    assert of(same, "activation_bytes") == 10**6 * 7 * 4


def test_optimizers_launch_for_chunks_and_for_tensors() -> None:
    # 70e9 parameters in one tensor: 1,068,116 chunks, 320 a launch: 3,338; 1,000 tensors: 36 a launch
    assert of(works("adamw", elements=7 * 10**10)[1], "launches") == 3338
    assert of(works("adamw", elements=10**6, tensors=1000)[1], "launches") == 28
    assert of(one("sgd", elements=10**6, tensors=1000), "launches") == 16  # 64 a launch
    assert of(one("sgd", elements=10**6, tensors=1000, momentum=True), "launches") == 21  # 48
    assert of(works("adamw", elements=10**8, tensors=100, chunks=1700)[1], "tasks") == 1700  # of unequal tensors


def test_sgd() -> None:
    assert of(one("sgd", elements=10**6), "activation_bytes") == 10**6 * 3 * 2
    assert of(one("sgd", elements=10**6, momentum=True), "activation_bytes") == 10**6 * 5 * 2
    assert of(one("sgd", elements=10**6, momentum=True), "useful_flops") == 4 * 10**6


# ---- reductions ----


def test_reduce_sum_over_rows() -> None:
    # 4096 outputs, four a thread; 32 threads wide and 4 high are 128 (512 / 4): 128 columns a CTA, 32 CTAs. A thread
    # has 8192 / 4 = 2048 values, over 256; 16 CTAs of 128 threads fit each of 132 SMs: 2112 / 32 = 66 share an output
    work = one("reduce_sum", rows=8192, cols=4096)
    assert (of(work, "threads"), of(work, "tasks")) == (128, 32 * 66)
    assert of(work, "activation_bytes") == 8192 * 4096 * 2 + 4096 * 2
    # parts of 66 CTAs, fp32, written and read
    assert whole(work, "l2_bytes") == pytest.approx(8192 * 4096 * 2 + 4096 * 2 + 2 * 66 * 4096 * 4)
    assert of(work, "useful_flops") == 8192 * 4096


def test_reduce_sum_over_columns() -> None:
    # 4096 columns in vectors of four, 32 wide and 16 rows high: 128 values a thread, under 16 · 16, so a warp keeps its
    # row: 8192 / 16 = 512 CTAs
    work = one("reduce_sum", rows=8192, cols=4096, axis="cols")
    assert (of(work, "threads"), of(work, "tasks")) == (512, 512)
    assert of(work, "activation_bytes") == 8192 * 4096 * 2 + 8192 * 2


def test_argmax_writes_int64() -> None:
    work = one("argmax", rows=64, cols=1000)
    assert of(work, "activation_bytes") == 64 * 1000 * 2 + 64 * 8


def test_cumsum() -> None:
    # 4096 columns in pieces of 2 · 512: 4, each in log2(1024) = 10 levels; a CTA a row
    work = one("cumsum", rows=1000, cols=4096)
    assert of(work, "tasks") == 1000
    assert of(work, "activation_bytes") == 2 * 1000 * 4096 * 2
    assert of(work, "serial_steps") == 4 * 10
    assert of(work, "fma_flops") == 4096 * 10 / 2
    assert of(work, "smem_bytes") == 4 * 16 * (4 + 3 * 10) * 128  # 16 warps
    assert of(one("cumsum", rows=1000, cols=40), "tasks") == 63  # 32 threads a row, 16 rows a CTA
    assert of(one("cumsum", rows=1, cols=1 << 20), "tasks") == 547  # 1,920 elements a CTA


def test_topk_of_long_rows_reads_them_once_a_byte_and_once_to_gather() -> None:
    found = works("topk", rows=64, cols=128256, k=50)
    assert len(found) == 2 * 2 + 1 + 1  # two digits of 8 bits, each counted and joined; gather, sort
    assert of(found[0], "activation_bytes") == 64 * 128256 * 2 + 64 * 512
    assert of(found[4], "activation_bytes") == 64 * 128256 * 2 + 64 * 50 * (2 + 8)
    assert of(found[5], "activation_bytes") == 2 * 64 * 50 * 10
    # 50 in 64: 6 · 7 / 2 = 21 levels of 32 pairs
    assert of(found[5], "useful_flops") == 64 * 21 * 32 * 2
    assert len(works("topk", rows=64, cols=128256, k=50, dtype="fp32")) == 2 * 4 + 2


def test_topk_of_short_rows_takes_a_cta_each() -> None:
    select, _ = works("topk", rows=4096, cols=128, k=8)  # 128 is under 400
    assert (of(select, "tasks"), of(select, "threads")) == (4096, 128)
    # 16 bits, two at a time, and two more reads; DRAM sees the rows once
    assert of(select, "l2_bytes") == 10 * 128 * 2 + 8 * 10
    assert of(select, "activation_bytes") == 4096 * (128 * 2 + 8 * 10)
    assert len(works("topk", rows=4096, cols=128, k=1)) == 1  # one needs no sorting
    with pytest.raises(kc.KernelcastError, match="k 9 must be at most cols 8"):
        kernel("topk", rows=1, cols=8, k=9)


# ---- movement ----


def test_transpose_reads_a_sector_for_an_element() -> None:
    work = one("transpose", batch=2, rows=1024, cols=512)
    elements = 2 * 1024 * 512
    assert of(work, "tasks") == elements / 512  # 128 threads of four
    assert of(work, "activation_bytes") == 2 * elements * 2
    assert whole(work, "l2_bytes") == elements * (32 + 2)
    assert whole(one("transpose", rows=1024, cols=1), "l2_bytes") == 1024 * 4  # a vector is read as it lies


def test_gather() -> None:
    work = one("gather", rows=1000, cols=5120)
    assert of(work, "activation_bytes") == 1000 * (2 * 5120 * 2 + 8)
    assert of(work, "tasks") == 1000 * 3  # 10,240 bytes in pieces of 256 threads x 16 bytes


# ---- what the shipped weights say of ops that they never saw ----


@pytest.mark.parametrize("op", ["log", "sin", "nll_loss"])  # never measured
def test_unknown_ops_of_a_known_family_say_so(op: str) -> None:
    found = kc.predict(kernel(op, rows=4096, cols=4096), "h200_sxm")
    assert found.support in ("near", "extrapolated")
    assert found.bound_s <= found.time_s < 10 * found.bound_s
