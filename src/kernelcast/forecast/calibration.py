"""A calibration: what measurements of one GPU say about a predictor's errors there, in one small file; and the
predictor that it corrects.

For each family it holds the measured calls as the family's prior sees them (``prior.py``), and a weight for each: what
the errors of those calls, together, say of any other call. ``kernelcast.collect.calibrate`` fits them. Whole runs, in
which single calls were not measured, add *scales*: one factor for each group of kernels that runs can distinguish.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.forecast.features import KEEP
from kernelcast.forecast.learned import hidden_units
from kernelcast.forecast.network import Floats, in_blocks
from kernelcast.forecast.predictor import Estimate, Predictor, PredictorInput
from kernelcast.forecast.prior import Codes, Doubles, Prior, PriorScales, matern, sharers, with_hidden
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import PIPELINES, Analysis, Score, summed
from kernelcast.ops.base import Configuration, Kernel
from kernelcast.results import SEEN

_DISTINGUISHED = ("dtype", "kv_dtype", "phase", "stack")  # choices that whole runs can distinguish
_OF_ERROR = 1.606  # the reach of an 80% interval over the mean error, of normal errors
_TENSOR = PIPELINES.index("tensor")
_BYTES = tuple(PIPELINES.index(name) for name in ("dram", "launch"))


def scale_keys(family: str, choices: Mapping[str, str | None], works: Sequence[Analysis]) -> dict[str, Doubles]:
    """Groups of kernels that runs distinguish, and each call's share: 'attention bf16 decode vllm'; without a phase,
    'gemm bf16 vllm, tensor' and '..., bytes', by what limits the call (shares of the squares of both limits, so that
    there is no jump). A family's ops are learned together, and scaled together."""
    parts = {name: choices.get(name) for name in _DISTINGUISHED}
    if parts["kv_dtype"] == parts["dtype"]:
        parts["kv_dtype"] = None
    name = " ".join([family, *(str(value) for value in parts.values() if value is not None)])
    moved = summed([work.limits for work in works])[_BYTES, :].max(axis=0)
    tensor = summed([work.limits[_TENSOR] * (1 - work.padding) for work in works])  # tiles jump, what is asked does not
    if parts["phase"] is not None or not tensor.any():
        return {name: np.ones(len(tensor))}
    share = tensor**2 / (tensor**2 + moved**2)
    return {f"{name}, tensor": share, f"{name}, bytes": 1 - share}


def host_key(name: str) -> str:
    """What a host (of a stack, or one that runs PyTorch) takes for what it launches."""
    return f"host {name}"


@dataclass(frozen=True)
class Scale:
    """What whole runs say of one sort of kernels, or of the host: a factor on its time, and how sure that is."""

    log_scale: float = 0.0
    sd: float = 1.0  # of the log, after the runs
    prior_sd: float = 1.0  # and before them
    share: float = 0.0  # of the runs' time, on average
    runs: int = 0  # that it had a share in

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scale:
        """From a file; a ValueError where it cannot be."""
        scale = cls(**data)
        if not (np.isfinite(scale.log_scale) and 0 < scale.sd <= scale.prior_sd < np.inf):
            raise ValueError("a scale is no number, or less sure than before")
        return scale

    @property
    def factor(self) -> float:
        return float(np.exp(self.log_scale))

    @property
    def reach(self) -> float:
        """What is left of the interval, as logs of time."""
        return self.sd / self.prior_sd


UNSCALED = Scale()


def scaled(before: Estimate, question: PredictorInput, scales: Mapping[str, Scale]) -> Estimate:
    """Times that runs have scaled, and what is left of their intervals; others as they are."""
    if not scales:
        return before
    keys = scale_keys(question.kernel.family, question.match.configuration or question.choices, question.best)
    known = {key: scales.get(key, UNSCALED) for key in keys}
    if all(scale is UNSCALED for scale in known.values()):
        return before
    shares = np.array(list(keys.values()))
    time = before.time_s * np.sum(shares * [[scale.factor] for scale in known.values()], axis=0)
    reach = np.sum(shares * [[scale.reach] for scale in known.values()], axis=0)
    entry = question.match.entry
    single_call = np.inf if entry is None or entry.error is None else entry.error * _OF_ERROR
    low, high = np.log(before.time_s / before.low_s), np.log(before.high_s / before.time_s)
    return replace(
        before,
        time_s=time,
        low_s=time * np.exp(-_narrowed(low, single_call, reach)),
        high_s=time * np.exp(_narrowed(high, single_call, reach)),
    ).clipped(question.bound_s)


def _narrowed(width: Doubles, single_call: float, reach: Doubles) -> Doubles:
    """Runs show what calls have in common; how far single calls of a measured configuration are off stays."""
    kept = np.minimum(width, single_call)
    return np.sqrt(kept**2 + (width**2 - kept**2) * reach**2)


FORMAT = 6  # 1 had no scales, 2 no prior, 3 one reach a family, 4 no constants, 5 no hidden units
_KIND = "kernelcast calibration"
REACH = 1.2816  # standard deviations to either side that hold 80% of normal errors
LEAST_WIDTH = 0.01  # measurements repeat to about 1%
_SEEN = 0.25  # of the variance of the error: a call of which less is left counts as seen
_STRIDE = 64  # blocks at a time: kernels of these stay in the CPU's cache


def categorical_inputs(question: PredictorInput) -> Mapping[str, str | None]:
    """The choices by which calls share errors: of their configuration in full."""
    return {**(question.match.configuration or question.choices), "op": question.kernel.op}


def width_of(said: Estimate) -> Doubles:
    """The standard deviation that a forecast gives itself, as a log of time: the unit of its errors."""
    return np.maximum(np.log(said.high_s / said.low_s) / (2 * REACH), LEAST_WIDTH)


@dataclass(frozen=True, eq=False)
class FamilyCalibration:
    """The correction of one family's calls."""

    rows: int  # measured calls that it rests on
    error_before: float  # mean % error of those calls without it
    error_after: float  # and with it, each from a fit that did not see the call
    expected_before: float  # what the intervals say that these errors should be, before
    expected_after: float
    formats: Mapping[str, tuple[int, float, float]]  # rows, error before and after, by format
    prior: Prior
    setting: PriorScales
    position: Floats  # (points, features) calls that it knows, as the prior places them
    leaning: Floats
    groups: tuple[tuple[str, str, str], ...]  # format, stack and configuration of points
    code: Codes  # (points,) index of the group
    weights: Floats  # (points,)
    few: Codes  # points that say how sure a correction is
    factor: Floats  # the inverse of the Cholesky factor of their covariance
    noise: float  # variance of the error of a single call, in units of the width
    low: float  # the interval's reach below and above, as multiples of the standard deviation
    high: float
    reaches: Mapping[str, tuple[float, float]]  # the same of formats and configurations that were measured
    constants: Mapping[
        str, tuple[float, float]
    ]  # of configurations: share of the process, and log of a constant factor
    least: float  # range of the correction: that of the errors seen
    most: float

    def correction(
        self, names: tuple[str, ...], values: Floats, leaning: Doubles, choices: Mapping[str, str | None]
    ) -> tuple[Doubles, Doubles, Doubles]:
        """Of calls that share their choices: their error in units of the width, the variance that is left of it without
        noise, and that variance before any call was measured."""
        positions = in_blocks(self.prior.positions(names, values).astype(np.float32))
        lean = in_blocks(leaning.astype(np.float32)[:, None])[:, :, 0]
        same = [
            np.array([group[at] == mine for group in self.groups])[self.code]
            for at, mine in enumerate(sharers(choices))
        ]
        error, known = np.empty(positions.shape[:2]), np.empty(positions.shape[:2])
        for start in range(0, len(positions), _STRIDE):  # eight rows a product, always: see network.BLOCK_ROWS
            now = slice(start, start + _STRIDE)
            covariance = self._covariance(positions[now], lean[now], *same)
            error[now] = (covariance @ self.weights[:, None])[:, :, 0]
            known[now] = np.sum((covariance[:, :, self.few] @ self.factor.T) ** 2, axis=2)
        rows = len(values)
        biases, smooth, lean_share = self.prior.shares(self.setting)
        before = sum(biases) + sum(smooth) + lean_share * leaning**2
        left = np.maximum(before - known.reshape(-1)[:rows], 1e-4 * before)
        return error.reshape(-1)[:rows], left, before

    def shift(self, by_process: Doubles, choices: Mapping[str, str | None]) -> Doubles:
        """What is added to the log of time. ``by_process``: what the measured calls say of each call; the rest is what
        they say of the configuration as a whole."""
        share, constant = self.constants.get(sharers(choices)[2], (1.0, 0.0))
        return np.clip(share * by_process + (1 - share) * constant, self.least, self.most)

    def reach(self, choices: Mapping[str, str | None]) -> tuple[float, float]:
        """As far as the configuration was off, else the format, else the family."""
        form, _, configuration = sharers(choices)
        return self.reaches.get(configuration) or self.reaches.get(form) or (self.low, self.high)

    def _covariance(
        self, positions: Floats, leaning: Floats, form: NDArray[Any], stack: NDArray[Any], configuration: NDArray[Any]
    ) -> Floats:
        """(blocks, rows, points) with the points; only those that share a part are looked at in it."""
        everyone = np.ones(len(form))
        biases, smooth, lean_share = self.prior.shares(self.setting)
        shared = np.array(biases) @ np.stack([everyone, form, stack, configuration])
        covariance = shared.astype(np.float32) + np.float32(lean_share) * self.leaning * leaning[:, :, None]
        for part, (share, gate) in enumerate(zip(smooth, (everyone, form, configuration, everyone), strict=False)):
            members = slice(None) if gate.all() else np.flatnonzero(gate)  # a slice copies nothing
            mine = self.prior.scaled(positions, part, self.setting)
            turned, length = self._turned[part]
            squared = mine @ turned[:, members]
            squared *= -2
            squared += length[members]
            squared += np.sum(mine**2, axis=2)[:, :, None]
            covariance[:, :, members] += np.float32(share) * matern(squared)
        return np.asarray(covariance, dtype=np.float32)

    @functools.cached_property
    def _turned(self) -> list[tuple[Floats, Floats]]:
        """By smooth part, the points as columns, and their squared lengths."""
        parts = []
        for part in range(len(self.prior.smooth)):
            scaled_points = self.prior.scaled(self.position, part, self.setting)
            parts.append((np.ascontiguousarray(scaled_points.T), np.sum(scaled_points**2, axis=1)))
        return parts


@dataclass(frozen=True, eq=False)
class Calibration:
    """Corrections by family, scales by sort of kernel, and what they were made from."""

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

        from kernelcast.files import complete

        path = Path(path)
        tensors: dict[str, NDArray[Any]] = {}
        families: dict[str, Any] = {}
        for name, family in self.families.items():
            arrays, prior = family.prior.to_dict()
            families[name] = {_KEYS.get(plain, plain): getattr(family, plain) for plain in _PLAIN}
            families[name] |= {"prior": prior, "setting": asdict(family.setting)}
            tensors |= {f"{name}.prior.{array}": np.ascontiguousarray(value) for array, value in arrays.items()}
            for array, dtype in _ARRAYS.items():
                tensors[f"{name}.{_KEYS.get(array, array)}"] = np.ascontiguousarray(getattr(family, array), dtype=dtype)
        head = {"gpu": self.gpu, "predictor": self.predictor, "kernelcast": self.kernelcast, "families": families,
                "scales": {key: asdict(scale) for key, scale in self.scales.items()}}  # fmt: skip
        meta = {"kind": _KIND, "format": str(FORMAT), "calibration": json.dumps(head)}
        with complete(path) as part:
            part.write_bytes(save(tensors, metadata=meta))


# Points in half precision: three digits place a call well enough, and the fit used the rounded ones.
_ARRAYS = {"position": np.float16, "leaning": np.float32, "code": np.int64, "weights": np.float32, "few": np.int64,
           "factor": np.float32}  # fmt: skip
_PLAIN = ("rows", "error_before", "error_after", "expected_before", "expected_after", "formats", "groups", "noise",
          "low", "high", "reaches", "constants", "least", "most")  # fmt: skip
_KEYS = {"position": "place", "groups": "words"}  # of fields that files call otherwise


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
    if meta.get("format") != str(FORMAT):
        raise KernelcastError(
            f"{path}: a calibration of format {meta.get('format')}, this version reads {FORMAT}; calibrate again"
        )
    try:
        head = json.loads(meta["calibration"])
        families = {name: _family(data, tensors, name) for name, data in head.pop("families").items()}
        scales = {key: Scale.from_dict(data) for key, data in head.pop("scales", {}).items()}
        return Calibration(families=families, scales=scales, **head)
    except (KeyError, TypeError, ValueError) as error:
        raise KernelcastError(
            f"{path}: a broken calibration ({type(error).__name__}: {error}); make it again"
        ) from None


def _family(data: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], name: str) -> FamilyCalibration:
    plain: dict[str, Any] = {field: data[_KEYS.get(field, field)] for field in _PLAIN}
    for table in ("formats", "reaches", "constants"):
        plain[table] = {key: tuple(values) for key, values in data[table].items()}
    plain["groups"] = tuple(map(tuple, plain["groups"]))
    arrays: dict[str, Any] = {field: tensors[f"{name}.{_KEYS.get(field, field)}"] for field in _ARRAYS}
    arrays["position"] = arrays["position"].astype(np.float32)
    prior_arrays = {array: tensors[f"{name}.prior.{array}"] for array in ("mean", "scale", "metric")}
    prior = Prior.from_dict(prior_arrays, data["prior"])
    family = FamilyCalibration(prior=prior, setting=PriorScales(**data["setting"]), **plain, **arrays)
    _check_shapes(family)
    return family


def _check_shapes(family: FamilyCalibration) -> None:
    """A file that is truncated or edited by hand must not predict."""
    count, few = len(family.weights), len(family.few)
    shapes: tuple[tuple[NDArray[Any], tuple[int, ...]], ...] = (
        (family.position, (count, len(family.prior.names))), (family.leaning, (count,)), (family.code, (count,)),
        (family.factor, (few, few)),
    )  # fmt: skip
    if any(array.shape != shape for array, shape in shapes):
        raise ValueError("arrays do not fit together")
    if any(len(group) != 3 for group in family.groups):
        raise ValueError("a point has a format, a stack and a configuration")
    for codes, limit in ((family.code, len(family.groups)), (family.few, count)):
        if len(codes) and not 0 <= codes.min() <= codes.max() < limit:
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

    def matches(self, kernel: type[Kernel], configuration: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        return self.base.matches(kernel, configuration, target)

    def estimate(self, question: PredictorInput) -> Estimate:
        self.calibration.check_gpu(question.gpu.id)
        return scaled(self._corrected(question), question, self.calibration.scales)

    def _corrected(self, question: PredictorInput) -> Estimate:
        """By what single calls showed."""
        before = self.base.estimate(question)
        family = self.calibration.families.get(question.kernel.family)
        if family is None:
            return before
        features, width, choices = question.features, width_of(before), categorical_inputs(question)
        leaning = np.log(before.time_s / features.estimate_s)
        names, values = with_hidden(features.names, features.values, hidden_units(self.base, question))
        error, left, most = family.correction(names, values, leaning, choices)
        low, high = family.reach(choices)
        time = before.time_s * np.exp(family.shift(width * error, choices))
        spread = width * np.sqrt(left + family.noise)
        return replace(
            before,
            time_s=time,
            low_s=time * np.exp(-low * spread),
            high_s=time * np.exp(high * spread),
            support=np.where(left <= _SEEN * most, SEEN, before.support),
            predictor=before.predictor and f"{before.predictor}+calibrated",
        ).clipped(question.bound_s)
