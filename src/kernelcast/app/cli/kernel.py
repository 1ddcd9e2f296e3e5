"""``kernelcast kernel OP``: one call. A sub-command an op, made from the op's parameters when it is used."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import typer

from kernelcast.app.cli.commands import Command, CommandGroup, typer_parameter, with_examples
from kernelcast.app.questions import shared
from kernelcast.app.questions.kernel import KernelQuestion, op_options
from kernelcast.app.questions.parameters import CommandParameter, bound, command_parameters
from kernelcast.app.report.json import energy_fields, to_json
from kernelcast.app.report.kernel import doc_text, prediction_fields, print_prediction
from kernelcast.errors import KernelcastError
from kernelcast.ops import REGISTRY, Kernel, parameters_of
from kernelcast.ops.base import Parameter
from kernelcast.ops.op_names import unknown_op

EXAMPLE_GPU = "h200_sxm"
EXAMPLE_WIDTH = 70
_OF_THE_OP = ("op", "parameters")


class OpGroup(CommandGroup):
    """Its commands are the registry; only the one that is used is made."""

    noun = "op"

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(REGISTRY)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        op = cmd_name if cmd_name in REGISTRY else cmd_name.replace("-", "_")
        return op_command(REGISTRY[op]) if op in REGISTRY else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown_op(args[0], REGISTRY)
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=with_examples(OpGroup, *example_lines(REGISTRY["gemm"])), invoke_without_command=True)
    group.callback()(_kernel)
    app.add_typer(group, name="kernel")


def _kernel(ctx: typer.Context) -> None:
    """Predict one kernel call: its time, what limits it, and what the best kernel would reach."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def op_command(cls: type[Kernel]) -> Any:
    """The Typer command of one op: an option for each of its parameters, and those of every kernel call."""
    around = [each for each in command_parameters(KernelQuestion) if each.name not in _OF_THE_OP]
    around.append(bound("json", shared.Json, False))
    taken = {parameter.name for parameter in around}
    parameters = [*(_option(spec) for spec in parameters_of(cls).values() if spec.name not in taken), *around]

    def run(**given: Any) -> None:
        _run(cls, {name: given.pop(name) for name in [*given] if name not in taken}, given)

    typed = [typer_parameter(parameter) for parameter in parameters]
    run.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in typed}
    values = {parameter.name: parameter.values for parameter in parameters if parameter.values}
    command = with_examples(Command, *example_lines(cls), values=values)
    app = typer.Typer(add_completion=False)
    app.command(cls.op, cls=command, help=_escaped(doc_text(cls)))(run)
    return typer.main.get_command(app)


def _option(spec: Parameter) -> CommandParameter:
    """Text, except for switches: the parameter itself checks it, as in Python and tables."""
    text = _escaped(spec.help.replace("``", ""))
    if spec.type == "choice":
        text += f": {', '.join(spec.options)}"
    if spec.required:
        text += " (required)"
    elif spec.default is not None:
        text += f" (default {str(spec.default).lower() if spec.type == 'flag' else spec.default})"
    name = spec.name.replace("_", "-")
    if spec.type == "flag":
        return CommandParameter(text, (f"--{name}/--no-{name}",), type=bool | None, name=spec.name, default=None)
    metavar = {"size": "INT", "real": "NUMBER", "lengths": "INT,INT,…"}.get(spec.type, name.upper())
    values = partial(tuple, spec.options) if spec.type == "choice" else None
    return CommandParameter(text, (f"--{name}",), metavar, type=str | None, name=spec.name, default=None, values=values)


def _run(cls: type[Kernel], given: Mapping[str, Any], around: dict[str, Any]) -> None:
    json = around.pop("json")
    specs = parameters_of(cls)
    missing = [f"`{name}`" for name, spec in specs.items() if spec.required and given.get(name) is None]
    missing += ["`gpu`"] if around["gpu"] is None else []
    if missing:
        raise KernelcastError(f"{cls.op} needs {', '.join(missing)}; see kernelcast kernel {cls.op} --help")
    values = {name: parse_value(specs[name], text) for name, text in given.items() if text is not None}
    question = KernelQuestion(op=cls.op, parameters=values, **around)
    gpu, conditions = question.resolved_gpu, question.conditions
    prediction, energy = question.answer()
    if json:
        print(to_json(prediction_fields(prediction, gpu, conditions) | energy_fields(energy)))
    else:
        print_prediction(prediction, gpu, conditions, energy)


def parse_value(spec: Parameter, text: Any) -> Any:
    """What was typed, in the type that the parameter checks."""
    if spec.type in ("size", "real"):
        return parse_number(text)
    if spec.type == "lengths":
        try:
            return json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
        except ValueError:
            raise KernelcastError(f"{spec.name} must be a list such as 128,64, not {text!r}") from None
    return text


def parse_number(text: str) -> Any:
    """An int, a float, or the text itself when it is neither."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def example_lines(cls: type[Kernel]) -> list[str]:
    """The op's own examples as commands; long ones go on after a backslash."""
    return [_folded(op_options(example), cls.op) for example in cls.examples]


def _folded(options: list[str], op: str) -> str:
    lines = [f"kernelcast kernel {op}"]
    for option in (*options, f"--gpu {EXAMPLE_GPU}"):
        if len(lines[-1]) + len(option) > EXAMPLE_WIDTH:
            lines.append("   ")
        lines[-1] += f" {option}"
    return " \\\n".join(lines)


def _escaped(text: str) -> str:
    """Typer reads [text] in help as markup; ours are indices."""
    return text.replace("[", r"\[")
