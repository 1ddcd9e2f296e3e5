"""One scheduler with its KV cache: which requests wait, prefill and decode, and what the next step runs.

Between two events (a request arrives, is admitted, ends, is preempted) every step decodes the same sequences, each with
one token more: such steps are simulated together. Requests are not updated step by step: a request has the number of
the step after which it ends, and blocks are taken by how many sequences fill a block at each step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from kernelcast.serving.kv_cache import KvCacheBlocks, Pieces, PrefixNode
from kernelcast.serving.service import EngineSettings


class Request:
    """``context``: tokens that must be cached before the next one is sampled; ``remaining``: of them, not computed."""

    __slots__ = (
        "arrival_s", "at", "base", "blocks", "cached", "context", "finish", "first_s", "generated", "inputs",
        "last_s", "outputs", "path", "pieces", "preempted", "remaining", "replica", "scheduled_s", "shared", "steps",
    )  # fmt: skip

    def __init__(self, at: int, arrival_s: float, inputs: int, outputs: int, pieces: Pieces = (), steps: int = 0):
        self.at, self.arrival_s, self.inputs, self.outputs, self.pieces = at, arrival_s, inputs, outputs, pieces
        self.steps = steps or outputs - 1  # decode steps that it takes after its first token
        self.context, self.remaining, self.generated = inputs, inputs, 0
        self.blocks = self.shared = 0  # private blocks, and those in the prefix tree
        self.path: list[PrefixNode] = []  # nodes of the prefix tree that it holds
        self.base = self.finish = (
            0  # while it decodes: context less the rank's step count; the step after which it ends
        )
        self.scheduled_s = self.first_s = self.last_s = math.nan
        self.cached = self.preempted = self.replica = 0

    @property
    def total(self) -> int:
        """Tokens in the cache when it ends: the last one is never read."""
        return self.inputs + self.outputs - 1


_LPM_WINDOW = 128  # waiting requests among which lpm picks the longest cached prefix, as SGLang does
_CLIPPED = 4096  # output tokens that SGLang reserves at most for a new request
_RATIO, _LEAST_RATIO, _RATIO_STEPS = 0.7, 0.098, 600  # share of the remaining output that SGLang keeps free
_RETRACTED = 0.1  # that the share grows by when the estimate was too low
_RETRACT_STEPS = 20  # after which the estimate is updated
# The limit of a prompt that is prefilled whole, and for which the sequences that decode leave no room in any step.
UNCHUNKED = "max_num_batched_tokens without chunked prefill"


@dataclass
class SchedulerStep:
    """The next step of one rank: chunks of prompts (tokens of each), or decode steps, ``most`` at a time."""

    chunks: list[tuple[Request, int]] = field(default_factory=list)
    decodes: bool = True
    most: int = 1

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)


class Scheduler:
    """``mixed_steps``: prompts are prefilled in the steps in which others decode; else before them, alone.
    ``tokens_per_step``: that a decode step adds to the cache of each sequence, on average."""

    def __init__(
        self, settings: EngineSettings, mixed_steps: bool, caching: bool, drafted: int = 0, tokens_per_step: float = 1.0
    ) -> None:
        self.settings, self.mixed_steps, self.drafted, self.tokens_per_step = (
            settings,
            mixed_steps,
            drafted,
            tokens_per_step,
        )
        self.blocks = KvCacheBlocks(settings.kv_blocks, settings.block_size, caching and settings.prefix_caching)
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: dict[int, Request] = {}  # prefilling or decoding, in the order of admission
        self.decoding = 0
        self.context_sum = 0.0  # tokens in the cache of decoding requests
        self.steps = 0  # decode steps so far
        self.blocked = ""  # the limit that the first waiting request waits for
        self._ends: list[tuple[int, int, Request]] = []  # by step
        self._contexts: list[tuple[int, int]] = []  # contexts of decoding requests less the steps so far, longest first
        self._filling = [0] * settings.block_size  # sequences that need a new block at steps of this remainder
        self._to_write = 0  # sum of the last steps of decoding requests
        self._ratio = _RATIO
        # Blocks of all that a request may generate are taken at once where nothing is preempted, and where steps add
        # several tokens (speculative decoding).
        self._reserve_all = settings.capacity == "reserve" or drafted > 0
        self.held = False  # no prefill begins: other ranks have no prompt yet

    @property
    def _prompt_budget(self) -> int:
        """Prompt tokens of the next step at most. Sequences that decode in it come first, as in vLLM and TensorRT-LLM
        (whose microBatchScheduler goes through the requests in the order of their arrival)."""
        beside = self.decoding * (1 + self.drafted) if self.mixed_steps else 0
        return self.settings.max_num_batched_tokens - beside

    def schedule(self, now_s: float) -> SchedulerStep | None:
        """The next step; None where there is no work."""
        self.blocked = ""
        if self.mixed_steps:
            return self._mixed(now_s)
        chunks = self._prompts(self._prompt_budget, now_s, self.settings.max_prefill_tokens)
        while not chunks and not self.decoding and len(self.prefilling) > 1:
            self._preempt(self.prefilling[-1])
            chunks = self._prompts(self._prompt_budget, now_s, self.settings.max_prefill_tokens)
        if chunks:
            return SchedulerStep(chunks, decodes=False)
        return self._decode() if self.decoding else None

    def _mixed(self, now_s: float) -> SchedulerStep | None:
        crowded = self._preempt_for_room()
        budget = self._prompt_budget
        chunks = self._prompts(budget, now_s, budget, admit=not crowded)
        while not chunks and not self.decoding and len(self.prefilling) > 1:  # half-prefilled prompts hold all blocks
            self._preempt(self.prefilling[-1])
            chunks = self._prompts(budget, now_s, budget, admit=False)
        if chunks:
            return SchedulerStep(chunks, decodes=self.decoding > 0)
        return self._decode() if self.decoding else None

    def _decode(self) -> SchedulerStep:
        self._preempt_for_room()
        most = self._ends[0][0] - self.steps
        if not self._reserve_all and self.blocks.free < most * self.decoding:
            most = self._steps_until_full(most)
        if self.waiting and self.settings.capacity == "estimate":
            most = min(most, _RETRACT_STEPS)
        return SchedulerStep(most=max(most, 1))

    def _steps_until_full(self, most: int) -> int:
        """Steps that the free blocks last for, at most ``most``."""
        size, free = self.settings.block_size, self.blocks.free
        whole = free // self.decoding * size if self.decoding else most
        steps = min(most, max(0, whole - size))
        free -= self._needed(steps)
        while steps < most:
            free -= self._filling[(self.steps + steps) % size]
            if free < 0:
                break
            steps += 1
        return steps

    def _needed(self, steps: int) -> int:
        """Blocks that the next so many decode steps take."""
        if self._reserve_all:
            return 0
        size = self.settings.block_size
        rounds, rest = divmod(steps, size)
        return rounds * self.decoding + sum(self._filling[(self.steps + i) % size] for i in range(rest))

    def _preempt_for_room(self) -> bool:
        """Preempt the latest requests until the next step's blocks are free; returns whether any was preempted."""
        crowded = False
        while self.decoding and self.blocks.free < self._needed(1):
            self._preempt(self.running[next(reversed(self.running))])
            crowded = True
        return crowded

    def _preempt(self, request: Request) -> None:
        """Preempt a request: its cache is dropped and recomputed later, with the tokens generated so far."""
        del self.running[request.at]
        if request.remaining:
            self.prefilling.remove(request)
        else:
            self._stop_decoding(request)
            request.steps = request.finish - self.steps
            request.generated = request.outputs - request.steps
        self._release(request)
        request.context = request.remaining = request.inputs + request.generated
        request.preempted += 1
        self.waiting.appendleft(request)
        if self.settings.capacity == "estimate":
            self._ratio = min(1.0, max(self._ratio, _LEAST_RATIO) + _RETRACTED)

    def _prompts(self, budget: int, now_s: float, in_all: int, *, admit: bool = True) -> list[tuple[Request, int]]:
        """Chunks to prefill in this step: of running requests first, then of waiting ones, within all limits."""
        chunks = []
        kept = self._needed(1) if self.mixed_steps else 0  # blocks of the decodes beside them
        for request in self.prefilling:
            tokens = self._fitting(request, min(request.remaining, budget), kept)
            if tokens:
                chunks.append((request, tokens))
                budget, in_all = budget - tokens, in_all - tokens
        while self.waiting and admit and not self.held:
            if len(self.running) >= self.settings.max_num_seqs:
                self.blocked = "max_num_seqs"
                break
            if budget <= 0 or in_all <= 0:
                self.blocked = "max_num_batched_tokens"
                break
            taken = self._admitted(budget, kept)
            if not taken:
                break
            request, tokens = taken
            if request.scheduled_s != request.scheduled_s:
                request.scheduled_s = now_s
            if tokens:
                chunks.append((request, tokens))
                budget, in_all = budget - tokens, in_all - tokens
        return chunks

    def _fitting(self, request: Request, tokens: int, kept: int) -> int:
        """Take blocks for so many tokens of a running prompt, or for fewer where blocks are short; returns the
        tokens."""
        if tokens <= 0:
            return 0
        done = request.context - request.remaining
        need = self._more_blocks(request, done + tokens)
        if need > self.blocks.free - kept:
            spare = max(0, self.blocks.free - kept) * self.settings.block_size
            tokens = min(tokens, spare)
            need = self._more_blocks(request, done + tokens)
            if tokens <= 0 or need > self.blocks.free - kept:
                self.blocked = "KV cache"
                return 0
        self._take(request, need)
        return tokens

    def _more_blocks(self, request: Request, tokens: int) -> int:
        if self._reserve_all:
            tokens = request.total
        return max(0, self.blocks.needed_for(tokens) - request.shared - request.blocks)

    def _take(self, request: Request, blocks: int) -> None:
        self.blocks.take(blocks)
        request.blocks += blocks

    def _next(self) -> Request:
        if self.settings.policy == "lpm" and self.blocks.caching and len(self.waiting) > 1:
            looked = range(min(len(self.waiting), _LPM_WINDOW))
            best = max(
                looked, key=lambda i: (self.blocks.cached_prefix(self.waiting[i].pieces, self.waiting[i].inputs)[0], -i)
            )
            if best:
                chosen = self.waiting[best]
                del self.waiting[best]
                self.waiting.appendleft(chosen)
        return self.waiting[0]

    def _admitted(self, budget: int, kept: int) -> tuple[Request, int] | None:
        """Admit the next waiting request, with tokens of its prompt; None where a limit keeps it out."""
        request = self._next()
        if not request.remaining:  # its cache was transferred
            return self._admit_transferred(request, kept)
        cached, path = self.blocks.cached_prefix(request.pieces, request.context - 1)
        if (
            not self.running
            and self.blocks.unheld(path) + self.blocks.needed_for(request.total - cached) > self.blocks.free
        ):
            cached, path = 0, []  # the cached prefix of a longer prompt would leave no room for this request
        left = request.context - cached
        if not self.settings.chunked_prefill and left > budget:
            self.blocked = UNCHUNKED if left > self._prompt_budget else "max_num_batched_tokens"
            return None
        tokens = min(left, budget)
        free = self.blocks.free - kept - self.blocks.unheld(path)
        need = (
            self.blocks.needed_for(request.total if self._reserve_all else cached + tokens) - cached // self.blocks.size
        )
        if need > free or not self._estimated(request, left, free):
            self.blocked = "KV cache"
            return None
        self.waiting.popleft()
        self.blocks.hold(path)
        request.path, request.remaining, request.shared = list(path), left, cached // self.blocks.size
        request.cached = max(request.cached, cached)
        self._take(request, need)
        self.running[request.at] = request
        self.prefilling.append(request)
        return request, tokens

    def _estimated(self, request: Request, left: int, free: int) -> bool:
        """SGLang: its prompt and output, and the estimated remaining output of the others, fit."""
        if self.settings.capacity != "estimate" or not self.running:
            return True
        ratio = max(_LEAST_RATIO, self._ratio)
        others = (self._to_write - self.steps * self.decoding) * ratio
        return left + min(request.outputs, _CLIPPED) + others < free * self.settings.block_size

    def _admit_transferred(self, request: Request, kept: int) -> tuple[Request, int] | None:
        need = self.blocks.needed_for(request.total if self._reserve_all else request.context)
        if need > self.blocks.free - kept:
            self.blocked = "KV cache"
            return None
        self.waiting.popleft()
        self._take(request, need)
        self.running[request.at] = request
        self._start_decoding(request)
        return request, 0

    def advance(self, step: SchedulerStep, count: int, now_s: float) -> list[Request]:
        """Finish ``count`` such steps at ``now_s``; returns the requests that finished."""
        done = []
        if step.decodes and self.decoding:
            need = self._needed(count)
            self.blocks.take(need)
            self.steps += count
            self.context_sum += count * self.decoding * self.tokens_per_step
            self._ratio -= count * (_RATIO - _LEAST_RATIO) / _RATIO_STEPS
            while self._ends and self._ends[0][0] <= self.steps:
                _, _, request = heapq.heappop(self._ends)
                if self.running.get(request.at) is request and not request.remaining and request.finish <= self.steps:
                    self._stop_decoding(request)
                    self._end(request, now_s)
                    done.append(request)
        for request, tokens in step.chunks:
            request.remaining -= tokens
            computed = request.context - request.remaining
            if request.pieces:
                self._store(request, request.pieces, computed)
            if request.remaining:
                continue
            self.prefilling.remove(request)
            if request.generated:  # it was preempted: recomputing gave its next token
                request.steps -= 1
            else:
                request.first_s = now_s
            request.generated += 1
            if request.steps:
                self._start_decoding(request)
            else:
                self._end(request, now_s)
                done.append(request)
        return done

    def _start_decoding(self, request: Request) -> None:
        """Move a prefilled request to decode, from the next step on."""
        size = self.settings.block_size
        request.base = request.context - self.steps
        request.finish = self.steps + request.steps
        if not self._reserve_all:
            self._filling[-request.base % size] += 1
        self.decoding += 1
        self.context_sum += request.context
        self._to_write += request.finish
        heapq.heappush(self._ends, (request.finish, request.at, request))
        heapq.heappush(self._contexts, (-request.base, request.at))

    @property
    def longest(self) -> int:
        """The longest context of a decoding request."""
        while self._contexts:
            base, at = self._contexts[0]
            request = self.running.get(at)
            if request is not None and not request.remaining and request.base == -base:
                return self.steps - base
            heapq.heappop(self._contexts)
        return 0

    def _store(self, request: Request, pieces: Pieces, computed: int) -> None:
        """Insert the shareable part of its prompt into the prefix tree."""
        moved = self.blocks.store(pieces, request.path, computed)
        request.blocks, request.shared = request.blocks - moved, request.shared + moved

    def _stop_decoding(self, request: Request) -> None:
        """The blocks that it took step by step become its private ones."""
        size = self.settings.block_size
        context = request.base + self.steps
        if not self._reserve_all:
            self._filling[-request.base % size] -= 1
            request.blocks += self.blocks.needed_for(context) - self.blocks.needed_for(request.context)
        self.decoding -= 1
        self.context_sum -= request.context + (self.steps - request.finish + request.steps) * self.tokens_per_step
        self._to_write -= request.finish

    def _end(self, request: Request, now_s: float) -> None:
        request.last_s = now_s
        covered = sum(tokens for _, tokens in request.pieces) >= request.inputs if request.pieces else False
        if covered and self.blocks.caching:  # the output continues the stream of the prompt
            stream, tokens = request.pieces[-1]
            longer = [*request.pieces[:-1], (stream, tokens + request.outputs - 1)]
            self._store(request, longer, request.total)
        self._release(request)
        self.running.pop(request.at, None)

    def _release(self, request: Request) -> None:
        self.blocks.release(request.blocks, request.path)
        request.blocks, request.shared, request.path = 0, 0, []

    @property
    def load(self) -> int:
        """Waiting, prefilling and decoding requests."""
        return len(self.running) + len(self.waiting)
