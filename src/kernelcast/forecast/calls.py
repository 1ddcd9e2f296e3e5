"""Kernel calls and launches: the value that tables, models, traces and profiles share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.table import plain

ROTATIONS = ("rotation", "input_rotation")
_SHOWN = 6  # of a list of lengths, in messages


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its parameters (number format, stack and backend among them) and what holds around it.

    Nothing is checked before it is predicted: ``kernels`` know what is right. ``rotation`` and ``input_rotation``
    stand in for those of the conditions under which it is predicted, where given. Many calls that differ in sizes alone
    may be one, with columns (arrays) for those sizes; such a call is no key of a dictionary.
    """

    op: str
    parameters: tuple[tuple[str, Any], ...]  # by name
    rotation: float | None = None
    input_rotation: float | None = None

    @classmethod
    def of(cls, op: str, given: Mapping[str, Any], rotation: float | None = None,
           input_rotation: float | None = None) -> Call:  # fmt: skip
        """A parameter that is None was not given."""
        known = tuple(sorted((name, value) for name, value in given.items() if value is not None))
        return cls(op, known, rotation, input_rotation)

    @property
    def arguments(self) -> dict[str, Any]:
        """The op and its parameters by name."""
        return {"op": self.op, **dict(self.parameters)}

    def replace(self, **changes: Any) -> Call:
        """With other parameters; None takes one away."""
        return Call.of(self.op, {**dict(self.parameters), **changes}, self.rotation, self.input_rotation)

    def row(self, at: int) -> Call:
        """One of a call whose sizes are columns."""
        given = {name: plain(value[at]) if isinstance(value, np.ndarray) else value for name, value in self.parameters}
        return Call.of(self.op, given, self.rotation, self.input_rotation)

    def __str__(self) -> str:
        return ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())


def _short(value: Any) -> Any:
    """Of the lengths of a large batch, the first few."""
    if not isinstance(value, tuple) or len(value) <= _SHOWN:
        return value
    return f"({', '.join(map(str, value[:_SHOWN]))}, ... {len(value)} in all)"


@dataclass(frozen=True, slots=True)
class Launch:
    """A call in a part of a model, with a count; ``scales_with``: what of the batch its size follows."""

    part: str
    call: Call
    count: float = 1.0
    scales_with: str = (
        "tokens"  # or "sequences" (the head's rows), or "lengths" (attention: new and past tokens of each)
    )
    overlaps: str = (
        ""  # on a stream of its own beside the routed "experts", or beside "all": what they do not hide counts
    )

    @property
    def op(self) -> str:
        return self.call.op

    @property
    def arguments(self) -> dict[str, Any]:
        return self.call.arguments


def columns_of(calls: Sequence[Call]) -> dict[str, NDArray[Any]]:
    """A table with one row a call; what a call does not say is an empty cell."""
    names = dict.fromkeys(name for call in calls for name, _ in call.parameters)
    turning = [name for name in ROTATIONS if any(getattr(call, name) is not None for call in calls)]
    columns = {name: np.full(len(calls), None, dtype=object) for name in ("op", *names, *turning)}
    for row, call in enumerate(calls):
        for name in ("op", *turning):
            columns[name][row] = getattr(call, name)
        for name, value in call.parameters:
            columns[name][row] = value
    return columns
