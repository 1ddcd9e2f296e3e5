"""The best matrix products of cards as others publish them: consumer, workstation and data-centre GPUs, most of which
no fit has seen. What one card reaches under its power limit follows from its silicon, not from a sibling's share."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import kernelcast as kc
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import Prediction
from kernelcast.hardware import gpu
from kernelcast.hardware.clocks import BURST, HELD, IDLE, SLOPE, product_rates, silicon, usual_clock_hz

RATES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("published_gemm_rates.toml").read_text())[
    "rates"
]
SIZES = (1024, 2048, 4096, 8192, 10240)
AGAIN = Conditions(rotation=1.0)  # the same matrices again and again


def flops(prediction: Prediction) -> float:
    return 2.0 * prediction.parameters["m"] ** 3


def best(gpu_id: str, stack: str = "torch") -> Prediction:
    dtype = RATES[gpu_id]["dtype"]
    made = [kc.predict(kc.Gemm(m=n, n=n, k=n, dtype=dtype, stack=stack), gpu_id, AGAIN) for n in SIZES]
    return max(made, key=lambda prediction: flops(prediction) / prediction.time_s)


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Forecast over published rate, less 1."""
    found = {name: best(name) for name in RATES}
    return {name: flops(p) / p.time_s / (RATES[name]["tflops"] * 1e12) - 1 for name, p in found.items()}


def test_rates_of_cards_that_no_constant_was_set_on(errors: dict[str, float]) -> None:
    held_out = [name for name, row in RATES.items() if not row.get("sets") and not row.get("known")]
    assert len(held_out) >= 15
    assert fmean(abs(errors[name]) for name in held_out) < 0.08


def test_rates_of_all_cards(errors: dict[str, float]) -> None:
    assert len(errors) >= 35
    assert fmean(map(abs, errors.values())) < 0.12
    assert max(map(abs, errors.values())) < 0.25, errors


@pytest.mark.parametrize("gpu_id", RATES)
def test_no_card_is_faster_than_its_bound(gpu_id: str) -> None:
    found = kc.predict(kc.Gemm(m=8192, n=8192, k=8192, dtype=RATES[gpu_id]["dtype"], stack="torch"), gpu_id, AGAIN)
    assert RATES[gpu_id]["tflops"] * 1e12 <= flops(found) / found.bound_s


@pytest.mark.parametrize("gpu_id", [name for name, row in RATES.items() if not row.get("known")])
@pytest.mark.parametrize("stack", ["torch", "vllm"])
def test_the_interval_holds_what_was_published(gpu_id: str, stack: str) -> None:
    """So a card whose architecture was measured may be called near."""
    found = best(gpu_id, stack)
    assert flops(found) / found.high_s <= RATES[gpu_id]["tflops"] * 1e12 <= flops(found) / found.low_s


def test_watts_at_the_clock_that_the_limit_leaves() -> None:
    """An L4: 58 SMs, 72 W, of which a tenth is drawn whatever runs. At the clock of its lasting products the rest is
    v² clock (joules a FLOP x FLOPs a clock + joules a cycle)."""
    target, known = gpu("l4"), silicon("8.9")
    rates = product_rates(target)
    assert known is not None and rates is not None
    efficiency = 1 - 0.07  # the full rate of 1,024 FLOPs a clock and SM
    clock_hz = rates.lasting / efficiency * target.clock_boost_hz
    volts = 1 - SLOPE * (1 - clock_hz / known.clock_hz)
    watts = 58 * clock_hz * volts**2 * (known.flop_j * 1024 * efficiency + known.cycle_j)
    assert watts + IDLE * 72 == pytest.approx(HELD * 72, rel=1e-6)
    assert rates.burst > rates.lasting
    assert BURST > HELD


def test_more_watts_are_never_slower_and_end_at_the_usual_clock() -> None:
    """An RTX 4090 of 128 SMs at 512 FLOPs a clock goes beyond its boost clock where the limit lets it."""
    target = gpu("rtx_4090")
    shares = [product_rates(replace(target, power_w=watts)) for watts in (150, 300, 450, 600, 1200)]
    lasting = [each.lasting for each in shares if each]
    assert lasting == sorted(lasting)
    assert lasting[-1] == pytest.approx((1 - 0.07 / 2) * usual_clock_hz(target) / target.clock_boost_hz)
    assert target.clock_boost_hz < usual_clock_hz(target) < 3.105e9


def test_the_bound_is_at_the_highest_clock() -> None:
    """2 x 8192³ FLOPs at 128 SMs x 512 FLOPs x 3.105 GHz."""
    found = kc.predict(kc.Gemm(m=8192, n=8192, k=8192, dtype="bf16", stack="torch"), "rtx_4090")
    assert found.bound_s == pytest.approx(2 * 8192**3 / (128 * 512 * 3.105e9))
