"""The house in order: what is shipped is listed, and no function is too long to be read at once."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_LINES = 60
LAB = ROOT / "src" / "kernelcast_lab"


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in (ROOT / "src").glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > LONGEST_LINES
    ]
    assert long == []


def test_the_lab_lists_its_packages_and_is_of_the_products_version() -> None:
    import kernelcast

    found = tomllib.loads((LAB / "pyproject.toml").read_text())
    folders = {path.parent for path in LAB.glob("**/__init__.py")}
    packages = {".".join(path.relative_to(LAB.parent).parts) for path in folders}
    assert set(found["tool"]["setuptools"]["packages"]) == packages
    assert found["project"]["version"] == kernelcast.__version__
    assert f"kernelcast[torch,plots]=={kernelcast.__version__}" in found["project"]["dependencies"]


@pytest.mark.parametrize("pattern", ["**/*.toml", "**/*.json", "**/*.safetensors"])
def test_every_data_file_of_the_product_is_shipped(pattern: str) -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kernelcast"]
    product = ROOT / "src" / "kernelcast"
    known = {path for glob in shipped for path in product.glob(glob)}
    assert [path for path in product.glob(pattern) if path not in known] == []


def test_every_data_file_of_the_lab_is_shipped() -> None:
    shipped = tomllib.loads((LAB / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    known = {path for glob in shipped["kernelcast_lab"] for path in LAB.glob(glob)}
    assert {path for ending in ("toml", "safetensors") for path in LAB.glob(f"*/**/*.{ending}")} == known
