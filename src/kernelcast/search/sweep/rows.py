"""The rows of a sweep: their columns, and a chunk of settings in, its rows as a Parquet file out. What cannot run is a
row with its reason."""

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
from kernelcast.search.sweep.file import AS_STORED, LAYOUT, NAMES, SIZES, Sweep, layout_of
from kernelcast.search.sweep.space import Chunk, SettingBlock, Space

Columns = dict[str, NDArray[Any]]
STATUSES = OK, NO_ROOM, ILLEGAL, REFUSED = ("ok", "does not fit", "illegal", "refused")
_ENDS = ("", "_low", "_high")
_SECONDS = tuple(f"{name}_s{end}" for name in ("ttft", "tpot", "total") for end in _ENDS)
_TEXTS = ("status", "reason", "precision", "bound_by", "support")
_INFERRED = (*_SECONDS, "tokens_per_s", "memory_bytes", "available_bytes", "fits", "bound_by", "support")
# columns of a setting first, then of its forecast; as DuckDB types them
COLUMNS: Mapping[str, str] = {
    "setting": "BIGINT", **dict.fromkeys(NAMES, "VARCHAR"), "gpus": "INTEGER", **dict.fromkeys(LAYOUT, "INTEGER"),
    "sequence_parallel": "BOOLEAN", "skew": "DOUBLE", **dict.fromkeys(SIZES, "INTEGER"),
    "status": "VARCHAR", "reason": "VARCHAR", "precision": "VARCHAR", **dict.fromkeys(_SECONDS, "DOUBLE"),
    "tokens_per_s": "DOUBLE", "tokens_per_s_per_gpu": "DOUBLE", "requests_per_s": "DOUBLE", "memory_bytes": "DOUBLE",
    "available_bytes": "DOUBLE", "fits": "BOOLEAN", "bound_by": "VARCHAR", "support": "VARCHAR",
    "usd_per_hour": "DOUBLE", "dollars_per_million_tokens": "DOUBLE",
}  # fmt: skip
_STEP = tuple(f"step_s{end}" for end in _ENDS)
TRAINING_COLUMNS: Mapping[str, str] = {
    "setting": "BIGINT", **dict.fromkeys(("model", "gpu", "stack", "precision", "recompute"), "VARCHAR"),
    **dict.fromkeys(("seq", "global_batch", "micro_batch", "micro_batches", "gpus", "dp", "tp", "cp", "pp",
                     "virtual_stages", "ep", "expert_tp", "zero"), "INTEGER"),
    "status": "VARCHAR", "reason": "VARCHAR", **dict.fromkeys(_STEP, "DOUBLE"),
    **dict.fromkeys(("tokens_per_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "bubble_s", "memory_bytes",
                     "available_bytes"), "DOUBLE"), "fits": "BOOLEAN", "support": "VARCHAR",
    "usd_per_hour": "DOUBLE", "dollars_per_million_tokens": "DOUBLE",
}  # fmt: skip
# which direction is better, where that is plain
BETTER: Mapping[str, str] = {
    **dict.fromkeys(
        (*_SECONDS, *_STEP, "bubble_s", "gpus", "memory_bytes", "usd_per_hour", "dollars_per_million_tokens"), "min"
    ),
    **dict.fromkeys(
        ("tokens_per_s", "tokens_per_s_per_gpu", "requests_per_s", "available_bytes", "tflops_per_gpu", "mfu"), "max"
    ),
}


def weights_digest(conditions: Conditions) -> str:
    """Digest of all fitted weights in use."""
    return _folder_digest(getattr(conditions.predictor, "folder", WEIGHTS))


@functools.cache
def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def hourly_prices(gpus: Sequence[Gpu], path: Path | None = None, given: Sequence[str] = ()) -> dict[str, float]:
    """USD per GPU-hour by id, of those that have a price; a what-if or a file of the user's has that of its name."""
    prices = read_prices(path, given)
    return {gpu.id: float(prices[gpu.id].usd_per_hour) for gpu in gpus if gpu.id in prices}


@dataclass(frozen=True)
class SweepJob:
    """The data of every worker. ``prices``: USD per GPU-hour by GPU id; unknown stays unknown."""

    sweep: Sweep
    conditions: Conditions
    prices: Mapping[str, float]

    @cached_property
    def space(self) -> Space:
        return Space(self.sweep)

    def __getstate__(self) -> dict[str, object]:
        """For another process, which numbers the settings itself."""
        return {name: value for name, value in self.__dict__.items() if name != "space"}

    def rows(self, chunk: Chunk) -> bytes:
        """The chunk's rows: the same bytes on every executor."""
        columns = self._columns(self.space.between(chunk.start, chunk.stop))
        columns["setting"] = np.arange(chunk.first, chunk.first + chunk.count)
        return parquet({name: columns[name] for name in COLUMNS})

    def _columns(self, block: SettingBlock) -> Columns:
        """The columns of every setting: its parameters and its forecast."""
        space = self.space
        setting = space.columns(block)
        unique, which = np.unique(block.deployments, return_inverse=True)
        models, *middle, layouts = space.codes(unique)
        values = space.layout_values(models, layouts)
        codes = np.stack([models, *middle], axis=1)
        deployments = [self._deployment(*code) for code in zip(*codes.T.tolist(), values.tolist(), strict=True)]
        batches, batch_of = np.unique(np.stack([block.sizes[name] for name in SIZES], axis=1), axis=0,
                                      return_inverse=True)  # many deployments have the same  # fmt: skip
        workloads = [_workload(*sizes) for sizes in batches.tolist()]
        cases = [(deployments[at], workloads[of]) for at, of in zip(which.tolist(), batch_of.tolist(), strict=True)]
        columns = _inferred(cases, self.conditions)
        columns["requests_per_s"] = setting["batch"] / columns["total_s"]
        columns["tokens_per_s_per_gpu"] = columns["tokens_per_s"] / setting["gpus"]
        hourly = np.array([self.prices.get(name, np.nan) for name in setting["gpu"]])
        columns["usd_per_hour"] = hourly * setting["gpus"]
        columns["dollars_per_million_tokens"] = columns["usd_per_hour"] / 3600.0 / columns["tokens_per_s"] * 1e6
        for end in _ENDS:  # of one token there is none after the first
            columns[f"tpot_s{end}"][setting["output_len"] == 1] = np.nan
        chunk = setting["chunk"].astype(np.float64)
        return setting | {"chunk": np.where(chunk < 0, np.nan, chunk)} | columns

    def _deployment(
        self, model: int, gpu: int, stack: int, dtype: int, kv_dtype: int, skew: int, layout: list[int]
    ) -> Deployment | str:
        """Or why it cannot be."""
        sweep = self.sweep
        formats = [None if name == AS_STORED else name for name in (sweep.dtypes[dtype], sweep.kv_dtypes[kv_dtype])]
        try:
            precision = Precision.of(sweep.models[model], *formats)
            return Deployment(sweep.models[model], sweep.gpus[gpu], sweep.stacks[stack], precision,
                              layout_of(tuple(layout)), sweep.skews[skew])  # fmt: skip
        except KernelcastError as error:
            return str(error)


def _workload(batch: int, inputs: int, outputs: int, cached: int, chunk: int) -> Workload | str:
    """Or why it cannot be."""
    try:
        return Workload.equal(batch, inputs, outputs, cached, None if chunk < 0 else chunk)
    except KernelcastError as error:
        return str(error)


def _inferred(cases: Sequence[tuple[Deployment | str, Workload | str]], conditions: Conditions) -> Columns:
    columns: Columns = {name: np.full(len(cases), np.nan) for name in _INFERRED}
    columns |= {name: np.full(len(cases), None, dtype=object) for name in _TEXTS}
    legal: list[tuple[Deployment, Workload]] = []
    rows: list[int] = []
    for row, (deployment, workload) in enumerate(cases):
        if isinstance(deployment, str) or isinstance(workload, str):
            columns["status"][row] = ILLEGAL
            columns["reason"][row] = deployment if isinstance(deployment, str) else workload
            continue
        columns["precision"][row] = deployment.precision.label
        legal.append((deployment, workload))
        rows.append(row)
    if legal:
        forecasts = infer_columns(legal, conditions)
        for name in _INFERRED:
            columns[name][rows] = forecasts[name]
        columns["reason"][rows] = forecasts["refused"]
        answered = np.array([why is None for why in forecasts["refused"]])
        columns["status"][rows] = np.where(answered, OK, np.where(forecasts["fits"], REFUSED, NO_ROOM))
    return columns


def parquet(columns: Columns, types: Mapping[str, str] = COLUMNS) -> bytes:
    """Columns of these types as a Parquet file; NaN and None are NULL."""
    import duckdb

    cells: dict[str, NDArray[np.float64]] = {}
    select = [f"CAST({encoded(column, cells)} AS {types[name]}) AS {quoted(name)}" for name, column in columns.items()]
    with TemporaryDirectory(prefix="kernelcast-") as folder, duckdb.connect() as connection:
        path = Path(folder) / "rows.parquet"
        connection.execute("SET threads = 1")  # one order of row groups
        connection.register("encoded", cells)
        query = f"SELECT {', '.join(select)} FROM encoded"
        connection.execute(f"COPY ({query}) TO {text(str(path))} (FORMAT parquet, COMPRESSION zstd)")
        return path.read_bytes()
