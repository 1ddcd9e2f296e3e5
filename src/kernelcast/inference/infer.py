"""Static batches from prompt to last token: prefill, then decode steps until every request has its output.

Decode steps differ only in how much attention reads, which grows evenly: a few steps are predicted and the rest lie on
lines between them. Many batches are predicted together: those of one deployment are columns, and every distinct kernel
call of a GPU is predicted once.
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
from kernelcast.forecast.end_to_end import WholeSupport
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
from kernelcast.results import HtmlRepr, Interval, Renamed, support_of
from kernelcast.schedule import EvidenceSummary, Memory, Share, Timeline


@dataclass(frozen=True)
class Inference(Renamed, HtmlRepr):
    """How a batch runs: one entry of the results of its deployment. Every second of ``total`` is in one of
    ``shares``."""

    deployment: Deployment
    workload: Workload
    prefill: Interval
    decode: Interval
    steps: int  # of decode
    memory: Memory
    results: BatchResults = field(repr=False, compare=False)
    at: int = field(repr=False, compare=False)
    _renamed = {"told_tokens": "counted_tokens", "answers": "results"}

    @classmethod
    def of(cls, results: BatchResults, at: int) -> Inference:
        prefill, decode = (_interval(column, at) for column in (results.prefill_s, results.decode_s))
        memory, steps = results.memory_of(at), int(results.steps[at])
        return cls(results.deployment, results.workloads[at], prefill, decode, steps, memory, results, at)

    @cached_property
    def passes(self) -> tuple[PassTime, ...]:
        """Each distinct pass once, with its count."""
        return self.results.passes_of(self.at)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        return self.results.shares.of(self.at)

    @cached_property
    def rests_on(self) -> EvidenceSummary:
        """The measured configurations behind the kernels of all passes."""
        return EvidenceSummary.of(kernel * each.count for each in self.passes for kernel in each.kernels)

    @cached_property
    def supports(self) -> WholeSupport:
        """Of the kernels, and of the run as a whole."""
        return WholeSupport.of(self.results.setting, support_of((share.time_s, share.support) for share in self.shares))

    @property
    def support(self) -> str:
        return self.supports.level

    @property
    def times(self) -> Times:
        assert self.results.times is not None
        return self.results.times

    @property
    def predictor(self) -> str:
        return self.times.predictor

    @cached_property
    def energy(self) -> Interval | None:
        """Joules of all GPUs over the whole run, in a series of such runs; None without a power model."""
        return total(self.energies.values(), self.deployment.layout.gpus)

    @cached_property
    def energies(self) -> dict[str, Energy | None]:
        """Energy of the mean GPU, by phase."""
        learn_activities([self])
        return {phase: self._phase_energy(phase) for phase in dict.fromkeys(each.phase for each in self.passes)}

    def _phase_energy(self, phase: str) -> Energy | None:
        stages, launched, waits_s = self.deployment.layout.pp, dict[Call, tuple[float, float]](), 0.0
        for each in (each for each in self.passes if each.phase == phase and each.count):
            share = each.count * each.micro_batches / stages  # a stage has its part of the layers of every micro-batch
            limited_s = sum(kernel.time_s for kernel in each.kernels if kernel.part == POWER_LIMIT)
            waits_s += each.count * (each.interval.value - limited_s)
            for launch, kernel in zip(each.launches, each.kernels, strict=False):  # entries beside kernels come last
                count, _ = launched.get(launch.call, (0.0, 0.0))
                launched[launch.call] = count + launch.count * share, kernel.time_s / kernel.launches
        waits_s -= sum(count * seconds for count, seconds in launched.values())
        return energy_of(launched, self.times, waits_s, self.prefill if phase == "prefill" else self.decode)

    @cached_property
    def largest_batch(self) -> int:
        return largest_batch(self.deployment, self.workload)

    def timeline(self) -> Timeline:
        """One decode step, in the middle; the prefill where nothing is decoded."""
        decodes = [each for each in self.passes if each.phase == "decode" and each.deployment is self.deployment]
        return (decodes[len(decodes) // 2] if decodes else self.passes[0]).timeline()

    @property
    def total(self) -> Interval:
        return self.prefill + self.decode

    @property
    def ttft_s(self) -> float:
        """Time to first token of the last request, when all prompts of the batch are prefilled."""
        return self.prefill.value

    @cached_property
    def mean_ttft_s(self) -> float:
        return self.results.mean_ttft_s(self.at)

    @property
    def step(self) -> Interval:
        return _interval(self.results.step_s, self.at)

    @property
    def tpot(self) -> Interval:
        return _interval(self.results.tpot_s, self.at)

    @property
    def output_tokens(self) -> int:
        return int(self.results.output_tokens[self.at])

    @property
    def counted_tokens(self) -> int:
        """Tokens that joules and dollars are divided by: output tokens; of an encoder, input tokens."""
        return self.output_tokens if self.deployment.model.generates else sum(self.workload.inputs)

    @property
    def tokens_per_s(self) -> float:
        return float(self.results.tokens_per_s[self.at])

    @property
    def flops(self) -> float:
        return float(self.results.flops[self.at])

    @property
    def decode_bytes(self) -> float:
        return float(self.results.decode_bytes[self.at])

    @property
    def mfu(self) -> float:
        return float(self.results.mfu[self.at])

    @property
    def bandwidth_use(self) -> float:
        return float(self.results.bandwidth_use[self.at])


def learn_activities(inferences: Sequence[Inference]) -> None:
    """Compute the pipeline activity of the kernels of several batches at once, which is faster than batch by batch."""
    if inferences and power_model(inferences[0].deployment.gpu) is not None:
        activities(
            [launch.call for inference in inferences for each in inference.passes for launch in each.launches],
            inferences[0].times,
        )


def _interval(column: Array, at: int) -> Interval:
    return Interval(*column[:, at].tolist())


_PASSES = 1 << 17  # computed at a time, which bounds the memory of many cases
_CASES = 512  # workloads of one deployment that are predicted as columns

Cases = Sequence[tuple[Deployment, Workload]]


def infer(deployment: Deployment, workload: Workload, conditions: Conditions = DEFAULT) -> Inference:
    """Predict one batch."""
    return infer_many([(deployment, workload)], conditions)[0]


def infer_many(
    cases: Cases, conditions: Conditions = DEFAULT, *, skip: Callable[[int, KernelcastError], None] | None = None
) -> list[Inference]:
    """Predict many batches; a kernel call that several share is computed once. ``skip`` is called with each case that
    is refused (it does not fit, say); without it the first refusal is raised."""
    inferences: dict[int, Inference] = {}
    refused: dict[int, KernelcastError] = {}
    for numbers, results in _predicted(cases, conditions):
        for at, number in enumerate(numbers):
            if at in results.refused:
                refused[number] = results.refused[at]
            else:
                inferences[number] = Inference.of(results, at)
        if refused and skip is None:
            raise refused[min(refused)]
    for number in sorted(refused):
        skip(number, refused[number])  # type: ignore[misc]  # it was raised otherwise
    return [inferences[number] for number in sorted(inferences)]


def infer_columns(cases: Cases, conditions: Conditions = DEFAULT) -> dict[str, NDArray[Any]]:
    """Predict many batches, columns out: one entry a case, in order; ``Inference`` says what each column means.

    Times: ttft_s, prefill_s, decode_s, total_s, tpot_s, step_s, each also as *_low and *_high. Numbers: tokens_per_s,
    steps, output_tokens, flops, mfu, bandwidth_use, memory_bytes, available_bytes; fits: true or false. Texts: bound_by
    (what binds most of the time), support, and refused: None, or why there is no answer. Of a case that is refused
    times and what follows from them are NaN, bound_by and support None.
    """
    columns: dict[str, NDArray[Any]] = {}
    for numbers, results in _predicted(cases, conditions):
        for name, values in _columns(results).items():
            if name not in columns:
                columns[name] = np.empty(len(cases), dtype=values.dtype)
            columns[name][numbers] = values
    return columns


def _columns(results: BatchResults) -> dict[str, NDArray[Any]]:
    times = {
        "ttft": results.prefill_s, "prefill": results.prefill_s, "decode": results.decode_s, "total": results.total_s,
        "tpot": results.tpot_s, "step": results.step_s,
    }  # fmt: skip
    columns = {
        f"{name}_s{end}": column[at] for name, column in times.items() for at, end in enumerate(("", "_low", "_high"))
    }
    for name in ("tokens_per_s", "steps", "output_tokens", "flops", "mfu", "bandwidth_use"):
        columns[name] = getattr(results, name)
    count, memory = len(results.workloads), results.memory
    columns |= {"memory_bytes": memory.used_bytes, "available_bytes": np.full(count, memory.available_bytes)}
    texts = {"bound_by": results.shares.bound_by, "support": results.support} if results.passes else {}
    for name in ("bound_by", "support"):
        columns[name] = np.full(count, None, dtype=object)
        columns[name][results.answered] = texts[name][results.answered] if texts else None
    columns["refused"] = np.full(count, None, dtype=object)
    for at, error in results.refused.items():
        columns["refused"][at] = str(error)
    return columns | {"fits": memory.fits}


def _predicted(cases: Cases, conditions: Conditions) -> Iterator[tuple[list[int], BatchResults]]:
    """The numbers of the cases of each deployment, and their results."""
    for gpu, places in _by_gpu(cases):
        chunk = _PendingResults(Times(gpu, conditions))
        for numbers in (members[at : at + _CASES] for members in places for at in range(0, len(members), _CASES)):
            deployment = cases[numbers[0]][0]
            chunk.add(numbers, BatchResults(deployment, [cases[number][1].on(deployment) for number in numbers]))
            if chunk.passes > _PASSES:
                yield from chunk.finish()
                chunk = _PendingResults(chunk.times)
        yield from chunk.finish()


def _by_gpu(cases: Cases) -> list[tuple[Gpu, list[list[int]]]]:
    """The numbers of the cases of each deployment, by GPU; neither is a key of a dictionary."""
    places: dict[int, list[int]] = {}
    for number, (deployment, _) in enumerate(cases):
        places.setdefault(id(deployment), []).append(number)
    groups: list[tuple[Gpu, list[list[int]]]] = []
    for numbers in places.values():
        gpu = cases[numbers[0]][0].gpu
        same = next((members for known, members in groups if known is gpu or known == gpu), None)
        if same is None:
            groups.append((gpu, [numbers]))
        else:
            same.append(numbers)
    return groups


@dataclass
class _PendingResults:
    """Batches on one GPU whose calls are predicted in one table."""

    times: Times
    calls: CallTable = field(default_factory=CallTable)
    members: list[tuple[list[int], BatchResults]] = field(default_factory=list)
    passes: int = 0

    def add(self, numbers: list[int], results: BatchResults) -> None:
        results.gather(self.calls)
        self.members.append((numbers, results))
        self.passes += sum(len(passes.owner) for passes, _ in results.passes)

    def finish(self) -> Iterator[tuple[list[int], BatchResults]]:
        columns = predict_calls(self.calls, self.times)
        for numbers, results in self.members:
            results.predict(columns, self.times)
            yield numbers, results


_FAR = 2.0  # times as long
# Formats of experts, by width
_AS_WIDE = (("fp8", "fp8_block", "int8"), ("nvfp4", "int4", "mxfp4", "mxfp4_fp8", "w4a4_mxfp4"), ("bf16", "fp16"))
_OP = "moe"
_KEPT_CALLS = 4096
_Fastest = tuple[float, Call | None, float]  # seconds of a call; its fastest alternative, if any; its seconds
_kept: list[tuple[Gpu, dict[Call, _Fastest]]] = []  # one at most: of the GPU that was asked about last


@dataclass(frozen=True)
class FasterKernel:
    """A call of a phase, and a faster alternative on another stack, backend or format."""

    phase: str
    call: Call
    time_s: float
    other: Call
    other_s: float

    @property
    def text(self) -> str:
        current, other = (_kernel_text(call) for call in (self.call, self.other))
        took, would = (f"{time_s * 1e6:,.0f}" for time_s in (self.time_s, self.other_s))
        return f"{self.phase}: experts take {took} µs a layer as {current}, which runs here; {other} would take {would}"

    def as_dict(self) -> dict[str, object]:
        names = ("stack", "backend", "dtype")
        current, other = ({name: dict(call.parameters).get(name) for name in names} for call in (self.call, self.other))
        return {"phase": self.phase, "op": _OP, "runs": current, "time_s": self.time_s, "faster": other,
                "faster_s": self.other_s}  # fmt: skip


def faster_kernels(inference: Inference) -> list[FasterKernel]:
    """At most one for each phase: for its first MoE call."""
    known = _known(inference.times)
    faster = []
    for phase, call in _calls(inference):
        if call not in known:
            known[call] = _fastest(call, inference.times)
        used_s, best, best_s = known[call]
        if best is not None and used_s > _FAR * best_s:
            faster.append(FasterKernel(phase, call, used_s, best, best_s))
    return faster


def _known(times: Times) -> dict[Call, _Fastest]:
    """Kept for the next batch on this GPU: its full prefill chunks have the same calls."""
    if times.conditions != DEFAULT:
        return {}
    gpu, known = next(iter(_kept), (None, {}))
    if gpu != times.gpu or len(known) > _KEPT_CALLS:
        known = {}
        _kept[:] = [(times.gpu, known)]
    return known


def _fastest(call: Call, asked: Times) -> _Fastest:
    """Predicted by themselves, so that the last digit does not depend on what was asked before."""
    others = [call.replace(**choices) for choices in _measured(asked.gpu.known_as, call)]
    if not others:
        return 0.0, None, 0.0
    times = Times(asked.gpu, asked.conditions)
    try:
        times.predict([call, *others])
    except KernelcastError:  # one of them is refused: it cannot run here
        return 0.0, None, 0.0
    times_s = {other: times[other].interval.value for other in others}
    best = min(times_s, key=times_s.__getitem__)
    return times[call].interval.value, best, times_s[best]


def _calls(inference: Inference) -> Iterator[tuple[str, Call]]:
    """MoE calls of the middle pass of each phase."""
    for phase in ("prefill", "decode"):
        passes = [each for each in inference.passes if each.phase == phase]
        if passes:
            calls = [x.call for x in passes[len(passes) // 2].launches if x.op == _OP]
            yield from ((phase, call) for call in calls[:1])


def _measured(gpu: str, call: Call) -> list[dict[str, str | None]]:
    """Stack, backend and format of every MoE configuration measured on this GPU in formats as wide."""
    weights, dtype = load(WEIGHTS, _OP), str(dict(call.parameters)["dtype"])
    if weights is None or weights.evidence is None:
        return []
    wide = next((group for group in _AS_WIDE if dtype in group), (dtype,))
    measured = {
        (entry.configuration["stack"], entry.configuration["backend"], entry.configuration["dtype"])
        for entry in weights.evidence.by_op.get(_OP, ())
        if entry.gpu == gpu and entry.configuration["dtype"] in wide and entry.configuration["backend"] not in SENT
    }
    return [dict(zip(("stack", "backend", "dtype"), choices, strict=True)) for choices in sorted(measured, key=str)]


def _kernel_text(call: Call) -> str:
    given = dict(call.parameters)
    return f"{given['stack']}'s {given['backend']} in {given['dtype']}"
