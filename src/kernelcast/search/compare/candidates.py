"""Ways to run a model on one GPU kind: layouts and batches that fit, and the few of them that are worth a forecast.

Memory is looked at first. What is left is put in order by a rough time (peaks of the chip, bytes and links; it is never
told), and only the best few layouts, each at the batches around its rough best, are forecast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernelcast.errors import KernelcastError, unknown
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.hardware import Gpu, changed, gpu, gpu_ids
from kernelcast.hardware.prices import Price
from kernelcast.inference.deployment import scheduler_defaults
from kernelcast.inference.forward import Deployment
from kernelcast.inference.memory import cache_bytes, largest_batch, memory, read_weight_bytes
from kernelcast.inference.workload import Workload
from kernelcast.models.architecture import Architecture
from kernelcast.models.precision import CACHE, WEIGHTS, Precision
from kernelcast.ops.dtypes import find_dtype, supports_dtype
from kernelcast.schedule import Memory
from kernelcast.search.goals import Goal
from kernelcast.search.layouts import POWERS, cuts
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
            sixteen = "bf16" if supports_dtype(chip, "bf16") else "fp16"
            names = dict.fromkeys(sixteen if name == ALL[0] else name for name in self.formats)
            found = [Precision.of(self.model, name, self.kv_dtype) for name in names]
        return [
            kind for kind in found if supports_dtype(chip, kind.weights) and supports_dtype(chip, kind.expert_weights)
        ]


def listed(names: str | Sequence[str]) -> list[str]:
    """Names in a list, or in text with commas."""
    return [word.strip() for word in (names.split(",") if isinstance(names, str) else names) if word.strip()]


def chosen_gpus(names: str | Sequence[str], what_ifs: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """GPUs by name (``all``: the catalogue), each followed by its what-ifs; of one what-if, changes are joined with
    commas."""
    found: dict[str, Gpu] = {}
    for word in listed(names):
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
    wanted = ", ".join(name for name in names if name == ALL[0] or not supports_dtype(chip, name))
    able = [name for name in ("bf16", "fp16", "fp8", "int8", "nvfp4") if supports_dtype(chip, find_dtype(name).name)]
    return f"has no {wanted} arithmetic; --formats {able[0]} would run" if able else f"has no {wanted} arithmetic"


LAYOUTS = 24  # that are forecast of a GPU and a format: all of a dense model on 8 GPUs
_MATH, _DRAM = 0.6, 0.8  # of the peaks, that rough times take for reached
_PARTS = 8  # of a batch, in steps of which a better one is looked for
_HOP_S = 8e-6  # of a small all-reduce


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way: ``batch`` requests under way on each of ``replicas`` engines, of at most ``most``. ``full``: more do not
    fit in memory."""

    deployment: Deployment
    replicas: int
    batch: int
    most: int = 0
    full: bool = False

    @property
    def gpus(self) -> int:
        return self.deployment.layout.gpus * self.replicas


@dataclass(frozen=True)
class Unfit:
    """Why nothing runs on a GPU: in words, and by memory the least that one GPU would need."""

    why: str
    memory: Memory | None = None


def candidates(asked: Asked, chip: Gpu, *, thorough: bool = False) -> list[Candidate] | Unfit:
    """What to forecast on ``chip``; ``thorough``: everything that fits."""
    kinds = asked.precisions(chip)
    if not kinds:
        return Unfit(lacking(asked, chip))
    found: list[Candidate] = []
    short: list[tuple[Deployment, Memory]] = []
    held = 0
    for kind in kinds:
        places = list(_places(asked, chip, kind, short))
        held = max([held, *(most * (asked.max_gpus // place.layout.gpus) for place, most in places)])
        ways = [list(_batches(asked, place)) for place in places]
        found += [way for batches in (ways if thorough else _worth(asked, ways)) for way in batches]
    return found or _unfit(asked, short, held)


def _places(
    asked: Asked, chip: Gpu, kind: Precision, short: list[tuple[Deployment, Memory]]
) -> Iterator[tuple[Deployment, int]]:
    """Cuts that hold the weights and one request, with the most requests that each holds; the others go to ``short``.
    Stages of a pipeline take turns: a batch passes them in as many parts."""
    stages = [n for n in POWERS if n <= asked.max_gpus]
    one = Workload.equal(1, asked.input_len, asked.output_len)
    for layout in cuts(asked.model, asked.max_gpus, pp=stages):
        try:
            place = Deployment(
                asked.model, chip, asked.stack, kind, replace(layout, micro_batches=layout.pp), asked.skew
            )
        except KernelcastError:  # the model cannot be cut so
            continue
        most = largest_batch(place, one)
        if most:
            yield place, most
        else:
            tokens = min(asked.input_len, one.on(place).chunk or asked.input_len)
            short.append((place, memory(place, {asked.input_len + asked.output_len: 1}, tokens, 1)))


def _unfit(asked: Asked, short: list[tuple[Deployment, Memory]], held: int) -> Unfit:
    """``held``: requests that do fit."""
    if held:
        return Unfit(f"has no room for a batch of {asked.batch:,}: {asked.max_gpus} of them hold {held:,}")
    if not short:
        return Unfit(f"{asked.model.name} cannot be cut over {asked.max_gpus} GPUs or fewer")
    place, least = min(short, key=lambda one: one[1].used_bytes)
    need, has = (size / 2**30 for size in (least.used_bytes, least.available_bytes))
    return Unfit(f"needs {need:.1f} GiB a GPU on {place.layout.gpus} of them, has {has:.1f}", least)


def _batches(asked: Asked, place: tuple[Deployment, int]) -> Iterator[Candidate]:
    """Sizes that a cut may run: of a static batch its share of each of 1, 2, 4, .. engines; else 1, 2, 4, .. requests
    under way, up to what memory and the engine's own limit hold."""
    deployment, held = place
    engines = asked.max_gpus // deployment.layout.gpus
    if asked.batch is not None:
        for replicas in _doubling(min(engines, asked.batch)):
            each = math.ceil(asked.batch / replicas)
            if each <= held:
                yield Candidate(deployment, replicas, each)
        return
    own = scheduler_defaults(asked.stack, deployment.gpu).get("max_num_seqs")
    most = min(held, int(own) * deployment.layout.dp) if own else held
    sizes = _doubling(most)
    if asked.rate is None and not asked.goals:
        sizes = [1] if asked.by == "latency" else [most]
    for batch in sizes:
        yield Candidate(deployment, engines, batch, most, full=batch == held)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, .. and ``most`` itself."""
    return sorted({*(2**n for n in range(most.bit_length())), most} - {0})


def between(way: Candidate) -> list[Candidate]:
    """Batches from this one to the next that was looked at, in eighths of it."""
    step = max(1, way.batch // _PARTS)
    return [replace(way, batch=n, full=False) for n in range(way.batch + step, min(2 * way.batch, way.most), step)]


# ---- what is worth a forecast ----
def _worth(asked: Asked, ways: list[list[Candidate]]) -> list[list[Candidate]]:
    """The layouts that promise most by rough times, each at the sizes around its best."""
    kept = []
    for batches in ways:
        scores = [_promise(asked, way) for way in batches]
        if scores:
            best = min(range(len(batches)), key=lambda at: scores[at])
            # Rough times are on the fast side: where a rate must be carried, larger batches than they say may do it
            near = batches if asked.rate is not None else batches[max(0, best - (3 if asked.goals else 1)) : best + 2]
            kept.append((min(scores), near))
    kept.sort(key=lambda one: one[0])
    return [near for _, near in kept[:LAYOUTS]]


def _promise(asked: Asked, way: Candidate) -> tuple[float, float]:
    """Roughly: how far beyond the goals, then what it is chosen by; less is better."""
    read_s, step_s = rough_times(asked, way)
    total_s = way.batch * read_s + (asked.output_len - 1) * step_s
    each = (asked.output_len - 1) or 1
    seconds = {"ttft": read_s, "tpot": (total_s - read_s) / each, "e2el": total_s}
    late = max((1e3 * seconds[goal.metric] / goal.limit_ms for goal in asked.goals), default=0.0)
    rate = way.batch / total_s
    replicas = way.replicas if asked.rate is None else max(1, math.ceil(asked.rate / rate))
    gpus = replicas * way.deployment.layout.gpus
    over = max(0.0, late - 1) + max(0.0, gpus / asked.max_gpus - 1)
    if asked.by == "latency":
        return over, total_s
    if asked.rate is not None:
        return over, gpus + 1e-3 * total_s
    return over, -rate / way.deployment.layout.gpus if asked.by != "throughput" else -rate * replicas


def rough_times(asked: Asked, way: Candidate) -> tuple[float, float]:
    """Seconds to read a prompt among others, and of a decode step, by peaks alone."""
    place, layout = way.deployment, way.deployment.layout
    gpu, model = place.gpu, place.model
    unit = find_dtype(place.precision.weights).math
    peak = _MATH * max(gpu.tensor_flops_per_s(unit), gpu.fma_flops_per_s(unit), 1.0) * layout.gpus
    active = model.active_parameters
    flops = 2.0 * (active.attention + active.mlp + active.experts)
    link = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s
    hidden_s = model.layer_count * model.hidden * 2 / link  # a token through every layer, once
    sent = 4.0 * hidden_s * (layout.tp - 1) / layout.tp  # two all-reduces a layer
    shared = 2.0 * hidden_s if layout.dp > 1 else 0.0  # tokens of all ranks go to the experts and come back
    hops = 2.0 * model.layer_count * _HOP_S if layout.tp * layout.dp > 1 else 0.0
    tokens = way.batch / layout.micro_batches / layout.dp
    context = asked.input_len + asked.output_len // 2
    read = read_weight_bytes(place, tokens) + tokens * layout.dp * cache_bytes(place, context)
    step_s = layout.pp * max(read / (_DRAM * gpu.dram_bytes_per_s), way.batch / layout.pp * flops / peak)
    talk_s = tokens * (sent + shared * layout.dp)
    return asked.input_len * (flops / peak + sent / layout.dp + shared), step_s + hops + talk_s
