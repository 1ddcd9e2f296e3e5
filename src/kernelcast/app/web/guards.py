"""What every request passes before a route sees it: who may ask, how much, how fast, and what the browser is told.

Plain ASGI, since a body that is too large must be refused before it is read.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from kernelcast.app.web.limits import Limits
from kernelcast.app.web.problems import Problem, problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LOCAL = ("localhost", "127.0.0.1", "::1")
UPLOAD_PATH = "/api/v1/diagnose"
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

        async def told(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), *_SECURE]
            await send(message)

        try:
            self._check(scope)
        except Refused as error:
            await problem(error.status_code, str(error.detail), error.headers)(scope, receive, told)
            return
        uploads = int(scope["path"] == UPLOAD_PATH)
        self.under_way += 1
        self.uploads += uploads
        try:
            await self.app(scope, self._bounded(scope, receive), told)
        except asyncio.CancelledError:  # the server ends
            if not started:
                await problem(503, "the server is ending", {"Connection": "close"})(scope, receive, told)
        except Exception:
            traceback.print_exc()
            if not started:
                await problem(500, "kernelcast web has a fault; it is told where it was started")(scope, receive, told)
        finally:
            self.under_way -= 1
            self.uploads -= uploads

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers = dict(scope["headers"])
        host = _host(headers.get(b"host", b"").decode("latin-1"))
        if "*" not in self.hosts and host not in self.hosts:
            raise Refused(421, f"this server does not answer for {host[:100]!r}: start it with --allow-host to let it")
        if self.under_way >= self.limits.requests:
            raise Refused(429, f"{self.under_way} requests are under way; ask again in a moment", retry_s=2)
        if scope["path"] == UPLOAD_PATH and self.uploads >= self.limits.uploads:
            raise Refused(429, f"{self.uploads} files are under way; send it again in a moment", retry_s=2)
        # a page of another site may send simple requests: browsers say whose page it is
        if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and scope["method"] != "GET":
            raise Refused(403, "questions of other sites' pages are not answered")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise Refused(400, "Content-Length is no number")
        if int(length[:20]) > self._most(scope):
            raise Refused(413, self._too_large(scope))

    def _most(self, scope: MutableMapping[str, Any]) -> int:
        return self.limits.upload_bytes if scope["path"] == UPLOAD_PATH else self.limits.body_bytes

    def _too_large(self, scope: MutableMapping[str, Any]) -> str:
        return f"a body has at most {self._most(scope):,} bytes here"

    def _bounded(self, scope: MutableMapping[str, Any], receive: Receive) -> Receive:
        """``receive`` that counts bytes, and the time until the last one; once the body is whole it only waits."""
        left, loop = self._most(scope), asyncio.get_running_loop()
        until, whole = loop.time() + self.limits.body_seconds, False

        async def bounded() -> Message:
            nonlocal left, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise Refused(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None
            left -= len(message.get("body", b""))
            if left < 0:
                raise Refused(413, self._too_large(scope))
            whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        return bounded


def _host(given: str) -> str:
    """The name of a Host header, without its port."""
    try:
        return (urlsplit(f"//{given}").hostname or "").lower()
    except ValueError:
        return given
