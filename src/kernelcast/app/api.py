"""What is asked from Python: each function takes the words of its command.

``api.pyi`` beside this file has their types, made from the questions: ``python -m kernelcast.app.questions.stub``.
"""

from __future__ import annotations

import inspect
from operator import methodcaller
from typing import Any

from kernelcast.app.questions import (
    CompareQuestion,
    InferQuestion,
    PlanQuestion,
    PoolsQuestion,
    SimulateQuestion,
    words_of,
)
from kernelcast.app.questions.evidence import evidence

__all__ = ["compare", "evidence", "infer", "infer_pools", "plan", "simulate"]


def _asked(question: type[Any], help: str, name: str = "", answer: Any = methodcaller("answer")) -> Any:
    """A function that asks ``question``: ``model`` and ``gpu`` may stand alone."""
    words = {word.name: word for word in words_of(question)}
    alone = [name for name in ("model", "gpu", "gpus") if name in words]

    def ask(*values: Any, **given: Any) -> Any:
        if len(values) > len(alone):
            raise TypeError(f"{question.command}() takes {len(alone)} words without their names, not {len(values)}")
        return answer(question(**dict(zip(alone, values, strict=False)), **given))

    place, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    ask.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                place if name in alone else keyword,
                default=inspect.Parameter.empty if word.required else word.default,
            )
            for name, word in sorted(words.items(), key=lambda item: alone.index(item[0]) if item[0] in alone else 9)
        ]
    )
    ask.__name__ = ask.__qualname__ = name or question.command
    lines = [f"{name}: {word.flag.help}" for name, word in words.items()]
    ask.__doc__ = "\n".join([help, "", *lines])
    return ask


infer = _asked(InferQuestion, "How fast a language model runs: one static batch.")
infer_pools = _asked(PoolsQuestion, "Workers that read prompts and others that decode, as a static point.",
                     "infer_pools", methodcaller("answer_apart"))  # fmt: skip
simulate = _asked(SimulateQuestion, "What users of a served model feel under load.")
compare = _asked(CompareQuestion, "Every GPU at its best way to serve a model, in order.")
plan = _asked(PlanQuestion, "The cheapest GPUs, and how to run a model on them, that keep latency goals under a load.")
