"""``kernelcast evaluate public``: forecasts against everything that others have published, and against live runs."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

import kernelcast
from kernelcast.app.cli.commands import Json
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.forecast.end_to_end import FILE, EndToEnd
from kernelcast_lab.cli.fit import needs_torch, say


def public(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="folder of measured tables; default: KERNELCAST_DATA")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="only this source, or group of sources; may be repeated")
    ] = None,
    sample: Annotated[int | None, typer.Option("--sample", min=1, help="rows of a source; default: 60")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="every row of the sources")] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="processes; default: one a core")] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="fit the spreads of whole answers on the development part, and write them to the"
                     " installed package with the errors of this run; with --source serving: those of servers"),
    ] = False,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="write the accuracy page of the installed package")
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Published results and live runs, each asked as a user would (docs/published.md), and how far forecasts are off.

    Half of each source is its development part; coverage of intervals is that of the other half.
    """
    from kernelcast_lab.evaluate import public as scoreboard
    from kernelcast_lab.evaluate.public_report import write_page
    from kernelcast_lab.evaluate.public_spreads import fit_spreads, kernels_alone, merged, with_spreads

    if report is not None and not fit:
        say(f"{write_page(EndToEnd.read(), report)}")
        return
    needs_torch()
    known = {**dict.fromkeys(scoreboard.NAMES), **scoreboard.GROUPS}
    refuse_unknown("source of published results", source or (), known)
    names = [name for text in source or () for name in scoreboard.GROUPS.get(text, (text,))]
    usual = scoreboard.FIT_SAMPLE if fit else scoreboard.SAMPLE
    count = None if whole else sample or usual
    if fit and source and tuple(source) != ("serving",):
        raise KernelcastError("spreads are fitted on all sources, or on those of servers: --fit --source serving")
    processes = workers or os.cpu_count() or 1
    if fit:
        with kernels_alone():
            first = scoreboard.all_sources(data, names, count, processes, say)
        evidence = fit_spreads(each for scores in first for each in scores.scored)
        scores = with_spreads(first, evidence)
        about = {"made": date.today().isoformat(), "command": "kernelcast evaluate public --fit",
                 "version": kernelcast.__version__}  # fmt: skip
        evidence = replace(evidence, errors=scoreboard.figures(scores), about=about)
        (merged(EndToEnd.read(), evidence, names) if names else evidence).write(FILE)
        if report is not None:
            say(f"{write_page(EndToEnd.read(), report)}")
    else:
        scores = scoreboard.all_sources(data, names, count, processes, say)
    from kernelcast_lab.cli.evaluate import print_figures

    columns = ("source", "of", "rows", "mean", "median", "bias", "coverage", "held_out")
    print_figures(scoreboard.figures(scores), json, {"sources": columns})
