"""What was measured, by kind of call, and how far a question is from it.

A kind is an op on a GPU and all of its words together: stack, backend, number formats, prefill or decode, … A question
whose kind was measured is answered in the words that the networks heard. One that was not is answered as the nearest
kind that was, times the ratio of physics between the two; how far off that is was learned by asking about each
measured kind as if it had not been (``Step``). No rows are kept, only figures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu, gpu
from kernelcast.ops.base import Calls, Configuration, Kernel
from kernelcast.ops.work import Array

Rows = NDArray[np.intp]
Change = tuple[str, str | None, str | None]  # a word, as asked, as answered
# Stacks that a call could mean where none is named, the first that was measured; None: a kernel by itself.
USUAL_STACKS = (None, "vllm", "sglang", "trtllm", "torch", "flashinfer", "nccl")
FIXED = ("phase", "mask", "lengths", "filters", "config", "absorbed")  # a call of another of these has other numbers
_OWN = ("layout", "to", "scale", "access", "state_dtype", "fabric", "inputs")  # an op's own defaults: nothing is told
_ROUNDING = 0.25  # octaves beyond a range that are still inside of it
_OTHER_MODEL = 0.2  # octaves that a call counts which has not the sizes of a measured model
_NEAR = 2.0  # octaves beyond a range that are near
_PUBLIC = ("op", "gpu", "configuration", "calls", "ranges", "sources", "tested", "error", "bias", "inside",
           "faster_doubled")  # fmt: skip
_KEYS = {"configuration": "words", "network_choices": "heard"}  # of fields that files and JSON call otherwise


@dataclass(frozen=True)
class Substitution:
    """What it costs to answer with one word changed: log of true over answered time."""

    shift: float  # the median, which the answer is corrected by
    low: float  # the tenth percentile lies this far below
    high: float  # and the ninetieth this far above
    error: float  # mean error of an answer, corrected by other kinds' median
    configurations: int


# Batches of unequal lengths are in no table of kernels; whole decode steps of such batches in engines are this far off.
RAGGED = Substitution(0.0, 0.1, 0.1, 0.07, 0)
# An engine's product of inputs that come quantised is in no table either; against 1,102 products alone that PyTorch was
# measured with on an H200, what is told of TensorRT-LLM's, vLLM's and SGLang's is off by 5.4, 6.6 and 8.1%.
QUANTIZED_INPUTS = Substitution(0.0, 0.09, 0.09, 0.07, 0)
UNKNOWN = Substitution(0.0, 0.4, 0.7, 0.5, 0)  # of a word of which no two kinds were measured: as wide as the widest
# A link is physics alone: what one slow host is off by says nothing of another link.
UNMEASURED = {"lengths": RAGGED, "inputs": QUANTIZED_INPUTS, "fabric": UNKNOWN}
UNKNOWN_FIXED = Substitution(0.0, 0.7, 1.1, 1.0, 0)  # the same of a word that cannot be changed in a call


@dataclass(frozen=True)
class MeasuredConfiguration:
    """One measured kind."""

    op: str
    gpu: str
    configuration: Mapping[str, str | None]  # in full, as ``Kernel.with_defaults`` gives them
    network_choices: Mapping[str, str | None]  # the choices that the networks were told
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


@dataclass(frozen=True, eq=False)  # looked up once and shared: one is the same as another only if it is that one
class EvidenceMatch:
    """Where a kind of question stands: what it rests on, and by how many words it is off."""

    configuration: Mapping[str, str | None]  # as asked, what nobody said filled in
    filled: tuple[Change, ...] = ()  # what nobody said, or called by another name
    entry: MeasuredConfiguration | None = None
    network_gpu: str | None = None  # the GPU that the networks are told of
    substituted: tuple[Change, ...] = ()  # what was said and not measured
    shift: float = 0.0
    low: float = 0.0
    high: float = 0.0
    distance: int = 0  # words changed, a GPU that was not measured, a new generation

    @property
    def answered_as(self) -> dict[str, dict[str, str | None]]:
        """The words that were filled in or changed: what was asked, None where nobody said, and what was answered."""
        filled = {word: {"asked": asked, "answered": answered} for word, asked, answered in self.filled}
        for word, asked, answered in self.substituted:
            said = filled[word]["asked"] if word in filled else asked
            filled[word] = {"asked": said, "answered": answered}
        return filled

    @property
    def text(self) -> str:
        """'backend flashinfer for fa2, paged yes': the words that were filled in or changed."""
        told = []
        for word, pair in self.answered_as.items():
            asked = f" for {pair['asked']}" if pair["asked"] is not None else ""
            told.append(f"{word} {pair['answered'] or 'not given'}{asked}")
        return ", ".join(told)

    @property
    def evidence(self) -> dict[str, Any] | None:
        """The evidence as data, None where nothing of the kind was measured."""
        return self.entry.to_dict() if self.entry else None


UNMATCHED = EvidenceMatch({})  # in the words that the calls have, whatever was measured


def configurations_of(kernel: type[Kernel], calls: Calls) -> Iterator[tuple[Rows | None, dict[str, str | None]]]:
    """The calls of each kind, by number (None: all of them), and its words."""
    words = kernel.configuration(calls)
    varying = {name: column for name, column in words.items() if isinstance(column, np.ndarray)}
    same = {name: word for name, word in words.items() if not isinstance(word, np.ndarray)}
    if not varying:
        yield None, same
        return
    code = np.zeros(calls.count, dtype=np.int64)
    for column in varying.values():
        other = column != column[0]
        if other.any():
            code = code * (len(column) + 1) + np.unique(column.astype(str), return_inverse=True)[1]
            code = np.unique(code, return_inverse=True)[1]
    _, first = np.unique(code, return_index=True)
    for number, row in enumerate(first):
        own = {name: column[row] for name, column in varying.items()}
        yield (None if len(first) == 1 else np.flatnonzero(code == number)), {**same, **own}


def without_evidence(kernel: type[Kernel], words: Configuration, place: Gpu) -> EvidenceMatch:
    """Without evidence: what nobody said filled in from the stack's file."""
    usual = kernel.with_defaults(words, place)
    return EvidenceMatch(usual, _filled(words, usual))


def _filled(words: Configuration, usual: Configuration) -> tuple[Change, ...]:
    return tuple((name, words[name], word) for name, word in usual.items() if word != words[name] and name not in _OWN)


def _short(value: Any) -> Any:
    """Whole numbers without a point, all through."""
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


Apart = tuple[
    MeasuredConfiguration, list[Change], bool, float
]  # a kind, the words between, whether it fills in others, their cost


@dataclass(frozen=True)
class Evidence:
    """All measured kinds of a family, and what changing a word costs."""

    entries: tuple[MeasuredConfiguration, ...] = ()
    substitutions: Mapping[str, Substitution] = field(
        default_factory=dict
    )  # by "word asked answered", "word, dtype" and "word"
    _known: dict[Any, tuple[EvidenceMatch, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )  # looked up before
    _errors: dict[Any, float] = field(default_factory=dict, compare=False, repr=False)  # of steps, looked up before
    _words: dict[Any, list[Apart]] = field(default_factory=dict, compare=False, repr=False)  # compared before

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
        found: dict[str, list[MeasuredConfiguration]] = {}
        for entry in self.entries:
            found.setdefault(entry.op, []).append(entry)
        return found

    @functools.cached_property
    def gpus(self) -> frozenset[str]:
        return frozenset(entry.gpu for entry in self.entries)

    @functools.cached_property
    def capabilities(self) -> frozenset[str]:
        return frozenset(gpu(name).compute_capability for name in self.gpus)

    def substitution(
        self, word: str, asked: str | None, answered: str | None, dtype: str | None = None
    ) -> Substitution:
        """What it costs to take one word for another: of this pair, else of the word in this format, else in any."""
        keys = (f"{word} {asked} {answered}", f"{word}, {dtype}", word)
        known = next((self.substitutions[key] for key in keys if key in self.substitutions), None)
        if known:
            return known
        return UNMEASURED.get(word, UNKNOWN_FIXED if word in FIXED else UNKNOWN)

    def _error(self, word: str, asked: str | None, answered: str | None, dtype: str | None) -> float:
        key = word, asked, answered, dtype
        if key not in self._errors:
            self._errors[key] = self.substitution(*key).error
        return self._errors[key]

    def _step(self, change: Change, dtype: str | None, own: bool) -> Substitution:
        """``own``: the networks are told of the GPU itself, and answer for it in words that they heard elsewhere: no
        median of answers under another name corrects that."""
        step = self.substitution(*change, dtype)
        return replace(step, shift=0.0) if own and change[0] == "gpu" else step

    def matches(self, kernel: type[Kernel], words: Configuration, place: Gpu, kin: str) -> tuple[EvidenceMatch, ...]:
        """Where these words stand on ``place``, which has the name of ``kin`` where it was not measured.

        Several where what nobody said could be one or the other: the usual one first. Which of them a call is, its
        numbers tell: an engine takes another kernel for wide heads, say.
        """
        key = kernel.op, tuple(words.items()), place.id, place.compute_capability, place.link_kind, kin
        if key not in self._known:
            self._known[key] = tuple(self._looked_up(kernel, words, place, kin))
        return self._known[key]

    def _looked_up(self, kernel: type[Kernel], words: Configuration, place: Gpu, kin: str) -> list[EvidenceMatch]:
        if words.get("stack") is not None:
            return self._nearest(kernel, words, words, place, kin)[1]
        measured = {entry.configuration["stack"] for entry in self.by_op.get(kernel.op, ())}
        stacks = [stack for stack in USUAL_STACKS if stack in measured] or [None]
        found = {stack: self._nearest(kernel, words, {**words, "stack": stack}, place, kin) for stack in stacks}
        least = min(cost for cost, _ in found.values())
        matches = next(matches for cost, matches in found.values() if cost == least)  # of equals the first
        # Nobody said which stack, so the interval holds them all
        loose = self.substitutions.get(f"stack, {words['dtype']}") or self.substitutions.get("stack", UNKNOWN)
        return [one if one.configuration["stack"] is None else _wider(one, loose) for one in matches]

    def _nearest(
        self, kernel: type[Kernel], asked: Configuration, words: Configuration, place: Gpu, kin: str
    ) -> tuple[float, list[EvidenceMatch]]:
        """The measured kinds that the fewest and least words lie between, and what they cost."""
        usual = kernel.with_defaults(words, place)
        unsaid = [name for name in usual if words[name] is None and name != "stack"]
        own = any(entry.gpu == kin for entry in self.by_op.get(kernel.op, ()))  # the networks know the op there
        new = 0 if place.id in self.gpus else 1 + (place.compute_capability not in self.capabilities)
        found, dtype = [], usual["dtype"]
        far = {name: 0.0 if name == kin else self._error("gpu", kin, name, dtype) for name in self.gpus}
        for at, (entry, changed, filled, cost) in enumerate(self._apart(kernel, usual, unsaid)):
            found.append(((round(cost + far[entry.gpu], 6), filled, -entry.calls, at), changed))
        if not found:
            return 0.0, [EvidenceMatch(usual, _filled(asked, usual), distance=2)]
        least = min(order[0] for order, _ in found)
        entries = self.by_op[kernel.op]

        def order_of(one: Any) -> Any:
            """Of equals those of the same compute capability; for these alone, as it opens the file of the GPU."""
            (_, filled, *rest), _ = one
            return filled, gpu(entries[rest[-1]].gpu).compute_capability != place.compute_capability, rest

        nearest = sorted((one for one in found if one[0][0] == least), key=order_of)
        matches = []
        for (*_, at), changed in nearest:
            entry = entries[at]
            changed = changed if entry.gpu == kin else [*changed, ("gpu", kin, entry.gpu)]
            steps = [self._step(change, dtype, own) for change in changed]
            said = {**usual, **{name: entry.configuration.get(name) for name in unsaid}}
            # told of the GPU that was asked about, not of its stand-in
            told = tuple(("gpu", place.id, entry.gpu) if change[0] == "gpu" else change for change in changed)
            matches.append(
                EvidenceMatch(
                    configuration=said,
                    filled=_filled(asked, said),
                    entry=entry,
                    network_gpu=kin if own else entry.gpu,
                    substituted=told,
                    shift=sum(step.shift for step in steps),
                    low=float(np.sqrt(sum(step.low**2 for step in steps))),
                    high=float(np.sqrt(sum(step.high**2 for step in steps))),
                    distance=len(told) + new,
                )
            )
        return least, matches

    def _apart(self, kernel: type[Kernel], usual: Configuration, unsaid: Sequence[str]) -> list[Apart]:
        """Of every measured kind of an op: the words between, whether it fills in some that nobody said, and what they
        cost. The same on every GPU."""
        key = kernel.op, tuple(usual.items()), tuple(unsaid)
        if key not in self._words:
            found = []
            for entry in self.by_op.get(kernel.op, ()):
                heard = entry.configuration.get
                apart = [(name, word, heard(name)) for name, word in usual.items() if word != heard(name)]
                changed = [change for change in apart if change[0] not in unsaid]
                cost = sum(self._error(*change, usual["dtype"]) for change in changed)
                found.append((entry, changed, len(apart) > len(changed), cost))
            self._words[key] = found
        return self._words[key]


def _wider(match: EvidenceMatch, loose: Substitution) -> EvidenceMatch:
    low, high = float(np.hypot(match.low, loose.low)), float(np.hypot(match.high, loose.high))
    return replace(match, low=low, high=high)


def nearest_match(matches: Sequence[EvidenceMatch], kernel: type[Kernel], calls: Calls) -> NDArray[np.intp]:
    """Which of several matches each call has: the one whose measured calls are the nearest, of equals the first."""
    sizes = kernel.sizes(calls)
    own = np.nan_to_num(np.stack([sizes[name] for name in kernel.model_sizes], axis=1)) if kernel.model_sizes else None
    octaves = []
    for entry in (one.entry for one in matches):
        if entry is None:
            octaves.append(np.zeros(calls.count))
            continue
        octaves.append(beyond(entry, sizes, calls.count))
        if entry.models and own is not None:
            known = (own[:, None, :] == np.array(entry.models)[None]).all(axis=2).any(axis=1)
            octaves[-1] += np.where(known, 0.0, _OTHER_MODEL)
    return np.argmin(np.round(octaves, 2), axis=0)


def beyond(entry: MeasuredConfiguration, sizes: Mapping[str, Array], count: int) -> Array:
    """Octaves by which calls lie outside of what was measured of their kind, in the number that is farthest out."""
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
