"""Measured kernel times: one schema, named cleaning rules, readers for tables and importers for public sources."""

from kernelcast.lab.data.measurements import Measurements, data_hash, merged
from kernelcast.lab.data.rules import RULES
from kernelcast.lab.data.schema import columns_of
from kernelcast.lab.data.shared import kernel_tables, read, read_all, read_table, tables
from kernelcast.lab.data.store import read_canonical, write_canonical

__all__ = [
    "RULES",
    "Measurements",
    "columns_of",
    "data_hash",
    "kernel_tables",
    "merged",
    "read",
    "read_all",
    "read_canonical",
    "read_table",
    "tables",
    "write_canonical",
]
