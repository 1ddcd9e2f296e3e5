"""Columns of measurements -> Calibration, scored on calls that the fit did not see."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast._version import __version__
from kernelcast.collect.calibrate.fit import MAX_POINTS, choose, fit
from kernelcast.collect.calibrate.measured import Columns, Errors, errors, one_gpu, select, shapes
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Calibration, Predictor
from kernelcast.forecast.calibration import FamilyCalibration
from kernelcast.forecast.conditions import DEFAULT, Conditions, chosen
from kernelcast.forecast.learned import Learned, load
from kernelcast.forecast.prior import Prior, plain_prior
from kernelcast.forecast.table import BadRows
from kernelcast.hardware import Gpu, gpu

LEAST_ROWS = 10
_FOLDS = 20  # of shapes that are left out together
_FEW = 30  # rows with which the interval is half the prior's (or the family's) and half what the errors say
_T_REACH = 1.5332  # scales to either side that hold 80% of Student's t with four degrees, which priors are learned with
_OUTSIDE = 0.1  # share of calls below the interval, and above: it holds 80%
_LEAST_SPREAD = 0.05  # of a feature: one that hardly varies tells calls apart, but not by miles
_MEAN = np.sqrt(2 / np.pi)  # mean size of a normal error of standard deviation 1


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
    if len(rows) > MAX_POINTS:
        rows = select(rows, np.sort(np.random.default_rng(0).choice(len(rows), MAX_POINTS, replace=False)))
    prior = prior_of(rows, base)
    placed = rows.placed(prior)
    error = rows.target / rows.width
    setting = choose(prior, placed, error)
    made = fit(prior, placed, error, setting, shapes(rows) % _FOLDS)
    after = (error - made.left_out) * rows.width
    form, kind = (np.array([words[at] for words in rows.shared])[rows.code] for at in (0, 2))
    off = made.left_out / made.spread
    low, high = _reach(off, (_T_REACH, _T_REACH))
    return FamilyCalibration(
        rows=len(rows),
        error_before=float(np.mean(rows.percent(np.zeros(len(rows))))),
        error_after=float(np.mean(rows.percent(after))),
        expected_before=float(100 * np.mean(_MEAN * rows.width)),
        expected_after=float(100 * np.mean(_MEAN * rows.width * made.spread)),
        formats=_by_format(rows, form, after),
        reaches=_reaches(off, form, kind, (low, high)),
        prior=prior,
        setting=setting,
        place=placed.place.astype(np.float32),
        leaning=rows.leaning.astype(np.float32),
        words=rows.shared,
        code=rows.code.astype(np.int64),
        weights=made.weights.astype(np.float32),
        few=made.few.astype(np.int64),
        factor=made.factor.astype(np.float32),
        noise=prior.noise * setting.noise,
        low=low,
        high=high,
        least=float(min(0.0, rows.target.min())),
        most=float(max(0.0, rows.target.max())),
    )


def prior_of(rows: Errors, base: Predictor) -> Prior:
    """What is known of the errors of this family: learned with its weights, or the plain one."""
    weights = load(base.folder, rows.family) if isinstance(base, Learned) else getattr(base, "weights", None)
    learned: Prior | None = getattr(weights, "prior", None)
    if learned is not None:
        return learned
    spread = rows.values.std(axis=0, dtype=np.float64)
    return plain_prior(rows.names, rows.values.mean(axis=0), np.maximum(spread, _LEAST_SPREAD).astype(np.float32))


def _by_format(rows: Errors, form: NDArray[Any], after: NDArray[np.float64]) -> dict[str, tuple[int, float, float]]:
    """Rows, error before and after, of each format."""
    before, corrected = rows.percent(np.zeros(len(rows))), rows.percent(after)
    return {
        str(name): (
            int((form == name).sum()),
            float(before[form == name].mean()),
            float(corrected[form == name].mean()),
        )
        for name in np.unique(form)
    }


def _reaches(
    off: NDArray[np.float64], form: NDArray[Any], kind: NDArray[Any], family: tuple[float, float]
) -> dict[str, tuple[float, float]]:
    """Of each format, and of each kind within it: one engine's kernels may be far harder to tell than another's."""
    found = {str(name): _reach(off[form == name], family) for name in np.unique(form)}
    for name in np.unique(kind):
        own = kind == name
        found[str(name)] = _reach(off[own], found[str(form[own][0])])
    return found


def _reach(left_out: NDArray[np.float64], before: tuple[float, float]) -> tuple[float, float]:
    """Standard deviations to either side that hold 80% of calls not seen; with few of them mostly as ``before``.

    ``left_out``: errors of such calls, over the standard deviation that the process gives them."""
    share = len(left_out) / (len(left_out) + _FEW)
    found = []
    for side, reach in zip((-left_out, left_out), before, strict=True):
        needed = float(np.quantile(side, 1 - _OUTSIDE))
        found.append(float(reach * np.exp(share * np.log(np.clip(needed / reach, 0.2, 5.0)))))
    return found[0], found[1]
