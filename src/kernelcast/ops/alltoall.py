"""alltoall_prepare, alltoall_dispatch, alltoall_combine: TensorRT-LLM's exchange of tokens over NVLink.

one_sided: senders store into the receivers' memory. two_sided: through buffers that both sides watch, after ranks have
told one another what comes (prepare). All SMs copy. A token goes once to each rank that holds any of its experts.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice
from kernelcast.ops.exchange import Exchange, Sent, row_bytes, sixteen_bits
from kernelcast.ops.routing import reached
from kernelcast.ops.vector import side_instructions
from kernelcast.ops.work import Array, Work, Works, ceil_div

KERNELS = ("one_sided", "two_sided")
_THREADS = 256.0
_MEETING_CYCLES = 18e3  # ranks wait for one another's flags: as of DeepEP's low-latency kernels
_ROUND_CYCLES = 1800.0  # a load and a sum over the CTA before it, a token a thread (GB200: 7 ns a token)
_INDEX_BYTES = 8.0  # of an expert that a token chose: its number and its weight


class _AllToAll(Exchange):
    """Parameters of all three."""

    examples = (
        {"tokens": 1024, "hidden": 7168, "topk": 8, "experts": 256, "world": 8},
        {"tokens": 1, "hidden": 7168, "topk": 8, "experts": 256, "world": 32, "kernel": "one_sided"},
    )
    trailing_parameters = ("routing",)
    reads: ClassVar[float]  # bytes that an SM moves for a row that is sent, over the row: here and at the peer
    writes: ClassVar[float]  # and for a token, over its 16-bit form
    messages: ClassVar[float] = 2.0  # dependent: the rows, and the flag that they came

    kernel: str = choice("who moves rows: one_sided the sender, two_sided both", KERNELS, default="two_sided")

    @classmethod
    def sent(cls, calls: Calls) -> Sent:
        world = calls["world"]
        ranks = reached(world, calls["topk"], calls["experts"], calls.choice("routing"))
        return Sent(ranks, ranks * (world - 1) / world, np.zeros(calls.count), row_bytes(calls))

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        names = ("tokens", "hidden", "topk", "experts", "world")
        rows = cls.sent(calls).rows
        return {**{f"log_{name}": np.log2(calls[name]) for name in names}, "log_rows": np.log2(rows)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sent, tokens = cls.sent(calls), calls["tokens"]
        own_bytes = calls["hidden"] * sixteen_bits(calls.dtype.name)
        moved = tokens * (cls.reads * sent.rows * sent.row_bytes + cls.writes * own_bytes)
        tasks = np.ceil(tokens * sent.rows)
        work = Work(
            tasks=tasks,
            l2_bytes=moved / tasks,
            other_warp_instructions=side_instructions(gpu, moved / tasks),
            activation_bytes=tokens * (sent.rows * sent.row_bytes + own_bytes),
            link_bytes=sent.link_bytes(tokens, "", gpu),
            link_steps=cls.messages,
            threads=_THREADS,
            registers_per_thread=48.0,
            task_cycles=_MEETING_CYCLES,
            tile={"rows": tasks},
        )
        return (work,)


class AllToAllPrepare(_AllToAll):
    """Ranks tell one another which tokens come: numbers of experts and weights, and the counts of ranks."""

    op = "alltoall_prepare"
    reads, writes = 2.0, 0.0

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        told = calls["tokens"] * calls["topk"] * _INDEX_BYTES
        tasks = calls["world"]  # a CTA a rank, which goes through all tokens for its own
        work = Work(
            tasks=tasks,
            l2_bytes=2 * told,
            activation_bytes=2 * told,
            link_bytes=told * (calls["world"] - 1) / calls["world"],
            link_steps=cls.messages,
            threads=_THREADS,
            serial_steps=ceil_div(calls["tokens"], _THREADS),
            step_cycles=_ROUND_CYCLES,
            task_cycles=_MEETING_CYCLES,
            launches=2.0,
            tile={"rows": tasks},
        )
        return (work,)


class AllToAllDispatch(_AllToAll):
    """Tokens of every rank to the ranks of their experts. ``dtype``: as they travel."""

    op = "alltoall_dispatch"
    reads, writes = 2.0, 0.0


class AllToAllCombine(_AllToAll):
    """Results of the experts back to the tokens' ranks, which add them up. ``dtype``: as they travel."""

    op = "alltoall_combine"
    reads, writes = 3.0, 1.0
