"""Options in groups: a dataclass whose fields are words, in place of one parameter of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING
from typing import Annotated, Any, get_args, get_type_hints

import typer

from kernelcast.app.questions.words import Flag, words_of


def option(word: Any) -> Any:
    """The ``Flag`` of an annotated type, as Typer takes it."""
    return _typed(get_args(word)[1])


def _typed(flag: Flag) -> Any:
    if not flag.names:
        return typer.Argument(metavar=flag.metavar, help=flag.help)
    return typer.Option(*flag.names, help=flag.help, metavar=flag.metavar, rich_help_panel=flag.panel, min=flag.low)


def takes(**groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command with the words of dataclasses in place of its parameters of these names."""

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
    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    return [
        inspect.Parameter(
            word.name, keyword, default=empty if word.default is MISSING else word.default,
            annotation=Annotated[word.kind, _typed(word.flag)],
        )
        for word in words_of(group)
    ]  # fmt: skip
