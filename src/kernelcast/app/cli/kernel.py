"""``kernelcast kernel OP``: one call. A sub-command an op, made from the op's own parameters when it is asked for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from kernelcast.app.cli import options as typed
from kernelcast.app.cli.commands import Command, CommandGroup, with_examples
from kernelcast.app.questions.kernel import KernelQuestion, typed_parameters
from kernelcast.app.report import json as as_json
from kernelcast.errors import KernelcastError
from kernelcast.ops import REGISTRY, Kernel, parameters_of
from kernelcast.ops.base import Parameter

EXAMPLE_GPU = "h200_sxm"
EXAMPLE_WIDTH = 70
_SHARED: dict[str, tuple[Any, Any]] = {
    "gpu": (typed.GpuName, None),
    "set": (typed.Changes, None),
    "power_cap": (typed.PowerCap, None),
    "without": (typed.Without, None),
    "cache": (typed.Cache, "model"),
    "predictor": (typed.PredictorName, "learned"),
    "calibration": (typed.CalibrationFile, None),
    "weights": (typed.WeightsFolder, None),
    "json": (typed.Json, False),
}


class OpGroup(CommandGroup):
    """Its commands are the registry; only the one that is asked for is made."""

    kind = "op"

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(REGISTRY)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        op = cmd_name if cmd_name in REGISTRY else cmd_name.replace("-", "_")
        return op_command(REGISTRY[op]) if op in REGISTRY else None


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=with_examples(OpGroup, *example_lines(REGISTRY["gemm"])), invoke_without_command=True)
    group.callback()(_kernel)
    app.add_typer(group, name="kernel")


def _kernel(ctx: typer.Context) -> None:
    """Predict one kernel call: its time, what limits it, and what the best kernel would reach."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def op_command(cls: type[Kernel]) -> Any:
    """The Typer command of one op."""
    app = typer.Typer(add_completion=False)
    text = _escaped(as_json.doc_text(cls))
    app.command(cls.op, cls=with_examples(Command, *example_lines(cls)), help=text)(_function(cls))
    return typer.main.get_command(app)


def _function(cls: type[Kernel]) -> Callable[..., None]:
    """A function with an argument for each parameter, which is what Typer reads options from."""

    def run(**given: Any) -> None:
        around = {name: given.pop(name) for name in _SHARED}
        _run(cls, given, around)

    options = {spec.name: (_option(spec), None) for spec in parameters_of(cls).values()}
    both = {**options, **_SHARED}
    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, default=d, annotation=a) for name, (a, d) in both.items()]
    )
    run.__annotations__ = {name: annotation for name, (annotation, _) in both.items()}
    return run


def _option(spec: Parameter) -> Any:
    """Text, except for switches: the parameter itself checks it, with the same words as in Python and tables."""
    text = _escaped(spec.help.replace("``", ""))
    if spec.type == "choice":
        text += f": {', '.join(spec.options)}"
    if spec.required:
        text += " (required)"
    elif spec.default is not None:
        text += f" (default {str(spec.default).lower() if spec.type == 'flag' else spec.default})"
    name = spec.name.replace("_", "-")
    if spec.type == "flag":
        return Annotated[bool | None, typer.Option(f"--{name}/--no-{name}", help=text, show_default=False)]
    metavar = {"size": "INT", "real": "NUMBER", "lengths": "INT,INT,…"}.get(spec.type, name.upper())
    return Annotated[str | None, typer.Option(f"--{name}", metavar=metavar, help=text)]


def _run(cls: type[Kernel], given: Mapping[str, Any], around: Mapping[str, Any]) -> None:
    specs = parameters_of(cls)
    missing = [f"--{name.replace('_', '-')}" for name, spec in specs.items() if spec.required and given[name] is None]
    missing += ["--gpu"] if around["gpu"] is None else []
    if missing:
        raise KernelcastError(f"{cls.op} needs {', '.join(missing)}; see kernelcast kernel {cls.op} --help")
    values = {name: parse_value(specs[name], text) for name, text in given.items() if text is not None}
    asked = {name: value for name, value in around.items() if name != "json"}
    question = KernelQuestion(op=cls.op, parameters=values, **asked)
    chip, conditions = question.chip, question.conditions
    found, drawn = question.answer()
    if around["json"]:
        print(as_json.to_json(as_json.prediction_fields(found, chip, conditions) | as_json.energy_fields(drawn)))
        return
    from kernelcast.app.report.text import print_prediction

    print_prediction(found, chip, conditions, drawn)


def parse_value(spec: Parameter, text: Any) -> Any:
    """What was typed, in the kind that the parameter checks."""
    if spec.type in ("size", "real"):
        return typed.parse_number(text)
    if spec.type == "lengths":
        try:
            return json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
        except ValueError:
            raise KernelcastError(f"{spec.name} must be a list such as 128,64, not {text!r}") from None
    return text


def example_lines(cls: type[Kernel]) -> list[str]:
    """The op's own examples as commands; long ones go on after a backslash."""
    return [_folded(typed_parameters(example), cls.op) for example in cls.examples]


def _folded(options: list[str], op: str) -> str:
    lines = [f"kernelcast kernel {op}"]
    for option in (*options, f"--gpu {EXAMPLE_GPU}"):
        if len(lines[-1]) + len(option) > EXAMPLE_WIDTH:
            lines.append("   ")
        lines[-1] += f" {option}"
    return " \\\n".join(lines)


def _escaped(text: str) -> str:
    """Typer reads [words] in help as markup; ours are indices."""
    return text.replace("[", r"\[")
