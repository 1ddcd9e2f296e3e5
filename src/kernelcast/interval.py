"""A forecast quantity with its 80% interval, and the two ways in which several add up."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

_BEFORE = {"time_s": "value", "low_s": "low", "high_s": "high"}  # names of 0.x, for one more release


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and the interval that 80% of cases should lie in. The unit is that of the field that holds it."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        return cls(value, value, value)

    def __add__(self, other: Interval) -> Interval:
        """The sum of two whose errors have one cause."""
        return Interval(self.value + other.value, self.low + other.low, self.high + other.high)

    def __mul__(self, times: float) -> Interval:
        return Interval(self.value * times, self.low * times, self.high * times)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _BEFORE:
                raise AttributeError(f"Interval has no attribute {name!r}")
            warnings.warn(f"Interval.{name} is now Interval.{_BEFORE[name]}", DeprecationWarning, stacklevel=2)
            return getattr(self, _BEFORE[name])


NOTHING = Interval.exact(0.0)


def independent(intervals: Iterable[Interval]) -> Interval:
    """The sum of several with independent errors: deviations add up as the root of their squares."""
    known = list(intervals)
    value = sum(each.value for each in known)
    low = math.sqrt(sum((each.value - each.low) ** 2 for each in known))
    high = math.sqrt(sum((each.high - each.value) ** 2 for each in known))
    return Interval(value, value - low, value + high)
