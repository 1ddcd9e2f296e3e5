"""What the order of kernels on the GPU tells: where it had nothing to do, and which of them could be one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernelcast.advise.chrome_events import Event, arg
from kernelcast.advise.kernel_names import FUSIBLE_KINDS, read_name

CHAIN_KERNELS = 2  # the least that a row of fusible kernels has


@dataclass(frozen=True)
class Place:
    """One kernel's neighbourhood, in microseconds."""

    idle_us: float = 0.0  # nothing ran before it
    chain: int = 0  # kernels of its row of fusible ones, 0 where it is in none
    chain_saved_us: float = 0.0


def places(device: Sequence[Event]) -> list[Place]:
    """Of each of these kernels, which are in the order of their start.

    One kernel for a whole row of them would take about as long as the longest: the others' time is saved at best.
    """
    idle, chains = _idle_us(device), [(0, 0.0)] * len(device)
    for members in _rows(device):
        if len(members) < CHAIN_KERNELS:
            continue
        longest = max(members, key=lambda at: float(device[at]["dur"]))
        for at in members:
            chains[at] = (len(members), 0.0 if at == longest else float(device[at]["dur"]))
    return [Place(gap, *chain) for gap, chain in zip(idle, chains, strict=True)]


def span_us(device: Sequence[Event]) -> float:
    end = max(float(event["ts"]) + float(event["dur"]) for event in device)
    return end - min(float(event["ts"]) for event in device)


def _idle_us(device: Sequence[Event]) -> list[float]:
    """Time from the end of all kernels before to the start of each; the first has waited for none."""
    found, end = [], None
    for event in device:
        start = float(event["ts"])
        found.append(max(0.0, start - end) if end is not None else 0.0)
        end = max(end if end is not None else start, start + float(event["dur"]))
    return found


def _rows(device: Sequence[Event]) -> Iterator[list[int]]:
    """Neighbours on one stream that read and write element by element, or row by row."""
    row: list[int] = []
    stream = None
    for at, event in enumerate(device):
        fits = fusible(str(event["name"]))
        if row and (not fits or arg(event, "stream") != stream):
            yield row
            row = []
        if fits:
            row.append(at)
            stream = arg(event, "stream")
    if row:
        yield row


def fusible(name: str) -> bool:
    """Copies to and from the host are none."""
    return read_name(name).kind in FUSIBLE_KINDS and not crosses_to_host(name)


def crosses_to_host(name: str) -> bool:
    return name.startswith("Memcpy") and "DtoD" not in name
