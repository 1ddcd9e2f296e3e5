"""Every GPU at its best way to run a model: which GPUs at which prices, what is served, and what is trained."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.parameters import Question, option
from kernelcast.app.questions.trace import NEEDS_TORCH, StepParameters, step_conditions
from kernelcast.app.questions.train import LONGEST
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.search.compare.compare import Comparison, ServingForecast
    from kernelcast.search.compare.sensitivity import Gain
    from kernelcast.search.compare.training import TrainingComparison

Gains = list[tuple["ServingForecast", "tuple[Gain, ...]"]]

_OF_TRACES = ("dtype", "image_size", "accumulate", "attention", "graph", "host")  # parameters of PyTorch's step
_FIRST = 3  # GPUs of the sensitivity analysis
_limit = partial(option, metavar="TIME")


@dataclass(frozen=True)
class GpusAndPrices(shared.PredictorParameters):
    """Which GPUs, at which prices."""

    panel: ClassVar[str | None] = "GPUs and prices"

    gpus: Annotated[
        str | Sequence[str] | None,
        option(metavar="ID,..", help="GPUs to compare, or all (required)", type=str | None,
               values=partial(shared.gpu_names, "all")),
    ] = None  # fmt: skip
    max_gpus: Annotated[int, option(help="GPUs at most, of one model")] = 8
    what_if: Annotated[
        list[str] | None,
        option(metavar="FIELD*FACTOR", help="a variant of every GPU, or FIELD=VALUE; may be repeated"),
    ] = None
    by: Annotated[
        str | None,
        option(metavar="WHAT", help="dollars, latency, throughput or joules; default: dollars, then (without a price) "
               "throughput a GPU", values=partial(shared.names_of, "search.compare.candidates", "BY")),
    ] = None  # fmt: skip
    prices: shared.PricesFile = None
    price: shared.Price = None
    price_kind: shared.PriceKind = "on_demand"

    @property
    def gpu_arguments(self) -> dict[str, Any]:
        """As ``search.compare`` takes them."""
        names = "all" if self.gpus is None else self.gpus
        if isinstance(names, str) and not names.replace(",", "").strip():
            raise KernelcastError(f"`gpus` is a list with commas, as in h100_sxm,h200_sxm, or all, not {self.gpus!r}")
        return {
            "gpus": names, "max_gpus": self.max_gpus, "what_if": self.what_if or (),
            "by": self.by, "prices": self.prices, "price": self.price or (), "price_kind": self.price_kind,
        }  # fmt: skip


@dataclass(frozen=True)
class ServedModel(Question):
    """A model that serves requests."""

    panel: ClassVar[str | None] = "Serving"

    rate: Annotated[float | None, option(help="requests per second to sustain")] = None
    input_len: shared.InputLen = None
    output_len: shared.OutputLen = None
    ttft: Annotated[str | None, _limit(help="limit of the mean time to first token")] = None
    tpot: Annotated[str | None, _limit(help="limit of the mean time per output token")] = None
    e2el: Annotated[str | None, _limit(help="limit of the mean end-to-end latency")] = None
    stack: Annotated[
        str | None, option(metavar="NAME", help="vllm (or sglang, trtllm, torch)", values=shared.stack_names)
    ] = None
    formats: Annotated[
        str | None,
        option(metavar="FORMAT,..", help="formats of weights, a row each, or all; default: the checkpoint's",
               values=partial(shared.weight_formats, "all"), reads=shared.number_format),
    ] = None  # fmt: skip
    kv_dtype: shared.KvFormat = None
    thorough: Annotated[bool, option(help="forecast every layout, not only the most promising")] = False
    sensitivity: Annotated[bool, option(help="what 1% more of each spec buys, of the first three GPUs")] = False

    @property
    def served_arguments(self) -> dict[str, Any]:
        """As ``search.compare`` takes them."""
        given = {field.name: getattr(self, field.name) for field in fields(ServedModel) if field.name != "sensitivity"}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class CompareQuestion(ServedModel, GpusAndPrices):
    """Every GPU at its best way to serve a model."""

    command: ClassVar[str] = "compare"

    model: shared.ModelName
    batch: Annotated[int | None, option(help="requests of one static batch", maximum=1 << 20)] = None

    def answer(self) -> Comparison:
        """The GPUs, in order."""
        from kernelcast.search.compare.compare import compare

        return compare(self.model, **self.gpu_arguments, **self.served_arguments, batch=self.batch,
                       conditions=self.conditions)  # fmt: skip

    def gains(self, comparison: Comparison) -> Gains:
        """With ``sensitivity``: what one per cent more of each spec buys, of the first few real GPUs."""
        from kernelcast.search.compare.sensitivity import sensitivity

        real: dict[str, ServingForecast] = {}  # the best format of each
        for served in comparison.fitting if self.sensitivity else ():
            if not served.deployment.gpu.changes:
                real.setdefault(served.deployment.gpu.label, served)
        first = list(real.values())[:_FIRST]
        return list(zip(first, sensitivity(first), strict=True)) if first else []


@dataclass(frozen=True)
class TrainedModel(StepParameters):
    """A model that is trained."""

    panel: ClassVar[str | None] = "Training step"

    tokens: Annotated[float | None, option(help="tokens of the whole training (1e12)")] = None
    samples: Annotated[float | None, option(help="samples of the whole training, such as an epoch's")] = None


@dataclass(frozen=True, kw_only=True)
class CompareTrainingQuestion(TrainedModel, GpusAndPrices):
    """Every GPU at its best way to train a model."""

    command: ClassVar[str] = "compare"

    model: shared.ModelName
    batch: Annotated[int, option(help="samples of a step")] = 1

    def answer(self) -> TrainingComparison:
        """The GPUs, in order; what is wrong is refused before the model is traced."""
        arguments = self.gpu_arguments
        from kernelcast.hardware.prices import read_prices
        from kernelcast.search.compare.candidates import chosen_gpus
        from kernelcast.search.compare.training import compare_training
        from kernelcast.training.layout import TrainingLayout

        chosen_gpus(arguments["gpus"], self.what_if or ())
        read_prices(self.prices, self.price or (), self.price_kind)
        layout = TrainingLayout(**self.parallel_sizes)
        whole: dict[str, Any] = {"layout": None if layout == TrainingLayout() else layout, "tokens": self.tokens,
                 "samples": self.samples, "conditions": step_conditions(self.conditions)}  # fmt: skip
        if (job := self._transformer()) is not None:
            return compare_training(None, **arguments, **whole, **job)
        if importlib.util.find_spec("torch") is None:
            raise KernelcastError(NEEDS_TORCH)
        self.check("training")
        traced = self.traced(self.model, self.batch, "training")
        return compare_training(traced, **arguments, **whole, how=self.launching)

    def _transformer(self) -> dict[str, Any] | None:
        """The model, where its layers are known and nothing is asked of PyTorch; None: it is traced."""
        from kernelcast.models.architecture import Architecture
        from kernelcast.training.job import OPTIMIZERS, Recompute, precision, precision_names

        recipe = self.precision or "bf16"
        if self.given(*_OF_TRACES) or self.optimizer not in OPTIMIZERS or recipe not in precision_names():
            return None
        try:
            model: Architecture = shared.resolve_model(self.model)
        except KernelcastError:
            return None
        if not model.generates:
            return None
        settings = {"precision": precision(recipe), "optimizer": self.optimizer}
        if self.checkpointing:
            settings["recompute"] = Recompute("full")
        seq = self.seq or min(model.max_context or LONGEST, LONGEST)
        return {"model": model, "batch": self.batch, "seq": seq, "settings": settings}
