"""What one per cent more of each spec of a GPU buys.

Every spec is taken a tenth up and a tenth down, and the slope between the two (of logarithms: per cent for per cent) is
told. Over one per cent alone a forecast may stand still or jump: tiles and waves are whole, and so are SMs; such steps
even out over a fifth. Layout, format and batch stay as they are; only memory that is full holds more requests when it
is larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernelcast.energy import power_model
from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import INTEGERS, RATE_TABLES
from kernelcast.inference.memory import largest_batch
from kernelcast.inference.workload import Workload
from kernelcast.search.compare.candidates import Candidate
from kernelcast.search.compare.compare import Served, forecast

STEP = 1.1
# name: fields that go together; those in LESS are better when smaller
SPECS: dict[str, tuple[str, ...]] = {
    "DRAM bandwidth": ("dram_bytes_per_s",),
    "DRAM capacity": ("dram_bytes",),
    "L2 bandwidth": ("l2_bytes_per_clk", "l2_bytes_per_clk_sm"),
    "L2 capacity": ("l2_bytes",),
    "tensor peak": ("tensor_flops_per_clk_sm",),
    "vector peak": ("fma_flops_per_clk_sm",),
    "special functions": ("xu_ops_per_clk_sm",),
    "shared memory": ("smem_bytes_per_clk_sm",),
    "instructions": ("issue_warps_per_clk_sm",),
    "clocks": ("clock_boost_hz", "clock_tensor_hz", "clock_sustained_hz"),
    "SM count": ("sm_count",),
    "link": ("link_bytes_per_s",),
    "launch time (less)": ("launch_floor_s", "sustained_launch_s"),
    "power": ("power_w",),
}
LESS = ("launch time (less)",)
MERIT = {
    "dollars": "tokens a dollar", "latency": "speed of a request", "throughput": "tokens/s", "joules": "tokens a joule",
}  # fmt: skip


@dataclass(frozen=True)
class Gain:
    """Per cent that one per cent more of ``spec`` buys of what the comparison is by."""

    spec: str
    percent: float
    fields: tuple[str, ...]


def sensitivity(found: Sequence[Served]) -> list[tuple[Gain, ...]]:
    """Of each way, the gains by spec, the largest first; all forecasts in one call."""
    ways: list[Candidate] = []
    asked: list[tuple[int, str, tuple[str, ...], float]] = []  # of which way, the spec, and how far its ends are apart
    for at, one in enumerate(found):
        chip = one.way.deployment.gpu
        for spec, names in SPECS.items():
            fields = _present(chip, names)
            if not fields or not merit(one) or (spec == "power" and power_model(chip) is None):
                continue  # nobody knows
            ends = [_scaled(chip, fields, factor) for factor in (STEP, 1 / STEP)]
            apart = math.log(_number(ends[0], fields[0]) / _number(ends[1], fields[0]))
            asked.append((at, spec, fields, -apart if spec in LESS else apart))
            ways += [_moved(one, chip, fields) for chip in ends]
    served = iter(forecast(found[0].asked, ways)) if ways else iter(())
    gains: list[list[Gain]] = [[] for _ in found]
    for at, spec, fields, apart in asked:
        up, down = (merit(one) if isinstance(one, Served) else 0.0 for one in (next(served), next(served)))
        slope = math.log(up / down) / apart if up and down and apart else 0.0
        gains[at].append(Gain(spec, max(0.0, slope), fields))  # more of a part need not be used
    return [tuple(sorted(members, key=lambda gain: -gain.percent)) for members in gains]


def merit(found: Served) -> float:
    """What more is better of, in the words of ``MERIT``; the number of GPUs and their price stay."""
    by = found.asked.by or "dollars"
    if by == "latency":
        return 1 / found.e2el.value
    if by == "joules":
        return 1 / found.joules_per_million.value if found.joules_per_million else 0.0
    return found.requests_per_s / found.gpus


def _present(chip: Gpu, names: Sequence[str]) -> tuple[str, ...]:
    """The fields that this GPU has a number for; without links of its own, GPUs talk over PCIe."""
    if names == SPECS["link"] and not chip.link_bytes_per_s:
        return ("pcie_bytes_per_s",)
    return tuple(name for name in names if getattr(chip, name))


def _scaled(chip: Gpu, fields: Sequence[str], factor: float) -> Gpu:
    numbers: dict[str, float] = {}
    for name in fields:
        if name in RATE_TABLES:
            numbers |= {f"{name}.{dtype}": rate * factor for dtype, rate in getattr(chip, name).items()}
        else:
            value = getattr(chip, name) * factor
            numbers[name] = round(value) if name in INTEGERS else value
    return chip.replace(**numbers)


def _number(chip: Gpu, name: str) -> float:
    value = getattr(chip, name)
    return float(next(iter(value.values()))) if name in RATE_TABLES else float(value)


def _moved(found: Served, chip: Gpu, fields: Sequence[str]) -> Candidate:
    """The same way on a changed GPU. The number of engines stays, so that only their speed counts."""
    way = replace(found.way, deployment=replace(found.way.deployment, gpu=chip))
    if "dram_bytes" not in fields or not way.full:
        return way
    one = Workload.equal(1, found.asked.input_len, found.asked.output_len)
    return replace(way, batch=max(1, largest_batch(way.deployment, one)))
