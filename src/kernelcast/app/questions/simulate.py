"""What users of a served model feel under load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kernelcast.app.questions.load import LoadChoice, chosen_load
from kernelcast.app.questions.service import ServiceChoice, chosen_service
from kernelcast.app.questions.shared import ModelName, chosen_model
from kernelcast.app.questions.words import flag
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.serving.metrics import LatencyGoals
    from kernelcast.serving.simulate import Simulation

Told = Callable[[str, int, int], None]  # which run, how many requests of it are done, and of how many
_GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class SimulateQuestion(LoadChoice, ServiceChoice):
    """A service and a load; None: not given."""

    command: ClassVar[str] = "simulate"

    model: ModelName
    goodput: Annotated[
        Sequence[str] | None,
        flag("--goodput", metavar="NAME:MS", help="a goal: ttft, tpot or e2el in ms; may be repeated",
             typed=list[str] | None),
    ] = None  # fmt: skip
    intervals: Annotated[bool, flag("--intervals/--no-intervals", help="run both ends of the doubt too")] = True

    def answer(self, told: Told | None = None) -> Simulation:
        """The load, answered. ``told`` hears which run is under way, how many of its requests are done, of how many."""
        from kernelcast.serving.simulate import simulate

        goals, model = parse_goals(self.goodput or ()), chosen_model(self.model)
        load = chosen_load(self, model.max_context)
        service = chosen_service(self, model, load)
        heard = None if told is None else lambda run, done: told(run, done, len(load))
        return simulate(service, load, self.conditions, goals=goals, seed=self.seed, intervals=self.intervals,
                        told=heard)  # fmt: skip


def parse_goals(pairs: Sequence[str]) -> LatencyGoals:
    """``ttft:500`` and the like, milliseconds as vLLM takes them."""
    from kernelcast.serving.metrics import LatencyGoals

    found = {}
    for pair in (word for text in pairs for word in text.split()):
        name, colon, text = pair.partition(":")
        try:
            value = float(text.removesuffix("ms"))
        except ValueError:
            colon = ""
        if not colon or name not in _GOALS or not value > 0:
            raise KernelcastError(f"--goodput takes NAME:MS of {', '.join(_GOALS)}, as in ttft:500, not {pair!r}")
        found[f"{name}_s"] = value / 1e3
    return LatencyGoals(**found)
