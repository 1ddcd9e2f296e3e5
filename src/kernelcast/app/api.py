"""Commands as Python functions: each takes the parameters of its command.

``api.pyi`` beside this file has their types, made from the questions: ``python -m kernelcast.app.questions.source``.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelcast.app.questions.compare import CompareQuestion
from kernelcast.app.questions.evidence import evidence
from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.parameters import POSITIONAL, command_parameters
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.app.questions.trace import NEEDS_TORCH, TraceQuestion
from kernelcast.app.questions.train import TrainQuestion
from kernelcast.app.questions.values import ArgumentTypeError
from kernelcast.errors import KernelcastError, unknown
from kernelcast.stacks.engine_flags import canonical_names

__all__ = ["compare", "evidence", "infer", "infer_pools", "plan", "simulate", "trace", "train"]

# a parameter, as the library and the command line write it, with a blank before a value
_NAMED = re.compile(r"(?:`([a-z]\w*)`|--([a-z][a-z-]*))( (?=[\d\[]|[\w.]+\)))?")
_OF_A_GPU = ("dp", "tp", "pp", "ep", "zero", "micro_batches", "sequence_parallel", "tp_plan", "schedule", "compile",
             "virtual_stages", "set", "power_cap", "predictor", "calibration", "weights")  # fmt: skip


def as_keywords(text: str, names: Iterable[str]) -> str:
    """A message with parameters as Python has them: ``gpu=`` for `gpu` and --gpu."""

    def keyword(match: re.Match[str]) -> str:
        name = match[1] or match[2].replace("-", "_")
        return f"{name}=" if name in names else match[0]

    return _NAMED.sub(keyword, text)


@contextmanager
def _errors_as_keywords(names: Iterable[str]) -> Iterator[None]:
    try:
        yield
    except KernelcastError as error:
        if (text := as_keywords(str(error), names)) != str(error):
            error.args = (text, *error.args[1:])
        raise


def _question(question: type[Any], names: Iterable[str], given: dict[str, Any]) -> Any:
    given = canonical_names(given, {*names})
    for name in given:
        if name not in names:
            raise ArgumentTypeError(str(unknown(f"parameter of {question.command}()", name, names)))
    if "model" in names and "model" not in given:
        raise ArgumentTypeError("which model? give `model`, as in llama-3.1-8b")
    return question(**given)


def _function(question: type[Any], help: str) -> Any:
    """A function that answers ``question``."""
    parameters = {parameter.name: parameter for parameter in command_parameters(question)}
    positional = [name for name in POSITIONAL if name in parameters]

    def answer(*values: Any, **given: Any) -> Any:
        with _errors_as_keywords(parameters):
            if len(values) > len(positional):
                raise ArgumentTypeError(f"{question.command}() takes {len(positional)} arguments without names "
                                    f"({', '.join(positional)}), not {len(values)}")  # fmt: skip
            first = dict(zip(positional, values, strict=False))
            for name in first.keys() & given.keys():
                raise ArgumentTypeError(f"{question.command}() got `{name}` twice: give it once")
            return _question(question, parameters, first | given).answer()

    ordered = [*positional, *(name for name in parameters if name not in positional)]
    answer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD if name in positional else inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if parameters[name].required else parameters[name].default,
            )
            for name in ordered
        ]
    )
    answer.__name__ = answer.__qualname__ = question.command
    lines = (_described(name, parameters) for name in ordered)
    answer.__doc__ = "\n".join([help, "", *lines])
    return answer


def _described(name: str, parameters: dict[str, Any]) -> str:
    also = f" (also {', '.join(parameters[name].aliases)})" if parameters[name].aliases else ""
    return f"{name}: {as_keywords(parameters[name].help, parameters)}{also}"


infer = _function(InferQuestion, "How fast a language model runs: one static batch, or prefill and decode workers.")
simulate = _function(SimulateQuestion, "What users of a served model see under load.")
compare = _function(CompareQuestion, "Every GPU at its best way to serve a model, in order.")
plan = _function(
    PlanQuestion, "The cheapest GPUs, and how to run a model on them, that keep latency goals under a load."
)
train = _function(TrainQuestion, "A training step of a transformer on many GPUs, and what a run costs.")


def infer_pools(*values: Any, prefill_workers: int | None = None, **given: Any) -> Any:
    """``infer`` with prefill workers, which are required."""
    if prefill_workers is None:
        raise KernelcastError("how many prefill workers? give prefill_workers=, such as 2")
    return infer(*values, prefill_workers=prefill_workers, **given)


infer_pools.__signature__ = inspect.signature(infer)  # type: ignore[attr-defined]


def trace(model: Any, *values: Any, **given: Any) -> Any:
    """A step of a PyTorch model. Of a name of `kernelcast models`, a config.json or FILE.py:function: the forecast of
    `kernelcast trace`, whose parameters it takes, or without ``gpu`` the traced ops, for ``run_step``. Of a module or a
    function with its inputs: the traced ops (``kernelcast.tracing.trace``)."""
    if importlib.util.find_spec("torch") is None:
        raise KernelcastError(NEEDS_TORCH)
    if not isinstance(model, str | Path):
        from kernelcast.tracing import trace as traced

        return traced(model, *values, **given)
    names = {parameter.name: parameter for parameter in command_parameters(TraceQuestion)}
    with _errors_as_keywords(names):
        if len(values) > 1 or (values and "gpu" in given):
            raise ArgumentTypeError("trace() takes a model and a `gpu` without names; give the rest by name")
        gpu = {"gpu": values[0]} if values else {}
        question = _question(TraceQuestion, names, {"model": str(model), **gpu, **given})
        if question.gpu is not None:
            return question.answer()
        question.refuse(_OF_A_GPU, "without `gpu` there is no forecast, only the traced ops")
        return question.traced(question.model, question.batch, question.mode, question.cache, question.logits)
