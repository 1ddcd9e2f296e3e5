"""Command and group classes: lenient about spelling, strict about names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from typer.core import TyperCommand, TyperGroup

from kernelcast import _start
from kernelcast.app.cli.completion import offer_names
from kernelcast.app.cli.targets import check_targets
from kernelcast.errors import KernelcastError, KernelcastWarning, unknown

AnyCommand = TypeVar("AnyCommand", bound="Examples")
_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


class Examples:
    """Commands to try at the end of a help page, as they are: Typer would wrap them."""

    examples: tuple[str, ...] = ()
    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(text.split()) for text in paragraphs)  # the terminal breaks lines
        super().format_help(ctx, formatter)  # type: ignore[misc]
        lines = "\n".join(self.examples).replace("\n", "\n  ")
        formatter.write(f" Example:\n\n  {lines}\n" if lines else "")


class Command(Examples, TyperCommand):
    """Takes --kv_heads for --kv-heads, and --causal true for --causal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell asks how the line may go on
            offer_names(self.params)
        switches = {p.opts[0]: p.secondary_opts[0] for p in self.params if p.opts and p.secondary_opts}
        return super().parse_args(ctx, tidy(args, switches))

    def invoke(self, ctx: Any) -> Any:
        _start.running()
        check_targets(self.name or "", self.params, ctx.params)
        with warnings.catch_warnings():
            warnings.simplefilter("always", KernelcastWarning)
            usual = warnings.showwarning
            warnings.showwarning = lambda message, category, *where, **more: (
                print("kernelcast: warning:", message, file=sys.stderr)
                if issubclass(category, KernelcastWarning)
                else usual(message, category, *where, **more)
            )
            return super().invoke(ctx)


class CommandGroup(Examples, TyperGroup):
    """Says 'unknown command' with the nearest names."""

    kind = "command"
    elsewhere: Mapping[str, str] = {}  # commands that other distributions bring

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            if args[0] in self.elsewhere:
                raise KernelcastError(f"{args[0]} is a command of {self.elsewhere[args[0]]}, which is not installed")
            raise unknown(self.kind, args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def with_examples(base: type[AnyCommand], *lines: str) -> type[AnyCommand]:
    """``base`` for a command with these examples."""
    return type(base.__name__, (base,), {"examples": lines})


def tidy(args: list[str], switches: dict[str, str]) -> list[str]:
    """Dashes for underscores in option names; '--switch word' as '--switch' or '--no-switch'."""
    result: list[str] = []
    for arg in args:
        name, equals, value = arg.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            arg = f"{name}{equals}{value}"
        if name in switches and equals:
            word = value.lower()
            arg = name if word in _TRUE else switches[name] if word in _FALSE else arg
        elif result and result[-1] in switches and arg.lower() in (*_TRUE, *_FALSE):
            name = result.pop()
            arg = name if arg.lower() in _TRUE else switches[name]
        result.append(arg)
    return result
