"""Match, predict, rank: where a measured run loses time, against what this GPU and stack should take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kernelcast.diagnose.kernel_names import MATRIX_CATEGORIES, parse_kernel_name
from kernelcast.diagnose.measured import MeasuredCall, Profile, launch_grid
from kernelcast.diagnose.metrics import WIDTH_BITS, CallForecast, CallForecasts, CallMetrics, unaligned_sizes
from kernelcast.diagnose.reasons import Reason, idle, reasons
from kernelcast.forecast.calls import Call
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.hardware import Gpu
from kernelcast.results import HtmlRepr

_MATRIX_OPS = ("gemm", "bmm", "attention", "attention_backward", "masked_attention", "masked_attention_backward",
               "conv2d", "conv2d_dgrad", "conv2d_wgrad", "moe_gemm", "grouped_mm", "mla")  # fmt: skip


@dataclass(frozen=True)
class DiagnosedCall:
    """One measured call, diagnosed. Times of one call in microseconds; ``*_total_us`` of all of them."""

    measured: MeasuredCall
    metrics: CallMetrics
    reasons: tuple[Reason, ...]
    share: float  # of the run's GPU time
    unmatched: str = ""  # why there is no forecast

    @property
    def forecast(self) -> CallForecast:
        """The forecast of a matched call."""
        assert self.metrics.forecast is not None
        return self.metrics.forecast

    @property
    def main(self) -> Reason | None:
        return self.reasons[0] if self.reasons else None

    @property
    def saving_us(self) -> float:
        """Time that could be saved: the gap to the best kernels of this op, or by another size, format or fewer
        launches."""
        return max(self.metrics.gap_us, self.main.explained_us if self.main else 0.0)

    @property
    def total_saving_us(self) -> float:
        return self.saving_us * self.measured.count


@dataclass(frozen=True)
class Diagnosis(HtmlRepr):
    """A run, its calls ranked by the time that could be saved."""

    profile: Profile
    gpu: Gpu
    run_dtype: str
    rows: tuple[DiagnosedCall, ...]
    predictor: str

    @property
    def matched(self) -> tuple[DiagnosedCall, ...]:
        return tuple(row for row in self.rows if not row.unmatched)

    @property
    def unmatched(self) -> tuple[DiagnosedCall, ...]:
        """The longest first."""
        return tuple(sorted((row for row in self.rows if row.unmatched), key=lambda row: -row.measured.total_us))

    @cached_property
    def matched_share(self) -> float:
        return min(1.0, sum(row.share for row in self.matched))

    def total_us(self, name: str) -> float:
        """The sum of a time of ``CallForecast`` over all matched calls."""
        return sum(float(getattr(row.forecast, name)) * row.measured.count for row in self.matched)

    @property
    def idle(self) -> Reason | None:
        """Whether the run waits for the host."""
        return idle(self.profile.idle_us, self.profile.duration_us or 0.0)

    @cached_property
    def measured_matched_us(self) -> float:
        return sum(row.measured.total_us for row in self.matched)


def diagnose(
    profile: Profile, gpu: Gpu, conditions: Conditions = DEFAULT, *, run_dtype: str | None = None
) -> Diagnosis:
    """``run_dtype``: the format that the run's products should be in; else the most used."""
    dtype = run_dtype or most_used_dtype(profile.calls)
    calls = [launch.call for measured in profile.calls for launch in measured.calls]
    calls += [call for measured in profile.calls for call in _variants(measured, dtype).values()]
    forecasts = CallForecasts(calls, gpu, conditions)
    total_us = profile.gpu_time_us or 1.0
    rows = []
    for measured in profile.calls:
        metrics, why = _metrics(measured, forecasts, gpu, dtype, fp32_is_meant=run_dtype == "fp32")
        rows.append(DiagnosedCall(measured, metrics, reasons(metrics), measured.total_us / total_us, why))
    rows.sort(key=lambda row: (-row.total_saving_us, -row.measured.total_us))
    return Diagnosis(profile, gpu, dtype, tuple(rows), conditions.loaded_predictor.name)


def most_used_dtype(calls: Iterable[MeasuredCall]) -> str:
    """The format of most matrix calls, by number: a slow product in fp32 must not make it a run in fp32."""
    votes: Counter[str] = Counter()
    for measured in calls:
        name = parse_kernel_name(measured.main.name)
        dtypes = [str(launch.arguments.get("dtype", "bf16")) for launch in measured.calls if launch.op in _MATRIX_OPS]
        if not measured.calls and name.category in MATRIX_CATEGORIES and name.dtype:
            dtypes = [name.dtype]
        votes.update(dtypes * measured.count)
    return max(votes, key=lambda name: (votes[name], -WIDTH_BITS.get(name, 64)), default="bf16")


def _metrics(
    measured: MeasuredCall, forecasts: CallForecasts, gpu: Gpu, dtype: str, *, fp32_is_meant: bool
) -> tuple[CallMetrics, str]:
    """The metrics of a call, and why there is no forecast, where there is none."""
    forecast = forecasts.of(measured.calls)
    matched = isinstance(forecast, CallForecast)
    parameters = measured.calls[0].arguments if matched else {}
    variants = {
        name: variant
        for name, call in _variants(measured, dtype).items()
        if isinstance(variant := forecasts.of([replace(measured.calls[0], call=call)]), CallForecast)
    }
    main = measured.main
    metrics = CallMetrics(
        op=str(parameters.get("op", "")),
        category=parse_kernel_name(main.name).category,
        parameters=parameters,
        measured_us=measured.time_us,
        grid=launch_grid(main, parameters, gpu),
        sm_count=gpu.sm_count,
        dram_bytes_per_s=gpu.dram_bytes_per_s,
        forecast=forecast if isinstance(forecast, CallForecast) else None,
        **variants,
        run_dtype=dtype,
        fp32_is_meant=fp32_is_meant,
        launches=len(measured.kernels),
        idle_us=measured.idle_us,
        chain=measured.chain,
        chain_saved_us=measured.chain_saved_us,
        counters=main.counters,
    )
    return metrics, "" if matched else str(forecast or measured.unmatched or "unknown")


def _variants(measured: MeasuredCall, dtype: str) -> dict[str, Call]:
    """The first call with padded sizes, in the run's format, and over tensors of one layout, where it differs."""
    if not measured.calls:
        return {}
    call, strided = measured.calls[0].call, parse_kernel_name(measured.main.name).strided
    variants = {"aligned": _aligned(call), "narrow": _narrow(call, dtype), "vector": _vector(call, strided)}
    return {name: variant for name, variant in variants.items() if variant is not None}


def _aligned(call: Call) -> Call | None:
    """The call with its sizes padded, None where they are good as they are."""
    parameters = call.arguments
    sizes = unaligned_sizes(call.op, parameters)
    padded = {name: -(-int(parameters[name]) // multiple) * multiple for name, multiple in sizes.items()}
    return call.replace(**padded) if sizes else None


def _narrow(call: Call, run_dtype: str) -> Call | None:
    """A matrix call in the run's format (tf32 where the run is in fp32), None where it is in no wider format."""
    dtype = str(call.arguments.get("dtype", ""))
    target = run_dtype if WIDTH_BITS.get(run_dtype, 16) < 32 else "tf32"
    if call.op not in _MATRIX_OPS or WIDTH_BITS.get(dtype, 0) < 32 or dtype == target:
        return None
    return call.replace(dtype=target if target != "tf32" or call.op in ("gemm", "bmm") else "bf16")


def _vector(call: Call, strided: bool) -> Call | None:
    """Where the kernel computes the address of each element (``strided``: a copy that does, by its name)."""
    if call.op == "pointwise" and call.arguments.get("access") == "strided":
        return call.replace(access=None, axes=None)
    return call if call.op == "cat" and strided else None
