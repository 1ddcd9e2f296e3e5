"""A question as the command that asks it, and as Python; what is as usual is left out of both."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelcast.app.questions.kernel import KernelQuestion, typed_parameters
from kernelcast.app.questions.pools import PoolsQuestion
from kernelcast.app.questions.shared import ROTATIONS
from kernelcast.app.questions.words import Word, words_of
from kernelcast.hardware import Gpu


def as_command(question: Any) -> str:
    """The command line that gives the same answer."""
    parts = ["kernelcast", question.command]
    for word, value in _given(question):
        if isinstance(value, Mapping):
            parts += typed_parameters(value)
        elif isinstance(value, bool):
            parts.append(word.option if value else word.switched_off)
        else:
            values = value if isinstance(value, list | tuple) else (value,)
            parts += [f"{word.option} {_quoted(one)}".strip() for one in values]
    return " ".join(parts)


def as_python(question: Any) -> str:
    """The lines that give the same answer."""
    if isinstance(question, KernelQuestion):
        return _kernel(question)
    given = {word.name: value for word, value in _given(question)}
    alone = [repr(_plain(given.pop(name))) for name in ("model", "gpu") if name in given]
    words = [f"{name}={_plain(value)!r}" for name, value in given.items()]
    return _lines([f"found = kc.{_function(question)}({', '.join([*alone, *words])})"])


def _function(question: Any) -> str:
    return "infer_pools" if isinstance(question, PoolsQuestion) and question.apart else str(question.command)


def _kernel(question: KernelQuestion) -> str:
    question = _named(question)
    words = ", ".join([repr(question.op), *(f"{name}={value!r}" for name, value in question.parameters.items())])
    chip = f"kc.gpu({_plain(question.gpu)!r})"
    if question.set:
        chip = f"kc.changed({chip}, {list(question.set)!r})"
    if question.power_cap is not None:
        chip = f"kc.with_cap({chip}, {question.power_cap!r})"
    around = []
    if question.cache != "model":
        around += [f"{name}=float({str(value)!r})" for name, value in
                   zip(("rotation", "input_rotation"), ROTATIONS[question.cache], strict=True)]  # fmt: skip
    if question.without:
        around.append(f"without={tuple(question.without)!r}")
    if question.predictor != "learned":
        around.append(f"predictor={question.predictor!r}")
    if question.power_cap is not None:  # which slows a call that is repeated for seconds
        return _lines([
            "from kernelcast.energy.power import lasting", "",
            f"gpu, conditions = {chip}, kc.Conditions({', '.join(around)})",
            f"found, drawn = lasting(kc.predict(kc.kernel({words}), gpu, conditions), gpu, conditions)",
        ])  # fmt: skip
    conditions = f", kc.Conditions({', '.join(around)})" if around else ""
    return _lines([f"found = kc.predict(kc.kernel({words}), {chip}{conditions})"])


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(["import kernelcast as kc", "", *lines, ""])


def _named(question: Any) -> Any:
    """With a GPU that was changed by its name, and its changes as ``set``."""
    chip = getattr(question, "gpu", None)
    if not isinstance(chip, Gpu) or not chip.changes:
        return question
    changes = [f"{name}={float(value)!r}" for name, value in chip.changes.items()]
    return replace(question, gpu=chip.known_as, set=[*changes, *(question.set or ())])


def _given(question: Any) -> list[tuple[Word, Any]]:
    """Words that are not as usual."""
    question = _named(question)
    found = [(word, getattr(question, word.name)) for word in words_of(type(question))]
    return [(word, value) for word, value in found if value != word.default and value is not None]


def _plain(value: Any) -> Any:
    """Names for what has one."""
    if isinstance(value, Gpu):
        return value.known_as
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, str | int | float | list | tuple) else getattr(value, "name", value)


def _quoted(value: Any) -> str:
    return shlex.quote(str(_plain(value)))
