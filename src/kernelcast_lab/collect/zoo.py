"""Measure the zoo: models of many architectures, each a function in a file beside cases.toml. Needs torch and CUDA."""

from __future__ import annotations

import gc
import gzip
import importlib.util
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kernelcast.errors import KernelcastError
from kernelcast.files import complete
from kernelcast.tracing.run import DTYPES, OPTIMIZERS
from kernelcast_lab.collect.run import WARM_UPS, environment, time_steps, trace_events
from kernelcast_lab.collect.steps import Step
from kernelcast_lab.collect.store import Record, error_line, json_lines
from kernelcast_lab.collect.trace import PHASE, summarise
from kernelcast_lab.validate.kernels import Case, read_cases

Say = Callable[[str], None]


def measure_zoo(folder: Path, out: Path, only: Sequence[str], budget_s: float, say: Say) -> tuple[int, int]:
    """Lines into ``out`` until the budget is spent: wall times of all cases first, then their kernels, for a profiler
    that ran once in a process slows every launch after it. What the file has is left out. How many lines were
    written, and how many of them say what failed."""
    start, device = time.monotonic(), torch.device("cuda", 0)
    done = {(Case(**line["case"]), line["part"]) for line in json_lines(out) if "case" in line}
    cases = [case for case in read_cases(folder) if not only or any(part in case.id for part in only)]
    measured = failed = 0
    with out.open("a") as file:
        file.write(json.dumps({"environment": environment()}) + "\n")
        for part, measure in _PARTS.items():
            for case in (case for case in cases if (case, part) not in done):
                begin = time.monotonic()
                if begin - start > budget_s:
                    return measured, failed
                try:
                    result = measure(_made(case, folder, device), device)
                except Exception as error:  # any failure of a case is a fact about it; the others go on
                    result = {"error": error_line(error)}
                file.write(json.dumps({"case": asdict(case), "part": part, **result}) + "\n")
                file.flush()
                measured, failed = measured + 1, failed + ("error" in result)
                message = result.get("error") or ", ".join(f"{name} {result[name]}" for name in list(result)[:2])
                say(f"{case.id}: {message} ({time.monotonic() - begin:.1f} s)")
                gc.collect()
                torch.cuda.empty_cache()
    return measured, failed


def pack_zoo(lines: Path, packed: Path) -> tuple[int, int]:
    """The measured lines in the form that is kept: the last of each part of each case, joined; how many cases have
    all parts, and how many do not."""
    result: list[Record] = list(json_lines(lines))
    if not result:
        raise KernelcastError(f"{lines}: no measured models")
    last: dict[Case, dict[str, Record]] = {}
    for line in (line for line in result if "case" in line):
        last.setdefault(Case(**line["case"]), {})[line["part"]] = line
    good = [
        {key: value for part in parts.values() for key, value in part.items() if key != "part"}
        for parts in last.values()
        if set(parts) == set(_PARTS) and not any("error" in part for part in parts.values())
    ]
    machine: Record = next((line["environment"] for line in reversed(result) if "environment" in line), {})
    text = json.dumps({"environment": machine, "cases": good}, separators=(",", ":"))
    with complete(packed) as part:
        part.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return len(good), len(last) - len(good)


def _made(case: Case, folder: Path, device: torch.device) -> Step:
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with device:
        made = _built(case, folder)
    return _step(case, *made)


def _timed(step: Step, device: torch.device) -> Record:
    wall, gpu, repeats = time_steps(step, device)
    return {
        "wall_ms": [wall.median_ms, wall.low_ms, wall.high_ms],
        "gpu_ms": gpu.median_ms,
        "repeats": repeats,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _profiled(step: Step, device: torch.device) -> Record:
    for _ in range(WARM_UPS):
        step()
    profile = summarise(trace_events(step, device))
    return {
        "kernel_ms": profile.kernel_sum_ms,
        "kernels": profile.kernel_calls,
        "phase_ms": profile.phase_ms,
        "ops": [[row.phase, row.op, row.shapes, row.kernel, row.calls, round(row.total_us, 2)] for row in profile.ops],
    }


_PARTS: dict[str, Callable[[Step, torch.device], Record]] = {"wall": _timed, "kernels": _profiled}


def _built(case: Case, folder: Path) -> tuple[Any, ...]:
    """What the function of the case gives, made for real."""
    spec = importlib.util.spec_from_file_location(f"zoo_{Path(case.file).stem}", folder / case.file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, case.function)
    known = {"batch": case.batch, "seq": case.seq, "dtype": DTYPES[case.dtype], "mode": case.mode}
    return function(**{name: known[name] for name in inspect.signature(function).parameters})


def _step(case: Case, model: Any, inputs: Any, loss: Any = None) -> Step:
    """As ``kernelcast.trace`` runs it."""

    def call() -> Any:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, Sequence) else model(inputs)

    if case.mode == "inference":
        model.eval()
        return lambda: torch.no_grad()(call)()
    model.train()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    mark = torch.profiler.record_function

    def step() -> object:
        with mark(PHASE + "forward"):
            out = call()
            result = loss(out) if loss is not None else getattr(out, "loss", None)
            result = out.mean() if result is None else result
        with mark(PHASE + "backward"):
            result.backward()
        with mark(PHASE + "optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return None

    return step
