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
    """The calls of one pass on one GPU, all stages of a pipeline together; layers that are alike once with their count,
    or ``in_order`` one after another."""
    return list(_calls(PassContext(deployment, batch.sizes(head_rows(deployment, batch))), in_order))


def forward_many(deployment: Deployment, batches: BatchColumns, by: str = ""
                 ) -> Iterator[tuple[Rows, list[Launch], dict[str, Rows]]]:  # fmt: skip
    """``forward`` of many batches at once. They come by form, with which the kernels that run are the same: the batches
    (rows) of one form, their launches with a column in place of each size, and where each batch finds its entry in the
    columns of launches that follow its tokens, its sequences or its lengths (``Launch.by``); ``by``: only these."""
    for form, rows in batches.forms():
        own = batches.take(rows)
        sizes, places = own.sizes(form, head_rows(deployment, own))
        launches = _calls(PassContext(deployment, sizes), in_order=False)
        yield rows, [launch for launch in launches if by in ("", launch.scales_with)], places


def head_rows(deployment: Deployment, batch: Any) -> Any:
    """Rows of the head: of one batch, or a column of those of many."""
    if deployment.model.vision_encoder is not None:  # patches of an image are merged
        return -(-batch.tokens // deployment.model.vision_encoder.merge**2)
    if deployment.model.head != "lm":  # BERT's pooler: the first token of each sequence
        return batch.sequences
    return batch.sequences * batch.head_rows if deployment.stack.head_rows == "last" else batch.tokens


def _calls(run: PassContext, in_order: bool) -> Iterator[Launch]:
    model, layout = run.model, run.layout
    yield from _embedded(run)
    runs = (LayerRun(1, layer) for layer in model.expand()) if in_order else model.distinct_layers
    for each in runs:
        yield from _layer(run, each.layer, each.count)
    if layout.pp > 1:
        sent = run.tokens * model.hidden * run.precision.between_bytes
        yield run.sent("send_recv", layout.pp - 1, sent, layout.tp * layout.pp, world=None)
    if model.head == "lm":
        yield from _head(run)
    elif model.vision_encoder is not None:
        yield from _projected(run, model.vision_encoder)
    else:  # BERT's pooler, whole on every GPU
        yield run.product("head", 1, run.sizes.rows, model.hidden, model.hidden)
        yield from run.small("head", "tanh", rows=run.sizes.rows, cols=model.hidden)


def _embedded(run: PassContext) -> Iterator[Launch]:
    model, tokens = run.model, run.tokens
    if (
        model.vision_encoder is not None
    ):  # pixels of a patch in three colours; of layers with a window they come embedded
        if model.head == "projector":
            yield run.product("embedding", 1, tokens, model.hidden, 3 * model.vision_encoder.patch**2)
        return
    yield from run.small("embedding", "embedding", tokens=tokens, hidden=model.hidden,
                         vocab=max(1, model.vocab // run.layout.tp))  # fmt: skip
    if model.learned_positions:
        added = 2 if model.token_types else 1  # positions, and BERT's segments
        yield from run.small("embedding", "add", added, rows=tokens, cols=model.hidden)
    yield from run.joined(1)
    if model.embedding_norm:
        yield from run.small("norms", model.embedding_norm, rows=tokens, cols=model.hidden)
    if model.joins_target:  # a module that predicts further tokens: two norms, and a product over both side by side
        yield from run.small("norms", model.final_norm or "rmsnorm", 2, rows=tokens, cols=model.hidden)
        yield run.product("projections", 1, tokens, model.hidden, 2 * model.hidden)


def _layer(run: PassContext, layer: Layer, count: int) -> Iterator[Launch]:
    if layer.attention is not None:
        yield from _before(run, layer, count)
        yield from mixer_launches(run, layer.attention, count)
        yield from run.joined(count)
        yield from _behind(run, layer, count)
    if layer.mlp is not None:
        yield from _before(run, layer, count)
        if isinstance(layer.mlp, Experts):
            yield from experts(run, layer.mlp, count)
        else:
            yield from dense(run, layer.mlp, count, "mlp")
            yield from run.joined(count)
        yield from _behind(run, layer, count)


def _before(run: PassContext, layer: Layer, count: int) -> Iterator[Launch]:
    """What a half of a layer reads: the residual's norm, or what stands in place of a plain residual."""
    residual, sizes = run.model.residual, {"rows": run.tokens, "cols": run.model.hidden}
    if isinstance(residual, HyperConnections):
        yield run.call("residual", "mhc_pre", count, tokens=run.tokens, hidden=run.model.hidden, mult=residual.streams)
        yield from run.small("norms", layer.norms.kind, count, **sizes)
        return
    if isinstance(residual, BlockResiduals):  # on average half of the blocks are behind
        blocks = -(-run.model.layer_count // residual.layers)
        yield from run.small("residual", "pointwise", count, **sizes, reads=1.0 + blocks / 2, tensors=2.0 + blocks / 2)
    yield from run.norm(layer.norms.kind, count)


def _behind(run: PassContext, layer: Layer, count: int) -> Iterator[Launch]:
    """A norm behind a half (Gemma), and what joins it with streams of the residual."""
    if layer.norms.behind:
        yield from run.small("norms", layer.norms.kind, count, rows=run.tokens, cols=run.model.hidden)
    residual = run.model.residual
    if isinstance(residual, HyperConnections):
        yield run.call("residual", "mhc_post", count, tokens=run.tokens, hidden=run.model.hidden, mult=residual.streams)


def _projected(run: PassContext, tower: VisionEncoder) -> Iterator[Launch]:
    """Merged patches through two products, to tokens of the text part."""
    if run.model.head != "projector":
        return
    rows, width = run.sizes.rows, tower.hidden * tower.merge**2
    yield from run.small("norms", tower.norm, 1, rows=run.tokens, cols=tower.hidden)
    yield replace(run.product("head", 1, rows, width, width), scales_with="sequences")
    yield from run.small("head", run.activation("gelu"), 1, rows=rows, cols=width)
    yield run.product("head", 1, rows, tower.out_hidden, width)


def _head(run: PassContext) -> Iterator[Launch]:
    rows, vocab, hidden, tp = run.sizes.rows, run.model.vocab, run.model.hidden, run.layout.tp
    if run.model.final_norm:
        fused = {"residual": True} if run.stack.fused_residual else {}
        yield from run.small("norms", run.model.final_norm, 1, rows=run.tokens, cols=hidden, **fused)
    yield run.call("head", "gemm", 1, m=rows, n=-(-vocab // tp), k=hidden, dtype=run.precision.between)
    if tp > 1:
        gathered = run.sent("all_gather", 1, rows * vocab * run.precision.between_bytes, tp)
        yield replace(gathered, scales_with="sequences")
    yield from run.small("sampling", "copy", 1, rows=rows, cols=vocab, to="fp32")
    yield run.call("sampling", "argmax", 1, rows=rows, cols=vocab, dtype="fp32", stack="torch")
