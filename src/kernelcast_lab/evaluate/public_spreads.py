"""Spreads of whole answers, from the development part of published results (`kernelcast evaluate public --fit`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from kernelcast.forecast.end_to_end import NVIDIA, EndToEnd, FittedSpread, Setting, backoff, end_to_end, widened, worse
from kernelcast.ops.work import Array
from kernelcast_lab.evaluate.public import UNKNOWN, ScoredCase, SourceScores

_FEWEST = 10  # results of the development part that a spread is fitted on,
_FEWEST_OF_STACK = 24  # and that one of a single engine is,
_FEWEST_GROUPS = 18  # of so many models on a GPU, whose level is 0.95 (see ``_spread``): fewer say little of the engine
# Sources whose requests are known by their mean lengths alone: that such a run was measured makes others near, not seen
_UNKNOWN_RECIPES = ("served",)
_SIDE = 0.1  # of the results that may lie on each side of an 80% interval
_FEWEST_TO_SHRINK = 40  # of a single engine, that the kernels' intervals are narrowed on
_LEAST_FOLLOWED = 0.5  # of a step's error, that a throughput must show to tell of it
_LEAST_SHARE = 0.3  # of the kernels' deviation: a few results do not say that it is nothing


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
    runs = Counter(map(_measured_setting, cases))
    inventory = EndToEnd({setting: count for setting, count in runs.items() if setting}, ())
    groups: dict[tuple[str | None, ...], list[ScoredCase]] = {}
    for case in cases:
        assert case.setting is not None
        if case.follows < _LEAST_FOLLOWED:
            continue
        others = {setting: n - (setting == _measured_setting(case)) for setting, n in inventory.runs.items()}
        level = EndToEnd({setting: n for setting, n in others.items() if n}, ()).level(case.setting)
        for key in backoff(case.setting, quantity_of(case), level):
            if key[3] or case.setting.gpu_class in NVIDIA:
                groups.setdefault(key, []).append(case)
    spreads = [
        FittedSpread(*key, *_spread(members, bool(key[2])), len(members))  # type: ignore[arg-type,call-arg]
        for key, members in sorted(groups.items(), key=lambda item: str(item[0]))
        if len(members) >= _FEWEST
        and not (key[2] and (len(members) < _FEWEST_OF_STACK or len(set(map(_group, members))) < _FEWEST_GROUPS))
    ]
    return EndToEnd(inventory.runs, tuple(spreads))


def _measured_setting(case: ScoredCase) -> Setting | None:
    unknown = case.source in _UNKNOWN_RECIPES
    return replace(case, release=UNKNOWN).measured_setting if unknown else case.measured_setting


def _group(case: ScoredCase) -> tuple[str, ...]:
    """What is off alike: an engine with a model on a GPU, of one source."""
    return case.source, case.gpu, case.model, case.stack.partition("==")[0]


def _spread(members: Sequence[ScoredCase], one_engine: bool) -> tuple[float, float, float, float]:
    """The narrowest interval with no more than a tenth of the results outside on either side: first a share of the
    kernels' own deviation, and what is added where all of it does not do.

    What it promises is of a machine that nobody measured, and results of one machine are off alike: an engine with
    a model on a GPU counts once, however many results there are of it, and one such group more is taken to be outside
    (conformal prediction of hierarchical data: Lee, Barber & Willett, arXiv 2306.06342)."""
    columns = (np.array([getattr(m, name) for m in members]) for name in ("measured", "predicted", "low", "high"))
    measured, predicted, low, high = map(np.log, columns)
    sizes = Counter(map(_group, members))
    weights = np.array([1 / sizes[_group(each)] for each in members])
    count = len(sizes) if len(sizes) > 1 else len(members)  # nothing tells how alike results of a single group are
    level = min(1 - _SIDE / 2, (1 - _SIDE) * (1 + 1 / count))  # of few, an outlier alone does not decide
    fitted: list[float] = []
    for off, own in ((predicted - measured, predicted - low), (measured - predicted, high - predicted)):
        off, own = np.maximum(off, 0.0), np.maximum(own, 1e-6)
        least = _LEAST_SHARE if one_engine and len(members) >= _FEWEST_TO_SHRINK else 1.0
        share = max(least, min(1.0, _quantile(off / own, weights, level)))
        added = _quantile(np.sqrt(np.maximum(off**2 - (share * own) ** 2, 0.0)), weights, level)
        fitted += [round(share, 3), round(added, 3)]
    return fitted[0], fitted[1], fitted[2], fitted[3]


def _quantile(values: Array, weights: Array, level: float) -> float:
    """The least value that no less than this share of the weights does not exceed: a result itself, not a point on the
    way to the next, which of few is an outlier."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, level - 1e-9)])


def merged(known: EndToEnd, fitted: EndToEnd, sources: Sequence[str]) -> EndToEnd:
    """``known`` with the runs and spreads of the workloads that ``fitted`` has, and its errors of ``sources``."""
    workloads = {each.workload for each in fitted.spreads} | {run.workload for run in fitted.runs}
    runs = {run: count for run, count in known.runs.items() if run.workload not in workloads}
    kept = [each for each in known.spreads if each.workload not in workloads]
    errors = {
        name: [*(line for line in known.errors.get(name, ()) if line["source"] not in sources), *lines]
        for name, lines in fitted.errors.items()
    }
    return EndToEnd({**runs, **fitted.runs}, (*kept, *fitted.spreads), errors, fitted.about)


def with_spreads(scores: Iterable[SourceScores], evidence: EndToEnd) -> list[SourceScores]:
    """Scores of kernels alone, with the spreads of ``evidence``."""
    return [replace(each, scored=tuple(_with_spread(case, evidence) for case in each.scored)) for each in scores]


def _with_spread(case: ScoredCase, evidence: EndToEnd) -> ScoredCase:
    if case.setting is None:
        return case
    ends = np.array([case.predicted, case.low, case.high])
    _, low, high = widened(ends, evidence.spread(case.setting, quantity_of(case)), case.follows)
    level = worse(case.kernels, evidence.level(case.setting))
    return replace(case, low=float(low), high=float(high), support=level)
