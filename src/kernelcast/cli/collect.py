"""collect: measure kernels on this machine's GPU."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.cli.commands import Command, with_examples
from kernelcast.cli.options import Json
from kernelcast.cli.progress import progress_bar
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu, kind_of
from kernelcast.hardware import gpu as find_gpu

if TYPE_CHECKING:
    from kernelcast.measure.choose import Wanted

_CONFIGS = "moe-config"  # not calls of a family but every Triton config of some: a file of its own kind
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

Only = Annotated[
    list[str] | None, typer.Option("--family", help="only this family; may be repeated; moe-config: Triton configs")
]
Without = Annotated[list[str] | None, typer.Option("--without", help="leave this family out; may be repeated")]
Budget = Annotated[str | None, typer.Option("--budget", metavar="TIME", help="stop in time, as in 300s, 5m or 1h")]
Warm = Annotated[float, typer.Option("--warm", min=0.0, max=1.0, help="share of calls to time from a warm L2 too")]
Telling = Annotated[bool, typer.Option("--for-calibration", help="the calls that teach most, for kernelcast calibrate")]
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
    again: Again = None,
    gpu: Here = None,
    seed: Annotated[int, typer.Option("--seed", help="the same seed gives the same calls")] = 0,
    plan_only: Annotated[bool, typer.Option("--plan", help="show the plan and stop; needs no GPU")] = False,
    host: Annotated[bool, typer.Option("--host", help="not kernels but this host, for trace --host FILE.toml")] = False,
    specs: Annotated[
        bool, typer.Option("--specs", help="a minute of microbenchmarks of this GPU, for --gpu FILE.toml")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="collectives over the GPUs of this machine, for --fabric FILE.toml")
    ] = False,
    power: Annotated[
        bool, typer.Option("--power", help="not times but joules: calls of all kinds, rests, and both mixed")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure kernels on this machine's GPU into a table that fit and calibrate read. Needs PyTorch and CUDA."""
    seconds = parse_time(budget) if budget else None
    if sum((host, specs, link, power)) > 1:
        raise KernelcastError("--specs, --link, --host and --power measure different things: give one of them")
    if specs:
        _measure_specs(out, as_json)
        return
    if link:
        _measure_link(out, gpu, as_json)
        return
    if host:
        _measure_host(out, gpu, as_json)
        return
    if power:
        _measure_power(out, gpu, seconds, seed, plan_only, as_json)
        return
    if family == [_CONFIGS]:
        _sweep_configs(out, gpu, seconds)
        return
    if out is not None and out.suffix != ".parquet":
        raise KernelcastError(f"--out {out}: the table is written as Parquet; end its name in .parquet")
    if again and (family or without or warm or for_calibration):
        raise KernelcastError("--again takes its calls from a table; leave out --family, --without, --warm and"
                              " --for-calibration")  # fmt: skip

    def wanted_of(target: Gpu) -> list[Wanted]:
        from kernelcast.measure.choose import choose, most_telling
        from kernelcast.measure.table import calls_again

        if again:
            return calls_again(again, calls, seed)
        chosen = partial(choose, target, only=family or (), without=without or (), seed=seed)
        return most_telling(chosen(8 * calls), target, calls) if for_calibration else chosen(calls, warm_share=warm)

    if plan_only:
        _show(wanted_of(find_gpu(gpu or "h200_sxm")), as_json)
        return
    if out is None:
        raise KernelcastError("where should the results go? give -o FILE.parquet")
    _measure(wanted_of, out, gpu, seconds, seed, as_json)


def _measure_host(out: Path | None, gpu: str | None, as_json: bool) -> None:
    if out is None or out.suffix != ".toml":
        raise KernelcastError(f"a host is written as TOML: give -o FILE.toml{f', not {out}' if out else ''}")
    _needs_cuda()
    from kernelcast.measure.device import identified
    from kernelcast.measure.host import measured_host, write_host
    from kernelcast.timeline.host import COSTS

    with progress_bar() as start:
        told = start("small models")
        found = measured_host(identified(gpu), lambda done, total: told(done, total, ""))
    write_host(found, out)
    if as_json:
        typer.echo(json.dumps({"file": str(out), **{name: getattr(found, name) for name in COSTS}}))
        return
    typer.echo(f"{out}: {found.launch_s * 1e6:.1f} µs a kernel, {found.view_s * 1e6:.1f} a view, "
               f"{found.python_s * 1e6:.1f} a call of Python; {dict(found.sources)['programs']}")  # fmt: skip


def _measure_specs(out: Path | None, as_json: bool) -> None:
    if out is None:
        raise KernelcastError("a GPU is written as TOML: give -o FILE.toml")
    _needs_cuda()
    from kernelcast.measure.specs import measure, properties
    from kernelcast.measure.specs_draft import begun, write
    from kernelcast.measure.specs_file import finished
    from kernelcast.report.json import gpu_fields, to_json

    told = properties()
    begin = begun(told, out)  # a name or a GPU that will not do is refused before the minute
    with progress_bar() as start:
        made = finished(begin, told, measure(begin.gpu, start("specs")))
    chip = write(made)
    if as_json:
        typer.echo(to_json({"file": str(out), "notes": made.notes, "gpu": gpu_fields(chip)}))
        return
    typer.echo(f"{out}: {len(made.numbers)} numbers of {told.name}; kernelcast gpu {out} shows them")
    for note in made.notes:
        typer.echo(f"  {note}")


def _measure_link(out: Path | None, gpu: str | None, as_json: bool) -> None:
    if out is None or out.suffix != ".toml":
        raise KernelcastError(f"a fabric is written as TOML: give -o FILE.toml{f', not {out}' if out else ''}")
    _needs_cuda()
    import torch

    from kernelcast.measure.link import fitted, measure, write_link

    count = torch.cuda.device_count()
    if count < 2:
        raise KernelcastError(f"a link is measured between two or more GPUs, and this machine has {count}")
    from kernelcast.measure.device import facts, identified

    like = kind_of(identified(gpu).link_kind)
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


def _measure_power(
    out: Path | None, gpu: str | None, seconds: float | None, seed: int, plan_only: bool, as_json: bool
) -> None:
    from kernelcast.measure.power_plan import plan

    if plan_only:
        counts = Counter(job.family for job in plan(find_gpu(gpu or "h200_sxm"), seed))
        typer.echo(json.dumps(counts) if as_json else "\n".join(f"{name:20} {n:6,}" for name, n in counts.items()))
        return
    if out is None or out.suffix != ".parquet":
        raise KernelcastError("where should the results go? give -o FILE.parquet")
    _needs_cuda()
    from kernelcast.measure.device import facts, identified
    from kernelcast.measure.power import PowerDevice, read_lines, run
    from kernelcast.measure.power_table import write_power

    target = identified(gpu)
    lines = out.with_suffix(".progress.jsonl")  # kept: it has the counter's readings too
    with progress_bar() as start:
        failed, left = run(plan(target, seed), PowerDevice(target), lines, seconds, start("power"))
    rows = write_power(read_lines(lines), out, target, {**facts(), "seed": seed})
    told = {"file": str(out), "rows": rows, "failed": failed, "left": left}
    typer.echo(json.dumps(told) if as_json else f"{rows:,} points in {out} ({failed} could not run, {left} left)")


def _measure(
    wanted_of: Callable[[Gpu], list[Wanted]],
    out: Path,
    gpu: str | None,
    seconds: float | None,
    seed: int,
    as_json: bool,
) -> None:
    _needs_cuda()
    from kernelcast.measure.device import CudaDevice, facts, identified
    from kernelcast.measure.session import Progress, Session, read_lines
    from kernelcast.measure.table import read_records, write_table

    target = identified(gpu)
    wanted = wanted_of(target)
    lines = out.with_suffix(".progress.jsonl")
    earlier = read_records(out)
    before = facts()
    with progress_bar() as start:
        told = start("measuring")

        def say(progress: Progress) -> None:
            told(progress.done, progress.total, f"({progress.failed} failed)" if progress.failed else "")

        done = Session(CudaDevice(target), lines, seconds, say=say, earlier=earlier).run(wanted)
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
    _needs_cuda()
    from kernelcast.measure.device import facts, identified
    from kernelcast.measure.moe_sweep import collect as sweep_configs

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


def _needs_cuda() -> None:
    try:
        import torch
    except ImportError:
        raise KernelcastError("collect needs PyTorch: pip install 'kernelcast[torch]'") from None
    if not torch.cuda.is_available():
        raise KernelcastError("collect needs a CUDA GPU, and PyTorch sees none here; --plan shows what it would run")


def _show(wanted: list[Wanted], as_json: bool) -> None:
    if as_json:
        for entry in wanted:
            typer.echo(json.dumps({**entry.parameters, "warm": entry.warm}))
        return
    counts: dict[str, list[Wanted]] = {}
    for entry in wanted:
        counts.setdefault(entry.family, []).append(entry)
    for name, members in counts.items():
        given = ", ".join(f"{key}={value}" for key, value in members[0].parameters.items())
        typer.echo(f"{name:20} {len(members):6,}  e.g. {given}")
    typer.echo(f"{'all':20} {len(wanted):6,}")
