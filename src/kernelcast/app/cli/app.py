"""The ``kernelcast`` program: its commands, and how it ends."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any

import typer

from kernelcast import plugins
from kernelcast._version import __version__
from kernelcast.app.cli.commands import CommandGroup, with_examples
from kernelcast.errors import KernelcastError, unknown
from kernelcast.stacks.engine_flags import aliases_of

# Modules of this folder; each has register(app). Only that of the command that runs is imported.
COMMANDS: tuple[str | ModuleType, ...] = (
    "calibrate", "collect", "compare", "diagnose", "infer", "kernel", "kernels", "lists", "plan", "replay", "simulate",
    "sweep", "trace", "train", "tune", "web",
)  # fmt: skip
# the module of a command, where the names differ
MODULES = {**dict.fromkeys(("evidence", "gpu", "gpus", "models", "ops"), "lists"), "query": "sweep"}
LAB = ("collect-models", "data", "evaluate", "fit", "validate")
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + the signal, as shells count
_LONG = re.compile(r"(\S{400})\S+")  # what somebody typed: the rest of it says no more
_COMPLETING = "_KERNELCAST_COMPLETE"  # set by a shell that completes a line
_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # the line so far: of bash, of the others
# Typer carries its own copy of Click since 0.2x and used the package before; its base is reached either way.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def completing() -> bool:
    """Whether a shell completes a line, and nobody runs a command."""
    return bool(os.environ.get(_COMPLETING))


def completed_line() -> Sequence[str]:
    """The finished arguments of the line that a shell completes, without the program's name."""
    line = next((os.environ[name] for name in _LINES if name in os.environ), "")
    arguments = line.split()
    return arguments[1:] if line.endswith((" ", "\n", "\t")) else arguments[1:-1]


def _version(wanted: bool) -> None:
    if wanted:
        from kernelcast.forecast.learned import WEIGHTS, version

        typer.echo(f"kernelcast {__version__}, weights {version(WEIGHTS)}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and stop.")
    ] = False,
) -> None:
    """Forecast how long GPU work takes, which part of the GPU limits it, and how far that is from the best.

    Exit codes: 0, 2 where the input is wrong, 3 where goals are not met or a model does not fit in memory, 130 after
    Ctrl-C."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def build(only: str | None = None) -> typer.Typer:
    """The program with all of its commands, or with those of one module."""
    example = "kernelcast kernel gemm --m 4096 --n 4096 --k 4096 --gpu h200_sxm"
    group = with_examples(CommandGroup, example)
    group.elsewhere = dict.fromkeys(LAB, "kernelcast-lab")
    app = typer.Typer(cls=group, invoke_without_command=True)
    app.callback()(_root)
    for name in COMMANDS if only is None else (only,):
        module = name if isinstance(name, ModuleType) else import_module(f"kernelcast.app.cli.{name}")
        module.register(app)
    for added in sorted(plugins.entry_points(plugins.COMMANDS), key=lambda point: point.name) if only is None else ():
        added.load()(app)
    return app


def module_of(arguments: Sequence[str]) -> str | None:
    """The module of the command that ``arguments`` begin with; None: none of ours, or all are needed."""
    name = MODULES.get(arguments[0], arguments[0]) if arguments else ""
    return name if name in COMMANDS else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code: 0 well, 2 the input is wrong, 3 goals are not met or a model does not fit, 130
    Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without µ shows ? and goes on
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        only = module_of(completed_line() if completing() else arguments)
        code = typer.main.get_command(build(only)).main(arguments, prog_name="kernelcast", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UsageError as error:
        return _fail(usage_text(error))
    except KernelcastError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit) as ended:
        return _ended(ended)
    except (OSError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__)


def _ended(by: BrokenPipeError | SystemExit) -> int:
    """Typer ends by SystemExit once a shell has its answer; and so do Typer and Rich when nobody reads."""
    if isinstance(by, SystemExit) and (not by.code or completing()):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        return int(by.code or 0)
    _discard_output()
    return BROKEN_PIPE


def _fail(message: str, code: int = 2) -> int:
    if not completing():  # a shell that completes a line has no place for messages
        with contextlib.suppress(BrokenPipeError):
            text = _LONG.sub(r"\1…", " ".join(message.split()))
            print("kernelcast: error:", text, file=sys.stderr)
    return code


def _discard_output() -> None:
    """Nobody reads: keep the interpreter's last flush from complaining."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def usage_text(error: Any) -> str:
    """What is wrong, what is known, and where help is."""
    context = getattr(error, "ctx", None)
    more = f"; see {context.command_path} --help" if context else ""
    name = type(error).__name__
    if name == "NoSuchOption":
        return _unknown_option(error.option_name, context)
    if name == "MissingParameter" and error.param is not None:
        options = [name for name in error.param.opts if name.startswith("-")]
        return f"missing {options[0] if options else error.param.metavar or error.param.name}{more}"
    message = " ".join(error.format_message().split()).rstrip(".")
    for kind, right in (("valid integer", "a whole number, in digits alone as 8192"), ("valid number", "a number")):
        if kind in message and (quoted := re.search(r"'(--?[\w-]+)'", message)):
            return f"{quoted[1]} must be {right}{more}"
    return f"{message[:1].lower()}{message[1:]}{more}"


def _unknown_option(name: str, context: Any) -> str:
    """With the nearest names, and where all are listed."""
    text = str(unknown("option", name, option_names(context)))
    return f"{text.partition('; known: ')[0]}; `{context.command_path} --help` lists all" if context else text


def option_names(context: Any) -> list[str]:
    """The long options of the command that was running."""
    if context is None:
        return []
    params = context.command.get_params(context)
    names = [name for p in params for name in (*p.opts, *p.secondary_opts)]
    known = {str(p.name) for p in params}
    names += [f"--{alias.replace('_', '-')}" for name in known for alias in aliases_of(name, known) if len(alias) > 1]
    return [name for name in names if name.startswith("--")]
