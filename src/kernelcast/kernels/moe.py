"""moe: a mixture-of-experts layer as serving engines run it: route, sort by expert, two grouped GEMMs, add up.

Tokens are sorted by expert and each expert's rows are padded to a multiple of block_m, so a GEMM has
sum over experts of ceil(rows / block_m) row blocks, times ceil(n / block_n). How tokens spread over experts
decides the padding and, for few tokens, how many experts are read at all. ``routing`` says how: balanced (the
default, and what public benchmarks measure) deals rows out evenly; random draws each token's experts by chance, as
a trained router about does. ``skew`` above 0 is neither: the rows of an expert follow a power law with density
x^-skew between 1 and 0.8 tokens, as AIConfigurator's benchmark draws them (1.01 and 1.2 are its settings).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Conflicts, Words, choice, conflict, flag, real, size
from kernelcast.kernels.grouped import Blocks, GroupedKernel, active_experts, grouped_gemm, random_blocks
from kernelcast.kernels.quantize import quantised_rows
from kernelcast.kernels.which import stack_backend
from kernelcast.kernels.work import Array, Number, Work, Works, axis, ceil_div

# (block_m, block_n, warps): the default rules and the tuned files of vLLM and SGLang draw from these.
BLOCKS = ((16, 32, 4), (16, 128, 4), (32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 128, 8), (128, 256, 8))
_ROUTINGS = ("balanced", "random")
_BACKENDS = ("triton", "cutlass", "trtllm", "deepgemm", "marlin")
_QUANTILES = 32  # experts of a skewed layer are stood for by this many load levels
_LARGEST_SHARE = 0.8  # of the tokens, that one expert can draw


class Moe(GroupedKernel):
    """A fused mixture-of-experts layer on one rank of tp x ep: hidden, inter and experts are the whole model's."""

    op = "moe"
    examples = (
        {"tokens": 1024, "hidden": 4096, "inter": 14336, "experts": 8, "topk": 2},
        {"tokens": 64, "hidden": 2048, "inter": 768, "experts": 128, "topk": 8, "block_m": 16, "block_n": 64,
         "block_k": 128},
    )  # fmt: skip

    grows = "tokens"
    of_model = ("hidden", "inter", "experts", "topk", "gated")

    tokens: int = size("tokens that enter the layer")
    hidden: int = size("model width")
    inter: int = size("width of one expert, before cutting by tp")
    experts: int = size("experts, before cutting by ep", high=65536)
    topk: int = size("experts a token goes to", high=65536)
    tp: int = size("tensor-parallel ranks: each holds inter / tp", default=1, high=65536)
    ep: int = size("expert-parallel ranks: each holds experts / ep", default=1, high=65536)
    skew: float = real("0: by routing; else the exponent of the power law of tokens an expert", default=0.0, high=10.0)
    routing: str | None = choice("how tokens choose experts without skew: balanced or random", _ROUTINGS, default=None)
    gated: bool = flag("gate and up projections (SwiGLU) rather than one", default=True)
    backend: str | None = choice("library, default: the usual one of the stack", _BACKENDS, default=None)

    @classmethod
    def kinds(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        even = calls.choice("routing") or "balanced"
        return {**super().kinds(calls), "routing": np.where(calls["skew"] > 0, "skewed", even).astype(object)}

    @classmethod
    def usual(cls, words: Words, gpu: Gpu) -> dict[str, str | None]:
        return {**words, "backend": words["backend"] or stack_backend(cls.op, words, gpu)}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        for whole, parts in (("inter", "tp"), ("experts", "ep")):
            uneven = np.mod(calls[whole], calls[parts]) != 0
            text = f"{whole} {{{whole}:g}} cannot be cut into {parts} {{{parts}:g}} equal parts"
            if found := conflict(uneven, text, calls.numbers):
                return found
        return super().conflicts(calls)

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        layer = _Layer.of(calls)
        sizes = {
            "log_tokens": layer.tokens, "log_hidden": layer.hidden, "log_inter": layer.inter,
            "log_experts": layer.experts,
            "log_topk": calls["topk"], "log_ep": calls["ep"], "log_tp": calls["tp"], "log_active": layer.active(),
            "log_rows": layer.pairs / layer.experts + 1e-3,
        }  # fmt: skip
        found = {name: np.log2(value) for name, value in sizes.items()}
        return found | {"skew": calls["skew"], "gated": calls["gated"]}

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        kind, layer, tile = calls.dtype, _Layer.of(calls), _tile(calls)
        up = layer.inter * (1 + calls["gated"])
        blocks, active, rows = layer.blocks(tile.block_m), layer.active(), np.minimum(layer.tokens, layer.pairs)
        first, second = (
            grouped_gemm(gpu, tile, n, k, blocks=blocks, active=active, rows=rows, pairs=layer.pairs)
            for n, k in ((up, layer.hidden), (layer.hidden, layer.inter))
        )
        if kind.act_bytes >= 2:
            return _route(layer), first, _activation(layer, up), second, _add_up(layer)
        inputs = quantised_rows(gpu, kind, layer.tokens, layer.hidden)
        hidden = quantised_rows(gpu, kind, np.ceil(layer.around), layer.inter)
        return _route(layer), inputs, first, _activation(layer, up), hidden, second, _add_up(layer)


def _tile(calls: Calls) -> Blocks:
    """The config where one is given, else the candidates."""
    block_m, block_n, warps = (axis([b[i] for b in BLOCKS]) for i in range(3))
    return Blocks(
        kind=calls.dtype,
        block_m=calls.given("block_m", block_m),
        block_n=calls.given("block_n", block_n),
        block_k=calls.given("block_k", 128.0 if calls.dtype.act_bytes <= 1.1 else 64.0),
        warps=calls.given("warps", warps),
        stages=calls.given("stages", 3.0),
    )


@dataclass(frozen=True)
class _Layer:
    """What one rank holds and is sent."""

    tokens: Array
    hidden: Array
    inter: Array
    experts: Array
    pairs: Array  # (token, expert) pairs that this rank's experts multiply
    around: Array  # pairs that the kernels around the GEMMs walk
    skew: Array
    topk: Array
    ep: Array
    random: bool  # experts are drawn by chance, not dealt out

    @classmethod
    def of(cls, calls: Calls) -> _Layer:
        return cls(
            tokens=calls["tokens"],
            hidden=calls["hidden"],
            inter=calls["inter"] / calls["tp"],
            experts=calls["experts"] / calls["ep"],
            pairs=calls["tokens"] * calls["topk"] / calls["ep"],
            # Triton's kernels walk the pairs of other ranks too; the others sort them out first
            around=calls["tokens"] * calls["topk"] / (1.0 if calls.choice("backend") == "triton" else calls["ep"]),
            skew=calls["skew"],
            topk=calls["topk"],
            ep=calls["ep"],
            random=calls.choice("routing") == "random",
        )

    def blocks(self, block_m: Array) -> Array:
        """Row blocks over all experts, each expert padded to ``block_m``."""
        if self.random:
            even = random_blocks(self.tokens, self.experts * self.ep, self.topk, block_m) / self.ep
        else:
            even = _balanced(self.pairs, self.experts, block_m)
        if not np.any(self.skew > 0):
            return even
        load, share = self._skewed()
        skewed = np.zeros_like(even)
        for i in range(_QUANTILES):
            skewed = skewed + share * np.where(load[i] >= 1, np.ceil(load[i] / block_m), load[i])
        return np.where(self.skew > 0, np.maximum(skewed, 1.0), even)

    def active(self) -> Array:
        """Experts that get any token."""
        if self.random:
            even = active_experts(self.tokens, self.experts * self.ep, self.topk) / self.ep
        else:
            even = np.minimum(self.experts, np.ceil(self.pairs))
        if not np.any(self.skew > 0):
            return even
        load, share = self._skewed()
        return np.where(self.skew > 0, np.maximum(1.0, np.sum(np.minimum(load, 1.0), axis=0) * share), even)

    def _skewed(self) -> tuple[Array, Array]:
        """(quantiles, calls) rows of an expert at each level, and how many experts a level stands for."""
        u = (axis(list(range(_QUANTILES))) + 0.5) / _QUANTILES
        top = np.maximum(_LARGEST_SHARE * self.tokens, 2.0)
        bend = np.where(np.abs(1 - self.skew) < 1e-6, 1e-6, 1 - self.skew)  # the limit of bend -> 0 is top**u
        draw = (1 + u * (top**bend - 1)) ** (1 / bend)
        share = self.experts / _QUANTILES
        load = draw * (self.pairs / (np.sum(draw, axis=0) * share))
        return np.minimum(load, self.tokens), share


def _balanced(pairs: Array, experts: Array, block_m: Array) -> Array:
    """Blocks when pairs are dealt out evenly: some experts get floor(pairs / experts) rows, the rest one more."""
    few = np.floor(pairs / experts)
    more = np.ceil(pairs - few * experts)
    return more * np.ceil((few + 1) / block_m) + (experts - more) * np.ceil(few / block_m)


def _route(layer: _Layer) -> Work:
    """Top-k of the router's scores, and the sort of pairs by expert: two small kernels."""
    moved = layer.tokens * layer.experts * 4 + layer.around * 16
    return Work(
        tasks=ceil_div(layer.tokens, 4),
        xu_ops=4 * layer.experts,
        l2_bytes=moved / ceil_div(layer.tokens, 4),
        activation_bytes=moved,
        launches=2.0,
    )


def _activation(layer: _Layer, up: Array) -> Work:
    """SiLU of the gate times the rest: one row a CTA."""
    return _row_pass(layer.around, (up + layer.inter) * 2.0, flops=4 * layer.inter, xu_ops=2 * layer.inter)


def _add_up(layer: _Layer) -> Work:
    """Weighted sum of each token's experts."""
    per_token = layer.around / layer.tokens
    return _row_pass(layer.tokens, (per_token + 1) * layer.hidden * 2.0, flops=2 * per_token * layer.hidden)


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
