"""Evidence by configuration: what was measured, its held-out error, and what it costs to substitute another one.

Configurations are counted over all rows that a fit may see. Interval widths are calibrated on the fold that a main
network did not see, errors are on the test fold that none saw. Substitutions are learned by forecasting each
configuration as if only its neighbour, which differs in a single choice, had been measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.evidence import (
    FIXED,
    Evidence,
    EvidenceMatch,
    MeasuredConfiguration,
    Substitution,
    configurations_of,
)
from kernelcast.forecast.learned import FamilyWeights, Learned
from kernelcast.forecast.network import Layers
from kernelcast.forecast.predict import predictor_input
from kernelcast.forecast.predict_table import rotations_of
from kernelcast.forecast.table import BadRows, grouped
from kernelcast.hardware import Gpu
from kernelcast.machine.limits import Rotation
from kernelcast.ops import REGISTRY
from kernelcast.ops.base import Calls, Configuration, Kernel, Ragged
from kernelcast_lab.data.folds import AT_LEAST, TEST_FOLD, shape_fold
from kernelcast_lab.data.measurements import AGAIN, merged
from kernelcast_lab.data.shared import read, tables
from kernelcast_lab.fit.families import EAGER, Roots, folders_of

Columns = Mapping[str, NDArray[Any]]
Rows = NDArray[np.intp]
Report = Callable[[int, int, str], None]
INSIDE = 0.8  # coverage of the intervals
_MOST_ROWS = 300  # of a configuration and fold, that are scored
_STEP_ROWS = 40  # of a configuration, that are forecast as each neighbour
_LEAST_ROWS = 25  # of a configuration, for a width of its own
_PRIOR_ROWS = 25  # weight of the op's width in that of a configuration, in rows
_LEAST_WIDTH = 0.5
_MOST_MODELS = 400
_POOLED = 0.08  # in each tail of substitutions of choices of which no pair was measured: those vary more
_FASTER, _LEAST_PAIRS = 0.98, 8


@dataclass
class _Measured:
    """The measured rows of one configuration."""

    kernel: type[Kernel]
    gpu: Gpu
    choices: dict[str, str | None]
    network_choices: dict[str, str | None]
    rows: list[Rows] = field(default_factory=list)
    most: int = 0  # rows of the largest group, whose choices the networks get


def repeated_columns(roots: Roots, family: str) -> Columns | None:
    """Calls of a family that were measured again, on another day or another machine; None where none were."""
    ops = sorted(op for op, cls in REGISTRY.items() if cls.family == family)
    names = [(folder, name) for folder in folders_of(roots) for name in tables(folder) if name.endswith(AGAIN)]
    repeated = merged([read(folder, name, ops=ops) for folder, name in names]).columns if names else {}
    return repeated if repeated and len(repeated["op"]) else None


def evidence_of(
    columns: Columns,
    family: str,
    weights: FamilyWeights,
    folds: Sequence[int],
    report: Report | None = None,
    again: Columns | None = None,
) -> Evidence:
    """Configurations, scores, widths and substitutions of a family. ``folds``: the fold held out of each main network;
    ``again``: calls measured a second time, elsewhere, which intervals should hold too."""
    configurations = _configurations(columns, family)
    bare = Evidence(tuple(_with_models(columns, configurations)))
    evaluator = _Evaluator(columns, replace(weights, evidence=bare))
    fold, measured = shape_fold(columns), _measured(columns)
    pairs = list(zip(configurations, bare.entries, strict=True))
    left = [_left_out(evaluator, configuration, entry, fold, measured, folds) for configuration, entry in pairs]
    widths = _widths(bare.entries, left)
    if again is not None:
        widths = _wide_elsewhere(again, family, evaluator.weights, configurations, bare.entries, folds, widths)
    entries = tuple(replace(entry, width=width) for entry, width in zip(bare.entries, widths, strict=True))
    tried = [rows[np.isin(fold[rows], folds or (1, 2)) & measured[rows]] for rows in map(_all, configurations)]
    steps = _steps(evaluator, configurations, entries, [_some(rows, _STEP_ROWS) for rows in tried], report)
    scored = tuple(
        _scored(evaluator, configuration, entry, fold, measured)
        for configuration, entry in zip(configurations, entries, strict=True)
    )
    return Evidence(scored, steps)


def _all(configuration: _Measured) -> Rows:
    return np.concatenate(configuration.rows)


def _measured(columns: Columns) -> NDArray[np.bool_]:
    """Rows whose time is known, not only that it is longer."""
    return np.asarray(columns[AT_LEAST] == 0) if AT_LEAST in columns else np.ones(len(columns["op"]), dtype=bool)


def _configurations(columns: Columns, family: str) -> list[_Measured]:
    result: dict[tuple[Any, ...], _Measured] = {}
    bad = BadRows()
    for kernel, target, rows, calls in grouped(columns, None, bad):
        if kernel.family != family:
            continue
        for members, choices in configurations_of(kernel, calls):
            usual = kernel.with_defaults(choices, target)
            at = rows if members is None else rows[members]
            key = (kernel.op, target.id, *sorted((n, str(w)) for n, w in usual.items()))
            configuration = result.setdefault(key, _Measured(kernel, target, usual, dict(calls.choices)))
            if len(at) > configuration.most:
                configuration.network_choices, configuration.most = dict(calls.choices), len(at)
            configuration.rows.append(at)
    if bad.messages:
        raise KernelcastError(bad.text())
    return [result[key] for key in sorted(result)]


def _entry(columns: Columns, configuration: _Measured) -> MeasuredConfiguration:
    rows = _all(configuration)
    calls = _calls(columns, configuration, rows)
    sizes = {name: column[~np.isnan(column)] for name, column in configuration.kernel.sizes(calls).items()}
    ranges = {name: (float(column.min()), float(column.max())) for name, column in sizes.items() if len(column)}
    sources = tuple(sorted({str(name) for name in columns["source"][rows]}))
    faster = _faster_doubled(configuration.kernel, calls, np.asarray(columns["latency_us"][rows], dtype=np.float64))
    return MeasuredConfiguration(
        configuration.kernel.op,
        configuration.gpu.id,
        configuration.choices,
        configuration.network_choices,
        len(rows),
        ranges,
        (),
        sources,
        faster_doubled=faster,
    )


def _faster_doubled(kernel: type[Kernel], calls: Calls, latency: NDArray[np.float64]) -> dict[str, float]:
    """Where the tables themselves break the law that twice the work takes no less."""
    if not kernel.batch_parameter:
        return {}
    sizes = {name: np.nan_to_num(column) for name, column in kernel.sizes(calls).items()}
    grows = sizes.pop(kernel.batch_parameter)
    rest = np.unique(np.stack(list(sizes.values()), axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    position = {key: at for at, key in enumerate(zip(rest.tolist(), grows.tolist(), strict=True))}
    pairs = [(at, position[group, 2 * size]) for (group, size), at in position.items() if (group, 2 * size) in position]
    if not pairs:
        return {}
    first, second = np.array(pairs).T
    octave, faster = np.floor(np.log2(grows[first])), latency[second] < _FASTER * latency[first]
    result = {}
    for power in np.unique(octave):
        members = faster[octave == power]
        if len(members) >= _LEAST_PAIRS:
            result[str(int(2**power))] = round(float(members.mean()), 4)
    return result


def _with_models(columns: Columns, configurations: Sequence[_Measured]) -> Iterator[MeasuredConfiguration]:
    """Entries; where several backends were measured, with the sizes of models by which an engine chose."""
    alike: dict[tuple[Any, ...], int] = {}
    keys = []
    for configuration in configurations:
        rest = {name: choice for name, choice in configuration.choices.items() if name not in ("backend", "paged")}
        keys.append((configuration.kernel.op, configuration.gpu.id, *sorted((n, str(w)) for n, w in rest.items())))
        alike[keys[-1]] = alike.get(keys[-1], 0) + 1
    for configuration, key in zip(configurations, keys, strict=True):
        entry, names = _entry(columns, configuration), configuration.kernel.model_sizes
        if alike[key] > 1 and names:
            sizes = configuration.kernel.sizes(_calls(columns, configuration, _all(configuration)))
            result = np.unique(np.nan_to_num(np.stack([sizes[name] for name in names], axis=1)), axis=0)
            if len(result) <= _MOST_MODELS:
                entry = replace(entry, models=tuple(tuple(map(float, each)) for each in result))
        yield entry


def _calls(columns: Columns, configuration: _Measured, rows: Rows) -> Calls:
    """Those rows as calls of one configuration, with the choices that the networks get."""
    part = {name: column[rows] for name, column in columns.items()}
    groups = list(grouped(part, None, BadRows()))
    order = np.argsort(np.concatenate([at for _, _, at, _ in groups]))
    numbers = {name: np.concatenate([calls[name] for _, _, _, calls in groups])[order] for name in groups[0][3].numbers}
    lists = {name: Ragged.joined([g[3].lists[name] for g in groups]).take(order) for name in groups[0][3].lists}
    return configuration.kernel.with_choices(
        Calls(len(rows), numbers, groups[0][3].choices, lists),
        {**configuration.choices, **configuration.network_choices},
    )


def _some(rows: Rows, count: int) -> Rows:
    return np.sort(np.random.default_rng(0).permutation(rows)[:count])


@dataclass(frozen=True)
class _Evaluator:
    """Estimates of measured rows by the networks."""

    columns: Columns
    weights: FamilyWeights

    @functools.cached_property
    def rotations(self) -> Rotation:
        return rotations_of(self.columns)

    def estimated(
        self, configuration: _Measured, rows: Rows, match: EvidenceMatch, nets: tuple[Layers, ...] | None = None
    ) -> Any:
        """(estimate, measured seconds) of these rows."""
        weights = replace(self.weights, main=nets) if nets else self.weights
        rotations = self.rotations.part(rows)
        calls = _calls(self.columns, configuration, rows)
        question = predictor_input(configuration.kernel, calls, configuration.gpu, rotations, Learned(), match=match)
        truth = np.maximum(np.asarray(self.columns["latency_us"][rows], dtype=np.float64) * 1e-6, question.bound_s)
        return weights.estimate(question), truth


def _left_out(
    evaluator: _Evaluator,
    configuration: _Measured,
    entry: MeasuredConfiguration,
    fold: NDArray[Any],
    measured: NDArray[Any],
    folds: Sequence[int],
) -> NDArray[np.float64]:
    """How many times the learned interval each held-out row needs."""
    rows, ratios = _all(configuration), [np.zeros(0)]
    for number, members in enumerate(folds):
        at = _some(rows[(fold[rows] == members) & measured[rows]], _MOST_ROWS)
        if len(at):
            predicted, truth = evaluator.estimated(
                configuration, at, EvidenceMatch(configuration.choices, entry=entry), (evaluator.weights.main[number],)
            )
            over, under = np.log(truth / predicted.time_s), np.log(predicted.time_s / truth)
            tight = np.log(predicted.high_s / predicted.time_s), np.log(predicted.time_s / predicted.low_s)
            ratios.append(np.maximum(over / np.maximum(tight[0], 1e-4), under / np.maximum(tight[1], 1e-4)))
    return np.concatenate(ratios)


def _widths(entries: Sequence[MeasuredConfiguration], ratios: Sequence[NDArray[np.float64]]) -> list[float]:
    """The ratio that four in five stay below, shrunk to that of the op where a configuration has few rows."""
    by_op: dict[str, list[NDArray[np.float64]]] = {}
    for entry, members in zip(entries, ratios, strict=True):
        by_op.setdefault(entry.op, []).append(members)
    whole = np.concatenate(list(ratios))
    widths = []
    for entry, members in zip(entries, ratios, strict=True):
        alike = np.concatenate(by_op[entry.op])
        alike = alike if len(alike) >= _LEAST_ROWS else whole
        usual = float(np.quantile(alike, INSIDE)) if len(alike) else 1.0
        weight = len(members) / (len(members) + _PRIOR_ROWS)
        result = weight * float(np.quantile(members, INSIDE)) + (1 - weight) * usual if len(members) else usual
        widths.append(round(max(result, _LEAST_WIDTH), 3))
    return widths


def _wide_elsewhere(
    again: Columns, family: str, weights: FamilyWeights, configurations: Sequence[_Measured],
    entries: Sequence[MeasuredConfiguration], folds: Sequence[int], widths: Sequence[float],
) -> list[float]:  # fmt: skip
    """Widths that hold on a second machine too, where it repeated enough calls that a network had not seen."""
    evaluator, fold = _Evaluator(again, weights), shape_fold(again)
    elsewhere = {
        (configuration.kernel.op, configuration.gpu.id, str(configuration.choices)): configuration
        for configuration in _configurations(again, family)
    }
    ratios: dict[int, NDArray[np.float64]] = {}
    for at, (configuration, entry) in enumerate(zip(configurations, entries, strict=True)):
        second = elsewhere.get((configuration.kernel.op, configuration.gpu.id, str(configuration.choices)))
        if second is not None:
            ratios[at] = _left_out(evaluator, second, entry, fold, np.ones(len(fold), dtype=bool), folds)
    result = list(widths)
    for at, members in ratios.items():
        alike = [other for number, other in ratios.items() if entries[number].op == entries[at].op]
        enough = members if len(members) >= _LEAST_ROWS else np.concatenate(alike)
        if len(enough) >= _LEAST_ROWS:
            result[at] = max(result[at], round(float(np.quantile(enough, INSIDE)), 3))
    return result


def _scored(
    evaluator: _Evaluator,
    configuration: _Measured,
    entry: MeasuredConfiguration,
    fold: NDArray[Any],
    measured: NDArray[Any],
) -> MeasuredConfiguration:
    """The error on shapes that no network saw."""
    rows = _all(configuration)
    rows = _some(rows[(fold[rows] == TEST_FOLD) & measured[rows]], _MOST_ROWS)
    if not len(rows):
        return entry
    predicted, truth = evaluator.estimated(configuration, rows, EvidenceMatch(configuration.choices, entry=entry))
    off = predicted.time_s / truth - 1
    inside = (predicted.low_s <= truth) & (truth <= predicted.high_s)
    error, bias, inside = (round(float(np.mean(x)), 4) for x in (np.abs(off), off, inside))
    return replace(entry, tested=len(rows), error=error, bias=bias, inside=inside)


def _steps(
    evaluator: _Evaluator,
    configurations: Sequence[_Measured],
    entries: Sequence[MeasuredConfiguration],
    rows: Sequence[Rows],
    report: Report | None,
) -> dict[str, Substitution]:
    """What it costs to substitute a choice: each configuration is forecast as each that differs in a single choice."""
    residuals: dict[str, list[NDArray[np.float64]]] = {}
    for number, (configuration, members) in enumerate(zip(configurations, rows, strict=True)):
        if report:
            report(number + 1, len(configurations), "steps")
        if len(members) < 5:
            continue
        for entry in entries:
            change = _single_change(configuration, entry)
            if change is None:
                continue
            predicted, truth = evaluator.estimated(
                configuration, members, EvidenceMatch(configuration.choices, entry=entry, substituted=(change,))
            )
            choice, tested, other = change
            left = np.log(truth / predicted.time_s)
            pooled = [choice, f"{choice}, {configuration.choices['dtype']}"] if EAGER not in (tested, other) else []
            for name in (f"{choice} {tested} {other}", *pooled):
                residuals.setdefault(name, []).append(left)
    return {name: _step(result, shifted=name.count(" ") == 2) for name, result in sorted(residuals.items())}


def _single_change(configuration: _Measured, entry: MeasuredConfiguration) -> tuple[str, str | None, str | None] | None:
    """The choice that alone differs between the two, and its two values; None where none or more do."""
    if configuration.kernel.op != entry.op:
        return None
    members: Configuration = {**configuration.choices, "gpu": configuration.gpu.id}
    other: Configuration = {**entry.configuration, "gpu": entry.gpu}
    apart = [name for name in members if members[name] != other.get(name)]
    if len(apart) != 1 or apart[0] in FIXED:
        return None
    return apart[0], members[apart[0]], other[apart[0]]


def _step(result: Sequence[NDArray[np.float64]], *, shifted: bool) -> Substitution:
    """From residuals by configuration. The median of the others corrects a forecast where there are two or more."""
    medians = np.array([np.median(each) for each in result])
    shift = float(np.median(medians)) if shifted and len(result) > 1 else 0.0
    others = [float(np.median(np.delete(medians, at))) if shift else 0.0 for at in range(len(result))]
    left = np.concatenate([each - other for each, other in zip(result, others, strict=True)])
    low, high = np.quantile(left, [0.1, 0.9] if shifted else [_POOLED, 1 - _POOLED])
    return Substitution(
        shift=round(shift, 4),
        low=round(max(0.0, -float(low)), 4),
        high=round(max(0.0, float(high)), 4),
        error=round(float(np.mean(np.abs(np.expm1(-left)))), 4),
        configurations=len(result),
    )
