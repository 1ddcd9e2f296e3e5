"""Things kept as TOML files: found by name, whole or refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kernelcast.errors import KernelcastError
from kernelcast.toml_folder import ids_in, read_from


@dataclass(frozen=True)
class Oven:
    id: str
    heat_k: float
    sources: tuple[tuple[str, str], ...]
    doors: int = 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text('heat_k = 450.0\n[sources]\nheat_k = "its label"\n')
    (tmp_path / "large.toml").write_text("heat_k = 550.0\ndoors = 2\nsources = {}\n")
    (tmp_path / "bent.toml").write_text("doors = 2\ncolour = 3\n")
    (tmp_path / "bare.toml").write_text("heat_k = 1.0\n")
    (tmp_path / "notes.txt").write_text("no oven")
    return tmp_path


def test_a_file_is_read_by_its_name_in_any_case(folder: Path) -> None:
    assert ids_in(folder) == ["bare", "bent", "large", "small"]
    assert read_from(folder, Oven, "small") == Oven("small", 450.0, (("heat_k", "its label"),))  # one door by default
    assert read_from(folder, Oven, "LARGE") == Oven("large", 550.0, (), doors=2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smal", "unknown oven 'smal' (did you mean small?)"),
        ("bent", "bent.toml: missing heat_k, sources; unknown colour"),
        ("bare", "bare.toml: missing sources; unknown nothing"),
    ],
)
def test_what_is_not_whole_is_refused(folder: Path, name: str, said: str) -> None:
    with pytest.raises(KernelcastError) as error:
        read_from(folder, Oven, name)
    assert said in str(error.value)


def test_a_base_has_what_a_file_does_not_say(folder: Path) -> None:
    (folder / "hot.toml").write_text('base = "small"\nheat_k = 500.0\n[sources]\ndoors = "seen"\n')
    (folder / "hotter.toml").write_text('base = "hot"\ndoors = 3\n')
    both = (("heat_k", "its label"), ("doors", "seen"))
    assert read_from(folder, Oven, "hotter") == Oven("hotter", 500.0, both, doors=3)
    (folder / "a.toml").write_text('base = "b"\n')
    (folder / "b.toml").write_text('base = "a"\n')
    with pytest.raises(KernelcastError, match="leads back to itself"):
        read_from(folder, Oven, "a")
