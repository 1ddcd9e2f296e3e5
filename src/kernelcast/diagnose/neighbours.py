"""What the order of kernels on the GPU tells: where it had nothing to do, and which of them could be one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.diagnose.chrome_events import Event, arg
from kernelcast.diagnose.kernel_names import FUSIBLE_KINDS, read_name

CHAIN_KERNELS = 2  # the least that a row of fusible kernels has


@dataclass(frozen=True)
class Neighbourhood:
    """Of one kernel, in microseconds."""

    idle_us: float = 0.0  # nothing ran before it
    chain: int = 0  # kernels of its row of fusible ones, 0 where it is in none
    chain_saved_us: float = 0.0


def neighbourhoods(device: Sequence[Event]) -> list[Neighbourhood]:
    """Of each of these kernels, which are in the order of their start.

    One kernel for a whole row of fusible ones (neighbours on one stream that read and write element by element, or row
    by row) would take about as long as the longest: the others' time is saved at best.
    """
    starts_us, times_us = (np.array([float(event[name]) for event in device]) for name in ("ts", "dur"))
    ended_us = np.maximum.accumulate(starts_us + times_us)  # all kernels up to each
    idle_us = np.maximum(0.0, starts_us - np.concatenate([starts_us[:1], ended_us[:-1]]))
    chains = [(0, 0.0)] * len(device)
    for (fits, _), row in itertools.groupby(range(len(device)), lambda at: _row_key(device[at])):
        members = list(row)
        if not fits or len(members) < CHAIN_KERNELS:
            continue
        longest = max(members, key=lambda at: times_us[at])
        for at in members:
            chains[at] = (len(members), 0.0 if at == longest else float(times_us[at]))
    return [Neighbourhood(idle, *chain) for idle, chain in zip(idle_us.tolist(), chains, strict=True)]


def _row_key(event: Event) -> tuple[bool, object]:
    """Whether a kernel is fusible (copies to and from the host are none), and its stream."""
    name = str(event["name"])
    return read_name(name).kind in FUSIBLE_KINDS and not crosses_to_host(name), arg(event, "stream")


def crosses_to_host(name: str) -> bool:
    return name.startswith("Memcpy") and "DtoD" not in name
