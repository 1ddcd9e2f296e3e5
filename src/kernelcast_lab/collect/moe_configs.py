"""Sweep Triton configs of MoE layers on this machine's GPU: ``kernelcast collect --family moe-config -o FILE.npz``.

Shapes of three models are swept over the whole space, with finals; of others over a random sample of it, to fit on.
Every config is compiled once, in processes of their own (a config that breaks the driver takes only its process along),
and checked against float32. A run goes on where the last one stopped.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from kernelcast.hardware import Gpu
from kernelcast.tune.configs import Config, MoeProblem, sglang_default, space, variant, vllm_default
from kernelcast_lab.data.config_sweeps import pack_sweeps

# experts, topk, hidden, inter of one GPU
TESTED = {
    "mixtral-8x7b-tp2": (8, 2, 4096, 7168),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3-tp8": (256, 8, 7168, 256),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 4096, 8192)
OTHERS = {
    "phi-3.5-moe": (16, 2, 4096, 6400), "dbrx": (16, 4, 6144, 10752), "qwen2-57b-a14b": (64, 8, 3584, 2560),
    "deepseek-v2-lite": (64, 6, 2048, 1408), "deepseek-v2": (160, 6, 5120, 1536), "olmoe": (64, 8, 2048, 1024),
    "llama4-scout": (16, 1, 5120, 8192), "glm4.5-air": (128, 8, 4096, 1408), "gpt-oss-20b": (32, 4, 2880, 2880),
    "mixtral-8x22b": (8, 2, 6144, 16384), "qwen3-235b": (128, 8, 4096, 1536), "minimax": (32, 2, 6144, 9216),
    "granite-3b": (40, 8, 1536, 512), "qwen2-moe": (60, 4, 2048, 1408), "deepseek-v3-ep": (32, 8, 7168, 2048),
    "qwen3-next": (512, 10, 2048, 512),
}  # fmt: skip
_MOST_WEIGHTS = 3.0e9  # elements of one layer
_CHUNK, _HOPELESS, _ROUNDS, _BEST = 24, 3.0, 15, 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """One shape to sweep with some configs."""

    phase: str  # main | train
    name: str
    problem: MoeProblem
    configs: tuple[Config, ...]

    @property
    def key(self) -> str:
        return f"{self.name}@{self.problem.tokens}"


def tasks(target: Gpu, train_shapes: int = 140, a_shape: int = 120, seed: int = 0) -> list[Task]:
    """The tested models' shapes with every config, then ``train_shapes`` of the others with ``a_shape`` each."""
    every, draw = space(target), random.Random(seed)
    results = []
    for tokens in TOKENS:
        for name, (experts, topk, hidden, inter) in TESTED.items():
            defaults = (vllm_default(tokens, experts), sglang_default(tokens, experts))
            problem = MoeProblem(tokens, hidden, inter, experts, topk)
            results.append(Task("main", name, problem, tuple(dict.fromkeys([*every, *defaults]))))
    seen: set[tuple[str, int, int]] = set()
    while len(seen) < train_shapes:
        name = draw.choice(sorted(OTHERS))
        experts, topk, hidden, whole = OTHERS[name]
        inter, tokens = whole // draw.choice((1, 2, 4, 8)), round(2 ** draw.uniform(0, 13))
        fits = inter >= 128 and inter % 64 == 0 and 3 * experts * inter * hidden <= _MOST_WEIGHTS
        if fits and (name, inter, tokens) not in seen:
            seen.add((name, inter, tokens))
            problem = MoeProblem(tokens, hidden, inter, experts, topk)
            results.append(
                Task("train", f"{name}-i{inter}", problem, tuple(draw.sample(every, min(a_shape, len(every)))))
            )
    return results


def collect(target: Gpu, out: Path, about: dict[str, Any], budget_s: float | None, say: Say) -> int:
    """Sweep, keep each shape as it is done, pack all at the end; how many shapes are in the file."""
    from kernelcast.collect.fused_moe import ConfigBench

    lines = out.with_suffix(".progress.jsonl")
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    done = {(r["phase"], r["shape"]) for r in records if r["kind"] == "shape"}
    left = [task for task in tasks(target) if (task.phase, task.key) not in done]
    variants = sorted({variant(c) for task in left for c in task.configs})
    good = compile_all(variants, out.with_suffix(".compile"))
    say(f"{len(good)} of {len(variants)} variants compiled and right")
    until = time.monotonic() + budget_s if budget_s else float("inf")
    with lines.open("a", buffering=1) as log:
        for task in left:
            if time.monotonic() > until:
                say("time is up: run the same command again to go on")
                break
            made = sweep(ConfigBench(task.problem), task, [c for c in task.configs if variant(c) in good])
            for record in made:
                log.write(json.dumps(record) + "\n")
            records += made
            best = min(row[6] + row[7] for row in made[0]["rows"])
            say(f"{task.key}: {len(made[0]['rows'])} configs, best {best * 1e6:.1f} us")
    pack_sweeps(records, out, about)
    return sum(r["kind"] == "shape" for r in records)


def sweep(bench: Any, task: Task, configs: Sequence[Config]) -> list[dict[str, Any]]:
    """The shape's record, and for a tested one its finals."""
    mixed = list(configs)
    random.Random(7).shuffle(mixed)  # so that heat and clocks do not go along with the block sizes
    best, rows = float("inf"), []
    for start in range(0, len(mixed), _CHUNK):
        part = mixed[start : start + _CHUNK]
        samples = dict(zip(part, bench.samples(part, 1), strict=True))
        best = min([best, *(sum(result[0]) for result in samples.values())])
        close = [c for c in part if sum(samples[c][0]) <= _HOPELESS * best]
        for c, result in zip(close, bench.samples(close, 2), strict=True):
            samples[c] += result
        rows += [[*astuple(c), *_medians(result), len(result)] for c, result in samples.items()]
    p = task.problem
    facts = {"phase": task.phase, "kernel": "plain", "shape": task.key, "name": task.name, "tokens": p.tokens,
             "experts": p.experts, "topk": p.topk, "hidden": p.hidden, "inter": p.inter, "dense": False,
             "routings": bench.rounds, "active": bench.active,
             "blocks": {bm: bench.blocks(bm) for bm in sorted({c.block_m for c in configs})}}  # fmt: skip
    shape = {"kind": "shape", "rows": rows, **facts}
    return (
        [shape] if task.phase != "main" else [shape, {"kind": "finals", **_finals(bench, rows, p), "shape": task.key}]
    )


def _medians(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of the first and of the second GEMM."""
    return statistics.median(first for first, _ in samples), statistics.median(second for _, second in samples)


def _finals(bench: Any, rows: list[list[Any]], p: MoeProblem) -> dict[str, Any]:
    """The best and the engines' defaults again, in turn, many rounds; whole layers of the best and the defaults."""
    best = [Config(*row[:6]) for row in sorted(rows, key=lambda row: row[6] + row[7])[:_BEST]]
    known = {Config(*row[:6]) for row in rows}
    defaults = [c for c in (vllm_default(p.tokens, p.experts), sglang_default(p.tokens, p.experts)) if c in known]
    chosen = list(dict.fromkeys([*best, *defaults]))
    results = []
    for c, samples in zip(chosen, bench.samples(chosen, _ROUNDS), strict=True):
        total = sorted(map(sum, samples))
        first_s, second_s = _medians(samples)
        results.append({"kernel": "plain", "config": astuple(c), "first_s": first_s, "second_s": second_s,
                      "total_s": statistics.median(total), "low_s": total[len(total) // 4],
                      "high_s": total[3 * len(total) // 4]})  # fmt: skip
    layers = [["plain", *astuple(c), *bench.layer_s(c)] for c in dict.fromkeys([best[0], *defaults])]
    return {"rows": results, "layers": layers}


# ------------------------------------------------------------------------------------------------------------ compiling
def compile_all(variants: Sequence[tuple[int, ...]], folder: Path) -> set[tuple[int, ...]]:
    """Those that compile, run and are right; each worker fills Triton's cache, from which this process reads."""
    folder.mkdir(parents=True, exist_ok=True)
    good: set[tuple[int, ...]] = set()
    missing = list(variants)
    for attempt in range(3):  # a worker that died leaves the rest of its list to the next
        jobs = []
        workers = min(os.cpu_count() or 1, len(missing))
        for i in range(workers):
            todo, done = folder / f"{attempt}_{i}.todo", folder / f"{attempt}_{i}.done"
            todo.write_text(json.dumps(missing[i::workers]))
            done.write_text("")
            jobs.append((subprocess.Popen([sys.executable, "-m", __name__, str(todo), str(done)]), done))
        seen: set[tuple[int, ...]] = set()
        for job, done in jobs:
            job.wait()
            for line in done.read_text(encoding="utf-8").splitlines():
                key, right = json.loads(line)
                seen.add(tuple(key))
                if right:
                    good.add(tuple(key))
        missing = [v for v in missing if v not in seen]
        if not missing:
            break
    return good


def _worker(todo: Path, done: Path) -> None:
    from kernelcast.collect.fused_moe import checked

    with done.open("a", buffering=1) as out:
        for block_m, block_n, block_k, warps, stages in json.loads(todo.read_text(encoding="utf-8")):
            key = (block_m, block_n, block_k, warps, stages)
            out.write(json.dumps([key, False]) + "\n")  # stands if the process ends here
            try:
                right = checked(Config(block_m, block_n, block_k, 4, warps, stages))
            except Exception as error:
                if "CUDA" in str(error):  # the context is gone
                    os._exit(3)
                right = False
            out.write(json.dumps([key, right]) + "\n")


if __name__ == "__main__":
    _worker(Path(sys.argv[1]), Path(sys.argv[2]))
