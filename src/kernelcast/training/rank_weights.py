"""Weights of one rank of a training job."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Dense, Experts, LatentAttention, Layer, SelfAttention


@dataclass(frozen=True)
class Weights:
    """Numbers that one rank has: ``dense`` ones are the same on all data parallel ranks, ``experts`` on those with the
    same experts. ``products``: of them, matrices of linear layers. ``shapes``: numbers of each distinct one."""

    dense: float = 0.0
    experts: float = 0.0
    products: float = 0.0
    shapes: tuple[float, ...] = ()
    adapters: float = 0.0
    unit: float = 0.0  # the largest that FSDP gathers at once: a layer, or the embedding or head

    @property
    def total(self) -> float:
        return self.dense + self.experts


@functools.lru_cache(maxsize=4096)
def layer_weights(
    layer: Layer, hidden: int, tp: int, ep: int, expert_tp: int, rank: int = 0, targets: tuple[str, ...] = (),
) -> Weights:  # fmt: skip
    """Column- and row-parallel matrices are divided by ``tp``, experts by ``ep`` and ``expert_tp``; norms, the router
    and down-projections to a latent are on every rank. An adapter has (inputs + outputs) x rank numbers, of which the
    side that meets the sharded one is divided."""
    matrices = _matrices(layer, hidden, tp)
    whole = sum(rows * columns for _, rows, columns, _ in matrices)
    products = sum(rows * columns / shards for _, rows, columns, shards in matrices)
    shapes = {rows * columns / shards for _, rows, columns, shards in matrices}
    adapters = sum(
        rank * (rows + columns / shards if name in ("qkv", "fc1") else rows / shards + columns)
        for name, rows, columns, shards in matrices if name in targets
    )  # fmt: skip
    experts, block = 0.0, layer.mlp
    every = layer.norms.weights(hidden)
    every += layer.attention.weights(hidden) if layer.attention else 0
    every += block.weights(hidden) if block else 0
    if isinstance(block, Experts):
        each = block.expert_weights(hidden)
        whole += block.experts * each
        experts = block.experts * each / ep / expert_tp
        width = block.width(hidden)
        shapes |= {width * block.expert.up_width / expert_tp, width * block.inter / expert_tp}
        adapters += sum(
            rank * (width + size) * block.experts / ep / expert_tp
            for name, size in (("fc1", block.expert.up_width), ("fc2", block.inter)) if name in targets
        )  # fmt: skip
    dense = every - whole + products
    return Weights(dense, experts, products + experts, tuple(sorted(shapes)), adapters, dense + experts)


def _matrices(layer: Layer, hidden: int, tp: int) -> list[tuple[str, int, int, float]]:
    """Linear layers: LoRA's name, inputs, outputs, ranks that it is divided over."""
    found: list[tuple[str, int, int, float]] = []
    mixer = layer.attention
    if isinstance(mixer, SelfAttention):
        kv = mixer.qkv_width - mixer.q_width
        over = mixer.qkv_width / (mixer.q_width / tp + kv / min(tp, mixer.kv_heads))
        found += [("qkv", hidden, mixer.qkv_width, over), ("proj", mixer.q_width, hidden, tp)]
    elif isinstance(mixer, LatentAttention):
        q_width, from_width = mixer.q_heads * mixer.qk_head_dim, mixer.q_lora_rank or hidden
        if mixer.q_lora_rank:
            found.append(("qkv", hidden, mixer.q_lora_rank, 1))
        expanded = mixer.q_heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        found.append(("qkv", from_width, q_width, tp))
        found.append(("qkv", hidden, mixer.kv_lora_rank + mixer.qk_rope_head_dim, 1))
        found.append(("qkv", mixer.kv_lora_rank, expanded, tp))
        found.append(("proj", mixer.q_heads * mixer.v_head_dim, hidden, tp))
    elif mixer is not None:
        found.append(("qkv", hidden, mixer.weights(hidden) // hidden, tp))
    dense = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
    if isinstance(dense, Dense):
        found += [("fc1", hidden, dense.up_width, tp), ("fc2", dense.inter, hidden, tp)]
    return found


def layer_runs(model: Architecture, first: int, end: int) -> tuple[tuple[int, Layer], ...]:
    """The layers from ``first`` to ``end`` as runs of equal ones."""
    found, at = [], 0
    for run in model.layers:
        count = min(end, at + run.count) - max(first, at)
        if count > 0:
            found.append((count, run.layer))
        at += run.count
    return tuple(found)
