"""Measured kernel times: one schema, named cleaning rules, readers for tables and importers for public sources."""

from kernelcast.collect.schema import columns_of
from kernelcast_lab.data.measurements import Measurements, merged, read_canonical, write_canonical
from kernelcast_lab.data.rules import RULES, data_hash
from kernelcast_lab.data.shared import kernel_tables, read, read_all, read_table, tables

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
