"""How fast a calibration learns a GPU: error against calls measured, beside a fit that saw the GPU.

The weights are fitted without the GPU (and its twin). Calibration calls are drawn from its measured calls, the test
calls from other shapes of it, so that no shape is in both. The last point of a curve is a fit on the same
rows and up to ``Settings``' number of calls of this GPU: what calibrating can hope for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.calibrate import calibrate
from kernelcast.collect.schema import columns_of
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import gpu as find_gpu
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.evaluate.report import markdown, saved_plot
from kernelcast_lab.evaluate.run import Fitted
from kernelcast_lab.evaluate.scores import Columns, ErrorSummary
from kernelcast_lab.fit.fit import TWINS, fit_rows, sampled
from kernelcast_lab.fit.recipes import Settings, changed, recipe

COUNTS = (0, 10, 30, 100, 300, 1000)
SEEN = "fit that saw it"
_LEAST_DRAWS = 300  # calls that a group needs for a curve of its own


@dataclass(frozen=True, kw_only=True)
class CurvePoint(ErrorSummary):
    """Errors on calls of other shapes than those measured."""

    family: str
    gpu: str
    calls: int  # that calibrated, or that the fit saw
    predictor: str  # calibrated, or a fit that saw the GPU
    seed: int  # which calls were drawn


@dataclass(frozen=True)
class CurveSettings:
    """Small fits, so that two cores can run it; ``repeats`` draws of the calls where they are few."""

    counts: tuple[int, ...] = COUNTS
    repeats: int = 5
    test_rows: int = 1000
    seen_rows: int = 20_000
    rows: int = 60_000
    epochs: int = 15
    fit: Settings | None = None  # None: those of the family's recipe, in small

    def fit_of(self, family: str) -> Settings:
        small = {"rows": self.rows, "networks": 1, "transfer_networks": 1, "rows_left_out": 4000}
        return self.fit or changed(recipe(family).settings, epochs=self.epochs, batch=2048, **small)


def learning_curve(
    columns: Columns,
    family: str,
    gpu: str,
    settings: CurveSettings | None = None,
    *,
    source: str | None = None,
    by: Sequence[str] = (),
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[CurvePoint]:
    """Fit without ``gpu``, calibrate with more and more of its calls, score each; then a fit that saw it.

    ``by``: a curve for each combination of these columns (op, dtype, …) that has calls enough, instead of one for all.
    """
    settings = settings or CurveSettings()
    gpu_id = find_gpu(gpu).id
    others, pool, test = _rows(columns, gpu_id, source, seed, settings)
    groups = _groups(columns, family, by, pool, test)
    if not groups:
        raise KernelcastError(f"no {' and '.join(by)} of {family} has {_LEAST_DRAWS} calls of {gpu_id} to draw from")
    say(f"{family}: {len(others):,} rows of other GPUs; {gpu_id}: {len(pool):,} to draw from, {len(test):,} to test")
    fit = settings.fit_of(family)
    unseen = Fitted(fit_rows(columns, family, others, fit))
    seen = sampled(pool, settings.seen_rows, seed)
    both = np.sort(np.concatenate([sampled(others, fit.rows, fit.seed), seen]))
    whole = Conditions(predictor=Fitted(fit_rows(columns, family, both, replace(fit, rows=0))))
    points: list[CurvePoint] = []
    for name, draws, tests in groups:
        held = {label: column[tests] for label, column in columns.items()}
        for count in settings.counts:
            if count > len(draws):
                say(f"{name}: only {len(draws):,} calls of {gpu_id} to draw {count:,} from")
                continue
            for draw in range(settings.repeats if 0 < count < 1000 else 1):
                drawn = np.sort(np.random.default_rng([seed, count, draw]).choice(draws, count, replace=False))
                conditions = _calibrated(unseen, columns, drawn, gpu_id)
                labels = {"family": name, "gpu": gpu_id, "calls": count, "predictor": "calibrated", "seed": draw}
                points.append(_point(held, conditions, labels))
            say(f"{name}: {count:,} calls: {_mean([p for p in points if p.family == name], count):.2f}%")
        saw = len(np.intersect1d(draws, seen))
        labels = {"family": name, "gpu": gpu_id, "calls": saw, "predictor": SEEN, "seed": seed}
        points.append(_point(held, whole, labels))
        say(f"{name}: a fit that saw {saw:,} calls: {points[-1].mean:.2f}%")
    return points


def _groups(
    columns: Columns, family: str, by: Sequence[str], pool: NDArray[np.intp], test: NDArray[np.intp]
) -> list[tuple[str, NDArray[np.intp], NDArray[np.intp]]]:
    """Name, rows to draw from and rows to test on, of each combination with enough of both."""
    if not by:
        return [(family, pool, test)]
    refuse_unknown("column", by, columns_of())
    cells_by_column = [columns[name] if name in columns else np.full(len(columns["op"]), None) for name in by]
    label = np.array(
        [" ".join(str(cell) for cell in cells if cell is not None) for cells in zip(*cells_by_column, strict=True)]
    )
    result = [(str(name), pool[label[pool] == name], test[label[test] == name]) for name in np.unique(label[pool])]
    return [(name, draws, tests) for name, draws, tests in result if len(draws) >= _LEAST_DRAWS and len(tests)]


def _rows(
    columns: Columns, gpu: str, source: str | None, seed: int, settings: CurveSettings
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Rows of other GPUs, rows to calibrate with, rows to test on."""
    gpu_id = columns["gpu"].astype(str)
    twins = next((pair for pair in TWINS if gpu in pair), (gpu,))
    here = gpu_id == gpu
    if source is not None:
        refuse_unknown("source", [source], set(columns["source"]))
        here &= columns["source"] == source
    test = shape_fold(columns) == TEST_FOLD
    others, pool = np.flatnonzero(~np.isin(gpu_id, twins)), np.flatnonzero(here & ~test)
    held = sampled(np.flatnonzero(here & test), settings.test_rows, seed)
    if not (len(others) and len(pool) and len(held)):
        raise KernelcastError(
            f"too few measured calls: {len(pool)} of {gpu}, {len(held)} to test, {len(others)} others"
        )
    return others, pool, held


def _calibrated(base: Fitted, columns: Columns, drawn: NDArray[np.intp], gpu: str) -> Conditions:
    if not len(drawn):
        return Conditions(predictor=base)
    calibration, _ = calibrate({n: c[drawn] for n, c in columns.items()}, gpu, Conditions(predictor=base))
    return Conditions(predictor=base, calibration=calibration)


def _point(held: Columns, conditions: Conditions, labels: Mapping[str, Any]) -> CurvePoint:
    results, bad = predict_columns(held, labels["gpu"], conditions)
    if bad.messages:
        raise KernelcastError(bad.text())
    return CurvePoint.of(
        held["latency_us"], *(results[name] for name in ("predicted_us", "low_us", "high_us")), **labels
    )


def _mean(points: Sequence[CurvePoint], calls: int) -> float:
    return float(np.mean([p.mean for p in points if p.calls == calls and p.predictor == "calibrated"]))


def curve_lines(points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    """A line a GPU and family: the mean error by number of calls, and that of the fit that saw the GPU."""
    counts = sorted({p.calls for p in points if p.predictor == "calibrated"})
    results = []
    for gpu_id, family in dict.fromkeys((p.gpu, p.family) for p in points):
        members = [p for p in points if (p.gpu, p.family) == (gpu_id, family)]
        known = {p.calls for p in members if p.predictor == "calibrated"}
        seen = next((p for p in members if p.predictor == SEEN), None)
        line: dict[str, Any] = {"GPU left out": gpu_id, "family": family}
        line |= {f"{count:,}": _mean(members, count) if count in known else None for count in counts}
        results.append(line | {SEEN: seen and seen.mean, "calls it saw": seen and seen.calls})
    return results


def write_curves(points: Sequence[CurvePoint], out: Path) -> Path:
    """learning_curve.json, learning_curve.md and, where Matplotlib is, a plot."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "learning_curve.json").write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    lines = curve_lines(points)
    rows = []
    for line in lines:
        *cells, seen, calls = line.values()
        numbers = [f"{cell:.1f}" if isinstance(cell, float) else cell or "–" for cell in cells]
        rows.append([*numbers, "–" if seen is None else f"{seen:.1f} ({calls:,} calls)"])
    path = out / "learning_curve.md"
    path.write_text(markdown(list(lines[0])[:-1], rows) + "\n")
    gpu_ids = list(dict.fromkeys(p.gpu for p in points))

    def draw(axes: Any) -> None:
        for axis, gpu_id in zip(axes[0], gpu_ids, strict=True):
            _draw(axis, gpu_id, [p for p in points if p.gpu == gpu_id])

    saved_plot(out / "learning_curve.png", 1, len(gpu_ids), (5.0 * len(gpu_ids), 3.8), draw)
    return path


def _draw(axis: Any, gpu_id: str, points: Sequence[CurvePoint]) -> None:
    for family in dict.fromkeys(p.family for p in points):
        members = [p for p in points if p.family == family]
        counts = sorted({p.calls for p in members if p.predictor == "calibrated"})
        (line,) = axis.plot([max(c, 3) for c in counts], [_mean(members, c) for c in counts], "o-", label=family)
        for point in members:
            if point.predictor == SEEN:
                axis.axhline(point.mean, color=line.get_color(), linestyle=":", linewidth=1)
    axis.set(xscale="log", title=f"{gpu_id} left out of the fit", xlabel="calls measured (leftmost: none)")
    axis.set(ylabel="mean error on other shapes, %", ylim=(0, None))
    axis.legend(fontsize=8, title=f"dotted: {SEEN}", title_fontsize=7)
