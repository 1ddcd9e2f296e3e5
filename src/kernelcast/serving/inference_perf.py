"""Reports of inference-perf: of the whole run, of its stages, and of each request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.serving.load import Lengths, Load, Pieces, arrivals, shared_prefix, vllm_draws
from kernelcast.serving.metrics import BenchResult, Seconds, by_arrival, latencies_ms, throughput

_SUMMARY, _REQUESTS = "summary_lifecycle_metrics.json", "per_request_lifecycle_metrics.json"
_STAGE = re.compile(r"stage_(\d+)_lifecycle_metrics\.json")
_LATENCIES = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
    "request_latency": "e2el",
}
_RATES = {
    "requests_per_sec": "request_throughput",
    "output_tokens_per_sec": "output_throughput",
    "total_tokens_per_sec": "total_token_throughput",
}
_KEYS = re.compile(r"mean|median|p\d+(\.\d+)?")


def is_report(report: Any) -> bool:
    """Whether it is a report of a run or a stage, or the list of requests."""
    if isinstance(report, dict):
        return isinstance(report.get("successes"), dict)
    return isinstance(report, list) and bool(report) and isinstance(report[0], dict) and "start_time" in report[0]


def read_report(path: Path, *, seed: int = 0) -> BenchResult:
    """A folder of reports, or one report; a stage has its part of the list of requests in the same folder."""
    folder = path if path.is_dir() else path.parent
    stages = _stages(folder)
    known = [name for name in (_SUMMARY, _REQUESTS) if (folder / name).is_file()]
    if path.is_dir() and not stages and not known:
        raise KernelcastError(f"{path} has no reports of inference-perf, such as {_SUMMARY}")
    alone = _STAGE.fullmatch(path.name)
    number = int(alone.group(1)) if alone else -1
    listed = folder / _REQUESTS if (folder / _REQUESTS).is_file() else path
    requests = _json(listed) if listed.is_file() else None
    if isinstance(requests, list):
        return _of_requests(path, requests, folder, stages, number)
    if number in stages:
        stages = {number: stages[number]}
    summary = folder / _SUMMARY
    report = stages[number] if number in stages else _json(summary if summary.is_file() else path)
    picked = stages or {0: report}
    load = _made_again(path, [picked[key] for key in sorted(picked)], _config(folder), seed)
    notes = (f"no {_REQUESTS} beside it: the load is made again from the rates and mean lengths of its stages",)
    return BenchResult(
        path, "inference-perf", load, False, _metrics(report), _server(folder),
        stages=tuple(_metrics(picked[key]) for key in sorted(picked)), notes=notes,
    )  # fmt: skip


def _of_requests(
    path: Path, requests: Sequence[Any], folder: Path, stages: Mapping[int, Any], number: int
) -> BenchResult:
    rows = [row for row in requests if isinstance(row, dict) and "start_time" in row]
    if not rows:
        raise KernelcastError(f"{folder / _REQUESTS} has no request with a start_time")
    rows.sort(key=lambda row: float(row["start_time"]))
    stage_of = _stage_of(len(rows), stages)
    reported = _metrics(_json(folder / _SUMMARY)) if (folder / _SUMMARY).is_file() else {}
    if number >= 0:
        if stage_of is None:
            raise KernelcastError(f"{path}: which requests of {_REQUESTS} are of this stage is not known")
        rows = [row for row, stage in zip(rows, stage_of, strict=True) if stage == number]
        stage_of, reported = None, _metrics(stages[number])
    good = [row for row in rows if not row.get("error") and _tokens(row, "input") and _tokens(row, "output")]
    if not good:
        raise KernelcastError(f"{folder / _REQUESTS}: none of its {len(rows)} requests completed")
    kept = None
    if stage_of is not None:
        answered = {id(row) for row in good}
        kept = stage_of[np.array([id(row) in answered for row in rows])]
    load, ttft, e2el, itls, last_s = _served(good, kept)
    computed = latencies_ms(load.outputs, ttft, e2el, itls) | throughput(load.inputs, load.outputs, last_s)
    failed = len(rows) - len(good)
    notes = [f"{failed} of {len(rows)} requests failed and are left out"] if failed else []
    if load.shared:
        notes.append("what prompts share is found in their texts, with characters for tokens")
    return BenchResult(
        path, "inference-perf", load, True, {**computed, **reported}, _server(folder), ttft, e2el, itls,
        tuple(_metrics(stages[key]) for key in sorted(stages)) if number < 0 else (), tuple(notes),
    )  # fmt: skip


def _served(
    rows: Sequence[Mapping[str, Any]], stages: NDArray[np.int64] | None
) -> tuple[Load, Seconds, Seconds, tuple[Seconds, ...], float]:
    """The load and the times of completed requests; and the duration."""
    starts = np.array([float(row["start_time"]) for row in rows])
    ends = np.array([float(row["end_time"]) for row in rows])
    inputs = np.array([_tokens(row, "input") for row in rows])
    tokens = [_token_times(row) for row in rows]
    first = np.array([times[0] if len(times) else np.nan for times in tokens])
    columns: dict[str, NDArray[Any] | None] = {
        "inputs": inputs,
        "outputs": np.array([_tokens(row, "output") for row in rows]),
        "ttft": first - starts,
        "e2el": ends - starts,
    }
    order, ordered, itls = by_arrival(starts, columns, [np.diff(times) for times in tokens])
    shared = _shared([rows[at] for at in order], ordered["inputs"])
    load = Load(starts[order] - starts.min(), ordered["inputs"], ordered["outputs"], shared, stages=stages)
    return load, ordered["ttft"], ordered["e2el"], itls, max(float(ends.max() - starts.min()), 1e-9)


def _shared(rows: Sequence[Mapping[str, Any]], inputs: NDArray[np.int64]) -> tuple[Pieces, ...]:
    prompts = [_prompt(row.get("request")) for row in rows]
    return shared_by_text(prompts, inputs) if all(prompts) else ()


def _prompt(request: Any) -> str:
    """The text of a request's body; '' where there is none."""
    try:
        body = json.loads(request) if isinstance(request, str) else request
    except json.JSONDecodeError:
        return ""
    if not isinstance(body, dict):
        return ""
    if isinstance(body.get("messages"), list):
        return "\n".join(str(said.get("content", "")) for said in body["messages"] if isinstance(said, dict))
    return body["prompt"] if isinstance(body.get("prompt"), str) else ""


def _tokens(row: Mapping[str, Any], side: str) -> int:
    """Older reports have counts at the top of info, newer ones in its parts; the server's own count is exact."""
    info = row.get("info") or {}
    answer = info.get("response_metrics") or {}
    if side == "input":
        text = (info.get("request_metrics") or {}).get("text") or {}
        return int(info.get("input_tokens") or text.get("input_tokens") or 0)
    usage = answer.get("server_usage") or {}
    return int(usage.get("completion_tokens") or answer.get("output_tokens") or info.get("output_tokens") or 0)


def _token_times(row: Mapping[str, Any]) -> Seconds:
    info = row.get("info") or {}
    answer = info.get("response_metrics") or {}
    times = answer.get("output_token_times") or info.get("output_token_times") or answer.get("chunk_times") or []
    return np.asarray(times, dtype=np.float64)


def _stages(folder: Path) -> dict[int, Any]:
    stages = {int(hit.group(1)): _json(file) for file in folder.iterdir() if (hit := _STAGE.fullmatch(file.name))}
    return dict(sorted(stages.items()))


def _stage_of(count: int, stages: Mapping[int, Any]) -> NDArray[np.int64] | None:
    """The stage of each request: stages are sequential, so their counts determine it; None where they do not."""
    sizes = [int((stages[number].get("load_summary") or {}).get("count") or 0) for number in sorted(stages)]
    return np.repeat(np.array(sorted(stages)), sizes) if sizes and sum(sizes) == count else None


def _made_again(path: Path, reports: Sequence[Any], config: Mapping[str, str], seed: int) -> Load:
    """Each report as a stage at its rate, with its mean lengths; shared prompts where config.yaml has them."""
    times: list[Seconds] = []
    counts: list[int] = []
    rates: list[tuple[int, int]] = []
    start_s = 0.0
    for report in reports:
        said, done = report.get("load_summary") or {}, report.get("successes") or {}
        count = int(said.get("count") or done.get("count") or 0)
        seconds = float(said.get("send_duration") or report.get("benchmark_time_seconds") or 0)
        rate = float(said.get("requested_rate") or (count / seconds if seconds else 0))
        if not count or not rate > 0:
            raise KernelcastError(f"{path} says too little of its load: load_summary needs count and requested_rate")
        process = "constant" if config.get("load_type") == "constant" else "poisson"
        times.append(start_s + arrivals(count, rate, vllm_draws(seed + len(times)), process))
        counts.append(count)
        rates.append((_mean(path, done, "prompt_len"), _mean(path, done, "output_len")))
        start_s += count / rate
    numbers = np.repeat(np.arange(len(counts)), counts)
    if _has_groups(config):
        question_len = max(rates[0][0] - int(config["system_prompt_len"]), 1)
        prompts = shared_prefix(
            sum(counts), int(config["groups"]), int(config["users"]), int(config["system_prompt_len"]),
            Lengths(question_len), Lengths(rates[0][1]), np.random.default_rng(seed),
        )  # fmt: skip
        return Load(np.concatenate(times), prompts.inputs, prompts.outputs, prompts.shared, stages=numbers)
    inputs, outputs = (np.repeat([pair[side] for pair in rates], counts) for side in (0, 1))
    return Load(np.concatenate(times), inputs, outputs, stages=numbers)


def _mean(path: Path, done: Mapping[str, Any], name: str) -> int:
    mean = (done.get(name) or {}).get("mean")
    if not isinstance(mean, int | float) or not mean > 0:
        raise KernelcastError(f"{path} says too little of its load: successes needs the mean of {name}")
    return max(round(mean), 1)


def _metrics(report: Any) -> dict[str, float]:
    """The metrics of a report by vLLM's names, in milliseconds."""
    done = report.get("successes") or {}
    metrics = {}
    for theirs, ours in _LATENCIES.items():
        for key, value in ((done.get("latency") or {}).get(theirs) or {}).items():
            if _KEYS.fullmatch(key) and isinstance(value, int | float):
                metrics[f"{key}_{ours}_ms"] = float(value) * 1e3
    rates = done.get("throughput") or {}
    metrics |= {
        ours: float(rates[theirs]) for theirs, ours in _RATES.items() if isinstance(rates.get(theirs), int | float)
    }
    counts = {"completed": done.get("count"), "failed": (report.get("failures") or {}).get("count"),
              "duration": report.get("benchmark_time_seconds")}  # fmt: skip
    return metrics | {name: float(value) for name, value in counts.items() if isinstance(value, int | float)}


def _config(folder: Path) -> dict[str, str]:
    """The few keys of config.yaml that matter here; a program writes it, a key a line."""
    file = folder / "config.yaml"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    wanted = {
        "model": r"model_name",
        "groups": r"num_groups|num_unique_system_prompts",
        "users": r"num_prompts_per_group|num_users_per_system_prompt",
        "system_prompt_len": r"system_prompt_len",
    }
    config = {}
    for key, names in wanted.items():
        if hit := re.search(rf"^\s*(?:{names}):\s*['\"]?([^\s'\"#]+)", text, re.MULTILINE):
            config[key] = hit.group(1)
    if hit := re.search(r"^load:\s*\n(?:\s+.*\n)*?\s+type:\s*(\w+)", text, re.MULTILINE):
        config["load_type"] = hit.group(1).lower()
    return config


def _has_groups(config: Mapping[str, str]) -> bool:
    return all(config.get(key, "").isdigit() for key in ("groups", "users", "system_prompt_len"))


def _server(folder: Path) -> dict[str, Any]:
    config = _config(folder)
    return {"model": config["model"]} if config.get("model", "null") != "null" else {}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise KernelcastError(f"{path} is not JSON") from None


_LEAST_CHARACTERS = 64  # some 16 tokens, a block of a server's cache: shorter prefixes are not shared


def shared_by_text(prompts: Sequence[str], inputs: NDArray[np.int64]) -> tuple[Pieces, ...]:
    """Prefixes that each prompt shares with others; characters are converted to tokens by the prompt's mean.

    Prompts with a common prefix are neighbours in a sorted list: a group shares its shortest common beginning, and
    falls apart into smaller groups that share more.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    alike = np.array([0, *(_alike(prompts[a], prompts[b]) for a, b in pairwise(order))])
    pieces: list[list[tuple[int, int]]] = [[] for _ in prompts]
    streams, groups = 0, [(0, len(order), 0)]  # from, to, characters that are shared already
    while groups:
        first, last, known = groups.pop()
        if last - first < 2:
            continue
        common = int(alike[first + 1 : last].min())
        ends = [first, *(first + 1 + np.flatnonzero(alike[first + 1 : last] == common)).tolist(), last]
        if common - known >= _LEAST_CHARACTERS:
            leader = order[first]
            tokens = round((common - known) * int(inputs[leader]) / max(len(prompts[leader]), 1))
            for row in order[first:last]:
                left = int(inputs[row]) - sum(part for _, part in pieces[row])
                if min(tokens, left) > 0:
                    pieces[row].append((streams, min(tokens, left)))
            streams, known = streams + 1, common
        groups += [(start, end, known) for start, end in pairwise(ends)]
    return tuple(map(tuple, pieces)) if any(pieces) else ()


def _alike(first: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
