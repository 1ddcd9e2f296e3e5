"""Few calls that teach most about a GPU: those that lie farthest apart in what the machine says of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernelcast.efficiency.features import aligned
from kernelcast.efficiency.learned import Learned
from kernelcast.hardware import Gpu
from kernelcast.kernels.base import columns_of, parameters_of
from kernelcast.machine.analyse import IN_A_MODEL
from kernelcast.measure.plan import Planned
from kernelcast.predict import ask


def most_telling(candidates: Sequence[Planned], target: Gpu, count: int) -> list[Planned]:
    """``count`` of the candidates, each family by its share, so ordered that any prefix is spread out too."""
    groups: dict[str, list[Planned]] = {}
    for planned in candidates:
        groups.setdefault(planned.family, []).append(planned)
    found: list[tuple[float, str, Planned]] = []
    for name, members in groups.items():
        share = max(1, round(count * len(members) / len(candidates)))
        picked = farthest_first(_features(members, target), min(share, len(members)))
        found += [((at + 0.5) / len(picked), name, members[i]) for at, i in enumerate(picked)]
    return [planned for _, _, planned in sorted(found, key=lambda entry: entry[:2])][:count]


def farthest_first(points: NDArray[np.float64], count: int) -> list[int]:
    """Start at the most central point, then always take the one farthest from all that are taken."""
    centre = points.mean(axis=0)
    picked = [int(np.argmin(np.sum((points - centre) ** 2, axis=1)))]
    distance = np.sum((points - points[picked[0]]) ** 2, axis=1)
    while len(picked) < count:
        picked.append(int(np.argmax(distance)))
        distance = np.minimum(distance, np.sum((points - points[picked[-1]]) ** 2, axis=1))
    return picked


def _features(members: Sequence[Planned], target: Gpu) -> NDArray[np.float64]:
    """One row a call, each column to unit spread; words count as one step each."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for at, planned in enumerate(members):
        specs = parameters_of(type(planned.call)).values()
        words = tuple(str(getattr(planned.call, p.name)) for p in specs if p.kind == "choice")
        groups.setdefault((planned.call.op, *words), []).append(at)
    parts = []
    for rows in groups.values():
        calls = columns_of([members[i].call for i in rows])
        kernel = type(members[rows[0]].call)
        parts.append((rows, ask(kernel, calls, target, IN_A_MODEL, Learned()).features))
    names = tuple(dict.fromkeys(name for _, found in parts for name in found.names))
    values = np.zeros((len(members), len(names) + len(parts)))
    for at, (rows, found) in enumerate(parts):
        values[rows, : len(names)] = aligned(found.names, found.values, names)
        values[rows, len(names) + at] = 1.0
    spread = values.std(axis=0)
    return values / np.where(spread < 1e-9, 1.0, spread)
