"""What every request passes before a route sees it: host, rate and size limits, security headers, strict JSON.

Plain ASGI, since a body that is too large must be refused before it is read.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from kernelcast.app.web.limits import Limits
from kernelcast.app.web.problems import Problem, problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOCAL = ("localhost", "127.0.0.1", "::1")
UPLOAD_PATH, UPLOAD_TYPE = "/api/v1/diagnose", b"application/octet-stream"
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_SECURE = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
_MAX_DEPTH = 64  # levels of lists and objects; a model's config.json has four
_MAX_DIGITS = 40  # of a whole number; larger ones are no count of anything
_MAX_VALUES = 65_536  # entries of all lists and objects of a body
# a string with its end, or, where it has none, the rest: it never goes back, so that it takes linear time
_STRINGS, _BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL), re.compile(rb"[\[\]{}]")


class Refused(Problem):
    """Refused before all of it was read: the connection ends with the answer."""

    def __init__(self, status: int, detail: str, retry_s: int | None = None) -> None:
        super().__init__(status, detail, retry_s)
        self.headers = {**(self.headers or {}), "Connection": "close"}


class Guards:
    """The outermost layer of the app."""

    def __init__(self, app: App, limits: Limits, hosts: Iterable[str] = ()) -> None:
        self.app, self.limits = app, limits
        self.hosts = frozenset((*LOCAL, *(host.lower() for host in hosts)))
        self.under_way = self.uploads = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def secured(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *_SECURE]
            await send(message)

        try:
            self._check(scope)
        except Refused as error:
            await problem(error.status_code, str(error.detail), error.headers)(scope, receive, secured)
            return
        uploads = int(scope["path"] == UPLOAD_PATH)
        self.under_way += 1
        self.uploads += uploads
        try:
            await self.app(scope, self._bounded(scope, receive), secured)
        except asyncio.CancelledError:  # the server ends
            if not started:
                await problem(503, "the server is shutting down", {"Connection": "close"})(scope, receive, secured)
        except Exception:
            traceback.print_exc()
            if not started:
                await problem(500, "kernelcast web has a fault; its log has the traceback")(scope, receive, secured)
        finally:
            self.under_way -= 1
            self.uploads -= uploads

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers = dict(scope["headers"])
        host = _host(headers.get(b"host", b"").decode("latin-1"))
        if "*" not in self.hosts and host not in self.hosts:
            raise Refused(421, f"this server does not answer for {host[:100]!r}: start it with --allow-host to let it")
        if self.under_way >= self.limits.requests:
            raise Refused(429, f"{self.under_way} requests are in progress; try again in a moment", retry_s=2)
        if scope["path"] == UPLOAD_PATH and self.uploads >= self.limits.uploads:
            raise Refused(429, f"{self.uploads} uploads are in progress; try again in a moment", retry_s=2)
        if scope["method"] not in ("GET", "HEAD"):
            self._check_sender(scope["path"], headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise Refused(400, "Content-Length is not a number")
        if int(length[:20]) > self._max_bytes(scope):
            raise Refused(413, self._too_large(scope))

    @staticmethod
    def _check_sender(path: str, headers: Mapping[bytes, bytes]) -> None:
        """A page of another site may send simple requests; browsers name the site, and ask before they send bytes."""
        host, origin = headers.get(b"host", b"").lower(), headers.get(b"origin")
        other = origin is not None and origin.lower().partition(b"://")[2] != host
        if other or headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise Refused(403, "requests from pages of other sites are refused")
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if path == UPLOAD_PATH and media_type != UPLOAD_TYPE:
            said = media_type.decode("latin-1")[:100] or "of no type"
            raise Refused(415, f"a file is sent as {UPLOAD_TYPE.decode()}, not {said}")

    def _max_bytes(self, scope: MutableMapping[str, Any]) -> int:
        return self.limits.upload_bytes if scope["path"] == UPLOAD_PATH else self.limits.body_bytes

    def _too_large(self, scope: MutableMapping[str, Any]) -> str:
        return f"a body has at most {self._max_bytes(scope):,} bytes here"

    def _bounded(self, scope: MutableMapping[str, Any], receive: Receive) -> Receive:
        """``receive`` that counts bytes, and the time until the last; once the body is complete it only waits."""
        remaining, loop = self._max_bytes(scope), asyncio.get_running_loop()
        deadline, complete = loop.time() + self.limits.body_seconds, False

        async def bounded() -> Message:
            nonlocal remaining, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Refused(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None
            remaining -= len(message.get("body", b""))
            if remaining < 0:
                raise Refused(413, self._too_large(scope))
            complete = message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        return bounded


def _host(header: str) -> str:
    """The name of a Host header, without its port."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return header


# ---- bodies as strict JSON: no NaN, no number beyond a float, no nesting that breaks a parser ----


class StrictRequest(Request):
    """What FastAPI reads bodies by."""

    async def body(self) -> bytes:
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise Problem(415, f"the body must be application/json, not {media_type[:100] or 'of no type'}")
        body = await super().body()
        if not body:
            raise Problem(400, "the body is empty: it should be a JSON object")
        return body

    async def json(self) -> Any:
        return strict_json(await self.body())


class StrictRoute(APIRoute):
    """A route whose body is strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def strict_json(raw: bytes) -> Any:
    """The value of a JSON text, by the letter of RFC 8259; a 400 ``Problem`` where it is none."""
    if _depth(raw) > _MAX_DEPTH:
        raise Problem(400, f"JSON may be nested {_MAX_DEPTH} levels deep here")
    try:
        return json.loads(raw.decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_short,
                          object_pairs_hook=_unique)  # fmt: skip
    except UnicodeDecodeError:
        raise Problem(400, "the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error.msg} in line {error.lineno}") from None


def _depth(raw: bytes) -> int:
    """How deep lists and objects are nested; a 400 ``Problem`` where there are too many of them to look."""
    opened = raw.count(b"[") + raw.count(b"{")
    if opened <= _MAX_DEPTH and raw.count(b",") <= _MAX_VALUES:
        return 0
    raw = _STRINGS.sub(b"", raw)
    if sum(map(raw.count, (b"[", b"{", b","))) > _MAX_VALUES:
        raise Problem(400, f"JSON may have {_MAX_VALUES:,} values here")
    depth = deepest = 0
    for bracket in _BRACKETS.findall(raw):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _refuse(constant: str) -> None:
    raise Problem(400, f"the body is not JSON: {constant} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Problem(400, f"{text[:40]} is larger than any number here")
    return value


def _short(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise Problem(400, f"a whole number of {len(text)} digits is larger than any number here")
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise Problem(400, "a JSON object has the same key twice")
    return value
