"""Replay whole models: each is built on meta tensors, traced as it was run, and predicted. Needs torch; no GPU.

A folder of models has ``cases.toml``, the files whose functions build them, and for each machine that they were
measured on ``<gpu>.json.gz`` (``<gpu>_machine_2.json.gz``) with times; beside it may lie ``..._host.toml``, its host.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu
from kernelcast.schedule import Host
from kernelcast.schedule.timeline import host as find_host
from kernelcast.training.step import LAUNCH_BOUND, Step, run_step
from kernelcast_lab.validate.kernels import Case

FOLDER = "zoo"  # inside of a folder of cases
_HOST = "_host.toml"
_MACHINE = "_machine_"  # in the name of a file: the same GPU in another machine
_SPEEDS = tuple(0.4 + 0.02 * at for at in range(81))  # of a host, times what the default one takes


@dataclass(frozen=True)
class MeasuredModel:
    """A case as it was measured."""

    case: Case
    wall_ms: float
    kernel_ms: float
    kernels: int  # launched


@dataclass(frozen=True)
class Replayed:
    """A measured case beside its forecast. ``machine_host_s``: the wall time with the machine's own host."""

    machine: str
    measured: MeasuredModel
    step: Step
    machine_host_s: float

    @property
    def kernel_error(self) -> float:
        return 100 * (self.step.kernel_time_s * 1e3 / self.measured.kernel_ms - 1)

    @property
    def wall_error(self) -> float:
        return 100 * (self.step.time_s * 1e3 / self.measured.wall_ms - 1)

    @property
    def machine_host_error(self) -> float:
        return 100 * (self.machine_host_s * 1e3 / self.measured.wall_ms - 1)

    @property
    def inside(self) -> bool:
        """Whether the interval of the default host holds the wall time."""
        return self.step.low_s * 1e3 <= self.measured.wall_ms <= self.step.high_s * 1e3

    @property
    def launch_bound(self) -> bool:
        """As measured: the GPU was idle for more of the wall time than gaps between kernels explain."""
        gaps_ms = self.step.host.gap_s * 1e3 * self.measured.kernels
        return (self.measured.wall_ms - self.measured.kernel_ms - gaps_ms) / self.measured.wall_ms > LAUNCH_BOUND

    @property
    def launch_bound_right(self) -> bool:
        """By the machine's own host."""
        waits_s = self.machine_host_s - float(self.step.busy_s.sum())
        return (waits_s > LAUNCH_BOUND * self.machine_host_s) == self.launch_bound

    @property
    def line(self) -> dict[str, Any]:
        return {
            "machine": self.machine, "case": self.measured.case.id, "kernels_ms": self.measured.kernel_ms,
            "kernels_error": self.kernel_error, "wall_ms": self.measured.wall_ms, "wall_error": self.wall_error,
            "wall_error_own_host": self.machine_host_error, "inside": self.inside, "launch_bound": self.launch_bound,
            "told_right": self.launch_bound_right, "covered": self.step.coverage,
        }  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The file of one machine. ``host``: as `kernelcast collect --host` measured it there, where it did."""

    name: str
    models: tuple[MeasuredModel, ...]
    host: Host | None

    @property
    def gpu(self) -> str:
        return self.name.partition(_MACHINE)[0]


def measured(folder: Path) -> list[Measured]:
    """What was measured of the models of a folder, a machine each."""
    results = []
    for path in sorted(folder.glob("*.json.gz")):
        try:
            lines = json.loads(gzip.decompress(path.read_bytes()))["cases"]
            measured_models = tuple(
                MeasuredModel(Case(**line["case"]), line["wall_ms"][0], line["kernel_ms"], line["kernels"])
                for line in lines
            )
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise KernelcastError(f"{path}: not a file of measured models ({error})") from None
        name = path.name.removesuffix(".json.gz")
        members = path.with_name(f"{name}{_HOST}")
        results.append(Measured(name, measured_models, find_host(str(members)) if members.exists() else None))
    return results


def replay(
    folder: Path,
    conditions: Conditions,
    only: Sequence[str] = (),
    say: Callable[[int, int], None] = lambda done, total: None,
) -> list[Replayed]:
    """Every measured case (with ``only``, those whose id contains one of them)."""
    machines = measured(folder)
    cases = dict.fromkeys(model.case for each in machines for model in each.models)
    chosen = [case for case in cases if not only or any(part in case.id for part in only)]
    times = {name: Times(gpu(name), conditions) for name in {each.gpu for each in machines}}
    result: dict[str, list[Replayed]] = {each.name: [] for each in machines}
    for at, case in enumerate(chosen):
        say(at, len(chosen))
        traced = trace_case(folder, case)
        for each in machines:
            measured_model = next((model for model in each.models if model.case == case), None)
            if measured_model is None:
                continue
            known = times[each.gpu]
            step = run_step(traced, known.gpu, conditions, times=known)
            host_s = run_step(traced, known.gpu, conditions, times=known, on=each.host).time_s if each.host else 0.0
            result[each.name].append(Replayed(each.name, measured_model, step, host_s))
    replayed = (result[each.name] if each.host else _with_fitted_host(result[each.name]) for each in machines)
    return list(itertools.chain.from_iterable(replayed))


def _with_fitted_host(cases: Sequence[Replayed]) -> list[Replayed]:
    """Of a machine whose host was not measured: the default host at the speed that the other half of the models had
    there, one number, by the least median error of their wall times."""
    if not cases:
        return []
    models = sorted({each.measured.case.build for each in cases})
    half = {build: at % 2 for at, build in enumerate(models)}

    def speed(of: int) -> float:
        values = [each for each in cases if half[each.measured.case.build] != of] or list(cases)
        off = [[abs(each.step.ends(host=s) * 1e3 / each.measured.wall_ms - 1) for each in values] for s in _SPEEDS]
        return _SPEEDS[min(range(len(_SPEEDS)), key=lambda at: fmean(off[at]))]

    speeds = [speed(0), speed(1)]
    return [replace(each, machine_host_s=each.step.ends(host=speeds[half[each.measured.case.build]])) for each in cases]


def trace_case(folder: Path, case: Case) -> Any:
    """The case on meta tensors."""
    from kernelcast.tracing import trace
    from kernelcast.tracing.build import TraceRequest, build

    request = TraceRequest(f"{folder / case.file}:{case.function}", case.batch, max(1, case.seq), case.dtype, case.mode)
    built = build(request)
    return trace(
        built.model, built.inputs, case.mode, loss=built.loss, optimizer=case.optimizer, name=case.id  # type: ignore[arg-type]
    )  # fmt: skip


def summary(result: Iterable[Replayed]) -> dict[str, Any]:
    """Mean errors in per cent, shares of cases; wall times by machine."""
    cases = list(result)
    machines = dict.fromkeys(each.machine for each in cases)
    first = [each for each in cases if each.machine == next(iter(machines))]
    kernels = [abs(each.kernel_error) for each in first]
    return {
        "cases": len(first),
        "models": len({each.measured.case.build for each in first}),
        "kernels_error": fmean(kernels),
        "worst_kernels_error": max(kernels),
        "machines": {name: _walls([each for each in cases if each.machine == name]) for name in machines},
    }


def _walls(cases: Sequence[Replayed]) -> dict[str, float]:
    return {
        "cases": len(cases),
        "wall_error": fmean(abs(each.wall_error) for each in cases),
        "wall_error_own_host": fmean(abs(each.machine_host_error) for each in cases),
        "inside": fmean(each.inside for each in cases),
        "launch_bound_told_right": fmean(each.launch_bound_right for each in cases),
    }
