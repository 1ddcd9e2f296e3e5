"""A training step of a transformer on many GPUs: layout, precision, recomputation, and what a run costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import Question, argument, option
from kernelcast.errors import KernelcastError, unknown
from kernelcast.stacks.training_flags import value_called

if TYPE_CHECKING:
    from kernelcast.hardware import Gpu
    from kernelcast.models.architecture import Architecture
    from kernelcast.training.job import Lora, Recompute, TrainingJob, TrainingPrecision
    from kernelcast.training.layout import TrainingLayout
    from kernelcast.training.run import TrainingRun

_COUNT = re.compile(r"(\d+)(?:\s*[x×*]\s*(.+))?", re.IGNORECASE)  # 512xH100; 512
_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "rowwise": "fp8_current", "blockwise": "fp8_block",
            "mxfp8": "mxfp8", "nvfp4": "nvfp4"}  # fmt: skip
_SCALINGS = ("delayed", "current", "mxfp8", "blockwise", "subchannel", "nvfp4")
_TARGETS = {
    "linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2", "attention_qkv": "qkv",
    "attention_dense": "proj", "mlp_fc1": "fc1", "mlp_fc2": "fc2", "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv",
    "o_proj": "proj", "up_proj": "fc1", "gate_proj": "fc1", "down_proj": "fc2",
}  # fmt: skip
_MODULES = {"mlp_act_fn": "mlp_act", "attention": "core_attn"}
LONGEST = 4096  # tokens of a sequence by default
PER_STAGE = 4  # micro-batches of a rank by default, for each pipeline stage
_layout = partial(option, panel="Layout")
_memory = partial(option, panel="Memory")
_run = partial(option, panel="Run")
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


@dataclass(frozen=True)
class JobParameters(Question):
    """How a job is laid out and run; None: as the framework does by default."""

    micro_batch: Annotated[
        int | None, option(help="sequences of a micro-batch on a rank", unless_given=1, minimum=1)
    ] = None
    global_batch: Annotated[
        int | None,
        option(help="sequences of a step; default: 4 micro-batches a rank for each pipeline stage", minimum=1),
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
        option(metavar="NAME", help="framework: megatron, torchtitan, torchtitan_eager, fsdp, huggingface", unless_given="megatron",
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
    recompute: Annotated[
        str | None,
        _memory(metavar="MODE", help="none, selective, full, or modules with commas (core_attn, mlp, moe_act, …)",
                unless_given="none", reads=partial(_reads, "recompute")),
    ] = None  # fmt: skip
    recompute_modules: Annotated[
        str | None, _memory(metavar="NAME,..", help="of selective recomputation (core_attn)")
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
    packed: Annotated[bool | None, _tuning("--packed/--no-packed", help="sequences are packed; see --mean-length")] = (
        None
    )
    mean_length: Annotated[int | None, _tuning(help="tokens of each packed sequence", minimum=1)] = None


@dataclass(frozen=True, kw_only=True)
class TrainQuestion(JobParameters, shared.PredictorParameters):
    """A training step of a transformer; None: not given."""

    command: ClassVar[str] = "train"

    model: Annotated[
        Any,
        argument("MODEL", "a name of `kernelcast models`, or a config.json", type=str | None, values=shared.model_names,
                 annotation="str | Path | Architecture | None"),
    ] = None  # fmt: skip
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
    tokens: Annotated[float | None, _run(help="tokens of the whole training: days, dollars, energy")] = None
    prices: shared.PricesFile = None
    price: shared.Price = None
    price_kind: shared.PriceKind = "on_demand"
    checkpoint_every: Annotated[int | None, _run(help="steps between checkpoints", minimum=1)] = None
    checkpoint_s: Annotated[float, _run(help="seconds that each stops the training")] = 0.0
    mtbf: Annotated[float | None, _run(help="hours between failures of one GPU (Llama 3: 50700)")] = None
    restart_s: Annotated[float, _run(help="seconds from a failure to the next step")] = 600.0
    jitter: Annotated[float, _run(help="standard deviation of a GPU's time over its mean: the slowest counts")] = 0.0
    search: Annotated[bool, option(help="find the layout with the most tokens/s that fits")] = False
    set: shared.Changes = None
    power_cap: shared.PowerCap = None

    def answer(self) -> TrainingRun:
        """The step, and the run that it is of; with ``search``, of the fastest layout."""
        from kernelcast.training.job_memory import check_fits
        from kernelcast.training.transformer_step import forecast

        asked, unread = self._with_config()
        asked._check_run()
        if asked.search:
            return asked._searched(unread)
        job, filled = asked.job()
        try:
            step = forecast(job, asked._step_conditions)
        except KernelcastError:  # a buffer that no GPU holds
            check_fits(job)
            raise
        return asked._whole(step, filled, unread)

    def _searched(self, unread: tuple[str, ...]) -> TrainingRun:
        """The fastest of all layouts with the sizes that are given."""
        from kernelcast.search.training import SearchSpace, search_layouts

        model, gpu, count = self._model(), *self._gpus()
        if self.global_batch is None or count is None:
            raise KernelcastError("`search` compares layouts of one batch on so many GPUs: give `global_batch`, and "
                                  "`gpus` as in 64xH100")  # fmt: skip
        self.refuse(("dp", "schedule", "stage_layers", "layers_per_virtual_stage", "sequence_parallel",
                     "distributed_optimizer"), "`search` finds the layout")  # fmt: skip
        sizes = ("tp", "pp", "cp", "ep", "expert_tp", "virtual_stages", "micro_batch", "zero")
        space = {name: (getattr(self, name),) for name in sizes if getattr(self, name) is not None}
        filled: dict[str, Any] = {}
        found = search_layouts(
            model, gpu, count, global_batch=self.global_batch, base=self._base(), conditions=self._step_conditions,
            space=SearchSpace(**space, recompute=(self._recompute(),) if self.recompute else ()),
            **self._settings(model, filled),
        )  # fmt: skip
        layout = found.best.job.layout
        filled |= {name: getattr(layout, name) for name in ("dp", *sizes[:6]) if name not in space}
        return replace(self._whole(found.best, filled, unread), search=found)

    def _with_config(self) -> tuple[TrainQuestion, tuple[str, ...]]:
        """With what a config file sets, where no parameter does."""
        if self.config is None:
            return self, ()
        from kernelcast.app.questions.parameters import command_parameters
        from kernelcast.app.questions.training_config import read_config

        known = {parameter.name for parameter in command_parameters(TrainQuestion)}
        found, unread = read_config(self.config, known)
        count = found.pop("gpus", None)
        if count and self.gpus is not None and isinstance(self.gpus, str) and not _COUNT.fullmatch(self.gpus):
            found["gpus"] = f"{count}x{self.gpus}"
        given = {name.strip("`") for name in self.given(*known)} - {"gpus" if "gpus" in found else ""}
        return replace(self, **{name: value for name, value in found.items() if name not in given}), unread

    def _check_run(self) -> None:
        if self.tokens is not None and not 0 < self.tokens < float("inf"):
            raise KernelcastError(f"`tokens` is a number above 0, not {self.tokens:g}")
        if self.tokens is None:
            self.refuse(("prices", "price"), "prices are of a run: give `tokens` too")
        if self.mtbf is not None and self.checkpoint_every is None:
            raise KernelcastError("`mtbf` needs `checkpoint_every`: without checkpoints a failure loses the whole run")

    @property
    def _step_conditions(self) -> Any:
        from kernelcast.app.questions.trace import step_conditions

        return step_conditions(self.conditions)

    def job(self) -> tuple[TrainingJob, dict[str, Any]]:
        """The job, and the parameters that were filled in."""
        from kernelcast.training.job import TrainingJob

        model, gpu, count = self._model(), *self._gpus()
        filled: dict[str, Any] = {}
        layout = self._layout(count, model, filled)
        filled |= {} if self.micro_batch else {"micro_batch": self.value("micro_batch")}
        settings = self._settings(model, filled) | {"tp_overlap": bool(self.tp_overlap) and layout.tp > 1}
        return TrainingJob(model=model, gpu=gpu, layout=layout, micro_batch=self.value("micro_batch"),
                           recompute=self._recompute(), **settings), filled  # fmt: skip

    def _model(self) -> Architecture:
        if self.model is None:
            raise KernelcastError("which model? give MODEL, as in llama-3.1-8b")
        model = shared.resolve_model(self.model)
        if not model.generates:
            raise KernelcastError(f"{model.name} makes no tokens: `kernelcast trace --mode training` trains any model")
        if self.mtp and not model.mtp_layers:
            raise KernelcastError(f"{model.name} has no layers for multi-token prediction: leave out `mtp`")
        return model

    def _settings(self, model: Architecture, filled: dict[str, Any]) -> dict[str, Any]:
        """What no layout decides."""
        from kernelcast.stacks.training_stack import training_stack
        from kernelcast.training.job import Offload

        seq = self.seq or min(model.max_context or LONGEST, LONGEST)
        if model.learned_positions and seq > model.max_context:
            raise KernelcastError(f"`seq` {seq:,} is more than the {model.max_context:,} positions of {model.name}")
        filled |= {} if self.seq else {"seq": seq}
        filled |= {
            name: self.value(name) for name in ("precision", "stack", "optimizer") if getattr(self, name) is None
        }
        return {
            "seq": seq, "stack": training_stack(self.value("stack")), "precision": self._precision(),
            "optimizer": self.value("optimizer"), "lora": self._lora(), "tp_overlap": bool(self.tp_overlap),
            "offload": Offload(self.offload_layers or 0, bool(self.offload_optimizer)),
            "routing": self.value("routing"), "packed": bool(self.packed) or self.mean_length is not None,
            "mean_length": self.mean_length or 0, "cuda_graphs": self.value("cuda_graphs").replace("none", ""),
            "dispatcher": self.value("dispatcher"), "expert_overlap": bool(self.expert_overlap), "mtp": bool(self.mtp),
        }  # fmt: skip

    def _base(self) -> TrainingLayout:
        """Of a layout what no size decides."""
        from kernelcast.training.layout import TrainingLayout

        given: dict[str, Any] = {name: getattr(self, name) for name in ("cp_comm", "gpus_per_node", "between_nodes")
                                 if getattr(self, name) is not None}  # fmt: skip
        return TrainingLayout(overlap=self.overlap is not False, **given)

    def _gpus(self) -> tuple[Gpu, int | None]:
        """The GPU, and how many; None: as many as the layout says."""
        from kernelcast.hardware import Gpu

        if self.gpus is None:
            raise KernelcastError("which GPUs? give `gpus`, as in 512xH100")
        if isinstance(self.gpus, Gpu):
            return shared.resolve_gpu(self.gpus, self.set, self.power_cap), None
        text = str(self.gpus).strip()
        match = _COUNT.fullmatch(text)
        if match and not match[2]:
            raise KernelcastError(f"`gpus` says how many of which, as in {text}xH100, not {text}")
        name, count = (match[2].strip(), int(match[1])) if match else (text, None)
        if count is not None and not 1 <= count <= 1 << 20:
            raise KernelcastError(f"`gpus` is 1 to {1 << 20:,} GPUs, not {match[1][:20] if match else text}")
        return shared.resolve_gpu(name, self.set, self.power_cap), count

    def _layout(self, count: int | None, model: Architecture, filled: dict[str, Any]) -> TrainingLayout:
        sizes = {name: self.value(name) for name in ("tp", "pp", "cp", "ep", "expert_tp")}
        ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
        count = ranks * (self.dp or 1) if count is None else count
        dp = self.dp or max(1, count // ranks)
        if dp * ranks != count:
            raise KernelcastError(
                f"`tp` {sizes['tp']} x `pp` {sizes['pp']} x `cp` {sizes['cp']}" + (f" x `dp` {dp}" if self.dp else "")
                + f" do not make {count} GPUs: {'give ' if self.dp else ''}"
                + ("sizes whose product is the number of GPUs" if self.dp else f"{count} is no multiple of {ranks}")
            )  # fmt: skip
        micro = self.value("micro_batch")
        batch = self.global_batch or dp * micro * (PER_STAGE * sizes["pp"] if sizes["pp"] > 1 else 1)
        if batch % (dp * micro):
            raise KernelcastError(
                f"`global_batch` {batch} must be a multiple of `micro_batch` {micro} x dp {dp} = {micro * dp}"
            )
        filled |= {} if self.global_batch else {"global_batch": batch}
        filled |= {} if self.dp else {"dp": dp}
        zero = self._zero(dp * sizes["cp"])
        parallel = sizes["tp"] > 1 if self.sequence_parallel is None else self.sequence_parallel
        filled |= {"zero": zero} if self.zero is None and self.distributed_optimizer is None else {}
        more: dict[str, Any] = {} if self.stage_layers is None else {"stage_layers": _counts(self.stage_layers)}
        return replace(
            self._base(), **sizes, dp=dp, zero=zero, sequence_parallel=parallel and sizes["tp"] > 1,
            micro_batches=batch // (dp * micro), **self._schedule(model), **more,
        )  # fmt: skip

    def _zero(self, replicas: int) -> int:
        from kernelcast.stacks.training_stack import training_stack

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
        if self.gradients is None:
            return found
        size = {"bf16": 2.0, "fp32": 4.0}.get(self.gradients.lower())
        if size is None:
            raise unknown("format of gradients", self.gradients, ("bf16", "fp32"))
        return replace(found, gradient_bytes=size, reduce_bytes=size)

    def _recompute(self) -> Recompute:
        from kernelcast.training.job import Recompute

        mode, modules = self.value("recompute"), _mapped(_MODULES, self.recompute_modules or "")
        if mode not in ("none", "full", "selective"):
            modules, mode = _mapped(_MODULES, mode), "selective"
        if mode != "full":
            self.refuse(("recompute_method", "recompute_layers"), f"these are of `recompute` full, not {mode}")
        if mode == "selective":
            return Recompute("selective", modules=modules or ("core_attn",))
        if modules:
            raise KernelcastError(f"`recompute_modules` are of `recompute` selective, not {mode}")
        layers = self.recompute_layers or 0
        method: Any = self.recompute_method or ("block" if layers else "uniform")
        if method not in ("uniform", "block"):
            raise unknown("recompute_method", method, ("uniform", "block"))
        return Recompute(mode, method, layers)

    def _lora(self) -> Lora | None:
        from kernelcast.training.job import LORA_TARGETS, Lora

        if self.lora_rank is None:
            self.refuse(("lora_targets",), "targets are of LoRA: give `lora_rank` too")
            if not self.qlora:
                return None
        targets = _mapped(_TARGETS, self.lora_targets) if self.lora_targets else LORA_TARGETS
        return Lora(self.lora_rank or 16, targets, "int4" if self.qlora else "")

    def _whole(self, step: Any, filled: dict[str, Any], unread: tuple[str, ...]) -> TrainingRun:
        from kernelcast.hardware.prices import read_prices
        from kernelcast.training.run import Failures, TrainingRun

        prices = read_prices(self.prices, self.price or (), self.price_kind) if self.tokens else {}
        failures = Failures(
            self.checkpoint_every or 0, self.checkpoint_s, self.mtbf or 0.0, self.restart_s, self.jitter
        )
        return TrainingRun(step, self.tokens, prices.get(step.job.gpu.known_as), failures, filled, unread)


def _counts(text: str) -> tuple[int, ...]:
    """'4,4,3' as numbers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 6 for word in words):
        raise KernelcastError(f"`stage_layers` is a list of whole numbers with commas, as in 4,4,3, not {text!r}")
    return tuple(map(int, words))
