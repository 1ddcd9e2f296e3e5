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

from kernelcast.app.cli import main

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
    assert family["expected_after"] < family["expected_before"]
    (form,) = family["formats"].values()
    assert (form["rows"], form["error_after"]) == (40, pytest.approx(family["error_after"]))


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
    assert "is analytical" in refused(capsys, *GEMM, "--without", "l2", *there)
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


RUN = {"model": "llama-3.1-8b", "stack": "vllm", "batch": 8, "input_len": 512, "output_len": 32}
INFER = [
    "infer",
    "llama-3.1-8b",
    "--batch",
    "8",
    "--input-len",
    "512",
    "--output-len",
    "32",
    "--gpu",
    "h200_sxm",
    "--json",
]


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_runs_scale_what_they_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = told(capsys, *INFER), tmp_path / "cal"
    slow = {"ttft_s": 1.1 * plain["ttft_s"], "tpot_s": 1.2 * plain["tpot_s"]}
    run = written(tmp_path / "run.json", {**RUN, **slow, "gpu": "NVIDIA H200"})
    found = told(capsys, "calibrate", run, "-o", out, "--json")  # the run says which GPU
    assert found["gpu"] == "h200_sxm" and found["rows"] == 0 and not found["by_others"]
    before, after = ([line[key] for line in found["runs"]] for key in ("error_before", "error_after"))
    assert before == pytest.approx([1 / 1.1 - 1, 1 / 1.2 - 1])
    assert all(abs(a) < 0.6 * abs(b) for a, b in zip(after, before, strict=True))
    scale = found["scales"]["gemm bf16 vllm, bytes"]
    assert 1.02 < scale["factor"] < 1.25 and scale["sd"] < scale["prior_sd"] and scale["runs"] == 1
    assert "moe" in found["unseen"] and "attention mixed" in found["unseen"]
    there = told(capsys, *INFER, "--calibration", out)
    assert there["tpot_s"] == pytest.approx(slow["tpot_s"] * (1 + after[1]), rel=5e-3)
    moe = ["kernel", "moe", "--tokens", "64", "--hidden", "4096", "--inter", "1024", "--experts", "8", "--topk", "2",
           "--gpu", "h200_sxm", "--json"]  # fmt: skip
    assert told(capsys, *moe, "--calibration", out)["time_s"] == told(capsys, *moe)["time_s"]  # which no run saw
    assert main(["calibrate", str(run), "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert "not seen, so not scaled: " in said.out and "1 measured run -> " in said.err
    gemm = [*GEMM[:-1], "--stack", "vllm", "--calibration", str(out)]
    assert main(gemm) == 0 and "by whole runs: gemm bf16 vllm, bytes x 1." in " ".join(capsys.readouterr().out.split())


def test_calls_come_first_and_runs_scale_what_is_left(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, out = told(capsys, *INFER), tmp_path / "cal"
    run = written(tmp_path / "run.json", [{**RUN, "tpot_s": 1.2 * plain["tpot_s"]}])
    found = told(capsys, "calibrate", run, measured, "--gpu", "h200_sxm", "-o", out, "--json")
    assert found["families"]["gemm"]["rows"] == 40 and found["scales"]
    alone = told(capsys, "calibrate", run, "--gpu", "h200_sxm", "-o", out, "--json")
    assert found["runs"][0]["error_before"] != alone["runs"][0]["error_before"]  # forecast with the calls' correction
    twice = told(capsys, "calibrate", measured, measured, "--gpu", "h200_sxm", "-o", out, "--json")
    assert twice["rows"] == 80 and "scales" not in twice


def test_a_servers_benchmark_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served, out = tmp_path / "served.csv", tmp_path / "cal"
    ask = ["simulate", "llama-3.1-8b", "--gpu", "h100_sxm", "--request-rate", "4", "--num-prompts", "20"]
    assert main([*ask, "--requests-out", str(served), "--no-intervals"]) == 0
    capsys.readouterr()
    where = ["--gpu", "h100_sxm", "--model", "llama-3.1-8b", "-o", out]
    found = told(capsys, "calibrate", served, *where, "--json")
    assert [line["what"] for line in found["runs"]] == ["mean_ttft_s", "mean_tpot_s"]
    assert all(abs(line["error_before"]) < 1e-6 for line in found["runs"])  # its own simulation
    assert "does not name its model" in refused(capsys, "calibrate", served, "--gpu", "h100_sxm", "-o", out)


def test_wrong_runs_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "run.json", tmp_path / "cal"

    def said(content: object, *more: object) -> str:
        return refused(capsys, "calibrate", written(path, content), "-o", out, *(more or ("--gpu", "h200_sxm")))

    good = {**RUN, "tpot_s": 0.01}
    assert "unknown key 'tpto_s' (did you mean tpot_s" in said({**RUN, "tpto_s": 0.01})
    assert "no measured time" in said(RUN)
    assert "which GPU was measured" in said(good, "--skip-bad")
    assert "was measured on l40s, not on h200_sxm" in said({**good, "gpu": "l40s"})
    assert "measurements of 2 GPUs" in said([{**good, "gpu": "l40s"}, {**good, "gpu": "a40"}], "--skip-bad")
    assert "run.json:1 nobody: unknown model 'nobody'" in said({**good, "model": "nobody"})
    assert "run.json:1 llama-3.1-70b: " in said({**good, "model": "llama-3.1-70b"}, "--gpu", "l40s")  # does not fit
    assert "outputs of one token" in said({**good, "output_len": 1})
    assert "a calibration is made of a predictor without one" in said(good, "--gpu", "h200_sxm", "--calibration", path)
    assert "was not measured" in said(good, "--gpu", "h200_sxm", "--set", "dram_bytes_per_s=7e12")
    assert not out.exists()
