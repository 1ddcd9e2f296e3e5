"""Table files in and out: any mix of ops, everything else unchanged, all or nothing."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

import kernelcast
from kernelcast.cli import main
from kernelcast.tables import OUTPUT

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
CALLS = [
    kernelcast.kernel("gemm", m=4096, n=4096, k=4096, dtype="bf16"),
    kernelcast.kernel("rmsnorm", rows=512, cols=8192),
    kernelcast.kernel("gemm", m=16, n=1024, k=512, dtype="fp8"),
    kernelcast.kernel("silu_mul", rows=64, cols=256, dtype="fp16"),
]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def write(query: str, path: Path) -> Path:
    kind = {".csv": "FORMAT csv, HEADER", ".parquet": "FORMAT parquet", ".jsonl": "FORMAT json"}[path.suffix]
    duckdb.connect().execute(f"COPY ({query}) TO '{path}' ({kind})")
    return path


def read(path: Path, select: str = "*") -> list[dict[str, Any]]:
    cursor = duckdb.connect().execute(f"SELECT {select} FROM {READERS[path.suffix].format(path)}")
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def predicted(path: Path) -> list[float | None]:
    return [None if row["predicted_us"] in (None, "") else float(row["predicted_us"]) for row in read(path)]


def refused(run: Run, *arguments: str | Path) -> str:
    """The one line that refuses ``arguments``."""
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kernelcast: error: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("target", ENDINGS)
@pytest.mark.parametrize("source", ENDINGS)
def test_every_row_gets_what_python_predicts(run: Run, tmp_path: Path, source: str, target: str) -> None:
    table, out = write(MIXED, tmp_path / f"in{source}"), tmp_path / f"out{target}"
    code, _, err = run("kernels", table, "--gpu", "h100_sxm", "-o", out)
    assert code == 0, err
    expected = kernelcast.predict_many(CALLS, "h100_sxm")
    rows = read(out)
    assert [row["op"] for row in rows] == ["gemm", "rmsnorm", "gemm", "silu_mul"]
    for row, prediction in zip(rows, expected, strict=True):
        assert list(row)[-len(OUTPUT) :] == list(OUTPUT)
        assert float(row["predicted_us"]) == pytest.approx(prediction.time_s * 1e6, rel=1e-12)
        assert float(row["low_us"]) == pytest.approx(prediction.low_s * 1e6, rel=1e-12)
        assert float(row["high_us"]) == pytest.approx(prediction.high_s * 1e6, rel=1e-12)
        assert float(row["ceiling_us"]) == pytest.approx(prediction.ceiling_s * 1e6, rel=1e-12)
        assert float(row["bound_us"]) == pytest.approx(prediction.bound_s * 1e6, rel=1e-12)
        assert (row["bound_by"], row["support"]) == (prediction.bound_by, prediction.support)


def test_parquet_columns_pass_through_with_their_types(run: Run, tmp_path: Path) -> None:
    extra = (
        f"SELECT *, [1, 2] AS l, {{'a': 1, 'b': NULL}} AS s, 1.25::DECIMAL(9, 2) AS d, 7::UTINYINT AS u FROM ({MIXED})"
    )
    table, out = write(extra, tmp_path / "in.parquet"), tmp_path / "out.parquet"
    assert run("kernels", table, "--gpu", "h100_sxm", "-o", out)[0] == 0
    kept = f"* EXCLUDE ({', '.join(OUTPUT)})"
    assert read(out, kept) == read(table)

    def types(path: Path) -> list[Any]:
        return duckdb.connect().execute(f"DESCRIBE SELECT * FROM '{path}'").fetchall()

    assert types(out)[: -len(OUTPUT)] == types(table)
    assert {row[0]: row[1] for row in types(out)[-len(OUTPUT) :]} == {
        **dict.fromkeys(OUTPUT, "DOUBLE"), "bound_by": "VARCHAR", "support": "VARCHAR"
    }  # fmt: skip


def test_csv_cells_pass_through_as_written(run: Run, tmp_path: Path) -> None:
    lines = [
        "op,m,n,k,code,price,when,text",
        'gemm,64,64.0,6.4e1,007,1.50,2024-01-01T00:00:00Z,"a, ""b"""',
        "gemm,1,2,3,,,,",
    ]
    (tmp_path / "in.csv").write_text("\n".join(lines) + "\n")
    assert run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")[0] == 0
    with (tmp_path / "in.csv").open(newline="") as before, (tmp_path / "out.csv").open(newline="") as after:
        for old, new in zip(csv.reader(before), csv.reader(after), strict=True):
            assert new[: len(old)] == old


def test_jsonl_values_pass_through(run: Run, tmp_path: Path) -> None:
    rows = [
        {"op": "gemm", "m": 1, "n": 2, "k": 3, "when": "2024-01-01T00:00:00Z",
         "nested": {"a": [1, 2], "b": "2024-01-01"}},
        {"op": "gemm", "m": 4, "n": 5, "k": 6, "mixed": "text", "nested": None},
        {"op": "gemm", "m": 7, "n": 8, "k": 9, "mixed": 3},
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("kernels", tmp_path / "in.jsonl", "--gpu", "h100_sxm", "-o", tmp_path / "out.jsonl")[0] == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, result in zip(rows, found, strict=True):
        assert {name: result[name] for name in row} == row


def test_nan_in_a_passed_column_is_null_in_json(run: Run, tmp_path: Path) -> None:
    query = "SELECT 'gemm' AS op, 1 AS m, 2 AS n, 3 AS k, 'NaN'::DOUBLE AS x"
    plain = write(query, tmp_path / "plain.parquet")
    nested = write(f"SELECT *, ['inf'::DOUBLE] AS y FROM ({query})", tmp_path / "nested.parquet")
    for table, expected in ((plain, {"x": None}), (nested, {"x": None, "y": [None]})):
        assert run("kernels", table, "--gpu", "h100_sxm", "-o", tmp_path / "out.jsonl")[0] == 0
        row = json.loads((tmp_path / "out.jsonl").read_text(), parse_constant=pytest.fail)
        code, out, _ = run("kernels", table, "--gpu", "h100_sxm", "--json")
        assert code == 0
        assert json.loads(out, parse_constant=pytest.fail) == [row]
        assert {name: row[name] for name in expected} == expected


def test_row_order_over_many_rows(run: Run, tmp_path: Path) -> None:
    """Two ops in turn, more rows than DuckDB takes at once; the id says where a row was."""
    query = """SELECT range AS id, CASE WHEN range % 3 = 0 THEN 'gemm' ELSE 'rmsnorm' END AS op,
        CASE WHEN range % 3 = 0 THEN 1 + range % 4096 END AS m, 64 AS n, 64 AS k,
        CASE WHEN range % 3 > 0 THEN 1 + range % 4096 END AS rows, 4096 AS cols FROM range(300000)"""
    table, out = write(query, tmp_path / "in.parquet"), tmp_path / "out.parquet"
    assert run("kernels", table, "--gpu", "h100_sxm", "-o", out)[0] == 0
    assert [row["id"] for row in read(out, "id")] == list(range(300000))
    rows = read(out, "op, m, rows, predicted_us")
    for index in (0, 1, 2, 122_880, 122_881, 299_998, 299_999):
        row = rows[index]
        values = {"m": row["m"], "n": 64, "k": 64} if row["op"] == "gemm" else {"rows": row["rows"], "cols": 4096}
        expected = kernelcast.predict(kernelcast.kernel(row["op"], **values), "h100_sxm")
        assert row["predicted_us"] == pytest.approx(expected.time_s * 1e6)


@pytest.mark.parametrize("ending", ENDINGS)
def test_ragged_lists(run: Run, tmp_path: Path, ending: str) -> None:
    lists = ([512, 1, 1], [512, 900, 7000])
    cells = "[512, 1, 1] AS q_lens, [512, 900, 7000] AS kv_lens"
    if ending == ".csv":
        cells = "'[512, 1, 1]' AS q_lens, '[512, 900, 7000]' AS kv_lens"
    query = f"""SELECT 'attention' AS op, 32 AS q_heads, 8 AS kv_heads, 128 AS head_dim, {cells},
        NULL::INT AS m, NULL::INT AS n, NULL::INT AS k
        UNION ALL SELECT 'gemm', NULL, NULL, NULL, NULL, NULL, 1, 2, 3"""
    out = tmp_path / f"out{ending}"
    code, _, err = run("kernels", write(query, tmp_path / f"in{ending}"), "--gpu", "h100_sxm", "-o", out)
    assert code == 0, err
    call = kernelcast.kernel("attention", q_lens=lists[0], kv_lens=lists[1], q_heads=32, kv_heads=8, head_dim=128)
    assert predicted(out)[0] == pytest.approx(kernelcast.predict(call, "h100_sxm").time_s * 1e6)


def test_gpu_column_and_the_option_that_wins(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    table.write_text("op,m,n,k,gpu\ngemm,64,8192,8192,h100_sxm\ngemm,64,8192,8192,NVIDIA H200\n")
    assert run("kernels", table, "-o", tmp_path / "out.csv")[0] == 0
    first, second = predicted(tmp_path / "out.csv")
    assert first is not None and second is not None and second < first  # more bandwidth
    assert run("kernels", table, "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")[0] == 0
    assert predicted(tmp_path / "out.csv") == [first, first]
    assert [row["gpu"] for row in read(tmp_path / "out.csv")] == ["h100_sxm", "NVIDIA H200"]


def test_no_gpu_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("op,m,n,k\ngemm,1,2,3\n")
    assert "which GPU?" in refused(run, "kernels", tmp_path / "in.csv", "-o", tmp_path / "out.csv")
    (tmp_path / "in.csv").write_text("op,m,n,k,gpu\ngemm,1,2,3,\n")
    assert "row 1: gpu is empty" in refused(run, "kernels", tmp_path / "in.csv", "-o", tmp_path / "out.csv")
    assert "--gpu" in refused(run, "kernels", tmp_path / "in.csv", "--set", "sm_count=3")
    assert not (tmp_path / "out.csv").exists()


def test_results_of_an_earlier_run_are_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("predicted_us,op,m,n,k\n-1,gemm,1,2,3\n")
    assert run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")[0] == 0
    header = (tmp_path / "out.csv").read_text().splitlines()[0]
    assert header == "op,m,n,k," + ",".join(OUTPUT)
    again = run("kernels", tmp_path / "out.csv", "--gpu", "h100_sxm", "-o", tmp_path / "again.csv")
    assert again[0] == 0
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "out.csv").read_text()


# ---- bad rows ----

HALF_BAD = """op,m,n,k,dtype,note
gemm,64,64,64,bf16,good
gemm,abc,64,64,bf16,word
gemm,64,64,,bf16,missing
gemm,-1,64,64,bf16,negative
gemm,64,64,64,fp9,dtype
gemmm,64,64,64,bf16,op
gemm,2000000,2000000,64,bf16,large
,64,64,64,bf16,empty
gemm,64,64.5,64,bf16,half
gemm,128,64,64,,good
"""
REASONS = {
    2: "m must be a number, not 'abc'",
    3: "gemm needs k",
    4: "m must be from 1",
    5: "unknown dtype 'fp9'",
    6: "unknown op 'gemmm'",
    7: "but h100_sxm has 86 GB",
    8: "op is empty",
    9: "n must be a whole number, not 64.5",
}


def test_bad_rows_are_named_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(HALF_BAD)
    line = refused(run, "kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")
    assert "8 bad rows" in line
    assert "row 2: gemm: m must be a number, not 'abc'" in line
    assert "--skip-bad" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv"]


@pytest.mark.parametrize("row", REASONS)
def test_each_bad_row_has_its_reason(run: Run, tmp_path: Path, row: int) -> None:
    lines = HALF_BAD.splitlines()
    (tmp_path / "in.csv").write_text("\n".join([lines[0], *[lines[1]] * 3, lines[row]]) + "\n")
    line = refused(run, "kernels", tmp_path / "in.csv", "--gpu", "h100_sxm")
    assert "1 bad row: row 4: " in line
    assert REASONS[row] in line


@pytest.mark.parametrize("ending", ENDINGS)
def test_skip_bad_leaves_their_results_empty(run: Run, tmp_path: Path, ending: str) -> None:
    (tmp_path / "in.csv").write_text(HALF_BAD)
    out = tmp_path / f"out{ending}"
    code, _, err = run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", out, "--skip-bad")
    assert code == 0
    assert "kernelcast: warning: 8 bad rows: row 2: " in err
    rows = read(out)
    assert [row["note"] for row in rows] == [line.split(",")[-1] for line in HALF_BAD.splitlines()[1:]]
    for row in rows:
        empty = {name: row[name] for name in OUTPUT if row[name] is None}
        assert set(empty) == (set() if row["note"] == "good" else set(OUTPUT))
    assert "nan" not in out.read_bytes().decode(errors="ignore").lower().replace("nano", "")


def test_one_odd_cell_late_in_a_long_csv_is_one_bad_row(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("op,m,n,k\n" + "gemm,64,64,64\n" * 50_000 + "gemm,abc,64,64\n")
    line = refused(run, "kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")
    assert "1 bad row: row 50001: gemm: m must be a number, not 'abc'" in line


def test_many_bad_rows_are_quick_and_short(run: Run, tmp_path: Path) -> None:
    query = "SELECT 'gemm' AS op, -range - 1 AS m, 64 AS n, 64 AS k FROM range(100000)"
    table = write(query, tmp_path / "in.parquet")
    started = time.perf_counter()
    line = refused(run, "kernels", table, "--gpu", "h100_sxm")
    assert time.perf_counter() - started < 10
    assert "100000 bad rows" in line
    assert len(line) < 1000


def test_a_bad_option_is_not_blamed_on_rows(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("op,m,n,k\ngemm,1,2,3\n")
    options = ("--gpu", "h100_sxm", "--skip-bad", "-o", str(tmp_path / "out.csv"))
    assert "unknown limit 'l3'" in refused(run, "kernels", tmp_path / "in.csv", *options, "--without", "l3")
    assert not (tmp_path / "out.csv").exists()


# ---- files that cannot be read, places that cannot be written ----


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.csv", b"", "is empty"),
        ("in.csv", b"\n\nop\n", "blank"),
        ("in.csv", bytes(range(256)) * 64, "not UTF-8 text"),
        ("in.csv", b"op,m,n,k\ngemm,1,2,3\ngemm,1,\xff,3\n", "not UTF-8 text"),
        ("in.csv", b"op,m,n,k\ngemm,1,2\n", "Line: 2; Expected Number of Columns: 4 Found: 3"),
        ("in.csv", b"op,m,n,k\ngemm,1,2,3,4\n", "Line: 2; Expected Number of Columns: 4 Found: 5"),
        ("in.csv", b'op,m,n,k\ngemm,1,2,"3\n', "unterminated quote"),
        ("in.csv", b"op,m,n,m\ngemm,1,2,3\n", "more than one column is called m"),
        ("in.csv", b"m,n,k\n1,2,3\n", "needs a column 'op'; this has m, n, k"),
        ("in.parquet", bytes(range(256)) * 64, "No magic bytes"),
        ("in.parquet", b"PAR1", "too small"),
        ("in.jsonl", b'{"op": "gemm", "m": 1}\n{"op": "ge', "line 2 is not JSON"),
        ("in.jsonl", bytes(range(128, 256)) * 64, "line 1 is not text"),
        ("in.jsonl", b"[1, 2]\n", "needs a column 'op'"),
        ("in.txt", b"op\n", ".csv, .parquet, .jsonl"),
    ],
)
def test_unreadable_files(run: Run, tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    line = refused(run, "kernels", tmp_path / name, "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")
    assert said in line
    assert len(line) < 400
    assert not (tmp_path / "out.csv").exists()


def test_a_truncated_parquet_file(run: Run, tmp_path: Path) -> None:
    table = write(MIXED, tmp_path / "in.parquet")
    table.write_bytes(table.read_bytes()[:-20])
    refused(run, "kernels", table, "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")


def test_missing_files_and_bad_places(run: Run, tmp_path: Path) -> None:
    table = write(MIXED, tmp_path / "in.parquet")
    gpu = ("--gpu", "h100_sxm", "-o")
    (tmp_path / "folder.csv").mkdir()
    assert "no file" in refused(run, "kernels", tmp_path / "none.csv", *gpu, tmp_path / "out.csv")
    assert "not a file" in refused(run, "kernels", tmp_path / "folder.csv", *gpu, tmp_path / "out.csv")
    assert "no folder" in refused(run, "kernels", table, *gpu, tmp_path / "no" / "out.csv")
    assert ".csv, .parquet, .jsonl" in refused(run, "kernels", table, *gpu, tmp_path / "out.xlsx")
    assert "is a folder" in refused(run, "kernels", table, *gpu, tmp_path / "folder.csv")
    before = table.read_bytes()
    assert "is the input" in refused(run, "kernels", table, *gpu, tmp_path / "." / "in.parquet")
    assert table.read_bytes() == before
    assert "missing TABLE" in refused(run, "kernels")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.csv", "in.parquet"]


def test_an_existing_output_survives_an_error_and_is_replaced_by_a_result(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("precious")
    (tmp_path / "in.csv").write_text("op,m,n,k\ngemm,abc,2,3\n")
    refused(run, "kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "precious"
    (tmp_path / "in.csv").write_text("op,m,n,k\ngemm,1,2,3\n")
    assert run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")[0] == 0
    assert len(read(tmp_path / "out.csv")) == 1


def test_a_failed_write_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    (tmp_path / "out.csv").write_text("precious")
    table = write(MIXED, tmp_path / "in.parquet")
    monkeypatch.setattr(Path, "replace", fail)
    assert "No space left" in refused(run, "kernels", table, "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.csv"]


def test_ctrl_c_while_writing_leaves_nothing(tmp_path: Path) -> None:
    query = "SELECT 'gemm' AS op, 1 + range % 4096 AS m, 64 AS n, 64 AS k FROM range(1500000)"
    table, out = write(query, tmp_path / "in.parquet"), tmp_path / "out.csv"
    command = [sys.executable, "-m", "kernelcast", "kernels", str(table), "--gpu", "h100_sxm", "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".out.*")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out_text, err = process.communicate(timeout=60)
    assert (process.returncode, out_text, err.strip()) == (130, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


# ---- names, summaries, and no output file ----


def test_names_with_quotes_wildcards_and_blanks(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "it's [a] ta*ble.csv"
    table.write_text('op,m,n,k,"a ""b"" \'c\'",select\ngemm,1,2,3,x,y\n')
    out = tmp_path / "o'ut [1].csv"
    code, _, err = run("kernels", table, "--gpu", "h100_sxm", "-o", out)
    assert code == 0, err
    assert out.read_text().splitlines()[1].startswith("gemm,1,2,3,x,y,")


def test_spreadsheet_csv(run: Run, tmp_path: Path) -> None:
    """A byte-order mark, semicolons, CRLF, a blank line, an index column without a name."""
    (tmp_path / "in.csv").write_bytes("\ufeff;op;m;n;k\r\n0;gemm;1;2;3\r\n\r\n1;gemm;4;5;6\r\n".encode())
    code, _, err = run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")
    assert code == 0, err
    assert [row["m"] for row in read(tmp_path / "out.csv")] == ["1", "4"]


def test_a_table_without_rows(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("op,m,n,k\n")
    assert run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")[0] == 0
    assert (tmp_path / "out.csv").read_text() == "op,m,n,k," + ",".join(OUTPUT) + "\n"
    code, out, _ = run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "--json")
    assert (code, json.loads(out)) == (0, [])


def test_summary(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(HALF_BAD)
    common = ["kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "--skip-bad", "-o", tmp_path / "out.csv"]
    code, out, err = run(*common)
    assert (code, out) == (0, "")
    assert "10 rows, 8 bad" in err.splitlines()[-1]
    code, out, _ = run(*common, "--json")
    summary = json.loads(out)
    assert (summary["rows"], summary["bad_rows"]) == (10, 8)
    assert {problem["row"] for problem in summary["problems"]} == set(REASONS)


def test_without_an_output_rows_are_shown(run: Run, tmp_path: Path) -> None:
    query = "SELECT 'gemm' AS op, range + 1 AS m, 64 AS n, 64 AS k, 'bf16' AS dtype FROM range(25)"
    table = write(query, tmp_path / "in.parquet")
    code, out, _ = run("kernels", table, "--gpu", "h100_sxm")
    assert code == 0
    assert "gemm m=20 n=64 k=64 bf16" in out
    assert "gemm m=21 " not in out
    assert "the first 20 of 25 rows" in out
    assert max(map(len, out.splitlines())) <= 100
    code, out, _ = run("kernels", table, "--gpu", "h100_sxm", "--json")
    rows = json.loads(out, parse_constant=pytest.fail)
    assert [row["m"] for row in rows] == list(range(1, 26))
    assert all(row["predicted_us"] > 0 for row in rows)


def test_conditions_reach_the_table(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("op,m,n,k\ngemm,1,16384,16384\n")

    def bound_us(*options: str) -> float:
        code, out, err = run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "--json", *options)
        assert code == 0, err
        return float(json.loads(out)[0]["bound_us"])

    plain = bound_us()
    assert bound_us("--set", "dram_bytes_per_s=6.7e12") == pytest.approx(plain / 2, rel=1e-6)  # 3.35 -> 6.7 TB/s
    assert bound_us("--without", "dram") < plain
    (tmp_path / "in.csv").write_text("op,m,n,k\ngemm,1,4096,2048\n")  # 17 MB of weights; L2 holds 50
    assert bound_us("--cache", "warm") < bound_us("--cache", "cold")


def test_a_million_rows_in_time_and_memory(tmp_path: Path) -> None:
    query = """SELECT 'gemm' AS op, 1 + (range * 7919) % 8192 AS m, 128 * (1 + range % 64) AS n,
        128 * (1 + range % 61) AS k, CASE WHEN range % 2 = 0 THEN 'bf16' ELSE 'fp8' END AS dtype, range AS id
        FROM range(1000000)"""
    table = write(query, tmp_path / "in.parquet")
    code = (
        "import resource, sys; from kernelcast.cli import main; code = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, "kernels", str(table), "--gpu", "h100_sxm", "-o", str(tmp_path / "out.parquet")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - started < 30  # 5 s on two slow cores; the rest is for a busy machine
    assert int(done.stdout) < 2_000_000  # kB
    assert read(tmp_path / "out.parquet", "count(*) AS rows, count(predicted_us) AS times") == [
        {"rows": 1_000_000, "times": 1_000_000}
    ]
