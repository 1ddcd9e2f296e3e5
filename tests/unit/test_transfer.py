"""Forecasts of a GPU that was left out, in small: what the fit, the calibration and the catalogue row may know."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from small_fits import small_settings

from kernelcast.app.cli import main
from kernelcast.collect.calibrate import calibrate
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.learned import FamilyWeights
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import Gpu, gpu, gpu_ids
from kernelcast_lab.data import Measurements, write_canonical
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.evaluate import transfer
from kernelcast_lab.evaluate.splits import generation_out
from kernelcast_lab.evaluate.transfer import TransferPoint, TransferSettings, as_catalogued, score_left_out
from kernelcast_lab.evaluate.transfer_report import (
    GENERATION,
    SINGLE_GPU,
    group_means,
    lines,
    overall_means,
    write_transfer,
)
from kernelcast_lab.fit import fit as fitting

FIT = small_settings(epochs=10, transfer_epochs=3, rows_left_out=100)
SMALL = TransferSettings(fit=FIT, counts=(10, 30), repeats=2)
GPUS = ("a100_sxm", "l40s", "h100_sxm", "h200_sxm", "h20")


def invented(rows: int = 1500) -> dict[str, np.ndarray[Any, Any]]:
    """Physics times a factor; the H200 is half as slow again. A kernel that Hopper alone runs, and no call to test on
    of the H20."""
    rng = np.random.default_rng(3)
    places = np.array(GPUS, dtype=object)[rng.integers(0, len(GPUS), rows)]
    hopper = np.isin(places.astype(str), ("h100_sxm", "h200_sxm", "h20"))
    columns = {
        "op": np.full(rows, "gemm", dtype=object),
        "dtype": np.where(hopper & (rng.random(rows) < 0.3), "fp8_block", "bf16").astype(object),
        "stack": np.array(["vllm", "sglang"], dtype=object)[rng.integers(0, 2, rows)],
        "gpu": places,
        "kernel_source": np.where(hopper & (rng.random(rows) < 0.3), "wgmma", "cublas").astype(object),
        "source": np.where(places == "h20", "pipeweave", "aiconfigurator").astype(object),
        **{side: np.floor(2 ** rng.uniform(6, 12, rows)) for side in ("m", "n", "k")},
    }
    physics, _ = predict_columns(columns, None, Conditions(predictor="generic"))
    return {**columns, "latency_us": physics["predicted_us"] * np.where(places == "h200_sxm", 1.8, 1.2)}


@functools.cache
def weights_without(left_out: str) -> FamilyWeights:
    columns = invented()
    split = generation_out(columns, left_out)
    return fitting.fit_rows(columns, "gemm", np.flatnonzero(split.train), FIT)


@pytest.fixture
def fitted_once(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Fits that are made once for all tests; what each was asked to see."""
    asked: list[dict[str, Any]] = []

    def fit_rows(columns: Any, family: str, rows: Any, settings: Any) -> FamilyWeights:
        asked.append({name: column[rows] for name, column in columns.items()})
        return weights_without("Hopper")

    monkeypatch.setattr(transfer, "fit_rows", fit_rows)
    return asked


def shapes_of(columns: Any) -> set[tuple[float, ...]]:
    return set(zip(columns["m"], columns["n"], columns["k"], strict=True))


def test_neither_fit_nor_calibration_sees_what_is_tested(
    monkeypatch: pytest.MonkeyPatch, fitted_once: list[dict[str, Any]]
) -> None:
    calibrated: list[tuple[Any, Gpu]] = []
    tested: list[tuple[Any, Gpu]] = []

    def spied(columns: Any, chip: Gpu, *more: Any, **named: Any) -> Any:
        calibrated.append((columns, chip))
        return calibrate(columns, chip, *more, **named)

    def predicted(columns: Any, chip: Gpu, *more: Any) -> Any:
        tested.append((columns, chip))
        return predict_columns(columns, chip, *more)

    monkeypatch.setattr(transfer, "calibrate", spied)
    monkeypatch.setattr(transfer, "predict_columns", predicted)
    points = score_left_out(invented(), "gemm", "Hopper", SMALL)

    (fit,) = fitted_once
    assert set(fit["gpu"]) == {"a100_sxm", "l40s"}  # no Hopper at all, though the H20 is not tested on
    assert not (shape_fold(fit) == TEST_FOLD).any()
    shapes = set().union(*(shapes_of(columns) for columns, _ in tested))
    for columns, chip in (*calibrated, *tested):
        assert "gpu" not in columns and chip.id not in gpu_ids() and not chip.changes
    for columns, _ in calibrated:
        assert not (shape_fold(columns) == TEST_FOLD).any()
        assert not shapes_of(columns) & shapes
        assert set(columns["source"]) == {"aiconfigurator"}
    assert {point.gpu for point in points} == {"h100_sxm", "h200_sxm"}
    # of each of two formats 10 calls, the same and 20 more, as many others, and the 10 and 30 most telling; on two GPUs
    assert [len(columns["op"]) for columns, _ in calibrated] == [20, 60, 20, 60, 20, 60] * 2
    few, many, others = (shapes_of(columns) for columns, _ in calibrated[:3])
    assert few < many and few != others
    kinds = {(point.column, point.kernels) for point in points}
    assert kinds == {(c, k) for c in ("GEMM bf16+fp8", "GEMM fp8_block") for k in ("shared", "new")}


def test_calibration_learns(fitted_once: list[dict[str, Any]]) -> None:
    points = score_left_out(invented(), "gemm", "Hopper", SMALL)
    errors = {k: m.mean for k, m in group_means([p for p in points if p.gpu == "h200_sxm"]).items()}
    assert errors["Hopper", "30 calls", "GEMM bf16+fp8"] < errors["Hopper", "specs", "GEMM bf16+fp8"] / 2


def test_the_catalogue_row_uses_nothing_that_was_measured_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, fitted_once: list[dict[str, Any]]
) -> None:
    def means(chip: Gpu) -> dict[str, list[float]]:
        monkeypatch.setattr(transfer, "find_gpu", lambda name: chip if name == chip.id else gpu(name))
        found = score_left_out(invented(), "gemm", "h200_sxm", dataclasses.replace(SMALL, counts=()))
        return {knows: [p.mean for p in found if p.knows == knows] for knows in ("catalogue", "specs")}

    own = gpu("h200_sxm")
    other = dataclasses.replace(
        own, sustained_tensor_fraction=0.4, sustained_dram_fraction=0.5, sustained_launch_s=9e-6, launch_floor_s=3e-6,
        long_tensor_fraction=0.3, tensor_flops_per_j=1e11,
    )  # fmt: skip
    first, second = means(own), means(other)
    assert first["catalogue"] == second["catalogue"]
    assert first["specs"] != second["specs"] and first["specs"] != first["catalogue"]


def test_what_only_measuring_tells_is_the_mean_of_the_gpus_of_the_fit() -> None:
    chip, seen, out = gpu("h200_sxm"), [gpu("a100_sxm"), gpu("l40s"), gpu("v100_pcie")], ["h200_sxm", "h100_sxm"]
    found = as_catalogued(chip, seen, out)
    assert found.sustained_tensor_fraction == pytest.approx((0.85 + 0.75) / 2)  # nobody measured the V100's
    assert found.sustained_launch_s == pytest.approx((3e-6 + 2.1e-6 + 3.5e-6) / 3)
    assert found.dram_bytes_per_s == chip.dram_bytes_per_s and found.id == "h200_sxm_catalogue"
    # where the fit saw none that was measured: all but those left out
    known = [g for g in map(gpu, gpu_ids()) if g.sustained_dram_fraction and g.id not in out]
    found = as_catalogued(chip, [gpu("v100_pcie")], out)
    assert found.sustained_dram_fraction == pytest.approx(np.mean([g.sustained_dram_fraction for g in known]))


def test_given_weights_are_scored_unless_they_saw_the_gpu(tmp_path: Path) -> None:
    fitting.save(weights_without("Hopper"), tmp_path)
    settings = dataclasses.replace(SMALL, weights=tmp_path, counts=(10,))
    points = score_left_out(invented(), "gemm", "Hopper", settings)
    assert {point.knows for point in points} == {"catalogue", "specs", "calls"}
    with pytest.raises(KernelcastError, match="saw a100_sxm: give others"):
        score_left_out(invented(), "gemm", "A100", settings)
    with pytest.raises(KernelcastError, match="no weights of gemm in"):
        score_left_out(invented(), "gemm", "Hopper", dataclasses.replace(settings, weights=tmp_path / "none"))


def test_the_command_makes_pieces_goes_on_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "measured/invented").mkdir(parents=True)
    write_canonical(Measurements(invented(), "invented"), tmp_path / "measured/invented/rows.parquet")
    fits: list[int] = []

    def counted(columns: Any, family: str, rows: Any, settings: Any) -> FamilyWeights:
        fits.append(len(rows))
        return fitting.fit_rows(columns, family, rows, FIT)

    monkeypatch.setattr(transfer, "fit_rows", counted)
    out = tmp_path / "pieces"
    words = ["evaluate", "transfer", "--data", str(tmp_path / "measured"), "--family", "gemm", "--repeats", "1"]
    words += ["--rows", "600", "--epochs", "2", "--workers", "1", "-o", str(out)]
    assert main([*words, "--left-out", "h200"]) == 0
    capsys.readouterr()
    assert main([*words, "--left-out", "h200_sxm", "--left-out", "Hopper", "--json"]) == 0
    assert len(fits) == 2 and fits[0] == 600  # the first piece was there
    points = json.loads(capsys.readouterr().out)["points"]
    assert {point["left_out"] for point in points} == {"h200_sxm", "Hopper"}
    assert sorted(path.name for path in out.glob("*.json")) == [
        "transfer-gemm-Hopper.json",
        "transfer-gemm-h200_sxm.json",
    ]
    made = (out / "transfer.md").read_text()
    assert main(["evaluate", "transfer", "--report", str(out)]) == 0
    assert (out / "transfer.md").read_text() == made and len(fits) == 2
    assert "| Hopper | 30 calls |" in made and "| a generation | 300 calls |" not in made  # there are no 300
    capsys.readouterr()
    assert main([*words, "--left-out", "Hopper", "--seed", "1"]) == 2
    assert "was made with seed 0, not 1" in capsys.readouterr().err


def point(left_out: str, place: str, mean: float, knows: str = "calls", draw: int = 0, **more: Any) -> TransferPoint:
    told = {"family": "gemm", "column": "GEMM bf16+fp8", "kernels": "shared", "drawn": "random", "calls": 30, **more}
    return TransferPoint(
        rows=100, mean=mean, median=mean, p90=mean, bias=-mean, coverage=0.8, left_out=left_out, gpu=place,
        knows=knows, draw=draw, **told,
    )  # fmt: skip


def test_means_are_over_draws_then_gpus_then_generations(tmp_path: Path) -> None:
    points = [
        point("A100", "a100_sxm", 4.0),
        point("Hopper", "h100_sxm", 6.0),
        point("Hopper", "h100_sxm", 10.0, draw=1),
        point("Hopper", "h200_sxm", 20.0),
        point("L40S", "l40s", 8.0),
        point("gb300", "gb300", 5.0, knows="catalogue"),
        point("Hopper", "h200_sxm", 90.0, kernels="new"),
    ]
    groups = group_means(points)
    hopper = groups["Hopper", "30 calls", "GEMM bf16+fp8"]
    assert hopper.mean == pytest.approx((8 + 20) / 2) and hopper.rows == 200
    told = write_transfer(points, tmp_path).read_text()
    assert "| a generation | 30 calls | 8.7 |" in told  # no verdict before all five are there
    points += [
        point("RTX Blackwell", "rtx_pro_6000_server", 9.0),
        point("Blackwell", "gb200", 10.0),
        point("h200_sxm", "h200_sxm", 5.2, knows="catalogue"),
    ]
    whole = overall_means(group_means(points))
    assert whole[GENERATION, "30 calls", "GEMM bf16+fp8"].mean == pytest.approx((4 + 14 + 8 + 10 + 9) / 5)
    told = write_transfer(points, tmp_path).read_text()
    assert "| a generation | 30 calls | 9.0 (8, **missed**) |" in told
    assert f"| {SINGLE_GPU} | catalogue | 5.1 (5.5, met) |" in told
    assert "| Hopper | 30 calls | 90.0 |" in told  # apart from the rest
    shown = [line["left out"] for line in lines(points)]
    assert shown == [
        SINGLE_GPU,
        GENERATION,
        "h200_sxm",
        "gb300",
        "A100",
        "L40S",
        "Hopper",
        "Blackwell",
        "RTX Blackwell",
    ]
