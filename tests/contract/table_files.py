"""Table files for tests of kernelcast kernels: written, read back, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
from running import Run

import kernelcast

ENDINGS = (".csv", ".parquet", ".jsonl")
READERS = {
    ".csv": "read_csv('{}', header = true, all_varchar = true)",
    ".parquet": "read_parquet('{}')",
    ".jsonl": "read_json('{}', format = 'newline_delimited')",
}
# Three ops, pass-through columns of several types with NULLs, and rows that are in no order.
MIXED = """
SELECT * FROM (VALUES
    ('gemm',      4096, 4096, 4096, 'bf16', NULL, NULL, 'first', 1.5::DOUBLE,  true,  DATE '2024-02-29', '007'),
    ('rmsnorm',   NULL, NULL, NULL, NULL,   512,  8192, NULL,    NULL::DOUBLE, NULL,  NULL::DATE,        NULL),
    ('gemm',      16,   1024, 512,  'fp8',  NULL, NULL, 'a,"b"', -2.25,        false, DATE '1999-12-31', ''),
    ('silu_mul',  NULL, NULL, NULL, 'fp16', 64,   256,  'µ',     1e300,        true,  NULL,              'x y')
) AS t(op, m, n, k, dtype, rows, cols, note, weight, used, day, code)
"""
CALLS = [  # the same in Python
    kernelcast.kernel("gemm", m=4096, n=4096, k=4096, dtype="bf16"),
    kernelcast.kernel("rmsnorm", rows=512, cols=8192),
    kernelcast.kernel("gemm", m=16, n=1024, k=512, dtype="fp8"),
    kernelcast.kernel("silu_mul", rows=64, cols=256, dtype="fp16"),
]


def write(query: str, path: Path) -> Path:
    kind = {".csv": "FORMAT csv, HEADER", ".parquet": "FORMAT parquet", ".jsonl": "FORMAT json"}[path.suffix]
    duckdb.connect().execute(f"COPY ({query}) TO '{path}' ({kind})")
    return path


def read(path: Path, select: str = "*") -> list[dict[str, Any]]:
    cursor = duckdb.connect().execute(f"SELECT {select} FROM {READERS[path.suffix].format(path)}")
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def refused(run: Run, *arguments: str | Path) -> str:
    """The one line that refuses ``arguments``."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kernelcast: error: ")
    assert err.count("\n") == 1, err
    return err
