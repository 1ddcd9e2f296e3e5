"""Find a GPU by id, by the name that its driver prints, or by the path of a TOML file; check it, and change it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import names
from kernelcast.hardware.fabric import ENDING, fabric_type
from kernelcast.hardware.gpu import IDENTITY, INTEGERS, NUMBERS, RATE_TABLES, Gpu
from kernelcast.hardware.names import find, normalised
from kernelcast.toml_folder import parse_toml, read_toml

CATALOGUE = Path(__file__).parent / "catalogue"
_TABLES = (*RATE_TABLES, "published_flops_per_s")
_LEAST_RATE = 1e6  # less is a number of MHz or GB/s
TOLERANCE = 0.03  # vendors round clocks and peaks
_ORDERED = (
    ("clock_base_hz", "clock_boost_hz"),
    ("clock_boost_hz", "clock_max_hz"),
    ("clock_tensor_hz", "clock_boost_hz"),
    ("clock_sustained_hz", "clock_boost_hz"),
    ("l2_bytes", "dram_bytes"),
    ("long_tensor_fraction", "sustained_tensor_fraction"),
    ("launch_floor_s", "sustained_launch_s"),
)
_CHANGE = re.compile(r"\s*([a-z0-9_.]+)\s*([=*])\s*([0-9.eE+-]+)\s*", re.IGNORECASE)


@functools.cache
def gpu_ids() -> tuple[str, ...]:
    """Ids of the catalogue: its file names. Files that start with '_' are bases, not GPUs."""
    return tuple(sorted(p.stem for p in CATALOGUE.glob("*.toml") if not p.stem.startswith("_")))


def gpu(name: str | Path | Gpu, **changes: float) -> Gpu:
    """The GPU called ``name``: a catalogue id, a name as the driver prints it, or the path of a TOML file.

    ``changes`` are what-ifs, as in ``Gpu.replace``.
    """
    device = name if isinstance(name, Gpu) else _find(str(name))
    return device.replace(**changes) if changes else device


def origin_of(gpu: Gpu) -> Gpu | None:
    """The GPU whose forecast this one's is derived from, by what physics says of the numbers that differ; None where it
    has its own. Of a what-if the GPU that was changed; of a measured unit the catalogued one; of a file the catalogued
    one that it builds on. A GPU is its numbers: a file that has the name of a catalogued one and other numbers is a
    what-if of it."""
    if gpu.origin is not None:
        return gpu.origin
    if gpu.known_as in gpu_ids():
        catalogued = _catalogued(gpu.known_as)
        return None if gpu is catalogued or gpu == catalogued else catalogued
    return _base_of(gpu) if gpu.base else None


def _base_of(gpu: Gpu) -> Gpu:
    """The GPU that a file builds on. Where the file says that it is of another generation or has another type of link,
    that GPU's numbers under the file's identity: other kernels run there, and the numbers alone are a what-if."""
    base = _catalogued(str(gpu.base))
    kinds = [(each.compute_capability, each.instruction_path, fabric_type(each.link_kind)) for each in (gpu, base)]
    if kinds[0] == kinds[1]:
        return base
    identity = {name: getattr(gpu, name) for name in IDENTITY}
    return dataclasses.replace(base, **identity, base=None, sources={**base.sources, **gpu.sources})


def root_of(gpu: Gpu) -> Gpu:
    """The GPU that is no what-if and no unit, which forecasts know by name."""
    while (origin := origin_of(gpu)) is not None:
        gpu = origin
    return gpu


def _find(name: str) -> Gpu:
    if name.endswith(ENDING):
        return load_gpu(Path(name))
    if name in gpu_ids():  # the usual case opens no other file
        return _catalogued(name)
    spellings = _names()
    gpu_id = spellings.get(normalised(name)) or find(name, spellings, _memory())
    if gpu_id is None:
        raise unknown_gpu(name)
    return _catalogued(gpu_id)


def unknown_gpu(name: str) -> KernelcastError:
    """The error for a name that is no GPU's."""
    return names.unknown_gpu(name, _names())


@functools.cache
def _memory() -> dict[str, int]:
    return {gpu_id: _catalogued(gpu_id).dram_bytes for gpu_id in gpu_ids()}


@functools.cache
def _catalogued(gpu_id: str) -> Gpu:
    return load_gpu(CATALOGUE / f"{gpu_id}.toml")


@functools.cache
def _names() -> dict[str, str]:
    """Every accepted spelling, normalised, to its id. The catalogue test checks that no two GPUs share one."""
    spellings: dict[str, str] = {}
    for gpu_id in gpu_ids():
        raw = read_toml(CATALOGUE / f"{gpu_id}.toml")
        for spelling in (gpu_id, raw.get("name", gpu_id), *raw.get("aliases", ())):
            spellings.setdefault(normalised(spelling), gpu_id)
    return spellings


def load_gpu(path: Path) -> Gpu:
    """Read one GPU file. A number is ``value`` or ``[value, "source key"]``; the file's [sources] spells keys out."""
    return _checked(read_toml(path, "GPU file"), path)


def parse_gpu(text: str, path: Path) -> Gpu:
    """The GPU that a file with this text would be at ``path``."""
    return _checked(parse_toml(text, path), path)


def _checked(raw: dict[str, Any], path: Path) -> Gpu:
    values, sources = _merged(path, raw, ())
    needed = (f.name for f in dataclasses.fields(Gpu) if f.default is f.default_factory is dataclasses.MISSING)
    missing = [name for name in needed if name not in values and name != "id"]
    if missing:
        raise KernelcastError(f'{path}: missing {", ".join(missing)} (give them, or a base = "…" that has them)')
    device = Gpu(id=path.stem, sources=sources, **values)
    if device.unit_of is not None and device.unit_of not in gpu_ids():
        raise KernelcastError(f"{path}: unit_of: {unknown('gpu', device.unit_of, gpu_ids())}")
    fabric_type(device.link_kind)  # refuses an unknown one
    for contradiction in contradictions(device):
        raise KernelcastError(f"{path}: {contradiction}")
    return device


def base_values(stem: str) -> dict[str, Any]:
    """The fields that a base file of the catalogue has."""
    path = CATALOGUE / f"{stem}.toml"
    return _merged(path, read_toml(path), ())[0]


def _merged(path: Path, raw: dict[str, Any], chain: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values and sources on top of those of its base."""
    if path.stem in chain:
        raise KernelcastError(f"{path}: base goes round in a circle: {' -> '.join((*chain, path.stem))}")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if "base" in raw:
        base = str(raw.pop("base"))
        below = next((folder / f"{base}.toml" for folder in (path.parent, CATALOGUE)
                      if (folder / f"{base}.toml").exists()), None)  # fmt: skip
        if below is None:
            raise KernelcastError(f"{path}: base: {unknown('gpu', base, gpu_ids())}")
        values, sources = _merged(below, read_toml(below, "GPU file"), (*chain, path.stem))
        for inherited in ("aliases", "unit_of", "published_flops_per_s"):  # they belong to the base alone
            values.pop(inherited, None)
        if below.parent == CATALOGUE and below.stem in gpu_ids():
            values["base"] = below.stem
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


def _sourced(path: Path, name: str, entry: object, keys: Mapping[str, str]) -> tuple[object, str]:
    if not isinstance(entry, list):
        return entry, f"{path.name}, no source given"
    if len(entry) != 2 or entry[1] not in keys:
        raise KernelcastError(f"{path}: {name} = [number, source], where source is a key of [sources], not {entry!r}")
    return entry[0], keys[entry[1]]


def contradictions(gpu: Gpu) -> Iterator[str]:
    """What cannot be true at once of the numbers of a GPU file, a line each, with the numbers."""
    for less, more in _ORDERED:
        low, high = getattr(gpu, less), getattr(gpu, more)
        if low is not None and high is not None and low > high:
            yield f"{less} {low:g} is more than {more} {high:g}"
    for name in NUMBERS:
        if name.endswith(("_hz", "_bytes_per_s")) and 0 < (number := getattr(gpu, name) or 0) < _LEAST_RATE:
            yield f"{name} {number:g} is too low: it is in {'Hz' if name.endswith('_hz') else 'bytes a second'}"
    if gpu.l2_bytes_per_s < gpu.dram_bytes_per_s:
        yield (
            f"l2_bytes_per_clk {gpu.l2_bytes_per_clk:g} at {gpu.clock_boost_hz / 1e6:g} MHz is "
            f"{gpu.l2_bytes_per_s:.4g} B/s, less than dram_bytes_per_s {gpu.dram_bytes_per_s:g}"
        )
    for key, package in gpu.published_flops_per_s.items():
        published, dtype = package / gpu.devices_per_package, key.removesuffix("_vector")
        vector = key != dtype or not gpu.tensor_flops_per_s(key)
        peak = gpu.fma_flops_per_s(dtype) if vector else gpu.tensor_flops_per_s(dtype)
        if abs(peak / published - 1) > TOLERANCE:
            table = "fma_flops_per_clk_sm" if vector else "tensor_flops_per_clk_sm"
            clock = gpu.clock_boost_hz if vector else gpu.tensor_clock_hz
            yield (
                f"published_flops_per_s.{key} is {published:.4g}, but {gpu.sm_count} SMs x {clock / 1e6:g} MHz x "
                f"{getattr(gpu, table).get(dtype, 0.0):g} ({table}) give {peak:.4g}"
            )
    for dtype in gpu.sustained_tensor_fractions:
        if not gpu.tensor_flops_per_clk_sm.get("fp8" if dtype == "fp8_block" else dtype):
            known = ", ".join(gpu.tensor_flops_per_clk_sm) or "none"
            yield f"sustained_tensor_fractions.{dtype}, but tensor_flops_per_clk_sm has no {dtype} (it has {known})"


def changed(gpu: str | Path | Gpu, changes: str | Iterable[str], parameter: str = "set") -> Gpu:
    """A what-if of ``gpu`` from text: ``dram_bytes_per_s=7e12`` sets a number, ``dram_bytes_per_s*1.5`` multiplies it.

    A table with one number per dtype may be multiplied as a whole (``tensor_flops_per_clk_sm*2``); whole numbers are
    rounded.
    """
    if not isinstance(gpu, Gpu):
        gpu = _find(str(gpu))
    numbers: dict[str, float] = {}
    for text in [changes] if isinstance(changes, str) else changes:
        match = _CHANGE.fullmatch(text)
        try:
            name, sign, value = match[1], match[2], float(match[3])  # type: ignore[index]
        except (TypeError, ValueError):
            raise KernelcastError(
                f"`{parameter}` takes FIELD=NUMBER or FIELD*FACTOR, such as dram_bytes_per_s=7e12 or "
                f"dram_bytes_per_s*1.5, not {text!r}"
            ) from None
        numbers |= {name: value} if sign == "=" else _multiplied(gpu, name, value)
    return gpu.replace(**numbers) if numbers else gpu


def _multiplied(gpu: Gpu, name: str, factor: float) -> dict[str, float]:
    if name in RATE_TABLES:
        return {f"{name}.{dtype}": rate * factor for dtype, rate in getattr(gpu, name).items()}
    if name not in NUMBERS and name.partition(".")[0] not in RATE_TABLES:
        raise unknown("GPU field", name, [*NUMBERS, *(f"{table}.<dtype>" for table in RATE_TABLES)])
    before = gpu.number(name)
    if before is None:
        raise KernelcastError(f"{gpu.id} has no {name} to multiply: set it with {name}=NUMBER")
    return {name: round(before * factor) if name in INTEGERS else before * factor}
