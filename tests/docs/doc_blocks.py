"""Code blocks of a page: found, told apart, run in this process, and compared with the output that the page shows.

A block is run by its language:

- ``console`` (or none, with lines that begin with ``$``): commands and what they print. A line ``…`` stands for any
  lines, a ``…`` in a line for anything in it; all else is compared. ``$ cat FILE`` makes the file, or compares it;
  ``$ echo $?`` shows the exit code of the command before it.
- ``sh``: commands that must end well.
- ``python``: run in one namespace a page; a ``text`` block right behind it is what it prints.
- ``toml``, ``json``, ``csv``: parsed.

``<!-- file: NAME -->`` before a block writes it to the page's folder; ``<!-- not run: REASON -->`` leaves it out.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REASONS = (
    "needs a GPU",
    "needs measured tables",
    "takes minutes",
    "needs another program",
    "output of an earlier release",
)
_FENCE = re.compile(
    r"(?:^(?P<indent>[ ]*)<!-- (?P<word>not run|file): (?P<said>[^\n]*?) -->\n)?"
    r"^(?P<inner>[ ]*)```(?P<language>[^\s`]*)[^\n`]*\n(?P<text>.*?)^(?P=inner)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_WRITES = ("-o", "--output", "--plot", "--trace", "--timeline", "--requests-out")
_ANY = "…"
_EXIT_CODE = "echo $?"  # after a command: how it ended
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, its text, and the comment before it."""

    line: int
    language: str
    text: str
    not_run: str = ""
    file: str = ""
    adjoins: bool = False  # nothing stands between it and the block before

    @property
    def kind(self) -> str:
        if self.language:
            return self.language
        return "console" if any(line.startswith("$ ") for line in self.text.splitlines()) else "text"


@dataclass(frozen=True)
class Step:
    """A command of a console block, and the output shown under it."""

    command: str
    shown: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        inner = len(match["inner"])
        lines = (line[inner:] if line[:inner].isspace() else line for line in match["text"].splitlines())
        said = {match["word"]: match["said"]} if match["word"] else {}
        found.append(
            Block(
                line=text[: match.start("language")].count("\n") + 1,
                language=match["language"],
                text="\n".join(lines) + "\n",
                not_run=said.get("not run", ""),
                file=said.get("file", ""),
                adjoins=bool(found) and not text[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


def steps(text: str) -> list[Step]:
    """Commands of a console block (``$ ``; a backslash or an open quote goes on in the next line) and their output."""
    found: list[tuple[str, list[str]]] = []
    opened = False
    for line in text.splitlines():
        if opened:
            command, shown = found[-1]
            found[-1] = (f"{command}\n{line}", shown)
        elif line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line.rstrip())
        else:
            raise AssertionError(f"output before the first command: {line!r}")
        opened = (opened or line.startswith("$ ")) and _goes_on(found[-1][0])
    return [Step(_joined(command), tuple(shown)) for command, shown in found]


def commands(text: str) -> list[str]:
    """Commands of a ``sh`` block, comments and empty lines left out."""
    lines = [line for line in _joined(text).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line.strip() for line in lines]


def matches(shown: tuple[str, ...], printed: list[str]) -> str:
    """Empty where the output is as shown; else the first line that differs, both ways."""
    want = _without_edges([line.rstrip() for line in shown])
    have = _without_edges([line.rstrip() for line in printed])
    at = 0
    open_end = False  # whether the last shown line was "…": then lines may be skipped
    for line in want:
        if line.strip() == _ANY:
            open_end = True
            continue
        reach = range(at, len(have)) if open_end else range(at, min(at + 1, len(have)))
        hit = next((i for i in reach if _line_matches(line, have[i])), None)
        if hit is None:
            near = "\n".join(have[at : at + 6]) or "(nothing more)"
            return f"shown:   {line}\nprinted: {near}"
        at, open_end = hit + 1, False
    if not open_end and at < len(have):
        return f"printed, but not shown: {have[at]}"
    return ""


@dataclass
class Page:
    """A page that is being run: its folder, its namespace, and what was run and left out."""

    name: str
    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__docs__"})
    printed: str = ""  # by the last python block
    ran: int = 0
    faults: list[str] = field(default_factory=list)

    def run(self, block: Block, previous: Block | None) -> None:
        """Run one block; what is wrong is added to the faults."""
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        handler = getattr(self, f"_{block.kind}", None)
        if handler is None:
            self._fault(block, f"no way to run {block.kind!r}: name its language, or say why it is not run")
            return
        try:
            handler(block, previous)
        except Exception as error:
            self._fault(block, f"{type(error).__name__}: {error}")
        self.ran += 1

    def _fault(self, block: Block, what: str) -> None:
        self.faults.append(f"{self.name}:{block.line}: {what}")

    def _console(self, block: Block, previous: Block | None) -> None:
        listed = steps(block.text)
        for at, step in enumerate(listed):
            words = shlex.split(step.command, comments=True)
            if words[0] == "cat":
                self.cat(block, words[1], step.shown)
                continue
            if step.command == _EXIT_CODE:
                continue
            code, printed = self._run_words(words)
            expected_code = 2 if any(line.startswith("kernelcast: error:") for line in step.shown) else 0
            if at + 1 < len(listed) and listed[at + 1].command == _EXIT_CODE:
                expected_code = int(listed[at + 1].shown[0])
            if code != expected_code:
                self._fault(block, f"{step.command}: exit code {code}\n{printed}")
            elif any(step.shown) and (wrong := self._differs(step.shown, printed.splitlines())):
                self._fault(block, f"{step.command}\n{wrong}")

    @staticmethod
    def _differs(shown: tuple[str, ...], printed: list[str]) -> str:
        """Notes on standard error (``kernelcast: ...``) may be left out; the rest may not."""
        if not any(line.startswith("kernelcast: ") for line in shown):
            printed = [line for line in printed if not line.startswith("kernelcast: ")]
        return matches(shown, printed)

    def cat(self, block: Block, name: str, shown: tuple[str, ...]) -> None:
        """The file is as shown; where there is none yet, it is made."""
        path = self.folder / name
        if path.exists():
            if wrong := matches(shown, path.read_text(encoding="utf-8").splitlines()):
                self._fault(block, f"cat {name}\n{wrong}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(shown).rstrip() + "\n", encoding="utf-8")

    def _sh(self, block: Block, previous: Block | None) -> None:
        for command in commands(block.text):
            code, printed = self._run_words(shlex.split(command, comments=True))
            if code:
                self._fault(block, f"{command}: exit code {code}\n{printed}")

    def _python(self, block: Block, previous: Block | None) -> None:
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            exec(compile(block.text, f"{self.name}:{block.line}", "exec"), self.names)
        self.printed = stream.getvalue()

    def _text(self, block: Block, previous: Block | None) -> None:
        if previous is None or previous.kind != "python" or not block.adjoins:
            raise AssertionError("text that no block prints: show the command, or say why it is not run")
        if wrong := matches(tuple(block.text.splitlines()), self.printed.splitlines()):
            self._fault(block, wrong)

    def _toml(self, block: Block, previous: Block | None) -> None:
        tomllib.loads(block.text)

    def _json(self, block: Block, previous: Block | None) -> None:
        json.loads(block.text)

    def _csv(self, block: Block, previous: Block | None) -> None:
        rows = list(csv.reader(block.text.splitlines()))
        assert len({len(row) for row in rows}) == 1, "rows of different lengths"

    def _mermaid(self, block: Block, previous: Block | None) -> None:
        assert block.text.startswith("flowchart "), "only flow charts are drawn"

    def _run_words(self, words: list[str]) -> tuple[int, str]:
        """Run ``kernelcast``; of other programs look whether what they are given is there."""
        if words[0] == "kernelcast":
            return run_kernelcast(words[1:])
        return (0, "") if _is_there(words) else (1, f"{shlex.join(words)}: no such thing in this repository")


def run_kernelcast(arguments: list[str]) -> tuple[int, str]:
    """Exit code, and standard output and error in the order of their writing. What several pages ask is run once,
    unless it reads or writes a file."""
    known = not any(word in _WRITES or Path(word).exists() for word in arguments)
    return _run_once(tuple(arguments)) if known else _run_once.__wrapped__(tuple(arguments))


@functools.cache
def _run_once(arguments: tuple[str, ...]) -> tuple[int, str]:
    from kernelcast.app.cli.app import main  # late: conftest sets the number of threads first

    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        code = main(list(arguments))
    return code, stream.getvalue()


def pages() -> Iterator[Path]:
    """README.md and every page of docs/."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def _goes_on(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command, comments=True)
    except ValueError:  # no closing quotation
        return True
    return False


def _joined(command: str) -> str:
    return re.sub(r"\\\n\s*", "", command)


def _without_edges(lines: list[str]) -> list[str]:
    """Without empty lines at the beginning and the end."""
    return "\n".join(lines).strip("\n").split("\n") if any(lines) else []


def _line_matches(shown: str, printed: str) -> bool:
    """Whether a line is as shown. Another machine may round the last digit of a number the other way."""
    if _ANY in shown:
        pattern = ".*".join(re.escape(part) for part in shown.split(_ANY))
        return re.fullmatch(pattern, printed) is not None
    if shown == printed:
        return True
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    return all(one == other or _rounded_alike(one, other) for one, other in pairs)


def _rounded_alike(one: str, other: str) -> bool:
    """Decimals of two digits and more that differ by no more than one in the last place."""
    first, second = one.replace(",", ""), other.replace(",", "")
    places = len(first.partition(".")[2])
    if not places or places != len(second.partition(".")[2]) or len(first.replace(".", "").lstrip("0")) < 2:
        return False
    return abs(float(first) - float(second)) < 1.5 * 10.0**-places


def _is_there(words: list[str]) -> bool:
    """Whether a make target, a script or an extra that a page names exists."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return all(word in targets for word in words[1:] if "=" not in word)
    if words[0] == "python":
        return words[1].startswith("-") or (ROOT / words[1]).exists()
    if words[0] in ("pip", "cd", "export", "git", "mkdocs", "source", "docker"):
        extras = {name for word in words[1:] for group in re.findall(r"\[(.*?)\]", word) for name in group.split(",")}
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        return extras <= set(known)
    return False
