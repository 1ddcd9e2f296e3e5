"""Dispatch and combine of tokens between expert-parallel ranks.

A token is routed to ``topk`` experts, which are on fewer ranks and still fewer nodes: libraries send it once to each of
those. With random routing 8 of 256 experts are on 5.3 of 8 ranks on average (8 (1 - C(224, 8) / C(256, 8))), with
balanced routing on all 8.

alltoall_*: TensorRT-LLM over NVLink, all SMs copying. one_sided: senders store into the receivers' memory. two_sided:
through buffers that both sides poll, after ranks have exchanged counts (prepare).

deepep_*: DeepEP (README.md and csrc/kernels). Normal kernels (prefill) use a few SMs, half to send and half to receive;
between nodes a token crosses the network once per node, to the GPU of the same local rank, which forwards it over
NVLink. Low-latency kernels (decode) send one copy per expert straight to its GPU, over NVLink or RDMA, with all SMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu, fabric, fabric_type, fabrics
from kernelcast.ops.base import Calls, Configuration, Conflicts, Kernel, choice, conflict, more_than, not_multiple, size
from kernelcast.ops.dtypes import DTYPES
from kernelcast.ops.routing import ROUTINGS, groups_reached
from kernelcast.ops.vector import side_instructions
from kernelcast.ops.work import Array, Work, Works, ceil_div

_DTYPES = ("bf16", "fp16", "fp8", "fp8_block", "nvfp4")
_ROW_HEAD_BYTES = 16.0  # that travel with a row: where it is from, and for which experts (DeepEP's int4 of metadata)


class Exchange(Kernel):
    """Parameters of every exchange: tokens of one rank, routed to experts on ``world`` GPUs."""

    family = "deepep"
    dtypes = _DTYPES
    batch_parameter = "tokens"
    trailing_parameters = ("routing",)
    reads: ClassVar[float]  # bytes that an SM moves for a row that is sent, over the row: here and at the peer
    writes: ClassVar[float]  # and for a token, over its 16-bit form

    tokens: int = size("tokens of one rank")
    hidden: int = size("hidden size of the model")
    topk: int = size("experts per token", high=65536)
    experts: int = size("experts over all ranks", high=65536)
    world: int = size("expert-parallel GPUs", low=2, high=8192)
    routing: str | None = choice("how tokens choose experts, default: random", ROUTINGS, default=None, unset="random")

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return more_than(calls.numbers, "topk", "experts") or not_multiple(calls.numbers, "experts", "world")

    @classmethod
    def exchange(cls, gpu: Gpu, calls: Calls, sent: RowsSent, tasks: Array, **more: Any) -> Work:
        """The kernel of ``tasks`` CTAs that moves the rows."""
        tokens, token_bytes = calls["tokens"], calls["hidden"] * max(2.0, calls.dtype.act_bytes)  # before quantisation
        moved = tokens * (cls.reads * sent.rows * sent.row_bytes + cls.writes * token_bytes)
        return Work(
            tasks=tasks,
            l2_bytes=moved / tasks,
            other_warp_instructions=side_instructions(gpu, moved / tasks),
            activation_bytes=tokens * (sent.rows * sent.row_bytes + token_bytes),
            link_bytes=sent.link_bytes(tokens, more.get("link", ""), gpu),
            **more,
        )


@dataclass(frozen=True)
class RowsSent:
    """Rows that leave one GPU per token, and the bytes of a row."""

    rows: Array  # of a token, the local GPU's included
    near: Array  # of them over NVLink
    far: Array  # over the network between nodes
    row_bytes: Array

    def link_bytes(self, tokens: Array, link: str, gpu: Gpu) -> Array:
        """Bytes of the slower link, as bytes of ``link``: NVLink and the network work concurrently. Without a network
        all bytes are NVLink's."""
        near = tokens * self.near * self.row_bytes
        if not link:
            return near
        share = fabric(link, gpu).bytes_per_s / fabric(gpu.link_kind, gpu).bytes_per_s
        return np.maximum(tokens * self.far * self.row_bytes, near * share)


def row_bytes(calls: Calls) -> Array:
    """A token as sent, with scales and header."""
    return calls["hidden"] * calls.dtype.act_bytes + _ROW_HEAD_BYTES


KERNELS = ("one_sided", "two_sided")
_THREADS = 256.0
_ALLTOALL_MEETING_CYCLES = 18e3  # ranks wait for each other's flags, as in DeepEP's low-latency kernels
_ROUND_CYCLES = 1800.0  # a load and a sum over the CTA before it, one token per thread (GB200: 7 ns per token)
_INDEX_BYTES = 8.0  # per selected expert of a token: its id and its weight
_MESSAGES = 2.0  # dependent: the rows, and the flag that they came


class _AllToAll(Exchange):
    """Parameters of all three."""

    examples = (
        {"tokens": 1024, "hidden": 7168, "topk": 8, "experts": 256, "world": 8},
        {"tokens": 1, "hidden": 7168, "topk": 8, "experts": 256, "world": 32, "kernel": "one_sided"},
    )

    kernel: str = choice("one_sided: the sender moves rows; two_sided: both sides", KERNELS, default="two_sided")

    @classmethod
    def sent(cls, calls: Calls) -> RowsSent:
        world = calls["world"]
        ranks = groups_reached(world, calls["topk"], calls["experts"], calls.choice("routing"))
        return RowsSent(ranks, ranks * (world - 1) / world, np.zeros(calls.count), row_bytes(calls))

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        names = ("tokens", "hidden", "topk", "experts", "world")
        rows = cls.sent(calls).rows
        return {**{f"log_{name}": np.log2(calls[name]) for name in names}, "log_rows": np.log2(rows)}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sent = cls.sent(calls)
        tasks = np.ceil(calls["tokens"] * sent.rows)
        work = cls.exchange(
            gpu,
            calls,
            sent,
            tasks,
            link_steps=_MESSAGES,
            threads=_THREADS,
            registers_per_thread=48.0,
            task_cycles=_ALLTOALL_MEETING_CYCLES,
            tile={"rows": tasks},
        )
        return (work,)


class AllToAllPrepare(_AllToAll):
    """Ranks exchange which tokens come: expert ids and weights, and the counts per rank."""

    op = "alltoall_prepare"
    reads, writes = 2.0, 0.0

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        index_bytes = calls["tokens"] * calls["topk"] * _INDEX_BYTES
        tasks = calls["world"]  # one CTA per rank, which scans all tokens
        work = Work(
            tasks=tasks,
            l2_bytes=2 * index_bytes,
            activation_bytes=2 * index_bytes,
            link_bytes=index_bytes * (calls["world"] - 1) / calls["world"],
            link_steps=_MESSAGES,
            threads=_THREADS,
            serial_steps=ceil_div(calls["tokens"], _THREADS),
            step_cycles=_ROUND_CYCLES,
            task_cycles=_ALLTOALL_MEETING_CYCLES,
            launches=2.0,
            tile={"rows": tasks},
        )
        return (work,)


class AllToAllDispatch(_AllToAll):
    """Tokens of every rank to the ranks of their experts. ``dtype``: as sent."""

    op = "alltoall_dispatch"
    reads, writes = 2.0, 0.0


class AllToAllCombine(_AllToAll):
    """Results of the experts back to the tokens' ranks, which add them up. ``dtype``: as sent."""

    op = "alltoall_combine"
    reads, writes = 3.0, 1.0


MODES = ("normal", "low_latency")
_SMS = 24  # of the normal kernels, as deployed and as public campaigns measure at most
_MOST_SMS = 256
_NORMAL_THREADS, _LOW_LATENCY_THREADS = 768.0, 1024.0
# A channel, a pair of SMs, sends its tokens serially: find a free slot at each peer, copy, signal; what
# comes back is added up in rounds of one load from every peer, which wait for memory. Slopes of public campaigns on
# H100, H200 and B200 with 4 to 24 SMs: 150 to 220 ns per token, 20 to 60 per rank; 55 to 95 per KiB added up.
_TOKEN_CYCLES, _RANK_CYCLES, _ADD_CYCLES_PER_BYTE = 330.0, 60.0, 0.15
# Ranks synchronise before and after: system-wide fences, and flags that all wait for. One token takes on
# H100 and H200 beside launches: 18 us out and 38 us back by the normal kernels, 9 us by the others.
_MEETING_CYCLES = {"normal": 36e3, "low_latency": 18e3}
_NORMAL_MESSAGES = 4.0  # dependent: a barrier, the counts, the rows, the flag that they came
_LOW_LATENCY_MESSAGES = 2.0  # the rows, and their count


class _DeepEp(Exchange):
    """Parameters of both."""

    examples = (
        {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "world": 8},
        {"tokens": 128, "hidden": 7168, "topk": 8, "experts": 256, "world": 8, "mode": "low_latency"},
        {"tokens": 4096, "hidden": 7168, "topk": 8, "experts": 256, "world": 32, "nodes": 4, "fabric": "ib_ndr"},
    )
    starts: ClassVar[float]  # tokens are sent serially
    meetings: ClassVar[float]  # of ranks, by the normal kernels

    nodes: int = size("nodes of the GPUs, with NVLink inside a node", default=1, high=8192)
    node_limit: int | None = size("nodes that a token may be routed to (DeepSeek-V3: 4), default: all", default=None)
    mode: str = choice("kernels: normal (prefill) or low_latency (decode)", MODES, default="normal")
    sms: int = size("SMs of the normal kernels", default=_SMS, low=2, high=_MOST_SMS)
    fabric: str | None = choice(
        "network between nodes, or a FILE.toml that collect --link wrote", tuple(fabrics()), default=None, file=fabric
    )

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        """Evidence is kept by the type of network: a file is of the catalogued type that it derives from."""
        named = configuration["fabric"]
        return {**super().with_defaults(configuration, gpu), "fabric": None if named is None else fabric_type(named)}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        apart = (calls["nodes"] > 1) & (calls.choice("fabric") is None)
        numbers = calls.numbers
        return (
            super().conflicts(calls)
            or not_multiple(numbers, "world", "nodes")
            or conflict(apart, "nodes {nodes:g} need a fabric between them, such as ib_ndr", numbers)
        )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        sent = _sent(calls)
        names = ("tokens", "hidden", "topk", "experts", "world", "nodes", "sms")
        rows = {"log_rows": sent.rows, "log_near": sent.near + 1e-3, "log_far": sent.far + 1e-3}
        return {
            **{f"log_{name}": np.log2(calls[name]) for name in names},
            **{name: np.log2(value) for name, value in rows.items()},
            "log_channel_tokens": np.log2(2 * calls["tokens"] / calls["sms"]),
        }

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sent, tokens, link = _sent(calls), calls["tokens"], calls.choice("fabric") or ""
        normal = calls.choice("mode") == "normal"
        token_bytes = calls["hidden"] * max(2.0, calls.dtype.act_bytes)
        # the normal kernels' SMs come in pairs; the others take all there are
        sms = np.minimum(calls["sms"], gpu.sm_count) if normal else np.full(calls.count, float(gpu.sm_count))
        rounds = np.ceil(tokens / np.maximum(np.floor(sms / 2), 1.0)) if normal else np.zeros(calls.count)
        waits = cls.starts * _TOKEN_CYCLES + sent.rows * _RANK_CYCLES + cls.writes * token_bytes * _ADD_CYCLES_PER_BYTE
        work = cls.exchange(
            gpu,
            calls,
            sent,
            sms,
            link_steps=_NORMAL_MESSAGES if normal else _LOW_LATENCY_MESSAGES,
            link=link,
            threads=_NORMAL_THREADS if normal else _LOW_LATENCY_THREADS,
            registers_per_thread=64.0,
            serial_steps=np.maximum(rounds, 1.0),
            task_cycles=_MEETING_CYCLES[calls.choice("mode")] * (cls.meetings if normal else 1.0) + rounds * waits,
            launches=2.0 if normal else 1.0,  # ranks exchange counts first
            tile={"sms": sms},
        )
        return (work,)


def _sent(calls: Calls) -> RowsSent:
    """Rows per token. Normal: one per rank, once over the network per node. Low latency: one per expert."""
    world, nodes, topk = calls["world"], calls["nodes"], calls["topk"]
    a_node = world / nodes
    if calls.choice("mode") == "low_latency":
        return RowsSent(topk, topk * (a_node - 1) / world, topk * (world - a_node) / world, row_bytes(calls))
    allowed = np.minimum(calls.given("node_limit", nodes), nodes)
    experts = np.maximum(calls["experts"] * allowed / nodes, topk)  # that may be chosen from
    routing = calls.choice("routing")
    ranks, reached_nodes = (groups_reached(groups, topk, experts, routing) for groups in (allowed * a_node, allowed))
    return RowsSent(ranks, ranks * (a_node - 1) / a_node, reached_nodes * (nodes - 1) / nodes, row_bytes(calls))


class DeepEpDispatch(_DeepEp):
    """Tokens of every rank to the ranks of their experts. ``dtype``: as sent; fp8_block sends its scales too."""

    op = "deepep_dispatch"
    # A row is read and stored at the peer, then read there and stored in its slot; a kernel quantises it before.
    reads, writes, starts, meetings = 4.0, 0.0, 1.0, 1.0

    dtype: str = choice("dtype that is sent", tuple(DTYPES), default="fp8_block")


class DeepEpCombine(_DeepEp):
    """Results of the experts back to the tokens' ranks, which add them up."""

    op = "deepep_combine"
    # A row is read and stored at the peer, and read there to be added; a token is written once.
    reads, writes, starts, meetings = 3.0, 1.0, 0.0, 2.0
