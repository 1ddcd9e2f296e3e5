"""collect: measure kernels on this machine's GPU, or the machine that they run on."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kernelcast import plugins
from kernelcast.app.cli.commands import add_command, progress_bar
from kernelcast.app.questions.measure import CollectQuestion
from kernelcast.app.questions.shared import Json
from kernelcast.app.report.json import print_json
from kernelcast.errors import KernelcastError
from kernelcast.forecast import load_calibration
from kernelcast.hardware import Gpu, fabric_type
from kernelcast.hardware import gpu as find_gpu

if TYPE_CHECKING:
    from kernelcast.collect.choose import PlannedCall

PARTS = {"specs": "GPU", "link": "fabric", "host": "host", "power": ""}  # of a machine, and what their files hold
_CONFIGS = "moe-config"  # not calls of a family but every Triton config of some: a file of another format
_CANDIDATES = 8  # for each call that is chosen
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def register(app: typer.Typer) -> None:
    add_command(app, collect, "kernelcast collect --calls 100 --plan --gpu h200_sxm")


def collect(question: CollectQuestion, json: Json = False) -> None:
    """Measure kernels on this machine's GPU into a table that fit and calibrate read. Needs PyTorch and CUDA."""
    seconds = parse_time(question.budget) if question.budget else None
    if parts := question.given(*PARTS):
        if len(parts) > 1:
            raise KernelcastError(f"{' and '.join(parts)} measure different things: give one of them")
        _measure_machine(question, seconds, json)
        return
    if question.engine is not None:
        from kernelcast.app.cli.collect_engine import collect_engine

        collect_engine(question, seconds, json)
        return
    if question.model or question.engine_args:
        raise KernelcastError("`model` and `engine_args` are of a serving engine: give `engine`, as in vllm")
    out = question.out
    if question.family == [_CONFIGS]:
        _sweep_configs(out, question.gpu, seconds)
        return
    if out is not None and out.suffix != ".parquet":
        raise KernelcastError(f"`out` {out}: the table is written as Parquet; end its name in .parquet")
    if question.again:
        question.refuse(("family", "without", "warm", "for_calibration"), "`again` takes its calls from a table")
    if question.next and not question.for_calibration:
        raise KernelcastError("`next` is for `for_calibration`: it chooses calls that a calibration learns most from")
    if question.plan:
        _show(_planned_calls(question, find_gpu(question.gpu or "h200_sxm")), json)
        return
    if out is None:
        raise KernelcastError("where should the results go? give -o FILE.parquet")
    _measure(partial(_planned_calls, question), out, question.gpu, seconds, question.seed, json)


def _planned_calls(question: CollectQuestion, target: Gpu) -> list[PlannedCall]:
    """The calls to measure."""
    from kernelcast.collect.choose import choose, most_informative
    from kernelcast.collect.table import calls_again

    if question.again:
        return calls_again(question.again, question.calls, question.seed)
    chosen = partial(choose, target, only=question.family or (), without=question.without or (), seed=question.seed)
    if not question.for_calibration:
        return chosen(question.calls, warm_share=question.warm)
    known = load_calibration(question.next) if question.next else None
    planned, errors = most_informative(chosen(_CANDIDATES * question.calls), target, question.calls, known)
    typer.echo(
        f"kernelcast: {target.id}: forecasts of such calls are expected to be off by {errors.before:.1f}%, and by"
        f" {errors.after:.1f}% once these {len(planned):,} are measured", err=True,
    )  # fmt: skip
    return planned


def _measure(
    planned_calls: Callable[[Gpu], list[PlannedCall]],
    out: Path,
    gpu: str | None,
    seconds: float | None,
    seed: int,
    json: bool,
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
        report = start("measuring")

        def say(progress: Progress) -> None:
            report(progress.done, progress.total, f"({progress.failed} failed)" if progress.failed else "")

        done = Session(CudaDevice(target), lines, seconds, say=say, earlier=earlier).run(planned)
    after = {f"{name} after": value for name, value in facts().items() if before.get(name) != value}
    rows = write_table([*earlier, *read_lines(lines)], out, target, {**before, **after, "seed": seed})
    lines.unlink()
    left = done.total - done.done
    if json:
        result = {"file": str(out), "rows": rows, "failed": done.failed, "left": left}
        print_json({**result, "seconds": round(done.seconds, 1)})
        return
    typer.echo(f"{rows:,} calls in {out} ({done.failed:,} could not run), {done.seconds:.0f} s")
    if left:
        typer.echo(f"{left:,} calls of the plan are left: run the same command again to continue")


def _measure_machine(question: CollectQuestion, seconds: float | None, json: bool) -> None:
    """Not kernels but the machine that they run on."""
    out, gpu = question.out, question.gpu
    if question.power:
        measure_power = plugins.plugin(plugins.COLLECTORS, "power")
        measure_power(out, gpu, seconds, question.seed, question.plan, json)
        return
    part = next(name for name in PARTS if getattr(question, name))
    if out is None or out.suffix != ".toml":
        raise KernelcastError(f"a {PARTS[part]} is written as TOML: give -o FILE.toml{f', not {out}' if out else ''}")
    needs_cuda()
    {"specs": _measure_specs, "link": _measure_link, "host": _measure_host}[part](out, gpu, json)


def _measure_specs(out: Path, gpu: str | None, json: bool) -> None:
    from kernelcast.app.report.json import to_json
    from kernelcast.app.report.lists import gpu_fields
    from kernelcast.collect.specs import measure, properties
    from kernelcast.collect.specs_draft import start_draft, write
    from kernelcast.collect.specs_file import complete_draft

    device = properties()
    begin = start_draft(device, out, gpu)  # a name or a GPU that will not do is refused before the minute
    with progress_bar() as start:
        made = complete_draft(begin, device, measure(begin.gpu, start("specs")))
    spec = write(made)
    if json:
        typer.echo(to_json({"file": str(out), "notes": made.notes, "gpu": gpu_fields(spec)}))
        return
    typer.echo(f"{out}: {len(made.numbers)} numbers of {device.name}; kernelcast gpu {out} shows them")
    for note in made.notes:
        typer.echo(f"  {note}")


def _measure_link(out: Path, gpu: str | None, json: bool) -> None:
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
    link = fitted(timed, like, f"{count} {known['device']}, PyTorch {known['torch']}, CUDA {known['cuda']}")
    write_link(link, out)
    if json:
        print_json({"file": str(out), **vars(link)})
        return
    typer.echo(f"{out}: {link.bytes_per_s / 1e9:.0f} GB/s, {link.latency_s * 1e6:.2f} µs a message, over {count} GPUs")


def _measure_host(out: Path, gpu: str | None, json: bool) -> None:
    from kernelcast.collect.device import identified
    from kernelcast.collect.host import measured_host, write_host
    from kernelcast.schedule.timeline import COSTS

    with progress_bar() as start:
        report = start("small models")
        host = measured_host(identified(gpu), lambda done, total: report(done, total, ""))
    write_host(host, out)
    if json:
        print_json({"file": str(out), **{name: getattr(host, name) for name in COSTS}})
        return
    typer.echo(f"{out}: {host.launch_s * 1e6:.1f} µs a kernel, {host.view_s * 1e6:.1f} a view, "
               f"{host.python_s * 1e6:.1f} a call of Python; {dict(host.sources)['programs']}")  # fmt: skip


def needs_cuda() -> None:
    try:
        import torch
    except ImportError:
        raise KernelcastError("collect needs PyTorch: pip install 'kernelcast[torch]'") from None
    if not torch.cuda.is_available():
        raise KernelcastError("collect needs a CUDA GPU, and PyTorch sees none here; `plan` shows what it would run")


def _sweep_configs(out: Path | None, gpu: str | None, seconds: float | None) -> None:
    """Swept Triton configs of MoE layers, for fitting and scoring ``tune``."""
    if out is None or out.suffix != ".npz":
        raise KernelcastError(f"`family` {_CONFIGS} writes swept configs: give -o FILE.npz")
    needs_cuda()
    from kernelcast.collect.device import facts, identified

    sweep_configs = plugins.plugin(plugins.COLLECTORS, _CONFIGS)
    target = identified(gpu)
    about = {"gpu": target.id, "dtype": "bf16", **facts()}
    count = sweep_configs(target, out, about, seconds, lambda text: typer.echo(f"kernelcast: {text}", err=True))
    typer.echo(f"{count:,} shapes in {out}")


def parse_time(text: str) -> float:
    """Seconds of a text like 300, 300s, 5m or 1h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not match or float(match[1]) <= 0:
        raise KernelcastError(f"`budget` {text!r} is no time; write it as 300s, 5m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def _show(planned: list[PlannedCall], json: bool) -> None:
    if json:
        for entry in planned:
            print_json({**entry.parameters, "warm": entry.warm})
        return
    counts: dict[str, list[PlannedCall]] = {}
    for entry in planned:
        counts.setdefault(entry.family, []).append(entry)
    for name, members in counts.items():
        given = ", ".join(f"{key}={value}" for key, value in members[0].parameters.items())
        typer.echo(f"{name:20} {len(members):6,}  e.g. {given}")
    typer.echo(f"{'all':20} {len(planned):6,}")
