"""A simulated service over time, at few enough moments for a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kernelcast.serving.simulate import Simulation

POINTS = 400


def over_time(found: Simulation) -> dict[str, list[float]]:
    """Requests that decode and that wait, summed over engines, and the mean share of their KV caches in use."""
    notes = found.notes
    if not notes.end_s:
        return {"time_s": [], "running": [], "waiting": [], "kv_share": []}
    ends, engines = np.array(notes.end_s), np.array(notes.engine)
    moments = np.unique(ends)
    if len(moments) > POINTS:
        moments = np.linspace(moments[0], moments[-1], POINTS)
    told: dict[str, Any] = {"running": notes.decoding, "waiting": notes.waiting, "kv_share": notes.kv_use}
    sums = {name: np.zeros(len(moments)) for name in told}
    names = np.unique(engines)
    for engine in names:
        own = np.flatnonzero(engines == engine)
        own = own[np.argsort(ends[own], kind="stable")]
        at = np.searchsorted(ends[own], moments, side="right") - 1  # the last stretch that had ended by then
        for name, values in told.items():
            sums[name] += np.where(at < 0, 0.0, np.array(values, dtype=np.float64)[own][np.maximum(at, 0)])
    sums["kv_share"] /= len(names)
    return {"time_s": moments.tolist(), **{name: values.tolist() for name, values in sums.items()}}
