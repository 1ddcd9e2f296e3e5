"""Replay what the project measured itself: predictions beside measured times, and how far two measurements differ.

A folder of cases has ``<source>/<name>.parquet``, tables of ``kernelcast collect``. A table whose name ends in
``_again`` measured calls of another a second time, on another day or machine: their difference is the noise floor.
Only held-out shapes are scored, unless all are wanted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.data.measurements import AGAIN, read_canonical
from kernelcast_lab.evaluate.scores import ErrorSummary


@dataclass(frozen=True, kw_only=True)
class Line(ErrorSummary):
    """One group of cases; ``noise``: the error of a second measurement from the first."""

    gpu: str
    family: str
    dtype: str
    noise: float | None


def tables(folder: Path) -> list[Path]:
    """The tables of a folder of cases, second measurements left out."""
    if not folder.is_dir():
        raise KernelcastError(f"no folder {folder}; give the folder of cases, as in kernelcast validate validation")
    result = [path for path in sorted(folder.glob("*/*.parquet")) if not path.stem.endswith(AGAIN)]
    if not result:
        raise KernelcastError(f"{folder} has no cases: none of its folders has a table of kernelcast collect")
    return result


def validate(folder: Path, conditions: Conditions, *, seen: bool = False) -> list[Line]:
    """Every table of a folder, by family and number format."""
    return [line for path in tables(folder) for line in _table(path, conditions, seen)]


def _table(path: Path, conditions: Conditions, seen: bool) -> list[Line]:
    columns = read_canonical(path, more={"family": "VARCHAR"}).columns
    keep = np.ones(len(columns["op"]), dtype=bool) if seen else shape_fold(columns) == TEST_FOLD
    columns = {name: column[keep] for name, column in columns.items()}
    forecast, bad = predict_columns(columns, None, conditions)
    if bad.messages:
        raise KernelcastError(f"{path}: {bad.text()}")
    again = path.with_name(f"{path.stem}{AGAIN}.parquet")
    noise = repeated(path, again) if again.exists() else {}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for at, key in enumerate(zip(columns["gpu"], columns["family"], columns["dtype"], strict=True)):
        groups.setdefault(key, []).append(at)
    truth, *results = columns["latency_us"], forecast["predicted_us"], forecast["low_us"], forecast["high_us"]
    return [
        Line.of(truth[at], *(column[at] for column in results), gpu=g, family=f, dtype=d, noise=noise.get(f))
        for (g, f, d), at in sorted(groups.items())
    ]


def repeated(first: Path, second: Path) -> dict[str, float]:
    """Mean difference of calls that two tables measured, in percent, by family."""
    once, twice = _times(first), _times(second)
    result: dict[str, list[float]] = {}
    for key, (family, latency) in twice.items():
        if key in once:
            result.setdefault(family, []).append(abs(latency / once[key][1] - 1) * 100)
    return {family: float(np.mean(differences)) for family, differences in result.items()}


def _times(path: Path) -> dict[str, tuple[str, float]]:
    from kernelcast.collect.table import read_records

    return {r["key"]: (r["family"], r["latency_us"]) for r in read_records(path) if r["status"] == "ok"}


def overall(lines: Sequence[Line]) -> float:
    """Mean error of all cases."""
    return float(np.average([line.mean for line in lines], weights=[line.rows for line in lines]))


# ---- Whole models that are measured and replayed: ``cases.toml`` beside the files whose functions build them.


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
