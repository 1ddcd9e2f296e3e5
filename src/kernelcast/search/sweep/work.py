"""What every worker holds: a sweep with all that its answers rest on; a chunk in, its rows as a Parquet file out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from kernelcast.files import encoded, quoted, text
from kernelcast.forecast.conditions import Conditions
from kernelcast.search.sweep.answer import Columns, answers
from kernelcast.search.sweep.columns import COLUMNS
from kernelcast.search.sweep.file import Sweep
from kernelcast.search.sweep.space import Chunk, Space


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
