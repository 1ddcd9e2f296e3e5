"""What tuning pays on this machine's GPU, next to an exhaustive sweep: MoE layers of three models, 1 to 8,192 tokens.

  python benchmarks/tuned_moe.py validation/moe_configs_h200_sxm.npz [--top 16] [-o FILE.json]

Each shape is tuned as ``kernelcast tune moe`` does. Then the tuned config, both engines' defaults and the best 20 of
the sweep are timed again in turn, in an order drawn anew each round: so the tuned one is judged by other times than
those that it was picked by. Times are of both grouped GEMMs. Needs PyTorch, Triton and a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from kernelcast.collect.device import identified
from kernelcast.collect.fused_moe import ConfigBench, Measurer
from kernelcast.hardware import Gpu
from kernelcast.tune.configs import Config
from kernelcast.tune.tune import TOP, TuneResult, tune
from kernelcast_lab.data.config_sweeps import Sweep, about_sweeps, read_sweeps
from kernelcast_lab.evaluate.tuning import problem_of, swept_times

BEST, ROUNDS = 20, 15


@dataclass(frozen=True)
class Judged:
    """One shape, in seconds."""

    shape: str
    tuned: TuneResult
    time_s: float
    best: Config
    best_s: float  # of the tuned config and the sweep's best 20
    default_s: dict[str, float]

    @property
    def off(self) -> float:
        return self.time_s / self.best_s - 1


def judged(sweep: Sweep, chip: Gpu, measurer: Measurer, top: int) -> Judged:
    problem = problem_of(sweep)
    tuned = tune(problem, chip, measurer, top=top)
    swept = swept_times(sweep)
    best = sorted(swept, key=lambda config: swept[config])[:BEST]
    chosen = list(dict.fromkeys([tuned.config, *best, *tuned.defaults.values()]))
    bench, draw = ConfigBench(problem), random.Random(0)
    samples: dict[Config, list[float]] = {config: [] for config in chosen}
    for _ in range(ROUNDS):
        draw.shuffle(chosen)
        for config, times in zip(chosen, bench.timed(chosen), strict=True):
            samples[config].append(sum(times))
    time = {config: statistics.median(found) for config, found in samples.items()}
    winner = min((tuned.config, *best), key=lambda config: time[config])
    defaults = {stack: time[config] for stack, config in tuned.defaults.items()}
    return Judged(sweep.key, tuned, time[tuned.config], winner, time[winner], defaults)


def summary(found: list[Judged], stacks: tuple[str, ...]) -> dict[str, float]:
    told = {
        "shapes": len(found),
        "off_the_best_most": max(one.off for one in found),
        "off_the_best_mean": statistics.mean(one.off for one in found),
        "within_3_percent": sum(one.off <= 0.03 for one in found),
        "share_measured_most": max(one.tuned.configs_measured / one.tuned.configs_in_space for one in found),
    }
    for stack in stacks:
        gains = np.array([one.default_s[stack] / one.time_s for one in found])
        gaps = np.array([one.tuned.default_predicted_s[stack] / one.tuned.predicted_s for one in found])
        told[f"{stack}_speedup_mean"] = float(np.exp(np.log(gains).mean()))
        told[f"{stack}_speedup_most"] = float(gains.max())
        told[f"{stack}_speedup_least"] = float(gains.min())
        if len(found) > 2:
            told[f"{stack}_gap_gain"] = float(np.corrcoef(gaps, gains)[0, 1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path)
    parser.add_argument("--top", type=int, default=TOP)
    parser.add_argument("-o", "--out", type=Path)
    given = parser.parse_args()
    chip, measurer = identified(None), Measurer()
    swept_on = str(about_sweeps(given.sweeps)["gpu"])
    if chip.id != swept_on:
        raise SystemExit(f"{given.sweeps} was swept on a {swept_on}; this machine has a {chip.id}")
    sweeps = [s for s in read_sweeps(given.sweeps) if s.phase == "main" and s.kernel == "plain"]
    stacks = ("vllm", "sglang")
    print("| shape | tuned | us | off the best | over vLLM | over SGLang |\n|---|---|--:|--:|--:|--:|", flush=True)
    found = []
    for sweep in sweeps:
        one = judged(sweep, chip, measurer, given.top)
        found.append(one)
        gains = " | ".join(f"{one.default_s[stack] / one.time_s:.2f}" for stack in stacks)
        print(f"| {one.shape} | {one.tuned.config} | {one.time_s * 1e6:,.0f} | {100 * one.off:.1f}% | {gains} |",
              flush=True)  # fmt: skip
        if given.out is not None:  # as far as it got, should it be cut off
            rows = [{"shape": f.shape, "config": astuple(f.tuned.config), "time_s": f.time_s, "best_s": f.best_s,
                     "best": astuple(f.best), **{f"{s}_s": f.default_s[s] for s in stacks},
                     "picked_at_s": f.tuned.measured_s, "predicted_s": f.tuned.predicted_s} for f in found]  # fmt: skip
            given.out.write_text(json.dumps({"shapes": rows, "summary": summary(found, stacks)}, indent=1) + "\n")
    print(json.dumps({name: round(value, 4) for name, value in summary(found, stacks).items()}, indent=1))


if __name__ == "__main__":
    main()
