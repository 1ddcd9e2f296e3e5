"""Engines behind a router: requests come, are dealt out, read, perhaps handed over, decoded, and leave."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.times import Times
from kernelcast.inference.disaggregated import port_bytes, send, sent, transfer_fabric
from kernelcast.inference.forward import Deployment
from kernelcast.inference.workload import Speculation
from kernelcast.serving.engine import Engine
from kernelcast.serving.load import Load
from kernelcast.serving.scheduler import Rank, Request
from kernelcast.serving.settings import Settings, settings_of, without_terms
from kernelcast.serving.step_times import Reach, StepTimes, host_s

if TYPE_CHECKING:
    from kernelcast.ops.work import Array

ROUTERS = ("round_robin", "least_loaded", "cache_aware")
_MATCH, _APART = (
    0.5,
    32,
)  # cache-aware: the share of a prompt that must be cached, and requests that replicas may differ
_SENT_TOKENS = (1, 64, 512, 4096, 32768, 262144)  # handed over, that times are predicted for; lines between them


@dataclass(frozen=True)
class Pool:
    """Engines that are alike. ``settings`` not given: those of the stack's launcher."""

    deployment: Deployment
    settings: Settings = field(default=None)  # type: ignore[assignment]  # never None once it is made
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.settings is None:
            object.__setattr__(self, "settings", settings_of(self.deployment))
        if self.replicas < 1:
            raise KernelcastError(f"replicas must be 1 or more, not {self.replicas}")

    @property
    def gpus(self) -> int:
        return self.replicas * self.deployment.layout.gpus

    def reach(self, context: int) -> Reach:
        """Of its steps, with requests of at most ``context`` tokens."""
        settings = self.settings
        sequences = min(settings.max_num_seqs, settings.kv_tokens)
        return Reach(settings.max_num_batched_tokens, sequences, context, max(settings.kv_tokens, context))


@dataclass(frozen=True)
class Service:
    """What answers: one pool; or one that reads prompts and hands their caches over to another that decodes."""

    pool: Pool
    prefill: Pool | None = None  # disaggregated: reads prompts
    router: str = "round_robin"
    speculation: Speculation | None = None
    transfer: str | None = None  # the fabric that caches are handed over; None: see ``transfer_fabric``

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise KernelcastError(f"a router is one of {', '.join(ROUTERS)}, not {self.router!r}")

    @property
    def gpus(self) -> int:
        return self.pool.gpus + (self.prefill.gpus if self.prefill else 0)


@dataclass
class Notes:
    """What steps did, one entry a stretch of alike steps."""

    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    kv_use: list[float] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    blocked_s: dict[str, float] = field(default_factory=dict)  # that requests waited because of a limit

    def gaps(self) -> tuple[Array, Array]:
        """Seconds between tokens of those that decode, of each stretch, and how many such gaps there were. A step that
        reads prompts alone lengthens the gap before the next decode step of its engine."""
        lasted, weight = np.zeros(len(self.steps)), np.zeros(len(self.steps))
        waited: dict[int, float] = {}
        for at, (start, end, steps, decoding, engine) in enumerate(
            zip(self.start_s, self.end_s, self.steps, self.decoding, self.engine, strict=True)
        ):
            if not decoding:
                waited[engine] = waited.get(engine, 0.0) + end - start
                continue
            lasted[at] = (end - start + waited.pop(engine, 0.0)) / steps
            weight[at] = steps * decoding
        return lasted, weight


class Fleet:
    """One run of a service under a load. ``tables``: step times of each pool's deployment, shared by several runs."""

    def __init__(self, service: Service, load: Load, tables: Tables, variant: str = "likely", seed: int = 0) -> None:
        self.service, self.load, self.variant = service, load, variant
        self.notes = Notes()
        self._tables = tables
        guesses = service.speculation
        self._gained = guesses.tokens_per_step if guesses else 1.0
        self.deciding = self._engines(service.pool, guesses, self._gained)
        self.reading = self._engines(service.prefill, None, 1.0) if service.prefill else self.deciding
        self._every = self.deciding if service.prefill is None else [*self.reading, *self.deciding]
        self._number = {id(engine): at for at, engine in enumerate(self._every)}
        self._turn = 0
        self._later: list[tuple[float, int, Request, bool]] = []  # when, which, and whether its cache is read already
        self.requests = _requests(load, guesses, seed)
        stack = (service.prefill or service.pool).deployment.stack
        self._front_s = [host_s(variant, x, stack.spread) for x in (stack.request_s, stack.front_s, stack.token_s)]
        # when the front end of each server has read all that came to it
        self._front_free_s = [0.0] * (service.prefill or service.pool).replicas
        self._limit = load.max_concurrency or len(load)
        self._sent = self.done = self._under_way = 0
        self._order = 0  # of events at the same moment
        self._freed_s = 0.0  # when the last request ended: who waits at the client is sent then
        self._held: dict[int, list[int]] = {}  # requests that wait for the answer to another, by that one
        self._answered = bytearray(len(load))
        self._to_decode: dict[int, tuple[int, int]] = {}  # tokens and steps of requests that are being read elsewhere

    def _engines(self, pool: Pool, guesses: Speculation | None, gained: float) -> list[Engine]:
        """A pipeline runs as many batches as it has stages, each with its part of the cache."""
        layout, settings = pool.deployment.layout, pool.settings
        stages = layout.pp
        own = replace(settings, kv_blocks=max(1, settings.kv_blocks // stages),
                      max_num_seqs=max(1, settings.max_num_seqs // stages))  # fmt: skip
        times, drafted = self._tables.of(pool, self.load, guesses), guesses.draft_tokens if guesses else 0
        together = pool.deployment.stack.mixed_steps
        return [
            Engine([Rank(own, together, bool(self.load.shared), drafted, gained) for _ in range(layout.dp)], times,
                   self.variant, self._note)
            for _ in range(pool.replicas * stages)
        ]  # fmt: skip

    def _note(self, start_s: float, end_s: float, steps: int, decoding: int, prompts: int, engine: Engine) -> None:
        notes, ranks = self.notes, engine.ranks
        notes.start_s.append(start_s)
        notes.end_s.append(end_s)
        notes.steps.append(steps)
        notes.decoding.append(decoding)
        notes.prompt_tokens.append(prompts)
        waiting = sum(len(rank.waiting) for rank in ranks)
        notes.waiting.append(waiting)
        notes.kv_use.append(sum(rank.blocks.used / rank.blocks.count for rank in ranks) / len(ranks))
        notes.engine.append(self._number[id(engine)])
        if waiting:
            for rank in ranks:
                if rank.blocked:
                    notes.blocked_s[rank.blocked] = notes.blocked_s.get(rank.blocked, 0.0) + end_s - start_s

    def run(self, told: Callable[[int], None] | None = None) -> None:
        """Until every request is done. An interrupt leaves ``done`` and the requests as far as they came."""
        arrivals, count = self.load.arrivals_s.tolist(), len(self.load)
        while self.done < count:
            engine = min(self._every, key=_next)
            ready_s = self._later[0][0] if self._later else math.inf
            if self._sent < count and self._under_way < self._limit:
                sent_s = max(arrivals[self._sent], self._freed_s)
                if sent_s <= ready_s and sent_s <= engine.next_s:
                    self._due(self._sent, sent_s)
                    self._sent += 1
                    continue
            if ready_s <= engine.next_s:
                now_s, _, request, read = heapq.heappop(self._later)
                self._route(request, now_s, read)
            else:
                self._step(engine, told)

    def _due(self, at: int, now_s: float) -> None:
        """A request's time has come; one that answers to another waits for it."""
        before = int(self.load.follows[at]) if self.load.follows is not None else -1
        if before >= 0 and not self._answered[before]:
            self._held.setdefault(before, []).append(at)
        else:
            self._send(at, now_s)
        self._under_way += 1

    def _send(self, at: int, now_s: float) -> None:
        """It leaves its client, and comes to a router once the front end has read it."""
        request = self.requests[at]
        request.arrival_s = now_s
        passing_s, each_s, token_s = self._front_s
        at = self._front_free_s.index(min(self._front_free_s))
        self._front_free_s[at] = max(now_s, self._front_free_s[at]) + each_s + token_s * request.inputs
        self._push(self._front_free_s[at] + passing_s, request, read=False)

    def _push(self, when_s: float, request: Request, *, read: bool) -> None:
        self._order += 1
        heapq.heappush(self._later, (when_s, self._order, request, read))

    def _ended(self, request: Request, now_s: float) -> None:
        self.done += 1
        self._under_way -= 1
        self._freed_s = now_s
        self._answered[request.at] = 1
        for at in self._held.pop(request.at, ()):
            self._send(at, now_s)

    def _route(self, request: Request, now_s: float, read: bool) -> None:
        engines = self.deciding if read else self.reading
        chosen = engines[0]
        if len(engines) > 1:
            chosen = self._chosen(engines, request)
        if self.service.prefill and not read:  # it gets one token here, the others where it decodes
            self._to_decode[request.at] = request.outputs, request.steps
            request.outputs, request.steps = 1, 0
        request.replica = self._number[id(chosen)]
        chosen.submit(request, now_s)

    def _chosen(self, engines: Sequence[Engine], request: Request) -> Engine:
        if self.service.router == "round_robin":
            self._turn += 1
            return engines[self._turn % len(engines)]
        least = min(engines, key=lambda engine: engine.load)
        if self.service.router == "least_loaded" or not request.pieces:
            return least
        best = max(engines, key=lambda engine: (_cached(engine, request), -engine.load))
        near = best.load - least.load <= _APART
        return best if near and _cached(best, request) >= _MATCH * request.inputs else least

    def _step(self, engine: Engine, told: Callable[[int], None] | None) -> None:
        now_s = engine.next_s
        ended = engine.run()
        if self.service.prefill and engine in self.reading:
            for request in ended:
                self._hand_over(request, now_s)
            return
        for request in ended:
            self._ended(request, now_s)
        if told and ended:
            told(self.done)

    def _hand_over(self, request: Request, now_s: float) -> None:
        """Its cache goes to an engine that decodes; a request of one token is done."""
        request.outputs, request.steps = self._to_decode.pop(request.at)
        if request.outputs == 1:
            self._ended(request, now_s)
            return
        request.context, request.left, request.pieces = request.inputs, 0, ()
        sent_s = self._tables.sent_s(self.service, request.inputs)
        self._push(now_s + sent_s, request, read=True)


def _next(engine: Engine) -> float:
    return engine.next_s


def _cached(engine: Engine, request: Request) -> int:
    return max(rank.blocks.found(request.pieces, request.inputs)[0] for rank in engine.ranks)


def _requests(load: Load, guesses: Speculation | None, seed: int) -> list[Request]:
    pieces = load.shared or len(load) * ((),)
    outputs = load.outputs
    steps = _steps(load.outputs, guesses, seed) if guesses else np.zeros(len(load), dtype=np.int64)
    given = zip(load.arrivals_s.tolist(), load.inputs.tolist(), outputs.tolist(), pieces, steps.tolist(), strict=True)
    return [Request(at, *values) for at, values in enumerate(given)]


def _steps(outputs: NDArray[np.int64], guesses: Speculation, seed: int) -> NDArray[np.int64]:
    """Decode steps of each request where a step gives 1 to k + 1 tokens: a renewal process, whose count after n tokens
    is nearly normal with mean n / m and variance n v / m^3 (m, v: mean and variance of a step's tokens)."""
    k, a = guesses.draft_tokens, guesses.acceptance
    given = np.arange(1, k + 2)
    chance = np.where(given <= k, a ** (given - 1) * (1 - a), a**k)
    mean = float((given * chance).sum())
    spread = float((given**2 * chance).sum()) - mean**2
    tokens = outputs - 1
    drawn = np.random.default_rng(seed).standard_normal(len(outputs))
    steps = np.round(tokens / mean + drawn * np.sqrt(tokens * spread / mean**3))
    return np.clip(steps, np.ceil(tokens / (k + 1)), tokens).astype(np.int64)


class Tables:
    """Step times by deployment, and how long caches take to be handed over: predicted once."""

    def __init__(self, times: Callable[[Deployment], Times]) -> None:
        self._times = times
        self._known: list[tuple[Deployment, Reach, StepTimes]] = []
        self._transfers: list[tuple[Service, tuple[list[int], list[float]]]] = []

    def of(self, pool: Pool, load: Load, guesses: Speculation | None = None) -> StepTimes:
        context = int((load.inputs + load.outputs).max())
        reach, drafted = pool.reach(context), guesses.draft_tokens if guesses else 0
        draft = self._steps(guesses.draft, reach) if guesses and guesses.draft else None
        return self._steps(pool.deployment, reach, drafted, draft)

    def _steps(self, place: Deployment, reach: Reach, drafted: int = 0, draft: StepTimes | None = None) -> StepTimes:
        for known, reached, found in self._known:
            if found.drafted == drafted and found.draft is draft and _within(reach, reached):
                if known is place:
                    return found
                if _alike(known, place):
                    return found.served_by(place)
        found = StepTimes(place, reach, times=self._times(place), drafted=drafted, draft=draft)
        self._known.append((place, reach, found))
        return found

    def sent_s(self, service: Service, tokens: int) -> float:
        """Seconds to hand the cache of so many tokens over; every GPU sends its part."""
        known = next((sent for kept, sent in self._transfers if kept is service), None)
        if known is None:
            known = self._predicted(service)
            self._transfers.append((service, known))
        return float(np.interp(tokens, *known))

    def _predicted(self, service: Service) -> tuple[list[int], list[float]]:
        """Tokens, and the seconds that the busiest GPU needs for its part of their cache."""
        assert service.prefill is not None
        place, most = service.prefill.deployment, service.prefill.settings.kv_tokens
        fabric = transfer_fabric(place, service.transfer)
        tokens = [*(n for n in _SENT_TOKENS if n < most), most]
        sends = [send(port_bytes(place, service.pool.deployment, n), fabric) for n in tokens]
        times = self._times(place)
        times.learn(one.call for one in sends)
        return tokens, [sent(one, times).value for one in sends]


def _alike(one: Deployment, other: Deployment) -> bool:
    """All the same but what a server was measured to take."""
    same = all(getattr(one, name) is getattr(other, name) for name in ("model", "gpu", "precision", "layout"))
    alike = all(getattr(one, name) == getattr(other, name) for name in ("skew", "routing", "redundant", "overlap"))
    return same and alike and without_terms(one.stack) == without_terms(other.stack)


def _within(asked: Reach, known: Reach) -> bool:
    return (asked.tokens <= known.tokens and asked.sequences <= known.sequences and asked.context <= known.context
            and asked.cached <= known.cached)  # fmt: skip
