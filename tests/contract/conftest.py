"""The command line, run in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Run

from kernelcast.cli.app import main


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run in this process: exit code, standard output, standard error."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call
