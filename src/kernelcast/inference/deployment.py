"""A model on GPUs: its parallelism, and all else that decides which kernels run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast.end_to_end import Setting
from kernelcast.hardware import Gpu, fabric, fabric_type
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import (
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
from kernelcast.models.precision import Precision
from kernelcast.stacks import Stack

GPUS_PER_NODE = 8  # of HGX, DGX and most PCIe servers
BETWEEN_NODES = "ib_ndr"  # one 400 Gb/s port a GPU


@dataclass(frozen=True)
class Layout:
    """``tp``, ``pp``: tensor and pipeline parallel sizes. ``dp``: attention data parallel ranks, which share experts.
    ``ep``: expert parallel size; each expert is sharded over the other tp x dp / ep GPUs. ``sequence_parallel``:
    activations between layers are sharded (reduce-scatter and all-gather in place of all-reduce). ``micro_batches`` of
    a batch follow one another through the pipeline stages; 1: the batch passes them whole.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    micro_batches: int = 1
    gpus_per_node: int = GPUS_PER_NODE
    between_nodes: str = BETWEEN_NODES
    link: str | None = None  # between the GPUs of a node; None: the GPU's own link, as measured

    def __post_init__(self) -> None:
        check_counts(self, "tp", "pp", "dp", "ep", "micro_batches", "gpus_per_node")
        if (self.tp * self.dp) % self.ep:
            raise KernelcastError(f"ep {self.ep} does not divide the {self.tp * self.dp} GPUs of tp x dp")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """GPUs that an expert is sharded over."""
        return self.tp * self.dp // self.ep

    def near(self, gpu: Gpu, world: int) -> bool:
        """Whether a group of this many neighbours is on one node."""
        return world <= node_gpus(gpu, self.gpus_per_node)

    def fabric(self, gpu: Gpu, world: int) -> str | None:
        """The fabric of a group of this many neighbours; None: the GPU's own link."""
        return self.link if self.near(gpu, world) else self.between_nodes


def check_counts(layout: Any, *names: str) -> None:
    """Refuse sizes that are not positive whole numbers, and unknown fabrics between nodes."""
    for name in names:
        value = getattr(layout, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise KernelcastError(f"{name} must be a whole number of 1 or more, not {value!r}")
    for link in (layout.between_nodes, getattr(layout, "link", None)):
        if link is not None:
            fabric(link)


def node_gpus(gpu: Gpu, gpus_per_node: int) -> int:
    """GPUs that the GPU's own links join: of a server, or of a rack (GB200 NVL72) whose trays are nodes."""
    return max(gpu.link_gpus, gpus_per_node)


ROUTINGS = ("expected", "random", "balanced", "identical")
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
    # how tokens choose experts: as trained routers do, at random, evenly, or (sequences are copies of one) all alike
    routing: str = "expected"
    redundant: int = 0  # spare copies of hot experts, placed by load (EPLB)
    overlap: bool = False  # exchanges of one half of the batch run beside the other's work (two-batch overlap)

    def __post_init__(self) -> None:
        if not self.stack.runs_on(self.gpu.vendor):
            raise KernelcastError(
                f"{self.stack.name} runs on {self.stack.vendor.upper()} GPUs alone, and {self.gpu.name} is of "
                f"{self.gpu.vendor.upper()}: take `stack` vllm or sglang"
            )
        object.__setattr__(self, "stack", self.stack.in_pipeline(self.layout.pp))
        precision = Precision.of(self.model) if self.precision is None else self.precision
        object.__setattr__(self, "precision", precision.on(self.gpu))
        if self.routing not in ROUTINGS:
            raise unknown("routing", self.routing, ROUTINGS)
        if self.identical and self.layout.ep > 1:
            raise KernelcastError(
                "routing identical: copies of one sequence meet on the ranks of its experts; leave out ep"
            )
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
        for layer in (run.layer for run in self.model.distinct_layers):
            _check(layer, self)
        if self.layout.pp > self.model.layer_count:
            raise KernelcastError(f"pp {self.layout.pp} is more than the {self.model.layer_count} layers")

    @property
    def linked(self) -> bool:
        """Whether more than PCIe links the GPUs of a node."""
        return not fabric_type(self.layout.link or self.gpu.link_kind).startswith("pcie")

    def setting(self, workload: str) -> Setting:
        """What decides, beside the kernels, whether such a run was measured end to end."""
        return Setting.of(workload, self.gpu, self.stack.id, self.stack.release, self.model.model_class, self.layout,
                          self.precision.weights)  # fmt: skip

    @property
    def identical(self) -> bool:
        """All sequences are copies of one: each decode step has one token as often as there are sequences."""
        return self.routing == "identical" and not self.skew

    def routed(self, block: Experts, *, decodes: bool) -> dict[str, Any]:
        """The experts that are chosen from and how, as parameters of a call."""
        if self.identical and decodes:
            return {"experts": block.topk, "routing": "balanced"}
        skew = self.skew or (EXPECTED_SKEW if self.routing in ("expected", "identical") else 0.0)
        return {"experts": block.experts, **({"skew": skew} if skew else {"routing": self.routing})}

    def slots(self, experts: int) -> dict[str, Any]:
        """Spare copies beside so many experts, as parameters of a call."""
        return {"slots": experts + self.redundant, "eplb": True} if self.redundant else {}


def _check(layer: Layer, deployment: Deployment) -> None:
    tp, name = deployment.layout.tp, deployment.model.name
    if layer.attention is not None:
        check_heads(layer.attention, tp, name)
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


def check_heads(mixer: Mixer, tp: int, name: str) -> None:
    """Heads are not split; key-value heads are sharded or replicated evenly."""
    if isinstance(mixer, Parallel):
        check_heads(mixer.attention, tp, name)
        check_heads(mixer.recurrent, tp, name)
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
        raise KernelcastError(f"tp {tp} and the {mixer.kv_heads} key-value heads of {name}: neither divides the other")
    if isinstance(mixer, CompressedAttention) and mixer.o_groups % tp:
        raise KernelcastError(f"tp {tp} does not divide the {mixer.o_groups} groups of heads of {name}'s output")


_SMALL_BYTES, _LARGE_BYTES, _HUGE_BYTES = (size * 2**30 for size in (35, 70, 160))  # where engines' defaults change


def scheduler_defaults(stack: Stack, gpu: Gpu, offline: bool = False) -> dict[str, Any]:
    """A stack's default limits on this GPU, of a server or ``offline``; empty: it has no scheduler. Some are of GPUs of
    much memory; ``large_but``: which of them an engine does not count as such."""
    raw = dict(stack.scheduler)
    counted = not gpu.known_as.startswith(tuple(raw.pop("large_but", ())))
    size = gpu.dram_bytes
    endings = {
        "_small": size < _SMALL_BYTES,
        "_large": size >= _LARGE_BYTES and counted,
        "_huge": size >= _HUGE_BYTES,
        "_offline": offline,
    }
    for ending, holds in endings.items():
        for name in [name for name in raw if name.endswith(ending)]:
            value = raw.pop(name)
            if holds:
                raw[name.removesuffix(ending)] = value
    return raw


def step_tokens(stack: Stack, gpu: Gpu) -> int:
    """Default tokens of a prefill step; 0: all at once."""
    return int(scheduler_defaults(stack, gpu).get("max_num_batched_tokens", 0))
