"""Tasks of a worker: arguments of a question in, the API's answer out. No argument names a file."""

from __future__ import annotations

import functools
import importlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.app.questions.kernel import KernelQuestion
from kernelcast.app.questions.source import as_command, as_python
from kernelcast.app.report.json import energy_fields
from kernelcast.app.report.kernel import prediction_fields
from kernelcast.app.web import lists
from kernelcast.app.web.parameters import QUESTIONS
from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast.learned import WEIGHTS, load
from kernelcast.ops import kernel, kernel_class, parameters_of

if TYPE_CHECKING:
    from kernelcast.inference.infer import Inference
    from kernelcast.serving.simulate import Simulation

OVER_TIME_POINTS = 400
# what long tasks import when they first run
_LATER = (
    "kernelcast.app.report.simulate",
    "kernelcast.serving.simulate",
    "kernelcast.app.report.plan",
    "kernelcast.search.plan.plan",
    "kernelcast.app.report.train",
    "kernelcast.training.transformer_step",
    "kernelcast.diagnose.read",
    "kernelcast.app.report.diagnose",
)
OWN_MODEL = ("config", "hf_quant_config", "name")
Arguments = dict[str, Any]
Limits = Mapping[str, Any]
Task = Callable[[Arguments, bytes, Limits], Any]


def _kernel(arguments: Arguments, _: bytes, __: Limits) -> Any:
    specs = parameters_of(kernel_class(arguments["op"]))
    given = arguments.get("parameters", {})
    for name, value in given.items():
        spec = specs.get(name)
        if spec is not None and spec.type == "choice" and value not in spec.options:  # a file would be read
            raise unknown(name, value, spec.options)
    call = kernel(arguments["op"], **given)  # in the parameters' types, as a command line gives them
    parameters = {name: getattr(call, name) for name in given if getattr(call, name) != specs[name].default}
    question = KernelQuestion(**{**arguments, "parameters": parameters})
    prediction, energy = question.answer()
    fields = prediction_fields(prediction, question.resolved_gpu, question.conditions) | energy_fields(energy)
    return {"answer": fields, "command": as_command(question), "python": as_python(question)}


def _infer(question: Any, _: Arguments) -> dict[str, Any]:
    from kernelcast.app.report.infer import fields
    from kernelcast.app.web.curves import what_fits

    result = question.answer()
    return {
        "answer": fields(result), "fits": what_fits(question), "kernels": part_kernels(result), "cost": _cost(result),
    }  # fmt: skip


def part_kernels(result: Inference) -> list[dict[str, Any]]:
    """The longest kernel of each part, in the first prefill pass and in the middle decode pass: what to look at."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for phase in ("prefill", "decode"):
        passes = [each for each in result.passes if each.phase == phase and each.deployment is result.deployment]
        for each in passes[:1] if phase == "prefill" else passes[len(passes) // 2 :][:1]:
            for launch, time in zip(each.launches, each.kernels, strict=False):  # what is no kernel comes last
                key, call = (phase, time.part), launch.call
                if time.launches and time.time_s > found.get(key, {"time_s": 0.0})["time_s"]:
                    found[key] = {"phase": phase, "part": time.part, "op": call.op, "time_s": time.time_s,
                                  "parameters": dict(call.parameters)}  # fmt: skip
    return list(found.values())


def _cost(result: Inference) -> dict[str, Any] | None:
    """Dollars of the run at the price of its GPU, as `kernelcast compare` counts them; None without a price."""
    from kernelcast.hardware.prices import read_prices

    price = read_prices().get(result.deployment.gpu.known_as)
    if price is None or not result.counted_tokens:
        return None
    usd_per_hour = price.usd_per_hour * result.deployment.layout.gpus
    hours = result.total.value / 3600
    return {"usd_per_gpu_hour": price.usd_per_hour, "usd_per_hour": usd_per_hour, "date": price.date,
            "usd_per_million_tokens": usd_per_hour * hours / result.counted_tokens * 1e6}  # fmt: skip


def _curves(arguments: Arguments, _: bytes, __: Limits) -> Any:
    from kernelcast.app.web.curves import curves

    own = (*OWN_MODEL, "cases", "vary", "sizes")
    question, shown = _asked("infer", {name: value for name, value in arguments.items() if name not in own}, arguments)
    found = curves(question, shown, arguments["cases"], arguments["vary"], arguments["sizes"])
    return {"command": found.pop("command"), "python": "", "answer": found}


def _simulate(question: Any, _: Arguments) -> dict[str, Any]:
    from kernelcast.app.report.simulate import fields

    simulation = question.answer()
    return {"answer": fields(simulation), "over_time": over_time(simulation)}


def _compare(question: Any, _: Arguments) -> dict[str, Any]:
    from kernelcast.app.report.compare import fields

    comparison = question.answer()
    return {"answer": fields(comparison, question.gains(comparison), question.price_kind)}


def _plan(question: Any, arguments: Arguments) -> dict[str, Any]:
    from kernelcast import models
    from kernelcast.app.report.plan import fields

    name = "." if "config" in arguments else models.hub_name(arguments["model"])
    return {"answer": fields(question.answer(), name, question.unpriced)}


def _train(question: Any, _: Arguments) -> dict[str, Any]:
    from kernelcast.app.report.train import PARTS, fields

    return {"answer": fields(question.answer()), "parts": PARTS}


def _diagnose(arguments: Arguments, content: bytes, limits: Limits) -> Any:
    """A measured run from its bytes, which are not kept."""
    from kernelcast.app.report.diagnose import fields
    from kernelcast.diagnose.diagnose import diagnose
    from kernelcast.diagnose.read import FileLimits, read_bytes
    from kernelcast.hardware import gpu

    filename, gpu_id, dtype = arguments["filename"], arguments.get("gpu"), arguments.get("dtype")
    if not content:
        raise KernelcastError(f"{filename} is empty")
    given = gpu(gpu_id) if gpu_id else None
    sizes = FileLimits(limits["unpacked_bytes"], limits["file_rows"], limits["file_events"])
    profile, measured_on = read_bytes(content, filename, given, sizes)
    options = [f"--{name} {arguments[name]}" for name in ("gpu", "dtype") if arguments.get(name)]
    python = [
        "from pathlib import Path", "", "import kernelcast as kc", "from kernelcast.diagnose.diagnose import diagnose",
        "from kernelcast.diagnose.read import read_measured", "",
        f"profile, gpu = read_measured(Path({filename!r}){f', kc.gpu({gpu_id!r})' if gpu_id else ''})",
        f"diagnosis = diagnose(profile, gpu{f', run_dtype={dtype!r}' if dtype else ''})", "",
    ]  # fmt: skip
    return {
        "answer": fields(diagnose(profile, measured_on, run_dtype=dtype)),
        "command": " ".join(["kernelcast diagnose", shlex.quote(filename), *options]),
        "python": "\n".join(python),
    }


def over_time(simulation: Simulation) -> dict[str, list[float]]:
    """Requests that decode and that wait, summed over engines, and the mean share of their KV caches in use, at few
    enough times for a chart."""
    notes = simulation.step_log
    if not notes.end_s:
        return {"time_s": [], "running": [], "waiting": [], "kv_share": []}
    ends, engines = np.array(notes.end_s), np.array(notes.engine)
    times = np.unique(ends)
    if len(times) > OVER_TIME_POINTS:
        times = np.linspace(times[0], times[-1], OVER_TIME_POINTS)
    columns: dict[str, Any] = {"running": notes.decoding, "waiting": notes.waiting, "kv_share": notes.kv_use}
    sums = {name: np.zeros(len(times)) for name in columns}
    names = np.unique(engines)
    for engine in names:
        rows = np.flatnonzero(engines == engine)
        rows = rows[np.argsort(ends[rows], kind="stable")]
        at = np.searchsorted(ends[rows], times, side="right") - 1  # the last step that had ended by then
        for name, values in columns.items():
            sums[name] += np.where(at < 0, 0.0, np.array(values, dtype=np.float64)[rows][np.maximum(at, 0)])
    sums["kv_share"] /= len(names)
    return {"time_s": times.tolist(), **{name: values.tolist() for name, values in sums.items()}}


def _with_model(command: str, forecast: Callable[[Any, Arguments], dict[str, Any]]) -> Task:
    """The task of a question about a model; command and Python name a config by its file."""

    def task(arguments: Arguments, _: bytes, __: Limits) -> Any:
        given = {name: value for name, value in arguments.items() if name not in OWN_MODEL}
        question, shown = _asked(command, given, arguments)
        return {**forecast(question, arguments), "command": as_command(shown), "python": as_python(shown)}

    return task


def _asked(command: str, given: Arguments, arguments: Arguments) -> tuple[Any, Any]:
    """The question, and as it is shown: a config by its file; by its folder where a file beside it has the formats."""
    if ("config" in arguments) == ("model" in arguments):
        raise KernelcastError("which model? give a name of GET /api/v1/models, or a config, not both")
    if "config" not in arguments:
        question = QUESTIONS[command](**given)
        return question, question
    from kernelcast import models
    from kernelcast.models.catalogue import with_formats

    name, beside = arguments.get("name", "my-model"), arguments.get("hf_quant_config")
    config = with_formats(arguments["config"], beside) if beside else arguments["config"]
    question = QUESTIONS[command](**{**given, "model": models.parse(config, name=name)})
    return question, replace(question, model=f"./{name}" if beside else f"{name}.json")


def _list(make: Callable[..., Any]) -> Task:
    return lambda arguments, _, __: make(**arguments)


TASKS: Mapping[str, Task] = {
    "kernel": _kernel,
    "infer": _with_model("infer", _infer),
    "curves": _curves,
    "simulate": _with_model("simulate", _simulate),
    "compare": _with_model("compare", _compare),
    "plan": _with_model("plan", _plan),
    "train": _with_model("train", _train),
    "diagnose": _diagnose,
    **{name: _list(make) for name, make in lists.LISTS.items()},
}


def warm_up() -> Iterator[Callable[[], object]]:
    """Steps that make later tasks fast, most needed first; the first is done at once."""

    def step(task: str, **arguments: Any) -> Callable[[], object]:
        return functools.partial(TASKS[task], arguments, b"", {})

    step("kernel", op="gemm", gpu="h200_sxm", parameters={"m": 64, "n": 64, "k": 64})()
    yield lambda: None
    yield step("infer", model="llama-3.1-8b", gpu="h200_sxm")
    yield step("infer", model="qwen3-30b-a3b", gpu="h100_sxm", tp=2)
    yield from (functools.partial(load, WEIGHTS, path.stem) for path in sorted(WEIGHTS.glob("*.safetensors")))
    yield from (functools.partial(importlib.import_module, name) for name in _LATER)
    yield step("compare", model="llama-3.2-1b", gpus="h100_sxm", batch=1, max_gpus=1)
