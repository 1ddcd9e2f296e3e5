"""One run of any of the supported benchmarks, and its metrics by the names of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.ops.work import Array

if TYPE_CHECKING:
    from kernelcast.serving.load import Load
    from kernelcast.serving.scheduler import Request

PERCENTILES = (50, 90, 95, 99)


def summary_ms(name: str, values_s: NDArray[np.float64]) -> dict[str, float]:
    """mean_ttft_ms, median_ttft_ms, std_ttft_ms, p90_ttft_ms, .. of times in seconds; nothing of none."""
    values = values_s[np.isfinite(values_s)] * 1e3
    if not len(values):
        return {}
    summary = {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
    summary |= {f"p{p}_{name}_ms": at for p, at in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
    return {key: float(value) for key, value in summary.items()}


def latencies_ms(
    outputs: NDArray[np.int64],
    ttft_s: NDArray[np.float64] | None,
    e2el_s: NDArray[np.float64] | None,
    itls: Sequence[NDArray[np.float64]] = (),
) -> dict[str, float]:
    """Latency statistics of all requests: TTFT, TPOT, ITL and end-to-end latency."""
    latencies: dict[str, float] = {}
    if ttft_s is not None:
        latencies |= summary_ms("ttft", ttft_s)
    if ttft_s is not None and e2el_s is not None:
        several = outputs > 1
        latencies |= summary_ms("tpot", (e2el_s - ttft_s)[several] / (outputs[several] - 1))
    if len(itls):
        latencies |= summary_ms("itl", np.concatenate([np.asarray(gaps, dtype=np.float64) for gaps in itls]))
    return latencies | (summary_ms("e2el", e2el_s) if e2el_s is not None else {})


def throughput(inputs: NDArray[np.int64], outputs: NDArray[np.int64], duration_s: float) -> dict[str, float]:
    """Throughput of requests that completed in ``duration_s``."""
    tokens_in, tokens_out = int(inputs.sum()), int(outputs.sum())
    return {
        "duration": duration_s,
        "completed": float(len(inputs)),
        "total_input_tokens": float(tokens_in),
        "total_output_tokens": float(tokens_out),
        "request_throughput": len(inputs) / duration_s,
        "output_throughput": tokens_out / duration_s,
        "total_token_throughput": (tokens_in + tokens_out) / duration_s,
    }


@dataclass(frozen=True, eq=False)
class LatencyGoals:
    """Latency goals of a request for goodput, in seconds; None: no goal."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @property
    def given(self) -> bool:
        return any(goal is not None for goal in (self.ttft_s, self.tpot_s, self.e2el_s))


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """One entry a request, in the load's order; NaN where an interrupt came first. Times count from the load's start;
    ``arrival_s`` is when a request was sent, which a closed loop decides."""

    arrival_s: Array
    scheduled_s: Array
    first_token_s: Array
    last_token_s: Array
    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]
    cached: NDArray[np.int64]
    preempted: NDArray[np.int64]
    replica: NDArray[np.int64]

    @classmethod
    def of(cls, requests: list[Request], load: Load) -> RequestTimes:
        def seconds(name: str) -> Array:
            return np.array([getattr(request, name) for request in requests], dtype=np.float64)

        def counts(name: str) -> NDArray[np.int64]:
            return np.array([getattr(request, name) for request in requests], dtype=np.int64)

        return cls(
            seconds("arrival_s"), seconds("scheduled_s"), seconds("first_s"), seconds("last_s"), load.inputs,
            load.outputs, counts("cached"), counts("preempted"), counts("replica"),
        )  # fmt: skip

    @property
    def done(self) -> NDArray[np.bool_]:
        return np.isfinite(self.last_token_s)

    @property
    def ttft_s(self) -> Array:
        return self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> Array:
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Array:
        """NaN of a request with one token."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.last_token_s - self.first_token_s) / np.where(self.outputs > 1, self.outputs - 1, np.nan)

    def good(self, goals: LatencyGoals) -> NDArray[np.bool_]:
        """Which requests meet every goal; a request of one token meets any goal of time per output token."""
        kept = self.done.copy()
        for goal, value in ((goals.ttft_s, self.ttft_s), (goals.tpot_s, self.tpot_s), (goals.e2el_s, self.e2el_s)):
            if goal is not None:
                kept &= ~(value > goal)
        return kept


def metrics(served: RequestTimes, notes: StepLog, rows: NDArray[np.bool_] | None = None,
            goals: LatencyGoals | None = None) -> dict[str, float]:  # fmt: skip
    """Throughput, and mean, median and percentiles of latencies by vLLM's names; of some ``rows``, or all."""
    chosen = served.done if rows is None else served.done & rows
    if not chosen.any():
        return {"completed": 0.0}
    outputs = served.outputs[chosen]
    duration_s = float(served.last_token_s[chosen].max() - served.arrival_s[chosen].min())
    values = throughput(served.inputs[chosen], outputs, max(duration_s, 1e-9))
    if goals and goals.given:
        values["request_goodput"] = float((served.good(goals) & chosen).sum()) / max(duration_s, 1e-9)
    values |= latencies_ms(outputs, served.ttft_s[chosen], served.e2el_s[chosen])
    return values | _gaps_ms(served, notes, chosen, whole=rows is None)


def follows_steps(load: Load, fast: Mapping[str, float], slow: Mapping[str, float]) -> float:
    """The share of a step's error that shows in the throughput, by the metrics of both ends of the interval of every
    step: nothing in an open loop whose server keeps up, all of it where requests wait for the server."""
    if load.form != "open loop":
        return 1.0
    slower = slow["mean_e2el_ms"] / fast["mean_e2el_ms"]
    less = fast["request_throughput"] / slow["request_throughput"]
    return float(np.clip(np.log(less) / np.log(slower), 0.0, 1.0)) if slower > 1 else 1.0


def _gaps_ms(served: RequestTimes, notes: StepLog, chosen: NDArray[np.bool_], *, whole: bool) -> dict[str, float]:
    """Gaps between tokens: their mean is that of the requests; percentiles are those of the steps, each counted once
    for every sequence that it decoded. Of a part of the load the steps while it ran stand for its own."""
    tokens = served.outputs[chosen] - 1
    if not tokens.sum():
        return {}
    mean_ms = float((served.last_token_s - served.first_token_s)[chosen].sum() / tokens.sum()) * 1e3
    lasted, weight, starts = notes.gaps()
    if not whole:
        first, last = served.arrival_s[chosen].min(), served.last_token_s[chosen].max()
        weight = weight * ((starts >= first) & (starts <= last))
    if not weight.sum():
        return {"mean_itl_ms": mean_ms}
    order = np.argsort(lasted)
    share = np.cumsum(weight[order]) / weight.sum()
    at = [float(lasted[order][np.searchsorted(share, p / 100)]) * 1e3 for p in PERCENTILES]
    named = {f"p{p}_itl_ms": value for p, value in zip(PERCENTILES, at, strict=True)}
    spread = float(np.sqrt(np.average((lasted * 1e3 - mean_ms) ** 2, weights=weight)))
    return {"mean_itl_ms": mean_ms, "median_itl_ms": at[0], "std_itl_ms": spread, **named}


@dataclass
class StepLog:
    """A log of steps, one entry for each stretch of equal steps."""

    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    kv_use: list[float] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    blocked_s: dict[str, float] = field(default_factory=dict)  # time that requests waited because of a limit

    def hold(self, since_s: float, later_s: float) -> None:
        """The tokens of the last step, which began at ``since_s``, come later than it ended."""
        if self.steps[-1] > 1:
            self.end_s[-1], end_s = since_s, self.end_s[-1]
            self.steps[-1] -= 1
            for column in (self.decoding, self.prompt_tokens, self.waiting, self.engine):
                column.append(column[-1])
            self.kv_use.append(self.kv_use[-1])
            self.start_s.append(since_s)
            self.end_s.append(end_s)
            self.steps.append(1)
        self.end_s[-1] += later_s

    def gaps(self) -> tuple[Array, Array, Array]:
        """Seconds between tokens of those that decode, of each stretch, how many such gaps there were, and when it
        began. A step that only prefills lengthens one gap of those that decoded before it in its engine."""
        rows: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
        waited: dict[int, float] = {}
        decoded: dict[int, int] = {}
        for start, end, steps, decoding, engine in zip(
            self.start_s, self.end_s, self.steps, self.decoding, self.engine, strict=True
        ):
            if not decoding:
                waited[engine] = waited.get(engine, 0.0) + end - start
                continue
            each_s, wait_s = (end - start) / steps, waited.pop(engine, 0.0)
            held = min(decoded.get(engine, 0), decoding) if wait_s else 0
            rows += [(each_s, steps * decoding - held, start), (each_s + wait_s, held, start)]
            decoded[engine] = decoding
        seconds, count, starts = np.array(rows).T
        return seconds, count, starts


Seconds = NDArray[np.float64]


_NAMES = {  # names that servers and benchmarks use for the same setting
    "model": ("model", "model_id", "model_path", "model_name"),
    "tokenizer": ("tokenizer", "tokenizer_id", "tokenizer_path"),
    "tp": ("tp", "tensor_parallel_size", "tp_size"),
    "pp": ("pp", "pipeline_parallel_size", "pp_size"),
    "dp": ("dp", "data_parallel_size", "dp_size"),
    "max_num_seqs": ("max_num_seqs", "max_running_requests"),
    "max_num_batched_tokens": ("max_num_batched_tokens", "chunked_prefill_size"),
    "max_model_len": ("max_model_len", "context_length"),
    "dtype": ("dtype",),
    "kv_cache_dtype": ("kv_cache_dtype",),
    "backend": ("backend", "endpoint_type"),
    "version": ("vllm_version", "sglang_version", "version"),
    "gpu": ("gpu", "gpu_type", "hardware"),
}


@dataclass(frozen=True, eq=False)
class BenchResult:
    """One run of a benchmark. Arrays of measured times have an entry for each request of the load, NaN for none."""

    path: Path
    benchmark: str  # vllm, sglang, inference-perf, requests
    load: Load
    exact: bool  # the load has the requests that were sent; else it is drawn again from rates and mean lengths
    metrics: Mapping[str, float]  # by vLLM's names
    server: Mapping[str, Any] = field(default_factory=dict)  # settings in the file: model, tp, max_num_seqs, ..
    ttft_s: Seconds | None = None
    e2el_s: Seconds | None = None
    itls: tuple[Seconds, ...] = ()
    stages: tuple[Mapping[str, float], ...] = ()  # metrics of the stages of the load
    notes: tuple[str, ...] = ()  # notes on the load


def server_settings(source: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a server under one name each; numbers written as text become numbers."""
    settings: dict[str, Any] = {}
    for key, names in _NAMES.items():
        value = next((source[name] for name in names if source.get(name) not in (None, "")), None)
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, str | int | float):
            settings[key] = value
    return settings


def by_arrival(
    arrivals_s: Seconds, columns: Mapping[str, NDArray[Any] | None], itls: Sequence[Any]
) -> tuple[NDArray[np.int64], dict[str, Any], tuple[Seconds, ...]]:
    """All arrays sorted by arrival, as a load requires."""
    order = np.argsort(arrivals_s, kind="stable")
    ordered = {name: None if column is None else column[order] for name, column in columns.items()}
    return order, ordered, tuple(np.asarray(itls[row], dtype=np.float64) for row in order) if len(itls) else ()
