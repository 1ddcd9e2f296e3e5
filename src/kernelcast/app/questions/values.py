"""Values of parameters: in the parameter's type and range, or one error that says what would be right."""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.app.questions.parameters import CommandParameter

LARGEST = 2**31 - 1  # of a whole number without a maximum of its own: products of two of them fit in 64 bits
_NOUNS = {"str": "a text", "Path": "a path", "Mapping": "a mapping", "Sequence": "a list"}
_SHOWN = 80  # characters of a wrong value


class ArgumentTypeError(KernelcastError, TypeError):
    """An argument that a function does not take, or a value of another type than it takes."""


def union_members(type: Any) -> tuple[Any, ...]:
    """The types of a union; of another type that type."""
    return get_args(type) if get_origin(type) in (Union, types.UnionType) else (type,)


def checked_value(parameter: CommandParameter, value: Any) -> Any:
    members = union_members(parameter.python_type)
    if value is None and (type(None) in members or parameter.default is None):
        return None
    if parameter.python_type is Any:
        if {each.__name__ for each in type(value).__mro__}.isdisjoint(parameter.annotation.split(" | ")):
            raise _wrong(parameter, value, _one_of(parameter.annotation.split(" | ")))
        return value
    if bool in members:
        if isinstance(value, bool) or type(value).__name__ == "bool_":  # NumPy's
            return bool(value)
        raise _wrong(parameter, value, "True or False")
    if int in members or float in members:
        return _number(parameter, value, whole=float not in members)
    lists = [member for member in members if get_origin(member) in (list, Sequence)]
    if lists and str not in members:
        return _list(parameter, value, *get_args(lists[0]))
    return _text(parameter, value, tuple(get_origin(member) or member for member in members))


def _number(parameter: CommandParameter, value: Any, *, whole: bool) -> int | float:
    numeric = isinstance(value, numbers.Integral if whole else numbers.Real)
    if isinstance(value, bool) or not numeric:
        raise _wrong(parameter, value, "a whole number" if whole else "a number")
    low, high = parameter.minimum, parameter.maximum
    if whole:
        low, high = -LARGEST if low is None else low, LARGEST if high is None else high
    if not (low is None or value >= low):
        raise _wrong(parameter, value, f"{low:,} or more")
    if not (high is None or value <= high):
        raise _wrong(parameter, value, f"at most {high:,}")
    try:
        number = int(value) if whole else float(value)
        if not whole and isinstance(value, int):
            number = value  # commands show 4 as it was given, not as 4.0
    except OverflowError:
        number = math.nan
    if math.isnan(number):
        raise _wrong(parameter, value, "a number that a float can be")
    return number


def _list(parameter: CommandParameter, value: Any, of: Any) -> Any:
    """A list of names or paths; one alone is a list of one, and a dict one of NAME=VALUE."""
    if isinstance(value, str | Path):
        value = [value]
    if isinstance(value, Mapping) and "=" in (parameter.metavar or ""):
        value = [f"{name}={each}" for name, each in value.items()]
    if not isinstance(value, Sequence) or not all(isinstance(item, str | of) for item in value):
        raise _wrong(parameter, value, f"a list of {'paths' if of is Path else 'texts'}")
    return value if all(isinstance(item, of) for item in value) else [of(item) for item in value]


def _text(parameter: CommandParameter, value: Any, classes: tuple[Any, ...]) -> Any:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if str in classes and parameter.has_commas and isinstance(value, Sequence) and not isinstance(value, str):
        value = value if Sequence in classes else ",".join(map(str, value))
    elif number and str in classes and (parameter.has_commas or parameter.metavar == "TIME"):
        value = str(value)
    elif Path in classes and str not in classes and isinstance(value, str):
        value = Path(value)
    if not isinstance(value, classes):
        raise _wrong(parameter, value, _one_of([each.__name__ for each in classes if each is not type(None)]))
    return _read(parameter, value) if isinstance(value, str) else value


def _read(parameter: CommandParameter, text: str) -> str | None:
    """What a text means; of a list with commas each item."""
    if parameter.reads is None:
        return text
    if not parameter.has_commas:
        return parameter.reads(text)
    items = [parameter.reads(item.strip()) for item in text.split(",")]
    return ",".join(item for item in items if item is not None) or None


def _one_of(classes: Sequence[str]) -> str:
    names = [_NOUNS.get(name, f"{'an' if name[0] in 'AEIO' else 'a'} {name}") for name in classes]
    return " or ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _wrong(parameter: CommandParameter, value: Any, right: str) -> KernelcastError:
    large = isinstance(value, int) and value.bit_length() > 256  # which Python may refuse to print
    text = "a number of more than 77 digits" if large else repr(value)[:_SHOWN]
    return ArgumentTypeError(f"`{parameter.name}` must be {right}, not {text}")
