"""moe: a mixture-of-experts layer as serving engines run it: route, sort by expert, two grouped GEMMs, weighted sum.

Each expert's rows are padded to a multiple of block_m, so a GEMM has sum over experts of ceil(rows / block_m) row
blocks, times ceil(n / block_n). Routing decides the padding and, for few tokens, how many experts are read: balanced
(the default, as in public benchmarks), random (about what a trained router does), or a power law (``skew`` above 0;
1.01 and 1.2 were measured). The forecast is of the busiest rank (``routing.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import (
    BoundingCalls,
    Calls,
    Configuration,
    ConfigurationColumns,
    Conflicts,
    choice,
    flag,
    more_than,
    not_multiple,
    real,
    size,
)
from kernelcast.ops.dtypes import DType
from kernelcast.ops.grouped import GroupedKernel, TritonBlocks, grouped_gemm
from kernelcast.ops.kernel_selection import stack_backend
from kernelcast.ops.quantize import quantised_rows
from kernelcast.ops.routing import ROUTINGS, ExpertRouting
from kernelcast.ops.work import Array, Number, Work, Works, axis, ceil_div

# (block_m, block_n, warps): the default rules and the tuned files of vLLM and SGLang draw from these.
BLOCKS = ((16, 32, 4), (16, 128, 4), (32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (128, 256, 8))
_MILD = 1.01  # the least skew that public campaigns measured
# Experts behind an exchange, which brings each rank the tokens that have an expert there (wide expert parallelism):
# DeepGEMM on sorted rows (SGLang's prefill) or on a buffer per expert (its decode), TensorRT-LLM's
# CUTLASS.
SENT = ("deepep_contiguous", "deepep_masked", "wideep_cutlass")
_BACKENDS = ("triton", "cutlass", "trtllm", "deepgemm", "marlin", *SENT)


_FULL_ROWS = 16.0  # of each expert, from which on skew was measured to be slower, seldom faster
_NEARLY_ALL = 0.95  # of the experts
MEASURED_SKEWS = (1.01, 1.2)
_CHANCE = 1e-9  # more uneven than balanced routing, less than the mildest skew


class Moe(GroupedKernel):
    """A fused mixture-of-experts layer on one rank of tp x ep: hidden, inter and experts are the whole model's."""

    op = "moe"
    dtypes = (*GroupedKernel.dtypes, "int8_wo", "mxfp4", "mxfp4_fp8", "w4a4_mxfp4")
    examples = (
        {"tokens": 1024, "hidden": 4096, "inter": 14336, "experts": 8, "topk": 2},
        {"tokens": 64, "hidden": 2048, "inter": 768, "experts": 128, "topk": 8, "block_m": 16, "block_n": 64,
         "block_k": 128},
    )  # fmt: skip

    batch_parameter = "tokens"
    model_sizes = ("hidden", "inter", "experts", "topk", "gated")

    tokens: int = size("tokens that enter the layer")
    hidden: int = size("hidden size of the model")
    inter: int = size("intermediate size of an expert, before sharding by tp")
    experts: int = size("experts, before sharding by ep", high=65536)
    topk: int = size("experts per token", high=65536)
    tp: int = size("tensor-parallel ranks: each holds inter / tp", default=1, high=65536)
    ep: int = size("expert-parallel ranks: each holds experts / ep", default=1, high=65536)
    skew: float = real("0: as routing says; else the power-law exponent of tokens per expert", default=0.0, high=10.0)
    routing: str | None = choice("how tokens choose experts without skew: balanced or random", ROUTINGS, default=None)
    gated: bool = flag("gated MLP: gate and up projections; any activation is forecast as SiLU", default=True)
    slots: int | None = size("expert slots, redundant experts included, default: experts", default=None, high=65536)
    eplb: bool = flag("expert slots balanced by load (EPLB)", default=False)
    received: int | None = size("tokens dispatched to a rank, default: expected", default=None)
    backend: str | None = choice("backend, default: the stack's", _BACKENDS, default=None)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        even = calls.choice("routing") or "balanced"
        return {**super().configuration(calls), "routing": np.where(calls["skew"] > 0, "skewed", even).astype(object)}

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        return {**configuration, "backend": configuration["backend"] or stack_backend(cls.op, configuration, gpu)}

    @classmethod
    def sizes(cls, calls: Calls) -> Mapping[str, Array]:
        """Random routing is treated as its equivalent skew."""
        sizes = super().sizes(calls)
        return {**sizes, "skew": _similar_skew(calls)} if calls.choice("routing") == "random" else sizes

    @classmethod
    def with_choices(cls, calls: Calls, configuration: Configuration) -> Calls:
        """Random routing was not measured: the most similar call stands in for it, times the ratio of physics."""
        chosen = super().with_choices(calls, configuration)
        if calls.choice("routing") != "random" or chosen.choice("routing") == "random":
            return chosen
        similar = {"skew": _similar_skew(calls), "tokens": _similar_tokens(calls)}
        return replace(chosen, numbers={**chosen.numbers, **similar})

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        held = {**calls.numbers, "experts": calls.given("slots", calls["experts"])}
        return (
            not_multiple(held, "inter", "tp")
            or not_multiple(held, "experts", "ep")
            or more_than(calls.numbers, "experts", "slots")
            or super().conflicts(calls)
        )

    @classmethod
    def not_faster_than(cls, calls: Calls) -> BoundingCalls:
        """Where every expert has enough rows, more uneven routing is no faster: the busiest expert decides. With few
        rows skew is faster, as measured: fewer experts are read. So it is than balanced rows that end within a block
        (vLLM's and SGLang's campaigns: a skew of 1.01 is 12% slower with 128 rows an expert, 6% faster with 132)."""
        by_chance = calls.choice("routing") == "random"
        uneven = np.maximum(calls["skew"], _CHANCE) if by_chance else calls["skew"]
        return [cls._skewed(calls, less, uneven > less) for less in (0.0, *MEASURED_SKEWS) if (uneven > less).any()]

    @classmethod
    def not_slower_than(cls, calls: Calls) -> BoundingCalls:
        """Random routing is less uneven than the mildest measured skew."""
        mild = calls["skew"] == 0
        by_chance = calls.choice("routing") == "random" and mild.any()
        return [cls._skewed(calls, MEASURED_SKEWS[0], mild)] if by_chance else []

    @staticmethod
    def _skewed(calls: Calls, skew: float, where: NDArray[np.bool_]) -> tuple[NDArray[np.intp], Calls]:
        """These calls with this skew, where every expert has enough rows. Balanced, each has whole blocks of rows: with
        one more row than that all of them would be padded, of uneven ones some."""
        mean = calls["tokens"] * calls["topk"] / calls["experts"]
        rows = np.flatnonzero((mean >= _FULL_ROWS) & where)
        other, mean = calls.take(rows), mean[rows]
        numbers = {**other.numbers, "skew": np.full(len(rows), skew)}
        if not skew:
            block = np.minimum(2 ** np.floor(np.log2(mean)), BLOCKS[-1][0])
            numbers["tokens"] = np.ceil((mean - mean % block) * other["experts"] / other["topk"])
        return rows, replace(other, numbers=numbers, choices={**other.choices, "routing": None})

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        layer = RankLayer.of(calls)
        sizes = {
            "log_tokens": layer.tokens, "log_hidden": layer.hidden, "log_inter": layer.inter,
            "log_experts": layer.experts,
            "log_topk": calls["topk"], "log_ep": calls["ep"], "log_tp": calls["tp"], "log_active": layer.active(),
            "log_rows": layer.pairs / layer.experts + 1e-3, "log_seen": layer.seen,
            "log_uneven": layer.pairs / layer.mean_pairs,
        }  # fmt: skip
        features = {name: np.log2(value) for name, value in sizes.items()}
        return features | {name: calls[name] for name in ("skew", "gated", "eplb")}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        dtype, layer, tile = calls.dtype, RankLayer.of(calls), _tile(calls)
        up = layer.inter * (1 + calls["gated"])
        blocks, active, rows = layer.blocks(tile.block_m), layer.active(), np.minimum(layer.seen, layer.pairs)
        first, second = (
            grouped_gemm(gpu, tile, n, k, blocks=blocks, active=active, rows=rows, pairs=layer.pairs)
            for n, k in ((up, layer.hidden), (layer.hidden, layer.inter))
        )
        if layer.backend == "deepep_masked":  # rows come sorted and narrow, and are added up on their way back
            return first, _activation(layer, up), second
        if layer.backend == "deepep_contiguous":
            return _sort(layer, dtype), first, _activation(layer, up), second, _add_up(layer)
        if dtype.act_bytes >= 2:
            return _route(layer), first, _activation(layer, up), second, _add_up(layer)
        inputs = quantised_rows(gpu, dtype, np.ceil(layer.seen), layer.hidden)
        hidden = quantised_rows(gpu, dtype, np.ceil(layer.around), layer.inter)
        return _route(layer), inputs, first, _activation(layer, up), hidden, second, _add_up(layer)


def _similar_skew(calls: Calls) -> Array:
    """The measured skew most similar to random routing. On one rank the mildest power law, whose rows also end within a
    block (public campaigns: 6 to 11% slower than balanced at 128 to 512 rows per expert, half of what padding alone
    makes); with few rows none (``_similar_tokens``). On several ranks none: the busiest has little more than its share.
    """
    few = calls["tokens"] * calls["topk"] < _FULL_ROWS * calls["experts"]
    return np.where(calls["skew"] > 0, calls["skew"], np.where((calls["ep"] > 1) | few, 0.0, _MILD))


def _similar_tokens(calls: Calls) -> Array:
    """Tokens that read as many experts when they are routed evenly as these do at random. Where experts have few rows
    each that is read takes as long: in vLLM's campaign on an H200 0.023 + 0.0022 ms an expert (128 of 768), from 8 to
    128 of them."""
    active = replace(RankLayer.of(calls), random=True, skew=np.zeros_like(calls["skew"])).active()
    some = (calls["skew"] == 0) & (calls["ep"] == 1) & (active < _NEARLY_ALL * calls["experts"])
    return np.where(some, np.maximum(np.rint(active / calls["topk"]), 1.0), calls["tokens"])


def _tile(calls: Calls) -> TritonBlocks:
    """The given config, else the candidates; DeepGEMM pads sorted rows to 128."""
    sorted_rows = calls.choice("backend") == "deepep_contiguous"
    block_m, block_n, warps = (axis([b[i] for b in BLOCKS if b[0] >= 128 or not sorted_rows]) for i in range(3))
    return TritonBlocks(
        dtype=calls.dtype,
        block_m=calls.given("block_m", block_m),
        block_n=calls.given("block_n", block_n),
        block_k=calls.given("block_k", 128.0 if calls.dtype.act_bytes <= 1.1 else 64.0),
        warps=calls.given("warps", warps),
        stages=calls.given("stages", 3.0),
    )


@dataclass(frozen=True)
class RankLayer(ExpertRouting):
    """What the busiest rank holds and receives."""

    hidden: Array = field(kw_only=True)
    inter: Array = field(kw_only=True)
    backend: str | None = field(kw_only=True)
    given: Array = field(kw_only=True)  # tokens that reach it, where that is known

    @classmethod
    def of(cls, calls: Calls) -> RankLayer:
        slots = calls.given("slots", calls["experts"])
        return cls(
            calls["tokens"], calls["topk"], slots / calls["ep"], calls["ep"], calls["skew"],
            calls.choice("routing") == "random", slots - calls["experts"], calls["eplb"],
            hidden=calls["hidden"], inter=calls["inter"] / calls["tp"], backend=calls.choice("backend"),
            given=calls["received"],
        )  # fmt: skip

    @property
    def around(self) -> Array:
        """Pairs that the kernels around the GEMMs process: Triton's include those of other ranks."""
        return self.tokens * self.topk if self.backend == "triton" else self.pairs

    @property
    def seen(self) -> Array:
        """Tokens that they process: all, unless a dispatch brings only those with an expert here."""
        if self.backend not in SENT:
            return self.tokens
        return np.where(np.isnan(self.given), self.received, self.given)


def _route(layer: RankLayer) -> Work:
    """Top-k of the router's scores, and the sort of pairs by expert: two small kernels."""
    moved = layer.seen * layer.experts * 4 + layer.around * 16
    return Work(
        tasks=ceil_div(layer.seen, 4),
        xu_ops=4 * layer.experts,
        l2_bytes=moved / ceil_div(layer.seen, 4),
        activation_bytes=moved,
        launches=2.0,
    )


def _sort(layer: RankLayer, dtype: DType) -> Work:
    """Dispatched rows, copied to the slots of their experts."""
    row_bytes = layer.hidden * dtype.act_bytes
    return _row_pass(layer.seen, row_bytes * (1 + layer.pairs / layer.seen), flops=np.zeros(1))


def _activation(layer: RankLayer, up: Array) -> Work:
    """SiLU of the gate times the up projection: one CTA per row."""
    return _row_pass(layer.around, (up + layer.inter) * 2.0, flops=4 * layer.inter, xu_ops=2 * layer.inter)


def _add_up(layer: RankLayer) -> Work:
    """Weighted sum of each token's experts."""
    per_token = layer.around / layer.seen
    return _row_pass(layer.seen, (per_token + 1) * layer.hidden * 2.0, flops=2 * per_token * layer.hidden)


def _row_pass(rows: Array, row_bytes: Array, flops: Array, xu_ops: Number = 0.0) -> Work:
    return Work(
        tasks=np.ceil(rows),
        fma_flops=flops,
        xu_ops=xu_ops,
        l2_bytes=row_bytes,
        activation_bytes=rows * row_bytes,
        threads=256.0,
        registers_per_thread=32.0,
        useful_flops=rows * flops,
    )
