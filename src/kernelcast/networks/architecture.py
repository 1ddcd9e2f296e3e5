"""A whole model as numbers: what it is made of, how many weights it has, and how many one token uses."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from kernelcast.networks.layers import Dense, Layer, LayerRun, NormKind, norm_weights

Head = Literal["lm", "pooler"]


@dataclass(frozen=True)
class Parameters:
    """Weights by part; parts add up to ``total``.

    Norms inside an attention block count as attention; the router and shared experts count as experts.
    """

    embedding: int = 0
    attention: int = 0
    mlp: int = 0
    experts: int = 0
    norms: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def __mul__(self, times: int) -> Parameters:
        return Parameters(*(times * part for part in dataclasses.astuple(self)))


@dataclass(frozen=True)
class Quantization:
    """How the published checkpoint stores its matrices, in Hugging Face's words (``quantization_config``)."""

    method: str  # quant_method: fp8, mxfp4, ...
    weight_block: tuple[int, ...] | None = None  # weight_block_size: rows and columns that share one scale
    not_converted: tuple[str, ...] = ()  # modules_to_not_convert: kept in the unquantised type
    weights: str | None = None  # the format of layers' matrices; None: one without kernels here
    experts: str | None = None  # of the experts, where it differs
    cache: str | None = None  # of keys and values, where the checkpoint has their scales
    unknown: str | None = None  # what has no kernels here


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
    final_norm: NormKind | None
    embedding_norm: NormKind | None = None  # over the sum of embeddings (BERT)
    learned_positions: int = 0  # rows of a learned position table; 0: rope
    token_types: int = 0  # rows of the segment table (BERT)
    head: Head = "lm"
    quantization: Quantization | None = None

    @property
    def layer_count(self) -> int:
        return sum(run.count for run in self.layers)

    def expand(self) -> Iterator[Layer]:
        """Every layer in order."""
        for run in self.layers:
            for _ in range(run.count):
                yield run.layer

    @cached_property
    def layer_kinds(self) -> tuple[LayerRun, ...]:
        """Each distinct layer once with how often it occurs: for sums, where order does not matter."""
        totals: dict[Layer, int] = {}
        for run in self.layers:
            totals[run.layer] = totals.get(run.layer, 0) + run.count
        return tuple(LayerRun(count, layer) for layer, count in totals.items())

    def _layer_parameters(self, active: bool) -> Parameters:
        total = Parameters()
        for run in self.layer_kinds:
            layer = run.layer
            mlp = layer.mlp.active_weights(self.hidden) if active else layer.mlp.weights(self.hidden)
            dense = isinstance(layer.mlp, Dense)
            one = Parameters(
                attention=layer.attention.weights(self.hidden),
                mlp=mlp if dense else 0,
                experts=0 if dense else mlp,
                norms=layer.norms.weights(self.hidden),
            )
            total += one * run.count
        return total

    def _outer_parameters(self) -> Parameters:
        rows = self.vocab + self.learned_positions + self.token_types
        norms = sum(norm_weights(kind, self.hidden) for kind in (self.final_norm, self.embedding_norm) if kind)
        if self.head == "pooler":
            head = self.hidden * self.hidden + self.hidden
        else:
            head = 0 if self.tied_embeddings else self.vocab * self.hidden
        return Parameters(embedding=rows * self.hidden, norms=norms, head=head)

    @cached_property
    def parameters(self) -> Parameters:
        """Every weight, counted once (tied embeddings are one table)."""
        return self._layer_parameters(active=False) + self._outer_parameters()

    @cached_property
    def active_parameters(self) -> Parameters:
        """The weights that one token uses: all but the experts it is not sent to.

        The embedding table counts whole, as most model cards count it (gpt-oss's card leaves it out).
        """
        return self._layer_parameters(active=True) + self._outer_parameters()


def run_lengths(layers: Iterable[Layer]) -> tuple[LayerRun, ...]:
    """Neighbours that are equal become one run."""
    return tuple(LayerRun(len(list(group)), layer) for layer, group in groupby(layers))
