"""Memory of one GPU at the fullest moment of a run, by what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes by what they hold; parts add up to ``used_bytes``."""

    parts: Mapping[str, float]
    gpu_bytes: float
    available_bytes: float  # of these, that may be filled

    def __getitem__(self, part: str) -> float:
        return self.parts[part]

    @property
    def used_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> float:
        """Below zero when it does not fit."""
        return self.available_bytes - self.used_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0

    @property
    def missing_bytes(self) -> float:
        return max(0.0, -self.free_bytes)

    def fields(self, *names: str) -> dict[str, float]:
        """``name_bytes`` of each part and of these properties, for JSON."""
        told = {f"{name}_bytes": float(size) for name, size in self.parts.items()}
        return told | {name: float(getattr(self, name)) for name in names}
