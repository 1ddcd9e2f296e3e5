"""A server's own benchmark as a measured run: its load simulated, and again with each kind of kernel longer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from kernelcast.collect.calibrate.runs import PASS_NOISE, Kinds, Run, sd_of
from kernelcast.collect.calibrate.scales import Seen, Slopes
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calibration import host_key
from kernelcast.forecast.calls import Call
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import CallTime, Times
from kernelcast.inference.pass_times import HOST_RANGE
from kernelcast.results import Interval
from kernelcast.serving.calibrate import least_spread
from kernelcast.serving.metrics import Bench, Served, metrics
from kernelcast.serving.service import Pool, Service
from kernelcast.serving.simulate import Fleet, check
from kernelcast.serving.step_times import Tables

_SEEN = ("mean_ttft_ms", "mean_tpot_ms")
_APART = 0.1  # of a log scale, to either side: a run jumps where a request just makes a step or just does not


class _Stretched(Times):
    """What was predicted, with kinds of kernels so many times as long."""

    def __init__(self, base: Times, kinds: Kinds, scales: Mapping[str, float]) -> None:
        super().__init__(base.gpu, base.conditions)
        self._base, self._kinds, self._factors = base, kinds, {key: float(np.exp(x)) for key, x in scales.items()}

    def learn(self, calls: Iterable[Call]) -> None:
        """All calls of a service are known once it was simulated."""

    def __getitem__(self, call: Call) -> CallTime:
        found = self._base[call]
        factor = sum(share * self._factors.get(key, 1.0) for key, share in self._kinds.of(call).items())
        return replace(found, span=found.span * factor)


def served_run(bench: Bench, service: Service, conditions: Conditions, *, seed: int = 0) -> Run:
    """The mean time to first token and per token; slopes from simulations to either side of the forecast."""
    measured = {key: bench.metrics[key] / 1e3 for key in _SEEN if bench.metrics.get(key, 0.0) > 0}
    if not measured:
        raise KernelcastError(f"{bench.path} has no latencies to learn from: {' or '.join(_SEEN)}")
    check(service, bench.load)
    base = Times(service.pool.deployment.gpu, conditions)
    likely = _simulated(bench, service, base, seed)
    kinds = Kinds(base)
    kinds.learn(base.calls)
    host = host_key(service.pool.deployment.stack.id)
    keys = (*sorted({key for call in base.calls for key in kinds.of(call)}), host)
    slopes: dict[str, list[float]] = {key: [] for key in measured}
    for key in keys:
        ends = [
            _simulated(bench, _on_host(service, float(np.exp(apart))), base, seed)
            if key == host
            else _simulated(bench, service, _Stretched(base, kinds, {key: apart}), seed)
            for apart in (_APART, -_APART)
        ]
        for what in measured:
            slopes[what].append(float(np.log(ends[0][what] / ends[1][what])) / (2 * _APART))
    least = least_spread(bench)
    seen = []
    for what, time_s in measured.items():
        along = np.array(slopes[what])
        # a queue makes more of what steps are off by, and so of what they are off beyond their kernels
        noise = float(np.hypot(PASS_NOISE * np.abs(along).sum(), sd_of(1 - least, 1 + least)))
        name = what.removesuffix("_ms") + "_s"
        seen.append(Seen(str(bench.path), name, time_s, Slopes(keys, likely[what], along), noise))
    mean = {**_mean_spans(base, kinds), host: Interval(1.0, *HOST_RANGE)}
    weights = {key: sum(abs(one.shares[key]) * one.measured_s for one in seen) for key in keys}
    return Run(str(bench.path), tuple(seen), {key: mean[key] * weights[key] for key in keys if weights[key]})


def _mean_spans(times: Times, kinds: Kinds) -> dict[str, Interval]:
    """Of each kind, the interval of its mean call, as factors of the time: tables of passes have calls of all sizes,
    and the longest are not those that run most."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for call in times.calls:
        span = times[call].span
        for key, share in kinds.of(call).items():
            found.setdefault(key, []).append((share, span.low / span.value, span.high / span.value))
    means = {key: np.average(rows, axis=0, weights=np.array(rows)[:, 0] + 1e-9) for key, rows in found.items()}
    return {key: Interval(1.0, float(low), float(high)) for key, (_, low, high) in means.items()}


def _simulated(bench: Bench, service: Service, times: Times, seed: int) -> dict[str, float]:
    """Seconds by the names of vLLM's milliseconds."""
    fleet = Fleet(service, bench.load, Tables(lambda place: times), "likely", seed)
    fleet.run()
    found = metrics(Served.of(fleet.requests, bench.load), fleet.notes)
    return {key: found[key] / 1e3 for key in _SEEN if key in found}


def _on_host(service: Service, factor: float) -> Service:
    def pool(one: Pool) -> Pool:
        place = one.deployment
        return replace(one, deployment=replace(place, stack=place.stack.with_host(factor)))

    return replace(service, pool=pool(service.pool), prefill=pool(service.prefill) if service.prefill else None)
