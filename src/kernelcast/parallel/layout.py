"""A layout: how many GPUs share a layer, a batch, the experts and the depth of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, fabric

GPUS_PER_NODE = 8  # of HGX, DGX and most PCIe servers
BETWEEN_NODES = "ib_ndr"  # one 400 Gb/s port a GPU


@dataclass(frozen=True)
class Layout:
    """``tp``: GPUs that cut every layer. ``pp``: stages that follow one another. ``dp``: ranks that each hold attention
    whole and run their own part of the batch, while experts are shared (attention DP). ``ep``: parts that the experts
    are dealt out to; the other tp x dp / ep cut each expert. ``sequence_parallel``: activations between the cut layers
    are kept in parts (reduce-scatter and all-gather in place of all-reduce). ``micro_batches``: parts of a batch that
    follow one another through the stages; 1: the batch passes them whole, as engines run one static batch.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    micro_batches: int = 1
    gpus_per_node: int = GPUS_PER_NODE
    between_nodes: str = BETWEEN_NODES
    link: str | None = None  # between the GPUs of a node; None: their own, as it was measured

    def __post_init__(self) -> None:
        check_counts(self, "tp", "pp", "dp", "ep", "micro_batches", "gpus_per_node")
        if (self.tp * self.dp) % self.ep:
            raise KernelcastError(f"ep {self.ep} does not divide the {self.tp * self.dp} GPUs of tp x dp")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """GPUs that cut one expert."""
        return self.tp * self.dp // self.ep

    def near(self, gpu: Gpu, world: int) -> bool:
        """Whether this many neighbours are of one node."""
        return world <= self.gpus_per_node or one_domain(gpu)

    def fabric(self, gpu: Gpu, world: int) -> str | None:
        """The link of a group of this many neighbours; None: the GPU's own."""
        return self.link if self.near(gpu, world) else self.between_nodes


def check_counts(layout: Any, *names: str) -> None:
    """Refuse what is no number of GPUs or parts, and links between nodes that nobody knows."""
    for name in names:
        value = getattr(layout, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise KernelcastError(f"{name} must be a whole number of 1 or more, not {value!r}")
    for link in (layout.between_nodes, getattr(layout, "link", None)):
        if link is not None:
            fabric(link)


def one_domain(gpu: Gpu) -> bool:
    """NVLink reaches across trays (GB200 NVL72)."""
    return gpu.known_as.startswith("gb")
