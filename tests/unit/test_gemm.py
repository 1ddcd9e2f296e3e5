"""gemm by hand: tiles, waves, padded FLOPs, bytes and split-K, each with its arithmetic."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.machine import analyse
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.base import columns_of
from kernelcast.ops.gemm import Gemm
from kernelcast.ops.work import Work

ALONE = kc.Conditions(predictor="generic")  # the product by itself, in no engine's layer


def candidate(work: Work, **tile: float) -> int:
    """Index of the candidate with this tile."""
    match = np.ones(work.shape[0], dtype=bool)
    for name, value in tile.items():
        column = np.broadcast_to(np.asarray(work.tile[name], dtype=float), work.shape)
        match &= column[:, 0] == value
    return int(np.flatnonzero(match)[0])


def value(work: Work, field: str, index: int) -> float:
    return float(np.broadcast_to(np.asarray(getattr(work, field), dtype=float), work.shape)[index, 0])


def gemm_work(gpu: str, **parameters: object) -> Work:
    call = kc.kernel("gemm", **parameters)
    return Gemm.work(columns_of([call]), kc.gpu(gpu))[0]


def test_tiles_waves_and_padded_flops() -> None:
    # A 1000 x 3000 output in tiles of 128 x 128: ceil(1000/128) = 8 by ceil(3000/128) = 24, so 192 tiles.
    work = gemm_work("a100_sxm", m=1000, n=3000, k=500)
    at = candidate(work, tile_m=128, tile_n=128, split_k=1)
    assert value(work, "tasks", at) == 8 * 24
    # k = 500 in steps of 64 (128 bytes of bf16): 8 steps, so 512 deep with padding.
    assert value(work, "serial_steps", at) == 8
    assert value(work, "tensor_flops", at) == 2 * 128 * 128 * 512
    # padded over useful work: 192 tiles x 2 x 128 x 128 x 512 against 2 x 1000 x 3000 x 500
    padded = 192 * 2 * 128 * 128 * 512
    assert value(work, "tasks", at) * value(work, "tensor_flops", at) == padded
    assert value(work, "useful_flops", at) == 3.0e9


def test_waves_tail_and_busiest_sm() -> None:
    # 4096 x 4096 in tiles of 128 x 256: 32 x 16 = 512 tiles on 132 SMs: 3.88 waves, the busiest SM does 4.
    gpu = kc.gpu("h100_sxm")
    work = gemm_work("h100_sxm", m=4096, n=4096, k=4096)
    found = analyse(work, gpu, keep=work.shape[0])
    big = next(a for a in found if (a.tile["tile_m"][0], a.tile["tile_n"][0]) == (128, 256))
    assert big.tasks[0] == 512
    assert big.waves[0] == pytest.approx(512 / 132)
    assert big.busiest[0] == 4
    assert big.tail[0] == pytest.approx(1 - 512 / (4 * 132))
    # tensor limit: 2 x 4096^3 FLOPs at 132 x 4096 FLOP/clk x 1.83 GHz = 989.43 TFLOP/s
    tensor = PIPELINES.index("tensor")
    assert big.limits[tensor, 0] == pytest.approx(2 * 4096**3 / (132 * 4096 * 1.83e9))
    assert big.busiest_limits[tensor, 0] == pytest.approx(4 * 2 * 128 * 256 * 4096 / (4096 * 1.83e9))


def test_dram_bytes_of_a_skinny_gemm() -> None:
    # One token: the 4096 x 4096 bf16 weights, 32 MiB, come from DRAM; 16 KiB of activations may stay in L2.
    p = kc.predict(kc.Gemm(m=1, n=4096, k=4096), "h100_sxm")
    assert p.kernels[0].dram_bytes == 4096 * 4096 * 2
    assert p.limits["dram"] == pytest.approx(4096 * 4096 * 2 / 3.35e12)
    assert p.bound_by == "dram"


def test_same_call_again_finds_its_weights_in_l2() -> None:
    # 8 MiB of weights fit H100's 50 MiB of L2: warm, nothing crosses DRAM's pins.
    call = kc.Gemm(m=16, n=2048, k=2048)
    cold = kc.predict(call, "h100_sxm")
    warm = kc.predict(call, "h100_sxm", kc.Conditions(rotation=1))
    assert cold.limits["dram"] > 0 and "dram" not in warm.limits
    assert warm.kernels[0].l2_resident == 1.0
    assert warm.time_s < cold.time_s
    # 1 GiB does not fit: warm and cold are the same.
    large = kc.Gemm(m=16, n=16384, k=32768)
    again = kc.predict(large, "h100_sxm", kc.Conditions(rotation=1))
    assert again.time_s == kc.predict(large, "h100_sxm").time_s


def test_split_k_fills_the_sms_once() -> None:
    # 128 x 256 of output in tiles of 128 x 128 is 2 tiles; 108 SMs / 2 = 54, but at most 32 splits,
    # each of at least 4 k-steps: k = 8192 is 128 steps, so 32 splits of 4 steps.
    work = gemm_work("a100_sxm", m=128, n=256, k=8192)
    at = candidate(work, tile_m=128, tile_n=128, split_k=32)
    assert value(work, "tasks", at) == 64
    assert value(work, "serial_steps", at) == 4


def test_number_formats_set_bytes_and_rate() -> None:
    gpu = kc.gpu("h100_sxm")
    bf16 = kc.predict(kc.Gemm(m=8192, n=8192, k=8192), gpu, ALONE)
    fp8 = kc.predict(kc.Gemm(m=8192, n=8192, k=8192, dtype="fp8"), gpu, ALONE)
    assert fp8.limits["tensor"] == pytest.approx(bf16.limits["tensor"] / 2)
    one = {
        t: kc.predict(kc.Gemm(m=1, n=8192, k=8192, dtype=t), gpu, ALONE).kernels[0].dram_bytes
        for t in ("bf16", "fp8", "int4")
    }
    assert one["fp8"] == one["bf16"] / 2
    assert one["int4"] == pytest.approx(8192 * 8192 * (0.5 + 2 / 128))  # 4 bits and an fp16 scale per 128
    # fp32 runs on the vector units, tf32 on the tensor cores
    fp32 = kc.predict(kc.Gemm(m=4096, n=4096, k=4096, dtype="fp32"), gpu, ALONE)
    assert "tensor" not in fp32.limits
    assert fp32.limits["fma"] == pytest.approx(2 * 4096**3 / (132 * 256 * 1.98e9))
    assert "tensor" in kc.predict(kc.Gemm(m=4096, n=4096, k=4096, dtype="tf32"), gpu, ALONE).limits


def test_bmm_of_one_is_a_gemm_with_a_warm_operand() -> None:
    gemm = kc.predict(kc.Gemm(m=8192, n=8192, k=8192), "a100_sxm")
    bmm = kc.predict(kc.kernel("bmm", batch=1, m=8192, n=8192, k=8192), "a100_sxm")
    assert bmm.limits["tensor"] == gemm.limits["tensor"]
    assert bmm.kernels[0].tasks == gemm.kernels[0].tasks


def test_a_learned_choice_can_replace_the_ranking() -> None:
    """Whatever scores the candidates decides: here, the one with the most shared-memory traffic."""
    gpu = kc.gpu("h100_sxm")
    work = gemm_work("h100_sxm", m=4096, n=4096, k=4096)
    smem = PIPELINES.index("smem")
    usual = analyse(work, gpu)[0]
    odd = analyse(work, gpu, score=lambda limits, details: -limits[smem])[0]
    assert odd.limits[smem, 0] > usual.limits[smem, 0]
    assert odd.tile["tile_m"][0] * odd.tile["tile_n"][0] < usual.tile["tile_m"][0] * usual.tile["tile_n"][0]


def test_alignment_is_that_of_rows_in_memory() -> None:
    # m 7, n 12, k 10 in bf16: rows of k are 20 bytes (4 divides them), of n 24 (8), of m 14 (2)
    def hints(layout: str, op: str = "gemm", **more: int) -> dict[str, float]:
        call = kc.kernel(op, m=7, n=12, k=10, layout=layout, dtype="bf16", **more)
        found = type(call).shape_features(columns_of([call]), kc.gpu("h100_sxm"))
        return {name: 2.0 ** (float(found[f"align_{name}"][0]) - 1) for name in ("a", "b", "c")}

    assert hints("tn") == {"a": 4, "b": 4, "c": 8}
    assert hints("nn") == {"a": 4, "b": 8, "c": 8}
    assert hints("nt") == {"a": 2, "b": 8, "c": 8}
    assert hints("nn") == hints("nn", "bmm", batch=3)


def test_hopper_shares_reads_of_b_and_ampere_does_not() -> None:
    hopper = gemm_work("h100_sxm", m=4096, n=4096, k=4096)
    ampere = gemm_work("a100_sxm", m=4096, n=4096, k=4096)
    assert np.any(np.asarray(hopper.multicast_bytes) > 0)
    assert not np.any(np.asarray(ampere.multicast_bytes) > 0)
    # with multicast the SM's port still carries all of A and B
    at = candidate(hopper, tile_m=128, tile_n=256, split_k=1)
    arriving = value(hopper, "l2_bytes", at) + value(hopper, "multicast_bytes", at)
    assert arriving == (128 + 256) * 4096 * 2 + 128 * 256 * 2


def test_refetch_only_when_operands_exceed_l2() -> None:
    gpu = kc.gpu("a100_sxm")
    small = Gemm.work(columns_of([kc.Gemm(m=1024, n=1024, k=1024)]), gpu)[0]
    large = Gemm.work(columns_of([kc.Gemm(m=32768, n=32768, k=8192)]), gpu)[0]
    assert not np.any(small.refetched_bytes)
    assert np.all(np.asarray(large.refetched_bytes) > 0)
    assert dataclasses.replace(large, refetched_bytes=0.0).shape == large.shape


def test_layout_is_a_word_that_physics_does_not_hear() -> None:
    # operands lie another way round in memory: the same bytes and FLOPs
    physics = kc.Conditions(predictor="generic")
    shape = {"m": 4096, "n": 1024, "k": 2048}
    for op, sizes in (("gemm", shape), ("bmm", {"batch": 3, **shape})):
        plain = kc.predict(kc.kernel(op, **sizes), "h100_sxm", physics)
        for layout in ("tn", "nn", "nt"):
            laid = kc.predict(kc.kernel(op, **sizes, layout=layout), "h100_sxm", physics)
            assert laid.parameters["layout"] == layout
            assert (laid.limits, laid.time_s, laid.support) == (plain.limits, plain.time_s, plain.support)
    with pytest.raises(kc.KernelcastError, match="unknown layout 'tt'"):
        kc.kernel("gemm", **shape, layout="tt")


def test_a_matrix_with_a_vector_is_the_vector_with_the_transposed_matrix() -> None:
    tall = kc.predict(kc.kernel("bmm", batch=18, m=256, n=1, k=2560), "h200_sxm")
    flat = kc.predict(kc.kernel("bmm", batch=18, m=1, n=256, k=2560), "h200_sxm")
    assert tall.limits == flat.limits
    assert tall.time_s == pytest.approx(8.8e-6, rel=0.5)  # as measured: not tiles of 64 x 64 over a column, 48 us


def test_mxfp4_runs_at_the_rate_of_its_activations() -> None:
    """An MI355X: 2 x 8192^3 FLOPs at 10,066 TFLOPS are 109 us, at fp8's 5,033 218 us, at 16 bits' 2,517 437 us."""
    flops = 2 * 8192**3
    for dtype, peak in (("w4a4_mxfp4", 10066.3e12), ("mxfp4_fp8", 5033.2e12), ("mxfp4", 2516.6e12)):
        found = kc.predict(kc.Gemm(m=8192, n=8192, k=8192, dtype=dtype), "mi355x")
        assert found.limits["tensor"] == pytest.approx(flops / peak, rel=0.01)
    # all have the weights of 4 bits: 4.25 with the scales
    small = {d: kc.predict(kc.Gemm(m=1, n=8192, k=8192, dtype=d), "mi355x") for d in ("w4a4_mxfp4", "mxfp4", "bf16")}
    assert small["w4a4_mxfp4"].limits["dram"] == pytest.approx(8192**2 * 4.25 / 8 / 8e12, rel=0.01)
    assert small["mxfp4"].limits["dram"] == pytest.approx(small["bf16"].limits["dram"] * 4.25 / 16, rel=0.01)


@pytest.mark.parametrize(("dtype", "measured"), [("w4a4_mxfp4", "nvfp4"), ("mxfp4", "int4")])
def test_a_format_that_nobody_measured_is_answered_by_one_of_its_widths(dtype: str, measured: str) -> None:
    for gpu_id in ("b200_sxm", "mi355x"):
        found = kc.predict(kc.Gemm(m=4096, n=4096, k=4096, dtype=dtype), gpu_id)
        assert found.answered_as["dtype"] == {"asked": dtype, "answered": measured} and found.support != "seen"
