"""One engine: its ranks step in lockstep, each step as long as that of the busiest rank.

An engine that schedules asynchronously launches a step while the GPU runs the one before, and hands on the tokens of
that one when both are done: a step whose launches take long (no CUDA graph) holds back the tokens before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kernelcast.ops.work import Array
from kernelcast.serving.scheduler import Request, Scheduler, SchedulerStep
from kernelcast.serving.step_times import StepTimes, host_time

_MOST_STEPS = 512  # steps that are simulated together


@dataclass
class _RunningSteps:
    """Running steps: they end at ``start_s + ends_s``; ``count`` of them will be run."""

    start_s: float
    ends_s: list[float] | Array
    count: int
    steps: list[SchedulerStep | None]


class Engine:
    """``next_s``: when the running steps end, infinity where it is idle. ``log`` is called after equal steps with
    (start, end, steps, decoding sequences, prompt tokens, the engine); ``held_back``, where the tokens of the last of
    them come later than it ends, with (when it began, how much later)."""

    def __init__(self, ranks: list[Scheduler], times: StepTimes, variant: str,
                 log: Callable[[float, float, int, int, int, Engine], None],
                 held_back: Callable[[float, float], None]) -> None:  # fmt: skip
        self.ranks, self.times, self.variant, self._log, self._held_back = ranks, times, variant, log, held_back
        self.next_s = math.inf
        self._under: _RunningSteps | None = None
        self._host_free_s = 0.0  # when the next step can be scheduled
        self._launched_s = 0.0  # when the running step is launched
        self._known_s = 0.0  # when the tokens of the step before are known
        # An asynchronous scheduler has the next step ready when one begins: a request that arrives during a step is
        # considered when that step ends, and runs in the step after the next.
        self._ahead = ranks[0].settings.async_scheduling
        self._every = ranks[0].settings.recv_interval
        self._arrived: deque[tuple[float, Request]] = deque()
        self._count = 0  # steps so far
        self._waited = 0  # steps that prefill was held for, see EngineSettings.dp_wait
        stack = times.deployment.stack
        self._host_times_s = [
            host_time(variant, x, stack.spread) for x in (stack.step_s, stack.prefill_s, stack.sequence_s)
        ]

    @property
    def load(self) -> int:
        return sum(rank.load for rank in self.ranks) + len(self._arrived)

    def submit(self, request: Request, now_s: float) -> None:
        """Queue a request. It is considered when the running step ends (or, with an asynchronous scheduler, the one
        after it)."""
        under = self._under
        if under is None:
            self._assign(request)
            self._host_free_s = self._known_s = now_s
            self._begin(now_s)
            return
        full = self._full
        if self._ahead or self._every > 1:
            self._arrived.append((now_s, request))
        else:
            self._assign(request)
        if under.count > 1 and not full:
            run = int(np.searchsorted(under.ends_s, now_s - under.start_s)) + (2 if self._ahead else 1)
            run += -(self._count + run) % self._every
            if run < under.count:
                under.count = run
                self.next_s = under.start_s + float(under.ends_s[run - 1])

    def _assign(self, request: Request) -> None:
        """To the rank with the fewest requests."""
        rank = self.ranks[0] if len(self.ranks) == 1 else min(self.ranks, key=lambda rank: rank.load)
        rank.waiting.append(request)

    @property
    def _full(self) -> bool:
        """Whether a new request must wait for another to finish."""
        return all(rank.waiting or len(rank.running) >= rank.settings.max_num_seqs for rank in self.ranks)

    def run(self) -> list[Request]:
        """Finish the running steps and begin the next; returns the requests that finished."""
        under = self._under
        assert under is not None
        now_s, done = self.next_s, list[Request]()
        decoding = sum(rank.decoding for rank, step in zip(self.ranks, under.steps, strict=True)
                       if step and step.decodes)  # fmt: skip
        prompts = sum(step.prompt_tokens for step in under.steps if step and step.chunks)
        self._log(min(self._known_s, now_s), now_s, under.count, decoding, prompts, self)
        for rank, step in zip(self.ranks, under.steps, strict=True):
            if step:
                done += rank.advance(step, under.count, now_s)
        self._under = None
        self._count += under.count
        self._waited = self._waited + under.count if ranks_held(self.ranks) else 0
        last_s = under.start_s + float(under.ends_s[under.count - 2]) if under.count > 1 else under.start_s
        self._host_free_s = now_s
        if self._ahead:
            self._host_free_s = last_s if under.count > 1 else max(last_s, self._launched_s)
        while self._arrived and self._arrived[0][0] <= self._host_free_s and not self._count % self._every:
            self._assign(self._arrived.popleft()[1])
        self._begin(now_s)
        self._known_s = now_s
        if self._ahead and self._under and self._launched_s > now_s:
            self._known_s = self._launched_s
            self._held_back(last_s, self._known_s - now_s)
            first = [request for step in under.steps if step for request, _ in step.chunks if request.first_s == now_s]
            for request in first:
                request.first_s = self._known_s
            for request in done:
                request.last_s = self._known_s
        return done

    def _begin(self, now_s: float) -> None:
        self._hold()
        steps = [rank.schedule(now_s) for rank in self.ranks]
        if not any(steps) and self._arrived:  # nothing runs: no reason to wait
            while self._arrived:
                self._assign(self._arrived.popleft()[1])
            steps = [rank.schedule(now_s) for rank in self.ranks]
        if not any(steps):
            self.next_s = math.inf
            return
        if any(step.chunks for step in steps if step):
            for step in steps:
                if step:
                    step.most = 1
            step_s, launch_s = self._mixed_s(steps, now_s - self._host_free_s)
            ends: list[float] | Array = [step_s]
        else:
            most = min(step.most for step in steps if step)
            if self._arrived and not self._full:
                most = min(most, self._every - self._count % self._every)
            if ranks_held(self.ranks):
                most = min(most, self.ranks[0].settings.dp_wait - self._waited)
            ends = self._decodes_s(most)
            launch_s = self.times.launch_s(max(rank.decoding for rank in self.ranks), 0, 0, self.variant)
        self._launched_s = self._host_free_s + launch_s
        self._under = _RunningSteps(now_s, ends, len(ends), steps)
        self.next_s = now_s + float(ends[-1])

    def _hold(self) -> None:
        """Prefill is delayed while some ranks have no prompt, for at most ``dp_wait`` steps."""
        most = self.ranks[0].settings.dp_wait
        if not most or len(self.ranks) == 1:
            return
        ready = [bool(rank.waiting or rank.prefilling) for rank in self.ranks]
        under_way = any(rank.prefilling for rank in self.ranks) or not any(rank.decoding for rank in self.ranks)
        hold = any(ready) and not all(ready) and not under_way and self._waited < most
        for rank in self.ranks:
            rank.held = hold

    def _mixed_s(self, steps: list[SchedulerStep | None], ahead_s: float) -> tuple[float, float]:
        """The step of the busiest rank, of which the host launched ``ahead_s`` before it begins, and its launches; all
        ranks run as many tokens."""
        longest = launch_s = 0.0
        for rank, step in zip(self.ranks, steps, strict=True):
            if step is None:
                continue
            decoding, context = (rank.decoding, rank.context_sum) if step.decodes else (0, 0.0)
            ragged_s = self.times.ragged_s(decoding, context, rank.longest, mixed=bool(step.chunks))
            if not step.chunks:
                decode_s = self.times.decode(decoding, context, self.variant)
                longest = max(longest, decode_s + ragged_s + self._host(decoding))
                continue
            tokens = pairs = own = rows = 0
            for request, part in step.chunks:
                past = request.context - request.remaining
                tokens, pairs, rows = tokens + part, pairs + part * past, rows + (request.remaining == part)
                own += part * part
            prompts = tokens * tokens / own
            mixed_s = self.times.mixed(decoding, context, tokens, pairs / tokens, rows + decoding, self.variant,
                                       prompts, ahead_s)  # fmt: skip
            longest = max(longest, mixed_s + ragged_s + self._host(decoding, len(step.chunks)))
            launch_s = max(launch_s, self.times.launch_s(decoding, tokens, prompts, self.variant))
        return longest, launch_s

    def _host(self, decoding: int, prefilling: int = 0) -> float:
        """The time that the GPU waits for the host in a step."""
        step_s, prefill_s, sequence_s = self._host_times_s
        return (step_s if decoding else prefill_s) + (decoding + prefilling) * sequence_s

    def _decodes_s(self, most: int) -> list[float] | Array:
        """When each of the next steps ends, all ranks decoding."""
        decoding = max(rank.decoding for rank in self.ranks)
        context = max(rank.context_sum for rank in self.ranks)
        beside_s = self._host(decoding)
        beside_s += self.times.ragged_s(decoding, context, max(rank.longest for rank in self.ranks))
        if most == 1:
            return [self.times.decode(decoding, context, self.variant) + beside_s]
        count, tokens_per_step = min(most, _MOST_STEPS), self.ranks[0].tokens_per_step
        return np.cumsum(self.times.decodes(decoding, context, tokens_per_step, count, self.variant) + beside_s)


def ranks_held(ranks: list[Scheduler]) -> bool:
    """Whether prompts wait for other ranks."""
    return ranks[0].held
