"""Measurements that cannot be are refused by row, with the likely reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.collect.calibrate import calibrate
from kernelcast.diagnose.read import read_measured

SIZES = [(m, 4096, 4096) for m in (1, 16, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)]


def measured(factor: float = 1.0) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.object_]]]:
    """Products on an H200 at 1.3 times their bound, in other units by ``factor``."""
    calls = [kc.Gemm(m=m, n=n, k=k) for m, n, k in SIZES]
    times = [1.3e6 * found.bound_s * factor for found in kc.predict_many(calls, "h200_sxm")]
    columns = {"op": ["gemm"] * len(SIZES), "m": [s[0] for s in SIZES], "n": [4096] * len(SIZES),
               "k": [4096] * len(SIZES), "latency_us": times}  # fmt: skip
    return {name: np.array(values, dtype=object) for name, values in columns.items()}


def test_times_that_can_be_are_taken() -> None:
    found, bad = calibrate(measured(), "h200_sxm")
    assert not bad.messages and found.families["gemm"].rows == len(SIZES)


@pytest.mark.parametrize(("factor", "unit"), [(1e-3, "milliseconds"), (1e-6, "seconds")])
def test_another_unit_is_named(factor: float, unit: str) -> None:
    with pytest.raises(kc.KernelcastError, match=rf"12 bad rows: rows 1, 2, .*measured in {unit}\?"):
        calibrate(measured(factor), "h200_sxm")


def test_one_row_that_cannot_be_is_named() -> None:
    columns = measured()
    columns["latency_us"][9] = columns["latency_us"][9] / 10  # as if it had been a tenth of the size
    with pytest.raises(kc.KernelcastError, match=r"1 bad row: row 10: .*less than half .*another GPU, shape"):
        calibrate(columns, "h200_sxm")


def test_a_slower_gpu_than_was_measured_on_is_noticed() -> None:
    with pytest.raises(kc.KernelcastError, match="another GPU"):
        calibrate(measured(), "a2")


def test_diagnosis_refuses_a_table_in_milliseconds(tmp_path: Path) -> None:
    columns = measured(1e-3)
    path = tmp_path / "run.csv"
    rows = zip(*(columns[name] for name in ("m", "n", "k", "latency_us")), strict=True)
    lines = [",".join(map(str, ("gemm", *row))) for row in rows]
    path.write_text("\n".join(["op,m,n,k,measured_us", *lines]) + "\n")
    with pytest.raises(kc.KernelcastError, match=r"run\.csv: 12 bad rows: .*milliseconds"):
        read_measured(path, kc.gpu("h200_sxm"))
