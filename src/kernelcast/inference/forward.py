"""One forward pass of a model as kernel calls: what each GPU of a layout launches for one batch of tokens.

A pass is a batch of sequences, each with new tokens and tokens already in its cache: a prefill has no past, a decode
step one new token each, a chunked step some of both. Layers that are alike appear once, with their count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kernelcast.forecast.calls import Launch
from kernelcast.inference.batch import Batch, BatchColumns, Rows
from kernelcast.inference.deployment import Deployment
from kernelcast.inference.layers import PassContext, dense, experts, mixer_launches
from kernelcast.models.layers import BlockResiduals, Experts, HyperConnections, Layer, LayerRun
from kernelcast.models.vision import VisionEncoder

__all__ = ["Deployment", "forward", "forward_many", "head_rows"]


def forward(deployment: Deployment, batch: Batch, *, in_order: bool = False) -> list[Launch]:
    """The calls of one pass on one GPU, all stages of a pipeline together; equal layers once with their count,
    or ``in_order`` one after another."""
    return list(_launches(PassContext(deployment, batch.sizes(head_rows(deployment, batch))), in_order))


def forward_many(deployment: Deployment, batches: BatchColumns, by: str = ""
                 ) -> Iterator[tuple[Rows, list[Launch], dict[str, Rows]]]:  # fmt: skip
    """``forward`` of many batches at once, by traits: batches (rows) that launch the same kernels, their launches with
    columns in place of each size, and the entry of each batch in the columns (by ``Launch.scales_with``). ``by``: only
    launches that scale with this."""
    for traits, rows in batches.by_traits():
        alike = batches.take(rows)
        sizes, places = alike.sizes(traits, head_rows(deployment, alike))
        launches = _launches(PassContext(deployment, sizes), in_order=False)
        yield rows, [launch for launch in launches if by in ("", launch.scales_with)], places


def head_rows(deployment: Deployment, batch: Any) -> Any:
    """Rows of the head: of one batch, or a column of those of many."""
    if deployment.model.vision_encoder is not None:  # patches of an image are merged
        return -(-batch.tokens // deployment.model.vision_encoder.merge**2)
    if deployment.model.head != "lm":  # BERT's pooler: the first token of each sequence
        return batch.sequences
    return batch.sequences * batch.head_rows if deployment.stack.head_rows == "last" else batch.tokens


def _launches(ctx: PassContext, in_order: bool) -> Iterator[Launch]:
    model, layout = ctx.model, ctx.layout
    yield from _embedding(ctx)
    runs = (LayerRun(1, layer) for layer in model.expand()) if in_order else model.distinct_layers
    for each in runs:
        yield from _layer(ctx, each.layer, each.count)
    if layout.pp > 1:
        sent = ctx.tokens * model.hidden * ctx.precision.between_bytes
        yield ctx.collective("send_recv", layout.pp - 1, sent, layout.tp * layout.pp, world=None)
    if model.head == "lm":
        yield from _head(ctx)
    elif model.vision_encoder is not None:
        yield from _projector(ctx, model.vision_encoder)
    elif model.head == "pooler":  # BERT's, replicated on every GPU
        yield ctx.gemm("head", 1, ctx.sizes.rows, model.hidden, model.hidden)
        yield from ctx.elementwise("head", "tanh", rows=ctx.sizes.rows, cols=model.hidden)


def _embedding(ctx: PassContext) -> Iterator[Launch]:
    model, tokens = ctx.model, ctx.tokens
    if (
        model.vision_encoder is not None
    ):  # pixels of a patch in three colours; of layers with a window they come embedded
        if model.head == "projector":
            yield ctx.gemm("embedding", 1, tokens, model.hidden, 3 * model.vision_encoder.patch**2)
        return
    yield from ctx.elementwise("embedding", "embedding", tokens=tokens, hidden=model.hidden,
                         vocab=max(1, model.vocab // ctx.layout.tp))  # fmt: skip
    if model.learned_positions:
        added = 2 if model.token_types else 1  # positions, and BERT's segments
        yield from ctx.elementwise("embedding", "add", added, rows=tokens, cols=model.hidden)
    yield from ctx.tensor_parallel_sum(1)
    if model.embedding_norm:
        yield from ctx.elementwise("norms", model.embedding_norm, rows=tokens, cols=model.hidden)
    if model.joins_target:  # multi-token prediction: two norms, and a projection of both concatenated (eh_proj)
        yield from ctx.elementwise("norms", model.final_norm or "rmsnorm", 2, rows=tokens, cols=model.hidden)
        yield ctx.gemm("projections", 1, tokens, model.hidden, 2 * model.hidden)


def _layer(ctx: PassContext, layer: Layer, count: int) -> Iterator[Launch]:
    if layer.attention is not None:
        yield from _pre_norm(ctx, layer, count)
        yield from mixer_launches(ctx, layer.attention, count)
        yield from ctx.tensor_parallel_sum(count)
        yield from _post_norm(ctx, layer, count)
    if layer.mlp is not None:
        yield from _pre_norm(ctx, layer, count)
        if isinstance(layer.mlp, Experts):
            yield from experts(ctx, layer.mlp, count)
        else:
            yield from dense(ctx, layer.mlp, count, "mlp")
            yield from ctx.tensor_parallel_sum(count)
        yield from _post_norm(ctx, layer, count)


def _pre_norm(ctx: PassContext, layer: Layer, count: int) -> Iterator[Launch]:
    """The norm before attention or MLP with its residual, plain or one of the other sorts."""
    residual, sizes = ctx.model.residual, {"rows": ctx.tokens, "cols": ctx.model.hidden}
    if isinstance(residual, HyperConnections):
        yield ctx.launch(
            "residual", "mhc_pre", count, tokens=ctx.tokens, hidden=ctx.model.hidden, mult=residual.streams
        )
        yield from ctx.elementwise("norms", layer.norms.op, count, **sizes)
        return
    if isinstance(residual, BlockResiduals):  # on average half of the blocks are behind
        blocks = -(-ctx.model.layer_count // residual.layers)
        yield from ctx.elementwise(
            "residual", "pointwise", count, **sizes, reads=1.0 + blocks / 2, tensors=2.0 + blocks / 2
        )
    yield from ctx.norm(layer.norms.op, count)


def _post_norm(ctx: PassContext, layer: Layer, count: int) -> Iterator[Launch]:
    """A norm after attention or MLP (Gemma), and the update of residual streams."""
    if layer.norms.behind:
        yield from ctx.elementwise("norms", layer.norms.op, count, rows=ctx.tokens, cols=ctx.model.hidden)
    residual = ctx.model.residual
    if isinstance(residual, HyperConnections):
        yield ctx.launch(
            "residual", "mhc_post", count, tokens=ctx.tokens, hidden=ctx.model.hidden, mult=residual.streams
        )


def _projector(ctx: PassContext, tower: VisionEncoder) -> Iterator[Launch]:
    """Merged patches through two products, to tokens of the text part."""
    if ctx.model.head != "projector":
        return
    rows, width = ctx.sizes.rows, tower.hidden * tower.merge**2
    yield from ctx.elementwise("norms", tower.norm, 1, rows=ctx.tokens, cols=tower.hidden)
    yield replace(ctx.gemm("head", 1, rows, width, width), scales_with="sequences")
    yield from ctx.elementwise("head", ctx.activation("gelu"), 1, rows=rows, cols=width)
    yield ctx.gemm("head", 1, rows, tower.out_hidden, width)


def _head(ctx: PassContext) -> Iterator[Launch]:
    rows, vocab, hidden, tp = ctx.sizes.rows, ctx.model.vocab, ctx.model.hidden, ctx.layout.tp
    if ctx.model.final_norm:
        fused = {"residual": True} if ctx.stack.fused_residual else {}
        yield from ctx.elementwise("norms", ctx.model.final_norm, 1, rows=ctx.tokens, cols=hidden, **fused)
    yield ctx.launch("head", "gemm", 1, m=rows, n=-(-vocab // tp), k=hidden, dtype=ctx.precision.between)
    if tp > 1:
        gathered = ctx.collective("all_gather", 1, rows * vocab * ctx.precision.between_bytes, tp)
        yield replace(gathered, scales_with="sequences")
    yield from ctx.elementwise("sampling", "copy", 1, rows=rows, cols=vocab, to="fp32")
    yield from ctx.elementwise("sampling", "argmax", rows=rows, cols=vocab, dtype="fp32")
