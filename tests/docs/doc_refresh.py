"""Puts what commands print now into the pages: ``python tests/docs/doc_refresh.py README.md docs/infer.md``.

For new weights, after which every figure of an example moves. Lines that the page leaves out (``…``) stay left out.
Look at the difference before you keep it: a test cannot tell a better forecast from a fault.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from doc_blocks import ROOT, Block, Page, blocks, matches, run_kernelcast, steps
from doc_files import make_files


def refreshed(shown: list[str], printed: list[str]) -> list[str]:
    """The shown lines as they are printed now, with the same pieces left out."""
    if not matches(tuple(shown), printed):
        return shown
    found: list[str] = []
    at = 0
    pieces = _pieces(shown)
    for number, piece in enumerate(pieces):
        if number:
            found.append("…")
        if not piece:
            continue
        at = at if number == 0 else _place(piece[0], printed, at)
        end = len(printed) if number == len(pieces) - 1 else at + len(piece)
        found += [_kept(piece[i] if i < len(piece) else "", line) for i, line in enumerate(printed[at:end])]
        at = end
    return found


def _kept(shown: str, printed: str) -> str:
    """The printed line, but for what the page leaves out of it."""
    return shown if "…" in shown and not matches((shown,), [printed]) else printed


def _pieces(shown: list[str]) -> list[list[str]]:
    """Lines between those that say ``…``."""
    found: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == "…":
            found.append([])
        else:
            found[-1].append(line)
    return found


def _place(line: str, printed: list[str], at: int) -> int:
    """Where the line that is most like this one stands, whatever its figures."""

    def shape(text: str) -> str:
        return re.sub(r"[\d.,█▏▎▍▌▋▊▉]+", "#", text)

    likeness = [difflib.SequenceMatcher(None, shape(line), shape(other)).ratio() for other in printed[at:]]
    return at + max(range(len(likeness)), key=lambda i: likeness[i]) if likeness else at


def refresh(path: Path, folder: Path) -> bool:
    """Rewrite one page; whether anything changed."""
    text = before = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    page = Page(name, folder)
    previous: Block | None = None
    for block in blocks(path):
        if block.kind == "console" and not block.not_run:
            text = text.replace(block.text, _console(page, block), 1)
        elif block.kind == "text" and previous is not None and previous.kind == "python" and block.adjoins:
            now = refreshed(block.text.splitlines(), page.printed.splitlines())
            text = text.replace(f"\n{block.text}```", f"{_lines(now)}```", 1)
        elif not block.not_run:
            page.run(block, previous)
        previous = block
    path.write_text(text, encoding="utf-8")
    return text != before


def _console(page: Page, block: Block) -> str:
    text = block.text
    for step in steps(block.text):
        words = shlex.split(step.command, comments=True)
        if words[0] == "cat":
            page.cat(block, words[1], step.shown)
        if words[0] != "kernelcast":
            continue
        _, out = run_kernelcast(words[1:])
        shown = "\n".join(step.shown).strip("\n").split("\n")
        if not any(shown):
            continue
        notes = any(line.startswith("kernelcast: ") for line in shown)
        printed = [
            line.rstrip() for line in out.strip("\n").split("\n") if notes or not line.startswith("kernelcast: ")
        ]
        text = text.replace(_lines(shown), _lines(refreshed(shown, printed)), 1)
    return text


def _lines(lines: list[str]) -> str:
    """Whole lines, so that a short one is not found inside of another."""
    return "\n" + "\n".join(lines) + "\n"


def main() -> None:
    os.environ["COLUMNS"] = "100"
    for name in sys.argv[1:]:
        path = (ROOT / name).resolve()
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for link in ("validation", "docs", "src"):
                (folder / link).symlink_to(ROOT / link, target_is_directory=True)
            os.chdir(folder)
            make_files(path.relative_to(ROOT).as_posix(), folder)
            print(f"{name}: {'rewritten' if refresh(path, folder) else 'as it was'}")
            os.chdir(ROOT)


if __name__ == "__main__":
    main()
