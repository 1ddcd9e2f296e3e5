"""What a plan may choose from: GPUs, engines, formats, layouts, limits of a batch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import Price
from kernelcast.inference.forward import Deployment
from kernelcast.models.architecture import Architecture
from kernelcast.models.precision import Precision
from kernelcast.ops.dtypes import supports_dtype
from kernelcast.search.layouts import layouts
from kernelcast.serving.service import EnginePool, EngineSettings, Service, engine_settings
from kernelcast.stacks import Stack

SEQUENCES = (64, 256)  # max_num_seqs to try beside the engine's default
TOKENS = (2048, 8192, 16384)  # max_num_batched_tokens to try
NO_MEMORY, NO_LAYOUT = "does not fit in memory", "the model cannot be sharded so"


@dataclass(frozen=True)
class SearchSpace:
    """The search space; None: defaults for the model and the GPU. ``disaggregated``: also, only, or not with separate
    prefill and decode engines."""

    gpus: tuple[tuple[Gpu, Price], ...]
    stacks: tuple[Stack, ...]
    max_gpus: int = 64
    formats: tuple[str, ...] | None = None
    kv_dtype: str | None = None
    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2)
    dp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    max_num_seqs: tuple[int, ...] | None = None
    max_num_batched_tokens: tuple[int, ...] | None = None
    disaggregated: str = "also"
    skew: float = 0.0  # of tokens over experts; 0: as trained routers choose
    budget: float = math.inf  # USD per hour, of all GPUs

    def __post_init__(self) -> None:
        if self.max_gpus < 1:
            raise KernelcastError(f"`max_gpus` is 1 or more, not {self.max_gpus}")
        if not self.budget > 0:
            raise KernelcastError(f"`budget` is USD per hour, above 0, not {self.budget:g}")
        if not self.gpus:
            raise KernelcastError("no GPU has a price: give `price` GPU=USD per hour, or `prices` FILE")

    def gpus_within(self, price: Price) -> int:
        """GPUs of this price that are allowed and that the budget pays for."""
        paid = self.budget / price.usd_per_hour + 1e-9 if price.usd_per_hour else math.inf
        return int(min(self.max_gpus, paid))

    def most(self, engine: EngineOption) -> int:
        """Replicas that are allowed and that the budget pays for."""
        return self.gpus_within(engine.price) // engine.gpus

    def engines(self, model: Architecture, context: int, discarded: Counter[str]) -> Iterator[EngineOption]:
        """Every engine that holds the model; what does not is counted in ``discarded``."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        limits = (len(seqs) if seqs else len(SEQUENCES) + 1) * (len(tokens) if tokens else len(TOKENS))
        for (gpu, price), stack in itertools.product(self.gpus, self.stacks):
            if not stack.runs_on(gpu.vendor):
                continue
            allowed = layouts(model, self.max_gpus, self.tp, self.pp, self.dp, self.ep)
            for precision, layout in itertools.product(self._precisions(model, gpu), allowed):
                try:
                    deployment = Deployment(model, gpu, stack, precision, layout, self.skew)
                except KernelcastError:
                    discarded[NO_LAYOUT] += limits * (self.max_gpus // layout.gpus)
                    continue
                fitting = tuple(self._limits(deployment, context))
                if fitting:
                    yield EngineOption(deployment, price, fitting)
                else:
                    discarded[NO_MEMORY] += limits * (self.max_gpus // layout.gpus)

    def _precisions(self, model: Architecture, gpu: Gpu) -> list[Precision]:
        """The checkpoint's format, and fp8 for an unquantized one; formats that the GPU does not support are left
        out."""
        chosen = [Precision.of(model, name, self.kv_dtype).on(gpu) for name in self.formats or (None,)]
        if self.formats is None and model.quantization is None:
            chosen.append(Precision("fp8", self.kv_dtype))
        return [p for p in chosen if supports_dtype(gpu, p.weights) and supports_dtype(gpu, p.expert_weights)]

    def _limits(self, deployment: Deployment, context: int) -> Iterator[EngineSettings]:
        """Limits of a batch, the engine's default first, less those that leave no cache or that it refuses."""
        try:
            default = [engine_settings(deployment, {}, context)]
        except KernelcastError:
            default = []
        seqs = self.max_num_seqs or (*(each.max_num_seqs for each in default), *SEQUENCES)
        tokens = self.max_num_batched_tokens or (*(each.max_num_batched_tokens for each in default), *TOKENS)
        for most, step in itertools.product(dict.fromkeys(seqs), dict.fromkeys(tokens)):
            try:
                yield engine_settings(deployment, {"max_num_seqs": most, "max_num_batched_tokens": step}, context)
            except KernelcastError:
                continue


@dataclass(frozen=True, eq=False)
class EngineOption:
    """A deployment with its price. ``limits``: what its batches may be limited to."""

    deployment: Deployment
    price: Price
    limits: tuple[EngineSettings, ...]

    @property
    def gpus(self) -> int:
        return self.deployment.layout.gpus

    @property
    def usd_per_hour(self) -> float:
        return self.gpus * self.price.usd_per_hour

    @property
    def widest(self) -> EngineSettings:
        """Limits that hold all of ``limits``: one table of step times serves them."""
        most = {name: max(getattr(limit, name) for limit in self.limits)
                for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "kv_blocks")}  # fmt: skip
        return replace(self.limits[0], **most)


@dataclass(frozen=True, eq=False)
class ServiceCandidate:
    """A service that may be the answer: equal engines; disaggregated, these decode and ``prefill`` ones prefill."""

    engine: EngineOption
    limits: EngineSettings
    replicas: int
    prefill: EngineOption | None = None
    prefill_limits: EngineSettings | None = None
    prefill_replicas: int = 0

    @property
    def gpus(self) -> int:
        return self.replicas * self.engine.gpus + (self.prefill_replicas * self.prefill.gpus if self.prefill else 0)

    @property
    def usd_per_hour(self) -> float:
        return self.gpus * self.engine.price.usd_per_hour

    def service(self, parts: int = 1) -> Service:
        """The service, or one of so many equal parts of it."""
        prefill = None
        if self.prefill is not None and self.prefill_limits is not None:
            prefill = EnginePool(self.prefill.deployment, self.prefill_limits, self.prefill_replicas // parts)
        return Service(EnginePool(self.engine.deployment, self.limits, self.replicas // parts), prefill)
