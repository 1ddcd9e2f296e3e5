"""Swept configs: the file, the rows that a fit may see, and the figures that are shown from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.tune.configs import Config, space
from kernelcast_lab.data.config_sweeps import (
    about_sweeps,
    models_tested,
    pack_sweeps,
    read_sweeps,
    rows_of,
    slower_rows,
    training_rows,
)
from kernelcast_lab.data.folds import AT_LEAST, shape_fold
from kernelcast_lab.evaluate.tuning import final_times, score, summary, swept_times
from kernelcast_lab.evaluate.tuning_gpus import rank_biserial

FILE = Path(__file__).parents[2] / "validation" / "moe_configs_h200_sxm.npz"


@pytest.fixture(scope="module")
def sweeps() -> list[Any]:
    return read_sweeps(FILE)


def record(kind: str = "shape", **changes: Any) -> dict[str, Any]:
    rows = [[16, 32, 64, 1, 4, 2, 4e-5, 2e-5, 3], [64, 64, 64, 1, 4, 2, 1e-4, 9e-5, 1]]
    return {"kind": kind, "phase": "train", "kernel": "plain", "shape": "a@5", "name": "a", "tokens": 5, "experts": 8,
            "topk": 2, "hidden": 512, "inter": 256, "dense": False, "routings": 2, "active": [5, 6],
            "blocks": {"16": [6, 7], "64": [5, 6]}, "rows": rows} | changes  # fmt: skip


def test_what_is_packed_comes_back(tmp_path: Path) -> None:
    final = {"kernel": "plain", "config": [16, 32, 64, 1, 4, 2], "first_s": 4e-5, "second_s": 2e-5, "total_s": 6e-5,
             "low_s": 5e-5, "high_s": 7e-5}  # fmt: skip
    finals = {
        "kind": "finals",
        "shape": "b@5",
        "rows": [final],
        "layers": [["plain", 16, 32, 64, 1, 4, 2, 7e-5, 6e-5, 8e-5]],
    }
    path = tmp_path / "x.npz"
    pack_sweeps([record(), record(shape="b@5", name="b", phase="main"), finals], path, {"gpu": "h200_sxm"})
    one, two = read_sweeps(path)
    assert about_sweeps(path) == {"gpu": "h200_sxm"}
    assert one.key == "a@5" and one.active == 5.5 and one.blocks == {16: 6.5, 64: 5.5} and one.finals is None
    assert one.configs.tolist() == [[16, 32, 64, 1, 4, 2], [64, 64, 64, 1, 4, 2]]
    np.testing.assert_allclose(one.total_s, [6e-5, 1.9e-4], rtol=1e-3)
    assert two.finals is not None and two.layers is not None
    assert two.finals.of([16, 32, 64, 1, 4, 2]) == pytest.approx(6e-5)
    assert two.layers.of([16, 32, 64, 1, 4, 2]) == pytest.approx(7e-5) and np.isnan(two.layers.of([0] * 6))
    with pytest.raises(KernelcastError, match="no swept configs"):
        read_sweeps(tmp_path / "none.npz")


def test_shown_sweeps_are_of_the_whole_space(sweeps: list[Any]) -> None:
    main = [s for s in sweeps if s.phase == "main" and s.kernel == "plain"]
    assert len(main) == 45
    every = set(space(gpu("h200_sxm")))
    for sweep in main:
        assert every <= set(swept_times(sweep))


def test_no_fit_sees_a_model_that_is_tested(sweeps: list[Any]) -> None:
    (train,) = training_rows(FILE.parent)
    assert not models_tested(train, FILE.parent).any()
    tested = rows_of(s for s in sweeps if s.phase == "main" and s.kernel == "plain")
    assert models_tested(tested, FILE.parent).all()


def test_rows_of_a_layer_are_its_two_gemms(sweeps: list[Any]) -> None:
    sweep = next(s for s in sweeps if s.key == "qwen3-30b-a3b@64" and s.kernel == "plain")
    rows, count = rows_of([sweep]), len(sweep.configs)
    assert set(rows["n"][:count]) == {1536.0} and set(rows["k"][count:]) == {768.0}
    assert np.isnan(rows["second"][:count]).all() and (rows["second"][count:] == 1).all()
    np.testing.assert_allclose(rows["latency_us"][:count] * 1e-6, sweep.w13_s)


def test_configs_left_out_of_a_list_are_at_least_as_slow_as_its_limit() -> None:
    config = {"block_m": [16, 32, 64], "block_n": [32] * 3, "block_k": [64] * 3, "group_m": [1] * 3, "warps": [4] * 3,
              "stages": [2] * 3}  # fmt: skip
    columns: dict[str, Any] = {name: np.array(values, float) for name, values in config.items()}
    columns |= {"tokens": np.array([1.0, 1, 9]), "latency_us": np.array([10.0, 10.05, 50])}
    columns |= {name: np.full(3, 8.0) for name in ("experts", "topk", "k", "n")}
    columns |= {"gpu": np.array(["l40"] * 3, dtype=object), "op": np.array(["moe_gemm"] * 3, dtype=object)}
    found = slower_rows(columns, 9)
    told = {(t, b): us for t, b, us in zip(found["tokens"], found["block_m"], found["latency_us"], strict=True)}
    assert told == {(1, 64): pytest.approx(10.1), (9, 16): pytest.approx(50.5), (9, 32): pytest.approx(50.5)}
    assert found[AT_LEAST].all()
    assert (shape_fold({**columns, AT_LEAST: np.zeros(3)}) == shape_fold(columns)).all()


def test_correlations_of_ranks() -> None:
    listed = np.array([True, True, False, False])
    assert rank_biserial(np.array([1.0, 2, 3, 4]), listed) == 1
    assert rank_biserial(np.array([1.0, 3, 2, 4]), listed) == 0.5
    assert rank_biserial(np.ones(4), listed) == 0


def test_the_first_of_the_finals_is_set_right(sweeps: list[Any]) -> None:
    sweep = next(s for s in sweeps if s.key == "mixtral-8x7b-tp2@32" and s.kernel == "plain")
    found, usual = final_times(sweep)
    first = Config(*sweep.finals.configs[0])
    assert usual == pytest.approx(1.0, abs=0.01)
    assert sweep.finals.total_s[0] > 1.15 * found[first]  # as it was timed
    assert found[first] == pytest.approx(swept_times(sweep)[first], rel=0.01)


def test_targets_of_tuning_hold_on_some_shapes(sweeps: list[Any]) -> None:
    """docs/tuning.md has all 45; these are a third of them."""
    main = [s for s in sweeps if s.phase == "main" and s.kernel == "plain"][::3]
    found = summary([score(s) for s in main])
    assert found["spearman_median"] >= 0.85 and found["share_measured"] <= 0.05
    assert found["within_3_percent"] == len(main)
    assert found["sglang_speedup_mean"] >= 1.15 and found["sglang_gap_gain"] >= 0.6
