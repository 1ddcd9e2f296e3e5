"""Links between GPUs: a small frozen value each, from fabrics.toml or from a user's file."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware.gpu import Gpu
from kernelcast.toml_folder import read_toml

ENDING = ".toml"  # of a name that is a file


@dataclass(frozen=True)
class Fabric:
    """A link as one GPU sees it: bytes per second in one direction, and the latency of one dependent message.

    ``like``: of a file, the catalogued fabric that it resembles, which says how far GPUs reach into one another's
    memory. ``shared``: all GPUs of a group have the rate together, and reach none of the others' memory.
    """

    kind: str
    bytes_per_s: float
    latency_s: float
    source: str
    like: str = ""
    shared: bool = False

    def __post_init__(self) -> None:
        numbers = (self.bytes_per_s, self.latency_s)
        if not all(isinstance(value, int | float) and 0 < value < float("inf") for value in numbers):
            raise KernelcastError(f"fabric {self.kind}: bytes_per_s and latency_s must be positive, not {numbers}")


@functools.cache
def fabrics() -> dict[str, Fabric]:
    """Every fabric of the catalogue by name."""
    return {name: Fabric(name, **entry) for name, entry in read_toml(Path(__file__).parent / "fabrics.toml").items()}


def fabric(name: str, gpu: Gpu | None = None) -> Fabric:
    """The fabric called ``name``, or of that file; with ``gpu``, at the GPU's rate where it is its link or PCIe."""
    catalogued = _named(name)
    if gpu is None or name != gpu.link_kind or catalogued.like:
        return catalogued
    own = name.startswith("pcie") and not catalogued.shared
    rate = gpu.link_bytes_per_s or (gpu.pcie_bytes_per_s if own else catalogued.bytes_per_s)
    return replace(catalogued, bytes_per_s=rate)


def fabric_type(name: str) -> str:
    """The catalogued name of a fabric: of a file, what it is like."""
    return _named(name).like or name


def _named(name: str) -> Fabric:
    name = str(name)  # a path, or what is refused below
    if name.endswith(ENDING):
        try:
            return load_fabric(name, Path(name).stat().st_mtime_ns)
        except OSError:
            raise KernelcastError(f"no fabric file {name}") from None
    if name not in fabrics():
        raise unknown("fabric", name, fabrics())
    return fabrics()[name]


@functools.lru_cache(maxsize=64)
def load_fabric(path: str, modified_ns: int) -> Fabric:
    """A file of one fabric: its numbers, their source, and the catalogued one that it is like."""
    raw = read_toml(Path(path), "fabric file")
    wanted = {field.name for field in fields(Fabric)} - {"kind", "shared"}
    if set(raw) != wanted:
        lists = (", ".join(sorted(names)) or "nothing" for names in (wanted - set(raw), set(raw) - wanted))
        raise KernelcastError("{}: missing {}; unknown {}".format(path, *lists))
    if raw["like"] not in fabrics():
        raise KernelcastError(f"{path}: like: {unknown('fabric', raw['like'], fabrics())}")
    return Fabric(kind=path, **raw)
