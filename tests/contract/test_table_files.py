"""Table files in and out: any mix of ops gets its results, everything else passes through unchanged."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from running import Run
from table_files import CALLS, ENDINGS, MIXED, read, write

import kernelcast
from kernelcast.forecast.predict_table import OUTPUT


def predicted(path: Path) -> list[float | None]:
    return [None if row["predicted_us"] in (None, "") else float(row["predicted_us"]) for row in read(path)]


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
        **dict.fromkeys(OUTPUT, "DOUBLE"), "bound_by": "VARCHAR", "support": "VARCHAR",
        "answered_as": "VARCHAR",
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


@pytest.mark.slow
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
    assert [row["gpu"] for row in read(tmp_path / "out.csv")] == ["h100_sxm", "h100_sxm"]  # as answered


def test_results_of_an_earlier_run_are_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("predicted_us,op,m,n,k\n-1,gemm,1,2,3\n")
    assert run("kernels", tmp_path / "in.csv", "--gpu", "h100_sxm", "-o", tmp_path / "out.csv")[0] == 0
    header = (tmp_path / "out.csv").read_text().splitlines()[0]
    assert header == "op,m,n,k," + ",".join(OUTPUT)
    again = run("kernels", tmp_path / "out.csv", "--gpu", "h100_sxm", "-o", tmp_path / "again.csv")
    assert again[0] == 0
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "out.csv").read_text()


# ---- odd files, no output file, conditions, size ----


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


@pytest.mark.slow
def test_a_million_rows_in_time_and_memory(tmp_path: Path) -> None:
    query = """SELECT 'gemm' AS op, 1 + (range * 7919) % 8192 AS m, 128 * (1 + range % 64) AS n,
        128 * (1 + range % 61) AS k, CASE WHEN range % 2 = 0 THEN 'bf16' ELSE 'fp8' END AS dtype, range AS id
        FROM range(1000000)"""
    table = write(query, tmp_path / "in.parquet")
    code = (
        "import resource, sys; from kernelcast.app.cli import main; code = main(sys.argv[1:]); "
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


def test_rotations_of_a_table_reach_the_command(run: Run, tmp_path: Path) -> None:
    # a small product whose operands L2 keeps: warm (rotation 1) is faster than from DRAM
    path = tmp_path / "calls.csv"
    path.write_text("op,m,n,k,rotation\ngemm,8,8192,2048,1\ngemm,8,8192,2048,\ngemm,8,8192,2048,inf\n")
    out = tmp_path / "times.jsonl"
    assert run("kernels", path, "--gpu", "h200_sxm", "-o", out)[0] == 0
    warm, usual, cold = (json.loads(line)["predicted_us"] for line in out.read_text().splitlines())
    assert warm < usual == cold
