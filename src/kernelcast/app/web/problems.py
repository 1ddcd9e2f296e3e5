"""Errors as application/problem+json (RFC 9457): one line that says what is wrong and what would be right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import FileResponse, Response

MEDIA_TYPE = "application/problem+json"
_DETAIL_CHARS = 2000
_ERRORS = 20  # of a body that are listed


class ProblemFields(BaseModel):
    """What went wrong."""

    type: str = Field(examples=["about:blank"])
    title: str = Field(examples=["Unprocessable Content"])
    status: int = Field(ge=400, le=599, examples=[422])
    detail: str = Field(examples=["unknown gpu 'h2000' (did you mean h200_sxm?); known: 47 names"])


class Problem(HTTPException):
    """Raised anywhere below a route; ``retry_s``: when to retry."""

    def __init__(self, status: int, detail: str, retry_s: int | None = None) -> None:
        super().__init__(status, detail, None if retry_s is None else {"Retry-After": str(retry_s)})


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any) -> Response:
    """The response that says so."""
    try:
        title = HTTPStatus(status).phrase
    except ValueError:
        title = "Error"
    line = " ".join(detail.split())[:_DETAIL_CHARS]
    fields = {"type": "about:blank", "title": title, "status": status, "detail": line, **more}
    body = json.dumps(fields, ensure_ascii=False).encode(errors="replace")
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, MEDIA_TYPE)


def add_handlers(app: FastAPI, page: Path) -> None:
    """All that a route may raise, as problems; ``page``: what a browser gets for an address that is none."""

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        if error.status_code == 404 and _for_people(request):
            return FileResponse(page, 404, {"Cache-Control": "no-store"})
        return problem(error.status_code, _detail(request, error), error.headers)

    async def of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        lines = [_line(entry) for entry in error.errors()[:_ERRORS]]
        return problem(422, lines[0] if lines else "the request is not valid", errors=lines)

    app.add_exception_handler(StarletteHTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_validation)


def _for_people(request: Request) -> bool:
    """An address that was typed or followed, beside the API and the page's files."""
    asked = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    return asked and not request.url.path.startswith(("/api/", "/static/"))


def _detail(request: Request, error: StarletteHTTPException) -> str:
    if isinstance(error, Problem):
        return str(error.detail)
    if error.status_code == 404:
        return f"no page {request.url.path[:200]}; the API is described at /openapi.json"
    if error.status_code == 405:
        return f"{request.url.path[:200]} does not take {request.method}"
    return str(error.detail)


def _line(error: Mapping[str, Any]) -> str:
    """'batch: should be 1 or more, not 0'. What kernelcast itself says stays as it is."""
    reason = error.get("ctx", {}).get("error")
    if isinstance(reason, ValueError) and str(reason):
        return str(reason)
    # where in the body, without 'body' itself
    location = [part for part in error.get("loc", ()) if part not in ("body", "query", "path")][:6]
    name = ".".join(map(str, location))
    message = str(error.get("msg", "is wrong"))
    message = message[:1].lower() + message[1:]
    if error.get("type") == "missing":
        return f"{name or 'the body'} is missing"
    if error.get("type") == "extra_forbidden":
        return f"{name}: no such parameter here; GET /api/v1/parameters lists them"
    given = repr(error.get("input"))
    return f"{name or 'the body'}: {message}" + (f", not {given}" if len(given) <= 60 else "")


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of an operation that are problems, for the OpenAPI document."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemFields"}}}
    retry = {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content,
                 **({"headers": retry} if status in (429, 503) else {})}
        for status in sorted(statuses)
    }  # fmt: skip
