"""The power model: its arithmetic, what a limit does, and how far off it is on what was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.energy import Activity, PowerModel, activity, power_model, run_operating_point, sustained
from kernelcast.energy.model import FOLDER, coefficients, measured_ids
from kernelcast.energy.power import energy_of, lasting, longer_s, throttled_s, with_cap
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call
from kernelcast.forecast.conditions import DEFAULT
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu_ids
from kernelcast.machine.analyse import PIPELINES
from kernelcast.results import Interval

H200 = kc.gpu("h200_sxm")
TABLE = Path(__file__).parents[2] / "validation" / "power_h200_sxm.parquet"


def made(**changes: float) -> PowerModel:
    """Round numbers: 100 W at rest, 50 while SMs work, 400 of tensor cores, 300 of DRAM; no burst."""
    given = {"asleep_w": 100.0, "idle_w": 100.0, "busy_w": 50.0, "start_s": 0.0, "voltage": 1.0, "memory": 1.0,
             "limit_w": 1e6, "board_w": 1e6, "burst_w": 1e6, "burst_s": 1e9, "low": 0.9, "high": 1.1}  # fmt: skip
    other = np.zeros(len(PIPELINES))
    other[PIPELINES.index("dram")] = 300.0
    return PowerModel(**{**given, **changes}, tensor_w={"bf16": 400.0}, other_w=other, measured="x", support="seen")


def one(tensor_s: float, dram_s: float, filled: float = 1.0) -> Activity:
    busy = np.zeros((len(PIPELINES), 1))
    busy[PIPELINES.index("tensor")], busy[PIPELINES.index("dram")] = tensor_s, dram_s
    return Activity(busy, np.array([filled]), np.ones(1), np.array(["bf16"], dtype=object))


def test_joules_are_watts_by_what_each_pipeline_does() -> None:
    # 1 s: 100 at rest + 50 x half of the SMs + 400 x 0.8 s of tensor cores + 300 x 0.2 s of DRAM
    found = sustained(made(), one(0.8, 0.2, filled=0.5), np.array([1.0]))
    assert found.energy_j[0] == pytest.approx(100 + 25 + 320 + 60)
    assert found.clock[0] == 1 and not found.limited[0]


def test_a_limit_lowers_the_clock_and_slows_what_follows_it() -> None:
    model = made(limit_w=300.0, board_w=300.0)
    bound_by_tensor = sustained(model, one(1.0, 0.0), np.array([1.0]))
    clock = bound_by_tensor.clock[0]
    # time 1/c; joules 100/c + c³ · 50/c + c² · 400 = 300 W x 1/c, so that 100 + 50 c³ + 400 c³ = 300
    assert 100 + 50 * clock**3 + 400 * clock**3 == pytest.approx(300, rel=1e-3)
    assert bound_by_tensor.time_s[0] == pytest.approx(1 / clock, rel=1e-3)
    assert bound_by_tensor.power_w[0] <= 300.01
    mostly_waiting = sustained(made(limit_w=440.0, board_w=440.0), one(0.1, 1.0), np.array([1.0]))
    # what a byte costs on the chip falls with the voltage: the clock can stay higher
    on_chip = sustained(made(limit_w=440.0, board_w=440.0, memory=0.5), one(0.1, 1.0), np.array([1.0]))
    assert mostly_waiting.clock[0] < on_chip.clock[0] < 1
    assert mostly_waiting.limited[0] and mostly_waiting.time_s[0] < 1.01


def test_times_were_measured_in_bursts() -> None:
    """A call that drew its burst limit when it was timed would be faster at the full clock, and is slower for long."""
    free = sustained(made(limit_w=300.0, board_w=300.0), one(1.0, 0.0), np.ones(1))
    burst = sustained(made(limit_w=300.0, board_w=300.0, burst_w=400.0), one(1.0, 0.0), np.ones(1))
    assert burst.time_s[0] < free.time_s[0]  # of the slowing, a part was in the measured time already
    long = sustained(made(limit_w=300.0, board_w=300.0, burst_w=400.0, burst_s=1e-9), one(1.0, 0.0), np.ones(1))
    assert long.time_s[0] == pytest.approx(1.0, rel=2e-3)  # measured at the clock that the limit leaves


def test_a_run_has_one_clock_and_waits_at_rest() -> None:
    calls = Activity.joined([one(1.0, 0.0), one(0.0, 1.0)])
    found = run_operating_point(made(), calls, np.ones(2), np.array([2.0, 1.0]), waits_s=5.0)
    assert found.energy_j[0] == pytest.approx(2 * (100 + 50 + 400) + (100 + 50 + 300) + 5 * 100)
    assert found.time_s[0] == pytest.approx(8.0)


@pytest.mark.parametrize("cap", [600, 500, 400, 300])
def test_a_lower_cap_is_never_faster_and_slows_products_more_than_copies(cap: int) -> None:
    columns = {"op": ["gemm", "add"], "m": [8192, None], "n": [8192, None], "k": [8192, None], "rows": [None, 65536],
               "cols": [None, 8192], "dtype": ["bf16", "bf16"], "stack": ["torch", "torch"]}  # fmt: skip
    table = {name: np.array(values, dtype=object) for name, values in columns.items()}
    seconds = np.array([1.45e-3, 0.75e-3])
    before = sustained(power_model(H200), activity(table, H200, DEFAULT), seconds)  # type: ignore[arg-type]
    lower = H200.replace(power_w=cap)
    after = sustained(power_model(lower), activity(table, lower, DEFAULT), seconds)  # type: ignore[arg-type]
    slower = after.time_s / before.time_s
    assert np.all(slower >= 1 - 1e-6) and slower[0] > slower[1]
    assert np.all(after.power_w <= cap) and np.all(after.energy_j <= before.energy_j * 1.001)


def test_what_ifs_keep_joules_a_byte() -> None:
    """Twice the bandwidth: the same bytes cost the same joules, in half of DRAM's seconds."""
    faster = H200.replace(dram_bytes_per_s=2 * H200.dram_bytes_per_s)
    before, after = (power_model(chip).watts("bf16") for chip in (H200, faster))  # type: ignore[union-attr]
    assert after[PIPELINES.index("dram")] == pytest.approx(2 * before[PIPELINES.index("dram")])
    assert after[PIPELINES.index("l2")] == before[PIPELINES.index("l2")]


def test_every_gpu_has_a_model_or_none_and_draws_no_more_than_its_board() -> None:
    for name in gpu_ids():
        chip = kc.gpu(name)
        model = power_model(chip)
        assert (model is None) == (chip.vendor != H200.vendor), name
        if model is not None:
            _, drawn = lasting(kc.predict(kc.Gemm(m=4096, n=4096, k=4096, dtype="fp16"), chip), chip, DEFAULT)
            assert drawn is not None and 0 < drawn.power_w <= chip.power_w * 1.001, name
            assert drawn.joules.low < drawn.joules.value < drawn.joules.high
            assert model.support == ("seen" if name in measured_ids() else model.support) != ""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_coefficients_are_physical_and_say_where_they_are_from(path: Path) -> None:
    found = coefficients(path.stem)
    joules = dict(found.joules)
    assert 0 < found.idle_w < found.idle_w + found.busy_w < kc.gpu(path.stem).power_w
    assert joules["tensor_fp8"] < joules["tensor_bf16"] < joules["tensor_tf32"]  # narrower is cheaper
    assert joules["smem"] < joules["l2"] < joules["dram"]  # farther is dearer
    assert 1e-11 < joules["dram"] < 3e-10 and 1e-13 < joules["tensor_bf16"] < 3e-12
    assert {"data", "left_out"} <= dict(found.sources).keys()


def test_what_switches_every_cycle_costs_less_at_a_lower_clock() -> None:
    # measured on the H200: 122 W at rest at 1,980 MHz, 81 W at 345
    model = power_model(H200)
    assert model is not None
    assert model.resting_w(1.0) == pytest.approx(122.5, abs=0.1)
    assert model.resting_w(345 / 1980) == pytest.approx(80.7, rel=0.05)
    assert model.cycling(0.5) < 0.5 * model.volts(0.5)


@pytest.mark.parametrize(
    ("cap_w", "published"), [(360, 1900.02 / 1883.27), (300, 1900.02 / 1813.35), (250, 1900.02 / 1596.71)]
)
def test_decode_under_a_cap_is_as_slow_as_published(cap_w: float, published: float) -> None:
    """GLM 4.5 Air, in FP8, served on two RTX PRO 6000 (docs/energy.md): how much longer the same load took than at
    600 W. No published curve is in the fit."""
    board = kc.gpu("rtx_pro_6000")
    times = [
        kc.infer("llama-3.1-8b", chip, batch=16, input_len=512, output_len=64).tpot.value
        for chip in (board, with_cap(board, cap_w))
    ]
    assert times[1] / times[0] == pytest.approx(published, abs=0.04)


def test_decode_of_an_h100_loses_little_under_a_cap() -> None:
    h100 = kc.gpu("h100_sxm")
    capped, alone = (
        kc.infer("llama-3.1-8b", chip, batch=1, input_len=512, output_len=64).tpot.value
        for chip in (with_cap(h100, 300), h100)
    )
    assert 1.05 < capped / alone < 1.3  # it was 1.6: the watts of cycles that were not run


def test_caps_that_no_gpu_takes_are_refused() -> None:
    for watts in (0, -5, 100, 701):
        with pytest.raises(KernelcastError, match="takes a limit from"):
            with_cap(H200, watts)
    assert with_cap(H200, None) is H200
    with pytest.raises(KernelcastError, match="no power model"):
        with_cap(kc.gpu("mi300x"), 500)


def test_the_energy_of_calls_is_bounded_by_the_limit() -> None:
    times = Times(H200)
    call = Call.of("gemm", {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "stack": "torch"})
    times.predict([call])
    short = Interval.exact(times[call].interval.value * 0.5)  # as if the run took half of what its kernel does
    found = energy_of({call: (1.0, times[call].interval.value)}, times, 0.0, short)
    assert found is not None and found.joules.value == pytest.approx(H200.power_w * short.value)
    assert throttled_s(call, times[call].interval.value, times) >= 0
    assert energy_of({}, times, 0.0, short) is None


def test_a_lower_limit_comes_on_top_of_the_boards() -> None:
    call = Call.of("gemm", {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "stack": "torch"})
    assert H200.tensor_flops_per_j
    time_s = 2 * 8192**3 / (H200.tensor_flops_per_j * H200.power_w) / 2  # the board's limit makes it twice as long
    assert longer_s(call, time_s, H200) == pytest.approx(time_s)
    assert longer_s(call, time_s, with_cap(H200, 400)) == pytest.approx(time_s)
    assert longer_s(call, time_s, with_cap(H200, 400), 1.5) == pytest.approx(2 * time_s)  # 1.5 x 2 - 1


def test_left_out_calls_are_within_ten_percent() -> None:
    power = pytest.importorskip("kernelcast_lab.fit.power")
    rows = power.read_power(TABLE)
    lines = {line["calls"]: line for line in power.errors(rows, *power.left_out(rows))}
    for kind in ("gemm", "attention", "decode attention"):
        assert lines[kind]["joules_error"] < 0.10 and lines[kind]["watts_error"] < 0.07, lines[kind]
    assert lines["all"]["rows"] == 200 and lines["all"]["joules_error"] < 0.12


def test_the_shipped_coefficients_are_those_of_the_table() -> None:
    power = pytest.importorskip("kernelcast_lab.fit.power")
    rows = power.read_power(TABLE)
    again, shipped = power.fitted(rows), coefficients("h200_sxm")
    assert again.voltage == shipped.voltage and again.burst == shipped.burst
    assert dict(again.joules) == pytest.approx(dict(shipped.joules), rel=1e-3)
    joules, watts = power.left_out(rows)
    assert 0.72 <= power.inside_of_others(rows, joules, watts) <= 0.88
