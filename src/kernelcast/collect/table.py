"""Results as one Parquet in the canonical schema, with what was seen beside the times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.collect.choose import PlannedCall
from kernelcast.collect.schema import SOURCE, columns_of, connect, note_of, write_rows
from kernelcast.errors import KernelcastError
from kernelcast.files import text
from kernelcast.hardware import Gpu
from kernelcast.ops import kernel, kernel_class, parameters_of

# warm: timed with what the L2 kept. status: ok or failed, with the error. spread: half the quartiles' distance over
# the median. launches: in one replay.
# kernels: GPU kernels of the call; kernels_us: what they take, one by one, copies and fills too. The rest describes the
# longest of them.
RESULT_COLUMNS = {
    "family": "VARCHAR", "warm": "BOOLEAN", "status": "VARCHAR", "error": "VARCHAR", "spread": "FLOAT",
    "replays": "INTEGER",
    "launches": "INTEGER", "at_s": "FLOAT", "kernels": "INTEGER", "kernels_us": "FLOAT",
    "kernel_name": "VARCHAR", "grid": "VARCHAR",
    "block": "VARCHAR", "registers": "INTEGER", "smem_bytes": "INTEGER",
}  # fmt: skip


def write_table(records: Iterable[Mapping[str, Any]], path: Path, target: Gpu, facts: Mapping[str, Any]) -> int:
    """Write the file atomically; returns the number of rows."""
    rows = [_row(record, target, facts) for record in records]
    return write_rows(rows, columns_of({row["op"] for row in rows}) | RESULT_COLUMNS, path, facts, by="op, dtype")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The results of a table that was written before, as records of a session."""
    if not path.exists():
        return []
    if note_of(path) is None:
        raise KernelcastError(f"{path} is no table of kernelcast collect: choose another name for the results")
    with connect() as connection:
        result = connection.execute(f"SELECT * FROM read_parquet({text(str(path))})")
        names = [column[0] for column in result.description or ()]
        rows = [dict(zip(names, values, strict=True)) for values in result.fetchall()]
    return [_record({name: value for name, value in row.items() if value is not None}) for row in rows]


def calls_again(path: Path, count: int, seed: int) -> list[PlannedCall]:
    """``count`` of the calls that a table has times of, at random, to be measured a second time."""
    if not path.exists():
        raise KernelcastError(f"no table {path} to measure again")
    known = [record for record in read_records(path) if record["status"] == "ok"]
    picked = [known[at] for at in np.random.default_rng(seed).permutation(len(known))[:count]]
    return [
        PlannedCall(record["family"], kernel(**record["call"]), warm=record.get("warm", False)) for record in picked
    ]


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    parameters = parameters_of(kernel_class(row["op"]))
    given = {name: value for name, value in row.items() if name in parameters}
    lists = {name: json.loads(value) for name, value in given.items() if parameters[name].type == "lengths"}
    call = kernel(row["op"], **{**given, **lists})
    planned = PlannedCall(row["family"], call, warm=row.get("warm", False))
    kept = ("latency_us", "rotation", "kernel_source", *RESULT_COLUMNS)
    return {"key": planned.key, "call": planned.parameters, **{name: row[name] for name in kept if name in row}}


def _row(record: Mapping[str, Any], target: Gpu, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One flat row; ``rotation`` is the number of sets of tensors in rotation."""
    call = {name: json.dumps(list(value)) if isinstance(value, list | tuple) else value
            for name, value in record["call"].items()}  # fmt: skip
    stack = call.get("stack")
    version = str(facts.get(stack or "triton", ""))
    results = {name: record[name] for name in RESULT_COLUMNS if name in record}
    return {
        **call,
        "gpu": target.known_as,
        "version": version,
        "kernel_source": record.get("kernel_source"),
        "source": SOURCE,
        "campaign": f"{SOURCE}/{target.known_as}/{stack}/{version}",
        "rotation": record.get("rotation"),
        "input_rotation": record.get("rotation"),  # a set has its inputs too
        **results,
        "latency_us": record.get("kernels_us" if kernel_class(call["op"]).timed_as_sum else "latency_us"),
    }
