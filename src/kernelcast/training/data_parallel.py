"""Collectives of data parallelism: buckets of gradients (DDP), and the shards of ZeRO 1, 2 and 3 (FSDP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kernelcast.schedule.timeline import Collective
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.step import LaunchQueue

_ALL = float("inf")  # bytes: whatever there is goes in one bucket


@dataclass(frozen=True)
class RankParameter:
    """A parameter of one rank: its unit of the model, and the group that replicates it. ``ready``: the op after which
    its gradient may be sent; None: it is frozen and has none."""

    bytes: float
    ready: int | None
    unit: int
    group: str  # dp, or expert_dp
    dtype: str


@dataclass(frozen=True)
class Bucket:
    op: str
    bytes: float
    dtype: str
    group: str
    ready: int  # the op after which it may go


def buckets(weights: Sequence[RankParameter], limit_bytes: float, op: str) -> list[Bucket]:
    """Gradients in the order in which they are ready, sent when ``limit_bytes`` are full, as in DDP; or parameters."""
    full: list[Bucket] = []
    for group, dtype in dict.fromkeys((w.group, w.dtype) for w in weights):
        held, ready = 0.0, 0
        for w in sorted((w for w in weights if (w.group, w.dtype) == (group, dtype)), key=lambda w: w.ready or 0):
            held, ready = held + w.bytes, w.ready or 0
            if held >= limit_bytes:
                full.append(Bucket(op, held, dtype, group, ready))
                held = 0.0
        if held:
            full.append(Bucket(op, held, dtype, group, ready))
    return sorted(full, key=lambda bucket: bucket.ready)


@dataclass(frozen=True)
class DataParallel:
    """Makes the jobs of one part of the model. ``seconds``: of a bucket's collective."""

    layout: TrainingLayout
    weights: Sequence[RankParameter]
    unit_of: Sequence[int]  # of each op
    seconds: Callable[[Bucket], float]

    def gradients(self, queue: LaunchQueue, waits: int, final: bool) -> Iterator[Collective]:
        """Gradient collectives of a backward pass; kernel ``waits`` needs them. ``final``: of the step's last
        micro-batch; before it only ZeRO 2 and 3 send, for they keep no whole gradients."""
        zero, overlap = self.layout.zero, self.layout.overlap
        if self.layout.dp == 1 or not (final or zero >= 2):
            return
        op = "reduce_scatter" if zero else "all_reduce"
        if zero == 3:
            units = ([w for w in self._units[unit] if w.ready is not None] for unit in sorted(self._units))
            buckets_ready = [bucket for weights in units for bucket in buckets(weights, _ALL, op)]
        else:
            buckets_ready = buckets(self._trained, self.layout.bucket_bytes if overlap else _ALL, op)
        for bucket in buckets_ready:
            after = queue.kernel_at(bucket.ready) if overlap else len(queue.kernels) - 1
            yield self._job(bucket, after, waits)

    def parameters(self, end: int) -> Iterator[Collective]:
        """After the optimizer, whose kernels are ``end``, each rank has its shard of the new parameters: ZeRO 1 and 2
        gather them at once."""
        if self.layout.dp > 1 and self.layout.zero in (1, 2):
            for bucket in buckets(self._trained, _ALL, "all_gather"):
                yield self._job(bucket, end - 1, end)

    def gathers(self, queue: LaunchQueue) -> Iterator[Collective]:
        """ZeRO 3 gathers a unit's parameters before it runs, one unit ahead; forward and backward apart."""
        if self.layout.dp == 1 or self.layout.zero < 3:
            return
        firsts: dict[tuple[str, int], int] = {}  # kernel of each unit, in the order of the pass
        for at, (kernel, op) in enumerate(zip(queue.kernels, queue.indices, strict=True)):
            firsts.setdefault((kernel.phase, self.unit_of[op]), at)
        before = next(iter(firsts.values()), 0)
        for (_, unit), first in firsts.items():
            for bucket in buckets(self._units.get(unit, ()), _ALL, "all_gather"):
                yield self._job(bucket, before - 1, first)
            before = first

    @cached_property
    def _trained(self) -> list[RankParameter]:
        return [weight for weight in self.weights if weight.ready is not None]

    @cached_property
    def _units(self) -> dict[int, list[RankParameter]]:
        units: dict[int, list[RankParameter]] = {}
        for weight in self.weights:
            units.setdefault(weight.unit, []).append(weight)
        return units

    def _job(self, bucket: Bucket, after: int, before: int) -> Collective:
        sent_bytes = self.layout.group(bucket.group).sent_bytes(bucket.op, bucket.bytes)
        return Collective(bucket.op, self.seconds(bucket), after, before, sent_bytes)
