"""The shipped weights against the measured tables, where the variable KERNELCAST_DATA names them.

Only shapes that the fit never saw are scored. The limits are the targets of docs/accuracy-kernels.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kernelcast.forecast.predict_table import predict_columns
from kernelcast_lab.data import read
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.data.serving import served_cases, serving_points
from kernelcast_lab.evaluate.served import Compared, static_batches
from kernelcast_lab.evaluate.serving_points import closed_loops
from kernelcast_lab.evaluate.under_load import vllm_runs
from kernelcast_lab.evaluate.unspecified import left_out
from kernelcast_lab.fit.fit import sampled

DATA = os.environ.get("KERNELCAST_DATA")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA, reason="KERNELCAST_DATA names no folder of measured tables"),
]
# Rows to read of a table of a million: the test fold then has some 6,000, and predicting them takes seconds.
# GEMM is read whole: its error is near its limit, and a sample's is a tenth of a percent off.
SOME = 60_000


def mean_error(found: Sequence[Compared], what: str, where: Callable[[Compared], bool] = lambda c: True) -> float:
    """Mean size of the error of one quantity, in percent."""
    return float(np.mean([abs(entry.error) for entry in found if entry.what == what and where(entry)]))


@pytest.mark.parametrize(
    ("table", "where", "sample", "most"),
    [
        ("aiconfigurator/gemm", "dtype IN ('bf16', 'fp8') AND kernel_source NOT LIKE '%static scale%'", None, 4.5),
        ("aiconfigurator/attention_context", None, SOME, 5.0),
        ("aiconfigurator/attention_generation", None, SOME, 6.0),
        ("aiconfigurator/moe", None, SOME, 7.0),
        ("aiconfigurator_rtx_pro_6000/gemm", "dtype IN ('bf16', 'fp8')", SOME, 4.5),
        ("aiconfigurator_rtx_pro_6000/attention_context", None, SOME, 5.0),
        ("aiconfigurator_rtx_pro_6000/attention_generation", None, SOME, 6.0),
        ("aiconfigurator_rtx_pro_6000/moe", None, SOME, 7.0),
        ("neusight/ops", "op NOT IN ('gemm', 'bmm', 'conv2d')", None, 8.0),
        ("vidur/layers", "op <> 'gemm'", None, 8.0),
        ("pipeweave/gemm_fp8", None, None, 3.3),
    ],
)
def test_new_shapes(table: str, where: str | None, sample: int | None, most: float) -> None:
    rows = read(Path(str(DATA)), table, where=where, sample=sample).columns
    test = sampled(np.flatnonzero(shape_fold(rows) == TEST_FOLD), 20_000, seed=0)
    held = {name: column[test] for name, column in rows.items()}
    found, bad = predict_columns(held, None)
    assert not bad.messages
    error = np.abs(found["predicted_us"] / held["latency_us"] - 1) * 100
    inside = (held["latency_us"] >= found["low_us"]) & (held["latency_us"] <= found["high_us"])
    assert float(np.mean(error)) <= most
    assert 0.75 <= float(np.mean(inside)) <= 0.90
    if table.startswith("aiconfigurator"):  # NeuSight's test rows are on GPUs of their own
        assert (found["support"] == "seen").mean() > 0.99  # new shapes, but within the ranges of their kinds
    family = {"aiconfigurator/attention_generation": "attention", "aiconfigurator/moe": "moe"}.get(table)
    for line in left_out(rows, family) if family else ():
        # What the stack's file tells, or the sizes of the model. SGLang on Blackwell, by calls a few, was measured with
        # three backends for the same sizes: nobody can tell these.
        if line["left_out"] in ("page_size", "backend"):
            assert line["by_calls" if family == "attention" else "ratio"] <= 1.2, line


def test_whole_models_as_served() -> None:
    """PipeWeave's static batches: SGLang and vLLM on 11 GPUs, most of them with no kernel of theirs in the data."""
    found = static_batches(served_cases(DATA))
    assert len([entry for entry in found if entry.what == "total"]) == 44
    assert mean_error(found, "total") <= 7
    assert mean_error(found, "prefill") <= 8
    assert mean_error(found, "decode step") <= 9
    by_gpu: dict[str, list[float]] = {}
    for entry in found:
        if entry.what == "total":
            by_gpu.setdefault(entry.groups["gpu"], []).append(abs(entry.error))
    assert max(np.mean(errors) for errors in by_gpu.values()) <= 15


@pytest.mark.xfail(
    strict=True, reason="intervals of totals hold 40 of 44 batches, 91%, and decode steps' 93%, not 75 to 90%"
)
def test_intervals_of_whole_models_as_served() -> None:
    found = static_batches(served_cases(DATA))
    for what in ("total", "prefill", "decode step"):
        held = [bool(entry.inside) for entry in found if entry.what == what]
        assert 0.75 <= np.mean(held) <= 0.90, what  # every second case set how wide whole passes are


def test_closed_loops() -> None:
    """AIConfigurator's points under load: every 23rd, none of which the hosts' times were set on (those are even)."""
    points = serving_points(DATA)[1::46]
    found, left = closed_loops(points)
    assert len([entry for entry in found if entry.what == "TPOT"]) >= 0.6 * len(points), left
    assert mean_error(found, "TPOT") <= 17
    assert mean_error(found, "TTFT") <= 40


def test_vllm_under_load() -> None:
    """Eight runs of vLLM on H100; nothing was fitted to them."""
    whole = [entry for entry in vllm_runs(DATA) if entry.groups["stage"] == "all"]
    assert mean_error(whole, "E2E mean") <= 7
    assert mean_error(whole, "E2E p90") <= 8
    assert mean_error(whole, "ITL mean") <= 9  # of which two runs count pieces of text, not tokens: docs/simulate.md
    assert mean_error(whole, "TTFT mean") <= 16
    assert mean_error(whole, "TTFT p90") <= 18
