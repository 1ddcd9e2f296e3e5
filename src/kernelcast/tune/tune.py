"""tune: the best Triton config of a (grouped) GEMM, by predicting all of them and measuring only a few.

The predictor ranks the whole space in well under a second; a GPU, where there is one, then times the most promising.
Measuring is passed in as a function, so that nothing here needs a GPU or PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.learned import Learned
from kernelcast.forecast.predict import predict_calls
from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls
from kernelcast.ops.moe_gemm import MoeGemm
from kernelcast.results import LEVELS
from kernelcast.tune.configs import DEFAULTS, Config, MoeProblem, Problem, fits, space

# Seconds of each config on the GPU at hand, infinity where it does not run.
Measure = Callable[[Problem, Sequence[Config]], Sequence[float]]
MeasureConfigs = Callable[[Sequence[Config]], Sequence[float]]
TOP = 16
_FINALISTS = 4  # measured a second time: the least of many noisy times is too low, and may be of another config
_NAMES = tuple(field.name for field in fields(Config))


@dataclass(frozen=True)
class RankedConfigs:
    """A space of configs with their predicted times, the fastest first."""

    configs: tuple[Config, ...]
    time_s: NDArray[np.float64]
    ceiling_s: float  # the least that any of them is predicted to reach at its best
    support: str

    def of(self, config: Config) -> float:
        return float(self.time_s[self.configs.index(config)])


@dataclass(frozen=True)
class TuneResult:
    """The best config of one problem."""

    problem: Problem
    config: Config
    predicted_s: float
    measured_s: float | None  # None: no GPU, the predicted best
    configs_measured: int
    configs_in_space: int
    ceiling_s: float
    support: str
    defaults: Mapping[str, Config]
    default_predicted_s: Mapping[str, float]
    default_measured_s: Mapping[str, float]

    @property
    def measured(self) -> bool:
        return self.measured_s is not None

    def speedup(self, stack: str) -> float:
        """Over an engine's default config: measured where it was, else predicted."""
        if self.measured_s is not None and stack in self.default_measured_s:
            return self.default_measured_s[stack] / self.measured_s
        return self.default_predicted_s[stack] / self.predicted_s


def predict_configs(
    problem: Problem, configs: Sequence[Config], gpu: Gpu, conditions: Conditions = DEFAULT
) -> tuple[NDArray[np.float64], NDArray[np.float64], str]:
    """(seconds, ceiling in seconds) of all GEMMs of the problem with each config, and how well that is supported."""
    table = np.array([astuple(config) for config in configs], dtype=np.float64)
    time, ceiling = np.zeros(len(configs)), np.zeros(len(configs))
    support = 0
    for product in problem.products:
        numbers = {name: np.full(len(configs), float(value)) for name, value in product.items()}
        numbers |= {name: table[:, at] for at, name in enumerate(_NAMES)}
        calls = Calls(len(configs), numbers, {"dtype": problem.dtype, "stack": None})
        forecast = predict_calls(MoeGemm, calls, gpu, conditions)
        time, ceiling = time + forecast.time_s, ceiling + forecast.ceiling_s
        support = max(support, int(forecast.support.max()))
    return time, ceiling, LEVELS[support]


def rank_configs(
    problem: Problem, gpu: Gpu, conditions: Conditions = DEFAULT, extra: Sequence[Config] = ()
) -> RankedConfigs:
    """The whole space, best first; ``extra`` configs count too, where they fit."""
    candidates = space(gpu, problem.dtype)
    configs = list(dict.fromkeys([*candidates, *(c for c in extra if fits(c, gpu, problem.dtype))]))
    if not configs:
        raise KernelcastError(f"no config fits {gpu.id}: it has {gpu.smem_bytes_per_cta:,} bytes of shared memory")
    time, ceiling, support = predict_configs(problem, configs, gpu, conditions)
    if support != "seen" and conditions.predictor == "learned":
        # a GPU's name says little where its configs were not measured; physics errs otherwise than networks do
        nameless, _, _ = predict_configs(problem, configs, gpu, Conditions(predictor=Learned(nameless=True)))
        physics, _, _ = predict_configs(problem, configs, gpu, Conditions(predictor="generic"))
        time = np.sqrt(nameless * physics)
    order = np.argsort(time, kind="stable")
    return RankedConfigs(tuple(configs[i] for i in order), time[order], float(ceiling.min()), support)


def tune(
    problem: Problem,
    gpu: Gpu,
    measure: Measure | None = None,
    *,
    top: int = TOP,
    more: int = 0,
    conditions: Conditions = DEFAULT,
) -> TuneResult:
    """The best of the predicted ``top``, as measured; without ``measure`` the predicted best.

    ``more`` measures that many beyond them: in predicted order, or, where the prediction is not of a GPU seen and
    Optuna is installed, around the best so far. The engines' defaults are measured too, to compare with, and may win.
    The best few and the defaults are then measured again, which decides.
    """
    defaults = _defaults(problem, gpu)
    ranking = rank_configs(problem, gpu, conditions, tuple(defaults.values()))
    tuned = partial(
        TuneResult,
        problem=problem,
        configs_in_space=len(ranking.configs),
        ceiling_s=ranking.ceiling_s,
        support=ranking.support,
        defaults=defaults,
        default_predicted_s={stack: ranking.of(config) for stack, config in defaults.items()},
    )
    if measure is None:
        best, time_s = ranking.configs[0], float(ranking.time_s[0])
        return tuned(config=best, predicted_s=time_s, measured_s=None, configs_measured=0, default_measured_s={})
    chosen = list(dict.fromkeys([*ranking.configs[:top], *defaults.values()]))
    times = dict(zip(chosen, measure(problem, chosen), strict=True))
    if more:
        unsure = ranking.support != "seen"
        times |= refine(ranking.configs, times, more, lambda configs: measure(problem, configs), search=unsure)
    finalists = sorted((c for c in times if np.isfinite(times[c])), key=lambda config: times[config])[:_FINALISTS]
    if not finalists:
        raise KernelcastError(f"none of the {len(times)} configs ran on this GPU")
    judged = list(dict.fromkeys([*finalists, *defaults.values()]))
    final = dict(zip(judged, measure(problem, judged), strict=True))
    best = min(final, key=lambda config: final[config])
    return tuned(
        config=best,
        predicted_s=ranking.of(best),
        measured_s=final[best],
        configs_measured=len(times),
        default_measured_s={stack: final[config] for stack, config in defaults.items()},
    )


def _defaults(problem: Problem, gpu: Gpu) -> dict[str, Config]:
    """The engines' defaults for an MoE layer, where it fits; a plain GEMM has none."""
    if not isinstance(problem, MoeProblem):
        return {}
    defaults = {stack: default(problem.tokens, problem.experts) for stack, default in DEFAULTS.items()}
    return {stack: config for stack, config in defaults.items() if fits(config, gpu, problem.dtype)}


def refine(
    space: Sequence[Config], known: Mapping[Config, float], count: int, measure: MeasureConfigs, *, search: bool
) -> dict[Config, float]:
    """Times of up to ``count`` more configs of ``space`` (best predicted first) than are in ``known``.

    ``search``: around the best so far by Optuna, where it is installed. That is better where the predictor does not
    know the GPU's configs, and the predicted order where it does (docs/tuning.md has both).
    """
    if search:
        try:
            import optuna
        except ImportError:
            pass
        else:
            return _by_optuna(optuna, space, known, count, measure)
    remaining = [config for config in space if config not in known][:count]
    return dict(zip(remaining, measure(remaining), strict=True)) if remaining else {}


def _by_optuna(
    optuna: Any, space: Sequence[Config], known: Mapping[Config, float], count: int, measure: MeasureConfigs
) -> dict[Config, float]:
    """TPE on the measured times; a suggestion that does not fit or is known gives way to the nearest that is new."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = [field.name for field in fields(Config)]
    choices = {name: sorted({getattr(config, name) for config in space}) for name in names}
    distributions = {name: optuna.distributions.CategoricalDistribution(values) for name, values in choices.items()}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, multivariate=True))

    def add(config: Config, time: float) -> None:
        study.add_trial(optuna.trial.create_trial(params=asdict(config), distributions=distributions, value=time))

    for config, time in known.items():
        if np.isfinite(time):
            add(config, float(time))
    times: dict[Config, float] = {}
    for _ in range(count):
        remaining = [config for config in space if config not in known and config not in times]
        if not remaining:
            break
        trial = study.ask(distributions)
        config = min(remaining, key=lambda c: _distance(c, trial.params))
        times[config] = float(measure([config])[0])
        add(config, times[config] if np.isfinite(times[config]) else 1e9)
    return times


def _distance(config: Config, wanted: Mapping[str, int]) -> float:
    """Steps of doubling between two configs."""
    return sum(abs(float(np.log2(getattr(config, name) / value))) for name, value in wanted.items())
