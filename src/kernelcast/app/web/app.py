"""The app: the page's files, the API, and the middleware around them."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response

from kernelcast._version import __version__
from kernelcast.app.web.bodies import BODIES, op_schema
from kernelcast.app.web.guards import Guards
from kernelcast.app.web.limits import Limits
from kernelcast.app.web.parameters import OPS
from kernelcast.app.web.pool import WorkerPool
from kernelcast.app.web.problems import ProblemFields, add_handlers, problem
from kernelcast.app.web.routes import ForecastService, routers

_ABOUT = """Forecasts of how long GPU work takes. Every `answer` is what the command line prints with `--json`;
`command` and `python` give the same elsewhere. Errors are `application/problem+json` with one line in `detail`."""
_SMALL = 1000  # bytes that are not worth compressing
_STATIC = Path(__file__).parent / "static"
PAGES = ("/", "/model", "/kernel", "/compare", "/serve", "/diagnose", "/evidence")
_PLACEHOLDER = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>kernelcast</title>
<p>The page was not installed. The API is described at <a href="/openapi.json">/openapi.json</a>.</p></html>"""
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def create_app(limits: Limits | None = None, hosts: Iterable[str] = ()) -> FastAPI:
    """The server's app. ``hosts``: names that it answers for beside those of this machine."""
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with WorkerPool(limits) as pool:
            app.state.service = ForecastService(pool, limits)
            yield

    app = FastAPI(title="kernelcast", version=__version__, description=_ABOUT, lifespan=lifespan, docs_url=None,
                  redoc_url=None, redirect_slashes=False)  # fmt: skip

    def service() -> ForecastService:
        running: ForecastService = app.state.service
        return running

    add_handlers(app)
    for router in routers(service, limits):
        app.include_router(router)
    _add_pages(app)
    _add_openapi(app)
    app.add_middleware(GZipMiddleware, minimum_size=_SMALL, compresslevel=5)
    app.add_middleware(Guards, limits=limits, hosts=tuple(hosts))
    return app


def _add_openapi(app: FastAPI) -> None:
    """The OpenAPI document, with the parameters of every op; made once."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document["components"]["schemas"]
            schemas["ProblemFields"] = ProblemFields.model_json_schema()
            schemas |= {f"parameters_{op}": op_schema(op) for op in OPS}
            kernel = schemas[BODIES["kernel"].__name__]
            kernel["properties"]["parameters"] |= {
                "anyOf": [{"$ref": f"#/components/schemas/parameters_{op}"} for op in OPS]
            }
            for name in ("HTTPValidationError", "ValidationError"):  # errors are problems here
                schemas.pop(name, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_pages(app: FastAPI) -> None:
    files = StaticPages()

    def add(path: str, name: str | None = None) -> None:
        async def respond(request: Request) -> Response:
            return files.respond(request, name or request.path_params["name"])

        app.add_route(path, respond, methods=["GET"], include_in_schema=False)

    for path in PAGES:
        add(path, "index.html")
    add("/favicon.ico", "favicon.svg")
    add("/static/{name:path}")


@dataclass(frozen=True)
class StaticFile:
    """A file as it is sent."""

    content: bytes
    compressed: bytes | None
    media_type: str
    etag: str
    changed_ns: int = 0

    @classmethod
    def of(cls, content: bytes, name: str, changed_ns: int = 0) -> StaticFile:
        media_type = _MEDIA_TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        text = media_type.startswith("text/") or media_type.endswith(("json", "xml"))
        compressed = gzip.compress(content, 6, mtime=0) if len(content) > _SMALL and text else None
        return cls(content, compressed, f"{media_type}; charset=utf-8" if text else media_type,
                   f'"{hashlib.sha256(content).hexdigest()[:24]}"', changed_ns)  # fmt: skip


class StaticPages:
    """The files of ``folder``, from memory; a file that changes is read again. A name is looked up among the files that
    are there, and never joined to a path."""

    def __init__(self, folder: Path = _STATIC) -> None:
        self._folder = folder
        self._read: dict[str, StaticFile] = {}
        self._paths = self._walk()

    def _walk(self) -> dict[str, Path]:
        if not self._folder.is_dir():
            return {}
        files = (path for path in self._folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {path.relative_to(self._folder).as_posix(): path for path in files}

    def file(self, name: str) -> StaticFile | None:
        if name not in self._paths:
            return StaticFile.of(_PLACEHOLDER, name) if name == "index.html" else None
        path, file = self._paths[name], self._read.get(name)
        try:
            changed_ns = path.stat().st_mtime_ns
            if file is None or file.changed_ns != changed_ns:
                file = self._read[name] = StaticFile.of(path.read_bytes(), name, changed_ns)
        except OSError:
            return None
        return file

    def respond(self, request: Request, name: str) -> Response:
        file = self.file(name)
        if file is None:
            self._paths = self._walk()  # it may be new
            file = self.file(name)
        if file is None:
            return problem(404, f"no file {name[:200]} here")
        headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if file.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.compressed, 200, {**headers, "Content-Encoding": "gzip"}, file.media_type)
        return Response(file.content, 200, headers, file.media_type)
