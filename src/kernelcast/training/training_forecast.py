"""What a forecast of a training job's step says: its time and parts, throughput, utilisation, interval and support."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kernelcast.forecast.calls import Launch
from kernelcast.forecast.end_to_end import Setting
from kernelcast.forecast.predict_table import Times
from kernelcast.ops.dtypes import matmul_flops_per_s
from kernelcast.schedule import KernelTime
from kernelcast.training import job_flops
from kernelcast.training.job import TrainingJob
from kernelcast.training.job_memory import TrainingMemory, memory
from kernelcast.training.job_work import exchange_s
from kernelcast.training.predicted_step import PredictedStep

if TYPE_CHECKING:
    from kernelcast.training.transformer_step import Plan


@dataclass(frozen=True, kw_only=True)
class TrainingForecast(PredictedStep):
    """A step of a job: its time, where that goes (``parts_s`` of the slowest stage; they add up to it), and what the
    GPUs reach."""

    job: TrainingJob
    parts_s: dict[str, float]
    times: Times = field(repr=False, compare=False)
    plan: Plan = field(repr=False, compare=False)
    slowest: int = 0  # stage
    host_reach_s: tuple[float, ...] = ()  # how much less and more the GPU waits for a host as fast or slow as it may be

    @cached_property
    def time_s(self) -> float:
        return sum(self.parts_s.values())

    @cached_property
    def kernels(self) -> tuple[KernelTime, ...]:
        """Of the slowest stage, one step."""
        found = []
        for phase, one, times in self.plan.passes(self.slowest):
            for kernel in one.kernels:
                launch = Launch(kernel.part, kernel.call, kernel.count)
                found.append(KernelTime.of(phase, launch, self.times, times))
            for exchange in one.exchanges:
                for launch in exchange.launches:
                    share = exchange_s(launch, self.times) / self.times[launch.call].interval.value
                    each = Launch(exchange.part, launch.call, share)
                    found.append(KernelTime.of(phase, each, self.times, times))
        return tuple(found)

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Of the kernels, and of the host where the GPU waits for it."""
        low, high = self.kernel_spread
        if self.host_reach_s:  # where the GPU waits, its kernels take no part
            busy = 1 - self.parts_s["host"] / self.time_s
            reach = np.array(self.host_reach_s) / self.time_s
            low, high = np.hypot(np.array([low, high]) * busy, reach).tolist()
        return 1 - low, 1 + high

    @cached_property
    def setting(self) -> Setting:
        job = self.job
        workload = "training at scale" if job.gpus > 1 else "training step"
        workload += ", experts" * ("experts" in job.model.model_class)
        return Setting.of(workload, job.gpu, job.stack.id, job.stack.release, job.model.model_class, job.layout,
                          job.precision.id)  # fmt: skip

    @property
    def tokens_per_s(self) -> float:
        return self.job.tokens / self.time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.job.gpus

    @cached_property
    def model_flops(self) -> float:
        """Of a step on all GPUs, without recomputation; of causal attention the half that is seen."""
        return job_flops.model_flops(self.job)

    @property
    def model_tflops_per_gpu(self) -> float:
        return self.model_flops / self.time_s / self.job.gpus / 1e12

    @property
    def mfu(self) -> float:
        """The share of the step that the model's FLOPs would take at the peak of the products' format."""
        return self.model_tflops_per_gpu * 1e12 / matmul_flops_per_s(self.job.gpu, self.job.precision.forward)

    @property
    def hfu(self) -> float:
        """With what is computed again."""
        return self.mfu * (1 + job_flops.recomputed_share(self.job))

    @cached_property
    def memory(self) -> TrainingMemory:
        return memory(self.job)

    @property
    def fits(self) -> bool:
        return self.memory.fits
