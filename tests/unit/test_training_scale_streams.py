"""Streams and schedules with their arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.inference.deployment import Layout
from kernelcast.schedule.timeline import Collective, schedule_streams
from kernelcast.training.data_parallel import RankParameter, buckets
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.pipeline import PipelineTimes, balanced, most_in_flight, orders, run


def test_what_the_backward_pass_hides() -> None:
    # four kernels of 1 s; a collective of 1.5 s after the second: beside the third and half of the fourth
    found = schedule_streams(np.ones(4), np.zeros(4), [Collective("all_reduce", 1.5, 1, 4)], interference=0.0)
    assert found.ends_s.tolist() == [1, 2, 3, 4]
    assert (found.end_s, found.exposed_s, found.overlapped_s) == (4, 0, 1.5)
    # 3 s: one more than is left to run
    found = schedule_streams(np.ones(4), np.zeros(4), [Collective("all_reduce", 3.0, 1, 4)], interference=0.0)
    assert (found.end_s, found.exposed_s, found.overlapped_s) == (5, 1, 2)


def test_collectives_queue_and_kernels_wait() -> None:
    jobs = [Collective("a", 2.0, -1, 1), Collective("b", 1.0, -1, 2)]
    found = schedule_streams(np.ones(3), np.zeros(3), jobs, interference=0.0)
    # a from 0 to 2, b to 3; kernel 0 at 0, kernel 1 waits from 1 to 2, kernel 2 runs from 3
    assert found.starts_s.tolist() == [0, 2, 3]
    assert found.job_ends_s.tolist() == [2, 3]
    assert (found.exposed_s, found.overlapped_s) == (1, 2)


def test_kernels_are_slower_beside_collectives() -> None:
    # at 80% of its speed for 2 s a kernel does 1.6 s of its 3 s; the rest takes 1.4 s
    found = schedule_streams(np.array([1.0, 3.0]), np.zeros(2), [Collective("a", 2.0, 0, 2)], interference=0.2)
    assert found.end_s == pytest.approx(1 + 2 + 1.4)
    assert found.slowed_s == pytest.approx(0.4)
    # one that ends beside it: 1 / 0.8
    found = schedule_streams(np.array([1.0, 1.0]), np.zeros(2), [Collective("a", 2.0, 0, 2)], interference=0.2)
    assert found.compute_end_s == pytest.approx(1 + 1.25) and found.end_s == 3


def test_parts_of_a_run_add_up() -> None:
    rng = np.random.default_rng(0)
    busy, launched = rng.uniform(0.5, 2, 60), np.cumsum(rng.uniform(0, 2, 60))
    jobs = [Collective("j", float(t), int(a), int(min(60, a + b))) for t, a, b in
            zip(rng.uniform(0, 3, 20), rng.integers(-1, 55, 20), rng.integers(1, 20, 20), strict=True)]  # fmt: skip
    found = schedule_streams(busy, launched, jobs, interference=0.1)
    assert found.busy_s + found.host_idle_s + found.slowed_s + found.exposed_s == pytest.approx(found.end_s)
    assert found.exposed_s + found.overlapped_s == pytest.approx(found.jobs_s)


def table(schedule: str, stages: int, micro: int, virtual: int = 1, send: float = 0.0, forward: float = 1.0) -> float:
    parts = stages * virtual
    timing = PipelineTimes(
        [forward / virtual] * parts, [2.0 / virtual] * parts, [2.0 / virtual] * parts, [send] * (parts - 1)
    )
    return max(run(orders(schedule, stages, micro, virtual), timing, micro).ends_s)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(2, 1), (4, 4), (4, 16), (8, 3)])
def test_bubble(schedule: str, stages: int, micro: int) -> None:
    # m + p - 1 slots of forward and backward (1 + 2 s): a bubble of (p - 1) / (m + p - 1) (Huang et al. 2019)
    time = table(schedule, stages, micro)
    assert time == pytest.approx((micro + stages - 1) * 3)
    assert 1 - micro * 3 / time == pytest.approx((stages - 1) / (micro + stages - 1))


@pytest.mark.parametrize(("stages", "micro", "virtual"), [(4, 8, 2), (4, 16, 4), (2, 2, 3)])
def test_interleaving_divides_the_bubble(stages: int, micro: int, virtual: int) -> None:
    # (p - 1) / v slots of bubble beside m slots of work (Narayanan et al. 2021)
    assert table("interleaved", stages, micro, virtual) == pytest.approx((micro + (stages - 1) / virtual) * 3)


def test_one_micro_batch_passes_stages_in_turn() -> None:
    # forward through 4 stages and back, three links each way
    assert table("gpipe", 4, 1, send=0.5) == pytest.approx(4 * (1 + 2) + 6 * 0.5)


def test_unequal_stages() -> None:
    # stages of 1 and 2 s forward, 2 and 4 s backward: the second works without a break from 1 s on, then the first
    # has its last backward pass
    timing = PipelineTimes([1, 2], [2, 4], [2, 4], [0.0])
    assert max(run(orders("1f1b", 2, 5), timing, 5).ends_s) == pytest.approx(1 + 5 * 6 + 2)


@pytest.mark.parametrize(("stages", "micro"), [(4, 8), (4, 2), (8, 8)])
def test_micro_batches_in_flight(stages: int, micro: int) -> None:
    for stage, order in enumerate(orders("1f1b", stages, micro)):
        assert most_in_flight(order) == min(stages - stage, micro)
    assert all(most_in_flight(order) == micro for order in orders("gpipe", stages, micro))


def test_buckets_fill_in_the_order_of_readiness() -> None:
    weights = [RankParameter(10, ready, 0, "dp", "bf16") for ready in (7, 3, 5, 9)]
    found = buckets(weights, 20, "all_reduce")
    # 10 at op 3 and 10 at op 5 fill the first; 7 and 9 the second
    assert [(m.bytes, m.ready) for m in found] == [(20, 5), (20, 9)]
    assert [m.bytes for m in buckets(weights, 25, "all_reduce")] == [30, 10]


def test_balanced() -> None:
    assert balanced([1, 1, 1, 1], 2) == [2, 2]
    assert balanced([1, 1, 1, 1, 1, 1, 4], 2) == [5, 2] or balanced([1, 1, 1, 1, 1, 1, 4], 2) == [6, 1]
    assert balanced([3, 1, 1, 1], 2) == [1, 3]
    assert balanced([1.0] * 36, 4) == [9] * 4


def test_groups_and_nodes() -> None:
    plan = TrainingLayout(dp=8, tp=4, pp=2, gpus_per_node=8)
    # tp ranks are neighbours; dp ranks are 4 apart: two of a node
    assert (plan.group("tp").world, plan.group("tp").stride) == (4, 1)
    assert (plan.group("dp").world, plan.group("dp").stride) == (8, 4)
    assert plan.group("dp").sent_bytes("all_reduce", 800) == 2 * 7 / 8 * 800


@pytest.mark.parametrize(("name", "gpus", "nodes"), [
    ("gb200", 72, 1), ("gb200", 144, 2), ("gb300", 256, 4), ("h100_sxm", 16, 2), ("gb10", 16, 2),
])  # fmt: skip
def test_a_rack_of_nvl72_has_72_gpus(name: str, gpus: int, nodes: int) -> None:
    """A group of 256 divides over racks of at most 72: 64 of each of four. DGX Spark (GB10) has no NVLink at all."""
    chip = kc.gpu(name)
    assert TrainingLayout(dp=gpus).group("dp").nodes(chip) == nodes
    layout = Layout(tp=1, dp=gpus, ep=gpus)
    assert layout.near(chip, gpus) == (nodes == 1)
    assert layout.fabric(chip, gpus) == (None if nodes == 1 else "ib_ndr")
    twice = kc.gpu("gb200").replace(link_gpus=144)  # as a what-if
    assert TrainingLayout(dp=144).group("dp").nodes(twice) == 1
