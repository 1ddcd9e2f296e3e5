"""How a batch runs: its phases with their intervals, where the time goes, and what follows from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kernelcast.calls import Call
from kernelcast.energy import power_model
from kernelcast.kernels.work import Array
from kernelcast.networks.forward import Deployment
from kernelcast.serving.answers import Answers
from kernelcast.serving.memory import largest_batch
from kernelcast.serving.passes import POWER_LIMIT, Pass, drawn
from kernelcast.serving.workload import Workload
from kernelcast.shown import Shown
from kernelcast.span import Span
from kernelcast.support import support_of
from kernelcast.timeline import Memory, RestsOn, Share, Timeline
from kernelcast.timeline.power import Energy, activities, energy_of, total
from kernelcast.times import Times


@dataclass(frozen=True)
class Inference(Shown):
    """How a batch runs: one entry of the answers of its deployment. Every second of ``total`` is in one of
    ``shares``."""

    deployment: Deployment
    workload: Workload
    prefill: Span
    decode: Span
    steps: int  # of decode
    memory: Memory
    answers: Answers = field(repr=False, compare=False)
    at: int = field(repr=False, compare=False)

    @classmethod
    def of(cls, answers: Answers, at: int) -> Inference:
        prefill, decode = (_span(column, at) for column in (answers.prefill_s, answers.decode_s))
        memory, steps = answers.memory_of(at), int(answers.steps[at])
        return cls(answers.deployment, answers.workloads[at], prefill, decode, steps, memory, answers, at)

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Each different pass once, with how many it stands for."""
        return self.answers.passes_of(self.at)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        return self.answers.shares.of(self.at)

    @cached_property
    def rests_on(self) -> RestsOn:
        """The measured kinds behind the kernels of all passes."""
        return RestsOn.of(ran * one.count for one in self.passes for ran in one.ran)

    @property
    def support(self) -> str:
        return support_of((share.time_s, share.support) for share in self.shares)

    @property
    def times(self) -> Times:
        assert self.answers.times is not None  # laid out
        return self.answers.times

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
        learn_activities([self])
        return {phase: self._drawn(phase) for phase in dict.fromkeys(one.phase for one in self.passes)}

    def _drawn(self, phase: str) -> Energy | None:
        stages, launched, waits_s = self.deployment.layout.pp, dict[Call, tuple[float, float]](), 0.0
        for one in (one for one in self.passes if one.phase == phase and one.count):
            share = one.count * one.run.parts / stages  # a stage has its part of the layers of every micro-batch
            limited_s = sum(ran.time_s for ran in one.ran if ran.part == POWER_LIMIT)
            waits_s += one.count * (one.span.time_s - limited_s)
            for launch, ran in zip(one.run.launches, one.ran, strict=False):  # what is beside kernels comes last
                count, _ = launched.get(launch.call, (0.0, 0.0))
                launched[launch.call] = count + launch.count * share, ran.time_s / ran.launches
        waits_s -= sum(count * seconds for count, seconds in launched.values())
        return energy_of(launched, self.times, waits_s, self.prefill if phase == "prefill" else self.decode)

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
        return self.answers.mean_ttft_s(self.at)

    @property
    def step(self) -> Span:
        return _span(self.answers.step_s, self.at)

    @property
    def tpot(self) -> Span:
        return _span(self.answers.tpot_s, self.at)

    @property
    def output_tokens(self) -> int:
        return int(self.answers.output_tokens[self.at])

    @property
    def told_tokens(self) -> int:
        """Those that joules and dollars are told of: written ones; of an encoder, read ones."""
        return sum(self.workload.inputs) if self.deployment.model.kind == "encoder" else self.output_tokens

    @property
    def tokens_per_s(self) -> float:
        return float(self.answers.tokens_per_s[self.at])

    @property
    def flops(self) -> float:
        return float(self.answers.flops[self.at])

    @property
    def decode_bytes(self) -> float:
        return float(self.answers.decode_bytes[self.at])

    @property
    def mfu(self) -> float:
        return float(self.answers.mfu[self.at])

    @property
    def bandwidth_use(self) -> float:
        return float(self.answers.bandwidth_use[self.at])


def learn_activities(found: Sequence[Inference]) -> None:
    """What kernels of several batches on one GPU keep busy, all at once: batch by batch it takes longer."""
    if found and power_model(found[0].deployment.gpu) is not None:
        activities([launch.call for one in found for ran in one.passes for launch in ran.run.launches], found[0].times)


def _span(column: Array, at: int) -> Span:
    return Span(*column[:, at].tolist())
