"""What data-parallel ranks send one another: buckets of gradients (DDP), and the shards of ZeRO 1, 2 and 3 (FSDP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kernelcast.networks.traced import Gradient
from kernelcast.parallel.training import TrainingLayout
from kernelcast.timeline.streams import Job

# Seconds of a collective in a group: (op, bytes, dtype, group)
Cost = Callable[[str, float, str, str], float]


@dataclass(frozen=True)
class Weight:
    """A parameter of one rank, by its gradient: its unit of the model, and who has the same one."""

    gradient: Gradient
    unit: int
    group: str  # dp, or expert_dp
    dtype: str


@dataclass(frozen=True)
class Message:
    op: str
    bytes: float
    dtype: str
    group: str
    ready: int  # the op after which it may go


def buckets(weights: Sequence[Weight], limit_bytes: float, op: str) -> list[Message]:
    """Gradients in the order in which they become ready, sent when ``limit_bytes`` are full, as DDP does once it has
    seen that order."""
    found: list[Message] = []
    for group, dtype in dict.fromkeys((w.group, w.dtype) for w in weights):
        held, ready = 0.0, 0
        for w in sorted((w for w in weights if (w.group, w.dtype) == (group, dtype)), key=lambda w: w.gradient.ready):
            held, ready = held + w.gradient.bytes, w.gradient.ready
            if held >= limit_bytes:
                found.append(Message(op, held, dtype, group, ready))
                held = 0.0
        if held:
            found.append(Message(op, held, dtype, group, ready))
    return sorted(found, key=lambda message: message.ready)


@dataclass(frozen=True)
class Sender:
    """Makes the jobs of one pass. ``place``: of the last kernel at or before an op; ``first``: kernel of a unit."""

    layout: TrainingLayout
    cost: Cost
    weights: Sequence[Weight]

    @property
    def shared(self) -> bool:
        return self.layout.dp > 1

    def gradients(self, place: Callable[[int], int], last: int, waits: int, final: bool) -> Iterator[Job]:
        """After a backward pass whose last kernel is ``last``. ``final``: of the step's last micro-batch; before it
        only ZeRO 2 and 3 send, for they keep no whole gradients."""
        if not self.shared or not (final or self.layout.zero >= 2):
            return
        op = "reduce_scatter" if self.layout.zero else "all_reduce"
        if self.layout.zero == 3:
            messages = [m for unit in self._units() for m in buckets(self._of(unit), float("inf"), op)]
        else:
            messages = buckets(self.weights, self.layout.bucket_bytes if self.layout.overlap else float("inf"), op)
        for m in messages:
            after = place(m.ready) if self.layout.overlap else last
            yield self._job(m.op, m.bytes, m.dtype, m.group, after, waits)

    def parameters(self, last: int, waits: int) -> Iterator[Job]:
        """After the optimizer each rank has its shard of the new parameters: ZeRO 1 and 2 gather them at once."""
        if self.shared and self.layout.zero in (1, 2):
            for m in buckets(self.weights, float("inf"), "all_gather"):
                yield self._job(m.op, m.bytes, m.dtype, m.group, last, waits)

    def gathers(self, firsts: Sequence[tuple[int, int]]) -> Iterator[Job]:
        """ZeRO 3 gathers a unit's parameters before it runs, one unit ahead. ``firsts``: (unit, its first kernel) in
        the order of the pass."""
        if not (self.shared and self.layout.zero == 3):
            return
        for at, (unit, kernel) in enumerate(firsts):
            asked = firsts[at - 1][1] - 1 if at else firsts[0][1] - 1
            for m in buckets(self._of(unit), float("inf"), "all_gather"):
                yield self._job(m.op, m.bytes, m.dtype, m.group, asked, kernel)

    def _units(self) -> list[int]:
        return sorted({w.unit for w in self.weights})

    def _of(self, unit: int) -> list[Weight]:
        return [w for w in self.weights if w.unit == unit]

    def _job(self, op: str, size: float, dtype: str, group: str, after: int, before: int) -> Job:
        sent = self.layout.group(group).sent_bytes(op, size)
        return Job(op, self.cost(op, size, dtype, group), after, before, sent)
