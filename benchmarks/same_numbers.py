"""Do two commits give the same numbers? Random calls of every op, models, traced steps and diagnoses, asked of both.

    python benchmarks/same_numbers.py main~20                 # against the working tree
    python benchmarks/same_numbers.py main~20 main -o answers # two commits; answers are kept and reused

Every question goes through the command line, whose names are a contract, so the script runs on old commits too. Prints
where answers differ by more than 1e-9 of their size, and exits 1 if any do.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-9
GPUS = (
    "h200_sxm", "h100_sxm", "a100_sxm", "b200_sxm", "l40s", "l40", "rtx_pro_6000_server", "v100_sxm", "h20", "gb200",
    "rtx_4090", "mi300x",
)  # fmt: skip
CALLS = 20_000
PROFILES = ("llama_8b_4_layers_decode", "llama_8b_4_layers_prefill", "planted_faults", "planted_faults_more",
            "planted_waves")  # fmt: skip


def random_calls(count: int, seed: int = 0, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Examples of every op, or of some, with other sizes and words, where these make a call. Some GPUs refuse some."""
    from kernelcast.errors import KernelcastError
    from kernelcast.kernels.base import REGISTRY, parameters_of
    from kernelcast.kernels.base import kernel as made

    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    ops = itertools.cycle(only or sorted(REGISTRY))
    while len(found) < count:
        kernel = REGISTRY[next(ops)]
        call: dict[str, Any] = {"op": kernel.op, **draw.choice(kernel.examples)}
        for spec in parameters_of(kernel).values():
            value = call.get(spec.name)
            if spec.kind == "size" and isinstance(value, int) and value > 1:
                grain = draw.choice((1, 8, 64))
                call[spec.name] = max(1, int(value * 2 ** draw.uniform(-4, 2)) // grain * grain)
            elif spec.kind == "choice" and draw.random() < 0.5:
                call[spec.name] = draw.choice([*spec.options, None])
            elif spec.kind == "flag" and draw.random() < 0.3:
                call[spec.name] = draw.random() < 0.5
        with contextlib.suppress(KernelcastError):
            made(**call)
            found.append({"gpu": draw.choice(GPUS), **call})
    return found


def write_calls(calls: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, list(dict.fromkeys(name for call in calls for name in call)))
        rows.writeheader()
        for call in calls:
            rows.writerow({k: json.dumps(v) if isinstance(v, list | tuple) else v for k, v in call.items()})


def infer_settings() -> list[list[str]]:
    plain = [
        ["infer", model, "--gpu", gpu, "--stack", stack, "--batch", batch, "--input-len", "1000", "--output-len", "64"]
        for model, gpu, stack, batch in itertools.islice(
            zip(
                itertools.cycle(("llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-9b", "deepseek-v2-lite", "qwen2.5-7b",
                                 "gpt-oss-20b", "opt-6.7b")),
                itertools.cycle(("h200_sxm", "h100_sxm", "b200_sxm", "l40s", "rtx_pro_6000_server")),
                itertools.cycle(("vllm", "sglang", "trtllm", "torch")),
                itertools.cycle(("1", "8", "31")),
                strict=False,
            ),
            38,
        )
    ]  # fmt: skip
    more = """
        llama-3.1-70b --gpu h100_sxm --tp 4 --batch 16 | llama-3.1-70b --gpu h200_sxm --tp 2 --pp 2 --micro-batches 2
        llama-3.1-405b --gpu b200_sxm --tp 8 --dtype fp8 --kv-dtype fp8 | deepseek-v3 --gpu b200_sxm --tp 8 --ep 8
        deepseek-v3 --gpu h200_sxm --dp 8 --ep 8 --batch 64 | mixtral-8x7b --gpu h100_sxm --tp 2 --skew 1.2
        qwen3-next-80b-a3b --gpu h200_sxm --tp 2 | llama-3.1-8b --gpu h200_sxm --chunk 512 --input-len 3000
        llama-3.1-8b --gpu h200_sxm --draft-tokens 3 --draft-model llama-3.2-1b | llama-3.1-8b --gpu h200_sxm --cached 9
        llama-3.1-8b --gpu a100_sxm --dtype int4 | llama-3.1-8b --gpu h200_sxm --set dram_bytes_per_s=7e12
        llama-3.1-8b --gpu h200_sxm --predictor generic | llama-3.1-8b --gpu h200_sxm --predictor roofline
        llama-3.1-8b --gpu h200_sxm --tp 2 --sequence-parallel | bert-large --gpu l40s --batch 4 --input-len 384
        llama-3.1-8b --gpu b200_sxm --dtype nvfp4 | llama-3.1-8b --gpu mi300x | gpt2-xl --gpu v100_sxm --stack torch
        llama-3.1-8b --gpu l40 --batch 16 --input-len 2048 | llama-3.1-8b --gpu h200_sxm --batch 32 --input-len 4096
        llama-3.1-8b --gpu h200_sxm --tp 3 | llama-3.1-70b --gpu l40s
    """
    return plain + [["infer", *words.split()] for line in more.strip().splitlines() for words in line.split("|")]


def trace_settings() -> list[list[str]]:
    lines = """
        gpt2 --gpu h200_sxm --mode training --batch 4 | gpt2 --gpu h200_sxm --batch 4 | gpt2 --gpu v100_sxm --dtype fp16
        gpt2 --gpu h200_sxm --mode training --compile | gpt2 --gpu h200_sxm --graph | gpt2 --gpu a100_sxm --dtype fp32
        gpt2 --gpu h100_sxm --mode training --dtype tf32 | gpt2 --gpu l40 --mode training --batch 8 --seq 1024
        gpt2 --gpu h200_sxm --mode training --dp 8 --zero 1 | gpt2 --gpu h200_sxm --mode training --dp 4 --zero 3
        gpt2 --gpu h100_sxm --mode training --tp 2 | gpt2 --gpu h100_sxm --mode training --tp 4 --sequence-parallel
        gpt2 --gpu h100_sxm --mode training --pp 2 --micro-batches 4 | bert-base --gpu h200_sxm --mode training
        gpt2 --gpu h100_sxm --mode training --pp 2 --micro-batches 4 --schedule interleaved --virtual-stages 2
        gpt2 --gpu b200_sxm --mode training --pp 4 --micro-batches 8 --schedule gpipe --dp 2
        gpt2 --gpu h200_sxm --mode training --checkpointing | gpt2 --gpu h200_sxm --mode training --optimizer sgd
        gpt2 --gpu h200_sxm --mode training --optimizer adamw-foreach | gpt2 --gpu h200_sxm --attention math
        bert-base --gpu l40s --batch 8 --seq 128 | llama-3.2-1b --gpu h200_sxm --seq 2048
        llama-3.2-1b --gpu h200_sxm --mode training --batch 2 --seq 1024 | qwen2.5-0.5b --gpu a100_sxm --mode training
        qwen2.5-0.5b --gpu h200_sxm --batch 8 | qwen3-0.6b --gpu rtx_4090 | gemma-3-1b --gpu h200_sxm
        opt-125m --gpu t4 --dtype fp16 --mode training | gpt2 --gpu h200_sxm --predictor generic --mode training
        gpt2 --gpu h200_sxm --set dram_bytes_per_s=9.6e12 | olmoe-1b-7b --gpu h200_sxm --seq 256
    """
    return [["trace", *words.split()] for line in lines.strip().splitlines() for words in line.split("|")]


def diagnose_settings() -> list[list[str]]:
    folder = "validation/profiles"
    plain = [["diagnose", f"{folder}/{name}.json.gz"] for name in PROFILES]
    return [
        *plain,
        ["diagnose", f"{folder}/ncu_metrics.csv", "--gpu", "h200_sxm"],
        ["diagnose", f"{folder}/planted_faults.json.gz", "--dtype", "fp32"],
        ["diagnose", f"{folder}/planted_faults.json.gz", "--predictor", "generic"],
        ["diagnose", f"{folder}/llama_8b_4_layers_prefill.json.gz", "--gpu", "h100_sxm"],
        ["diagnose", f"{folder}/llama_8b_4_layers_decode.json.gz", "--cache", "warm"],
    ]


def answer(folder: Path, only: list[str]) -> None:
    """Put every question of ``folder`` to the kernelcast that Python finds; runs in the tree that is asked."""
    from kernelcast.cli import main

    def run(*words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(words))
        return code, out.getvalue(), err.getvalue()

    if "kernels" in only:
        code, _, said = run("kernels", str(folder / "calls.csv"), "--skip-bad", "-o", str(folder / "kernels.jsonl"))
        assert code == 0, said
    for kind, settings in (("infer", infer_settings()), ("trace", trace_settings()), ("diagnose", diagnose_settings())):
        if kind not in only:
            continue
        told = []
        for words in settings:
            code, out, err = run(*words, "--json")
            told.append({"asked": " ".join(words), "code": code, "said": json.loads(out) if code == 0 else err})
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ; keys that only the new answer has are none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            yield from differences(value, new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{at}]")
    elif isinstance(old, int | float) and isinstance(new, int | float):
        if not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-15):
            yield path, old, new
    elif old != new:
        yield path, old, new


def answers(commit: str, calls: Path, out: Path, only: list[str]) -> Path:
    """The folder with a commit's answers ("": of the working tree), made where it is not there."""
    folder = out / (commit or "working-tree")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls.csv").write_text(calls.read_text())
    wanted = only if not commit else [kind for kind in only if not (folder / f"{kind}.jsonl").exists()]
    if not wanted:
        return folder
    tree = ROOT
    if commit:
        tree = out / f"tree-{commit}"
        if not tree.exists():
            subprocess.run(["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True)
    started = [  # one process a kind, so that both cores have work
        subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--answer", str(folder), "--only", kind],
                         cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "src")})
        for kind in wanted
    ]  # fmt: skip
    if any(process.wait() for process in started):
        sys.exit(f"{commit or 'the working tree'} did not answer")
    return folder


def compare(old: Path, new: Path, kind: str) -> int:
    rows = [[json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()] for folder in (old, new)]
    assert len(rows[0]) == len(rows[1]), f"{kind}: {len(rows[0])} and {len(rows[1])} answers"
    different, leaves = [], Counter[str]()
    for one, other in zip(*rows, strict=True):
        found = list(differences(one, other))
        if found:
            name = one.get("asked") or f"{one['op']} on {one['gpu']}"
            different.append((name, found))
            leaves.update(path.split("[")[0] for path, _, _ in found)
    print(f"{kind:9} {len(rows[0]):6,} answers, {len(different):,} differ  {dict(leaves.most_common(6)) or ''}")
    for name, found in different[:12]:
        path, was, now = found[0]
        print(
            f"    {name}: {path} was {str(was)[:80]}, is {str(now)[:80]}" + (f" (+{len(found) - 1})" * (len(found) > 1))
        )
    return len(different)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="commit")
    parser.add_argument("new", nargs="?", default="", help="commit; default: the working tree")
    parser.add_argument("-o", "--out", type=Path, help="folder that keeps answers of commits")
    parser.add_argument("--only", action="append", choices=("kernels", "infer", "trace", "diagnose"))
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    only = given.only or ["kernels", "infer", "trace", "diagnose"]
    if given.answer:
        answer(given.answer, only)
        return
    if not given.old:
        parser.error("which commit to compare with?")
    with tempfile.TemporaryDirectory() as temporary:
        out = (given.out or Path(temporary)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        calls = out / "calls.csv"
        if not calls.exists():
            write_calls(random_calls(CALLS), calls)
        old, new = (answers(commit, calls, out, only) for commit in (given.old, given.new))
        sys.exit(sum(compare(old, new, kind) for kind in only) > 0)


if __name__ == "__main__":
    main()
