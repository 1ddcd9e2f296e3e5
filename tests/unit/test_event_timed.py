"""Long event-timed calls as kernels, what a fit leaves out, and the sectors of tensors that lie across."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pytest

from kernelcast.forecast.predictor import sustained_start_s
from kernelcast.hardware import gpu
from kernelcast.tracing.aten.elementwise import fetched_bytes
from kernelcast.tracing.traced import Tensor
from kernelcast_lab.fit.families import EAGER, KERNELS, family_columns, fitted_columns, with_kernels


def test_a_long_call_is_its_kernel_and_the_hosts_time() -> None:
    columns = {
        "op": np.array(["add"] * 4, dtype=object), "gpu": np.array(["v100_pcie"] * 4, dtype=object),
        "stack": np.array([EAGER, EAGER, EAGER, "torch"], dtype=object), "rows": np.array([1.0, 2, 3, 4]),
        "latency_us": np.array([30.0, 100.0, 1000.0, 5000.0]),
    }  # fmt: skip
    found = with_kernels(columns)
    assert found["rows"].tolist() == [1, 2, 3, 4, 3]  # 1,000 us is over four times the shortest, 100 is not
    assert found["stack"].tolist() == [EAGER, EAGER, EAGER, "torch", KERNELS]
    host_us = 30 - sustained_start_s(gpu("v100_pcie")) * 1e6
    assert found["latency_us"][-1] == pytest.approx(1000 - host_us)


def test_rows_of_other_stacks_stay_as_they_are() -> None:
    columns = {"op": np.array(["add"], dtype=object), "gpu": np.array(["h200_sxm"], dtype=object),
               "stack": np.array(["torch"], dtype=object), "latency_us": np.array([5.0])}  # fmt: skip
    assert with_kernels(columns)["latency_us"].tolist() == [5.0]


def test_a_fit_sees_no_test_split_but_amds(tmp_path: Path) -> None:
    path = tmp_path / "neusight" / "ops.parquet"
    path.parent.mkdir()
    with duckdb.connect() as connection:
        connection.execute(
            "COPY (SELECT 'linear' AS op, 1 AS B, 512 + i AS M, 512 AS N, 512 AS K, g AS gpu, s AS split,"
            " 200.0 + i AS latency_us, 'p2.1.0' AS torch_version, 'sgemm' AS kernel_name"
            " FROM range(20) AS r(i), (VALUES ('Tesla T4'), ('AMD Instinct MI210')) AS a(g),"
            f" (VALUES ('train'), ('test')) AS b(s)) TO '{path}' (FORMAT parquet)"
        )
    whole, fitted = family_columns(tmp_path, "gemm"), fitted_columns(tmp_path, "gemm")
    assert {(g, s) for g, s in zip(whole["gpu"], whole["split"], strict=True)} >= {("t4", "test"), ("mi210", "test")}
    kept = {(g, s) for g, s in zip(fitted["gpu"], fitted["split"], strict=True)}
    assert kept == {("t4", "train"), ("mi210", "train"), ("mi210", "test")}
    assert set(fitted["layout"]) == {"tn"}  # a Linear's weight is [out, in]


def test_a_tensor_across_the_order_of_the_output_is_fetched_by_sectors() -> None:
    """Scores (heads, queries, keys) and a bias that lies as (queries, keys, heads)."""
    heads, length = 32, 1024
    scores = Tensor((heads, length, length), (length * length, length, 1), "fp32", 1)
    bias = Tensor((heads, length, length), (1, length * heads, heads), "fp32", 2)
    whole = heads * length * length * 4
    passed = length * length * 32  # bytes of sectors until the next head wants its neighbour
    assert fetched_bytes([scores, bias], scores, l2_bytes=0.5 * passed) == whole + 8 * whole
    assert fetched_bytes([scores, bias], scores, l2_bytes=2 * passed) == 2 * whole
    assert fetched_bytes([scores, scores], scores, l2_bytes=1.0) == 2 * whole
