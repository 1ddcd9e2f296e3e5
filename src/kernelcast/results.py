"""What every result has: a value with its 80% forecast interval, the level of support, a rendering for notebooks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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


Support = Literal["seen", "near", "extrapolated"]
SUPPORT: dict[str, str] = {
    "seen": "calls of this configuration were measured on this GPU",
    "near": "one substitution from measured calls: a parameter, the GPU, or the range",
    "extrapolated": "far from measured calls: mostly the analytical model",
}
LEVELS = tuple(SUPPORT)  # columns hold their index
SEEN, NEAR, EXTRAPOLATED = range(len(LEVELS))
MOST = 0.9  # share of the time that must reach a level for the whole to have it


def support_of(times: Iterable[tuple[float, str]]) -> str:
    """The level of support that nine tenths of the time reach; ``times``: seconds and the level of each part."""
    known = list(times)
    total, reached = sum(time for time, _ in known), 0.0
    for level in SUPPORT:
        reached += sum(time for time, support in known if support == level)
        if reached >= MOST * total:
            return level
    return list(SUPPORT)[-1]


class HtmlRepr:
    """A result that a notebook shows as the command line would, as HTML. ``kernelcast.app.report.html`` makes
    it; results do not import reports, so it is imported by name on first use."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        html: str = import_module("kernelcast.app.report.html").html_of(self)
        return html


class Renamed:
    """A result whose attributes still have their names of 0.x (``_renamed``: before, now), for one more release."""

    __slots__ = ()
    _renamed: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            now = type(self)._renamed.get(name)
            if now is None:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            warnings.warn(f"{name} is now {now}", DeprecationWarning, stacklevel=2)
            return getattr(self, now)
