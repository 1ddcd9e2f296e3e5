"""Steps of an engine from a dozen passes: enough to bound it, for a hundredth of the work of full tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernelcast.calls import Launch
from kernelcast.networks.batch import Batch
from kernelcast.networks.forward import Deployment, forward
from kernelcast.timeline import Ran, joined
from kernelcast.times import Times

_TOKENS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES = (1, 16, 64, 256, 1024)
_PROMPTS = (128, 1024, 8192)


class CoarseSteps:
    """``decode`` and ``mixed`` in seconds, for sequences of one length: ``context`` tokens in the cache, or ``past``
    ones before a prompt that is read. Attention of prompts and of decodes is added up."""

    def __init__(self, deployment: Deployment, times: Times, context: int, past: int, variant: str) -> None:
        self._times, self._variant, self._stack = times, variant, deployment.stack
        self._context = max(1, context)
        sorts = {
            "tokens": [Batch((n,), (0,)) for n in _TOKENS],
            "sequences": [Batch(n * (1,), n * (64,)) for n in _SEQUENCES],
            "decodes": [Batch(n * (1,), n * (self._context,)) for n in _SEQUENCES],
            "prompts": [Batch((n,), (past,)) for n in _PROMPTS],
        }
        launches = {sort: [_of(deployment, batch, sort) for batch in batches] for sort, batches in sorts.items()}
        times.learn(launch.call for group in launches.values() for each in group for launch in each)
        self._known = {sort: [self._seconds(each) for each in group] for sort, group in launches.items()}
        count = sum(launch.count for sort in ("tokens", "sequences", "decodes") for launch in launches[sort][0])
        self._gaps_s = count * deployment.stack.gap_s + deployment.stack.step_s

    def _seconds(self, launches: Sequence[Launch]) -> float:
        span = joined(Ran.of("", launch, self._times) for launch in launches)
        return {"low": span.low_s, "likely": span.time_s, "high": span.high_s}[self._variant]

    def _at(self, sort: str, grid: Sequence[int], value: float) -> float:
        """Between passes, and on from the last two."""
        known = self._known[sort]
        if value <= grid[-1]:
            return float(np.interp(value, grid, known))
        slope = max(0.0, (known[-1] - known[-2]) / (grid[-1] - grid[-2]))
        return known[-1] + slope * (value - grid[-1])

    def decode(self, sequences: int) -> float:
        """A step that decodes so many sequences."""
        kernels_s = (self._at("tokens", _TOKENS, sequences) + self._at("sequences", _SEQUENCES, sequences)
                     + self._at("decodes", _SEQUENCES, sequences))  # fmt: skip
        return kernels_s * self._stack.decode_factor + self._gaps_s

    def mixed(self, sequences: int, prompt_tokens: float) -> float:
        """A step that reads so many tokens of prompts beside them."""
        kernels_s = self._at("tokens", _TOKENS, sequences + prompt_tokens) + self._at(
            "prompts", _PROMPTS, prompt_tokens
        )
        if sequences:
            kernels_s += self._at("decodes", _SEQUENCES, sequences) + self._at("sequences", _SEQUENCES, sequences)
        return kernels_s * min(self._stack.prompt_factor, self._stack.decode_factor)


def _of(deployment: Deployment, batch: Batch, sort: str) -> list[Launch]:
    by = {"decodes": "lengths", "prompts": "lengths"}.get(sort, sort)
    return [launch for launch in forward(deployment, batch) if launch.by == by]
