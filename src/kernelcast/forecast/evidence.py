"""What was measured, by configuration, and how far a call is from it.

A configuration is an op on a GPU and all of its choices together: stack, backend, number formats, prefill or decode, …
A call whose configuration was measured is answered with the choices that the networks were fitted with. Any other is
answered as the nearest configuration that was measured, times the ratio of physics between the two; how far off that is
was learned by predicting each measured configuration as if it had not been (``Substitution``). No rows are kept, only
figures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu, gpu
from kernelcast.ops.base import Calls, Configuration, Kernel
from kernelcast.ops.dtypes import same_widths
from kernelcast.ops.work import Array

Rows = NDArray[np.intp]
Change = tuple[str, str | None, str | None]  # a parameter, the requested value, the value used
# Stacks that a call could mean where none is named, the first that was measured; None: a kernel by itself.
USUAL_STACKS = (None, "vllm", "sglang", "trtllm", "torch", "flashinfer", "nccl")
FIXED = ("phase", "mask", "lengths", "filters", "config", "absorbed")  # a call of another of these has other numbers
_DEFAULTS = ("layout", "to", "scale", "access", "state_dtype", "fabric", "inputs")  # of an op: not worth a mention
_ROUNDING = 0.25  # octaves beyond a range that are still inside of it
_OTHER_MODEL = 0.2  # octaves that a call counts which has not the sizes of a measured model
_NEAR = 2.0  # octaves beyond a range that are near
_PUBLIC = ("op", "gpu", "configuration", "calls", "ranges", "sources", "tested", "error", "bias", "inside",
           "faster_doubled")  # fmt: skip
_KEYS = {"configuration": "words", "network_choices": "heard"}  # of fields that files and JSON call otherwise


@dataclass(frozen=True)
class Substitution:
    """What it costs to answer with one choice for another: log of true over answered time."""

    shift: float  # the median, which the answer is corrected by
    low: float  # the tenth percentile lies this far below
    high: float  # and the ninetieth this far above
    error: float  # mean error of an answer, corrected by the median of other configurations
    configurations: int


# Batches of unequal lengths are in no table of kernels; whole decode steps of such batches in engines are this far off.
RAGGED = Substitution(0.0, 0.1, 0.1, 0.07, 0)
# An engine's product of inputs that come quantised is in no table either; against 1,102 products alone that PyTorch was
# measured with on an H200, forecasts of TensorRT-LLM's, vLLM's and SGLang's are off by 5.4, 6.6 and 8.1%.
QUANTIZED_INPUTS = Substitution(0.0, 0.09, 0.09, 0.07, 0)
# Formats of the same widths have the same bytes, and physics knows their rates: as far apart as 41 kernels bound by
# memory are in fp16 and bf16 (7%), and 26 kernels of experts in int4 and mxfp4 (6 to 8%).
SAME_WIDTHS = Substitution(0.0, 0.1, 0.13, 0.08, 0)
UNKNOWN = Substitution(0.0, 0.4, 0.7, 0.5, 0)  # of a choice of which no two were measured: as wide as the widest
# A link is physics alone: what one slow host is off by says nothing of another link.
UNMEASURED = {"lengths": RAGGED, "inputs": QUANTIZED_INPUTS, "fabric": UNKNOWN}
UNKNOWN_FIXED = Substitution(0.0, 0.7, 1.1, 1.0, 0)  # the same of a choice that cannot be changed in a call


@dataclass(frozen=True)
class MeasuredConfiguration:
    """What was measured of one configuration."""

    op: str
    gpu: str
    configuration: Mapping[str, str | None]  # in full, as ``Kernel.with_defaults`` gives it
    network_choices: Mapping[str, str | None]  # the choices that the networks were fitted with
    calls: int
    ranges: Mapping[str, tuple[float, float]]
    models: tuple[tuple[float, ...], ...]  # ``Kernel.model_sizes`` of the calls, where another backend was measured too
    sources: tuple[str, ...]
    tested: int = 0  # calls of shapes that no network saw
    error: float | None = None  # mean error on them, as a share
    bias: float | None = None  # mean of predicted over measured, less 1
    inside: float | None = None  # share of them inside the interval
    width: float = 1.0  # how many times the interval as learned holds four in five of the calls left out
    # By the size that grows, to a power of two: the share of measured pairs in which twice of it was faster by over 2%
    faster_doubled: Mapping[str, float] = field(default_factory=dict)

    @functools.cached_property
    def octaves(self) -> tuple[dict[str, float], dict[str, float]]:
        """The ranges as log2 of the number and one: the lower ends, the upper ends."""
        ends = [np.log2(np.array(pair) + 1.0).tolist() for pair in self.ranges.values()]
        low, high = (dict(zip(self.ranges, [pair[at] for pair in ends], strict=True)) for at in (0, 1))
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """For JSON output; what only the networks need is left out."""
        values = {_KEYS.get(name, name): value for name, value in vars(self).items() if name in _PUBLIC}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


@dataclass(frozen=True, eq=False)  # looked up once and shared, so compared by identity
class EvidenceMatch:
    """The evidence of a configuration: what was measured that is nearest to it, and what lies between the two."""

    configuration: Configuration  # as requested, with defaults filled in
    filled: tuple[Change, ...] = ()  # what was not given, or given by another name
    entry: MeasuredConfiguration | None = None
    network_gpu: str | None = None  # the GPU that the networks are given
    substituted: tuple[Change, ...] = ()  # what was given and not measured
    shift: float = 0.0
    low: float = 0.0
    high: float = 0.0
    distance: int = 0  # choices substituted, a GPU that was not measured, a new generation
    gpu: str = ""  # that was asked about

    @property
    def borrowed(self) -> bool:
        """Whether what was measured was so on another GPU."""
        return self.entry is not None and bool(self.gpu) and self.entry.gpu != self.gpu

    @property
    def gpu_is_new(self) -> bool:
        """Whether nothing of this family was measured on the GPU."""
        return self.distance > len(self.substituted)

    @property
    def stand_in(self) -> str:
        """'in fp16 for bf16, of torch for flashinfer': choices that another one stands in for; but for the GPU."""
        others = [change for change in self.substituted if change[0] != "gpu"]
        return ", ".join(
            f"{_STAND_IN.get(name, f'with {name}')} {answered or _UNSET.get(name, 'not given')} for "
            f"{asked or _UNSET.get(name, 'not given')}" for name, asked, answered in others)  # fmt: skip

    @property
    def answered_as(self) -> dict[str, dict[str, str | None]]:
        """Choices filled in or substituted: what was asked (None where nothing was given), and what was answered."""
        filled = {name: {"asked": asked, "answered": answered} for name, asked, answered in self.filled}
        for name, asked, answered in self.substituted:
            given = filled[name]["asked"] if name in filled else asked
            filled[name] = {"asked": given, "answered": answered}
        return filled

    @property
    def text(self) -> str:
        """'backend flashinfer for fa2, paged yes': the choices filled in or substituted."""
        return _changes_text((name, pair["asked"], pair["answered"]) for name, pair in self.answered_as.items())

    @property
    def filled_in(self) -> str:
        """The same of the choices filled in alone."""
        changed = {name for name, *_ in self.substituted}
        return _changes_text(change for change in self.filled if change[0] not in changed)

    @property
    def evidence(self) -> dict[str, Any] | None:
        """What was measured, as data; None where nothing was."""
        return self.entry.to_dict() if self.entry else None


def _changes_text(changes: Iterable[Change]) -> str:
    return ", ".join(f"{name} {answered or 'not given'}{f' for {asked}' if asked is not None else ''}"
                     for name, asked, answered in changes)  # fmt: skip


_STAND_IN = {"dtype": "in", "stack": "of"}  # how a choice of such a name is put; others: with NAME
_UNSET = {"inputs": "quantised in the layer"}  # what it means that such a choice is not given
UNMATCHED = EvidenceMatch({})  # with the choices that the calls have, whatever was measured


def configurations_of(kernel: type[Kernel], calls: Calls) -> Iterator[tuple[Rows | None, dict[str, str | None]]]:
    """The calls of each configuration, by number (None: all of them)."""
    columns = kernel.configuration(calls)
    varying = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    same = {name: value for name, value in columns.items() if not isinstance(value, np.ndarray)}
    if not varying:
        yield None, same
        return
    code = np.zeros(calls.count, dtype=np.int64)
    for column in varying.values():
        if (column != column[0]).any():
            code = code * (len(column) + 1) + np.unique(column.astype(str), return_inverse=True)[1]
            code = np.unique(code, return_inverse=True)[1]
    _, first = np.unique(code, return_index=True)
    for number, row in enumerate(first):
        configuration = {**same, **{name: column[row] for name, column in varying.items()}}
        yield (None if len(first) == 1 else np.flatnonzero(code == number)), configuration


def without_evidence(kernel: type[Kernel], given: Configuration, gpu: Gpu) -> EvidenceMatch:
    """Defaults of the stack filled in, nothing substituted."""
    full = kernel.with_defaults(given, gpu)
    return EvidenceMatch(full, _filled(given, full))


def _filled(given: Configuration, full: Configuration) -> tuple[Change, ...]:
    changes = ((name, given[name], value) for name, value in full.items() if value != given[name])
    return tuple(change for change in changes if change[0] not in _DEFAULTS)


def _short(value: Any) -> Any:
    """Whole numbers without a point, all through."""
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


# Whether a measured configuration fills in choices with others than the defaults, and whether it has one that is alike
Fills = tuple[bool, bool]
# It, the choices between, what it fills in, and what the choices cost
Difference = tuple[MeasuredConfiguration, list[Change], Fills, float]


@dataclass(frozen=True)
class Evidence:
    """All measured configurations of a family, and what substitutions cost."""

    entries: tuple[MeasuredConfiguration, ...] = ()
    # by "choice asked answered", "choice, dtype" and "choice"
    substitutions: Mapping[str, Substitution] = field(default_factory=dict)
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """From what ``to_dict`` gave."""
        names = {key: name for name, key in _KEYS.items()}
        entries = [
            {
                **{names.get(key, key): value for key, value in entry.items()},
                "ranges": {name: tuple(pair) for name, pair in entry["ranges"].items()},
                "models": tuple(map(tuple, data["models"][entry["models"]])),
                "sources": tuple(entry["sources"]),
            }
            for entry in data["kinds"]
        ]
        substitutions = {name: Substitution(*values) for name, values in data["steps"].items()}
        return cls(tuple(MeasuredConfiguration(**entry) for entry in entries), substitutions)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; lists of models that configurations share are written once."""
        models = list(dict.fromkeys(entry.models for entry in self.entries))
        entries = [{_KEYS.get(name, name): value for name, value in asdict(entry).items()} for entry in self.entries]
        return {
            "models": [_short(sizes) for sizes in models],
            "kinds": [
                {**_short(data), "models": models.index(entry.models)}
                for data, entry in zip(entries, self.entries, strict=True)
            ],
            "steps": {name: tuple(asdict(step).values()) for name, step in self.substitutions.items()},
        }

    @functools.cached_property
    def by_op(self) -> Mapping[str, Sequence[MeasuredConfiguration]]:
        entries: dict[str, list[MeasuredConfiguration]] = {}
        for entry in self.entries:
            entries.setdefault(entry.op, []).append(entry)
        return entries

    @functools.cached_property
    def gpus(self) -> frozenset[str]:
        return frozenset(entry.gpu for entry in self.entries)

    @functools.cached_property
    def capabilities(self) -> frozenset[str]:
        return frozenset(gpu(name).compute_capability for name in self.gpus)

    def substitution(
        self, name: str, requested: str | None, used: str | None, dtype: str | None = None
    ) -> Substitution:
        """What it costs to take one choice for another: of this pair, else of the choice in this format, or in any."""
        pair = f"{name} {requested} {used}"
        if pair not in self.substitutions and same_widths(requested, used):
            return SAME_WIDTHS  # what formats of other bytes and rates cost says nothing of these
        for key in (pair, f"{name}, {dtype}", name):
            if key in self.substitutions:
                return self.substitutions[key]
        return UNMEASURED.get(name, UNKNOWN_FIXED if name in FIXED else UNKNOWN)

    def _error(self, *change: str | None) -> float:
        if change not in self._cache:
            self._cache[change] = self.substitution(*change).error  # type: ignore[arg-type]
        return float(self._cache[change])

    def matches(
        self, kernel: type[Kernel], given: Configuration, target: Gpu, nearest_gpu: str
    ) -> tuple[EvidenceMatch, ...]:
        """The evidence of a configuration on ``target``, which is taken for ``nearest_gpu`` where it was not measured.

        Several where what was not given could be one or the other: the usual first. Which of them a call has, its
        numbers decide: an engine takes another kernel for wide heads, say.
        """
        key = kernel.op, tuple(given.items()), target.id, target.compute_capability, target.link_kind, nearest_gpu
        if key not in self._cache:
            self._cache[key] = tuple(self._matches(kernel, given, target, nearest_gpu))
        matches: tuple[EvidenceMatch, ...] = self._cache[key]
        return matches

    def _matches(
        self, kernel: type[Kernel], given: Configuration, target: Gpu, nearest_gpu: str
    ) -> list[EvidenceMatch]:
        if given.get("stack") is not None:
            return self._nearest(kernel, given, given, target, nearest_gpu)[1]
        measured = {entry.configuration["stack"] for entry in self.by_op.get(kernel.op, ())}
        stacks = [stack for stack in USUAL_STACKS if stack in measured] or [None]
        options = [self._nearest(kernel, given, {**given, "stack": stack}, target, nearest_gpu) for stack in stacks]
        _, matches = min(options, key=lambda option: option[0])  # of equals the first
        # No stack was given, so the interval holds them all
        any_stack = self.substitutions.get(f"stack, {given['dtype']}") or self.substitutions.get("stack", UNKNOWN)
        return [match if match.configuration["stack"] is None else _wider(match, any_stack) for match in matches]

    def _nearest(
        self, kernel: type[Kernel], requested: Configuration, given: Configuration, target: Gpu, nearest_gpu: str
    ) -> tuple[float, list[EvidenceMatch]]:
        """The measured configurations that the fewest and cheapest substitutions lie between, and what they cost."""
        full = kernel.with_defaults(given, target)
        open_choices = [name for name in full if given[name] is None and name != "stack" and not implied(kernel, name)]
        entries, dtype = self.by_op.get(kernel.op, ()), full["dtype"]
        known = any(entry.gpu == nearest_gpu for entry in entries)  # the networks know the op there
        new = 0 if target.id in self.gpus else 1 + (target.compute_capability not in self.capabilities)
        gpu_cost = {
            name: 0.0 if name == nearest_gpu else self._error("gpu", nearest_gpu, name, dtype) for name in self.gpus
        }
        ranked = []
        for index, (entry, changes, fills, cost) in enumerate(self._differences(kernel, full, open_choices)):
            ranked.append((round(cost + gpu_cost[entry.gpu], 6), fills, -entry.calls, index, changes))
        if not ranked:
            return 0.0, [EvidenceMatch(full, _filled(requested, full), distance=2, gpu=target.id)]
        least = min(cost for cost, *_ in ranked)

        def order(each: tuple[float, Fills, int, int, list[Change]]) -> tuple[Fills, bool, int, int]:
            """Of equals those of the same compute capability; for these alone, as it opens the file of the GPU."""
            _, fills, calls, index, _ = each
            return fills, gpu(entries[index].gpu).compute_capability != target.compute_capability, calls, index

        matches = []
        for *_, index, changes in sorted((each for each in ranked if each[0] == least), key=order):
            entry = entries[index]
            if entry.gpu != nearest_gpu:
                changes = [*changes, ("gpu", nearest_gpu, entry.gpu)]
            costs = [self.substitution(*change, dtype) for change in changes]
            # Networks that know the op on this GPU need no correction by the median of answers under another name
            shifts = [
                0.0 if known and change[0] == "gpu" else cost.shift for change, cost in zip(changes, costs, strict=True)
            ]
            changed = {name for name, *_ in changes}
            configuration = {
                name: value if name in changed else entry.configuration.get(name) for name, value in full.items()
            }
            # the GPU that was asked about, not its stand-in
            substituted = tuple(("gpu", target.id, entry.gpu) if change[0] == "gpu" else change for change in changes)
            matches.append(
                EvidenceMatch(
                    configuration=configuration,
                    filled=_filled(requested, configuration),
                    entry=entry,
                    network_gpu=nearest_gpu if known else entry.gpu,
                    substituted=substituted,
                    shift=sum(shifts),
                    low=float(np.sqrt(sum(cost.low**2 for cost in costs))),
                    high=float(np.sqrt(sum(cost.high**2 for cost in costs))),
                    distance=len(substituted) + new,
                    gpu=target.id,
                )
            )
        return least, matches

    def _differences(self, kernel: type[Kernel], full: Configuration, open_choices: Sequence[str]) -> list[Difference]:
        """Of every measured configuration of an op: the choices between, what it fills in, and what they cost. The same
        on every GPU."""
        key = kernel.op, tuple(full.items()), tuple(open_choices)
        if key not in self._cache:
            differences = []
            for entry in self.by_op.get(kernel.op, ()):
                measured = entry.configuration.get
                apart = [(name, value, measured(name)) for name, value in full.items() if value != measured(name)]
                given = [change for change in apart if change[0] not in open_choices]
                changes = [change for change in given if not kernel.alike(*change)]
                cost = sum(self._error(*change, full["dtype"]) for change in changes)
                fills = len(apart) > len(given), len(given) > len(changes)
                differences.append((entry, changes, fills, cost))
            self._cache[key] = differences
        known: list[Difference] = self._cache[key]
        return known


def implied(kernel: type[Kernel], name: str) -> bool:
    """Whether a choice that is not given has another parameter's value: a copy's format is its source's."""
    parameter = kernel.parameters.get(name)
    return parameter is not None and parameter.unset in kernel.parameters


def _wider(match: EvidenceMatch, spread: Substitution) -> EvidenceMatch:
    low, high = float(np.hypot(match.low, spread.low)), float(np.hypot(match.high, spread.high))
    return replace(match, low=low, high=high)


def nearest_match(matches: Sequence[EvidenceMatch], kernel: type[Kernel], calls: Calls) -> NDArray[np.intp]:
    """Index of the match of each call: whose measured calls are the nearest, of equals the first."""
    sizes = kernel.sizes(calls)
    model = (
        np.nan_to_num(np.stack([sizes[name] for name in kernel.model_sizes], axis=1)) if kernel.model_sizes else None
    )
    octaves = []
    for entry in (match.entry for match in matches):
        if entry is None:
            octaves.append(np.zeros(calls.count))
            continue
        octaves.append(beyond(entry, sizes, calls.count))
        if entry.models and model is not None:
            known = (model[:, None, :] == np.array(entry.models)[None]).all(axis=2).any(axis=1)
            octaves[-1] += np.where(known, 0.0, _OTHER_MODEL)
    return np.argmin(np.round(octaves, 2), axis=0)


def beyond(entry: MeasuredConfiguration, sizes: Mapping[str, Array], count: int) -> Array:
    """Octaves by which calls lie outside of the measured ranges, in the number that is farthest out."""
    low, high = entry.octaves
    names = [name for name in entry.ranges if name in sizes]
    if not names:
        return np.zeros(count)
    least, most = (np.array([[octaves[name]] for name in names]) for octaves in (low, high))
    values = np.log2(np.maximum(np.array([sizes[name] for name in names]), 0.0) + 1.0)
    return np.fmax(0.0, np.fmax.reduce(np.maximum(least - values, values - most)))


def range_steps(octaves: Array) -> NDArray[np.int64]:
    """0 inside, 1 near, 2 farther."""
    return (octaves > _ROUNDING).astype(np.int64) + (octaves > _NEAR)
