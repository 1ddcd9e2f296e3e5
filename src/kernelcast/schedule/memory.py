"""Memory of one GPU at the fullest moment of a run, by what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Memory:
    """Bytes by what they hold; parts add up to ``used_bytes``. Columns of bytes make it many memories of one GPU."""

    parts: Mapping[str, Any]
    gpu_bytes: float
    available_bytes: float  # of these, that may be filled

    def __getitem__(self, part: str) -> Any:
        return self.parts[part]

    @property
    def used_bytes(self) -> Any:
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> Any:
        """Below zero when it does not fit."""
        return self.available_bytes - self.used_bytes

    @property
    def fits(self) -> Any:
        return self.free_bytes >= 0

    @property
    def missing_bytes(self) -> Any:
        return np.maximum(0.0, -self.free_bytes)

    def fields(self, *names: str) -> dict[str, float]:
        """``name_bytes`` of each part and of these properties, for JSON."""
        told = {f"{name}_bytes": float(size) for name, size in self.parts.items()}
        return told | {name: float(getattr(self, name)) for name in names}
