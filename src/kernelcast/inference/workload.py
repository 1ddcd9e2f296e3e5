"""Requests of a static batch (lengths, chunked prefill, speculative decoding, images) and the passes that they need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.inference.batch import Batch, BatchColumns, Ints, Rows
from kernelcast.inference.deployment import Layout, step_tokens
from kernelcast.inference.forward import Deployment
from kernelcast.models.architecture import Architecture, vision_encoders
from kernelcast.models.precision import Precision
from kernelcast.ops.work import Array

_SAMPLED_STEPS = 9  # decode steps that are predicted, of each stretch with the same requests


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: ``draft_tokens`` a step, each accepted with probability ``acceptance`` if those before
    it were (Leviathan et al., arXiv 2211.17192). ``draft``: the draft model, on the same GPUs; None: free."""

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
        """Expected: the accepted draft tokens and one of the model, (1 - a^(k+1)) / (1 - a)."""
        a, k = self.acceptance, self.draft_tokens
        return k + 1.0 if a == 1 else (1 - a ** (k + 1)) / (1 - a)


@dataclass(frozen=True)
class ImageBatch:
    """The batch of a vision encoder (or of equal layers of it) before prefill: sequences of patches."""

    tower: Deployment
    sequences: int
    patches: int


class RequestLengths(NamedTuple):
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
    chunk: int | None = None  # tokens of a prefill step; 0: all at once; None: the scheduler's default
    speculation: Speculation | None = None
    images: tuple[ImageBatch, ...] = ()  # their tokens are among ``inputs``

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
    def uniform_request(self) -> RequestLengths | None:
        """One request, where all are equal."""
        first = RequestLengths(self.inputs[0], self.outputs[0], self.past[0])
        columns = zip((self.inputs, self.outputs, self.past), first, strict=True)
        return first if all(column.count(value) == len(column) for column, value in columns) else None

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decode step gives a request."""
        return self.speculation.tokens_per_step if self.speculation else 1.0

    @property
    def verified_tokens(self) -> int:
        """Tokens of a request that a decode step verifies: one, and the draft tokens."""
        return 1 + (self.speculation.draft_tokens if self.speculation else 0)

    def on(self, deployment: Deployment) -> Workload:
        """The workload with the default chunk of the deployment's scheduler, once per attention-DP rank, unless
        given."""
        if self.chunk is not None:
            return self
        return replace(self, chunk=deployment.layout.dp * step_tokens(deployment.stack, deployment.gpu))

    def first_tokens(self) -> list[int]:
        """The prefill pass (0, 1, ..) of each request that gives its first token."""
        new = np.cumsum([n - c for n, c in zip(self.inputs, self.past, strict=True)])
        return [int(-(-tokens // self.chunk) - 1) if self.chunk else 0 for tokens in new]

    def prefills(self) -> list[Batch]:
        """The prefill's passes: one, or chunks that take the prompts in turn."""
        new = [n - c for n, c in zip(self.inputs, self.past, strict=True)]
        if not self.chunk or sum(new) <= self.chunk:
            return [Batch(tuple(new), self.past)]
        passes: list[Batch] = []
        taken: list[tuple[int, int]] = []
        room = self.chunk
        for tokens, past in zip(new, self.past, strict=True):
            while tokens:
                part = min(tokens, room)
                taken.append((part, past))
                tokens, past, room = tokens - part, past + part, room - part
                if not room:
                    passes.append(_batch(taken))
                    taken, room = [], self.chunk
        return [*passes, _batch(taken)] if taken else passes

    def decodes(self) -> list[tuple[int, Batch]]:
        """(step, pass) of decode steps to predict: the ends of every stretch with the same requests, some between."""
        gained, checked = self.tokens_per_step, self.verified_tokens
        ends = [math.ceil((n - 1) / gained) for n in self.outputs]  # steps that each request takes part in
        passes, start = [], 1
        for end in sorted({e for e in ends if e}):
            alive = [i for i, e in enumerate(ends) if e >= end]
            for step in sampled_steps(start, end):
                past = tuple(self.inputs[i] + int((step - 1) * gained) for i in alive)
                passes.append((step, Batch(len(alive) * (checked,), past, head_rows=checked)))
            start = end + 1
        return passes


def sampled_steps(start: int, end: int) -> tuple[int, ...]:
    """The steps of a stretch of decode steps that are predicted."""
    return _spread(start, end, min(_SAMPLED_STEPS, end - start + 1))


@lru_cache(maxsize=4096)
def _spread(start: int, end: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(set(np.linspace(start, end, count).round().astype(int).tolist())))


def _batch(taken: list[tuple[int, int]]) -> Batch:
    """A batch from (new, past) of each sequence."""
    return Batch(tuple(new for new, _ in taken), tuple(past for _, past in taken))


def with_images(workload: Workload, deployment: Deployment, images: int, side: int) -> Workload:
    """The workload with so many images of so many pixels a side before each prompt. Encoders run in 16 bits, replicated
    on each tensor parallel GPU: images are split over them (vLLM's --mm-encoder-tp-mode data)."""
    towers = vision_encoders(deployment.model, side)
    assert deployment.model.vision is not None  # else there are no vision encoders
    added = images * deployment.model.vision.tokens(side)
    each = -(-len(workload.inputs) * images // deployment.layout.tp)
    read = tuple(ImageBatch(_alone(deployment, tower), count * each, patches) for tower, count, patches in towers)
    return replace(workload, inputs=tuple(tokens + added for tokens in workload.inputs), images=read)


def _alone(deployment: Deployment, tower: Architecture) -> Deployment:
    """A vision encoder has no experts to shard."""
    layout = Layout(dp=deployment.layout.dp)
    return replace(deployment, model=tower, precision=Precision(stored=True), layout=layout, redundant=0, overlap=False)


def sum_by_owner(owner: Ints, values: Array | Ints, count: int) -> Array:
    """The sum of the values of each of ``count`` owners, in order, so that it does not depend on other owners."""
    return np.bincount(owner, values, count).astype(np.float64, copy=False)


class RequestColumns:
    """``inputs``, ``outputs``, ``cached``, ``counts``: the different requests of each workload, one workload after
    another. ``batch``, ``chunk`` and ``checked`` have an entry a workload."""

    def __init__(self, workloads: Sequence[Workload]) -> None:
        self.workloads, self.count = workloads, len(workloads)
        rows: list[tuple[int, int, int, int, int]] = []
        for at, workload in enumerate(workloads):
            if workload.uniform_request is not None:
                rows.append((at, *workload.uniform_request, len(workload.inputs)))
            else:
                distinct = Counter(zip(workload.inputs, workload.outputs, workload.past, strict=True))
                rows += [(at, *request, count) for request, count in distinct.items()]
        self.owner, self.inputs, self.outputs, self.cached, self.counts = (
            np.array(rows, dtype=np.int64).reshape(-1, 5).T
        )
        self.batch: Ints = np.array([len(workload.inputs) for workload in workloads], dtype=np.int64)
        self.chunk: Ints = np.array([workload.chunk or 0 for workload in workloads], dtype=np.int64)
        self.verified_tokens: Ints = np.array([workload.verified_tokens for workload in workloads], dtype=np.int64)

    def total(self, values: Array | Ints) -> Array:
        """The sum over the requests of each workload."""
        return sum_by_owner(self.owner, self.counts * values, self.count)

    def most(self, values: Ints) -> Ints:
        """The maximum over the requests of each workload."""
        largest: Ints = np.maximum.reduceat(values, np.searchsorted(self.owner, np.arange(self.count)))
        return largest

    def towers(self) -> Iterator[tuple[Deployment, list[int]]]:
        """Vision encoders, and the workloads with images."""
        members: dict[int, tuple[Deployment, list[int]]] = {}
        for at, workload in enumerate(self.workloads):
            for images in workload.images:
                members.setdefault(id(images.tower), (images.tower, []))[1].append(at)
        yield from members.values()

    def drafts(self) -> Iterator[tuple[Deployment, Ints]]:
        """Draft models, and the workloads of each."""
        known: dict[int, tuple[Deployment, list[int]]] = {}
        for at, workload in enumerate(self.workloads):
            if workload.speculation is not None and workload.speculation.draft is not None:
                draft = workload.speculation.draft
                known.setdefault(id(draft), (draft, []))[1].append(at)
        for draft, members in known.values():
            yield draft, np.array(members)


@dataclass(frozen=True)
class WorkloadPasses:
    """The distinct passes of the prefill, then those of decode steps. ``counts``: how many each represents;
    ``order``: of the prefill's passes one after another, the row of each; ``count``: of decode steps."""

    batches: BatchColumns
    counts: Array
    decodes: NDArray[np.bool_]
    order: Rows
    count: int

    def drafted(self, draft_tokens: int) -> WorkloadPasses:
        """Passes of the draft model: its prefill, and one pass in the middle of the decode for all draft tokens."""
        prefills, decodes = np.flatnonzero(~self.decodes), np.flatnonzero(self.decodes)
        middle = self.batches.batch(int(decodes[len(decodes) // 2]))
        draft = BatchColumns.of([Batch(len(middle.new) * (1,), middle.past)])
        return replace(
            self,
            batches=BatchColumns.concatenate([self.batches.take(prefills), draft]),
            counts=np.append(self.counts[prefills], float(self.count * draft_tokens)),
            decodes=np.append(self.decodes[prefills], True),
        )


def workload_passes(workload: Workload) -> WorkloadPasses:
    if workload.uniform_request is None:
        prefills, order = _listed(workload.prefills())
        decodes = workload.decodes()
        return _steps(
            prefills, order, tuple(step for step, _ in decodes), BatchColumns.of([batch for _, batch in decodes])
        )
    gained = workload.tokens_per_step
    end = math.ceil((workload.uniform_request.outputs - 1) / gained)
    steps = sampled_steps(1, end) if end else ()
    return _even_steps(
        len(workload.inputs), workload.uniform_request, workload.chunk or 0, steps, gained, workload.verified_tokens
    )


def image_passes(workload: Workload, tower: Deployment) -> WorkloadPasses:
    """The pass of the vision encoder, before any prompt."""
    (images,) = (each for each in workload.images if each.tower is tower)
    read = _evenly([(images.sequences, images.patches, 0)])
    return WorkloadPasses(read, np.ones(1), np.zeros(1, dtype=bool), np.zeros(1, dtype=np.intp), 0)


def _steps(prefills: BatchColumns, order: Rows, steps: tuple[int, ...], decodes: BatchColumns) -> WorkloadPasses:
    counts = np.concatenate([np.bincount(order, minlength=len(prefills)), step_weights(steps)])
    phases = np.arange(len(counts)) >= len(prefills)
    return WorkloadPasses(
        BatchColumns.concatenate([prefills, decodes]), counts, phases, order, steps[-1] if steps else 0
    )


def _listed(batches: Sequence[Batch]) -> tuple[BatchColumns, Rows]:
    """The distinct batches, and the row of each."""
    known: dict[Batch, int] = {}
    order = [known.setdefault(batch, len(known)) for batch in batches]
    return BatchColumns.of(list(known)), np.array(order, dtype=np.intp)


@lru_cache(maxsize=4096)  # deployments share workloads
def _even_steps(
    batch: int, request: RequestLengths, chunk: int, steps: tuple[int, ...], gained: float, checked: int
) -> WorkloadPasses:
    """The passes of equal requests."""
    tokens = request.inputs - request.cached
    prefills, order = _chunks(batch, tokens, request.cached, min(chunk or batch * tokens, batch * tokens))
    decodes = [(batch, checked, request.inputs + int((step - 1) * gained)) for step in steps]
    return _steps(prefills, order, steps, _evenly(decodes, checked))


@lru_cache(maxsize=4096)  # and outputs of several lengths of the same prompts
def _chunks(batch: int, tokens: int, past: int, chunk: int) -> tuple[BatchColumns, Rows]:
    """Prompts of one size, end to end, split every ``chunk`` tokens: passes that begin at the same position
    of a prompt and are as long are alike."""
    starts = np.arange(0, batch * tokens, chunk)
    sizes = np.minimum(chunk, batch * tokens - starts)
    _, first, order = np.unique(starts % tokens * (chunk + 1) + sizes, return_index=True, return_inverse=True)
    whole = (starts % tokens == 0) & (sizes % tokens == 0)
    if (whole | (sizes <= tokens - starts % tokens)).all():  # each has whole prompts, or a part of one
        sequences = np.where(whole, sizes // tokens, 1)
        new = np.where(whole, tokens, sizes)
        return BatchColumns.uniform(sequences[first], new[first], past + (starts % tokens)[first]), order
    return BatchColumns.of([_chunk(int(starts[at]) % tokens, int(sizes[at]), tokens, past) for at in first]), order


def _chunk(start: int, size: int, tokens: int, past: int) -> Batch:
    """``size`` tokens from position ``start`` of a prompt on."""
    first = min(size, tokens - start)
    whole, last = divmod(size - first, tokens)
    new = (first, *(whole * (tokens,)), *((last,) if last else ()))
    return Batch(new, (past + start, *((len(new) - 1) * (past,))))


def _evenly(rows: Sequence[tuple[int, int, int]], head_rows: int = 1) -> BatchColumns:
    """Batches from (sequences, new, past) of each."""
    sequences, new, past = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return BatchColumns.uniform(sequences, new, past, head_rows)


@lru_cache(maxsize=1024)
def step_weights(steps: tuple[int, ...]) -> Array:
    """How many steps each predicted step represents: the trapezoid rule, exact where time grows evenly."""
    if not steps:
        return np.empty(0)
    every = np.arange(1, steps[-1] + 1)
    return np.array([np.interp(every, steps, row).sum() for row in np.eye(len(steps))])
