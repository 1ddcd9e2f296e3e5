"""What is asked of a deployment: requests that start together, how their prompts are cut, how tokens are guessed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.networks.batch import Batch
from kernelcast.networks.forward import Deployment
from kernelcast.stacks import Stack

_LARGE_BYTES = 70 * 2**30  # GPUs of so much memory, on which engines take larger steps by default
_SAMPLED_STEPS = 9  # decode steps that are predicted, of each stretch with the same requests


def scheduler_defaults(stack: Stack, gpu: Gpu) -> dict[str, Any]:
    """A stack's own limits on this GPU, as its launcher sets them; empty: it has no scheduler."""
    raw = dict(stack.scheduler)
    large = gpu.dram_bytes >= _LARGE_BYTES and not gpu.known_as.startswith("a100")
    for name in [name for name in raw if name.endswith("_large")]:
        value = raw.pop(name)
        if large:
            raw[name.removesuffix("_large")] = value
    return raw


def step_tokens(stack: Stack, gpu: Gpu) -> int:
    """Tokens of a step that reads prompts, by default; 0: all at once."""
    return int(scheduler_defaults(stack, gpu).get("max_num_batched_tokens", 0))


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: ``draft_tokens`` guesses a step, each right with probability ``acceptance`` if those before
    it were (Leviathan et al., arXiv 2211.17192). ``draft``: the model that guesses, on the same GPUs; None: free."""

    draft_tokens: int
    acceptance: float
    draft: Deployment | None = None

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise KernelcastError(f"draft tokens must be 1 or more, not {self.draft_tokens}")
        if not 0 <= self.acceptance <= 1:
            raise KernelcastError(f"an acceptance rate lies between 0 and 1, not at {self.acceptance}")

    @property
    def tokens_per_step(self) -> float:
        """Expected: the accepted guesses and one token of the model's own, (1 - a^(k+1)) / (1 - a)."""
        a, k = self.acceptance, self.draft_tokens
        return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


@dataclass(frozen=True)
class Images:
    """What a tower (or its layers of one kind) reads before prompts: so many sequences of so many patches."""

    tower: Deployment
    sequences: int
    patches: int


class Request(NamedTuple):
    """Tokens of one request: its prompt, its output, and (of the prompt) those in the cache already."""

    inputs: int
    outputs: int
    cached: int


@dataclass(frozen=True)
class Workload:
    """Requests that start together: prompt, output and (of the prompt) tokens that are in the cache already."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cached: tuple[int, ...] = ()
    chunk: int | None = None  # tokens of a prefill step; 0: all at once; None: as the stack's scheduler takes them
    speculation: Speculation | None = None
    images: tuple[Images, ...] = ()  # their tokens are among ``inputs``

    def __post_init__(self) -> None:
        if not self.inputs or len(self.inputs) != len(self.outputs):
            raise KernelcastError(f"{len(self.inputs)} prompts and {len(self.outputs)} outputs: give one of each")
        if self.cached and len(self.cached) != len(self.inputs):
            raise KernelcastError(f"{len(self.cached)} cached prefixes for {len(self.inputs)} prompts")
        if min(self.inputs) < 1 or min(self.outputs) < 1:
            raise KernelcastError("every request needs at least one input token and one output token")
        if any(not 0 <= c < n for c, n in zip(self.cached, self.inputs, strict=False)):
            raise KernelcastError("cached tokens must be fewer than a request's input tokens")
        if self.chunk is not None and self.chunk < 0:
            raise KernelcastError(f"a prefill chunk must be 0 or more tokens, not {self.chunk}")

    @classmethod
    def equal(cls, batch: int, input_tokens: int, output_tokens: int, cached: int = 0, chunk: int | None = None,
              speculation: Speculation | None = None) -> Workload:  # fmt: skip
        if batch < 1:
            raise KernelcastError(f"batch must be 1 or more, not {batch}")
        prefixes = batch * (cached,) if cached else ()
        return cls(batch * (input_tokens,), batch * (output_tokens,), prefixes, chunk, speculation)

    @property
    def past(self) -> tuple[int, ...]:
        return self.cached or len(self.inputs) * (0,)

    @cached_property
    def even(self) -> Request | None:
        """One request, where all are alike."""
        first = Request(self.inputs[0], self.outputs[0], self.past[0])
        columns = zip((self.inputs, self.outputs, self.past), first, strict=True)
        return first if all(column.count(value) == len(column) for column, value in columns) else None

    @property
    def gained(self) -> float:
        """Tokens that a decode step gives a request."""
        return self.speculation.tokens_per_step if self.speculation else 1.0

    @property
    def checked(self) -> int:
        """Tokens of a request that go through a decode step: one, and those guessed."""
        return 1 + (self.speculation.draft_tokens if self.speculation else 0)

    def on(self, deployment: Deployment) -> Workload:
        """With prompts cut as the deployment's schedulers do, one of each attention-DP rank, where nothing else is
        said."""
        if self.chunk is not None:
            return self
        return replace(self, chunk=deployment.layout.dp * step_tokens(deployment.stack, deployment.gpu))

    def first_tokens(self) -> list[int]:
        """Of each request, the pass of the prefill (0, 1, ..) that gives its first token."""
        new = np.cumsum([n - c for n, c in zip(self.inputs, self.past, strict=True)])
        return [int(-(-tokens // self.chunk) - 1) if self.chunk else 0 for tokens in new]

    def prefills(self) -> list[Batch]:
        """The prefill's passes: one, or chunks that take the prompts in turn."""
        new = [n - c for n, c in zip(self.inputs, self.past, strict=True)]
        if not self.chunk or sum(new) <= self.chunk:
            return [Batch(tuple(new), self.past)]
        found: list[Batch] = []
        taken: list[tuple[int, int]] = []
        room = self.chunk
        for tokens, past in zip(new, self.past, strict=True):
            while tokens:
                part = min(tokens, room)
                taken.append((part, past))
                tokens, past, room = tokens - part, past + part, room - part
                if not room:
                    found.append(_batch(taken))
                    taken, room = [], self.chunk
        return [*found, _batch(taken)] if taken else found

    def decodes(self) -> list[tuple[int, Batch]]:
        """(step, pass) of decode steps to predict: the ends of every stretch with the same requests, some between."""
        gained, checked = self.gained, self.checked
        ends = [math.ceil((n - 1) / gained) for n in self.outputs]  # steps that each request takes part in
        found, start = [], 1
        for end in sorted({e for e in ends if e}):
            alive = [i for i, e in enumerate(ends) if e >= end]
            for step in sampled_steps(start, end):
                past = tuple(self.inputs[i] + int((step - 1) * gained) for i in alive)
                found.append((step, Batch(len(alive) * (checked,), past, head_rows=checked)))
            start = end + 1
        return found


def sampled_steps(start: int, end: int) -> tuple[int, ...]:
    """Of a stretch of decode steps, those that are predicted."""
    return _spread(start, end, min(_SAMPLED_STEPS, end - start + 1))


@lru_cache(maxsize=4096)
def _spread(start: int, end: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(set(np.linspace(start, end, count).round().astype(int).tolist())))


def _batch(taken: list[tuple[int, int]]) -> Batch:
    """Of (new, past) of each sequence."""
    return Batch(tuple(new for new, _ in taken), tuple(past for _, past in taken))
