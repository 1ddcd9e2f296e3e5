"""Times of many kernel calls at once: every different call is predicted once, in one table a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.networks.forward import Call
from kernelcast.predict import DEFAULT, Conditions, chosen
from kernelcast.tables import predict_columns

Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class KernelTime:
    """One call on one GPU, in seconds."""

    time_s: float
    low_s: float
    high_s: float
    bound_by: str
    support: str


class KernelTimes:
    """What was predicted so far on one GPU; asking again costs nothing."""

    def __init__(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> None:
        self.gpu, self.conditions = gpu, conditions
        self.predictor = chosen(conditions).name
        self._known: dict[Key, KernelTime] = {}

    def learn(self, calls: Iterable[Call]) -> None:
        """Predict all of these that are not known yet."""
        new = list(dict.fromkeys(call.parameters for call in calls if call.parameters not in self._known))
        if not new:
            return
        found, bad = predict_columns(_columns(new), self.gpu, self.conditions)
        if bad.found:
            first = min(bad.found)
            raise KernelcastError(f"{bad.found[first]} (asked for by {_told(new[first])})")
        numbers = (found[name] * 1e-6 for name in ("predicted_us", "low_us", "high_us"))
        for key, *values in zip(new, *numbers, found["bound_by"], found["support"], strict=True):
            self._known[key] = KernelTime(*values)

    def __getitem__(self, call: Call) -> KernelTime:
        return self._known[call.parameters]


def _columns(keys: list[Key]) -> Mapping[str, np.ndarray[Any, Any]]:
    """One row a call; a parameter that a call does not have is an empty cell."""
    names = list(dict.fromkeys(name for key in keys for name, _ in key))
    columns = {name: np.full(len(keys), None, dtype=object) for name in names}
    for row, key in enumerate(keys):
        for name, value in key:
            columns[name][row] = value
    return columns


def _told(key: Key) -> str:
    return ", ".join(f"{name}={value}" for name, value in key)
