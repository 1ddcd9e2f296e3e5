"""Where the time of many workloads goes, as columns: by phase and part, what binds it and what supports it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kernelcast.kernels.work import Array
from kernelcast.machine.analyse import PIPELINES
from kernelcast.networks.batch import Ints
from kernelcast.serving.asked import summed
from kernelcast.serving.laid import PHASES, Alike, Laid
from kernelcast.support import MOST, SUPPORT
from kernelcast.timeline import Share

_BOUND = (*PIPELINES, "power", "host")
_LEVELS = tuple(SUPPORT)


class _Part:
    """One part in one phase: seconds by what binds and by what supports, and kernels, an entry a workload."""

    def __init__(self, count: int) -> None:
        self.bound_s, self.support_s = np.zeros((len(_BOUND), count)), np.zeros((len(_LEVELS), count))
        self.kernels = np.zeros(count)

    def add(self, bound: int, support: int, time_s: Array) -> None:
        self.bound_s[bound] += time_s
        self.support_s[support] += time_s

    @property
    def time_s(self) -> Array:
        return self.support_s.sum(axis=0)


class Shares:
    """Of ``count`` workloads; ``laid``: passes, and the workload (by number) of each owner of theirs."""

    def __init__(self, count: int, laid: Iterable[tuple[Laid, Ints]]) -> None:
        self.count, self.parts = count, dict[tuple[str, str], _Part]()
        for passes, owners in laid:
            for phase in PHASES:  # in the order of appearance
                self._add(phase, passes, owners)

    def _add(self, phase: str, passes: Laid, owners: Ints) -> None:
        weights = passes.counts * (passes.decodes == (phase == "decode"))
        if not weights.any():
            return
        owner = owners[passes.owner]
        for group in passes.alike:
            if weights[group.rows].any():
                own = (weights * passes.rounds)[group.rows]
                self._kernels(phase, passes, group, owner[group.rows], own)
        for name, bound, support, time_s in (
            ("power limit", "power", "near", passes.power_s), ("host", "host", "seen", passes.host_s),
        ):  # fmt: skip
            if time_s.any():
                each = summed(owner, weights * time_s, self.count)
                self._part(phase, name).add(_BOUND.index(bound), _LEVELS.index(support), each)

    def _kernels(self, phase: str, passes: Laid, group: Alike, owner: Ints, weights: Array) -> None:
        each = summed(owner, weights, self.count)
        for launch in group.launches:
            self._part(phase, passes.part(launch)).kernels += launch.count * each
        times = passes.times
        for launches, calls, at in group.sorts():
            seconds = passes.seconds(group, launches, calls, at)[0]
            parts = list(dict.fromkeys(map(passes.part, launches)))
            which = [[parts.index(passes.part(launch))] for launch in launches]
            labels = (np.array(which) * len(_BOUND) + times.bound_by[calls]) * len(_LEVELS) + times.support[calls]
            for label in np.unique(labels).tolist():
                rest, support = divmod(label, len(_LEVELS))
                part, bound = divmod(rest, len(_BOUND))
                own = np.where(labels == label, seconds, 0.0).sum(axis=0)
                self._part(phase, parts[part]).add(bound, support, summed(owner, own[at] * weights, self.count))

    def _part(self, phase: str, name: str) -> _Part:
        return self.parts.setdefault((phase, name), _Part(self.count))

    def of(self, at: int) -> tuple[Share, ...]:
        """Of one workload; adds up to its time."""
        return tuple(
            Share(phase, name, float(part.time_s[at]), float(part.kernels[at]),
                  _BOUND[int(part.bound_s[:, at].argmax())], _LEVELS[int(part.support_s[:, at].argmax())])
            for (phase, name), part in self.parts.items()
            if part.kernels[at] or part.time_s[at]
        )  # fmt: skip

    @property
    def bound_by(self) -> NDArray[np.object_]:
        """What binds most of the time, by workload."""
        sums = np.sum([part.bound_s for part in self.parts.values()], axis=0)
        return np.array(_BOUND, dtype=object)[sums.argmax(axis=0)]

    @property
    def support(self) -> NDArray[np.object_]:
        """As ``support_of`` the shares of each workload."""
        levels = np.zeros((len(_LEVELS), self.count))
        for part in self.parts.values():
            levels[part.support_s.argmax(axis=0), np.arange(self.count)] += part.time_s
        reached = np.cumsum(levels, axis=0) >= MOST * levels.sum(axis=0)
        reached[-1] = True
        return np.array(_LEVELS, dtype=object)[reached.argmax(axis=0)]
