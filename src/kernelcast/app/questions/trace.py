"""A step of any PyTorch model: inference or training, on one GPU or many."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import Question, argument, option
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.forecast.conditions import Conditions
    from kernelcast.tracing.build import TraceRequest
    from kernelcast.tracing.traced import Trace
    from kernelcast.training.layout import TrainingLayout
    from kernelcast.training.scale import ScaledStep
    from kernelcast.training.step import Step
    from kernelcast.training.tensor_parallel import TensorParallelPlan

UNMASKED = (
    "a graph of attention without a mask, as with attn_implementation='flash_attention_2': transformers' sdpa builds a "
    "mask while a stream is captured, for which attention is slower (of encoders: the math backend's)"
)
NEEDS_TORCH = "tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'"


def run_mode(text: str) -> str:
    """A mode as people write it: train, eval."""
    return {"train": "training", "infer": "inference", "eval": "inference"}.get(text.strip().lower(), text)


@dataclass(frozen=True)
class StepParameters(Question):
    """A model's step, and how it is parallelised; None: not given."""

    panel: ClassVar[str | None] = "Training step"

    seq: Annotated[int | None, option(help="tokens of each sample (512), or samples of sound (160000)")] = None
    dtype: Annotated[
        str | None,
        option(metavar="FORMAT", help="bf16, fp16, fp32 or tf32; default: the model's", reads=shared.number_format),
    ] = None
    precision: Annotated[
        str | None, option(metavar="NAME", help="pure, mixed (fp32 master weights and moments) or autocast")
    ] = None
    image_size: Annotated[int | None, option(help="pixels of an image's side; default: the config's")] = None
    optimizer: Annotated[str, option(metavar="NAME", help="adamw, adamw-foreach, adam, sgd, sgd-momentum, none")] = (
        "adamw"
    )
    accumulate: Annotated[int, option(help="gradient accumulation steps")] = 1
    attention: Annotated[str, option(metavar="NAME", help="fused: one kernel; math: matrix products and softmax")] = (
        "fused"
    )
    checkpointing: Annotated[
        bool, option(help="activation checkpointing: recompute in the backward pass (Hugging Face models)")
    ] = False
    graph: Annotated[bool, option(help="kernels replay from a CUDA graph")] = False
    host: Annotated[
        str | None,
        option(
            metavar="NAME",
            help="whose time to launch kernels; default: a server of the GPU's years",
            values=shared.host_names,
        ),
    ] = None
    dp: Annotated[int, option(help="data parallel size; --batch is per rank")] = 1
    tp: shared.Tp = 1
    pp: shared.Pp = 1
    ep: Annotated[int, option(help="expert parallel size, of the data parallel ranks")] = 1
    zero: Annotated[int, option(help="ZeRO stage: 1 shards optimizer states, 2 gradients, 3 parameters")] = 0
    micro_batches: Annotated[int, option(help="micro-batches of --batch a step")] = 1

    @property
    def parallel_sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dp", "tp", "pp", "ep", "zero", "micro_batches")}

    @property
    def launching(self) -> dict[str, Any]:
        """What a step's schedule takes."""
        return {"tf32": self.dtype == "tf32", "graph": self.graph, "on": self.host}

    def check(self, mode: str) -> None:
        """Refuse options that contradict each other, before the model is traced."""
        from kernelcast.schedule import host
        from kernelcast.tracing.run import check_options

        optimizer = None if self.optimizer == "none" else self.optimizer
        check_options(mode, self.accumulate, self.attention, optimizer, self.precision or "pure", "bf16")
        if self.host:
            host(self.host)
        parallel = self.given(*self.parallel_sizes)
        if mode == "inference" and (given := [*parallel, *self.given("accumulate")]):
            raise KernelcastError(f"{given[0]} is of training: add `mode` training, or ask kernelcast infer")
        if parallel and self.accumulate > 1:
            raise KernelcastError(f"`accumulate` does not go with {parallel[0]}: give `micro_batches`")

    def traced(self, model: str, batch: int, mode: str, cache: bool | None = None, logits: str | None = None) -> Trace:
        """The ops of the step."""
        from kernelcast.tracing.build import TraceRequest

        return trace_step(
            TraceRequest(model, batch, self.seq, self.dtype, mode, self.checkpointing, self.precision, cache, logits,
                  self.image_size),
            self.optimizer, self.accumulate, self.attention, self.graph,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TraceQuestion(StepParameters, shared.PredictorParameters):
    """A step of a model on a GPU."""

    command: ClassVar[str] = "trace"

    model: Annotated[
        str,
        argument(
            "MODEL", "FILE.py:function that gives (model, inputs), a config.json, or a name", values=shared.model_names
        ),
    ]
    gpu: shared.GpuName = None
    mode: Annotated[
        str,
        option(metavar="MODE", help="inference or training", reads=run_mode),
    ] = "inference"
    batch: Annotated[int, option(help="samples")] = 1
    cache: Annotated[bool | None, option("--cache/--no-cache", help="a prefill that fills a KV cache, or none")] = None
    logits: Annotated[str | None, option(metavar="WHICH", help="all or last; of causal inference the last")] = None
    compile: Annotated[bool, option(help="fuse chains of element-wise ops and reductions, as torch.compile does")] = (
        False
    )
    tp_plan: Annotated[
        str | None, option(metavar="FILE", help="TOML or JSON: module -> colwise, rowwise, ...; hf: the model's plan")
    ] = None
    schedule: Annotated[str, option(metavar="NAME", help="pipeline schedule: gpipe, 1f1b or interleaved")] = "1f1b"
    virtual_stages: Annotated[int, option(help="virtual pipeline stages of a rank, interleaved")] = 1
    sequence_parallel: shared.SequenceParallel = False
    set: shared.Changes = None
    power_cap: shared.PowerCap = None

    def answer(self) -> Step | ScaledStep:
        """The step, forecast: on one GPU, or on those of the parallel layout."""
        if self.gpu is None:
            raise KernelcastError("which GPU? give `gpu`, as in h200_sxm")
        if importlib.util.find_spec("torch") is None:
            raise KernelcastError(NEEDS_TORCH)
        gpu = shared.resolve_gpu(self.gpu, self.set, self.power_cap)
        from kernelcast.tracing.fusion import fuse
        from kernelcast.training.layout import TrainingLayout
        from kernelcast.training.scale import scale
        from kernelcast.training.step import run_step
        from kernelcast.training.tensor_parallel import TensorParallelPlan

        conditions = step_conditions(self.conditions)
        more: Any = {name: getattr(self, name) for name in ("sequence_parallel", "schedule", "virtual_stages")}
        layout = TrainingLayout(**self.parallel_sizes, **more)
        self.check(self.mode)
        plan = self._tp_plan()
        self._check_sizes(layout)
        trace = self.traced(self.model, self.batch, self.mode, self.cache, self.logits)
        if layout == TrainingLayout():
            return run_step(fuse(trace) if self.compile else trace, gpu, conditions, **self.launching)
        if self.tp_plan == "hf" and not trace.tp_plan:
            raise KernelcastError(f"`tp_plan` hf: {trace.name} has no plan of its own; give a file")
        if self.tp_plan == "hf":
            plan = TensorParallelPlan.of(trace.tp_plan)
        return scale(trace, gpu, layout, conditions, **self.launching, compiled=self.compile, tp_plan=plan)

    def _check_sizes(self, layout: TrainingLayout) -> None:
        """Refuse a layout that a decoder of this config cannot have: large models take a minute to trace."""
        from kernelcast.models.catalogue import config

        if layout.gpus == 1 or ".py" in self.model:
            return
        name, raw = config(self.model)
        text = raw.get("text_config") or raw
        layers, heads = (
            next((text[key] for key in keys if isinstance(text.get(key), int)), 0)
            for keys in (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
        )
        if raw.get("is_encoder_decoder"):
            return
        if layers and layout.parts > layers + 2:
            parts = "`pp` x `virtual_stages`" if layout.virtual_stages > 1 else "`pp`"
            raise KernelcastError(
                f"{parts} {layout.parts} exceeds the {layers} layers of {name}, its embedding and its head"
            )
        if heads and heads % layout.tp and self.tp_plan is None:
            raise KernelcastError(f"`tp` {layout.tp} does not divide the {heads} heads of {name}")

    def _tp_plan(self) -> TensorParallelPlan | None:
        """How each module is sharded by a file; None: by the names of public models, and by the model's own plan."""
        from kernelcast.training.tensor_parallel import TensorParallelPlan, read_plan

        if self.tp_plan is not None and self.tp == 1:
            raise KernelcastError("`tp_plan` shards over the `tp` ranks: give `tp` of 2 or more")
        if self.schedule != "1f1b" and self.pp == 1:
            raise KernelcastError(f"`schedule` {self.schedule} orders the stages of a pipeline: give `pp` of 2 or more")
        return None if self.tp_plan in (None, "hf") else TensorParallelPlan.of(read_plan(Path(self.tp_plan)))


def step_conditions(conditions: Conditions) -> Conditions:
    """The same for kernels of a step, whose inputs the kernel before has just written."""
    from kernelcast.training.step import STEP

    return replace(conditions, input_rotation=STEP.input_rotation)


def trace_step(request: TraceRequest, optimizer: str, accumulate: int, attention: str, graph: bool) -> Trace:
    """The ops of a step of a model. ``graph``: its kernels replay from a CUDA graph, the same as eagerly."""
    from kernelcast.tracing import trace as run
    from kernelcast.tracing.build import build

    built = build(request)
    trace_ = run(
        built.model, built.inputs, request.mode, optimizer=None if optimizer == "none" else optimizer,  # type: ignore[arg-type]
        loss=built.loss, accumulate=accumulate, attention=attention, name=built.name,
        precision=built.precision, dtype=built.dtype if built.precision == "autocast" else "bf16",
    )  # fmt: skip
    notes = (*trace_.notes, UNMASKED) if graph and trace_.unmasked else trace_.notes
    return replace(trace_, built=built.summary, notes=notes)
