"""How good ``tune`` is, against exhaustive sweeps of shapes that no fit has seen.

The tuner runs as it does for users; where it would time a config on the GPU, it gets the time that the sweep measured.
What it picks is then judged by the finals: 15 interleaved rounds of each shape's best 20 configs and both defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from scipy.stats import spearmanr

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.hardware import gpu
from kernelcast.tune.configs import Config, GemmProblem, MoeProblem, Problem, swift_default, vllm_default
from kernelcast.tune.tune import TOP, predict_configs, tune
from kernelcast_lab.data.config_sweeps import Sweep, Timed, about_sweeps, read_sweeps

SWEEPS = Path(__file__).parents[3] / "validation" / "moe_configs_h200_sxm.npz"
_BEST = 20  # of a kernel's configs that the finals time again


@dataclass(frozen=True)
class ShapeScore:
    """One shape. Regrets are shares over the best: 0.01 is 1% slower."""

    shape: str
    configs: int
    measured: int
    spearman: float
    error: float  # mean absolute error of log time over all configs
    tuned: str
    best: str
    regret: float  # by the sweep's times
    regret_finals: float  # by the finals' times
    first_regret: float  # of the predicted best, unmeasured, by the sweep's times
    tuned_us: float
    speedup: dict[str, float]  # of the tuned config over each engine's default, by the finals
    gap: dict[str, float]  # predicted: the default's time over the best predicted, less 1

    @property
    def line(self) -> dict[str, Any]:
        """All fields, a number each for the engines."""
        flat = {name: value for name, value in vars(self).items() if not isinstance(value, dict)}
        flat |= {f"over_{stack}": value for stack, value in self.speedup.items()}
        return flat | {f"predicted_gap_{stack}": value for stack, value in self.gap.items()}


def problem_of(sweep: Sweep) -> Problem:
    if sweep.dense:
        return GemmProblem(sweep.tokens, sweep.inter, sweep.hidden)
    return MoeProblem(sweep.tokens, sweep.hidden, sweep.inter, sweep.experts, sweep.topk)


def final_times(sweep: Sweep) -> tuple[dict[Config, float], float]:
    """The finals' seconds by config, and how many times the sweep's they are for the best configs.

    What was timed first in each round (the sweep's best config of the plain kernel) came out up to 28% slow from 32
    tokens on: the GPU had just slept. Its time is the sweep's, times what the others' finals are over their sweep's.
    """
    if sweep.finals is None:
        return {}, 1.0
    swept = swept_times(sweep)
    result = swept_times(sweep.finals)
    best = list(result)[:_BEST]
    usual = float(np.median([result[c] / swept[c] for c in best[1:]]))
    if sweep.kernel == "plain":
        result[best[0]] = swept[best[0]] * usual
    return result, usual


def swept_times(sweep: Sweep | Timed) -> dict[Config, float]:
    return {Config(*map(int, c)): float(t) for c, t in zip(sweep.configs, sweep.total_s, strict=True)}


def score(
    sweep: Sweep, gpu_id: str = "h200_sxm", top: int = TOP, more: int = 0, conditions: Conditions = DEFAULT
) -> ShapeScore:
    """Tune one swept shape, and compare."""
    target, problem = gpu(gpu_id), problem_of(sweep)
    swept = swept_times(sweep)
    configs = list(swept)
    predicted_s, _, _ = predict_configs(problem, configs, target, conditions)
    truth = np.array(list(swept.values()))

    def measure(_: Problem, wanted: Sequence[Config]) -> list[float]:
        return [swept.get(config, np.inf) for config in wanted]

    tuned = tune(problem, target, measure, top=top, more=more, conditions=conditions)
    finals, usual = final_times(sweep)

    def judged(config: Config) -> float:
        return finals.get(config, swept[config] * usual)

    best_final = min(finals.values()) if finals else float(truth.min())
    best = configs[int(np.argmin(truth))]
    speedup = {stack: judged(c) / judged(tuned.config) for stack, c in tuned.defaults.items()}
    gap = {stack: tuned.default_predicted_s[stack] / float(predicted_s.min()) - 1 for stack in tuned.defaults}
    return ShapeScore(
        shape=sweep.key, configs=len(configs), measured=tuned.configs_measured,
        spearman=float(spearmanr(predicted_s, truth).statistic),
        error=float(np.mean(np.abs(np.log(predicted_s / truth)))), tuned=str(tuned.config), best=str(best),
        regret=(tuned.measured_s or np.inf) / float(truth.min()) - 1,
        regret_finals=judged(tuned.config) / best_final - 1,
        first_regret=float(truth[int(np.argmin(predicted_s))] / truth.min() - 1), tuned_us=judged(tuned.config) * 1e6,
        speedup=speedup, gap=gap,
    )  # fmt: skip


def summary(scores: Sequence[ShapeScore]) -> dict[str, float]:
    """The figures that targets are set for."""
    summary_ = {
        "shapes": len(scores),
        "spearman_median": float(np.median([s.spearman for s in scores])),
        "spearman_least": min(s.spearman for s in scores),
        "regret_most": max(s.regret for s in scores),
        "regret_mean": float(np.mean([s.regret for s in scores])),
        "regret_finals_most": max(s.regret_finals for s in scores),
        "within_3_percent": sum(s.regret_finals <= 0.03 and s.regret <= 0.03 for s in scores),
        "share_measured": max(s.measured / s.configs for s in scores),
        "log_error_mean": float(np.mean([s.error for s in scores])),
    }
    for stack in scores[0].speedup:
        gains = np.array([s.speedup[stack] for s in scores])
        gaps = np.array([s.gap[stack] for s in scores])
        summary_[f"{stack}_speedup_mean"] = float(np.exp(np.mean(np.log(gains))))
        summary_[f"{stack}_speedup_most"] = float(gains.max())
        summary_[f"{stack}_slower"] = int(np.sum(gains < 0.995))
        summary_[f"{stack}_gap_gain"] = float(np.corrcoef(gaps, gains)[0, 1])
        summary_[f"{stack}_gap_gain_ranks"] = float(spearmanr(gaps, gains).statistic)
    return summary_


def kernels_compared(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """The swift kernel next to the plain one: both GEMMs and whole layers (with SwiGLU), at the best and by rules.

    ``rule``: vLLM's default for the plain kernel, its own for the swift one, whose first GEMM does SwiGLU too.
    """
    by_shape: dict[str, dict[str, Any]] = {}
    for sweep in sweeps:
        if sweep.layers is None:
            continue
        finals, usual = final_times(sweep)
        default = vllm_default(sweep.tokens, sweep.experts)
        members = swift_default(sweep.tokens, sweep.experts, sweep.topk) if sweep.kernel == "swift" else default
        times_s = {
            "best": min(finals.values()),
            "rule": finals.get(members, swept_times(sweep)[members] * usual),
            "layer": float(sweep.layers.total_s.min()),
            "layer_default": sweep.layers.of([*vars(default).values()]),
        }
        row = by_shape.setdefault(sweep.key, {"shape": sweep.key})
        row |= {f"{sweep.kernel}_{name}_us": time_s * 1e6 for name, time_s in times_s.items()}
    return [row for row in by_shape.values() if "plain_best_us" in row and "swift_best_us" in row]


def swift_over_plain(compared: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast the swift kernel is, by what both are timed at."""
    pairs = (("rule", "rule"), ("best", "best"), ("rule", "best"), ("best", "rule"), ("layer", "layer"),
             ("layer_default", "layer"), ("layer_default", "layer_default"))  # fmt: skip
    rows = []
    for plain_at, swift_at in pairs if compared else ():
        gain = np.array([row[f"plain_{plain_at}_us"] / row[f"swift_{swift_at}_us"] for row in compared])
        labels = {"mean": float(np.exp(np.log(gain).mean())), "least": float(gain.min()), "most": float(gain.max())}
        rows.append({"swift": swift_at, "plain": plain_at} | labels | {"slower": int(np.sum(gain < 0.995))})
    return rows


def chosen_sweeps(path: Path, only: Sequence[str] = ()) -> tuple[list[Sweep], str]:
    """The sweeps of a file, and their GPU; with ``only``, shapes whose name contains one of them."""
    try:
        result, gpu_id = read_sweeps(path), str(about_sweeps(path)["gpu"])
    except KernelcastError:
        raise
    except (ValueError, KeyError, EOFError, BadZipFile) as error:
        raise KernelcastError(f"{path} holds no swept configs: {error}") from None
    return [sweep for sweep in result if not only or any(part in sweep.key for part in only)], gpu_id


def figures(
    sweeps: Sequence[Sweep], gpu_id: str, top: int = TOP, more: int = 0, conditions: Conditions = DEFAULT
) -> dict[str, list[dict[str, Any]]]:
    """Every shape that is tested on, the figures that targets are set for, and the two kernels beside each other."""
    kernels = {"plain": ("main", "plain"), "swift": ("main", "swift"), "dense": ("dense", "plain")}
    scored = {
        group: [score(s, gpu_id, top, more, conditions) for s in sweeps if (s.phase, s.kernel) == which]
        for group, which in kernels.items()
    }
    totals = {group: summary(scored[group]) for group in ("plain", "swift") if scored[group]}
    compared = kernels_compared(sweeps)
    if compared:
        off = np.array([row["swift_rule_us"] / row["swift_best_us"] - 1 for row in compared])
        totals["swift"] |= {"rule_off_best_mean": float(off.mean()), "rule_off_best_most": float(off.max())}
    names = dict.fromkeys(name for group in totals.values() for name in group)
    return {
        "shapes": [{"kernel": group, **s.line} for group, scores in scored.items() for s in scores],
        "summary": [{"figure": name, **{group: total.get(name) for group, total in totals.items()}} for name in names],
        "swift_over_plain": swift_over_plain(compared),
        "kernels": compared,
    }
