"""Commands as Python functions: each takes the parameters of its command.

``api.pyi`` beside this file has their types, made from the questions: ``python -m kernelcast.app.questions.source``.
"""

from __future__ import annotations

import inspect
from typing import Any

from kernelcast.app.questions.compare import CompareQuestion
from kernelcast.app.questions.evidence import evidence
from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.parameters import POSITIONAL, command_parameters
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.errors import KernelcastError

__all__ = ["compare", "evidence", "infer", "infer_pools", "plan", "simulate"]


def _function(question: type[Any], help: str) -> Any:
    """A function that answers ``question``."""
    parameters = {parameter.name: parameter for parameter in command_parameters(question)}
    positional = [name for name in POSITIONAL if name in parameters]

    def answer(*values: Any, **given: Any) -> Any:
        if len(values) > len(positional):
            raise TypeError(f"{question.command}() takes {len(positional)} positional arguments, not {len(values)}")
        return question(**dict(zip(positional, values, strict=False)), **given).answer()

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
    answer.__doc__ = "\n".join([help, "", *(f"{name}: {parameters[name].help}" for name in ordered)])
    return answer


infer = _function(InferQuestion, "How fast a language model runs: one static batch, or prefill and decode workers.")
simulate = _function(SimulateQuestion, "What users of a served model see under load.")
compare = _function(CompareQuestion, "Every GPU at its best way to serve a model, in order.")
plan = _function(
    PlanQuestion, "The cheapest GPUs, and how to run a model on them, that keep latency goals under a load."
)


def infer_pools(*values: Any, prefill_workers: int | None = None, **given: Any) -> Any:
    """``infer`` with prefill workers, which are required."""
    if prefill_workers is None:
        raise KernelcastError("how many prefill workers? give `prefill_workers`, such as 2")
    return infer(*values, prefill_workers=prefill_workers, **given)


infer_pools.__signature__ = inspect.signature(infer)  # type: ignore[attr-defined]
