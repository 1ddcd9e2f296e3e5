"""Disaggregated deployments as static points: workers that only read prompts, and others that only decode.

Every prefill worker reads a batch of prompts after another; their caches go over a fabric to workers that decode, each
of which holds as many requests as its batch says at all times. No request waits in a queue: what comes is what the
slower of both pools (or the ports between them) can take. Requests that come as they do in the world are simulate's.

A request passes: prefill of its batch, hand-over, one decode step (the first that it takes part in, which tells its
first token), and the steps that give the others. The time to first token has all but the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Call, Launch
from kernelcast.forecast.conditions import DEFAULT, Conditions
from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch_results import BatchResults
from kernelcast.inference.deployment import nvlink_domain
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import Inference, infer_many
from kernelcast.inference.memory import DoesNotFit, cache_bytes
from kernelcast.inference.workload import Speculation, Workload
from kernelcast.results import HtmlRepr, Interval, independent, support_of
from kernelcast.schedule import EvidenceSummary, KernelTime, Memory, Share, shares

_PIECE_BYTES = 2**32  # more than that is sent in several


def kv_transfer_bytes(decode: Deployment, tokens: int) -> float:
    """What the cache of a prompt of so many tokens fills on all GPUs of a rank that decodes it."""
    layout = decode.layout
    return float(cache_bytes(decode, tokens)) * layout.dp * layout.tp * layout.pp  # cache_bytes: mean over ranks


def ports(deployment: Deployment) -> int:
    """GPUs of one rank, each of which has its part of a request's cache."""
    return deployment.layout.tp * deployment.layout.pp


def port_bytes(prefill: Deployment, decode: Deployment, tokens: int, leaving: int = 1, coming: int = 1) -> float:
    """Bytes through the busiest port where a rank sends the caches of ``leaving`` prompts at once and one gets
    ``coming`` of them."""
    each = kv_transfer_bytes(decode, tokens)
    return max(leaving * each / ports(prefill), coming * each / ports(decode))


def transfer_fabric(prefill: Deployment, named: str | None) -> str | None:
    """The link that caches take: the one that is named; NVLink where it reaches across a rack (None: the GPU's own);
    else what links nodes."""
    layout = prefill.layout
    return named or (layout.link if nvlink_domain(prefill.gpu) else layout.between_nodes)


def kv_send(sent_bytes: float, fabric: str | None) -> Launch:
    """One GPU's part to one other, in pieces that go one after another."""
    pieces = max(1, math.ceil(sent_bytes / _PIECE_BYTES))
    parameters = {"dtype": "bf16", "fabric": fabric, "stack": "nccl"}
    return Launch(
        "KV cache", Call.of("send_recv", {"bytes": max(1, math.ceil(sent_bytes / pieces)), **parameters}), pieces
    )


def send_time(launch: Launch, times: Times) -> Interval:
    """How long it takes; ``times`` knows the call."""
    return times[launch.call].interval * launch.count


HANDOVER = "handover"
_PHASES = ("prefill", "decode")
# What deployments of two pools are off beyond their kernels (servers, routers, recipes that nobody told), as a share:
# set on every second of 96 measured ones, of which it holds 81%, and 83% of the others; without it 43% lie inside.
_BEYOND = 0.2
_ROUNDS = 12  # in which the requests that decode workers hold settle


@dataclass(frozen=True)
class PhaseWorkers:
    """``count`` engines that are alike. ``batch``: prompts that one reads at a time, or requests that one holds while
    it decodes. A pipeline has as many batches under way as it has stages: each stage reads another batch of prompts,
    and those that decode are dealt out to the stages."""

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
    """What is asked: both pools, and the requests, which are all alike."""

    prefill: PhaseWorkers
    decode: PhaseWorkers
    input_tokens: int
    output_tokens: int
    cached: int = 0  # of each prompt, that prefill workers have in their cache already
    chunk: int | None = None  # tokens of a prefill step; 0: all at once; None: as the stack's scheduler takes them
    speculation: Speculation | None = None  # of the workers that decode
    transfer: str | None = None  # the fabric that caches are handed over; see ``transfer_fabric``

    def __post_init__(self) -> None:
        ends = self.prefill.deployment, self.decode.deployment
        if ends[0].model.kind == "encoder":
            raise KernelcastError(
                f"{ends[0].model.name} is an encoder: it writes no tokens, and nothing is handed over"
            )
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
    def reading(self) -> Workload:
        """One batch of prompts; it gives each its first token."""
        return Workload.equal(self.prefill.batch, self.input_tokens, 1, self.cached, self.chunk)

    @property
    def decoding(self) -> Workload:
        """Requests that decode in one step: their caches have come, all but the last token of the prompt."""
        return self._held(-(-self.decode.batch // self.decode.stages))

    def _held(self, requests: int) -> Workload:
        return Workload.equal(requests, self.input_tokens, self.output_tokens, self.input_tokens - 1, 0,
                              self.speculation)  # fmt: skip

    @property
    def memories(self) -> tuple[Memory, Memory]:
        """Of a GPU that reads: batches under way, and one whose caches are being handed over. Of one that decodes: all
        that it holds."""
        deployment, work = self.prefill.deployment, self.reading
        prefill = BatchResults(deployment, [work.on(deployment)]).memory_of(0)
        parts = {**prefill.parts, "cache": self.prefill.stages * prefill["cache"], HANDOVER: prefill["cache"]}
        decode = BatchResults(self.decode.deployment, [self._held(self.decode.batch)]).memory_of(0)
        return replace(prefill, parts=parts), decode


@dataclass(frozen=True)
class KvTransfer:
    """Of the caches of one batch. ``span``: until the last that leave together have come. ``leaving``, ``coming``: how
    long the ports of a prefill worker are busy with its batch, and those of a decode rank with one cache."""

    fabric: str | None  # None: the GPU's own link
    request_bytes: float  # of one prompt, to all GPUs that decode it
    port_bytes: float  # through the busiest port in ``span``
    span: Interval
    leaving: Interval
    coming: Interval
    ran: KernelTime


@dataclass(frozen=True)
class Disaggregated(HtmlRepr):
    """How both pools run. Rates are spans too: of requests a second, low and high ones. ``reads`` is one batch of
    prompts, ``decodes`` the requests of one step."""

    pools: DisaggregatedDeployment
    reads: Inference
    decodes: Inference
    handover: KvTransfer
    prefill_memory: Memory
    decode_memory: Memory

    # ---- what a request sees ----

    @property
    def prefill(self) -> Interval:
        """Of a batch of prompts."""
        return _wider(self.reads.prefill)

    @property
    def step(self) -> Interval:
        """The mean decode step: who comes meets requests that are half done on average."""
        return self.decode * (1 / self.decodes.steps)

    @property
    def tpot(self) -> Interval:
        return self.decode * (1 / (self.pools.output_tokens - 1))

    @property
    def decode(self) -> Interval:
        """All tokens after the first."""
        return _wider(self.decodes.decode)

    @property
    def ttft(self) -> Interval:
        """Of the last prompt of a batch: its prefill, the hand-over, and the first step that it takes part in."""
        return self.prefill + self.handover.span + self.step

    @property
    def mean_ttft_s(self) -> float:
        """Over a batch: prompts that are read in an early step need not wait for the others."""
        return self.reads.mean_ttft_s + self.handover.span.value + self.step.value

    @property
    def total(self) -> Interval:
        """From a prompt to its last token."""
        return self.ttft + self.decode

    # ---- what the pools do ----

    @cached_property
    def rates(self) -> dict[str, Interval]:
        """Requests a second that each could take if the others could: prefill, decode, handover."""
        reading, holding = self.pools.prefill, self.pools.decode
        ranks = holding.count * holding.deployment.layout.dp
        leaving = _rate(reading.count * reading.batch, self.handover.leaving)
        coming = _rate(ranks, self.handover.coming)
        return {
            "prefill": _rate(reading.count * reading.stages * reading.batch, self.prefill),
            "decode": _rate(holding.count * holding.batch, self.step + self.decode),
            HANDOVER: _least(leaving, coming),
        }

    @property
    def limited_by(self) -> str:
        """Which of them takes the fewest."""
        return min(self.rates, key=lambda name: self.rates[name].value)

    @cached_property
    def requests_per_s(self) -> Interval:
        return _least(*self.rates.values())

    @property
    def tokens_per_s(self) -> Interval:
        """Written."""
        return self.requests_per_s * self.pools.output_tokens

    @property
    def tokens_per_s_per_gpu(self) -> Interval:
        return self.tokens_per_s * (1 / self.pools.gpus)

    def busy(self, name: str) -> float:
        """Of what it could take, the share that comes: 1 for the one that limits."""
        return self.requests_per_s.value / self.rates[name].value

    @property
    def held_requests(self) -> float:
        """That a decode worker holds on average: its batch, or fewer where it waits for prompts."""
        return self.pools.decode.batch * self.busy("decode")

    @property
    def prefill_per_decode(self) -> float:
        """Prefill workers that keep one decode worker busy."""
        each = {name: self.rates[name].value / getattr(self.pools, name).count for name in _PHASES}
        return each["decode"] / each["prefill"]

    # ---- what it rests on ----

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Of a batch that is read, of its hand-over, and of the decode steps of a request."""
        read = tuple(share for share in self.reads.shares if share.phase == "prefill")
        decoded = tuple(share for share in self.decodes.shares if share.phase == "decode")
        return (*read, *shares([self.handover.ran]), *decoded)

    @property
    def support(self) -> str:
        return support_of((share.time_s, share.support) for share in self.shares)

    @cached_property
    def rests_on(self) -> EvidenceSummary:
        """The measured kinds behind both phases and the hand-over."""
        kernels = [part * each.count for phase, inference in zip(_PHASES, (self.reads, self.decodes), strict=True)
               for each in inference.passes if each.phase == phase for part in each.kernels]  # fmt: skip
        return EvidenceSummary.of([*kernels, self.handover.ran])

    @cached_property
    def request_energy(self) -> Interval | None:
        """Joules of all GPUs at work for one request, without what a pool draws while it waits; None where no power
        model is, or where a pipeline's batches overlap."""
        if self.pools.prefill.stages > 1 or self.pools.decode.stages > 1 or self.reads.energy is None:
            return None
        drawn = self.decodes.energies.get("decode")
        if drawn is None:
            return None
        steps = 1 + 1 / self.decodes.steps  # with the first
        gpus = self.pools.decode.deployment.layout.gpus
        return self.reads.energy * (1 / self.pools.prefill.batch) + drawn.joules * (
            steps * gpus / self.pools.decode.batch
        )

    @property
    def predictor(self) -> str:
        return self.reads.predictor


def infer_disaggregated(prefill: PhaseWorkers, decode: PhaseWorkers, input_tokens: int, output_tokens: int, *,
                        cached: int = 0, chunk: int | None = None, speculation: Speculation | None = None,
                        transfer: str | None = None, conditions: Conditions = DEFAULT) -> Disaggregated:  # fmt: skip
    """Forecast one disaggregated deployment."""
    asked = DisaggregatedDeployment(prefill, decode, input_tokens, output_tokens, cached, chunk, speculation, transfer)
    return infer_disaggregated_many([asked], conditions)[0]


def infer_disaggregated_many(
    asked: Sequence[DisaggregatedDeployment], conditions: Conditions = DEFAULT
) -> list[Disaggregated]:
    """Forecast many; a kernel call that several share is computed once."""
    memories = [_fitting(one) for one in asked]
    cases = [case for one in asked for case in ((one.prefill.deployment, one.reading),
                                                (one.decode.deployment, one.decoding))]  # fmt: skip
    inferences = infer_many(cases, conditions)
    pairs = zip(asked, inferences[::2], inferences[1::2], memories, strict=True)
    return [
        Disaggregated(one, reads, decodes, _handed_over(one, reads), *memory) for one, reads, decodes, memory in pairs
    ]


def balanced(forecast: Disaggregated, conditions: Conditions = DEFAULT) -> Disaggregated:
    """With as many requests a decode worker as come: where prompts are read too slowly to fill its batch, it holds
    fewer, whose steps are shorter, and so fewer still, until both pools keep up with one another."""
    for _ in range(_ROUNDS):
        held = max(1, round(forecast.held_requests))
        if held >= forecast.pools.decode.batch:
            break
        fewer = replace(forecast.pools, decode=replace(forecast.pools.decode, batch=held))
        forecast = infer_disaggregated_many([fewer], conditions)[0]
    return forecast


def _fitting(asked: DisaggregatedDeployment) -> tuple[Memory, Memory]:
    """Memory of both pools; refused where it does not suffice."""
    both = asked.memories
    for name, workers, memory in zip(_PHASES, (asked.prefill, asked.decode), both, strict=True):
        if not memory.fits:
            deployment, gib = workers.deployment, 2**30
            parts = ", ".join(f"{part} {size / gib:.1f}" for part, size in memory.parts.items())
            raise DoesNotFit(
                f"the {name} pool: {deployment.model.name} on {deployment.layout.gpus} x {deployment.gpu.id} needs "
                f"{memory.used_bytes / gib:.1f} GiB a GPU ({parts}), {memory.missing_bytes / gib:.1f} GiB more than "
                f"{deployment.stack.name} fills; take a smaller batch, more GPUs a worker, or a smaller format",
                memory,
            )
    return both


def _handed_over(asked: DisaggregatedDeployment, reads: Inference) -> KvTransfer:
    """Caches of prompts that end in the same step leave together; earlier ones went while others were read."""
    prefill, decode = asked.prefill.deployment, asked.decode.deployment
    ends = reads.workload.first_tokens()
    together, ranks = ends.count(max(ends)), asked.decode.count * decode.layout.dp
    busiest = port_bytes(prefill, decode, asked.input_tokens, -(-together // prefill.layout.dp), -(-together // ranks))
    each, fabric = kv_transfer_bytes(decode, asked.input_tokens), transfer_fabric(prefill, asked.transfer)
    of_a_worker = -(-asked.prefill.batch // prefill.layout.dp) * each / ports(prefill)
    sends = [kv_send(size, fabric) for size in (busiest, of_a_worker, each / ports(decode))]
    reads.times.predict(launch.call for launch in sends)
    span, leaving, coming = (send_time(launch, reads.times) for launch in sends)
    kernel = KernelTime.of(HANDOVER, sends[0], reads.times)
    return KvTransfer(fabric, each, busiest, span, leaving, coming, kernel)


def _wider(span: Interval) -> Interval:
    """With what a deployment is off beyond its kernels, which errs on its own."""
    more = Interval(0.0, -_BEYOND * span.value, _BEYOND * span.value)
    return independent([span, more])


def _rate(requests: float, span: Interval) -> Interval:
    """Requests a second: the fewest where it takes longest."""
    return Interval(requests / span.value, requests / span.high, requests / span.low)


def _least(*rates: Interval) -> Interval:
    return Interval(*(min(getattr(rate, end) for rate in rates) for end in ("value", "low", "high")))
