"""collect: measure kernels on this machine's GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast import plugins
from kernelcast.app.cli.collect_machine import PARTS, measure_machine, needs_cuda
from kernelcast.app.cli.commands import Command, with_examples
from kernelcast.app.cli.options import Json
from kernelcast.app.cli.progress import progress_bar
from kernelcast.errors import KernelcastError
from kernelcast.forecast import load_calibration
from kernelcast.hardware import Gpu
from kernelcast.hardware import gpu as find_gpu

if TYPE_CHECKING:
    from kernelcast.collect.choose import PlannedCall

_CONFIGS = "moe-config"  # not calls of a family but every Triton config of some: a file of its own kind
_CHOICE = 8  # candidates for each call that is chosen
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

Only = Annotated[
    list[str] | None, typer.Option("--family", help="only this family; may be repeated; moe-config: Triton configs")
]
Without = Annotated[list[str] | None, typer.Option("--without", help="leave this family out; may be repeated")]
Budget = Annotated[str | None, typer.Option("--budget", metavar="TIME", help="stop in time, as in 300s, 5m or 1h")]
Warm = Annotated[float, typer.Option("--warm", min=0.0, max=1.0, help="share of calls to time from a warm L2 too")]
Telling = Annotated[bool, typer.Option("--for-calibration", help="the calls that teach most, for kernelcast calibrate")]
Next = Annotated[
    Path | None,
    typer.Option("--next", metavar="FILE", help="with --for-calibration: what this calibration does not know yet"),
]
Again = Annotated[
    Path | None,
    typer.Option("--again", metavar="FILE.parquet", help="calls of this table a second time: how far times repeat"),
]
Here = Annotated[
    str | None, typer.Option("--gpu", metavar="ID", help="what this GPU is in the catalogue; default: by its name")
]
Out = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE.parquet", help="table of results; goes on where it was")
]
Host = Annotated[bool, typer.Option("--host", help="not kernels but this host, for trace --host FILE.toml")]
Specs = Annotated[bool, typer.Option("--specs", help="a minute of microbenchmarks of this GPU, for --gpu FILE.toml")]
Links = Annotated[bool, typer.Option("--link", help="collectives over this machine's GPUs, for --fabric FILE.toml")]
Power = Annotated[bool, typer.Option("--power", help="not times but joules: calls of all kinds, rests, and both mixed")]


def register(app: typer.Typer) -> None:
    choosing = "kernelcast collect --calls 100 --plan --gpu h200_sxm"
    app.command("collect", cls=with_examples(Command, choosing))(collect)


def collect(
    out: Out = None,
    calls: Annotated[int, typer.Option("--calls", min=1, help="calls to measure")] = 1700,
    family: Only = None,
    without: Without = None,
    budget: Budget = None,
    warm: Warm = 0.0,
    for_calibration: Telling = False,
    next_of: Next = None,
    again: Again = None,
    gpu: Here = None,
    seed: Annotated[int, typer.Option("--seed", help="the same seed gives the same calls")] = 0,
    plan_only: Annotated[bool, typer.Option("--plan", help="show the plan and stop; needs no GPU")] = False,
    host: Host = False,
    specs: Specs = False,
    link: Links = False,
    power: Power = False,
    as_json: Json = False,
) -> None:
    """Measure kernels on this machine's GPU into a table that fit and calibrate read. Needs PyTorch and CUDA."""
    seconds = parse_time(budget) if budget else None
    parts = [name for name, asked in zip(PARTS, (specs, link, host, power), strict=True) if asked]
    if parts:
        measure_machine(parts, out, gpu, seconds, seed, plan_only, as_json)
        return
    if family == [_CONFIGS]:
        _sweep_configs(out, gpu, seconds)
        return
    if out is not None and out.suffix != ".parquet":
        raise KernelcastError(f"--out {out}: the table is written as Parquet; end its name in .parquet")
    if again and (family or without or warm or for_calibration):
        raise KernelcastError("--again takes its calls from a table; leave out --family, --without, --warm and"
                              " --for-calibration")  # fmt: skip

    if next_of and not for_calibration:
        raise KernelcastError("--next is for --for-calibration: it chooses calls that a calibration learns most from")
    known = load_calibration(next_of) if next_of else None

    def planned_calls(target: Gpu) -> list[PlannedCall]:
        from kernelcast.collect.choose import choose, most_informative
        from kernelcast.collect.table import calls_again

        if again:
            return calls_again(again, calls, seed)
        chosen = partial(choose, target, only=family or (), without=without or (), seed=seed)
        if not for_calibration:
            return chosen(calls, warm_share=warm)
        planned, told = most_informative(chosen(_CHOICE * calls), target, calls, known)
        typer.echo(
            f"kernelcast: {target.id}: forecasts of such calls are expected to be off by {told.before:.1f}%, and by"
            f" {told.after:.1f}% once these {len(planned):,} are measured", err=True,
        )  # fmt: skip
        return planned

    if plan_only:
        _show(planned_calls(find_gpu(gpu or "h200_sxm")), as_json)
        return
    if out is None:
        raise KernelcastError("where should the results go? give -o FILE.parquet")
    _measure(planned_calls, out, gpu, seconds, seed, as_json)


def _measure(
    planned_calls: Callable[[Gpu], list[PlannedCall]],
    out: Path,
    gpu: str | None,
    seconds: float | None,
    seed: int,
    as_json: bool,
) -> None:
    needs_cuda()
    from kernelcast.collect.device import CudaDevice, facts, identified
    from kernelcast.collect.session import Progress, Session, read_lines
    from kernelcast.collect.table import read_records, write_table

    target = identified(gpu)
    planned = planned_calls(target)
    lines = out.with_suffix(".progress.jsonl")
    earlier = read_records(out)
    before = facts()
    with progress_bar() as start:
        told = start("measuring")

        def say(progress: Progress) -> None:
            told(progress.done, progress.total, f"({progress.failed} failed)" if progress.failed else "")

        done = Session(CudaDevice(target), lines, seconds, say=say, earlier=earlier).run(planned)
    after = {f"{name} after": value for name, value in facts().items() if before.get(name) != value}
    rows = write_table([*earlier, *read_lines(lines)], out, target, {**before, **after, "seed": seed})
    lines.unlink()
    left = done.total - done.done
    if as_json:
        result = {"file": str(out), "rows": rows, "failed": done.failed, "left": left}
        typer.echo(json.dumps({**result, "seconds": round(done.seconds, 1)}))
        return
    typer.echo(f"{rows:,} calls in {out} ({done.failed:,} could not run), {done.seconds:.0f} s")
    if left:
        typer.echo(f"{left:,} calls of the plan are left: run the same command again to go on")


def _sweep_configs(out: Path | None, gpu: str | None, seconds: float | None) -> None:
    """Swept Triton configs of MoE layers, for fitting and scoring ``tune``."""
    if out is None or out.suffix != ".npz":
        raise KernelcastError(f"--family {_CONFIGS} writes swept configs: give -o FILE.npz")
    needs_cuda()
    from kernelcast.collect.device import facts, identified

    sweep_configs = plugins.plugin(plugins.COLLECTORS, _CONFIGS)
    target = identified(gpu)
    about = {"gpu": target.id, "dtype": "bf16", **facts()}
    count = sweep_configs(target, out, about, seconds, lambda text: typer.echo(f"kernelcast: {text}", err=True))
    typer.echo(f"{count:,} shapes in {out}")


def parse_time(text: str) -> float:
    """Seconds of a text like 300, 300s, 5m or 1h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not found or float(found[1]) <= 0:
        raise KernelcastError(f"--budget {text!r} is no time; write it as 300s, 5m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def _show(planned: list[PlannedCall], as_json: bool) -> None:
    if as_json:
        for entry in planned:
            typer.echo(json.dumps({**entry.parameters, "warm": entry.warm}))
        return
    counts: dict[str, list[PlannedCall]] = {}
    for entry in planned:
        counts.setdefault(entry.family, []).append(entry)
    for name, members in counts.items():
        given = ", ".join(f"{key}={value}" for key, value in members[0].parameters.items())
        typer.echo(f"{name:20} {len(members):6,}  e.g. {given}")
    typer.echo(f"{'all':20} {len(planned):6,}")
