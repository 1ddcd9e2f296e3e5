"""Each reason on a planted case: it holds there, explains the right time, and not where its threshold is not met."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelcast.diagnose import reasons
from kernelcast.diagnose.measured import LaunchGrid
from kernelcast.diagnose.metrics import CallForecast, CallMetrics, unaligned_sizes

GEMM = {"op": "gemm", "m": 4096, "n": 4096, "k": 4096, "dtype": "bf16", "layout": "tn"}


def predicted(time_us: float, **given: Any) -> CallForecast:
    """A call bound by tensor cores that runs at 80% of its bound, unless told otherwise."""
    found = CallForecast(
        time_us=time_us, low_us=0.95 * time_us, high_us=1.1 * time_us, ceiling_us=0.9 * time_us, bound_us=0.8 * time_us,
        limits_us={"tensor": 0.8 * time_us, "dram": 0.1 * time_us, "launch": 0.7}, support="seen", flops=1e9,
        moved_bytes=1e8, dram_bytes=1e7, refetched_bytes=0.0,
        tile={"tile_m": 128.0, "tile_n": 256.0, "split_k": 1.0}, tasks=512.0, padding=0.0,
    )  # fmt: skip
    return replace(found, **given)


def facts(measured_us: float = 100.0, **given: Any) -> CallMetrics:
    found = CallMetrics(
        op="gemm", category="matmul", parameters=GEMM, measured_us=measured_us, grid=LaunchGrid(), sm_count=132,
        dram_bytes_per_s=4.8e12, forecast=predicted(100.0),
    )  # fmt: skip
    return replace(found, **given)


def vector(measured_us: float, **given: Any) -> CallMetrics:
    """An element-wise kernel that DRAM binds."""
    limits = {"dram": 0.8 * measured_us, "launch": 0.7}
    told = predicted(measured_us, limits_us=limits, dram_bytes=0.5 * measured_us * 4.8e6)
    found = facts(measured_us, op="add", category="pointwise", parameters={"op": "add", "dtype": "bf16"}, forecast=told)
    return replace(found, **given)


def names(case: CallMetrics) -> list[str]:
    return [reason.name for reason in reasons.reasons(case)]


def test_a_call_at_its_best_has_no_reason() -> None:
    limits = {"tensor": 60.0, "dram": 20.0, "launch": 0.7}
    assert names(facts(100.0, forecast=predicted(100.0, limits_us=limits))) == []


# ---- tail wave, padding, tile ----


def test_one_wave_plus_one_tile_idles_half_the_time() -> None:
    grid = LaunchGrid(ctas=132, tasks=133, slots=132, ctas_per_sm=1, tile_m=128, tile_n=256)
    found = reasons.tail_wave(facts(200.0, grid=grid))
    assert found is not None
    # two rounds of 132 for 133 tiles: 1 - 133 / 264 = 49.6%
    assert found.explained_us == pytest.approx(200.0 * (1 - 133 / 264))
    assert "133 tiles of 128x256 on 132 SMs: 1.01 waves, the last 1% full" in found.detail


@pytest.mark.parametrize("tasks", [132, 264, 66, 13_200 + 132 * 9 + 120])
def test_no_tail_in_whole_waves_in_part_of_one_and_over_many(tasks: int) -> None:
    grid = LaunchGrid(ctas=tasks, tasks=tasks, slots=132, ctas_per_sm=1, tile_m=128, tile_n=256)
    assert reasons.tail_wave(facts(200.0, grid=grid)) is None


def test_a_tail_does_not_matter_where_memory_binds() -> None:
    grid = LaunchGrid(ctas=133, tasks=133, slots=132, ctas_per_sm=1)
    told = predicted(100.0, limits_us={"dram": 80.0, "tensor": 20.0})
    assert reasons.tail_wave(facts(grid=grid, forecast=told)) is None


def test_a_tail_cannot_explain_more_than_the_bound_leaves() -> None:
    grid = LaunchGrid(ctas=132, tasks=133, slots=132, ctas_per_sm=1)
    found = reasons.tail_wave(facts(100.0, grid=grid))
    assert found is not None and found.explained_us == pytest.approx(20.0)  # the bound is 80


def test_padding() -> None:
    found = reasons.padding(facts(200.0, grid=LaunchGrid(tile_m=192, tile_n=192, padding=0.25)))
    assert found is not None and found.explained_us == pytest.approx(50.0)
    assert "192x192 over 4096 x 4096: 25%" in found.detail
    assert reasons.padding(facts(200.0, grid=LaunchGrid(padding=0.05))) is None
    assert reasons.padding(vector(200.0)) is None


def test_wrong_tile() -> None:
    """4 rounds of 64x64 are as much as 1 of 128x128; 8 are twice that."""
    grid = LaunchGrid(ctas=1056, tasks=1056, slots=132, ctas_per_sm=1, tile_m=64, tile_n=64)
    told = predicted(100.0, tile={"tile_m": 128.0, "tile_n": 128.0, "split_k": 1.0}, tasks=132.0)
    found = reasons.wrong_tile(facts(200.0, grid=grid, forecast=told))
    assert found is not None and found.explained_us == pytest.approx(100.0)
    assert "2.00 times the work of 128x128" in found.detail
    assert reasons.wrong_tile(facts(99.0, grid=grid, forecast=told)) is None  # as fast as any


# ---- sizes and formats ----


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({}, set()),
        ({"k": 4095}, {"k"}),
        ({"n": 4095}, {"n"}),
        ({"m": 4095}, set()),  # rows of A are k long
        ({"m": 4095, "layout": "nt"}, {"m"}),
        ({"k": 4095, "layout": "nt"}, set()),
        ({"n": 4100, "dtype": "fp32"}, set()),  # 16 bytes are four numbers of fp32
        ({"k": 4104, "dtype": "fp8"}, {"k"}),  # and sixteen of fp8
    ],
)
def test_which_sizes_are_unaligned(changes: dict[str, Any], bad: set[str]) -> None:
    assert set(unaligned_sizes("gemm", {**GEMM, **changes})) == bad


def test_unaligned_sizes_explain_what_padding_them_would_win() -> None:
    case = facts(500.0, parameters={**GEMM, "k": 4095}, aligned=predicted(100.0), grid=LaunchGrid(align_elements=1))
    found = reasons.unaligned(case)
    assert found is not None and found.explained_us == pytest.approx(400.0)
    assert "k=4095: no multiple of 8 in bf16; the kernel loads 1 number at a time" in found.detail
    assert "pad k to a multiple of 8" in found.advice
    assert reasons.unaligned(replace(case, aligned=predicted(490.0))) is None


def test_fp32_product_in_a_bf16_run() -> None:
    case = facts(2700.0, parameters={**GEMM, "dtype": "fp32"}, narrow=predicted(160.0), run_dtype="bf16")
    found = reasons.dtype_fallback(case)
    assert found is not None and found.explained_us == pytest.approx(2540.0)
    assert "fp32 on vector units" in found.detail and "while the run is in bf16" in found.detail


def test_a_kernel_that_computes_in_fp32_over_narrow_tensors() -> None:
    case = facts(1000.0, op="conv2d", category="conv", grid=LaunchGrid(dtype="fp32"))
    found = reasons.dtype_fallback(case)
    assert found is not None and found.explained_us == pytest.approx(910.0)  # the ceiling is 90
    assert "channels_last" in found.advice


def test_no_fallback_in_bf16_nor_of_vector_kernels() -> None:
    assert reasons.dtype_fallback(facts()) is None
    assert reasons.dtype_fallback(vector(10.0, parameters={"op": "add", "dtype": "fp32"})) is None


# ---- how much of the GPU works ----


def test_split_k_missing() -> None:
    grid = LaunchGrid(ctas=33, tasks=33, slots=33, ctas_per_sm=1, tile_m=64, tile_n=64)
    told = predicted(20.0, bound_us=5.0)
    found = reasons.split_k(facts(100.0, grid=grid, forecast=told))
    assert found is not None and found.explained_us == pytest.approx(75.0)  # 99 of 132 SMs do nothing
    assert "split k into 4 parts" in found.advice
    assert reasons.split_k(facts(grid=replace(grid, split_k=2))) is None
    assert reasons.split_k(facts(grid=grid, parameters={**GEMM, "k": 256})) is None
    # and it is not told twice
    assert names(facts(100.0, grid=grid, forecast=told))[:1] in (["unexplained"], ["split-K missing"])
    assert "low occupancy" not in names(facts(100.0, grid=grid, forecast=told))


def test_too_few_ctas() -> None:
    told = predicted(200.0, bound_us=5.0)
    found = reasons.few_ctas(vector(246.0, grid=LaunchGrid(ctas=8, tasks=8, slots=132), forecast=told))
    assert found is not None and found.explained_us == pytest.approx(246.0 * (1 - 8 / 132))
    assert "8 CTAs on 132 SMs" in found.detail


def test_too_few_warps_where_the_counter_says_so() -> None:
    grid = LaunchGrid(ctas=5000, tasks=5000, slots=264, ctas_per_sm=2, occupancy=0.9)
    told = predicted(50.0, ceiling_us=40.0)
    case = vector(100.0, grid=grid, forecast=told, counters={"occupancy": 0.15})
    found = reasons.few_warps(case)
    assert found is not None and found.explained_us == pytest.approx(50.0)  # half of the 30% that it takes
    assert reasons.few_warps(replace(case, counters={})) is None
    assert reasons.few_warps(facts(grid=replace(grid, occupancy=0.19))) is None  # products hold few warps


# ---- memory ----


def test_memory_beside_its_peak_has_nothing_to_win() -> None:
    told = predicted(100.0, dram_bytes=0.85 * 100e-6 * 4.8e12)
    found = reasons.memory_bound(vector(100.0, forecast=told))
    assert found is not None and found.explained_us == 0.0
    assert "408.0 MB at 85% of DRAM's peak" in found.detail
    assert reasons.memory_bound(vector(100.0)) is None  # at 50%


def test_no_kernel_is_told_to_run_above_a_peak() -> None:
    warm = reasons.memory_bound(vector(100.0, forecast=predicted(100.0, dram_bytes=2.78 * 100e-6 * 4.8e12)))
    assert warm is not None and warm.name == "in L2" and "%" not in warm.detail
    other = reasons.compute_bound(facts(100.0, forecast=predicted(300.0, limits_us={"tensor": 265.0})))
    assert other is not None and "2.6 times the peak" in other.detail and "measured on" in other.advice


def test_bytes_that_come_twice() -> None:
    """30 + 60 us of DRAM beside 50 us of arithmetic: 40 us more than it takes without."""
    limits = {"tensor": 50.0, "dram": 30.0}
    told = predicted(90.0, limits_us=limits, bound_us=50.0, dram_bytes=30e-6 * 4.8e12, refetched_bytes=60e-6 * 4.8e12)
    found = reasons.l2_misses(facts(100.0, forecast=told))
    assert found is not None and found.explained_us == pytest.approx(40.0)
    hidden = replace(told, limits_us={"tensor": 95.0, "dram": 30.0})
    assert reasons.l2_misses(facts(100.0, forecast=hidden)) is None


def test_counted_bytes_beat_expected_ones() -> None:
    told = predicted(90.0, limits_us={"tensor": 50.0, "dram": 30.0}, bound_us=50.0, dram_bytes=30e-6 * 4.8e12)
    case = facts(100.0, forecast=told, counters={"dram_bytes": 80e-6 * 4.8e12, "l2_hit_share": 0.4})
    found = reasons.l2_misses(case)
    assert found is not None and found.explained_us == pytest.approx(30.0)
    assert found.detail.startswith("40% of its reads hit L2")


def test_a_row_of_kernels_that_could_be_one() -> None:
    found = reasons.unfused(vector(20.0, chain=6, chain_saved_us=20.0))
    assert found is not None and found.explained_us == 20.0
    assert "one of 6 element-wise kernels" in found.detail and "torch.compile" in found.advice
    assert reasons.unfused(vector(20.0, chain=6, chain_saved_us=0.0)) is None  # the one that stays
    assert reasons.unfused(vector(2.0, chain=6, chain_saved_us=2.0)) is None  # launch-bound instead


def test_strided_access() -> None:
    case = vector(54.0, vector=predicted(7.0), forecast=predicted(54.0, bound_us=5.0))
    found = reasons.strided(case)
    assert found is not None and found.explained_us == pytest.approx(47.0)
    assert reasons.strided(vector(54.0)) is None


def test_tensor_cores_beside_their_peak() -> None:
    found = reasons.compute_bound(facts(100.0))
    assert found is not None and found.explained_us == 0.0
    assert "tensor cores at 80% of their peak; the best kernels of this op reach 89%" in found.detail


# ---- launches ----


def test_a_tiny_kernel_is_its_launch() -> None:
    told = predicted(1.1, limits_us={"dram": 0.01, "launch": 0.7}, dram_bytes=0.0)
    case = vector(0.86, forecast=told, chain=200, chain_saved_us=0.86, idle_us=0.9)
    found = reasons.launch_bound(case)
    assert found is not None and found.explained_us == pytest.approx(0.85)
    assert "waits 0.9 µs" in found.detail and "one of 200 kernels" in found.detail
    assert names(case) == ["launch-bound"]


def test_a_short_kernel_with_much_work_is_not() -> None:
    told = predicted(4.0, limits_us={"tensor": 3.0, "launch": 0.7})
    assert reasons.launch_bound(facts(4.0, forecast=told)) is None


def test_a_run_that_waits_for_the_host() -> None:
    found = reasons.idle(850.0, 1000.0)
    assert found is not None and found.name == "launch-bound" and found.explained_us == 850.0
    assert "85% of the time" in found.detail
    assert reasons.idle(50.0, 1000.0) is None
    assert reasons.idle(0.0, 0.0) is None


# ---- together ----


def test_what_no_rule_explains_is_said_to_be_so() -> None:
    case = facts(150.0, forecast=predicted(100.0, limits_us={"tensor": 50.0}))
    assert names(case) == ["unexplained"]
    assert reasons.reasons(case)[0].explained_us == pytest.approx(50.0)


def test_reasons_come_by_what_they_explain() -> None:
    grid = LaunchGrid(ctas=132, tasks=133, slots=132, ctas_per_sm=1, tile_m=128, tile_n=256, padding=0.1)
    found = reasons.reasons(facts(300.0, grid=grid))
    assert [reason.name for reason in found][:2] == ["tail wave", "padding"]
    assert found[0].explained_us > found[1].explained_us


def test_without_a_prediction_only_what_the_launch_says() -> None:
    case = facts(100.0, op="", forecast=None, parameters={}, grid=LaunchGrid(ctas=1024, tasks=1024, dtype="fp32"))
    assert names(case) == ["dtype fallback"]


def test_calls_in_turn_add_up() -> None:
    both = CallForecast.sum([(predicted(100.0), 2.0), (predicted(10.0, limits_us={"dram": 8.0}), 1.0)])
    assert both.time_us == pytest.approx(210.0)
    assert both.limits_us["dram"] == pytest.approx(28.0)
    assert both.bound_by == "tensor"
