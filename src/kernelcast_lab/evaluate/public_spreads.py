"""Spreads of whole answers, from the development part of published results (`kernelcast evaluate public --fit`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from kernelcast.forecast.end_to_end import NVIDIA, EndToEnd, FittedSpread, Setting, backoff, end_to_end, widened, worse
from kernelcast_lab.evaluate.public import UNKNOWN, ScoredCase, SourceScores

_FEWEST = 10  # results of the development part that a spread is fitted on,
_FEWEST_OF_STACK = 24  # and that one of a single engine is
# Sources whose requests are known by their mean lengths alone: that such a run was measured makes others near, not seen
_UNKNOWN_RECIPES = ("served",)
_SIDE = 0.1  # of the results that may lie on each side of an 80% interval
_FEWEST_TO_SHRINK = 40  # of a single engine, that the kernels' intervals are narrowed on
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
        others = {setting: n - (setting == _measured_setting(case)) for setting, n in inventory.runs.items()}
        level = EndToEnd({setting: n for setting, n in others.items() if n}, ()).level(case.setting)
        for key in backoff(case.setting, quantity_of(case), level):
            if key[3] or case.setting.gpu_class in NVIDIA:
                groups.setdefault(key, []).append(case)
    spreads = [
        FittedSpread(*key, *_spread(members, bool(key[2])), len(members))  # type: ignore[arg-type,call-arg]
        for key, members in sorted(groups.items(), key=lambda item: str(item[0]))
        if len(members) >= (_FEWEST_OF_STACK if key[2] else _FEWEST)
    ]
    return EndToEnd(inventory.runs, tuple(spreads))


def _measured_setting(case: ScoredCase) -> Setting | None:
    unknown = case.source in _UNKNOWN_RECIPES
    return replace(case, release=UNKNOWN).measured_setting if unknown else case.measured_setting


def _spread(members: Sequence[ScoredCase], one_engine: bool) -> tuple[float, float, float, float]:
    """The narrowest interval with no more than a tenth of the results outside on either side: first a share of the
    kernels' own deviation, and what is added where all of it does not do."""
    columns = (np.array([getattr(m, name) for m in members]) for name in ("measured", "predicted", "low", "high"))
    measured, predicted, low, high = map(np.log, columns)
    # of n results, so that as many others are outside on average (split conformal prediction); of few, an outlier alone
    # does not decide
    level = min(1 - _SIDE / 2, (1 - _SIDE) * (1 + 1 / _independent(members)))
    fitted: list[float] = []
    for off, own in ((predicted - measured, predicted - low), (measured - predicted, high - predicted)):
        off, own = np.maximum(off, 0.0), np.maximum(own, 1e-6)
        least = _LEAST_SHARE if one_engine and len(members) >= _FEWEST_TO_SHRINK else 1.0
        # a result itself, not a point on the way to the next: of few, that is an outlier
        share = max(least, min(1.0, float(np.quantile(off / own, level, method="lower"))))
        added = float(np.quantile(np.sqrt(np.maximum(off**2 - (share * own) ** 2, 0.0)), level, method="lower"))
        fitted += [round(share, 3), round(added, 3)]
    return fitted[0], fitted[1], fitted[2], fitted[3]


def _independent(members: Sequence[ScoredCase]) -> float:
    """As many independent results as these are worth: those of one model on one GPU of a source share a machine and
    are off alike. Kish's design effect, n / (1 + (m - 1) rho) with m results of each and the intraclass correlation
    rho of their errors."""
    errors, n = np.log([each.predicted / each.measured for each in members]), len(members)
    each = [(case.source, case.gpu, case.model) for case in members]
    groups = [errors[[key == known for key in each]] for known in dict.fromkeys(each)]
    if len(groups) in (1, n):  # nothing tells how alike they are
        return n
    sizes = np.array([len(group) for group in groups])
    means = np.array([group.mean() for group in groups])
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / (n - len(groups))
    between = float((sizes * (means - errors.mean()) ** 2).sum()) / (len(groups) - 1)
    usual = (n - (sizes**2).sum() / n) / (len(groups) - 1)
    rho = np.clip((between - within) / max(between + (usual - 1) * within, 1e-12), 0.0, 1.0)
    return float(n / (1 + ((sizes**2).sum() / n - 1) * rho))


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
    _, low, high = widened(ends, evidence.spread(case.setting, quantity_of(case)))
    level = worse(case.kernels, evidence.level(case.setting))
    return replace(case, low=float(low), high=float(high), support=level)
