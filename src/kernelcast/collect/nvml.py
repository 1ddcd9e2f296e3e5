"""What NVIDIA's driver says of a GPU's power: energy, watts, clocks, heat. By ctypes: nothing to install.

The energy counter (millijoules since the driver was loaded; Volta and later) moves every 20 to 100 ms.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from kernelcast.errors import KernelcastError

_LIBRARY = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_MOST_LINKS = 18
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT: the plain reading is a mean over a second on some GPUs


class _Field(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("id", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong), ("kind", ctypes.c_int), ("status", ctypes.c_int), ("value", ctypes.c_ulonglong),
    )  # fmt: skip


@dataclass(frozen=True)
class State:
    """Beside energy. ``reasons``: NVML's bits of why the clock is not higher (4: power, 0x20 and 0x40: heat)."""

    power_w: float | None
    sm_mhz: float | None
    memory_mhz: float | None
    temperature_c: float | None
    reasons: int | None


@dataclass(frozen=True)
class Board:
    """What a board is built for: highest clocks, memory bus, links that are up; None where the driver does not say."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    memory_bits: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    nvlinks: int = 0
    power_limit_w: float | None = None


class Nvml:
    """One GPU, by its UUID (as PyTorch tells it) or the first."""

    def __init__(self, uuid: str | None = None) -> None:
        try:
            self._library: Any = ctypes.CDLL(_LIBRARY)
        except OSError:
            raise KernelcastError(
                f"power is read from NVIDIA's driver, and {_LIBRARY} is not on this machine"
            ) from None
        if code := self._library.nvmlInit_v2():
            raise KernelcastError(f"NVIDIA's driver does not answer (nvmlInit: error {code})")
        self._gpu = ctypes.c_void_p()
        named = f"GPU-{uuid}".encode() if uuid else b""
        if not (named and self._library.nvmlDeviceGetHandleByUUID(named, ctypes.byref(self._gpu)) == 0):
            code = self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._gpu))
            if code:
                raise KernelcastError(f"NVIDIA's driver gives no GPU (error {code})")

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded; None before Volta."""
        return _times(self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()), 1e-3)

    def power_limit_w(self) -> float | None:
        return _times(self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint()), 1e-3)

    def board(self) -> Board:
        links = [self._read("nvmlDeviceGetNvLinkState", ctypes.c_uint(), link) for link in range(_MOST_LINKS)]
        return Board(
            sm_mhz=self._read("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(), _SM),
            memory_mhz=self._read("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(), _MEMORY),
            memory_bits=self._read("nvmlDeviceGetMemoryBusWidth", ctypes.c_uint()),
            pcie_generation=self._read("nvmlDeviceGetMaxPcieLinkGeneration", ctypes.c_uint()),
            pcie_lanes=self._read("nvmlDeviceGetMaxPcieLinkWidth", ctypes.c_uint()),
            nvlinks=sum(state == 1 for state in links),
            power_limit_w=self.power_limit_w(),
        )

    def state(self) -> State:
        return State(
            power_w=_times(self._instant_mw() or self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint()), 1e-3),
            sm_mhz=self._read("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM),
            memory_mhz=self._read("nvmlDeviceGetClockInfo", ctypes.c_uint(), _MEMORY),
            temperature_c=self._read("nvmlDeviceGetTemperature", ctypes.c_uint(), 0),
            reasons=self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong()),
        )

    def _instant_mw(self) -> int | None:
        field = _Field(id=_POWER_INSTANT)
        code = self._library.nvmlDeviceGetFieldValues(self._gpu, 1, ctypes.byref(field))
        return int(field.value & 0xFFFFFFFF) if code == 0 and field.status == 0 else None

    def _read(self, function: str, into: Any, *more: int) -> int | None:
        code = getattr(self._library, function)(self._gpu, *more, ctypes.byref(into))
        return int(into.value) if code == 0 else None


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
