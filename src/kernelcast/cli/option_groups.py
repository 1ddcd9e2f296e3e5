"""Options in groups: a dataclass whose fields are options, in place of one parameter of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import typer


def option_of(panel: str) -> Callable[..., Any]:
    """Options of a group, which help shows under ``panel``."""

    def option(*names: str, help: str, metavar: str | None = None) -> Any:
        return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel)

    return option


def takes(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with the options of dataclasses in place of its parameters of these names."""

    def with_groups(command: Callable[..., None]) -> Callable[..., None]:
        own, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        members: dict[str, list[str]] = {}
        for name, parameter in own.parameters.items():
            if name in groups:
                words = _parameters(groups[name])
                members[name] = [word.name for word in words]
                parameters += words
            else:
                kept = parameter.replace(
                    kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(name, parameter.annotation)
                )
                parameters.append(kept)

        @functools.wraps(command)
        def grouped(**given: Any) -> None:
            chosen = {
                name: groups[name](**{word: given.pop(word) for word in words}) for name, words in members.items()
            }
            command(**given, **chosen)

        grouped.__signature__ = own.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
        grouped.__annotations__ = {p.name: p.annotation for p in parameters}
        del grouped.__wrapped__  # Typer would look at the command itself
        return grouped

    return with_groups


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(group)
    ]


@functools.cache
def flag_of(group: type, name: str) -> str:
    """The first flag of an option."""
    option = get_type_hints(group, include_extras=True)[name].__metadata__[0]
    # until Typer has looked at it, the first flag stands where a default would
    flags = [option.default, *(option.param_decls or ())]
    return next(flag for flag in flags if isinstance(flag, str) and flag.startswith("--")).split("/")[0]
