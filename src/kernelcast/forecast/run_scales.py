"""What whole runs say of kernels that they only saw together: one factor for each kind that they can tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.predictor import Estimate, Question
from kernelcast.machine.analyse import PIPELINES, Analysis, summed

Doubles = NDArray[np.float64]

_TOLD = ("dtype", "kv_dtype", "phase", "stack")  # words that make it another kernel to whoever sees only whole runs
_OF_ERROR = 1.606  # the reach of an 80% interval over the mean error, of normal errors
_TENSOR = PIPELINES.index("tensor")
_BYTES = tuple(PIPELINES.index(name) for name in ("dram", "launch"))


def scale_keys(family: str, words: Mapping[str, str | None], works: Sequence[Analysis]) -> dict[str, Doubles]:
    """What whole runs tell apart, and how much of each call it is: 'attention bf16 decode vllm'; of what has no phase,
    'gemm bf16 vllm, tensor' and '..., bytes', by what limits the call (shares of the squares of both limits, so that
    there is no jump). A family's ops are learned together, and scaled together."""
    told = {name: words.get(name) for name in _TOLD}
    if told["kv_dtype"] == told["dtype"]:
        told["kv_dtype"] = None
    name = " ".join([family, *(str(word) for word in told.values() if word is not None)])
    moved = summed([work.limits for work in works])[_BYTES, :].max(axis=0)
    tensor = summed([work.limits[_TENSOR] * (1 - work.padding) for work in works])  # tiles jump, what is asked does not
    if told["phase"] is not None or not tensor.any():
        return {name: np.ones(len(tensor))}
    share = tensor**2 / (tensor**2 + moved**2)
    return {f"{name}, tensor": share, f"{name}, bytes": 1 - share}


def host_key(name: str) -> str:
    """What a host (of a stack, or one that runs PyTorch) takes for what it launches."""
    return f"host {name}"


@dataclass(frozen=True)
class Scale:
    """What whole runs say of one kind of kernels, or of the host: a factor on its time, and how sure that is."""

    log_scale: float = 0.0
    sd: float = 1.0  # of the log, after the runs
    prior_sd: float = 1.0  # and before them
    share: float = 0.0  # of the runs' time, on average
    runs: int = 0  # that it had a share in

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Scale:
        """From a file; a ValueError where it cannot be."""
        found = cls(**told)
        if not (np.isfinite(found.log_scale) and 0 < found.sd <= found.prior_sd < np.inf):
            raise ValueError("a scale is no number, or less sure than before")
        return found

    @property
    def factor(self) -> float:
        return float(np.exp(self.log_scale))

    @property
    def reach(self) -> float:
        """What is left of the interval, as logs of time."""
        return self.sd / self.prior_sd


UNSCALED = Scale()


def scaled(before: Estimate, question: Question, scales: Mapping[str, Scale]) -> Estimate:
    """Times that runs have scaled, and what is left of their intervals; others as they are."""
    if not scales:
        return before
    keys = scale_keys(question.kernel.family, question.match.words or question.words, question.best)
    known = {key: scales.get(key, UNSCALED) for key in keys}
    if all(scale is UNSCALED for scale in known.values()):
        return before
    shares = np.array(list(keys.values()))
    time = before.time_s * np.sum(shares * [[scale.factor] for scale in known.values()], axis=0)
    reach = np.sum(shares * [[scale.reach] for scale in known.values()], axis=0)
    entry = question.match.entry
    own = np.inf if entry is None or entry.error is None else entry.error * _OF_ERROR
    low, high = np.log(before.time_s / before.low_s), np.log(before.high_s / before.time_s)
    return replace(
        before,
        time_s=time,
        low_s=time * np.exp(-_narrowed(low, own, reach)),
        high_s=time * np.exp(_narrowed(high, own, reach)),
    ).held(question.bound_s)


def _narrowed(width: Doubles, own: float, reach: Doubles) -> Doubles:
    """Runs tell what calls of a kind have in common; by how much single calls of a measured kind are off stays."""
    kept = np.minimum(width, own)
    return np.sqrt(kept**2 + (width**2 - kept**2) * reach**2)
