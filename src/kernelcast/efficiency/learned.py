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

from kernelcast.efficiency.features import GPU_FEATURES, KEEP, LIMIT_SHARES, Features, aligned, gpu_features
from kernelcast.efficiency.generic import Generic, by_time, sustained_shares
from kernelcast.efficiency.network import Encoder, Floats, Layers, read_tensors
from kernelcast.efficiency.predictor import Estimate, Question
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu
from kernelcast.machine.analyse import PIPELINES, Score

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


@dataclass(frozen=True)
class FamilyWeights:
    """All that is fitted for one family."""

    encoder: Encoder
    main: tuple[Layers, ...]
    transfer: tuple[Layers, ...]
    ceiling: Layers
    capabilities: tuple[str, ...]  # of the GPUs in the data
    spreads: Mapping[str, Spread]  # by support
    about: Mapping[str, Any]  # version, data hash, rows, sources
    # by "op stack gpu", "op stack" and "": how many times the interval as learned
    widths: Mapping[str, float] = field(default_factory=dict)
    nameless: bool = False  # ask only the networks that know no GPU by name

    def estimate(self, question: Question, found: Features) -> Estimate:
        values = aligned(found.names, found.values, self.encoder.names)
        support = self._support(question, values)
        out = self.outputs(values, question.gpu, question.words)
        kept, low, high = self._spread(support)
        middle = out[:, 0] * kept
        width = self.width(question.kernel.op, question.words.get("stack"), question.gpu.id)
        fast = self.ceiling(self._blank(values), ())[:, 0].astype(np.float64)
        time = found.estimate_s * np.exp(middle)
        return Estimate(
            time_s=time,
            low_s=time * np.exp(-np.maximum(width * softplus(out[:, 1]), low)),
            high_s=time * np.exp(np.maximum(width * softplus(out[:, 2]), high)),
            ceiling_s=found.estimate_s * np.exp(fast),
            support=support,
        ).held(question.bound_s)

    def width(self, op: str, stack: str | None, place: str) -> float:
        """What shapes left out of a fit showed of this op and stack on this GPU, else of as much as is known."""
        for known in (f"{op} {stack} {place}", f"{op} {stack}", ""):
            if known in self.widths:
                return self.widths[known]
        return 1.0

    def outputs(self, values: Floats, target: Gpu, words: Mapping[str, str | None]) -> NDArray[np.float64]:
        """(calls, 3): log of the correction, and how far below and above it the interval reaches (before softplus)."""
        if self.nameless:
            return self._transferred(values, words)
        kin = stand_in(target, self.encoder.vocabulary["gpu"])
        named = values if kin.id == target.id else as_gpu(self.encoder.names, values, kin, target)
        near = _mean(self.main, self.encoder.numbers(named), self.encoder.positions({**words, "gpu": kin.id}))
        shift = clock_shift(kin, target)
        if shift:
            near[:, 0] += shift * self._tensor_share(values)
        if kin.compute_capability == target.compute_capability:
            return near
        return (near + self._transferred(values, words)) / 2

    def _transferred(self, values: Floats, words: Mapping[str, str | None]) -> NDArray[np.float64]:
        """What the networks say that know no GPU."""
        return _mean(self.transfer, self._blank(values), self.encoder.positions(words))

    def _blank(self, values: Floats) -> Floats:
        return without_gpu(self.encoder, self.encoder.numbers(values))

    def _tensor_share(self, values: Floats) -> NDArray[np.float64]:
        """Of the generic time, what matrix products bind."""
        at = self.encoder.names.index("tensor_busiest")
        return np.minimum(1.0, np.exp2(values[:, at].astype(np.float64)))

    def _support(self, question: Question, values: Floats) -> NDArray[Any]:
        """seen: this GPU, op, format and stack, inside the range of the data; near: one step from that."""
        vocabulary = self.encoder.vocabulary
        exact = question.gpu.id in vocabulary.get("gpu", ())
        named = question.kernel.op in vocabulary.get("op", ())
        named = named and question.calls.choice("dtype") in vocabulary.get("dtype", ())
        named = named and question.calls.choice("stack") in (None, *vocabulary.get("stack", ()))
        kin = question.gpu.compute_capability in self.capabilities
        steps = int(not exact) + int(not named) + self.encoder.outside(values) + int(not kin)
        return np.array(["seen", "near", "extrapolated"], dtype=object)[np.minimum(steps, 2)]

    def _spread(self, support: NDArray[Any]) -> NDArray[np.float64]:
        """(3, calls): keep, low and high of each call's support."""
        found = np.tile(np.array([[1.0], [0.0], [0.0]]), len(support))
        for level, spread in self.spreads.items():
            found[:, support == level] = np.array([[spread.keep], [spread.low], [spread.high]])
        return found


def _mean(nets: Sequence[Layers], numbers: Floats, positions: Sequence[int]) -> NDArray[np.float64]:
    return np.asarray(sum(net(numbers, positions) for net in nets) / len(nets), dtype=np.float64)


def stand_in(target: Gpu, measured: Sequence[str]) -> Gpu:
    """The measured GPU to take the name of: itself, else the nearest of its compute capability, else of all."""
    if target.id in measured:
        return gpu(target.id)
    known = [gpu(name) for name in measured]
    kin = [g for g in known if g.compute_capability == target.compute_capability]
    return min(kin or known, key=lambda g: (_distance(g, target), g.id))


def clock_shift(kin: Gpu, target: Gpu) -> float:
    """What the networks learned of ``kin`` has its power limit in it: long matrix products run at a lower clock there.

    The log of how much less the target's clock is lowered (below 0) or more; 0 where that was not measured on both.
    """
    if kin.id == target.id or not (kin.long_tensor_fraction and target.long_tensor_fraction):
        return 0.0
    tensor = PIPELINES.index("tensor")
    held = [g.long_tensor_fraction / float(sustained_shares(g)[tensor, 0]) for g in (kin, target)]  # type: ignore[operator]
    return float(np.log(held[0] / held[1]))


def _distance(one: Gpu, other: Gpu) -> float:
    """How unlike two GPUs are: the factors between their main numbers, as logs; DRAM's counts twice, because it
    tells a data-centre part with HBM from a card with GDDR."""
    numbers = ("dram_bytes_per_s", "dram_bytes_per_s", "sm_count", "l2_bytes", "power_w")
    return float(sum(abs(np.log(getattr(one, name) / getattr(other, name))) for name in numbers))


def as_gpu(names: Sequence[str], values: Floats, kin: Gpu, target: Gpu) -> Floats:
    """The features that name a GPU as they are on ``kin``: half a name would be worse than none.

    The launch floor is such a name too: it is the shortest kernel that somebody measured there. Where it is the bound,
    the distance to the bound moves with it.
    """
    named = gpu_features(kin)
    changed = values.copy()
    for at, name in enumerate(names):
        if name in named:
            changed[:, at] = named[name]
    if kin.launch_floor_s != target.launch_floor_s and "launch_share" in names:
        limits = [at for at, name in enumerate(names) if name in LIMIT_SHARES]
        changed[:, names.index("launch_share")] += np.float32(np.log2(kin.launch_floor_s / target.launch_floor_s))
        moved = changed[:, limits].max(axis=1) - values[:, limits].max(axis=1)
        changed[:, names.index("over_bound")] -= moved
    return changed


def without_gpu(encoder: Encoder, numbers: Floats) -> Floats:
    """The features that name a GPU set to their mean, which says nothing."""
    blank = numbers.copy()
    blank[:, [at for at, name in enumerate(encoder.names) if name in GPU_FEATURES]] = 0.0
    return blank


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
        asked = replace(weights, nameless=True) if self.nameless else weights
        return asked.estimate(question, question.features)


@functools.cache
def version(folder: Path) -> str:
    """Of the weights as a whole: 'none' when there are none."""
    about = folder / "about.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else "none"


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
        capabilities=tuple(meta["capabilities"]),
        spreads={level: Spread(*pair) for level, pair in meta["spreads"].items()},
        about=meta["about"],
        widths=meta.get("widths", {}),
    )


def pack(weights: FamilyWeights) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Named tensors (networks in half precision) and JSON metadata."""
    tensors: dict[str, NDArray[Any]] = {**weights.encoder.tensors()}
    named = {f"main.{i}": net for i, net in enumerate(weights.main)}
    named |= {f"transfer.{i}": net for i, net in enumerate(weights.transfer)}
    for name, net in {**named, "ceiling": weights.ceiling}.items():
        for key, array in net.tensors(f"{name}.weight.", f"{name}.bias.").items():
            tensors[key] = array.astype(np.float16) if ".weight." in key else array
    meta = {
        "format": FORMAT,
        "names": weights.encoder.names,
        "vocabulary": weights.encoder.vocabulary,
        "main": len(weights.main),
        "transfer": len(weights.transfer),
        "capabilities": weights.capabilities,
        "spreads": {level: (s.keep, s.low, s.high) for level, s in weights.spreads.items()},
        "about": weights.about,
        "widths": weights.widths,
    }
    return tensors, {name: json.dumps(value) for name, value in meta.items()}
