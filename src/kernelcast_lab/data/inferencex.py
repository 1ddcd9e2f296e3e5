"""Which public serving points decode speculatively (multi-token prediction), which their table does not say.

AIConfigurator's e2e_silicon repeats runs of InferenceX (github SemiAnalysisAI/InferenceX). There a recipe and its twin
with ``-mtp`` run side by side; the exports of the runs drop which was which. What is public of it:

- ``perf-changelog.yaml``: which recipes ran with which image, by pull request, which a run's image and day identify.
- The dump of 2026-04-27 has only runs without speculation (images that only ``-mtp`` recipes used are not in it).
- Benchmark scripts of the ``-mtp`` recipes: TensorRT-LLM drafts 3 tokens, with attention DP 1; SGLang 3 for Qwen3.5
  (num-steps 3) and 2 for DeepSeek-R1 (num-steps 2).

Where a run has both, a point that the dump has too is without; of two different points of a setting the one with the
shorter TPOT speculates; the others are ``UNKNOWN``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNKNOWN = -1  # with speculative decoding or without
_DUMP = "db-dump/2026-04-27"
_PULLS = "https://github.com/SemiAnalysisAI/InferenceX/pull/"


@dataclass(frozen=True)
class Run:
    """A sweep with speculative decoding, by the image's version or the day. ``both``: some points are without."""

    model: str
    stack: str
    gpus: tuple[str, ...]
    draft_tokens: int
    draft_tokens_dp: int  # with attention DP
    source: str
    version: str | None = None
    day: str | None = None
    both: bool = False
    mode: str = "agg"


RUNS = (
    Run("DeepSeek-R1", "trtllm", ("b200_sxm",), 3, 1, f"{_PULLS}632 and 642", version="1.2.0rc6.post3"),
    Run("DeepSeek-R1", "trtllm", ("b200_sxm", "h200_sxm"), 3, 1, f"{_PULLS}392", "1.1.0rc2.post2", "2026-01-14"),
    Run("DeepSeek-R1", "sglang", ("b200_sxm",), 2, 2, f"{_PULLS}943", "0.5.9", "2026-03-25", both=True),
    Run("Qwen3.5-397B-A17B", "sglang", ("b200_sxm",), 3, 3, f"{_PULLS}898", "0.5.9", "2026-03-20"),
    # Multi-node recipes of dynamo. TensorRT-LLM's sweeps have both throughout, SGLang's on GB200 none with speculation.
    Run("DeepSeek-R1", "trtllm", ("b200_sxm", "gb200", "h100_sxm", "h200_sxm"), 3, 1, f"{_PULLS}510, 570, 588, 616, "
        "617 and 651", both=True, mode="disagg"),
    Run("DeepSeek-R1", "sglang", ("b200_sxm",), 2, 2, f"{_PULLS}667 to 697", day="2026-02-13", mode="disagg"),
    *(Run("DeepSeek-R1", "sglang", gpus, 2, 2, f"{_PULLS}{pulls}", day=day, both=True, mode="disagg")
      for gpus, pulls, day in ((("b200_sxm",), "672 and 683", "2026-02-11"), (("b200_sxm",), "907", "2026-03-18"),
                               (("h100_sxm", "h200_sxm"), "640, 643 and 644", None))),
)  # fmt: skip


def draft_tokens_of(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of each row of e2e_silicon: the draft tokens of a step, 0: none, or ``UNKNOWN``."""
    plain = {_measured(row) for row in rows if _source(row).startswith(_DUMP)}
    known = {_measured(row): run for row in rows if (run := _run_of(row))}  # another export may leave the day out
    results = []
    for row in rows:
        run = _run_of(row) or known.get(_measured(row))
        if run is None or _measured(row) in plain:
            results.append(0)
        elif run.both:
            results.append(UNKNOWN)
        else:
            results.append(_draft_tokens(run, row))
    return _by_twins(rows, results)


def _by_twins(rows: Sequence[Mapping[str, Any]], result: list[int]) -> list[int]:
    """Of two different points of a setting that are unknown, the faster speculates, the other does not."""
    settings: dict[tuple[Any, ...], list[int]] = {}
    for at, row in enumerate(rows):
        settings.setdefault(_setting(row), []).append(at)
    values = list(result)
    for members in settings.values():
        times = sorted({round(rows[at]["silicon_tpot_ms"] or 0.0, 1) for at in members})
        if len(times) != 2:
            continue
        for at in members:
            if result[at] == UNKNOWN and (run := _run_of(rows[at])):
                fast = round(rows[at]["silicon_tpot_ms"], 1) == times[0]
                values[at] = _draft_tokens(run, rows[at]) if fast else 0
    return values


def _draft_tokens(run: Run, row: Mapping[str, Any]) -> int:
    dp = row["attention_dp_size"] if run.mode == "agg" else row["decode_attention_dp_size"]
    return run.draft_tokens_dp if (dp or 1) > 1 else run.draft_tokens


def _run_of(row: Mapping[str, Any]) -> Run | None:
    """The sweep with speculative decoding that a row is of."""
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", _source(row))
    for run in RUNS:
        same = run.model in row["model_path"] and run.stack == row["backend"] and row["system"] in run.gpus
        same &= run.mode == row["mode"] and run.version in (None, row["backend_version"])
        if same and (run.day is None or (day is not None and day[1] == run.day)):
            return run
    return None


def _source(row: Mapping[str, Any]) -> str:
    return str(row["silicon_data_source"] or "")


def _measured(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two exports of one measurement share."""
    times = (row["silicon_ttft_ms"] or 0.0, row["silicon_tpot_ms"] or 0.0)
    return (row["system"], row["backend"], row["isl"], row["osl"], round(times[0]), round(times[1], 1))


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The load and the engine, and the day."""
    concurrency = re.search(r"silicon_concurrency=(\d+)", _source(row))
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", _source(row))
    sizes = tuple(row[name] for name in sorted(row) if name.endswith(("_size", "_num_workers")))
    return (row["system"], row["backend"], row["backend_version"], row["gemm_quant_mode"], row["isl"], row["osl"],
            concurrency and concurrency[1], day and day[1], *sizes)  # fmt: skip
