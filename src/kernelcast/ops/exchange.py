"""What exchanges of tokens between expert-parallel ranks share: where a router sends them, and over which link.

A token goes to ``topk`` different experts, which lie on fewer ranks and still fewer nodes: libraries send it once to
each of those. Drawn by chance, 8 of 256 experts lie on 5.3 of 8 ranks on average (8 (1 - C(224, 8) / C(256, 8))); dealt
out evenly on all 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelcast.hardware import Gpu, fabric
from kernelcast.ops.base import Calls, Configuration, Conflicts, Kernel, choice, conflict, size
from kernelcast.ops.dtypes import DTYPES
from kernelcast.ops.routing import ROUTINGS
from kernelcast.ops.work import Array

_DTYPES = ("bf16", "fp16", "fp8", "fp8_block", "nvfp4")
_ROW_HEAD_BYTES = 16.0  # that travel with a row: where it is from, and for which experts (DeepEP's int4 of metadata)


class Exchange(Kernel):
    """Parameters of every exchange: tokens of one rank, routed to experts that lie on ``world`` GPUs."""

    family = "deepep"
    dtypes = _DTYPES
    batch_parameter = "tokens"

    tokens: int = size("tokens of one rank")
    hidden: int = size("model width")
    topk: int = size("experts a token goes to", high=65536)
    experts: int = size("experts of all ranks together", high=65536)
    world: int = size("GPUs that the experts lie on", low=2, high=8192)
    routing: str | None = choice("how tokens choose experts: random (default) or balanced", ROUTINGS, default=None)

    @classmethod
    def with_defaults(cls, words: Configuration, gpu: Gpu) -> dict[str, str | None]:
        return {**words, "routing": words["routing"] or "random"}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return conflict(
            calls["topk"] > calls["experts"], "topk {topk:g} is more than experts {experts:g}", calls.numbers
        ) or conflict(
            np.mod(calls["experts"], calls["world"]) != 0,
            "experts {experts:g} cannot be dealt out to world {world:g} evenly",
            calls.numbers,
        )


@dataclass(frozen=True)
class Sent:
    """Rows that leave one GPU for each of its tokens, and what a row weighs."""

    rows: Array  # of a token, its own GPU's share included
    near: Array  # of them over NVLink
    far: Array  # over the network between nodes
    row_bytes: Array

    def link_bytes(self, tokens: Array, link: str, gpu: Gpu) -> Array:
        """Of the link that takes longer, as bytes of ``link``: NVLink and the network work side by side. Without a link
        between nodes all is NVLink's."""
        near = tokens * self.near * self.row_bytes
        if not link:
            return near
        share = fabric(link, gpu).bytes_per_s / fabric(gpu.link_kind, gpu).bytes_per_s
        return np.maximum(tokens * self.far * self.row_bytes, near * share)


def row_bytes(calls: Calls) -> Array:
    """A token as it travels, with scales and head."""
    return calls["hidden"] * calls.dtype.act_bytes + _ROW_HEAD_BYTES


def sixteen_bits(name: str) -> float:
    """Bytes of an element before it is narrowed for its way."""
    return max(2.0, DTYPES[name].act_bytes)
