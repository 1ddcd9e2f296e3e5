"""Draws the import graph: `python docs/import_graph.py` rewrites the diagram of architecture.md.

A node is a package or a module of src/kernelcast; an edge goes from the imported to the importing one, transitive edges
are left out. A test compares the page with the imports.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import grimp

PAGE = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- import graph: made by docs/import_graph.py -->", "<!-- end of the import graph -->"
_LEFT_OUT = ("_moved", "_start", "_version", "__main__", "errors")  # everything imports errors


def packages() -> dict[str, set[str]]:
    """Each package with the packages that it imports."""
    graph = grimp.build_graph("kernelcast", cache_dir=None)
    names = sorted(name for name in graph.find_children("kernelcast") if name.split(".")[-1] not in _LEFT_OUT)
    imports: dict[str, set[str]] = {name: set() for name in names}
    for importer, imported in itertools.permutations(names, 2):
        if graph.direct_import_exists(importer=importer, imported=imported, as_packages=True):
            imports[importer].add(imported)
    return imports


def reduced(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without transitive edges."""

    def reach(name: str) -> set[str]:
        return imports[name].union(*(reach(other) for other in imports[name]))

    return {name: direct - set().union(*(reach(other) for other in direct)) for name, direct in imports.items()}


def picture() -> str:
    imports = packages()
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
