"""Measure the zoo: models of all kinds, each a function of a file beside the list of cases. Needs torch and CUDA."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kernelcast.tracing.precision import DTYPES, OPTIMIZERS
from kernelcast.validate.cases import Case
from kernelcast_lab.models.run import time_steps, trace_events
from kernelcast_lab.models.steps import Step
from kernelcast_lab.models.store import Record, one_line
from kernelcast_lab.models.trace import PHASE, summarise


def measure_zoo(
    cases: Sequence[Case], folder: Path, write: Callable[[Record], None], say: Callable[[str], None], budget_s: float
) -> None:
    """A record a case, until the budget is spent."""
    start, device = time.monotonic(), torch.device("cuda", 0)
    for case in cases:
        begin = time.monotonic()
        if begin - start > budget_s:
            say(f"{case.id}: no time left")
            continue
        try:
            found = _measured(case, folder, device)
        except Exception as error:  # any failure of a case is a fact about it; the others go on
            found = {"error": one_line(error)}
        write({"case": case.told, **found})
        told = found.get("error") or f"{found['wall_ms'][0]:.3f} ms, kernels {found['kernel_ms']:.3f} ms"
        say(f"{case.id}: {told} ({time.monotonic() - begin:.1f} s)")
        gc.collect()
        torch.cuda.empty_cache()


def _measured(case: Case, folder: Path, device: torch.device) -> Record:
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with device:
        made = _built(case, folder)
    step = _step(case, *made)
    wall, gpu, repeats = time_steps(step, device)
    profile = summarise(trace_events(step, device))
    return {
        "wall_ms": [wall.median_ms, wall.low_ms, wall.high_ms],
        "gpu_ms": gpu.median_ms,
        "repeats": repeats,
        "kernel_ms": profile.kernel_sum_ms,
        "kernels": profile.kernel_calls,
        "phase_ms": profile.phase_ms,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "ops": [[row.phase, row.op, row.shapes, row.kernel, row.calls, round(row.total_us, 2)] for row in profile.ops],
    }


def _built(case: Case, folder: Path) -> tuple[Any, ...]:
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
            found = loss(out) if loss is not None else getattr(out, "loss", None)
            found = out.mean() if found is None else found
        with mark(PHASE + "backward"):
            found.backward()
        with mark(PHASE + "optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return None

    return step
