"""Files that commands write: whole or not at all, and refused in one line before the work where they cannot be."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kernelcast as kc
from kernelcast.app.cli import app
from kernelcast.app.cli.commands import check_targets, is_written
from kernelcast.errors import KernelcastError
from kernelcast.files import check_folder, check_writable, complete

Run = Callable[..., tuple[int, str, str]]
SRC = Path(kc.__file__).parents[1]
READ = {
    "--again", "--calibration", "--config", "--data", "--measured", "--next", "--prices", "--recipe", "--report",
    "--requests", "--server", "--tp-plan", "--weights", "--zoo",
}  # fmt: skip


def commands(group: Any) -> Iterator[Any]:
    for found in group.commands.values():
        if getattr(found, "commands", None):
            yield from commands(found)
        elif hasattr(found, "params"):
            yield found


def written(command: Any) -> list[Any]:
    return [param for param in command.params if is_written(param)]


ALL = list(commands(typer.main.get_command(app.build())))
WRITING = [(command, param) for command in ALL for param in written(command)]


def refused(run: Run, *words: str | Path) -> str:
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


# ---- every option ----
def test_every_option_that_takes_a_file_is_known_to_be_read_or_written() -> None:
    """A new one that writes has to be among those that are looked at before the work."""
    for command in ALL:
        for param in command.params:
            if any(word in str(param.metavar) for word in ("FILE", "DIR")) and param.opts[0].startswith("-"):
                reads = READ & set(param.opts) or (param.opts[0] == "--trace" and param.metavar == "FILE")
                assert bool(reads) != is_written(param), f"{command.name} {param.opts}"
    asked = {(command.name, flag) for command, param in WRITING for flag in param.opts}
    assert {
        ("infer", "--trace"), ("infer", "--plot"), ("simulate", "--requests-out"), ("simulate", "--timeline"),
        ("simulate", "--plot"), ("compare", "--plot"), ("plan", "--plot"), ("diagnose", "--plot"), ("replay", "--plot"),
        ("trace", "--trace"), ("kernels", "--output"), ("calibrate", "--output"), ("replay", "--output"),
        ("sweep", "-o"), ("moe", "-o"), ("collect", "-o"),
    } <= asked  # fmt: skip


@pytest.mark.parametrize(("command", "param"), WRITING, ids=[f"{c.name} {p.opts[0]}" for c, p in WRITING])
def test_a_place_that_cannot_be_written_to_is_refused(
    command: Any, param: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(target: Path) -> None:
        check_targets(command.name, command.params, {param.name: target})

    file = tmp_path / "file.txt"
    file.touch()
    folder = param.metavar == "DIR"
    check(tmp_path / "new.png")
    with pytest.raises(KernelcastError, match="is a file, not a folder" if folder else "is a folder, not a file"):
        check(file if folder else tmp_path)
    with pytest.raises(KernelcastError, match="is a file, not a folder" if folder else "no folder|not a folder"):
        check(file / "below" / "x.png")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write wherever it likes
    with pytest.raises(KernelcastError, match="no permission"):
        check(tmp_path / "new.png")
    assert sorted(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "words",
    [
        "infer nobody --gpu l4 --trace {place}.json", "infer nobody --gpu l4 --plot {place}.png",
        "simulate nobody --gpu l4 --requests-out {place}.csv", "simulate nobody --gpu l4 --timeline {place}.json",
        "plan nobody --plot {place}.png", "compare nobody --gpus l4 --plot {place}.png",
        "trace nobody --gpu l4 --trace {place}.json", "diagnose nobody.json --plot {place}.png",
        "kernels nobody.csv -o {place}.csv", "calibrate nobody.csv --gpu l4 -o {place}",
        "replay nobody.json --calibrate -o {place}.json",
    ],
)  # fmt: skip
def test_it_is_refused_before_the_work(run: Run, tmp_path: Path, words: str) -> None:
    """Nobody knows the model or the file either, which is told of a place that can be written to."""
    pytest.importorskip("matplotlib")
    assert "there is no folder" in refused(run, *words.format(place=tmp_path / "none" / "x").split())
    assert "nobody" in refused(run, *words.format(place=tmp_path / "x").split())
    assert list(tmp_path.iterdir()) == []


def test_the_ending_of_a_picture_is_its_format(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    infer = ("infer", "llama-3.1-8b", "--gpu", "l4", "--plot")
    assert "as in plot.png" in refused(run, *infer, tmp_path / "plot")
    assert "Format 'odd' is not supported" in refused(run, *infer, tmp_path / "plot.odd")


# ---- a disk that is full ----
WRITERS = {
    "infer llama-3.2-1b --gpu l4 --trace {out}": "t.json",
    "infer llama-3.2-1b --gpu l4 --plot {out}": "t.png",
    "kernels calls.csv --gpu l4 -o {out}": "t.csv",
    "kernels calls.csv --gpu l4 --json -o {out}": "t.parquet",
    "simulate llama-3.2-1b --gpu l4 --num-prompts 100 --no-intervals --requests-out {out}": "t.parquet",
    "calibrate measured.csv --gpu h200_sxm -o {out}": "t.safetensors",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", WRITERS, ids=[f"{words.split()[0]} {name}" for words, name in WRITERS.items()])
def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path: Path, words: str) -> None:
    """A process that may write no more than 300 bytes to a file finds the disk full, as far as it can tell."""
    pytest.importorskip("matplotlib.font_manager")  # which makes a file of its own, once
    rows = range(1, 41)
    (tmp_path / "calls.csv").write_text("op,m,n,k,dtype\n" + "".join(f"gemm,{64 * i},512,512,bf16\n" for i in rows))
    timed = "".join(f"gemm,{64 * i},4096,4096,bf16,{9 + 2.6 * i}\n" for i in rows)
    (tmp_path / "measured.csv").write_text("op,m,n,k,dtype,latency_us\n" + timed)
    before = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / WRITERS[words]
    out.write_text("old")
    done = subprocess.run(
        [sys.executable, "-m", "kernelcast", *words.format(out=out).split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"kernelcast: error: {out}: ")
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, out.name])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("option", ["--trace", "--plot"])
def test_a_device_that_is_full_is_one_line_and_stays_a_device(run: Run, option: str) -> None:
    pytest.importorskip("matplotlib")
    told = refused(run, "infer", "llama-3.2-1b", "--gpu", "l4", option, "/dev/full")
    assert "/dev/full: No space left on device" in told
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_output_that_nobody_can_take_is_one_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("a device that is always full")
    around = {**os.environ, "PYTHONPATH": str(SRC)}
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "kernelcast", "gpus"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, env=around)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


# ---- what writes them ----
def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), complete(file) as part:
            part.write_text("half")
            raise error
        assert list(tmp_path.iterdir()) == []
    with complete(file) as part:
        part.write_text("whole")
    file.chmod(0o640)
    with pytest.raises(KernelcastError, match=r"result\.json: .*; it was not written"), complete(file) as part:
        part.write_text("half")
        raise OSError(28, "No space left on device")
    assert file.read_text() == "whole" and list(tmp_path.iterdir()) == [file]
    with complete(file) as part:
        part.write_text("again")
    assert file.read_text() == "again" and stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    link.symlink_to(real)
    with complete(link) as part:
        part.write_text("new")
    assert link.is_symlink() and real.read_text() == "new"


def test_a_long_name_has_room_for_a_temporary_one(tmp_path: Path) -> None:
    with complete(tmp_path / f"{'n' * 245}.json") as part:
        part.write_text("whole")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_pipe_gets_what_was_written(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with complete(pipe) as part:
        part.write_text("whole")
    assert os.read(reader, 100) == b"whole" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


def test_places_that_can_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (Path("x.json"), tmp_path / "x.json", Path("/dev/null")):
        check_writable(place)
    for place in (Path("new"), tmp_path, tmp_path / "a" / "b"):
        check_folder(place)
    assert list(tmp_path.iterdir()) == []
