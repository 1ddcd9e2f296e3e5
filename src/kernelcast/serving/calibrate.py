"""Server overheads beyond kernel forecasts, fitted to the server's benchmark by simulating it repeatedly.

The objective is the sum of squared logarithms of predicted over measured latencies, of each request and of the means
and percentiles of all, each weighted by its noise: the time to first token of one request is noisier than its many
decode steps. A penalty on the distance from the initial overheads keeps those that the benchmark does not constrain.
The search is Levenberg's and Marquardt's, with slopes from simulations a good step apart, since a run jumps where a
request just makes a step or just does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.ops.work import Array
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import BenchResult, RequestTimes, metrics
from kernelcast.serving.replay import Rows, measured, named, stage_metrics
from kernelcast.serving.service import OVERHEADS, Service
from kernelcast.serving.simulate import Cluster, check
from kernelcast.serving.step_times import StepTimeTables
from kernelcast.stacks import Stack

# How far servers lie from their forecast: seconds, or, of factors, in their logarithm
SCALES = {"request_s": 0.02, "front_s": 2e-3, "token_s": 2e-6, "step_s": 1e-3, "sequence_s": 2e-5,
          "launch_factor": 0.3, "prompt_factor": 0.05, "decode_factor": 0.05}  # fmt: skip
_NOISE = {"mean": 1.0, "p50": 1.6, "p90": 2.9, "p99": 14.0}  # variance over that of a mean, for normal errors
_FITTED = tuple((ending, name) for name in ("ttft", "tpot", "e2el") for ending in _NOISE)
_EXACT = 0.01  # no latency is known better, as a share
_UNKNOWN = 0.2  # noise of single requests where they are not one by one
_LARGE = 3.0  # times its noise from which a request counts less
_APART = 0.3  # scales between simulations that slopes are taken from
_TIMES, _ROUNDS, _TRIES, _GAIN = 2, 8, 4, 2e-3
_MOST = 2000  # requests that are simulated: more add little information
_BEHIND = 20  # requests of a closed loop that may be sent for each running request before a part ends
_SPREADS = tuple(0.02 * 1.25**i for i in range(11))  # 2% to 19%: another load is a little off in any case
_SUMMARY = 4  # index of the spread for a load that was drawn again: 5%
_HELD = 0.8  # coverage of the interval of a measured server


@dataclass(frozen=True, eq=False)
class CalibrationRequests:
    """The requests that are fitted: ``rows`` of the load, or the summary (of a stage) where they are not listed."""

    name: str
    rows: Rows
    summary: dict[str, float]


@dataclass(frozen=True, eq=False)
class CalibratedServer:
    """A service with fitted overheads. Errors are root mean squares over latencies, as shares."""

    service: Service
    before: Stack
    part: CalibrationRequests
    runs: int
    error_before: float
    error: float
    by_request: bool

    @property
    def stack(self) -> Stack:
        return self.service.pool.deployment.stack


def calibration_requests(bench: BenchResult, calibrate_on: str | None) -> CalibrationRequests:
    """The requests that ``calibrate_on`` names: a number of the first, ``stage:N``; None: all."""
    count = len(bench.load)
    if calibrate_on is None:
        return CalibrationRequests("all requests", np.ones(count, dtype=np.bool_), dict(bench.metrics))
    prefix, _, number = calibrate_on.rpartition(":")
    if prefix not in ("", "stage") or not number.isdigit():
        raise KernelcastError(
            f"`calibrate_on` takes a number of requests or stage:N, as in 100 or stage:0, not {calibrate_on!r}"
        )
    at = int(number)
    if prefix == "stage":
        known = [] if bench.load.stages is None else np.unique(bench.load.stages).tolist()
        if at not in known:
            stages = f"stages {known[0]} to {known[-1]}" if known else "no stages"
            raise KernelcastError(f"`calibrate_on` {calibrate_on}: {bench.path} has {stages}")
        rows = np.asarray(bench.load.stages == at)
        return CalibrationRequests(f"stage {at}", rows, dict(stage_metrics(bench, known.index(at), rows)))
    if not _one_by_one(bench):
        raise KernelcastError(
            f"`calibrate_on` {calibrate_on}: {bench.path} does not have the latencies of requests one by one "
            "(vLLM: --save-detailed)"
        )
    if not 0 < at <= count:
        raise KernelcastError(f"`calibrate_on` {calibrate_on}: {bench.path} has {count:,} requests")
    rows = np.arange(count) < at
    return CalibrationRequests(f"first {at:,} requests", rows, measured(bench, rows))


def least_spread(bench: BenchResult) -> float:
    """The least relative error of a simulation; larger for a load that was drawn again."""
    return _SPREADS[0] if _one_by_one(bench) else _SPREADS[_SUMMARY]


def _one_by_one(bench: BenchResult) -> bool:
    """Whether each request that is simulated was measured."""
    return bench.exact and (bench.ttft_s is not None or bench.e2el_s is not None)


def calibrate(bench: BenchResult, service: Service, part: CalibrationRequests, tables: StepTimeTables, *, seed: int = 0,
              progress: Callable[[int, int], None] | None = None) -> CalibratedServer:  # fmt: skip
    """The service with the overheads that fit ``part`` of the benchmark best."""
    problem = _Objective(bench, service, part, tables, seed)
    at = problem.start
    before = problem.error(at)
    for _ in range(_TIMES):  # noise is what the fit before it left
        problem.weigh(at)
        at = _searched(problem, at, progress)
    stack = replace(problem.service(at).pool.deployment.stack, spread=problem.spread(at))
    return CalibratedServer(_with(service, stack), problem.before, part, problem.runs, before, problem.error(at),
                  problem.one_by_one)  # fmt: skip


def _searched(problem: _Objective, at: Array, progress: Callable[[int, int], None] | None) -> Array:
    """Minimise from ``at`` until a step gains little."""
    here, damping = problem.residuals(at), 1e-2
    cost = float(here @ here)
    for count in range(_ROUNDS):
        if progress:
            progress(count, _ROUNDS)
        slopes, last = problem.slopes(at), cost
        for _ in range(_TRIES):
            step = np.linalg.solve(slopes.T @ slopes + damping * np.diag((slopes**2).sum(0)), -slopes.T @ here)
            tried = problem.within(at + step)
            residuals = problem.residuals(tried)
            if float(residuals @ residuals) < cost:
                at, here, cost = tried, residuals, float(residuals @ residuals)
                damping /= 5
                break
            damping *= 5
        if cost > last * (1 - _GAIN):
            break
    return at


class _Objective:
    """Residuals of a service as a function of its overheads, in scales from their initial values."""

    def __init__(
        self, bench: BenchResult, service: Service, part: CalibrationRequests, tables: StepTimeTables, seed: int
    ) -> None:
        self.before = service.pool.deployment.stack
        self.one_by_one, self._least = _one_by_one(bench), least_spread(bench)
        self._base, self._tables, self._seed = service, tables, seed
        rows = part.rows & (np.arange(len(part.rows)) < _MOST)
        kept = _needed(bench, rows) if self.one_by_one else np.ones(len(rows), dtype=np.bool_)
        self._load: Load = bench.load.take(kept)
        self._rows = rows[kept]
        check(service, self._load)
        self._times = _times(bench, rows) if self.one_by_one else {}
        summary = measured(bench, rows) if self.one_by_one else part.summary
        # Of a load that was made again lengths are means: the tails of what was measured are those of others.
        # Where requests are fitted one by one, their mean and last percentile would count those that waited for a
        # compilation, or for the machine, a second time.
        endings = ("p50", "p90") if self.one_by_one else _NOISE if bench.exact else ("mean", "p50")
        measured_ms = {f"{ending}_{name}_ms": named(summary, f"{ending}_{name}_ms") for ending, name in _FITTED
                 if ending in endings}  # fmt: skip
        self._summary = {key: value for key, value in measured_ms.items() if value}
        if not self._summary:
            raise KernelcastError(f"{bench.path} has no latencies to learn from: ttft, tpot or e2el")
        self.start, self.runs = np.zeros(len(OVERHEADS)), 0
        self._noise = dict.fromkeys(("ttft", "tpot", "e2el"), _UNKNOWN)

    def service(self, at: Array, spread: float = 0.0) -> Service:
        values = {}
        for name, u in zip(OVERHEADS, at.tolist(), strict=True):
            begun = getattr(self.before, name)
            values[name] = begun * float(np.exp(u * SCALES[name])) if name.endswith("factor") else \
                max(0.0, begun + u * SCALES[name])  # fmt: skip
        return _with(self._base, replace(self.before, **values, spread=spread))

    def within(self, at: Array) -> Array:
        """No time is negative."""
        least = [
            -np.inf if name.endswith("factor") else -getattr(self.before, name) / SCALES[name] for name in OVERHEADS
        ]
        return np.clip(at, np.maximum(least, -10.0), 20.0)

    def _served(self, at: Array, variant: str = "likely", spread: float = 0.0) -> tuple[Cluster, RequestTimes]:
        self.runs += 1
        cluster = Cluster(self.service(at, spread), self._load, self._tables, variant, self._seed)
        cluster.run()
        return cluster, RequestTimes.of(cluster.requests, self._load)

    def weigh(self, at: Array) -> None:
        """Set the noise of requests: the spread of their errors around the median error."""
        if self.one_by_one:
            errors = self._errors(self._served(at)[1])
            self._noise |= {name: 1.48 * float(np.median(np.abs(e - np.median(e)))) for name, e in errors.items()}

    def residuals(self, at: Array) -> Array:
        cluster, served = self._served(at)
        count = int(self._rows.sum())
        whole = [log / np.hypot(_EXACT, self._noise[name] * np.sqrt(_NOISE[ending] / count))
                 for (ending, name), log in self._wholes(cluster, served).items()]  # fmt: skip
        parts = [np.array(whole), at]
        if self.one_by_one:
            for name, errors in self._errors(served).items():
                weight = np.sqrt(len(_NOISE) / len(errors))  # as much as the summary
                parts.append(_tamed(errors / np.hypot(_EXACT, self._noise[name])) * weight)
        return np.concatenate(parts)

    def error(self, at: Array) -> float:
        """Root mean square of the log errors of means and percentiles."""
        return float(np.sqrt(np.mean(np.square(list(self._wholes(*self._served(at)).values())))))

    def _wholes(self, cluster: Cluster, served: RequestTimes) -> dict[tuple[str, str], float]:
        """Logarithms of predicted over measured means and percentiles."""
        simulated = metrics(served, cluster.step_log, self._rows)
        keys = {pair: f"{pair[0]}_{pair[1]}_ms" for pair in _FITTED}
        return {pair: float(np.log(simulated[key] / self._summary[key])) for pair, key in keys.items()
                if key in self._summary and key in simulated}  # fmt: skip

    def _errors(self, served: RequestTimes) -> dict[str, Array]:
        """Logarithms of predicted over measured times, of each request."""
        simulated = _simulated(served)
        logs = {name: np.log(simulated[name][self._rows] / times) for name, times in self._times.items()}
        return {name: errors[np.isfinite(errors)] for name, errors in logs.items() if np.isfinite(errors).any()}

    def slopes(self, at: Array) -> Array:
        """Central differences: a jump on one side has half the weight."""
        columns = []
        for number in range(len(at)):
            step = np.zeros(len(at))
            step[number] = _APART
            above, below = at + step, self.within(at - step)
            apart = above[number] - below[number]
            columns.append((self.residuals(above) - self.residuals(below)) / apart)
        return np.stack(columns, axis=1)

    def spread(self, at: Array) -> float:
        """The least at which runs of slower and faster steps hold most of what was measured, a tenth of the requests
        at a time."""
        for spread in (spread for spread in _SPREADS if spread >= self._least):
            ends = [self._tenths(*self._served(at, variant, spread)) for variant in ("low", "likely", "high")]
            known = self._tenths(None, None)
            inside = (np.min(ends, axis=0) <= known) & (known <= np.max(ends, axis=0))
            if np.mean(inside) >= _HELD:
                return spread
        return _SPREADS[-1]

    def _tenths(self, cluster: Cluster | None, served: RequestTimes | None) -> Array:
        """Mean latencies of the requests, a tenth of them at a time; else the summary."""
        if not self.one_by_one:
            latencies = metrics(served, cluster.step_log, self._rows) if served and cluster else self._summary
            return np.array([latencies[key] for key in self._summary])
        times = {name: values[self._rows] for name, values in _simulated(served).items()} if served else self._times
        count = max(1, min(10, int(self._rows.sum()) // 5))
        return np.array([np.nanmean(part) for name in self._times for part in np.array_split(times[name], count)])


def _with(service: Service, stack: Stack) -> Service:
    """The service with another stack; pools that share a deployment still do."""
    deployment = replace(service.pool.deployment, stack=stack)
    pool, prefill = replace(service.pool, deployment=deployment), service.prefill
    if prefill is not None:
        same = prefill.deployment is service.pool.deployment
        prefill = replace(prefill, deployment=deployment if same else replace(prefill.deployment, stack=stack))
    return replace(service, pool=pool, prefill=prefill)


def _needed(bench: BenchResult, rows: Rows) -> Rows:
    """The requests that ran beside those of the part, and all before: later ones did not affect it."""
    lasted = bench.e2el_s if bench.e2el_s is not None else bench.ttft_s
    assert lasted is not None
    if bench.load.max_concurrency:  # when each was sent is not known
        return np.asarray(np.arange(len(rows)) <= np.flatnonzero(rows)[-1] + _BEHIND * bench.load.max_concurrency)
    end_s = float(np.nanmax((bench.load.arrivals_s + lasted)[rows]))
    return np.asarray(bench.load.arrivals_s <= end_s)


def _times(bench: BenchResult, rows: Rows) -> dict[str, Array]:
    seconds = {
        name: times[rows] for name, times in (("ttft", bench.ttft_s), ("e2el", bench.e2el_s)) if times is not None
    }
    if len(seconds) == 2:
        outputs = bench.load.outputs[rows]
        tokens = np.where(outputs > 1, outputs - 1, np.nan)
        seconds["tpot"] = (seconds["e2el"] - seconds["ttft"]) / tokens
    return {name: np.where(times > 0, times, np.nan) for name, times in seconds.items()}


def _simulated(served: RequestTimes) -> dict[str, NDArray[np.float64]]:
    return {"ttft": served.ttft_s, "tpot": served.tpot_s, "e2el": served.e2el_s}


def _tamed(errors: Array) -> Array:
    """Huber's: squares near zero, no faster than lines beyond."""
    size = np.abs(errors)
    return np.sign(errors) * np.where(size <= _LARGE, size, np.sqrt(_LARGE * np.maximum(2 * size - _LARGE, 0)))
