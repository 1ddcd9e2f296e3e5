"""``kernelcast gpus``, ``kernelcast gpu ID`` and ``kernelcast ops``: what can be asked about."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import Changes, Json
from kernelcast.app.questions.shared import chosen_gpu
from kernelcast.app.report import json as as_json
from kernelcast.hardware import Gpu, gpu, gpu_ids
from kernelcast.ops import REGISTRY


def register(app: typer.Typer) -> None:
    app.command("gpus", cls=with_examples(Command, "kernelcast gpus --json"))(list_gpus)
    examples = ("kernelcast gpu h200_sxm", "kernelcast gpu h200_sxm --set dram_bytes_per_s=7e12")
    app.command("gpu", cls=with_examples(Command, *examples))(show_gpu)
    app.command("ops", cls=with_examples(Command, "kernelcast ops --json"))(list_ops)


def list_gpus(json: Json = False) -> None:
    """List the GPUs of the catalogue."""
    chips = sorted(map(gpu, gpu_ids()), key=_age)
    if json:
        print(as_json.to_json([as_json.gpu_summary(chip) for chip in chips]))
        return
    from kernelcast.app.report.lists import print_gpus

    print_gpus(chips)


def show_gpu(
    gpu_id: Annotated[str, typer.Argument(metavar="ID", help="An id or name from `kernelcast gpus`, or a TOML file.")],
    changes: Changes = None,
    json: Json = False,
) -> None:
    """Show one GPU: every number, where it is from, and the peaks that follow."""
    chip = chosen_gpu(gpu_id, changes)
    if json:
        print(as_json.to_json(as_json.gpu_fields(chip)))
        return
    from kernelcast.app.report.lists import print_gpu

    print_gpu(chip)


def list_ops(json: Json = False) -> None:
    """List the ops and their parameters."""
    kernels = [REGISTRY[op] for op in sorted(REGISTRY)]
    if json:
        print(as_json.to_json([as_json.op_fields(kernel) for kernel in kernels]))
        return
    from kernelcast.app.report.lists import print_ops

    print_ops(kernels)


def _age(chip: Gpu) -> tuple[str, float, str]:
    """Oldest architecture first: vendors number their capabilities in order (8.9 < 9.0; gfx90a < gfx942)."""
    digits = re.sub(r"^[a-z]+", "", chip.compute_capability)
    number = float(digits) if digits == chip.compute_capability else float(int(digits, 16))
    return chip.vendor, number, chip.id
