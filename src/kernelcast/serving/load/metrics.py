"""Latencies of served requests under the names that `vllm bench serve` gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
