"""Command and group classes: lenient about spelling, strict about names."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from kernelcast.errors import unknown

_TRUE, _FALSE = ("true", "yes", "1", "on"), ("false", "no", "0", "off")


class Command(TyperCommand):
    """Takes --kv_heads for --kv-heads, and --causal true for --causal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {p.opts[0]: p.secondary_opts[0] for p in self.params if p.opts and p.secondary_opts}
        return super().parse_args(ctx, tidy(args, switches))


class CommandGroup(TyperGroup):
    """Says 'unknown command' with the nearest names."""

    kind = "command"

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise unknown(self.kind, args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


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
