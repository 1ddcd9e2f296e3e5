"""Collectives between GPUs: all_reduce, all_gather, reduce_scatter, all_to_all, send_recv.

Each algorithm of a library is a candidate; ``tile["algorithm"]`` is its index in ``ALGORITHMS``. Where one is
impossible (too many GPUs, the wrong fabric) the first algorithm stands in for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu, fabric, fabric_type, fabrics
from kernelcast.ops.base import Calls, Configuration, ConfigurationColumns, Kernel, choice, size
from kernelcast.ops.vector import VECTOR_BYTES, side_instructions
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

# The number of an algorithm is its index here:
# 0 ring: chunks go round (NCCL).
# 1 tree: log2(world) steps (NCCL: double binary tree for all-reduce, PAT for gather and scatter).
# 2 one_shot: every GPU reads from all others at once (custom all-reduce of vLLM, SGLang, TensorRT-LLM).
# 3 two_shot: reduce-scatter, then all-gather, each in one shot (the same libraries).
# 4 in_switch: NVSwitch adds (NVLink SHARP, PTX multimem.ld_reduce).
# 5 by_node: GPUs of a node split the message, and each sends its part to its peer in other nodes (NCCL's rings and
#   trees cross nodes so, each over another port).
ALGORITHMS = ("ring", "tree", "one_shot", "two_shot", "in_switch", "by_node")
_NODE_GPUS = 8.0  # of HGX, DGX and most servers: one port each
_NETWORKS = ("ib",)  # how links between nodes are called

_GPU_LINK = "own"  # the GPU's link, in configurations
_THREADS = 512.0
_NCCL_CTAS = 32.0  # channels; NCCL 2.2x uses 16 to 32 within a node
_DIRECT_CTAS = 36.0  # vLLM custom_all_reduce.cuh: more contend for the link
# GPUs that load and store in each other's memory. PCIe: more than a pair share host bridges (vLLM's rule).
_REACH = {"nvlink5": 72.0, "nvlink": 8.0, "xgmi": 8.0, "pcie": 2.0}
_SWITCH_REACH = {"nvlink4": 8.0, "nvlink5": 72.0}  # NVSwitch of the third generation on has SHARP
_SWITCH_DTYPES = ("fp32", "fp16", "bf16")  # PTX multimem.ld_reduce
_DTYPES = ("fp32", "fp16", "bf16", "fp8", "int8")


@dataclass(frozen=True)
class Algorithm:
    """One algorithm: bytes that each GPU sends, passes through its SMs and adds."""

    algorithm: str
    link_bytes: Array  # the busier direction
    link_steps: Number
    sm_bytes: Array  # loads and stores of its SMs, here and at peers
    added_bytes: Number
    ctas: Array
    possible: NDArray[np.bool_] | bool = True

    @property
    def number(self) -> float:
        return float(ALGORITHMS.index(self.algorithm))


class CollectiveMessage:
    """Message size and world of the calls, and how far direct access reaches."""

    def __init__(self, calls: Calls, gpu: Gpu) -> None:
        name = calls.choice("fabric") or gpu.link_kind
        link = fabric_type(name)
        self.bytes, self.world = calls["bytes"], calls["world"]
        self.senders = self.world if fabric(name).shared else 1.0  # whose bytes cross the same link
        self.others = (self.world - 1) / self.world  # share of the message for or from other GPUs
        self.levels = np.ceil(np.log2(self.world))  # of a tree
        reach = next((far for prefix, far in _REACH.items() if link.startswith(prefix)), 1.0)
        reach = 1.0 if fabrics()[link].shared else reach
        switch_reach = _SWITCH_REACH.get(link, 0.0) if calls.choice("dtype") in _SWITCH_DTYPES else 0.0
        self.direct, self.switch = self.world <= reach, self.world <= switch_reach
        self.between = link.startswith(_NETWORKS)  # nodes


class _Collective(Kernel):
    """Parameters of every collective."""

    family = "collective"
    dtypes = _DTYPES
    examples = (
        {"bytes": 2**24, "world": 8},
        {"bytes": 8192, "world": 2},
        {"bytes": 2**28, "world": 64, "fabric": "ib_ndr"},
    )
    wholes: ClassVar[float]  # messages that a GPU reads and writes, whole
    parts: ClassVar[float] = 0.0  # and 1 / world of it

    bytes: int = size("bytes of the whole message", high=2**50)
    world: int = size("GPUs that take part", low=2, high=8192)
    fabric: str | None = choice(
        "link, or a FILE.toml that collect --link wrote; default: the GPU's",
        tuple(fabrics()),
        default=None,
        file=fabric,
    )

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        """A call that names no link uses the GPU's link, not the link that was measured."""
        return {**super().configuration(calls), "fabric": calls.choice("fabric") or _GPU_LINK}

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        """Evidence is of the GPU's link, unless another type is named, or the link is of hosts rather than of GPUs.
        PyTorch's collectives are NCCL's."""
        named, stack = configuration["fabric"], configuration["stack"]
        link = fabric_type(gpu.link_kind)
        if named in (None, _GPU_LINK) and fabrics()[link].shared:
            named = link
        native = not fabrics()[link].shared and (named in (None, _GPU_LINK) or fabric_type(str(named)) == link)
        library = "nccl" if stack in ("torch", "torch_eager") else stack
        return {**configuration, "fabric": _GPU_LINK if native else named, "stack": library}

    @classmethod
    def alike(cls, name: str, value: str | None, other: str | None) -> bool:
        """Bytes are given, so formats that the same algorithms add up are alike: engines' all-reduces were measured in
        bf16, NCCL's in fp16."""
        return (name == "dtype" and {value, other} <= set(_SWITCH_DTYPES)) or super().alike(name, value, other)

    @classmethod
    def algorithms(cls, message: CollectiveMessage) -> list[Algorithm]:
        """The algorithms; the first is always possible."""
        raise TypeError(f"{cls.__name__} defines no algorithms")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        message = CollectiveMessage(calls, gpu)
        algorithms = cls.algorithms(message)
        possible = np.stack([np.broadcast_to(p.possible, calls.count) for p in algorithms])

        def rows(name: str) -> Array:
            table = np.stack([np.broadcast_to(getattr(p, name), calls.count) for p in algorithms])
            return np.where(possible, table, table[0])

        tasks, sm_bytes, steps = rows("ctas"), rows("sm_bytes"), rows("link_steps")
        flops = rows("added_bytes") / calls.dtype.act_bytes
        work = Work(
            tasks=tasks,
            fma_flops=flops / tasks,
            l2_bytes=sm_bytes / tasks,
            other_warp_instructions=side_instructions(gpu, sm_bytes / tasks),
            # Buffers between GPUs are small and stay in L2.
            activation_bytes=message.bytes * (cls.wholes + cls.parts / message.world),
            link_bytes=rows("link_bytes") * message.senders,
            link_steps=steps,
            link=calls.choice("fabric") or "",
            threads=_THREADS,
            registers_per_thread=96.0,
            serial_steps=steps,
            useful_flops=flops,
            tile={"algorithm": rows("number")},
        )
        return (work,)


def _ctas(moved_bytes: Array, most: float) -> Array:
    """One thread per 16-byte vector, up to the number of CTAs that saturate a link."""
    return np.clip(ceil_div(moved_bytes, _THREADS * VECTOR_BYTES), 1, most)


class AllReduce(_Collective):
    """Sum of a tensor over all GPUs, on each of them. ``bytes``: the tensor of one GPU.

    With SHARP each GPU sends its tensor once and receives its part of the sum; a ring or two-shot sends 2 (world − 1) /
    world of it; one-shot sends it to every other GPU.
    """

    op = "all_reduce"
    wholes = 2.0

    @classmethod
    def algorithms(cls, message: CollectiveMessage) -> list[Algorithm]:
        m, part, once = message, message.bytes / message.world, message.others * message.bytes
        nccl, shots = _ctas(m.bytes, _NCCL_CTAS), _ctas(m.bytes, _DIRECT_CTAS)
        # A GPU inside a tree sends its half up, and down to two children; two trees swap leaves and insides.
        tree = np.where(m.world > 2, 2.0, 1.0) * m.bytes
        all_others = (m.world - 1) * m.bytes
        nodes = np.maximum(1.0, m.world / _NODE_GPUS)
        crossing = 2 * (nodes - 1) / nodes * m.bytes / _NODE_GPUS  # of one GPU, over its port
        steps = 2 * np.ceil(np.log2(np.maximum(nodes, 2.0)))
        by_node = Algorithm("by_node", crossing, steps, 4 * once + 2 * m.bytes, once, nccl, m.world > _NODE_GPUS)
        return [
            Algorithm("ring", 2 * once, 2 * (m.world - 1), 4 * once + 2 * m.bytes, once, nccl),
            *([by_node] if m.between else []),
            Algorithm("tree", tree, 2 * m.levels, 2 * tree + 2 * m.bytes, m.bytes, nccl),
            Algorithm("one_shot", all_others, 1.0, all_others + 2 * m.bytes, all_others, shots, m.direct),
            Algorithm("two_shot", 2 * once, 2.0, 2 * (once + m.bytes), once, _ctas(part, _DIRECT_CTAS), m.direct),
            Algorithm("in_switch", m.bytes + part, 2.0, 2 * part, 0.0, nccl, m.switch),
        ]


class ReduceScatter(_Collective):
    """Sum of a tensor over all GPUs, one shard on each. ``bytes``: the whole tensor of one GPU."""

    op = "reduce_scatter"
    wholes, parts = 1.0, 1.0
    adds: ClassVar[float] = 1.0

    @classmethod
    def algorithms(cls, message: CollectiveMessage) -> list[Algorithm]:
        """(world − 1) / world of the message is sent once."""
        m, sent = message, message.others * message.bytes
        kept = m.bytes + m.bytes / m.world
        staged = 2 * sent + kept  # NCCL copies through buffers: received and sent, beside the tensors themselves
        nccl, shots = _ctas(m.bytes, _NCCL_CTAS), _ctas(m.bytes / m.world, _DIRECT_CTAS)
        return [
            Algorithm("ring", sent, m.world - 1, staged, cls.adds * sent, nccl),
            Algorithm("tree", sent, m.levels, staged, cls.adds * sent, nccl),
            Algorithm("one_shot", sent, 1.0, sent + kept, cls.adds * sent, shots, m.direct),
        ]


class AllGather(ReduceScatter):
    """Every GPU's shard, on all of them. ``bytes``: the gathered tensor."""

    op = "all_gather"
    adds = 0.0


class AllToAll(_Collective):
    """A different shard of each GPU's tensor to every GPU. ``bytes``: the tensor of one GPU, local shard included."""

    op = "all_to_all"
    wholes = 2.0

    @classmethod
    def algorithms(cls, message: CollectiveMessage) -> list[Algorithm]:
        sent = message.others * message.bytes
        # NCCL sends to all peers at once: no message waits for another.
        staged = 2 * sent + 2 * message.bytes
        return [Algorithm("one_shot", sent, 1.0, staged, 0.0, _ctas(message.bytes, _NCCL_CTAS))]


class SendRecv(_Collective):
    """One GPU's tensor to another, as between pipeline stages. ``world`` does not change the time."""

    op = "send_recv"
    wholes = 1.0  # the sender's side: it reads; the receiver only writes

    world: int = size("GPUs that take part", default=2, low=2, high=8192)

    @classmethod
    def algorithms(cls, message: CollectiveMessage) -> list[Algorithm]:
        moved = message.bytes
        return [Algorithm("one_shot", moved, 1.0, 2 * moved, 0.0, _ctas(moved, _NCCL_CTAS))]
