"""Start the server: its address first, one line where that is taken, and no traceback at Ctrl-C."""

from __future__ import annotations

import logging
import socket
import threading
import webbrowser
from collections.abc import Sequence

from kernelcast.app.web.limits import Limits
from kernelcast.errors import KernelcastError

_BACKLOG = 512
_KEEP_ALIVE_S = 15  # that an idle connection stays open
_GRACE_S = 2  # for requests in progress when the server ends


def serve(host: str, port: int, limits: Limits, hosts: Sequence[str] = (), *, opened: bool = False) -> None:
    """Until Ctrl-C."""
    import uvicorn

    from kernelcast.app.web.app import create_app
    from kernelcast.app.web.connections import bounded

    # ``guards`` logs what goes wrong; uvicorn would log requests that Ctrl-C ended, with tracebacks
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    bound = listening(host, port)
    url = address(host, bound.getsockname()[1])
    config = uvicorn.Config(
        create_app(limits, [*hosts, *host_names(host)]), log_config=None, access_log=False, server_header=False,
        date_header=False, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_GRACE_S, ws="none",
        lifespan="on", h11_max_incomplete_event_size=2**16, http=bounded(limits),
    )  # fmt: skip
    print(f"kernelcast web: {url} (Ctrl-C ends it)", flush=True)
    if opened:
        threading.Timer(0.5, webbrowser.open, [url]).start()
    try:
        uvicorn.Server(config).run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()


def listening(host: str, port: int) -> socket.socket:
    """A socket at this address, or one line that says why not."""
    try:
        family, socket_type, protocol, _, sockaddr = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                              flags=socket.AI_PASSIVE)[0]  # fmt: skip
    except OSError as error:
        raise KernelcastError(f"`host` {host}: no such address ({error.strerror or error})") from None
    listener = socket.socket(family, socket_type, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise KernelcastError(
            f"cannot listen at {host} port {port}: {(error.strerror or str(error)).lower()}; give another `port`"
        ) from None
    return listener


def address(host: str, port: int) -> str:
    """As a browser takes it."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def host_names(host: str) -> tuple[str, ...]:
    """Names that a server at this address answers for, beside those of this machine."""
    return () if host in ("0.0.0.0", "::", "") else (host,)
