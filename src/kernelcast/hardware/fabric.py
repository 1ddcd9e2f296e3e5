"""Links between GPUs: a small frozen value a kind, from fabrics.toml or from a file of one's own."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware.gpu import Gpu

ENDING = ".toml"  # of a name that is a file


@dataclass(frozen=True)
class Fabric:
    """A link as one GPU sees it: bytes per second in one direction, and the time of one dependent message.

    ``like``: of a file, the catalogued kind that it is one of, which says how far GPUs reach into one another's memory.
    """

    kind: str
    bytes_per_s: float
    latency_s: float
    source: str
    like: str = ""

    def __post_init__(self) -> None:
        numbers = (self.bytes_per_s, self.latency_s)
        if not all(isinstance(value, int | float) and 0 < value < float("inf") for value in numbers):
            raise KernelcastError(f"fabric {self.kind}: bytes_per_s and latency_s must be positive, not {numbers}")


@functools.cache
def fabrics() -> dict[str, Fabric]:
    """Every kind of link of the catalogue by name."""
    raw = tomllib.loads((Path(__file__).parent / "fabrics.toml").read_text(encoding="utf-8"))
    return {kind: Fabric(kind=kind, **entry) for kind, entry in raw.items()}


def fabric(kind: str, gpu: Gpu | None = None) -> Fabric:
    """The link called ``kind``, or of that file; with ``gpu``, its own rate where that kind is the GPU's own link or
    PCIe."""
    found = _named(kind)
    if gpu is None or kind != gpu.link_kind or found.like:
        return found
    own = gpu.link_bytes_per_s or (gpu.pcie_bytes_per_s if kind.startswith("pcie") else found.bytes_per_s)
    return replace(found, bytes_per_s=own)


def kind_of(name: str) -> str:
    """The catalogued kind of a link: its own name, or what a file says that it is like."""
    return _named(name).like or name


def _named(name: str) -> Fabric:
    if name.endswith(ENDING):
        try:
            return load_fabric(name, Path(name).stat().st_mtime_ns)
        except OSError:
            raise KernelcastError(f"no fabric file {name}") from None
    if name not in fabrics():
        raise unknown("fabric", name, fabrics())
    return fabrics()[name]


@functools.lru_cache(maxsize=64)
def load_fabric(path: str, changed: int) -> Fabric:
    """A file of one link: its numbers, their source, and the catalogued kind that it is like."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KernelcastError(f"{path}: not readable as TOML: {error}") from None
    wanted = {field.name for field in fields(Fabric)} - {"kind"}
    if set(raw) != wanted:
        words = (", ".join(sorted(names)) or "nothing" for names in (wanted - set(raw), set(raw) - wanted))
        raise KernelcastError("{}: missing {}; unknown {}".format(path, *words))
    if raw["like"] not in fabrics():
        raise KernelcastError(f"{path}: like: {unknown('fabric', raw['like'], fabrics())}")
    return Fabric(kind=path, **raw)
