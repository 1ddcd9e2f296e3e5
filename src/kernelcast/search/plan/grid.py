"""What a plan may choose from: GPUs, engines, formats, cuts of a model, limits of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.hardware.prices import Price
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.models.architecture import Architecture
from kernelcast.models.precision import Precision
from kernelcast.ops.dtypes import find_dtype
from kernelcast.search.layouts import layouts as layouts_within
from kernelcast.serving.service import EnginePool, EngineSettings, Service, engine_settings
from kernelcast.stacks import Stack

SEQUENCES = (64, 256)  # beside the engine's own default
TOKENS = (2048, 8192, 16384)


@dataclass(frozen=True)
class Grid:
    """What to try; None: what is usual for the model and the GPU. ``disaggregated``: also, only, or not with engines
    that read prompts apart from those that decode."""

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

    def __post_init__(self) -> None:
        if self.max_gpus < 1:
            raise KernelcastError(f"--max-gpus is 1 or more, not {self.max_gpus}")
        if not self.gpus:
            raise KernelcastError("no GPU has a price: give --price GPU=USD per hour, or --prices FILE")


@dataclass(frozen=True, eq=False)
class Place:
    """An engine on its GPUs: a deployment with its price. ``limits``: what its batches may be limited to."""

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
        """Limits that hold all of its own: one table of step times serves them."""
        most = {name: max(getattr(limit, name) for limit in self.limits)
                for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "kv_blocks")}  # fmt: skip
        return replace(self.limits[0], **most)


@dataclass(frozen=True, eq=False)
class Setting:
    """One service that may be the answer: engines that are alike, perhaps beside others that read prompts."""

    place: Place
    limits: EngineSettings
    replicas: int
    reader: Place | None = None
    reader_limits: EngineSettings | None = None
    readers: int = 0

    @property
    def gpus(self) -> int:
        return self.replicas * self.place.gpus + (self.readers * self.reader.gpus if self.reader else 0)

    @property
    def usd_per_hour(self) -> float:
        return self.gpus * self.place.price.usd_per_hour

    def service(self, parts: int = 1) -> Service:
        """Or one of so many equal parts of it."""
        prefill = None
        if self.reader is not None and self.reader_limits is not None:
            prefill = EnginePool(self.reader.deployment, self.reader_limits, self.readers // parts)
        return Service(EnginePool(self.place.deployment, self.limits, self.replicas // parts), prefill)


@dataclass
class Fallen:
    """How many settings fell out, by why."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, why: str, count: int) -> None:
        if count > 0:
            self.counts[why] = self.counts.get(why, 0) + count


NO_MEMORY, NO_CUT = "does not fit in memory", "the model cannot be cut so"


def places(model: Architecture, grid: Grid, context: int, fallen: Fallen) -> Iterator[Place]:
    """Every engine that the grid allows and that holds the model; what does not is counted in ``fallen``."""
    for (chip, price), stack in itertools.product(grid.gpus, grid.stacks):
        if stack.id == "trtllm" and chip.vendor != "nvidia":
            continue
        for kind in formats(model, chip, grid):
            for layout in layouts(model, grid):
                count = _limit_count(grid) * (grid.max_gpus // layout.gpus)
                try:
                    place = Deployment(model, chip, stack, kind, layout, grid.skew)
                except KernelcastError:
                    fallen.add(NO_CUT, count)
                    continue
                found = _limits(place, grid, context)
                if found:
                    yield Place(place, price, found)
                else:
                    fallen.add(NO_MEMORY, count)


def formats(model: Architecture, chip: Gpu, grid: Grid) -> list[Precision]:
    """As the checkpoint is, and fp8 of one that is whole; what the GPU has no arithmetic for is left out."""
    if grid.formats is None:
        own = Precision.of(model, None, grid.kv_dtype)
        chosen = [own]
        if model.quantization is None:
            chosen.append(Precision("fp8", grid.kv_dtype))
    else:
        chosen = [Precision.of(model, name, grid.kv_dtype) for name in grid.formats]
    return [kind for kind in chosen if _has(chip, kind.weights) and _has(chip, kind.expert_weights)]


def _has(chip: Gpu, name: str) -> bool:
    unit = find_dtype(name).math
    return unit in chip.tensor_flops_per_clk_sm or unit in chip.fma_flops_per_clk_sm


def layouts(model: Architecture, grid: Grid) -> list[Layout]:
    """Cuts within the GPUs allowed."""
    return layouts_within(model, grid.max_gpus, grid.tp, grid.pp, grid.dp, grid.ep)


def _limit_count(grid: Grid) -> int:
    seqs, tokens = grid.max_num_seqs, grid.max_num_batched_tokens
    return (len(seqs) if seqs else len(SEQUENCES) + 1) * (len(tokens) if tokens else len(TOKENS))


def _limits(place: Deployment, grid: Grid, context: int) -> tuple[EngineSettings, ...]:
    """Limits of a batch, the engine's own first; those that leave no cache, or that it refuses, are left out."""
    try:
        usual = engine_settings(place, {}, context)
    except KernelcastError:
        usual = None
    seqs: Sequence[int] = grid.max_num_seqs or (*((usual.max_num_seqs,) if usual else ()), *SEQUENCES)
    tokens: Sequence[int] = grid.max_num_batched_tokens or TOKENS
    if usual and grid.max_num_batched_tokens is None:
        tokens = (usual.max_num_batched_tokens, *(n for n in TOKENS if n != usual.max_num_batched_tokens))
    found = []
    for most, step in itertools.product(dict.fromkeys(seqs), dict.fromkeys(tokens)):
        given = {"max_num_seqs": most, "max_num_batched_tokens": step}
        try:
            found.append(engine_settings(place, given, context))
        except KernelcastError:
            continue
    return tuple(found)
