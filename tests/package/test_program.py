"""The program: its versions, completion, a quick start, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kernelcast
from kernelcast.app.cli import app
from kernelcast.forecast.learned import WEIGHTS
from kernelcast.hardware import gpu_ids
from kernelcast.ops import REGISTRY

Run = Callable[..., tuple[int, str, str]]
SRC = Path(kernelcast.__file__).parents[1]
AS_A_SCRIPT = "import sys; sys.argv[0] = 'kernelcast'; from kernelcast._start import main; sys.exit(main())"


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that ask for it; ops of ``kernel`` are made when they are asked for."""
    for name, found in group.commands.items():
        if getattr(found, "commands", None):
            yield from commands(found, (*words, name))
        else:
            yield (*words, name), found


# ---- versions and start ----
def test_the_version_is_the_programs_and_the_weights(run: Run) -> None:
    code, out, err = run("--version")
    weights = json.loads((WEIGHTS / "about.json").read_text(encoding="utf-8"))["version"]
    assert (code, out, err) == (0, f"kernelcast {kernelcast.__version__}, weights {weights}\n", "")


def test_every_command_is_found_without_importing_the_others() -> None:
    """COMMANDS and BROUGHT_BY name the module of every command that is not the lab's."""
    whole = typer.main.get_command(app.build())
    lab = {name for name in whole.commands if app.module_of([name]) is None}  # type: ignore[attr-defined]
    assert lab <= {*app.LAB, "fit-power"}
    for name in set(whole.commands) - lab:  # type: ignore[attr-defined]
        assert name in typer.main.get_command(app.build(app.module_of([name]))).commands  # type: ignore[attr-defined]


def test_one_command_does_not_import_the_others() -> None:
    code = (
        "import sys; from kernelcast.app.cli.app import main; main(['gpus', '--json'])\n"
        "others = {'kernelcast.app.cli.plan', 'kernelcast.app.cli.simulate', 'duckdb'} & set(sys.modules)\n"
        "assert not others, others"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


# ---- completion ----
def completed(run: Run, monkeypatch: pytest.MonkeyPatch, line: str, shell: str = "zsh") -> list[str]:
    """Words that a shell would offer at the end of a line."""
    with monkeypatch.context() as patched:
        patched.setenv("_KERNELCAST_COMPLETE", f"complete_{shell}")
        if shell == "bash":
            words = line.split(" ")
            patched.setenv("COMP_WORDS", "\n".join(words))
            patched.setenv("COMP_CWORD", str(len(words) - 1))
        else:
            patched.setenv("_TYPER_COMPLETE_ARGS", line)
        code, out, err = run()
    assert (code, err) == (0, "")
    return out.split() if shell == "bash" else [word.split('"')[1] for word in out.splitlines() if '"' in word]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_names_are_completed(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    def offered(line: str) -> list[str]:
        return completed(run, monkeypatch, line, shell)

    assert offered("kernelcast infer llama-3.1-8b --gpu h20") == [name for name in gpu_ids() if name.startswith("h20")]
    assert "llama-3.1-8b" in offered("kernelcast infer llama-3.1")
    assert "llama-3.1-8b" in offered("kernelcast simulate llama-3.1")
    assert offered("kernelcast compare llama-3.1-8b --gpus l4,h200_s") == ["l4,h200_sxm"]
    assert offered("kernelcast plan llama-3.1-8b --stack vllm,sg") == ["vllm,sglang"]
    assert offered("kernelcast evidence --op moe_g") == ["moe_gemm"]
    assert offered("kernelcast kernel rmsn") == [op for op in sorted(REGISTRY) if op.startswith("rmsn")]
    assert offered("kernelcast kernel gemm --dtype fp8") == ["fp8", "fp8_block"]
    assert offered("kernelcast gpu rtx_40") == [name for name in gpu_ids() if name.startswith("rtx_40")]
    assert offered("kernelcast swe") == ["sweep"]
    assert "--request-rate" in offered("kernelcast simulate llama-3.1-8b --request")


def test_a_line_that_is_wrong_is_completed_in_silence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KERNELCAST_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kernelcast\nkernal\n--g")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert run()[1:] == ("", "")


def test_the_script_of_a_shell_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, err = run("--show-completion", "bash")
    assert (code, err) == (0, "") and "_KERNELCAST_COMPLETE=complete_bash" in out


# ---- Ctrl-C ----
def interrupted(words: list[str], after_s: float, place: Path, begun: str = "") -> tuple[int, str]:
    """The exit code and what was told of a program that gets Ctrl-C, as a terminal sends it to all its processes, some
    time after it was started or has made the file ``begun``."""
    around = {**os.environ, "PYTHONPATH": str(SRC)}
    process = subprocess.Popen(
        words,
        cwd=place,
        env=around,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while begun and not (place / begun).exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    return process.returncode, told


def is_quiet(code: int, told: str) -> bool:
    """No word of ours. Before a line of ours runs, the interpreter ends as it likes."""
    ours = "kernelcast" in told.replace("__editable___kernelcast", "").replace("-m kernelcast", "")
    return (code in (0, 130) and told == "") or (not ours and code in (-signal.SIGINT, 1))


needs_signals = pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends Ctrl-C as a POSIX terminal does")


@needs_signals
@pytest.mark.slow
@pytest.mark.parametrize("start", [["-m", "kernelcast"], ["-c", AS_A_SCRIPT]])
def test_ctrl_c_while_it_starts_is_quiet(start: list[str], tmp_path: Path) -> None:
    chance = random.Random(0)
    words = [sys.executable, *start, "kernel", "gemm", "--m", "64", "--n", "64", "--k", "64", "--gpu", "h200_sxm"]
    began = time.monotonic()
    subprocess.run(words, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(SRC)}, check=True)
    whole_s = time.monotonic() - began
    codes = []
    for _ in range(5):
        code, told = interrupted(words, chance.uniform(0.0, whole_s), tmp_path)
        assert is_quiet(code, told), f"{code}\n{told}"
        codes.append(code)
    assert 130 in codes


@needs_signals
@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "begun"),
    [
        ("sweep many.toml --workers 2 --chunk-settings 50", "many.sweep/manifest.json"),
        ("simulate llama-3.1-8b --gpu h100_sxm --request-rate 30 --num-prompts 200000 --requests-out r.csv", ""),
    ],
)
def test_ctrl_c_while_it_works_leaves_nothing_half_written(tmp_path: Path, asked: str, begun: str) -> None:
    (tmp_path / "many.toml").write_text(
        'model = "llama-3.1-8b"\ngpu = ["h100_sxm", "l40s"]\nbatch = { from = 1, to = 512, step = 1 }\n'
        "input_len = { from = 128, to = 8192, factor = 2 }\n"
    )
    code, told = interrupted([sys.executable, "-m", "kernelcast", *asked.split()], 3.0, tmp_path, begun)
    assert code == 130 and "Traceback" not in told
    assert "the same command continues" in told or not begun
    assert not list(tmp_path.rglob("*.part*"))


def test_a_program_that_imports_the_package_keeps_its_own_ctrl_c() -> None:
    code = "import signal, kernelcast; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
