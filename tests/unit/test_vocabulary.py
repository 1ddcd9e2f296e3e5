"""Names, help and documentation use the field's terms: words that were coined here before do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In names: each has a term of the field (configuration, parameters, sharded, deployment, Interval, ...)
COINED_NAMES = {
    "kind", "kinds", "word", "words", "heard", "told", "found", "one", "own", "laid", "lay", "ran", "span", "spans",
    "standing", "terms", "turns", "place", "cut", "cuts", "dealt", "deal", "asked", "answering", "spoken",
}  # fmt: skip
# Names of flags, of keys in files and of PyTorch that hold one of these
KEPT = {"price_kind", "link_kind", "in_place", "span_ms", "word_dropout"}
KEPT_FIELDS = {"src/kernelcast/hardware/fabric.py: kind", "src/kernelcast/hardware/prices.py: kind",
               "src/kernelcast/models/architecture.py: kind"}  # fmt: skip
# In prose, where some of these are ordinary English (one, own, found, place): what only this project would say
COINED_PROSE = re.compile(
    r"\b(kinds?|words?|heard|told|tells|laid|standing|dealt|deals? out|reads? prompts?|cuts?|way through|hang together|"
    r"what it rests on|answered in|wrong together)\b",
    re.IGNORECASE,
)
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def parts_of(name: str) -> set[str]:
    """``served_kinds`` and ``ServedKinds`` -> served, kinds."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def public_names(path: Path) -> Iterator[str]:
    """The module, and its classes, functions, methods, parameters and fields that do not begin with an underscore."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (item.target.id for item in node.body
                        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))  # fmt: skip
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name
            yield from (argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])


def prose_of(page: Path) -> str:
    """A page without its code blocks, inline code and link targets."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", text, flags=re.DOTALL)


def test_public_names_are_terms_of_the_field() -> None:
    coined = sorted({
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "src").rglob("*.py")
        for name in public_names(path)
        if not name.startswith("_") and name not in KEPT and parts_of(name) & COINED_NAMES
    } - KEPT_FIELDS)  # fmt: skip
    assert coined == []


def test_help_is_written_in_the_fields_terms(run: Callable[..., tuple[int, str, str]]) -> None:
    commands = re.findall(r"^│ ([a-z-]+) ", run("--help")[1], re.MULTILINE)
    assert len(commands) > 20
    for command in commands:
        # Names of flags, values and sub-commands are a contract
        text = re.sub(r"--[a-z-]+|kind\|op\|gpu\|stack|^│ words", "", run(command, "--help")[1], flags=re.MULTILINE)
        assert COINED_PROSE.findall(text) == [], command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_are_written_in_the_fields_terms(page: Path) -> None:
    assert [match.group() for match in COINED_PROSE.finditer(prose_of(page))] == []
