"""Kernel calls x Gpu -> Predictions. The one path that every command takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast import Estimate, Predictor, PredictorInput
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.evidence import UNMATCHED, EvidenceMatch, configurations_of, nearest_match
from kernelcast.forecast.predictor import by_time, work_times
from kernelcast.hardware import Gpu, gpu, origin_of, root_of
from kernelcast.machine.analyse import PIPELINES, Analysis, analyse, summed
from kernelcast.machine.limits import Rotation
from kernelcast.ops.base import Calls, Kernel, columns_of, parameters_of
from kernelcast.ops.dtypes import supports_dtype
from kernelcast.ops.kernel_selection import SelectedKernel, selected_kernel
from kernelcast.ops.work import Array, Number
from kernelcast.results import HtmlRepr

CHUNK_CALLS = 2048  # keeps the arrays of one chunk near the CPU's cache
SMALL_CALLS = 256  # are answered at once, without a thread
THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Predictions(Estimate):
    """Columns of results, one entry a call; limits are (pipelines, calls). ``works`` hold the details."""

    bound_s: Array
    limits_s: Array
    footprint_bytes: Array
    launches: Array  # kernels of a call, one after another
    match: NDArray[Any]  # what each call rests on
    works: tuple[Analysis, ...] = ()  # the kernels that a call launches in turn

    @property
    def bound_by(self) -> list[str]:
        """The pipeline with the largest limit, by call."""
        return [PIPELINES[i] for i in np.argmax(self.limits_s, axis=0)]

    @property
    def efficiency(self) -> Array:
        return self.bound_s / self.time_s

    def too_large(self, chip: Gpu) -> NDArray[np.bool_]:
        """Calls whose operands cannot be in this GPU's memory."""
        return self.footprint_bytes > chip.dram_bytes


@dataclass(frozen=True)
class LaunchedKernel:
    """One kernel of a call: how its tasks fall onto the SMs."""

    tile: Mapping[str, float]
    tasks: float
    ctas_per_sm: float
    waves: float
    tail: float  # share of SM time idle because tasks do not divide evenly
    padding: float  # share of the arithmetic that is padding
    launches: float
    useful_flops: float
    dram_bytes: float
    l2_resident: float
    limits: Mapping[str, float]
    busiest_sm: Mapping[str, float]


@dataclass(frozen=True)
class Prediction(HtmlRepr):
    """One call's result, in seconds."""

    op: str
    parameters: Mapping[str, Any]
    gpu: str
    time_s: float
    low_s: float
    high_s: float
    ceiling_s: float
    bound_s: float
    bound_by: str
    limits: Mapping[str, float]
    efficiency: float
    support: str
    predictor: str
    kernels: tuple[LaunchedKernel, ...]
    runs: SelectedKernel  # the kernel that it is taken to be
    match: EvidenceMatch = field(repr=False, compare=False)

    @property
    def evidence(self) -> dict[str, Any] | None:
        """What was measured of the kind of call that this is answered as: how many calls, in which ranges, and the
        error on those left out of every fit. None: nothing of the kind was."""
        return self.match.evidence

    @property
    def answered_as(self) -> dict[str, dict[str, str | None]]:
        """Words that nobody said, or that nobody measured: what was asked, and what was answered instead."""
        return self.match.answered_as

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON, where the kernels are called phases."""
        told = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("kernels", "runs", "match")
        }
        evidence = {"evidence": self.evidence, "answered_as": self.answered_as}
        return {**told, "runs": self.runs.to_dict(), **evidence, "phases": [asdict(kernel) for kernel in self.kernels]}


def predict(call: Kernel, target: Gpu | str, conditions: Conditions = DEFAULT) -> Prediction:
    """How long ``call`` takes on ``target``, what limits it, and how sure that is."""
    return predict_many([call], target, conditions)[0]


def predict_many(calls: Sequence[Kernel], target: Gpu | str, conditions: Conditions = DEFAULT) -> list[Prediction]:
    """Predict many calls, of any mix of ops, in order."""
    chip = gpu(target)
    conditions.check_gpu(chip)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, call in enumerate(calls):
        groups.setdefault(group_key(call), []).append(index)
    results: dict[int, Prediction] = {}
    for members in groups.values():
        batch = [calls[i] for i in members]
        for rows, found in predict_by_configuration(
            type(batch[0]), columns_of(batch), chip, conditions, conditions.rotations
        ):
            for position in np.flatnonzero(found.too_large(chip))[:1]:
                raise KernelcastError(too_large_text(batch[0].op, found.footprint_bytes[position], chip))
            for position, row in enumerate(rows):
                results[members[row]] = _one(calls[members[row]], chip, found, position)
    return [results[index] for index in range(len(calls))]


def too_large_text(op: str, footprint_bytes: float, chip: Gpu) -> str:
    return f"{op} needs {footprint_bytes / 1e9:,.1f} GB, but {chip.id} has {chip.dram_bytes / 1e9:,.1f} GB"


def group_key(call: Kernel) -> tuple[Any, ...]:
    """Calls that agree in this can be columns of one ``Calls``."""
    specs = parameters_of(type(call)).values()
    words = tuple(getattr(call, p.name) for p in specs if p.type == "choice")
    ragged = tuple(getattr(call, p.name) is not None for p in specs if p.type == "lengths")
    return (type(call), words, ragged)


def predict_calls(
    kernel: type[Kernel],
    calls: Calls,
    chip: Gpu,
    conditions: Conditions = DEFAULT,
    *,
    rotations: Rotation | None = None,
) -> Predictions:
    """Columns in, columns out. ``rotations`` may vary by call, else the conditions say it."""
    with ThreadPoolExecutor(THREADS) as pool:  # no thread starts before it has work
        return begin_calls(kernel, calls, chip, conditions, rotations or conditions.rotations, pool)()


def begin_calls(
    kernel: type[Kernel], calls: Calls, chip: Gpu, conditions: Conditions, rotations: Rotation, pool: Executor
) -> Callable[[], Predictions]:
    """Chunks of the calls go to the pool; who calls what is returned waits for all of them. A single small chunk is
    not worth a thread."""

    def run(start: int) -> Predictions:
        rows = slice(start, start + CHUNK_CALLS)
        part = calls.part(start, start + CHUNK_CALLS)
        found = list(predict_by_configuration(kernel, part, chip, conditions, rotations.part(rows)))
        if len(found) == 1:
            return replace(found[0][1], works=())
        return _join([one for _, one in found], np.argsort(np.concatenate([rows for rows, _ in found])))

    if calls.count <= SMALL_CALLS:
        return lambda: run(0)
    # NumPy lets go of the interpreter lock inside large operations
    chunks = [pool.submit(run, start) for start in range(0, calls.count, CHUNK_CALLS)]
    return lambda: _join([chunk.result() for chunk in chunks])


def predict_by_configuration(
    kernel: type[Kernel], calls: Calls, chip: Gpu, conditions: Conditions, rotations: Rotation
) -> Iterator[tuple[NDArray[np.intp], Predictions]]:
    """The calls of each kind, by number, and what is predicted of them, with the works."""
    held = [
        (np.minimum if law == kernel.not_slower_than else np.maximum, rows, other)
        for law in (kernel.not_slower_than, kernel.not_faster_than)  # the floor is kept last
        for rows, other in law(calls)
        if len(rows)
    ]
    known = [
        list(_each_configuration(kernel, other, chip, conditions, rotations.part(rows))) for _, rows, other in held
    ]
    for rows, found in _each_configuration(kernel, calls, chip, conditions, rotations):
        for (law, of, _), others in zip(held, known, strict=True):
            found = _held(found, rows, law, of, others)
        yield rows, found


def _each_configuration(
    kernel: type[Kernel], calls: Calls, chip: Gpu, conditions: Conditions, rotations: Rotation
) -> Iterator[tuple[NDArray[np.intp], Predictions]]:
    for rows, match in by_configuration(kernel, calls, chip, conditions.loaded_predictor):
        if rows is None:
            yield np.arange(calls.count), _answer(kernel, calls, chip, conditions, rotations, match)
        else:
            yield rows, _answer(kernel, calls.take(rows), chip, conditions, rotations.part(rows), match)


def _held(
    found: Predictions, rows: NDArray[np.intp], law: np.ufunc, of: NDArray[np.intp],
    others: Sequence[tuple[NDArray[np.intp], Predictions]],
) -> Predictions:  # fmt: skip
    """No faster (``law``: the maximum), or no slower (the minimum), than what was predicted of others. ``rows`` are the
    calls found, ``of`` those of the others."""
    changed = {}
    for name in ("time_s", "low_s", "high_s"):
        limit = np.full(max(rows.max(initial=-1), of.max(initial=-1)) + 1, 0.0 if law is np.maximum else np.inf)
        for members, other in others:
            limit[of[members]] = getattr(other, name)
        changed[name] = law(getattr(found, name), limit[rows])
    return replace(found, **changed).clipped(found.bound_s)


def predictor_input(
    kernel: type[Kernel],
    calls: Calls,
    chip: Gpu,
    rotations: Rotation,
    answering: Predictor,
    *,
    match: EvidenceMatch | None = None,
    without: tuple[str, ...] = (),
    keep: int = 1,
) -> PredictorInput:
    """What a predictor is asked: the calls, and what the machine finds for each of their works (``keep`` or more).

    ``match``: the kind that they are answered as; None: in the words that they have.
    """
    score, keep = answering.score(chip), max(keep, answering.keep)

    def question(said: Calls, told: str | None = None) -> PredictorInput:
        works = kernel.work(said, chip)
        ranked = tuple(
            analyse(work, chip, rotations=own, without=without, score=score, keep=keep)
            for work, own in zip(works, rotations.of_each(works), strict=True)
        )
        return PredictorInput(kernel, said, chip, ranked, match or UNMATCHED, network_dtype=told)

    if match is None:
        return question(calls)
    if match.entry is None:
        return question(kernel.with_choices(calls, match.configuration))
    words, told = {**match.configuration, **match.entry.configuration, **match.entry.network_choices}, None
    if not supports_dtype(chip, str(words["dtype"])):  # told by name alone: the GPU has no such arithmetic
        words, told = {**words, "dtype": match.configuration["dtype"]}, words["dtype"]
    heard = question(kernel.with_choices(calls, words), told)
    if all(word == "gpu" for word, _, _ in match.substituted):
        return heard
    return replace(question(kernel.with_choices(calls, match.configuration)), measured=heard)


def by_configuration(
    kernel: type[Kernel], calls: Calls, chip: Gpu, answering: Predictor
) -> list[tuple[NDArray[np.intp] | None, EvidenceMatch]]:
    """The calls of each kind, by number (None: all of them), and what they rest on."""
    found: list[tuple[NDArray[np.intp] | None, EvidenceMatch]] = []
    for rows, words in configurations_of(kernel, calls):
        matches = answering.matches(kernel, words, root_of(chip))
        if len(matches) == 1:
            found.append((rows, matches[0]))
            continue
        members = np.arange(calls.count) if rows is None else rows
        part = calls.take(members)
        which = nearest_match(matches, kernel, part)
        found += [(members[which == at], matches[at]) for at in np.unique(which)]
    return found


def _answer(
    kernel: type[Kernel], calls: Calls, chip: Gpu, conditions: Conditions, rotations: Rotation, match: EvidenceMatch
) -> Predictions:
    """Calls of one kind: the machine, then the predictor."""
    answering, origin = conditions.loaded_predictor, origin_of(chip)
    spread = answering.what_if_spread(kernel.family)
    if origin is not None and spread is not None:
        return _what_if(kernel, calls, chip, origin, conditions, rotations, match, spread)
    question = predictor_input(kernel, calls, chip, rotations, answering, match=match, without=conditions.without)
    times, best = answering.estimate(question), question.best
    return Predictions(
        **{**vars(times), "predictor": times.predictor or answering.name},
        match=np.full(calls.count, match, dtype=object),
        bound_s=question.bound_s,
        limits_s=summed([work.limits for work in best]),
        footprint_bytes=functools.reduce(np.maximum, [work.footprint_bytes for work in best]),
        launches=summed([work.launches for work in best]),
        works=tuple(best),
    )


def _what_if(
    kernel: type[Kernel], calls: Calls, chip: Gpu, origin: Gpu, conditions: Conditions, rotations: Rotation,
    match: EvidenceMatch, spread: tuple[float, float],
) -> Predictions:  # fmt: skip
    """The answer on ``origin``, times what physics says of the change: a network knows nothing of a GPU that is not.

    Both sides have the work that the kernel makes of the origin (its tiles, its splits, what it reads again because L2
    is full), so that every limit moves the way its number does: a better part is never slower, one's own value changes
    nothing, and changes compose.
    """
    before = _answer(kernel, calls, origin, conditions, rotations, match)
    works = kernel.work(kernel.with_choices(calls, match.configuration), origin)
    each = rotations.of_each(works)

    def seconds(place: Gpu) -> tuple[Array, list[Analysis]]:
        score, without = by_time(place), conditions.without
        best = [
            analyse(work, place, rotations=own, without=without, score=score)[0]
            for work, own in zip(works, each, strict=True)
        ]
        return summed(work_times(best, place)), best

    (time, _), (time_before, on_origin) = seconds(chip), seconds(origin)
    ratio = time / time_before
    best = [
        analyse(work, chip, rotations=own, without=conditions.without, candidate=first.candidate)[0]
        for work, own, first in zip(works, each, on_origin, strict=True)
    ]
    low: Number
    high: Number
    low, high = spread
    support = np.where(before.support == "seen", "near", before.support).astype(object)
    if chip.origin is None and chip.unit_of:  # no other GPU: as far off as what was measured of it moves the answer
        low = high = np.abs(np.log(ratio))
        support = before.support
    after = before.time_s * ratio
    found = Predictions(
        time_s=after,
        low_s=np.minimum(before.low_s * ratio, after * np.exp(-low)),
        high_s=np.maximum(before.high_s * ratio, after * np.exp(high)),
        ceiling_s=before.ceiling_s * ratio,
        support=support,
        match=before.match,
        predictor=before.predictor,
        bound_s=summed([work.bound for work in best]),
        limits_s=summed([work.limits for work in best]),
        footprint_bytes=before.footprint_bytes,
        launches=before.launches,
        works=tuple(best),
    )
    return found.clipped(found.bound_s)


def _join(parts: Sequence[Predictions], order: NDArray[np.intp] | None = None) -> Predictions:
    """One after another, or in the order that row numbers give."""
    names = [one.name for one in fields(Predictions) if one.name not in ("predictor", "works")]
    if len(parts) == 1 and order is None:
        return parts[0]
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names}
    if order is not None:
        columns = {name: column[..., order] for name, column in columns.items()}
    return replace(parts[0], works=(), **columns)


def _one(call: Kernel, chip: Gpu, found: Predictions, i: int) -> Prediction:
    times = ("time_s", "low_s", "high_s", "ceiling_s", "bound_s", "efficiency")
    limits = found.limits_s[:, i]
    return Prediction(
        op=call.op,
        parameters={n: getattr(call, n) for n in parameters_of(type(call)) if getattr(call, n) is not None},
        gpu=chip.label,
        **_numbers(found, i, *times),
        bound_by=PIPELINES[int(np.argmax(limits))],
        limits=_named(limits),
        support=str(found.support[i]),
        predictor=found.predictor,
        match=found.match[i],
        runs=_runs(call, chip, found.match[i]),
        kernels=tuple(_launched(work, i) for work in found.works if work.launches[i] > 0),
    )


def _runs(call: Kernel, chip: Gpu, match: EvidenceMatch) -> SelectedKernel:
    words = {"stack": call.stack, "dtype": call.dtype, **match.configuration}
    return selected_kernel(
        call.op, words, chip, getattr(call, "backend", None), match.entry.sources if match.entry else ()
    )


def _launched(work: Analysis, i: int) -> LaunchedKernel:
    return LaunchedKernel(
        tile={name: float(v[i]) for name, v in work.tile.items()},
        **_numbers(
            work, i, "tasks", "ctas_per_sm", "waves", "tail", "padding", "launches", "useful_flops", "dram_bytes"
        ),
        l2_resident=float(work.resident_share[i]),
        limits=_named(work.limits[:, i]),
        busiest_sm=_named(work.busiest_limits[:, i]),
    )


def _numbers(columns: Predictions | Analysis, i: int, *names: str) -> dict[str, float]:
    return {name: float(getattr(columns, name)[i]) for name in names}


def _named(limits: Array) -> dict[str, float]:
    """Limits by pipeline, those without demand left out."""
    return {name: float(v) for name, v in zip(PIPELINES, limits, strict=True) if v > 0}
