"""When requests are sent: processes with a rate, bursts, ramps, stages.

Intervals are drawn as `vllm bench serve` draws them: gamma with shape ``burstiness`` (1: Poisson), stretched so that
the last request is sent at count / rate. With ``vllm_draws(seed)`` they come from the same random numbers too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, unknown

Draws = np.random.Generator | np.random.RandomState
Seconds = NDArray[np.float64]

KINDS = ("poisson", "gamma", "constant", "bursty")
RAMPS = ("linear", "exponential")


def vllm_draws(seed: int) -> np.random.RandomState:
    """NumPy's global random numbers after np.random.seed(seed), which vLLM draws intervals from."""
    if not 0 <= seed < 2**32:
        raise KernelcastError(f"a seed is a whole number from 0 to {2**32 - 1}, not {seed}")
    return np.random.RandomState(seed)


def arrivals(
    count: int,
    rate: float,
    draws: Draws,
    kind: str = "poisson",
    *,
    burstiness: float = 1.0,
    on_s: float = 10.0,
    off_s: float = 10.0,
) -> Seconds:
    """``count`` requests at ``rate`` per second; at an infinite rate all come at once.

    bursty: Poisson for ``on_s`` seconds, nothing for ``off_s``, again and again; ``rate`` is the mean of both.
    """
    _check(count, rate, burstiness)
    if kind not in KINDS:
        raise unknown("kind of arrivals", kind, KINDS)
    if kind == "poisson" and burstiness != 1:
        raise KernelcastError(f"poisson arrivals have burstiness 1, not {burstiness:g}; take gamma")
    if np.isinf(rate):
        return np.zeros(count)
    if kind == "constant" or np.isinf(burstiness):
        return np.arange(count) / rate
    if kind == "bursty":
        return _bursty(count, rate, draws, on_s, off_s)
    return _spread(count, count / rate, burstiness, draws)


def ramp(
    count: int, start: float, end: float, draws: Draws, strategy: str = "linear", burstiness: float = 1.0
) -> Seconds:
    """The rate goes from ``start`` to ``end`` requests per second over the ``count`` requests, as in vLLM:
    by the number of a request, not by time."""
    if strategy not in RAMPS:
        raise unknown("ramp-up strategy", strategy, RAMPS)
    for rate in (start, end):
        _check(count, rate, burstiness)
        if np.isinf(rate):
            raise KernelcastError("a ramp goes between two rates in requests per second, neither of them inf")
    progress = np.arange(count) / max(count - 1, 1)
    rates = start + (end - start) * progress if strategy == "linear" else start * (end / start) ** progress
    if np.isinf(burstiness):
        return np.cumsum(1 / rates)
    return np.cumsum(draws.gamma(burstiness, 1 / (rates * burstiness)))


def staged(
    stages: Sequence[tuple[float, float]], draws: Draws, kind: str = "poisson", burstiness: float = 1.0
) -> tuple[Seconds, NDArray[np.int64]]:
    """Stages of (requests per second, seconds), one after another: arrivals, and the stage of each.

    A stage has rate x seconds requests, as in inference-perf; each begins when the one before it is over.
    """
    if not stages:
        raise KernelcastError("a load in stages needs at least one, as (requests per second, seconds)")
    if kind == "bursty":
        raise KernelcastError("stages are poisson, gamma or constant; bursts would cross their ends")
    times, numbers, start_s = [], [], 0.0
    for number, (rate, seconds) in enumerate(stages):
        if not (0 < rate < np.inf and 0 < seconds < np.inf):
            raise KernelcastError(f"stage {number}: a rate and seconds above 0, not {rate:g} for {seconds:g} s")
        count = round(rate * seconds)
        if count < 1:
            raise KernelcastError(f"stage {number}: {rate:g} requests/s for {seconds:g} s are not one request")
        times.append(start_s + arrivals(count, count / seconds, draws, kind, burstiness=burstiness))
        numbers.append(np.full(count, number, dtype=np.int64))
        start_s += seconds
    return np.concatenate(times), np.concatenate(numbers)


def _spread(count: int, seconds: float, burstiness: float, draws: Draws) -> Seconds:
    """Gamma intervals that fill ``seconds``."""
    times = np.cumsum(draws.gamma(burstiness, 1.0, count))
    if times[-1] == 0:  # a tiny shape draws nothing but zeros
        return np.full(count, seconds)
    return np.asarray(times * (seconds / times[-1]))


def _bursty(count: int, rate: float, draws: Draws, on_s: float, off_s: float) -> Seconds:
    """Poisson on a clock that runs only in the bursts."""
    if not (0 < on_s < np.inf and 0 <= off_s < np.inf):
        raise KernelcastError(f"a burst lasts more than 0 s and a pause 0 s or more, not {on_s:g} and {off_s:g}")
    share = on_s / (on_s + off_s)
    running = _spread(count, count / rate * share, 1.0, draws)
    return np.asarray(running + np.floor(running / on_s) * off_s)


def _check(count: int, rate: float, burstiness: float) -> None:
    if count < 1:
        raise KernelcastError(f"a load needs at least one request, not {count}")
    if not rate > 0:
        raise KernelcastError(f"a request rate is above 0 requests/s (inf: all at once), not {rate:g}")
    if not burstiness > 0:
        raise KernelcastError(f"burstiness is above 0 (1: Poisson, less: in bursts, more: even), not {burstiness:g}")
