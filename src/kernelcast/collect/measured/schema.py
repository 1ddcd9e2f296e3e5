"""The one schema of a measurement table: what was called, where it ran, and how long it took.

The columns of parameters are made from the registered kernel families, so a new kernel file needs no edit here.
In a file a number that was not given is NULL; in memory it is NaN, and a word that was not given is None.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernelcast.errors import KernelcastError
from kernelcast.ops import REGISTRY, kernel_class, parameters_of

VERSION = 1  # of the schema, kept in each file
SQL_OF_KIND = {"size": "BIGINT", "real": "DOUBLE", "flag": "BOOLEAN", "choice": "VARCHAR", "lengths": "VARCHAR"}

# Beside the parameters of the ops, dtype and stack among them.
# gpu: id in the catalogue. version: of the stack. kernel_source: the kernel as the source names it.
# source: who published it. campaign: source/gpu/stack/version, one measuring of one stack on one GPU.
# split: the source's own division into train and test. rotation: how many sets of weights passed between two uses
# of one (1: the same call again and again); not given: weights came from DRAM. input_rotation: the same of activations;
# not given: the kernel before had just made them, or the same were used again.
IDENTITY = {
    "gpu": "VARCHAR",
    "version": "VARCHAR",
    "kernel_source": "VARCHAR",
    "source": "VARCHAR",
    "campaign": "VARCHAR",
    "split": "VARCHAR",
}
NUMBERS = {"rotation": "DOUBLE", "input_rotation": "DOUBLE", "latency_us": "DOUBLE"}


def parameter_types(ops: Iterable[str] | None = None) -> dict[str, str]:
    """SQL type of each parameter of these ops (default: all), dtype and stack first."""
    types = {"dtype": "VARCHAR", "stack": "VARCHAR"}
    for op in sorted(REGISTRY) if ops is None else sorted(set(ops)):
        for name, spec in parameters_of(kernel_class(op)).items():
            types[name] = _joined(name, types.get(name), SQL_OF_KIND[spec.type])
    return types


def _joined(name: str, known: str | None, new: str) -> str:
    """One type for a name that several ops use."""
    if known in (None, new):
        return new
    if {known, new} <= {"BIGINT", "DOUBLE"}:
        return "DOUBLE"
    raise KernelcastError(f"parameter {name} is {known} in one op and {new} in another: rename one of them")


def columns_of(ops: Iterable[str] | None = None) -> dict[str, str]:
    """Every column of a table of these ops and its SQL type, in order."""
    return {"op": "VARCHAR", **parameter_types(ops), **IDENTITY, **NUMBERS}


def is_word(sql_type: str) -> bool:
    return sql_type == "VARCHAR"
