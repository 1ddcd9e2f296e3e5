"""Draws the way through the code from its imports: `python docs/way_through.py` rewrites architecture.md's picture.

A box is a folder or a file of src/kernelcast; an arrow goes from what is imported to who imports it. Arrows that follow
from others are left out. A test compares the page with the imports as they are.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import grimp

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- way through: made by docs/way_through.py -->", "<!-- end of the way through -->"
_NO_ROOM = ("_start", "_version", "__main__", "errors")  # everything imports errors


def rooms() -> dict[str, set[str]]:
    """Each room with the rooms that it imports."""
    graph = grimp.build_graph("kernelcast", cache_dir=None)
    names = sorted(name for name in graph.find_children("kernelcast") if name.split(".")[-1] not in _NO_ROOM)
    found: dict[str, set[str]] = {name: set() for name in names}
    for one, other in itertools.permutations(names, 2):
        if graph.direct_import_exists(importer=one, imported=other, as_packages=True):
            found[one].add(other)
    return found


def reduced(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that others imply."""

    def reach(name: str) -> set[str]:
        return imports[name].union(*(reach(other) for other in imports[name]))

    return {name: own - set().union(*(reach(other) for other in own)) for name, own in imports.items()}


def picture() -> str:
    imports = rooms()
    arrows = reduced(imports)

    def level(name: str) -> int:
        return 1 + max((level(other) for other in imports[name]), default=-1)

    order = sorted(imports, key=lambda name: (level(name), name))
    lines = [f"    {_short(low)} --> {_short(high)}" for high in order for low in sorted(arrows[high], key=order.index)]
    alone = [
        f"    {_short(name)}" for name in order if not imports[name] and not any(name in v for v in arrows.values())
    ]
    return "\n".join(["```mermaid", "flowchart LR", *alone, *lines, "```"])


def _short(name: str) -> str:
    return name.removeprefix("kernelcast.")


def page() -> str:
    """The page with the picture as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{picture()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
