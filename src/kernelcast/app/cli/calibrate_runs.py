"""Measured runs of ``kernelcast calibrate``: each forecast as its own command forecasts it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kernelcast.app.cli.progress import progress_bar
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu

if TYPE_CHECKING:
    from kernelcast.app.questions.service import ServiceChoice
    from kernelcast.collect.calibrate.run_files import CalibrationInput, RunRecord
    from kernelcast.collect.calibrate.scales import MeasuredRun
    from kernelcast.forecast.conditions import Conditions
    from kernelcast.serving.metrics import BenchResult


def measured_gpu(inputs: Iterable[CalibrationInput], benches: Iterable[BenchResult], wanted: Gpu | None) -> Gpu | None:
    """The GPU that runs were measured on: the one that is asked for, or the only one that they name."""
    said = {str(record.words["gpu"]): one.path for one in inputs for record in one.records if "gpu" in record.words}
    said |= {str(bench.server["gpu"]): bench.path for bench in benches if isinstance(bench.server.get("gpu"), str)}
    found = {gpu(name).id: path for name, path in said.items()}
    others = sorted(set(found) - ({wanted.id} if wanted else set()))
    if wanted and others:
        raise KernelcastError(f"{found[others[0]]} was measured on {others[0]}, not on {wanted.id}")
    if len(others) > 1:
        raise KernelcastError(f"measurements of {len(others)} GPUs ({', '.join(others)}): a calibration is of one")
    return wanted or (gpu(next(iter(said))) if said else None)


def forecast(
    inputs: Sequence[CalibrationInput], benches: Sequence[BenchResult], chip: Gpu, conditions: Conditions,
    service: ServiceChoice, model: str | None, given: set[str],
) -> list[MeasuredRun]:  # fmt: skip
    """Every run beside its forecast."""
    records = [record for one in inputs for record in one.records]
    steps = [record for record in records if record.kind == "step"]
    return [
        *_batches([record for record in records if record.kind == "batch"], chip, conditions),
        *(_steps(steps, chip, conditions) if steps else ()),
        *(_served(bench, chip, conditions, service, model, given) for bench in benches),
    ]


def _batches(records: Sequence[RunRecord], chip: Gpu, conditions: Conditions) -> list[MeasuredRun]:
    from kernelcast.collect.calibrate.run_files import static_batch
    from kernelcast.collect.calibrate.runs import batch_run
    from kernelcast.inference.infer import infer

    found = []
    for record in records:
        try:
            inferred = infer(*static_batch(record, chip), conditions)
        except KernelcastError as error:
            raise KernelcastError(f"{record.name}: {str(error).removeprefix(f'{record.name}: ')}") from None
        found.append(batch_run(record.name, inferred, record.measured))
    return found


def _served(
    bench: BenchResult, chip: Gpu, conditions: Conditions, service: ServiceChoice, model: str | None, given: set[str]
) -> MeasuredRun:
    from kernelcast.app.cli.replay import from_file
    from kernelcast.app.questions.service import chosen_service
    from kernelcast.collect.calibrate.runs import benchmark_run

    name, choice, _ = from_file(bench, model, replace(service, gpu=chip.id), given | {"gpu"})
    place = chosen_service(replace(choice, gpu=service.gpu or chip.id), name, bench.load)
    return benchmark_run(bench, place, conditions)


def _steps(records: Sequence[RunRecord], chip: Gpu, conditions: Conditions) -> list[MeasuredRun]:
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError("a step of a PyTorch model is traced: pip install 'kernelcast[torch]' (no GPU)")
    with progress_bar(transient=True) as task, TemporaryDirectory() as folder:
        told, found = task("tracing"), []
        for at, record in enumerate(records):
            told(at, len(records))
            try:
                found.append(_step(record, chip, conditions, Path(folder)))
            except KernelcastError as error:
                raise KernelcastError(f"{record.name}: {error}") from None
        return found


def _step(record: RunRecord, chip: Gpu, conditions: Conditions, folder: Path) -> MeasuredRun:
    from kernelcast.app.cli.trace import traced
    from kernelcast.collect.calibrate.runs import step_run
    from kernelcast.tracing.build import TraceRequest
    from kernelcast.tracing.fusion import fuse
    from kernelcast.training.step import STEP, run_step

    words: dict[str, Any] = dict(record.words)
    what = str(words["model"])
    if record.config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(record.config), encoding="utf-8")
        what = str(path)
    names = ("batch", "seq", "dtype", "mode", "checkpointing", "precision", "cache", "logits")
    asked = TraceRequest(what, **{name: words[name] for name in names if name in words}, image=words.get("image_size"))
    graph = words.get("graph", False)
    trace = traced(
        asked, words.get("optimizer", "adamw"), words.get("accumulate", 1), words.get("attention", "fused"), graph
    )
    step = run_step(
        fuse(trace) if words.get("compile") else trace, chip, replace(conditions, input_rotation=STEP.input_rotation),
        tf32=words.get("dtype") == "tf32", graph=graph, on=words.get("host", "server"),
    )  # fmt: skip
    return step_run(record.name, step, record.measured)
