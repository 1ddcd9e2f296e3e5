"""Files of measurements, recognised by their keys: runs written by hand, measured models, results of
servers' benchmarks; and tables of calls."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernelcast.collect.calibrate.runs import PHASES, STEP_TIMES
from kernelcast.errors import KernelcastError, unknown
from kernelcast.files import ENDINGS, open_table, read_text
from kernelcast.hardware import Gpu
from kernelcast.inference.deployment import Deployment, Layout
from kernelcast.inference.workload import Speculation, Workload
from kernelcast.models import model
from kernelcast.models.precision import Precision
from kernelcast.serving.bench import bench_format
from kernelcast.serving.inference_perf import is_report
from kernelcast.serving.step_table import FILE_TYPE, MeasuredStep, read_steps
from kernelcast.stacks import stack

# Parameters of a run, as `kernelcast infer` and `kernelcast trace` take them, and what each is
_TEXT, _COUNT, _COUNTS = "a text", "a whole number, 0 or more", "a whole number or a list of them"
_NUMBER, _YES = "a number", "true or false"
_BATCH = {
    "model": _TEXT, "gpu": _TEXT, "stack": _TEXT, "tp": _COUNT, "pp": _COUNT, "dp": _COUNT, "ep": _COUNT,
    "batch": _COUNT, "input_len": _COUNTS, "output_len": _COUNTS, "cached": _COUNT, "chunk": _COUNT, "dtype": _TEXT,
    "kv_dtype": _TEXT, "skew": _NUMBER, "micro_batches": _COUNT, "sequence_parallel": _YES, "draft_tokens": _COUNT,
    "acceptance": _NUMBER, "draft_model": _TEXT,
}  # fmt: skip
_STEP = {
    "model": _TEXT, "gpu": _TEXT, "mode": _TEXT, "batch": _COUNT, "seq": _COUNT, "dtype": _TEXT, "precision": _TEXT,
    "cache": _YES, "logits": _TEXT, "image_size": _COUNT, "optimizer": _TEXT, "accumulate": _COUNT,
    "attention": _TEXT, "checkpointing": _YES, "compile": _YES, "graph": _YES, "host": _TEXT,
}  # fmt: skip
_NOTES = ("name", "note", "date")
_MODEL_CASES = "kernelcast model cases"
_SERVED = ("arrival_s", "first_token_s", "last_token_s")


@dataclass(frozen=True)
class RunRecord:
    """One run of a file. ``config``: the model's own config, where the file has it."""

    workload: Literal["batch", "step"]
    name: str
    parameters: Mapping[str, Any]
    measured: Mapping[str, float]  # seconds
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CalibrationInput:
    """The content of a file. ``left_out``: entries without a forecast."""

    path: Path
    content: Literal["calls", "bench", "runs"]
    records: tuple[RunRecord, ...] = ()
    left_out: tuple[str, ...] = ()


def read_input(path: Path) -> CalibrationInput:
    if path.is_dir():
        return CalibrationInput(path, "bench")
    if not path.is_file():
        raise KernelcastError(f"no file {path}")
    if path.suffix.lower() in (".csv", ".parquet"):
        with open_table(path) as source:
            served = all(name in source.types for name in _SERVED)
        return CalibrationInput(path, "bench" if served else "calls")
    content = _content(path)
    first = content[0] if isinstance(content, list) and content else content
    if not isinstance(first, dict):
        raise KernelcastError(
            f"{path}: a run is an object of JSON with its parameters, as in {{'model': 'llama-3.1-8b', …}}"
        )
    if first.get("kind") == FILE_TYPE:
        return _engine_steps(path)
    if "op" in first and path.suffix.lower() in ENDINGS:
        return CalibrationInput(path, "calls")
    if is_report(content) or bench_format(first) or all(name in first for name in _SERVED):
        return CalibrationInput(path, "bench")
    if "cases" in first:
        return _measured_models(path, first)
    runs = content if isinstance(content, list) else [content]
    return CalibrationInput(path, "runs", tuple(_record(path, at, run) for at, run in enumerate(runs, 1)))


def _content(path: Path) -> Any:
    """The JSON of a file, plain or gzipped, or of its lines."""
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        raise KernelcastError(f"{path} is not text: runs are JSON, calls are CSV, Parquet or JSON lines") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"line {error.lineno}: {error.msg}" if text.strip() else "it is empty"
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()] or _refuse(path, reason)
    except json.JSONDecodeError:
        return _refuse(path, reason)


def _refuse(path: Path, reason: str) -> Any:
    raise KernelcastError(f"{path} is not JSON: {reason}")


# ---- runs written by hand ----


def _record(path: Path, at: int, run: Any) -> RunRecord:
    where = f"{path}: run {at}"
    if not isinstance(run, dict):
        raise KernelcastError(f"{where} must be an object with its parameters, not {run!r}")
    shape: Literal["batch", "step"] = "step" if "mode" in run else "batch"
    parameters, times = (_STEP, STEP_TIMES) if shape == "step" else (_BATCH, tuple(PHASES))
    for name in run:
        if name not in parameters and name not in times and name not in _NOTES:
            raise KernelcastError(f"{where}: {unknown('key', name, (*parameters, *times, *_NOTES))}")
    if "model" not in run:
        raise KernelcastError(f"{where} does not name its model: give 'model', as in 'llama-3.1-8b'")
    for name in parameters:
        if name in run and not _fits(run[name], parameters[name]):
            raise KernelcastError(f"{where}: {name} must be {parameters[name]}, not {run[name]!r}")
    measured = {name: run[name] for name in times if name in run}
    for name, value in measured.items():
        if not _fits(value, _NUMBER) or not value > 0:
            raise KernelcastError(f"{where}: {name} must be a positive number of seconds, not {value!r}")
    if not measured:
        raise KernelcastError(f"{where} has no measured time: give {' or '.join(times)}, in seconds")
    if {"ttft_s", "prefill_s"} <= set(measured) or {"tpot_s", "decode_s"} <= set(measured):
        raise KernelcastError(f"{where}: ttft_s and prefill_s of a batch are one time, and so are tpot_s and decode_s")
    if len(measured) > 1:  # what the others add up to
        measured.pop("total_s", None)
    name = str(run.get("name") or f"{path.name}:{at} {run['model']}")
    return RunRecord(shape, name, {key: run[key] for key in parameters if key in run}, measured)


def _fits(value: Any, what: str) -> bool:
    if what == _COUNTS and isinstance(value, list):
        return bool(value) and all(_fits(item, _COUNT) for item in value)
    if what == _TEXT:
        return isinstance(value, str)
    if what == _YES or isinstance(value, bool):
        return what == _YES and isinstance(value, bool)
    if what == _NUMBER:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, int) and value >= 0


def static_batch(record: RunRecord, target: Gpu) -> tuple[Deployment, Workload]:
    """The deployment and workload of a run's parameters, with the defaults of `kernelcast infer`."""
    parameters = record.parameters
    layout = Layout(parameters.get("tp", 1), parameters.get("pp", 1), parameters.get("dp", 1), parameters.get("ep", 1),
                    parameters.get("sequence_parallel", False), parameters.get("micro_batches", 1))  # fmt: skip

    def deployed(name: str) -> Deployment:
        architecture = model(name)
        formats = Precision.of(architecture, parameters.get("dtype"), parameters.get("kv_dtype"))
        return Deployment(
            architecture, target, stack(parameters.get("stack", "vllm")), formats, layout, parameters.get("skew", 0.0)
        )

    deployment, speculation = deployed(parameters["model"]), None
    if parameters.get("draft_tokens"):
        drafted = deployed(parameters["draft_model"]) if "draft_model" in parameters else None
        speculation = Speculation(parameters["draft_tokens"], parameters.get("acceptance", 0.7), drafted)
    inputs, outputs = _lengths(parameters, deployment)
    cached = len(inputs) * (parameters["cached"],) if parameters.get("cached") else ()
    if max(outputs) == 1 and not {"ttft_s", "prefill_s", "total_s"} & set(record.measured):
        raise KernelcastError(f"{record.name}: outputs of one token are not decoded: there is no time per token")
    return deployment, Workload(inputs, outputs, cached, parameters.get("chunk"), speculation)


def _lengths(parameters: Mapping[str, Any], deployment: Deployment) -> tuple[tuple[int, ...], tuple[int, ...]]:
    usual = 128 if deployment.model.generates else 1
    sides = [parameters.get("input_len", 1024), parameters.get("output_len", usual)]
    counts = {len(side) for side in sides if isinstance(side, list)} | (
        {parameters["batch"]} if "batch" in parameters else set()
    )
    if len(counts) > 1:
        raise KernelcastError(f"batch, and lists of input_len and output_len, must be as many, not {sorted(counts)}")
    count = counts.pop() if counts else 1
    inputs, outputs = (tuple(side) if isinstance(side, list) else count * (side,) for side in sides)
    return inputs, outputs


# ---- steps of an engine ----


def _engine_steps(path: Path) -> CalibrationInput:
    """Steps that only decode, and prompts alone, as static batches. Steps that mix both are no batch of `infer`."""
    table = read_steps(path)
    if table.graph_mode == "NONE":
        raise KernelcastError(
            f"{path}: its engine ran without CUDA graphs, and `kernelcast infer` forecasts it with them: "
            "`kernelcast replay --calibrate` fits such steps"
        )
    same = {"model": table.engine["model"], "gpu": table.engine["gpu"], "stack": table.stack,
            "tp": table.count("tp") or 1}  # fmt: skip
    formats = {"dtype": table.dtype(model(same["model"])), "kv_dtype": table.kv_dtype}
    same |= {name: value for name, value in formats.items() if value is not None}
    records = [_step_record(path, step, same) for step in table.steps if step.group != "mixed"]
    if not records:
        raise KernelcastError(
            f"{path}: all its steps mix prompts and decodes: `kernelcast replay --calibrate` fits them"
        )
    left = len(table.steps) - len(records)
    mixed = (f"{left} steps that mix prompts and decodes, which `kernelcast replay --calibrate` fits",) if left else ()
    return CalibrationInput(path, "runs", tuple(records), mixed)


def _step_record(path: Path, step: MeasuredStep, same: Mapping[str, Any]) -> RunRecord:
    decodes = step.group == "decode"
    # the one step of two tokens is decoded after the context, and the token of its prefill
    sizes = {"batch": step.decodes, "input_len": round(step.context), "output_len": 2} if decodes else {
        "batch": step.prompts, "input_len": step.prompt_tokens // step.prompts, "output_len": 1}  # fmt: skip
    name = f"{path.name}: {step.text}"
    return RunRecord("batch", name, {**same, **sizes}, {"tpot_s" if decodes else "prefill_s": step.step_s})


# ---- whole models, as `kernelcast collect-models` keeps them ----


def _measured_models(path: Path, content: Mapping[str, Any]) -> CalibrationInput:
    try:
        if str(content.get("format", "")).startswith(_MODEL_CASES):
            records = list(_model_cases(content))
            decodes = sum(line["case"]["mode"] == "decode" for line in content["cases"])
            left = (f"{decodes} decode steps, whose caches only the lab builds",) if decodes else ()
        else:
            records, left = list(_zoo_cases(path, content)), ()
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise KernelcastError(f"{path}: not a file of measured models ({type(error).__name__} {error})") from None
    if not records:
        raise KernelcastError(f"{path} has no measured model that can be traced here")
    return CalibrationInput(path, "runs", tuple(records), left)


def _zoo_cases(path: Path, content: Mapping[str, Any]) -> Iterator[RunRecord]:
    """Each model is a function of a file beside the measurements."""
    for line in content["cases"]:
        case = line["case"]
        gpu, seq = content["environment"]["gpu"], max(1, case["seq"])
        parameters = {"model": str(path.parent / case["build"]), "gpu": gpu, "seq": seq}
        parameters |= {name: case[name] for name in ("mode", "batch", "dtype", "optimizer")}
        name = f"{case['build'].partition(':')[2]}/{case['mode']}/{case['dtype']}/{case['batch']}x{case['seq']}"
        yield RunRecord("step", name, parameters, {"kernel_time_s": line["kernel_ms"] / 1e3})


def _model_cases(content: Mapping[str, Any]) -> Iterator[RunRecord]:
    for line in content["cases"]:
        case, profile = line["case"], line["measured"]["profile"]
        if case["mode"] == "decode":
            continue
        config = dict(content["models"][case["model"]])
        config["n_layer" if "n_layer" in config else "num_hidden_layers"] = case["layers"]
        training = case["mode"] == "training"
        parameters = {name: case[name] for name in ("model", "batch", "seq", "dtype")} | {
            "gpu": content["environments"][line["run"]]["gpu"], "mode": "training" if training else "inference",
            "graph": case["launch"] == "graph", "cache": False, "precision": "pure",
        }  # fmt: skip
        name = f"{case['model']}/{case['mode']}/{case['dtype']}/{case['batch']}x{case['seq']}"
        yield RunRecord("step", name, parameters, {"kernel_time_s": profile["kernel_sum_ms"] / 1e3}, config)
