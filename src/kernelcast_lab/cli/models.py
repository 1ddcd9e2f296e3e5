"""collect-models: measure whole models on this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kernelcast.app.cli.collect import parse_time
from kernelcast.app.cli.commands import Command, Json, with_examples
from kernelcast.app.report.json import to_json
from kernelcast.errors import KernelcastError


def register(app: typer.Typer) -> None:
    listing = "kernelcast collect-models --list --only llama"
    app.command("collect-models", cls=with_examples(Command, listing))(collect_models)


def collect_models(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="JSON lines to append to; with --pack, the .json.gz to write"),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="stop in time, as in 240s, 5m or 1h, start included")
    ] = "240s",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="TEXT", help="cases whose id contains this; may be repeated")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="run cases again that failed before")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="show the cases in their order and stop")] = False,
    pack: Annotated[
        Path | None, typer.Option("--pack", metavar="JSONL", help="turn measured JSON lines into the kept form")
    ] = None,
    power: Annotated[bool, typer.Option("--power", help="joules of steps that are repeated, not times")] = False,
    zoo: Annotated[
        Path | None, typer.Option("--zoo", metavar="DIR", help="the models of this folder's cases.toml instead")
    ] = None,
    json: Json = False,
) -> None:
    """Measure whole models on this machine's GPU. Needs PyTorch, transformers and CUDA, and no file of any model.

    An interrupted run goes on where it stopped: start it again with the same file. --pack makes the form that is
    kept and that evaluations read.
    """
    from kernelcast_lab.collect.cases import MODELS, chosen, parameter_count, with_layers
    from kernelcast_lab.collect.measure import measure_here
    from kernelcast_lab.collect.store import pack as packed

    seconds = parse_time(budget)
    if power:
        _power(out, seconds)
        return
    if zoo is not None:
        _zoo(zoo, out, pack, only or (), seconds)
        return
    cases = chosen(only or ())
    if list_only:
        weights = {case.id: parameter_count(with_layers(MODELS[case.model], case.layers)) for case in cases}
        lines = [f"{name}  {count / 1e9:.2f}e9 weights" for name, count in weights.items()]
        typer.echo(to_json(weights) if json else "\n".join([*lines, f"{len(cases)} cases"]))
        return
    if out is None:
        raise KernelcastError("where to? give -o FILE.jsonl (or -o FILE.json.gz with --pack)")
    if pack is not None:
        measured, failed = packed(pack, out)
        labels = {"measured": measured, "failed": failed, "bytes": out.stat().st_size}
    else:
        tally = measure_here(cases, out, seconds, retry, lambda line: typer.echo(line, err=json))
        labels = tally._asdict()
    counts = ", ".join(f"{count:,} {what}" for what, count in labels.items())
    typer.echo(to_json({"file": str(out), **labels}) if json else f"{out}: {counts}")


def _zoo(folder: Path, out: Path | None, pack: Path | None, only: Sequence[str], seconds: float) -> None:
    """Measure the models of a folder, or pack what was measured of them."""
    if out is None:
        raise KernelcastError("where to? give -o FILE.jsonl (or -o GPU.json.gz with --pack)")
    from kernelcast_lab.collect.measure import measured_here
    from kernelcast_lab.collect.zoo import measure_zoo, pack_zoo

    if pack is not None:
        good, failed = pack_zoo(pack, out)
    else:
        measured_here()
        good, failed = measure_zoo(folder, out, only, seconds, typer.echo)
    typer.echo(f"{out}: {good:,} cases, {failed:,} failed")


def _power(out: Path | None, seconds: float) -> None:
    """Joules of whole models' steps, the check of the power model."""
    if out is None:
        raise KernelcastError("where to? give -o FILE.jsonl")
    from kernelcast_lab.collect.measure import measured_here

    measured_here()
    from kernelcast_lab.collect.energy import collect

    done, failed = collect(out, seconds, typer.echo)
    typer.echo(f"{out}: {done:,} measured, {failed:,} failed")
