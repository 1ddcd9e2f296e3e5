"""Table files (.csv, .parquet, .jsonl) in and out, by DuckDB: columns for the table reader, and a copy of the
file with the results beside its own columns.

A CSV is read as text and typed by its whole content, so that one odd cell late in the file makes one bad row and
not a failed file. Output goes to a temporary file beside the target and is moved there when it is complete.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.ops import REGISTRY, parameters_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ENDINGS = (".csv", ".parquet", ".jsonl")
_DELIMITERS = ",;\t|"
_COPY = {
    ".csv": "FORMAT csv, HEADER",
    ".parquet": "FORMAT parquet, COMPRESSION zstd",
    ".jsonl": "FORMAT json",
}
_FLOATS = ("FLOAT", "DOUBLE")
_STEM = 80  # letters of a file's name that its temporary name keeps: names have an end

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class TableFile:
    """An open table file: its columns' names, DuckDB types, and the row count."""

    path: Path
    types: Mapping[str, str]
    count: int
    connection: DuckDBPyConnection

    def columns(self, *more: str) -> dict[str, NDArray[Any]]:
        """The columns that kernel calls are made of, and ``more``; an empty cell is masked, NaN or None."""
        if "op" not in self.types:
            raise KernelcastError(
                f"{self.path}: a table of calls needs a column 'op'; this has {', '.join(self.types)}"
            )
        texts, others = _call_columns()
        select = []
        for name in self.types:
            if name in texts:
                select.append(f"CAST({_plain(name, self.types[name])} AS VARCHAR) AS {quoted(name)}")
            elif name in others or name in more:
                select.append(f"{_plain(name, self.types[name])} AS {quoted(name)}")
        return self._selected(select)

    def named(self, *names: str) -> dict[str, NDArray[Any]]:
        """These columns of a table of whatever it is."""
        return self._selected([f"{_plain(name, self.types[name])} AS {quoted(name)}" for name in names])

    def _selected(self, select: list[str]) -> dict[str, NDArray[Any]]:
        with _plain_errors(self.path):
            columns = self.connection.execute(f"SELECT {', '.join(select)} FROM source").fetchnumpy()
        return {name: _unmasked(column) for name, column in columns.items()}

    def write(self, results: Columns, target: Path) -> None:
        """All of the file's own columns and ``results``, to ``target``; complete or not at all."""
        with complete(target) as part:
            if target.suffix == ".jsonl" and any(_nests_floats(type_) for type_ in self.types.values()):
                with part.open("w", encoding="utf-8") as file:
                    file.writelines(f"{row}\n" for row in self.json_rows(results))
                return
            query = self._joined(results, as_text=target.suffix == ".csv", finite=target.suffix == ".jsonl")
            self.connection.execute(f"COPY ({query}) TO {text(str(part))} ({_COPY[target.suffix]})")

    def json_rows(self, results: Columns) -> Iterator[str]:
        """Each row, with its results, as one line of JSON."""
        with _plain_errors(self.path):
            query = f"SELECT CAST(to_json(j) AS VARCHAR) FROM ({self._joined(results, finite=True)}) AS j"
            cursor = self.connection.execute(query)
            while rows := cursor.fetchmany(10_000):
                yield from (_strict_json(row[0]) for row in rows)

    def _joined(self, results: Columns, *, as_text: bool = False, finite: bool = False) -> str:
        """The query for the file's columns and the results, row by row. A column of the same name is replaced."""
        replaced = {name.lower() for name in results}
        select = []
        for name, type_ in self.types.items():
            if name.lower() in replaced:
                continue
            cell = f"s.{quoted(name)}"
            if finite and type_ in _FLOATS:  # JSON has no NaN
                cell = f"CASE WHEN isfinite({cell}) THEN {cell} END"
            select.append(f"{cell} AS {quoted(name)}")
        cells: dict[str, NDArray[Any]] = {}
        select += [f"{encoded(column, cells)} AS {quoted(name)}" for name, column in results.items()]
        self.connection.register("encoded", cells)
        source = "source_text" if as_text and self.path.suffix.lower() == ".csv" else "source"
        return f"SELECT {', '.join(select)} FROM {source} AS s POSITIONAL JOIN encoded"


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """A string in SQL."""
    return "'" + value.replace("'", "''") + "'"


def encoded(column: NDArray[Any], into: dict[str, NDArray[Any]]) -> str:
    """Put a column where DuckDB can scan it, and say in SQL how to read it once ``into`` is registered as ``encoded``:
    text travels as codes, NaN is NULL."""
    key = f"c{len(into)}"
    if column.dtype != object:
        into[key] = np.asarray(column, dtype=np.float64)
        return f"CASE WHEN isfinite(encoded.{key}) THEN encoded.{key} END"
    codes: dict[Any, int] = {None: 0}
    into[key] = np.fromiter((codes.setdefault(v, len(codes)) for v in column), dtype=np.int32, count=len(column))
    values = ", ".join("NULL" if value is None else text(str(value)) for value in codes)
    return f"CAST(list_extract([{values}], encoded.{key} + 1) AS VARCHAR)"


def read_text(path: Path) -> str:
    """A file's text, plain or gzipped; UnicodeDecodeError where it is none."""
    raw = path.read_bytes()
    try:
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error):
        raise UnicodeDecodeError("utf-8", raw[:2], 0, 1, "not a complete gzip file") from None


@contextmanager
def complete(target: Path) -> Iterator[Path]:
    """A temporary name beside ``target``, which is moved there when all is written: a complete file or none, and where
    it is none, one line that says why. What is no file (a device, a pipe) gets a copy of what was written."""
    if target.is_dir():
        raise KernelcastError(f"{target} is a folder, not a file")
    if target.exists() and not target.is_file():
        with _write_errors(target), TemporaryDirectory(prefix="kernelcast-") as folder:
            part = Path(folder) / f"part{target.suffix}"
            yield part
            with part.open("rb") as written, target.open("wb") as taken:
                shutil.copyfileobj(written, taken)
        return
    file = target.resolve()  # what a link leads to is replaced, and the link stays
    part = file.with_name(f".{file.stem[:_STEM]}.{os.getpid()}.part{file.suffix}")
    try:
        with _write_errors(target):
            yield part
            if file.exists():
                shutil.copymode(file, part)
            part.replace(file)
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """What cannot be written, in one line."""
    duckdb = sys.modules.get("duckdb")  # where nobody has imported it, it has not written either
    try:
        with _plain_errors(target) if duckdb else nullcontext():
            yield
    except BrokenPipeError:  # nobody reads it any more, which is no error
        raise
    except OSError as error:
        raise KernelcastError(f"{target}: {error.strerror or error}; it was not written") from None


def check_target(source: Path, target: Path, *, table: bool = True) -> None:
    """Refuse a place to write a result of ``source`` to before any work is done."""
    if table and target.suffix not in ENDINGS:
        raise KernelcastError(f"{target}: the ending of an output file is one of {', '.join(ENDINGS)}")
    check_writable(target)
    if target.exists() and source.exists() and target.samefile(source):
        raise KernelcastError(f"{target} is the input; write the output to another file")


def check_writable(target: Path) -> None:
    """Refuse a file that could not be written."""
    if target.is_dir():
        raise KernelcastError(f"{target} is a folder, not a file")
    if not target.parent.is_dir():
        raise KernelcastError(f"{target}: there is no folder {target.parent}")
    if target.exists() and not os.access(target, os.W_OK):
        raise KernelcastError(f"{target}: no permission to write to it")
    if not os.access(target.parent, os.W_OK) and (target.is_file() or not target.exists()):
        raise KernelcastError(f"{target}: no permission to write to the folder {target.parent}")


def check_folder(target: Path) -> None:
    """Refuse a folder that could not be made or written to."""
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    if not there.is_dir():
        raise KernelcastError(f"{target}: {there} is a file, not a folder" if there != target else
                              f"{target} is a file, not a folder")  # fmt: skip
    if not os.access(there, os.W_OK):
        raise KernelcastError(f"{target}: no permission to write to the folder {there}")


@contextmanager
def open_table(path: Path) -> Iterator[TableFile]:
    """Open a table file; the first look at its content happens here."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise KernelcastError(f"{path}: the ending of a table file is one of {', '.join(ENDINGS)}")
    if not path.exists():
        raise KernelcastError(f"no file {path}")
    if not path.is_file():
        raise KernelcastError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise KernelcastError(f"{path} is empty")
    import duckdb

    with TemporaryDirectory(prefix="kernelcast-") as folder, duckdb.connect() as connection:
        readable = _without_wildcards(path, Path(folder))
        with _plain_errors(path):
            _OPENERS[ending](connection, readable)
            types = {row[0]: row[1] for row in connection.execute("DESCRIBE source").fetchall()}
            counted = connection.execute("SELECT count(*) FROM source").fetchone()
        yield TableFile(path, types, counted[0] if counted else 0, connection)


@contextmanager
def opened_parquet(file: Path, name: Path, most_bytes: int, most_rows: int) -> Iterator[TableFile]:
    """A Parquet file that has no name of its own (``name``: what to call it), if it is not too large unpacked. A column
    of equal values takes a few bytes, however many they are."""
    import duckdb

    memory: dict[str, Any] = {"memory_limit": f"{most_bytes}B", "threads": 1, "max_temp_directory_size": "0B"}
    with duckdb.connect(config=memory) as connection, _plain_errors(name):
        source = text(str(file))
        rows = (connection.execute(f"SELECT sum(num_rows) FROM parquet_file_metadata({source})").fetchone() or (0,))[0]
        if (rows or 0) > most_rows:
            raise KernelcastError(f"{name}: a table may have {most_rows:,} rows here, not {int(rows):,}")
        unpacked = connection.execute(f"SELECT sum(total_uncompressed_size) FROM parquet_metadata({source})")
        if ((unpacked.fetchone() or (0,))[0] or 0) > most_bytes:
            raise KernelcastError(f"{name}: it has more than {most_bytes:,} bytes when it is no longer compressed")
        _open_parquet(connection, file)
        types = {row[0]: row[1] for row in connection.execute("DESCRIBE source").fetchall()}
        counted = connection.execute("SELECT count(*) FROM source").fetchone()
        yield TableFile(name, types, counted[0] if counted else 0, connection)


def _open_parquet(connection: DuckDBPyConnection, path: Path) -> None:
    connection.execute(f"CREATE VIEW source AS SELECT * FROM read_parquet({text(str(path))})")


def _open_jsonl(connection: DuckDBPyConnection, path: Path) -> None:
    """JSON has no dates, so text that looks like one stays text."""
    reader = f"read_json({text(str(path))}, format = 'newline_delimited', sample_size = -1"
    described = connection.execute(f"DESCRIBE SELECT * FROM {reader})").fetchall()
    dates = r"\b(DATE|TIMESTAMP(_NS|_MS|_S)?( WITH TIME ZONE)?|TIME( WITH TIME ZONE)?|UUID)\b(?=$|\)|,|\[)"
    types = ", ".join(f"{text(name)}: {text(re.sub(dates, 'VARCHAR', type_))}" for name, type_, *_ in described)
    connection.execute(f"CREATE VIEW source AS SELECT * FROM {reader}, columns = {{{types}}})")


def _open_csv(connection: DuckDBPyConnection, path: Path) -> None:
    """``source_text`` has the cells as written; ``source`` has them typed."""
    names, delimiter = _csv_header(path)
    columns = ", ".join(f"{text(name)}: 'VARCHAR'" for name in names)
    connection.execute(
        f"CREATE TABLE source_text AS SELECT * FROM read_csv({text(str(path))}, auto_detect = false, header = true,"
        f" delim = {text(delimiter)}, quote = '\"', escape = '\"', columns = {{{columns}}})"
    )
    typed = []
    for cell in map(quoted, names):
        tests = {
            "BIGINT": f"CAST(TRY_CAST({cell} AS BIGINT) AS VARCHAR) = {cell}",
            # a number, but not a code with leading zeros such as 007
            "DOUBLE": f"TRY_CAST({cell} AS DOUBLE) IS NOT NULL AND NOT ({cell} LIKE '0_%' AND {cell} NOT LIKE '0.%')",
            "BOOLEAN": f"lower({cell}) IN ('true', 'false')",
        }
        checks = ", ".join(f"bool_and({cell} IS NULL OR coalesce({test}, false))" for test in tests.values())
        passed = connection.execute(f"SELECT {checks} FROM source_text").fetchone() or ()
        type_ = next((type_ for type_, fits in zip(tests, passed, strict=False) if fits), "VARCHAR")
        typed.append(f"CAST({cell} AS {type_}) AS {cell}")
    connection.execute(f"CREATE VIEW source AS SELECT {', '.join(typed)} FROM source_text")


_OPENERS = {".csv": _open_csv, ".parquet": _open_parquet, ".jsonl": _open_jsonl}


def _csv_header(path: Path) -> tuple[list[str], str]:
    """Column names and the delimiter: the one that the header line has most of."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline(1 << 20)
    except UnicodeDecodeError:
        raise KernelcastError(f"{path}: not readable as CSV: it is not UTF-8 text") from None
    return csv_header(line, path)


def csv_header(line: str, path: Path) -> tuple[list[str], str]:
    """The same of the line itself."""
    if "\0" in line or not line.strip():
        what = "it is not text" if line.strip() else "its first line, which names the columns, is blank"
        raise KernelcastError(f"{path}: not readable as CSV: {what}")
    delimiter = max(_DELIMITERS, key=line.count)
    names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
    names = [name or f"column{index}" for index, name in enumerate(names)]  # an index column has no name
    folded = Counter(name.lower() for name in names)
    twice = sorted({name for name in names if folded[name.lower()] > 1})
    if twice:
        raise KernelcastError(f"{path}: more than one column is called {', '.join(twice)}")
    return names, delimiter


def _call_columns() -> tuple[frozenset[str], frozenset[str]]:
    """Names of text columns, and of columns of numbers or lists."""
    specs = [spec for kernel in REGISTRY.values() for spec in parameters_of(kernel).values()]
    texts = {"op", "gpu", *(spec.name for spec in specs if spec.type == "choice")}
    return frozenset(texts), frozenset(spec.name for spec in specs) - texts


def _plain(name: str, type_: str) -> str:
    """A column of mixed JSON values as text, without JSON's own quotes."""
    return f"({quoted(name)} ->> '$')" if type_ == "JSON" else quoted(name)


def _unmasked(column: Any) -> NDArray[Any]:
    """Masks only where the type has no empty value of its own."""
    if not isinstance(column, np.ma.MaskedArray):
        return np.asarray(column)
    if column.dtype.kind == "O":
        values = np.array(column.data, dtype=object)
        values[np.ma.getmaskarray(column)] = None
        return values
    return np.asarray(column.filled(np.nan)) if column.dtype.kind == "f" else column


def _nests_floats(type_: str) -> bool:
    """Lists and structs may hide a NaN, which DuckDB would write to JSON as it is."""
    return type_ not in _FLOATS and any(name in type_ for name in _FLOATS)


def _strict_json(line: str) -> str:
    """NaN inside a nested value becomes null."""
    if "NaN" not in line and "Infinity" not in line:
        return line
    return json.dumps(json.loads(line, parse_constant=lambda _: None), ensure_ascii=False)


def _without_wildcards(path: Path, folder: Path) -> Path:
    """DuckDB reads *, ? and [ in a path as wildcards; such a file goes by another name."""
    if not set("*?[{") & set(str(path)):
        return path
    link = folder / f"table{path.suffix}"
    try:
        link.symlink_to(path.resolve())
    except OSError:  # Windows lets few people make links
        shutil.copyfile(path, link)
    return link


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """DuckDB's errors in one line; its interrupt as Ctrl-C."""
    import duckdb

    try:
        yield
    except (duckdb.InterruptException, RuntimeError) as error:  # DuckDB turns Ctrl-C into either
        if "interrupt" in str(error).lower():
            raise KeyboardInterrupt from None
        raise
    except duckdb.Error as error:
        said = _bad_json_line(path) if "Malformed JSON" in str(error) else ""
        raise KernelcastError(f"{path}: {said or _first_lines(str(error))}") from None


def _bad_json_line(path: Path) -> str:
    """The first line that is not JSON (DuckDB counts lines from the end of its buffers)."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line.decode().strip() or "null")
            except UnicodeDecodeError:
                return f"line {number} is not text"
            except json.JSONDecodeError as error:
                return f"line {number} is not JSON: {error.msg}"
    return ""


def _first_lines(message: str) -> str:
    """What went wrong and where, without DuckDB's advice on its own options."""
    lines = [line.strip() for line in message.splitlines()]
    said = [re.sub(r"^[A-Z][\w ]* Error: |( of| in)? file ['\"].*?['\"]", "", lines[0])]
    for line in lines[1:]:
        if line.startswith(("Possible", "LINE", "file =")):
            break
        if line and not line.startswith("Original Line"):
            said.append(line)
    return "; ".join(said[:2]).rstrip(". ")[:300]
