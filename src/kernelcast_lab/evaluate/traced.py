"""Traced models against whole models measured by this project: ``python -m kernelcast_lab.evaluate.traced``.

Every measured case is built again on meta tensors, traced as it was run, and predicted: the sum of its kernels against
the profiler's, the wall time against the clock's. Needs torch and transformers; no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.networks.traced import Trace
from kernelcast.predict import Conditions
from kernelcast.times import Times
from kernelcast.tracing import trace
from kernelcast.training.step import LAUNCH_BOUND, STEP, Step, run_step
from kernelcast_lab.models.cases import Case
from kernelcast_lab.models.steps import build, make_step
from kernelcast_lab.models.store import MeasuredCase, load_cases

MEASURED = Path(__file__).parents[3] / "validation" / "models_h200_sxm.json.gz"
_META = torch.device("meta")


@dataclass(frozen=True)
class Found:
    """A case, and what was predicted for it."""

    case: MeasuredCase
    step: Step

    @property
    def kernel_error(self) -> float:
        return self.step.kernel_time_s * 1e3 / self.case.kernel_sum_ms - 1

    @property
    def wall_error(self) -> float:
        return self.step.time_s * 1e3 / self.case.wall_ms - 1

    @property
    def launch_bound(self) -> bool:
        """As measured: the GPU was idle for more of the wall time than gaps between kernels explain."""
        idle_ms = self.case.wall_ms - self.case.kernel_sum_ms
        gaps_ms = self.step.host.gap_s * 1e3 * self.case.measured.profile.kernel_calls
        return self.case.case.launch == "eager" and (idle_ms - gaps_ms) / self.case.wall_ms > LAUNCH_BOUND


def traced(case: MeasuredCase) -> Trace:
    """The case on meta tensors, as ``lab.collect.models`` runs it."""
    model = build(case.config, case.case.dtype, _META)
    if case.case.mode == "training":
        with _META:
            tokens = torch.randint(4, model.config.vocab_size, (case.case.batch, case.case.seq))
        options = {} if model.config.model_type == "bert" else {"use_cache": False}
        return trace(model, {"input_ids": tokens, "labels": tokens, **options}, "training", name=case.case.id)
    with _META:
        step = make_step(model, case.case, _META)
    return trace(step, (), graph=case.case.launch == "graph", name=case.case.id)


def evaluate(cases: Iterable[MeasuredCase], conditions: Conditions) -> list[Found]:
    chip = gpu("h200_sxm")
    times = Times(chip, conditions)
    found = []
    for case in cases:
        step = run_step(
            traced(case),
            chip,
            conditions,
            tf32=case.case.dtype == "tf32",
            graph=case.case.launch == "graph",
            times=times,
        )
        found.append(Found(case, step))
    return found


def _mean(values: Sequence[float]) -> float:
    return 100 * sum(abs(value) for value in values) / len(values) if values else float("nan")


def summary(found: Sequence[Found]) -> list[str]:
    """Means by mode, and in how many cases the binding side was told right."""
    lines = []
    groups = {"inference": [f for f in found if f.case.case.mode != "training"]}
    groups |= {mode: [f for f in found if f.case.case.mode == mode] for mode in ("prefill", "decode", "training")}
    groups["eager"] = [f for f in found if f.case.case.launch == "eager"]
    groups["all"] = list(found)
    for name, members in groups.items():
        right = sum(f.launch_bound == f.step.launch_bound for f in members)
        lines.append(
            f"{name:10s} {len(members):3d} cases: kernels {_mean([f.kernel_error for f in members]):5.1f}%, "
            f"wall {_mean([f.wall_error for f in members]):5.1f}%, launch-bound told right {right}/{len(members)}"
        )
    return lines


def _line(found: Found) -> str:
    case: Case = found.case.case
    told = f"{'launch-bound' if found.launch_bound else '':12s}/{'launch-bound' if found.step.launch_bound else '':12s}"
    return (
        f"{case.id:52s} kernels {found.step.kernel_time_s * 1e3:8.2f} of {found.case.kernel_sum_ms:8.2f} ms "
        f"{100 * found.kernel_error:+6.1f}%  wall {found.step.time_s * 1e3:8.2f} of {found.case.wall_ms:8.2f} ms "
        f"{100 * found.wall_error:+6.1f}%  {told}  covered {100 * found.step.coverage:.1f}%"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernelcast_lab.evaluate.traced", description=__doc__)
    parser.add_argument("--measured", type=Path, default=MEASURED, help="file of measured models")
    parser.add_argument("--predictor", default="learned")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose id holds one of the words")
    given = parser.parse_args(words)
    try:
        cases = [c for c in load_cases(given.measured) if not given.only or any(w in c.case.id for w in given.only)]
        if not cases:
            raise KernelcastError(f"no measured case holds {' or '.join(given.only)} in its id")
        found = evaluate(cases, replace(STEP, predictor=given.predictor))
    except KernelcastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(*(_line(f) for f in found), *summary(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
