"""What tests of the command line share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[..., tuple[int, str, str]]


def strict(text: str) -> Any:
    """JSON that any parser reads: no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def instead(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments with these options in place of those of the same name: a command refuses an option twice."""
    names = {option for option in options if option.startswith("-")}
    kept: list[str] = []
    for at, argument in enumerate(arguments):
        if argument not in names and not (at and arguments[at - 1] in names):
            kept.append(argument)
    return [*kept, *options]
