"""collect --specs, --link, --host, --power: not kernels but the machine that they run on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from kernelcast import plugins
from kernelcast.app.cli.progress import progress_bar
from kernelcast.errors import KernelcastError
from kernelcast.hardware import fabric_type

PARTS = ("specs", "link", "host", "power")


def measure_machine(
    parts: Sequence[str], out: Path | None, gpu: str | None, seconds: float | None, seed: int, plan_only: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """One of ``PARTS``."""
    if len(parts) > 1:
        raise KernelcastError(f"--{' and --'.join(parts)} measure different things: give one of them")
    if parts == ["power"]:
        plugins.plugin(plugins.COLLECTORS, "power")(out, gpu, seconds, seed, plan_only, as_json)
        return
    if out is None or out.suffix != ".toml":
        thing = {"specs": "GPU", "link": "fabric", "host": "host"}[parts[0]]
        raise KernelcastError(f"a {thing} is written as TOML: give -o FILE.toml{f', not {out}' if out else ''}")
    needs_cuda()
    if parts == ["specs"]:
        _measure_specs(out, gpu, as_json)
    elif parts == ["link"]:
        _measure_link(out, gpu, as_json)
    else:
        _measure_host(out, gpu, as_json)


def _measure_specs(out: Path, gpu: str | None, as_json: bool) -> None:
    from kernelcast.app.report.json import gpu_fields, to_json
    from kernelcast.collect.specs import measure, properties
    from kernelcast.collect.specs_draft import start_draft, write
    from kernelcast.collect.specs_file import complete_draft

    told = properties()
    begin = start_draft(told, out, gpu)  # a name or a GPU that will not do is refused before the minute
    with progress_bar() as start:
        made = complete_draft(begin, told, measure(begin.gpu, start("specs")))
    chip = write(made)
    if as_json:
        typer.echo(to_json({"file": str(out), "notes": made.notes, "gpu": gpu_fields(chip)}))
        return
    typer.echo(f"{out}: {len(made.numbers)} numbers of {told.name}; kernelcast gpu {out} shows them")
    for note in made.notes:
        typer.echo(f"  {note}")


def _measure_link(out: Path, gpu: str | None, as_json: bool) -> None:
    import torch

    from kernelcast.collect.link import fitted, measure, write_link

    count = torch.cuda.device_count()
    if count < 2:
        raise KernelcastError(f"a link is measured between two or more GPUs, and this machine has {count}")
    from kernelcast.collect.device import facts, identified

    like = fabric_type(identified(gpu).link_kind)
    known = facts()
    with progress_bar() as start:
        timed = measure(count, "nccl", start("link"))
    found = fitted(timed, like, f"{count} {known['device']}, PyTorch {known['torch']}, CUDA {known['cuda']}")
    write_link(found, out)
    if as_json:
        typer.echo(json.dumps({"file": str(out), **vars(found)}))
        return
    typer.echo(
        f"{out}: {found.bytes_per_s / 1e9:.0f} GB/s, {found.latency_s * 1e6:.2f} µs a message, over {count} GPUs"
    )


def _measure_host(out: Path, gpu: str | None, as_json: bool) -> None:
    from kernelcast.collect.device import identified
    from kernelcast.collect.host import measured_host, write_host
    from kernelcast.schedule.timeline import COSTS

    with progress_bar() as start:
        told = start("small models")
        found = measured_host(identified(gpu), lambda done, total: told(done, total, ""))
    write_host(found, out)
    if as_json:
        typer.echo(json.dumps({"file": str(out), **{name: getattr(found, name) for name in COSTS}}))
        return
    typer.echo(f"{out}: {found.launch_s * 1e6:.1f} µs a kernel, {found.view_s * 1e6:.1f} a view, "
               f"{found.python_s * 1e6:.1f} a call of Python; {dict(found.sources)['programs']}")  # fmt: skip


def needs_cuda() -> None:
    try:
        import torch
    except ImportError:
        raise KernelcastError("collect needs PyTorch: pip install 'kernelcast[torch]'") from None
    if not torch.cuda.is_available():
        raise KernelcastError("collect needs a CUDA GPU, and PyTorch sees none here; --plan shows what it would run")
