"""A model on GPUs: all that decides which kernels run, and whether the cut goes into whole parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.networks.architecture import Architecture
from kernelcast.networks.layers import (
    BlockSparseAttention,
    CompressedAttention,
    Experts,
    Kda,
    Layer,
    LinearAttention,
    Mamba2,
    Mixer,
    Parallel,
    SelfAttention,
)
from kernelcast.networks.precision import Precision
from kernelcast.parallel import Layout
from kernelcast.stacks import Stack

ROUTINGS = ("expected", "random", "balanced")
# How uneven trained routers are: the exponent of the power law that public campaigns draw tokens by. Of 0 (by chance),
# 1.01 and 1.2 it serves best on every fourth measured deployment (`kernelcast evaluate served`; docs/frontier.md).
EXPECTED_SKEW = 1.2


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs. ``precision`` not given: as the checkpoint is stored."""

    model: Architecture
    gpu: Gpu
    stack: Stack
    precision: Precision = field(default=None)  # type: ignore[assignment]  # never None once it is made
    layout: Layout = field(default_factory=Layout)
    skew: float = 0.0  # of tokens over experts: 0 as ``routing`` says, else the exponent of their power law
    routing: str = "expected"  # how tokens choose experts: as trained routers do, by chance alone, or dealt out evenly
    redundant: int = 0  # spare copies of hot experts, placed by load (EPLB)
    overlap: bool = False  # exchanges of one half of the batch run beside the other's work (two-batch overlap)

    def __post_init__(self) -> None:
        if self.precision is None:
            object.__setattr__(self, "precision", Precision.of(self.model))
        if self.routing not in ROUTINGS:
            raise unknown("routing", self.routing, ROUTINGS)
        if self.skew < 0:
            raise KernelcastError(f"skew must be 0 or more, not {self.skew:g}")
        if self.redundant < 0:
            raise KernelcastError(f"redundant experts must be 0 or more, not {self.redundant}")
        if self.redundant and self.layout.ep == 1:
            raise KernelcastError("redundant experts even out ranks that hold different ones: they need ep above 1")
        if self.overlap and (self.layout.dp == 1 or self.layout.ep == 1):
            raise KernelcastError(
                "two-batch overlap hides the exchange of tokens between ranks: it needs dp and ep above 1"
            )
        for layer in (run.layer for run in self.model.layer_kinds):
            _check(layer, self)
        if self.layout.pp > self.model.layer_count:
            raise KernelcastError(f"pp {self.layout.pp} is more than the {self.model.layer_count} layers")

    @property
    def routed(self) -> dict[str, Any]:
        """How tokens choose experts, in the words of a call."""
        skew = self.skew or (EXPECTED_SKEW if self.routing == "expected" else 0.0)
        return {"skew": skew} if skew else {"routing": self.routing}

    def slots(self, experts: int) -> dict[str, Any]:
        """Spare copies beside so many experts, in the words of a call."""
        return {"slots": experts + self.redundant, "eplb": True} if self.redundant else {}


def _check(layer: Layer, deployment: Deployment) -> None:
    tp, name = deployment.layout.tp, deployment.model.name
    if layer.attention is not None:
        _check_mixer(layer.attention, tp, name)
    if isinstance(layer.mlp, Experts):
        held = layer.mlp.experts + deployment.redundant
        if held % deployment.layout.ep:
            spare = f" and {deployment.redundant} redundant ones" if deployment.redundant else ""
            raise KernelcastError(f"ep {deployment.layout.ep} does not divide {layer.mlp.experts} experts{spare}")
        if layer.mlp.inter % deployment.layout.expert_tp:
            raise KernelcastError(
                f"{deployment.layout.expert_tp} GPUs an expert do not divide its width of {layer.mlp.inter}"
            )
    elif deployment.layout.ep > 1 and not any(isinstance(run.layer.mlp, Experts) for run in deployment.model.layers):
        raise KernelcastError(f"ep {deployment.layout.ep}: {name} has no experts")
    elif layer.mlp is not None and layer.mlp.inter % tp:
        raise KernelcastError(f"tp {tp} does not divide the MLP's width of {layer.mlp.inter}")


def _check_mixer(mixer: Mixer, tp: int, name: str) -> None:
    """Heads go to GPUs whole; key-value heads are cut evenly, or copied evenly."""
    if isinstance(mixer, Parallel):
        _check_mixer(mixer.attention, tp, name)
        _check_mixer(mixer.recurrent, tp, name)
        return
    if isinstance(mixer, LinearAttention):
        if mixer.key_heads % tp:
            raise KernelcastError(
                f"tp {tp} does not divide the {mixer.key_heads} key heads of {name}'s linear attention"
            )
        return
    heads = mixer.heads if isinstance(mixer, Kda | Mamba2) else mixer.q_heads
    if heads % tp:
        raise KernelcastError(f"tp {tp} does not divide the {heads} heads of {name}")
    if isinstance(mixer, SelfAttention | BlockSparseAttention) and mixer.kv_heads % tp and tp % mixer.kv_heads:
        raise KernelcastError(f"tp {tp} does not divide the {mixer.kv_heads} key-value heads of {name}, nor they it")
    if isinstance(mixer, CompressedAttention) and mixer.o_groups % tp:
        raise KernelcastError(f"tp {tp} does not divide the {mixer.o_groups} groups of heads of {name}'s output")
