"""A time with its interval: one value, and the two ways in which several add up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds, with the interval that 80% of cases should lie in."""

    time_s: float
    low_s: float
    high_s: float

    @classmethod
    def exact(cls, time_s: float) -> Span:
        return cls(time_s, time_s, time_s)

    def __add__(self, other: Span) -> Span:
        """One after another, as wrong together."""
        return Span(self.time_s + other.time_s, self.low_s + other.low_s, self.high_s + other.high_s)

    def __mul__(self, times: float) -> Span:
        return Span(self.time_s * times, self.low_s * times, self.high_s * times)


NOTHING = Span.exact(0.0)


def independent(spans: Iterable[Span]) -> Span:
    """One after another, each wrong on its own: deviations add up as the root of their squares."""
    known = list(spans)
    time = sum(span.time_s for span in known)
    low = math.sqrt(sum((span.time_s - span.low_s) ** 2 for span in known))
    high = math.sqrt(sum((span.high_s - span.time_s) ** 2 for span in known))
    return Span(time, time - low, time + high)
