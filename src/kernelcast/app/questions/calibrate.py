"""A calibration of one GPU: from single calls, and from whole runs, each forecast as its own command forecasts it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from kernelcast.app.questions.parameters import argument, option
from kernelcast.app.questions.replay import with_server
from kernelcast.app.questions.shared import Cache, SkipBad, model_names, resolve_conditions, resolve_gpu
from kernelcast.app.questions.simulate import ServiceParameters
from kernelcast.app.questions.trace import step_conditions, trace_step
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, gpu

if TYPE_CHECKING:
    from kernelcast.collect.calibrate.run_files import CalibrationInput, RunRecord
    from kernelcast.collect.calibrate.scales import MeasuredRun, RunErrors
    from kernelcast.forecast import Calibration
    from kernelcast.forecast.conditions import Conditions
    from kernelcast.forecast.table import BadRows
    from kernelcast.serving.metrics import BenchResult

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class CalibrateQuestion(ServiceParameters):
    """Measurements of one GPU; the parameters of a deployment and an engine are those of a benchmark's server."""

    command: ClassVar[str] = "calibrate"

    measured: Annotated[
        list[Path],
        argument("MEASURED...", "tables of calls (.csv, .parquet, .jsonl: op, its parameters, dtype, stack, "
                 "latency_us); runs (.json, .jsonl: the parameters of infer or trace, and ttft_s, tpot_s, …); results "
                 "of servers' benchmarks"),
    ]  # fmt: skip
    output: Annotated[Path, option("-o", metavar="FILE", help="where to write the calibration")]
    model: Annotated[
        str | None,
        option(metavar="NAME", help="that a benchmark served; default: the file's", values=model_names),
    ] = None
    skip_bad: SkipBad = False
    cache: Cache = "model"

    def answer(
        self, inputs: list[CalibrationInput], given: set[str], report: Progress = lambda done, total: None
    ) -> tuple[Calibration, BadRows | None, RunErrors | None]:
        """Single calls first; runs scale what these leave. ``given``: parameters that a benchmark's file does not
        replace."""
        from kernelcast.collect.calibrate.scales import calibrate_runs, empty_calibration
        from kernelcast.serving.bench import read_bench

        if self.calibration is not None:
            raise KernelcastError("a calibration is made of a predictor without one")
        conditions = resolve_conditions(None, self.cache, self.predictor, None, self.weights)
        tables = [file.path for file in inputs if file.content == "calls"]
        benches = [read_bench(file.path) for file in inputs if file.content == "bench"]
        wanted = resolve_gpu(self.gpu, self.set) if self.gpu is not None else None
        target = _measured_gpu(inputs, benches, wanted)
        calibration, bad = _of_calls(tables, target, conditions, self.skip_bad) if tables else (None, None)
        if len(tables) == len(inputs):
            assert calibration is not None
            return calibration, bad, None
        if target is None:
            if calibration is None:
                raise KernelcastError("which GPU was measured? give it as `gpu`, or as 'gpu' of a run")
            target = resolve_gpu(calibration.gpu)
        # in a run L2 is as a model leaves it, however single calls were measured
        as_run = replace(self.conditions, calibration=calibration)
        records = [record for file in inputs for record in file.records]
        runs = [
            *_batches([record for record in records if record.workload == "batch"], target, as_run),
            *_steps([record for record in records if record.workload == "step"], target, as_run, report),
            *(self._served(bench, target, as_run, given) for bench in benches),
        ]
        scaled, seen = calibrate_runs(calibration or empty_calibration(target, conditions), runs)
        return scaled, bad, seen

    def _served(self, bench: BenchResult, target: Gpu, conditions: Conditions, given: set[str]) -> MeasuredRun:
        from kernelcast.collect.calibrate.runs import benchmark_run

        name, server, _ = with_server(bench, self.model, replace(self, gpu=target.id), given | {"gpu"})
        return benchmark_run(bench, replace(server, gpu=self.gpu or target.id).service(name, bench.load), conditions)


def _measured_gpu(inputs: Iterable[CalibrationInput], benches: Iterable[BenchResult], wanted: Gpu | None) -> Gpu | None:
    """The GPU that runs were measured on: the one that is wanted, or the only one that they name."""
    records = [(record.parameters, file.path) for file in inputs for record in file.records]
    named = {str(parameters["gpu"]): path for parameters, path in records if "gpu" in parameters}
    named |= {str(bench.server["gpu"]): bench.path for bench in benches if isinstance(bench.server.get("gpu"), str)}
    paths = {gpu(name).id: path for name, path in named.items()}
    others = sorted(set(paths) - ({wanted.id} if wanted else set()))
    if wanted and others:
        raise KernelcastError(f"{paths[others[0]]} was measured on {others[0]}, not on {wanted.id}")
    if len(others) > 1:
        raise KernelcastError(f"measurements of {len(others)} GPUs ({', '.join(others)}): a calibration is of one")
    return wanted or (gpu(next(iter(named))) if named else None)


def _batches(records: Sequence[RunRecord], target: Gpu, conditions: Conditions) -> list[MeasuredRun]:
    from kernelcast.collect.calibrate.run_files import static_batch
    from kernelcast.collect.calibrate.runs import batch_run
    from kernelcast.inference.infer import infer

    runs = []
    for record in records:
        try:
            inferred = infer(*static_batch(record, target), conditions)
        except KernelcastError as error:
            raise KernelcastError(f"{record.name}: {str(error).removeprefix(f'{record.name}: ')}") from None
        runs.append(batch_run(record.name, inferred, record.measured))
    return runs


def _steps(records: Sequence[RunRecord], target: Gpu, conditions: Conditions, report: Progress) -> list[MeasuredRun]:
    if records and importlib.util.find_spec("torch") is None:
        raise KernelcastError("a step of a PyTorch model is traced: pip install 'kernelcast[torch]' (no GPU)")
    runs = []
    with TemporaryDirectory() as folder:
        for at, record in enumerate(records):
            report(at, len(records))
            try:
                runs.append(_step(record, target, conditions, Path(folder)))
            except KernelcastError as error:
                raise KernelcastError(f"{record.name}: {error}") from None
    return runs


def _step(record: RunRecord, target: Gpu, conditions: Conditions, folder: Path) -> MeasuredRun:
    from kernelcast.collect.calibrate.runs import step_run
    from kernelcast.tracing.build import TraceRequest
    from kernelcast.tracing.fusion import fuse
    from kernelcast.training.step import run_step

    parameters: dict[str, Any] = dict(record.parameters)
    model = str(parameters["model"])
    if record.config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps(record.config), encoding="utf-8")
        model = str(path)
    names = ("batch", "seq", "dtype", "mode", "checkpointing", "precision", "cache", "logits")
    given = {name: parameters[name] for name in names if name in parameters}
    graph = parameters.get("graph", False)
    trace = trace_step(
        TraceRequest(model, **given, image=parameters.get("image_size")), parameters.get("optimizer", "adamw"),
        parameters.get("accumulate", 1), parameters.get("attention", "fused"), graph,
    )  # fmt: skip
    step = run_step(
        fuse(trace) if parameters.get("compile") else trace, target, step_conditions(conditions),
        tf32=parameters.get("dtype") == "tf32", graph=graph, on=parameters.get("host"),
    )  # fmt: skip
    return step_run(record.name, step, record.measured)


def _of_calls(
    tables: list[Path], target: Gpu | None, conditions: Conditions, skip_bad: bool
) -> tuple[Calibration, BadRows]:
    from kernelcast.collect.calibrate import calibrate, read_measured

    named = str(tables[0]) if len(tables) == 1 else f"{len(tables)} tables"
    try:
        return calibrate(_joined([read_measured(path) for path in tables]), target, conditions, skip_bad=skip_bad)
    except KernelcastError as error:
        more = " (`skip_bad` leaves them out)" if " bad row" in str(error) else ""
        raise KernelcastError(f"{named}: {str(error).removeprefix(f'{named}: ')}{more}") from None


def _joined(tables: list[dict[str, Any]]) -> dict[str, Any]:
    """One table after another; a cell of a column that a table lacks is empty."""
    if len(tables) == 1:
        return tables[0]
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        cells = [table.get(name, np.full(len(table["op"]), None, dtype=object)) for table in tables]
        columns[name] = np.concatenate([_plain(column) for column in cells])
    return columns


def _plain(column: Any) -> Any:
    """Cells as objects; what is masked or no number is empty."""
    values = np.array(column, dtype=object)
    values[[cell is None or cell is np.ma.masked or cell != cell for cell in column]] = None
    return values
