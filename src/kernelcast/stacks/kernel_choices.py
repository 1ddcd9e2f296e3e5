"""Which kernel a stack runs for an op and a format on a GPU: ``kernels.toml``, the most specific entry of it.

Entries are kept by stack, op, dtype, kv_dtype, phase (of attention: prefill, decode) and ``on``: a compute capability
("8.9"), its generation ("12"), an instruction path ("mma.sync") or any ("*"). A capability that no entry names takes
those of its path: it inherits.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.hardware import Gpu
from kernelcast.hardware.gpu import FMA, MMA_SYNC, PATHS, WIDE
from kernelcast.toml_folder import read_toml

FILE = Path(__file__).parent / "kernels.toml"
ANY = "*"
# Fields that an entry is matched by; each may be a list of several values
_MATCHED = ("stack", "op", "dtype", "kv_dtype", "phase", "on")
_TABLES = ("families", "backends", "homes", "sources", "runs")
Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KernelFamily:
    """Kernels of one library."""

    about: str
    path: str = ""  # the instruction path that they are written for; "": that of the GPU


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """The kernel that runs where its fields match."""

    stack: str
    op: str
    dtype: str = ANY
    kv_dtype: str = ANY
    phase: str = ANY
    on: str = ANY
    family: str
    backend: str | None = None  # its name in calls; None: the op has no backends, or evidence decides
    path: str = ""  # where it is not the family's: fp32 products run on vector units
    tiles: str = ""  # what gives the tiles, in ops/: "gemm.matrix_unit"
    served_dtype: str | None = None  # a served model's experts of this format are forecast in this one,
    served_backends: tuple[
        str, ...
    ] = ()  # by these backends, first the usual; (): by ``backend``, as campaigns timed it
    note: str = ""  # why it differs from what was measured, where it does
    sources: tuple[str, ...]

    @property
    def key(self) -> Key:
        return tuple(getattr(self, name) for name in _MATCHED)


@dataclass(frozen=True)
class KernelChoices:
    """All entries of a file."""

    families: Mapping[str, KernelFamily]
    backends: Mapping[str, str]  # the family of a backend
    homes: Mapping[str, tuple[str, ...]]  # by path: the capabilities that its entries were written for
    entries: Mapping[Key, KernelChoice]

    def find(
        self, stack: str | None, gpu: Gpu, op: str, dtype: str, kv_dtype: str | None = None, exact_stack: bool = False,
        phase: str | None = None,
    ) -> KernelChoice | None:  # fmt: skip
        """The most specific entry, by stack, then dtype, kv_dtype, phase and GPU. ``exact_stack``: of this stack
        alone."""
        stacks = [name for name in (stack, None if exact_stack else ANY) if name]
        optional = (dtype, ANY), (kv_dtype or ANY, ANY), (phase or ANY, ANY)
        keys = itertools.product(stacks, (op,), *optional, _gpu_keys(gpu))
        return next((self.entries[key] for key in keys if key in self.entries), None)

    def inherited(self, entry: KernelChoice, gpu: Gpu) -> bool:
        """Whether the entry is of the GPU's path, and was written for other capabilities than its own."""
        if entry.on == ANY:
            return False
        return gpu.path_inherited or (entry.on in PATHS and gpu.compute_capability not in self.homes[entry.on])

    def path(self, entry: KernelChoice, gpu: Gpu) -> str:
        """The instruction path that it runs by on this GPU."""
        path = entry.path or self.families[entry.family].path
        return path if path and _has_path(gpu, path) else gpu.instruction_path

    def can_run(self, family: str, gpu: Gpu) -> bool:
        """Whether the GPU has the instructions that kernels of this family are written for."""
        path = self.families[family].path
        return not path or _has_path(gpu, path)


def _has_path(gpu: Gpu, path: str) -> bool:
    """Every GPU has vector units, and those with wgmma or tcgen05 have mma.sync too."""
    return path in (gpu.instruction_path, FMA) or (path == MMA_SYNC and gpu.instruction_path in WIDE)


def _gpu_keys(gpu: Gpu) -> tuple[str, ...]:
    """The values of ``on`` that match this GPU, the most specific first."""
    return gpu.compute_capability, gpu.compute_capability.partition(".")[0], gpu.instruction_path, ANY


def read_kernel_choices(path: Path, known: Mapping[str, Collection[str]]) -> KernelChoices:
    """The file, or what is wrong with it. ``known``: what stack, op, dtype, kv_dtype and phase may
    be; a name without its choices is not checked."""
    raw = read_toml(path)
    try:
        return _parse(raw, {**known, "on": [*PATHS, ANY]})
    except KernelcastError as error:
        raise KernelcastError(f"{path.name}: {error}") from None


def _parse(raw: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> KernelChoices:
    refuse_unknown("table", raw, _TABLES)
    for name in _TABLES:
        if name not in raw:
            raise KernelcastError(f"the table {name} is missing")
    families = {name: _build(KernelFamily, name, values) for name, values in raw["families"].items()}
    refuse_unknown("family", raw["backends"].values(), families)
    refuse_unknown("path", [f.path for f in families.values() if f.path], PATHS)
    refuse_unknown("path", raw["homes"], PATHS)
    entries: dict[Key, KernelChoice] = {}
    for group in raw["runs"]:
        shared = {name: value for name, value in group.items() if name != "kernels"}
        for kernel in group.get("kernels", [{}]):
            for entry in _expand({**shared, **kernel}, raw["sources"]):
                _check(entry, families, raw["backends"], known)
                if entry.key in entries:
                    raise KernelcastError(f"{_name(entry.key)}: there are two entries")
                entries[entry.key] = entry
    homes = {path: tuple(capabilities) for path, capabilities in raw["homes"].items()}
    refuse_unknown("home of path", {entry.on for entry in entries.values() if entry.on in PATHS}, homes)
    return KernelChoices(families, raw["backends"], homes, entries)


def _expand(raw: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[KernelChoice]:
    """One entry for each combination of the values that lists have."""
    where = f"runs of {raw.get('stack')} {raw.get('op')}"
    matched = {name: raw[name] if isinstance(raw[name], list) else [raw[name]] for name in _MATCHED if name in raw}
    given = raw.get("source", [])
    keys = [given] if isinstance(given, str) else given
    if not keys:
        raise KernelcastError(f"{where}: source is missing")
    refuse_unknown(f"source in {where}", keys, sources)
    rest = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in raw.items()
        if name not in ("source", *matched)
    }
    for values in itertools.product(*matched.values()):
        combination = dict(zip(matched, values, strict=True))
        yield _build(KernelChoice, where, {**rest, **combination, "sources": tuple(sources[key] for key in keys)})


def _check(
    entry: KernelChoice,
    families: Mapping[str, KernelFamily],
    backends: Mapping[str, str],
    known: Mapping[str, Collection[str]],
) -> None:
    where = _name(entry.key)
    refuse_unknown(f"family of {where}", [entry.family], families)
    refuse_unknown(f"backend of {where}", [name for name in (entry.backend, *entry.served_backends) if name], backends)
    refuse_unknown(f"path of {where}", [entry.path] if entry.path else [], PATHS)
    for name in ("stack", "op", "dtype", "kv_dtype", "phase"):
        value = getattr(entry, name)
        if name in known and (value != ANY or name == "op"):
            refuse_unknown(f"{name} of {where}", [value], known[name])
    if not (entry.on.startswith("gfx") or entry.on.replace(".", "", 1).isdigit()):  # no capability: '8.9', '12'
        refuse_unknown(f"on of {where}", [entry.on], known["on"])


def _build(cls: Any, where: str, values: Mapping[str, Any]) -> Any:
    refuse_unknown(f"field in {where}", values, [field.name for field in fields(cls)])
    try:
        return cls(**values)
    except TypeError as error:
        raise KernelcastError(f"{where}: {str(error).partition('missing ')[2] or error} is missing") from None


def _name(key: Key) -> str:
    return " ".join(value for value in key if value != ANY)
