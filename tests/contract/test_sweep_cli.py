"""``kernelcast sweep`` and ``kernelcast query``: what they tell, what they refuse, and what a kill leaves."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Run, strict

FILE = """
model = ["llama-3.1-8b", "qwen3-30b-a3b"]
gpu = ["h100_sxm", "l40s"]
tp = [1, 2]
batch = { from = 1, to = 512, factor = 8 }
input_len = [128, 1000]
output_len = 3
where = ["batch * input_len <= 400000"]
"""
QUICK = ("--predictor", "generic", "--chunk-settings", "4")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "small.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def folder(file: Path) -> Path:
    from kernelcast.app.cli.app import main

    out = file.with_suffix(".sweep")
    assert main(["sweep", str(file), "-o", str(out), "--engine", "one", *QUICK]) == 0
    return out


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("[!.]*.parquet")}


def process(*arguments: object) -> subprocess.Popen[str]:
    """In a session of its own, with whatever it starts."""
    command = [sys.executable, "-m", "kernelcast", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_a_sweep_says_what_it_did_and_what_is_best(run: Run, file: Path, folder: Path) -> None:
    best = ("--top", "2", "--by", "dollars_per_million_tokens", "--pareto", "tokens_per_s_per_gpu,tpot_s")
    code, out, err = run("sweep", file, "-o", folder, "--engine", "one", *QUICK, *best)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("56 settings: ") and "does not fit" in lines[0] and "all were there" in lines[0]
    assert f"rows in {folder}" in out and "best 2 by dollars_per_million_tokens (min)" in out
    assert "on the Pareto front: tokens_per_s_per_gpu (max) against tpot_s (min)" in out
    found = strict(run("sweep", file, "-o", folder, "--engine", "one", *QUICK, *best, "--json")[1])
    assert found["settings"] == found["finished_before"] == sum(found["statuses"].values()) == 56
    assert len(found["top"]) == 2 and len(found["pareto"]) > 1
    asked = strict(run("query", folder, *best, "--json")[1])
    assert asked["top"] == found["top"] and asked["pareto"] == found["pareto"]
    only = strict(run("query", folder, "--top", "50", "--where", "gpu = 'l40s'", "--json")[1])["top"]
    assert {row["gpu"] for row in only} == {"l40s"}


def test_sql_over_the_rows(run: Run, folder: Path) -> None:
    query = "SELECT gpu, count(*) AS n, max(tokens_per_s) AS most FROM sweep GROUP BY gpu ORDER BY gpu"
    found = strict(run("query", folder, query, "--json")[1])
    assert [row["gpu"] for row in found] == ["h100_sxm", "l40s"] and sum(row["n"] for row in found) == 56
    code, out, err = run("query", folder, query)
    assert (code, err) == (0, "") and out.splitlines()[0].split() == ["gpu", "n", "most"] and len(out.splitlines()) == 3
    lines = run("query", folder, query, "--csv")[1].splitlines()
    assert lines[0] == "gpu,n,most" and float(lines[1].split(",")[2]) == found[0]["most"]
    assert "… 6 rows more" in run("query", folder, "SELECT setting, reason FROM sweep")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["SELECT gpuu FROM sweep"], 'column "gpuu" not found'),
        (["SELECT * FROM swep"], "sweep"),
        (["SELEC 1"], "syntax error"),
        (["DROP VIEW sweep"], "a query is one SELECT"),
        (["SELECT 1; SELECT 2"], "a query is one SELECT"),
        (["COPY sweep TO 'x.csv'"], "a query is one SELECT"),
        (["SELECT * FROM read_text('/etc/hostname')"], "disabled"),
        ([], "what to query?"),
        (["SELECT 1", "--top", "3"], "what to query?"),
        (["--top", "3", "--by", "tpot"], "unknown column 'tpot' (did you mean tpot_s"),
        (["--top", "3", "--by", "batch"], "write batch:min or batch:max"),
        (["--top", "3", "--by", "gpu"], "gpu is text"),
        (["--top", "3", "--by", "tpot_s:least"], "min or max"),
        (["--top", "0"], "1 or more"),
        (["--by", "tpot_s"], "--by needs --top"),
        (["--pareto", "tpot_s"], "two columns"),
        (["--top", "3", "--where", "gpuu = 1"], "gpuu"),
    ],
)
def test_a_question_that_cannot_be_is_one_line(run: Run, folder: Path, arguments: list[str], said: str) -> None:
    code, out, err = run("query", folder, *arguments)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "arguments", "said"),
    [
        (("batch =", "bacth ="), [], "unknown key 'bacth' (did you mean batch"),
        (("l40s", "l40x"), [], "unknown gpu 'l40x' (did you mean"),
        (("input_len <=", "inputlen <="), [], "(did you mean input_len"),
        (("", ""), ["--engine", "rays"], "unknown engine 'rays' (did you mean ray"),
        (("", ""), ["--address", "auto"], "give --engine ray too"),
        (("", ""), ["--workers", "0"], "--workers is a number of 1 or more"),
        (("", ""), ["--chunk-settings", "0"], "1 or more"),
        (("", ""), ["--top", "3", "--by", "cost"], "unknown column 'cost'"),
        (("400000", "0"), [], "no setting keeps where"),
    ],
)
def test_a_slip_is_one_line_and_nothing_is_written(
    run: Run, tmp_path: Path, change: tuple[str, str], arguments: list[str], said: str
) -> None:
    (tmp_path / "slip.toml").write_text(FILE.replace(*change))
    code, out, err = run("sweep", tmp_path / "slip.toml", "-o", tmp_path / "out", *arguments)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_finished_says_so(run: Run, folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for name in ("manifest.json", "chunk-000000.parquet", "chunk-000003.parquet"):
        (part / name).write_bytes((folder / name).read_bytes())
    code, out, err = run("query", part, "SELECT count(*) AS n FROM sweep", "--json")
    assert code == 0 and strict(out) == [{"n": 8}] and "2 of 14 chunks are finished so far" in err
    (part / "chunk-000000.parquet").unlink()
    (part / "chunk-000003.parquet").unlink()
    code, _, err = run("query", part, "SELECT 1")
    assert code == 2 and "none of the 14 chunks" in err


def test_another_file_in_the_same_folder_is_refused(run: Run, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other.toml").write_text(FILE.replace("128", "256"))
    code, _, err = run("sweep", tmp_path / "other.toml", "-o", folder, "--engine", "one", *QUICK)
    assert code == 2 and "input_len = [128, 1000], now [256, 1000]" in err and "--fresh" in err


def awaited(what: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    assert what()


def test_control_c_says_how_to_go_on(file: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    started = process("sweep", file, "-o", out, "--workers", 2, *QUICK)
    awaited(lambda: len(digests(out)) > 1)
    os.killpg(started.pid, signal.SIGINT)  # as a terminal does, to all of them
    _, err = started.communicate(timeout=60)
    if len(digests(out)) < len(digests(folder)):  # it was not done before
        assert started.returncode == 130 and len(err.splitlines()) == 1
        assert "the same command continues" in err
    assert process("sweep", file, "-o", out, "--workers", 2, *QUICK).wait() == 0
    assert digests(out) == digests(folder)


@pytest.mark.slow
def test_killed_and_resumed_many_times(file: Path, folder: Path, tmp_path: Path) -> None:
    """The whole group, at any instant, in processes or alone; some before the first chunk, most in the midst."""
    out, chance, partly = tmp_path / "killed", random.Random(18), 0
    whole = len(digests(folder))
    for at in range(8):
        before = len(digests(out))
        started = process("sweep", file, "-o", out, *(("--workers", 2) if at % 4 == 0 else ("--engine", "one")), *QUICK)
        if at % 2:
            time.sleep(chance.uniform(0.0, 0.8))
        else:
            end = time.monotonic() + 20
            while len(digests(out)) == before and started.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.05))
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        partly += 0 < len(digests(out)) < whole
    assert partly >= 2
    assert process("sweep", file, "-o", out, "--workers", 2, *QUICK).wait() == 0
    assert digests(out) == digests(folder)
    assert not list(out.glob(".*part*"))
