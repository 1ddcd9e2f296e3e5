"""Fitting in small: deterministic, resumable, honest about its test shapes, and it learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from small_fits import small_settings

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.learned import load
from kernelcast.forecast.predict_table import predict_columns
from kernelcast_lab.data import Measurements, read_canonical, write_canonical
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.evaluate import run
from kernelcast_lab.evaluate.run import Evaluation, Fitted, evaluate
from kernelcast_lab.evaluate.splits import generation, gpu_out, shapes
from kernelcast_lab.fit import fit as fitting
from kernelcast_lab.fit.dataset import build
from kernelcast_lab.fit.recipes import recipe
from kernelcast_lab.fit.train import encoder_of, train

SMALL = small_settings(epochs=40, transfer_epochs=10, rows_left_out=300)


def invented(rows: int = 900) -> dict[str, np.ndarray[Any, Any]]:
    """GEMM times that no GPU ever had: the roofline, slower by a factor that depends on shape and GPU."""
    rng = np.random.default_rng(3)
    gpus = np.array(["a100_sxm", "h100_sxm", "h200_sxm", "l40s"], dtype=object)[rng.integers(0, 4, rows)]
    sides = {side: np.floor(2 ** rng.uniform(6, 13, rows)) for side in ("m", "n", "k")}
    columns = {
        "op": np.full(rows, "gemm", dtype=object),
        "dtype": np.full(rows, "bf16", dtype=object),
        "stack": np.array(["vllm", "sglang"], dtype=object)[rng.integers(0, 2, rows)],
        "gpu": gpus,
        "kernel_source": np.full(rows, "invented", dtype=object),
        "source": np.full(rows, "aiconfigurator", dtype=object),
        **sides,
    }
    physics, _ = predict_columns(columns, None, Conditions(predictor="generic"))
    slow = np.where(columns["stack"] == "vllm", 1.3, 1.6) * np.where(gpus == "l40s", 1.5, 1.0)
    return {**columns, "latency_us": physics["predicted_us"] * slow}


@pytest.mark.slow
def test_fit_learns_and_test_shapes_stay_out(tmp_path: Path) -> None:
    columns = invented()
    weights = fitting.fit_family(columns, "gemm", SMALL)
    test = shape_fold(columns) == TEST_FOLD
    assert weights.about["rows"] == int((~test).sum())
    held = {name: column[test] for name, column in columns.items()}
    learned, _ = predict_columns(held, None, Conditions(predictor=Fitted(weights)))
    plain, _ = predict_columns(held, None, Conditions(predictor="generic"))
    error = [np.mean(np.abs(r["predicted_us"] / held["latency_us"] - 1)) for r in (learned, plain)]
    assert error[0] < 0.1 < error[1]
    path = fitting.save(weights, tmp_path)
    again = load(tmp_path, "gemm")
    assert again is not None and path.exists()
    stored, _ = predict_columns(held, None, Conditions(predictor=Fitted(again)))
    # networks are stored in half precision
    assert stored["predicted_us"] == pytest.approx(learned["predicted_us"], rel=5e-3)


def test_each_main_network_leaves_a_fold_of_its_own_out_or_none_does() -> None:
    fold = np.repeat(np.arange(10), 40)
    assert fitting._folds(fold, 2) == (1, 2)
    assert fitting._folds(fold, 10) == (*range(1, 10), 1)  # there are nine beside the test shapes
    assert fitting._folds(fold[fold != 2], 2) == ()
    assert fitting._folds(fold[1:], 2) == (1, 2)  # of the test shapes nobody sees any


@pytest.mark.slow
def test_noise_that_no_network_can_know_is_inside_four_times_in_five(tmp_path: Path) -> None:
    columns = invented(4000)
    noise = np.random.default_rng(5).normal(0, 0.15, 4000)
    columns["latency_us"] = columns["latency_us"] * np.exp(noise)
    fitting.save(fitting.fit_family(columns, "gemm", replace(SMALL, networks=2)), tmp_path)
    weights = load(tmp_path, "gemm")
    assert weights is not None and {entry.configuration["stack"] for entry in weights.evidence.entries} == {
        "vllm",
        "sglang",
    }
    assert all(entry.width != 1.0 and entry.tested for entry in weights.evidence.entries)
    test = shape_fold(columns) == TEST_FOLD
    held = {name: column[test] for name, column in columns.items()}
    found, _ = predict_columns(held, None, Conditions(predictor=Fitted(weights)))
    inside = (found["low_us"] <= held["latency_us"]) & (held["latency_us"] <= found["high_us"])
    assert 0.74 < inside.mean() < 0.88


def test_same_seed_same_weights() -> None:
    columns = invented(300)
    one, two = (fitting.fit_family(columns, "gemm", SMALL) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one.main[0].weights, two.main[0].weights, strict=True))
    assert one.spreads == two.spreads


def test_interrupted_fit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = invented(300)
    trained: list[str] = []
    real = train

    def counted(*arguments: Any) -> Any:
        trained.append(str(arguments[3]))
        if len(trained) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(fitting, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        fitting.fit_family(columns, "gemm", SMALL, partial=tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2
    before = len(trained)
    weights = fitting.fit_family(columns, "gemm", SMALL, partial=tmp_path)
    went_on = trained[before:]
    assert not list(tmp_path.glob("*.npz"))
    whole = fitting.fit_family(columns, "gemm", SMALL)
    assert went_on == trained[before + len(went_on) :][2:]  # all but the two that were there
    assert np.array_equal(weights.ceiling.weights[0], whole.ceiling.weights[0])


def test_fine_tuning_goes_on_with_the_main_network() -> None:
    data = build(invented(300), "gemm")
    encoder = encoder_of(data)
    start = train(data, encoder, SMALL.main)
    still = train(data, encoder, replace(SMALL.main, epochs=1, learning_rate=1e-9), "finetune", start=start)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(still.weights, start.weights, strict=True))
    columns = invented(300)
    tuned = fitting.fit_family(columns, "gemm", replace(SMALL, finetune=SMALL.main, finetune_share=0.08))
    plain = fitting.fit_family(columns, "gemm", SMALL)
    assert not np.allclose(tuned.main[0].weights[0], plain.main[0].weights[0], atol=1e-3)
    assert np.array_equal(tuned.ceiling.weights[0], plain.ceiling.weights[0])


def test_a_shape_is_in_one_fold_everywhere() -> None:
    columns = invented(200)
    moved = {**columns, "gpu": np.full(200, "b200_sxm", dtype=object), "latency_us": columns["latency_us"] * 7}
    assert np.array_equal(shape_fold(columns), shape_fold(moved))
    share = np.mean(shape_fold(invented(4000)) == TEST_FOLD)
    assert 0.07 < share < 0.13


def test_canonical_files_can_be_fitted_on(tmp_path: Path) -> None:
    columns = invented(50)
    columns["stack"][3] = None
    write_canonical(Measurements(columns, "invented"), tmp_path / "rows.parquet")
    back = read_canonical(tmp_path / "rows.parquet").columns
    assert set(back) >= set(columns)
    assert back["stack"].tolist() == columns["stack"].tolist()
    assert np.array_equal(back["m"], columns["m"])
    assert len(build(back, "gemm")) == 50


def test_splits_keep_kin_apart() -> None:
    columns = invented(600)
    (split,) = shapes(columns)
    keys = list(zip(columns["m"], columns["n"], columns["k"], strict=True))
    assert not {k for k, t in zip(keys, split.train, strict=True) if t} & {
        k for k, t in zip(keys, split.test, strict=True) if t
    }
    (split,) = gpu_out(columns, "h200_sxm")
    assert set(columns["gpu"][split.test]) == {"h200_sxm"} and "h200_sxm" not in set(columns["gpu"][split.train])
    hopper = next(s for s in generation(columns) if s.label == "Hopper")
    assert not {"h100_sxm", "h200_sxm"} & set(columns["gpu"][hopper.train])


@pytest.mark.slow
def test_evaluation_resumes(tmp_path: Path) -> None:
    columns = invented(600)
    empty = {name: column[:0] for name, column in columns.items()}
    asked = Evaluation(splits=("gpu",), predictors=("generic", "roofline"), settings=SMALL)
    said: list[str] = []

    def tables(family: str) -> Any:
        return columns if family == "gemm" else empty

    first = evaluate(tables, asked, tmp_path / "scores.json", said.append)
    assert len(said) == 2 and {s.predictor for s in first} == {"generic", "roofline"}
    again = evaluate(tables, asked, tmp_path / "scores.json", said.append)
    assert len(said) == 2 and again == first
    score = next(s for s in first if s.group == "all" and s.predictor == "generic")
    assert 20 < score.mean < 60 and score.bias < 0
    evaluate(tables, replace(asked, predictors=("learned",)), tmp_path / "scores.json")
    kept = json.loads((tmp_path / "density.json").read_text())  # for the plot, without what writes the report
    assert list(kept) == ["gpu: h200_sxm, GEMM bf16+fp8"]


def test_a_job_without_scores_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks of the baselines that cannot be fitted: asked once each, and remembered."""
    columns = invented(200)
    tried: list[str] = []

    def refused(*_: Any, **__: Any) -> None:
        tried.append("fit")
        raise KernelcastError("no network for this family")

    monkeypatch.setattr(run, "fit_neusight", refused)
    tables = {"gemm": columns}.get
    empty = {name: column[:0] for name, column in columns.items()}
    asked = Evaluation(splits=("gpu",), tasks=("GEMM bf16+fp8",), predictors=("neusight",))
    for _ in range(2):
        with pytest.raises(KernelcastError, match="no scores: neusight cannot be fitted"):
            evaluate(lambda family: tables(family, empty), asked, tmp_path / "scores.json")
    assert tried == ["fit"] and not (tmp_path / "scores.json").exists()
    with pytest.raises(KernelcastError, match="no measured row of gpu, fused MoE"):
        evaluate(lambda family: empty, replace(asked, tasks=("fused MoE",)), tmp_path / "none" / "scores.json")
    assert not (tmp_path / "none").exists()


def test_rows_of_small_sources_are_repeated() -> None:
    source = np.array(["large"] * 1000 + ["small"] * 10 + ["tiny"], dtype=object)
    settings = replace(recipe("attention").settings, least_share=0.08, most_repeats=20)
    counts = np.bincount(fitting.repeated(source, settings), minlength=len(source))
    assert set(counts[:1000]) == {1}
    assert set(counts[1000:1010]) == {8}  # 8% of 1,011 rows is eight times ten
    assert counts[1010] == 20  # at most
    assert fitting.repeated(np.array(["one"] * 5, dtype=object), settings).tolist() == [0, 1, 2, 3, 4]


def test_a_generation_is_left_out_whole_and_a_gpu_where_another_stands_in() -> None:
    assert fitting.generation("b300_sxm") == fitting.generation("b200_sxm") != fitting.generation("h100_sxm")
    assert fitting._stands_in("h100_sxm", "h200_sxm") and fitting._stands_in("gb300", "b300_sxm")
    # a B300 has another capability than a B200, a GB200 is its twin: without it nobody stands in
    assert not fitting._stands_in("b300_sxm", "b200_sxm") and not fitting._stands_in("gb200", "b200_sxm")


def test_tasks_of_frontier_models_are_scored_when_named() -> None:
    families = {protocol.family for protocol in Evaluation().protocols}
    assert "gemm" in families
    assert not families & {"mla_layer", "sparse_attention", "linear_attention", "deepep"}
    assert {protocol.family for protocol in Evaluation(tasks=("DeepEP",)).protocols} == {"deepep"}
