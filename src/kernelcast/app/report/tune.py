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


def fields(found: Sequence[TuneResult], chip: Gpu) -> list[dict[str, Any]]:
    """One entry a problem."""
    return [
        {
            "gpu": chip.id,
            **asdict(one.problem),
            "config": one.config.named,
            "measured": one.measured,
            **attributes(one, *_TOLD),
            "defaults": {stack: config.named for stack, config in one.defaults.items()},
            "speedup": {stack: one.speedup(stack) for stack in one.defaults},
        }
        for one in found
    ]


def print_tuned(found: Sequence[TuneResult], chip: Gpu, note: str = "") -> None:
    """One line a problem."""
    stacks = list(found[0].defaults)
    numbers = ("predicted", "measured", *(f"over {stack}" for stack in stacks))
    rows = "m x n x k" if isinstance(found[0].problem, GemmProblem) else "tokens"
    lines = []
    for one in found:
        problem = one.problem
        size = f"{problem.m} x {problem.n} x {problem.k}" if isinstance(problem, GemmProblem) else str(problem.tokens)
        measured = time_text(one.measured_s) if one.measured_s is not None else "—"
        gains = [f"{one.speedup(stack):.2f}×" for stack in stacks]
        lines.append((size, str(one.config), time_text(one.predicted_s), measured, *gains, one.support))
    show(plain_table(rows, "config", *numbers, "support", right=(rows, *numbers), rows=lines), "")
    fitting = f"{found[0].configs_in_space:,} that fit"
    show(f"config: block_m x block_n x block_k, g group_m, w warps, s stages; of {fitting}")
    if not found[0].measured:
        show(note or PREDICTED.format(chip.name))
