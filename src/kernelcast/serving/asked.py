"""What many workloads ask, as columns: their requests, and what these add up to in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kernelcast.kernels.work import Array
from kernelcast.networks.batch import Ints
from kernelcast.networks.forward import Deployment
from kernelcast.serving.workload import Workload


def summed(owner: Ints, values: Array | Ints, count: int) -> Array:
    """The values of each of ``count`` owners, added up one after another: the same sum whoever else is there."""
    return np.bincount(owner, values, count).astype(np.float64, copy=False)


class Asked:
    """``inputs``, ``outputs``, ``cached``, ``counts``: the different requests of each workload, one workload after
    another. ``batch``, ``chunk`` and ``checked`` have an entry a workload."""

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self.workloads, self.count = workloads, len(workloads)
        rows: list[tuple[int, int, int, int, int]] = []
        for at, one in enumerate(workloads):
            if one.even is not None:
                rows.append((at, *one.even, len(one.inputs)))
            else:
                kinds = Counter(zip(one.inputs, one.outputs, one.past, strict=True))
                rows += [(at, *request, count) for request, count in kinds.items()]
        self.owner, self.inputs, self.outputs, self.cached, self.counts = (
            np.array(rows, dtype=np.int64).reshape(-1, 5).T
        )
        self.batch: Ints = np.array([len(one.inputs) for one in workloads], dtype=np.int64)
        self.chunk: Ints = np.array([one.chunk or 0 for one in workloads], dtype=np.int64)
        self.checked: Ints = np.array([one.checked for one in workloads], dtype=np.int64)

    def total(self, values: Array | Ints) -> Array:
        """Of each workload: the sum over its requests."""
        return summed(self.owner, self.counts * values, self.count)

    def most(self, values: Ints) -> Ints:
        """Of each workload: the most of its requests."""
        found: Ints = np.maximum.reduceat(values, np.searchsorted(self.owner, np.arange(self.count)))
        return found

    def towers(self) -> Iterator[tuple[Deployment, list[int]]]:
        """What reads images, and the workloads that have some."""
        found: dict[int, tuple[Deployment, list[int]]] = {}
        for at, one in enumerate(self.workloads):
            for images in one.images:
                found.setdefault(id(images.tower), (images.tower, []))[1].append(at)
        yield from found.values()

    def drafts(self) -> Iterator[tuple[Deployment, Ints]]:
        """The different models that guess, and the workloads of each."""
        found: dict[int, tuple[Deployment, list[int]]] = {}
        for at, one in enumerate(self.workloads):
            if one.speculation is not None and one.speculation.draft is not None:
                draft = one.speculation.draft
                found.setdefault(id(draft), (draft, []))[1].append(at)
        for draft, members in found.values():
            yield draft, np.array(members)
