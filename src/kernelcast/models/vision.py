"""The part of a model that reads images: a transformer over patches, and what projects its output to the text part."""

from __future__ import annotations

from dataclasses import dataclass

from kernelcast.models.layers import NormKind


@dataclass(frozen=True)
class VisionTower:
    """An encoder over patches of pixels. ``weights``: every number of it, the projection to the text part included."""

    hidden: int
    layers: int
    heads: int
    inter: int
    gated: bool  # of its feed-forward part
    activation: str
    norm: NormKind
    patch: int  # pixels of a side
    merge: int  # patches of a side that become one token of the text part
    out_hidden: int  # of a token of the text part
    weights: int
    image: int | None = None  # pixels of a side, where it is fixed
    full_layers: int | None = None  # layers whose attention is over all patches; None: all
    window: int | None = None  # pixels of a side that the others see

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def patches(self, side: int) -> int:
        """Of an image of so many pixels a side, in whole tokens of the text part."""
        return self.tokens(side) * self.merge**2

    def tokens(self, side: int) -> int:
        """That an image becomes for the text part."""
        return (-(-(self.image or side) // (self.patch * self.merge))) ** 2

    @property
    def window_patches(self) -> int:
        """That attention of layers with a window sees."""
        return ((self.window or 0) // self.patch) ** 2
