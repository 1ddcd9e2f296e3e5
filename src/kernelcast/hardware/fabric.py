"""Links between GPUs: a small frozen value a kind, from catalogue/fabrics.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware.gpu import Gpu


@dataclass(frozen=True)
class Fabric:
    """A link as one GPU sees it: bytes per second in one direction, and the time of one dependent message."""

    kind: str
    bytes_per_s: float
    latency_s: float
    source: str

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s > 0):
            raise KernelcastError(f"fabric {self.kind}: bytes_per_s and latency_s must be positive")


@functools.cache
def fabrics() -> dict[str, Fabric]:
    """Every kind of link by name."""
    raw = tomllib.loads((Path(__file__).parent / "fabrics.toml").read_text())
    return {kind: Fabric(kind=kind, **entry) for kind, entry in raw.items()}


def fabric(kind: str, gpu: Gpu | None = None) -> Fabric:
    """The link called ``kind``; with ``gpu``, its own rate where that kind is the GPU's own link or PCIe."""
    if kind not in fabrics():
        raise unknown("fabric", kind, fabrics())
    found = fabrics()[kind]
    if gpu is None or kind != gpu.link_kind:
        return found
    own = gpu.link_bytes_per_s or (gpu.pcie_bytes_per_s if kind.startswith("pcie") else found.bytes_per_s)
    return replace(found, bytes_per_s=own)
