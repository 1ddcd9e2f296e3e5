"""What is compared, and the candidate deployments on a GPU that are worth a forecast.

Memory is checked first. Deployments that fit are ordered by a rough time (peaks, bytes and links; never shown), and
only the best few, each at the batch sizes around its rough best, are forecast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from kernelcast.errors import KernelcastError, refuse_unknown
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
from kernelcast.search.layouts import POWERS, layouts
from kernelcast.serving.goals import Goal
from kernelcast.stacks import Stack

BY = ("dollars", "latency", "throughput", "joules")
ALL_FORMATS = ("16-bit", "fp8", "int8", "int4", "nvfp4")  # 16 bits are bf16, or fp16 on a GPU without bf16
LAYOUTS = 24  # forecast per GPU and format: all of a dense model on 8 GPUs
_MATH, _DRAM = 0.6, 0.8  # shares of the peaks that rough times assume
_BATCH_STEPS = 8  # between a batch size and its double, in a closer search
_HOP_S = 8e-6  # a small all-reduce
F = TypeVar("F")  # a forecast of serving or training


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The common parameters of comparisons of serving and training. ``by`` None: dollars; GPUs without a price follow,
    by throughput per GPU."""

    gpus: tuple[Gpu, ...]
    max_gpus: int = 8
    by: str | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    conditions: Conditions = DEFAULT

    def __post_init__(self) -> None:
        if not self.gpus:
            raise KernelcastError("no GPU to compare: give `gpus` h100_sxm,h200_sxm or `gpus` all")
        if self.max_gpus < 1:
            raise KernelcastError(f"`max_gpus` is 1 or more, not {self.max_gpus}")
        refuse_unknown("`by`", [self.by] if self.by is not None else [], BY)

    def price(self, gpu: Gpu) -> Price | None:
        """Per GPU-hour; a what-if has the price of the GPU that it changes."""
        return self.prices.get(gpu.known_as)


@dataclass(frozen=True, kw_only=True)
class ServingScenario(Scenario):
    """``batch``: requests of one static batch; ``rate``: requests per second to carry; neither: the number of running
    requests that gives most within the goals. ``formats`` None: as the checkpoint is."""

    model: Architecture
    stack: Stack
    input_len: int = 1024
    output_len: int = 128
    batch: int | None = None
    rate: float | None = None
    goals: tuple[Goal, ...] = ()
    formats: tuple[str, ...] | None = None
    kv_dtype: str | None = None
    skew: float = 0.0  # of tokens over experts; 0: as trained routers choose

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("`input_len`", self.input_len), ("`output_len`", self.output_len)):
            if value < 1:
                raise KernelcastError(f"{name} is 1 or more, not {value}")
        tokens = self.input_len + (self.output_len if self.model.generates else 0)
        if tokens > self.model.max_context:
            raise KernelcastError(
                f"a request of {tokens:,} tokens exceeds the context of {self.model.name}, {self.model.max_context:,}"
            )
        if self.batch is not None and self.batch < 1:
            raise KernelcastError(f"`batch` is 1 or more requests, not {self.batch}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise KernelcastError(f"`rate` is a number of requests a second above 0, not {self.rate:g}")
        if self.batch is not None and self.rate is not None:
            raise KernelcastError("give `batch` (one static batch) or `rate` (requests a second), not both")
        given = [name for name in self.formats or () if name != ALL_FORMATS[0]]
        refuse_unknown("number format of weights", given, (*WEIGHTS, "all"))
        refuse_unknown("number format of the KV cache", [self.kv_dtype] if self.kv_dtype is not None else [], CACHE)

    @property
    def counted_tokens(self) -> int:
        """Tokens of a request that count as throughput: its output; of an encoder its input."""
        return self.output_len if self.model.generates else self.input_len

    @property
    def steady(self) -> bool:
        """Requests come and go, rather than start together as one static batch."""
        return self.batch is None

    @property
    def request(self) -> Workload:
        return Workload.equal(1, self.input_len, self.output_len)

    def by_format(self) -> list[ServingScenario]:
        """The same of each format that was asked for: a comparison has a row of each."""
        return [replace(self, formats=(name,)) for name in self.formats] if self.formats else [self]

    def precisions(self, gpu: Gpu) -> list[Precision]:
        """Formats that are allowed and that the GPU has arithmetic for."""
        names: list[str | None] = [None]
        if self.formats is not None:
            sixteen = "bf16" if supports_dtype(gpu, "bf16") else "fp16"
            names = list(dict.fromkeys(sixteen if name == ALL_FORMATS[0] else name for name in self.formats))
        known = [Precision.of(self.model, name, self.kv_dtype).on(gpu) for name in names]
        return [p for p in known if supports_dtype(gpu, p.weights) and supports_dtype(gpu, p.expert_weights)]

    def missing_formats(self, gpu: Gpu) -> str:
        """Why a GPU runs none of the formats."""
        checkpoint = Precision.of(self.model) if self.formats is None else None
        names = (checkpoint.weights, checkpoint.expert_weights) if checkpoint else self.formats or ()
        missing = [name for name in dict.fromkeys(names) if name == ALL_FORMATS[0] or not supports_dtype(gpu, name)]
        able = [name for name in ("bf16", "fp16", "fp8", "int8", "nvfp4") if supports_dtype(gpu, name)]
        hint = f"; {able[0]} would run" if able else ""
        return f"has no {', '.join(missing)} arithmetic{hint}"


def split_names(names: str | Sequence[str]) -> list[str]:
    """Names in a list, or in text with commas."""
    return [name.strip() for name in (names.split(",") if isinstance(names, str) else names) if name.strip()]


def chosen_gpus(names: str | Sequence[str], what_ifs: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """GPUs by name (``all``: the catalogue), each followed by its what-ifs; the changes of one what-if are joined with
    commas."""
    chosen: dict[str, Gpu] = {}
    for given in split_names(names):
        for base in map(gpu, gpu_ids() if given == "all" else (given,)):
            for variant in (base, *(changed(base, text.split(","), "what_if") for text in what_ifs)):
                chosen.setdefault(variant.label, variant)
    return tuple(chosen.values())


@dataclass(frozen=True, eq=False)
class ComparisonRow(Generic[F]):
    """A GPU: the forecast of its best deployment, or why there is none; where memory is short, the least that one GPU
    would need. ``format``: of weights, where each has a row."""

    gpu: Gpu
    best: F | None
    why: str = ""
    memory: Memory | None = None
    meets: bool = False  # goals are kept and the rate is carried
    refused: bool = False  # it could not run, with any memory
    format: str | None = None


@dataclass(frozen=True, eq=False)
class Candidate:
    """``batch`` running requests on each of ``replicas`` engines, at most ``max_batch``. ``full``: memory holds no
    more."""

    deployment: Deployment
    replicas: int
    batch: int
    max_batch: int = 0
    full: bool = False

    def larger_batches(self) -> list[Candidate]:
        """Up to the next power of two, in eighths."""
        step, end = max(1, self.batch // _BATCH_STEPS), min(2 * self.batch, self.max_batch)
        return [replace(self, batch=n, full=False) for n in range(self.batch + step, end, step)]


def candidates(scenario: ServingScenario, gpu: Gpu, *, thorough: bool = False) -> list[Candidate] | ComparisonRow[Any]:
    """The candidates to forecast on ``gpu`` (``thorough``: everything that fits), or a row that says why nothing
    runs."""
    if not scenario.stack.runs_on(gpu.vendor):
        return ComparisonRow(gpu, None, f"{scenario.stack.name} does not run on GPUs of {gpu.vendor.upper()}")
    precisions = scenario.precisions(gpu)
    if not precisions:
        return ComparisonRow(gpu, None, scenario.missing_formats(gpu), refused=True)
    chosen: list[Candidate] = []
    short: list[tuple[Memory, Deployment]] = []
    held = 0  # requests
    for precision in precisions:
        fitting = list(_fitting(scenario, gpu, precision, short))
        held = max([held, *(most * (scenario.max_gpus // each.layout.gpus) for each, most in fitting)])
        groups = [list(_batches(scenario, deployment, most)) for deployment, most in fitting]
        chosen += [each for group in (groups if thorough else _promising(scenario, groups)) for each in group]
    if chosen:
        return chosen
    if held:
        why = f"has no room for a batch of {scenario.batch:,}: {scenario.max_gpus} of them hold {held:,}"
        return ComparisonRow(gpu, None, why)
    if not short:
        why = f"{scenario.model.name} cannot be sharded over {scenario.max_gpus} GPUs or fewer"
        return ComparisonRow(gpu, None, why, refused=True)
    least, deployment = min(short, key=lambda pair: pair[0].used_bytes)
    need, has = (size / 2**30 for size in (least.used_bytes, least.available_bytes))
    why = f"needs {need:.1f} GiB a GPU on {deployment.layout.gpus} of them, has {has:.1f}"
    return ComparisonRow(gpu, None, why, least)


def _fitting(
    scenario: ServingScenario, gpu: Gpu, precision: Precision, short: list[tuple[Memory, Deployment]]
) -> Iterator[tuple[Deployment, int]]:
    """Deployments that hold the weights and one request, with the most requests that each holds; the others go to
    ``short``. A batch passes the stages of a pipeline in as many micro-batches."""
    request, context = scenario.request, scenario.input_len + scenario.output_len
    for layout in layouts(scenario.model, scenario.max_gpus, pp=[n for n in POWERS if n <= scenario.max_gpus]):
        layout = replace(layout, micro_batches=layout.pp)
        try:
            deployment = Deployment(scenario.model, gpu, scenario.stack, precision, layout, scenario.skew)
        except KernelcastError:  # the model cannot be sharded so
            continue
        most = largest_batch(deployment, request)
        if most:
            yield deployment, most
        else:
            tokens = min(scenario.input_len, request.on(deployment).chunk or scenario.input_len)
            short.append((memory(deployment, {context: 1}, tokens, 1), deployment))


def _batches(scenario: ServingScenario, deployment: Deployment, held: int) -> Iterator[Candidate]:
    """Batch sizes to try: a static batch on 1, 2, 4, .. engines; else 1, 2, 4, .. running requests, up to what
    memory and the scheduler's limit hold."""
    engines = scenario.max_gpus // deployment.layout.gpus
    if scenario.batch is not None:
        for replicas in _doubling(min(engines, scenario.batch)):
            each = math.ceil(scenario.batch / replicas)
            if each <= held:
                yield Candidate(deployment, replicas, each)
        return
    limit = scheduler_defaults(scenario.stack, deployment.gpu).get("max_num_seqs")
    most = min(held, int(limit) * deployment.layout.dp) if limit else held
    sizes = _doubling(most)
    if scenario.rate is None and not scenario.goals:
        sizes = [1] if scenario.by == "latency" else [most]
    for batch in sizes:
        yield Candidate(deployment, engines, batch, most, full=batch == held)


def _doubling(most: int) -> list[int]:
    """1, 2, 4, .. and ``most`` itself."""
    return sorted({*(2**n for n in range(most.bit_length())), most} - {0})


def _promising(scenario: ServingScenario, groups: list[list[Candidate]]) -> list[list[Candidate]]:
    """The deployments with the best rough times, each at the batch sizes around its best."""
    kept = []
    for group in groups:
        scores = [_rough_score(scenario, candidate) for candidate in group]
        if scores:
            best = min(range(len(group)), key=lambda at: scores[at])
            # Rough times are on the fast side: larger batches than they say may carry a rate
            near = group if scenario.rate is not None else group[max(0, best - (3 if scenario.goals else 1)) : best + 2]
            kept.append((min(scores), near))
    kept.sort(key=lambda pair: pair[0])
    return [near for _, near in kept[:LAYOUTS]]


def _rough_score(scenario: ServingScenario, candidate: Candidate) -> tuple[float, float]:
    """How far beyond the goals, then what the order is by; less is better."""
    prefill_s, step_s = rough_times(scenario, candidate)
    steps = scenario.output_len - 1
    total_s = candidate.batch * prefill_s + steps * step_s
    seconds = {"ttft": prefill_s, "tpot": (total_s - prefill_s) / (steps or 1), "e2el": total_s}
    late = max((1e3 * seconds[goal.metric] / goal.limit_ms for goal in scenario.goals), default=0.0)
    rate = candidate.batch / total_s
    replicas = candidate.replicas if scenario.rate is None else max(1, math.ceil(scenario.rate / rate))
    gpus = replicas * candidate.deployment.layout.gpus
    over = max(0.0, late - 1) + max(0.0, gpus / scenario.max_gpus - 1)
    if scenario.by == "latency":
        return over, total_s
    if scenario.rate is not None:
        return over, gpus + 1e-3 * total_s
    return over, -rate / candidate.deployment.layout.gpus if scenario.by != "throughput" else -rate * replicas


def rough_times(scenario: ServingScenario, candidate: Candidate) -> tuple[float, float]:
    """Seconds to prefill a prompt among others, and of a decode step, by peaks alone."""
    deployment, layout = candidate.deployment, candidate.deployment.layout
    gpu, model = deployment.gpu, deployment.model
    unit = find_dtype(deployment.precision.weights).math
    peak = _MATH * max(gpu.tensor_flops_per_s(unit), gpu.fma_flops_per_s(unit), 1.0) * layout.gpus
    active = model.active_parameters
    flops = 2.0 * (active.attention + active.mlp + active.experts)
    link = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s
    hidden_s = model.layer_count * model.hidden * 2 / link  # a token through every layer, once
    all_reduce_s = 4.0 * hidden_s * (layout.tp - 1) / layout.tp  # two a layer
    dispatch_s = 2.0 * hidden_s if layout.dp > 1 else 0.0  # tokens of all ranks to the experts and back
    hops_s = 2.0 * model.layer_count * _HOP_S if layout.tp * layout.dp > 1 else 0.0
    tokens = candidate.batch / layout.micro_batches / layout.dp
    context = scenario.input_len + scenario.output_len // 2
    read = read_weight_bytes(deployment, tokens) + tokens * layout.dp * cache_bytes(deployment, context)
    step_s = layout.pp * max(read / (_DRAM * gpu.dram_bytes_per_s), candidate.batch / layout.pp * flops / peak)
    link_s = tokens * (all_reduce_s + dispatch_s * layout.dp)
    return scenario.input_len * (flops / peak + all_reduce_s / layout.dp + dispatch_s), step_s + hops_s + link_s
