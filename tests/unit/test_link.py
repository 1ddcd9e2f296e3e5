"""Links measured between GPUs: what times say, arithmetic shown; files of fabrics; the measuring, over host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernelcast as kc
from kernelcast.collect.link import SUSTAINED, CollectiveTime, Link, fitted, measure, worlds, write_link
from kernelcast.errors import KernelcastError
from kernelcast.hardware import fabric, fabric_type, gpu, load_gpu

LATENCY_S, START_S, RATE = 1.5e-6, 6e-6, 300e9


def taken(op: str, size: int, world: int, rate: float = RATE) -> CollectiveTime:
    """A start, messages in turn, and bytes over a rate."""
    one = CollectiveTime(op, size, world, 0.0)
    return CollectiveTime(op, size, world, START_S + LATENCY_S * one.steps + one.sent_bytes / rate)


def campaign(*counts: int, rates: dict[int, float] | None = None) -> list[CollectiveTime]:
    ops = ("all_reduce", "all_gather", "send_recv")
    return [taken(op, size, world, (rates or {}).get(world, RATE))
            for world in counts for op in ops for size in (1, 2**20, 2**30)]  # fmt: skip


def test_what_a_gpu_sends_and_waits_for() -> None:
    assert [CollectiveTime(op, 800, 8, 1.0).steps for op in ("all_reduce", "all_gather", "send_recv")] == [14, 7, 1]
    assert [CollectiveTime(op, 800, 8, 1.0).sent_bytes for op in ("all_reduce", "all_gather", "send_recv")] == [
        1400,
        700,
        800,
    ]
    assert [worlds(n) for n in (2, 3, 8, 6)] == [[2], [2, 3], [2, 4, 8], [2, 4, 6]]


def test_latency_is_the_slope_over_messages_and_rates_are_the_best_of_each_number_of_gpus() -> None:
    found = Link.of(campaign(2, 4, 8, rates={8: 250e9}))
    assert found.latency_s == pytest.approx(LATENCY_S, rel=1e-3)
    assert list(found.rates) == [2, 4, 8]
    assert found.rates[2] == pytest.approx(RATE, rel=0.01) and found.rates[8] == pytest.approx(250e9, rel=0.01)
    # with a pair alone all-reduce has two messages and the others one
    assert Link.of(campaign(2)).latency_s == pytest.approx(LATENCY_S, rel=1e-3)


def test_noise_leaves_a_latency_that_can_be() -> None:
    flat = [
        CollectiveTime("all_reduce", 1, world, 10e-6 - world * 1e-8) for world in (2, 4)
    ]  # more messages, less time
    assert 0 < Link.of(flat).latency_s <= 10e-6 / 6
    steep = [CollectiveTime("all_reduce", 1, 2, 1e-6), CollectiveTime("all_reduce", 1, 4, 60e-6)]
    assert Link.of(steep).latency_s <= 1e-6 / 2


def test_the_file_is_a_fabric_wherever_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "my_link.toml"
    write_link(fitted(campaign(2, 8), "nvlink4", "8 GPUs"), path)
    found = fabric(str(path))
    assert found.bytes_per_s == pytest.approx(RATE / SUSTAINED, rel=0.01)
    assert found.latency_s == pytest.approx(LATENCY_S, rel=1e-3)
    assert fabric_type(str(path)) == "nvlink4" and found.source.startswith("measured")
    # slower than the H200's 450 GB/s: an all-reduce of 1 GiB takes longer, in proportion to the link
    for dtype in ("bf16", "fp16"):
        call = {"bytes": 2**30, "world": 8, "dtype": dtype, "stack": "nccl"}
        own = kc.predict(kc.kernel("all_reduce", **call), "h200_sxm")
        measured = kc.predict(kc.kernel("all_reduce", **call, fabric=str(path)), "h200_sxm")
        assert measured.time_s / own.time_s == pytest.approx(450e9 * SUSTAINED / RATE, rel=0.05)
        assert measured.support == own.support
    # as the link of a GPU file, beside it
    (tmp_path / "mine.toml").write_text('base = "h200_sxm"\nname = "mine"\nlink_kind = "my_link.toml"\n')
    mine = load_gpu(tmp_path / "mine.toml")
    assert kc.predict(kc.kernel("all_reduce", **call), mine).limits["link"] == pytest.approx(measured.limits["link"])
    # between nodes
    from kernelcast.inference.deployment import Layout

    assert Layout(tp=16, between_nodes=str(path)).fabric(gpu("h200_sxm"), 16) == str(path)


def test_fabric_files_that_will_not_do_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match="no fabric file"):
        kc.kernel("all_reduce", bytes=1, world=2, fabric=str(tmp_path / "none.toml"))
    path = tmp_path / "odd.toml"
    for text, told in (
        ('like = "nvlink4"', "missing bytes_per_s, latency_s, source"),
        ('like = "nvlink44"\nbytes_per_s = 1e9\nlatency_s = 1e-6\nsource = "x"', "unknown fabric 'nvlink44'"),
        ('like = "nvlink4"\nbytes_per_s = 0\nlatency_s = 1e-6\nsource = "x"', "must be positive"),
        ("like = ", "not readable as TOML"),
    ):
        path.write_text(text)
        with pytest.raises(KernelcastError, match=told):
            fabric(str(path))


@pytest.mark.slow
def test_two_processes_measure_over_host_memory() -> None:
    told: list[str] = []
    found = measure(2, "gloo", lambda done, total, note: told.append(note), sizes=(2**10, 2**20))
    assert {(one.op, one.bytes) for one in found} == {
        (op, size) for op in ("all_reduce", "all_gather", "send_recv") for size in (2**10, 2**20)
    }
    assert all(one.world == 2 and 0 < one.seconds < 1 for one in found)
    assert Link.of(found).rates[2] > 1e6
    assert told[0] == "2 GPUs"
