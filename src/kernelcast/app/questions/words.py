"""Words of a question: fields of a dataclass that say how they are typed on a command line, and what they mean.

A question is asked from Python, on the command line and over the web by the same words; all of them read it here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

_KNOWN: dict[type, tuple[Word, ...]] = {}


@dataclass(frozen=True)
class Flag:
    """How a field is typed: its flags (none: it stands alone), what it means, and under which heading help shows it.

    ``typed``: what a command line can give, where Python may give more (a ``Gpu`` for its name); None: the field's own
    type. ``python``: the type as one writes it, where importing it would take long.
    """

    names: tuple[str, ...]
    help: str
    metavar: str | None = None
    panel: str | None = None
    typed: Any = None
    low: float | None = None
    python: str = ""


def flag(*names: str, help: str, metavar: str | None = None, typed: Any = None, low: float | None = None,
         python: str = "") -> Flag:  # fmt: skip
    """A flag under no heading of its own."""
    return Flag(names, help, metavar, None, typed, low, python)


def flags_under(panel: str) -> Callable[..., Flag]:
    """Flags that help shows under ``panel``."""

    def under(*names: str, help: str, metavar: str | None = None, typed: Any = None) -> Flag:
        return Flag(names, help, metavar, panel, typed)

    return under


@dataclass(frozen=True)
class Word:
    """A field of a question: ``kind`` is its type as a command line has it."""

    name: str
    flag: Flag
    kind: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def option(self) -> str:
        """The first flag, its positive form; empty: it stands alone."""
        return self.flag.names[0].split("/")[0] if self.flag.names else ""

    @property
    def switched_off(self) -> str:
        """The flag that says no; empty: there is none."""
        return self.flag.names[0].partition("/")[2] if self.flag.names else ""

    @property
    def of_file(self) -> bool:
        """Whether it names a file."""
        return Path in options_of(self.kind)


def options_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another type that type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def words_of(question: Any) -> tuple[Word, ...]:
    """All words of a question, in order: what stands alone first, then what has no heading of its own."""
    if question not in _KNOWN:
        _KNOWN[question] = tuple(
            sorted(_words(question), key=lambda word: (bool(word.flag.names), word.flag.panel is not None))
        )
    return _KNOWN[question]


def _words(question: Any) -> Iterator[Word]:
    hints = get_type_hints(question, include_extras=True)
    for one in fields(question):
        hint = hints[one.name]
        if get_origin(hint) is not Annotated:
            raise TypeError(f"{question.__name__}.{one.name} has no Flag")
        kind, own = get_args(hint)[:2]
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        yield Word(one.name, own, own.typed or kind, default)


def flag_of(question: Any, name: str) -> str:
    """The first flag of a word."""
    return next(word.option for word in words_of(question) if word.name == name)
