"""The page and its files, from memory: a name is looked up among those that were found, and never joined to a path."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from kernelcast.app.web.problems import problem

STATIC = Path(__file__).parent / "static"
PAGES = ("/", "/model", "/kernel", "/compare", "/serve", "/diagnose", "/evidence")
_PLACEHOLDER = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>kernelcast</title>
<p>The page was not installed. The API is described at <a href="/openapi.json">/openapi.json</a>.</p></html>"""
_SMALL = 1000  # bytes that are not worth compressing
_KINDS = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".html": "text/html",
          ".svg": "image/svg+xml", ".json": "application/json", ".webmanifest": "application/manifest+json",
          ".woff2": "font/woff2"}  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A file as it is sent."""

    content: bytes
    packed: bytes | None
    kind: str
    tag: str
    changed_ns: int = 0

    @classmethod
    def of(cls, content: bytes, name: str, changed_ns: int = 0) -> Page:
        kind = _KINDS.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        packed = gzip.compress(content, 6, mtime=0) if len(content) > _SMALL and not kind.startswith("font/") else None
        text = kind.startswith("text/") or kind.endswith(("json", "xml"))
        return cls(content, packed, f"{kind}; charset=utf-8" if text else kind,
                   f'"{hashlib.sha256(content).hexdigest()[:24]}"', changed_ns)  # fmt: skip


class Pages:
    """The files of ``folder``; one that changes is read again."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._found: dict[str, Page] = {}
        self._files = self._walk()

    def _walk(self) -> dict[str, Path]:
        if not self._folder.is_dir():
            return {}
        files = (path for path in self._folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {path.relative_to(self._folder).as_posix(): path for path in files}

    def page(self, name: str) -> Page | None:
        if name not in self._files:
            if name != "index.html":
                return None
            return Page.of(_PLACEHOLDER, name)
        path, known = self._files[name], self._found.get(name)
        try:
            changed_ns = path.stat().st_mtime_ns
            if known is None or known.changed_ns != changed_ns:
                known = self._found[name] = Page.of(path.read_bytes(), name, changed_ns)
        except OSError:
            return None
        return known

    def respond(self, request: Request, name: str) -> Response:
        found = self.page(name)
        if found is None:
            self._files = self._walk()  # it may be new
            found = self.page(name)
        if found is None:
            return problem(404, f"no file {name[:200]} here")
        headers = {"ETag": found.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if found.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if found.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(found.packed, 200, {**headers, "Content-Encoding": "gzip"}, found.kind)
        return Response(found.content, 200, headers, found.kind)
