"""What a worker can be asked: words in, what the page and the API answer out. No word of these is a file's name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernelcast.app.questions import (
    CompareQuestion,
    InferQuestion,
    KernelQuestion,
    PlanQuestion,
    SimulateQuestion,
    as_command,
    as_python,
)
from kernelcast.app.report import json as as_json
from kernelcast.app.web import lists, uploads
from kernelcast.errors import KernelcastError, unknown
from kernelcast.ops import kernel, kernel_class, parameters_of

# what long questions import when they are first asked
_LATER = (
    "kernelcast.app.report.simulate",
    "kernelcast.serving.simulate",
    "kernelcast.app.report.plan",
    "kernelcast.search.plan.plan",
    "kernelcast.diagnose.read",
    "kernelcast.app.report.diagnose",
)
Words = dict[str, Any]
Limits = Mapping[str, Any]
Task = Callable[[Words, bytes, Limits], Any]


def _kernel(words: Words, _: bytes, __: Limits) -> Any:
    specs = parameters_of(kernel_class(words["op"]))
    given = words.get("parameters", {})
    for name, value in given.items():
        spec = specs.get(name)
        if spec is not None and spec.type == "choice" and value not in spec.options:  # a file would be read
            raise unknown(name, value, spec.options)
    call = kernel(words["op"], **given)  # in the parameters' own types, as a command line gives them
    said = {name: getattr(call, name) for name in given if getattr(call, name) != specs[name].default}
    question = KernelQuestion(**{**words, "parameters": said})
    found, drawn = question.answer()
    told = as_json.prediction_fields(found, question.chip, question.conditions) | as_json.energy_fields(drawn)
    return _envelope(question, told)


def _infer(words: Words, _: bytes, __: Limits) -> Any:
    from kernelcast.app.report.infer import fields

    question, shown = _with_model(InferQuestion, words)
    return _envelope(shown, fields(question.answer()))


def _simulate(words: Words, _: bytes, __: Limits) -> Any:
    from kernelcast.app.report.simulate import fields
    from kernelcast.app.web.over_time import over_time

    question, shown = _with_model(SimulateQuestion, words)
    found = question.answer()
    return {**_envelope(shown, fields(found)), "over_time": over_time(found)}


def _compare(words: Words, _: bytes, __: Limits) -> Any:
    from kernelcast.app.report.compare import fields

    question, shown = _with_model(CompareQuestion, words)
    found = question.answer()
    return _envelope(shown, fields(found, question.gains(found), question.price_kind))


def _plan(words: Words, _: bytes, __: Limits) -> Any:
    from kernelcast import models
    from kernelcast.app.report.plan import fields

    question, shown = _with_model(PlanQuestion, words)
    name = "." if "config" in words else models.hub_name(words["model"])
    return _envelope(shown, fields(question.answer(), name, question.unpriced))


def _with_model(question: Any, words: Words) -> tuple[Any, Any]:
    """The question, and the one that a person would type: a config of one's own is a file there."""
    given = {name: value for name, value in words.items() if name not in ("config", "name")}
    if "config" not in words:
        if "model" not in words:
            raise KernelcastError("which model? give a name of GET /api/v1/models, or a config")
        asked = question(**given)
        return asked, asked
    if "model" in words:
        raise KernelcastError("give a model by its name or by its config, not both")
    from kernelcast import models

    name = words.get("name", "my-model")
    asked = question(**given, model=models.parse(words["config"], name=name))
    return asked, replace(asked, model=f"{name}.json")


def _envelope(question: Any, answer: Any) -> dict[str, Any]:
    return {"answer": answer, "command": as_command(question), "python": as_python(question)}


def _list(make: Callable[..., Any]) -> Task:
    def told(words: Words, _: bytes, __: Limits) -> Any:
        return make(**words)

    return told


TASKS: Mapping[str, Task] = {
    "kernel": _kernel,
    "infer": _infer,
    "simulate": _simulate,
    "compare": _compare,
    "plan": _plan,
    "diagnose": uploads.diagnose,
    **{name: _list(make) for name, make in lists.LISTS.items()},
}


def warming() -> Iterator[Callable[[], object]]:
    """Steps that make later questions fast, most needed first; the first is done where it is asked for."""
    _kernel({"op": "gemm", "gpu": "h200_sxm", "parameters": {"m": 64, "n": 64, "k": 64}}, b"", {})
    yield lambda: None
    yield functools.partial(_infer, {"model": "llama-3.1-8b", "gpu": "h200_sxm"}, b"", {})
    yield functools.partial(_infer, {"model": "qwen3-30b-a3b", "gpu": "h100_sxm", "tp": 2}, b"", {})
    yield from (functools.partial(lists.load_family, name) for name in lists.families())
    yield from (functools.partial(importlib.import_module, name) for name in _LATER)
    yield functools.partial(_compare, {"model": "llama-3.2-1b", "gpus": "h100_sxm", "batch": 1, "max_gpus": 1}, b"", {})
