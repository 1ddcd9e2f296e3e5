"""The gain from one per cent more of each spec of a GPU.

Every spec is raised and lowered by a tenth, and the slope between the two (of logarithms: per cent for per cent) is the
answer. Over one per cent alone a forecast may not move or jump: tiles, waves and SMs are whole numbers; such steps even
out over a fifth. Layout, format and batch stay; only memory that is full holds more requests when it is larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernelcast.energy import power_model
from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import INTEGERS, RATE_TABLES
from kernelcast.inference.memory import largest_batch
from kernelcast.search.compare.candidates import Candidate
from kernelcast.search.compare.compare import ServingForecast, forecast

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


def sensitivity(forecasts: Sequence[ServingForecast]) -> list[tuple[Gain, ...]]:
    """The gains by spec of each deployment, the largest first; all forecasts in one call."""
    candidates: list[Candidate] = []
    steps: list[tuple[int, str, tuple[str, ...], float]] = []  # of which deployment, the spec, and log(up / down)
    for at, base in enumerate(forecasts):
        gpu = base.deployment.gpu
        for spec, names in SPECS.items():
            fields = _present(gpu, names)
            if not fields or not merit(base) or (spec == "power" and power_model(gpu) is None):
                continue  # unknown
            ends = [_scaled(gpu, fields, factor) for factor in (STEP, 1 / STEP)]
            apart = math.log(_number(ends[0], fields[0]) / _number(ends[1], fields[0]))
            steps.append((at, spec, fields, -apart if spec in LESS else apart))
            candidates += [_moved(base, changed, fields) for changed in ends]
    varied = iter(forecast(forecasts[0].scenario, candidates)) if candidates else iter(())
    gains: list[list[Gain]] = [[] for _ in forecasts]
    for at, spec, fields, apart in steps:
        up, down = (merit(each) if isinstance(each, ServingForecast) else 0.0 for each in (next(varied), next(varied)))
        slope = math.log(up / down) / apart if up and down and apart else 0.0
        gains[at].append(Gain(spec, max(0.0, slope), fields))  # more of a resource need not be used
    return [tuple(sorted(members, key=lambda gain: -gain.percent)) for members in gains]


def merit(forecast: ServingForecast) -> float:
    """The figure of merit (``MERIT``), more is better; the number of GPUs and their price stay."""
    by = forecast.scenario.by or "dollars"
    if by == "latency":
        return 1 / forecast.e2el.value
    if by == "joules":
        return 1 / forecast.joules_per_million.value if forecast.joules_per_million else 0.0
    return forecast.requests_per_s / forecast.gpus


def _present(gpu: Gpu, names: Sequence[str]) -> tuple[str, ...]:
    """The fields that this GPU has a number for; a GPU without links communicates over PCIe."""
    if names == SPECS["link"] and not gpu.link_bytes_per_s:
        return ("pcie_bytes_per_s",)
    return tuple(name for name in names if getattr(gpu, name))


def _scaled(gpu: Gpu, fields: Sequence[str], factor: float) -> Gpu:
    numbers: dict[str, float] = {}
    for name in fields:
        value = getattr(gpu, name)
        if name in RATE_TABLES:
            numbers |= {f"{name}.{dtype}": rate * factor for dtype, rate in value.items()}
        else:
            numbers[name] = round(value * factor) if name in INTEGERS else value * factor
    return gpu.replace(**numbers)


def _number(gpu: Gpu, name: str) -> float:
    value = getattr(gpu, name)
    return float(next(iter(value.values()))) if name in RATE_TABLES else float(value)


def _moved(base: ServingForecast, gpu: Gpu, fields: Sequence[str]) -> Candidate:
    """The same deployment on a changed GPU. The number of engines stays, so that only their speed counts."""
    candidate = replace(base.candidate, deployment=replace(base.deployment, gpu=gpu))
    if "dram_bytes" not in fields or not candidate.full:
        return candidate
    return replace(candidate, batch=max(1, largest_batch(candidate.deployment, base.scenario.request)))
