"""The app: the page, the API, and what guards them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response

from kernelcast._version import __version__
from kernelcast.app.web.bodies import BODIES, op_schema
from kernelcast.app.web.guards import Guards
from kernelcast.app.web.limits import Limits
from kernelcast.app.web.pages import PAGES, Pages
from kernelcast.app.web.pool import Pool
from kernelcast.app.web.problems import ProblemFields, add_handlers
from kernelcast.app.web.routes import Desk, routers
from kernelcast.app.web.vocabulary import OPS

_ABOUT = """Forecasts of how long GPU work takes. Every `answer` is what the command line prints with `--json`;
`command` and `python` ask the same elsewhere. Errors are `application/problem+json` with one line in `detail`."""
_SMALL = 1000  # bytes that are not worth compressing


def create_app(limits: Limits | None = None, hosts: Iterable[str] = ()) -> FastAPI:
    """The server's app. ``hosts``: names that it answers for beside those of this machine."""
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Pool(limits) as pool:
            app.state.desk = Desk(pool, limits)
            yield

    app = FastAPI(title="kernelcast", version=__version__, description=_ABOUT, lifespan=lifespan, docs_url=None,
                  redoc_url=None, redirect_slashes=False)  # fmt: skip

    def desk() -> Desk:
        found: Desk = app.state.desk
        return found

    add_handlers(app)
    for router in routers(desk, limits):
        app.include_router(router)
    _add_pages(app)
    _describe(app)
    app.add_middleware(GZipMiddleware, minimum_size=_SMALL, compresslevel=5)
    app.add_middleware(Guards, limits=limits, hosts=tuple(hosts))
    return app


def _add_pages(app: FastAPI) -> None:
    pages = Pages()

    async def index(request: Request) -> Response:
        return pages.respond(request, "index.html")

    async def static(request: Request) -> Response:
        return pages.respond(request, request.path_params["name"])

    async def icon(request: Request) -> Response:
        return pages.respond(request, "favicon.svg")

    for path in PAGES:
        app.add_route(path, index, methods=["GET"], include_in_schema=False)
    app.add_route("/favicon.ico", icon, methods=["GET"], include_in_schema=False)
    app.add_route("/static/{name:path}", static, methods=["GET"], include_in_schema=False)


def _describe(app: FastAPI) -> None:
    """The OpenAPI document, with the parameters of every op; made once."""
    made = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = made()
            schemas = found["components"]["schemas"]
            schemas["ProblemFields"] = ProblemFields.model_json_schema()
            schemas |= {f"parameters_{op}": op_schema(op) for op in OPS}
            kernel = schemas[BODIES["kernel"].__name__]
            kernel["properties"]["parameters"] |= {
                "anyOf": [{"$ref": f"#/components/schemas/parameters_{op}"} for op in OPS]
            }
            for name in ("HTTPValidationError", "ValidationError"):  # errors are problems here
                schemas.pop(name, None)
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]
