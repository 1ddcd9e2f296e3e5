"""``kernelcast data``: measured kernel times; import from public repositories, list, show, pack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.app.cli.commands import Command, CommandGroup, Json, with_examples
from kernelcast.app.report import json as as_json
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast_lab.cli.fit import Families, Folders, say, with_tables

if TYPE_CHECKING:
    from rich.table import Table

SOURCES = ("aiconfigurator", "neusight", "pipeweave", "vidur", "tables")
# A checkout in small, so that the examples run as they stand.
_MAKE = (
    "mkdir -p pipeweave/dataset",
    "printf 'M,N,K,avg_duration,hardware\\n4096,4096,4096,120.5,NVIDIA H100\\n' > pipeweave/dataset/gemm_fp8_test.csv",
    "kernelcast data import pipeweave pipeweave -o measured --replace",
)
_MOST_CAMPAIGNS = 20


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=with_examples(CommandGroup, *_MAKE), invoke_without_command=True)
    group.callback()(_data)
    group.command("import", cls=with_examples(Command, *_MAKE))(import_source)
    group.command("list", cls=with_examples(Command, *_MAKE, "kernelcast data list measured"))(list_folder)
    shown = "kernelcast data show measured/pipeweave/gemm_fp8.parquet"
    group.command("show", cls=with_examples(Command, *_MAKE, shown))(show_file)
    packed = "kernelcast data pack --data measured -o packed"
    group.command("pack", cls=with_examples(Command, *_MAKE, packed))(pack_rows)
    group.command("specs", cls=with_examples(Command, *_MAKE, "kernelcast data specs --data measured"))(show_specs)
    app.add_typer(group, name="data")


def _data(ctx: typer.Context) -> None:
    """Measured kernel times: import them from public repositories, list, show and pack them."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def import_source(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=f"One of {', '.join(SOURCES)}.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Your checkout of the source's repository.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the measurements.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace what an earlier import left there.")] = False,
    json: Json = False,
) -> None:
    """Turn a public repository's measurements into canonical Parquet files.

    Writes DIR/SOURCE/TABLE.parquet for each table of kernels and a summary.json: rows kept, and rows left out by
    rule. The source 'tables' is a folder of cleaned SOURCE/TABLE.parquet files.
    """
    from kernelcast_lab.data.importing import import_checkout, import_tables

    if output.exists() and not output.is_dir():
        raise KernelcastError(f"{output} is a file; -o takes a folder")
    importing = import_tables if source == "tables" else partial(import_checkout, source)
    summary = importing(path, output, replace=replace, progress=say)
    if json:
        print(as_json.to_json(summary))
        return
    _print_tables(summary["tables"])
    kept = sum(line["rows"] for line in summary["tables"])
    say(f"{kept:,} rows -> {output}")


def list_folder(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="Folder of SOURCE/TABLE.parquet files; default: KERNELCAST_DATA."),
    ] = None,
    json: Json = False,
) -> None:
    """List the tables of a folder: ops, GPUs, rows, and rows left out by rule."""
    from kernelcast_lab.data.importing import left_out_whole
    from kernelcast_lab.data.measurements import describe
    from kernelcast_lab.data.shared import root_path, tables

    root = root_path(folder)
    lines = [{"table": name, **describe(root / f"{name}.parquet")} for name in tables(root)]
    lines += [line for line in left_out_whole(root) if line["table"] not in {known["table"] for known in lines}]
    if not lines:
        raise KernelcastError(f"{root} has no SOURCE/TABLE.parquet files; `kernelcast data import` makes such")
    if json:
        print(as_json.to_json(lines))
    else:
        _print_tables(lines)


def show_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A Parquet file that `kernelcast data import` wrote.")],
    json: Json = False,
) -> None:
    """Show one file: rows by op, GPU and campaign, and what was left out and why."""
    from kernelcast_lab.data.measurements import describe
    from kernelcast_lab.data.rules import RULES

    if not file.is_file():
        raise KernelcastError(f"no file {file}")
    result = describe(file)
    if not result["canonical"]:
        raise KernelcastError(f"{file} has no canonical measurements; `kernelcast data import` makes such files")
    if json:
        print(as_json.to_json({**result, "reasons": {rule: RULES[rule] for rule in result["dropped"]}}))
        return
    from kernelcast.app.report.text import show

    parts: list[Any] = [f"{file}: {result['rows']:,} rows of {result['source']}\n"]
    for key, title in (("ops", "op"), ("gpus", "GPU"), ("campaigns", "campaign")):
        parts += [_counts(title, result[key]), ""]
    left_out = {f"{rule}: {RULES[rule]}": count for rule, count in result["dropped"].items()}
    show(*parts, *([_counts("left out", left_out)] if left_out else ["nothing was left out"]))


def pack_rows(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the pack.")],
    data: Folders = None,
    family: Families = [],  # noqa: B006  Typer copies it
    json: Json = False,
) -> None:
    """Pack the measured rows that fits need in as few bytes as possible.

    Writes DIR/measured/FAMILY.parquet. `kernelcast fit --data DIR` gives the weights that the tables give: take the
    pack to a machine that has a GPU.
    """
    from kernelcast_lab.fit.packing import pack
    from kernelcast_lab.fit.recipes import FAMILIES

    refuse_unknown("family", family, FAMILIES)
    if output.exists() and not output.is_dir():
        raise KernelcastError(f"{output} is a file; -o takes a folder")
    lines = pack(with_tables(data), output, family or FAMILIES, say)
    if json:
        print(as_json.to_json(lines))
    say(f"{sum(line['bytes'] for line in lines) / 1e6:.1f} MB -> {output}")


def show_specs(data: Folders = None, json: Json = False) -> None:
    """What the tables' matrix products say of GPUs, by the definitions of `kernelcast collect --specs`.

    Large products' share of the peak by format, the same of those that last (power), DRAM's share by products with
    few rows, and what the smallest take; beside them what the catalogue has.
    """
    from kernelcast_lab.data.specs import by_gpu, specs_in

    result = specs_in(with_tables(data))
    if json:
        print(as_json.to_json(by_gpu(result)))
        return
    from kernelcast.app.report.text import plain_table, show
    from kernelcast.hardware import gpu

    headings = ("large", "tensor", "long", "DRAM", "smallest µs")
    table = plain_table("GPU", "format", *headings, right=headings)
    for each in result:
        target, sixteen = gpu(each.gpu), each.smallest_s is not None
        known = target.sustained_tensor_fraction if sixteen else target.sustained_tensor_fractions.get(each.dtype)
        cells = [(each.tensor_fraction, known), (each.long_fraction, target.long_tensor_fraction if sixteen else None)]
        cells += [(each.dram_fraction, target.sustained_dram_fraction if sixteen else None)]
        cells += [(_micro(each.smallest_s), _micro(target.sustained_launch_s) if sixteen else None)]
        shown = (" / ".join("—" if value is None else f"{value:.3f}" for value in pair) for pair in cells)
        table.add_row(each.gpu, each.dtype, f"{each.large:,}", *(cell if cell != "— / —" else "" for cell in shown))
    show(table if table.row_count else "no GPU has enough large products in these tables")
    show("\nshares of the peak: in these tables / in the catalogue. What each means: docs/new-gpu.md")


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _counts(title: str, counts: Mapping[str, int]) -> Table:
    from kernelcast.app.report.text import plain_table

    table = plain_table(title, "rows", right=("rows",))
    for campaign, count in list(counts.items())[:_MOST_CAMPAIGNS]:
        table.add_row(campaign, f"{count:,}")
    rest = len(counts) - _MOST_CAMPAIGNS
    if rest > 0:
        table.add_row(f"and {rest} more (--json has all)", "")
    return table


def _print_tables(lines: Sequence[Mapping[str, Any]]) -> None:
    """A line a table, then what was left out by rule."""
    from kernelcast.app.report.text import plain_table, show
    from kernelcast_lab.data.measurements import total
    from kernelcast_lab.data.rules import RULES

    table = plain_table("table", "rows", "left out", "ops", "GPUs", right=("rows", "left out"))
    for line in lines:
        dropped = line.get("dropped", {})
        ops = _few(line.get("ops", ())) or ("not canonical" if line.get("canonical") is False else "none")
        table.add_row(line["table"], f"{line['rows']:,}", f"{sum(dropped.values()):,}", ops, _few(line.get("gpus", ())))
    reasons = plain_table("left out by", "rows", "why", right=("rows",))
    for rule, count in total(line.get("dropped", {}) for line in lines).items():
        reasons.add_row(rule, f"{count:,}", RULES[rule])
    show(table)
    if reasons.row_count:
        show("", reasons)


def _few(names: Iterable[str], most: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
