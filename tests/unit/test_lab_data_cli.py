"""kernelcast data: import, list and show, with errors of one line and examples that run."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from measured_files import pipeweave

from kernelcast.app.cli import app
from kernelcast_lab.cli import data as cli_data
from kernelcast_lab.data.rules import RULES


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run ``kernelcast data …`` in this process: exit code, standard output, standard error."""
    others = tuple(module for module in app.COMMANDS if module is not cli_data)
    monkeypatch.setattr(app, "COMMANDS", (*others, cli_data))

    def call(*arguments: object) -> tuple[int, str, str]:
        code = app.main(["data", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def test_cli_import_list_show(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = run("import", "pipeweave", pipeweave(tmp_path / "pw"), "-o", tmp_path / "out", "--json")
    assert code == 0 and "table 1 of 2, collectives (2 files)" in err
    assert {line["table"]: line["rows"] for line in json.loads(out)["tables"]} == {
        "pipeweave/collectives": 2,
        "pipeweave/gemm_fp8": 3,
    }
    code, out, _ = run("list", tmp_path / "out")
    assert (
        code == 0 and "pipeweave/gemm_fp8" in out and "between_nodes" in out and max(map(len, out.splitlines())) <= 100
    )
    code, out, _ = run("list", tmp_path / "out", "--json")
    assert {line["table"]: line["ops"] for line in json.loads(out)}["pipeweave/gemm_fp8"] == {"gemm": 3}
    code, out, _ = run("show", tmp_path / "out/pipeweave/collectives.parquet")
    assert code == 0 and "rtx_pro_6000_server" in out and RULES["between_nodes"][:30] in out
    code, out, _ = run("show", tmp_path / "out/pipeweave/collectives.parquet", "--json")
    assert json.loads(out)["reasons"] == {"between_nodes": RULES["between_nodes"]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "pipeweave", "{tmp}", "-o", "{tmp}/out"], "is no checkout of pipeweave: no dataset/gemm_fp8"),
        (["import", "pipeweav", "{tmp}", "-o", "{tmp}/out"], "did you mean pipeweave?"),
        (["import", "tables", "{tmp}", "-o", "{tmp}/out"], "has no tables of kernels"),
        (["import", "vidur", "{tmp}"], "missing --output"),
        (["list", "{tmp}"], "has no SOURCE/TABLE.parquet"),
        (["list", "{tmp}/nowhere"], "no folder"),
        (["show", "{tmp}/nothing.parquet"], "no file"),
        (["show", "{tmp}/words.txt"], "not readable as Parquet"),
        (["shwo"], "did you mean show?"),
    ],
)
def test_cli_errors_are_one_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "words.txt").write_text("words")
    code, out, err = run(*(word.replace("{tmp}", str(tmp_path)) for word in arguments))
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["import", "list", "show"])
def test_cli_examples_run(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, _ = run(command, "--help")
    lines = [line.strip() for line in out.partition("Example:")[2].splitlines() if line.strip()]
    assert any(line.startswith(f"kernelcast data {command}") for line in lines)
    for line in lines:
        if line.startswith("kernelcast data "):
            assert run(*shlex.split(line)[2:])[0] == 0
        else:
            subprocess.run(["bash", "-ec", line], check=True)
