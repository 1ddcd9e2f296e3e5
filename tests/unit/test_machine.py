"""The machine by hand: occupancy, schedules, each limit's arithmetic, residency."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernelcast as kc
from kernelcast.machine import limits
from kernelcast.machine.analyse import PIPELINES, analyse
from kernelcast.machine.limits import busiest_share, ctas_per_sm, longest_first
from kernelcast.ops.work import Work

H100 = kc.gpu("h100_sxm")
ONE = np.array([[1.0]])


def longest_first_exact(costs: Sequence[float], sms: int) -> float:
    """The heap itself: the finishing time of the last SM."""
    loads = [0.0] * sms
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def test_occupancy_is_the_scarcest_resource() -> None:
    # registers: 128 threads = 4 warps x 128 regs x 32 lanes = 16,384 of 65,536: 4 CTAs
    assert ctas_per_sm(Work(tasks=1.0, threads=128.0, registers_per_thread=128.0), H100) == 4
    # threads: 2048 / 1024 = 2
    assert ctas_per_sm(Work(tasks=1.0, threads=1024.0, registers_per_thread=16.0), H100) == 2
    # shared memory: 228 KiB / (100 KiB + 1 KiB reserved) = 2
    assert ctas_per_sm(Work(tasks=1.0, registers_per_thread=32.0, smem_bytes_per_cta=102400.0), H100) == 2
    # small CTAs stop at the hardware's 32
    assert ctas_per_sm(Work(tasks=1.0, threads=32.0, registers_per_thread=16.0), H100) == 32


def test_schedules_of_equal_tasks() -> None:
    # 133 tasks on 132 SMs: one SM does two, whatever the order
    assert busiest_share(Work(tasks=133.0), 132) == 2
    heap = Work(tasks=133.0, schedule="longest_first", longest_count=133.0)
    assert busiest_share(heap, 132) == 2
    assert busiest_share(Work(tasks=0.0, schedule="longest_first"), 132) == 0


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(1, 40))
def test_longest_first_never_above_the_heap(costs: list[int], sms: int) -> None:
    """The closed form is a lower limit of the real heap, and within the heap's own 4/3 guarantee of it."""
    mean = sum(costs) / len(costs)
    longest, shortest = max(costs), min(costs)
    closed = longest_first(len(costs), longest / mean, 1e-9, costs.count(longest), sms)
    rounded = longest_first(len(costs), longest / mean, shortest / mean, costs.count(longest), sms)
    exact = longest_first_exact(costs, sms) / mean
    assert float(closed) <= exact * (1 + 1e-9)
    assert exact <= float(closed) * 2
    assert float(rounded) <= float(closed) + shortest / mean + 1e-9
    if len(costs) <= sms:
        assert float(rounded) == pytest.approx(exact)


def test_fewer_tasks_than_sms_take_the_longest() -> None:
    # 136 chunks on 142 SMs, the last one of each request shorter: each SM has one, so the longest decides
    assert longest_first(136, 1.01, 0.79, 128, 142) == 1.01


def test_longest_first_is_close_on_causal_tiles() -> None:
    # 32 heads x 4 requests x 16 query tiles of 1 … 16 steps, as a causal prefill has them
    costs = [float(i + 1) for i in range(16) for _ in range(128)]
    mean = sum(costs) / len(costs)
    closed = float(longest_first(len(costs), 16 / mean, 1 / mean, 128, 132))
    assert closed == pytest.approx(longest_first_exact(costs, 132) / mean, rel=0.02)


def test_each_limit_by_hand() -> None:
    # one task on one SM of an H100 at 1.98 GHz (1.83 GHz for tensor cores)
    def limit(name: str, **demand: float) -> float:
        return float(limits.LIMITS[name](Work(tasks=1.0, **demand), H100, ONE, limits.Rotation()).item())  # type: ignore[arg-type]

    assert limit("tensor", tensor_flops=4096.0) == pytest.approx(1 / 1.83e9)
    assert limit("fma", fma_flops=256.0) == pytest.approx(1 / 1.98e9)
    assert limit("xu", xu_ops=16.0) == pytest.approx(1 / 1.98e9)
    assert limit("smem", smem_bytes=128.0) == pytest.approx(1 / 1.98e9)
    assert limit("l2", l2_bytes=64.0) == pytest.approx(1 / 1.98e9)  # one SM's port: 64 bytes a clock
    assert limit("issue", other_warp_instructions=4.0) == pytest.approx(1 / 1.98e9)
    assert limit("dram", streamed_bytes=3.35e12) == pytest.approx(1)
    assert limit("link", link_bytes=450e9) == pytest.approx(1)
    assert limit("launch", launches=2.0) == pytest.approx(2 * H100.launch_floor_s)


def test_l2_rate_of_all_sms_together() -> None:
    # 132 SMs x 64 B/clk would be 8448, but L2 gives 5120 B/clk: with every SM busy that binds
    work = Work(tasks=132.0, l2_bytes=64.0)
    assert limits.l2(work, H100, ONE, limits.Rotation()).item() == pytest.approx(132 * 64 / 5120 / 1.98e9)


def test_instructions_follow_from_demand() -> None:
    # mma.sync m16n8k16 does 4,096 FLOPs; wgmma m64n256k16 524,288 for four warps; 32 lanes of FMA 64
    work = Work(tasks=1.0, tensor_flops=524288.0, fma_flops=64.0)
    assert limits.warp_instructions(work, kc.gpu("a100_sxm")) == 128 + 1
    assert limits.warp_instructions(work, H100) == 4 + 1


def test_activations_stay_in_l2_until_they_outgrow_it() -> None:
    small = Work(tasks=1.0, activation_bytes=float(H100.l2_bytes))
    large = Work(tasks=1.0, activation_bytes=H100.l2_bytes + 1e6)
    assert limits.dram_bytes(small, H100, limits.Rotation()) == 0
    assert limits.dram_bytes(large, H100, limits.Rotation()) == 1e6


def test_inputs_that_take_turns_come_from_dram_but_bound_nothing() -> None:
    # a sixteenth of L2, which has two partitions: 8 sets still fit, 10 are a quarter more than fit, 9 half of the way
    work = Work(tasks=1.0, activation_bytes=H100.l2_bytes / 16, refetched_bytes=100.0)
    extra = [float(limits.extra_dram_bytes(work, H100, limits.Rotation(inputs=n))) for n in (1, 8, 9, 10)]
    assert extra == pytest.approx([100, 100, 100 + H100.l2_bytes / 32, 100 + H100.l2_bytes / 16])
    assert limits.dram_bytes(work, H100, limits.Rotation(inputs=12)) == 0
    # what exceeds L2 anyway is counted once
    large = Work(tasks=1.0, activation_bytes=3.0 * H100.l2_bytes)
    assert limits.dram_bytes(large, H100, limits.Rotation(inputs=4)) == 2.0 * H100.l2_bytes
    assert limits.extra_dram_bytes(large, H100, limits.Rotation(inputs=4)) == 1.0 * H100.l2_bytes


def test_a_cold_input_is_slower_than_one_just_made() -> None:
    call = kc.kernel("add", rows=2048, cols=4096)
    just_made, other = (kc.predict(call, H100, kc.Conditions(predictor="generic", input_rotation=n)) for n in (1, 8))
    assert other.time_s > 1.3 * just_made.time_s
    assert other.bound_s == just_made.bound_s
    with pytest.raises(kc.KernelcastError, match="input_rotation must be 1 or more"):
        kc.Conditions(input_rotation=0)


def test_residency_fades_with_rotation() -> None:
    work = Work(tasks=1.0, streamed_bytes=H100.l2_bytes / 6)
    share = [float(limits.resident_share(work, H100, limits.Rotation(), r)) for r in (1, 6, 9, 12, np.inf)]
    assert share == [1, 1, 0.5, 0, 0]


def test_what_comes_round_in_turn_is_lost_soon_after_it_no_longer_fits() -> None:
    # an eighth of L2 each: in one partition 8 sets fit, 9 are half of the way to a quarter more; in two half as many
    chips = (kc.gpu("l40s"), H100)
    assert [chip.l2_partitions for chip in chips] == [1, 2]
    for chip, rotations in zip(chips, ((8, 9, 10, 16), (4, 4.5, 5, 8)), strict=True):
        work = Work(tasks=1.0, streamed_bytes=chip.l2_bytes / 8)
        assert [float(limits.kept_share(work, chip, limits.Rotation(), n)) for n in rotations] == [1, 0.5, 0, 0]
    # 8 sets may still all be there, which is the bound; with two partitions they are expected to come from DRAM
    work, passed = Work(tasks=1.0, streamed_bytes=H100.l2_bytes / 8), limits.Rotation(weights=8.0)
    assert limits.dram_bytes(work, H100, passed) == 0
    assert limits.extra_dram_bytes(work, H100, passed) == H100.l2_bytes / 8


def test_the_weights_of_all_kernels_of_a_call_pass_between_two_uses() -> None:
    # 0.8 and 0.6 of L2: each fits alone, 1.4 together do not
    chip = kc.gpu("l40s")
    works = tuple(Work(tasks=1.0, streamed_bytes=share * chip.l2_bytes) for share in (0.8, 0.6))
    alone, each = limits.Rotation(weights=1.0), limits.Rotation(weights=1.0).of_each(works)
    assert [float(limits.kept_share(work, chip, alone, 1.0)) for work in works] == [1, 1]
    assert [float(limits.kept_share(work, chip, own, 1.0)) for work, own in zip(works, each, strict=True)] == [0, 0]
    assert each[0].beside_bytes == pytest.approx(0.6 * chip.l2_bytes)
    assert limits.Rotation().of_each(works) == [limits.Rotation()] * 2  # in a model nothing comes round


def test_a_limit_can_be_left_out() -> None:
    call = kc.Gemm(m=1, n=8192, k=8192)
    without = kc.predict(call, H100, kc.Conditions(without=("dram",)))
    assert "dram" not in without.limits
    assert without.bound_by != "dram"
    assert without.time_s < kc.predict(call, H100).time_s
    with pytest.raises(kc.KernelcastError, match=r"unknown limit 'drum'.*dram"):
        kc.predict(call, H100, kc.Conditions(without=("drum",)))


def test_parts_make_the_bound() -> None:
    p = kc.predict(kc.kernel("moe", tokens=512, hidden=4096, inter=14336, experts=8, topk=2), H100)
    assert p.bound_s == pytest.approx(sum(max(phase.limits.values()) for phase in p.kernels))
    for name, total in p.limits.items():
        assert total == pytest.approx(sum(phase.limits.get(name, 0.0) for phase in p.kernels))


def test_best_few_candidates_in_order() -> None:
    from kernelcast.machine.analyse import overlapped
    from kernelcast.ops.base import columns_of
    from kernelcast.ops.gemm import Gemm

    work = Gemm.work(columns_of([kc.Gemm(m=777, n=3333, k=2222)]), H100)[0]
    found = analyse(work, H100, keep=3)
    scores = [float(overlapped(a.busiest_limits)[0]) for a in found]
    assert len(found) == 3 and scores == sorted(scores)
    assert all(a.limits.shape == (len(PIPELINES), 1) for a in found)
