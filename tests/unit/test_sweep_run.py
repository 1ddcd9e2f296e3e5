"""Sweeps: the same rows by every engine, after any death; folders that know what their rows rest on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sweeps import digests, work

import kernelcast as kc
from kernelcast.forecast.conditions import Conditions
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import infer
from kernelcast.inference.workload import Workload
from kernelcast.models import model
from kernelcast.search.sweep.engines import ProcessEngine, RayEngine, SerialEngine, starting_worker
from kernelcast.search.sweep.query import Objective, open_sweep
from kernelcast.search.sweep.rows import COLUMNS, SweepJob
from kernelcast.search.sweep.run import SweepFolder, default_chunk, run_sweep
from kernelcast.search.sweep.space import Chunk
from kernelcast.stacks import stack

SIZE = 8  # settings of a chunk


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows as one process makes them."""
    folder = tmp_path_factory.mktemp("sweep") / "alone"
    run_sweep(work(), folder, SerialEngine(), chunk_settings=SIZE)
    return folder


def rows(folder: Path, query: str = "SELECT * FROM sweep ORDER BY setting") -> list[dict[str, Any]]:
    with open_sweep(folder) as found:
        return found.sql(query).fields()


def test_rows_are_what_infer_says(alone: Path) -> None:
    found = rows(alone)
    assert [row["setting"] for row in found] == list(range(len(found))) and list(found[0]) == list(COLUMNS)
    ran = [row for row in found if row["status"] == "ok"]
    for row in ran[:: len(ran) // 5]:
        place = Deployment(model(row["model"]), kc.gpu(row["gpu"]), stack("vllm"), layout=Layout(tp=row["tp"]))
        told = infer(
            place, Workload.equal(row["batch"], row["input_len"], row["output_len"]), Conditions(predictor="generic")
        )
        assert row["ttft_s"] == told.prefill.value and row["total_s_high"] == told.total.high
        assert row["tpot_s"] == (told.tpot.value if row["output_len"] > 1 else None)
        assert row["memory_bytes"] == told.memory.used_bytes and row["support"] == told.support
        assert row["tokens_per_s_per_gpu"] == told.tokens_per_s  # of one GPU
    # 4 USD an hour are 4 / 3600 a second: a million tokens at r a second take 10^6 / r seconds
    priced = [row for row in ran if row["gpu"] == "h100_sxm"]
    assert priced and all(
        row["dollars_per_million_tokens"] == pytest.approx(4 / 3600 * 1e6 / row["tokens_per_s"]) for row in priced
    )
    assert all(row["dollars_per_million_tokens"] is None for row in ran if row["gpu"] == "l40s")  # unknown stays so


def test_what_cannot_run_is_a_row_with_its_reason(alone: Path) -> None:
    found = rows(alone)
    assert all((row["status"] == "illegal") == (row["tp"] == 3) for row in found)
    assert all("tp 3 does not divide" in row["reason"] for row in found if row["status"] == "illegal")
    full = [row for row in found if row["status"] == "does not fit"]
    assert full and all(row["memory_bytes"] > row["available_bytes"] and row["fits"] is False for row in full)
    assert all("GiB more than" in row["reason"] and row["tokens_per_s"] is None for row in full)
    assert all(row["reason"] is None and row["fits"] for row in found if row["status"] == "ok")


def test_several_processes_write_the_same_bytes(alone: Path, tmp_path: Path) -> None:
    run_sweep(work(), tmp_path / "many", ProcessEngine(2), chunk_settings=SIZE)
    assert digests(tmp_path / "many") == digests(alone)


def test_a_worker_killed_midway_changes_nothing(alone: Path, tmp_path: Path) -> None:
    killed: list[int | None] = []

    def kill(done: int, total: int, before: int) -> None:
        if 0 < done < total // 2 and len(killed) < 2:  # of one chunk, at worst; a third death would give it up
            one = multiprocessing.active_children()[0]
            one.kill()
            killed.append(one.pid)

    run_sweep(work(), tmp_path / "killed", ProcessEngine(2), chunk_settings=SIZE, on_progress=kill)
    assert len(killed) == 2 and digests(tmp_path / "killed") == digests(alone)


@dataclass(frozen=True)
class Deadly(SweepJob):
    """Dies of its second chunk."""

    def rows(self, chunk: Chunk) -> bytes:
        if chunk.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().rows(chunk)


def test_a_chunk_that_kills_its_workers_is_told_and_the_others_are_done(alone: Path, tmp_path: Path) -> None:
    good = work()
    bad = Deadly(good.sweep, good.conditions, good.prices)
    with pytest.raises(kc.KernelcastError, match=r"settings 8 to 15 killed 3 workers \(signal SIGKILL.*"):
        run_sweep(bad, tmp_path / "bad", ProcessEngine(2), chunk_settings=SIZE)
    assert digests(tmp_path / "bad").keys() == digests(alone).keys() - {"chunk-000001.parquet"}
    outcome = run_sweep(good, tmp_path / "bad", SerialEngine(), chunk_settings=SIZE)
    assert outcome.settings - outcome.before == SIZE and digests(tmp_path / "bad") == digests(alone)


def test_an_error_of_ours_is_no_death(tmp_path: Path) -> None:
    broken = replace(work(), prices=None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        next(ProcessEngine(2).run(broken, list(broken.space.chunks(SIZE))[:1]))
    assert not multiprocessing.active_children()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, one core each."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    yield found
    ray.shutdown()
    found.shutdown()  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_writes_the_same_bytes(alone: Path, cluster: Any, tmp_path: Path) -> None:
    run_sweep(work(), tmp_path / "ray", RayEngine(cluster.address), chunk_settings=SIZE)
    assert digests(tmp_path / "ray") == digests(alone)
    extra = cluster.add_node(num_cpus=1)
    left: list[int] = []

    def lose(done: int, total: int, before: int) -> None:
        if done and not left:
            cluster.remove_node(extra, allow_graceful=False)
            left.append(done)

    run_sweep(work(), tmp_path / "lost", RayEngine(cluster.address), chunk_settings=SIZE, on_progress=lose)
    assert left and digests(tmp_path / "lost") == digests(alone)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(kc.KernelcastError, match=r"pip install 'kernelcast\[ray\]'"):
        run_sweep(work(), tmp_path / "ray", RayEngine())


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(kc.KernelcastError, match=r"no Ray cluster at 127\.0\.0\.1:6"):
        run_sweep(work(), tmp_path / "ray", RayEngine("127.0.0.1:6"))


class Stopped(Exception):  # noqa: N818  # no error: somebody had enough
    pass


def test_what_was_done_is_not_done_again(alone: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, before: int) -> None:
        if done > before + 2 * SIZE:
            raise Stopped

    folder = tmp_path / "resumed"
    befores: list[int] = []
    while not befores or befores[-1] < work().space.count:
        try:
            befores.append(run_sweep(work(), folder, SerialEngine(), chunk_settings=SIZE, on_progress=stop).before)
        except Stopped:
            befores.append(SIZE * len(digests(folder)))
    assert len(befores) > 3 and befores == sorted(befores) and digests(folder) == digests(alone)


def test_a_folder_of_another_sweep_is_refused(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept"
    run_sweep(work(), folder, SerialEngine(), chunk_settings=64)
    was = digests(folder)
    said = {
        "batch = .*, now 7": work(batch=7),
        "where = .*, now ": work(where=["batch < 9"]),
        "price h100_sxm = 4.0, now 3.0": replace(work(), prices={"h100_sxm": 3.0}),
        "predictor generic.*, now roofline": replace(work(), conditions=Conditions(predictor="roofline")),
    }
    for pattern, other in said.items():
        with pytest.raises(kc.KernelcastError, match=pattern):
            run_sweep(other, folder, SerialEngine(), chunk_settings=64)
    monkeypatch.setattr("kernelcast.search.sweep.run.__version__", "9.9")
    with pytest.raises(kc.KernelcastError, match=r"kernelcast .*, now 9\.9; .*`fresh`"):
        run_sweep(work(), folder, SerialEngine(), chunk_settings=64)
    monkeypatch.undo()
    monkeypatch.setattr("kernelcast.search.sweep.run.weights_digest", lambda conditions: "ab12")
    with pytest.raises(kc.KernelcastError, match=r"weights .*, now ab12"):
        run_sweep(work(), folder, SerialEngine(), chunk_settings=64)
    monkeypatch.undo()
    assert digests(folder) == was
    run_sweep(work(batch=7), folder, SerialEngine(), chunk_settings=64, fresh=True)
    assert {row["batch"] for row in rows(folder)} == {7}


def test_folders_that_are_no_sweeps_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear diary")
    for fresh in (False, True):
        with pytest.raises(kc.KernelcastError, match="not empty and no folder of a sweep"):
            run_sweep(work(), tmp_path / "mine", SerialEngine(), fresh=fresh)
    with pytest.raises(kc.KernelcastError, match="is a file"):
        run_sweep(work(), tmp_path / "mine" / "notes.txt", SerialEngine())
    with (
        pytest.raises(kc.KernelcastError, match=r"no folder of a sweep: it has no manifest\.json"),
        open_sweep(tmp_path),
    ):
        pass
    with SweepFolder(tmp_path / "taken").locked(), pytest.raises(kc.KernelcastError, match="another sweep is writing"):
        run_sweep(work(), tmp_path / "taken", SerialEngine())


def test_leftovers_of_a_killed_writer_are_removed(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    (folder / ".chunk-000003.99.part.parquet").write_bytes(b"half")
    (folder / ".manifest.99.part.json").write_text("{")
    run_sweep(work(), folder, SerialEngine(), chunk_settings=SIZE)
    assert digests(folder) == digests(alone)
    assert not list(folder.glob(".*part*"))
    told = json.loads((folder / "manifest.json").read_text())
    assert told["chunks"] == len(digests(folder)) and told["settings"] == work().space.count


def test_chunks_are_cut_by_the_number_of_settings_alone() -> None:
    assert [default_chunk(n) for n in (1, 256, 8192, 16_000, 64_000, 10**6)] == [256, 256, 256, 500, 2000, 2000]


def test_the_best_and_those_that_no_other_beats(alone: Path) -> None:
    ran = [row for row in rows(alone) if row["tpot_s"] is not None]
    with open_sweep(alone) as found:
        best = found.top(3, Objective.read("tokens_per_s_per_gpu")).fields()
        worst = found.top(1, Objective.read("ttft_s:max"), "gpu = 'l40s'").fields()
        front = found.pareto(Objective.read("tokens_per_s_per_gpu"), Objective.read("tpot_s")).fields()
    everyone = sorted((row["tokens_per_s_per_gpu"] or 0 for row in rows(alone)), reverse=True)
    assert [row["tokens_per_s_per_gpu"] for row in best] == everyone[:3]
    assert worst[0]["ttft_s"] == max(row["ttft_s"] for row in rows(alone) if row["gpu"] == "l40s" and row["ttft_s"])

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        more, less = one["tokens_per_s_per_gpu"], one["tpot_s"]
        good = more >= other["tokens_per_s_per_gpu"] and less <= other["tpot_s"]
        return good and (more, less) != (other["tokens_per_s_per_gpu"], other["tpot_s"])

    unbeaten = [row["setting"] for row in ran if not any(beats(other, row) for other in ran)]
    assert len(unbeaten) > 2 and sorted(row["setting"] for row in front) == unbeaten


def test_a_worker_that_is_starting_does_not_hear_control_c() -> None:
    started = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0.05,))
    with starting_worker():
        started.start()
    assert started.pid is not None
    os.kill(started.pid, signal.SIGINT)  # long before any line of its own was read
    started.join(30)
    assert started.exitcode == 0
