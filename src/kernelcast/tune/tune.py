"""tune: the best Triton config of a (grouped) GEMM, found by predicting all of them and measuring only a few.

The predictor ranks the whole space in well under a second; a GPU, where there is one, then times the most promising.
Measuring is passed in as a function, so that nothing here needs a GPU or PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.learned import Learned
from kernelcast.forecast.predict import predict_calls
from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls
from kernelcast.ops.moe_gemm import MoeGemm
from kernelcast.results import SUPPORT
from kernelcast.tune.configs import DEFAULTS, Config, MoeProblem, Problem, fits, space
from kernelcast.tune.refine import refined

# Seconds of each config on the GPU at hand, infinity where it does not run.
Measure = Callable[[Problem, Sequence[Config]], Sequence[float]]
TOP = 16
_FINALISTS = 4  # that are measured a second time: the least of many noisy times is too low, and may be another's
_NAMES = tuple(field.name for field in fields(Config))


@dataclass(frozen=True)
class Ranked:
    """A space of configs with their predicted times, the fastest first."""

    configs: tuple[Config, ...]
    time_s: NDArray[np.float64]
    ceiling_s: float  # the least that any of them is predicted to reach at its best
    support: str

    def of(self, config: Config) -> float:
        return float(self.time_s[self.configs.index(config)])


@dataclass(frozen=True)
class Tuned:
    """What came out for one problem."""

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
        """Over an engine's own default config: measured where it was, else predicted."""
        if self.measured_s is not None and stack in self.default_measured_s:
            return self.default_measured_s[stack] / self.measured_s
        return self.default_predicted_s[stack] / self.predicted_s


def predicted(
    problem: Problem, configs: Sequence[Config], chip: Gpu, conditions: Conditions = DEFAULT
) -> tuple[NDArray[np.float64], NDArray[np.float64], str]:
    """(seconds, ceiling in seconds) of all GEMMs of the problem with each config, and how well that is supported."""
    table = np.array([astuple(config) for config in configs], dtype=np.float64)
    time, ceiling = np.zeros(len(configs)), np.zeros(len(configs))
    supports: set[str] = set()
    for product in problem.products:
        numbers = {name: np.full(len(configs), float(value)) for name, value in product.items()}
        numbers |= {name: table[:, at] for at, name in enumerate(_NAMES)}
        calls = Calls(len(configs), numbers, {"dtype": problem.dtype, "stack": None})
        found = predict_calls(MoeGemm, calls, chip, conditions)
        time, ceiling = time + found.time_s, ceiling + found.ceiling_s
        supports |= set(found.support.tolist())
    return time, ceiling, max(supports, key=list(SUPPORT).index)


def ranked(problem: Problem, chip: Gpu, conditions: Conditions = DEFAULT, extra: Sequence[Config] = ()) -> Ranked:
    """The whole space, best first; ``extra`` configs count too, where they fit."""
    known = space(chip, problem.dtype)
    configs = list(dict.fromkeys([*known, *(c for c in extra if fits(c, chip, problem.dtype))]))
    if not configs:
        raise KernelcastError(f"no config fits {chip.id}: it has {chip.smem_bytes_per_cta:,} bytes of shared memory")
    time, ceiling, support = predicted(problem, configs, chip, conditions)
    if support != "seen" and conditions.predictor == "learned":
        # a GPU's name says little where its configs were not measured; physics errs otherwise than networks do
        other, _, _ = predicted(problem, configs, chip, Conditions(predictor=Learned(nameless=True)))
        physics, _, _ = predicted(problem, configs, chip, Conditions(predictor="generic"))
        time = np.sqrt(other * physics)
    order = np.argsort(time, kind="stable")
    return Ranked(tuple(configs[i] for i in order), time[order], float(ceiling.min()), support)


def tune(
    problem: Problem,
    chip: Gpu,
    measure: Measure | None = None,
    *,
    top: int = TOP,
    more: int = 0,
    conditions: Conditions = DEFAULT,
) -> Tuned:
    """The best of the predicted ``top``, as measured; without ``measure`` the predicted best.

    ``more`` measures that many beyond them: in predicted order, or, where the prediction is not of a GPU seen and
    Optuna is installed, around the best so far. The engines' defaults are measured too, to compare with, and may win.
    The best few and the defaults are then measured again in turn, which decides.
    """
    defaults = _defaults(problem, chip)
    found = ranked(problem, chip, conditions, tuple(defaults.values()))
    tuned = partial(
        Tuned,
        problem=problem,
        configs_in_space=len(found.configs),
        ceiling_s=found.ceiling_s,
        support=found.support,
        defaults=defaults,
        default_predicted_s={stack: found.of(config) for stack, config in defaults.items()},
    )
    if measure is None:
        best, time_s = found.configs[0], float(found.time_s[0])
        return tuned(config=best, predicted_s=time_s, measured_s=None, configs_measured=0, default_measured_s={})
    chosen = list(dict.fromkeys([*found.configs[:top], *defaults.values()]))
    times = dict(zip(chosen, measure(problem, chosen), strict=True))
    if more:
        unsure = found.support != "seen"
        times |= refined(found.configs, times, more, lambda configs: measure(problem, configs), search=unsure)
    finalists = sorted((c for c in times if np.isfinite(times[c])), key=lambda config: times[config])[:_FINALISTS]
    if not finalists:
        raise KernelcastError(f"none of the {len(times)} configs ran on this GPU")
    judged = list(dict.fromkeys([*finalists, *defaults.values()]))
    final = dict(zip(judged, measure(problem, judged), strict=True))
    best = min(final, key=lambda config: final[config])
    return tuned(
        config=best,
        predicted_s=found.of(best),
        measured_s=final[best],
        configs_measured=len(times),
        default_measured_s={stack: final[config] for stack, config in defaults.items()},
    )


def _defaults(problem: Problem, chip: Gpu) -> dict[str, Config]:
    """The engines' own choice for an MoE layer, where it fits; a plain GEMM has none."""
    if not isinstance(problem, MoeProblem):
        return {}
    every = {stack: default(problem.tokens, problem.experts) for stack, default in DEFAULTS.items()}
    return {stack: config for stack, config in every.items() if fits(config, chip, problem.dtype)}
