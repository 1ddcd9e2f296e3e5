"""Wheels of both distributions, built from a copy of what git has, and a fresh environment with one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BESIDE = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
_LEFT = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "node_modules")


def built(place: Path, *, lab: bool = False) -> Path:
    """The wheel of the product, or of the lab. What setuptools leaves behind stays out of the checkout."""
    source = place / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=_LEFT)
    for name in _BESIDE:
        shutil.copy(ROOT / name, source / name)
    folder = source / "src" / "kernelcast_lab" if lab else source
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*pip, str(folder)], check=True, capture_output=True, text=True)
    return next(place.glob("*.whl"))


@dataclass(frozen=True)
class Installed:
    """An environment of its own, and an empty folder to work in."""

    environment: Path
    work: Path

    @property
    def bin(self) -> Path:
        return self.environment / ("Scripts" if os.name == "nt" else "bin")

    @property
    def packages(self) -> Path:
        return next(self.environment.glob("[Ll]ib/**/site-packages"))

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, which sees nothing of this checkout."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
        around = {name: value for name, value in os.environ.items() if name not in hidden} | {"COLUMNS": "100"} | more
        command = [str(self.bin / words[0]), *words[1:]]
        return subprocess.run(command, cwd=self.work, env=around, capture_output=True, text=True, encoding="utf-8")


def installed(wheel: Path, place: Path) -> Installed:
    """A fresh environment with the wheel and what it needs."""
    venv.create(place / "environment", with_pip=True)
    work = place / "empty"
    work.mkdir()
    found = Installed(place / "environment", work)
    done = found.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
    assert done.returncode == 0, done.stderr
    return found
