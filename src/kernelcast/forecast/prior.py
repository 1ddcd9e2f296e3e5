"""Prior covariance of the residuals on one GPU, learned from GPUs held out of a fit.

An error is the log of measured over predicted time, in units of the width that the forecast gives itself. It has
*biases* (of all calls, of a format, of a stack, of a configuration), a *leaning* (too much or too little of what the
networks corrected), *smooth* parts (calls that are alike err alike: of any format, the same, or the same configuration;
what alike means is a metric over the features) and *noise*. The prior says what share of the variance each is, and the
metrics. Fitted by ``kernelcast fit``; a family that was measured on too few GPUs has the plain one. A calibration adds
a smooth part over the hidden units of the networks: calls that they do not tell apart err alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.features import GPU_FEATURES, aligned
from kernelcast.forecast.network import Encoder, Floats

Doubles = NDArray[np.float64]
Codes = NDArray[np.int64]

SHARERS = ("all", "format", "stack", "kind")  # who shares a bias
SMOOTH = ("all", "format", "kind")  # within whom a smooth part holds; one over hidden units holds within all
_FORMAT = ("op", "dtype", "kv_dtype", "phase")  # choices that make another format
_FARTHEST = 5.0  # spreads of a feature
_ROOT_3 = np.sqrt(3.0)
# Shares of the variance where nothing was learned: as the families that were measured on many GPUs have them, rounded.
_PLAIN_BIASES, _PLAIN_SMOOTH = (0.12, 0.12, 0.06, 0.12), (0.16, 0.16, 0.16)
_PLAIN_LEANING, _PLAIN_NOISE = 0.04, 0.06
_HIDDEN = 0.1  # the share of the smooth part over hidden units, before any call was measured
_UNITS = 80  # of hundreds: a calibration stays under a megabyte
_PLAIN_METRIC = 0.75  # over the root of the number of features: two calls at random are about 1 apart


def sharers(choices: Mapping[str, str | None]) -> tuple[str, str, str]:
    """The format, the stack and the configuration of a call by its choices."""
    given = {name: value for name, value in sorted(choices.items()) if value is not None}
    form = " ".join(f"{name}={given[name]}" for name in _FORMAT if name in given)
    return form, str(given.get("stack", "")), " ".join(f"{name}={value}" for name, value in given.items())


def hidden_names(units: int) -> tuple[str, ...]:
    return tuple(f"hidden_{at}" for at in range(units))


def with_hidden(names: tuple[str, ...], values: Floats, hidden: Floats) -> tuple[tuple[str, ...], Floats]:
    """Features and hidden units of calls side by side, as a prior over both takes them."""
    return (*names, *hidden_names(hidden.shape[1])), np.concatenate([values, hidden], axis=1)


def matern(squared: NDArray[Any]) -> NDArray[Any]:
    """Likeness of calls at this squared distance: 1 at 0, then falling (Matérn 3/2)."""
    scaled = np.sqrt(np.maximum(squared, 0)) * squared.dtype.type(_ROOT_3)
    return (1 + scaled) * np.exp(-scaled)


@dataclass(frozen=True)
class PriorScales:
    """What the measured calls of one GPU say of the prior: how large its parts are there, as factors on the variance;
    ``length``: how far a call speaks for others; ``unshared``: how much of it a configuration does not share."""

    biases: float = 1.0
    smooth: float = 1.0
    noise: float = 1.0
    length: float = 1.0
    unshared: float = 1.0  # on top of the factors of its biases and smooth parts
    hidden: float = 1.0  # of the smooth part over hidden units


AS_LEARNED = PriorScales()


@dataclass(frozen=True, eq=False)
class CallPoints:
    """Calls as the prior sees them."""

    position: Doubles  # (calls, features) standardised
    leaning: Doubles  # (calls,) log of what the networks corrected
    format: Codes  # (calls,) numbers of formats, stacks and configurations
    stack: Codes
    configuration: Codes

    @classmethod
    def of(
        cls, position: Doubles, leaning: Doubles, groups: Sequence[tuple[str, str, str]], code: NDArray[Any]
    ) -> CallPoints:
        """Of calls whose format, stack and configuration are ``groups[code]``."""
        numbers = [np.unique([group[at] for group in groups], return_inverse=True)[1] for at in range(3)]
        form, stack, configuration = (np.asarray(number, dtype=np.int64).reshape(-1)[code] for number in numbers)
        return cls(position, leaning, form, stack, configuration)

    def __len__(self) -> int:
        return len(self.leaning)

    def select(self, rows: NDArray[Any]) -> CallPoints:
        return CallPoints(
            self.position[rows], self.leaning[rows], self.format[rows], self.stack[rows], self.configuration[rows]
        )


@dataclass(frozen=True, eq=False)
class Prior:
    """Shares of the variance of an error, and the metrics of its smooth parts."""

    names: tuple[str, ...]  # features
    mean: Floats
    scale: Floats
    metric: Floats  # (smooth parts, features): how much a feature counts in telling calls apart
    biases: tuple[float, ...]  # by SHARERS
    smooth: tuple[float, ...]  # by SMOOTH, and over hidden units where there are some
    leaning: float
    noise: float

    def positions(self, names: tuple[str, ...], values: Floats) -> Doubles:
        """Features as the metrics take them."""
        positions = (aligned(names, values, self.names) - self.mean) / self.scale
        return np.clip(positions, -_FARTHEST, _FARTHEST).astype(np.float64)

    def covariance(self, first: CallPoints, second: CallPoints, setting: PriorScales = AS_LEARNED) -> Doubles:
        """Of the errors of two sets of calls, without noise."""
        form, stack, configuration = (
            (getattr(first, name)[:, None] == getattr(second, name)[None, :]).astype(np.float64)
            for name in ("format", "stack", "configuration")
        )
        biases, smooth, leaning = self.shares(setting)
        shared = sum(share * gate for share, gate in zip(biases, (1.0, form, stack, configuration), strict=True))
        shared = shared + leaning * np.outer(first.leaning, second.leaning)
        for part, (share, gate) in enumerate(zip(smooth, (1.0, form, configuration, 1.0), strict=False)):
            shared = shared + share * gate * matern(self._squared(first, second, part, setting))
        return np.asarray(shared)

    def variance(self, calls: CallPoints, setting: PriorScales = AS_LEARNED) -> Doubles:
        """The diagonal of the covariance of calls with themselves."""
        biases, smooth, leaning = self.shares(setting)
        return np.asarray(sum(biases) + sum(smooth) + leaning * calls.leaning**2)

    def shares(self, setting: PriorScales) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Of the biases, the smooth parts and the leaning, with this setting."""
        own = (1.0, 1.0, 1.0, setting.unshared)  # the last of SHARERS and of SMOOTH is a configuration
        biases = tuple(setting.biases * share * factor for share, factor in zip(self.biases, own, strict=True))
        factors = (setting.smooth, setting.smooth, setting.smooth * setting.unshared, setting.hidden)
        smooth = tuple(share * factor for share, factor in zip(self.smooth, factors, strict=False))
        return biases, smooth, setting.biases * self.leaning

    def scaled(self, positions: NDArray[Any], part: int, setting: PriorScales) -> NDArray[Any]:
        """Positions in lengths of a smooth part, by the features that count there."""
        counting = np.flatnonzero(self.metric[part])
        length = setting.length if part < len(SMOOTH) else 1.0
        return positions[..., counting] * (self.metric[part, counting] / np.float32(length))

    def with_hidden(self, hidden: Floats) -> Prior:
        """With a smooth part over the hidden units that tell these calls apart most: two at random are about 1.4
        apart."""
        variance = hidden.var(axis=0, dtype=np.float64)
        units = np.sort(np.argsort(-variance, kind="stable")[:_UNITS])
        if not units.size:
            return self
        spread = np.sqrt(max(variance[units].sum(), 1e-6))
        known = len(self.names)
        metric = np.zeros((len(SMOOTH) + 1, known + len(units)), dtype=np.float32)
        metric[: len(SMOOTH), :known], metric[len(SMOOTH), known:] = self.metric, 1.0
        names = hidden_names(hidden.shape[1])
        return replace(
            self,
            names=(*self.names, *(names[at] for at in units)),
            mean=np.concatenate([self.mean, hidden[:, units].mean(axis=0)]),
            scale=np.concatenate([self.scale, np.full(len(units), spread, dtype=np.float32)]),
            metric=metric,
            smooth=(*self.smooth, _HIDDEN),
        )

    def _squared(self, first: CallPoints, second: CallPoints, part: int, setting: PriorScales) -> Doubles:
        left, right = (self.scaled(calls.position, part, setting) for calls in (first, second))
        return np.sum(left**2, axis=1)[:, None] + np.sum(right**2, axis=1) - 2 * left @ right.T

    def to_dict(self) -> tuple[dict[str, Floats], dict[str, Any]]:
        """Arrays and plain values, as a file has them."""
        plain = {"names": self.names, "biases": self.biases, "smooth": self.smooth, "leaning": self.leaning}
        return {"mean": self.mean, "scale": self.scale, "metric": self.metric}, {**plain, "noise": self.noise}

    @classmethod
    def from_dict(cls, arrays: Mapping[str, Floats], plain: Mapping[str, Any]) -> Self:
        """From what ``to_dict`` gave."""
        prior = cls(
            names=tuple(plain["names"]), mean=arrays["mean"], scale=arrays["scale"], metric=arrays["metric"],
            biases=tuple(plain["biases"]), smooth=tuple(plain["smooth"]), leaning=float(plain["leaning"]),
            noise=float(plain["noise"]),
        )  # fmt: skip
        shares = (*prior.biases, *prior.smooth, prior.leaning, prior.noise)
        if min(shares) < 0 or len(prior.biases) != len(SHARERS) or len(prior.smooth) - len(SMOOTH) not in (0, 1):
            raise ValueError("a share of the variance is not a share")
        width = len(prior.names)
        if prior.metric.shape != (len(prior.smooth), width) or not prior.mean.shape == prior.scale.shape == (width,):
            raise ValueError("arrays of the prior do not fit together")
        return prior

    def of(self, shares: Sequence[float], metric: Floats) -> Prior:
        """The same features with other shares: biases, smooth parts, leaning, noise in a row."""
        groups = len(SHARERS)
        biases, smooth = tuple(shares[:groups]), tuple(shares[groups : groups + len(SMOOTH)])
        leaning, noise = shares[groups + len(SMOOTH) :]
        return replace(self, metric=metric, biases=biases, smooth=smooth, leaning=leaning, noise=noise)


def plain_prior(names: Sequence[str], mean: Floats, scale: Floats) -> Prior:
    """Where nothing was learned: all features count alike. Those that name a GPU say nothing."""
    keep = [at for at, name in enumerate(names) if name not in GPU_FEATURES]
    metric = np.full((len(SMOOTH), len(keep)), _PLAIN_METRIC / np.sqrt(len(keep)), dtype=np.float32)
    return Prior(
        tuple(names[at] for at in keep), mean[keep].astype(np.float32), scale[keep].astype(np.float32), metric,
        _PLAIN_BIASES, _PLAIN_SMOOTH, _PLAIN_LEANING, _PLAIN_NOISE,
    )  # fmt: skip


def prior_of_encoder(encoder: Encoder) -> Prior:
    """The plain one over the features of a family's networks."""
    return plain_prior(encoder.names, encoder.mean, encoder.scale)
