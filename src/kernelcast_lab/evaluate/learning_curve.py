"""How fast a calibration learns a GPU: error against calls measured, beside a fit that saw the GPU.

The weights are fitted without the GPU (and its twin). Calibration calls are drawn from its measured calls, the test
calls from other shapes of it, so that no shape is in both. The last point of a curve is a fit on the same
rows and up to ``Settings``' number of calls of this GPU: what calibrating can hope for.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.calibrate import calibrate
from kernelcast.efficiency.learned import FamilyWeights
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu as find_gpu
from kernelcast.measured.folds import TEST_FOLD, shape_fold
from kernelcast.predict import Conditions
from kernelcast.tables import predict_columns
from kernelcast_lab.evaluate.run import Fitted
from kernelcast_lab.fit.fit import TWINS, Settings, fit_rows, sampled
from kernelcast_lab.fit.train import Recipe

Columns = Mapping[str, NDArray[Any]]
COUNTS = (0, 10, 30, 100, 300, 1000)
SEEN = "fit that saw it"
_LEAST_DRAWS = 300  # calls that a group needs for a curve of its own


@dataclass(frozen=True)
class CurvePoint:
    """Errors, in percent of the measured time, on calls of other shapes than those measured."""

    family: str
    gpu: str
    calls: int  # that calibrated, or that the fit saw
    predictor: str  # calibrated, or a fit that saw the GPU
    seed: int  # which calls were drawn
    rows: int
    mean: float
    median: float
    coverage: float


@dataclass(frozen=True)
class CurvePlan:
    """Small fits, so that two cores can run it; ``repeats`` draws of the calls where they are few."""

    counts: tuple[int, ...] = COUNTS
    repeats: int = 5
    test_rows: int = 1000
    seen_rows: int = 20_000
    settings: Settings = field(
        default_factory=lambda: Settings(
            rows=60_000, networks=1, transfer_networks=1, rows_left_out=4000, main=Recipe(epochs=15, batch=2048)
        )
    )


def learning_curve(
    columns: Columns,
    family: str,
    gpu: str,
    plan: CurvePlan | None = None,
    *,
    source: str | None = None,
    by: Sequence[str] = (),
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[CurvePoint]:
    """Fit without ``gpu``, calibrate with more and more of its calls, score each; then a fit that saw it.

    ``by``: a curve for each combination of these words (op, dtype, …) that has calls enough, instead of one for all.
    """
    plan = plan or CurvePlan()
    place = find_gpu(gpu).id
    others, pool, test = _rows(columns, place, source, seed, plan)
    say(f"{family}: {len(others):,} rows of other GPUs; {place}: {len(pool):,} to draw from, {len(test):,} to test")
    weights = fit_rows(columns, family, others, plan.settings)
    seen = sampled(pool, plan.seen_rows, seed)
    both = np.sort(np.concatenate([sampled(others, plan.settings.rows, plan.settings.seed), seen]))
    whole = Conditions(predictor=Fitted(fit_rows(columns, family, both, _all_rows(plan.settings))))
    points = []
    for name, draws, tests in _groups(columns, family, by, pool, test):
        held = {label: column[tests] for label, column in columns.items()}
        for count in plan.counts:
            if count > len(draws):
                say(f"{name}: only {len(draws):,} calls of {place} to draw {count:,} from")
                continue
            for draw in range(plan.repeats if 0 < count < 1000 else 1):
                drawn = np.sort(np.random.default_rng([seed, count, draw]).choice(draws, count, replace=False))
                conditions = _conditions(weights, columns, drawn, place)
                points.append(_scored(held, conditions, name, place, count, "calibrated", draw))
            say(f"{name}: {count:,} calls: {_mean([p for p in points if p.family == name], count):.2f}%")
        points.append(_scored(held, whole, name, place, len(np.intersect1d(draws, seen)), SEEN, seed))
        say(f"{name}: a fit that saw {points[-1].calls:,} calls: {points[-1].mean:.2f}%")
    return points


def _groups(
    columns: Columns, family: str, by: Sequence[str], pool: NDArray[np.intp], test: NDArray[np.intp]
) -> list[tuple[str, NDArray[np.intp], NDArray[np.intp]]]:
    """Name, rows to draw from and rows to test on, of each combination of words with enough of both."""
    if not by:
        return [(family, pool, test)]
    words = [columns[name] if name in columns else np.full(len(columns["op"]), None) for name in by]
    label = np.array([" ".join(str(word) for word in cells if word is not None) for cells in zip(*words, strict=True)])
    found = [(str(name), pool[label[pool] == name], test[label[test] == name]) for name in np.unique(label[pool])]
    return [(name, draws, tests) for name, draws, tests in found if len(draws) >= _LEAST_DRAWS and len(tests)]


def _rows(
    columns: Columns, gpu: str, source: str | None, seed: int, plan: CurvePlan
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Rows of other GPUs, rows to calibrate with, rows to test on."""
    place = columns["gpu"].astype(str)
    kin = next((pair for pair in TWINS if gpu in pair), (gpu,))
    here = place == gpu
    if source is not None:
        here &= columns["source"] == source
    test = shape_fold(columns) == TEST_FOLD
    others, pool = np.flatnonzero(~np.isin(place, kin)), np.flatnonzero(here & ~test)
    held = sampled(np.flatnonzero(here & test), plan.test_rows, seed)
    if not (len(others) and len(pool) and len(held)):
        raise KernelcastError(
            f"too few measured calls: {len(pool)} of {gpu}, {len(held)} to test, {len(others)} others"
        )
    return others, pool, held


def _all_rows(settings: Settings) -> Settings:
    return replace(settings, rows=0)


def _conditions(weights: FamilyWeights, columns: Columns, drawn: NDArray[np.intp], gpu: str) -> Conditions:
    base = Fitted(weights)
    if not len(drawn):
        return Conditions(predictor=base)
    found, _ = calibrate({n: c[drawn] for n, c in columns.items()}, gpu, Conditions(predictor=base))
    return Conditions(predictor=base, calibration=found)


def _scored(
    held: Columns, conditions: Conditions, family: str, gpu: str, calls: int, predictor: str, seed: int
) -> CurvePoint:
    results, bad = predict_columns(held, gpu, conditions)
    if bad.found:
        raise KernelcastError(bad.text())
    truth = held["latency_us"]
    error = np.abs(results["predicted_us"] / truth - 1) * 100
    inside = (truth >= results["low_us"]) & (truth <= results["high_us"])
    return CurvePoint(
        family=family,
        gpu=gpu,
        calls=calls,
        predictor=predictor,
        seed=seed,
        rows=len(truth),
        mean=float(error.mean()),
        median=float(np.median(error)),
        coverage=float(inside.mean()),
    )


def _mean(points: Sequence[CurvePoint], calls: int, predictor: str = "calibrated") -> float:
    return float(np.mean([p.mean for p in points if p.calls == calls and p.predictor == predictor]))


def write_curves(points: Sequence[CurvePoint], out: Path) -> Path:
    """learning_curve.json, learning_curve.md and, where Matplotlib is, a plot."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "learning_curve.json").write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    counts = sorted({p.calls for p in points if p.predictor == "calibrated"})
    lines = [
        f"| GPU left out | family | {' | '.join(f'{count:,}' for count in counts)} | {SEEN} |",
        f"|{' --- |' * (len(counts) + 3)}",
    ]
    for place, family in dict.fromkeys((p.gpu, p.family) for p in points):
        own = [p for p in points if (p.gpu, p.family) == (place, family)]
        known = {p.calls for p in own if p.predictor == "calibrated"}
        cells = [f"{_mean(own, count):.1f}" if count in known else "–" for count in counts]
        seen = next((f"{p.mean:.1f} ({p.calls:,} calls)" for p in own if p.predictor == SEEN), "–")
        lines.append(f"| {place} | {family} | {' | '.join(cells)} | {seen} |")
    path = out / "learning_curve.md"
    path.write_text("\n".join(lines) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        _plot(points, out / "learning_curve.png")
    return path


def _plot(points: Sequence[CurvePoint], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    places = list(dict.fromkeys(p.gpu for p in points))
    figure, axes = plt.subplots(1, len(places), figsize=(5.0 * len(places), 3.8), squeeze=False)
    for axis, place in zip(axes[0], places, strict=True):
        for family in dict.fromkeys(p.family for p in points if p.gpu == place):
            own = [p for p in points if (p.gpu, p.family) == (place, family)]
            counts = sorted({p.calls for p in own if p.predictor == "calibrated"})
            (line,) = axis.plot([max(c, 3) for c in counts], [_mean(own, c) for c in counts], "o-", label=family)
            for point in own:
                if point.predictor == SEEN:
                    axis.axhline(point.mean, color=line.get_color(), linestyle=":", linewidth=1)
        axis.set(xscale="log", title=f"{place} left out of the fit", xlabel="calls measured (leftmost: none)")
        axis.set(ylabel="mean error on other shapes, %", ylim=(0, None))
        axis.legend(fontsize=8, title=f"dotted: {SEEN}", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
