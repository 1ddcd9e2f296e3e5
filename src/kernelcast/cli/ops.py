"""``kernelcast ops``: what can be asked."""

from __future__ import annotations

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import Json
from kernelcast.kernels import REGISTRY
from kernelcast.report import json as as_json


def register(app: typer.Typer) -> None:
    app.command("ops", cls=with_examples(Command, "kernelcast ops --json"))(list_ops)


def list_ops(json: Json = False) -> None:
    """List the ops and their parameters."""
    kernels = [REGISTRY[op] for op in sorted(REGISTRY)]
    if json:
        print(as_json.to_json([as_json.op_fields(kernel) for kernel in kernels]))
        return
    from kernelcast.report.lists import print_ops

    print_ops(kernels)
