"""How a batch runs: its phases with their intervals, where the time goes, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kernelcast.calls import Call
from kernelcast.networks.forward import Deployment
from kernelcast.serving.memory import largest_batch
from kernelcast.serving.passes import POWER_LIMIT, Pass, drawn
from kernelcast.serving.workload import Workload
from kernelcast.span import NOTHING, Span
from kernelcast.support import support_of
from kernelcast.timeline import Memory, RestsOn, Share, Timeline, shares
from kernelcast.timeline.power import Energy, activities, energy_of, total
from kernelcast.times import Times


@dataclass(frozen=True)
class Inference:
    """How a batch runs. Every second of ``total`` is in one of ``shares``."""

    deployment: Deployment
    workload: Workload
    passes: tuple[Pass, ...] = field(repr=False)
    steps: int  # of decode
    memory: Memory
    times: Times = field(repr=False, compare=False)
    flops: float = field(repr=False, default=0.0)  # of matrix products, all GPUs together
    decode_bytes: float = field(repr=False, default=0.0)  # weights and cache that one GPU reads in all decode steps

    @cached_property
    def prefill(self) -> Span:
        return self._phase("prefill")

    @cached_property
    def decode(self) -> Span:
        return self._phase("decode")

    def _phase(self, name: str) -> Span:
        return sum((one.span * one.count for one in self.passes if one.phase == name), NOTHING)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        return shares(ran * one.count for one in self.passes for ran in one.ran)

    @cached_property
    def rests_on(self) -> RestsOn:
        """The measured kinds behind the kernels of all passes."""
        return RestsOn.of(ran * one.count for one in self.passes for ran in one.ran)

    @property
    def support(self) -> str:
        return support_of((share.time_s, share.support) for share in self.shares)

    @property
    def predictor(self) -> str:
        return self.times.predictor

    @cached_property
    def energy(self) -> Span | None:
        """Joules of all GPUs over the whole run, as one that follows others like it; None where no power model is."""
        return total(self.energies.values(), self.deployment.layout.gpus)

    @cached_property
    def energies(self) -> dict[str, Energy | None]:
        """Of the mean GPU, by phase."""
        activities([launch.call for one in self.passes for launch in one.run.launches], self.times)  # all at once
        return {phase: self._drawn(phase) for phase in dict.fromkeys(one.phase for one in self.passes)}

    def _drawn(self, phase: str) -> Energy | None:
        stages, launched, waits_s = self.deployment.layout.pp, dict[Call, float](), 0.0
        passes = [one for one in self.passes if one.phase == phase and one.count]
        for one in passes:
            share = one.count * one.run.parts / stages  # a stage has its part of the layers of every micro-batch
            limited_s = sum(ran.time_s for ran in one.ran if ran.part == POWER_LIMIT)
            waits_s += one.count * (one.span.time_s - limited_s)
            for launch in one.run.launches:
                launched[launch.call] = launched.get(launch.call, 0.0) + launch.count * share
        waits_s -= sum(count * self.times[call].span.time_s for call, count in launched.items())
        return energy_of(launched, self.times, waits_s, self._phase(phase))

    @cached_property
    def largest_batch(self) -> int:
        return largest_batch(self.deployment, self.workload)

    def timeline(self) -> Timeline:
        """One decode step, in the middle; the prefill where nothing is decoded."""
        decodes = [one for one in self.passes if one.phase == "decode" and one.run.deployment is self.deployment]
        return drawn(decodes[len(decodes) // 2] if decodes else self.passes[0], self.times)

    @property
    def total(self) -> Span:
        return self.prefill + self.decode

    @property
    def ttft_s(self) -> float:
        """Of the last request: when the prompts of the whole batch are read."""
        return self.prefill.time_s

    @cached_property
    def mean_ttft_s(self) -> float:
        """Over requests: one whose prompt is read in an early pass need not wait for the others."""
        passes = [one for one in self.passes if one.phase == "prefill"]
        own = [one.span.time_s for one in passes if one.run.deployment is self.deployment]
        drafted = sum(one.span.time_s for one in passes) - sum(own)  # the draft model reads prompts too
        ends = np.cumsum(own)
        return float(np.mean([ends[at] for at in self.workload.first_tokens()])) + drafted

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
    def told_tokens(self) -> int:
        """Those that joules and dollars are told of: written ones; of an encoder, read ones."""
        return sum(self.workload.inputs) if self.deployment.model.kind == "encoder" else self.output_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.total.time_s

    @property
    def mfu(self) -> float:
        """Of the peak of all GPUs, the share that the model's matrix products use over the whole time."""
        peak = self.deployment.layout.gpus * self.deployment.gpu.mfu_flops_per_s
        return self.flops / (self.total.time_s * peak)

    @property
    def bandwidth_use(self) -> float:
        """Of DRAM's peak, the share that weights and cache use in the decode steps."""
        if not self.decode.time_s:
            return 0.0
        return self.decode_bytes / self.decode.time_s / self.deployment.gpu.dram_bytes_per_s
