"""calibrate and --calibration from the command line: the help's example, what is written, what is refused."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelcast.cli import main

GEMM = ["kernel", "gemm", "--m", "512", "--n", "4096", "--k", "4096", "--gpu", "h200_sxm", "--json"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(word) for word in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said.err
    return said.err


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([str(word) for word in arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Forty GEMMs at times that rise with m."""
    lines = [f"gemm,{i * 64},4096,4096,bf16,{9 + i * 2.6},note {i}" for i in range(1, 41)]
    path = tmp_path / "measured.csv"
    path.write_text("\n".join(["op,m,n,k,dtype,latency_us,note", *lines]) + "\n")
    return path


@pytest.fixture
def made(measured: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = measured.with_name("my_h200.safetensors")
    assert main(["calibrate", str(measured), "--gpu", "h200_sxm", "-o", str(path)]) == 0
    said = capsys.readouterr()
    assert re.search(r"gemm +40 +[\d.]+% +[\d.]+%", said.out)
    assert f"--calibration {path}" in said.err
    return path


def test_the_example_in_help_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["calibrate", "--help"]) == 0
    example = re.sub(r" *\\\s*\n\s*", " ", capsys.readouterr().out.partition("Example:")[2])
    lines = [line.strip() for line in example.splitlines() if line.strip()]
    assert any(line.startswith("kernelcast calibrate") for line in lines)
    script = "\n".join(lines).replace("kernelcast ", f"{shlex.quote(sys.executable)} -m kernelcast ")
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "+calibrated" in done.stdout


def test_json_says_what_was_made(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = measured.with_name("out")
    found = told(capsys, "calibrate", measured, "--gpu", "NVIDIA H200", "-o", path, "--json")
    assert (found["gpu"], found["rows"], found["bad_rows"]) == ("h200_sxm", 40, 0)
    family = found["families"]["gemm"]
    assert family["rows"] == 40 and family["error_after"] < family["error_before"]
    assert len(family["biases"]["all"]) == 3


def test_predictions_take_it_and_say_so(made: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, after = told(capsys, *GEMM), told(capsys, *GEMM, "--calibration", made)
    assert after["predictor"] == plain["predictor"] + "+calibrated"
    assert plain["calibration"] is None
    assert (after["calibration"]["gpu"], after["calibration"]["rows"]) == ("h200_sxm", 40)
    true = 9 + 8 * 2.6  # µs: m = 512 is the eighth row
    assert abs(after["time_s"] * 1e6 / true - 1) < abs(plain["time_s"] * 1e6 / true - 1)
    rows = told(capsys, "kernels", measured, "--gpu", "h200_sxm", "--calibration", made, "--json")
    assert rows[7]["predicted_us"] == pytest.approx(after["time_s"] * 1e6)
    assert main([*GEMM[:-1], "--calibration", str(made)]) == 0
    assert "by 40 measured calls" in capsys.readouterr().out
    norm = ["kernel", "rmsnorm", "--rows", "64", "--cols", "64", "--gpu", "h200_sxm", "--calibration", made]
    assert told(capsys, *norm, "--json")["calibration"]["rows"] == 0  # nothing of its family was measured


def test_wrong_use_is_one_line(made: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--calibration", made]
    said = refused(capsys, *GEMM[:-2], "a100_sxm", *there)
    assert "made on h200_sxm, not on a100_sxm" in said
    assert "made on h200_sxm" in refused(capsys, "kernels", measured, "--gpu", "a100_sxm", *there)
    assert "not generic-1" in refused(capsys, *GEMM, "--predictor", "generic", *there)
    assert "physics alone" in refused(capsys, *GEMM, "--without", "l2", *there)
    assert "no calibration file" in refused(capsys, *GEMM, "--calibration", made.with_name("none"))
    assert "not a calibration" in refused(capsys, *GEMM, "--calibration", measured)
    assert main([str(w) for w in (*GEMM, "--set", "dram_bytes_per_s=7e12", *there)]) == 0  # a what-if is fine


def test_other_weights_warn_on_stderr(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    from kernelcast import load_calibration

    replace(load_calibration(made), predictor="learned-1999").save(made)
    assert main([*GEMM, "--calibration", str(made)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["time_s"] > 0
    assert said.err.startswith("kernelcast: warning: the calibration was made for learned-1999")
    assert said.err.count("\n") == 1


def test_bad_measurements_are_refused_and_nothing_is_written(
    measured: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    text = measured.read_text()

    def said(content: str, *more: str) -> str:
        measured.write_text(content)
        return refused(capsys, "calibrate", measured, "-o", out, *(more or ("--gpu", "h200_sxm")))

    lines = text.splitlines()
    assert "9 measured calls" in said("\n".join(lines[:10]) + "\n")
    assert "needs a column 'latency_us'" in said("op,m\ngemm,1\n")
    assert "needs a column 'op'" in said("m,latency_us\n1,1\n")
    assert "row 8: latency_us must be a positive number" in said(text.replace("29.8", "-1"))
    assert "row 8: latency_us must be a positive number" in said(text.replace("29.8", "fast"))
    bad = said(text.replace("gemm,512", "gem,512"))
    assert "1 bad row: row 8: unknown op 'gem'" in bad and "--skip-bad" in bad
    assert "unknown gpu 'h2000'" in said(text, "--gpu", "h2000")
    assert "which GPU" in said(text, "--skip-bad")
    both = "\n".join(
        [lines[0] + ",gpu", *(f"{line},{'h200_sxm' if i else 'l40s'}" for i, line in enumerate(lines[1:]))]
    )
    assert "2 GPUs (h200_sxm, l40s)" in said(both + "\n", "--skip-bad")
    assert "no folder" in refused(capsys, "calibrate", measured, "--gpu", "h200_sxm", "-o", tmp_path / "a" / "b")
    assert "is the input" in refused(capsys, "calibrate", measured, "--gpu", "h200_sxm", "-o", measured)
    assert "is a folder" in refused(capsys, "calibrate", measured, "--gpu", "h200_sxm", "-o", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["measured.csv"]


def test_skip_bad_leaves_rows_out(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured.write_text(measured.read_text().replace("29.8", "").replace("gemm,640", "gem,640"))
    out = measured.with_name("out")
    assert main(["calibrate", str(measured), "--gpu", "h200_sxm", "-o", str(out), "--skip-bad", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == 38
    assert said.err.startswith("kernelcast: warning: 2 bad rows") and out.exists()
