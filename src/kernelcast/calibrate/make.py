"""Columns of measurements -> Calibration, scored on calls that the fit did not see."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from kernelcast._version import __version__
from kernelcast.calibrate.fit import Design, Setting, choose, design, fit
from kernelcast.calibrate.measured import Columns, Errors, errors, one_gpu, select, shapes
from kernelcast.calls.table import BadRows
from kernelcast.efficiency import Calibration, Predictor
from kernelcast.efficiency.calibration import FamilyCalibration, joint
from kernelcast.efficiency.learned import Learned, load
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu
from kernelcast.predict import DEFAULT, Conditions, chosen

LEAST_ROWS = 10
MAX_ROWS = 20_000  # of one family; more are sampled
_FOLDS = 5
_FEW_ROWS = 100  # up to here each fold chooses its own settings too
_FEW = 30  # rows with which the interval is half its own and half what the errors say
_OUTSIDE = 0.1  # share of calls below the interval, and above: it holds 80%
_LEAST_SPREAD = 0.05  # of a feature: one that hardly varies tells calls apart, but not by miles


def calibrate(
    columns: Columns,
    target: Gpu | str | None = None,
    conditions: Conditions = DEFAULT,
    *,
    skip_bad: bool = False,
) -> tuple[Calibration, BadRows]:
    """What measurements of one GPU say about the predictor. Bad rows are an error, or left out with ``skip_bad``.

    ``columns``: calls as in any table, and ``latency_us``. The GPU is ``target``, or the only one in the column gpu.
    """
    if conditions.calibration is not None:
        raise KernelcastError("a calibration is made of a predictor without one")
    chip = one_gpu(columns, gpu(target) if target is not None else None)
    if chip.changes:
        raise KernelcastError(f"{chip.label} was not measured: calibrate the GPU as it is")
    base = chosen(conditions)
    bad = BadRows()
    found = errors(columns, chip, base, conditions, bad)
    if bad.found and not skip_bad:
        raise KernelcastError(bad.text())
    count = sum(map(len, found.values()))
    if count < LEAST_ROWS:
        raise KernelcastError(f"{count} measured calls; a calibration needs {LEAST_ROWS} or more")
    families = {name: _family(rows, base) for name, rows in found.items()}
    return Calibration(gpu=chip.known_as, predictor=base.name, kernelcast=__version__, families=families), bad


def _family(rows: Errors, base: Predictor) -> FamilyCalibration:
    if len(rows) > MAX_ROWS:
        rows = select(rows, np.sort(np.random.default_rng(0).choice(len(rows), MAX_ROWS, replace=False)))
    mean, scale = _standard(rows, base)
    whole = design(rows, mean, scale)
    shape = shapes(rows)
    setting = choose(whole, shape)
    made = fit(whole, setting)
    out = _unseen(whole, shape, setting)
    low, high = _reach(rows, out)
    points = whole.place[made.points] / setting.length  # in units of the length scale, as the file keeps them
    return FamilyCalibration(
        rows=len(rows),
        error_before=float(np.mean(rows.percent(np.zeros(len(rows))))),
        error_after=float(np.mean(rows.percent(out))),
        biases={key: tuple(map(float, np.round(b, 6))) for key, b in zip(whole.keys, made.biases, strict=True)},
        names=rows.names,
        mean=mean,
        scale=(scale * np.float32(setting.length)).astype(np.float32),
        points=points.astype(np.float16).astype(np.float32),
        weights=made.weights.astype(np.float32),
        groups=tuple(joint(words) for words in rows.words),
        group=rows.code[made.points].astype(np.int64),
        low=low,
        high=high,
        least=float(min(0.0, rows.target.min())),
        most=float(max(0.0, rows.target.max())),
        settings=asdict(setting),
    )


def _standard(rows: Errors, base: Predictor) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and spread of each feature: over all that the predictor was fitted on, where that is known."""
    mean = rows.values.mean(axis=0, dtype=np.float64)
    spread = rows.values.std(axis=0, dtype=np.float64)
    weights = getattr(base, "weights", None)
    if isinstance(base, Learned):
        weights = load(base.folder, rows.family)
    if weights is not None:
        known = dict(zip(weights.encoder.names, weights.encoder.scale, strict=True))
        spread = np.array([known.get(name, own) for name, own in zip(rows.names, spread, strict=True)])
    scale = np.maximum(spread, _LEAST_SPREAD) * np.sqrt(len(rows.names))
    return mean.astype(np.float32), scale.astype(np.float32)


def _unseen(whole: Design, shape: NDArray[np.intp], setting: Setting) -> NDArray[np.float64]:
    """Correction of each call by a fit without it and without its like."""
    fold = shape % _FOLDS
    out = np.zeros(len(shape))
    for at in np.unique(fold):
        inside, outside = np.flatnonzero(fold != at), np.flatnonzero(fold == at)
        if len(inside):
            part = whole.select(inside)
            own = choose(part, shape[inside]) if len(shape) <= _FEW_ROWS else setting
            out[outside] = fit(part, own).correction(whole.select(outside))
    return out


def _reach(rows: Errors, out: NDArray[np.float64]) -> tuple[float, float]:
    """Multiples of the predictor's interval that hold 80% of calls not seen, shrunk towards 1 when there are few."""
    left = rows.target - out
    share = len(rows) / (len(rows) + _FEW)
    found = []
    for side, own in ((-left, rows.low), (left, rows.high)):
        needed = float(np.quantile(side / np.maximum(own, 1e-3), 1 - _OUTSIDE))
        found.append(float(np.exp(share * np.log(np.clip(needed, 0.05, 20.0)))))
    return found[0], found[1]
