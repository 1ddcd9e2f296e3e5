"""Sweeps of training jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.hardware import gpu
from kernelcast.models.catalogue import model
from kernelcast.search.sweep.engines import sweep_engine
from kernelcast.search.sweep.query import Objective, open_sweep
from kernelcast.search.sweep.run import run_sweep
from kernelcast.search.sweep.training import TrainingSweep, TrainingSweepJob
from kernelcast.search.training import SearchSpace, search_layouts
from kernelcast.training.job import Recompute

SMALL: dict[str, Any] = {
    "model": "llama-3.1-8b", "gpu": "h100_sxm", "gpus": 8, "global_batch": 64, "seq": 4096,
    "tp": [1, 2, 3], "pp": [1, 2], "recompute": ["none", "full"], "where": ["tp * pp <= 4"],
}  # fmt: skip


def rows(folder: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    job = TrainingSweepJob(TrainingSweep.of(asked), Conditions(), {"h100_sxm": 4.0})
    run_sweep(job, folder, sweep_engine("one"))
    with open_sweep(folder) as table:
        return table.sql("SELECT * FROM sweep ORDER BY setting").fields()


def test_a_row_is_a_training_job_and_the_fastest_is_what_a_search_finds(tmp_path: Path) -> None:
    found = rows(tmp_path, SMALL)
    assert len(found) == 5 * 2  # (1, 1), (1, 2), (2, 1), (2, 2), (3, 1)
    by = {status: [row for row in found if row["status"] == status] for status in ("ok", "does not fit", "illegal")}
    assert sum(map(len, by.values())) == len(found)
    assert {row["tp"] for row in by["illegal"]} == {3}
    assert "do not divide 8 GPUs" in by["illegal"][0]["reason"]
    assert all(row["step_s"] is None and row["memory_bytes"] > row["available_bytes"] for row in by["does not fit"])
    best = min(by["ok"], key=lambda row: row["step_s"])
    space = SearchSpace(tp=(1, 2), pp=(1, 2), cp=(1,), micro_batch=(1,), virtual_stages=(1,),
                        recompute=(Recompute(), Recompute("full")))  # fmt: skip
    searched = search_layouts(model("llama-3.1-8b"), gpu("h100_sxm"), 8, global_batch=64, seq=4096, space=space).best
    assert best["step_s"] == pytest.approx(searched.time_s)
    assert (best["tp"], best["pp"], best["dp"]) == (
        searched.job.layout.tp, searched.job.layout.pp, searched.job.layout.dp)  # fmt: skip
    assert best["step_s_low"] < best["step_s"] < best["step_s_high"]
    # 8 GPUs at 4 USD an hour
    assert best["dollars_per_million_tokens"] == pytest.approx(8 * 4.0 / 3600 / best["tokens_per_s"] * 1e6)


def test_top_and_pareto_of_training(tmp_path: Path) -> None:
    rows(tmp_path, SMALL)
    with open_sweep(tmp_path) as table:
        top = table.top(2, Objective.read("mfu")).fields()
        front = table.pareto(Objective.read("step_s"), Objective.read("memory_bytes")).fields()
    assert top[0]["mfu"] > top[1]["mfu"]
    assert [row["step_s"] for row in front] == sorted(row["step_s"] for row in front)


def test_engines_write_the_same_bytes(tmp_path: Path) -> None:
    job = TrainingSweepJob(TrainingSweep.of(SMALL), Conditions(), {})
    assert [job.rows(chunk) for chunk in job.space.chunks(4)] == [job.rows(chunk) for chunk in job.space.chunks(4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 4}, "batch"),
        ({"precision": "fp7"}, "precision"),
        ({"recompute": "some"}, "recompute module"),
        ({"where": ["tq <= 4"]}, "tq"),
        ({"tp": {"from": 1, "to": 10**6, "step": 1}, "cp": {"from": 1, "to": 100, "step": 1}}, "more than"),
    ],
)
def test_what_no_sweep_has_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelcastError, match=message):
        TrainingSweepJob(TrainingSweep.of({**SMALL, **changes}), Conditions(), {}).space.count  # noqa: B018
