"""Errors that a person can act on: one line that says what is wrong and what would be right."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

NOT_MET = 3  # exit code of an answer that is no: goals are not met, or a model does not fit

SHOWN = 12  # names in an error
LISTED_BY = {"gpu": "kernelcast gpus", "model": "kernelcast models", "op": "kernelcast ops"}


class KernelcastError(ValueError):
    """Base of every error that kernelcast raises for its input; the CLI prints it and exits with ``exit_code``."""

    exit_code: ClassVar[int] = 2


class DoesNotFit(KernelcastError):  # noqa: N818  # it says what is wrong
    """The input is right, and the model needs more memory than there is; ``memory``: what it needs, where one batch
    decides."""

    exit_code = NOT_MET

    def __init__(self, message: str, memory: Any = None) -> None:
        super().__init__(message)
        self.memory = memory


def nearest(name: str, known: Iterable[str], limit: int = 3) -> str:
    """' (did you mean …?)' for the known names closest to ``name``, or ''."""
    known = list(known)
    folded = {each.lower(): each for each in known}
    hits = difflib.get_close_matches(str(name).lower(), folded, n=limit, cutoff=0.5)
    return f" (did you mean {', '.join(folded[h] for h in hits)}?)" if hits else ""


def unknown(what: str, name: object, known: Iterable[str], meant: Collection[str] = ()) -> KernelcastError:
    """'unknown stack 'vlm' (did you mean …?); known: a, b, c'; of a long list a few, or the command that lists it.
    ``meant``: what the name stands for elsewhere, ahead of those that are spelt alike."""
    names = sorted(known)
    hint = f" (did you mean {', '.join(meant)}?)" if meant else nearest(str(name), names)
    if what in LISTED_BY and len(names) > SHOWN:
        return KernelcastError(f"unknown {what} {name!r}{hint}; `{LISTED_BY[what]}` lists {len(names)}")
    shown = ", ".join(names) if len(names) <= SHOWN else f"{len(names)} names"
    if len(names) > SHOWN and not hint:
        shown = f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
    return KernelcastError(f"unknown {what} {name!r}{hint}; known: {shown}")


def refuse_unknown(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """The first unknown name, as an error."""
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


class KernelcastWarning(UserWarning):
    """What a person should know of an answer that is given all the same; the CLI prints it in one line."""


def warn(message: str) -> None:
    """Warn the caller of kernelcast."""
    warnings.warn(message, KernelcastWarning, stacklevel=3)
