"""The learned efficiency: networks that correct the generic time, fitted on measured calls, shipped as weights.

A family has three sorts of networks. ``main`` knows the GPU by name. A GPU that was not measured borrows the name of
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
from kernelcast.forecast.evidence import Evidence, EvidenceMatch, beyond, range_steps, without_evidence
from kernelcast.forecast.features import GPU_FEATURES, KEEP, LIMIT_SHARES, aligned, gpu_features
from kernelcast.forecast.network import Encoder, Floats, Layers, read_tensors
from kernelcast.forecast.predictor import (
    ByTime,
    Estimate,
    Generic,
    Predictor,
    PredictorInput,
    dram_time_s,
    sustained_start_s,
    tensor_share,
)
from kernelcast.forecast.prior import Prior
from kernelcast.hardware import Gpu, gpu, root_of
from kernelcast.hardware.clocks import product_rates
from kernelcast.hardware.gpu import FMA, MFMA, MMA_SYNC, TCGEN05, WGMMA
from kernelcast.machine.analyse import Score, lazy
from kernelcast.ops.base import Configuration, Kernel
from kernelcast.results import EXTRAPOLATED, LEVELS

# How far kernels of one path are from those of another: each is written anew for the next one. AMD's are their own.
_PATH_PLACES = {FMA: -1.0, MMA_SYNC: 0.0, WGMMA: 1.0, TCGEN05: 2.0, MFMA: -4.0}


def nearest_measured_gpu(target: Gpu, measured: Sequence[str]) -> Gpu:
    """The measured GPU to take the name of: itself, else the nearest of its compute capability, else of its instruction
    path, whose kernels it runs, first those that multiply most of its formats (sm_120 has the fp8 of sm_89, which sm_80
    has not), else of all."""
    if target.id in measured:
        return gpu(target.id)
    known = [gpu(name) for name in measured]
    siblings = [g for g in known if g.compute_capability == target.compute_capability]
    if not siblings:
        siblings = [g for g in known if g.instruction_path == target.instruction_path]
        missing = [len(set(target.tensor_flops_per_clk_sm) - set(g.tensor_flops_per_clk_sm)) for g in siblings]
        siblings = [g for g, lacks in zip(siblings, missing, strict=True) if lacks == min(missing)]
    return min(siblings or known, key=lambda g: (distance(g, target), g.id))


def clock_shift(sibling: Gpu, target: Gpu) -> float:
    """What the networks learned of ``sibling`` includes its power limit: long GEMMs run at a lower clock there.

    The log of how much less the target's clock is lowered (below 0) or more; 0 where that is not known of both.
    """
    if sibling.id == target.id:
        return 0.0
    held = [_held(each) for each in (sibling, target)]
    return float(np.log(held[0] / held[1])) if held[0] and held[1] else 0.0


def _held(gpu: Gpu) -> float | None:
    """What long GEMMs reach over what short ones do: measured, else by the power that the board allows."""
    if gpu.long_tensor_fraction:
        return gpu.long_tensor_fraction / tensor_share(gpu)
    rates = product_rates(root_of(gpu))
    return rates.lasting / rates.burst if rates else None


def format_shift(sibling: Gpu, target: Gpu, dtype: str | None) -> float:
    """The same for a format: the networks learned what ``sibling`` sustains in it, against 16 bits; the log of
    how much less the target sustains of it (above 0) or more; 0 where that was not measured on both."""
    if sibling.id == target.id or dtype is None:
        return 0.0
    shares = []
    for each in (sibling, target):
        share, plain = each.sustained_tensor_fractions.get(dtype), each.sustained_tensor_fraction
        if not share or not plain:
            return 0.0
        shares.append(share / plain)
    return float(np.log(shares[0] / shares[1]))


def distance(gpu_a: Gpu, gpu_b: Gpu) -> float:
    """How unlike two GPUs are: the factors between their main numbers, as logs; DRAM's counts twice, because it
    separates data-centre parts with HBM from cards with GDDR. The GEMM rate separates an H20 from an H100."""
    numbers = ("dram_bytes_per_s", "dram_bytes_per_s", "sm_count", "l2_bytes", "power_w", "mfu_flops_per_s")
    return float(sum(abs(np.log(getattr(gpu_a, name) / getattr(gpu_b, name))) for name in numbers))


def with_gpu_features(names: Sequence[str], values: Floats, sibling: Gpu, target: Gpu) -> Floats:
    """The features that identify a GPU, with the values of ``sibling``: a mix of two identities is worse than none.

    The launch floor is such a name too: it is the shortest kernel that somebody measured there. Where it is the bound,
    the distance to the bound moves with it.
    """
    named = gpu_features(sibling)
    changed = values.copy()
    for at, name in enumerate(names):
        if name in named:
            changed[:, at] = named[name]
    if sibling.launch_floor_s != target.launch_floor_s and "launch_share" in names:
        limits = [at for at, name in enumerate(names) if name in LIMIT_SHARES]
        changed[:, names.index("launch_share")] += np.float32(np.log2(sibling.launch_floor_s / target.launch_floor_s))
        moved = changed[:, limits].max(axis=1) - values[:, limits].max(axis=1)
        changed[:, names.index("over_bound")] -= moved
    return changed


def architecture_distance(gpu_a: Gpu, gpu_b: Gpu) -> float:
    """Dissimilarity of two GPUs: steps between their instruction paths, and the log ratio of their DRAM rates, which
    separates HBM from GDDR."""
    paths = abs(_PATH_PLACES[gpu_a.instruction_path] - _PATH_PLACES[gpu_b.instruction_path])
    return paths + abs(float(np.log(gpu_a.dram_bytes_per_s / gpu_b.dram_bytes_per_s)))


def shares(known: Sequence[Gpu], target: Gpu, likeness: float) -> NDArray[np.float64]:
    """How much each of the GPUs that a new one is answered as counts. ``likeness`` 0: all the same; the larger, the
    more those that are most like it."""
    weights = np.exp(-likeness * np.array([architecture_distance(each, target) for each in known]))
    return np.asarray(weights / weights.sum())


# Products of which the campaigns' "measured" and "long" shares are: bursts, and such as a clock follows.
SHORT_S, LONG_S = 2e-4, 3e-3
WEIGHTS = Path(__file__).parent / "weights"
FORMAT = 1
GENERIC = Generic()  # answers for families without weights


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
    prior: Prior | None = None  # covariance of residuals on held-out GPUs; None: too few were measured
    nameless: bool = False  # use only the networks fitted without GPU identity
    _asked: dict[Any, list[Gpu]] = field(default_factory=dict, compare=False, repr=False)  # looked up before

    def estimate(self, question: PredictorInput) -> Estimate:
        """As the measured configuration of the match, times the ratio of physics between the two."""
        match, measured = question.match, question.measured or question
        features = measured.features
        values = aligned(features.names, features.values, self.encoder.names)
        steps = self._steps(measured)
        numbers = self.encoder.numbers(values)
        out = self.outputs(values, question.gpu, measured.choices, match.network_gpu, numbers)
        kept, *least = self._spread(steps)
        width = match.entry.width if match.entry else 1.0
        learned = np.maximum(width * softplus(out[:, 1:].T), least)
        low, high = np.hypot(learned, [[match.low], [match.high]])
        fast = self._fastest(numbers, ())[:, 0].astype(np.float64)
        scale = features.estimate_s if question.measured is None else question.time_s
        time = scale * np.exp(out[:, 0] * kept + match.shift)
        if match.borrowed:  # a correction that was learned elsewhere makes no DRAM faster than it is
            time = np.maximum(time, dram_time_s(question.best, question.gpu))
        return Estimate(
            time_s=time,
            low_s=time * np.exp(-low),
            high_s=time * np.exp(high),
            ceiling_s=scale * np.exp(fast),
            support=np.minimum(steps + len(match.substituted), EXTRAPOLATED),
        ).clipped(question.bound_s)

    def hidden(self, question: PredictorInput) -> Floats:
        """(calls, units): the last hidden layers of a network that knows no GPU, and of one that is given the nearest.
        What networks learned to tell apart on many GPUs is what errors of another GPU go by."""
        measured, known = question.measured or question, self.encoder.vocabulary["gpu"]
        values = aligned(measured.features.names, measured.features.values, self.encoder.names)
        name = question.match.network_gpu
        nearest = gpu(name) if name else nearest_measured_gpu(question.gpu, known)
        named = with_gpu_features(self.encoder.names, values, nearest, question.gpu)
        layers = [
            network.hidden(self.encoder.numbers(inputs), self.encoder.positions(choices))
            for network, inputs, choices in (
                (self._unnamed[0], values, measured.choices),
                (self.main[0], named, {**measured.choices, "gpu": nearest.id}),
            )
        ]
        return np.concatenate(layers, axis=1)

    def matches(self, kernel: type[Kernel], configuration: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        nearest = nearest_measured_gpu(target, self.encoder.vocabulary["gpu"])
        return self.evidence.matches(kernel, configuration, target, nearest.id)

    def outputs(
        self, values: Floats, target: Gpu, choices: Mapping[str, str | None], name: str | None = None,
        numbers: Floats | None = None,
    ) -> NDArray[np.float64]:  # fmt: skip
        """(calls, 3): log of the correction, and how far below and above it the interval reaches (before softplus).

        ``name``: the GPU that the networks are given; the target, or the nearest measured one, where none is given.
        ``numbers``: the values as the encoder gives them, where that was done before.
        """
        encoded = self.encoder.numbers(values) if numbers is None else numbers
        if self.nameless:
            return self._transferred(encoded, choices)
        nearest = gpu(name) if name else nearest_measured_gpu(target, self.encoder.vocabulary["gpu"])
        if nearest.compute_capability == target.compute_capability:
            return self._as(nearest, target, values, choices, encoded if nearest.id == target.id else None)
        siblings = self._known(nearest, target, choices)
        each = [self._as(sibling, target, values, choices) for sibling in siblings]
        counts = shares(siblings, target, self._likeness)
        # BLAS would round by the number of rows
        mean = sum(share * outputs for share, outputs in zip(counts, each, strict=True))
        transferred = self._transferred(encoded, choices)
        kept = [self._kept(values, sibling, target, choices.get("dtype")) for sibling in siblings]
        transferred[:, 0] *= sum(share * one for share, one in zip(counts, kept, strict=True))
        return np.asarray((mean + transferred) / 2)

    def _as(
        self,
        sibling: Gpu,
        target: Gpu,
        values: Floats,
        choices: Mapping[str, str | None],
        encoded: Floats | None = None,
    ) -> NDArray[np.float64]:
        """As if the target were ``sibling``, corrected for the target's clocks and formats."""
        named = (
            self.encoder.numbers(with_gpu_features(self.encoder.names, values, sibling, target))
            if encoded is None
            else encoded
        )
        outputs = _mean(self.main, named, self.encoder.positions({**choices, "gpu": sibling.id}))
        shift = format_shift(sibling, target, choices.get("dtype"))
        held = clock_shift(sibling, target)
        if shift or held:
            outputs[:, 0] += (shift + held * self._lasting(values, target)) * self._tensor_share(values)
        outputs[:, 0] *= self._kept(values, sibling, target, choices.get("dtype"))
        return outputs

    def _kept(self, values: Floats, sibling: Gpu, target: Gpu, dtype: str | None) -> NDArray[np.float64] | float:
        """How much of a correction that was learned of ``sibling`` holds of a GPU that the networks do not know. It is
        what a kernel loses beside the pipeline that binds it; one whose SMs get fewer FLOPs or bytes a clock from that
        pipeline waits for it longer, and loses as much less beside it."""
        if target.id in self.encoder.vocabulary["gpu"] or sibling.compute_capability != target.compute_capability:
            return 1.0
        target = root_of(target)  # what a what-if changes is left to physics
        ratios = [
            ("tensor_busiest", _ratio(*(each.tensor_flops_per_clk_sm.get(dtype or "") for each in (target, sibling)))),
            ("dram_share", _ratio(_dram_bytes_per_clk(target), _dram_bytes_per_clk(sibling))),
        ]
        lost: NDArray[np.float64] | float = 0.0
        for name, ratio in ratios:
            if ratio < 1 and name in self.encoder.names:
                part = np.exp2(values[:, self.encoder.names.index(name)].astype(np.float64))
                lost = np.maximum(lost, np.minimum(1.0, part) * (1 - ratio))
        return 1 - lost

    def _lasting(self, values: Floats, target: Gpu) -> NDArray[np.float64]:
        """How far calls are from bursts (0) to products that last (1), by their generic time."""
        at = self.encoder.names.index("launches_worth")
        octaves = values[:, at].astype(np.float64) + np.log2(sustained_start_s(target) / SHORT_S)
        return np.asarray(np.clip(octaves / np.log2(LONG_S / SHORT_S), 0.0, 1.0))

    def _known(self, nearest: Gpu, target: Gpu, choices: Mapping[str, str | None]) -> list[Gpu]:
        """Of a new generation, the GPUs to answer as: of each generation that ran such calls the most like the
        target. Their mean, in which near ones count more, is steadier than the nearest: a generation is unlike each of
        the others."""
        key = nearest.id, target.id, choices.get("op"), choices.get("dtype"), choices.get("stack")
        if key not in self._asked:
            measured = {
                entry.gpu
                for entry in self.evidence.by_op.get(str(choices.get("op")), ())
                if all(
                    {**entry.configuration, **entry.network_choices}.get(name) == choices.get(name)
                    for name in ("dtype", "stack")
                )
            }
            alike = [gpu(name) for name in self.encoder.vocabulary["gpu"] if name in measured or not measured]
            alike = [each for each in alike if each.vendor == nearest.vendor and each.instruction_path != FMA] or [
                nearest
            ]
            best: dict[str, Gpu] = {}
            for each in sorted(alike, key=lambda g: (distance(g, target), g.id)):
                best.setdefault(each.compute_capability, each)
            self._asked[key] = list(best.values())
        return self._asked[key]

    def _transferred(self, numbers: Floats, choices: Mapping[str, str | None]) -> NDArray[np.float64]:
        """What the networks say that know no GPU."""
        return _mean(self._unnamed, numbers, self.encoder.positions(choices))

    @lazy
    def _unnamed(self) -> tuple[Layers, ...]:
        return tuple(net.without_inputs(self._naming) for net in self.transfer)

    @lazy
    def _fastest(self) -> Layers:
        return self.ceiling.without_inputs(self._naming)

    @lazy
    def without_names(self) -> FamilyWeights:
        """Asked by ratios alone, whatever GPU it is."""
        return replace(self, nameless=True)

    @property
    def _naming(self) -> list[int]:
        """Inputs that name a GPU, which some networks were fitted without."""
        return naming(self.encoder)

    def _tensor_share(self, values: Floats) -> NDArray[np.float64]:
        """Of the generic time, what matrix products bind."""
        at = self.encoder.names.index("tensor_busiest")
        return np.minimum(1.0, np.exp2(values[:, at].astype(np.float64)))

    def _steps(self, question: PredictorInput) -> NDArray[np.int64]:
        """How many steps calls are away, substitutions aside: the GPU, its generation, the range of their numbers."""
        match = question.match
        new = match.distance - len(match.substituted)
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
        spreads = [self.spreads.get(level, Spread()) for level in LEVELS]
        return np.array([[s.keep for s in spreads], [s.low for s in spreads], [s.high for s in spreads]])


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


def _ratio(value: float | None, reference: float | None) -> float:
    """At most 1; 1 where one of them is not known."""
    return min(1.0, value / reference) if value and reference else 1.0


def _dram_bytes_per_clk(gpu: Gpu) -> float:
    """Of an SM."""
    return gpu.dram_bytes_per_s / (gpu.sm_count * gpu.clock_boost_hz)


def softplus(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.logaddexp(0.0, x)


@dataclass(frozen=True)
class Learned:
    """The default: fitted weights where a family has them, physics where not."""

    folder: Path = WEIGHTS
    keep: int = KEEP
    nameless: bool = False  # by ratios alone, whatever GPU it is

    def score(self, target: Gpu) -> Score:
        return ByTime(target)

    @property
    def name(self) -> str:
        return f"learned-{version(self.folder)}" + ("-nameless" if self.nameless else "")

    def what_if_spread(self, family: str) -> tuple[float, float]:
        """As far as calls on GPUs that were left out of a fit were off."""
        weights = load(self.folder, family)
        near = weights.spreads.get("near", Spread()) if weights else Spread()
        return near.low, near.high

    def estimate(self, question: PredictorInput) -> Estimate:
        weights = load(self.folder, question.kernel.family)
        if weights is None:
            return replace(GENERIC.estimate(question), predictor=GENERIC.name)
        return (weights.without_names if self.nameless else weights).estimate(question)

    def matches(self, kernel: type[Kernel], configuration: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        weights = load(self.folder, kernel.family)
        if weights is None:
            return (without_evidence(kernel, configuration, target),)
        return weights.matches(kernel, configuration, target)


def weights_of(base: Predictor, family: str) -> FamilyWeights | None:
    """The weights that a predictor answers with, or None where it has none."""
    return load(base.folder, family) if isinstance(base, Learned) else getattr(base, "weights", None)


def hidden_units(base: Predictor, question: PredictorInput) -> Floats:
    """(calls, units) of the networks that answer; no units where physics does."""
    weights = weights_of(base, question.kernel.family)
    return weights.hidden(question) if weights else np.zeros((question.calls.count, 0), dtype=np.float32)


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
        evidence=Evidence.from_dict(meta.get("evidence", {"models": [], "kinds": [], "steps": {}})),
        prior=_prior(tensors, meta["prior"]) if meta.get("prior") else None,
    )


def _prior(tensors: Mapping[str, Floats], data: Mapping[str, Any]) -> Prior:
    return Prior.from_dict({name: tensors[f"prior.{name}"] for name in ("mean", "scale", "metric")}, data)


def pack(weights: FamilyWeights) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Named tensors (networks in half precision) and JSON metadata."""
    tensors: dict[str, NDArray[Any]] = {**weights.encoder.tensors()}
    named = {f"main.{i}": net for i, net in enumerate(weights.main)}
    named |= {f"transfer.{i}": net for i, net in enumerate(weights.transfer)}
    for name, net in {**named, "ceiling": weights.ceiling}.items():
        for key, array in net.tensors(f"{name}.weight.", f"{name}.bias.").items():
            tensors[key] = array.astype(np.float16) if ".weight." in key else array
    arrays, prior = weights.prior.to_dict() if weights.prior else ({}, None)
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
        "evidence": weights.evidence.to_dict(),
    }
    return tensors, {name: json.dumps(value) for name, value in meta.items()}
