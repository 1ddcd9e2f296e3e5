"""End-to-end evidence: which deployments were measured as a whole, and how far such forecasts were off.

All kernels of a run may have been measured while the release of the engine, the host, the parallelism or the recipe
was not: then the kernels' intervals are too narrow for the whole. ``weights/end_to_end.json`` lists what was measured
end to end (counts only), by setting the spread of measured over forecast times beyond the kernels' intervals, and the
errors of forecasts by source (``kernelcast evaluate public --fit``). A calibration with measured runs removes that
doubt.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.work import Array
from kernelcast.results import EXTRAPOLATED, LEVELS, NEAR, SEEN
from kernelcast.stacks.stack import minor_release

FILE = Path(__file__).parent / "weights" / "end_to_end.json"
ERRORS_BY = ("source", "gpu", "model", "stack", "support")  # what errors are kept by
# NVIDIA's data-center parts by compute capability; all others are graphics cards (GDDR, PCIe, clocks by board power)
_DATA_CENTER = ("6.0", "7.0", "8.0", "9.0", "10.0", "10.3")
Side = tuple[float, float]  # the share that the kernels' own deviation has in the whole's, and what is added to it
Spread = tuple[Side, Side]  # of the logarithm of a time, below and above
EXACT: Spread = ((1.0, 0.0), (1.0, 0.0))
RUN_SUPPORT = {
    "seen": "this release of the engine was measured end to end with such a model on this GPU",
    "near": "measured end to end but for one of: release, GPU, class of model, parallelism",
    "extrapolated": "nothing close to it was measured end to end",
}
# What each source is, and where it is from
TITLES = {
    "aiter_gemm": "AMD's tuned GEMMs (aiter), against the ceiling",
    "aiter_moe": "AMD's tuned fused MoE (aiter), against the ceiling",
    "static_batches": "one static batch: vLLM and TensorRT-LLM of 2024 (LLM-Inference-Bench)",
    "trtllm_offline": "TensorRT-LLM's own throughput tables",
    "served": "served benchmarks of others (GPUStack's performance lab)",
    "training_llm": "training at scale (Megatron-Bridge, NeMo, llm-foundry)",
    "mlperf_training": "MLPerf Training v5.0",
    "simumax": "Megatron-LM on 8 B200 (SimuMax)",
    "timm": "vision models in PyTorch (timm)",
    "kernelbench": "PyTorch ops (KernelBench)",
    "pipeweave": "one static batch: SGLang and vLLM (PipeWeave)",
    "serving_points": "closed loops of requests: vLLM, SGLang, TensorRT-LLM (AIConfigurator, InferenceX)",
    "vllm_h100": "vLLM on H100 under load (inference-sim)",
    "vllm_h200": "live vLLM on an H200, measured for this project",
    "training_h200": "training steps of four Llama layers on an H200, timed for this project",
    "torch_h200": "language models in PyTorch on an H200, measured for this project",
    "llmservingsim": "vLLM on an RTX PRO 6000 under load (LLMServingSim)",
}


NVIDIA = ("data center", "graphics")


def gpu_class(gpu: Gpu) -> str:
    """Of NVIDIA's GPUs, data center or graphics; else the vendor."""
    if gpu.vendor.lower() != "nvidia":
        return gpu.vendor
    return NVIDIA[gpu.compute_capability not in _DATA_CENTER]


@dataclass(frozen=True, order=True)
class Setting:
    """What a run has beside its kernels. ``model_class``: dense, experts, …; ``parallelism``: "tp8", "dp8 ep8", "" on
    one GPU; ``dtype``: of the weights."""

    workload: str
    stack: str
    release: str
    gpu: str
    gpu_class: str
    model_class: str
    parallelism: str
    dtype: str

    @classmethod
    def of(
        cls, workload: str, gpu: Gpu, stack: str, release: str, model_class: str, layout: Any, dtype: str
    ) -> Setting:
        """``layout``: an object with parallel sizes, or None on one GPU."""
        sizes = {name: getattr(layout, name, 1) for name in ("tp", "pp", "dp", "ep", "cp")}
        parallelism = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        return cls(workload, stack, release, gpu.known_as, gpu_class(gpu), model_class, parallelism, dtype)

    @property
    def engine(self) -> str:
        """The stack without its release."""
        return self.stack.partition("==")[0]

    @property
    def minor_release(self) -> str:
        """The release without its patch: fixes change no times."""
        return minor_release(self.release)

    @property
    def parallel_axes(self) -> str:
        return " ".join(axis.rstrip("0123456789") for axis in self.parallelism.split())


@dataclass(frozen=True)
class FittedSpread:
    """The spread of a group of settings; an attribute that is None holds for all (a class of GPUs: for all of NVIDIA's,
    with whose results other vendors' are not mixed). ``low``, ``high``: what is added to
    the kernels' deviation in squares; ``low_share``, ``high_share``: of it, where it is wider than such runs need.
    ``cases``: measured results that it was fitted on."""

    workload: str
    quantity: str
    stack: str | None
    gpu_class: str | None
    level: str | None
    low_share: float
    low: float
    high_share: float
    high: float
    cases: int

    @property
    def spread(self) -> Spread:
        return (self.low_share, self.low), (self.high_share, self.high)

    @property
    def key(self) -> tuple[str | None, ...]:
        return self.workload, self.quantity, self.stack, self.gpu_class, self.level


def backoff(setting: Setting, quantity: str, level: str) -> Iterator[tuple[str | None, ...]]:
    """Keys of a spread, the most specific first."""
    for stack, gpu_class_, level_ in (
        (setting.stack, setting.gpu_class, level), (None, setting.gpu_class, level),
        (setting.stack, setting.gpu_class, None), (None, setting.gpu_class, None), (None, None, None),
    ):  # fmt: skip
        yield setting.workload, quantity, stack, gpu_class_, level_


@dataclass(frozen=True)
class EndToEnd:
    """Measured settings with their number of cases, fitted spreads, and lines of errors by their table (``sources``,
    ``by_gpu``, …) as `kernelcast evaluate public` prints them."""

    runs: Mapping[Setting, int]
    spreads: tuple[FittedSpread, ...]
    errors: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = FILE) -> EndToEnd:
        if not path.exists():
            return cls({}, ())
        data = json.loads(path.read_text(encoding="utf-8"))
        runs = {Setting(*values): cases for *values, cases in data["runs"]}
        spreads = tuple(FittedSpread(**values) for values in data["spreads"])
        return cls(runs, spreads, data["errors"], data["about"])

    def write(self, path: Path) -> None:
        """As JSON, a line an entry."""
        tables: dict[str, list[Any]] = {
            "runs": [[*astuple(setting), cases] for setting, cases in sorted(self.runs.items())],
            "spreads": [asdict(each) for each in self.spreads],
        }
        parts = [f'"about": {json.dumps(dict(self.about))}', f'"columns": {json.dumps([*_COLUMNS, "cases"])}']
        parts += [f'"{name}": {_listed(lines)}' for name, lines in tables.items()]
        errors = ",\n".join(f'"{name}": {_listed(lines)}' for name, lines in self.errors.items())
        path.write_text("{" + ",\n".join([*parts, f'"errors": {{{errors}}}']) + "}\n", encoding="utf-8")

    def error_lines(self, by: str = "source") -> list[dict[str, Any]]:
        """Errors by one of ``ERRORS_BY``, with what their source is (``title``) and what they are of (``quantity``)."""
        lines: Sequence[Mapping[str, Any]] = self.errors.get("sources" if by == "source" else f"by_{by}", ())
        if by != "source":
            order = LEVELS.index if by == "support" else str
            lines = sorted(lines, key=lambda line: (order(line[by]), line["source"]))
        return [
            {**line, "title": TITLES.get(line["source"], line["source"]), "quantity": _UNIT.sub("", line["of"])
             .replace("_", " ")} for line in lines
        ]  # fmt: skip

    def aspects(self, setting: Setting) -> dict[str, str]:
        """The level of each aspect by itself: seen where a run with it was measured on this engine."""
        own = [run for run in self.runs if run.engine == setting.engine]
        return {
            "engine": _level(own, lambda run: run.minor_release == setting.minor_release, lambda run: True),
            "host": _level(
                self.runs, lambda run: run.gpu == setting.gpu, lambda run: run.gpu_class == setting.gpu_class
            ),
            "parallelism": _level(
                own, lambda run: run.parallelism == setting.parallelism,
                lambda run: run.parallel_axes == setting.parallel_axes,
            ),
            "recipe": _level(
                own, lambda run: (run.workload, run.model_class, run.dtype) ==
                (setting.workload, setting.model_class, setting.dtype),
                lambda run: run.model_class == setting.model_class,
            ),
        }  # fmt: skip

    def level(self, setting: Setting) -> str:
        """Seen: a run of this engine, release, GPU, model class and parallel axes was measured. Near: one of this
        engine that differs in one of these, on the same class of GPU. Else extrapolated."""
        differs = self.differences(setting)
        return LEVELS[EXTRAPOLATED if differs is None else min(len(differs), EXTRAPOLATED)]

    def differences(self, setting: Setting) -> tuple[str, ...] | None:
        """What the nearest measured run of this engine differs in; None: none of this engine was measured."""
        runs = (run for run in self.runs if run.engine == setting.engine)
        each = (tuple(text for name, text in _DIFFERENCES.items() if getattr(run, name) != getattr(setting, name))
                for run in runs)  # fmt: skip
        return min(each, key=len, default=None)

    @functools.cached_property
    def _by_key(self) -> Mapping[tuple[str | None, ...], Spread]:
        return {each.key: each.spread for each in self.spreads}

    def spread(self, setting: Setting, quantity: str = "time") -> Spread:
        """Beyond the kernels' interval; none where nothing was measured for such a workload. A throughput of which too
        little was measured is off as the time per token is, the other way."""
        known = self._by_key
        keys = backoff(setting, quantity, self.level(setting)) if known else ()
        found = next((known[key] for key in keys if key in known), None)
        if found is None and quantity == "throughput":
            below, above = self.spread(setting, "tpot")
            return above, below
        return found or EXACT


_DIFFERENCES = {"minor_release": "release", "gpu": "GPU", "model_class": "class of model",
                "parallel_axes": "parallelism", "gpu_class": "class of GPU"}  # fmt: skip
_COLUMNS = tuple(each.name for each in fields(Setting))
_UNIT = re.compile("_(s|us|ms)$")


def _listed(lines: Iterable[Any]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(_rounded(line))}" for line in lines) + "\n]"


def _rounded(line: Any) -> Any:
    if isinstance(line, Mapping):
        return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in line.items()}
    return line


def _level(runs: Iterable[Setting], same: Any, alike: Any) -> str:
    runs = list(runs)
    if any(map(same, runs)):
        return LEVELS[SEEN]
    return LEVELS[NEAR] if any(map(alike, runs)) else LEVELS[EXTRAPOLATED]


@functools.cache
def end_to_end() -> EndToEnd:
    """What ships."""
    return EndToEnd.read()


@dataclass(frozen=True)
class WholeSupport:
    """Support of a whole answer: of its kernels, of the run as a whole, and of each aspect. ``differs``: what the
    nearest measured run differs in."""

    kernels: str
    run: str
    aspects: Mapping[str, str]
    differs: tuple[str, ...] = ()

    @classmethod
    def of(cls, setting: Setting, kernels: str) -> WholeSupport:
        evidence = end_to_end()
        return cls(kernels, evidence.level(setting), evidence.aspects(setting), evidence.differences(setting) or ())

    @property
    def level(self) -> str:
        """The worse of kernels and run."""
        return worse(self.kernels, self.run)

    def to_dict(self) -> dict[str, str]:
        return {"kernels": self.kernels, **self.aspects}


def metric_quantity(metric: str) -> str | None:
    """The quantity that a metric of a served load (vLLM's names) is a statistic of; None: of none that has a spread."""
    if "throughput" in metric:
        return "throughput"
    names = {"ttft": "ttft", "tpot": "tpot", "itl": "tpot", "e2el": "time"}
    return next((quantity for name, quantity in names.items() if f"_{name}_" in metric), None)


def worse(*levels: str) -> str:
    return LEVELS[max(map(LEVELS.index, levels))]


def widened(seconds: Array, spread: Spread, follows: float = 1.0) -> Array:
    """(3, …): a time with its interval, as such runs need it. Times of 0 stay. ``follows``: the share of a step's error
    that shows in it."""
    if spread == EXACT:
        return seconds
    time, low, high = seconds
    with np.errstate(divide="ignore", invalid="ignore"):
        (low_share, low_added), (high_share, high_added) = spread
        below = np.hypot(low_share * np.log(time / low), follows * low_added)
        above = np.hypot(high_share * np.log(high / time), follows * high_added)
        ends = np.stack([time, time * np.exp(-below), time * np.exp(above)])
    return np.where(time > 0, ends, seconds)
