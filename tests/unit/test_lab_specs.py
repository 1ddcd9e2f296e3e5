"""What tables of measured products say of a GPU, by the definitions of collect --specs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import gpu
from kernelcast_lab.data.specs import LEAST_CALLS, SustainedSpecs, by_gpu, of_format

H200 = gpu("h200_sxm")
PEAK = H200.tensor_flops_per_s("bf16")


def rows(m: Any, n: Any, k: Any, seconds: Any, dtype: str = "bf16", stack: str | None = None) -> dict[str, Any]:
    shape = np.broadcast_shapes(np.shape(m), np.shape(n), np.shape(k), np.shape(seconds))
    numbers = {"m": m, "n": n, "k": k, "latency_us": np.asarray(seconds) * 1e6}
    words = {"op": "gemm", "dtype": dtype, "stack": stack}
    return {
        **{name: np.broadcast_to(np.asarray(value, dtype=float), shape).copy() for name, value in numbers.items()},
        **{name: np.full(shape, word, dtype=object) for name, word in words.items()},
    }


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_the_best_hundredth_of_large_products_the_median_of_long_ones() -> None:
    at_peak_s = 2 * 4096**3 / PEAK  # 0.139 ms
    shares = np.linspace(0.5, 0.9, 101)
    large = rows(4096, 4096, 4096, at_peak_s / shares)
    long = rows(16384, 16384, 16384, np.full(60, 2 * 16384**3 / PEAK / 0.7))  # 12.7 ms
    tall = rows(4096, 512, 65536, np.full(100, 1e-9))  # one side is short: whatever it says does not count
    found = of_format(joined(large, long, tall), H200, "bf16")
    assert found.large == 161
    assert found.tensor_fraction == pytest.approx(np.quantile([*shares, *[0.7] * 60], 0.99))
    assert found.long_fraction == pytest.approx(0.7)
    assert found.dram_fraction is None  # nothing waited for DRAM


def test_memory_by_products_with_few_rows_and_the_smallest() -> None:
    n, k = 16384, 16384  # 512 MiB of weights: over four times L2
    moved = 2 * (n * k + 16 * k + 16 * n)
    reading = rows(16, n, k, np.full(60, moved / (0.87 * H200.dram_bytes_per_s)))
    small = rows(1, 64, 64, np.full(40, 2.5e-6))
    found = of_format(joined(reading, small), H200, "bf16")
    assert found.dram_fraction == pytest.approx(0.87)
    assert found.smallest_s == pytest.approx(2.5e-6)
    assert found.tensor_fraction is None and found.large == 0
    few = {name: column[: LEAST_CALLS - 1] for name, column in reading.items()}
    assert of_format(few, H200, "bf16").dram_fraction is None


def test_an_engines_quantisation_is_taken_off() -> None:
    at_peak_s = 2 * 8192**3 / (2 * PEAK)
    asked = rows(8192, 8192, 8192, np.ones(60), "fp8", "vllm")
    ready = {**asked, "inputs": np.full(60, "ready", dtype=object)}

    def generic_us(columns: dict[str, Any]) -> Any:
        given = {name: column for name, column in columns.items() if name != "latency_us"}
        return predict_columns(given, H200, Conditions(predictor="generic"))[0]["predicted_us"]

    before_s = (generic_us(asked) - generic_us(ready)) * 1e-6
    assert np.all(before_s > 5e-6)
    found = of_format({**asked, "latency_us": (at_peak_s / 0.75 + before_s) * 1e6}, H200, "fp8")
    assert found.tensor_fraction == pytest.approx(0.75)
    assert found.smallest_s is None  # told by 16 bits


def test_as_fields_of_a_gpu_file() -> None:
    fields = by_gpu(
        [
            SustainedSpecs("h200_sxm", "bf16", 90, 0.88, 0.7, 0.87, 2.6e-6),
            SustainedSpecs("h200_sxm", "fp8", 90, 0.75, 0.6),
        ]
    )
    assert fields == {
        "h200_sxm": {
            "sustained_tensor_fractions": {"fp8": 0.75},
            "sustained_tensor_fraction": 0.88,
            "long_tensor_fraction": 0.7,
            "sustained_dram_fraction": 0.87,
            "sustained_launch_s": 2.6e-6,
        }
    }
