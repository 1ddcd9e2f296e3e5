"""Parameters of a question: annotated fields of a dataclass, each defined once.

The command line's options, Python's signatures, the web's bodies, completion and the docs are all read from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from kernelcast.app.questions.values import checked_value, union_members
from kernelcast.errors import KernelcastError
from kernelcast.stacks.engine_flags import aliases_of

POSITIONAL = ("model", "gpu", "gpus")  # parameters that may be given without their names
_CACHE: dict[type, tuple[CommandParameter, ...]] = {}


@dataclass(frozen=True)
class CommandParameter:
    """A parameter as users see it.

    ``type``: what a command line can give, where Python takes more (a ``Gpu`` beside its name). ``annotation``: the
    Python type as written, where importing it would take long. ``unless_given``: what None stands for. ``values``:
    the names that it is one of, looked up when they are needed. ``reads``: the name that a text means, of a list with
    commas each; None: as not given.
    """

    help: str
    flags: tuple[str, ...] = ()  # none: a positional argument
    metavar: str | None = None
    panel: str | None = None  # heading in --help
    minimum: float | None = None
    maximum: float | None = None
    unless_given: Any = None
    values: Callable[[], Iterable[str]] | None = None
    reads: Callable[[str], str | None] | None = None
    type: Any = None
    annotation: str = ""
    python_type: Any = None
    name: str = ""
    aliases: tuple[str, ...] = ()  # engines' names of it
    default: Any = field(default_factory=lambda: MISSING)

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def option(self) -> str:
        """The first flag, in its positive form; empty for an argument."""
        return self.flags[0].partition("/")[0] if self.flags else ""

    @property
    def negative_option(self) -> str:
        return self.flags[0].partition("/")[2] if self.flags else ""

    @property
    def is_file(self) -> bool:
        return Path in union_members(self.type)

    @property
    def has_commas(self) -> bool:
        """Whether the command line writes a list with commas."""
        return bool(self.metavar) and str(self.metavar).endswith(",..")


def argument(metavar: str, help: str, **more: Any) -> CommandParameter:
    """A positional argument."""
    return CommandParameter(help, metavar=metavar, **more)


def option(*flags: str, help: str, unless_given: Any = None, **more: Any) -> CommandParameter:
    """An option; ``--`` and the field's name come first unless ``flags`` have it."""
    text = help if unless_given is None else f"{help} ({unless_given})"
    return CommandParameter(text, flags or ("",), unless_given=unless_given, **more)


def bound(name: str, annotation: Any, default: Any) -> CommandParameter:
    """The parameter of an annotated field or argument, with its name, flags, type and default."""
    if get_origin(annotation) is not Annotated:
        raise TypeError(f"{name} has no CommandParameter")
    type, parameter = get_args(annotation)[:2]
    flag = f"--{name.replace('_', '-')}"
    flags = tuple(given or flag for given in parameter.flags)
    if flags and not any(flag in given.split("/") for given in flags):
        flags = (flag, *flags)
    return replace(parameter, name=name, flags=flags, type=parameter.type or type, python_type=type, default=default)


def command_parameters(question: Any) -> tuple[CommandParameter, ...]:
    """All parameters of a question: arguments first, then options without a panel, then the panels."""
    if question not in _CACHE:
        hints = get_type_hints(question, include_extras=True)
        parameters = []
        known = {member.name for member in fields(question)}
        for member in fields(question):
            default = member.default if member.default_factory is MISSING else member.default_factory()
            parameter = bound(member.name, hints[member.name], default)
            home = next(cls for cls in question.__mro__ if member.name in inspect.get_annotations(cls))
            panel = parameter.panel or home.__dict__.get("panel")
            parameters.append(replace(parameter, panel=panel, aliases=aliases_of(member.name, known)))
        _CACHE[question] = tuple(
            sorted(parameters, key=lambda parameter_: (bool(parameter_.flags), parameter_.panel is not None))
        )
    return _CACHE[question]


@dataclass(frozen=True)
class Question:
    """Parameters of a command. Errors name parameters in backquotes; the command line shows their flags instead.

    ``panel``: the heading that --help shows the fields of a class under.
    """

    command: ClassVar[str]
    panel: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for parameter in command_parameters(type(self)):
            given = getattr(self, parameter.name)
            if given is not parameter.default and (value := checked_value(parameter, given)) is not given:
                object.__setattr__(self, parameter.name, value)

    def given(self, *names: str) -> list[str]:
        """Which of these parameters differ from their defaults, quoted for a message."""
        defaults = {member.name: member.default for member in fields(self)}
        return [f"`{name}`" for name in names if getattr(self, name) != defaults[name]]

    def value(self, name: str) -> Any:
        """A parameter's value, or what stands for None."""
        value = getattr(self, name)
        if value is not None:
            return value
        return next(parameter.unless_given for parameter in command_parameters(type(self)) if parameter.name == name)

    def refuse(self, names: Iterable[str], because: str) -> None:
        """Refuse these parameters where they are given."""
        if given := self.given(*names):
            raise KernelcastError(f"{because}: leave out {', '.join(given)}")
