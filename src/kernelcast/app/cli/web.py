"""``kernelcast web``: the page and its API, on this machine."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.errors import KernelcastError

PORT = 8321
_NEEDED = ("fastapi", "uvicorn")


def register(app: typer.Typer) -> None:
    examples = ("kernelcast web", "kernelcast web --port 9000 --open")
    app.command("web", cls=with_examples(Command, *examples))(web)


def web(
    host: Annotated[str, typer.Option("--host", help="address to listen at; others than this one let others ask")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free")] = PORT,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=64, help="processes that answer; default: one a core, 2 to 8")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="a name that browsers may ask it by; may be repeated"),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="show the page in a browser")] = False,
) -> None:
    """Serve the page and its API on this machine, until Ctrl-C."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise KernelcastError(f"the page needs {' and '.join(missing)}: pip install 'kernelcast[web]'")
    from kernelcast.app.web.limits import Limits
    from kernelcast.app.web.serve import serve

    limits = Limits()
    serve(host, port, limits if workers is None else replace(limits, workers=workers), allow_host or (), opened=opened)
