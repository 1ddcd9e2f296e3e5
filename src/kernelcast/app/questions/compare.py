"""Every GPU at its best way to run a model: which GPUs at which prices, what is served, and what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions.shared import CalibrationFile, ModelName, PredictorName, WeightsFolder, chosen_conditions
from kernelcast.app.questions.words import flag, flag_of, flags_under
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions

if TYPE_CHECKING:
    from kernelcast.search.compare.compare import Comparison, ServingForecast
    from kernelcast.search.compare.sensitivity import Gain

Gains = list[tuple["ServingForecast", "tuple[Gain, ...]"]]

_FIRST = 3  # GPUs that ``sensitivity`` looks at
_gpus = flags_under("GPUs and prices")
_served = flags_under("What is served")
_trained = flags_under("What is trained (with --training; words as in `kernelcast trace`)")


@dataclass(frozen=True)
class GpuChoice:
    """Which GPUs, at which prices."""

    gpus: Annotated[
        str | Sequence[str] | None,
        _gpus("--gpus", "--gpu", metavar="ID,..", help="GPUs to compare, or all (required)", typed=str | None),
    ] = None
    max_gpus: Annotated[int, _gpus("--max-gpus", help="GPUs at most, of one kind")] = 8
    what_if: Annotated[
        list[str] | None,
        _gpus("--what-if", metavar="FIELD*FACTOR", help="a variant of every GPU, or FIELD=VALUE; may be repeated"),
    ] = None
    by: Annotated[
        str | None,
        _gpus("--by", metavar="WHAT", help="dollars, latency, throughput or joules; default: dollars, then (without a "
              "price) throughput a GPU"),
    ] = None  # fmt: skip
    prices: Annotated[
        Path | None, _gpus("--prices", metavar="FILE", help="TOML with usd_per_hour, date and source of each GPU")
    ] = None
    price: Annotated[
        list[str] | None, _gpus("--price", metavar="GPU=USD", help="one price per GPU-hour; may be repeated")
    ] = None
    price_kind: Annotated[
        str, _gpus("--price-kind", metavar="on_demand|reserved", help="which price of a file that has both")
    ] = "on_demand"
    predictor: PredictorName = "learned"
    calibration: CalibrationFile = None
    weights: WeightsFolder = None

    @property
    def conditions(self) -> Conditions:
        return chosen_conditions(None, "model", self.predictor, self.calibration, self.weights)

    @property
    def compared(self) -> dict[str, Any]:
        """As ``advise.compare`` takes them."""
        names = "all" if self.gpus is None else self.gpus
        if isinstance(names, str) and not names.replace(",", "").strip():
            raise KernelcastError(f"--gpus is a list with commas, as in h100_sxm,h200_sxm, or all, not {self.gpus!r}")
        return {
            "gpus": names, "max_gpus": self.max_gpus, "what_if": self.what_if or (),
            "by": self.by, "prices": self.prices, "price": self.price or (), "price_kind": self.price_kind,
        }  # fmt: skip


@dataclass(frozen=True)
class ServedChoice:
    """A model that answers requests."""

    rate: Annotated[float | None, _served("--rate", "--request-rate", help="requests a second to carry")] = None
    input_len: Annotated[int | None, _served("--input-len", help="tokens of each prompt (1024)")] = None
    output_len: Annotated[int | None, _served("--output-len", help="tokens of each answer (128)")] = None
    ttft: Annotated[str | None, _served("--ttft", metavar="TIME", help="limit of the mean time to first token")] = None
    tpot: Annotated[str | None, _served("--tpot", metavar="TIME", help="of the mean time per output token")] = None
    e2el: Annotated[str | None, _served("--e2el", metavar="TIME", help="of the mean time end to end")] = None
    stack: Annotated[str | None, _served("--stack", metavar="NAME", help="vllm (or sglang, trtllm, torch)")] = None
    formats: Annotated[
        str | None, _served("--formats", metavar="FORMAT,..", help="of weights, or all; default: the checkpoint's")
    ] = None
    kv_dtype: Annotated[str | None, _served("--kv-dtype", metavar="FORMAT", help="of the KV cache")] = None
    thorough: Annotated[bool, _served("--thorough", help="forecast every layout, not only those that promise most")] = (
        False
    )
    sensitivity: Annotated[
        bool, _served("--sensitivity", help="what one per cent more of each spec buys, of the first three GPUs")
    ] = False

    @property
    def served(self) -> dict[str, Any]:
        """As ``advise.compare`` takes them."""
        return {one.name: getattr(self, one.name) for one in fields(ServedChoice) if one.name != "sensitivity"}


@dataclass(frozen=True, kw_only=True)
class CompareQuestion(ServedChoice, GpuChoice):
    """Every GPU at its best way to serve a model."""

    command: ClassVar[str] = "compare"

    model: ModelName
    batch: Annotated[int | None, flag("--batch", help="requests of one static batch")] = None

    def answer(self) -> Comparison:
        """The GPUs, in order."""
        from kernelcast.search.compare.compare import compare

        served = {name: value for name, value in self.served.items() if value is not None}
        return compare(self.model, **self.compared, **served, batch=self.batch, conditions=self.conditions)

    def gains(self, found: Comparison) -> Gains:
        """With ``sensitivity``: what one per cent more of each spec buys, of the first few real GPUs."""
        from kernelcast.search.compare.sensitivity import sensitivity

        real = [one for one in found.fitting if not one.deployment.gpu.changes]
        first = real[:_FIRST] if self.sensitivity else []
        return list(zip(first, sensitivity(first), strict=True)) if first else []


@dataclass(frozen=True)
class TrainedChoice:
    """A model that is trained."""

    seq: Annotated[int | None, _trained("--seq", help="tokens of each sample (512)")] = None
    dtype: Annotated[str | None, _trained("--dtype", metavar="FORMAT", help="bf16, fp16, fp32 or tf32")] = None
    precision: Annotated[str | None, _trained("--precision", metavar="NAME", help="pure, mixed or autocast")] = None
    image_size: Annotated[int | None, _trained("--image-size", help="pixels of an image's side")] = None
    optimizer: Annotated[str, _trained("--optimizer", metavar="NAME", help="adamw, adam, sgd, .., none")] = "adamw"
    accumulate: Annotated[int, _trained("--accumulate", help="passes before the optimizer steps")] = 1
    attention: Annotated[str, _trained("--attention", metavar="KIND", help="fused or math")] = "fused"
    checkpointing: Annotated[bool, _trained("--checkpointing", help="recompute activations")] = False
    graph: Annotated[bool, _trained("--graph", help="kernels replay from a CUDA graph")] = False
    host: Annotated[str, _trained("--host", metavar="NAME", help="whose time to launch kernels")] = "server"
    dp: Annotated[int, _trained("--dp", help="data-parallel ranks; --batch is that of each")] = 1
    tp: Annotated[int, _trained("--tp", help="GPUs that cut every layer")] = 1
    pp: Annotated[int, _trained("--pp", help="pipeline stages")] = 1
    ep: Annotated[int, _trained("--ep", help="data-parallel ranks that experts are dealt out to")] = 1
    zero: Annotated[int, _trained("--zero", help="1: optimizer states, 2: gradients, 3: parameters dealt out")] = 0
    micro_batches: Annotated[int, _trained("--micro-batches", help="passes of --batch before the step")] = 1
    tokens: Annotated[float | None, _trained("--tokens", help="of the whole training (1e12)")] = None
    samples: Annotated[float | None, _trained("--samples", help="of the whole training: an epoch's, say")] = None

    @property
    def cut(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("dp", "tp", "pp", "ep", "zero", "micro_batches")}


def refuse_others(choice: ServedChoice | TrainedChoice, what: str) -> None:
    """Refuse options of the other half."""
    kind: type = type(choice)
    given = [flag_of(kind, one.name) for one in fields(choice) if getattr(choice, one.name) != one.default]
    if given:
        raise KernelcastError(f"{', '.join(given)} {what}")
