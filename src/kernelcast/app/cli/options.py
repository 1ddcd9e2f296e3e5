"""Options that several commands share, as Typer takes them: words of questions, and how to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.app.cli.option_groups import option
from kernelcast.app.questions import shared

GpuName = Annotated[str | None, option(shared.GpuName)]
Changes = Annotated[list[str] | None, option(shared.Changes)]
Without = Annotated[list[str] | None, option(shared.Without)]
Cache = Annotated[str, option(shared.Cache)]
PredictorName = Annotated[str, option(shared.PredictorName)]
CalibrationFile = Annotated[Path | None, option(shared.CalibrationFile)]
WeightsFolder = Annotated[Path | None, option(shared.WeightsFolder)]
PowerCap = Annotated[float | None, option(shared.PowerCap)]
Tp = Annotated[int, option(shared.Tp)]
Pp = Annotated[int, option(shared.Pp)]
SequenceParallel = Annotated[bool, option(shared.SequenceParallel)]
TimelineFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE.json", help="timeline of one step, for Perfetto")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def parse_number(text: str) -> Any:
    """An int, a float, or the text itself when it is neither."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
