"""How tasks fall onto SMs: the busiest SM's share, in units of the mean task.

Closed forms, so that a million calls take one pass; their test replays the heap.
"""

from __future__ import annotations

import numpy as np

from kernelcast.kernels.work import Array, Number, Work


def busiest_share(work: Work, sms: int) -> Array:
    """Mean tasks' worth of work on the busiest of ``sms`` SMs: the least that its schedule can reach."""
    if work.schedule == "longest_first":
        return longest_first(work.tasks, work.longest, work.shortest, work.longest_count, sms)
    tasks = np.asarray(work.tasks)  # an SM that frees up takes the next
    return np.maximum(np.ceil(tasks / sms), np.where(tasks > 0, work.longest, 0.0))


def longest_first(tasks: Number, longest: Number, shortest: Number, longest_count: Number, sms: int) -> Array:
    """Unequal tasks, longest first, each to the least loaded SM.

    Three lower limits, of which the largest is close to what the heap reaches: the longest task alone; the
    longest tasks shared out; all work shared out, rounded up to the shortest task (the last to be placed).
    For equal tasks this is ceil(tasks / sms).
    """
    grain = np.maximum(shortest, 1e-9)
    shared = grain * np.ceil(np.asarray(tasks, dtype=np.float64) / (sms * grain) - 1e-9)
    shared = np.where(np.asarray(tasks) > sms, shared, 0.0)  # else no SM has two
    long = longest * np.ceil(np.asarray(longest_count, dtype=np.float64) / sms)
    return np.where(np.asarray(tasks) > 0, np.maximum(shared, np.maximum(long, longest)), 0.0)
