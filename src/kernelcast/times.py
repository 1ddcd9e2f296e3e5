"""Times of many kernel calls at once: every different call is predicted once, in one table a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kernelcast.calls.call import Call, columns_of
from kernelcast.efficiency.evidence import Standing
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.predict import DEFAULT, Conditions, chosen
from kernelcast.span import Span
from kernelcast.tables import predict_columns


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call on one GPU."""

    span: Span
    bound_by: str
    support: str
    standing: Standing  # what it rests on
    launches: float  # kernels, one after another


class Times:
    """What was predicted so far on one GPU; asking again costs nothing."""

    def __init__(self, gpu: Gpu, conditions: Conditions = DEFAULT) -> None:
        self.gpu, self.conditions = gpu, conditions
        self.predictor = chosen(conditions).name
        self._known: dict[Call, CallTime] = {}

    def learn(self, calls: Iterable[Call]) -> None:
        """Predict all of these that are not known yet."""
        new = list(dict.fromkeys(call for call in calls if call not in self._known))
        if not new:
            return
        standings, launches = np.full(len(new), None, dtype=object), np.ones(len(new))
        found, bad = predict_columns(columns_of(new), self.gpu, self.conditions, standings, launches)
        if bad.found:
            first = min(bad.found)
            raise KernelcastError(f"{bad.found[first]} (asked for by {new[first]})")
        seconds = (found[name] * 1e-6 for name in ("predicted_us", "low_us", "high_us"))
        for call, *span, bound_by, support, standing, kernels in zip(
            new, *seconds, found["bound_by"], found["support"], standings, launches.tolist(), strict=True
        ):
            self._known[call] = CallTime(Span(*span), bound_by, support, standing, kernels)

    def __getitem__(self, call: Call) -> CallTime:
        return self._known[call]
