"""The columns of a sweep's rows: what each holds, as DuckDB types it, and which way is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernelcast.errors import KernelcastError, unknown

MIN, MAX = "min", "max"


@dataclass(frozen=True)
class Column:
    """``better``: min or max; None: neither without a word."""

    type: str
    better: str | None = None


WORDS = ("model", "gpu", "stack", "dtype", "kv_dtype")
CUTS = ("tp", "pp", "dp", "ep", "micro_batches", "sequence_parallel")
SIZES = ("batch", "input_len", "output_len", "cached", "chunk")
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


@dataclass(frozen=True)
class Wish:
    """A column, and which way is better."""

    column: str
    better: str

    @classmethod
    def read(cls, text: str) -> Wish:
        """'tpot_s', or 'batch:max' where the column does not tell by itself (or the other way is asked for)."""
        name, colon, better = text.strip().partition(":")
        if name not in COLUMNS:
            raise unknown("column", name, COLUMNS)
        if colon and better not in (MIN, MAX):
            raise KernelcastError(f"{text!r}: after the colon is min or max, as in {name}:min")
        chosen = better or COLUMNS[name].better
        if COLUMNS[name].type == "VARCHAR":
            raise KernelcastError(f"{name} holds words: take a column of numbers, such as tokens_per_s_per_gpu")
        if chosen is None:
            raise KernelcastError(f"is less or more {name} better? write {name}:min or {name}:max")
        return cls(name, chosen)

    @property
    def order(self) -> str:
        return "DESC" if self.better == MAX else "ASC"

    @property
    def sign(self) -> str:
        """That makes less better."""
        return "-" if self.better == MAX else ""
