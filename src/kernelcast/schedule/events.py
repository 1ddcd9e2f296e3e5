"""A timeline as a person looks at it: lanes of events, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that runs from ``start_s`` for ``time_s``."""

    name: str
    start_s: float
    time_s: float
    part: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return self.start_s + self.time_s


@dataclass(frozen=True)
class Lane:
    """A stream, a link or a thread of the host, of one ``place`` (a GPU, a stage)."""

    place: str
    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Timeline:
    lanes: tuple[Lane, ...]

    @property
    def end_s(self) -> float:
        return max((event.end_s for lane in self.lanes for event in lane.events), default=0.0)
