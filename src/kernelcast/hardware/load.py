"""Read GPU files (TOML) and find a GPU by id, by the name that its driver prints, or by path."""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware.consistent import check_consistent
from kernelcast.hardware.fabric import ENDING, kind_of
from kernelcast.hardware.gpu import IDENTITY, NUMBERS, RATE_TABLES, Gpu

CATALOGUE = Path(__file__).parent / "catalogue"
_TABLES = (*RATE_TABLES, "published_flops_per_s")


@functools.cache
def gpu_ids() -> tuple[str, ...]:
    """Ids of the catalogue: its file names. Files that start with '_' are bases, not GPUs."""
    return tuple(sorted(p.stem for p in CATALOGUE.glob("*.toml") if not p.stem.startswith("_")))


def gpu(name: str | Path | Gpu, **changes: float) -> Gpu:
    """The GPU called ``name``: a catalogue id, a name as the driver prints it, or the path of a TOML file.

    ``changes`` are what-ifs, as in ``Gpu.replace``.
    """
    found = name if isinstance(name, Gpu) else _find(str(name))
    return found.replace(**changes) if changes else found


def origin_of(chip: Gpu) -> Gpu | None:
    """The GPU whose forecast this one's is worked out from, by what physics says of the numbers that differ; None where
    it is its own. Of a what-if the GPU that was changed; of a measured unit the one that it is a unit of. A GPU is its
    numbers: a file that has the name of a catalogued one and other numbers is a what-if of it."""
    if chip.origin is None and chip.known_as in gpu_ids():
        found = _catalogued(chip.known_as)
        return None if chip is found or chip == found else found
    return chip.origin


def root_of(chip: Gpu) -> Gpu:
    """The GPU that is no what-if and no unit, which forecasts know by name."""
    while (origin := origin_of(chip)) is not None:
        chip = origin
    return chip


def _find(name: str) -> Gpu:
    if name.endswith(".toml"):
        return load_gpu(Path(name))
    if name in gpu_ids():  # the usual case needs no look at the other files
        return _catalogued(name)
    known = _names().get(_fold(name))
    if known is None:
        raise unknown("gpu", name, gpu_ids())
    return _catalogued(known)


@functools.cache
def _catalogued(gpu_id: str) -> Gpu:
    return load_gpu(CATALOGUE / f"{gpu_id}.toml")


@functools.cache
def _names() -> dict[str, str]:
    """Every accepted spelling, folded, to its id. The catalogue test checks that no two GPUs share one."""
    names: dict[str, str] = {}
    for gpu_id in gpu_ids():
        head = tomllib.loads((CATALOGUE / f"{gpu_id}.toml").read_text(encoding="utf-8"))
        for spelling in (gpu_id, head.get("name", gpu_id), *head.get("aliases", ())):
            names.setdefault(_fold(spelling), gpu_id)
    return names


def _fold(name: str) -> str:
    """'NVIDIA H200' and 'h200' alike: lower case, no vendor words, no punctuation."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(w for w in words if w not in ("nvidia", "tesla", "amd", "instinct", "geforce"))


def load_gpu(path: Path) -> Gpu:
    """Read one GPU file. A number is ``value`` or ``[value, "source key"]``; the file's [sources] spells keys out."""
    return parse_gpu(_text(path), path)


def parse_gpu(text: str, path: Path) -> Gpu:
    """The GPU that a file with this text would be at ``path``."""
    values, sources = _merged(path, text, ())
    needed = (f.name for f in dataclasses.fields(Gpu) if f.default is f.default_factory is dataclasses.MISSING)
    missing = [name for name in needed if name not in values and name != "id"]
    if missing:
        raise KernelcastError(f'{path}: missing {", ".join(missing)} (give them, or a base = "…" that has them)')
    found = Gpu(id=path.stem, sources=sources, **values)
    if found.unit_of is not None and found.unit_of not in gpu_ids():
        raise KernelcastError(f"{path}: unit_of: {unknown('gpu', found.unit_of, gpu_ids())}")
    kind_of(found.link_kind)  # refused where nobody knows it
    check_consistent(found, str(path))
    return found


def base_values(stem: str) -> dict[str, Any]:
    """The fields that a base file of the catalogue has."""
    path = CATALOGUE / f"{stem}.toml"
    return _merged(path, _text(path), ())[0]


def _merged(path: Path, text: str, chain: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values and sources laid over those of its base."""
    if path.stem in chain:
        raise KernelcastError(f"{path}: base goes round in a circle: {' -> '.join((*chain, path.stem))}")
    raw = _parsed(path, text)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if "base" in raw:
        base = f"{raw.pop('base')}.toml"
        beside = path.parent / base
        below = beside if beside.exists() else CATALOGUE / base
        values, sources = _merged(below, _text(below), (*chain, path.stem))
        for inherited in ("aliases", "unit_of", "published_flops_per_s"):  # they belong to the base alone
            values.pop(inherited, None)
        sources = {k: v for k, v in sources.items() if not k.startswith("published_flops_per_s.")}
    keys = raw.pop("sources", {})
    for name, entry in raw.items():
        if name in IDENTITY and name != "id":
            values[name] = tuple(entry) if name == "aliases" else entry
            if name == "link_kind" and str(entry).endswith(ENDING):  # a file, beside this one
                values[name] = str(path.parent / entry)
        elif name in _TABLES:
            if not isinstance(entry, Mapping):
                raise KernelcastError(f"{path}: {name} is a table of one number per dtype")
            table = dict(values.get(name, {}))
            for dtype, number in entry.items():
                table[dtype], sources[f"{name}.{dtype}"] = _sourced(path, f"{name}.{dtype}", number, keys)
            values[name] = table
        elif name in NUMBERS:
            values[name], sources[name] = _sourced(path, name, entry, keys)
        else:
            raise KernelcastError(f"{path}: {unknown('GPU field', name, [*IDENTITY, *NUMBERS, *_TABLES])}")
    return values, sources


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KernelcastError(f"no GPU file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KernelcastError(f"{path}: not readable as TOML: {error}") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KernelcastError(f"{path}: not readable as TOML: {error}") from None


def _sourced(path: Path, name: str, entry: object, keys: Mapping[str, str]) -> tuple[object, str]:
    if not isinstance(entry, list):
        return entry, f"{path.name}, no source given"
    if len(entry) != 2 or entry[1] not in keys:
        raise KernelcastError(f"{path}: {name} = [number, source], where source is a key of [sources], not {entry!r}")
    return entry[0], keys[entry[1]]
