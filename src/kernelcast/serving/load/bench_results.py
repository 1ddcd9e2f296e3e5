"""One run of a benchmark, whatever wrote it down, and its metrics by the names of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.serving.load.load import Load

PERCENTILES = (50, 90, 95, 99)


def summary_ms(name: str, values_s: NDArray[np.float64]) -> dict[str, float]:
    """mean_ttft_ms, median_ttft_ms, std_ttft_ms, p90_ttft_ms, .. of times in seconds; nothing of none."""
    values = values_s[np.isfinite(values_s)] * 1e3
    if not len(values):
        return {}
    found = {f"mean_{name}_ms": values.mean(), f"median_{name}_ms": np.median(values), f"std_{name}_ms": values.std()}
    found |= {f"p{p}_{name}_ms": at for p, at in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
    return {key: float(value) for key, value in found.items()}


def latencies_ms(
    outputs: NDArray[np.int64],
    ttft_s: NDArray[np.float64] | None,
    e2el_s: NDArray[np.float64] | None,
    itls: Sequence[NDArray[np.float64]] = (),
) -> dict[str, float]:
    """Of all requests: time to first token, time per output token behind it, gaps between tokens, end to end."""
    found: dict[str, float] = {}
    if ttft_s is not None:
        found |= summary_ms("ttft", ttft_s)
    if ttft_s is not None and e2el_s is not None:
        several = outputs > 1
        found |= summary_ms("tpot", (e2el_s - ttft_s)[several] / (outputs[several] - 1))
    if len(itls):
        found |= summary_ms("itl", np.concatenate([np.asarray(gaps, dtype=np.float64) for gaps in itls]))
    return found | (summary_ms("e2el", e2el_s) if e2el_s is not None else {})


def throughput(inputs: NDArray[np.int64], outputs: NDArray[np.int64], duration_s: float) -> dict[str, float]:
    """Of requests that were completed in ``duration_s``."""
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


Seconds = NDArray[np.float64]

_NAMES = {  # what servers and benchmarks call the same thing
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
class Bench:
    """One run of a benchmark. Arrays of measured times have an entry for each request of the load, NaN for none."""

    path: Path
    kind: str  # vllm, sglang, inference-perf, requests
    load: Load
    exact: bool  # the load is what was sent, request by request; else made again from rates and mean lengths
    metrics: Mapping[str, float]  # by vLLM's names
    server: Mapping[str, Any] = field(default_factory=dict)  # what the file says of it: model, tp, max_num_seqs, ..
    ttft_s: Seconds | None = None
    e2el_s: Seconds | None = None
    itls: tuple[Seconds, ...] = ()
    stages: tuple[Mapping[str, float], ...] = ()  # metrics of the stages of the load
    notes: tuple[str, ...] = ()  # what a reader should know of the load


def server_words(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a server, by one name each; numbers that are written as text are numbers."""
    said: dict[str, Any] = {}
    for word, names in _NAMES.items():
        value = next((found[name] for name in names if found.get(name) not in (None, "")), None)
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, str | int | float):
            said[word] = value
    return said


def by_arrival(
    arrivals_s: Seconds, columns: Mapping[str, NDArray[Any] | None], itls: Sequence[Any]
) -> tuple[NDArray[np.int64], dict[str, Any], tuple[Seconds, ...]]:
    """Everything in order of arrival, which a load is."""
    order = np.argsort(arrivals_s, kind="stable")
    found = {name: None if column is None else column[order] for name, column in columns.items()}
    return order, found, tuple(np.asarray(itls[row], dtype=np.float64) for row in order) if len(itls) else ()
