"""The wheel: what is in it, that it runs where nothing else of this project is, and how large it is."""

from __future__ import annotations

import re
import shlex
import zipfile
from collections import Counter
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from wheels import ROOT, Installed, built, installed

pytestmark = pytest.mark.slow
LARGEST_BYTES = 200 * 2**20  # of the product and all that it needs, as the README says and as `du -m` counts
LONGEST_NAME = 120  # letters: a folder of packages on Windows has some 100 of its own, and a path 260
_NOT_ON_WINDOWS = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}
_TOOLS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence", "wheel")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def lab_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("lab"), lab=True)


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return installed(wheel, tmp_path_factory.mktemp("fresh"))


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def told_by(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))).decode()


# ---- what is in it ----
def test_it_is_for_every_machine(wheel: Path, lab_wheel: Path) -> None:
    for one in (wheel, lab_wheel):
        assert one.name.endswith("-py3-none-any.whl")
        assert "Root-Is-Purelib: true" in told_by(one, "WHEEL")


def test_every_file_of_the_package_is_in_it_and_no_other(wheel: Path) -> None:
    source = ROOT / "src"
    kept = [path for path in (source / "kernelcast").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(source).as_posix() for path in kept}
    assert {name for name in names_in(wheel) if ".dist-info/" not in name} == expected


def test_every_file_of_the_lab_is_in_its_own(lab_wheel: Path) -> None:
    lab = ROOT / "src" / "kernelcast_lab"
    beside, left = {"pyproject.toml", "LICENSE", "NOTICE"}, {"__pycache__", "kernelcast_lab.egg-info", "build"}
    kept = {
        path.relative_to(lab.parent).as_posix()
        for path in lab.rglob("*")
        if path.is_file() and not left & set(path.parts) and path.name not in beside
    }
    assert {name for name in names_in(lab_wheel) if ".dist-info/" not in name} == kept


def test_names_are_names_on_every_system(wheel: Path, lab_wheel: Path) -> None:
    for names in map(names_in, (wheel, lab_wheel)):
        assert [name for name, count in Counter(map(str.lower, names)).items() if count > 1] == []
        assert [name for name in names if len(name) > LONGEST_NAME] == []
        for name in names:
            for part in PurePosixPath(name).parts:
                assert part.split(".")[0].lower() not in _NOT_ON_WINDOWS, name
                assert not re.search(r'[<>:"|?*\\\x00-\x1f]|[ .]$', part), name


def test_the_metadata_says_what_it_is(wheel: Path, lab_wheel: Path) -> None:
    for one in (wheel, lab_wheel):
        told = Parser().parsestr(told_by(one, "METADATA"))
        assert told["License-Expression"] == "Apache-2.0"
        assert told.get_all("License-File") == ["LICENSE", "NOTICE"]
        assert told["Requires-Python"] == ">=3.11"
        kinds = told.get_all("Classifier") or []
        assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)} <= set(kinds)
        assert "Operating System :: OS Independent" in kinds
        assert told["Description-Content-Type"] == "text/markdown" and len(told.get_payload()) > 100
    assert "Typing :: Typed" in told_by(wheel, "METADATA") and "kernelcast/py.typed" in names_in(wheel)


def test_both_have_the_same_licence_files() -> None:
    for name in ("LICENSE", "NOTICE"):
        assert (ROOT / "src" / "kernelcast_lab" / name).read_bytes() == (ROOT / name).read_bytes()


# ---- where nothing else is ----
def test_it_is_small_enough(fresh: Installed) -> None:
    held = 0
    for path in fresh.packages.rglob("*"):
        ours = not path.relative_to(fresh.packages).parts[0].startswith(_TOOLS)
        if ours and path.is_file():
            blocks = getattr(path.stat(), "st_blocks", None)  # not on Windows
            held += path.stat().st_size if blocks is None else 512 * blocks
    assert held < LARGEST_BYTES, f"{held / 2**20:.0f} MiB"


def test_the_program_and_the_module_are_one(fresh: Installed) -> None:
    asked = ("kernel", "gemm", "--m", "64", "--n", "64", "--k", "64", "--gpu", "h200_sxm", "--json")
    program, module = fresh.run("kernelcast", *asked), fresh.run("python", "-m", "kernelcast", *asked)
    assert (program.returncode, program.stderr) == (module.returncode, module.stderr) == (0, "")
    assert program.stdout == module.stdout != ""
    assert re.fullmatch(r"kernelcast \d+\.\d+\.\d+, weights [\d.]+\n", fresh.run("kernelcast", "--version").stdout)


def test_what_was_not_installed_is_named(fresh: Installed) -> None:
    infer = ("kernelcast", "infer", "llama-3.1-8b", "--gpu", "h200_sxm")
    for asked, extra in (
        ((*infer, "--plot", "x.png"), "plots"),
        (("kernelcast", "trace", "gpt2", "--gpu", "l4"), "torch"),
    ):
        done = fresh.run(*asked)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert f"pip install 'kernelcast[{extra}]'" in done.stderr
    assert list(fresh.work.iterdir()) == []


def test_an_import_is_light(fresh: Installed) -> None:
    """No PyTorch, nothing of the command line, and little beside what NumPy takes."""
    heavy = "{'torch', 'duckdb', 'typer', 'rich', 'matplotlib'} & set(sys.modules)"
    code = (
        "import time, sys, numpy, typing, json; start = time.process_time(); import kernelcast;"
        f"print(time.process_time() - start); assert not {heavy}, {heavy}"
    )
    fresh.run("python", "-c", code)  # the first compiles
    seconds = min(float(fresh.run("python", "-c", code).stdout) for _ in range(3))
    assert seconds < 1.0  # 0.15 on a machine that has nothing else to do


def test_no_file_is_read_in_the_encoding_of_the_machine(fresh: Installed) -> None:
    """Windows has one of its own, which reads ours wrongly."""
    warned = ("-X", "warn_default_encoding", "-W", "always::EncodingWarning", "-m", "kernelcast")
    for asked in (
        "gpus",
        "models --json",
        "evidence --by op --json",
        "infer llama-3.1-8b --gpu h200_sxm --trace t.json",
        "kernel all_reduce --bytes 1048576 --world 8 --gpu h100_sxm",
    ):
        done = fresh.run("python", *warned, *asked.split())
        assert done.returncode == 0
        assert not re.search(r"kernelcast[/\\].*EncodingWarning", done.stderr), done.stderr
    (fresh.work / "t.json").unlink()


_SHOWN = re.compile(
    r"^```(?:console)?\n\$ (kernelcast (?:infer|kernel|evidence) (?:[^\n]*\\\n)*[^\n]*)\n(.*?)^```",
    re.MULTILINE | re.DOTALL,
)


def test_the_readme_shows_what_a_fresh_install_prints(fresh: Installed) -> None:
    examples = _SHOWN.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(examples) >= 3
    for command, shown in examples:
        done = fresh.run(*shlex.split(command.replace("\\\n", " ")))
        assert (done.returncode, done.stderr) == (0, ""), command
        lines = "".join(".*\n" if line == "…\n" else re.escape(line) for line in shown.splitlines(keepends=True))
        assert re.fullmatch(lines, done.stdout, re.DOTALL), f"{command}\n{done.stdout}"
    assert list(fresh.work.iterdir()) == []
