"""What each mixer launches, in turn. A new one is a dataclass in ``attention.py`` or ``recurrent.py`` and a function
here; the sum over the GPUs that cut it follows in ``forward.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.inference.launching import Pass
from kernelcast.models.layers import (
    BlockSparseAttention,
    CompressedAttention,
    Kda,
    LinearAttention,
    Mamba2,
    Mixer,
    Mla,
    Parallel,
    SelfAttention,
)


def mixed(run: Pass, mixer: Mixer, count: int) -> Iterator[Launch]:
    """The kernels of ``count`` mixers of one kind."""
    yield from _LAUNCHES[type(mixer)](run, mixer, count)


def _attention(run: Pass, mixer: SelfAttention, count: int) -> Iterator[Launch]:
    tp, width = run.layout.tp, run.model.hidden
    heads, kv_heads, dim = mixer.q_heads // tp, max(1, mixer.kv_heads // tp), mixer.head_dim
    gate = heads * dim if mixer.output_gate else 0
    kept = 0 if mixer.borrows else 1 if mixer.values_are_keys else 2  # projections of keys and values
    widths = [heads * dim + gate + kept * kv_heads * dim]
    if not run.stack.joined_projections:
        widths = [heads * dim + gate, *(kept * [kv_heads * dim])]
    for n in widths:
        yield run.product("projections", count, run.tokens, n, width)
    for own in (heads, *(() if mixer.borrows else (kv_heads,))) if mixer.qk_norm != "none" else ():
        rows, cols = (1, own * dim) if mixer.qk_norm == "full" else (own, dim)
        yield from run.small("norms", "rmsnorm", count, rows=run.tokens * rows, cols=cols)
    if mixer.rope:
        yield from run.small("rotary", "rope", count, tokens=run.tokens, q_heads=heads, kv_heads=kv_heads,
                             head_dim=dim, rotary_dim=mixer.rotary_dim or None)  # fmt: skip
    if run.stack.kernels == "torch" and run.form.cached:  # an engine's attention layer does it itself
        yield from run.small("cache", "kv_write", count, tokens=run.tokens, kv_heads=kv_heads, head_dim=dim)
    yield run.call("attention", "attention", count, **run.sizes.lengths, q_heads=heads, kv_heads=kv_heads,
                   head_dim=dim, causal=run.model.kind == "decoder", window=mixer.window or 0,
                   page_size=run.page_size, kv_dtype=run.precision.cache, backend=run.backend("attention"))  # fmt: skip
    if gate:
        yield from run.small("activation", "mul", count, rows=run.tokens, cols=gate)
    yield run.product("projections", count, run.tokens, width, heads * dim)


def _latent(run: Pass, mixer: Mla, count: int) -> Iterator[Launch]:
    heads = mixer.q_heads // run.layout.tp
    if mixer.output_gate:
        yield run.product("projections", count, run.tokens, heads * mixer.v_head_dim, run.model.hidden)
        yield from run.small("activation", "mul", count, rows=run.tokens, cols=heads * mixer.v_head_dim)
    if mixer.indexer is None and not run.stack.latent_layers:
        yield from _latent_parts(run, mixer, count)
        return
    sizes = {"q_rank": mixer.q_lora_rank or 0, "kv_rank": mixer.kv_lora_rank, "rope_dim": mixer.qk_rope_head_dim,
             "nope_dim": mixer.qk_nope_head_dim, "v_dim": mixer.v_head_dim}  # fmt: skip
    if mixer.indexer is None:
        yield _layer(run, "mla_layer", count, q_heads=heads, **sizes, absorbed="yes" if run.form.absorbed else "no")
        return
    index = mixer.indexer
    yield _layer(run, "dsa_layer", count, q_heads=heads, **sizes, index_heads=index.heads, index_dim=index.head_dim,
                 index_topk=index.topk, indexer=not index.shared)  # fmt: skip


def _latent_parts(run: Pass, mixer: Mla, count: int) -> Iterator[Launch]:
    """Kernel by kernel, where no whole layer of the stack was measured."""
    width, tokens = run.model.hidden, run.tokens
    heads, latent = mixer.q_heads // run.layout.tp, mixer.kv_lora_rank
    query = heads * mixer.qk_head_dim
    if mixer.q_lora_rank is None:
        yield run.product("projections", count, tokens, query, width)
        yield run.product("projections", count, tokens, latent + mixer.qk_rope_head_dim, width)
    else:  # both ways down in one product, whole on every GPU
        down = mixer.q_lora_rank + latent + mixer.qk_rope_head_dim
        yield run.product("projections", count, tokens, down, width)
        yield from run.small("norms", "rmsnorm", count, rows=tokens, cols=mixer.q_lora_rank)
        yield run.product("projections", count, tokens, query, mixer.q_lora_rank)
    yield from run.small("norms", "rmsnorm", count, rows=tokens, cols=latent)
    if mixer.rope:
        yield from run.small("rotary", "rope", count, tokens=tokens, q_heads=heads, kv_heads=1,
                             head_dim=mixer.qk_rope_head_dim)  # fmt: skip
    absorbed = run.form.absorbed
    if absorbed:  # queries into the latent, and values out of it, one small product a head
        for n, k in ((latent, mixer.qk_nope_head_dim), (mixer.v_head_dim, latent)):
            yield replace(run.call("projections", "bmm", count, batch=heads, m=run.sizes.batch_tokens, n=n, k=k,
                                   dtype=run.precision.between), by="lengths")  # fmt: skip
    else:
        up = heads * (mixer.qk_nope_head_dim + mixer.v_head_dim)
        expanded = run.product("projections", count, run.sizes.context_tokens, up, latent)
        yield replace(expanded, by="lengths")
    yield run.call("attention", "mla", count, **run.sizes.lengths, q_heads=heads, kv_rank=latent,
                   rope_dim=mixer.qk_rope_head_dim, nope_dim=mixer.qk_nope_head_dim, v_dim=mixer.v_head_dim,
                   page_size=run.page_size, kv_dtype=run.precision.cache, absorbed="yes" if absorbed else "no",
                   backend=run.backend("mla"), stack=run.stack.mla_kernels)  # fmt: skip
    yield run.product("projections", count, tokens, width, heads * mixer.v_head_dim)


def _layer(run: Pass, op: str, count: int, **sizes: Any) -> Launch:
    """An attention layer as engines measure it, projections inside."""
    return run.call("attention", op, count, **run.sizes.lengths, **sizes, hidden=run.model.hidden,
                    page_size=run.page_size, kv_dtype=run.precision.cache, dtype=run.matrices)  # fmt: skip


def _compressed(run: Pass, mixer: CompressedAttention, count: int) -> Iterator[Launch]:
    tp, index = run.layout.tp, mixer.indexer
    chosen = {"index_heads": index.heads, "index_dim": index.head_dim, "index_topk": index.topk} if index else {}
    yield _layer(run, "compressed_layer", count, q_heads=mixer.q_heads // tp, q_rank=mixer.q_lora_rank,
                 head_dim=mixer.head_dim, rope_dim=mixer.rope_dim, o_rank=mixer.o_lora_rank,
                 o_groups=mixer.o_groups // tp, window=mixer.window, compress_ratio=mixer.ratio, **chosen)  # fmt: skip


def _block_sparse(run: Pass, mixer: BlockSparseAttention, count: int) -> Iterator[Launch]:
    tp = run.layout.tp
    yield _layer(run, "block_sparse_layer", count, q_heads=mixer.q_heads // tp, kv_heads=max(1, mixer.kv_heads // tp),
                 head_dim=mixer.head_dim, index_heads=max(1, mixer.index_heads // tp), index_dim=mixer.index_dim,
                 block_size=mixer.block, topk_blocks=mixer.topk_blocks)  # fmt: skip


def _gated_delta(run: Pass, mixer: LinearAttention, count: int) -> Iterator[Launch]:
    tp, sizes = run.layout.tp, run.sizes.new
    yield run.product("projections", count, run.tokens, mixer.in_width // tp, run.model.hidden)
    yield from run.small("linear attention", "causal_conv1d", count, **sizes, channels=mixer.conv_channels // tp,
                         width=mixer.conv_width, kernel=_kernel(run))  # fmt: skip
    yield run.call("linear attention", "gated_delta", count, **sizes, key_heads=mixer.key_heads // tp,
                   value_heads=mixer.value_heads // tp, key_dim=mixer.key_head_dim, value_dim=mixer.value_head_dim,
                   qk_norm=True, state_dtype=mixer.state_dtype, kernel=_kernel(run))  # fmt: skip
    yield from run.small("norms", "rmsnorm", count, rows=run.tokens * mixer.value_heads // tp,
                         cols=mixer.value_head_dim)  # fmt: skip
    yield run.product("projections", count, run.tokens, run.model.hidden, mixer.value_width // tp)


def _kda(run: Pass, mixer: Kda, count: int) -> Iterator[Launch]:
    """The first steps of the decay and of a low-rank gate are whole on every GPU."""
    tp, sizes, width = run.layout.tp, run.sizes.new, mixer.width // run.layout.tp
    ranks = [mixer.decay_rank, *([mixer.gate_rank] if mixer.gate_rank else [])]
    yield run.product("projections", count, run.tokens, sum(ranks) + (mixer.in_width - sum(ranks)) // tp,
                      run.model.hidden)  # fmt: skip
    for rank in ranks:
        yield run.product("projections", count, run.tokens, width, rank)
    yield from run.small("linear attention", "causal_conv1d", count, **sizes, channels=mixer.conv_channels // tp,
                         width=mixer.conv_width, kernel=_kernel(run), parts=3)  # fmt: skip
    yield run.call("linear attention", "kda", count, **sizes, heads=mixer.heads // tp, key_dim=mixer.head_dim,
                   state_dtype=mixer.state_dtype, kernel=_kernel(run))  # fmt: skip
    yield from run.small("norms", "rmsnorm", count, rows=run.tokens * mixer.heads // tp, cols=mixer.head_dim)
    yield run.product("projections", count, run.tokens, run.model.hidden, width)


def _mamba2(run: Pass, mixer: Mamba2, count: int) -> Iterator[Launch]:
    """Groups of keys and queries are cut too, or copied where there are fewer than GPUs."""
    tp, sizes = run.layout.tp, run.sizes.new
    heads, groups = mixer.heads // tp, max(1, mixer.groups // tp)
    width = heads * mixer.head_dim
    channels = width + 2 * groups * mixer.state
    yield run.product("projections", count, run.tokens, width + channels + heads, run.model.hidden)
    yield from run.small("linear attention", "causal_conv1d", count, **sizes, channels=channels,
                         width=mixer.conv_width, kernel=_kernel(run))  # fmt: skip
    yield run.call("linear attention", "mamba2", count, **sizes, heads=heads, head_dim=mixer.head_dim,
                   state=mixer.state, groups=groups, chunk=mixer.chunk, state_dtype=mixer.state_dtype,
                   kernel=_kernel(run))  # fmt: skip
    if mixer.gated_norm:
        yield from run.small("norms", "rmsnorm", count, rows=run.tokens * groups, cols=width // groups)
    else:
        yield from run.small("activation", "silu_mul", count, rows=run.tokens, cols=width)
    yield run.product("projections", count, run.tokens, run.model.hidden, width)


def _parallel(run: Pass, mixer: Parallel, count: int) -> Iterator[Launch]:
    yield from _attention(run, mixer.attention, count)
    yield from _mamba2(run, mixer.recurrent, count)
    yield from run.small("residual", "add", count, rows=run.tokens, cols=run.model.hidden)


def _kernel(run: Pass) -> str:
    """A few drafted tokens are checked by the kernel of decode."""
    return "recurrent" if run.form.checks else "auto"


_LAUNCHES: Mapping[type, Callable[[Pass, Any, int], Iterator[Launch]]] = {
    SelfAttention: _attention,
    Mla: _latent,
    CompressedAttention: _compressed,
    BlockSparseAttention: _block_sparse,
    LinearAttention: _gated_delta,
    Kda: _kda,
    Mamba2: _mamba2,
    Parallel: _parallel,
}
