"""The columns of a sweep's rows: what each holds, as DuckDB types it, and which way is better."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.files import encoded, quoted, text
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.learned import WEIGHTS
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import read_prices
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import infer_columns
from kernelcast.inference.workload import Workload
from kernelcast.models.precision import Precision
from kernelcast.search.sweep.file import CUTS, OWN, SIZES, WORDS, Cut, Integers, Sweep, layout_of
from kernelcast.search.sweep.space import Block, Chunk, Space

MIN, MAX = "min", "max"


@dataclass(frozen=True)
class Column:
    """``better``: min or max; None: neither without a word."""

    type: str
    better: str | None = None


STATUSES = ("ok", "does not fit", "illegal", "refused")

_SECONDS = {
    f"{name}_s{end}": Column("DOUBLE", MIN) for name in ("ttft", "tpot", "total") for end in ("", "_low", "_high")
}
# of a setting first, then of its answer; energy joins the last line
COLUMNS: Mapping[str, Column] = {
    "setting": Column("BIGINT"),
    **{name: Column("VARCHAR") for name in WORDS},
    **{name: Column("BOOLEAN" if name == "sequence_parallel" else "INTEGER") for name in CUTS},
    "gpus": Column("INTEGER", MIN),
    "skew": Column("DOUBLE"),
    **{name: Column("INTEGER") for name in SIZES},
    "status": Column("VARCHAR"),
    "reason": Column("VARCHAR"),
    "precision": Column("VARCHAR"),
    **_SECONDS,
    "tokens_per_s": Column("DOUBLE", MAX),
    "tokens_per_s_per_gpu": Column("DOUBLE", MAX),
    "requests_per_s": Column("DOUBLE", MAX),
    "memory_bytes": Column("DOUBLE", MIN),
    "available_bytes": Column("DOUBLE", MAX),
    "fits": Column("BOOLEAN"),
    "bound_by": Column("VARCHAR"),
    "support": Column("VARCHAR"),
    "usd_per_hour": Column("DOUBLE", MIN),
    "dollars_per_million_tokens": Column("DOUBLE", MIN),
}


def weights_of(conditions: Conditions) -> str:
    """A digest of all fitted weights that answer."""
    folder = getattr(conditions.predictor, "folder", WEIGHTS)
    return _digest_of(folder)


@functools.cache
def _digest_of(weights: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(weights.glob("*.safetensors")):
        found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:32]


def hourly(gpus: Sequence[Gpu], path: Path | None = None, given: Sequence[str] = ()) -> dict[str, float]:
    """USD per GPU-hour by id, of those that have a price; a what-if or a file of one's own has that of its name."""
    known = read_prices(path, given)
    return {one.id: float(known[one.id].usd_per_hour) for one in gpus if one.id in known}


Columns = dict[str, NDArray[Any]]
OK, NO_ROOM, ILLEGAL, REFUSED = "ok", "does not fit", "illegal", "refused"
_NUMBERS = ("tokens_per_s", "memory_bytes", "available_bytes", "fits",
            *(f"{name}_s{end}" for name in ("ttft", "tpot", "total") for end in ("", "_low", "_high")))  # fmt: skip
_TEXTS = ("status", "reason", "precision", "bound_by", "support")


def answers(space: Space, block: Block, prices: Mapping[str, float], conditions: Conditions) -> Columns:
    """Every setting's own columns, and what is predicted of it."""
    asked = space.columns(block)
    unique, which = np.unique(block.places, return_inverse=True)
    models, *middle, layouts = space.codes(unique)
    cuts = space.cuts(models, layouts)
    codes = np.stack([models, *middle], axis=1)
    places = [
        _place(space.sweep, *code, cut=tuple(cut)) for code, cut in zip(codes.tolist(), cuts.tolist(), strict=True)
    ]
    found = _inferred(places, which, block.sizes, conditions)
    found["requests_per_s"] = asked["batch"] / found["total_s"]
    found["tokens_per_s_per_gpu"] = found["tokens_per_s"] / asked["gpus"]
    hourly = np.array([prices.get(name, np.nan) for name in asked["gpu"]])
    found["usd_per_hour"] = hourly * asked["gpus"]
    found["dollars_per_million_tokens"] = found["usd_per_hour"] / 3600.0 / found["tokens_per_s"] * 1e6
    for end in ("", "_low", "_high"):  # of one token there is none after the first
        found[f"tpot_s{end}"][asked["output_len"] == 1] = np.nan
    chunk = asked["chunk"].astype(np.float64)
    return asked | {"chunk": np.where(chunk < 0, np.nan, chunk)} | found


@dataclass(frozen=True)
class Illegal:
    """A place that cannot be, and why."""

    reason: str


def _place(
    sweep: Sweep, model: int, gpu: int, stack: int, dtype: int, kv_dtype: int, skew: int, *, cut: Cut
) -> Deployment | Illegal:
    formats = [None if word == OWN else word for word in (sweep.dtypes[dtype], sweep.kv_dtypes[kv_dtype])]
    architecture = sweep.models[model]
    try:
        return Deployment(
            architecture, sweep.gpus[gpu], sweep.stacks[stack], Precision.of(architecture, *formats), layout_of(cut),
            sweep.skews[skew],
        )  # fmt: skip
    except KernelcastError as error:
        return Illegal(str(error))


def _inferred(
    places: Sequence[Deployment | Illegal], which: Integers, sizes: Mapping[str, Integers], conditions: Conditions
) -> Columns:
    """Of each setting: the place ``places[which]``, a batch of ``sizes``."""
    found: Columns = {name: np.full(len(which), np.nan) for name in _NUMBERS}
    found |= {name: np.full(len(which), None, dtype=object) for name in _TEXTS}
    asked, batch_of = np.unique(np.stack([sizes[name] for name in SIZES], axis=1), axis=0, return_inverse=True)
    batches = [_batch(*row) for row in asked.tolist()]  # many places are asked the same
    cases: list[tuple[Deployment, Workload]] = []
    rows: list[int] = []
    for row, (at, of) in enumerate(zip(which.tolist(), batch_of.tolist(), strict=True)):
        place, batch = places[at], batches[of]
        if isinstance(place, Illegal) or isinstance(batch, Illegal):
            found["status"][row] = ILLEGAL
            found["reason"][row] = place.reason if isinstance(place, Illegal) else batch.reason
            continue
        found["precision"][row] = place.precision.label
        cases.append((place, batch))
        rows.append(row)
    if cases:
        told = infer_columns(cases, conditions)
        for name in (*_NUMBERS, "bound_by", "support"):
            found[name][rows] = told[name]
        found["reason"][rows] = told["refused"]
        answered = np.array([why is None for why in told["refused"]])
        found["status"][rows] = np.where(answered, OK, np.where(told["fits"], REFUSED, NO_ROOM))
    return found


def _batch(batch: int, inputs: int, outputs: int, cached: int, chunk: int) -> Workload | Illegal:
    try:
        return Workload.equal(batch, inputs, outputs, cached, None if chunk < 0 else chunk)
    except KernelcastError as error:
        return Illegal(str(error))


@dataclass(frozen=True)
class Work:
    """``prices``: USD per GPU-hour by GPU id; unknown stays unknown."""

    sweep: Sweep
    conditions: Conditions
    prices: Mapping[str, float]

    @cached_property
    def space(self) -> Space:
        return Space(self.sweep)

    def __getstate__(self) -> dict[str, object]:
        """To another process, which numbers the settings itself."""
        return {name: value for name, value in self.__dict__.items() if name != "space"}

    def rows(self, chunk: Chunk) -> bytes:
        """The chunk's rows: the same bytes whoever works them out."""
        columns = answers(self.space, self.space.between(chunk.start, chunk.stop), self.prices, self.conditions)
        columns["setting"] = np.arange(chunk.first, chunk.first + chunk.count)
        return parquet({name: columns[name] for name in COLUMNS})


def parquet(columns: Columns) -> bytes:
    """Columns of COLUMNS as a Parquet file; NaN and None are NULL."""
    import duckdb

    cells: dict[str, NDArray[np.float64]] = {}
    select = [
        f"CAST({encoded(column, cells)} AS {COLUMNS[name].type}) AS {quoted(name)}" for name, column in columns.items()
    ]
    with TemporaryDirectory(prefix="kernelcast-") as folder, duckdb.connect() as connection:
        path = Path(folder) / "rows.parquet"
        connection.execute("SET threads = 1")  # one order of row groups
        connection.register("encoded", cells)
        query = f"SELECT {', '.join(select)} FROM encoded"
        connection.execute(f"COPY ({query}) TO {text(str(path))} (FORMAT parquet, COMPRESSION zstd)")
        return path.read_bytes()
