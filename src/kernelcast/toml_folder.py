"""TOML files, and catalogues of them: a file's name is an id, its keys are the other fields of a dataclass."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kernelcast.errors import KernelcastError, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)


def read_toml(path: Path, what: str = "file") -> dict[str, Any]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"), path)
    except FileNotFoundError:
        raise KernelcastError(f"no {what} {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KernelcastError(f"{path}: not readable as TOML: {error}") from None


def parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KernelcastError(f"{path}: not readable as TOML: {error}") from None


def _read(folder: Path, cls: type[T], name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    path = folder / f"{name.lower()}.toml"
    if not path.exists():
        what = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()  # TrainingStack: training stack
        raise unknown(what, name, ids_in(folder))
    raw = read_toml(path)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if base in above:
        raise KernelcastError(f"{path.name}: base = {base!r} leads back to itself")
    below = _read(folder, cls, base, (*above, name.lower()))
    tables = {key: {**below[key], **raw[key]} for key in raw if isinstance(below.get(key), dict)}
    return {**below, **raw, **tables}


def ids_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_from(folder: Path, cls: type[T], name: str) -> T:
    """The ``cls`` called ``name``, its tables as pairs. ``base`` names a file that has what this one does not say; of
    a file without one only fields with a default may be left out."""
    path = folder / f"{name.lower()}.toml"
    raw = _read(folder, cls, name)
    known = {x.name: x.default is x.default_factory is MISSING for x in fields(cls) if x.name != "id"}
    missing = sorted(name for name, needed in known.items() if needed and name not in raw)
    extra = sorted(set(raw) - set(known))
    if missing or extra:
        lists = (", ".join(names) or "nothing" for names in (missing, extra))
        raise KernelcastError("{}: missing {}; unknown {}".format(path.name, *lists))
    values = {key: tuple(value.items()) if isinstance(value, dict) else value for key, value in raw.items()}
    make: Callable[..., T] = cls  # whose fields only the check above knows
    return make(id=path.stem, **values)
