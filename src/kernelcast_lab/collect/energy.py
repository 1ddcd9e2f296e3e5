"""Joules of whole models' steps on this machine's GPU: the check of the power model. Needs torch and transformers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernelcast.collect.power_meter import Nvml, measured
from kernelcast.collect.timing import Replays
from kernelcast_lab.collect.cases import Case, cases_of
from kernelcast_lab.collect.run import CudaRunner, captured, environment
from kernelcast_lab.collect.steps import make_step, set_precision

# Steps in a CUDA graph, as an engine runs them; training is launched by the host.
_POINTS = """
llama-3.1-8b | decode graph  | 1x1024 16x1024 64x1024 16x4096 64x4096
llama-3.1-8b | prefill graph | 1x512 1x2048 8x1024 4x4096
qwen3-4b     | decode graph  | 1x1024 16x4096 64x1024
qwen3-4b     | prefill graph | 1x512 1x2048 8x1024
gpt2-xl      | decode graph  | 1x1024 64x1024
gpt2-xl      | prefill graph | 1x512 8x1024
gpt2-xl      | training      | 4x512
llama-3.1-8b | training      | 4x512
"""


def energy_cases() -> list[Case]:
    """Two or three models, prefill, decode and training."""
    return [case for line in _POINTS.strip().splitlines() for case in cases_of(line)]


def collect(out: Path, seconds: float, say: Callable[[str], None]) -> tuple[int, int]:
    """Measures what the file lacks, a line each; how many were measured and how many failed."""
    begin = time.monotonic()
    meter, runner = Nvml(), CudaRunner(torch.device("cuda", 0))
    known = _known_cases(out)
    done = failed = 0
    with out.open("a") as file:
        file.write(json.dumps({"environment": environment()}) + "\n")
        for case in energy_cases():
            if case.id in known or time.monotonic() - begin + 6.0 > seconds:
                continue
            record: dict[str, Any] = {"id": case.id, **vars(case), "at_s": round(time.monotonic() - begin, 2)}
            try:
                record |= {"status": "ok", **_measured(case, runner, meter)}
                done += 1
            except Exception as error:  # of one case; the others go on
                record |= {"status": "failed", "error": " ".join(str(error).split())[:300]}
                failed += 1
            file.write(json.dumps(record) + "\n")
            file.flush()
            say(f"{case.id}: {record.get('power_w') or record.get('error')} W, {record.get('seconds_per_call')} s")
    return done, failed


def _known_cases(path: Path) -> set[str]:
    """Ids of the cases that a file has; lines that a kill left unfinished are skipped."""
    known = set()
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            known.add(str(json.loads(line).get("id")))
    return known


def _measured(case: Case, runner: CudaRunner, meter: Nvml) -> dict[str, Any]:
    runner._clear()
    set_precision(case.dtype)
    eager = make_step(runner._model_of(case), case, runner.device)
    step, launched = eager, "eager"
    if case.launch == "graph":
        try:
            step, launched = captured(eager), "graph"
        except RuntimeError:  # a model that synchronises with its device cannot be captured
            torch.cuda.synchronize()
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - start) / 3
    return measured(Replays(step, 1, step_s), meter, window_s=max(0.8, 4 * step_s)) | {
        "alone_s": step_s, "launched": launched,
    }  # fmt: skip
