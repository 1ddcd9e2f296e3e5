"""Docs that are made from the code are as the code is."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

from kernelcast.app.questions.evidence import evidence

DOCS = Path(__file__).parents[2] / "docs"


def test_the_diagram_of_architecture_is_that_of_the_imports() -> None:
    made = runpy.run_path(str(DOCS / "import_graph.py"))
    assert (DOCS / "architecture.md").read_text() == made["page"](), "run: python docs/import_graph.py"


def test_the_readme_counts_measured_calls_as_evidence_does() -> None:
    entries, page = evidence(), " ".join((DOCS.parent / "README.md").read_text().split())
    calls = f"{sum(entry.calls for entry in entries) / 1e6:.1f} million measured calls"
    assert f"fitted on {calls} (public campaigns on {len({entry.gpu for entry in entries})} GPUs" in page


def test_every_package_is_described() -> None:
    packages = runpy.run_path(str(DOCS / "import_graph.py"))["packages"]()
    page = (DOCS / "architecture.md").read_text()
    for name in packages:
        short = name.removeprefix("kernelcast.")
        assert f"`{short}/`" in page or f"`{short}.py`" in page or short == "toml_folder", short


def test_a_flow_chart_is_drawn_whole_and_boxes_do_not_overlap() -> None:
    flow = runpy.run_path(str(DOCS / "flow.py"))
    chart = re.findall(r"```mermaid\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)[0]
    labels, arrows = flow["read"](chart)
    boxes = flow["laid_out"](chart)
    assert {name for name, box in boxes.items() if box.label} == set(labels)
    for low, high in arrows:
        assert boxes[low].level < boxes[high].level
    for level in range(1 + max(box.level for box in boxes.values())):
        row = sorted((box for box in boxes.values() if box.level == level), key=lambda box: box.at)
        for one, other in itertools.pairwise(row):
            assert one.at + one.width / 2 < other.at - other.width / 2
    drawn = flow["svg"](chart)
    assert drawn.count("<rect") == len(labels) and drawn.count("marker-end") == len(arrows)
    assert all(f">{name}</text>" in drawn for name in labels)
