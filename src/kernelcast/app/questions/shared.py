"""Parameters that several questions share, and the model, GPU and conditions that they name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.app.questions.parameters import Question, argument, option
from kernelcast.errors import KernelcastError, unknown, warn
from kernelcast.forecast import PREDICTORS, Calibration, learned_from
from kernelcast.forecast.conditions import Conditions
from kernelcast.hardware import Gpu, changed, gpu
from kernelcast.machine.analyse import PIPELINES
from kernelcast.ops.dtypes import canonical_dtype

if TYPE_CHECKING:
    from kernelcast.models.architecture import Architecture
    from kernelcast.models.precision import Precision

# How many sets of weights, and of activations, pass between two uses of one
ROTATIONS = {"model": (math.inf, 1.0), "cold": (math.inf, math.inf), "warm": (1.0, 1.0)}
INPUT_LEN, OUTPUT_LEN = 1024, 128  # as in `vllm bench serve`
LONGEST = 1 << 24  # tokens of a request: more than any model takes
MOST_REQUESTS = 10_000_000  # of a load: as many are held in memory
_AS_STORED = ("compressed-tensors", "modelopt", "modelopt_mixed", "quark")  # of many formats: the checkpoint says which
_ACTIVATIONS = ("bf16", "fp16")
_UNQUANTISED = (*_ACTIVATIONS, "fp32", "tf32")


def names_of(module: str, attribute: str, *more: str) -> Iterable[str]:
    """Names of a catalogue, imported on first use."""
    names = getattr(import_module(f"kernelcast.{module}"), attribute)
    return (*(names() if callable(names) else names), *more)


gpu_names = partial(names_of, "hardware", "gpu_ids")
model_names = partial(names_of, "models.catalogue", "model_ids")
stack_names = partial(names_of, "stacks", "stack_ids")
fabric_names = partial(names_of, "hardware", "fabrics")
host_names = partial(names_of, "schedule.timeline", "host_ids")
weight_formats = partial(names_of, "models.precision", "WEIGHTS")
op_names = partial(names_of, "ops", "REGISTRY")

ModelName = Annotated[
    Any,
    argument("MODEL", "a name of `kernelcast models`, or a config.json", type=str, values=model_names,
             annotation="str | Path | Architecture"),
]  # fmt: skip
GpuName = Annotated[
    str | Path | Gpu | None,
    option(metavar="ID", help="GPU: an id or name from `kernelcast gpus`, or a TOML file (required)",
           type=str | None, values=gpu_names),
]  # fmt: skip
Changes = Annotated[
    Sequence[str] | None,
    option(metavar="FIELD=VALUE", help="what if: a GPU's field, or FIELD*FACTOR; may be repeated",
           type=list[str] | None),
]  # fmt: skip
Without = Annotated[
    Sequence[str] | None,
    option(metavar="LIMIT", help=f"leave a limit out: {', '.join(PIPELINES)}; may be repeated",
           type=list[str] | None, values=lambda: PIPELINES),
]  # fmt: skip
Cache = Annotated[
    str,
    option(metavar="model|cold|warm", help="model: weights from DRAM, activations as the kernel before left them; "
           "cold: all from DRAM; warm: L2 holds what the same call left", values=lambda: ROTATIONS),
]  # fmt: skip
PredictorName = Annotated[
    str,
    option(metavar="NAME", help=f"predictor of times from limits: {', '.join(PREDICTORS)}", values=lambda: PREDICTORS),
]
CalibrationFile = Annotated[
    Path | Calibration | None,
    option(metavar="FILE", help="measurements of this GPU, from `kernelcast calibrate`", type=Path | None),
]
WeightsFolder = Annotated[
    Path | None,
    option(metavar="DIR", help="fitted weights, from `kernelcast fit`, instead of those that ship; what it lacks rests "
           "on physics alone"),
]  # fmt: skip
PowerCap = Annotated[float | None, option(metavar="WATTS", help="power limit of each GPU, below the board's")]


def engine_name(text: str) -> str:
    """An engine as people write it, with its release or without: TensorRT-LLM, trt-llm, PyTorch, "vLLM 0.22",
    vllm:v0.22.1."""
    name, release, number = re.sub(r"[-_\s@:=]*v?(?=\d)", "==", text.strip(), count=1).partition("==")
    folded = re.sub(r"[-_\s]", "", name.lower())
    return _ENGINES.get(folded, name.strip().lower()) + release + number


_ENGINES = {"tensorrtllm": "trtllm", "trtllm": "trtllm", "trt": "trtllm", "tensorrt": "trtllm", "pytorch": "torch",
            "transformers": "torch", "hf": "torch", "huggingface": "torch"}  # fmt: skip
StackName = Annotated[
    str,
    option(metavar="NAME", help="vllm, sglang, trtllm, torch; an older release: vllm==0.19", values=stack_names,
           reads=engine_name),
]  # fmt: skip
InputLen = Annotated[int | None, option(help="prompt tokens of each request", unless_given=INPUT_LEN, maximum=LONGEST)]
OutputLen = Annotated[
    int | None, option(help="output tokens of each request", unless_given=OUTPUT_LEN, maximum=LONGEST)
]


def number_format(text: str) -> str | None:
    """A format as people write it (bfloat16, FP8, awq); None: auto, as the checkpoint is stored."""
    return None if text.strip().lower() == "auto" else canonical_dtype(text)


WeightsFormat = Annotated[
    str | None,
    option(metavar="FORMAT", help="number format of weights; default: the checkpoint's", values=weight_formats,
           reads=number_format),
]  # fmt: skip
QuantizationMethod = Annotated[
    str | None,
    option(metavar="METHOD", help="how weights are quantized, as engines call it: fp8, awq, gptq, …; --dtype is of "
           "activations then"),
]  # fmt: skip
KvFormat = Annotated[
    str | None,
    option(metavar="FORMAT", help="number format of the KV cache",
           values=partial(names_of, "models.precision", "CACHE"), reads=number_format),
]  # fmt: skip
Tp = Annotated[int, option(help="tensor parallel size")]
Pp = Annotated[int, option(help="pipeline parallel size")]
Ep = Annotated[int, option(help="expert parallel size")]
Dp = Annotated[int, option(help="attention data parallel size (ranks that share the experts)")]
MicroBatches = Annotated[int, option(help="micro-batches of a pipeline")]
SequenceParallel = Annotated[bool, option(help="sequence parallel: shard activations between tensor parallel layers")]
DraftTokens = Annotated[int, option(help="speculative decoding: draft tokens a step")]
Acceptance = Annotated[float, option(help="probability that a draft token is accepted")]
DraftModel = Annotated[
    str | None,
    option(metavar="MODEL", help="draft model; mtp: the model's multi-token prediction layers",
           values=partial(names_of, "models.catalogue", "model_ids", "mtp")),
]  # fmt: skip
TransferFabric = Annotated[
    str | None,
    option(metavar="ID", help="link that KV caches are transferred over; default: the link between nodes",
           values=fabric_names),
]  # fmt: skip
ServerFile = Annotated[
    Path | None, option(metavar="FILE", help="overheads of a server, fitted by `kernelcast replay --calibrate`")
]
PricesFile = Annotated[Path | None, option(metavar="FILE", help="TOML with usd_per_hour, date and source of each GPU")]
Price = Annotated[list[str] | None, option(metavar="GPU=USD", help="one price per GPU-hour; may be repeated")]
PriceKind = Annotated[
    str,
    option(metavar="on_demand|reserved", help="which price of a file that has both",
           values=partial(names_of, "hardware.prices", "KINDS")),
]  # fmt: skip
Intervals = Annotated[bool, option("--intervals/--no-intervals", help="simulate both ends of the interval too")]
Seed = Annotated[int, option(help="random seed")]
SkipBad = Annotated[bool, option(help="leave bad rows out instead of stopping")]
# how a command answers
Json = Annotated[bool, option(help="print JSON")]
Plot = Annotated[Path | None, option(metavar="FILE.png", help="write a plot")]
TimelineFile = Annotated[Path | None, option(metavar="FILE.json", help="write a timeline of one step, for Perfetto")]


@dataclass(frozen=True)
class PredictorParameters(Question):
    """What forecasts a kernel call."""

    predictor: PredictorName = "learned"
    calibration: CalibrationFile = None
    weights: WeightsFolder = None

    @cached_property
    def conditions(self) -> Conditions:
        """Made once: a calibration of other weights warns when it is read."""
        return resolve_conditions(None, "model", self.predictor, self.calibration, self.weights)


def resolve_model(name: str | Path | Architecture) -> Architecture:
    """The model of a name."""
    from kernelcast import models
    from kernelcast.models.architecture import Architecture

    return name if isinstance(name, Architecture) else models.model(name)


def resolve_gpu(
    name: str | Path | Gpu | None, changes: Sequence[str] | None = None, power_cap: float | None = None
) -> Gpu:
    """The GPU of a name, with its changes."""
    if name is None:
        raise KernelcastError("which GPU? give `gpu`, as in h200_sxm")
    target = changed(gpu(name), changes or ())
    if power_cap is None:
        return target
    from kernelcast.energy.power import with_cap

    return with_cap(target, power_cap)


def resolve_conditions(
    without: Sequence[str] | None = None,
    cache: str = "model",
    predictor: str = "learned",
    calibration: Path | Calibration | None = None,
    weights: Path | None = None,
) -> Conditions:
    """The conditions of a kernel call."""
    names = [name for text in without or () for name in text.split(",")]
    if weights is not None and (predictor != "learned" or names):
        raise KernelcastError("`weights` are those of the predictor learned: leave out `predictor` and `without`")
    if cache not in ROTATIONS:
        raise unknown("cache", cache, ROTATIONS)
    return Conditions(
        rotation=ROTATIONS[cache][0],
        input_rotation=ROTATIONS[cache][1],
        without=tuple(dict.fromkeys(names)),
        predictor=predictor if weights is None else learned_from(weights),
        calibration=calibration,
    )


def precision(model: Architecture, dtype: str | None, quantization: str | None, cache: str | None) -> Precision:
    """The formats of a served model. ``quantization``: the method as vLLM and SGLang name it; beside it ``dtype`` is of
    activations, as in the engines, and alone it is of weights. "none": not quantised, though the checkpoint is."""
    from kernelcast.models.precision import Precision

    stored = model.quantization
    if quantization is not None and quantization.lower() == "none":
        return Precision.of(model, dtype or ("bf16" if stored else None), cache)
    if quantization is None or quantization.lower() == "auto":
        if stored is not None and stored.weights not in (None, *_UNQUANTISED) and dtype in _ACTIVATIONS:
            warn(f"{model.name} is stored in {stored.weights}: `dtype` {dtype} is of activations, as in engines")
            return replace(Precision.of(model, None, cache), activations=dtype)
        return Precision.of(model, dtype, cache)
    method = quantization.lower().replace("_", "-")
    activations = dtype if dtype in _ACTIVATIONS else None
    if dtype not in (None, *_ACTIVATIONS) and dtype != canonical_dtype(quantization):
        raise KernelcastError(f"`dtype` {dtype} and `quantization` {quantization} are two formats: give one")
    if method.replace("-", "_") in _AS_STORED or method in _AS_STORED:
        if stored is None:
            raise KernelcastError(f"`quantization` {quantization} is what a checkpoint is stored as, and {model.name} "
                                  "is stored in 16 bits: say which format, such as fp8, awq or nvfp4")  # fmt: skip
        return replace(Precision.of(model, None, cache), activations=activations)
    weights = canonical_dtype(quantization)
    if weights not in (known := [name for name in weight_formats() if name not in _UNQUANTISED]):
        raise unknown("quantization", quantization, [*known, "awq", "gptq", *_AS_STORED])
    if stored is not None and stored.weights is not None:
        formats = {stored.weights, stored.experts, stored.mlp, stored.weights.removesuffix("_block")}
        if weights not in formats:
            raise KernelcastError(f"{model.name} is stored in {stored.experts or stored.weights}, which `quantization` "
                                  f"{quantization} does not match: engines refuse it")  # fmt: skip
        return replace(Precision.of(model, None, cache), activations=activations)
    # engines run weight-only kernels where a GPU does not multiply such numbers
    return replace(Precision.of(model, weights, cache), stored=True, activations=activations)
