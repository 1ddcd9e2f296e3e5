"""A training job of a transformer: model, GPUs, parallelism, precision, recomputation, optimizer. What decides a step.

``passes.py`` turns a job into kernel launches of one micro-batch, ``transformer_step.py`` into the time of a step,
``job_memory.py`` into bytes of a rank. Any other PyTorch model is traced (``step.py``, ``scale.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.inference.deployment import check_heads
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Experts
from kernelcast.ops.dtypes import supports_dtype
from kernelcast.stacks.training_stack import TrainingStack, training_stack
from kernelcast.toml_folder import read_toml
from kernelcast.training.layout import TrainingLayout

PRECISIONS_FILE = Path(__file__).parent / "precisions.toml"
RECOMPUTE_MODULES = (
    "core_attn",
    "mla_up_proj",
    "moe_act",
    "mlp_act",
    "layernorm",
    "mlp",
    "moe",
    "shared_experts",
    "op",
)  # op: of a layer all but attention and half of its products (torchtitan's selective op)
OPTIMIZERS = ("adamw", "adamw8bit", "muon", "sgd", "sgd_momentum")
DISPATCHERS = ("alltoall", "deepep", "hybridep")
ROUTINGS = ("balanced", "expected", "random")
CUDA_GRAPHS = ("", "partial", "full")
LORA_TARGETS = ("qkv", "proj", "fc1", "fc2")  # attention in and out, MLP in and out (Megatron-Bridge's linear_…)
RecomputeMode = Literal["none", "full", "selective"]


@dataclass(frozen=True, kw_only=True)
class TrainingPrecision:
    """Number formats of a step: an entry of ``precisions.toml``. Formats of products are dtypes of ops."""

    id: str
    activations: str  # of everything but products: bf16, fp16 or fp32
    forward: str  # of the products of linear layers: forward pass,
    dgrad: str  # gradient of the input,
    wgrad: str  # gradient of the weight
    attention: str  # of the products of attention
    scaling: str = ""  # "", delayed, current, block, mx, nvfp4: decides the kernels that cast (stack's ``casts``)
    parameter_bytes: float = 2.0  # the weights that products read
    main_parameter_bytes: float = 4.0  # fp32 copy that the optimizer updates; 0: none
    gradient_bytes: float = 4.0  # as they are accumulated
    reduce_bytes: float = 4.0  # as they are sent between data parallel ranks
    gather_bytes: float = 2.0  # parameters as they are all-gathered
    state_bytes: float = 8.0  # both moments of Adam
    weight_copies: float = 0.0  # bytes a parameter of quantised copies kept beside the weights (both layouts)
    saved_bytes: float = 2.0  # of an input of a linear layer that is kept for wgrad
    activation_input_bytes: float = 0.0  # of what an MLP's activation reads, as it is kept; 0: as activations
    casts: Mapping[str, tuple[float, float, float]] = field(default_factory=dict, hash=False)
    # of an "input" and of a "gradient": bytes read and written for each number, and those of both behind a norm that
    # writes the narrow format itself
    source: str = ""


@dataclass(frozen=True)
class Recompute:
    """Megatron's --recompute-granularity, -method, -num-layers and -modules. ``full``: a layer's input is kept and the
    layer runs again in the backward pass (``layers`` of each stage; 0: all). ``selective``: only ``modules`` do."""

    mode: RecomputeMode = "none"
    method: Literal["uniform", "block"] = "uniform"  # uniform: one kept input for ``layers`` layers; block: the first
    layers: int = 0  # of ``full``; uniform: layers a kept input stands for (0: 1); block: layers recomputed (0: all)
    modules: tuple[str, ...] = ("core_attn",)  # of ``selective``

    def __post_init__(self) -> None:
        if self.mode not in get_args(RecomputeMode):
            raise unknown("recompute", self.mode, get_args(RecomputeMode))
        for name in self.modules:
            if name not in RECOMPUTE_MODULES:
                raise unknown("recompute module", name, RECOMPUTE_MODULES)
        if self.layers < 0:
            raise KernelcastError(f"recompute layers must be 0 or more, not {self.layers}")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters of a frozen base. ``base``: the dtype that its weights are stored in ("" as the job's
    precision; int4: QLoRA's NF4)."""

    rank: int
    targets: tuple[str, ...] = LORA_TARGETS
    base: str = ""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise KernelcastError(f"LoRA's rank must be 1 or more, not {self.rank}")
        for name in self.targets:
            if name not in LORA_TARGETS:
                raise unknown("LoRA target", name, LORA_TARGETS)


@dataclass(frozen=True)
class Offload:
    """What moves to the host's memory over PCIe or C2C: ``activations`` of so many layers of a stage, the optimizer."""

    activation_layers: int = 0
    optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A step processes ``global_batch`` sequences of ``seq`` tokens: ``layout.micro_batches`` micro-batches of
    ``micro_batch`` sequences on each of ``layout.dp`` ranks."""

    model: Architecture
    gpu: Gpu
    layout: TrainingLayout
    seq: int
    micro_batch: int = 1
    stack: TrainingStack = field(default_factory=lambda: training_stack("megatron"))
    precision: TrainingPrecision = field(default_factory=lambda: precision("bf16"))
    recompute: Recompute = Recompute()
    optimizer: str = "adamw"
    lora: Lora | None = None
    offload: Offload = Offload()
    tp_overlap: bool = False  # TP communication runs beside the products, chunk by chunk (user buffers, AsyncTP)
    routing: str = "balanced"  # how tokens choose experts: balanced (forced), expected (trained router), random
    packed: bool = False  # sequences are packed: attention inside each of ``mean_length`` tokens
    mean_length: int = 0  # tokens of a packed sequence; 0: ``seq``
    cuda_graphs: str = ""  # full: of the iteration; partial: all but experts with their exchange; "": none
    dispatcher: str = "alltoall"  # how tokens reach their experts: alltoall (NCCL), deepep or hybridep (NVIDIA's)
    expert_overlap: bool = False  # dispatch and combine run beside another micro-batch's kernels
    mtp: bool = False  # with the model's modules for multi-token prediction

    def __post_init__(self) -> None:
        for name in ("seq", "micro_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise KernelcastError(f"{name} must be a whole number of 1 or more, not {value!r}")
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        if self.cuda_graphs not in CUDA_GRAPHS:
            raise unknown("cuda_graphs", self.cuda_graphs, CUDA_GRAPHS)
        if self.dispatcher not in DISPATCHERS:
            raise unknown("dispatcher", self.dispatcher, DISPATCHERS)
        if self.routing not in ROUTINGS:
            raise unknown("routing", self.routing, ROUTINGS)
        if self.mean_length > self.seq:
            raise KernelcastError(f"mean_length {self.mean_length} is more than the seq {self.seq} it is packed into")
        if self.offload.activation_layers > self.model.layer_count:
            raise KernelcastError(
                f"offload_layers {self.offload.activation_layers} is more than the {self.model.layer_count} layers of "
                f"{self.model.name}"
            )
        self._check_formats()
        self._check_layout()

    def _check_formats(self) -> None:
        """Products that the GPU has; block scales of MXFP8 are of the tensor cores that multiply 4-bit formats."""
        formats, gpu = self.precision, self.gpu
        for name in dict.fromkeys((formats.forward, formats.dgrad, formats.wgrad, formats.attention)):
            if not supports_dtype(gpu, name):
                raise KernelcastError(f"precision {formats.id}: {gpu.id} does not multiply matrices of {name}")
        if formats.scaling == "mx" and not gpu.tensor_flops_per_s("mxfp4"):
            raise KernelcastError(f"precision {formats.id}: {gpu.id} has no block scales; fp8_current scales a tensor")

    def _check_layout(self) -> None:
        layout, name = self.layout, self.model.name
        if layout.pp * layout.virtual_stages > self.model.layer_count + 2:
            raise KernelcastError(
                f"pp {layout.pp} x virtual_stages {layout.virtual_stages} is more than the {self.model.layer_count} "
                f"layers of {name}, its embedding and its head"
            )
        for run in self.model.distinct_layers:
            if (mixer := run.layer.attention) is None:
                continue
            check_heads(mixer, layout.tp, name)
            if layout.cp_comm == "a2a" and getattr(mixer, "q_heads", 0) % (layout.tp * layout.cp):
                raise KernelcastError(
                    f"cp_comm a2a: tp {layout.tp} x cp {layout.cp} does not divide the heads of {name}"
                )
        if self.seq % (2 * layout.cp if layout.cp > 1 else 1):
            raise KernelcastError(
                f"seq {self.seq} must be a multiple of 2 x cp {layout.cp}: causal halves are balanced"
            )
        if layout.stage_layers is not None and sum(layout.stage_layers) != self.model.layer_count:
            raise KernelcastError(
                f"stage_layers {layout.stage_layers} must add up to the {self.model.layer_count} layers of {name}"
            )
        blocks = [run.layer.mlp for run in self.model.distinct_layers if isinstance(run.layer.mlp, Experts)]
        if layout.ep > 1 and not blocks:
            raise KernelcastError(f"ep {layout.ep}: {name} has no experts")
        for block in blocks:
            if block.experts % layout.ep:
                raise KernelcastError(f"ep {layout.ep} does not divide {block.experts} experts of {name}")

    @property
    def gpus(self) -> int:
        return self.layout.gpus

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.layout.dp * self.layout.micro_batches

    @property
    def tokens(self) -> int:
        """Of a step, on all GPUs."""
        return self.global_batch * self.seq

    @property
    def part_layers(self) -> tuple[int, ...]:
        """Layers of each part of the model, in order: as given, else equal ones; where they do not divide, the
        embedding and the loss count as a layer of the first and of the last part (Megatron-LM's
        --account-for-embedding-in-pipeline-split), else the first parts have one more."""
        layers, parts = self.model.layer_count, self.layout.parts
        if self.layout.stage_layers is not None:
            return self.layout.stage_layers
        for first, last in ((0, 0), (1, 1), (0, 1)):
            if (layers + first + last) % parts == 0 and parts > 1:
                each = (layers + first + last) // parts
                return (each - first, *[each] * (parts - 2), each - last)
        ends = 1 if parts > 2 else 0  # the first and the last are lighter by what else they do
        each, more = divmod(layers, parts)
        return tuple(each + (ends <= at < more + ends) for at in range(parts))

    def imbalance(self, block: Experts) -> float:
        """Load of the busiest rank's experts over the mean. Balanced by force: 1. Of a trained router the busiest
        expert has half more (with an auxiliary loss; Wang et al. 2024, arXiv 2408.15664), which the others of a rank
        even out. By chance: the largest of as many draws as ranks."""
        ranks = self.layout.ep
        if self.routing == "balanced" or ranks == 1:
            return 1.0
        if self.routing == "expected":
            return 1.0 + 0.5 / (block.experts / ranks) ** 0.5
        return 1.0 + (2 * math.log(ranks) / (self.rank_tokens / self.layout.tp * block.topk)) ** 0.5

    @property
    def reserved_bytes(self) -> float:
        """Of a GPU, beside what PyTorch allocates."""
        return self.stack.reserved_bytes + (self.stack.nccl_bytes if self.gpus > 1 else 0.0)

    @property
    def rank_tokens(self) -> int:
        """Of a micro-batch, on the GPUs of one tensor parallel group: context parallelism shards the sequence."""
        return self.micro_batch * self.seq // self.layout.cp


@functools.cache
def precisions() -> dict[str, TrainingPrecision]:
    """Every recipe of ``precisions.toml`` by its id; ``base`` names the recipe that has what one does not say."""
    raw = read_toml(PRECISIONS_FILE)

    def whole(name: str) -> dict[str, Any]:
        entry = dict(raw[name])
        base = entry.pop("base", None)
        if "casts" in entry:
            entry["casts"] = {what: tuple(values) for what, values in entry["casts"].items()}
        return {**whole(base), **entry} if base else entry

    return {name: TrainingPrecision(id=name, **{k: v for k, v in whole(name).items() if k != "names"}) for name in raw}


def precision(name: str) -> TrainingPrecision:
    """By its id, or by a name that Megatron, NeMo or Transformer Engine has for it (``names``)."""
    known = {alias: id for id, entry in read_toml(PRECISIONS_FILE).items() for alias in entry.get("names", ())}
    folded = name.lower().replace("-", "_")
    found = precisions().get(known.get(folded, folded))
    if found is None:
        raise unknown("precision", name, precision_names())
    return found


def precision_names() -> Sequence[str]:
    return list(precisions())
