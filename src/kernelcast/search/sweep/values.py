"""What a key of a sweep file may be: one number, a list, a grid, or a range that numbers are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown

Integers = NDArray[np.int64]
_KEYS = ("from", "to", "steps", "step", "factor", "scale")
_SCALES = ("linear", "log")
_LARGEST = 10**9
_MOST_LISTED = 1_000_000


@dataclass(frozen=True)
class Values:
    """``listed``, or where that is None anything from ``low`` to ``high``, evenly or (``log``) evenly in its log."""

    listed: tuple[int, ...] | None
    low: int = 0
    high: int = 0
    log: bool = False

    @property
    def count(self) -> int:
        return len(self.listed or ())

    def at(self, codes: Integers) -> Integers:
        return np.asarray(self.listed, dtype=np.int64)[codes]

    def drawn(self, share: NDArray[np.float64]) -> Integers:
        """For numbers in [0, 1): each whole number of the range with its part of the (log) length."""
        if self.listed is not None:
            return self.at((share * self.count).astype(np.int64))
        if self.log:
            low, high = math.log(self.low), math.log(self.high + 1)
            found = np.floor(np.exp(low + share * (high - low)))
        else:
            found = self.low + np.floor(share * (self.high + 1 - self.low))
        return np.clip(found, self.low, self.high).astype(np.int64)

    @classmethod
    def read(cls, key: str, given: Any, least: int, sampled: bool) -> Values:
        """``sampled``: the file asks for samples, so that a range without steps is drawn from."""
        if isinstance(given, Mapping):
            return _grid(key, given, least, sampled)
        listed = given if isinstance(given, list) else [given]
        if not listed:
            raise KernelcastError(f"{key} = [] leaves nothing to sweep: give one number or more")
        return cls(tuple(dict.fromkeys(_whole(key, value, least) for value in listed)))


def _grid(key: str, given: Mapping[str, Any], least: int, sampled: bool) -> Values:
    for name in given:
        if name not in _KEYS:
            raise unknown(f"key of {key} = {{ … }}", name, _KEYS)
    if "from" not in given or "to" not in given:
        raise KernelcastError(f"{key} = {{ … }} needs from and to, as in {{ from = 1, to = 256, factor = 2 }}")
    low, high = (_whole(f"{key}.{name}", given[name], least) for name in ("from", "to"))
    if low > high:
        raise KernelcastError(f"{key}: from {low} is more than to {high}")
    scale = given.get("scale", "linear")
    if scale not in _SCALES:
        raise unknown(f"scale of {key}", scale, _SCALES)
    if scale == "log" and low < 1:
        raise KernelcastError(f"{key}: a log scale starts at 1 or more, not at {low}")
    ways = [name for name in ("steps", "step", "factor") if name in given]
    if not ways and sampled:
        return Values(None, low, high, scale == "log")
    if len(ways) != 1:
        raise KernelcastError(
            f"{key} = {{ from = {low}, to = {high} }} needs one of steps (how many), step (how far apart) and factor "
            f"(as in factor = 2), or samples = N at the top of the file"
        )
    return Values(_spread(key, low, high, ways[0], given[ways[0]], scale == "log"))


def _spread(key: str, low: int, high: int, way: str, given: Any, log: bool) -> tuple[int, ...]:
    if way == "factor":
        if isinstance(given, bool) or not isinstance(given, int | float) or not given > 1 or low < 1:
            raise KernelcastError(f"{key}: factor is more than 1 and from at least 1, not {given!r} and {low}")
        count = math.floor(math.log(high / low) / math.log(given) + 1e-9) + 1
        found: NDArray[Any] = low * float(given) ** np.arange(count)
    else:
        size = _whole(f"{key}.{way}", given, 1)
        if way == "steps" and size > _MOST_LISTED:
            raise KernelcastError(f"{key}: at most {_MOST_LISTED:,} steps, not {size:,}")
        if way == "step":
            found = np.arange(low, high + 1, size)
        else:
            found = np.geomspace(low, high, size) if log else np.linspace(low, high, size)
    return tuple(dict.fromkeys(np.rint(found).astype(int).tolist()))


def words(key: str, given: Any) -> list[str]:
    """One name or a list of names."""
    listed: Sequence[Any] = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(word, str) for word in listed):
        raise KernelcastError(f"{key} is a name or a list of names, not {given!r}")
    return list(dict.fromkeys(listed))


def _whole(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise KernelcastError(f"{key} is a whole number of {least} or more, not {value!r}")
    return value
