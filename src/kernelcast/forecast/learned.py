"""The learned efficiency: networks that correct the generic time, fitted on measured calls, shipped as weights.

A family has three kinds of networks. ``main`` knows the GPU by name. A GPU that was not measured borrows the name of
the nearest one that was; its own specs still enter through every ratio. ``transfer`` saw no trace of a GPU but ratios,
and was fitted with noise on them; a GPU of a new compute capability gets the mean of both, shrunk.
``ceiling`` is what the fastest measured calls of like physics reach, whatever their stack.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.evidence import Evidence, EvidenceMatch, as_asked, beyond, range_steps
from kernelcast.forecast.features import GPU_FEATURES, KEEP, aligned
from kernelcast.forecast.generic import Generic, by_time
from kernelcast.forecast.kin import as_gpu, clock_shift, distance, format_shift, shares, stand_in
from kernelcast.forecast.network import Encoder, Floats, Layers, read_tensors
from kernelcast.forecast.predictor import Estimate, Question
from kernelcast.forecast.prior import Prior
from kernelcast.hardware import Gpu, gpu
from kernelcast.hardware.paths import FMA
from kernelcast.machine.analyse import Score
from kernelcast.machine.lazy import lazy
from kernelcast.ops.base import Configuration, Kernel
from kernelcast.support import SUPPORT

WEIGHTS = Path(__file__).parent / "weights"
FORMAT = 1
GENERIC = Generic()  # answers for families without weights
LEVELS = np.array(list(SUPPORT), dtype=object)  # of support, by how many steps away


@dataclass(frozen=True)
class Spread:
    """What GPUs left out of a fit showed: how much of the correction to keep, and how far off it is.

    ``low`` and ``high``: the interval reaches at least this far below and above, as logs of time.
    """

    keep: float = 1.0
    low: float = 0.0
    high: float = 0.0
    likeness: float = 0.0  # how much more those count that are most like a new GPU, of those that it is answered as


@dataclass(frozen=True)
class FamilyWeights:
    """All that is fitted for one family."""

    encoder: Encoder
    main: tuple[Layers, ...]
    transfer: tuple[Layers, ...]
    ceiling: Layers
    spreads: Mapping[str, Spread]  # by support
    about: Mapping[str, Any]  # version, data hash, rows, sources
    evidence: Evidence = field(default_factory=Evidence)
    prior: Prior | None = None  # how errors on GPUs that were left out hang together; None: too few were measured
    nameless: bool = False  # ask only the networks that know no GPU by name
    _asked: dict[Any, list[Gpu]] = field(default_factory=dict, compare=False, repr=False)  # looked up before

    def estimate(self, question: Question) -> Estimate:
        """As the measured kind that the question stands on, times the ratio of physics between the two."""
        match, heard = question.match, question.heard or question
        found = heard.features
        values = aligned(found.names, found.values, self.encoder.names)
        steps = self._steps(heard)
        numbers = self.encoder.numbers(values)
        out = self.outputs(values, question.gpu, heard.words, match.name, numbers)
        kept, *least = self._spread(steps)
        width = match.entry.width if match.entry else 1.0
        learned = np.maximum(width * softplus(out[:, 1:].T), least)
        low, high = np.hypot(learned, [[match.low], [match.high]])
        fast = self._fastest(numbers, ())[:, 0].astype(np.float64)
        scale = found.estimate_s if question.heard is None else question.time_s
        time = scale * np.exp(out[:, 0] * kept + match.shift)
        return Estimate(
            time_s=time,
            low_s=time * np.exp(-low),
            high_s=time * np.exp(high),
            ceiling_s=scale * np.exp(fast),
            support=LEVELS[np.minimum(steps + len(match.changed), 2)],
        ).held(question.bound_s)

    def matches(self, kernel: type[Kernel], words: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        kin = stand_in(target, self.encoder.vocabulary["gpu"])
        return self.evidence.matches(kernel, words, target, kin.id)

    def outputs(
        self, values: Floats, target: Gpu, words: Mapping[str, str | None], name: str | None = None,
        numbers: Floats | None = None,
    ) -> NDArray[np.float64]:  # fmt: skip
        """(calls, 3): log of the correction, and how far below and above it the interval reaches (before softplus).

        ``name``: the GPU that the networks are told of; the target, or the nearest measured one, where none is given.
        ``numbers``: the values as the encoder gives them, where that was done before.
        """
        told = self.encoder.numbers(values) if numbers is None else numbers
        if self.nameless:
            return self._transferred(told, words)
        kin = gpu(name) if name else stand_in(target, self.encoder.vocabulary["gpu"])
        if kin.compute_capability == target.compute_capability:
            return self._as(kin, target, values, words, told if kin.id == target.id else None)
        known = self._known(kin, target, words)
        each = [self._as(one, target, values, words) for one in known]
        mean = np.tensordot(shares(known, target, self._likeness), np.array(each), axes=1)
        return np.asarray((mean + self._transferred(told, words)) / 2)

    def _as(
        self, kin: Gpu, target: Gpu, values: Floats, words: Mapping[str, str | None], told: Floats | None = None
    ) -> NDArray[np.float64]:
        """As if the target were ``kin``, but for what its own numbers say of its clock and formats."""
        named = self.encoder.numbers(as_gpu(self.encoder.names, values, kin, target)) if told is None else told
        found = _mean(self.main, named, self.encoder.positions({**words, "gpu": kin.id}))
        shift = clock_shift(kin, target) + format_shift(kin, target, words.get("dtype"))
        if shift:
            found[:, 0] += shift * self._tensor_share(values)
        return found

    def _known(self, kin: Gpu, target: Gpu, words: Mapping[str, str | None]) -> list[Gpu]:
        """Of a new generation, whom to answer as: of each generation that ran this kind of call the GPU most like the
        target. Their mean, in which kin count more, is steadier than the nearest one: a generation is unlike each of
        the others."""
        key = kin.id, target.id, words.get("op"), words.get("dtype"), words.get("stack")
        if key not in self._asked:
            ran = {
                entry.gpu for entry in self.evidence.by_op.get(str(words.get("op")), ())
                if all(entry.heard.get(name, entry.words.get(name)) == words.get(name) for name in ("dtype", "stack"))
            }  # fmt: skip
            alike = [gpu(name) for name in self.encoder.vocabulary["gpu"] if name in ran or not ran]
            alike = [one for one in alike if one.vendor == kin.vendor and one.instruction_path != FMA] or [kin]
            best: dict[str, Gpu] = {}
            for one in sorted(alike, key=lambda g: (distance(g, target), g.id)):
                best.setdefault(one.compute_capability, one)
            self._asked[key] = list(best.values())
        return self._asked[key]

    def _transferred(self, numbers: Floats, words: Mapping[str, str | None]) -> NDArray[np.float64]:
        """What the networks say that know no GPU."""
        return _mean(self._unnamed, numbers, self.encoder.positions(words))

    @lazy
    def _unnamed(self) -> tuple[Layers, ...]:
        return tuple(net.deaf_to(self._naming) for net in self.transfer)

    @lazy
    def _fastest(self) -> Layers:
        return self.ceiling.deaf_to(self._naming)

    @lazy
    def without_names(self) -> FamilyWeights:
        """Asked by ratios alone, whatever GPU it is."""
        return replace(self, nameless=True)

    @property
    def _naming(self) -> list[int]:
        """Inputs that tell a GPU: networks that were fitted without them hear nothing there."""
        return naming(self.encoder)

    def _tensor_share(self, values: Floats) -> NDArray[np.float64]:
        """Of the generic time, what matrix products bind."""
        at = self.encoder.names.index("tensor_busiest")
        return np.minimum(1.0, np.exp2(values[:, at].astype(np.float64)))

    def _steps(self, question: Question) -> NDArray[np.int64]:
        """By how much calls are off in what is no word: the GPU, its generation, and the range of their numbers."""
        match = question.match
        new = match.far - len(match.changed)
        if match.entry is None:
            return np.full(question.calls.count, 2)
        octaves = beyond(match.entry, question.kernel.sizes(question.calls), question.calls.count)
        return np.minimum(2, new + range_steps(octaves))

    def _spread(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """(3, calls): keep, low and high for so many steps."""
        return self._spreads[:, np.minimum(steps, 2)]

    @property
    def _likeness(self) -> float:
        return self.spreads.get("extrapolated", Spread()).likeness

    @lazy
    def _spreads(self) -> NDArray[np.float64]:
        told = [self.spreads.get(str(level), Spread()) for level in LEVELS]
        return np.array([[s.keep for s in told], [s.low for s in told], [s.high for s in told]])


def _mean(nets: Sequence[Layers], numbers: Floats, positions: Sequence[int]) -> NDArray[np.float64]:
    return np.asarray(sum(net(numbers, positions) for net in nets) / len(nets), dtype=np.float64)


def without_gpu(encoder: Encoder, numbers: Floats) -> Floats:
    """The features that name a GPU set to their mean, which says nothing."""
    blank = numbers.copy()
    blank[:, naming(encoder)] = 0.0
    return blank


def naming(encoder: Encoder) -> list[int]:
    """The features that name a GPU, by place."""
    return [at for at, name in enumerate(encoder.names) if name in GPU_FEATURES]


def softplus(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.logaddexp(0.0, x)


@dataclass(frozen=True)
class Learned:
    """The default: fitted weights where a family has them, physics where not."""

    folder: Path = WEIGHTS
    keep: int = KEEP
    nameless: bool = False  # by ratios alone, whatever GPU it is

    def score(self, target: Gpu) -> Score:
        return by_time(target)

    @property
    def name(self) -> str:
        return f"learned-{version(self.folder)}" + ("-nameless" if self.nameless else "")

    def what_if_spread(self, family: str) -> tuple[float, float]:
        """As far as calls on GPUs that were left out of a fit were off."""
        weights = load(self.folder, family)
        near = weights.spreads.get("near", Spread()) if weights else Spread()
        return near.low, near.high

    def estimate(self, question: Question) -> Estimate:
        weights = load(self.folder, question.kernel.family)
        if weights is None:
            return replace(GENERIC.estimate(question), predictor=GENERIC.name)
        return (weights.without_names if self.nameless else weights).estimate(question)

    def matches(self, kernel: type[Kernel], words: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        weights = load(self.folder, kernel.family)
        if weights is None:
            return (as_asked(kernel, words, target),)
        return weights.matches(kernel, words, target)


@functools.cache
def version(folder: Path) -> str:
    """Of the weights as a whole: 'none' when there are none."""
    about = folder / "about.json"
    return str(json.loads(about.read_text(encoding="utf-8"))["version"]) if about.exists() else "none"


@functools.cache
def load(folder: Path, family: str) -> FamilyWeights | None:
    """The weights of a family, or None when nothing was fitted for it."""
    path = folder / f"{family}.safetensors"
    if not path.exists():
        return None
    tensors, meta = read_tensors(path)
    if meta["format"] != FORMAT:
        raise KernelcastError(f"{path}: weights of format {meta['format']}, this version reads {FORMAT}")
    return unpack(tensors, meta)


def unpack(tensors: Mapping[str, Floats], meta: Mapping[str, Any]) -> FamilyWeights:
    """Weights from named tensors; ``pack`` is the other way."""

    def layers(name: str) -> Layers:
        return Layers.read(tensors, f"{name}.weight.", f"{name}.bias.")

    return FamilyWeights(
        encoder=Encoder.read(tensors, meta),
        main=tuple(layers(f"main.{i}") for i in range(int(meta["main"]))),
        transfer=tuple(layers(f"transfer.{i}") for i in range(int(meta["transfer"]))),
        ceiling=layers("ceiling"),
        spreads={level: Spread(*pair) for level, pair in meta["spreads"].items()},
        about=meta["about"],
        evidence=Evidence.read(meta.get("evidence", {"models": [], "kinds": [], "steps": {}})),
        prior=_prior(tensors, meta["prior"]) if meta.get("prior") else None,
    )


def _prior(tensors: Mapping[str, Floats], told: Mapping[str, Any]) -> Prior:
    return Prior.read({name: tensors[f"prior.{name}"] for name in ("mean", "scale", "metric")}, told)


def pack(weights: FamilyWeights) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Named tensors (networks in half precision) and JSON metadata."""
    tensors: dict[str, NDArray[Any]] = {**weights.encoder.tensors()}
    named = {f"main.{i}": net for i, net in enumerate(weights.main)}
    named |= {f"transfer.{i}": net for i, net in enumerate(weights.transfer)}
    for name, net in {**named, "ceiling": weights.ceiling}.items():
        for key, array in net.tensors(f"{name}.weight.", f"{name}.bias.").items():
            tensors[key] = array.astype(np.float16) if ".weight." in key else array
    arrays, prior = weights.prior.told() if weights.prior else ({}, None)
    tensors |= {f"prior.{name}": array for name, array in arrays.items()}
    meta = {
        "format": FORMAT,
        "prior": prior,
        "names": weights.encoder.names,
        "vocabulary": weights.encoder.vocabulary,
        "main": len(weights.main),
        "transfer": len(weights.transfer),
        "spreads": {level: (s.keep, s.low, s.high, s.likeness) for level, s in weights.spreads.items()},
        "about": weights.about,
        "evidence": weights.evidence.told(),
    }
    return tensors, {name: json.dumps(value) for name, value in meta.items()}
