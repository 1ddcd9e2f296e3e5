"""The clock that a GPU's power limit leaves while its tensor cores work, from what its silicon draws.

    P = idle + v² (joules a FLOP · FLOPs/s + joules a cycle · SMs · clock)

``v``: the voltage over that of the clock at which the silicon was rated (``silicon.toml``), half as steep as the clock
below it. A run that lasts holds the board's limit; bursts of milliseconds, as single products are timed in, may draw
more. Above the advertised boost clock, which is a mean of games, a card goes as its silicon allows, at most to the
highest clock that the driver lists (``clock_max_hz``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from kernelcast.hardware.gpu import MMA_SYNC, Gpu
from kernelcast.toml_folder import read_toml

_SILICON = Path(__file__).with_name("silicon.toml")
SLOPE = 0.5  # of the voltage against the clock, both relative: as the power model of the H200 has it
BURST = 1.3  # times the limit that milliseconds may draw, as the same power model has it
HELD = 0.975  # of its limit that a GPU at its limit draws, likewise
IDLE = 0.1  # of its limit that it draws whatever runs
_FULL_RATE = 1024.0  # FLOPs a clock and SM of mma.sync in 16 bits with fp32 accumulation, on professional cards
_BESIDE = 0.07  # of the time at that rate in which large products leave tensor cores waiting; at half the rate, half


@dataclass(frozen=True)
class Silicon:
    """A generation's: joules of a 16-bit FLOP, and of a cycle of an SM with work, at ``clock_hz``."""

    flop_j: float
    cycle_j: float
    clock_hz: float


@dataclass(frozen=True)
class ProductRates:
    """Shares of the published peak that large 16-bit products reach: in bursts, and in runs that last."""

    burst: float
    lasting: float


@functools.cache
def silicon(compute_capability: str) -> Silicon | None:
    """None: of a generation that nobody measured the watts of."""
    known = read_toml(_SILICON)["silicon"].get(compute_capability)
    return Silicon(**{name: float(known[name][0]) for name in ("flop_j", "cycle_j", "clock_hz")}) if known else None


def usual_clock_hz(gpu: Gpu) -> float:
    """What a card runs at under a load that its power limit allows: beyond the advertised boost clock where its
    silicon goes higher."""
    return gpu.clock_boost_hz * (1 + _usual() * (gpu.clock_reserve - 1))


@functools.cache
def _usual() -> float:
    return float(read_toml(_SILICON)["usual"]["way"][0])


def product_rates(gpu: Gpu) -> ProductRates | None:
    """None where the silicon is unknown, or has another instruction for matrix products."""
    rate = gpu.tensor_flops_per_clk_sm.get("fp16", 0.0)
    if gpu.instruction_path != MMA_SYNC or not rate or silicon(gpu.compute_capability) is None:
        return None
    return _rates(gpu.compute_capability, rate, gpu.sm_count, gpu.power_w, usual_clock_hz(gpu), gpu.tensor_clock_hz)


@functools.lru_cache(maxsize=1024)
def _rates(
    capability: str, rate: float, sm_count: int, power_w: float, usual_hz: float, published_hz: float
) -> ProductRates:
    known = silicon(capability)
    assert known is not None
    efficiency = 1 - _BESIDE * rate / _FULL_RATE
    cycle_j = sm_count * (known.flop_j * rate * efficiency + known.cycle_j)

    def share(limit_w: float) -> float:
        return efficiency * min(usual_hz, _clock_hz(known, cycle_j, limit_w - IDLE * power_w)) / published_hz

    return ProductRates(share(BURST * power_w), share(HELD * power_w))


def _clock_hz(known: Silicon, cycle_j: float, watts: float) -> float:
    """At which cycles of ``cycle_j`` joules draw so many watts: clock · v(clock)² · joules = watts, by halving."""
    low, high = 0.0, 4 * known.clock_hz
    for _ in range(40):
        clock = (low + high) / 2
        volts = 1 - SLOPE * (1 - clock / known.clock_hz)
        low, high = (clock, high) if clock * volts**2 * cycle_j < watts else (low, clock)
    return low
