"""The questions that the API takes, and those of their words that may come over the network: none that names a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from typing import Any

from kernelcast.app.questions import (
    CompareQuestion,
    InferQuestion,
    KernelQuestion,
    PlanQuestion,
    SimulateQuestion,
    Word,
    words_of,
)
from kernelcast.app.questions.words import options_of

QUESTIONS: Mapping[str, Any] = {
    question.command: question
    for question in (KernelQuestion, InferQuestion, SimulateQuestion, CompareQuestion, PlanQuestion)
}
_OF_TRACE = ("trace_format", "skip_bad", "rate_scale", "limit")  # of a file that is not read here


def web_words(command: str) -> list[Word]:
    """The words of a question that may be given over the network."""
    return [word for word in words_of(QUESTIONS[command]) if not word.of_file and word.name not in _OF_TRACE]


def told_word(word: Word) -> dict[str, Any]:
    """A word as data for whoever asks."""
    kinds = [kind for kind in options_of(word.kind) if kind is not type(None)]
    names = [str(kind) if kind == list[str] else getattr(kind, "__name__", str(kind)) for kind in kinds]
    default = None if word.default is MISSING or callable(word.default) else word.default
    return {"name": word.name, "flag": word.option or None, "type": " or ".join(names), "default": default,
            "help": word.flag.help, "panel": word.flag.panel}  # fmt: skip
