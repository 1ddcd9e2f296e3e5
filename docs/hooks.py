"""What MkDocs does beside rendering: pages made from the code itself, links out of docs/, flow charts as pictures.

Pages under reference/, and the ones of the repository's root, are made when the site is built, so that they cannot be
older than the code. Nothing here is fetched from anywhere.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import flow  # noqa: E402
import generated  # noqa: E402
import generated_code  # noqa: E402

MADE = {
    "cli": generated_code.commands,
    "api": generated_code.api,
    "ops": generated.ops,
    "gpus": generated.gpus,
    "models": generated.models,
    "stacks": generated.stacks,
    "evidence": generated.evidence,
}

# Pages of the repository that lie outside of docs/: by where they are in the site
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "validation/README.md": "validation.md",
}
HOME = {"README.md": "index.md"}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<to>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_MERMAID = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add what is not written by hand."""
    pages = {to: relinked((ROOT / name).read_text(encoding="utf-8"), Path(name)) for name, to in OUTSIDE.items()}
    pages |= {f"reference/{name}.md": make() for name, make in MADE.items()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to what the site has elsewhere, or not at all; flow charts."""
    name = page.file.src_uri
    if name not in OUTSIDE.values() and not name.startswith("reference/"):
        markdown = relinked(markdown, Path("docs") / name)
    return _MERMAID.sub(lambda match: flow.svg(match["text"]), markdown)


def relinked(text: str, source: Path) -> str:
    """A page's links as they are in the site; ``source`` is its path in the repository."""
    here = _in_site(source)

    def replace(match: re.Match[str]) -> str:
        to = match["to"]
        if ":" in to or to.startswith("/"):
            return match[0]
        target = Path(_normal((source.parent / to).as_posix()))
        place = _in_site(target)
        if place is None:  # a file of the repository that is no page: its name alone
            label = match["text"]
            return label if "`" in label else f"`{target.as_posix()}`"
        return f"[{match['text']}]({_relative(place, here)}{match['anchor'] or ''})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def _in_site(path: Path) -> str | None:
    """Where a file of the repository is in the site; None: nowhere."""
    name = path.as_posix()
    if name in OUTSIDE or name in HOME:
        return {**OUTSIDE, **HOME}[name]
    return name.removeprefix("docs/") if name.startswith("docs/") and not name.endswith(".py") else None


def _relative(to: str, here: str | None) -> str:
    depth = (here or "").count("/")
    return "../" * depth + to


def _normal(name: str) -> str:
    parts: list[str] = []
    for part in name.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
