"""How a batch runs: its phases with their intervals, where the time goes, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass, field

from kernelcast.networks.forward import Deployment
from kernelcast.serving.memory import Memory
from kernelcast.serving.workload import Workload


@dataclass(frozen=True)
class Span:
    """Seconds, with the interval that 80% of cases should lie in."""

    time_s: float
    low_s: float
    high_s: float

    def __add__(self, other: Span) -> Span:
        """One after another, as wrong together."""
        return Span(self.time_s + other.time_s, self.low_s + other.low_s, self.high_s + other.high_s)

    def __mul__(self, times: float) -> Span:
        return Span(self.time_s * times, self.low_s * times, self.high_s * times)


NOTHING = Span(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Share:
    """A part of the model in one phase: its seconds, its kernels, and what binds most of its time."""

    phase: str  # prefill or decode
    part: str
    time_s: float
    kernels: float  # launched
    bound_by: str
    support: str


@dataclass(frozen=True)
class Inference:
    """How a batch runs. Every second of ``total`` is in one of ``shares``."""

    deployment: Deployment
    workload: Workload
    prefill: Span
    decode: Span
    steps: int  # of decode
    memory: Memory
    shares: tuple[Share, ...]
    predictor: str
    flops: float = field(repr=False, default=0.0)  # of matrix products, all GPUs together
    decode_bytes: float = field(repr=False, default=0.0)  # weights and cache that one GPU reads in all decode steps

    @property
    def total(self) -> Span:
        return self.prefill + self.decode

    @property
    def ttft_s(self) -> float:
        return self.prefill.time_s

    @property
    def step(self) -> Span:
        """The mean decode step; with speculation a step may give several tokens."""
        return self.decode * (1 / self.steps) if self.steps else NOTHING

    @property
    def tpot(self) -> Span:
        """Mean time of an output token after the first."""
        tokens = max(self.workload.outputs) - 1
        return self.decode * (1 / tokens) if tokens else NOTHING

    @property
    def output_tokens(self) -> int:
        return sum(self.workload.outputs)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.total.time_s

    @property
    def mfu(self) -> float:
        """Of the peak of all GPUs, the share that the model's matrix products use over the whole time."""
        layout, gpu = self.deployment.layout, self.deployment.gpu
        # fp16 where there is no bf16 (V100, T4), fp32 where there are no tensor cores
        peak = gpu.tensor_flops_per_s("bf16") or gpu.tensor_flops_per_s("fp16") or gpu.fma_flops_per_s("fp32")
        return self.flops / (self.total.time_s * layout.gpus * peak)

    @property
    def bandwidth_use(self) -> float:
        """Of DRAM's peak, the share that weights and cache use in the decode steps."""
        if not self.decode.time_s:
            return 0.0
        return self.decode_bytes / self.decode.time_s / self.deployment.gpu.dram_bytes_per_s
