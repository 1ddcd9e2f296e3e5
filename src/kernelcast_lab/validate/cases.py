"""Whole models that are measured and replayed: ``cases.toml`` beside the files whose functions build them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError


@dataclass(frozen=True)
class Case:
    """One model at one point. ``seq`` 0: the function takes none."""

    build: str  # vision.py:resnet50
    mode: str
    dtype: str
    optimizer: str
    batch: int
    seq: int

    @property
    def file(self) -> str:
        return self.build.partition(":")[0]

    @property
    def function(self) -> str:
        return self.build.partition(":")[2]

    @property
    def id(self) -> str:
        length = f"x{self.seq}" if self.seq else ""
        return f"{self.function}/{self.mode}/{self.dtype}/{self.batch}{length}"

    @property
    def told(self) -> dict[str, Any]:
        return asdict(self)


def read_cases(folder: Path) -> list[Case]:
    """Every case of ``folder``/cases.toml, in its order."""
    path = folder / "cases.toml"
    try:
        lines = tomllib.loads(path.read_text(encoding="utf-8"))["cases"]
        return [case for line in lines for case in _of(*line)]
    except FileNotFoundError:
        raise KernelcastError(f"no cases of whole models: {path} is missing") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise KernelcastError(f"{path}: not a list of [file:function, dtype, optimizer, sizes]: {error}") from None


def _of(build: str, dtype: str, optimizer: str, modes: dict[str, list[list[int]]]) -> Iterator[Case]:
    for mode, sizes in modes.items():
        for batch, seq in sizes:
            yield Case(build, mode, dtype, optimizer, batch, seq)
