"""Measured data in small: files in the layout of the public repositories, and what is read back from them.

Every number is invented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from kernelcast.forecast.predict_table import predict_columns
from kernelcast_lab import data as lab
from kernelcast_lab.data.importing import import_checkout


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """A small Parquet file; numbers, words and None as Python has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(zip(*columns.values(), strict=True))
    marks = ", ".join("(" + ", ".join("?" * len(columns)) + ")" for _ in rows)
    names = ", ".join(f'"{name}"' for name in columns)
    with duckdb.connect() as connection:
        relation = f"SELECT * FROM (VALUES {marks}) AS t({names})"
        connection.execute(f"COPY ({relation}) TO '{path}' (FORMAT parquet)", [cell for row in rows for cell in row])


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")


def pipeweave(root: Path) -> Path:
    """A checkout of PipeWeave: two files of GEMMs, two of collectives within and between nodes."""
    gemm: dict[str, list[Any]] = {
        "M": [96, 384],
        "N": [512, 2048],
        "K": [256, 1536],
        "avg_duration": [11.5, 40.0],
        "hardware": ["NVIDIA H100", "NVIDIA H20"],
        "tc_bf16": [4096, 592],
    }
    write_csv(root / "dataset/gemm_fp8_test.csv", gemm)
    write_csv(root / "dataset/gemm_fp8_train.csv", {k: v[1:] for k, v in gemm.items()})
    for op in ("all_reduce", "send_recv"):
        columns: dict[str, list[Any]] = {
            f"time_stats.{op}.mean": [0.09, 0.2],
            f"time_stats.{op}.median": [0.08, 0.1],
            "rank": [0, 0],
            "num_workers": [2, 16],
            "size": [2048, 4096],
            "collective": [op, op],
            "devices_per_node": [2, 8],
        }
        write_csv(root / "dataset/collective/RTX PRO 6000 S" / f"{op}.csv", columns)
    return root


def imported(source: str, checkout: Path, target: Path) -> dict[str, dict[str, Any]]:
    """What an import says of each table, by its name."""
    summary = import_checkout(source, checkout, target)
    return {line["table"].split("/")[1]: line for line in summary["tables"]}


def rows_of(found: lab.Measurements) -> list[dict[str, Any]]:
    """Rows as dictionaries of what is given."""
    names = list(found.columns)
    cells = zip(*(found.columns[n].tolist() for n in names), strict=True)
    return [{n: v for n, v in zip(names, row, strict=True) if v is not None and v == v} for row in cells]


def no_bad_row(found: lab.Measurements) -> None:
    _, bad = predict_columns(found.columns, None)
    assert not bad.messages, bad.text()
