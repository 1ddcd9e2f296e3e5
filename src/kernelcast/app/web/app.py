"""The app: the page's files, the API, and the middleware around them."""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from kernelcast._version import __version__
from kernelcast.app.web.bodies import BODIES, op_schema
from kernelcast.app.web.guards import Guards
from kernelcast.app.web.limits import Limits
from kernelcast.app.web.parameters import OPS
from kernelcast.app.web.pool import WorkerPool
from kernelcast.app.web.problems import ProblemFields, add_handlers
from kernelcast.app.web.routes import ForecastService, routers

_ABOUT = """Forecasts of how long GPU work takes. Every `answer` is what the command line prints with `--json`;
`command` and `python` give the same elsewhere. Errors are `application/problem+json` with one line in `detail`."""
_SMALL = 1000  # bytes that are not worth compressing
_STATIC = Path(__file__).parent / "static"
PAGES = ("/", "/model", "/kernel", "/compare", "/serve", "/train", "/diagnose", "/evidence")
mimetypes.add_type("text/javascript", ".js")  # whatever the system says


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

    add_handlers(app, _STATIC / "index.html")
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


class PageFiles(StaticFiles):
    """The page's files; browsers revalidate them each time."""

    def file_response(self, *args: Any, **more: Any) -> Response:
        response = super().file_response(*args, **more)
        response.headers["Cache-Control"] = "no-cache"
        return response


def _add_pages(app: FastAPI) -> None:
    files = PageFiles(directory=_STATIC)

    def add(path: str, name: str) -> None:
        async def respond(request: Request) -> Response:
            return await files.get_response(name, request.scope)

        app.add_route(path, respond, methods=["GET"], include_in_schema=False)

    for path in PAGES:
        add(path, "index.html")
    add("/favicon.ico", "favicon.svg")
    app.mount("/static", files)
