"""Docs that are made from the code are as the code is."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_of_the_way_through_is_that_of_the_imports() -> None:
    made = runpy.run_path(str(DOCS / "way_through.py"))
    assert (DOCS / "architecture.md").read_text() == made["page"](), "run: python docs/way_through.py"


def test_every_room_is_told_of() -> None:
    rooms = runpy.run_path(str(DOCS / "way_through.py"))["rooms"]()
    page = (DOCS / "architecture.md").read_text()
    for name in rooms:
        short = name.removeprefix("kernelcast.")
        assert f"`{short}/`" in page or f"`{short}.py`" in page or short == "toml_folder", short
