"""web: the page and its API, on this machine."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Annotated

import typer

from kernelcast.app.cli.commands import add_command
from kernelcast.app.questions.parameters import option
from kernelcast.errors import KernelcastError

PORT = 8321
_NEEDED = ("fastapi", "uvicorn")

Host = Annotated[str, option(help="address to listen at; others than this one let other machines in")]
Port = Annotated[int, option(minimum=0, maximum=65535, help="0: any that is free")]
Workers = Annotated[int | None, option(minimum=1, maximum=64, help="worker processes; default: one a core, 2 to 8")]
AllowedHosts = Annotated[
    list[str] | None, option(metavar="NAME", help="a host name that browsers may use; may be repeated")
]
Open = Annotated[bool, option(help="show the page in a browser")]


def register(app: typer.Typer) -> None:
    add_command(app, web, "kernelcast web", "kernelcast web --port 9000 --open")


def web(
    host: Host = "127.0.0.1", port: Port = PORT, workers: Workers = None, allow_host: AllowedHosts = None,
    open: Open = False,
) -> None:  # fmt: skip
    """Serve the page and its API on this machine, until Ctrl-C."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KernelcastError(f"the page needs {' and '.join(missing)}: pip install 'kernelcast[web]'")
    from kernelcast.app.web.limits import Limits
    from kernelcast.app.web.serve import serve

    limits = Limits()
    serve(host, port, limits if workers is None else replace(limits, workers=workers), allow_host or (), opened=open)
