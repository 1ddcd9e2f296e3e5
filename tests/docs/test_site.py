"""The site builds without a warning and without the network, and all of its links and anchors lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from doc_blocks import ROOT

pytest.importorskip("material", reason="pip install 'kernelcast[docs]'")
pytestmark = pytest.mark.slow

ASSETS = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "srcset",
    "video": "src",
    "object": "data",
}
LINK = re.compile(r"(?<!!)\[[^\]\[]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)


class Page(HTMLParser):
    """What a page of the site loads, links to, and has as anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.assets: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if given.get(name))
        if tag in ASSETS and given.get(ASSETS[tag]) and given.get("rel") not in ("canonical", "next", "prev"):
            self.assets.append(given[ASSETS[tag]])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error (not quietly: MkDocs does not count what it does not say)."""
    folder = tmp_path_factory.mktemp("site")
    # whatever asks the network is told that there is none
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def made(site: Path) -> dict[str, Page]:
    """Every page by its path, but for the one of servers that know their own address (404.html)."""
    paths = (path for path in site.rglob("*.html") if path.name != "404.html")
    return {path.relative_to(site).as_posix(): Page(path.read_text("utf-8")) for path in paths}


def test_every_page_of_the_docs_is_in_the_site(made: dict[str, Page]) -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        assert path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in made
    for name in ("cli", "api", "ops", "gpus", "models", "stacks", "evidence"):
        assert f"reference/{name}.html" in made
    assert {"contributing.html", "changelog.html", "validation.html"} <= set(made)


def test_nothing_is_loaded_from_elsewhere(site: Path, made: dict[str, Page]) -> None:
    elsewhere = [(name, url) for name, page in made.items() for url in page.assets if urlsplit(url).netloc]
    assert not elsewhere
    for path in site.rglob("*.css"):
        assert not re.findall(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", path.read_text("utf-8")), path
    for name in made:  # Material fetches Mermaid where a page has a chart for it: ours are drawn already
        text = (site / name).read_text("utf-8")
        assert 'class="mermaid"' not in text and "fonts.googleapis" not in text


def test_every_picture_and_script_is_there(site: Path, made: dict[str, Page]) -> None:
    lost = [
        (name, url)
        for name, page in made.items()
        for url in page.assets
        if not urlsplit(url).scheme and not ((site / name).parent / unquote(urlsplit(url).path)).exists()
    ]
    assert not lost


def test_every_link_and_anchor_leads_somewhere(site: Path, made: dict[str, Page]) -> None:
    lost = []
    for name, page in made.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            path = (target / "index.html" if target.is_dir() else target).resolve()
            if not path.exists():
                lost.append((name, link))
                continue
            anchor = unquote(parts.fragment)
            found = made.get(path.relative_to(site.resolve()).as_posix())
            if anchor and found is not None and anchor not in found.anchors and not anchor.startswith("__"):
                lost.append((name, link))
    assert not lost


def test_generated_pages_list_what_the_code_has(site: Path) -> None:
    import kernelcast
    from kernelcast.models import model_ids
    from kernelcast.ops import REGISTRY
    from kernelcast.stacks import stack_ids

    def text(name: str) -> str:
        return (site / "reference" / f"{name}.html").read_text("utf-8")

    assert all(f'id="{name}"' in text("gpus") for name in kernelcast.gpu_ids())
    assert all(f'id="{op}"' in text("ops") for op in REGISTRY)
    assert all(f">{name}<" in text("models") for name in model_ids())
    assert all(f">{name}<" in text("stacks") for name in stack_ids())
    assert all(f'id="{name}"' in text("api") for name in kernelcast.__all__)
    assert all(f'id="{name}"' in text("cli") for name in ("infer", "plan", "simulate", "kernel", "evidence"))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "validation/README.md"])
def test_links_of_the_repositorys_own_pages_lead_somewhere(name: str) -> None:
    """As GitHub follows them: relative to the file, anchors made from headings."""
    page = ROOT / name
    for link in LINK.findall(page.read_text("utf-8")):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        path = (page.parent / parts.path).resolve() if parts.path else page
        assert path.exists(), link
        if parts.fragment:
            assert parts.fragment in {github_anchor(text) for text in HEADING.findall(path.read_text("utf-8"))}, link


def github_anchor(heading: str) -> str:
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
