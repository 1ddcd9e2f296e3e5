"""A calibration: what measurements of one GPU say about a predictor's errors there, in one small file; and that
predictor with it laid over.

For each family it holds a correction of the log of time in two levels. *Biases* are shared by many calls: of the whole
family, of each word (op, dtype, stack, …) and of the words together, for short, middling and long kernels.
The *local* part is a Gaussian process over the features of a call: it follows the calls that were measured
and fades away from them. Both were shrunk by how few rows there were (``kernelcast.calibrate`` fits them).
Whole runs, which no call of theirs was measured in, add *scales*: one factor for each kind of kernel that they saw.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.efficiency.evidence import Standing
from kernelcast.efficiency.features import KEEP, aligned
from kernelcast.efficiency.network import Floats, in_blocks
from kernelcast.efficiency.predictor import Estimate, Predictor, Question
from kernelcast.efficiency.run_scales import Scale, scaled
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Kernel, Words
from kernelcast.machine.analyse import Score

FORMAT = 2
_READ = ("1", "2")  # formats; the first had no scales
_KIND = "kernelcast calibration"
# Regimes by predicted time: under 10 µs, 10 to 100, over 100. Each has its full say at its centre; between two centres
# they share, linearly in the log of time, so that no call jumps from one to the other.
REGIMES = ("under 10 µs", "10-100 µs", "over 100 µs")
CENTRES_S = np.array([3.1623e-6, 31.623e-6, 316.23e-6])
ELSEWHERE = 0.3  # how alike two calls are, in the local part, whose words differ
_LIKE = 0.5  # a call this like a measured one is seen
_ROOT_3 = np.float32(np.sqrt(3.0))
_STRIDE = 64  # blocks at a time: kernels of these stay in the CPU's cache

Doubles = NDArray[np.float64]


def regimes(time_s: Doubles) -> Doubles:
    """(calls, 3) how much of each regime a call is; sums to 1."""
    place = np.log(time_s / CENTRES_S[0]) / np.log(CENTRES_S[1] / CENTRES_S[0])
    place = np.clip(place, 0.0, len(CENTRES_S) - 1.0)
    return np.maximum(0.0, 1.0 - np.abs(place[:, None] - np.arange(len(CENTRES_S))))


def joint(words: Mapping[str, str | None]) -> str:
    """The words of a call together: 'dtype=bf16 op=gemm stack=vllm'; what was not given is left out."""
    return " ".join(f"{name}={word}" for name, word in sorted(words.items()) if word is not None)


def bias_keys(words: Mapping[str, str | None]) -> list[str]:
    """Names of the biases that a call has: of all calls, of each of its words, of its words together."""
    each = [f"{name}={word}" for name, word in sorted(words.items()) if word is not None]
    return ["all", *each, joint(words) + " together"]


def matern(squared: NDArray[Any]) -> NDArray[Any]:
    """Likeness of calls at this squared distance, in units of the length scale: 1 at 0, then falling (Matérn 3/2)."""
    scaled = np.sqrt(np.maximum(squared, 0)) * _ROOT_3
    return (1 + scaled) * np.exp(-scaled)


@dataclass(frozen=True, eq=False)
class FamilyCalibration:
    """The correction of one family's calls."""

    rows: int  # measured calls that it rests on
    error_before: float  # mean % error of those calls without it
    error_after: float  # and with it, each from a fit that did not see the call
    biases: Mapping[str, tuple[float, ...]]  # log of time, by regime
    names: tuple[str, ...]  # features of the local part
    mean: Floats
    scale: Floats  # a feature's spread times the length scale
    points: Floats  # (points, features) calls that the local part knows, standardised
    weights: Floats  # (points,)
    groups: tuple[str, ...]  # the joint words of points
    group: NDArray[np.int64]  # (points,) index in groups
    low: float  # the interval's reach below and above, as multiples of the predictor's own
    high: float
    least: float  # range of the correction: that of the errors seen
    most: float
    settings: Mapping[str, float]  # what the data chose: amplitudes, length scale, noise

    def correction(
        self, names: tuple[str, ...], values: Floats, time_s: Doubles, words: Mapping[str, str | None]
    ) -> tuple[Doubles, Doubles]:
        """Of calls that share their words: log of the factor on time, and likeness to the nearest measured call."""
        level = np.zeros(len(REGIMES))
        for key in bias_keys(words):  # a word that was not measured has none
            level += self.biases.get(key, 0.0)
        shared = np.sum(regimes(time_s) * level, axis=1)
        local, like = self._local(aligned(names, values, self.names), joint(words))
        return np.clip(shared + local, self.least, self.most), like

    @functools.cached_property
    def _turned(self) -> tuple[Floats, Floats]:
        """The points as columns, and their squared lengths."""
        return np.ascontiguousarray(self.points.T), np.sum(self.points**2, axis=1)

    def _local(self, values: Floats, together: str) -> tuple[Doubles, Doubles]:
        same = np.array([name == together for name in self.groups])[self.group]
        factor = np.where(same, 1.0, ELSEWHERE).astype(np.float32)
        rows, blocks = len(values), in_blocks((values - self.mean) / self.scale)
        turned, length = self._turned
        weights = (self.weights * factor)[:, None]
        local, like = np.empty(blocks.shape[:2]), np.empty(blocks.shape[:2])
        for start in range(0, len(blocks), _STRIDE):  # eight rows a product, always: see network.BLOCK_ROWS
            now = slice(start, start + _STRIDE)
            part = blocks[now]
            squared = part @ turned
            squared *= -2
            squared += length
            squared += np.sum(part**2, axis=2)[:, :, None]
            kernel = matern(squared)
            local[now] = (kernel @ weights)[:, :, 0]
            like[now] = np.max(kernel * factor, axis=2)
        return local.reshape(-1)[:rows], like.reshape(-1)[:rows]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Corrections by family, scales by kind, and what they were made from."""

    gpu: str
    predictor: str  # name of what was corrected, with the version of its weights
    kernelcast: str
    families: Mapping[str, FamilyCalibration]
    scales: Mapping[str, Scale] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(family.rows for family in self.families.values())

    def caveat(self, predictor: str) -> str | None:
        """A warning, when it corrects another version of the predictor; an error, when another predictor."""
        if predictor == self.predictor:
            return None
        if predictor.partition("-")[0] != self.predictor.partition("-")[0]:
            raise KernelcastError(
                f"the calibration corrects {self.predictor}, not {predictor}; leave it out, or calibrate {predictor}"
            )
        return f"the calibration was made for {self.predictor}, this is {predictor}: calibrate again for the best fit"

    def check_gpu(self, gpu_id: str) -> None:
        """Refuse another GPU; a what-if of the same one is fine."""
        if gpu_id != self.gpu:
            raise KernelcastError(
                f"the calibration was made on {self.gpu}, not on {gpu_id}; leave it out, or measure {gpu_id}"
            )

    def save(self, path: Path | str) -> None:
        """Write one safetensors file; whole or not at all."""
        from safetensors.numpy import save

        path = Path(path)
        tensors: dict[str, NDArray[Any]] = {}
        told: dict[str, Any] = {}
        for name, family in self.families.items():
            told[name] = {field: getattr(family, field) for field in _PLAIN}
            for array, kind in _ARRAYS.items():
                tensors[f"{name}.{array}"] = np.ascontiguousarray(getattr(family, array), dtype=kind)
        head = {"gpu": self.gpu, "predictor": self.predictor, "kernelcast": self.kernelcast, "families": told,
                "scales": {key: asdict(scale) for key, scale in self.scales.items()}}  # fmt: skip
        meta = {"kind": _KIND, "format": str(FORMAT), "calibration": json.dumps(head)}
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_bytes(save(tensors, metadata=meta))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


# Points in half precision: three digits place a call well enough, and the fit used the rounded ones.
_ARRAYS = {"mean": np.float32, "scale": np.float32, "points": np.float16, "weights": np.float32, "group": np.int64}
_PLAIN = tuple(one.name for one in fields(FamilyCalibration) if one.name not in _ARRAYS)


def load_calibration(path: Path | str) -> Calibration:
    """Read what ``Calibration.save`` (or ``kernelcast calibrate``) wrote."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise KernelcastError(f"no calibration file {path}; `kernelcast calibrate` makes one")
    try:
        with safe_open(path, framework="numpy") as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise KernelcastError(f"{path}: not a calibration: {error}") from None
    if meta.get("kind") != _KIND:
        raise KernelcastError(f"{path}: not a calibration; `kernelcast calibrate` makes one")
    if meta.get("format") not in _READ:
        known = " and ".join(_READ)
        raise KernelcastError(f"{path}: a calibration of format {meta.get('format')}, this version reads {known}")
    try:
        head = json.loads(meta["calibration"])
        families = {name: _family(told, tensors, name) for name, told in head.pop("families").items()}
        scales = {key: Scale.read(told) for key, told in head.pop("scales", {}).items()}
        return Calibration(families=families, scales=scales, **head)
    except (KeyError, TypeError, ValueError) as error:
        raise KernelcastError(
            f"{path}: a broken calibration ({type(error).__name__}: {error}); make it again"
        ) from None


def _family(told: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], name: str) -> FamilyCalibration:
    plain: dict[str, Any] = {field: told[field] for field in _PLAIN}
    plain["biases"] = {key: tuple(map(float, values)) for key, values in told["biases"].items()}
    plain["names"], plain["groups"] = tuple(told["names"]), tuple(told["groups"])
    arrays: dict[str, Any] = {field: tensors[f"{name}.{field}"] for field in _ARRAYS}
    arrays["points"] = arrays["points"].astype(np.float32)
    found = FamilyCalibration(**plain, **arrays)
    _check_shapes(found)
    return found


def _check_shapes(family: FamilyCalibration) -> None:
    """A file cut short or edited by hand must not predict."""
    count, width = len(family.weights), len(family.names)
    shapes: Sequence[tuple[NDArray[Any], tuple[int, ...]]] = (
        (family.mean, (width,)), (family.scale, (width,)), (family.points, (count, width)), (family.group, (count,)),
    )  # fmt: skip
    if any(array.shape != shape for array, shape in shapes):
        raise ValueError("arrays do not fit together")
    if any(len(values) != len(REGIMES) for values in family.biases.values()):
        raise ValueError(f"a bias has {len(REGIMES)} regimes")
    if count and not 0 <= family.group.min() <= family.group.max() < len(family.groups):
        raise ValueError("a point of no group")


@dataclass(frozen=True)
class Calibrated:
    """What ``base`` says, corrected by what measurements of this GPU showed."""

    base: Predictor
    calibration: Calibration

    @property
    def name(self) -> str:
        return f"{self.base.name}+calibrated"

    @property
    def keep(self) -> int:
        return max(self.base.keep, KEEP)

    def score(self, target: Gpu) -> Score:
        return self.base.score(target)

    def what_if_spread(self, family: str) -> tuple[float, float] | None:
        return self.base.what_if_spread(family)

    def standings(self, kernel: type[Kernel], words: Words, target: Gpu) -> tuple[Standing, ...]:
        return self.base.standings(kernel, words, target)

    def estimate(self, question: Question) -> Estimate:
        self.calibration.check_gpu(question.gpu.id)
        return scaled(self._corrected(question), question, self.calibration.scales)

    def _corrected(self, question: Question) -> Estimate:
        """By what single calls showed."""
        before = self.base.estimate(question)
        family = self.calibration.families.get(question.kernel.family)
        if family is None:
            return before
        found = question.features
        shift, like = family.correction(found.names, found.values, before.time_s, question.words)
        time = before.time_s * np.exp(shift)
        return replace(
            before,
            time_s=time,
            low_s=time * (before.low_s / before.time_s) ** _reach(family.low, like),
            high_s=time * (before.high_s / before.time_s) ** _reach(family.high, like),
            support=np.where(like >= _LIKE, "seen", before.support).astype(object),
            predictor=before.predictor and f"{before.predictor}+calibrated",
        ).held(question.bound_s)


def _reach(factor: float, like: Doubles) -> Doubles:
    """Errors that were wider than the interval widen it everywhere; narrower ones narrow it where calls are alike."""
    return np.full(len(like), factor) if factor >= 1 else 1.0 + (factor - 1.0) * like
