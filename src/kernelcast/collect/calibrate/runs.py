"""Measured runs beside their forecasts, broken down into what is scaled: configurations of kernels, and the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.calibrate.residuals import predictor_inputs
from kernelcast.collect.calibrate.scales import MeasuredRun, MeasuredTime, Pieces, Slopes, sd_of, summed
from kernelcast.energy.power import throttled_s
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calibration import host_key, scale_keys
from kernelcast.forecast.calls import Call, columns_of
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import CallTable, CallTime, TableForecast, Times, rotations_of
from kernelcast.forecast.table import BadRows, grouped
from kernelcast.inference.infer import Inference
from kernelcast.inference.pass_times import HOST_RANGE, PASS_SPREAD, PassTime
from kernelcast.results import Interval
from kernelcast.serving.calibrate import least_spread
from kernelcast.serving.metrics import BenchResult, RequestTimes, metrics
from kernelcast.serving.service import EnginePool, Service
from kernelcast.serving.simulate import Cluster, check
from kernelcast.serving.step_times import StepTimeTables
from kernelcast.training.predicted_step import STEP_SPREAD
from kernelcast.training.step import Step

Doubles = NDArray[np.float64]
Seconds = Mapping[str, float]  # seconds by configuration
REST = ""  # what no scale applies to: power-limited kernels, gaps between kernels

# Numbers of a static batch that a run may have measured: phases that they add up
PHASES = {"ttft_s": ("prefill",), "prefill_s": ("prefill",), "decode_s": ("decode",), "tpot_s": ("decode",),
          "total_s": ("prefill", "decode")}  # fmt: skip
STEP_TIMES = ("time_s", "kernel_time_s")  # and of a traced step, as `kernelcast trace` reports them


# Error of whole passes and steps beyond their kernels, including noise from run to run
PASS_NOISE = sd_of(1 - PASS_SPREAD[0], 1 + PASS_SPREAD[1])
STEP_NOISE = sd_of(1 - STEP_SPREAD[0], 1 + STEP_SPREAD[1])


class ScaleShares:
    """The configurations behind calls on one GPU: shares by key, which add up to 1."""

    def __init__(self, times: Times) -> None:
        self._times, self._known = times, dict[Call, Seconds]()

    def learn(self, calls: Iterable[Call]) -> None:
        """Predict all of these that are not known yet, at once."""
        new = list(dict.fromkeys(call for call in calls if call not in self._known))
        if not new:
            return
        conditions, columns, bad = self._times.conditions, columns_of(new), BadRows()
        base, rotations = conditions.loaded_predictor, rotations_of(columns, conditions)
        for kernel, device, rows, calls_ in grouped(columns, self._times.gpu, bad):
            for at, question in predictor_inputs(kernel, rows, calls_, device, rotations, base):
                shares = scale_keys(kernel.family, question.match.configuration or question.choices, question.best)
                for number, row in enumerate(at):
                    self._known[new[row]] = {key: float(share[number]) for key, share in shares.items()}

    def of(self, call: Call) -> Seconds:
        return self._known[call]

    def by_watts(self, call: Call, each_s: float, count: float) -> list[Seconds]:
        """Alternatives of ``count`` calls that a lowered clock makes longer: seconds by configuration, or at that
        clock; none for other calls."""
        longer_s = throttled_s(call, each_s, self._times)
        if not longer_s > 0:
            return []
        return [_multiplied(self.of(call), each_s * count), {REST: (each_s + longer_s) * count}]


def pieces(groups: Sequence[Sequence[Seconds]]) -> Pieces:
    """A time from groups of alternatives, each its seconds by configuration."""
    keys = tuple(sorted({key for group in groups for alternative in group for key in alternative} - {REST}))
    order = (*keys, REST)
    return Pieces(
        keys,
        tuple(np.array([[alternative.get(key, 0.0) for key in order] for alternative in group]) for group in groups),
    )


# ---- a static batch ----


def batch_run(name: str, inference: Inference, measured: Mapping[str, float]) -> MeasuredRun:
    """``measured``: seconds by the names of ``PHASES``."""
    shares = ScaleShares(inference.times)
    shares.learn(launch.call for each in inference.passes for launch in each.launches)
    times, intervals = [], dict[int, list[tuple[str, Interval]]]()
    for what, time_s in measured.items():
        passes = [each for each in inference.passes if each.phase in PHASES[what] and each.count]
        per = max(inference.workload.outputs) - 1 if what == "tpot_s" else 1
        groups = [
            [_multiplied(seconds, each.count / per) for seconds in group]
            for each in passes
            for group in _groups(each, inference, shares)
        ]
        times.append(MeasuredTime(name, what, time_s, pieces(groups), PASS_NOISE))
        intervals |= {
            id(each): [(key, interval * each.count) for key, interval in _intervals(each, shares)] for each in passes
        }
    every = (pair for each in intervals.values() for pair in each if pair[0] != REST)
    return MeasuredRun(name, tuple(times), summed(every))


def _multiplied(seconds: Seconds, count: float) -> Seconds:
    return {key: time_s * count for key, time_s in seconds.items()}


def _intervals(pass_time: PassTime, shares: ScaleShares) -> Iterator[tuple[str, Interval]]:
    """The kernels of a pass by configuration, then what is beside them."""
    launches = pass_time.launches
    for launch, timed in zip(launches, pass_time.kernels, strict=False):
        yield from ((key, timed.interval * share) for key, share in shares.of(launch.call).items())
    for timed in pass_time.kernels[len(launches) :]:
        yield host_key(pass_time.deployment.stack.id) if timed.bound_by == "host" else REST, timed.interval


def _groups(pass_time: PassTime, inference: Inference, shares: ScaleShares) -> list[list[Seconds]]:
    """A pass as long as its kernels and what the host adds; or, where the GPU waits, as all that the host launches. A
    kernel that watts bind is as long as they make it, or as it is itself."""
    stack, decodes = pass_time.deployment.stack, pass_time.phase == "decode"
    gpu = {key: interval.value for key, interval in summed(_intervals(pass_time, shares)).items()}
    host, groups = host_key(stack.id), []
    if gpu.pop(REST, 0.0):
        for launch, timed in zip(pass_time.launches, pass_time.kernels, strict=False):
            group = shares.by_watts(launch.call, timed.time_s / timed.launches, timed.launches)
            groups += [group] if group else []
            for key, time_s in group[0].items() if group else ():
                gpu[key] -= time_s
    draft = pass_time.deployment is not inference.deployment  # the host calls it together with the model
    stack_s = 0.0 if draft else stack.step_s if decodes else stack.prefill_s
    graph = stack.replays(pass_time.batch.tokens, pass_time.batch.sequences, decodes=decodes)
    waits = gpu.get(host, 0.0) > stack_s * (1 + 1e-9) and not graph
    return [*groups, [{**gpu, host: stack_s}, {host: sum(gpu.values())}] if waits else [gpu]]


# ---- a traced step ----


def step_run(name: str, step: Step, measured: Mapping[str, float]) -> MeasuredRun:
    """``measured``: seconds by the names of ``STEP_TIMES``."""
    shares = ScaleShares(step.times)
    shares.learn(launch.call for op in step.kernels for launch in op.launched)
    keys, seconds, limited = _by_kernel(step, shares)
    host, times = host_key(step.host.id), []
    for what, time_s in measured.items():
        forecast = _wall(step, keys, seconds, host) if what == "time_s" else _kernels(keys, seconds, limited)
        measured_time = MeasuredTime(name, what, time_s, forecast, STEP_NOISE)
        waits = measured_time.shares.get(
            host, 0.0
        )  # for a host, whose speed varies from model to model and from hour to hour
        times.append(replace(measured_time, noise=STEP_NOISE * (1 - waits) + _host_sd(step) * waits))
    intervals = [
        (key, step.times[launch.call].interval * (launch.count * share))
        for op in step.kernels
        for launch in op.launched
        for key, share in shares.of(launch.call).items()
    ]
    if "time_s" in measured and not step.graph:
        launched = float(step.launched_s[-1])
        intervals.append(
            (host, Interval(launched, launched * (1 - step.host.faster), launched * (1 + step.host.slower)))
        )
    return MeasuredRun(name, tuple(times), summed(intervals))


def _host_sd(step: Step) -> float:
    return sd_of(1 - step.host.faster, 1 + step.host.slower)


def _by_kernel(step: Step, shares: ScaleShares) -> tuple[tuple[str, ...], Doubles, list[list[Seconds]]]:
    """Seconds of each op of the queue by configuration; power-limited launches apart."""
    keys = tuple(sorted({key for op in step.kernels for launch in op.launched for key in shares.of(launch.call)}))
    column = {key: at for at, key in enumerate(keys)}
    seconds, limited = np.zeros((len(step.kernels), len(keys))), []
    for row, op in enumerate(step.kernels):
        for launch in op.launched:
            each_s = step.times[launch.call].interval.value
            if group := shares.by_watts(launch.call, each_s, launch.count):
                limited.append(group)
                continue
            for key, share in shares.of(launch.call).items():
                seconds[row, column[key]] += each_s * launch.count * share
    return keys, seconds, limited


def _kernels(keys: tuple[str, ...], seconds: Doubles, limited: list[list[Seconds]]) -> Pieces:
    return pieces([[dict(zip(keys, seconds.sum(axis=0).tolist(), strict=True))], *limited])


def _wall(step: Step, keys: tuple[str, ...], seconds: Doubles, host: str) -> Pieces:
    """A stream ends when the host has launched one of its kernels, and that and all behind it have run
    (``stream_ends``): an alternative for each kernel. A graph is launched once."""
    rest = step.busy_s - seconds.sum(axis=1)  # gaps, and what watts bind
    behind = np.cumsum(np.column_stack([seconds, rest])[::-1], axis=0)[::-1]
    if step.graph:
        behind[:, -1] += step.launched_s
        return Pieces(keys, (behind,))
    return Pieces((*keys, host), (np.insert(behind, len(keys), step.launched_s, axis=1),))


# ---- a server's benchmark: its load simulated, and again with each configuration of kernels longer


_SEEN = ("mean_ttft_ms", "mean_tpot_ms")
_APART = 0.1  # of a log scale, to either side: a run jumps where a request just makes a step or just does not


class _Kept(Times):
    """Predicted times that keep every call."""

    def columns(self, calls: CallTable) -> TableForecast:
        self.predict(calls.calls())
        return super().columns(calls)


class _Stretched(Times):
    """Predicted times, with each configuration of kernels scaled by a factor."""

    def __init__(self, base: Times, shares: ScaleShares, scales: Mapping[str, float]) -> None:
        super().__init__(base.gpu, base.conditions)
        self._base, self._kinds, self._factors = base, shares, {key: float(np.exp(x)) for key, x in scales.items()}

    def predict(self, calls: Iterable[Call]) -> None:
        """All calls of a service are known once it was simulated."""

    def __getitem__(self, call: Call) -> CallTime:
        call_time = self._base[call]
        return replace(call_time, interval=call_time.interval * self._factor(call))

    def columns(self, calls: CallTable) -> TableForecast:
        columns = super().columns(calls)
        return replace(columns, times_s=columns.times_s * np.array([self._factor(call) for call in calls.calls()]))

    def _factor(self, call: Call) -> float:
        return sum(share * self._factors.get(key, 1.0) for key, share in self._kinds.of(call).items())


def benchmark_run(bench: BenchResult, service: Service, conditions: Conditions, *, seed: int = 0) -> MeasuredRun:
    """The mean time to first token and per token; slopes from simulations to either side of the forecast."""
    measured = {key: bench.metrics[key] / 1e3 for key in _SEEN if bench.metrics.get(key, 0.0) > 0}
    if not measured:
        raise KernelcastError(f"{bench.path} has no latencies to learn from: {' or '.join(_SEEN)}")
    check(service, bench.load)
    base = _Kept(service.pool.deployment.gpu, conditions)
    likely = _simulated(bench, service, base, seed)
    shares = ScaleShares(base)
    shares.learn(base.calls)
    host = host_key(service.pool.deployment.stack.id)
    keys = (*sorted({key for call in base.calls for key in shares.of(call)}), host)
    slopes: dict[str, list[float]] = {key: [] for key in measured}
    for key in keys:
        ends = [
            _simulated(bench, _on_host(service, float(np.exp(apart))), base, seed)
            if key == host
            else _simulated(bench, service, _Stretched(base, shares, {key: apart}), seed)
            for apart in (_APART, -_APART)
        ]
        for what in measured:
            slopes[what].append(float(np.log(ends[0][what] / ends[1][what])) / (2 * _APART))
    least = least_spread(bench)
    times = []
    for what, time_s in measured.items():
        along = np.array(slopes[what])
        # a queue amplifies errors of steps, also those beyond their kernels
        noise = float(np.hypot(PASS_NOISE * np.abs(along).sum(), sd_of(1 - least, 1 + least)))
        name = what.removesuffix("_ms") + "_s"
        times.append(MeasuredTime(str(bench.path), name, time_s, Slopes(keys, likely[what], along), noise))
    mean = {**_mean_intervals(base, shares), host: Interval(1.0, *HOST_RANGE)}
    weights = {key: sum(abs(each.shares[key]) * each.measured_s for each in times) for key in keys}
    return MeasuredRun(str(bench.path), tuple(times), {key: mean[key] * weights[key] for key in keys if weights[key]})


def _mean_intervals(times: Times, shares: ScaleShares) -> dict[str, Interval]:
    """The interval of the mean call of each configuration, as factors of the time: tables of passes have calls of all
    sizes, and the longest are not those that run most."""
    rows_by_key: dict[str, list[tuple[float, float, float]]] = {}
    for call in times.calls:
        interval = times[call].interval
        for key, share in shares.of(call).items():
            rows_by_key.setdefault(key, []).append(
                (share, interval.low / interval.value, interval.high / interval.value)
            )
    means = {key: np.average(rows, axis=0, weights=np.array(rows)[:, 0] + 1e-9) for key, rows in rows_by_key.items()}
    return {key: Interval(1.0, float(low), float(high)) for key, (_, low, high) in means.items()}


def _simulated(bench: BenchResult, service: Service, times: Times, seed: int) -> dict[str, float]:
    """Seconds by the names of vLLM's milliseconds."""
    cluster = Cluster(service, bench.load, StepTimeTables(lambda deployment: times), "likely", seed)
    cluster.run()
    results = metrics(RequestTimes.of(cluster.requests, bench.load), cluster.step_log)
    return {key: results[key] / 1e3 for key in _SEEN if key in results}


def _on_host(service: Service, factor: float) -> Service:
    def pool(engines: EnginePool) -> EnginePool:
        deployment = engines.deployment
        return replace(engines, deployment=replace(deployment, stack=deployment.stack.with_host(factor)))

    return replace(service, pool=pool(service.pool), prefill=pool(service.prefill) if service.prefill else None)
