"""A question as a command and as Python, without defaults; and the types of ``api``.

``python -m kernelcast.app.questions.source`` writes ``api.pyi`` anew; a test compares it.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
import types
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from kernelcast.app.questions.compare import CompareQuestion
from kernelcast.app.questions.infer import DISAGGREGATED, InferQuestion
from kernelcast.app.questions.kernel import KernelQuestion, op_options
from kernelcast.app.questions.parameters import POSITIONAL, CommandParameter, command_parameters
from kernelcast.app.questions.plan import PlanQuestion
from kernelcast.app.questions.shared import ROTATIONS
from kernelcast.app.questions.simulate import SimulateQuestion
from kernelcast.app.questions.trace import TraceQuestion
from kernelcast.app.questions.train import TrainQuestion
from kernelcast.hardware import Gpu
from kernelcast.stacks.engine_flags import negations_of

STUB = Path(__file__).parents[1] / "api.pyi"
_FUNCTIONS = (
    ("infer", InferQuestion, "Inference"), ("infer", InferQuestion, "Disaggregated"),
    ("infer_pools", InferQuestion, "Disaggregated"), ("simulate", SimulateQuestion, "Simulation"),
    ("compare", CompareQuestion, "Comparison"), ("plan", PlanQuestion, "Plan"), ("train", TrainQuestion, "TrainingRun"),
    ("trace", TraceQuestion, "Step | ScaledStep"), ("trace", TraceQuestion, "Trace"),
)  # fmt: skip
_HEAD = '''"""Made by ``python -m kernelcast.app.questions.source`` from the questions' parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from kernelcast.app.questions.evidence import evidence as evidence
from kernelcast.forecast import Calibration
from kernelcast.hardware import Gpu
from kernelcast.inference.disaggregated import Disaggregated
from kernelcast.inference.infer import Inference
from kernelcast.models.architecture import Architecture
from kernelcast.search.compare.compare import Comparison
from kernelcast.search.plan.plan import Plan
from kernelcast.serving.simulate import Simulation
from kernelcast.tracing.traced import Trace
from kernelcast.training.run import TrainingRun
from kernelcast.training.scale import ScaledStep
from kernelcast.training.step import Step

# fmt: off
'''
_MODULE = """@overload
def trace(model: object, inputs: object, mode: str = "inference", **more: Any) -> Trace: ..."""  # tracing.trace


def as_command(question: Any) -> str:
    """The command line that gives the same answer."""
    parts = ["kernelcast", question.command]
    for parameter, value in _given(question):
        if isinstance(value, Mapping):
            parts += op_options(value)
        elif isinstance(value, bool):
            parts.append(parameter.option if value else parameter.negative_option)
        else:
            values = value if isinstance(value, list | tuple) else (value,)
            parts += [f"{parameter.option} {shlex.quote(str(_plain(item)))}".strip() for item in values]
    return " ".join(parts)


def as_python(question: Any) -> str:
    """The lines that give the same answer."""
    if isinstance(question, KernelQuestion):
        return _kernel(question)
    given = {parameter.name: value for parameter, value in _given(question)}
    positional = [repr(_plain(given.pop(name))) for name in ("model", "gpu") if name in given]
    keywords = [f"{name}={_plain(value)!r}" for name, value in given.items()]
    return _lines([f"forecast = kc.{question.command}({', '.join([*positional, *keywords])})"])


def _kernel(question: KernelQuestion) -> str:
    question = _named(question)
    call = ", ".join([repr(question.op), *(f"{name}={value!r}" for name, value in question.parameters.items())])
    gpu = f"kc.gpu({_plain(question.gpu)!r})"
    if question.set:
        gpu = f"kc.changed({gpu}, {list(question.set)!r})"
    if question.power_cap is not None:
        gpu = f"kc.with_cap({gpu}, {question.power_cap!r})"
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
            f"gpu, conditions = {gpu}, kc.Conditions({', '.join(around)})",
            f"forecast, energy = lasting(kc.predict(kc.kernel({call}), gpu, conditions), gpu, conditions)",
        ])  # fmt: skip
    conditions = f", kc.Conditions({', '.join(around)})" if around else ""
    return _lines([f"forecast = kc.predict(kc.kernel({call}), {gpu}{conditions})"])


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(["import kernelcast as kc", "", *lines, ""])


def _named(question: Any) -> Any:
    """With a GPU that was changed by its name, and its changes as ``set``."""
    gpu = getattr(question, "gpu", None)
    if not isinstance(gpu, Gpu) or not gpu.changes:
        return question
    changes = [f"{name}={float(value)!r}" for name, value in gpu.changes.items()]
    return replace(question, gpu=gpu.known_as, set=[*changes, *(question.set or ())])


def _given(question: Any) -> list[tuple[CommandParameter, Any]]:
    """Parameters that are not as usual, with their values."""
    question = _named(question)
    values = [(parameter, getattr(question, parameter.name)) for parameter in command_parameters(type(question))]
    return [(parameter, value) for parameter, value in values if value != parameter.default and value is not None]


def _plain(value: Any) -> Any:
    """Names for what has one."""
    if isinstance(value, Gpu):
        return value.known_as
    if isinstance(value, Path):
        return str(value)
    return value if isinstance(value, str | int | float | list | tuple) else getattr(value, "name", value)


def stub() -> str:
    """``api.pyi``: the types of ``kernelcast.infer`` and its like, for type checkers and editors."""
    aliases = [_aliases(question) for question in dict.fromkeys(question for _, question, _ in _FUNCTIONS)]
    return "\n".join([_HEAD, *aliases, *(_function(*function) for function in _FUNCTIONS), _MODULE]) + "\n"


def _aliases(question: Any) -> str:
    """Engines' names of the parameters of a question, with their types."""
    hints = get_type_hints(question, include_extras=True)
    lines = [f"    {alias}: {_annotation(parameter, hints)}" for parameter in command_parameters(question)
             for alias in (*parameter.aliases, *negations_of(parameter.name)) if alias.isidentifier()]  # fmt: skip
    return "\n".join([f"class _{question.command.title()}Aliases(TypedDict, total=False):", *(lines or ["    ..."])])


def _function(name: str, question: Any, result: str) -> str:
    hints = get_type_hints(question, include_extras=True)
    written = {parameter.name: _parameter(parameter, hints) for parameter in command_parameters(question)}
    if result == "Inference":  # of an overload: without the pool of prefill workers
        written = {name: text for name, text in written.items() if name not in DISAGGREGATED}
    elif result == "Disaggregated":
        written["prefill_workers"] = "prefill_workers: int"
    elif name == "trace":  # a forecast on a GPU, or what is traced without one
        written["model"] = "model: str | Path"
        written["gpu"] = f"gpu: {'str | Path | Gpu' if 'Step' in result else 'None = None'}"
    positional = [written.pop(name) for name in POSITIONAL if name in written]
    aliases = f"**aliases: Unpack[_{question.command.title()}Aliases]"
    whole = [text.replace(" ", "\0") for text in (*positional, "*", *written.values(), aliases)]  # lines break there
    lines = textwrap.wrap(", ".join(whole), 116, break_on_hyphens=False)
    overload = ["@overload"] if name in ("infer", "trace") else []
    return "\n".join(
        [*overload, f"def {name}(", *(f"    {line}".replace("\0", " ") for line in lines), f") -> {result}: ..."]
    )


def _parameter(parameter: CommandParameter, hints: dict[str, Any]) -> str:
    annotation = _annotation(parameter, hints)
    if parameter.required:
        return f"{parameter.name}: {annotation}"
    default = json.dumps(parameter.default) if isinstance(parameter.default, str) else repr(parameter.default)
    return f"{parameter.name}: {annotation} = {default}"


def _annotation(parameter: CommandParameter, hints: dict[str, Any]) -> str:
    return parameter.annotation or _written(get_args(hints[parameter.name])[0])


def _written(annotation: Any) -> str:
    """A type as it is written."""
    if isinstance(annotation, types.UnionType):
        return " | ".join(map(_written, get_args(annotation)))
    if get_origin(annotation) is not None:
        return re.sub(r"[\w.]+\.", "", str(annotation))
    return "None" if annotation is type(None) else str(annotation.__name__)


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
