"""A training step on many GPUs: its time, where that goes, memory, and rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from kernelcast.hardware import Gpu
from kernelcast.networks.aten.flops import op_flops
from kernelcast.networks.traced import Trace
from kernelcast.training.memory import Memory
from kernelcast.training.pipeline import Timetable
from kernelcast.training.plan import Plan
from kernelcast.training.step import Kernel, Share, Step, interval
from kernelcast.training.streams import Run

# Parts of a stage's time, with what each is; they add up to the step.
PARTS = {
    "kernels": "kernels of the model",
    "optimizer": "kernels of the optimizer",
    "communication": "collectives of tensor and expert parallelism, which the layers wait for",
    "exposed": "waiting for data-parallel collectives",
    "links": "longer than with free links between stages",
    "bubble": "waiting for other stages",
    "slowed": "lost to collectives that run beside kernels",
    "gaps": "between kernels",
    "host": "waiting for the host to launch",
}


@dataclass(frozen=True)
class Piece:
    """One part of the model on a stage: its passes as they ran alone. ``forward`` and ``backward`` of one micro-batch;
    in ``last`` the gradients are sent. Without a pipeline ``step`` is the whole step, and those are empty."""

    units: tuple[int, ...]
    passes: dict[str, Run]
    kernels: dict[str, tuple[Kernel, ...]]


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline (the only one without): a rank of it."""

    index: int
    layers: int
    parts_s: dict[str, float]
    memory: Memory
    in_flight: int  # micro-batches whose activations it holds at once
    collectives_s: float  # of data parallelism, hidden or not
    pieces: tuple[Piece, ...] = field(repr=False)
    optimizer: Run | None = field(default=None, repr=False)
    optimizer_kernels: tuple[Kernel, ...] = field(default=(), repr=False)

    @property
    def time_s(self) -> float:
        return sum(self.parts_s.values())


@dataclass(frozen=True)
class ScaledStep:
    """A step of ``plan.gpus`` GPUs. The trace is one micro-batch of one data-parallel rank."""

    trace: Trace
    cut: Trace  # as one rank runs it
    gpu: Gpu
    plan: Plan
    time_s: float
    stages: tuple[Stage, ...]
    timetable: Timetable | None
    sample: Step  # one micro-batch of one rank, all stages one after another
    sent_bytes: float  # by a rank for data parallelism, in rings; the mean of the stages
    predictor: str

    @property
    def low_s(self) -> float:
        return self.time_s * self._spread[0]

    @property
    def high_s(self) -> float:
        return self.time_s * self._spread[1]

    @cached_property
    def _spread(self) -> tuple[float, float]:
        return interval(self.sample.kernels, self.sample.host, self.parts_s["host"] / self.time_s)

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Where the time goes, the mean of the stages; adds up to ``time_s``."""
        return {name: sum(stage.parts_s[name] for stage in self.stages) / len(self.stages) for name in PARTS}

    @property
    def bubble_share(self) -> float:
        return self.parts_s["bubble"] / self.time_s

    @property
    def exposed_s(self) -> float:
        """Communication that no kernel hides."""
        return self.parts_s["communication"] + self.parts_s["exposed"] + self.parts_s["links"]

    @property
    def overlapped_s(self) -> float:
        """Data-parallel collectives that kernels hide."""
        hidden = sum(s.collectives_s - s.parts_s["exposed"] for s in self.stages) / len(self.stages)
        return max(0.0, hidden)

    @property
    def tokens(self) -> int:
        return self.trace.tokens * self.plan.micro_batches * self.plan.dp

    @property
    def samples(self) -> int:
        return self.trace.samples * self.plan.micro_batches * self.plan.dp

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.plan.gpus

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.time_s

    @cached_property
    def flops(self) -> float:
        """Of the whole step on all GPUs, as the trace has them (what checkpointing computes twice counts twice)."""
        once = sum(op_flops(op) for op in self.trace.ops if op.kind == "kernel")
        return float(once) * self.plan.micro_batches * self.plan.dp

    @property
    def mfu(self) -> float:
        peak = self.gpu.tensor_flops_per_s("bf16") or self.gpu.tensor_flops_per_s("fp16")
        return self.flops / (self.time_s * self.plan.gpus * (peak or self.gpu.fma_flops_per_s("fp32")))

    @property
    def memory(self) -> Memory:
        """Of the fullest stage."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.used_bytes)

    @property
    def fits(self) -> bool:
        return all(stage.memory.fits for stage in self.stages)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Kernels of one micro-batch of one rank by phase and kind."""
        return self.sample.shares
