"""One rank of a training job: its shard of the trace, the kernels of each part of the model, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from kernelcast.forecast.calls import Launch
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu
from kernelcast.schedule import Host, Memory
from kernelcast.tracing.aten import OpLaunches, OpSettings
from kernelcast.tracing.fusion import fuse
from kernelcast.tracing.traced import Op, Tensor, Trace
from kernelcast.training.data_parallel import Bucket, DataParallel, RankParameter
from kernelcast.training.expert_parallel import shard_experts
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.memory import Lifetime, activations, alive_bytes, with_overhead
from kernelcast.training.pipeline import LayerMap, PipelineTask, held_passes, most_in_flight, optimizer_ops, parts
from kernelcast.training.placement import is_collective
from kernelcast.training.step import LaunchQueue, OpKernels, launch_costs, op_cost, predict_ops
from kernelcast.training.tensor_parallel import TensorParallelPlan, shard_tensors


class Rank:
    """``trace`` is the whole model, ``rank_trace`` what one rank runs of it."""

    def __init__(
        self, trace: Trace, layout: TrainingLayout, times: Times, machine: Host, graph: bool, tf32: bool,
        tp_plan: TensorParallelPlan | None, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.trace, self.layout, self.times, self.machine, self.graph = trace, layout, times, machine, graph
        self.gpu: Gpu = times.gpu
        self.settings = OpSettings(tf32=tf32, capability=self.gpu.compute_capability, l2_bytes=self.gpu.l2_bytes)
        sharded = shard_experts(trace, layout.ep)
        of_rank = shard_tensors(sharded, layout.tp, layout.sequence_parallel, tp_plan)
        self.rank_trace = fuse(of_rank) if compiled else of_rank  # a compiler sees what one rank runs
        self.layers = LayerMap(self.rank_trace)
        self.host_s = launch_costs(self.rank_trace, machine)
        self.weights = [*self._trained(sharded), *self._frozen(sharded)]

    def _trained(self, sharded: Trace) -> list[RankParameter]:
        """Parameters by their gradients. ``sharded``: the trace after expert parallelism alone."""
        experts = [a.elements != b.elements for a, b in zip(self.trace.gradients, sharded.gradients, strict=True)]
        return [
            RankParameter(g.bytes, g.ready, self.layers.gradient_unit(g), "expert_dp" if expert else "dp",
                          {4: "fp32", 2: "bf16"}.get(g.bytes // max(1, g.elements), "fp32"))
            for g, expert in zip(self.rank_trace.gradients, experts, strict=True)
        ]  # fmt: skip

    def _frozen(self, sharded: Trace) -> list[RankParameter]:
        experts = [a.elements != b.elements for a, b in zip(self.trace.frozen, sharded.frozen, strict=True)]
        return [
            RankParameter(x.bytes, None, self.layers.owner.get(x.storage, 0), "expert_dp" if expert else "dp", x.dtype)
            for x, expert in zip(self.rank_trace.frozen, experts, strict=True)
        ]

    # ---- kernels ----

    def _costs(self, op: Op) -> OpLaunches:
        if is_collective(op):
            x = op.arguments[0]
            return OpLaunches(
                tuple(self.layout.group(op.options["group"]).launches(op.name, x.bytes, x.dtype, self.gpu))
            )
        return op_cost(op, self.settings, self.gpu)

    def launches_s(self, launches: Iterable[Launch]) -> float:
        """Seconds of collectives in sequence, with no overlap."""
        calls = [launch.call for launch in launches]
        self.times.predict(calls)
        return sum(self.times[call].interval.value for call in calls)

    @cached_property
    def kernels(self) -> dict[int, OpKernels | None]:
        """The kernels of each op of forward and backward, by index."""
        ops = {at: op for at, op in enumerate(self.rank_trace.ops) if op.phase != "optimizer"}
        return dict(zip(ops, predict_ops(ops.values(), self.times, self._costs), strict=True))

    # ---- parts of the model ----

    @cached_property
    def part_of(self) -> list[int]:
        """The part of each unit."""
        unit_s = [0.0] * (self.layers.count + 2)
        for at, kernel in self.kernels.items():
            unit_s[self.layers.unit[at]] += kernel.time_s if kernel else 0.0
        return parts(self.layers, unit_s, self.layout.parts, self.layout.stage_layers)

    def parts_of(self, stage: int) -> range:
        return range(stage, self.layout.parts, self.layout.pp)

    def queue(self, part: int, *phases: str) -> LaunchQueue:
        """The kernels of one pass through a part."""
        units = self.layers.unit
        mine = [(at, kernel) for at, kernel in self.kernels.items()
                if self.rank_trace.ops[at].phase in phases and self.part_of[units[at]] == part]  # fmt: skip
        return self._queue(mine)

    def optimizer(self, stage: int) -> LaunchQueue:
        """The optimizer's pass over the parameters of one stage, or over their shards."""

        def shards(x: Tensor) -> int:  # experts' parameters have three axes
            return self.layout.group("expert_dp" if len(x.shape) == 3 else "dp").world if self.layout.zero else 1

        mine = {unit for unit, part in enumerate(self.part_of) if part in self.parts_of(stage)}
        ops = list(optimizer_ops(self.layers, mine, shards))
        kernels = predict_ops([op for _, op in ops], self.times, self._costs)
        return self._queue([(at, kernel) for (at, _), kernel in zip(ops, kernels, strict=True)])

    def _queue(self, kernels: Sequence[tuple[int, OpKernels | None]]) -> LaunchQueue:
        return LaunchQueue.of(kernels, self.host_s, self.machine, self.graph, self.rank_trace.compiled)

    def sender(self, part: int) -> DataParallel:
        def seconds(bucket: Bucket) -> float:
            group = self.layout.group(bucket.group)
            return self.launches_s(group.launches(bucket.op, bucket.bytes, bucket.dtype, self.gpu))

        mine = [weight for weight in self.weights if self.part_of[weight.unit] == part]
        return DataParallel(self.layout, mine, self.layers.unit, seconds)

    # ---- memory ----

    def memory(self, stage: int, order: Sequence[PipelineTask]) -> Memory:
        """Memory of a rank of this stage, which takes its tasks in this order."""
        layout, before = self.layout, self.trace.footprint
        mine = [weight for weight in self.weights if self.part_of[weight.unit] in self.parts_of(stage)]
        frozen = [weight for weight in mine if weight.ready is None]
        whole, sharded = float(sum(w.bytes for w in mine)), sum(self._shard_bytes(w) for w in mine)
        whole_frozen, sharded_frozen = float(sum(w.bytes for w in frozen)), sum(self._shard_bytes(w) for w in frozen)
        trained = float(sum(g.bytes for g in self.trace.gradients))
        buffers = max(0.0, before.parameters - trained - sum(x.bytes for x in self.trace.frozen))
        last = layout.pp > 1 and stage == layout.pp - 1
        tied, tied_trained = (self.layers.tied_bytes(frozen) if last else 0.0 for frozen in (True, False))
        by_unit: dict[int, float] = {}
        for weight in mine:
            by_unit[weight.unit] = by_unit.get(weight.unit, 0.0) + weight.bytes
        alive, grads = self._peak(stage, order)
        stepped = sharded - sharded_frozen if layout.zero else whole - whole_frozen + tied_trained
        parts = {
            "parameter": buffers + (sharded if layout.zero == 3 else whole + tied),  # every rank has all buffers
            "gradient": grads + (tied_trained if layout.zero < 2 else 0.0),
            "optimizer": before.optimizer * stepped / trained,
            "activation": alive,  # of all micro-batches in flight
            # parameters that ZeRO 3 has gathered: of the unit that runs and the next
            "gathered": sum(sorted(by_unit.values())[-2:]) if layout.zero == 3 and layout.dp > 1 else 0.0,
            "input": before.inputs * most_in_flight(order) / layout.virtual_stages,
        }
        return with_overhead(parts, self.gpu)

    def _shard_bytes(self, weight: RankParameter) -> float:
        """Bytes on each rank of the group that ZeRO shards the parameter, or its gradient, over."""
        return weight.bytes / self.layout.group(weight.group).world

    def _peak(self, stage: int, order: Sequence[PipelineTask]) -> tuple[float, float]:
        """Bytes of activations and of gradients when both together are most."""
        ops = self.rank_trace.ops
        alive = {part: alive_bytes([x for x in self._lifetimes if self.part_of[x.unit] == part], len(ops))
                 * self._kept_longer for part in self.parts_of(stage)}  # fmt: skip
        grads = alive_bytes([x for x in self._gradients if self.part_of[x.unit] in alive], len(ops))
        if self.layout.micro_batches > 1:  # they stay from the first micro-batch on
            grads = np.full_like(grads, grads[-1])
        forward_end = max((at for at, op in enumerate(ops) if op.phase == "forward"), default=-1)
        kept = {part: float(of_part[forward_end]) for part, of_part in alive.items()}
        peak = (0.0, 0.0)
        for state in held_passes(order):
            others = sum(passes * kept[part] for part, passes in state.held) - kept[state.part]
            phase = slice(forward_end + 1, None) if state.backward else slice(forward_end + 1)
            held = alive[state.part][phase] + others
            at = int(np.argmax(held + grads[phase]))
            peak = max(peak, (float(held[at]), float(grads[phase][at])), key=sum)
        return peak

    @cached_property
    def _lifetimes(self) -> list[Lifetime]:
        return activations(self.rank_trace, self.layers.unit)

    @cached_property
    def _gradients(self) -> list[Lifetime]:
        end, sharded = len(self.rank_trace.ops) - 1, self.layout.zero >= 2
        return [
            Lifetime(w.ready, end, self._shard_bytes(w) if sharded else w.bytes, w.unit)
            for w in self.weights
            if w.ready is not None
        ]

    @cached_property
    def _kept_longer(self) -> float:
        """Peak of the traced run beyond the lifetimes of its tensors: Python keeps some until a function returns."""
        trace, before, ops = self.trace, self.trace.footprint, len(self.trace.ops)
        alive = alive_bytes(activations(trace, [0] * ops), ops)
        grads = alive_bytes([Lifetime(g.ready, ops - 1, g.bytes, 0) for g in trace.gradients], ops)
        at = int(np.argmax(alive + grads))
        if alive[at] < 0.5 * grads[at] or not before.activations:
            return 1.0
        return float(np.clip((before.activations + before.gradients - grads[at]) / alive[at], 0.8, 1.5))
