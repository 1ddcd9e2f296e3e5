"""Commands from questions: parameters become options, errors name their flags, files to write are checked first."""

from __future__ import annotations

import inspect
import json as json_module
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from kernelcast import _start
from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import CommandParameter, bound, command_parameters
from kernelcast.errors import KernelcastError, KernelcastWarning, unknown
from kernelcast.stacks.engine_flags import parameter_called, without_effect

AnyCommand = TypeVar("AnyCommand", bound="Examples")
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")
_WRITTEN = ("-o", "--output", "--out", "--plot", "--timeline", "--requests-out")
_TIMELINE = ("--trace", "FILE.json")  # other commands read a --trace, of requests
_FOLDER = "DIR"  # what help calls a folder
_MAKES_FOLDERS = ("collect", "collect-models")  # commands that make the folder that their file goes to
_PAIR = re.compile(r"[a-z0-9]+:[0-9.]+(ms|s)?", re.IGNORECASE)  # as in --goodput ttft:500 tpot:30
Values = Callable[[], Iterable[str]]
# what errors call a parameter: `name`, a name that they begin with, or one with an underscore
_NAME = re.compile(r"`([a-z]\w*)`|^([a-z]+)(?=[ :])|(?<![\w./'\"=-])([a-z]+(?:_[a-z0-9]+)+)(?![\w./'\"=(-])")


class Examples:
    """Commands to try at the end of a help page, as they are: Typer would wrap them."""

    examples: tuple[str, ...] = ()
    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)  # the terminal breaks lines
        _fold_flags()
        super().format_help(ctx, formatter)  # type: ignore[misc]
        lines = "\n".join(self.examples).replace("\n", "\n  ")
        formatter.write(f" Example:\n\n  {lines}\n" if lines else "")


def _fold_flags() -> None:
    """Typer puts all names of an option into one word, and its negative form into a column of its own; Rich cuts off
    what is too long. So: one name a line, negative ones below."""
    rich_utils: Any = import_module("typer.rich_utils")
    usual, last = rich_utils.highlighter, list[Any]()
    if not isinstance(usual, rich_utils.RegexHighlighter):  # replaced already
        return

    def names(text: Any) -> Any:
        if not isinstance(text, str) or not text.startswith("-"):
            shown = usual(text)
            shown.overflow = "fold"  # other names of an option, in its help
            return shown
        last[:] = [usual(text.replace(",", "\n"))]
        last[0].overflow = "fold"
        return last[0]

    def negative(text: str) -> Any:
        if text:
            last[0].append_text(usual("\n" + text.replace(",", "\n")))
        return usual("")

    rich_utils.highlighter, rich_utils.negative_highlighter = names, negative


class Command(Examples, TyperCommand):
    """Takes --kv_heads for --kv-heads, --causal true for --causal, and engines' names of parameters."""

    values: ClassVar[Mapping[str, Callable[[], Iterable[str]]]] = {}  # that a shell may complete, by parameter

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell completes a line
            offer_names(self.params, self.values)
        switches = {p.opts[0]: p.secondary_opts[0] for p in self.params if p.opts and p.secondary_opts}
        args, left_out = canonical_flags(args, self.params)
        args = tidy(args, switches)
        if not ctx.resilient_parsing:
            refuse_twice(self.make_parser(ctx).parse_args(list(args))[2])
        for name in left_out:
            print(f"kernelcast: {name} changes nothing in the forecast", file=sys.stderr)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        _start.running()
        with warnings.catch_warnings():
            warnings.simplefilter("always", KernelcastWarning)
            usual = warnings.showwarning
            warnings.showwarning = lambda message, category, *where, **more: (
                print("kernelcast: warning:", with_flags(str(message), self.params), file=sys.stderr)
                if issubclass(category, KernelcastWarning)
                else usual(message, category, *where, **more)
            )
            try:
                check_targets(self.name or "", self.params, ctx.params)
                return super().invoke(ctx)
            except KernelcastError as error:
                error.args = (with_flags(str(error), self.params),)
                raise


class CommandGroup(Examples, TyperGroup):
    """Says 'unknown command' with the nearest names."""

    noun = "command"
    elsewhere: Mapping[str, str] = {}  # commands that other distributions bring

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            if args[0] in self.elsewhere:
                raise KernelcastError(f"{args[0]} is a command of {self.elsewhere[args[0]]}, which is not installed: "
                                      "pip install ./src/kernelcast_lab in a clone of the repository")  # fmt: skip
            raise unknown(self.noun, args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def with_examples(base: type[AnyCommand], *lines: str, **attributes: Any) -> type[AnyCommand]:
    """``base`` for a command with these examples."""
    return type(base.__name__, (base,), {"examples": lines, **attributes})


def with_flags(message: str, params: Iterable[Any]) -> str:
    """A library's message with the command's flags in place of its parameters' names."""
    flags = {param.name: next((name for name in param.opts if name.startswith("--")), param.metavar or param.name)
             for param in params}  # fmt: skip

    def flag(match: re.Match[str]) -> str:
        if match[2] and not str(flags.get(match[2])).startswith("--"):  # an argument, or plain text
            return match[0]
        return str(flags.get(match[1] or match[2] or match[3], match[0]))

    return _NAME.sub(flag, message)


def canonical_flags(args: list[str], params: Iterable[Any]) -> tuple[list[str], list[str]]:
    """Engines' flags as the command's own, pairs after --goodput as one option each; and the flags that are left out,
    as they change nothing in a forecast."""
    options = {str(param.name): param for param in params}
    known = {name for name, param in options.items() if any(opt.startswith("-") for opt in param.opts)}
    result: list[str] = []
    left_out: list[str] = []
    no_effect = without_effect(known)
    values, several = False, ""
    for arg in args:
        name, equals, value = arg.partition("=")
        parameter = name.lstrip("-").replace("-", "_") if name.startswith("-") else ""
        if values and not parameter:  # of a flag that was left out
            values = False
            continue
        if parameter in no_effect and parameter not in known and {"stack", "model"} <= options.keys():
            left_out.append(name)
            values = no_effect[parameter] and not equals
            continue
        if found := parameter_called(parameter, known):
            name = options[found[0]].opts[0]
            if not found[1]:
                name = options[found[0]].secondary_opts[0]
            arg = f"{name}{equals}{value}"
        elif parameter in known and len(parameter) > 1 and not name.startswith("--"):  # vLLM's -tp
            arg = f"-{arg}"
        pair = bool(_PAIR.fullmatch(arg))
        if pair and several and result[-1] != several:
            result.append(several)
        several = several if pair else name if _many(options.get(parameter)) else ""
        result.append(arg)
    return result, left_out


def _many(param: Any) -> bool:
    return bool(getattr(param, "multiple", False))


def refuse_twice(order: Iterable[Any]) -> None:
    """An option that is given more than once, where it takes one value: the last would win silently."""
    seen: set[str] = set()
    for param in order:
        if param.name in seen and not _many(param) and param.opts[0].startswith("-"):
            commas = str(param.metavar or "").endswith(",..")
            raise KernelcastError(f"{param.opts[0]} is given twice: give it once{', with commas' if commas else ''}")
        seen.add(param.name)


def tidy(args: list[str], switches: dict[str, str]) -> list[str]:
    """Dashes for underscores in option names; '--switch value' as '--switch' or '--no-switch'."""
    result: list[str] = []
    for arg in args:
        name, equals, value = arg.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            arg = f"{name}{equals}{value}"
        if name in switches and equals:
            text = value.lower()
            arg = name if text in _TRUE else switches[name] if text in _FALSE else arg
        elif result and result[-1] in switches and arg.lower() in (*_TRUE, *_FALSE):
            name = result.pop()
            arg = name if arg.lower() in _TRUE else switches[name]
        result.append(arg)
    return result


# ---- a command from the dataclasses that it takes ----
def add_command(app: typer.Typer, run: Callable[..., None], *examples: str, name: str | None = None) -> None:
    """``run`` as a command. Of its parameters a dataclass stands for its fields; others are annotated as such fields
    are, or a ``typer.Context``."""
    hints = get_type_hints(run, include_extras=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    typed: list[inspect.Parameter] = []
    values: dict[str, Any] = {}
    for given in inspect.signature(run).parameters.values():
        hint = hints[given.name]
        if hint is typer.Context:
            typed.append(given.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        members = command_parameters(hint) if is_dataclass(hint) else (bound(given.name, hint, given.default),)
        if is_dataclass(hint):
            groups[given.name] = (hint, [parameter.name for parameter in members])
        typed += [typer_parameter(parameter) for parameter in members]
        values |= {parameter.name: parameter.values for parameter in members if parameter.values}

    def command(**given: Any) -> None:
        questions = {at: cls(**{name: given.pop(name) for name in names}) for at, (cls, names) in groups.items()}
        run(**given, **questions)

    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in typed}
    app.command(name or run.__name__, cls=with_examples(Command, *examples, values=values))(command)


def typer_parameter(parameter: CommandParameter) -> inspect.Parameter:
    default = inspect.Parameter.empty if parameter.required or parameter.default is inspect.Parameter.empty else (
        parameter.default)  # fmt: skip
    return inspect.Parameter(parameter.name, inspect.Parameter.KEYWORD_ONLY, default=default,
                             annotation=Annotated[parameter.type, typer_info(parameter)])  # fmt: skip


def typer_info(parameter: CommandParameter) -> Any:
    """A parameter as Typer takes it."""
    if not parameter.flags:
        return typer.Argument(metavar=parameter.metavar, help=parameter.help)
    also = ", ".join(f"--{alias.replace('_', '-')}" for alias in parameter.aliases if len(alias) > 1)
    help = f"{parameter.help} (also {also})" if also else parameter.help
    # ``minimum`` is checked with the value (questions/values.py): a range would take room of the help
    return typer.Option(*parameter.flags, help=help, metavar=parameter.metavar, rich_help_panel=parameter.panel)


def typed(name: str, annotation: Any) -> Any:
    """The same of one annotated type, for commands with signatures of their own."""
    return typer_info(bound(name, annotation, None))


Json = Annotated[bool, typed("json", shared.Json)]
PredictorName = Annotated[str, typed("predictor", shared.PredictorName)]
WeightsFolder = Annotated[Path | None, typed("weights", shared.WeightsFolder)]


def given_options(ctx: typer.Context) -> set[str]:
    """Options that were given, not left to their defaults."""
    return {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") != "DEFAULT"}


def print_result(result: Any, json: bool, fields: Callable[..., Any], show: Callable[..., None], *more: Any) -> None:
    """A result as JSON, or as text; ``more``: what both functions take beside it."""
    if json:
        typer.echo(json_module.dumps(fields(result, *more)))
    else:
        show(result, *more)


# ---- files that a command writes: refused before the work, not after it ----
def check_targets(command: str, params: Iterable[Any], given: Mapping[str, Any]) -> None:
    """Refuse what a command could not write; ``given``: what its options are, by their names."""
    from kernelcast.files import check_folder, check_writable

    for param in params:
        target = given.get(param.name)
        if not isinstance(target, Path) or not is_written(param):
            continue
        if param.metavar == _FOLDER:
            check_folder(target)
            continue
        if command in _MAKES_FOLDERS:
            check_folder(target.parent)
        if command not in _MAKES_FOLDERS or target.parent.is_dir():
            check_writable(target)
        if "--plot" in param.opts:
            from kernelcast.app.report.plot import check_picture

            check_picture(target)


def is_written(param: Any) -> bool:
    flag, metavar = _TIMELINE
    return any(name in _WRITTEN or (name == flag and param.metavar == metavar) for name in param.opts)


# ---- a progress bar on stderr, for commands that take their time ----
class ProgressReport(Protocol):
    """Reports how far a task is; ``extra``: text beside its name."""

    def __call__(self, done: int, total: int, extra: str = "") -> None: ...


def _silent(done: int, total: int, extra: str = "") -> None:
    """Reports nothing."""


@contextmanager
def progress_bar(*, transient: bool = False) -> Iterator[Callable[[str], ProgressReport]]:
    """A function that starts a task by its name. Shown of each, from its first report on: the name, how much of how
    much is done, the time left. ``transient``: nothing stays on the screen at the end."""
    if transient and not sys.stderr.isatty():  # nobody looks, and Rich would leave an empty line
        yield lambda name: _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=transient) as progress:

        def start(name: str) -> ProgressReport:
            task = progress.add_task(name, total=None, visible=False)

            def report(done: int, total: int, extra: str = "") -> None:
                description = f"{name} {extra}".rstrip()
                progress.update(task, completed=done, total=total, description=description, visible=True)

            return report

        yield start


# ---- what a shell offers after Tab: names of GPUs, models, ops and stacks ----
@dataclass(frozen=True)
class Item:
    """A completion, as Typer shows it to shells."""

    value: str
    type: str = "plain"
    help: str | None = None


def offer_names(params: Iterable[Any], values: Mapping[str, Values]) -> None:
    """Let the options and arguments of a command complete names; of a command with a signature of its own, those that
    have the flags of others."""
    values = values or _by_name()
    for param in params:
        if param.name in values:
            param.shell_complete = partial(_offered, values[param.name], param.shell_complete)


def _offered(values: Values, usual: Callable[..., Any], ctx: Any, incomplete: str) -> Any:
    """Names that go on with what was typed; of a list with commas, its last one."""
    before, comma, last = incomplete.rpartition(",")
    names = [name for name in values() if name.lower().startswith(last.lower())]
    return [Item(f"{before}{comma}{name}") for name in names] or usual(ctx, incomplete)


def _by_name() -> dict[str, Values]:
    from kernelcast.app.questions.evidence import EvidenceQuestion
    from kernelcast.app.questions.infer import InferQuestion
    from kernelcast.app.questions.parameters import command_parameters

    parameters = (*command_parameters(InferQuestion), *command_parameters(EvidenceQuestion))
    return {parameter.name: parameter.values for parameter in parameters if parameter.values}
