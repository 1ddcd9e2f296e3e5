"""The learning curve in small: it falls, it never tests what it measured, and its report is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from small_fits import small_settings

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast_lab.evaluate.learning_curve import SEEN, CurveSettings, _groups, learning_curve, write_curves

SMALL = small_settings(epochs=20, transfer_epochs=5, rows_left_out=200)


def invented(rows: int = 1200) -> dict[str, np.ndarray[Any, Any]]:
    """Physics times a factor; the H200 is half as slow again, which no other GPU shows."""
    rng = np.random.default_rng(3)
    gpus = np.array(["a100_sxm", "h100_sxm", "h200_sxm"], dtype=object)[rng.integers(0, 3, rows)]
    columns = {
        "op": np.full(rows, "gemm", dtype=object),
        "dtype": np.full(rows, "bf16", dtype=object),
        "gpu": gpus,
        "source": np.full(rows, "invented", dtype=object),
        **{side: np.floor(2 ** rng.uniform(6, 13, rows)) for side in ("m", "n", "k")},
    }
    physics, _ = predict_columns(columns, None, Conditions(predictor="generic"))
    return {**columns, "latency_us": physics["predicted_us"] * np.where(gpus == "h200_sxm", 1.8, 1.2)}


@pytest.mark.slow
def test_the_curve_falls_and_is_written(tmp_path: Path) -> None:
    settings = CurveSettings(counts=(0, 30, 100, 5000), repeats=2, fit=SMALL)
    said: list[str] = []
    points = learning_curve(invented(), "gemm", "h200_sxm", settings, source="invented", say=said.append)
    mean = {count: np.mean([p.mean for p in points if p.calls == count]) for count in (0, 30, 100)}
    assert mean[0] > 25 and mean[30] < mean[0] / 2 and mean[100] < mean[0] / 4
    assert points[-1].predictor == SEEN and points[-1].mean < mean[0]
    assert any("to draw 5,000 from" in text for text in said)  # left out, and said
    path = write_curves(points, tmp_path)
    assert "| h200_sxm | gemm |" in path.read_text()
    assert len(json.loads((tmp_path / "learning_curve.json").read_text())) == len(points)


def test_a_gpu_that_nobody_measured_is_refused() -> None:
    with pytest.raises(KernelcastError, match="too few measured calls: 0 of l40s"):
        learning_curve(invented(100), "gemm", "l40s", CurveSettings(fit=SMALL))
    with pytest.raises(KernelcastError, match="unknown source 'vidur'; known: invented"):
        learning_curve(invented(100), "gemm", "h200_sxm", source="vidur")
    with pytest.raises(KernelcastError, match="unknown column 'dtyp'"):
        learning_curve(invented(100), "gemm", "h200_sxm", by=["dtyp"])
    with pytest.raises(KernelcastError, match="no op and dtype of gemm has 300 calls of h200_sxm"):
        learning_curve(invented(100), "gemm", "h200_sxm", by=["op", "dtype"])


def test_each_combination_of_words_has_its_own_calls() -> None:
    # 400 gemm bf16, 400 gemm fp8 and 100 bmm (too few) to draw from, as many again to test on
    words = 400 * [("gemm", "bf16")] + 400 * [("gemm", "fp8")] + 100 * [("bmm", None)]
    columns = {name: np.array([w[at] for w in 2 * words], dtype=object) for at, name in enumerate(("op", "dtype"))}
    pool, test = np.arange(900), np.arange(900, 1800)
    found = {name: (draws, tests) for name, draws, tests in _groups(columns, "gemm", ["op", "dtype"], pool, test)}
    assert set(found) == {"gemm bf16", "gemm fp8"}
    assert found["gemm fp8"][0].tolist() == list(range(400, 800))
    assert found["gemm bf16"][1].tolist() == list(range(900, 1300))
    assert [name for name, *_ in _groups(columns, "gemm", [], pool, test)] == ["gemm"]
