"""The ``kernelcast`` program: its commands, and how it ends."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer

from kernelcast._version import __version__
from kernelcast.cli import (
    calibrate,
    collect,
    compare,
    diagnose,
    evidence,
    infer,
    kernel,
    kernels,
    lists,
    plan,
    query,
    replay,
    simulate,
    sweep,
    trace,
    tune,
    validate,
)
from kernelcast.cli.commands import CommandGroup, with_examples
from kernelcast.cli.errors import UsageError, usage_text
from kernelcast.errors import KernelcastError

# each has register(app)
COMMANDS = (
    calibrate, collect, compare, diagnose, evidence, infer, kernel, kernels, lists, plan, query, replay, simulate,
    sweep, trace, tune, validate,
)  # fmt: skip
LAB = ("collect-models", "data", "evaluate", "fit")
ADDED = "kernelcast.commands"  # entry points by which other distributions (kernelcast-lab) add theirs
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + the signal, as shells count


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernelcast {__version__}")
        raise typer.Exit


def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Forecast how long GPU work takes, which part of the chip limits it, and how far that is from the best."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def build() -> typer.Typer:
    example = "kernelcast kernel gemm --m 4096 --n 4096 --k 4096 --gpu h200_sxm"
    group = with_examples(CommandGroup, example)
    group.elsewhere = dict.fromkeys(LAB, "kernelcast-lab")
    app = typer.Typer(cls=group, add_completion=False, invoke_without_command=True)
    app.callback()(_root)
    for module in COMMANDS:
        module.register(app)
    for added in sorted(entry_points(group=ADDED), key=lambda point: point.name):
        added.load()(app)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code: 0 well, 2 the input is wrong, 130 Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without µ shows ? and goes on
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = typer.main.get_command(build()).main(arguments, prog_name="kernelcast", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UsageError as error:
        return _fail(usage_text(error))
    except KernelcastError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # Typer and Rich turn a broken pipe into SystemExit
        _discard_output()
        return BROKEN_PIPE
    except (OSError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__)


def _fail(message: str) -> int:
    with contextlib.suppress(BrokenPipeError):
        print("kernelcast: error:", " ".join(message.split()), file=sys.stderr)
    return 2


def _discard_output() -> None:
    """Nobody reads: keep the interpreter's last flush from complaining."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
