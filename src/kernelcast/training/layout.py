"""Parallelism of a training step, and the links that each process group communicates over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast.calls import Call, Launch
from kernelcast.hardware import Gpu
from kernelcast.inference.deployment import BETWEEN_NODES, GPUS_PER_NODE, check_counts, node_gpus

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
ContextExchange = Literal["p2p", "all_gather", "a2a"]  # Transformer Engine's cp_comm_type
BUCKET_BYTES = 25 * 2**20  # torch's DistributedDataParallel, bucket_cap_mb


@dataclass(frozen=True)
class TrainingLayout:
    """``dp`` x ``cp`` x ``tp`` x ``pp`` GPUs, neighbours first in tp, then cp, dp, pp (Megatron's order).

    ``cp``: context parallel size: each rank has a part of every sequence; ``cp_comm``: how attention gets the rest
    (keys and values around a ring, gathered before, or heads exchanged for tokens). ``expert_tp``: GPUs that an expert
    is sharded over (Megatron's --expert-tensor-parallel-size).

    ``zero``: 0 replicates everything on the dp ranks, 1 shards optimizer states, 2 gradients too, 3 parameters too
    (FSDP), frozen ones too. ``ep``: of the dp ranks. ``micro_batches``: passes of the traced batch, which is ONE
    micro-batch of one dp rank, before the optimizer's step. ``virtual_stages``: parts of the model per stage of the
    interleaved schedule. ``shards``: ranks that share one copy of what ``zero`` shards, replicated over the others
    (HSDP); 0: all of dp x cp.
    ``bucket_bytes``: gradients that are sent together. ``overlap``: they are sent while the backward pass runs (DDP,
    FSDP), or all at its end (Megatron without --overlap-grad-reduce). ``stage_layers``: layers on each stage, in order;
    not given: balanced by time.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    cp_comm: ContextExchange = "p2p"
    expert_tp: int = 1
    zero: int = 0
    shards: int = 0
    sequence_parallel: bool = False
    micro_batches: int = 1
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    bucket_bytes: int = BUCKET_BYTES
    overlap: bool = True
    stage_layers: tuple[int, ...] | None = None
    gpus_per_node: int = GPUS_PER_NODE
    between_nodes: str = BETWEEN_NODES

    def __post_init__(self) -> None:
        check_counts(self, "dp", "tp", "pp", "ep", "micro_batches", "virtual_stages", "bucket_bytes", "gpus_per_node",
                     "cp", "expert_tp")  # fmt: skip
        if self.cp_comm not in get_args(ContextExchange):
            raise unknown("cp_comm", self.cp_comm, get_args(ContextExchange))
        if self.zero not in (0, 1, 2, 3):
            raise KernelcastError(f"zero must be 0, 1, 2 or 3, not {self.zero!r}")
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if self.zero and self.replicas == 1:
            raise KernelcastError(f"zero {self.zero} shards over the dp ranks: give dp of 2 or more")
        if self.expert_ranks % (self.ep * self.expert_tp):
            raise KernelcastError(
                f"ep {self.ep} x expert_tp {self.expert_tp} does not divide the {self.expert_ranks} ranks of dp x cp x "
                "tp"
            )
        if self.shards and self.replicas % self.shards:
            raise KernelcastError(f"shards {self.shards} does not divide the {self.replicas} ranks of dp x cp")
        if self.sequence_parallel and self.tp == 1:
            raise KernelcastError("sequence_parallel needs tp of 2 or more: it shards what is between tp's layers")
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        if self.virtual_stages > 1 and self.schedule != "interleaved":
            raise KernelcastError(f"virtual_stages {self.virtual_stages} needs schedule='interleaved'")
        if self.schedule == "interleaved":
            if self.pp == 1 or self.virtual_stages == 1:
                raise KernelcastError("the interleaved schedule needs pp and virtual_stages of 2 or more")
            if self.micro_batches % self.pp:
                raise KernelcastError(
                    f"interleaved: micro_batches {self.micro_batches} must be a multiple of pp {self.pp}"
                )
        if self.stage_layers is not None and len(self.stage_layers) != self.parts:
            raise KernelcastError(f"stage_layers names {len(self.stage_layers)} parts of the model, not {self.parts}")

    @property
    def gpus(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters outside experts: of data and context parallelism."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage, which experts are spread over."""
        return self.dp * self.cp * self.tp

    @property
    def expert_replicas(self) -> int:
        """Ranks that have the same experts."""
        return self.expert_ranks // (self.ep * self.expert_tp)

    @property
    def parts(self) -> int:
        """Parts of the model over all stages (virtual ones included)."""
        return self.pp * self.virtual_stages

    @property
    def label(self) -> str:
        """'dp 4, tp 2, ZeRO 1'"""
        names = ("dp", "cp", "tp", "pp", "ep")
        labels = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        labels += ["sequence parallel"] if self.sequence_parallel else []
        labels += [f"ZeRO {self.zero}"] if self.zero else []
        labels += [f"{self.schedule}, {self.micro_batches} micro-batches"] if self.pp > 1 else []
        labels += [f"{self.micro_batches} micro-batches"] if self.pp == 1 and self.micro_batches > 1 else []
        return ", ".join(labels) or "one GPU"

    def group(self, name: str) -> ProcessGroup:
        """tp, cp, dp, ep (ranks that share the experts), or expert_dp (ranks that have the same experts), in a traced
        model; of a job of a transformer replicas (dp x cp), experts and expert_replicas, which span tp ranks too."""
        worlds = {
            "tp": (self.tp, 1), "cp": (self.cp, self.tp), "dp": (self.dp, self.tp * self.cp), "ep": (self.ep, self.tp),
            "expert_dp": (self.dp // self.ep, self.tp * self.ep), "expert_tp": (self.expert_tp, 1),
            "replicas": (self.replicas, self.tp), "experts": (self.ep, self.expert_tp),
            "expert_replicas": (self.expert_replicas, self.expert_tp * self.ep),
        }  # fmt: skip
        return ProcessGroup(*worlds[name], self.gpus_per_node, self.between_nodes)

    def sends_between_nodes(self, gpu: Gpu, stage: int) -> bool:
        """Whether ``stage`` and the next (the first, after the last) are on different nodes."""
        node = node_gpus(gpu, self.gpus_per_node)
        here, there = (at % self.pp * self.expert_ranks // node for at in (stage, stage + 1))
        return here != there


@dataclass(frozen=True)
class ProcessGroup:
    """``world`` ranks, ``stride`` apart."""

    world: int
    stride: int
    gpus_per_node: int
    between_nodes: str

    def launches(self, op: str, size_bytes: float, dtype: str, gpu: Gpu) -> Iterator[Launch]:
        """The kernel calls of one collective. Ranks of a node reduce over its links first, then each exchanges with its
        peers in the other nodes over its port (as NCCL's rings and trees do; here one after another). In an all-to-all
        each GPU sends what other nodes get over its own port."""
        if self.world == 1 or size_bytes < 1:
            return
        inside = self.inside(gpu)
        if inside == self.world:
            yield collective_launch(op, size_bytes, self.world, dtype, None)
            return
        steps = ("reduce_scatter", "all_gather") if op == "all_reduce" else (op,)  # of a ring, one rank a node
        if inside == 1:
            yield from (collective_launch(step, size_bytes, self.world, dtype, self.between_nodes) for step in steps)
            return
        if op == "all_to_all":  # what stays in the node goes over its links, the rest over each GPU's own port
            crossing = size_bytes * (self.world - inside) / (self.world - 1)  # of which (world - 1) / world is sent
            yield collective_launch(op, size_bytes * inside / self.world, inside, dtype, None)
            yield collective_launch(op, crossing, self.world, dtype, self.between_nodes)
            return
        nodes, part = self.world // inside, size_bytes / inside
        if op in ("all_reduce", "reduce_scatter"):
            yield collective_launch("reduce_scatter", size_bytes, inside, dtype, None)
        yield from (collective_launch(step, part, nodes, dtype, self.between_nodes) for step in steps)
        if op in ("all_reduce", "all_gather"):
            yield collective_launch("all_gather", size_bytes, inside, dtype, None)

    def inside(self, gpu: Gpu) -> int:
        """Ranks that NVLink joins: the most that the group divides into."""
        most = max(1, node_gpus(gpu, self.gpus_per_node) // self.stride)
        return self.world if self.world <= most else max(n for n in range(1, most + 1) if self.world % n == 0)

    def nodes(self, gpu: Gpu) -> int:
        return self.world // self.inside(gpu)

    def neighbour(self, size_bytes: float, dtype: str, gpu: Gpu) -> Iterator[Launch]:
        """Each rank sends to the next of the ring; the slowest link is between nodes where the ring leaves one."""
        if self.world > 1 and size_bytes >= 1:
            fabric = None if self.nodes(gpu) == 1 else self.between_nodes
            yield collective_launch("send_recv", size_bytes, 2, dtype, fabric)

    def sent_bytes(self, op: str, size_bytes: float) -> float:
        """Bytes that each rank sends in a ring, as papers count them."""
        times = 2.0 if op == "all_reduce" else 1.0
        return times * size_bytes * (self.world - 1) / self.world


def collective_launch(op: str, size_bytes: float, world: int, dtype: str, fabric: str | None) -> Launch:
    """``fabric``: None is the link of the GPU."""
    arguments = {
        "bytes": max(1, round(size_bytes)), "world": world, "stack": "nccl", "fabric": fabric,
        "dtype": dtype if dtype in ("fp32", "bf16", "fp16") else "fp32",
    }  # fmt: skip
    return Launch("communication", Call.of(op, arguments))
