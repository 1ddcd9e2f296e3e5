"""What is compared: a model, GPUs, and what is asked of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.hardware import Gpu, changed, gpu, gpu_ids
from kernelcast.hardware.prices import Price
from kernelcast.models.architecture import Architecture
from kernelcast.models.precision import CACHE, WEIGHTS, Precision
from kernelcast.ops.dtypes import dtype, runs
from kernelcast.search.plan.goals import Goal
from kernelcast.stacks import Stack

BY = ("dollars", "latency", "throughput", "joules")
ALL = ("16-bit", "fp8", "int8", "int4", "nvfp4")  # of --formats all; 16 bits are bf16, or fp16 where a GPU has none


@dataclass(frozen=True)
class Asked:
    """``batch``: requests of one static batch; ``rate``: requests a second that must be carried; neither: as many under
    way as give the most within the goals. ``formats`` None: as the checkpoint is. ``by`` None: dollars, and throughput
    a GPU of those that have no price."""

    model: Architecture
    gpus: tuple[Gpu, ...]
    stack: Stack
    input_len: int = 1024
    output_len: int = 128
    batch: int | None = None
    rate: float | None = None
    goals: tuple[Goal, ...] = ()
    formats: tuple[str, ...] | None = None
    kv_dtype: str | None = None
    max_gpus: int = 8
    by: str | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    skew: float = 0.0  # of tokens over experts; 0: as trained routers choose
    conditions: Conditions = DEFAULT

    def __post_init__(self) -> None:
        if not self.gpus:
            raise KernelcastError("no GPU to compare: give --gpus h100_sxm,h200_sxm or --gpus all")
        for name, value in (("--input-len", self.input_len), ("--output-len", self.output_len)):
            if value < 1:
                raise KernelcastError(f"{name} is 1 or more, not {value}")
        tokens = self.input_len + (self.output_len if self.model.kind != "encoder" else 0)
        if tokens > self.model.max_context:
            raise KernelcastError(
                f"a request of {tokens:,} tokens exceeds the context of {self.model.name}, {self.model.max_context:,}"
            )
        if self.batch is not None and self.batch < 1:
            raise KernelcastError(f"--batch is 1 or more requests, not {self.batch}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise KernelcastError(f"--rate is a number of requests a second above 0, not {self.rate:g}")
        if self.batch is not None and self.rate is not None:
            raise KernelcastError("give --batch (one static batch) or --rate (requests a second), not both")
        if self.max_gpus < 1:
            raise KernelcastError(f"--max-gpus is 1 or more, not {self.max_gpus}")
        if self.by is not None and self.by not in BY:
            raise unknown("--by", self.by, BY)
        for name in self.formats or ():
            if name != ALL[0] and name not in WEIGHTS:
                raise unknown("number format of weights", name, (*WEIGHTS, "all"))
        if self.kv_dtype is not None and self.kv_dtype not in CACHE:
            raise unknown("number format of the KV cache", self.kv_dtype, CACHE)

    @property
    def output_tokens(self) -> int:
        """Of a request that are counted: what it writes; what it reads, of an encoder."""
        return self.input_len if self.model.kind == "encoder" else self.output_len

    @property
    def steady(self) -> bool:
        """Requests come and go; else they start together and that is all."""
        return self.batch is None

    def price(self, chip: Gpu) -> Price | None:
        """Of a GPU-hour; a what-if or a unit has that of the GPU that it is of."""
        return self.prices.get(chip.known_as)

    def precisions(self, chip: Gpu) -> list[Precision]:
        """Formats that are allowed and that the GPU has arithmetic for."""
        if self.formats is None:
            found = [Precision.of(self.model, None, self.kv_dtype)]
        else:
            sixteen = "bf16" if runs(chip, "bf16") else "fp16"
            names = dict.fromkeys(sixteen if name == ALL[0] else name for name in self.formats)
            found = [Precision.of(self.model, name, self.kv_dtype) for name in names]
        return [kind for kind in found if runs(chip, kind.weights) and runs(chip, kind.expert_weights)]


def chosen_gpus(names: Sequence[str], what_ifs: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """GPUs by name (``all``: the catalogue), each followed by its what-ifs; of one what-if, changes are joined with
    commas."""
    words = [word.strip() for word in names if word.strip()]
    found: dict[str, Gpu] = {}
    for word in words:
        for name in gpu_ids() if word == "all" else (word,):
            chip = gpu(name)
            found.setdefault(chip.label, chip)
            for text in what_ifs:
                variant = changed(chip, text.split(","), "--what-if")
                found.setdefault(variant.label, variant)
    return tuple(found.values())


def lacking(asked: Asked, chip: Gpu) -> str:
    """Why a GPU has none of the formats."""
    own = Precision.of(asked.model) if asked.formats is None else None
    names = dict.fromkeys((own.weights, own.expert_weights)) if own else asked.formats or ()
    wanted = ", ".join(name for name in names if name == ALL[0] or not runs(chip, name))
    able = [name for name in ("bf16", "fp16", "fp8", "int8", "nvfp4") if runs(chip, dtype(name).name)]
    return f"has no {wanted} arithmetic; --formats {able[0]} would run" if able else f"has no {wanted} arithmetic"
