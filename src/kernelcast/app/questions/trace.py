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
    from kernelcast.training.scale import ScaledStep
    from kernelcast.training.step import Step
    from kernelcast.training.tensor_parallel import TensorParallelPlan

NEEDS_TORCH = "tracing needs PyTorch (no GPU): pip install 'kernelcast[torch]'"


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
    host: Annotated[str, option(metavar="NAME", help="whose time to launch kernels", values=shared.host_names)] = (
        "server"
    )
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
    mode: Annotated[str, option(metavar="MODE", help="inference or training")] = "inference"
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

        conditions = step_conditions(self.conditions)
        trace = self.traced(self.model, self.batch, self.mode, self.cache, self.logits)
        more: Any = {name: getattr(self, name) for name in ("sequence_parallel", "schedule", "virtual_stages")}
        layout = TrainingLayout(**self.parallel_sizes, **more)
        if layout == TrainingLayout():
            return run_step(fuse(trace) if self.compile else trace, gpu, conditions, **self.launching)
        if self.compile:
            raise KernelcastError("`compile` is for one GPU: leave out `dp`, `tp`, `pp`, `ep`, `zero`, `micro_batches`")
        return scale(trace, gpu, layout, conditions, **self.launching, tp_plan=self._roles(trace))

    def _roles(self, trace: Trace) -> TensorParallelPlan | None:
        """How each module is sharded; None: by the names of public models, and by the model's own plan."""
        from kernelcast.training.tensor_parallel import TensorParallelPlan, read_plan

        if self.tp_plan is None:
            return None
        if self.tp_plan == "hf" and not trace.tp_plan:
            raise KernelcastError(f"`tp_plan` hf: {trace.name} has no plan of its own; give a file")
        return TensorParallelPlan.of(trace.tp_plan if self.tp_plan == "hf" else read_plan(Path(self.tp_plan)))


def step_conditions(conditions: Conditions) -> Conditions:
    """The same for kernels of a step, whose inputs the kernel before has just written."""
    from kernelcast.training.step import STEP

    return replace(conditions, input_rotation=STEP.input_rotation)


def trace_step(request: TraceRequest, optimizer: str, accumulate: int, attention: str, graph: bool) -> Trace:
    """The ops of a step of a model."""
    from kernelcast.tracing import trace as run
    from kernelcast.tracing.build import build

    built = build(request)
    trace_ = run(
        built.model, built.inputs, request.mode, optimizer=None if optimizer == "none" else optimizer,  # type: ignore[arg-type]
        loss=built.loss, accumulate=accumulate, attention=attention, graph=graph, name=built.name,
        precision=built.precision, dtype=built.dtype if built.precision == "autocast" else "bf16",
    )  # fmt: skip
    return replace(trace_, built=built.summary)
