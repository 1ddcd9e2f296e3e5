"""Match, predict, rank: where a measured run loses time, against what this GPU and stack should take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kernelcast.advise.answers import Predicted, predict_all, together
from kernelcast.advise.facts import WIDTH_BITS, Facts, unaligned_sizes
from kernelcast.advise.kernel_names import MATRIX_KINDS, KernelName, read_name
from kernelcast.advise.launch import launch_of
from kernelcast.advise.measured import MeasuredCall, Profile
from kernelcast.advise.reasons import Reason, idle, reasons
from kernelcast.calls import Call, Launch
from kernelcast.hardware import Gpu
from kernelcast.predict import DEFAULT, Conditions, chosen

_MATRIX_OPS = ("gemm", "bmm", "attention", "attention_backward", "conv2d", "conv2d_dgrad", "conv2d_wgrad", "moe_gemm",
               "mla")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured call, diagnosed. Times of one call in microseconds; ``*_total_us`` of all of them."""

    measured: MeasuredCall
    facts: Facts
    reasons: tuple[Reason, ...]
    share: float  # of the run's GPU time
    unmatched: str = ""  # why there is no prediction

    @property
    def predicted(self) -> Predicted | None:
        return self.facts.predicted

    @property
    def main(self) -> Reason | None:
        return self.reasons[0] if self.reasons else None

    @property
    def win_us(self) -> float:
        """What could be won: the way to the best kernels of its kind, or to another size, format or fewer launches."""
        return max(self.facts.gap_us, self.main.explained_us if self.main else 0.0)

    @property
    def win_total_us(self) -> float:
        return self.win_us * self.measured.count


@dataclass(frozen=True)
class Diagnosis:
    """A run, its rows ranked by the time that could be won."""

    profile: Profile
    gpu: Gpu
    run_dtype: str
    rows: tuple[Row, ...]
    predictor: str

    @property
    def gpu_time_us(self) -> float:
        return self.profile.gpu_time_us

    @property
    def matched(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.predicted is not None)

    @property
    def unmatched(self) -> tuple[Row, ...]:
        """The longest first."""
        return tuple(sorted((r for r in self.rows if r.predicted is None), key=lambda row: -row.measured.total_us))

    @cached_property
    def matched_share(self) -> float:
        return min(1.0, sum(row.share for row in self.matched))

    def total_us(self, name: str) -> float:
        """The sum of a time of ``Predicted`` over all matched calls."""
        return sum(getattr(row.predicted, name) * row.measured.count for row in self.matched)

    @property
    def idle(self) -> Reason | None:
        """Whether the run waits for the host."""
        return idle(self.profile.idle_us, self.profile.span_us or 0.0)

    @cached_property
    def measured_matched_us(self) -> float:
        return sum(row.measured.total_us for row in self.matched)


def diagnose(
    profile: Profile, chip: Gpu, conditions: Conditions = DEFAULT, *, run_dtype: str | None = None
) -> Diagnosis:
    """``run_dtype``: the format that the run's products should be in; else the one that most of them are in."""
    wanted = run_dtype or usual_dtype(profile.calls)
    answers = _Answers(predict_all(_questions(profile.calls, wanted), chip, conditions))
    total_us = profile.gpu_time_us or 1.0
    rows = [_row(call, answers, chip, wanted, run_dtype == "fp32", total_us) for call in profile.calls]
    rows.sort(key=lambda row: (-row.win_total_us, -row.measured.total_us))
    return Diagnosis(profile, chip, wanted, tuple(rows), chosen(conditions).name)


def usual_dtype(calls: Iterable[MeasuredCall]) -> str:
    """The format of most matrix calls, by number: one slow product in fp32 must not make the run one in fp32."""
    votes: dict[str, int] = {}
    for call in calls:
        for one in call.calls:
            if one.op in _MATRIX_OPS:
                dtype = str(one.words.get("dtype", "bf16"))
                votes[dtype] = votes.get(dtype, 0) + call.count
        said = read_name(call.main.name)
        if not call.calls and said.kind in MATRIX_KINDS and said.dtype:
            votes[said.dtype] = votes.get(said.dtype, 0) + call.count
    return max(votes, key=lambda name: (votes[name], -WIDTH_BITS.get(name, 64)), default="bf16")


def _questions(calls: Iterable[MeasuredCall], wanted: str) -> Iterable[Call]:
    for measured in calls:
        for launch in measured.calls:
            yield launch.call
            yield from (one for one in _changed(measured, wanted) if one is not None)


def _aligned(call: Call) -> Call | None:
    """The call with its sizes padded, None where they are good as they are."""
    given = call.words
    sizes = unaligned_sizes(call.op, given)
    padded = {name: -(-int(given[name]) // multiple) * multiple for name, multiple in sizes.items()}
    return call.replace(**padded) if sizes else None


def _narrow(call: Call, wanted: str) -> Call | None:
    """A matrix call in the run's format (tf32 where the run is in fp32), None where it is in no wider one."""
    dtype = str(call.words.get("dtype", ""))
    target = wanted if WIDTH_BITS.get(wanted, 16) < 32 else "tf32"
    if call.op not in _MATRIX_OPS or WIDTH_BITS.get(dtype, 0) < 32 or dtype == target:
        return None
    return call.replace(dtype=target if target != "tf32" or call.op in ("gemm", "bmm") else "bf16")


@dataclass(frozen=True)
class _Answers:
    """What was predicted, by what was asked."""

    told: Mapping[Call, Predicted | str]

    def of(self, launches: Iterable[Launch]) -> Predicted | str | None:
        """Of calls in turn; a text that says why one of them cannot be, None where there is none."""
        parts = []
        for launch in launches:
            answer = self.told[launch.call]
            if isinstance(answer, str):
                return answer
            parts.append((answer, launch.count))
        return together(parts) if parts else None


def _row(
    measured: MeasuredCall, answers: _Answers, chip: Gpu, wanted: str, fp32_is_meant: bool, total_us: float
) -> Row:
    predicted = answers.of(measured.calls)
    known = predicted if isinstance(predicted, Predicted) else None
    facts = _facts(measured, answers, known, chip, wanted, fp32_is_meant)
    why = predicted if isinstance(predicted, str) else measured.unmatched or "not known"
    share = measured.total_us / total_us
    return Row(measured, facts, reasons(facts), share, "" if facts.predicted is not None else why)


def _facts(
    measured: MeasuredCall, answers: _Answers, predicted: Predicted | None, chip: Gpu, wanted: str, fp32_is_meant: bool
) -> Facts:
    count = measured.calls[0].count if measured.calls else 1.0
    others = [answers.of([Launch("", one, count)]) if one else None for one in _changed(measured, wanted)]
    aligned, narrow, vector = (one if isinstance(one, Predicted) else None for one in others)
    parameters = measured.calls[0].words if predicted is not None else {}
    main = measured.main
    return Facts(
        op=str(parameters.get("op", "")),
        kind=read_name(main.name).kind,
        parameters=parameters,
        measured_us=measured.time_us,
        launch=launch_of(main, parameters, chip),
        sm_count=chip.sm_count,
        dram_bytes_per_s=chip.dram_bytes_per_s,
        predicted=predicted,
        aligned=aligned,
        narrow=narrow,
        vector=vector,
        run_dtype=wanted,
        fp32_is_meant=fp32_is_meant,
        launches=len(measured.kernels),
        idle_us=measured.idle_us,
        chain=measured.chain,
        chain_saved_us=measured.chain_saved_us,
        counters=main.counters,
    )


def _changed(measured: MeasuredCall, wanted: str) -> tuple[Call | None, Call | None, Call | None]:
    """The first call with padded sizes, in the run's format, and over tensors of one layout."""
    if not measured.calls:
        return None, None, None
    first = measured.calls[0].call
    return _aligned(first), _narrow(first, wanted), _vector(first, read_name(measured.main.name))


def _vector(call: Call, said: KernelName) -> Call | None:
    """Where the kernel computes the place of each element."""
    if call.op == "pointwise" and call.words.get("access") == "strided":
        return call.replace(access=None, axes=None)
    return call if call.op == "cat" and said.strided else None
