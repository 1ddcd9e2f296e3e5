"""Results of benchmarks of real servers: the load that was sent, and what was measured under it.

`vllm bench serve --save-result [--save-detailed]`, SGLang's `bench_serving --output-file`, inference-perf's reports, or
a table of served requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.files import ENDINGS, open_table, read_text
from kernelcast.inference.request_files import cell_text, line_of, numbers
from kernelcast.serving.inference_perf import is_report, read_report
from kernelcast.serving.load import Load, arrivals, ramp, scaled_to, spread_total, vllm_draws
from kernelcast.serving.metrics import (
    BenchResult,
    Seconds,
    by_arrival,
    latencies_ms,
    server_settings,
    summary_ms,
    throughput,
)
from kernelcast.serving.traces import read_trace


def read_bench(path: Path, *, seed: int = 0) -> BenchResult:
    """A file (or, of inference-perf, a folder) with results of any of these benchmarks; the last run of several.

    ``seed``: of a load that is drawn again, since the file does not list its requests.
    """
    try:
        return _read(path, seed)
    except KernelcastError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KernelcastError(f"{path} is not as its benchmark writes it: {type(error).__name__} {error}") from None


def _read(path: Path, seed: int) -> BenchResult:
    if path.is_dir():
        return read_report(path, seed=seed)
    if not path.is_file():
        raise KernelcastError(f"no file {path}")
    if path.suffix.lower() in (".csv", ".parquet"):
        return read_served(path)
    result, notes = _runs(path)
    if is_report(result):
        return read_report(path, seed=seed)
    if isinstance(result, dict) and bench_format(result):
        return read_result(path, result, seed=seed, notes=notes)
    if path.suffix.lower() in ENDINGS:
        return read_served(path)
    raise KernelcastError(
        f"{path} is no result of a benchmark that kernelcast knows: `vllm bench serve --save-result`, SGLang's"
        " bench_serving, inference-perf, or a table with arrival_s, first_token_s, last_token_s"
    )


def _runs(path: Path) -> tuple[Any, tuple[str, ...]]:
    """The JSON of a file; where it has a line for each run, the last."""
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        raise KernelcastError(f"{path} is not text; a result of a benchmark is JSON, CSV or Parquet") from None
    try:
        return json.loads(text), ()
    except json.JSONDecodeError as error:
        said = f"line {error.lineno}: {error.msg}" if text.strip() else "it is empty"
    try:
        runs = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError:
        runs = []
    if not runs:
        raise KernelcastError(f"{path} is not JSON: {said}")
    return runs[-1], (f"the file has {len(runs)} runs; this is the last",)


def read_served(path: Path) -> BenchResult:
    """A table with one row per served request: arrival_s, first_token_s, last_token_s, and its tokens."""
    wanted = ("arrival_s", "first_token_s", "last_token_s")
    with open_table(path) as source:
        missing = [name for name in wanted if name not in source.types]
        if missing:
            raise KernelcastError(
                f"{path}: a table of served requests needs columns {', '.join(wanted)}; {', '.join(missing)} not found"
            )
        cells = source.named(*wanted)
    sent, first, last = (numbers(cells[name]) for name in wanted)
    with np.errstate(invalid="ignore"):
        bad = ~((sent <= first) & (first <= last) & (last < np.inf))
    if bad.any():
        row = int(np.argmax(bad))
        times = ", ".join(cell_text(cells[name][row]) for name in wanted)
        raise KernelcastError(f"{path}: {line_of(path, row)}: {', '.join(wanted)} must follow one another, not {times}")
    trace = read_trace(path, "kernelcast", skip_bad=True)  # sorted; bad rows are counted
    if trace.skipped:
        raise KernelcastError(f"{path}: {trace.problems()}")
    order = np.argsort(sent, kind="stable")
    load, ttft, e2el = trace.load(), (first - sent)[order], (last - sent)[order]
    metrics = latencies_ms(load.outputs, ttft, e2el)
    metrics |= throughput(load.inputs, load.outputs, max(float(last.max() - sent.min()), 1e-9))
    return BenchResult(path, "requests", load, True, metrics, _meta_beside(path), ttft, e2el)


def _meta_beside(path: Path) -> dict[str, Any]:
    """The server's settings from a JSON file beside a table: NAME_meta.json beside NAME_requests.parquet, or
    meta.json."""
    stem = path.stem.removesuffix("_requests").removesuffix("requests")
    for name in (f"{stem}_meta.json" if stem else "", f"{path.stem}.json", "meta.json"):
        beside = path.with_name(name) if name else path
        if name and beside.is_file():
            try:
                meta = json.loads(beside.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError):
                continue
            if isinstance(meta, dict):
                engine = meta.get("engine_kwargs")
                return server_settings({**meta, **(engine if isinstance(engine, dict) else {})})
    return {}


_LATENCY = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
_TOTALS = (
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "total_throughput", "max_concurrent_requests",
    "concurrency",
)  # fmt: skip
_LONG_RUN = "the file has no requests one by one (vLLM: --save-detailed; SGLang: --output-details): made again"


def bench_format(result: Mapping[str, Any]) -> str:
    """The benchmark that wrote a result: vllm, sglang, or '' for anything else."""
    if "mean_e2e_latency_ms" in result or "sharegpt_output_len" in result:
        return "sglang"
    return "vllm" if "request_throughput" in result and "completed" in result else ""


def read_result(path: Path, result: Mapping[str, Any], *, seed: int = 0, notes: tuple[str, ...] = ()) -> BenchResult:
    """The result of one run."""
    benchmark = bench_format(result)
    server = server_settings({**result, **_server_info(result)})
    measured = {_name(key): value for key in result if _is_metric(key) and (value := _number(result[key])) is not None}
    if "total_throughput" in measured:
        measured["total_token_throughput"] = measured.pop("total_throughput")
    if not _is_list(result, "input_lens") or not _is_list(result, "output_lens"):
        load, more = _made_again(path, result, seed)
        if _is_list(result, "latencies"):  # newer vLLM keeps them without --save-detailed
            ended = np.array(result["latencies"], dtype=np.float64)
            measured = summary_ms("e2el", ended[ended > 0]) | measured
        return BenchResult(path, benchmark, load, False, measured, server, notes=(*notes, *more))
    sent = _Sent(path, result, seed)
    good = sent.good()
    columns = {"inputs": sent.inputs, "outputs": sent.outputs, "ttft": sent.times("ttfts"), "e2el": sent.e2el()}
    kept = {name: None if column is None else column[good] for name, column in columns.items()}
    gaps = [row for row, fine in zip(sent.itls, good, strict=True) if fine] if sent.itls else []
    order, ordered, itls = by_arrival(sent.arrivals_s[good], kept, gaps)
    load = Load(sent.arrivals_s[good][order], ordered["inputs"], ordered["outputs"], max_concurrency=sent.concurrency)
    failed = int(np.count_nonzero(~good))
    left_out = (f"{failed} of {len(good)} requests failed and are left out",) if failed else ()
    computed = latencies_ms(load.outputs, ordered["ttft"], ordered["e2el"], itls)
    return BenchResult(
        path, benchmark, load, sent.exact, {**computed, **measured}, server, ordered["ttft"], ordered["e2el"], itls,
        notes=(*notes, *sent.notes, *left_out),
    )  # fmt: skip


class _Sent:
    """The requests that the file lists."""

    def __init__(self, path: Path, result: Mapping[str, Any], seed: int) -> None:
        self.path, self.result = path, result
        self.inputs = self._tokens("input_lens")
        self.outputs = self._tokens("output_lens")
        self.itls: list[Any] = result["itls"] if _is_list(result, "itls") else []
        if self.itls and len(self.itls) != len(self.inputs):
            raise KernelcastError(f"{path}: itls has {len(self.itls)} entries for {len(self.inputs)} requests")
        self.concurrency = _concurrency(result)
        self.exact = True
        self.notes: tuple[str, ...] = ()
        self.arrivals_s = self._arrivals(seed)

    def times(self, name: str) -> Seconds | None:
        """Seconds by request, where the file has them."""
        if not _is_list(self.result, name):
            return None
        try:
            times = np.array(self.result[name], dtype=np.float64)
        except (TypeError, ValueError):
            times = np.zeros(0)
        if times.shape != self.inputs.shape:
            raise KernelcastError(f"{self.path}: {name} must have a number for each of {len(self.inputs)} requests")
        return times

    def good(self) -> NDArray[np.bool_]:
        """Which requests completed."""
        good = (self.inputs > 0) & (self.outputs > 0)
        errors = self.result.get("errors")
        if isinstance(errors, list) and len(errors) == len(good):
            good &= np.array([not error for error in errors])
        if not good.any():
            raise KernelcastError(f"{self.path}: none of its {len(good)} requests completed")
        return good

    def e2el(self) -> Seconds | None:
        """End-to-end latencies: as measured, or the sum of the first token and gaps."""
        ttft = self.times("ttfts")
        measured = self.times("latencies")
        if measured is not None or ttft is None or not self.itls:
            return measured
        return ttft + np.array([float(np.sum(gaps)) if gaps else 0.0 for gaps in self.itls])

    def _tokens(self, name: str) -> NDArray[np.int64]:
        try:
            tokens = np.array(self.result[name], dtype=np.float64)
        except (TypeError, ValueError):
            tokens = np.array([np.nan])
        if not len(tokens) or tokens.ndim != 1 or not np.all(tokens >= 0):
            raise KernelcastError(f"{self.path}: {name} must be a list of token counts")
        if len(tokens) != len(self.result["input_lens"]):
            raise KernelcastError(f"{self.path}: {name} has {len(tokens)} entries, input_lens has others")
        return tokens.astype(np.int64)

    def _arrivals(self, seed: int) -> Seconds:
        """When each was due: a client with --max-concurrency held some back, which newer vLLM says."""
        rate, started, held = _rate(self.path, self.result), self.times("start_times"), self.times("queue_times")
        if started is None and np.isinf(rate):
            return np.zeros(len(self.inputs))
        if started is None:
            self.exact = False
            self.notes = ("the file has no start_times: arrivals are made again from the rate",)
            return _rated(self.path, self.result, len(self.inputs), seed)
        if held is not None:
            started = started - np.maximum(held, 0)
        elif self.concurrency and np.isinf(rate):
            return np.zeros(len(self.inputs))  # all were due at once
        elif self.concurrency:
            self.exact = False
            self.notes = ("start_times have in them what --max-concurrency held requests back",)
        return started - started.min()


def _made_again(path: Path, result: Mapping[str, Any], seed: int) -> tuple[Load, tuple[str, ...]]:
    """A load with the rate, the number and the mean lengths of the file."""
    done = _count(result, "completed") or _count(result, "num_prompts")
    totals = [_count(result, name) for name in ("total_input_tokens", "total_output_tokens")]
    if not done or not all(totals):
        raise KernelcastError(f"{path} says too little of its load: completed, total_input_tokens, total_output_tokens")
    lengths = [
        _lengths(result, name, total, done, seed) for name, total in zip(("input", "output"), totals, strict=True)
    ]
    load = Load(_rated(path, result, done, seed), lengths[0], lengths[1], max_concurrency=_concurrency(result))
    return load, (f"{_LONG_RUN} from its rate and mean lengths",)


def _lengths(result: Mapping[str, Any], side: str, total: int, count: int, seed: int) -> NDArray[np.int64]:
    """Equal lengths, or those of SGLang's random dataset: uniform from a share of the length to the length."""
    longest, ratio = _number(result.get(f"random_{side}_len")), _number(result.get("random_range_ratio"))
    random = str(result.get("dataset_name", "")).startswith("random")
    if bench_format(result) == "sglang" and random and longest is not None and ratio is not None and ratio < 1:
        low = max(int(longest * ratio), 1)
        draws = np.random.default_rng([seed, side == "output"])
        return scaled_to(draws.integers(low, max(int(longest), low) + 1, size=count), total)
    return spread_total(total, count)


def _rated(path: Path, result: Mapping[str, Any], count: int, seed: int) -> Seconds:
    shape = _number(result.get("burstiness")) or 1.0
    if result.get("ramp_up_strategy"):
        start, end = (float(result.get(f"ramp_up_{at}_rps") or 0) for at in ("start", "end"))
        return ramp(count, start, end, vllm_draws(seed), str(result["ramp_up_strategy"]), shape)
    return arrivals(count, _rate(path, result), vllm_draws(seed), "gamma", burstiness=shape)


def _rate(path: Path, result: Mapping[str, Any]) -> float:
    said = result.get("request_rate", "inf")
    if said == "trace":
        raise KernelcastError(f"{path}: requests were sent at the times of a trace, which the file does not have")
    try:
        rate = float("inf" if said is None else said)
    except (TypeError, ValueError):
        rate = 0.0
    if not rate > 0:
        raise KernelcastError(f"{path}: request_rate must be a number of requests per second or inf, not {said!r}")
    return rate


def _concurrency(result: Mapping[str, Any]) -> int:
    return _count(result, "max_concurrency")


def _count(result: Mapping[str, Any], name: str) -> int:
    return int(_number(result.get(name)) or 0)


def _server_info(result: Mapping[str, Any]) -> dict[str, Any]:
    """Newer SGLang files have the result of /get_server_info."""
    info = result.get("server_info")
    return dict(info) if isinstance(info, dict) else {}


def _is_metric(key: str) -> bool:
    return key in _TOTALS or bool(_LATENCY.fullmatch(key))


def _name(key: str) -> str:
    return key.replace("e2e_latency", "e2el")


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    return float(value) if is_number else None


def _is_list(result: Mapping[str, Any], name: str) -> bool:
    return isinstance(result.get(name), list) and len(result[name]) > 0
