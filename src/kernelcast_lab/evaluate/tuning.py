"""How good ``tune`` is, against exhaustive sweeps of shapes that no fit has seen.

  python -m kernelcast_lab.evaluate.tuning validation/moe_configs_h200_sxm.npz [--top 16] [--more 0]
      [--predictor learned] [-o FILE.json]

The tuner runs as it does for users; where it would time a config on the GPU, it gets the time that the sweep measured.
What it picks is then judged by the finals: 15 interleaved rounds of each shape's best 20 configs and both defaults.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernelcast.advise.configs import Config, GemmProblem, MoeProblem, Problem, swift_default
from kernelcast.advise.tune import TOP, predicted, tune
from kernelcast.hardware import gpu
from kernelcast.measured.config_sweeps import Sweep, about_sweeps, read_sweeps
from kernelcast.predict import DEFAULT, Conditions

Floats = NDArray[np.float64]
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


def problem_of(sweep: Sweep) -> Problem:
    if sweep.dense:
        return GemmProblem(sweep.tokens, sweep.inter, sweep.hidden)
    return MoeProblem(sweep.tokens, sweep.hidden, sweep.inter, sweep.experts, sweep.topk)


def final_times(sweep: Sweep) -> tuple[dict[tuple[int, ...], float], float]:
    """The finals' seconds by config, and how many times the sweep's they are for the best configs.

    What was timed first in each round (the sweep's best config of the plain kernel) came out up to 28% slow from 32
    tokens on: the GPU had just slept. Its time is the sweep's, times what the others' finals are over their sweep's.
    """
    if sweep.finals is None:
        return {}, 1.0
    swept = swept_times(sweep)
    found = {tuple(map(int, c)): float(t) for c, t in zip(sweep.finals.configs, sweep.finals.total_s, strict=True)}
    best = list(found)[:_BEST]
    usual = float(np.median([found[c] / swept[c] for c in best[1:]]))
    if sweep.kernel == "plain":
        found[best[0]] = swept[best[0]] * usual
    return found, usual


def swept_times(sweep: Sweep) -> dict[tuple[int, ...], float]:
    return {tuple(map(int, c)): float(t) for c, t in zip(sweep.configs, sweep.total_s, strict=True)}


def score(
    sweep: Sweep, chip_id: str = "h200_sxm", top: int = TOP, more: int = 0, conditions: Conditions = DEFAULT
) -> ShapeScore:
    """Tune one swept shape, and compare."""
    chip, problem = gpu(chip_id), problem_of(sweep)
    swept = swept_times(sweep)
    configs = [Config(*c) for c in swept]
    guess, _, _ = predicted(problem, configs, chip, conditions)
    truth = np.array(list(swept.values()))

    def measure(_: Problem, wanted: Sequence[Config]) -> list[float]:
        return [swept.get((c.block_m, c.block_n, c.block_k, c.group_m, c.warps, c.stages), np.inf) for c in wanted]

    tuned = tune(problem, chip, measure, top=top, more=more, conditions=conditions)
    finals, usual = final_times(sweep)

    def judged(config: Config) -> float:
        key = (config.block_m, config.block_n, config.block_k, config.group_m, config.warps, config.stages)
        return finals.get(key, swept[key] * usual)

    best_final = min(finals.values()) if finals else float(truth.min())
    best = configs[int(np.argmin(truth))]
    speedup = {stack: judged(c) / judged(tuned.config) for stack, c in tuned.defaults.items()}
    gap = {stack: tuned.default_predicted_s[stack] / float(guess.min()) - 1 for stack in tuned.defaults}
    return ShapeScore(
        shape=sweep.key, configs=len(configs), measured=tuned.configs_measured, spearman=spearman(guess, truth),
        error=float(np.mean(np.abs(np.log(guess / truth)))), tuned=str(tuned.config), best=str(best),
        regret=(tuned.measured_s or np.inf) / float(truth.min()) - 1,
        regret_finals=judged(tuned.config) / best_final - 1,
        first_regret=float(truth[int(np.argmin(guess))] / truth.min() - 1), tuned_us=judged(tuned.config) * 1e6,
        speedup=speedup, gap=gap,
    )  # fmt: skip


def spearman(one: Floats, other: Floats) -> float:
    """Correlation of ranks; ties share their mean rank."""
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts).astype(np.float64)
    return (last - (counts - 1) / 2)[place]


def summary(scores: Sequence[ShapeScore]) -> dict[str, float]:
    """The figures that targets are set for."""
    found = {
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
        found[f"{stack}_speedup_mean"] = float(np.exp(np.mean(np.log(gains))))
        found[f"{stack}_speedup_most"] = float(gains.max())
        found[f"{stack}_slower"] = int(np.sum(gains < 0.995))
        found[f"{stack}_gap_gain"] = float(np.corrcoef(gaps, gains)[0, 1])
        found[f"{stack}_gap_gain_ranks"] = spearman(gaps, gains)
    return found


def kernels_compared(sweeps: Sequence[Sweep]) -> list[dict[str, float | str]]:
    """The swift kernel next to the plain one: both GEMMs and whole layers (with SwiGLU), at the best and by rules.

    ``rule``: vLLM's default for the plain kernel, its own for the swift one, whose first GEMM does SwiGLU too.
    """
    by_shape: dict[str, dict[str, Sweep]] = {}
    for sweep in sweeps:
        if sweep.layers is not None:
            by_shape.setdefault(sweep.key, {})[sweep.kernel] = sweep
    rows = []
    for key, pair in by_shape.items():
        row: dict[str, float | str] = {"shape": key}
        for kernel, sweep in pair.items():
            finals, usual = final_times(sweep)
            default = tune(problem_of(sweep), gpu("h200_sxm")).defaults["vllm"]
            assert sweep.layers is not None
            row[f"{kernel}_best_us"] = min(finals.values()) * 1e6
            own = swift_default(sweep.tokens, sweep.experts, sweep.topk) if kernel == "swift" else default
            config = tuple(vars(own).values())
            row[f"{kernel}_rule_us"] = finals.get(config, swept_times(sweep)[config] * usual) * 1e6
            row[f"{kernel}_layer_us"] = float(sweep.layers.total_s.min()) * 1e6
            row[f"{kernel}_layer_default_us"] = sweep.layers.of([*vars(default).values()]) * 1e6
        rows.append(row)
    return rows


def table(scores: Sequence[ShapeScore]) -> str:
    """Markdown, one line a shape."""
    lines = [
        "| shape | Spearman | tuned | µs | off the best | over vLLM | over SGLang |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for s in scores:
        lines.append(
            f"| {s.shape} | {s.spearman:.3f} | {s.tuned} | {s.tuned_us:,.0f} | {100 * s.regret_finals:.1f}% "
            f"| {s.speedup['vllm']:.2f} | {s.speedup['sglang']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path)
    parser.add_argument("--top", type=int, default=TOP)
    parser.add_argument("--more", type=int, default=0)
    parser.add_argument("--predictor", default="learned", choices=("learned", "generic"))
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    sweeps = read_sweeps(given.sweeps)
    chip, conditions = str(about_sweeps(given.sweeps)["gpu"]), Conditions(predictor=given.predictor)

    def scores_of(phase: str, kernel: str) -> list[ShapeScore]:
        chosen = [s for s in sweeps if s.phase == phase and s.kernel == kernel]
        return [score(s, chip, given.top, given.more, conditions) for s in chosen]

    found = {name: scores_of("main", name) for name in ("plain", "swift")}
    dense = scores_of("dense", "plain")
    compared = kernels_compared(sweeps)
    print(table(found["plain"]))
    for name, scores in found.items():
        print(f"\n{name}: {json.dumps({k: round(v, 4) for k, v in summary(scores).items()}, indent=1)}")
    print("\ndense:", *[f"{s.shape} {s.spearman:.3f} off {100 * s.regret:.1f}%" for s in dense], sep="\n  ")
    pairs = (("rule", "rule"), ("best", "best"), ("rule", "best"), ("best", "rule"), ("layer", "layer"),
             ("layer_default", "layer"), ("layer_default", "layer_default"))  # fmt: skip
    for plain_at, swift_at in pairs:
        gain = np.array([float(r[f"plain_{plain_at}_us"]) / float(r[f"swift_{swift_at}_us"]) for r in compared])
        print(f"swift {swift_at} over plain {plain_at}: mean {np.exp(np.log(gain).mean()):.3f}, "
              f"{gain.min():.3f} to {gain.max():.3f}, slower on {int(np.sum(gain < 0.995))}")  # fmt: skip
    off = np.array([float(r["swift_rule_us"]) / float(r["swift_best_us"]) - 1 for r in compared])
    print(f"swift by its rule: off its best by {100 * off.mean():.1f}% on the mean, {100 * off.max():.0f}% at most")
    if given.out is not None:
        told = {name: [asdict(s) for s in scores] for name, scores in (*found.items(), ("dense", dense))}
        given.out.write_text(json.dumps({**told, "kernels": compared}, indent=1) + "\n")


if __name__ == "__main__":
    main()
