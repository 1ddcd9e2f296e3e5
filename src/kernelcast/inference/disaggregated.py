"""Disaggregated deployments in steady state: prefill workers, decode workers, and the KV transfer between them.

A prefill worker runs one batch of prompts after another; a decode worker always holds as many requests as its batch
says. No request queues: the rate is what the slowest of both pools and the ports between them sustains (``simulate``
has arrivals and queues). The time to first token has the prefill of a batch, the KV transfer and one decode step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kernelcast.errors import DoesNotFit, KernelcastError
from kernelcast.forecast.calls import Call, Launch
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.end_to_end import WholeSupport
from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch_results import BatchResults
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import Inference, infer_many
from kernelcast.inference.memory import cache_bytes
from kernelcast.inference.workload import Speculation, Workload
from kernelcast.results import HtmlRepr, Interval, Renamed, independent, support_of
from kernelcast.schedule import EvidenceSummary, KernelTime, Memory, Share, shares

_PIECE_BYTES = 2**32  # larger transfers are split


def kv_transfer_bytes(decode: Deployment, tokens: int) -> float:
    """KV cache of a prompt of so many tokens, on all GPUs of the rank that decodes it."""
    layout = decode.layout
    return float(cache_bytes(decode, tokens)) * layout.dp * layout.tp * layout.pp  # cache_bytes: mean over ranks


def ports(deployment: Deployment) -> int:
    """GPUs of a rank, each of which sends or receives its shard of a request's cache."""
    return deployment.layout.tp * deployment.layout.pp


def port_bytes(prefill: Deployment, decode: Deployment, tokens: int, sent: int = 1, received: int = 1) -> float:
    """Bytes through the busiest port where a rank sends the caches of ``sent`` prompts at once and one receives
    ``received`` of them."""
    each = kv_transfer_bytes(decode, tokens)
    return max(sent * each / ports(prefill), received * each / ports(decode))


def transfer_fabric(prefill: Deployment, named: str | None) -> str | None:
    """The link of the KV transfer: the named one; NVLink where it spans a rack (None: the GPU's own); else that between
    nodes."""
    layout = prefill.layout
    return named or (layout.link if prefill.gpu.link_gpus > 1 else layout.between_nodes)


def kv_send(sent_bytes: float, fabric: str | None) -> Launch:
    """The transfers of one GPU's shard to one other GPU, in sequence."""
    pieces = max(1, math.ceil(sent_bytes / _PIECE_BYTES))
    parameters = {"dtype": "bf16", "fabric": fabric, "stack": "nccl"}
    return Launch(
        "KV cache", Call.of("send_recv", {"bytes": max(1, math.ceil(sent_bytes / pieces)), **parameters}), pieces
    )


def send_time(launch: Launch, times: Times) -> Interval:
    """The time of the transfer; ``times`` has the call."""
    return times[launch.call].interval * launch.count


HANDOVER = "handover"
_PHASES = ("prefill", "decode")
# Relative error of disaggregated deployments beyond their kernels (servers, routers, unknown settings):
# set on every second of 96 measured ones, of which it holds 81%, and 83% of the others; without it 43% lie inside.
_BEYOND = 0.2
_ROUNDS = 12  # until the requests held by decode workers settle


@dataclass(frozen=True)
class PhaseWorkers:
    """``count`` identical engines of one phase. ``batch``: prompts of a prefill, or requests that an engine holds while
    it decodes. A pipeline has as many batches in flight as stages: each stage prefills another batch, and requests that
    decode are split over the stages."""

    deployment: Deployment
    batch: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "count"):
            if getattr(self, name) < 1:
                raise KernelcastError(f"{name} of a pool must be 1 or more, not {getattr(self, name)}")

    @property
    def gpus(self) -> int:
        return self.count * self.deployment.layout.gpus

    @property
    def stages(self) -> int:
        return self.deployment.layout.pp


@dataclass(frozen=True)
class DisaggregatedDeployment:
    """Both pools, and the requests, which are all equal."""

    prefill: PhaseWorkers
    decode: PhaseWorkers
    input_tokens: int
    output_tokens: int
    cached: int = 0  # of each prompt, in the cache of prefill workers already
    chunk: int | None = None  # tokens of a prefill step; 0: all at once; None: the scheduler's default
    speculation: Speculation | None = None  # of decode workers
    transfer: str | None = None  # the fabric of the KV transfer; see ``transfer_fabric``

    def __post_init__(self) -> None:
        ends = self.prefill.deployment, self.decode.deployment
        if not ends[0].model.generates:
            raise KernelcastError(f"{ends[0].model.name} is an encoder: it does not decode")
        if ends[0].model.name != ends[1].model.name:
            raise KernelcastError(f"both pools serve one model, not {ends[0].model.name} and {ends[1].model.name}")
        caches = [deployment.precision.cache or deployment.precision.between for deployment in ends]
        if caches[0] != caches[1]:
            raise KernelcastError(f"both pools keep their KV cache in one format, not in {caches[0]} and {caches[1]}")
        if self.output_tokens < 2:
            raise KernelcastError(f"workers that decode need 2 output tokens or more, not {self.output_tokens}")

    @property
    def gpus(self) -> int:
        return self.prefill.gpus + self.decode.gpus

    @property
    def prefill_workload(self) -> Workload:
        """One batch of prompts; it gives each its first token."""
        return Workload.equal(self.prefill.batch, self.input_tokens, 1, self.cached, self.chunk)

    @property
    def decode_workload(self) -> Workload:
        """The requests of one decode step."""
        return self._decoding(-(-self.decode.batch // self.decode.stages))

    def _decoding(self, requests: int) -> Workload:
        """Their caches were transferred, all but the last token of the prompt."""
        return Workload.equal(requests, self.input_tokens, self.output_tokens, self.input_tokens - 1, 0,
                              self.speculation)  # fmt: skip

    @property
    def memories(self) -> tuple[Memory, Memory]:
        """Memory of a prefill GPU (batches in flight, caches in transfer) and of a decode GPU (all requests)."""
        deployment, workload = self.prefill.deployment, self.prefill_workload
        prefill = BatchResults(deployment, [workload.on(deployment)]).memory_of(0)
        parts = {**prefill.parts, "cache": self.prefill.stages * prefill["cache"], HANDOVER: prefill["cache"]}
        decode = BatchResults(self.decode.deployment, [self._decoding(self.decode.batch)]).memory_of(0)
        return replace(prefill, parts=parts), decode


@dataclass(frozen=True)
class KvTransfer:
    """The KV transfer of one batch. ``time``: until the last of those sent together has arrived. ``sending``,
    ``receiving``: how long ports of a prefill worker are busy with its batch, and of a decode rank with one cache."""

    fabric: str | None  # None: the GPU's own link
    request_bytes: float  # of one prompt, to all GPUs that decode it
    port_bytes: float  # through the busiest port in ``time``
    time: Interval
    sending: Interval
    receiving: Interval
    kernel: KernelTime


@dataclass(frozen=True)
class Disaggregated(Renamed, HtmlRepr):
    """Both pools. Rates are intervals too, in requests per second. ``prefill_batch`` is one batch of prompts,
    ``decode_batch`` the requests of one step."""

    pools: DisaggregatedDeployment
    prefill_batch: Inference
    decode_batch: Inference
    kv_transfer: KvTransfer
    prefill_memory: Memory
    decode_memory: Memory
    _renamed = {"reads": "prefill_batch", "decodes": "decode_batch", "handover": "kv_transfer"}

    @property
    def prefill(self) -> Interval:
        """Time to prefill a batch of prompts."""
        return _wider(self.prefill_batch.prefill)

    @property
    def step(self) -> Interval:
        """The mean decode step: requests of a batch are half done on average."""
        return self.decode * (1 / self.decode_batch.steps)

    @property
    def tpot(self) -> Interval:
        return self.decode * (1 / (self.pools.output_tokens - 1))

    @property
    def decode(self) -> Interval:
        """All tokens after the first."""
        return _wider(self.decode_batch.decode)

    @property
    def ttft(self) -> Interval:
        """Time to first token of the last prompt of a batch: its prefill, the KV transfer and its first decode step."""
        return self.prefill + self.kv_transfer.time + self.step

    @property
    def mean_ttft_s(self) -> float:
        """Over a batch: prompts prefilled in an early chunk do not wait for the others."""
        return self.prefill_batch.mean_ttft_s + self.kv_transfer.time.value + self.step.value

    @property
    def total(self) -> Interval:
        """End-to-end latency of a request."""
        return self.ttft + self.decode

    @cached_property
    def rates(self) -> dict[str, Interval]:
        """Requests per second that each sustains alone: prefill, decode, KV transfer."""
        prefill, decode = self.pools.prefill, self.pools.decode
        sending = _rate(prefill.count * prefill.batch, self.kv_transfer.sending)
        receiving = _rate(decode.count * decode.deployment.layout.dp, self.kv_transfer.receiving)
        return {
            "prefill": _rate(prefill.count * prefill.stages * prefill.batch, self.prefill),
            "decode": _rate(decode.count * decode.batch, self.step + self.decode),
            HANDOVER: _least(sending, receiving),
        }

    @property
    def limited_by(self) -> str:
        """The bottleneck among ``rates``."""
        return min(self.rates, key=lambda name: self.rates[name].value)

    @cached_property
    def requests_per_s(self) -> Interval:
        return _least(*self.rates.values())

    @property
    def tokens_per_s(self) -> Interval:
        """Output tokens."""
        return self.requests_per_s * self.pools.output_tokens

    @property
    def tokens_per_s_per_gpu(self) -> Interval:
        return self.tokens_per_s * (1 / self.pools.gpus)

    def busy(self, name: str) -> float:
        """Utilisation: 1 for the bottleneck."""
        return self.requests_per_s.value / self.rates[name].value

    @property
    def held_requests(self) -> float:
        """Requests that a decode worker holds on average: its batch, or fewer where it waits for prefills."""
        return self.pools.decode.batch * self.busy("decode")

    @property
    def prefill_per_decode(self) -> float:
        """Prefill workers that keep one decode worker busy."""
        each = {name: self.rates[name].value / getattr(self.pools, name).count for name in _PHASES}
        return each["decode"] / each["prefill"]

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Shares of the prefill of a batch, its KV transfer, and the decode steps of a request."""
        prefill = tuple(share for share in self.prefill_batch.shares if share.phase == "prefill")
        decode = tuple(share for share in self.decode_batch.shares if share.phase == "decode")
        return (*prefill, *shares([self.kv_transfer.kernel]), *decode)

    @cached_property
    def supports(self) -> WholeSupport:
        """Of the kernels, and of a run of the decode workers as a whole."""
        kernels = support_of((share.time_s, share.support) for share in self.shares)
        return WholeSupport.of(self.decode_batch.results.setting, kernels)

    @property
    def support(self) -> str:
        return self.supports.level

    @cached_property
    def rests_on(self) -> EvidenceSummary:
        """The measured configurations behind both phases and the KV transfer."""
        batches = zip(_PHASES, (self.prefill_batch, self.decode_batch), strict=True)
        kernels = [part * each.count for phase, inference in batches
                   for each in inference.passes if each.phase == phase for part in each.kernels]  # fmt: skip
        return EvidenceSummary.of([*kernels, self.kv_transfer.kernel])

    @cached_property
    def request_energy(self) -> Interval | None:
        """Joules of all GPUs for one request, without what idle pools draw; None without a power model, or where the
        batches of a pipeline overlap."""
        if self.pools.prefill.stages > 1 or self.pools.decode.stages > 1 or self.prefill_batch.energy is None:
            return None
        drawn = self.decode_batch.energies.get("decode")
        if drawn is None:
            return None
        steps = 1 + 1 / self.decode_batch.steps  # with the first
        gpus = self.pools.decode.deployment.layout.gpus
        return self.prefill_batch.energy * (1 / self.pools.prefill.batch) + drawn.joules * (
            steps * gpus / self.pools.decode.batch
        )

    @property
    def predictor(self) -> str:
        return self.prefill_batch.predictor


def infer_disaggregated(prefill: PhaseWorkers, decode: PhaseWorkers, input_tokens: int, output_tokens: int, *,
                        cached: int = 0, chunk: int | None = None, speculation: Speculation | None = None,
                        transfer: str | None = None, conditions: Conditions = DEFAULT) -> Disaggregated:  # fmt: skip
    """Forecast one disaggregated deployment."""
    pools = DisaggregatedDeployment(prefill, decode, input_tokens, output_tokens, cached, chunk, speculation, transfer)
    return infer_disaggregated_many([pools], conditions)[0]


def infer_disaggregated_many(
    deployments: Sequence[DisaggregatedDeployment], conditions: Conditions = DEFAULT
) -> list[Disaggregated]:
    """Forecast many; a kernel call that several share is computed once."""
    memories = [_fitting(pools) for pools in deployments]
    cases = [case for pools in deployments for case in ((pools.prefill.deployment, pools.prefill_workload),
                                                        (pools.decode.deployment, pools.decode_workload))]  # fmt: skip
    inferences = infer_many(cases, conditions)
    return [
        Disaggregated(pools, prefill, decode, _kv_transfer(pools, prefill), *memory)
        for pools, prefill, decode, memory in zip(deployments, inferences[::2], inferences[1::2], memories, strict=True)
    ]


def balanced(forecast: Disaggregated, conditions: Conditions = DEFAULT) -> Disaggregated:
    """The forecast with as many requests per decode worker as prefill sustains: where prefill is too slow to fill its
    batch it holds fewer, whose steps are shorter, and so fewer still, until both pools keep up with one another."""
    for _ in range(_ROUNDS):
        held = max(1, round(forecast.held_requests))
        if held >= forecast.pools.decode.batch:
            break
        fewer = replace(forecast.pools, decode=replace(forecast.pools.decode, batch=held))
        forecast = infer_disaggregated_many([fewer], conditions)[0]
    return forecast


def _fitting(pools: DisaggregatedDeployment) -> tuple[Memory, Memory]:
    """Memory of both pools; refused where it does not suffice."""
    memories = pools.memories
    for name, workers, memory in zip(_PHASES, (pools.prefill, pools.decode), memories, strict=True):
        if not memory.fits:
            deployment, gib = workers.deployment, 2**30
            parts = ", ".join(f"{part} {size / gib:.1f}" for part, size in memory.parts.items())
            raise DoesNotFit(
                f"the {name} pool: {deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.id} needs "
                f"{memory.used_bytes / gib:.1f} GiB a GPU ({parts}), {memory.missing_bytes / gib:.1f} GiB more than "
                f"{deployment.stack.name} fills; take a smaller batch, more GPUs a worker, or a smaller format",
                memory,
            )
    return memories


def _kv_transfer(pools: DisaggregatedDeployment, batch: Inference) -> KvTransfer:
    """Caches of prompts whose prefill ends in the same step are sent together; earlier ones during later prefills."""
    prefill, decode = pools.prefill.deployment, pools.decode.deployment
    ends = batch.workload.first_tokens()
    together, ranks = ends.count(max(ends)), pools.decode.count * decode.layout.dp
    busiest = port_bytes(prefill, decode, pools.input_tokens, -(-together // prefill.layout.dp), -(-together // ranks))
    each, fabric = kv_transfer_bytes(decode, pools.input_tokens), transfer_fabric(prefill, pools.transfer)
    of_worker = -(-pools.prefill.batch // prefill.layout.dp) * each / ports(prefill)
    sends = [kv_send(size, fabric) for size in (busiest, of_worker, each / ports(decode))]
    batch.times.predict(launch.call for launch in sends)
    time, sending, receiving = (send_time(launch, batch.times) for launch in sends)
    kernel = KernelTime.of(HANDOVER, sends[0], batch.times)
    return KvTransfer(fabric, each, busiest, time, sending, receiving, kernel)


def _wider(interval: Interval) -> Interval:
    """The interval widened by the error of whole deployments beyond their kernels, taken as independent."""
    more = Interval(0.0, -_BEYOND * interval.value, _BEYOND * interval.value)
    return independent([interval, more])


def _rate(requests: float, interval: Interval) -> Interval:
    """Requests per second; the low end is that of the longest time."""
    return Interval(requests / interval.value, requests / interval.high, requests / interval.low)


def _least(*rates: Interval) -> Interval:
    return Interval(*(min(getattr(rate, end) for rate in rates) for end in ("value", "low", "high")))
