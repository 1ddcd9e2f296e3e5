"""Joules of work that a GPU repeats: the driver's energy counter between two of its changes, while nothing waits.

A workload is repeated for about a second, so that the counter (which moves every 20 to 100 ms), the clocks and the
voltage settle. Joules a call are watts times the seconds that a call takes meanwhile, at the clock that the power limit
leaves: both belong to work that goes on, not to a single call on a GPU that rested.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from kernelcast.errors import KernelcastError

WARM_S = 0.3  # before the window: clocks and voltage settle
WINDOW_S = 0.65
_POLL_S = 2e-3
_STATE_S = 20e-3
_MOST_SERIES = 64


@dataclass(frozen=True)
class GpuState:
    """Beside energy. ``reasons``: NVML's bits of why the clock is not higher (4: power, 0x20 and 0x40: heat)."""

    power_w: float | None
    sm_mhz: float | None
    memory_mhz: float | None
    temperature_c: float | None
    reasons: int | None


@dataclass(frozen=True)
class BoardLimits:
    """Limits of a board: highest clocks, memory bus, links that are up; None where the driver does not say."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    memory_bits: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    nvlinks: int = 0
    power_limit_w: float | None = None


class Meter(Protocol):
    """Where readings come from: NVML, or something that stands in for it in a test."""

    def energy_j(self) -> float | None: ...

    def state(self) -> GpuState: ...


class Load(Protocol):
    """Work that repeats."""

    def push(self) -> int:
        """Gives the GPU some more, waits while it has enough; the calls that were given."""
        ...

    def finish(self) -> None:
        """Waits until all is done."""
        ...


class Idle:
    """Nothing to do."""

    def push(self) -> int:
        time.sleep(_STATE_S)
        return 0

    def finish(self) -> None:
        pass


@dataclass
class Readings:
    """Readings of a thread while work repeats; ``energy`` is (time, joules since some start) pairs."""

    meter: Meter
    clock: Callable[[], float] = time.perf_counter
    energy: list[tuple[float, float]] = field(default_factory=list)
    states: list[tuple[float, GpuState]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Readings:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        next_state = 0.0
        while not self._stop.is_set():
            before = self.clock()
            joules = self.meter.energy_j()
            if joules is not None:
                self.energy.append(((before + self.clock()) / 2, joules))
            if before >= next_state:
                self.states.append((before, self.meter.state()))
                next_state = before + _STATE_S
            time.sleep(_POLL_S)


def measured(
    load: Load,
    meter: Meter,
    warm_s: float = WARM_S,
    window_s: float = WINDOW_S,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Watts of a load over a window after a warm-up, and the wall seconds of a call."""
    with Readings(meter, clock) as readings:
        begin = clock()
        while clock() - begin < warm_s:
            load.push()
        load.finish()
        start, calls = clock(), 0
        while (stop := clock()) - start < window_s:
            calls += load.push()
        load.finish()
        stop = clock()
    result = {"seconds_per_call": (stop - start) / calls if calls else None, "calls": calls,
             "window_s": round(stop - start, 4), "started": begin}  # fmt: skip
    return result | summary(readings.energy, readings.states, start, stop)


def summary(
    energy: Sequence[tuple[float, float]], states: Sequence[tuple[float, GpuState]], start: float, stop: float
) -> dict[str, Any]:
    """Watts between the first and last change of the counter inside of the window; medians of the rest."""
    inside = [state for at, state in states if start <= at <= stop]
    changes = [after for before, after in pairwise(energy) if after[1] != before[1]]
    kept = [change for change in changes if start <= change[0] <= stop]
    drawn = [state.power_w for state in inside if state.power_w is not None]
    instant_w = statistics.fmean(drawn) if drawn else None
    counted_w = None
    if len(kept) >= 2:
        (first_s, first_j), (last_s, last_j) = kept[0], kept[-1]
        counted_w = (last_j - first_j) / (last_s - first_s)
    power_w = counted_w if counted_w is not None else instant_w
    if power_w is None:
        raise KernelcastError("the driver reports neither energy nor power of this GPU")
    series = [(round((at - start) * 1e3, 1), round(joules - changes[0][1], 3)) for at, joules in changes[:_MOST_SERIES]]
    reasons = 0
    for state in inside:
        reasons |= state.reasons or 0
    return {
        "power_w": round(power_w, 3), "counted_w": counted_w, "instant_w": instant_w, "updates": len(kept),
        "sm_mhz": _mean([state.sm_mhz for state in inside]), "memory_mhz": _mean([s.memory_mhz for s in inside]),
        "temperature_c": _mean([state.temperature_c for state in inside]), "reasons": reasons, "series": series,
    }  # fmt: skip


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 2) if known else None


class Nvml:
    """One GPU, by its UUID (as PyTorch has it) or the first, through nvidia-ml-py.

    The energy counter (millijoules since the driver was loaded; Volta and later) moves every 20 to 100 ms.
    """

    def __init__(self, uuid: str | None = None) -> None:
        try:
            import pynvml
        except ImportError:
            raise KernelcastError("power is read by nvidia-ml-py: pip install 'kernelcast[torch]'") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._gpu = self._handle(uuid)
        except pynvml.NVMLError as error:
            raise KernelcastError(f"NVIDIA's driver (libnvidia-ml) gives no power here: {error}") from None

    def _handle(self, uuid: str | None) -> Any:
        with contextlib.suppress(self._nvml.NVMLError):
            if uuid:
                return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        return self._nvml.nvmlDeviceGetHandleByIndex(0)

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded; None before Volta."""
        return _times(self._read("TotalEnergyConsumption"), 1e-3)

    def board(self) -> BoardLimits:
        links = [self._read("NvLinkState", link) for link in range(self._nvml.NVML_NVLINK_MAX_LINKS)]
        return BoardLimits(
            sm_mhz=self._read("MaxClockInfo", self._nvml.NVML_CLOCK_SM),
            memory_mhz=self._read("MaxClockInfo", self._nvml.NVML_CLOCK_MEM),
            memory_bits=self._read("MemoryBusWidth"),
            pcie_generation=self._read("MaxPcieLinkGeneration"),
            pcie_lanes=self._read("MaxPcieLinkWidth"),
            nvlinks=sum(state == 1 for state in links),
            power_limit_w=_times(self._read("EnforcedPowerLimit"), 1e-3),
        )

    def state(self) -> GpuState:
        return GpuState(
            power_w=_times(self._instant_mw() or self._read("PowerUsage"), 1e-3),
            sm_mhz=self._read("ClockInfo", self._nvml.NVML_CLOCK_SM),
            memory_mhz=self._read("ClockInfo", self._nvml.NVML_CLOCK_MEM),
            temperature_c=self._read("Temperature", self._nvml.NVML_TEMPERATURE_GPU),
            reasons=self._read("CurrentClocksThrottleReasons"),
        )

    def _instant_mw(self) -> int | None:
        """The plain reading is a mean over a second on some GPUs."""
        try:
            (reading,) = self._nvml.nvmlDeviceGetFieldValues(self._gpu, [self._nvml.NVML_FI_DEV_POWER_INSTANT])
        except self._nvml.NVMLError:
            return None
        return int(reading.value.uiVal) if reading.nvmlReturn == 0 else None

    def _read(self, name: str, *arguments: int) -> int | None:
        """None where this GPU or driver does not give it."""
        try:
            return int(getattr(self._nvml, f"nvmlDeviceGet{name}")(self._gpu, *arguments))
        except self._nvml.NVMLError:
            return None


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
