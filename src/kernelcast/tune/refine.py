"""Beyond the predicted top: a few more configs, in predicted order, or around the best so far by Optuna.

Where the model knows the GPU's configs, its order finds more than a search does; where it does not, the search does
(docs/tuning.md has both).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from kernelcast.tune.configs import Config

MeasureMore = Callable[[Sequence[Config]], Sequence[float]]


def refined(
    space: Sequence[Config], known: Mapping[Config, float], count: int, measure: MeasureMore, *, search: bool
) -> dict[Config, float]:
    """Times of up to ``count`` configs of ``space`` (best predicted first) that are not in ``known``.

    ``search``: by Optuna, where it is installed.
    """
    if search:
        try:
            import optuna
        except ImportError:
            pass
        else:
            return _by_optuna(optuna, space, known, count, measure)
    left = [config for config in space if config not in known][:count]
    return dict(zip(left, measure(left), strict=True)) if left else {}


def _by_optuna(
    optuna: Any, space: Sequence[Config], known: Mapping[Config, float], count: int, measure: MeasureMore
) -> dict[Config, float]:
    """TPE on the measured times; a suggestion that does not fit or is known gives way to the nearest that is new."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = [field.name for field in fields(Config)]
    choices = {name: sorted({getattr(config, name) for config in space}) for name in names}
    kinds = {name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True))
    for config, time in known.items():
        if np.isfinite(time):
            study.add_trial(optuna.trial.create_trial(params=asdict(config), distributions=kinds, value=float(time)))
    found: dict[Config, float] = {}
    for _ in range(count):
        left = [config for config in space if config not in known and config not in found]
        if not left:
            break
        trial = study.ask(kinds)
        config = min(left, key=lambda c: _distance(c, trial.params))
        found[config] = float(measure([config])[0])
        time = found[config] if np.isfinite(found[config]) else 1e9
        study.add_trial(optuna.trial.create_trial(params=asdict(config), distributions=kinds, value=time))
    return found


def _distance(config: Config, wanted: Mapping[str, int]) -> float:
    """Steps of doubling between two configs."""
    return sum(abs(float(np.log2(getattr(config, name) / value))) for name, value in wanted.items())
