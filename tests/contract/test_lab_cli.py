"""fit and evaluate from the command line: their help's examples, and what they say to bad input."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from running import strict

from kernelcast.app.cli import main

pytest.importorskip("torch")

EVALUATIONS = ("tables", "served", "traced", "neusight", "tuning", "tuning-gpus", "learning-curve", "transfer")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said.err
    return said.err


def run_example(capsys: pytest.CaptureFixture[str], folder: Path, *command: str, more: str = "") -> str:
    """What the last line of the example in a command's help prints, with ``more`` options for it."""
    assert main([*command, "--help"]) == 0
    example = re.sub(r" *\\\s*\n\s*", " ", capsys.readouterr().out.partition("Example:")[2])
    lines = [line.strip() for line in example.splitlines() if line.strip()]
    assert any(line.startswith(" ".join(("kernelcast", *command))) for line in lines)
    script = "\n".join(["{ true", *lines[:-1], "} >&2", lines[-1] + more])
    script = script.replace("kernelcast ", f"{shlex.quote(sys.executable)} -m kernelcast ")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_fit_wrote_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = run_example(capsys, tmp_path, "fit")
    assert (tmp_path / "weights/gemm.safetensors").exists()
    assert re.search(r"predictor +learned-\d{8}-0", said)  # the version of these weights, not of those that ship
    call = shlex.split("kernel gemm --m 512 --n 4096 --k 4096 --dtype fp8_block --gpu h100_sxm --json")
    fitted, shipped = ([*call, "--weights", str(tmp_path / "weights")], call)
    found = []
    for arguments in (fitted, shipped):
        assert main(arguments) == 0
        found.append(strict(capsys.readouterr().out))
    assert found[0]["time_s"] != found[1]["time_s"] and found[0]["support"] == "seen"
    softmax = shlex.split("kernel softmax --rows 4096 --cols 4096 --gpu h100_sxm --json")
    assert main([*softmax, "--weights", str(tmp_path / "weights")]) == 0
    assert strict(capsys.readouterr().out)["support"] == "extrapolated"  # a family that the folder lacks


def test_weights_that_cannot_answer_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = shlex.split(f"kernel gemm --m 512 --n 4096 --k 4096 --gpu h100_sxm --weights {tmp_path}")
    assert "no weights in" in refused(capsys, *call)
    assert "leave out --predictor and --without" in refused(capsys, *call, "--predictor", "generic")
    assert "leave out --predictor and --without" in refused(capsys, *call, "--without", "dram")
    (tmp_path / "gemm.safetensors").write_text("none")
    assert "gemm.safetensors holds no weights" in refused(capsys, *call)


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_the_example_of_an_evaluation_gives_scores(
    capsys: pytest.CaptureFixture[str], evaluation: str, tmp_path: Path
) -> None:
    found = strict(run_example(capsys, tmp_path, "evaluate", evaluation, more=" --json"))
    lines = found if isinstance(found, list) else next(iter(found.values()))
    assert lines and any(isinstance(value, float) for value in lines[0].values())
    written = {
        "tables": "accuracy/accuracy.md",
        "learning-curve": "curve/learning_curve.md",
        "transfer": "left/transfer.md",
    }
    assert (tmp_path / written[evaluation]).exists() if evaluation in written else True


@pytest.mark.slow
def test_without_a_name_tables_are_evaluated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = run_example(capsys, tmp_path, "evaluate")
    assert "PipeWeave fp8 GEMM" in said and "roofline" in said
    measured, out = str(tmp_path / "measured"), tmp_path / "bare"
    assert main(["evaluate", "-o", str(out), "--data", measured, "--predictor", "roofline"]) == 0
    assert (out / "accuracy.md").read_text() == (tmp_path / "accuracy/accuracy.md").read_text()
    # the folder has PipeWeave's calls alone, which no split of the main table takes
    capsys.readouterr()
    told = refused(capsys, "evaluate", "-o", str(tmp_path / "none"), "--data", measured, "--split", "shapes")
    assert "no scores: there is no measured row of shapes" in told
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("fit -o OUT --data HERE --family gem", "unknown family 'gem'"),
        ("fit -o OUT --data HERE/none --family gemm", "no folder"),
        ("fit -o OUT --data HERE", "has no SOURCE/TABLE.parquet"),
        ("evaluate -o OUT --data HERE --predictor oracle", "unknown predictor 'oracle'"),
        ("evaluate -o OUT --data HERE --split shape", "unknown split 'shape' (did you mean shapes?)"),
        ("evaluate tables -o OUT --data HERE --task moe", "unknown task 'moe'"),
        ("evaluate tables -o OUT --data HERE", "has no SOURCE/TABLE.parquet"),
        ("evaluate tables -o HERE/file --data HERE", "is a file"),
        ("evaluate tables --data HERE", "missing -o"),
        ("evaluate speed", "unknown evaluation 'speed'"),
        ("evaluate served --data HERE", "none of pipeweave/e2e_real, aiconfigurator/e2e_silicon is in these tables"),
        ("evaluate load --source sarathi", "unknown source of servers under load 'sarathi'"),
        ("evaluate traced --predictor oracle", "unknown predictor 'oracle'"),
        ("evaluate traced --only gpt-17", "holds gpt-17 in its id"),
        ("evaluate traced --measured HERE/file", "not a gzipped JSON file"),
        ("evaluate neusight --data HERE", "unknown table 'neusight/e2e'"),
        ("evaluate neusight --weights HERE", "no weights in"),
        ("evaluate tuning HERE/none.npz", "no swept configs at"),
        ("evaluate tuning HERE/file", "holds no swept configs"),
        ("evaluate tuning --only gpt-17", "no scores"),
        ("evaluate tuning-gpus --data HERE --gpu l4000", "has no SOURCE/TABLE.parquet"),
        ("evaluate learning-curve -o OUT --data HERE --gpu h2000 --family gemm", "unknown gpu 'h2000'"),
        ("evaluate learning-curve -o OUT --data HERE --gpu h20 --family gem", "unknown family 'gem'"),
        ("evaluate learning-curve -o OUT --data HERE --gpu h20 --family gemm --counts 1,x", "--counts takes numbers"),
        ("evaluate learning-curve -o OUT --data HERE --gpu h20 --family gemm", "has no SOURCE/TABLE.parquet"),
        ("evaluate transfer", "give -o DIR to make pieces, or --report DIR"),
        ("evaluate transfer -o OUT --report HERE", "give -o DIR to make pieces, or --report DIR"),
        ("evaluate transfer --report HERE", "no pieces in"),
        ("evaluate transfer -o OUT --data HERE --family mla", "unknown family 'mla'"),
        ("evaluate transfer -o OUT --data HERE --left-out Hoper", "unknown gpu 'Hoper'"),
        ("evaluate transfer -o OUT --data HERE --weights HERE", "no weights in"),
        ("evaluate transfer -o OUT --data HERE", "has no SOURCE/TABLE.parquet"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, told: str
) -> None:
    (tmp_path / "file").write_text("words")
    words = command.replace("HERE", str(tmp_path)).replace("OUT", str(tmp_path / "out")).split()
    assert told in refused(capsys, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_torch_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in ("fit", "evaluate"):
        said = refused(capsys, command, "-o", str(tmp_path / "out"), "--data", str(tmp_path))
        assert "pip install 'kernelcast[torch]'" in said
