"""A whole model as numbers: what it is made of, how many weights it has, and how many one token uses."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from kernelcast.errors import KernelcastError
from kernelcast.models.layers import (
    BlockResiduals,
    Dense,
    Experts,
    HyperConnections,
    LatentAttention,
    Layer,
    LayerRun,
    NormOp,
    Norms,
    SelfAttention,
    norm_weights,
)
from kernelcast.models.vision import VisionEncoder

Head = Literal["lm", "pooler", "projector", "none"]  # projector: of images, to the text model


@dataclass(frozen=True)
class Parameters:
    """Weights by part; parts add up to ``total``.

    Norms inside an attention block count as attention; the router and shared experts count as experts; what mixes
    residual streams counts as norms.
    """

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    experts: int = 0
    norms: int = 0
    head: int = 0
    vision: int = 0  # the vision encoder, and what projects its output

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __mul__(self, times: int) -> Parameters:
        return Parameters(*(times * part for part in dataclasses.astuple(self)))


@dataclass(frozen=True)
class Quantization:
    """How the published checkpoint stores its matrices, in Hugging Face's terms (``quantization_config``)."""

    method: str  # quant_method: fp8, mxfp4, ...
    weight_block: tuple[int, ...] | None = None  # weight_block_size: rows and columns that share one scale
    not_converted: tuple[str, ...] = ()  # modules_to_not_convert: kept in the unquantised type
    weights: str | None = None  # the format of layers' matrices; None: no kernels here
    experts: str | None = None  # of the experts, where it differs
    mlp: str | None = None  # of dense blocks and shared experts, where it differs
    cache: str | None = None  # of the KV cache, where the checkpoint has its scales
    unknown: str | None = None  # the format that has no kernels here
    four_bit_bytes: float | None = None  # of a 4-bit number with its share of a scale, where the group size is known


@dataclass(frozen=True)
class Architecture:
    """A transformer: embeddings, layers in order, a last norm and a head."""

    name: str
    model_type: str
    kind: Literal["decoder", "encoder"]
    hidden: int
    vocab: int
    layers: tuple[LayerRun, ...]
    tied_embeddings: bool  # the head reuses the embedding's weights; it still costs a matrix product
    max_context: int  # tokens
    final_norm: NormOp | None
    embedding_norm: NormOp | None = None  # over the sum of embeddings (BERT)
    learned_positions: int = 0  # rows of a learned position table; 0: rope
    token_types: int = 0  # rows of the segment table (BERT)
    head: Head = "lm"
    quantization: Quantization | None = None
    norm_shift: bool = True  # of the last norm, where it is a layernorm
    residual: HyperConnections | BlockResiduals | None = None  # in place of a plain residual
    vision: VisionEncoder | None = None  # None: no images, or an encoder that is not known here
    mtp_layers: int = 0  # modules for multi-token prediction; not in ``parameters``, as model cards do not count them
    mtp_module: tuple[LayerRun, ...] = ()  # the layers of one of them
    joins_target: bool = False  # such a module itself (``draft_of``)
    vision_encoder: VisionEncoder | None = None  # of which these are the layers (``vision_encoders``)
    unread: tuple[str, ...] = ()  # fields of the config that hint at layers that are not modelled

    @property
    def generates(self) -> bool:
        """Whether it makes tokens: an encoder does not, nor does an embedding model, which has no head."""
        return self.kind == "decoder" and self.head == "lm"

    @property
    def layer_count(self) -> int:
        return sum(run.count for run in self.layers)

    @cached_property
    def model_class(self) -> str:
        """encoder, dense or experts; "latent" and "hybrid" where attention is, as engines run these by other paths."""
        if self.kind == "encoder":
            return "encoder"
        layers = [run.layer for run in self.layers]
        mixers = [layer.attention for layer in layers if layer.attention is not None]
        known: list[str] = []
        if any(isinstance(mixer, LatentAttention) for mixer in mixers):
            known.append("latent")
        elif any(not isinstance(mixer, SelfAttention) for mixer in mixers):
            known.append("hybrid")
        return " ".join([*known, "experts" if any(isinstance(layer.mlp, Experts) for layer in layers) else "dense"])

    def expand(self) -> Iterator[Layer]:
        """Every layer in order."""
        for run in self.layers:
            for _ in range(run.count):
                yield run.layer

    @cached_property
    def distinct_layers(self) -> tuple[LayerRun, ...]:
        """Each distinct layer once with how often it occurs: for sums, where order does not matter."""
        totals: dict[Layer, int] = {}
        for run in self.layers:
            totals[run.layer] = totals.get(run.layer, 0) + run.count
        return tuple(LayerRun(count, layer) for layer, count in totals.items())

    def _layer_parameters(self, active: bool) -> Parameters:
        total = Parameters()
        for run in self.distinct_layers:
            layer, mlp = run.layer, 0
            if layer.mlp:
                mlp = layer.mlp.active_weights(self.hidden) if active else layer.mlp.weights(self.hidden)
            residual = layer.sublayers * self.residual.weights(self.hidden) if self.residual else 0
            each = Parameters(
                attention=layer.attention.weights(self.hidden) if layer.attention else 0,
                norms=layer.norms.weights(self.hidden) + residual,
                **{"mlp" if isinstance(layer.mlp, Dense) else "experts": mlp},
            )
            total += each * run.count
        return total

    def _outer_parameters(self) -> Parameters:
        rows = self.vocab + self.learned_positions + self.token_types
        types = (self.final_norm, self.embedding_norm)
        norms = sum(norm_weights(norm, self.hidden, self.norm_shift) for norm in types if norm)
        norms += self.residual.last_weights(self.hidden) if self.residual else 0
        if self.joins_target:  # two norms and a product over the token's embedding and the target's state side by side
            joined = 2 * norm_weights(self.final_norm or "rmsnorm", self.hidden, self.norm_shift)
            return Parameters(mlp=2 * self.hidden * self.hidden, norms=norms + joined)
        if self.head == "pooler":
            head = self.hidden * self.hidden + self.hidden
        else:
            shared = self.tied_embeddings or (self.head == "none" and self.vision_encoder is None)
            head = 0 if shared else self.vocab * self.hidden
        return Parameters(embedding=rows * self.hidden, norms=norms, head=head)

    @cached_property
    def parameters(self) -> Parameters:
        """Every weight, counted once (tied embeddings are one table)."""
        vision = Parameters(vision=self.vision.weights if self.vision else 0)
        return self._layer_parameters(active=False) + self._outer_parameters() + vision

    @cached_property
    def active_parameters(self) -> Parameters:
        """The weights that one token of text uses: all but the experts that it is not routed to.

        The embedding table counts whole, as most model cards count it (gpt-oss's card leaves it out).
        """
        return self._layer_parameters(active=True) + self._outer_parameters()


def run_lengths(layers: Iterable[Layer]) -> tuple[LayerRun, ...]:
    """Neighbours that are equal become one run."""
    return tuple(LayerRun(len(list(group)), layer) for layer, group in groupby(layers))


def draft_of(model: Architecture) -> Architecture:
    """The module for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) as a draft model: it joins the
    token's embedding to the target's last hidden state (eh_proj), has a layer or two and a norm, and shares the
    target's embedding and head. Run again for each further token."""
    if not model.mtp_module:
        raise KernelcastError(f"{model.name} has no layers that predict further tokens; give another model as draft")
    name, layers = f"{model.name}'s prediction layer", model.mtp_module
    return replace(model, name=name, layers=layers, mtp_layers=0, mtp_module=(), joins_target=True, vision=None)


def vision_encoders(model: Architecture, side: int) -> list[tuple[Architecture, int, int]]:
    """The vision encoder for an image of so many pixels a side, as architectures: layers that attend to all patches,
    and those that see a window of them; each with the sequences and the patches per sequence that an image is."""
    vision = model.vision
    if vision is None:
        raise KernelcastError(f"{model.name} reads no images, or its vision encoder is not known here")
    patches, local = vision.patches(side), vision.window_patches
    windowed = vision.layers - vision.full_layers if vision.full_layers is not None and 0 < local < patches else 0
    mixer = SelfAttention(vision.heads, vision.heads, vision.head_dim, qkv_bias=True, out_bias=True, rope=True)
    layer = Layer(mixer, Dense(vision.inter, vision.gated, vision.activation, bias=True), Norms(vision.norm, 2))

    def encoder(layers: int, head: Head) -> Architecture:
        runs = (LayerRun(layers, layer),)
        return Architecture(f"{model.name}'s images", "vision", "encoder", vision.hidden, 1, runs, False, 1 << 40,
                            vision.norm, head=head, vision_encoder=vision)  # fmt: skip

    full = (encoder(vision.layers - windowed, "projector"), 1, patches)
    return [full, (encoder(windowed, "none"), -(-patches // local), local)] if windowed else [full]
