"""What a rank does once a step beside its passes: gradients, parameters, the optimizer, what is on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.forecast.calls import Call, Launch
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import Gpu, fabric
from kernelcast.models.layers import Dense, Experts, LatentAttention, Layer, SelfAttention
from kernelcast.ops.dtypes import find_dtype
from kernelcast.ops.work import Array
from kernelcast.training.job import TrainingJob
from kernelcast.training.job_memory import shape_of
from kernelcast.training.layout import ProcessGroup
from kernelcast.training.saved_tensors import kept, layer_steps

# Of the rate of a port what collectives reach: 43 to 47 of 50 GB/s of a ConnectX-7 (DeepEP, README.md, internode)
NETWORK = 0.88
# NVLink-C2C of Grace superchips, 900 GB/s both ways; that of a GB200 or GB300 serves two GPUs (NVIDIA's data sheets)
_C2C = {"gh200": 450e9, "gb200": 225e9, "gb300": 225e9}
_SENT = ("all_gather", "reduce_scatter", "all_to_all", "send_recv")
_ELEMENTS = 1 << 26  # of an optimizer's pass that is timed, and as many of a copy; larger ones take in proportion
_RANK_PARAMETERS = 1e6  # of a bucket, for each rank at least (Megatron-LM's DistributedDataParallelConfig)
_HOST_ADAM_BYTES = 28.0  # of a parameter: gradient, parameter and moments read, the last two written
_HOST_BYTES_PER_S = 50e9  # of a GPU's share of its host's memory: 400 GB/s of eight channels and two sockets, by eight
_NEWTON_SCHULZ = 5  # Muon's iterations: two products of k x k by k x n and one of k x k by k x k


def host_bytes_per_s(gpu: Gpu) -> float:
    """Of a GPU's link to its host, in one direction."""
    return next((rate for name, rate in _C2C.items() if gpu.known_as.startswith(name)), gpu.pcie_bytes_per_s)


def exchange_s(launch: Launch, times: Times) -> float:
    """Of collectives inside a node as they are predicted; what crosses the network by its bytes: campaigns of it were
    measured over other networks, whose share of their rate says little."""
    given = launch.call.arguments
    if given.get("fabric") is None or launch.op not in _SENT:
        return launch.count * times[launch.call].interval.value
    link, world = fabric(given["fabric"], times.gpu), given["world"]
    messages = 1.0 if launch.op in ("send_recv", "all_to_all") else math.ceil(math.log2(world))
    sent_bytes = given["bytes"] * (1.0 if launch.op == "send_recv" else (world - 1) / world)
    return launch.count * (sent_bytes / (NETWORK * link.bytes_per_s) + messages * link.latency_s)


class Work:
    """``parts``: units of each part of the model with their count, a layer by its id."""

    def __init__(self, job: TrainingJob, parts: Sequence[Mapping[Any, int]]) -> None:
        self.job, self.parts, self.layout = job, parts, job.layout
        sizes: dict[Any, Array] = {id(run.layer): trained_parameters(job, run.layer) for run in job.model.layers}
        outer = 0.0 if job.lora else job.model.vocab * job.model.hidden / job.layout.tp
        tied = job.model.tied_embeddings and len(parts) == 1  # a pipeline has the table twice
        sizes |= {"embedding": np.array([outer, 0.0]), "head": np.array([0.0 if tied else outer, 0.0])}
        if job.mtp:
            sizes |= {id(run.layer): trained_parameters(job, run.layer) for run in job.model.mtp_module}
            sizes["mtp"] = np.array([0.0 if job.lora else 2.0 * job.model.hidden**2 / job.layout.tp, 0.0])
        self.sizes = sizes
        self.parameters = np.zeros((len(parts), 2))  # of each part, on a rank: outside experts, and experts
        for at, some in enumerate(parts):
            for name, count in some.items():
                copies = min(count, 1) if name == "head" else count
                self.parameters[at] += copies * sizes[name]
        self.groups = ("replicas", "expert_replicas")

    @cached_property
    def stage_parameters(self) -> Array:
        """(stages, 2)"""
        return self.parameters.reshape(self.layout.virtual_stages, self.layout.pp, 2).sum(axis=0)

    # ---- collectives ----

    def _launches(self, op: str, size_bytes: float, group_name: str, dtype: str) -> list[Launch]:
        """Of sharded data parallelism, bucket by bucket (Megatron-LM's are larger with many ranks); with ``shards``
        inside those, and sums over their copies."""
        layout, gpu = self.layout, self.job.gpu
        group = layout.group(group_name)
        if group.world == 1 or size_bytes < 1:
            return []
        bucket = max(self.job.stack.bucket_parameters, _RANK_PARAMETERS * group.world) * find_dtype(dtype).act_bytes
        if size_bytes > bucket:
            count = size_bytes / bucket
            return [replace(each, count=count) for each in self._launches(op, bucket, group_name, dtype)]
        shards = layout.shards
        if not shards or shards >= group.world or group_name != "replicas":
            return list(group.launches(op, size_bytes, dtype, gpu))
        inner = ProcessGroup(shards, group.stride, group.gpus_per_node, group.between_nodes)
        launches = list(inner.launches(op, size_bytes, dtype, gpu))
        if op == "reduce_scatter":
            outer = ProcessGroup(group.world // shards, group.stride * shards, group.gpus_per_node, group.between_nodes)
            launches += outer.launches("all_reduce", size_bytes / shards, dtype, gpu)
        return launches

    @cached_property
    def gradients(self) -> list[list[Launch]]:
        """Of each stage, once a step."""
        if self.layout.zero == 3:
            return [[] for _ in self.stage_parameters]
        each = self.job.precision.reduce_bytes
        op = "reduce_scatter" if self.layout.zero else "all_reduce"
        return [
            [launch for size, group in zip(sizes, self.groups, strict=True)
             for launch in self._launches(op, size * each, group, "fp32" if each >= 4 else "bf16")]
            for sizes in self.stage_parameters
        ]  # fmt: skip

    @cached_property
    def gathers(self) -> list[list[Launch]]:
        """Parameters that the optimizer of another rank has updated."""
        if self.layout.zero not in (1, 2):
            return [[] for _ in self.stage_parameters]
        each = self.job.precision.gather_bytes
        return [
            [launch for size, group in zip(sizes, self.groups, strict=True)
             for launch in self._launches("all_gather", size * each, group, "bf16")]
            for sizes in self.stage_parameters
        ]  # fmt: skip

    @cached_property
    def unit_shards(self) -> dict[Any, tuple[list[Launch], list[Launch]]]:
        """FSDP: all-gather and reduce-scatter of each unit, per micro-batch. Frozen parameters are gathered too."""
        if self.layout.zero != 3:
            return {}
        formats, shards = self.job.precision, {}
        runs = (*self.job.model.layers, *self.job.model.mtp_module)
        whole: dict[Any, Array] = {id(run.layer): rank_parameters(self.job, run.layer) for run in runs}
        table = np.array([self.job.model.vocab * self.job.model.hidden / self.layout.tp, 0.0])
        whole |= {"embedding": table, "head": table}
        for name, trained in self.sizes.items():
            there: list[Launch] = []
            back: list[Launch] = []
            for size, grads, group in zip(whole.get(name, trained), trained, self.groups, strict=True):
                there += self._launches("all_gather", size * formats.gather_bytes, group, "bf16")
                dtype = "fp32" if formats.reduce_bytes >= 4 else "bf16"
                back += self._launches("reduce_scatter", grads * formats.reduce_bytes, group, dtype)
            shards[name] = (there, back)
        return shards

    @cached_property
    def sends(self) -> list[Launch]:
        """To the next part: the hidden state of a micro-batch; sharded where sequence parallelism shards it."""
        job, layout = self.job, self.layout
        size = job.rank_tokens * job.model.hidden * find_dtype(job.precision.activations).act_bytes
        size /= layout.tp if layout.sequence_parallel else 1
        dtype = "bf16" if job.precision.activations != "fp32" else "fp32"
        found = []
        for part in range(len(self.parts) - 1):
            fabric = layout.between_nodes if layout.sends_between_nodes(job.gpu, part) else None
            given = {"bytes": max(1, round(size)), "world": 2, "stack": "nccl", "fabric": fabric, "dtype": dtype}
            found.append(Launch("communication", Call.of("send_recv", given)))
        return found

    def calls(self) -> Iterable[Call]:
        yield from self.update_calls
        if self.layout.pp > 1:
            yield from (launch.call for launch in self.sends)
        pairs = [part for both in self.unit_shards.values() for part in both]
        for launches in (*self.gradients, *self.gathers, *pairs):
            yield from (launch.call for launch in launches)

    # ---- their time ----

    def send_s(self, times: Times) -> Array:
        return np.array([exchange_s(launch, times) for launch in self.sends])

    def _first(self, total_s: float, stage: int) -> float:
        """The bucket that no kernel hides: the last of the gradients, the first of the parameters."""
        bucket, parameters = self.job.stack.bucket_parameters, float(self.stage_parameters[stage].sum())
        return total_s * min(1.0, bucket / parameters) if parameters else 0.0

    def _exposed(
        self, launches: Sequence[Sequence[Launch]], times: Times, beside_s: Array, overlap: bool
    ) -> list[float]:
        lost = self.job.stack.interference
        exposed = []
        for stage, mine in enumerate(launches):
            total = sum(exchange_s(launch, times) for launch in mine)
            if overlap and self.layout.overlap:
                first = self._first(total, stage)
                hidden = min(total - first, float(beside_s[stage]))
                total = total - hidden + lost * hidden
            exposed.append(total)
        return exposed

    def reduce_s(self, times: Times, per_stage: Array) -> list[float]:
        """Beside the last micro-batch's backward passes."""
        return self._exposed(self.gradients, times, per_stage[:, 1:].sum(axis=1), self.job.stack.overlap_grad_reduce)

    def gather_s(self, times: Times, per_stage: Array) -> list[float]:
        """Beside the first micro-batch's forward passes."""
        return self._exposed(self.gathers, times, per_stage[:, 0], self.job.stack.overlap_param_gather)

    def sharded_s(self, times: Times, pass_s: Array, units: Mapping[Any, Any]) -> Array:
        """(parts, 2) of FSDP, what a forward and a backward pass wait: a unit's parameters come while the unit before
        it runs, its gradients go while the next does; the first (the last) unit's are not hidden. ZeRO-3 gathers twice
        a micro-batch."""
        waits = np.zeros((len(self.parts), 2))
        if self.layout.zero != 3:
            return waits
        lost, overlap = self.job.stack.interference, self.layout.overlap

        def seconds(launches: Sequence[Launch]) -> float:
            return sum(exchange_s(launch, times) for launch in launches)

        sent = {name: [seconds(each) for each in pair] for name, pair in self.unit_shards.items()}
        for part, some in enumerate(self.parts):
            for name, count in some.items():
                gather, scatter = sent[name]
                run = units[name].seconds
                for which, wait, beside in (
                    (0, gather, run[0].sum()), (1, gather + scatter, run[1].sum() + run[2].sum() + run[0].sum()
                                                * (self.job.recompute.mode == "full")),
                ):  # fmt: skip
                    hidden = min(wait, float(beside)) if overlap else 0.0
                    waits[part, which] += count * (wait - hidden + lost * hidden)
            ends = [sent[name] for name in some if isinstance(name, int)]
            if ends:
                waits[part] += np.array([ends[0][0], ends[0][1]])
        return waits

    # ---- the optimizer ----

    @cached_property
    def update_calls(self) -> list[Call]:
        op = {"sgd": "sgd", "sgd_momentum": "sgd"}.get(self.job.optimizer, "adamw")
        formats = self.job.precision
        dtypes = {"dtype": "fp32"}
        if not formats.main_parameter_bytes and formats.parameter_bytes < 4:  # the weights themselves are updated
            dtypes = {"dtype": formats.activations}
            if op == "adamw":
                dtypes["state_dtype"] = formats.activations if formats.state_bytes <= 4 else "fp32"
        given = {"elements": _ELEMENTS, **dtypes, "stack": "torch"}
        copy = {"rows": _ELEMENTS >> 12, "cols": 1 << 12, "dtype": "fp32", "stack": "torch"}
        calls = [Call.of(op, given), Call.of("copy", copy)]
        if self.job.optimizer == "muon":
            side = self.job.model.hidden
            calls.append(Call.of("gemm", {"m": side, "n": side, "k": side, "dtype": "bf16", "stack": "torch"}))
        return calls

    def owned(self, stage: int) -> float:
        """Parameters that a rank updates."""
        worlds = (self.layout.shards or self.layout.replicas, self.layout.expert_replicas)
        shards = worlds if self.layout.zero else (1, 1)
        return float(sum(size / world for size, world in zip(self.stage_parameters[stage], shards, strict=True)))

    def optimizer_s(self, times: Times) -> list[float]:
        """Of each stage: the norm of the gradients, the update, the parameters in their format, gradients cleared for
        the next step, weights cast for the products."""
        update, copied = (times[call].interval.value / _ELEMENTS for call in self.update_calls[:2])
        byte_s = copied / 8.0
        formats, found = self.job.precision, []
        for stage, sizes in enumerate(self.stage_parameters):
            owned, whole = self.owned(stage), float(sizes.sum())
            seconds = owned * update * (1.0 if self.job.optimizer != "adamw8bit" else 16 / 28)
            if self.job.optimizer == "muon":
                side = self.job.model.hidden
                product = times[self.update_calls[2]].interval.value / (side * side)  # of a parameter
                seconds += owned * product * _NEWTON_SCHULZ * 3
            if self.job.offload.optimizer:
                seconds = 0.0
            held = owned if self.layout.zero >= 2 else whole
            moved = (owned + held) / 2 * formats.gradient_bytes * self.job.stack.gradient_passes
            moved += (
                owned * (formats.main_parameter_bytes + formats.parameter_bytes) * bool(formats.main_parameter_bytes)
            )
            if formats.scaling:
                moved += whole * (formats.casts["input"][0] + formats.casts["input"][1])
            found.append(seconds + moved * byte_s)
        return found

    def optimizer_offload_s(self) -> float:
        """Gradients to the host, its update, parameters back."""
        if not self.job.offload.optimizer:
            return 0.0
        owned = max(self.owned(stage) for stage in range(self.layout.pp))
        link = host_bytes_per_s(self.job.gpu)
        formats = self.job.precision
        return owned * (
            (formats.gradient_bytes + formats.parameter_bytes) / link + _HOST_ADAM_BYTES / _HOST_BYTES_PER_S
        )

    def activation_offload_s(self, tasks: Array) -> Array:
        """(3, parts): what a pass waits for activations on their way to the host and back, beside its kernels."""
        waits, layers = np.zeros_like(tasks), self.job.offload.activation_layers
        if layers:
            shape, job = shape_of(self.job), self.job
            each = max(kept(layer_steps(run.layer, shape)) for run in job.model.layers) * job.rank_tokens
            moved_s = min(layers, max(job.part_layers)) * each / host_bytes_per_s(job.gpu)
            waits[:2] = np.maximum(0.0, moved_s - tasks[:2])
        return waits


# ---- parameters


def rank_parameters(job: TrainingJob, layer: Layer) -> Array:
    """Of a layer on one rank: outside experts, and experts."""
    tp, hidden, layout = job.layout.tp, job.model.hidden, job.layout
    dense, routed = float(layer.norms.weights(hidden)), 0.0
    if layer.attention is not None:
        dense += layer.attention.weights(hidden) / tp
    if isinstance(layer.mlp, Dense):
        dense += layer.mlp.weights(hidden) / tp
    elif isinstance(layer.mlp, Experts):
        block = layer.mlp
        all_experts = block.experts * block.expert_weights(hidden)
        routed = all_experts / (layout.ep * layout.expert_tp)
        shared = block.shared.weights(hidden) if block.shared else 0.0
        dense += block.weights(hidden) - all_experts - shared + shared / tp
    return np.array([dense, routed])


def trained_parameters(job: TrainingJob, layer: Layer) -> Array:
    """The same of what is trained: adapters where the base is frozen."""
    if job.lora is None:
        return rank_parameters(job, layer)
    tp, hidden, rank, sizes = job.layout.tp, job.model.hidden, job.lora.rank, []
    if isinstance(layer.attention, SelfAttention):
        sizes += [("qkv", hidden + layer.attention.qkv_width / tp), ("proj", layer.attention.q_width / tp + hidden)]
    elif isinstance(layer.attention, LatentAttention):
        wide = layer.attention.q_heads * layer.attention.v_head_dim / tp
        sizes += [("qkv", 2 * hidden), ("proj", wide + hidden)]
    if isinstance(layer.mlp, Dense):
        sizes += [("fc1", hidden + layer.mlp.up_width / tp), ("fc2", layer.mlp.inter / tp + hidden)]
    dense = rank * sum(size for name, size in sizes if name in job.lora.targets)
    routed = 0.0
    if isinstance(layer.mlp, Experts):
        each = {"fc1": hidden + 2 * layer.mlp.inter, "fc2": layer.mlp.inter + hidden}
        local = layer.mlp.experts / (job.layout.ep * job.layout.expert_tp)
        routed = rank * local * sum(size for name, size in each.items() if name in job.lora.targets)
    return np.array([dense, routed])
