"""fit and evaluate from the command line: their help's examples, and what they say to bad input."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kernelcast.cli import main

pytest.importorskip("torch")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said.err
    return said.err


@pytest.mark.parametrize("command", ["fit", "evaluate"])
def test_the_example_in_help_runs(capsys: pytest.CaptureFixture[str], command: str, tmp_path: Path) -> None:
    assert main([command, "--help"]) == 0
    example = re.sub(r" *\\\s*\n\s*", " ", capsys.readouterr().out.partition("Example:")[2])
    lines = [line.strip() for line in example.splitlines() if line.strip()]
    assert any(line.startswith(f"kernelcast {command}") for line in lines)
    script = "\n".join(lines).replace("kernelcast ", f"{shlex.quote(sys.executable)} -m kernelcast ")
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {"fit": tmp_path / "weights/gemm.safetensors", "evaluate": tmp_path / "accuracy/accuracy.md"}
    assert made[command].exists()


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert "unknown family 'gem'" in refused(capsys, "fit", "-o", out, "--data", str(tmp_path), "--family", "gem")
    assert "no folder" in refused(capsys, "fit", "-o", out, "--data", str(tmp_path / "none"), "--family", "gemm")
    assert "unknown predictor" in refused(
        capsys, "evaluate", "-o", out, "--data", str(tmp_path), "--predictor", "oracle"
    )
    assert not Path(out).exists()


def test_without_torch_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for command in ("fit", "evaluate"):
        said = refused(capsys, command, "-o", str(tmp_path / "out"), "--data", str(tmp_path))
        assert "pip install 'kernelcast[torch]'" in said
