"""Which kernel a stack runs for an op and a format on a GPU: ``kernels.toml``, the most specific entry of it.

Entries are kept by stack, op, dtype, kv_dtype, phase (of attention: prefill, decode) and ``on``: a compute capability
("8.9"), its generation ("12"), an instruction path ("mma.sync") or any ("*"). A capability that no entry names takes
those of its path: it inherits.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.hardware import Gpu
from kernelcast.hardware.paths import FMA, MMA_SYNC, PATHS, WIDE

FILE = Path(__file__).parent / "kernels.toml"
ANY = "*"
# Words of an entry, each one of several where a list is given
_MATCHED = ("stack", "op", "dtype", "kv_dtype", "phase", "on")
_TABLES = ("families", "backends", "homes", "sources", "runs")
Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Kernels of one make."""

    about: str
    path: str = ""  # the one instruction path that they are written for; "": that of the GPU


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One entry: what runs there."""

    stack: str
    op: str
    dtype: str = ANY
    kv_dtype: str = ANY
    phase: str = ANY
    on: str = ANY
    family: str
    backend: str | None = None  # the word that calls have for it; None: the op has none, or evidence is to tell
    path: str = ""  # where it is not the family's: fp32 products run on vector units
    tiles: str = ""  # what gives the tiles, in kernels/: "gemm.matrix_unit"
    served_dtype: str | None = None  # a served model's experts of this format are asked about in this one,
    served_backend: str | None = None  # and with this backend: what campaigns timed is not what is served
    note: str = ""  # why it says other than what was measured, where it does
    sources: tuple[str, ...]

    @property
    def key(self) -> Key:
        return tuple(getattr(self, name) for name in _MATCHED)


@dataclass(frozen=True)
class Choices:
    """All entries of a file."""

    families: Mapping[str, Family]
    backends: Mapping[str, str]  # the family that a backend's word means
    homes: Mapping[str, tuple[str, ...]]  # by path: the capabilities that its entries were written for
    entries: Mapping[Key, Choice]

    def find(
        self, stack: str | None, gpu: Gpu, op: str, dtype: str, kv_dtype: str | None = None, own: bool = False,
        phase: str | None = None,
    ) -> Choice | None:  # fmt: skip
        """The most specific entry, by stack, then dtype, kv_dtype, phase and place. ``own``: none that is of any
        stack."""
        stacks = [word for word in (stack, None if own else ANY) if word]
        words = (dtype, ANY), (kv_dtype or ANY, ANY), (phase or ANY, ANY)
        for key in itertools.product(stacks, (op,), *words, places(gpu)):
            if found := self.entries.get(key):
                return found
        return None

    def inherited(self, choice: Choice, gpu: Gpu) -> bool:
        """Whether the entry is of the GPU's path, and was written for other capabilities than its own."""
        if choice.on == ANY:
            return False
        return gpu.path_inherited or (choice.on in PATHS and gpu.compute_capability not in self.homes[choice.on])

    def path(self, choice: Choice, gpu: Gpu) -> str:
        """The instruction path that it runs by on this GPU."""
        own = choice.path or self.families[choice.family].path
        return own if own and has_path(gpu, own) else gpu.instruction_path

    def can_run(self, family: str, gpu: Gpu) -> bool:
        """Whether the GPU has the instructions that kernels of this family are written for."""
        own = self.families[family].path
        return not own or has_path(gpu, own)


def has_path(gpu: Gpu, path: str) -> bool:
    """Every GPU has vector units, and those with wgmma or tcgen05 have mma.sync too."""
    return path in (gpu.instruction_path, FMA) or (path == MMA_SYNC and gpu.instruction_path in WIDE)


def places(gpu: Gpu) -> tuple[str, ...]:
    """What an entry may call this GPU by, the most specific first."""
    return gpu.compute_capability, gpu.compute_capability.partition(".")[0], gpu.instruction_path, ANY


def read_choices(path: Path, known: Mapping[str, Collection[str]]) -> Choices:
    """The file, or what is wrong with it. ``known``: what stack, op, dtype, kv_dtype and phase may be."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        found = _read(raw, {**known, "on": [*PATHS, ANY]})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KernelcastError(f"{path}: not readable as TOML: {error}") from None
    except KernelcastError as error:
        raise KernelcastError(f"{path.name}: {error}") from None
    return found


def _read(raw: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> Choices:
    refuse_unknown("table", raw, _TABLES)
    for name in _TABLES:
        if name not in raw:
            raise KernelcastError(f"the table {name} is missing")
    families = {name: _made(Family, name, told) for name, told in raw["families"].items()}
    refuse_unknown("family", raw["backends"].values(), families)
    refuse_unknown("path", [f.path for f in families.values() if f.path], PATHS)
    refuse_unknown("path", raw["homes"], PATHS)
    entries: dict[Key, Choice] = {}
    for group in raw["runs"]:
        shared = {name: word for name, word in group.items() if name != "kernels"}
        for told in group.get("kernels", [{}]):
            for entry in _spread({**shared, **told}, raw["sources"]):
                _check(entry, families, raw["backends"], known)
                if entry.key in entries:
                    raise KernelcastError(f"{_name(entry.key)}: there are two entries")
                entries[entry.key] = entry
    homes = {path: tuple(capabilities) for path, capabilities in raw["homes"].items()}
    refuse_unknown("home of path", {entry.on for entry in entries.values() if entry.on in PATHS}, homes)
    return Choices(families, raw["backends"], homes, entries)


def _spread(told: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[Choice]:
    """One entry for each of the words that a list has."""
    where = f"runs of {told.get('stack')} {told.get('op')}"
    words = {name: told[name] if isinstance(told[name], list) else [told[name]] for name in _MATCHED if name in told}
    given = told.get("source", [])
    keys = [given] if isinstance(given, str) else given
    if not keys:
        raise KernelcastError(f"{where}: source is missing")
    refuse_unknown(f"source in {where}", keys, sources)
    rest = {name: word for name, word in told.items() if name not in ("source", *words)}
    for values in itertools.product(*words.values()):
        own = dict(zip(words, values, strict=True))
        yield _made(Choice, where, {**rest, **own, "sources": tuple(sources[key] for key in keys)})


def _check(
    entry: Choice, families: Mapping[str, Family], backends: Mapping[str, str], known: Mapping[str, Collection[str]]
) -> None:
    where = _name(entry.key)
    refuse_unknown(f"family of {where}", [entry.family], families)
    refuse_unknown(f"backend of {where}", [word for word in (entry.backend, entry.served_backend) if word], backends)
    refuse_unknown(f"path of {where}", [entry.path] if entry.path else [], PATHS)
    for name in ("stack", "op", "dtype", "kv_dtype", "phase"):
        word = getattr(entry, name)
        refuse_unknown(f"{name} of {where}", [] if word == ANY and name != "op" else [word], known[name])
    if not _is_capability(entry.on):
        refuse_unknown(f"on of {where}", [entry.on], known["on"])


def _is_capability(word: str) -> bool:
    """'8.9', '12' or 'gfx942'."""
    return word.startswith("gfx") or word.replace(".", "", 1).isdigit()


def _made(kind: Any, where: str, told: Mapping[str, Any]) -> Any:
    names = [field.name for field in fields(kind)]
    refuse_unknown(f"field in {where}", told, names)
    try:
        return kind(**told)
    except TypeError as error:
        raise KernelcastError(f"{where}: {str(error).partition('missing ')[2] or error} is missing") from None


def _name(key: Key) -> str:
    return " ".join(word for word in key if word != ANY)
