"""Replay whole models: each is built on meta tensors, traced as it was run, and predicted. Needs torch; no GPU.

A folder of models has ``cases.toml``, the files whose functions build them, and for each GPU that they were measured on
``<gpu>.json.gz`` with times, and ``<gpu>_host.toml``, what the host of that machine takes, measured in the same run.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.predict import Conditions
from kernelcast.timeline import Host
from kernelcast.timeline.host import host as find_host
from kernelcast.times import Times
from kernelcast.training.step import LAUNCH_BOUND, Step, run_step
from kernelcast.validate.cases import Case

FOLDER = "zoo"  # inside of a folder of cases
_HOST = "_host.toml"


@dataclass(frozen=True)
class Ran:
    """A case as it was measured."""

    case: Case
    wall_ms: float
    kernel_ms: float
    kernels: int  # launched


@dataclass(frozen=True)
class Replayed:
    """A measured case beside its forecast: with the default host, and with the one measured on that machine."""

    ran: Ran
    step: Step
    with_host: Step | None

    @property
    def kernel_error(self) -> float:
        return 100 * (self.step.kernel_time_s * 1e3 / self.ran.kernel_ms - 1)

    @property
    def wall_error(self) -> float:
        return 100 * (self.step.time_s * 1e3 / self.ran.wall_ms - 1)

    @property
    def host_wall_error(self) -> float | None:
        return 100 * (self.with_host.time_s * 1e3 / self.ran.wall_ms - 1) if self.with_host else None

    @property
    def inside(self) -> bool:
        """Whether the interval of the default host holds the wall time."""
        return self.step.low_s * 1e3 <= self.ran.wall_ms <= self.step.high_s * 1e3

    @property
    def launch_bound(self) -> bool:
        """As measured: the GPU was idle for more of the wall time than gaps between kernels explain."""
        gaps_ms = (self.with_host or self.step).host.gap_s * 1e3 * self.ran.kernels
        return (self.ran.wall_ms - self.ran.kernel_ms - gaps_ms) / self.ran.wall_ms > LAUNCH_BOUND

    @property
    def told_right(self) -> bool:
        return (self.with_host or self.step).launch_bound == self.launch_bound

    @property
    def line(self) -> dict[str, Any]:
        return {
            "case": self.ran.case.id, "kernels_ms": self.ran.kernel_ms, "kernels_error": self.kernel_error,
            "wall_ms": self.ran.wall_ms, "wall_error": self.wall_error, "wall_error_own_host": self.host_wall_error,
            "inside": self.inside, "launch_bound": self.launch_bound, "told_right": self.told_right,
            "covered": self.step.coverage,
        }  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The file of one GPU."""

    gpu: str
    ran: tuple[Ran, ...]
    host: Host | None


def measured(folder: Path) -> list[Measured]:
    """What was measured of the models of a folder, a GPU each."""
    found = []
    for path in sorted(folder.glob("*.json.gz")):
        try:
            lines = json.loads(gzip.decompress(path.read_bytes()))["cases"]
            ran = tuple(
                Ran(Case(**line["case"]), line["wall_ms"][0], line["kernel_ms"], line["kernels"]) for line in lines
            )
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise KernelcastError(f"{path}: not a file of measured models ({error})") from None
        name = path.name.removesuffix(".json.gz")
        own = path.with_name(f"{name}{_HOST}")
        found.append(Measured(name, ran, find_host(str(own)) if own.exists() else None))
    return found


def replay(
    folder: Path,
    conditions: Conditions,
    words: Sequence[str] = (),
    say: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Replayed]:
    """Every measured case (with ``words``, those whose id holds one of them)."""
    for each in measured(folder):
        chip = gpu(each.gpu)
        times = Times(chip, conditions)
        chosen = [ran for ran in each.ran if not words or any(word in ran.case.id for word in words)]
        for at, ran in enumerate(chosen):
            say(at, len(chosen))
            traced = trace_case(folder, ran.case)
            step = run_step(traced, chip, conditions, times=times)
            own = run_step(traced, chip, conditions, times=times, on=each.host) if each.host else None
            yield Replayed(ran, step, own)


def trace_case(folder: Path, case: Case) -> Any:
    """The case on meta tensors."""
    from kernelcast.tracing import trace
    from kernelcast.tracing.build import Asked, build

    asked = Asked(f"{folder / case.file}:{case.function}", case.batch, max(1, case.seq), case.dtype, case.mode)
    built = build(asked)
    return trace(
        built.model, built.inputs, case.mode, loss=built.loss, optimizer=case.optimizer, name=case.id  # type: ignore[arg-type]
    )  # fmt: skip


def summary(found: Iterable[Replayed]) -> dict[str, float]:
    """Mean errors in per cent; shares of cases."""
    cases = list(found)
    own = [abs(one.host_wall_error) for one in cases if one.host_wall_error is not None]
    return {
        "cases": len(cases),
        "models": len({one.ran.case.build for one in cases}),
        "kernels_error": fmean(abs(one.kernel_error) for one in cases),
        "worst_kernels_error": max(abs(one.kernel_error) for one in cases),
        "wall_error": fmean(abs(one.wall_error) for one in cases),
        **({"wall_error_own_host": fmean(own)} if own else {}),
        "inside": fmean(one.inside for one in cases),
        "launch_bound_told_right": fmean(one.told_right for one in cases),
    }
