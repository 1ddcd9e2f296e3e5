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
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.evidence import UNMATCHED, EvidenceMatch, Rows, configurations_of, nearest_match
from kernelcast.forecast.predictor import ByTime, Estimate, Predictor, PredictorInput, work_times
from kernelcast.hardware import Gpu, origin_of, root_of
from kernelcast.hardware import gpu as gpu_of
from kernelcast.machine.analyse import PIPELINES, Analysis, analyse, summed
from kernelcast.machine.limits import Rotation
from kernelcast.ops.base import Calls, Kernel, columns_of, parameters_of
from kernelcast.ops.dtypes import supports_dtype
from kernelcast.ops.kernel_selection import SelectedKernel, selected_kernel
from kernelcast.ops.work import Array, Number
from kernelcast.results import LEVELS, NEAR, HtmlRepr

CHUNK_CALLS = 2048  # keeps the arrays of one chunk near the CPU's cache
SMALL_CALLS = 256  # are predicted at once, without a thread
THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Predictions(Estimate):
    """Columns of results, one entry a call; limits are (pipelines, calls)."""

    bound_s: Array
    limits_s: Array
    footprint_bytes: Array
    launches: Array  # kernels of a call, one after another
    match: NDArray[Any]  # the evidence of each call
    works: tuple[Analysis, ...] = ()  # the kernels that a call launches in sequence
    calls: Calls | None = None  # that the works are of, where they have the configuration that was asked for

    @property
    def bound_by(self) -> NDArray[np.intp]:
        """Index in PIPELINES of the largest limit, by call."""
        return np.argmax(self.limits_s, axis=0)

    def too_large(self, gpu: Gpu) -> NDArray[np.bool_]:
        """Calls whose operands cannot be in this GPU's memory."""
        return self.footprint_bytes > gpu.dram_bytes


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

    @classmethod
    def of(cls, work: Analysis, row: int) -> LaunchedKernel:
        names = ("tasks", "ctas_per_sm", "waves", "tail", "padding", "launches", "useful_flops", "dram_bytes")
        return cls(
            tile={name: float(values[row]) for name, values in work.tile.items()},
            **{name: float(getattr(work, name)[row]) for name in names},
            l2_resident=float(work.resident_share[row]),
            limits=_by_pipeline(work.limits[:, row]),
            busiest_sm=_by_pipeline(work.busiest_limits[:, row]),
        )


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
    match: EvidenceMatch = field(repr=False, compare=False)
    on: Gpu = field(repr=False, compare=False)
    columns: Predictions = field(repr=False, compare=False)  # that this is a row of
    row: int = field(repr=False, compare=False)

    @functools.cached_property
    def kernels(self) -> tuple[LaunchedKernel, ...]:
        return tuple(LaunchedKernel.of(work, self.row) for work in self.columns.works if work.launches[self.row] > 0)

    @functools.cached_property
    def runs(self) -> SelectedKernel:
        """The kernel that it is taken to be."""
        given, match = self.parameters, self.match
        configuration = {"stack": given.get("stack"), "dtype": given["dtype"], **match.configuration}
        sources = match.entry.sources if match.entry else ()
        return selected_kernel(self.op, configuration, self.on, given.get("backend"), sources)

    @property
    def evidence(self) -> dict[str, Any] | None:
        """What was measured of the configuration that this is answered as: how many calls, in which ranges, and the
        error on those left out of every fit. None: nothing."""
        return self.match.evidence

    @property
    def answered_as(self) -> dict[str, dict[str, str | None]]:
        """Choices that were not given, or not measured: what was asked, and what was answered instead."""
        return self.match.answered_as

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON, where the kernels are called phases."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        evidence = {"evidence": self.evidence, "answered_as": self.answered_as}
        phases = [asdict(kernel) for kernel in self.kernels]
        return {**values, "runs": self.runs.to_dict(), **evidence, "phases": phases}


def predict(call: Kernel, gpu: Gpu | str, conditions: Conditions = DEFAULT) -> Prediction:
    """How long ``call`` takes on ``gpu``, what limits it, and how sure that is."""
    return predict_many([call], gpu, conditions)[0]


def predict_many(calls: Sequence[Kernel], gpu: Gpu | str, conditions: Conditions = DEFAULT) -> list[Prediction]:
    """Predict many calls, of any mix of ops, in order."""
    on = gpu_of(gpu)
    conditions.check_gpu(on)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, call in enumerate(calls):
        if not isinstance(call, Kernel):
            raise KernelcastError(f"a kernel call is a value such as kc.Gemm(m=64, n=4096, k=4096), not {call!r:.60}")
        groups.setdefault(_group_key(call), []).append(index)
    results: dict[int, Prediction] = {}
    for members in groups.values():
        batch = [calls[index] for index in members]
        kernel, columns = type(batch[0]), columns_of(batch)
        for rows, predictions in predict_by_configuration(kernel, columns, on, conditions, conditions.rotations):
            for position in np.flatnonzero(predictions.too_large(on))[:1]:
                raise KernelcastError(too_large_text(kernel.op, predictions.footprint_bytes[position], on))
            for position, row in enumerate(rows):
                results[members[row]] = _prediction(batch[row], on, predictions, position)
    return [results[index] for index in range(len(calls))]


def too_large_text(op: str, footprint_bytes: float, gpu: Gpu) -> str:
    return f"{op} needs {footprint_bytes / 2**30:,.1f} GiB, but {gpu.id} has {gpu.dram_bytes / 2**30:,.1f} GiB"


def _group_key(call: Kernel) -> tuple[Any, ...]:
    """Calls that agree in this can be columns of one ``Calls``."""
    specs = parameters_of(type(call)).values()
    choices = tuple(getattr(call, spec.name) for spec in specs if spec.type == "choice")
    ragged = tuple(getattr(call, spec.name) is not None for spec in specs if spec.type == "lengths")
    return type(call), choices, ragged


def _prediction(call: Kernel, on: Gpu, columns: Predictions, row: int) -> Prediction:
    limits = columns.limits_s[:, row]
    names = ("time_s", "low_s", "high_s", "ceiling_s", "bound_s")
    times = {name: float(getattr(columns, name)[row]) for name in names}
    values = {name: getattr(call, name) for name in parameters_of(type(call))}
    return Prediction(
        op=call.op,
        parameters={name: value for name, value in values.items() if value is not None},
        gpu=on.label,
        **times,
        bound_by=PIPELINES[int(limits.argmax())],
        limits=_by_pipeline(limits),
        efficiency=times["bound_s"] / times["time_s"],
        support=LEVELS[columns.support[row]],
        predictor=columns.predictor,
        match=columns.match[row],
        on=on,
        columns=columns,
        row=row,
    )


def _by_pipeline(limits: Array) -> dict[str, float]:
    """Limits by pipeline, those without demand left out."""
    return {name: limit for name, limit in zip(PIPELINES, limits.tolist(), strict=True) if limit > 0}


def predict_calls(kernel: type[Kernel], calls: Calls, gpu: Gpu, conditions: Conditions = DEFAULT) -> Predictions:
    """Columns in, columns out."""
    with ThreadPoolExecutor(THREADS) as pool:  # no thread starts before it has work
        return begin_calls(kernel, calls, gpu, conditions, conditions.rotations, pool)()


def begin_calls(
    kernel: type[Kernel], calls: Calls, gpu: Gpu, conditions: Conditions, rotations: Rotation, pool: Executor
) -> Callable[[], Predictions]:
    """Chunks of the calls go to the pool; calling what is returned waits for all of them. A single small chunk is
    not worth a thread."""

    def run(start: int) -> Predictions:
        rows = slice(start, start + CHUNK_CALLS)
        chunk = calls.part(start, start + CHUNK_CALLS)
        parts = list(predict_by_configuration(kernel, chunk, gpu, conditions, rotations.part(rows)))
        if len(parts) == 1:
            return replace(parts[0][1], works=(), calls=None)
        return _join([part for _, part in parts], np.argsort(np.concatenate([rows for rows, _ in parts])))

    if calls.count <= SMALL_CALLS:
        return lambda: run(0)
    # NumPy releases the interpreter lock inside large operations
    chunks = [pool.submit(run, start) for start in range(0, calls.count, CHUNK_CALLS)]
    return lambda: _join([chunk.result() for chunk in chunks])


def _join(parts: Sequence[Predictions], order: Rows | None = None) -> Predictions:
    """One after another, or in the order that row numbers give."""
    if len(parts) == 1 and order is None:
        return parts[0]
    names = [each.name for each in fields(Predictions) if each.name not in ("predictor", "works", "calls")]
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names}
    if order is not None:
        columns = {name: column[..., order] for name, column in columns.items()}
    return replace(parts[0], works=(), calls=None, **columns)


def predict_by_configuration(
    kernel: type[Kernel], calls: Calls, gpu: Gpu, conditions: Conditions, rotations: Rotation
) -> Iterator[tuple[Rows, Predictions]]:
    """The calls of each configuration, by number, and what is predicted of them, with the works."""
    laws = [
        (np.minimum if law == kernel.not_slower_than else np.maximum, rows, other)
        for law in (kernel.not_slower_than, kernel.not_faster_than)  # the floor is kept last
        for rows, other in law(calls)
        if len(rows)
    ]
    references = [
        list(_each_configuration(kernel, other, gpu, conditions, rotations.part(rows))) for _, rows, other in laws
    ]
    for rows, predictions in _each_configuration(kernel, calls, gpu, conditions, rotations):
        for (law, of, _), reference in zip(laws, references, strict=True):
            predictions = _limited(predictions, rows, law, of, reference)
        yield rows, predictions


def _each_configuration(
    kernel: type[Kernel], calls: Calls, gpu: Gpu, conditions: Conditions, rotations: Rotation
) -> Iterator[tuple[Rows, Predictions]]:
    for rows, match in by_configuration(kernel, calls, gpu, conditions.loaded_predictor):
        if rows is None:
            yield np.arange(calls.count), _predicted(kernel, calls, gpu, conditions, rotations, match)
        else:
            yield rows, _predicted(kernel, calls.take(rows), gpu, conditions, rotations.part(rows), match)


def _limited(
    predictions: Predictions, rows: Rows, law: np.ufunc, of: Rows, reference: Sequence[tuple[Rows, Predictions]]
) -> Predictions:
    """No faster (``law``: the maximum), or no slower (the minimum), than other calls. ``rows`` are the calls found,
    ``of`` those that the reference is of."""
    changed = {}
    for name in ("time_s", "low_s", "high_s"):
        limit = np.full(max(rows.max(initial=-1), of.max(initial=-1)) + 1, 0.0 if law is np.maximum else np.inf)
        for members, other in reference:
            limit[of[members]] = getattr(other, name)
        changed[name] = law(getattr(predictions, name), limit[rows])
    return replace(predictions, **changed).clipped(predictions.bound_s)


def by_configuration(
    kernel: type[Kernel], calls: Calls, gpu: Gpu, predictor: Predictor
) -> list[tuple[Rows | None, EvidenceMatch]]:
    """The calls of each configuration, by number (None: all of them), and their evidence."""
    groups: list[tuple[Rows | None, EvidenceMatch]] = []
    for rows, configuration in configurations_of(kernel, calls):
        matches = predictor.matches(kernel, configuration, root_of(gpu))
        if len(matches) == 1:
            groups.append((rows, matches[0]))
            continue
        members = np.arange(calls.count) if rows is None else rows
        which = nearest_match(matches, kernel, calls.take(members))
        groups += [(members[which == index], matches[index]) for index in np.unique(which)]
    return groups


def predictor_input(
    kernel: type[Kernel],
    calls: Calls,
    gpu: Gpu,
    rotations: Rotation,
    predictor: Predictor,
    *,
    match: EvidenceMatch | None = None,
    without: tuple[str, ...] = (),
    keep: int = 1,
) -> PredictorInput:
    """The calls, and what the machine finds for each of their works (``keep`` candidates or more).

    ``match``: the configuration that they are answered as; None: that which they have.
    """
    score, keep = predictor.score(gpu), max(keep, predictor.keep)

    def analysed(chosen: Calls, network_dtype: str | None = None) -> PredictorInput:
        works = kernel.work(chosen, gpu)
        ranked = tuple(
            analyse(work, gpu, rotations=each, without=without, score=score, keep=keep)
            for work, each in zip(works, rotations.of_each(works), strict=True)
        )
        return PredictorInput(kernel, chosen, gpu, ranked, match or UNMATCHED, network_dtype=network_dtype)

    if match is None:
        return analysed(calls)
    if match.entry is None:
        return analysed(kernel.with_choices(calls, match.configuration))
    choices, dtype = {**match.configuration, **match.entry.configuration, **match.entry.network_choices}, None
    if not supports_dtype(gpu, str(choices["dtype"])):  # the networks know the format, the GPU has no such arithmetic
        choices, dtype = {**choices, "dtype": match.configuration["dtype"]}, choices["dtype"]
    measured = analysed(kernel.with_choices(calls, choices), dtype)
    asked = kernel.with_choices(calls, match.configuration)
    other_link = asked.choice("fabric") != measured.calls.choice("fabric")  # of the measured type, with its own rate
    if all(name == "gpu" for name, _, _ in match.substituted) and not other_link:
        return measured
    return replace(analysed(asked), measured=measured)


def _predicted(
    kernel: type[Kernel], calls: Calls, gpu: Gpu, conditions: Conditions, rotations: Rotation, match: EvidenceMatch
) -> Predictions:
    """Calls of one configuration: the machine, then the predictor."""
    predictor, origin = conditions.loaded_predictor, origin_of(gpu)
    if origin is not None and supports_dtype(gpu, calls.dtype.name) > supports_dtype(origin, calls.dtype.name):
        origin = None  # the format is new, so that there is no time which a ratio could scale
    if origin is not None and (spread := predictor.what_if_spread(kernel.family)) is not None:
        return _what_if(kernel, calls, gpu, origin, conditions, rotations, match, spread)
    given = predictor_input(kernel, calls, gpu, rotations, predictor, match=match, without=conditions.without)
    times, best = predictor.estimate(given), given.best
    return Predictions(
        **{**vars(times), "predictor": times.predictor or predictor.name},
        match=np.full(calls.count, match, dtype=object),
        bound_s=given.bound_s,
        limits_s=summed([work.limits for work in best]),
        footprint_bytes=functools.reduce(np.maximum, [work.footprint_bytes for work in best]),
        launches=summed([work.launches for work in best]),
        works=tuple(best),
        calls=given.calls,
    )


def _what_if(
    kernel: type[Kernel], calls: Calls, gpu: Gpu, origin: Gpu, conditions: Conditions, rotations: Rotation,
    match: EvidenceMatch, spread: tuple[float, float],
) -> Predictions:  # fmt: skip
    """The prediction on ``origin``, times what physics says of the change: networks know nothing of a GPU that does
    not exist.

    Both sides have the work that the kernel makes of the origin (its tiles, its splits, what it reads again because L2
    is full), so that every limit moves the way its number does: a better part is never slower, one's own value changes
    nothing, and changes compose.
    """
    before = _predicted(kernel, calls, origin, conditions, rotations, match)
    works = kernel.work(kernel.with_choices(calls, match.configuration), origin)
    each = rotations.of_each(works)

    def seconds(on: Gpu) -> tuple[Array, list[Analysis]]:
        best = [
            analyse(work, on, rotations=rotation, without=conditions.without, score=ByTime(on))[0]
            for work, rotation in zip(works, each, strict=True)
        ]
        return summed(work_times(best, on)), best

    (time, _), (time_before, on_origin) = seconds(gpu), seconds(origin)
    ratio = time / time_before
    best = [
        analyse(work, gpu, rotations=rotation, without=conditions.without, candidate=first.candidate)[0]
        for work, rotation, first in zip(works, each, on_origin, strict=True)
    ]
    low: Number
    high: Number
    low, high = spread
    support = np.maximum(before.support, NEAR)
    if gpu.origin is None and gpu.unit_of:  # no other GPU: as far off as what was measured of it moves the time
        low = high = np.abs(np.log(ratio))
        support = before.support
    after = before.time_s * ratio
    predictions = replace(
        before,
        time_s=after,
        low_s=np.minimum(before.low_s * ratio, after * np.exp(-low)),
        high_s=np.maximum(before.high_s * ratio, after * np.exp(high)),
        ceiling_s=before.ceiling_s * ratio,
        support=support,
        bound_s=summed([work.bound for work in best]),
        limits_s=summed([work.limits for work in best]),
        works=tuple(best),
        calls=None,
    )
    return predictions.clipped(predictions.bound_s)
