"""Measuring, as far as it goes without a GPU: choosing calls, resuming, the budget, the table, kernel names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.collect.calibrate import calibrate, next_calls
from kernelcast.collect.calibrate.fit import farthest_first, prior_of
from kernelcast.collect.calibrate.residuals import predictions
from kernelcast.collect.choose import LONGEST_S, PlannedCall, choose, most_informative
from kernelcast.collect.families import FAMILIES, SHARES
from kernelcast.collect.schema import note_of
from kernelcast.collect.session import DeviceLostError, Session, read_lines
from kernelcast.collect.table import calls_again, read_records, write_table
from kernelcast.collect.timing import kernels_of
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration
from kernelcast.forecast.prior import CallPoints, PriorScales
from kernelcast_lab.data import read_canonical

H200 = kc.gpu("h200_sxm")


class FakeGpu:
    """Takes a second a call; cannot run some ops."""

    def __init__(self, broken: str = "", lost: str = "") -> None:
        self.now, self.measured, self.broken, self.lost = 0.0, [], broken, lost  # type: ignore[var-annotated]

    def clock(self) -> float:
        return self.now

    def measure(self, wanted: PlannedCall) -> dict[str, Any]:
        self.now += 1.0
        self.measured.append(wanted.key)
        if wanted.call.op == self.lost:
            raise DeviceLostError("misaligned address")
        if wanted.call.op == self.broken:
            raise RuntimeError("out of\nmemory")
        return {"latency_us": 12.5, "spread": 0.01, "replays": 5, "launches": 8, "rotation": 4, "kernel_source": "fake"}

    def describe(self, batch: Sequence[PlannedCall]) -> list[dict[str, Any]]:
        return [{"kernels": 1, "kernel_name": f"k_{p.call.op}", "grid": "1x2x3", "block": "128x1x1"} for p in batch]


def test_calls_are_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert choose(H200, 200) == choose(H200, 200)
    assert {p.key for p in choose(H200, 200)} != {p.key for p in choose(H200, 200, seed=1)}


def test_choosing_has_every_family_by_its_share_and_no_call_twice() -> None:
    found = choose(H200, 1000)
    counts = Counter(p.family for p in found)
    assert set(counts) == set(FAMILIES)
    assert counts["gemm"] == pytest.approx(1000 * SHARES["gemm"] / sum(SHARES.values()), abs=2)
    assert len({p.key for p in found}) == len(found)
    # any prefix is mixed: the first tenth has the large families already
    assert {"gemm", "gemm-fp8", "attention", "pointwise", "moe-config"} <= {p.family for p in found[:100]}


def test_more_calls_contain_the_fewer() -> None:
    assert {p.key for p in choose(H200, 300)} <= {p.key for p in choose(H200, 1200)}


def test_chosen_calls_fit_the_gpu_and_our_patience() -> None:
    calls = [p.call for p in choose(H200, 300)]
    times = [found.time_s for found in kc.predict_many(calls, H200, kc.Conditions(predictor="generic"))]
    assert max(times) <= LONGEST_S
    gpus_without_fp8 = choose(kc.gpu("a100_sxm"), 300)
    assert not [p for p in gpus_without_fp8 if p.call.op == "gemm" and p.call.dtype == "fp8"]


def test_sizes_are_real_and_random_aligned_and_not() -> None:
    gemms = [p.call for p in choose(H200, 400, only=("gemm",))]
    odd = np.mean([call.n % 8 != 0 or call.k % 8 != 0 for call in gemms])  # type: ignore[attr-defined]
    assert 0.02 < odd < 0.25
    assert {(call.n, call.k) for call in gemms} & {(4096, 14336), (28672, 4096)}  # type: ignore[attr-defined]


def test_warm_calls_come_after_the_cold_ones() -> None:
    found = choose(H200, 100, warm_share=0.2)
    warm = [p.warm for p in found]
    assert warm == sorted(warm)
    assert 8 <= sum(warm) <= 35 and 90 <= len(warm) - sum(warm) <= 110
    assert len({p.key for p in found}) == len(found)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(KernelcastError, match="unknown family 'gem'"):
        choose(H200, 10, only=("gem",))
    with pytest.raises(KernelcastError, match="no family is left"):
        choose(H200, 10, only=("gemm",), without=("gemm",))


def test_the_farthest_points_come_first() -> None:
    points = np.array([[0.0], [1.0], [2.0], [9.0], [-7.0]])
    assert farthest_first(points, 3) == [1, 3, 4]  # the mean is 1, then 8 away, then 8 away


@pytest.fixture(scope="module")
def candidates() -> list[PlannedCall]:
    return choose(H200, 400, only=("gemm", "norm"))


def columns_of(calls: Sequence[PlannedCall]) -> dict[str, Any]:
    """As a table has them."""
    names = dict.fromkeys(name for wanted in calls for name in wanted.parameters)
    found = {name: np.empty(len(calls), dtype=object) for name in names}
    for at, wanted in enumerate(calls):
        for name, value in wanted.parameters.items():
            found[name][at] = value
    return found


def calibrated(calls: Sequence[PlannedCall]) -> Calibration:
    """As if these were measured, a fifth slower than the forecast."""
    times = [found.time_s for found in kc.predict_many([wanted.call for wanted in calls], H200)]
    found, _ = calibrate({**columns_of(calls), "latency_us": 1.2e6 * np.array(times)}, H200)
    return found


def left_by(
    chosen: Sequence[PlannedCall], candidates: Sequence[PlannedCall], known: Calibration | None = None
) -> float:
    """The error in % that is expected of the candidates once ``chosen`` were measured too, by one inverse."""
    base, taken, sizes = kc.Conditions(), {p.key for p in chosen}, []
    for name, (rows, at) in predictions(columns_of(candidates), H200, base.loaded_predictor, base).items():
        family = known.families.get(name) if known else None
        prior = family.prior if family else prior_of(rows, base.loaded_predictor)
        setting = family.setting if family else PriorScales()
        place, leaning, code = rows.placed(prior).position, rows.leaning, rows.code
        words, told = rows.shared, np.flatnonzero([candidates[row].key in taken for row in at])
        if family:
            place, leaning = np.concatenate([place, family.position]), np.concatenate([leaning, family.leaning])
            code, words = np.concatenate([code, family.code + len(words)]), (*words, *family.groups)
            told = np.concatenate([told, np.arange(len(rows), len(code))])
        calls = CallPoints.of(place, leaning, words, code)
        full, noise = prior.covariance(calls, calls, setting), prior.noise * setting.noise
        among = full[np.ix_(told, told)] + noise * np.eye(len(told))
        left = np.diag(full - full[:, told] @ np.linalg.solve(among, full[told]))[: len(rows)]
        sizes.append(np.sqrt(2 / np.pi) * rows.width * np.sqrt(left + noise))
    return float(100 * np.mean(np.concatenate(sizes)))


def test_the_most_telling_calls_leave_less_error_than_random_ones(candidates: list[PlannedCall]) -> None:
    chosen, told = most_informative(candidates, H200, 40)
    assert len(chosen) == 40 == len({p.key for p in chosen}) and told.rows.tolist() == [
        candidates.index(p) for p in chosen
    ]
    assert {p.family for p in chosen} == {"gemm", "norm"}
    assert told.after < 0.7 * told.before
    assert left_by(chosen, candidates) == pytest.approx(told.after)
    assert left_by((), candidates) == pytest.approx(told.before)
    random = [candidates[:40], candidates[40:80], candidates[-40:]]
    assert all(told.after < 0.97 * left_by(calls, candidates) for calls in random)


def test_any_prefix_of_the_most_telling_calls_is_the_choice_of_so_many(candidates: list[PlannedCall]) -> None:
    many, _ = most_informative(candidates, H200, 40)
    left = []
    for count in (1, 5, 20, 40):
        few, told = most_informative(candidates, H200, count)
        assert few == many[:count]
        left.append(told.after)
    assert left == sorted(left, reverse=True) and len(set(left)) == 4
    # the first calls tell most: five of forty do more than the last twenty
    assert told.before - left[1] > left[2] - left[3]


def test_asking_for_more_than_there_are_gives_each_once(candidates: list[PlannedCall]) -> None:
    chosen, _ = most_informative(candidates[:15], H200, 100)
    assert sorted(p.key for p in chosen) == sorted(p.key for p in candidates[:15])
    with pytest.raises(KernelcastError, match="no call to choose from"):
        next_calls({"op": np.array([], dtype=object)}, 5, H200)


def test_what_a_calibration_knows_is_not_asked_again(candidates: list[PlannedCall]) -> None:
    plain, before = most_informative(candidates, H200, 20)
    known = calibrated(plain)
    again, after = most_informative(candidates, H200, 40, known)
    assert after.after < after.before < before.before
    # so many new ones leave less error than the first ones measured once more
    assert len({p.key for p in plain} & {p.key for p in again[:20]}) < 10
    assert left_by(again[:20], candidates, known) < left_by(plain, candidates, known)


def test_what_is_left_is_that_of_a_plain_sum(candidates: list[PlannedCall]) -> None:
    """Though it weighs all calls of a calibration alike, which the choice does not."""
    known = calibrated(most_informative(candidates, H200, 20)[0])
    again, after = most_informative(candidates, H200, 40, known)
    assert left_by((), candidates, known) == pytest.approx(after.before, rel=0.01)
    assert left_by(again, candidates, known) == pytest.approx(after.after, rel=0.01)


def test_a_calibration_of_one_family_leaves_the_choice_to_the_others(candidates: list[PlannedCall]) -> None:
    gemms = [p for p in candidates if p.family == "gemm"]
    share = [
        np.mean([p.family == "norm" for p in most_informative(candidates, H200, 30, known)[0]])
        for known in (None, calibrated(gemms[:200]))
    ]
    assert share[1] > share[0]


def test_a_calibration_of_another_gpu_chooses_nothing(candidates: list[PlannedCall]) -> None:
    with pytest.raises(KernelcastError, match="made on h200_sxm, not on h100_sxm"):
        most_informative(candidates, kc.gpu("h100_sxm"), 5, calibrated(candidates[:20]))


def test_a_budget_stops_in_time_and_the_next_run_goes_on(tmp_path: Path) -> None:
    calls = choose(H200, 40, only=("gemm", "norm"))
    first = FakeGpu()
    done = Session(first, tmp_path / "x.jsonl", 12.0, clock=first.clock).run(calls)
    assert done.done == 10  # ten seconds, and two kept for looking at the kernels
    assert done.seconds <= 12
    second = FakeGpu()
    done = Session(second, tmp_path / "x.jsonl", clock=second.clock).run(calls)
    assert (done.done, done.total) == (len(calls), len(calls))
    assert not set(first.measured) & set(second.measured)
    assert [record["key"] for record in read_lines(tmp_path / "x.jsonl")] == [p.key for p in calls]


def test_a_line_that_was_cut_short_is_measured_again(tmp_path: Path) -> None:
    calls = choose(H200, 10, only=("gemm",))
    path = tmp_path / "x.jsonl"
    gpu = FakeGpu()
    Session(gpu, path, clock=gpu.clock).run(calls)
    text = path.read_text()
    first = text.splitlines()[0]
    path.write_text(first + "\n" + first[:40])
    assert len(read_lines(path)) == 1
    path.write_text("not ours\n")
    with pytest.raises(KernelcastError, match="line 1 is no result"):
        read_lines(path)


def test_a_call_that_fails_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    calls = choose(H200, 30, only=("gemm", "softmax"))
    gpu = FakeGpu(broken="softmax")
    done = Session(gpu, tmp_path / "x.jsonl", clock=gpu.clock).run(calls)
    records = read_lines(tmp_path / "x.jsonl")
    failed = [r for r in records if r["status"] == "failed"]
    assert done.failed == len(failed) > 0
    assert {r["error"] for r in failed} == {"RuntimeError: out of memory"}
    assert all(r["kernel_name"] == "k_" + r["call"]["op"] for r in records if r["status"] == "ok")


def test_a_broken_gpu_ends_the_run_and_names_the_call(tmp_path: Path) -> None:
    calls = choose(H200, 30, only=("gemm", "softmax"))
    gpu = FakeGpu(lost="softmax")
    with pytest.raises(DeviceLostError, match=r"op=softmax.* broke the GPU's context"):
        Session(gpu, tmp_path / "x.jsonl", clock=gpu.clock).run(calls)
    records = read_lines(tmp_path / "x.jsonl")
    assert [r["status"] for r in records][-1] == "failed"  # so that the next run does not try it again
    again = FakeGpu()
    assert Session(again, tmp_path / "x.jsonl", clock=again.clock).run(calls).done == len(calls)


def test_the_table_is_canonical_and_can_be_gone_on_with(tmp_path: Path) -> None:
    calls = choose(H200, 40, only=("gemm", "softmax", "flashinfer-decode", "moe-config"), warm_share=0.2)
    gpu = FakeGpu(broken="softmax")
    Session(gpu, tmp_path / "x.jsonl", clock=gpu.clock).run(calls)
    records = read_lines(tmp_path / "x.jsonl")
    path = tmp_path / "h200.parquet"
    assert write_table(records, path, H200, {"torch": "2.11", "flashinfer": "0.5.3"}) == len(calls)
    columns = read_canonical(path).columns
    assert len(columns["op"]) == sum(r["status"] == "ok" for r in records)  # what failed has no time
    assert set(columns["gpu"]) == {"h200_sxm"}
    assert set(columns["rotation"]) == {4.0}
    assert set(columns["version"][columns["stack"] == "torch"]) == {"2.11"}
    assert (note_of(path) or {})["measured"]["flashinfer"] == "0.5.3"
    back = read_records(path)
    assert {r["key"] for r in back} == {p.key for p in calls}
    rest = FakeGpu()
    assert Session(rest, tmp_path / "y.jsonl", clock=rest.clock, earlier=back).run(calls).done == len(calls)
    assert rest.measured == []


def test_a_table_of_nothing_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match="nothing was measured"):
        write_table([], tmp_path / "x.parquet", H200, {})
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_is_not_ours_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("mine")
    with pytest.raises(KernelcastError, match="not readable"):
        read_records(tmp_path / "x.parquet")


def test_kernels_belong_to_the_call_that_launched_them() -> None:
    def kernel(name: str, ts: float, correlation: int) -> dict[str, Any]:
        args = {"correlation": correlation, "grid": [4, 2, 1], "block": [128, 1, 1], "registers per thread": 64,
                "shared memory": 1024}  # fmt: skip
        return {"cat": "kernel", "name": name, "ts": ts, "dur": 5.0, "args": args}

    def launch(ts: float, correlation: int) -> dict[str, Any]:
        return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts, "dur": 1.0,
                "args": {"correlation": correlation}}  # fmt: skip

    events = [
        {"cat": "user_annotation", "name": "kernelcast:0", "ts": 0.0, "dur": 10.0},
        {"cat": "user_annotation", "name": "kernelcast:1", "ts": 20.0, "dur": 10.0},
        launch(1, 11), launch(2, 12), launch(15, 13), launch(21, 14),
        # they run later than they were launched, and one (13) was launched between the calls
        kernel("second", 31.0, 12), kernel("first", 30.0, 11), kernel("between", 40.0, 13), kernel("third", 50.0, 14),
    ]  # fmt: skip
    found = kernels_of(events, 2)
    assert [[k.name for k in kernels] for kernels in found] == [["first", "second"], ["third"]]
    assert found[0][0].grid == (4, 2, 1)
    assert (found[0][0].registers, found[0][0].smem_bytes) == (64, 1024)


def test_calls_of_a_table_can_be_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "first.parquet"
    first = choose(H200, 30)
    session = Session(FakeGpu(), tmp_path / "lines.jsonl")
    session.run(first)
    write_table(read_lines(session.lines), path, H200, {})
    again = calls_again(path, 10, seed=1)
    assert len(again) == 10 and {p.key for p in again} < {p.key for p in first}
    assert [p.key for p in calls_again(path, 10, seed=1)] == [p.key for p in again]
    assert {p.key for p in calls_again(path, 100, seed=1)} == {p.key for p in first}
    with pytest.raises(KernelcastError, match=r"no table .*missing.parquet to measure again"):
        calls_again(tmp_path / "missing.parquet", 10, seed=1)


def test_what_a_call_reads_keeps_its_random_numbers() -> None:
    torch = pytest.importorskip("torch")
    from kernelcast.collect.pool import TensorPool, specs

    pool = TensorPool(2**16, l2_bytes=2**10, device="cpu")
    tensors = (
        *specs("fp32", (8, 16)),
        *specs("fp32", (8, 16), use="written"),
        *specs("fp32", (8, 16), use="changed"),
    )
    read, written, changed = pool.sets(*tensors)[0]
    kept, begun = read.clone(), changed.clone()
    written.fill_(float("nan"))
    changed.mul_(0)
    assert torch.equal(pool.sets(*tensors)[0][0], kept)
    (other,) = pool.sets(*specs("fp32", (64, 16)))[0]  # of another call, over all of these places
    assert torch.isfinite(other).all() and other.std() > 0.5
    assert torch.equal(pool.sets(*tensors)[0][2], begun)  # fresh each time
    assert read.std() > 0.5 and begun.std() > 0.5
    ends = sorted((t.data_ptr(), t.data_ptr() + t.numel() * 4) for s in pool.sets(*tensors) for t in s)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))
