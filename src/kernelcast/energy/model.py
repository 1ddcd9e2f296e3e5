"""The power model of a GPU: watts at rest, watts while kernels run, joules of a unit of work on each pipeline.

    P = idle + v² (busy · filled SMs + Σ over core pipelines of joules a unit · units/s) + joules a byte · DRAM bytes/s

``v`` is the voltage, 1 at the full clock and ``voltage`` times as steep as the clock below it. Measured on one GPU
(``models/*.toml``, made by `kernelcast fit-power`). Another GPU is taken to spend the same shares of its board's power
on the same things: what its designers give each pipeline at full rate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelcast.hardware import Gpu, gpu, root_of
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.work import Array
from kernelcast.toml_folder import ids_in, read_from

FOLDER = Path(__file__).parent / "models"
LOWEST_CLOCK = 0.35  # of the full one: a limit that asks for less is held by waiting
MEMORY = ("dram", "link")  # have a voltage and a clock of their own
# Formats whose tensor cores are taken to draw what those of another do at full rate.
_LIKE = {"fp16": "bf16", "int4": "bf16", "int8_wo": "bf16", "mxfp4": "bf16", "mxfp4_fp8": "fp8", "fp8_block": "fp8",
         "int8": "fp8", "nvfp4": "fp8", "fp64": "tf32", "fp32": "tf32"}  # fmt: skip
_TENSOR = ("bf16", "fp8", "tf32")  # formats that were measured
_WIDER = {"seen": 1.0, "near": 2.0, "extrapolated": 4.0}  # powers of the interval's factors


@dataclass(frozen=True)
class Coefficients:
    """One file of ``models/``: a GPU that was measured."""

    id: str
    idle_w: float  # nothing runs, clocks up
    busy_w: float  # on top while every SM has work, whatever it is
    start_s: float  # of each kernel, in which the SMs have none yet
    voltage: float  # relative slope: v = 1 - voltage · (1 - clock)
    held: float  # share of the limit that a GPU at its limit draws
    burst: float  # times the limit: what runs of a few milliseconds may draw, as times of calls were measured
    burst_s: float  # a call as long as this was measured at the clock that the limit leaves
    low: float  # 80% of left-out calls drew at least so many times the forecast
    high: float  # and at most
    joules: tuple[tuple[str, float], ...]  # a FLOP, an op, a byte, a warp instruction; tensor cores by format
    sources: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PowerModel:
    """A GPU's. ``watts``: of each pipeline at its full rate (rows as in PIPELINES), by format of the tensor cores."""

    idle_w: float
    busy_w: float
    start_s: float
    voltage: float
    limit_w: float  # that it holds, over seconds
    board_w: float  # the same of the board that calls were measured on
    burst_w: float
    burst_s: float
    low: float
    high: float
    tensor_w: Mapping[str, float]
    other_w: Array
    measured: str  # GPU whose measurements it rests on
    support: str

    @property
    def lowest_w(self) -> float:
        """What it draws at the lowest clock with all SMs at work on nothing much."""
        return self.idle_w + self.busy_w * (1 - self.voltage * (1 - LOWEST_CLOCK)) ** 2

    def interval(self, joules: float, spread: tuple[float, float]) -> tuple[float, float]:
        """Low and high joules. ``spread``: factors that the interval of the time reaches. Work that takes longer than
        forecast draws longer; beside that, watts are wrong on their own."""
        below = math.hypot(math.log(self.low), math.log(min(1.0, spread[0])))
        above = math.hypot(math.log(self.high), math.log(max(1.0, spread[1])))
        return joules * math.exp(-below), joules * math.exp(above)

    def watts(self, dtype: str) -> Array:
        """(pipelines,) at full rate."""
        found = self.other_w.copy()
        found[PIPELINES.index("tensor")] = self.tensor_w[_LIKE.get(dtype, dtype)]
        return found

    def volts(self, clock: Array) -> Array:
        """Relative to those of the full clock."""
        return 1 - self.voltage * (1 - clock)


@functools.cache
def coefficients(name: str) -> Coefficients:
    return read_from(FOLDER, Coefficients, name)


def measured_ids() -> list[str]:
    return ids_in(FOLDER)


def power_model(chip: Gpu) -> PowerModel | None:
    """Of a catalogued GPU, or of a what-if: what is done costs what it cost before, its limit is ``power_w``. None of
    another vendor's: nothing measured is near."""
    if chip.vendor != gpu(measured_ids()[0]).vendor:
        return None
    origin = root_of(chip)
    known = measured_ids()
    kin = [name for name in known if gpu(name).compute_capability == chip.compute_capability]
    name = origin.id if origin.id in known else (kin or known)[0]
    return made(coefficients(name), gpu(name), origin, chip)


def made(found: Coefficients, reference: Gpu, origin: Gpu, chip: Gpu) -> PowerModel:
    """What was measured on ``reference``, for a ``chip`` that is ``origin`` or a what-if of it."""
    own = origin.id == reference.id
    scale = 1.0 if own else origin.power_w / reference.power_w
    joules, full, before, after = dict(found.joules), rates(reference), rates(origin), rates(chip)

    def watts(name: str) -> float:
        faster = after[name] / before[name] if before[name] else 1.0
        return joules.get(name, 0.0) * full[name] * scale * faster

    support = "seen" if own else "near" if reference.compute_capability == chip.compute_capability else "extrapolated"
    if chip is not origin and support == "seen":
        support = "near"
    wider = _WIDER[support]
    return PowerModel(
        idle_w=found.idle_w * scale, busy_w=found.busy_w * scale, start_s=found.start_s, voltage=found.voltage,
        limit_w=chip.power_w * found.held, board_w=origin.power_w * found.held,
        burst_w=origin.power_w * found.burst, burst_s=found.burst_s,
        low=found.low**wider, high=found.high**wider,
        tensor_w={dtype: watts(f"tensor_{dtype}") for dtype in _TENSOR},
        other_w=np.array([watts(name) if name in full else 0.0 for name in PIPELINES]),
        measured=reference.id, support=support,
    )  # fmt: skip


def rates(chip: Gpu) -> dict[str, float]:
    """Units a second of each pipeline at full rate; tensor cores by format."""
    return {
        **{f"tensor_{dtype}": chip.tensor_flops_per_s(dtype) for dtype in _TENSOR},
        "fma": chip.fma_flops_per_s("fp32"), "xu": chip.xu_ops_per_s, "smem": chip.smem_bytes_per_s,
        "l2": chip.l2_bytes_per_s, "dram": chip.dram_bytes_per_s, "issue": chip.issue_warps_per_s,
        "link": chip.link_bytes_per_s,
    }  # fmt: skip
