"""What users can name, one line each: commands with their flags, ops, GPUs, models, pages of the docs.

    python benchmarks/interface_list.py > after.txt      # compare with the list of an earlier version: nothing is lost

A flag's line has its type, whether it is required or repeated, and its default.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

import kernelcast


def flags(called: str, command: Any) -> Iterator[str]:
    """A command and everything below it."""
    yield f"command {called}"
    for param in command.params:
        if "--help" in param.opts:
            continue
        names = (
            ",".join(sorted([*param.opts, *param.secondary_opts])) if param.param_type_name == "option" else "argument"
        )
        about = [param.type_descriptor.annotation.__name__]
        about += ["required" if param.required else f"default={param.default!r}"]
        about += ["repeated"] if getattr(param, "multiple", False) or param.nargs != 1 else []
        about += [
            f"{limit}={getattr(param, limit)}" for limit in ("min", "max") if getattr(param, limit, None) is not None
        ]
        yield f"flag {called} {names} {' '.join(about)}"
    context = typer.Context(command)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from flags(f"{called} {name}", command.get_command(context, name))


def main() -> int:
    room = "kernelcast.app.cli" if find_spec("kernelcast.app") else "kernelcast.cli"  # where 0.2.0 and earlier have it
    metadata.entry_points = lambda **_: ()  # type: ignore[assignment]  # the lab registers below
    app = import_module(f"{room}.app").build()
    lab = import_module("kernelcast_lab.cli")
    for module in pkgutil.iter_modules(lab.__path__, "kernelcast_lab.cli."):
        getattr(import_module(module.name), "register", lambda app: None)(app)
    program = typer.main.get_command(app)
    hardware, ops, models = (
        next(import_module(f"kernelcast.{name}") for name in names if find_spec(f"kernelcast.{name}"))
        for names in (("hardware",), ("ops", "kernels"), ("models", "networks"))
    )
    docs = Path(kernelcast.__file__).parents[2] / "docs"
    lines = [
        *flags("kernelcast", program),
        *(f"op {name}" for name in ops.REGISTRY),
        *(f"gpu {name}" for name in hardware.gpu_ids()),
        *(f"model {name}" for name in models.model_ids()),
        *(f"page {path.relative_to(docs)}" for path in docs.rglob("*.md")),
        *(f"python {name}" for name in kernelcast.__all__),
    ]
    print("\n".join(sorted(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
