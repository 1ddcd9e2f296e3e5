"""HTTP connections that do not wait for ever: uvicorn closes those that are idle between requests, and no others."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kernelcast.app.web.limits import Limits


class BoundedConnection(H11Protocol):
    """Closed where a request's header is not complete in time, from the connection or the header's first byte on; more
    connections than the limit are closed at once."""

    limits = Limits()
    _header: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            transport.abort()
        else:
            self._expect_header()

    def data_received(self, data: bytes) -> None:
        if self._header is None and not self._asked():
            self._expect_header()
        super().data_received(data)
        if self._asked():
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _asked(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_header(self) -> None:
        self._header = self.loop.call_later(self.limits.header_seconds, self._close)

    def _forget(self) -> None:
        if self._header is not None:
            self._header.cancel()
            self._header = None

    def _close(self) -> None:
        self._header = None
        if not self._asked():
            self.transport.close()


def bounded(limits: Limits) -> type[BoundedConnection]:
    """The class with these limits, as uvicorn takes it."""
    return type("BoundedConnection", (BoundedConnection,), {"limits": limits})
