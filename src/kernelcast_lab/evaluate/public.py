"""Every published result as a test: errors, bias and coverage of forecasts that no fit has seen the answers of.

``kernelcast_lab.data.published`` says how a row becomes a question. Half of each source is the development part, which
the spreads of whole answers are fitted on (``fit_spreads``); coverage is reported of the other half.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.end_to_end import ERRORS_BY, Setting, WholeSupport
from kernelcast.forecast.predict_table import forecast_table
from kernelcast.forecast.table import as_columns
from kernelcast.results import LEVELS
from kernelcast_lab.data.published import SOURCES, PublishedCase, published_cases
from kernelcast_lab.data.shared import tables
from kernelcast_lab.evaluate.scores import ErrorSummary
from kernelcast_lab.evaluate.served import Compared

UNKNOWN = "unknown"  # release
SAMPLE, FIT_SAMPLE = 60, 400  # rows of a source by default: minutes on two cores


@dataclass(frozen=True)
class ScoredCase:
    """A measured quantity beside its forecast, in the unit that it was published in."""

    source: str
    id: str
    gpu: str
    model: str
    stack: str
    quantity: str
    measured: float
    predicted: float
    low: float
    high: float
    support: str  # of the whole answer
    kernels: str = ""  # of its kernels
    setting: Setting | None = None  # None: single kernels
    release: str = ""  # that was measured
    longest_part: str = ""  # what most of the forecast time is spent on
    follows: float = 1.0  # of a step's error, the share that shows in it

    @property
    def error(self) -> float:
        """In percent of what was measured."""
        return float((self.predicted / self.measured - 1) * 100)

    @property
    def inside(self) -> bool:
        return bool(self.low <= self.measured <= self.high)

    @property
    def development(self) -> bool:
        """Whether it is of the half that spreads are fitted on."""
        return digest(f"half {self.id}") % 2 == 0

    @property
    def measured_setting(self) -> Setting | None:
        """The setting that was measured: of the release that the source names."""
        return self.setting and replace(self.setting, release=self.release or UNKNOWN)

    def to_dict(self) -> dict[str, Any]:
        names = ("source", "id", "gpu", "model", "stack", "quantity", "error", "inside", "support", "longest_part")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SourceScores:
    """A source: what was asked of it, what was not and why, and what could not be answered."""

    source: str
    rows: int
    scored: tuple[ScoredCase, ...]
    missing: Mapping[str, int]  # rows that cannot be expressed, of all of them, by the feature that is missing
    refused: Mapping[str, int]  # questions of the sample that were answered with an error

    def lines(self, by: str | None = None) -> list[dict[str, Any]]:
        """Errors of each quantity, whole or by gpu, model, stack or support; coverage of what spreads were not fitted
        on."""
        groups: dict[tuple[str, str], list[ScoredCase]] = {}
        for each in self.scored:
            groups.setdefault((each.quantity, getattr(each, by) if by else ""), []).append(each)
        lines = []
        for (quantity, name), members in sorted(groups.items()):
            columns = (np.array([getattr(m, key) for m in members]) for key in ("measured", "predicted"))
            summary = asdict(ErrorSummary.of(*columns))
            held_out = [m.inside for m in members if not m.development and m.high > m.low]
            summary["coverage"] = float(np.mean(held_out)) if held_out else None
            lines.append({"source": self.source, "of": quantity, **({by: name} if by else {}), **summary,
                          "held_out": len(held_out)})  # fmt: skip
        return lines


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def sampled(cases: Sequence[Any], count: int | None) -> list[Any]:
    """The same cases every time, whatever else is in the table: those whose id hashes lowest."""
    order = sorted(cases, key=lambda case: digest(str(case.id)))
    return order if count is None else order[:count]


# ---- Answers, by the command that is asked


def kernels(cases: Sequence[PublishedCase]) -> list[ScoredCase]:
    """Kernel calls, all in one table. Tuned kernels are compared with the ceiling; its interval is the forecast's."""
    names = dict.fromkeys(name for case in cases for name in case.parameters)
    forecast = forecast_table(as_columns({n: [case.parameters.get(n) for case in cases] for n in names}), None)
    _, low_s, high_s = forecast.times_s
    scored = []
    for at, case in enumerate(cases):
        if at in forecast.errors.messages:
            continue
        # the best kernel lies between the fast end of the interval, or the ceiling, and the slow end
        ceiling_us, low_us, high_us = 1e6 * forecast.ceiling_s[at], 1e6 * low_s[at], 1e6 * high_s[at]
        ends = ceiling_us, min(low_us, ceiling_us), high_us
        scored.append(
            _scored(case, "ceiling_us", *ends, LEVELS[forecast.support[at]], None, str(case.parameters["op"]))
        )
    return scored


def _scored(case: PublishedCase, quantity: str, predicted: float, low: float, high: float,
            supports: WholeSupport | str, setting: Setting | None, longest_part: str = "") -> ScoredCase:  # fmt: skip
    levels = (supports, supports) if isinstance(supports, str) else (supports.level, supports.kernels)
    return ScoredCase(case.source, case.id, case.gpu, case.model, case.stack, quantity, case.measured[quantity],
                      predicted, low, high, *levels, setting, case.release, longest_part)  # fmt: skip


def infer(case: PublishedCase) -> list[ScoredCase]:
    from kernelcast.app.api import infer as ask

    result = ask(**case.parameters)
    total, longest = result.total, max(result.shares, key=lambda share: share.time_s).part
    ends = total.value, total.low, total.high
    return [_scored(case, "total_s", *ends, result.supports, result.results.setting, longest)]


def simulate(case: PublishedCase) -> list[ScoredCase]:
    from kernelcast.app.api import simulate as ask

    result = ask(**case.parameters)
    assert result.supports is not None
    setting = result.service.setting(result.load)
    scored = [
        _scored(case, name, result.metrics[name], result.low[name], result.high[name], result.supports, setting)
        for name in case.measured
    ]
    return [replace(each, follows=result.follows if "throughput" in each.quantity else 1.0) for each in scored]


def train(case: PublishedCase) -> list[ScoredCase]:
    """A step's time, and the peak memory of its fullest rank, which has no interval."""
    from kernelcast.training.transformer_step import forecast

    step = forecast(case.parameters["job"])
    scored = [_step(case, step)]
    if "memory_bytes" in case.measured:
        peak = step.memory.peak_bytes
        scored.append(_scored(case, "memory_bytes", peak, peak, peak, step.supports, None))
    return scored


def timm_model(case: PublishedCase) -> list[ScoredCase]:
    from kernelcast.training.step import run_step

    given = dict(case.parameters)
    target = given.pop("gpu")
    return [_step(case, run_step(_traced(**given), target))]


@functools.lru_cache(maxsize=1)  # rows of one model follow one another on several GPUs
def _traced(
    model: str, img_size: int, batch: int, mode: str, channels_last: bool, compile: bool, fused_attention: bool,
    fast_norm: bool,
) -> Any:  # fmt: skip
    import torch

    from kernelcast.tracing import trace as record
    from kernelcast.tracing.fusion import fuse

    try:
        import timm
    except ImportError:
        raise KernelcastError("vision models need timm: pip install 'kernelcast-lab[published]'") from None
    layers: Any = timm.layers  # has no types
    layers.set_fused_attn(fused_attention)
    layers.set_fast_norm(fast_norm)
    try:
        with torch.device("meta"):
            config: Any = timm.get_pretrained_cfg(model)
            sized = {"img_size": img_size} if config and "img_size" in config.to_dict() else {}
            net: Any = timm.create_model(model, **sized)  # type: ignore[arg-type]
            images = torch.empty(batch, 3, img_size, img_size)
    except Exception as error:  # timm of today no longer has some of the models, or builds them with real tensors
        raise KernelcastError(f"timm does not build it without weights: {type(error).__name__}") from None
    if channels_last:
        net, images = net.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    net = net.train(mode == "training")
    traced = record(net, images, mode, optimizer="sgd-momentum", precision="autocast", dtype="fp16", name=model)  # type: ignore[arg-type]
    return fuse(traced) if compile else traced


def kernelbench_call(case: PublishedCase) -> list[ScoredCase]:
    from kernelcast_lab.evaluate.kernelbench import forecast

    return [_step(case, forecast(**case.parameters))]


def _step(case: PublishedCase, step: Any) -> ScoredCase:
    longest = max(step.shares, key=lambda share: share.time_s).part if step.shares else ""
    return _scored(case, "time_s", step.time_s, step.low_s, step.high_s, step.supports, step.setting, longest)


ANSWERS: Mapping[str, Callable[[PublishedCase], list[ScoredCase]]] = {
    "infer": infer, "simulate": simulate, "train": train, "timm": timm_model, "kernelbench": kernelbench_call,
}  # fmt: skip


# ---- Runs that other evaluations know how to ask


def _of_compared(source: str, compared: Iterable[Compared], release: str = "") -> list[ScoredCase]:
    """Those with an interval, as cases of a source."""
    cases = []
    for each in compared:
        if each.low_s is None or each.high_s is None or each.setting is None or each.supports is None:
            continue
        run = each.groups.get("id") or each.groups.get("run") or " ".join(each.groups.values())
        cases.append(ScoredCase(
            source, f"{source}/{run}", each.setting.gpu, each.groups.get("model", run), each.setting.stack, each.what,
            each.measured_s, each.predicted_s, each.low_s, each.high_s, each.supports.level, each.supports.kernels,
            each.setting, each.groups.get("release", release),
        ))  # fmt: skip
    return cases


def pipeweave(root: Path | str | None, count: int | None) -> tuple[int, list[ScoredCase], dict[str, int]]:
    from kernelcast_lab.data.serving import served_cases
    from kernelcast_lab.evaluate.served import static_batches

    cases = served_cases(root and Path(root))
    return len(cases), _of_compared("pipeweave", static_batches(cases), "2025"), {}


def serving_points(root: Path | str | None, count: int | None) -> tuple[int, list[ScoredCase], dict[str, int]]:
    from kernelcast_lab.data.serving import serving_points as points
    from kernelcast_lab.evaluate.serving_points import closed_loops

    known = points(root and Path(root))
    chosen = sampled(known, count)
    compared, left = closed_loops(chosen, intervals=True)
    releases = {point.id: ".".join((point.version or "").split(".")[:2]) for point in chosen}
    compared = [
        replace(each, groups={**each.groups, "release": releases.get(each.groups["id"], "")})
        for each in compared
        if each.what == "TPOT" or each.groups["few"] == "yes"  # most of another TTFT is a queue
    ]
    return len(known), _of_compared("serving_points", compared), dict(left)


def torch_h200(root: Path | str | None, count: int | None) -> tuple[int, list[ScoredCase], dict[str, int]]:
    """Steps of language models that this project measured with the PyTorch of `stacks/`."""
    from kernelcast.training.step import STEP
    from kernelcast_lab.evaluate.traced import MEASURED, chosen_cases, evaluate

    cases = []
    for each in evaluate(chosen_cases(MEASURED), STEP):
        step, name = each.step, each.case.case.id
        ends = each.case.wall_ms / 1e3, step.time_s, step.low_s, step.high_s
        levels = step.supports.level, step.supports.kernels
        cases.append(ScoredCase("torch_h200", f"torch_h200/{name}", "h200_sxm", name, "torch", "time_s", *ends, *levels,
                                step.setting, step.setting.release))  # fmt: skip
    return len(cases), cases, {}


def training_h200(root: Path | str | None, count: int | None) -> tuple[int, list[ScoredCase], dict[str, int]]:
    """Training steps of four layers, this project's own."""
    from kernelcast.training.transformer_step import forecast
    from kernelcast_lab.evaluate.training_steps import job_of, timed_steps

    cases = []
    for at, measured in enumerate(timed_steps()):
        step = forecast(job_of(measured))
        ends = measured["seconds"], step.time_s, step.low_s, step.high_s
        levels = step.supports.level, step.supports.kernels
        cases.append(ScoredCase("training_h200", f"training_h200/{at}", "h200_sxm", "llama-3.1-8b", step.job.stack.id,
                                "time_s", *ends, *levels, step.setting, step.setting.release))  # fmt: skip
    return len(cases), cases, {}


def vllm_h100(root: Path | str | None, count: int | None) -> tuple[int, list[ScoredCase], dict[str, int]]:
    from kernelcast_lab.evaluate.under_load import vllm_runs

    compared = [each for each in vllm_runs(root) if each.groups["stage"] == "all"]
    return len({each.groups["run"] for each in compared}), _of_compared("vllm_h100", compared, "2025"), {}


def llmservingsim(root: Path | str | None, count: int | None) -> tuple[int, list[ScoredCase], dict[str, int]]:
    from kernelcast_lab.evaluate.under_load import single_requests

    return 1, _of_compared("llmservingsim", single_requests(root), "0.19"), {}


def vllm_h200(root: Path | str | None, count: int | None) -> tuple[int, list[ScoredCase], dict[str, int]]:
    """Live runs of `vllm bench serve`, this project's own."""
    from kernelcast_lab.evaluate.under_load import live_runs

    compared = live_runs()
    return len({each.groups["run"] for each in compared}), _of_compared("vllm_h200", compared, "0.22"), {}


RUNS = {each.__name__: each for each in (pipeweave, serving_points, vllm_h100, vllm_h200, torch_h200, training_h200,
                                         llmservingsim)}  # fmt: skip
# The table that each source is read from; our own measurements need none
TABLES = {name: f"public/{table}" for name, (table, _) in SOURCES.items()} | {
    "pipeweave": "pipeweave/e2e_real", "serving_points": "aiconfigurator/e2e_silicon",
    "vllm_h100": "vllm_h100/served", "llmservingsim": "llmservingsim/rtxpro6000_llama-3.1-8b_vllm_requests",
}  # fmt: skip
NAMES = (*SOURCES, *RUNS)
GROUPS = {"training": ("training_llm", "mlperf_training", "simumax"), "kernels": ("aiter_gemm", "aiter_moe"),
          "live": ("vllm_h200", "torch_h200", "training_h200"),
          # All that have a workload of these: spreads are kept by workload, so that such a group can be fitted alone
          "serving": ("static_batches", "trtllm_offline", "served", "pipeweave", "serving_points", "vllm_h100",
                      "vllm_h200", "llmservingsim")}  # fmt: skip


# ---- Scores


def score(
    root: Path | str | None, source: str, sample: int | None = SAMPLE, workers: int = 1,
    progress: Callable[[str], None] | None = None,
) -> SourceScores:  # fmt: skip
    """A sample of a source (None: all of it)."""
    if source in RUNS:
        rows, scored, left = RUNS[source](root, sample)
        return SourceScores(source, rows, tuple(scored), left, {})
    cases = published_cases(root, source)
    missing = Counter(case.missing for case in cases if case.missing)
    asked = sampled([case for case in cases if not case.missing], sample)
    if asked and asked[0].command == "kernels":
        return SourceScores(source, len(cases), tuple(kernels(asked)), missing, {})
    scored_cases: list[ScoredCase] = []
    refused: Counter[str] = Counter()
    asked.sort(key=lambda case: (case.model, case.gpu, str(case.parameters)))  # a model is traced once
    with ProcessPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        answers = map(_answered, asked) if pool is None else pool.map(_answered, asked, chunksize=4)
        for at, (results, error) in enumerate(answers):
            if progress is not None and at % 20 == 0:
                progress(f"{source}: {at} of {len(asked)}")
            scored_cases += results
            if error:
                refused[error] += 1
    return SourceScores(source, len(cases), tuple(scored_cases), missing, refused)


def _answered(case: PublishedCase) -> tuple[list[ScoredCase], str]:
    try:
        return ANSWERS[case.command](case), ""
    except KernelcastError as error:
        return [], str(error).splitlines()[0][:110]


def all_sources(
    root: Path | str | None, names: Sequence[str], sample: int | None, workers: int, progress: Any
) -> list[SourceScores]:
    """Sources whose tables are not in the folder are left out, unless they are named."""
    known = tables(root)
    there = [name for name in NAMES if name not in TABLES or TABLES[name] in known]
    return [score(root, name, sample, workers, progress) for name in names or there]


def figures(scores: Iterable[SourceScores], worst: int = 3) -> dict[str, list[dict[str, Any]]]:
    """Tables by name: whole sources, by GPU, model, stack and support, the worst rows, and what was not asked."""
    scores = list(scores)
    result = {"sources": [line for each in scores for line in each.lines()]}
    result |= {f"by_{by}": [line for each in scores for line in each.lines(by)] for by in ERRORS_BY if by != "source"}
    result["worst"] = [
        row.to_dict()
        for each in scores
        for row in sorted(each.scored, key=lambda s: -abs(np.log(s.predicted / s.measured)))[:worst]
    ]
    result["not_asked"] = [
        {"source": each.source, "rows": count, "of": each.rows, "reason": reason}
        for each in scores
        for table, what in ((each.missing, "missing: "), (each.refused, "refused: "))
        for reason, count in ((what + text, count) for text, count in table.items())
    ]
    return result
