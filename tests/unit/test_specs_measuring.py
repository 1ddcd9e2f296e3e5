"""Microbenchmarks without a GPU: which shapes, which is the best, what is checked, what is noted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernelcast.collect import specs
from kernelcast.collect.power_meter import GpuState
from kernelcast.collect.specs import FORMATS, SHAPES, Product
from kernelcast.collect.specs_draft import Microbenchmarks
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu

H200 = gpu("h200_sxm")
PEAK = H200.tensor_flops_per_s("bf16")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(specs, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_shapes_are_large_on_the_gpu_and_no_burst_is_long() -> None:
    for peak in (60e12, PEAK, 9e15):  # T4, H200, B200 in nvfp4
        chosen = specs.fitting(peak)
        assert len(chosen) >= 2
        assert all(100e-6 <= 2 * math.prod(shape) / peak <= 4e-3 for shape in chosen)
    assert specs.fitting(1e12) == [SHAPES[0]]  # a GPU so slow that all are long


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "int8"])
def test_products_are_checked_against_float32(dtype: str, on_host: None) -> None:
    product = FORMATS[dtype](64, 96, 128)
    assert specs.checked(product, dtype) is product
    wrong = Product(lambda: product.launch() * 1.5, product.factors)
    with pytest.raises(KernelcastError, match=r"wrong by 0\.5"):
        specs.checked(wrong, dtype)
    nothing = Product(lambda: torch.full((64, 96), math.nan), product.factors)
    with pytest.raises(KernelcastError, match="wrong by nan"):
        specs.checked(nothing, dtype)


def test_numbers_of_four_bits_are_two_a_byte(on_host: None) -> None:
    a, b = FORMATS["nvfp4"](64, 96, 128).factors()
    assert a.shape == (16, 128) and b.shape == (96, 128)
    assert set(a.abs().flatten().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    assert abs(float(b.mean())) < 0.3  # as many below 0 as above


def test_the_best_shape_counts(on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int, int]] = []

    def product(m: int, n: int, k: int) -> Product:
        made.append((m, n, k))
        if m * n * k > 8192**3:
            raise torch.OutOfMemoryError("too large")
        one = torch.ones(1, 1)
        return Product(lambda: one, lambda: (one, one))

    shares = iter((0.7, 0.9, 0.8, 0.6))
    monkeypatch.setitem(FORMATS, "bf16", product)
    monkeypatch.setattr(specs, "burst_s", lambda launch, guess_s: guess_s / next(shares))
    found = Microbenchmarks()
    specs._bursts("bf16", PEAK, found)
    assert found.bursts["bf16"] == pytest.approx(0.9 * PEAK)
    assert found.shapes["bf16"] == "4096 x 14336 x 4096"
    assert len(made) == 5  # what does not fit in memory is passed over


def test_what_lasts_is_told_with_its_watts_and_clock(on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        def state(self) -> GpuState:
            return GpuState(690.0, 1500, 3201, 60, 4)

    told = {"seconds_per_call": 2 * 8192**3 / 700e12, "power_w": 695.0, "sm_mhz": 1500.0, "reasons": 4}
    one = torch.ones(1, 1)
    monkeypatch.setitem(FORMATS, "bf16", lambda m, n, k: Product(lambda: one, lambda: (one, one)))
    monkeypatch.setattr(specs, "_meter", Meter)
    monkeypatch.setattr(specs, "captured", lambda launches: type("Graph", (), {"replay": lambda self: None})())
    monkeypatch.setattr(specs, "measured_power", lambda load, meter, warm_s, window_s: told)
    found = Microbenchmarks(bursts={"bf16": 850e12}, shapes={"bf16": "8192 x 8192 x 8192"})
    specs._long("bf16", PEAK, found)
    long = found.longs["bf16"]
    assert long.flops_per_s == pytest.approx(700e12)
    assert (long.power_w, long.sm_mhz, long.by_power) == (695.0, 1500.0, True)
    with pytest.raises(KernelcastError, match="no burst of it ran"):
        specs._long("fp8", PEAK, Microbenchmarks())


def test_what_cannot_run_is_noted_and_the_rest_is_measured(on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(chip: Any, found: Microbenchmarks) -> Any:
        def fails() -> None:
            raise RuntimeError("no kernel image\nis available")

        def works() -> None:
            found.gap_s = 1e-6

        return [("first", fails), ("second", works)]

    said: list[tuple[int, int, str]] = []
    monkeypatch.setattr(specs, "_products", lambda chip, found: [])
    monkeypatch.setattr(specs, "_others", parts)
    monkeypatch.setattr(specs, "stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    found = specs.measure(H200, lambda *told: said.append(told))
    assert found.skipped == {"first": "no kernel image is available"} and found.gap_s == 1e-6
    assert said == [(0, 2, "first"), (1, 2, "second"), (2, 2, "")]

    def lost() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(KernelcastError, match="the GPU is lost after measuring first"):
        specs.measure(H200)


def test_formats_that_the_gpu_lacks_are_not_tried() -> None:
    found = Microbenchmarks()
    names = [name for name, _ in specs._products(gpu("a100_sxm"), found)]
    assert names == ["bf16", "bf16, long", "fp16", "tf32", "int8"]
    assert set(found.skipped) == {"fp8", "fp8_block", "nvfp4"}


def test_sums_that_are_off_are_refused() -> None:
    specs._near("sums", 1.0001, 1.0)
    with pytest.raises(KernelcastError, match=r"sums: 1\.1, should be 1"):
        specs._near("sums", 1.1, 1.0)
