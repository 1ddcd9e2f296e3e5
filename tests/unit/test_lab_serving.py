"""Measured serving cases: medians over runs, steps and parts of a total, rules for rows that cannot be used.

Every number in the tables here is invented.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kernelcast.errors import KernelcastError
from kernelcast_lab.data import serving

NOTE = "db-dump/2026-01-01; config_id=1; silicon_concurrency="


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    marks = ", ".join("(" + ", ".join("?" * len(rows[0])) + ")" for _ in rows)
    names = ", ".join(f'"{name}"' for name in rows[0])
    with duckdb.connect() as connection:
        query = f"COPY (SELECT * FROM (VALUES {marks}) AS t({names})) TO '{path}' (FORMAT parquet)"
        connection.execute(query, [cell for row in rows for cell in row.values()])


def run(prefill_s: float | None, median_step_s: float | None, total_s: float, **changes: Any) -> dict[str, Any]:
    """A run of two requests of 10 and 30 tokens, with 5 tokens out: four decode steps."""
    sizes = [None] * 5 if prefill_s is None else [2.0, 30.0, 5.0, 40.0, 10.0]
    names = ("batch_size", "input_len", "output_len", "total_prefill_tokens", "total_decode_tokens")
    row = {"gpu": "A100", "serving": "sglang", "model": "toy", "workload": "w_2", "tp": 1, "pp": 1}
    times = {"prefill_latency": prefill_s, "median_decode_latency": median_step_s, "total_latency": total_s}
    return {**row, **dict(zip(names, sizes, strict=True)), **times, **changes}


def requests(workload: str, inputs: Sequence[int], outputs: Sequence[int]) -> list[dict[str, Any]]:
    names = ("workload", "request", "num_prefill_tokens", "num_decode_tokens", "output_tokens")
    cells = zip(inputs, outputs, strict=True)
    return [dict(zip(names, (workload, i, n, 999, out), strict=True)) for i, (n, out) in enumerate(cells)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = [run(1.0, 0.1, 1.8), run(2.0, 0.3, 3.2), run(4.0, 0.2, 4.4)]
    runs.append(run(None, None, 7.0, gpu="H20", serving="vllm", workload="w2", tp=4, pp=2))
    write(tmp_path / "pipeweave/e2e_real.parquet", runs)
    write(tmp_path / "pipeweave/workloads.parquet", requests("w_2", (10, 30), (5, 5)) + requests("vllm_w2", (8,), (3,)))
    return tmp_path


def test_a_case_is_the_median_of_each_quantity(folder: Path) -> None:
    first, second = serving.served_cases(folder)
    assert first.key == ("a100_sxm", "sglang", "toy", "w_2", 1, 1)
    assert first.requests == ((10, 5), (30, 5)) and first.input_tokens == 40
    assert first.steps == 4 and first.runs == 3
    assert (first.prefill_s, first.total_s, first.decode_step_median_s) == (2.0, 3.2, 0.2)
    assert first.decode_s == pytest.approx(0.8)  # of 0.8, 1.2, 0.4: not 3.2 - 2.0
    assert first.decode_step_mean_s == pytest.approx(0.2)
    assert (second.gpu, second.stack, second.tp, second.pp) == ("h20", "vllm", 4, 2)
    assert second.requests == ((8, 3),) and second.total_s == 7.0
    assert second.prefill_s is second.decode_s is second.decode_step_mean_s is second.decode_step_median_s is None


def test_published_errors_by_group(folder: Path) -> None:
    names = ("gpu", "serving", "model", "workload", "tp", "pp", "prefill_ms", "decode_avg_ms", "total_ms")
    cells = [
        ("A100", "sglang", "toy", "w_2", 1, 1, 1000.0, 250.0, 3200.0),
        ("H20", "vllm", "toy", "w2", 4, 2, 1.0, 1.0, 7700.0),
    ]
    rows = [{"method": "ours", **dict(zip(names, row, strict=True)), "decode_total_ms": 4 * row[-2]} for row in cells]
    write(folder / "pipeweave/e2e_pred.parquet", rows)
    total = serving.published_errors(folder, "ours")["all"]
    assert total == pytest.approx({"total_s": 5.0, "prefill_s": 50.0, "decode_step_mean_s": 25.0})
    by_stack = serving.published_errors(folder, "ours", by="stack")
    assert set(by_stack) == {"sglang", "vllm"} and by_stack["vllm"] == pytest.approx({"total_s": 10.0})
    with pytest.raises(KernelcastError, match="unknown method 'theirs'"):
        serving.published_errors(folder, "theirs")


def test_a_run_that_contradicts_its_workload_is_refused(folder: Path) -> None:
    write(folder / "pipeweave/e2e_real.parquet", [run(1.0, 0.1, 1.8, total_prefill_tokens=41.0)])
    with pytest.raises(KernelcastError, match="total_prefill_tokens is 41, its workload has 40"):
        serving.served_cases(folder)
    write(folder / "pipeweave/workloads.parquet", requests("w_2", (10, 30), (5, 6)))
    with pytest.raises(KernelcastError, match="differ in output_tokens"):
        serving.served_cases(folder)
    write(folder / "pipeweave/workloads.parquet", requests("other", (10,), (5,)))
    with pytest.raises(KernelcastError, match="unknown workload 'w_2'"):
        serving.served_cases(folder)


def test_missing_table_and_column_are_one_line(folder: Path) -> None:
    with pytest.raises(KernelcastError, match="unknown table 'aiconfigurator/e2e_silicon'") as error:
        serving.serving_points(folder)
    assert "\n" not in str(error.value)
    row = run(1.0, 0.1, 1.8)
    del row["prefill_latency"]
    write(folder / "pipeweave/e2e_real.parquet", [row])
    with pytest.raises(KernelcastError, match="e2e_real has no column prefill_latency; it has batch_size") as error:
        serving.served_cases(folder)
    assert "\n" not in str(error.value)


def silicon(**changes: Any) -> dict[str, Any]:
    """32 requests in flight on 8 GPUs, experts cut in 8."""
    row: dict[str, Any] = {
        "id": "a", "silicon_data_source": NOTE + "32; measured=x", "backend": "sglang", "backend_version": "1.0",
        "model_path": "toy/moe", "system": "h200_sxm", "mode": "agg", "isl": 1000, "osl": 101,
        "gemm_quant_mode": "fp8", "moe_quant_mode": "fp8_block", "batch_size": 32.0, "tp_size": 8.0, "pp_size": 1.0,
        "attention_dp_size": 1.0, "moe_tp_size": 1.0, "moe_ep_size": 8.0, "silicon_ttft_ms": 500.0,
        "silicon_tpot_ms": 20.0,
    }  # fmt: skip
    return {**row, **changes}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, None),
        ({"tp_size": 1.0, "attention_dp_size": 8.0, "batch_size": 4.0}, None),  # 8 ranks of 4 requests
        ({"attention_dp_size": None, "moe_tp_size": 1.0, "moe_ep_size": 1.0, "gemm_quant_mode": None}, None),
        ({"mode": "disagg", "tp_size": None}, "disaggregated"),
        ({"tp_size": None}, "no_parallel_sizes"),
        ({"silicon_tpot_ms": None}, "no_time"),
        ({"silicon_data_source": "source_file=x.csv"}, "no_concurrency"),
        ({"batch_size": 8.0}, "several_replicas"),
        ({"tp_size": 64.0, "moe_tp_size": 8.0}, "multiplied_sizes"),
        ({"tp_size": 2.0, "attention_dp_size": 2.0, "moe_ep_size": 4.0, "batch_size": 16.0}, "multiplied_sizes"),
        ({"tp_size": 12.0, "moe_tp_size": 12.0, "moe_ep_size": 1.0}, "odd_gpus"),
        ({"tp_size": 16.0, "moe_ep_size": 16.0}, "beyond_a_node"),
        ({"tp_size": 16.0, "moe_ep_size": 16.0, "system": "gb200"}, None),
        ({"tp_size": 2.0}, "experts_disagree"),
        ({"moe_quant_mode": "fp3"}, "unknown_format"),
    ],
)
def test_why_a_row_is_unusable(changes: dict[str, Any], rule: str | None) -> None:
    assert serving.why_unusable(silicon(**changes)) == rule


def test_serving_points(tmp_path: Path) -> None:
    rows = [
        silicon(),
        silicon(id="again", silicon_ttft_ms=500.2, silicon_tpot_ms=20.01),
        silicon(id="dense", moe_tp_size=0.0, moe_ep_size=0.0, gemm_quant_mode=None, moe_quant_mode=None),
        silicon(id="split", mode="disagg"),
    ]
    write(tmp_path / "aiconfigurator/e2e_silicon.parquet", rows)
    first, dense = serving.serving_points(tmp_path)
    assert (first.gpu, first.stack, first.version, first.weights, first.experts) == (
        "h200_sxm", "sglang", "1.0", "fp8", "fp8_block",
    )  # fmt: skip
    assert (first.concurrency, first.batch, first.tp, first.dp, first.moe_tp, first.moe_ep) == (32, 32, 8, 1, 1, 8)
    assert (first.ttft_s, first.tpot_s) == (0.5, 0.02)
    assert first.running == pytest.approx(32 * 2.0 / 2.5)  # 100 steps of 20 ms after half a second
    assert (dense.id, dense.moe_tp, dense.moe_ep, dense.weights) == ("dense", None, None, "bf16")
    assert serving.left_out(tmp_path) == {"disaggregated": 1, "repeated": 1}
