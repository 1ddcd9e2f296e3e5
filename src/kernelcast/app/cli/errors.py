"""Typer's usage errors as one line in kernelcast's own words."""

from __future__ import annotations

from typing import Any

import typer

from kernelcast.errors import unknown

# Typer carries its own copy of Click since 0.2x and used the package before; its base is reached either way.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def usage_text(error: Any) -> str:
    """What is wrong, what is known, and where help is."""
    context = getattr(error, "ctx", None)
    more = f"; see {context.command_path} --help" if context else ""
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return f"{unknown('option', error.option_name, option_names(context))}"
    if kind == "MissingParameter" and error.param is not None:
        options = [name for name in error.param.opts if name.startswith("-")]
        return f"missing {options[0] if options else error.param.metavar or error.param.name}{more}"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message[:1].lower()}{message[1:]}{more}"


def option_names(context: Any) -> list[str]:
    """The long options of the command that was running."""
    if context is None:
        return []
    found = [name for p in context.command.get_params(context) for name in (*p.opts, *p.secondary_opts)]
    return [name for name in found if name.startswith("--")]
