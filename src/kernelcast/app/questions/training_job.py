"""Parameters of a training job: batch, layout, precision, memory, fine-tuning; by the names of other projects too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import Question, option
from kernelcast.errors import KernelcastError, unknown
from kernelcast.stacks.training_flags import value_called

if TYPE_CHECKING:
    from kernelcast.models.architecture import Architecture
    from kernelcast.training.job import Lora, Recompute, TrainingPrecision

_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "rowwise": "fp8_current", "blockwise": "fp8_block",
            "mxfp8": "mxfp8", "nvfp4": "nvfp4"}  # fmt: skip
_SCALINGS = ("delayed", "current", "mxfp8", "blockwise", "subchannel", "nvfp4")
_TARGETS = {
    "linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2", "attention_qkv": "qkv",
    "attention_dense": "proj", "mlp_fc1": "fc1", "mlp_fc2": "fc2", "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv",
    "o_proj": "proj", "up_proj": "fc1", "gate_proj": "fc1", "down_proj": "fc2",
}  # fmt: skip
_MODULES = {"mlp_act_fn": "mlp_act", "attention": "core_attn"}
_layout = partial(option, panel="Layout")
_memory = partial(option, panel="Memory")
_tuning = partial(option, panel="Fine-tuning")


def training_precision(text: str) -> str:
    """A recipe as Megatron, NeMo, Transformer Engine and torchtitan name it."""
    name = text.strip().lower().replace("-", "_")
    if name in _RECIPES:
        return _RECIPES[name]
    for scaling in _SCALINGS:  # bf16_with_fp8_current_scaling_mixed
        if "_with_" in name and scaling in name:
            return {"current": "fp8_current", "delayed": "fp8_delayed"}.get(scaling, _RECIPES.get(scaling, "fp8_block"))
    return name


def _reads(parameter: str, text: str) -> str:
    return str(value_called(parameter, text))


def _mapped(names: Mapping[str, str], text: str) -> tuple[str, ...]:
    words = [word for word in re.split(r"[,\s]+", text.strip()) if word]
    return tuple(dict.fromkeys(names.get(word, word) for word in words))


@dataclass(frozen=True, kw_only=True)
class JobParameters(Question):
    """How a job is laid out and run; None: as the framework does by default."""

    gpus: Annotated[
        Any,
        option(metavar="NxGPU", help="how many of which: 512xH100 (required)", type=str | None,
               annotation="str | int | Gpu | None"),
    ] = None  # fmt: skip
    config: Annotated[
        Path | None,
        option(metavar="FILE", help="YAML of Megatron-Bridge or NeMo, TOML of torchtitan, or a shell script with "
               "arguments of Megatron-LM; flags come over it"),
    ] = None  # fmt: skip
    search: Annotated[bool, option(help="find the layout with the most tokens/s that fits")] = False
    micro_batch: Annotated[
        int | None, option(help="sequences of a micro-batch on a rank", unless_given=1, minimum=1)
    ] = None
    global_batch: Annotated[
        int | None,
        option(help="sequences of a step; default: one micro-batch a rank, 4 for each stage of a pipeline", minimum=1),
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None, option(help="micro-batches of a rank in a step, in place of --global-batch", minimum=1)
    ] = None
    seq: Annotated[int | None, option(help="tokens of a sequence (4096, or the model's longest)", minimum=1)] = None
    precision: Annotated[
        str | None,
        option(metavar="RECIPE", help="bf16, fp8_delayed, fp8_current (fp8), fp8_block, mxfp8, nvfp4, fp16, fp32",
               unless_given="bf16", reads=training_precision,
               values=partial(shared.names_of, "training.job", "precision_names")),
    ] = None  # fmt: skip
    stack: Annotated[
        str | None,
        option(metavar="NAME", help="framework: megatron, torchtitan, torchtitan_eager, fsdp, huggingface",
               unless_given="megatron", reads=partial(_reads, "stack"),
               values=partial(shared.names_of, "stacks.training_stack", "training_stack_ids")),
    ] = None  # fmt: skip
    optimizer: Annotated[
        str | None,
        option(metavar="NAME", help="adamw, adamw8bit, muon, sgd, sgd_momentum", unless_given="adamw",
               reads=partial(_reads, "optimizer"), values=partial(shared.names_of, "training.job", "OPTIMIZERS")),
    ] = None  # fmt: skip
    tp: Annotated[int | None, _layout(help="tensor parallel size", unless_given=1, minimum=1)] = None
    pp: Annotated[int | None, _layout(help="pipeline parallel size", unless_given=1, minimum=1)] = None
    cp: Annotated[int | None, _layout(help="context parallel size", unless_given=1, minimum=1)] = None
    ep: Annotated[int | None, _layout(help="expert parallel size", unless_given=1, minimum=1)] = None
    expert_tp: Annotated[int | None, _layout(help="tensor parallel size of an expert", unless_given=1, minimum=1)] = (
        None
    )
    dp: Annotated[int | None, _layout(help="data parallel size; default: what the others leave", minimum=1)] = None
    virtual_stages: Annotated[
        int | None, _layout(help="parts of the model on a pipeline stage (interleaved)", minimum=1)
    ] = None
    layers_per_virtual_stage: Annotated[
        int | None, _layout(help="the same, by the layers of a part", minimum=1)
    ] = None  # fmt: skip
    schedule: Annotated[
        str | None,
        _layout(metavar="NAME", help="of the pipeline: 1f1b, interleaved, gpipe, zb-h1, dualpipe",
                reads=partial(_reads, "schedule"), values=partial(shared.names_of, "training.layout", "SCHEDULES")),
    ] = None  # fmt: skip
    stage_layers: Annotated[
        str | None, _layout(metavar="N,..", help="layers of each part of the pipeline, in order")
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        _layout("--sequence-parallel/--no-sequence-parallel", help="shard activations between tensor parallel layers; "
                "default: where --tp is above 1"),
    ] = None  # fmt: skip
    zero: Annotated[
        int | None,
        _layout(help="shard optimizer states (1), gradients (2), parameters (3: FSDP); default: the framework's",
                minimum=0),
    ] = None  # fmt: skip
    distributed_optimizer: Annotated[
        bool | None, _layout("--distributed-optimizer/--no-distributed-optimizer", help="the same as --zero 1")
    ] = None
    cp_comm: Annotated[
        str | None,
        _layout(metavar="NAME", help="context parallel attention: p2p, all_gather, a2a", unless_given="p2p",
                reads=partial(_reads, "cp_comm")),
    ] = None  # fmt: skip
    dispatcher: Annotated[
        str | None,
        _layout(metavar="NAME", help="of tokens to experts: alltoall, deepep, hybridep", unless_given="alltoall",
                reads=partial(_reads, "dispatcher")),
    ] = None  # fmt: skip
    overlap: Annotated[
        bool | None, _layout("--overlap/--no-overlap", help="gradients are sent during the backward pass (default)")
    ] = None
    tp_overlap: Annotated[
        bool | None, _layout("--tp-overlap/--no-tp-overlap", help="TP communication beside products")
    ] = None
    expert_overlap: Annotated[
        bool | None, _layout("--expert-overlap/--no-expert-overlap", help="dispatch beside another micro-batch")
    ] = None
    routing: Annotated[
        str | None,
        _layout(metavar="NAME", help="of tokens to experts: balanced, expected, random", unless_given="balanced"),
    ] = None
    gpus_per_node: Annotated[int | None, _layout(help="GPUs that a server has", unless_given=8, minimum=1)] = None
    between_nodes: Annotated[
        str | None,
        _layout(
            metavar="ID", help="link between nodes, a port a GPU", unless_given="ib_ndr", values=shared.fabric_names
        ),
    ] = None
    fp8_param_gather: Annotated[
        bool | None,
        _memory("--fp8-param-gather/--no-fp8-param-gather", help="fp8 weights are kept and gathered in 8 bits"),
    ] = None
    activation_func_fp8_input_store: Annotated[
        bool | None,
        _memory(
            "--activation-func-fp8-input-store/--no-activation-func-fp8-input-store",
            help="what an MLP's activation reads is kept in 8 bits",
        ),
    ] = None
    recompute: Annotated[
        str | None,
        _memory(metavar="MODE", help="none, selective, full, or modules with commas (core_attn, mlp, moe_act, …)",
                unless_given="none", reads=partial(_reads, "recompute")),
    ] = None  # fmt: skip
    recompute_modules: Annotated[
        str | None, _memory(metavar="NAME,..", help="of selective recomputation (core_attn; torchtitan: op)")
    ] = None
    recompute_method: Annotated[str | None, _memory(metavar="NAME", help="of full: uniform or block")] = None
    recompute_layers: Annotated[int | None, _memory(help="of full: layers of a stage (all)", minimum=0)] = None
    gradients: Annotated[str | None, _memory(metavar="FORMAT", help="accumulated and sent in bf16 or fp32")] = None
    offload_layers: Annotated[
        int | None, _memory(help="layers of a stage whose activations go to the host", minimum=0)
    ] = None
    offload_optimizer: Annotated[
        bool | None, _memory("--offload-optimizer/--no-offload-optimizer", help="to the host")
    ] = None
    cuda_graphs: Annotated[
        str | None,
        option(metavar="NAME", help="full: of the iteration; partial: all but experts; none", unless_given="none",
               reads=partial(_reads, "cuda_graphs")),
    ] = None  # fmt: skip
    mtp: Annotated[bool | None, option("--mtp/--no-mtp", help="train the layers for multi-token prediction too")] = None
    lora_rank: Annotated[int | None, _tuning(help="LoRA of this rank on a frozen model", minimum=1)] = None
    lora_targets: Annotated[str | None, _tuning(metavar="NAME,..", help="qkv, proj, fc1, fc2 (all)")] = None
    qlora: Annotated[bool, _tuning(help="the frozen model in 4 bits")] = False
    frozen: Annotated[
        str | None,
        _tuning(metavar="FORMAT", help="of the frozen weights: bf16, fp8, int4; default: as --precision keeps them",
                reads=shared.number_format),
    ] = None  # fmt: skip
    packed: Annotated[bool | None, _tuning("--packed/--no-packed", help="sequences are packed; see --mean-length")] = (
        None
    )
    mean_length: Annotated[int | None, _tuning(help="tokens of each packed sequence", minimum=1)] = None

    def _zero(self, replicas: int) -> int:
        from kernelcast.stacks.training_stack import training_stack

        if replicas == 1 and self.config is not None:  # of other GPUs than the file was written for
            return 0
        if self.zero is not None:
            return self.zero
        if replicas == 1 or self.distributed_optimizer is False:
            return 0
        return 1 if self.distributed_optimizer else training_stack(self.value("stack")).zero

    def _schedule(self, model: Architecture) -> dict[str, Any]:
        """Of a pipeline: its order, and the parts of the model on a stage."""
        pp, virtual = self.value("pp"), self.virtual_stages or 1
        if self.layers_per_virtual_stage:
            if self.virtual_stages:
                raise KernelcastError("`virtual_stages` and `layers_per_virtual_stage` say the same: give one")
            virtual = max(1, round(model.layer_count / pp / self.layers_per_virtual_stage))
        if pp == 1:
            self.refuse(("schedule", "virtual_stages", "stage_layers", "layers_per_virtual_stage"),
                        "these are of a pipeline, and `pp` is 1")  # fmt: skip
            return {}
        name = self.schedule or ("interleaved" if virtual > 1 else "1f1b")
        name = "interleaved" if name == "1f1b" and virtual > 1 else name
        return {"schedule": name, "virtual_stages": virtual}

    def _precision(self) -> TrainingPrecision:
        from kernelcast.training.job import precision

        found = precision(self.value("precision"))
        if self.fp8_param_gather:
            if not found.scaling or found.scaling == "nvfp4":
                raise KernelcastError(f"`fp8_param_gather` needs a `precision` of fp8, not {found.id}")
            found = replace(found, gather_bytes=1.0)
        if self.activation_func_fp8_input_store:
            found = replace(found, activation_input_bytes=1.0)
        if self.gradients is None:
            return found
        size = {"bf16": 2.0, "fp32": 4.0}.get(self.gradients.lower())
        if size is None:
            raise unknown("format of gradients", self.gradients, ("bf16", "fp32"))
        return replace(found, gradient_bytes=size, reduce_bytes=size)

    def _recompute(self) -> Recompute:
        from kernelcast.training.job import RECOMPUTE_MODULES, Recompute

        modes, mode = ("none", "full", "selective"), self.value("recompute")
        modules = _mapped(_MODULES, self.recompute_modules or "")
        if mode not in modes:
            modules, mode = _mapped(_MODULES, mode), "selective"
            for name in modules:
                if name not in RECOMPUTE_MODULES:
                    raise unknown("recompute", name, (*modes, *RECOMPUTE_MODULES))
        if mode != "full":
            self.refuse(("recompute_method", "recompute_layers"), f"these are of `recompute` full, not {mode}")
        if mode == "selective":
            of_stack = ("op",) if self.value("stack").startswith("torchtitan") else ("core_attn",)
            return Recompute("selective", modules=modules or of_stack)
        if modules:
            raise KernelcastError(f"`recompute_modules` are of `recompute` selective, not {mode}")
        layers = self.recompute_layers or 0
        method: Any = self.recompute_method or ("block" if layers else "uniform")
        if method not in ("uniform", "block"):
            raise unknown("recompute_method", method, ("uniform", "block"))
        return Recompute(mode, method, layers)

    def _cuda_graphs(self) -> str:
        name = self.value("cuda_graphs")
        if name not in ("none", "partial", "full"):
            raise unknown("cuda_graphs", name, ("none", "partial", "full"))
        return "" if name == "none" else str(name)

    def _lora(self) -> Lora | None:
        from kernelcast.training.job import LORA_TARGETS, Lora

        if self.lora_rank is None and not self.qlora:
            self.refuse(("lora_targets", "frozen"), "`lora_rank` is not given")
            return None
        if self.qlora and self.frozen not in (None, "int4"):
            raise KernelcastError(f"`qlora` has its frozen weights in int4, not {self.frozen}")
        if self.frozen not in (None, "bf16", "fp16", "fp8", "int4"):
            raise unknown("format of frozen weights", self.frozen, ("bf16", "fp16", "fp8", "int4"))
        targets = _mapped(_TARGETS, self.lora_targets or "all")
        targets = LORA_TARGETS if targets in (("all",), ("all-linear",)) else targets
        return Lora(self.lora_rank or 16, targets, "int4" if self.qlora else self.frozen or "")


def whole_numbers(text: str) -> tuple[int, ...]:
    """'4,4,3' as numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 6 for word in words):
        raise KernelcastError(f"`stage_layers` is a list of whole numbers with commas, as in 4,4,3, not {text!r}")
    return tuple(map(int, words))
