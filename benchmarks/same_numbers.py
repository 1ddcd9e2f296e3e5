"""Do two commits give the same numbers? Random calls of every op, static batches, simulations, plans, comparisons,
traces, training on several GPUs, power caps, calibrations and diagnoses, asked of both.

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
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-9
CLOCK = ("seconds", "settings_per_s")  # how long a search or a sweep took
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
    from kernelcast.ops.base import REGISTRY, parameters_of
    from kernelcast.ops.base import kernel as made

    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    ops = itertools.cycle(only or sorted(REGISTRY))
    while len(found) < count:
        kernel = REGISTRY[next(ops)]
        call: dict[str, Any] = {"op": kernel.op, **draw.choice(kernel.examples)}
        for spec in parameters_of(kernel).values():
            value, form = (
                call.get(spec.name),
                getattr(spec, "type", None) or getattr(spec, "kind", None),
            )  # older commits: kind
            if form == "size" and isinstance(value, int) and value > 1:
                grain = draw.choice((1, 8, 64))
                call[spec.name] = max(1, int(value * 2 ** draw.uniform(-4, 2)) // grain * grain)
            elif form == "choice" and draw.random() < 0.5:
                call[spec.name] = draw.choice([*spec.options, None])
            elif form == "flag" and draw.random() < 0.3:
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
    return plain + [["infer", *words.split()] for words in _settings(more)]


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
    return [["trace", *words.split()] for words in _settings(lines)]


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


def simulate_settings() -> list[list[str]]:
    lines = """
        llama-3.1-8b --gpu h100_sxm --request-rate 8 | llama-3.1-8b --gpu h100_sxm --max-concurrency 32
        llama-3.1-8b --gpu l40s --request-rate 4 --input-len 1024 --output-len 128 --dtype fp8 --kv-dtype fp8
        llama-3.1-70b --gpu h100_sxm --tp 4 --stack sglang --max-concurrency 64 --goodput ttft:500 --goodput tpot:30
        llama-3.1-70b --gpu h200_sxm --tp 4 --prefill-replicas 2 --replicas 2 --request-rate 12
        llama-3.1-8b --gpu h200_sxm --stack trtllm --request-rate 20 --max-num-seqs 64 --max-num-batched-tokens 4096
        qwen3-30b-a3b --gpu h200_sxm --request-rate 10 | qwen3-30b-a3b --gpu h200_sxm --tp 2 --ep 2 --max-concurrency 16
        deepseek-v3 --gpu h200_sxm --stack sglang --dp 8 --ep 8 --max-concurrency 64 --input-len 2000
        llama-3.1-8b --gpu rtx_4090 --request-rate 2 --dtype fp8 | llama-3.1-8b --gpu mi300x --request-rate 4
        llama-3.1-8b --gpu h100_sxm --request-rate 8 --draft-tokens 3 --draft-model llama-3.2-1b
        llama-3.1-8b --gpu h100_sxm --request-rate 6 --arrivals bursty --burst-s 5 --pause-s 15
        llama-3.1-8b --gpu h100_sxm --request-rate 30 --num-gpu-blocks-override 600 --no-enable-chunked-prefill
        llama-3.1-8b --gpu h100_sxm --replicas 2 --router cache_aware --num-groups 4 --prompts-per-group 20
        llama-3.1-8b --gpu h100_sxm --stages 5x6,10x6 --no-intervals | gpt-oss-20b --gpu b200_sxm --request-rate 16
        llama-3.1-8b --gpu h100_sxm --pp 2 --request-rate 6 | llama-3.1-8b --gpu h100_sxm --request-rate 0
        llama-3.1-70b --gpu l40s --request-rate 1
    """
    return [["simulate", *words.split(), "--num-prompts", "100"] for words in _settings(lines)]


def plan_settings() -> list[list[str]]:
    lines = """
        --tpot-p99 30ms --ttft-p99 500ms --request-rate 10 --gpus h100_sxm,l40s --max-gpus 4
        --tpot-p99 30ms --request-rate 60 --gpus l40s --max-gpus 2 --disaggregated no
        --ttft-p90 1s --e2el-p99 20s --request-rate 5 --gpus h200_sxm --max-gpus 2 --dtype fp8 | --tpot-mean 12ms
        --tpot-p99 25ms --request-rate 8 --gpus h100_sxm,h200_sxm --max-gpus 4 --stack vllm,sglang --price h100_sxm=2.5
        --ttft-mean 2s --tpot-mean 50ms --max-concurrency 32 --gpus a100_sxm --max-gpus 4 --sure
        --tpot-p90 20ms --request-rate 12 --gpus b200_sxm --max-gpus 2 | --tpot-p99 1ms --request-rate 4 --gpus l40s
        --tpot-p99 40ms --request-rate 6 --gpus h100_sxm --max-gpus 4 --tp 1,2 --max-num-seqs 64 --price-kind reserved
        --ttft-p50 300ms --request-rate 9 --gpus h100_sxm --max-gpus 4 --disaggregated yes
    """
    return [
        ["plan", "llama-3.1-8b", *words.split(), "--num-prompts", "120", "--input-len", "1024", "--output-len", "128"]
        for words in _settings(lines)
    ]


def compare_settings() -> list[list[str]]:
    lines = """
        llama-3.1-8b --gpus l40s,a100_sxm,h100_sxm --tpot 25ms | mixtral-8x7b --gpus h100_sxm,b200_sxm --batch 8
        llama-3.3-70b --gpus h100_sxm,h200_sxm,b200_sxm,l40s --tpot 60ms | llama-3.3-70b --gpus all --batch 16
        llama-3.1-8b --gpus h100_sxm --batch 8 --what-if dram_bytes_per_s*1.5 --what-if sm_count*1.2
        llama-3.1-8b --gpus h100_sxm,l40s --rate 40 --input-len 1024 --output-len 256 --formats all
        llama-3.3-70b --gpus mi300x,b200_sxm,h100_sxm,a2 --ttft 1s --tpot 60ms --by tokens_per_s
        llama-3.1-8b --gpus h200_sxm --batch 8 --sensitivity | qwen3-235b-a22b --gpus h200_sxm,b200_sxm --rate 2
        --training llama-3.2-1b --gpus l40s,b200_sxm,h100_sxm --batch 4 --seq 2048 --tokens 1e12
        --training gpt2 --gpus h100_sxm --batch 8 --dp 8 --zero 1
    """
    return [["compare", *words.split()] for words in _settings(lines)]


def more_settings() -> list[list[str]]:
    """Power caps, lasting calls, evidence, lists of what there is, disaggregated batches, calibrations, sweeps."""
    lines = """
        infer llama-3.1-8b --gpu h200_sxm --batch 8 --input-len 2048 --power-cap 450
        infer qwen3-30b-a3b --gpu h200_sxm --batch 8 --power-cap 300 | kernel gemm --m 8192 --n 8192 --k 8192 --gpu l40s
        infer gpt2-xl --gpu h100_sxm --stack torch --power-cap 350 --batch 32
        kernel gemm --m 8192 --n 8192 --k 8192 --gpu h200_sxm --power-cap 350 | gpu h200_sxm | gpus | ops | models
        kernel attention --batch 8 --q-len 1 --kv-len 4096 --q-heads 32 --kv-heads 8 --head-dim 128 --gpu rtx_3090
        evidence --gpu h200_sxm --op gemm | evidence --gpu rtx_4090 | evidence --stack vllm --op attention
        infer deepseek-v3 --gpu h200_sxm --stack sglang --kv-dtype fp8 --prefill-workers 4 --prefill-tp 8 --prefill-batch 4 --decode-workers 1 --dp 16 --ep 16 --batch 512 --input-len 4096 --output-len 512
        infer qwen3-vl-8b --gpu h100_sxm --batch 8 --input-len 256 --images 2 --image-size 1024
        infer deepseek-v3 --gpu h200_sxm --tp 8 --batch 4 --draft-tokens 3 --draft-model mtp
        infer deepseek-v3.2 --gpu b200_sxm --tp 8 --stack sglang --batch 32 --input-len 8192
        infer glm-5-nvfp4 --gpu b200_sxm --tp 8 --stack trtllm | infer kimi-k2.5 --gpu b200_sxm --tp 8 --batch 16
        calibrate CALIBRATION.csv --gpu h200_sxm -o CALIBRATION.safetensors
        kernel gemm --m 700 --n 4096 --k 4096 --gpu h200_sxm --calibration CALIBRATION.safetensors
        infer llama-3.1-8b --gpu h200_sxm --batch 8 --calibration CALIBRATION.safetensors
        calibrate RUNS.json --gpu h200_sxm -o RUNS.safetensors
        infer llama-3.1-8b --gpu h200_sxm --batch 16 --calibration RUNS.safetensors
        simulate llama-3.1-8b --gpu h200_sxm --request-rate 8 --num-prompts 60 --calibration RUNS.safetensors
        sweep SWEEP.toml --out sweep --fresh --workers 1 --top 50 --by tokens_per_s_per_gpu
    """  # noqa: E501
    return [words.split() for words in _settings(lines)]


def _settings(lines: str) -> list[str]:
    return [words for line in lines.strip().splitlines() for words in line.split("|")]


def write_inputs(folder: Path) -> None:
    """Files that the questions of ``more_settings`` name: invented measurements, and a small sweep."""
    draw = random.Random(1)
    rows = [f"gemm,bf16,{2 ** draw.randrange(4, 13)},{256 * draw.randrange(4, 33)},4096,{draw.uniform(9, 400):.3f}"
            for _ in range(40)]  # fmt: skip
    (folder / "CALIBRATION.csv").write_text("\n".join(["op,dtype,m,n,k,measured_us", *rows, ""]))
    runs = [{"model": "llama-3.1-8b", "batch": batch, "input_len": 1024, "output_len": 64,
             "tpot_s": 0.006 + 1e-5 * batch} for batch in (1, 8, 32)]  # fmt: skip
    (folder / "RUNS.json").write_text(json.dumps(runs))
    (folder / "SWEEP.toml").write_text(
        'model = ["llama-3.1-8b", "qwen3-30b-a3b"]\ngpu = ["h100_sxm", "l40s"]\nbatch = [1, 16]\ntp = [1, 2]\n'
        'input_len = 1024\noutput_len = 64\nstack = ["vllm", "sglang"]\n'
    )


SETTINGS = {
    "infer": infer_settings, "simulate": simulate_settings, "plan": plan_settings, "compare": compare_settings,
    "trace": trace_settings, "diagnose": diagnose_settings, "more": more_settings,
}  # fmt: skip


def answer(folder: Path, only: list[str]) -> None:
    """Put every question of ``folder`` to the kernelcast that Python finds; runs in the tree that is asked."""
    room = "kernelcast.app.cli" if find_spec("kernelcast.app") else "kernelcast.cli"  # where 0.2.0 and earlier have it
    main = import_module(room).main

    def run(*words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(list(words))
            except SystemExit as stop:
                code = int(stop.code or 0)
        return code, out.getvalue(), err.getvalue()

    if "kernels" in only:
        code, _, errors = run("kernels", str(folder / "calls.csv"), "--skip-bad", "-o", str(folder / "kernels.jsonl"))
        assert code == 0, errors
    for name in only:
        if name == "kernels":
            continue
        answered = []
        with contextlib.ExitStack() as stack:
            if name == "more":  # which writes files
                write_inputs(folder)
                stack.enter_context(contextlib.chdir(folder))
            for words in SETTINGS[name]():
                code, out, err = run(*words, "--json")
                said: Any = json.loads(out) if code == 0 else err
                answered.append({"asked": " ".join(words), "code": code, "said": said})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ; keys that only the new answer has are none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            if key not in CLOCK:
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
    parser.add_argument("--only", action="append", choices=("kernels", *SETTINGS))
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    only = given.only or ["kernels", *SETTINGS]
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
