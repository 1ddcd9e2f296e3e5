"""Hand-worked demand of the simple families: norms, softmax, element-wise, gathers, conv, collectives."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu
from kernelcast.ops import REGISTRY, kernel
from kernelcast.ops.base import Kernel, columns_of
from kernelcast.ops.collectives import ALGORITHMS
from kernelcast.ops.elementwise import Copy, Elementwise
from kernelcast.ops.norm import RmsNorm
from kernelcast.ops.work import Work

MODULES = (
    "norm", "softmax", "elementwise", "rope", "movement", "quantize", "conv2d", "collectives", "attention_backward",
    "optimizer", "reduce", "topk", "batch_norm", "group_norm", "pooling", "resample", "layout", "embedding_bag",
    "scatter", "sort",
)  # fmt: skip
FAMILIES = {op: cls for op, cls in REGISTRY.items() if cls.__module__.rpartition(".")[2] in MODULES}
EXAMPLES = [(op, example) for op, cls in FAMILIES.items() for example in cls.examples]
H100 = gpu("h100_sxm")
EXACT = 1e-12


def works(*calls: Kernel, on: Gpu = H100) -> tuple[Work, ...]:
    return type(calls[0]).work(columns_of(calls), on)


def one(op: str, **values: Any) -> Work:
    """The only kernel of one call."""
    (work,) = works(kernel(op, **values))
    return work


def numbers(work: Work) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    values = {**vars(work), **work.tile}
    return {k: np.asarray(v, float) for k, v in values.items() if isinstance(v, float | int | np.ndarray)}


# ---- every family ----


def test_ops_are_registered() -> None:
    expected = (
        "rmsnorm layernorm softmax silu_mul gelu_mul add sub mul div neg relu gelu gelu_tanh silu sigmoid "
        "tanh exp sqrt rsqrt pow dropout where copy fill scale rope embedding kv_write quantize conv2d "
        "all_reduce all_gather reduce_scatter all_to_all send_recv"
    )
    assert set(expected.split()) <= set(FAMILIES)


@pytest.mark.parametrize(("op", "example"), EXAMPLES, ids=[f"{o}-{i}" for i, (o, _) in enumerate(EXAMPLES)])
@pytest.mark.parametrize("gpu_id", ["h100_sxm", "l40s", "mi300x"])
def test_examples_build_valid_work(op: str, example: dict[str, Any], gpu_id: str) -> None:
    call = kernel(op, **example)
    for work in works(call, call, call, on=gpu(gpu_id)):
        candidates, calls = work.shape
        assert calls == 3 and candidates >= 1
        for name, value in numbers(work).items():
            assert np.all(np.isfinite(value)) and np.all(value >= 0), name
            assert np.broadcast_shapes(value.shape, work.shape) == work.shape, name
        assert np.all(
            (np.asarray(work.tasks) >= 1) == (np.asarray(work.launches) >= 1)
        )  # not every call runs each kernel
        assert np.all(np.asarray(work.threads) <= 1024)
        # parts = total: what CTAs do is what the kernel does, unless tiles are padded (conv2d)
        done = np.asarray(work.tasks) * (np.asarray(work.fma_flops) + work.tensor_flops)
        assert np.all(done >= np.asarray(work.useful_flops) * (1 - 1e-9))


@pytest.mark.parametrize("op", sorted(FAMILIES))
def test_calls_of_a_table_do_not_touch_each_other(op: str) -> None:
    """A table of two calls gives the columns that each call gives alone."""
    cls, example = FAMILIES[op], dict(FAMILIES[op].examples[0])
    first = next(iter(example))
    calls = [cls(**example), cls(**{**example, first: example[first] * 2})]
    for i, call in enumerate(calls):
        for both, alone in zip(works(*calls), works(call), strict=True):
            together, single = numbers(both), numbers(alone)
            for name, value in single.items():
                wide = np.broadcast_to(together[name], both.shape)[:, [i]]
                np.testing.assert_allclose(wide, np.broadcast_to(value, alone.shape), err_msg=name, rtol=EXACT)


@pytest.mark.parametrize("op", sorted(FAMILIES))
def test_class_says_what_it_is(op: str) -> None:
    cls = FAMILIES[op]
    assert cls.__doc__ and not cls.__name__.startswith("_")
    call = cls(**cls.examples[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.dtype = "fp32"  # type: ignore[misc]


def test_vector_ops_take_no_matrix_dtype() -> None:
    with pytest.raises(KernelcastError, match="tf32"):
        kernel("add", rows=1, cols=1, dtype="tf32")


# ---- norms ----


def test_rmsnorm() -> None:
    work = one("rmsnorm", rows=4096, cols=4096)
    assert work.tasks == 4096
    assert work.threads == 4096 / 8  # 8 elements a thread: 512, a whole number of warps
    assert work.activation_bytes == 2 * 4096 * 4096 * 2  # x in, y out, bf16: 64 MiB
    assert work.streamed_bytes == 4096 * 2  # the weight
    assert work.fma_flops == 4 * 4096
    assert work.xu_ops == 1
    # a row in and out, and the weight once for each of 132 SMs: 8192 · 132 / 4096 = 264 bytes a row
    np.testing.assert_allclose(work.l2_bytes, 2 * 8192 + 264, rtol=EXACT)
    # 16 warps write, the first reads all, 16 read the result: 33 wavefronts of 128 bytes
    assert work.smem_bytes == 33 * 128


def test_norm_with_residual_moves_twice_as_much() -> None:
    (work,) = works(RmsNorm(rows=7, cols=5120), RmsNorm(rows=7, cols=5120, residual=True))
    assert np.ravel(work.activation_bytes).tolist() == [2 * 7 * 5120 * 2, 4 * 7 * 5120 * 2]
    assert np.ravel(work.fma_flops).tolist() == [4 * 5120, 5 * 5120]


def test_norm_threads_are_whole_warps_and_at_most_1024() -> None:
    assert one("layernorm", rows=1, cols=100).threads == 32  # 13 vectors of 8
    assert one("layernorm", rows=1, cols=16384).threads == 1024  # 2048 vectors, two a thread
    assert one("layernorm", rows=1, cols=16384).serial_steps == 2 + 1


def test_pytorchs_layer_norm_of_a_very_long_row_waits_for_each_vector() -> None:
    """A CTA of 128 threads a row: 4,194,304 / (128 · 4) = 8,192 steps for the moments, as many for the output."""
    work = one("layernorm", rows=16, cols=4_194_304, dtype="fp32", stack="torch")
    assert (work.tasks, work.threads, work.serial_steps) == (16, 128, 2 * 8192)
    # 112 of these steps took 58 us of an H200: half a microsecond each
    assert 112 * work.step_cycles / gpu("h200_sxm").clock_boost_hz == pytest.approx(58e-6, rel=0.05)
    assert one("layernorm", rows=16, cols=4096, stack="torch").step_cycles == 0  # learned


# ---- softmax ----


def test_softmax_short_rows_share_a_cta() -> None:
    # 64 columns: a warp takes two rows, a CTA of 128 threads has 4 warps, so 8 rows: 1000 / 8 = 125
    work = one("softmax", rows=1000, cols=64)
    assert work.tasks == 125
    assert work.xu_ops == 8 * 64 + 8  # an exp an element, a reciprocal a row
    assert work.smem_bytes == 0
    # 5 columns: rows of 8 lanes, so 16 to the CTA, two each: 32 rows
    assert one("softmax", rows=1000, cols=5).tasks == 32  # 1000 / 32 = 31.25
    # 1024 columns: a warp a row
    assert one("softmax", rows=1000, cols=1024).tasks == 250


def test_softmax_long_rows_take_a_cta() -> None:
    # 8192 bf16 are 16 KiB: kept in shared memory, written once and read twice; global memory read once
    held = one("softmax", rows=10, cols=8192)
    assert held.tasks == 10 and held.l2_bytes == 2 * 16384 and held.threads == 1024
    assert held.smem_bytes == 3 * 16384 + 2 * (2 * 32 + 1) * 128
    # 32768 bf16 are 64 KiB, more than the 48 KiB: read three times, written once
    assert one("softmax", rows=10, cols=32768).l2_bytes == 4 * 65536
    assert one("softmax", rows=10, cols=32768).xu_ops == 2 * 32768 + 1


# ---- element-wise ----


def test_silu_mul_moves_three_tensors() -> None:
    work = one("silu_mul", rows=300, cols=14336)
    assert work.tasks == 300
    assert work.activation_bytes == 3 * 300 * 14336 * 2
    assert work.xu_ops == 2 * 14336  # exp and reciprocal
    silu_mul = REGISTRY["silu_mul"]
    assert issubclass(silu_mul, Elementwise) and work.fma_flops == silu_mul.cost.flops * 14336


@pytest.mark.parametrize(("dtype", "element_bytes", "per_cta"), [("bf16", 2, 1024), ("fp32", 4, 512)])
def test_add_in_vectors_of_16_bytes(dtype: str, element_bytes: int, per_cta: int) -> None:
    work = one("add", rows=1000, cols=100, dtype=dtype)
    assert work.tasks == -(-100_000 // per_cta)  # 98 or 196
    assert work.activation_bytes == 3 * 100_000 * element_bytes
    np.testing.assert_allclose(np.asarray(work.tasks) * work.fma_flops, 100_000, rtol=EXACT)


@pytest.mark.parametrize(
    ("op", "bytes_per_element"),
    [("relu", 4), ("fill", 2), ("copy", 4), ("where", 7), ("dropout", 5), ("masked_fill", 5), ("mul", 6)],
)
def test_bytes_of_an_element(op: str, bytes_per_element: int) -> None:
    """bf16: 2 bytes for each tensor read or written, 1 for a boolean one."""
    assert one(op, rows=64, cols=64).activation_bytes == 64 * 64 * bytes_per_element


def test_cast_reads_one_format_and_writes_another() -> None:
    (work,) = works(Copy(rows=64, cols=64, dtype="fp32", to="bf16"))
    assert work.activation_bytes == 64 * 64 * (4 + 2)
    assert work.tasks == 64 * 64 / 512  # the wider format fills the 16 bytes


# ---- rope, embedding, kv_write ----


def test_rope() -> None:
    work = one("rope", tokens=10, q_heads=32, kv_heads=8, head_dim=128)
    assert work.tasks == 10
    assert work.activation_bytes == 10 * ((32 + 8) * 128 * 2 * 2 + 8)  # in and out, and an int64 position
    assert work.streamed_bytes == 10 * 128 * 2  # 64 cosines and 64 sines
    assert work.fma_flops == 40 * 64 * 6  # a pair: 4 products, 2 sums
    assert work.threads == 512
    half = one("rope", tokens=10, q_heads=32, kv_heads=8, head_dim=128, rotary_dim=64)
    assert half.fma_flops == 40 * 32 * 6


@pytest.mark.parametrize("rotary_dim", [63, 256])
def test_rope_refuses(rotary_dim: int) -> None:
    with pytest.raises(KernelcastError, match=f"rotary_dim {rotary_dim} .* head_dim 128"):
        kernel("rope", tokens=1, q_heads=1, kv_heads=1, head_dim=128, rotary_dim=rotary_dim)


def test_embedding_reads_no_row_twice() -> None:
    work = one("embedding", tokens=1000, hidden=5120, vocab=128256)
    assert work.streamed_bytes == 1000 * 5120 * 2
    assert work.activation_bytes == 1000 * (5120 * 2 + 8)
    assert work.tasks == 1000 * 3  # 10,240 bytes in pieces of 256 threads x 16 bytes
    assert one("embedding", tokens=1000, hidden=5120, vocab=100).streamed_bytes == 100 * 5120 * 2


def test_kv_write() -> None:
    work = one("kv_write", tokens=64, kv_heads=8, head_dim=128)
    assert work.tasks == 64
    assert work.activation_bytes == 64 * (2 * 8 * 128 * 2 + 8)  # K and V, and the slot
    assert work.streamed_bytes == 64 * 2 * 8 * 128 * 2
    assert work.fma_flops == 0
    fp8 = one("kv_write", tokens=64, kv_heads=8, head_dim=128, kv_dtype="fp8")
    assert fp8.streamed_bytes == 64 * 2 * 8 * 128
    assert fp8.activation_bytes == work.activation_bytes
    assert fp8.fma_flops == 3 * 2 * 8 * 128


# ---- quantize ----


def test_quantize_passes() -> None:
    rows, cols = 100, 4096
    read = rows * cols * 2
    assert one("quantize", rows=rows, cols=cols, scale="static").activation_bytes == read + rows * cols
    assert one("quantize", rows=rows, cols=cols).activation_bytes == read + rows * (cols + 4)  # a scale a token
    amax, scale = works(kernel("quantize", rows=rows, cols=cols, scale="tensor"))
    assert amax.activation_bytes == read + rows * 4  # the maximum of a row
    assert scale.activation_bytes == read + rows * cols
    assert amax.fma_flops == 1 * cols and scale.fma_flops == 3 * cols


def test_quantize_block_formats_carry_their_scales() -> None:
    rows, cols = 100, 4096
    fp8_block = one("quantize", rows=rows, cols=cols, to="fp8_block")
    assert fp8_block.activation_bytes == rows * (2 * cols + cols + cols / 128 * 4)
    assert one("quantize", rows=rows, cols=cols, scale="block").activation_bytes == fp8_block.activation_bytes
    nvfp4 = one("quantize", rows=rows, cols=cols, to="nvfp4")
    assert nvfp4.activation_bytes == rows * (2 * cols + cols / 2 + cols / 16)
    with pytest.raises(KernelcastError, match="nvfp4 has block scales"):
        kernel("quantize", rows=1, cols=16, to="nvfp4", scale="token")


# ---- collectives ----


def plan(op: str, algorithm: str, **values: Any) -> dict[str, float]:
    work = one(op, **values)
    row = np.flatnonzero(np.ravel(work.tile["algorithm"]) == ALGORITHMS.index(algorithm))
    assert len(row), f"{algorithm} is no candidate"
    table = {name: np.broadcast_to(value, work.shape)[row[0], 0] for name, value in numbers(work).items()}
    return {name: float(value) for name, value in table.items()}


def test_all_reduce_algorithms() -> None:
    size, world = 2.0**20, 8
    ring = plan("all_reduce", "ring", bytes=size, world=world)
    assert ring["link_bytes"] == 2 * 7 / 8 * size
    assert ring["link_steps"] == 2 * 7
    assert ring["useful_flops"] == 7 / 8 * size / 2  # bf16 sums
    assert ring["activation_bytes"] == 2 * size
    # received and sent once a step, the tensor read and the sum written: 2 · 1.75 + 2 = 5.5 times the message
    np.testing.assert_allclose(ring["tasks"] * ring["l2_bytes"], 5.5 * size, rtol=EXACT)
    tree = plan("all_reduce", "tree", bytes=size, world=world)
    assert (tree["link_bytes"], tree["link_steps"]) == (2 * size, 2 * 3)
    one_shot = plan("all_reduce", "one_shot", bytes=size, world=world)
    assert (one_shot["link_bytes"], one_shot["link_steps"]) == (7 * size, 1)
    assert one_shot["useful_flops"] == 7 * size / 2
    two_shot = plan("all_reduce", "two_shot", bytes=size, world=world)
    assert (two_shot["link_bytes"], two_shot["link_steps"]) == (2 * 7 / 8 * size, 2)
    switch = plan("all_reduce", "in_switch", bytes=size, world=world)
    assert (switch["link_bytes"], switch["link_steps"]) == (size + size / 8, 2)
    assert switch["fma_flops"] == 0


def algorithms(gpu_id: str, **values: Any) -> set[str]:
    (work,) = works(kernel("all_reduce", bytes=2**20, **values), on=gpu(gpu_id))
    return {ALGORITHMS[int(i)] for i in np.ravel(work.tile["algorithm"])}


def test_all_reduce_offers_what_the_fabric_can() -> None:
    inside = set(ALGORITHMS) - {"by_node"}
    assert algorithms("h100_sxm", world=8) == inside
    assert "in_switch" not in algorithms("h100_sxm", world=8, dtype="int8")  # the switch adds floats
    assert algorithms("a100_sxm", world=8) == inside - {"in_switch"}
    assert algorithms("h100_sxm", world=16, fabric="ib_ndr") == {"ring", "tree", "by_node"}
    assert algorithms("l40s", world=4) == {"ring", "tree"}  # PCIe: custom kernels for pairs only
    assert algorithms("l40s", world=2) == {"ring", "tree", "one_shot", "two_shot"}
    assert algorithms("rtx_4090", world=2) == {"ring", "tree"}  # GeForce: no peer access


def test_gpus_without_peer_access_share_the_hosts_memory() -> None:
    """A ring of four sends 2 x 3/4 of the message from each, and all four cross the same link."""
    found = plan("all_reduce", "ring", bytes=2**20, world=4, fabric="pcie4_shared")
    assert found["link_bytes"] == 4 * 2 * 3 / 4 * 2**20


def test_nodes_share_a_message_out_to_their_ports() -> None:
    """32 GPUs are four nodes: each GPU reduces an eighth with its three likes, 2 x 3/4 of it over its own port."""
    found = plan("all_reduce", "by_node", bytes=2**20, world=32, fabric="ib_ndr")
    assert found["link_bytes"] == 2 * 3 / 4 * 2**20 / 8
    assert found["link_steps"] == 2 * 2  # two levels of four nodes, there and back


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_gather_and_scatter_send_each_part_once(op: str) -> None:
    size = 2.0**20
    ring = plan(op, "ring", bytes=size, world=4)
    assert ring["link_bytes"] == 3 / 4 * size
    assert ring["link_steps"] == 3
    assert ring["activation_bytes"] == size + size / 4
    assert ring["useful_flops"] == (3 / 4 * size / 2 if op == "reduce_scatter" else 0)


def test_all_to_all_and_send_recv() -> None:
    shuffled = plan("all_to_all", "one_shot", bytes=2**20, world=8)
    assert (shuffled["link_bytes"], shuffled["link_steps"]) == (7 / 8 * 2**20, 1)
    sent = plan("send_recv", "one_shot", bytes=2**20)
    assert (sent["link_bytes"], sent["link_steps"]) == (2**20, 1)
    assert one("send_recv", bytes=2**20).link == ""
    assert one("send_recv", bytes=2**20, fabric="ib_ndr").link == "ib_ndr"


def test_collectives_take_large_messages_and_refuse_one_gpu() -> None:
    assert plan("all_reduce", "ring", bytes=2**40, world=8)["link_bytes"] == 1.75 * 2**40
    with pytest.raises(KernelcastError, match="world"):
        kernel("all_reduce", bytes=1024, world=1)
    with pytest.raises(KernelcastError, match="fabric"):
        kernel("all_reduce", bytes=1024, world=2, fabric="carrier_pigeon")
