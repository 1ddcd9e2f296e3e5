"""Table files that cannot be answered: bad rows are named, bad files refused, and nothing is half written."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import Run
from table_files import ENDINGS, MIXED, read, refused, write

from kernelcast.forecast.predict_table import OUTPUT


def test_no_gpu_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("op,m,n,k\ngemm,1,2,3\n")
    assert "which GPU?" in refused(run, "kernels", tmp_path / "in.csv", "-o", tmp_path / "out.csv")
    (tmp_path / "in.csv").write_text("op,m,n,k,gpu\ngemm,1,2,3,\n")
    assert "row 1: gpu is empty" in refused(run, "kernels", tmp_path / "in.csv", "-o", tmp_path / "out.csv")
    assert "--gpu" in refused(run, "kernels", tmp_path / "in.csv", "--set", "sm_count=3")
    assert not (tmp_path / "out.csv").exists()


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
    7: "but h100_sxm has 79.6 GiB",
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


@pytest.mark.slow
def test_ctrl_c_while_writing_leaves_nothing(tmp_path: Path) -> None:
    query = "SELECT 'gemm' AS op, 1 + range % 4096 AS m, 64 AS n, 64 AS k FROM range(1500000)"
    table, out = write(query, tmp_path / "in.parquet"), tmp_path / "out.csv"
    command = [sys.executable, "-m", "kernelcast", "kernels", str(table), "--gpu", "h100_sxm", "-o", str(out)]
    command += ["--predictor", "roofline"]  # what is written matters here, and when
    for _ in range(5):  # on a busy machine it may have written all before this process saw it begin
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
        )
        while not list(tmp_path.glob(".out.*")) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        out_text, err = process.communicate(timeout=60)
        if process.returncode != 0:
            break
        out.unlink()
    assert (process.returncode, out_text, err.strip()) == (130, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_a_row_that_breaks_two_rules_is_told_of_once(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    table.write_text(
        "op,batch,q_len,kv_len,q_heads,kv_heads,head_dim,causal,window\n"
        "attention,1,64,64,3,2,128,false,8\nattention,1,64,64,4,2,128,true,8\nattention,1,64,64,4,2,128,false,8\n"
    )
    code, _, err = run("kernels", table, "--gpu", "h200_sxm")
    assert code == 2 and "2 bad rows" in err and err.count("\n") == 1
