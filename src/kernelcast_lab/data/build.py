"""From a source's columns to canonical measurements: DuckDB maps, filters, counts and takes medians.

The order: rules over the source's columns; mapping to calls; formats and times; an optional sample; the median of
repeated calls; then the table reader's own checks and the bound (``rules.checked``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kernelcast.collect.schema import columns_of, is_text
from kernelcast.errors import KernelcastError
from kernelcast.files import quoted, text
from kernelcast.hardware import gpu
from kernelcast.ops import REGISTRY
from kernelcast.ops.base import STACKS
from kernelcast_lab.data.mapping import OpMap, TableMap
from kernelcast_lab.data.measurements import EVERYTHING, Choice, Columns, Measurements, empty, fetch, sampled
from kernelcast_lab.data.rules import checked, ordered

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def build(
    connection: DuckDBPyConnection, relation: str, mapping: TableMap, name: str, choice: Choice = EVERYTHING
) -> Measurements:
    """The measurements of ``relation`` (SQL: a query over the source's columns)."""
    wanted = [o for o in mapping.ops if o.op in REGISTRY and (choice.ops is None or o.op in choice.ops)]
    counts: Counter[str] = Counter()
    _mark(connection, relation, mapping, choice, counts)
    parts = [_calls(connection, op, mapping, counts) for op in wanted]
    if not parts:
        return empty(mapping.source, {name: ordered(counts)})
    types = columns_of({o.op for o in wanted})
    query = " UNION ALL BY NAME ".join(parts)
    connection.execute(f"CREATE OR REPLACE TEMP TABLE calls AS SELECT * FROM ({query}) WHERE {choice.where or 'true'}")
    _sample(connection, choice, types)
    columns = _medians(connection, types, counts)
    if not len(columns["op"]):
        return empty(mapping.source, {name: ordered(counts)})
    good, dropped = checked(columns)
    counts.update(dropped)
    return Measurements(good, mapping.source, {name: ordered(counts)})


def _mark(
    connection: DuckDBPyConnection, relation: str, mapping: TableMap, choice: Choice, counts: Counter[str]
) -> None:
    """The view ``marked``: the source's rows with ``_gpu`` and, where a rule takes them, ``_rule``; counts those."""
    present = {row[0] for row in connection.execute(f"DESCRIBE {relation}").fetchall()}
    added = [f"{sql} AS {quoted(column)}" for column, sql in mapping.optional.items() if column not in present]
    source = f"(SELECT {', '.join(['*', *added])} FROM ({relation}))"
    names = connection.execute(f"SELECT DISTINCT {mapping.gpu} FROM {source}").fetchall()
    ids = {str(row[0]): _gpu_id(str(row[0])) for row in names}
    arms = " ".join(f"WHEN {text(name)} THEN {text(result)}" for name, result in ids.items() if result)
    gpu_id = f"(CASE {mapping.gpu} {arms} END)" if arms else "NULL"
    located = f"(SELECT *, {gpu_id} AS _gpu FROM {source})"
    taken = " OR ".join(f"({o.where})" for o in mapping.ops if o.op in REGISTRY) or "false"
    rules = [("unknown_gpu", "_gpu IS NULL"), *mapping.drops, ("no_kernel_family", f"NOT coalesce({taken}, false)")]
    if not mapping.ops:
        rules = [("no_kernel_family", "true")]
    marks = " ".join(f"WHEN {condition} THEN {text(rule)}" for rule, condition in rules)
    scope = " AND ".join(["true", *_scope(mapping, choice)])
    connection.execute(
        f"CREATE OR REPLACE TEMP VIEW marked AS SELECT *, CASE {marks} END AS _rule FROM {located} WHERE {scope}"
    )
    result = connection.execute("SELECT _rule, count(*) FROM marked WHERE _rule IS NOT NULL GROUP BY 1").fetchall()
    counts.update({rule: int(count) for rule, count in result})


def _scope(mapping: TableMap, choice: Choice) -> list[str]:
    """Conditions for the rows that are counted: those of the chosen GPUs and ops."""
    scope = []
    if choice.gpus is not None:
        ids = ", ".join(text(gpu(name).id) for name in choice.gpus) or "NULL"
        scope.append(f"_gpu IN ({ids})")
    if choice.ops is not None and {o.op for o in mapping.ops} - set(choice.ops):
        scope.append(" OR ".join(f"({o.where})" for o in mapping.ops if o.op in choice.ops) or "false")
    return [f"({condition})" for condition in scope]


def _gpu_id(name: str) -> str | None:
    try:
        return gpu(name).id
    except KernelcastError:
        return None


def _calls(connection: DuckDBPyConnection, op: OpMap, mapping: TableMap, counts: Counter[str]) -> str:
    """SQL for the calls of one op; counts the rows whose format or time is no good."""
    types = columns_of({op.op})
    stack, version = op.stack or mapping.stack, mapping.version
    cells = {
        "op": text(op.op),
        "dtype": op.dtype,
        "stack": f"CASE WHEN ({stack}) IN ({', '.join(map(text, STACKS))}) THEN ({stack}) END",
        "gpu": "_gpu",
        "version": version,
        "kernel_source": mapping.kernel_source,
        "source": text(mapping.source),
        "campaign": f"concat_ws('/', {text(mapping.source)}, _gpu, {stack}, {version})",
        "split": mapping.split,
        "rotation": mapping.rotation,
        "latency_us": op.latency_us or mapping.latency_us,
        **op.parameters,
    }
    unknown = sorted(set(op.parameters) - set(types))
    if unknown:
        raise KernelcastError(f"{mapping.source}: {op.op} has no parameter {', '.join(unknown)}")
    select = ", ".join(
        f"CAST({cells.get(name, 'NULL')} AS {sql_type if is_text(sql_type) else 'DOUBLE'}) AS {quoted(name)}"
        for name, sql_type in types.items()
    )
    taken = f"FROM marked WHERE _rule IS NULL AND ({op.where})"
    formed = f"(SELECT {select} {taken})"
    good_time = "coalesce(latency_us > 0 AND isfinite(latency_us), false)"
    row = connection.execute(
        f"SELECT count(*) FILTER (dtype IS NULL), count(*) FILTER (dtype IS NOT NULL AND NOT {good_time}) FROM {formed}"
    ).fetchone() or (0, 0)
    counts.update({"unknown_dtype": row[0], "bad_latency": row[1]})
    return f"SELECT * FROM {formed} WHERE dtype IS NOT NULL AND {good_time}"


def _sample(connection: DuckDBPyConnection, choice: Choice, types: dict[str, str]) -> None:
    counted = connection.execute("SELECT count(*) FROM calls").fetchone() or (0,)
    condition = sampled(choice, types, counted[0])
    if condition:
        connection.execute(f"DELETE FROM calls WHERE NOT ({condition})")


def _medians(connection: DuckDBPyConnection, types: dict[str, str], counts: Counter[str]) -> Columns:
    """The calls, each once, in a fixed order."""
    keys = [quoted(name) for name in types if name != "latency_us"]
    before = connection.execute("SELECT count(*) FROM calls").fetchone() or (0,)
    connection.execute(
        f"CREATE OR REPLACE TEMP TABLE medians AS SELECT {', '.join(keys)}, median(latency_us) AS latency_us "
        f"FROM calls GROUP BY {', '.join(keys)}"
    )
    connection.execute("DROP TABLE calls")
    first = ["op", "gpu", "campaign", "dtype", "kernel_source"]
    order = [quoted(n) for n in first] + [k for k in keys if k.strip('"') not in first]
    columns = fetch(connection, "SELECT * FROM medians", types, order)
    connection.execute("DROP TABLE medians")
    counts["duplicate"] += before[0] - len(columns["op"])
    return columns
