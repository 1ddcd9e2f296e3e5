"""Static batches from prompt to last token: prefill, then decode steps until every request has its output.

Decode steps differ only in how much attention reads, which grows evenly: a few steps are predicted and the rest lie on
lines between them. Many batches are one question: those of one deployment are columns, and every different kernel call
of a GPU is predicted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.energy import power_model
from kernelcast.energy.power import Energy, activities, energy_of, total
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.learned import WEIGHTS, load
from kernelcast.forecast.predict_table import CallTable, Times
from kernelcast.hardware import Gpu
from kernelcast.inference.batch_results import BatchResults
from kernelcast.inference.forward import Deployment
from kernelcast.inference.memory import largest_batch
from kernelcast.inference.pass_times import POWER_LIMIT, PassTime, predict_calls
from kernelcast.inference.workload import Workload
from kernelcast.ops.moe import SENT
from kernelcast.ops.work import Array
from kernelcast.results import HtmlRepr, Interval, support_of
from kernelcast.schedule import EvidenceSummary, Memory, Share, Timeline


@dataclass(frozen=True)
class Inference(HtmlRepr):
    """How a batch runs: one entry of the answers of its deployment. Every second of ``total`` is in one of
    ``shares``."""

    deployment: Deployment
    workload: Workload
    prefill: Interval
    decode: Interval
    steps: int  # of decode
    memory: Memory
    answers: BatchResults = field(repr=False, compare=False)
    at: int = field(repr=False, compare=False)

    @classmethod
    def of(cls, answers: BatchResults, at: int) -> Inference:
        prefill, decode = (_span(column, at) for column in (answers.prefill_s, answers.decode_s))
        memory, steps = answers.memory_of(at), int(answers.steps[at])
        return cls(answers.deployment, answers.workloads[at], prefill, decode, steps, memory, answers, at)

    @cached_property
    def passes(self) -> tuple[PassTime, ...]:
        """Each different pass once, with how many it stands for."""
        return self.answers.passes_of(self.at)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        return self.answers.shares.of(self.at)

    @cached_property
    def rests_on(self) -> EvidenceSummary:
        """The measured kinds behind the kernels of all passes."""
        return EvidenceSummary.of(kernel * each.count for each in self.passes for kernel in each.kernels)

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
    def energy(self) -> Interval | None:
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
            share = one.count * one.micro_batches / stages  # a stage has its part of the layers of every micro-batch
            limited_s = sum(ran.time_s for ran in one.kernels if ran.part == POWER_LIMIT)
            waits_s += one.count * (one.interval.value - limited_s)
            for launch, ran in zip(one.launches, one.kernels, strict=False):  # what is beside kernels comes last
                count, _ = launched.get(launch.call, (0.0, 0.0))
                launched[launch.call] = count + launch.count * share, ran.time_s / ran.launches
        waits_s -= sum(count * seconds for count, seconds in launched.values())
        return energy_of(launched, self.times, waits_s, self.prefill if phase == "prefill" else self.decode)

    @cached_property
    def largest_batch(self) -> int:
        return largest_batch(self.deployment, self.workload)

    def timeline(self) -> Timeline:
        """One decode step, in the middle; the prefill where nothing is decoded."""
        decodes = [one for one in self.passes if one.phase == "decode" and one.deployment is self.deployment]
        return (decodes[len(decodes) // 2] if decodes else self.passes[0]).timeline()

    @property
    def total(self) -> Interval:
        return self.prefill + self.decode

    @property
    def ttft_s(self) -> float:
        """Of the last request: when the prompts of the whole batch are read."""
        return self.prefill.value

    @cached_property
    def mean_ttft_s(self) -> float:
        return self.answers.mean_ttft_s(self.at)

    @property
    def step(self) -> Interval:
        return _span(self.answers.step_s, self.at)

    @property
    def tpot(self) -> Interval:
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
        activities([launch.call for one in found for each in one.passes for launch in each.launches], found[0].times)


def _span(column: Array, at: int) -> Interval:
    return Interval(*column[:, at].tolist())


_PASSES = 1 << 17  # that are laid out at a time, which bounds the memory of many cases
_CASES = 512  # of one deployment that are columns of one another

Cases = Sequence[tuple[Deployment, Workload]]


def infer(deployment: Deployment, workload: Workload, conditions: Conditions = DEFAULT) -> Inference:
    """Predict one batch."""
    return infer_many([(deployment, workload)], conditions)[0]


def infer_many(
    cases: Cases, conditions: Conditions = DEFAULT, *, skip: Callable[[int, KernelcastError], None] | None = None
) -> list[Inference]:
    """Predict many batches; a kernel call that several share is computed once. ``skip`` is told of each case that is
    refused (it does not fit, say); without it the first refusal ends all."""
    found: dict[int, Inference] = {}
    refused: dict[int, KernelcastError] = {}
    for numbers, answers in _answered(cases, conditions):
        for at, number in enumerate(numbers):
            if at in answers.refused:
                refused[number] = answers.refused[at]
            else:
                found[number] = Inference.of(answers, at)
        if refused and skip is None:
            raise refused[min(refused)]
    for number in sorted(refused):
        skip(number, refused[number])  # type: ignore[misc]  # it was raised otherwise
    return [found[number] for number in sorted(found)]


def infer_columns(cases: Cases, conditions: Conditions = DEFAULT) -> dict[str, NDArray[Any]]:
    """Predict many batches, columns out: one entry a case, in order; ``Inference`` says what each column means.

    Times: ttft_s, prefill_s, decode_s, total_s, tpot_s, step_s, each also as *_low and *_high. Numbers: tokens_per_s,
    steps, output_tokens, flops, mfu, bandwidth_use, memory_bytes, available_bytes; fits: true or false. Words: bound_by
    (what binds most of the time), support, and refused: None, or why there is no answer. Of a case that is refused
    times and what follows from them are NaN, bound_by and support None.
    """
    columns: dict[str, NDArray[Any]] = {}
    for numbers, answers in _answered(cases, conditions):
        for name, values in _columns(answers).items():
            if name not in columns:
                columns[name] = np.empty(len(cases), dtype=values.dtype)
            columns[name][numbers] = values
    return columns


def _columns(answers: BatchResults) -> dict[str, NDArray[Any]]:
    times = {
        "ttft": answers.prefill_s, "prefill": answers.prefill_s, "decode": answers.decode_s, "total": answers.total_s,
        "tpot": answers.tpot_s, "step": answers.step_s,
    }  # fmt: skip
    found = {
        f"{name}_s{end}": column[at] for name, column in times.items() for at, end in enumerate(("", "_low", "_high"))
    }
    for name in ("tokens_per_s", "steps", "output_tokens", "flops", "mfu", "bandwidth_use"):
        found[name] = getattr(answers, name)
    count, memory = len(answers.workloads), answers.memory
    found |= {"memory_bytes": memory.used_bytes, "available_bytes": np.full(count, memory.available_bytes)}
    words = {"bound_by": answers.shares.bound_by, "support": answers.shares.support} if answers.laid else {}
    for name in ("bound_by", "support"):
        found[name] = np.full(count, None, dtype=object)
        found[name][answers.answered] = words[name][answers.answered] if words else None
    found["refused"] = np.full(count, None, dtype=object)
    for at, error in answers.refused.items():
        found["refused"][at] = str(error)
    return found | {"fits": memory.fits}


def _answered(cases: Cases, conditions: Conditions) -> Iterator[tuple[list[int], BatchResults]]:
    """The numbers of the cases of each deployment, and their answers."""
    for gpu, places in _by_gpu(cases):
        chunk = _PendingResults(Times(gpu, conditions))
        for numbers in (place[at : at + _CASES] for place in places for at in range(0, len(place), _CASES)):
            deployment = cases[numbers[0]][0]
            chunk.add(numbers, BatchResults(deployment, [cases[number][1].on(deployment) for number in numbers]))
            if chunk.passes > _PASSES:
                yield from chunk.laid()
                chunk = _PendingResults(chunk.times)
        yield from chunk.laid()


def _by_gpu(cases: Cases) -> list[tuple[Gpu, list[list[int]]]]:
    """The numbers of the cases of each deployment, by GPU; neither is a key of a dictionary."""
    places: dict[int, list[int]] = {}
    for number, (deployment, _) in enumerate(cases):
        places.setdefault(id(deployment), []).append(number)
    found: list[tuple[Gpu, list[list[int]]]] = []
    for numbers in places.values():
        gpu = cases[numbers[0]][0].gpu
        same = next((members for known, members in found if known is gpu or known == gpu), None)
        if same is None:
            found.append((gpu, [numbers]))
        else:
            same.append(numbers)
    return found


@dataclass
class _PendingResults:
    """Answers on one GPU under way: their calls are predicted in one table."""

    times: Times
    gathered: CallTable = field(default_factory=CallTable)
    members: list[tuple[list[int], BatchResults]] = field(default_factory=list)
    passes: int = 0

    def add(self, numbers: list[int], answers: BatchResults) -> None:
        answers.gather(self.gathered)
        self.members.append((numbers, answers))
        self.passes += sum(len(passes.owner) for passes, _ in answers.laid)

    def laid(self) -> Iterator[tuple[list[int], BatchResults]]:
        found = predict_calls(self.gathered, self.times)
        for numbers, answers in self.members:
            answers.lay(found, self.times)
            yield numbers, answers


_FAR = 2.0  # times as long
# Formats of experts, by width
_AS_WIDE = (("fp8", "fp8_block", "int8"), ("nvfp4", "int4", "mxfp4", "mxfp4_fp8"), ("bf16", "fp16"))
_OP = "moe"


@dataclass(frozen=True)
class FasterKernel:
    """A call of a phase, and the same in other words: what each takes, in seconds."""

    phase: str
    call: Call
    time_s: float
    other: Call
    other_s: float

    @property
    def text(self) -> str:
        own, other = (_words(call) for call in (self.call, self.other))
        took, would = (f"{time_s * 1e6:,.0f}" for time_s in (self.time_s, self.other_s))
        return f"{self.phase}: experts take {took} µs a layer as {own}, which runs here; {other} would take {would}"

    def told(self) -> dict[str, object]:
        names = ("stack", "backend", "dtype")
        own, other = ({name: dict(call.parameters).get(name) for name in names} for call in (self.call, self.other))
        return {"phase": self.phase, "op": _OP, "runs": own, "time_s": self.time_s, "faster": other,
                "faster_s": self.other_s}  # fmt: skip


def faster_kernels(found: Inference) -> list[FasterKernel]:
    """At most one a phase: of the call of experts that takes longest."""
    told = []
    for phase, call in _calls(found):
        others = [call.replace(**words) for words in _measured(found.deployment.gpu.known_as, call)]
        if not others:
            continue
        try:
            found.times.predict([call, *others])
        except KernelcastError:  # one of them is refused: it could not be had
            continue
        times_s = {other: found.times[other].interval.value for other in others}
        best, own_s = min(times_s, key=times_s.__getitem__), found.times[call].interval.value
        if own_s > _FAR * times_s[best]:
            told.append(FasterKernel(phase, call, own_s, best, times_s[best]))
    return told


def _calls(found: Inference) -> Iterator[tuple[str, Call]]:
    """A middling pass of each phase stands for all."""
    for phase in ("prefill", "decode"):
        passes = [one for one in found.passes if one.phase == phase]
        if passes:
            calls = [x.call for x in passes[len(passes) // 2].launches if x.op == _OP]
            yield from ((phase, call) for call in calls[:1])


def _measured(gpu: str, call: Call) -> list[dict[str, str | None]]:
    """Stack, backend and format of every measured kind of experts on this GPU in numbers as wide."""
    weights, own = load(WEIGHTS, _OP), str(dict(call.parameters)["dtype"])
    if weights is None or weights.evidence is None:
        return []
    wide = next((group for group in _AS_WIDE if own in group), (own,))
    kinds = {
        (entry.configuration["stack"], entry.configuration["backend"], entry.configuration["dtype"])
        for entry in weights.evidence.by_op.get(_OP, ())
        if entry.gpu == gpu and entry.configuration["dtype"] in wide and entry.configuration["backend"] not in SENT
    }
    return [dict(zip(("stack", "backend", "dtype"), kind, strict=True)) for kind in sorted(kinds, key=str)]


def _words(call: Call) -> str:
    given = dict(call.parameters)
    return f"{given['stack']}'s {given['backend']} in {given['dtype']}"
