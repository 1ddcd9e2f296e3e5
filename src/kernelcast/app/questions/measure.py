"""What is measured on a GPU, the kernels that are tuned on it, and a measured run to diagnose."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import Question, argument, option
from kernelcast.errors import KernelcastError, unknown
from kernelcast.ops.dtypes import canonical_dtype

if TYPE_CHECKING:
    from kernelcast.collect.step_plan import EngineLimits
    from kernelcast.diagnose.diagnose import Diagnosis

# Token counts of the engines' own files; at run time the nearest counts.
_TOKENS = "1,2,4,8,16,24,32,48,64,96,128,256,512,1024,1536,2048,3072,4096"
_size = partial(option, minimum=1)
_TYPICAL_CONTEXT = 4096  # of a sequence, which sizes a KV cache of layers with windows or states
_ENGINE_ARGS: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (int,), "max_num_batched_tokens": (int,), "max_model_len": (int,), "block_size": (int,),
    "gpu_memory_utilization": (float,), "tp": (int, "--tensor-parallel-size", "-tp"),
    "num_gpu_blocks_override": (int,), "kv_dtype": (str, "--kv-cache-dtype"), "dtype": (str, "--quantization", "-q"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CollectQuestion(Question):
    """What to measure on this machine."""

    command: ClassVar[str] = "collect"

    out: Annotated[
        Path | None, option("-o", metavar="FILE.parquet", help="table of results; continues where it stopped")
    ] = None
    engine: Annotated[
        str | None,
        option(metavar="NAME", help="not kernels but steps of an engine: vllm, with dummy weights; -o FILE.jsonl"),
    ] = None
    model: Annotated[
        str | None,
        option(
            metavar="NAME",
            help="with --engine: a name of `kernelcast models`, or a model's folder",
            values=shared.model_names,
        ),
    ] = None
    engine_args: Annotated[
        str, option(metavar="TEXT", help="with --engine: arguments of `vllm serve`, as in '--max-model-len 16384'")
    ] = ""
    calls: Annotated[int, _size(help="calls to measure")] = 1700
    family: Annotated[
        list[str] | None, option(help="only this family; may be repeated; moe-config: Triton configs")
    ] = None
    without: Annotated[list[str] | None, option(help="leave this family out; may be repeated")] = None
    budget: Annotated[str | None, option(metavar="TIME", help="stop in time, as in 300s, 5m or 1h")] = None
    warm: Annotated[float, option(minimum=0.0, maximum=1.0, help="share of calls to time from a warm L2 too")] = 0.0
    for_calibration: Annotated[bool, option(help="the most informative calls, for kernelcast calibrate")] = False
    next: Annotated[
        Path | None, option(metavar="FILE", help="with --for-calibration: what this calibration does not know yet")
    ] = None
    again: Annotated[
        Path | None, option(metavar="FILE.parquet", help="calls of this table a second time: how far times repeat")
    ] = None
    gpu: Annotated[
        str | None,
        option(metavar="ID", help="this GPU in the catalogue; default: by its name", values=shared.gpu_names),
    ] = None
    seed: Annotated[int, option(help="the same seed gives the same calls")] = 0
    plan: Annotated[bool, option(help="show the plan and stop; needs no GPU")] = False
    host: Annotated[bool, option(help="not kernels but this host, for trace --host FILE.toml")] = False
    specs: Annotated[bool, option(help="a minute of microbenchmarks of this GPU, for --gpu FILE.toml")] = False
    link: Annotated[bool, option(help="collectives over this machine's GPUs, for --fabric FILE.toml")] = False
    power: Annotated[bool, option(help="energy instead of time: calls of all sorts, idle, and both mixed")] = False

    def engine_limits(self) -> EngineLimits:
        """The limits that the engine of ``model`` would have on this GPU, by ``engine_args`` and its defaults."""
        import numpy as np

        from kernelcast.app.questions.simulate import ServiceParameters
        from kernelcast.collect.step_plan import EngineLimits
        from kernelcast.models import model as find_model
        from kernelcast.serving.load import Load

        architecture, given = find_model(str(self.model)), _engine_arguments(self.engine_args)
        longest = given.pop("max_model_len", None) or architecture.max_context
        tokens = min(longest, _TYPICAL_CONTEXT)
        engine = ServiceParameters(gpu=self.gpu or "h200_sxm", stack=str(self.engine), **given)
        settings = engine.service(architecture, Load(np.zeros(1), np.array([tokens]), np.array([1]))).pool.settings
        return EngineLimits(settings.max_num_seqs, settings.max_num_batched_tokens, longest, settings.kv_tokens)


def _engine_arguments(text: str) -> dict[str, Any]:
    """Those arguments of `vllm serve` that decide which steps it can run; others are the engine's own affair."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    for name, (type_, *flags) in _ENGINE_ARGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", *flags, dest=name, type=type_)
    try:
        known, _ = parser.parse_known_args(shlex.split(text))
    except (argparse.ArgumentError, ValueError) as error:
        raise KernelcastError(f"`engine_args` {text!r}: {error}") from None
    given = {name: value for name, value in vars(known).items() if value is not None}
    if str(given.get("kv_dtype")).startswith("fp8"):
        given["kv_dtype"] = "fp8"
    return given


@dataclass(frozen=True, kw_only=True)
class TuneQuestion(Question):
    """Which Triton configs to try."""

    gpu: shared.GpuName = None
    dtype: Annotated[str, option(metavar="FORMAT", help="bf16, fp16, fp8, fp8_block", reads=canonical_dtype)] = "bf16"
    top: Annotated[int, _size(help="configs to measure: the most promising by prediction")] = 16
    more: Annotated[
        int, option(minimum=0, help="measure so many beyond them; on a GPU not seen by Optuna, if installed")
    ] = 0
    no_measure: Annotated[bool, option(help="predict only, even where there is a GPU")] = False
    set: shared.Changes = None


@dataclass(frozen=True, kw_only=True)
class TuneMoeQuestion(TuneQuestion):
    """The grouped GEMMs of a mixture-of-experts layer."""

    command: ClassVar[str] = "tune moe"

    model: Annotated[str | None, argument("[MODEL]", "a name of `kernelcast models`", values=shared.model_names)] = None
    tokens: Annotated[str, option(metavar="N,N,…", help="token counts to tune for")] = _TOKENS
    hidden: Annotated[int | None, _size(help="hidden size, without a MODEL")] = None
    inter: Annotated[int | None, _size(help="intermediate size of an expert, without a MODEL")] = None
    experts: Annotated[int | None, _size(help="experts, without a MODEL")] = None
    topk: Annotated[int | None, _size(help="experts per token, without a MODEL")] = None
    tp: Annotated[int, _size(help="tensor parallel size")] = 1
    stack: Annotated[list[str] | None, option(metavar="NAME", help="vllm, sglang: whose files; default: both")] = None
    out: Annotated[Path | None, option("-o", metavar="DIR", help="folder for the files")] = None
    triton: Annotated[str | None, option(help="version that SGLang's folder is named by")] = None


@dataclass(frozen=True, kw_only=True)
class TuneGemmQuestion(TuneQuestion):
    """A Triton matrix product."""

    command: ClassVar[str] = "tune gemm"

    m: Annotated[int, _size(help="rows (tokens)")]
    n: Annotated[int, _size(help="output features")]
    k: Annotated[int, _size(help="input features")]


@dataclass(frozen=True, kw_only=True)
class DiagnoseQuestion(shared.PredictorParameters):
    """A measured run."""

    command: ClassVar[str] = "diagnose"

    file: Annotated[
        Path,
        argument(
            "FILE", "a torch.profiler trace (.json, .json.gz), a CSV of ncu, or a table of calls with measured_us"
        ),
    ]
    gpu: Annotated[
        str | None, option(metavar="ID", help="GPU that was measured; default: the file's", values=shared.gpu_names)
    ] = None
    top: Annotated[int, option(help="calls to show")] = 20
    dtype: Annotated[
        str | None,
        option(
            metavar="FORMAT",
            help="format that the run's matrix products should have; default: most of them",
            reads=canonical_dtype,
        ),
    ] = None
    set: shared.Changes = None
    cache: shared.Cache = "model"

    def answer(self) -> Diagnosis:
        """The run's kernels beside their forecasts."""
        from kernelcast.diagnose.diagnose import diagnose
        from kernelcast.diagnose.metrics import WIDTH_BITS
        from kernelcast.diagnose.read import read_measured

        if self.top < 1:
            raise KernelcastError(f"`top` must be 1 or more, not {self.top}")
        if self.dtype is not None and self.dtype not in WIDTH_BITS:
            raise unknown("dtype", self.dtype, WIDTH_BITS)
        conditions = shared.resolve_conditions(None, self.cache, self.predictor, self.calibration, self.weights)
        named = shared.resolve_gpu(self.gpu, self.set) if self.gpu is not None else None
        profile, gpu = read_measured(self.file, named)
        if self.gpu is None and self.set:
            gpu = shared.resolve_gpu(gpu.id, self.set)
        return diagnose(profile, gpu, conditions, run_dtype=self.dtype)
