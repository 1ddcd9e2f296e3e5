"""Match, predict, rank: where a measured run loses time, against what this GPU and stack should take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kernelcast.diagnose.answers import Answers, Predicted
from kernelcast.diagnose.facts import WIDTH_BITS, Facts, unaligned_sizes
from kernelcast.diagnose.grid import grid_of
from kernelcast.diagnose.kernel_names import MATRIX_KINDS, read_name
from kernelcast.diagnose.measured import MeasuredCall, Profile
from kernelcast.diagnose.reasons import Reason, idle, reasons
from kernelcast.forecast.calls import Call
from kernelcast.forecast.conditions import DEFAULT, Conditions, chosen
from kernelcast.hardware import Gpu
from kernelcast.results import Shown

_MATRIX_OPS = ("gemm", "bmm", "attention", "attention_backward", "masked_attention", "masked_attention_backward",
               "conv2d", "conv2d_dgrad", "conv2d_wgrad", "moe_gemm", "grouped_mm", "mla")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured call, diagnosed. Times of one call in microseconds; ``*_total_us`` of all of them."""

    measured: MeasuredCall
    facts: Facts
    reasons: tuple[Reason, ...]
    share: float  # of the run's GPU time
    unmatched: str = ""  # why there is no prediction

    @property
    def told(self) -> Predicted:
        """The prediction of a matched row."""
        assert self.facts.predicted is not None
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
class Diagnosis(Shown):
    """A run, its rows ranked by the time that could be won."""

    profile: Profile
    gpu: Gpu
    run_dtype: str
    rows: tuple[Row, ...]
    predictor: str

    @property
    def matched(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.unmatched)

    @property
    def unmatched(self) -> tuple[Row, ...]:
        """The longest first."""
        return tuple(sorted((row for row in self.rows if row.unmatched), key=lambda row: -row.measured.total_us))

    @cached_property
    def matched_share(self) -> float:
        return min(1.0, sum(row.share for row in self.matched))

    def total_us(self, name: str) -> float:
        """The sum of a time of ``Predicted`` over all matched calls."""
        return sum(float(getattr(row.told, name)) * row.measured.count for row in self.matched)

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
    asked = [launch.call for measured in profile.calls for launch in measured.calls]
    asked += [call for measured in profile.calls for call in _changed(measured, wanted).values()]
    answers = Answers(asked, chip, conditions)
    total_us = profile.gpu_time_us or 1.0
    rows = []
    for measured in profile.calls:
        facts, why = _facts(measured, answers, chip, wanted, fp32_is_meant=run_dtype == "fp32")
        rows.append(Row(measured, facts, reasons(facts), measured.total_us / total_us, why))
    rows.sort(key=lambda row: (-row.win_total_us, -row.measured.total_us))
    return Diagnosis(profile, chip, wanted, tuple(rows), chosen(conditions).name)


def usual_dtype(calls: Iterable[MeasuredCall]) -> str:
    """The format of most matrix calls, by number: one slow product in fp32 must not make the run one in fp32."""
    votes: Counter[str] = Counter()
    for measured in calls:
        said = read_name(measured.main.name)
        dtypes = [str(one.words.get("dtype", "bf16")) for one in measured.calls if one.op in _MATRIX_OPS]
        if not measured.calls and said.kind in MATRIX_KINDS and said.dtype:
            dtypes = [said.dtype]
        votes.update(dtypes * measured.count)
    return max(votes, key=lambda name: (votes[name], -WIDTH_BITS.get(name, 64)), default="bf16")


def _facts(
    measured: MeasuredCall, answers: Answers, chip: Gpu, wanted: str, *, fp32_is_meant: bool
) -> tuple[Facts, str]:
    """And why there is no prediction, where there is none."""
    told = answers.of(measured.calls)
    predicted = told if isinstance(told, Predicted) else None
    why = "" if predicted else told or measured.unmatched or "not known"
    parameters = measured.calls[0].words if predicted else {}
    changed = {
        name: answer
        for name, call in _changed(measured, wanted).items()
        if isinstance(answer := answers.of([replace(measured.calls[0], call=call)]), Predicted)
    }
    main = measured.main
    facts = Facts(
        op=str(parameters.get("op", "")),
        kind=read_name(main.name).kind,
        parameters=parameters,
        measured_us=measured.time_us,
        grid=grid_of(main, parameters, chip),
        sm_count=chip.sm_count,
        dram_bytes_per_s=chip.dram_bytes_per_s,
        predicted=predicted,
        **changed,
        run_dtype=wanted,
        fp32_is_meant=fp32_is_meant,
        launches=len(measured.kernels),
        idle_us=measured.idle_us,
        chain=measured.chain,
        chain_saved_us=measured.chain_saved_us,
        counters=main.counters,
    )
    return facts, str(why)


def _changed(measured: MeasuredCall, wanted: str) -> dict[str, Call]:
    """The first call with padded sizes, in the run's format, and over tensors of one layout, where it is not so."""
    if not measured.calls:
        return {}
    call, strided = measured.calls[0].call, read_name(measured.main.name).strided
    found = {"aligned": _aligned(call), "narrow": _narrow(call, wanted), "vector": _vector(call, strided)}
    return {name: one for name, one in found.items() if one is not None}


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


def _vector(call: Call, strided: bool) -> Call | None:
    """Where the kernel computes the place of each element (``strided``: a copy that does, by its name)."""
    if call.op == "pointwise" and call.words.get("access") == "strided":
        return call.replace(access=None, axes=None)
    return call if call.op == "cat" and strided else None
