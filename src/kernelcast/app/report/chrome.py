"""A timeline as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kernelcast.files import complete
from kernelcast.schedule import Timeline

_MOST_EVENTS = 200_000  # of a lane: more than a viewer shows


def write_timeline(found: Timeline, path: Path) -> None:
    """A process a place, a row a lane; microseconds."""
    places = list(dict.fromkeys(lane.process for lane in found.lanes))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}} for pid, name in enumerate(places)
    ]
    for tid, lane in enumerate(found.lanes):
        at = {"pid": places.index(lane.process), "tid": tid}
        events.append({"ph": "M", **at, "name": "thread_name", "args": {"name": lane.name}})
        events += [
            {"ph": "X", **at, "name": one.name, "cat": one.part, "ts": round(one.start_s * 1e6, 3),
             "dur": round(one.time_s * 1e6, 3), "args": dict(one.details)}
            for one in lane.events[:_MOST_EVENTS]
        ]  # fmt: skip
    with complete(path) as part:
        part.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
