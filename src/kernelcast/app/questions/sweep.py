"""Many settings of models on GPUs, and queries of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from kernelcast.app.questions.parameters import Question, argument, option
from kernelcast.app.questions.shared import PredictorParameters, Price, PricesFile
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.search.sweep.query import Objective

_RANKED_BY = "tokens_per_s_per_gpu"


@dataclass(frozen=True)
class RankingParameters(Question):
    """Which rows of a sweep to show."""

    top: Annotated[int | None, option(metavar="N", help="the best rows by --by")] = None
    by: Annotated[
        str | None,
        option(metavar="COLUMN", help="of --top; add :min or :max where better is not plain (batch:max)"),
    ] = None
    pareto: Annotated[
        str | None, option(metavar="X,Y", help="the Pareto front of two columns, as tokens_per_s_per_gpu,tpot_s")
    ] = None

    def objectives(self) -> tuple[Objective | None, tuple[Objective, Objective] | None]:
        """What to rank by, and the axes of the Pareto front; columns that are not are refused before any work."""
        from kernelcast.search.sweep.query import Objective, read_pareto

        if self.by is not None and self.top is None:
            raise KernelcastError(f"`by` needs `top`, as in `top` 10, `by` {self.by}")
        if self.top is not None and self.top < 1:
            raise KernelcastError(f"`top` must be 1 or more, not {self.top}")
        ranked_by = Objective.read(self.by or _RANKED_BY) if self.top is not None else None
        return ranked_by, read_pareto(self.pareto) if self.pareto is not None else None


@dataclass(frozen=True, kw_only=True)
class SweepQuestion(RankingParameters, PredictorParameters):
    """Every setting that a file describes."""

    command: ClassVar[str] = "sweep"

    file: Annotated[Path, argument("FILE.toml", "models, GPUs, layouts, sizes, formats, stacks")]
    out: Annotated[Path | None, option("-o", metavar="DIR", help="of the rows; default: FILE.sweep")] = None
    engine: Annotated[str, option(metavar="processes|ray|one", help="what runs it: the rows are the same")] = (
        "processes"
    )
    workers: Annotated[int | None, option(help="processes; default: one a core")] = None
    address: Annotated[str | None, option(metavar="HOST:PORT", help="of a Ray cluster; default: a local one")] = None
    fresh: Annotated[bool, option(help="delete the rows of another sweep in the folder")] = False
    chunk_settings: Annotated[int | None, option(help="settings a file of rows; default: by their number")] = None
    prices: PricesFile = None
    price: Price = None


@dataclass(frozen=True, kw_only=True)
class QueryQuestion(RankingParameters):
    """SweepTable of a sweep: by SQL, or the best of them."""

    command: ClassVar[str] = "query"

    folder: Annotated[Path, argument("DIR", "rows of `kernelcast sweep`, finished or running")]
    sql: Annotated[str | None, argument("SQL", "one SELECT from the table sweep")] = None
    where: Annotated[str | None, option(metavar="SQL", help="only such rows, of --top and --pareto")] = None
    csv: Annotated[bool, option(help="print CSV")] = False
