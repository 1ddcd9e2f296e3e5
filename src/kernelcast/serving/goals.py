"""Latency goals (SLOs) of a service, and how far metrics are from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelcast.errors import KernelcastError

METRICS = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end to end"}
PERCENT = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_TIME = re.compile(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(us|µs|ms|s|min)?\s*", re.IGNORECASE)
_UNITS_MS = {"us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}


@dataclass(frozen=True)
class Goal:
    """One statistic of one latency, at most ``limit_ms``."""

    metric: str
    statistic: str
    limit_ms: float

    @classmethod
    def named(cls, name: str, limit: str) -> Goal:
        """Of a parameter's name and value: ``ttft_p99``, ``500ms``."""
        metric, _, statistic = name.partition("_")
        return cls(metric, statistic, parse_ms(limit, f"`{name}`"))

    @property
    def key(self) -> str:
        """The metric's name in vLLM's benchmark."""
        return f"{self.statistic}_{self.metric}_ms"

    @property
    def name(self) -> str:
        return f"{self.metric.upper()} {self.statistic}"

    def share(self, metrics: Mapping[str, float]) -> float:
        """The metric over its limit: at most 1 where the goal is met. Outputs of one token have no time per output
        token."""
        return metrics.get(self.key, 0.0) / self.limit_ms


def parse_ms(text: str, flag: str = "a goal") -> float:
    """'500ms', '0.5s' or a number of milliseconds."""
    match = _TIME.fullmatch(text)
    try:
        value = float(match[1]) * _UNITS_MS[(match[2] or "ms").lower()] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise KernelcastError(f"{flag} takes a time above 0, as in 500ms, 0.5s or 500 (milliseconds), not {text!r}")
    return value


def worst(goals: Sequence[Goal], metrics: Mapping[str, float]) -> tuple[Goal, float]:
    """The goal that is nearest to breaking, or broken most, and its share."""
    return max(((goal, goal.share(metrics)) for goal in goals), key=lambda pair: pair[1])
