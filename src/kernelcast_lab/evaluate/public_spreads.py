"""Spreads of whole answers, from the development part of published results (`kernelcast evaluate public --fit`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from kernelcast.forecast.end_to_end import EndToEnd, FittedSpread, backoff, end_to_end, widened, worse
from kernelcast_lab.evaluate.public import ScoredCase, SourceScores

_FEWEST = 10  # results of the development part that a spread is fitted on
_SIDE = 0.1  # of the results that may lie on each side of an 80% interval


@contextmanager
def kernels_alone() -> Iterator[None]:
    """Intervals as the kernels have them, without spreads of whole runs."""
    with patch.object(EndToEnd, "read", return_value=EndToEnd({}, ())):
        end_to_end.cache_clear()
        yield
    end_to_end.cache_clear()


def quantity_of(case: ScoredCase) -> str:
    name = case.quantity.lower().replace("e2e ", "e2el ")
    if "ttft" in name or name == "prefill":
        return "ttft"
    if "throughput" in name:
        return "throughput"
    return "tpot" if any(part in name for part in ("tpot", "itl", "step")) else "time"


def fit_spreads(scored: Iterable[ScoredCase]) -> EndToEnd:
    """What was measured end to end, and the spreads that make the intervals of the kernels hold 80% of the development
    part, by group of settings with enough results. The level of a result is that of the other results' evidence."""
    cases = [each for each in scored if each.setting is not None and each.development]
    runs = Counter(case.measured_setting for case in cases)
    inventory = EndToEnd({setting: count for setting, count in runs.items() if setting}, ())
    groups: dict[tuple[str | None, ...], list[ScoredCase]] = {}
    for case in cases:
        assert case.setting is not None
        others = {setting: n - (setting == case.measured_setting) for setting, n in inventory.runs.items()}
        level = EndToEnd({setting: n for setting, n in others.items() if n}, ()).level(case.setting)
        for key in backoff(case.setting, quantity_of(case), level):
            groups.setdefault(key, []).append(case)
    spreads = [
        FittedSpread(*key, *_spread(members), len(members))  # type: ignore[arg-type,call-arg]
        for key, members in sorted(groups.items(), key=lambda item: str(item[0]))
        if len(members) >= _FEWEST
    ]
    return EndToEnd(inventory.runs, tuple(spreads))


def _spread(members: Sequence[ScoredCase]) -> tuple[float, float]:
    """The least spread below and above with no more than a tenth of the results outside on that side."""
    columns = (np.array([getattr(m, name) for m in members]) for name in ("measured", "predicted", "low", "high"))
    measured, predicted, low, high = map(np.log, columns)
    sides = (predicted - measured, predicted - low), (measured - predicted, high - predicted)
    needed = (np.sqrt(np.maximum(np.maximum(off, 0.0) ** 2 - own**2, 0.0)) for off, own in sides)
    below, above = (round(float(np.quantile(each, 1 - _SIDE)), 3) for each in needed)
    return below, above


def with_spreads(scores: Iterable[SourceScores], evidence: EndToEnd) -> list[SourceScores]:
    """Scores of kernels alone, with the spreads of ``evidence``."""
    return [replace(each, scored=tuple(_with_spread(case, evidence) for case in each.scored)) for each in scores]


def _with_spread(case: ScoredCase, evidence: EndToEnd) -> ScoredCase:
    if case.setting is None:
        return case
    ends = np.array([case.predicted, case.low, case.high])
    _, low, high = widened(ends, evidence.spread(case.setting, quantity_of(case)))
    level = worse(case.kernels, evidence.level(case.setting))
    return replace(case, low=float(low), high=float(high), support=level)
