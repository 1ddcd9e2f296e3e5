"""What ``tune`` found, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kernelcast.app.report.json import attributes
from kernelcast.app.report.text import plain_table, show, time_text
from kernelcast.hardware import Gpu
from kernelcast.tune.configs import GemmProblem
from kernelcast.tune.tune import TuneResult

_TOLD = ("predicted_s", "measured_s", "ceiling_s", "support", "configs_measured", "configs_in_space")
PREDICTED = "No GPU measured these: they are the predicted best. Run it on {} to measure the most promising."


def fields(results: Sequence[TuneResult], gpu: Gpu) -> list[dict[str, Any]]:
    """One entry a problem."""
    return [
        {
            "gpu": gpu.id,
            **asdict(result.problem),
            "config": result.config.named,
            "measured": result.measured,
            **attributes(result, *_TOLD),
            "defaults": {stack: config.named for stack, config in result.defaults.items()},
            "speedup": {stack: result.speedup(stack) for stack in result.defaults},
        }
        for result in results
    ]


def print_tuned(results: Sequence[TuneResult], gpu: Gpu, note: str = "") -> None:
    """One line a problem."""
    stacks = list(results[0].defaults)
    numbers = ("predicted", "measured", *(f"over {stack}" for stack in stacks))
    rows = "m x n x k" if isinstance(results[0].problem, GemmProblem) else "tokens"
    lines = []
    for result in results:
        problem = result.problem
        size = f"{problem.m} x {problem.n} x {problem.k}" if isinstance(problem, GemmProblem) else str(problem.tokens)
        measured = time_text(result.measured_s) if result.measured_s is not None else "—"
        gains = [f"{result.speedup(stack):.2f}×" for stack in stacks]
        lines.append((size, str(result.config), time_text(result.predicted_s), measured, *gains, result.support))
    show(plain_table(rows, "config", *numbers, "support", right=(rows, *numbers), rows=lines), "")
    fitting = f"{results[0].configs_in_space:,} that fit"
    show(f"config: block_m x block_n x block_k, g group_m, w warps, s stages; of {fitting}")
    if not results[0].measured:
        show(note or PREDICTED.format(gpu.name))
