"""The steps of an engine that `kernelcast collect --engine` times: which fit its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kernelcast.serving.step_table import KERNELS

# Contexts: sequences that decode, from most (those too many are aborted), and the prompts beside them
_PROMPTS = (32, 128, 512, 1024, 2048, 4096, 7900)
_GRID = {1024: ((256, 128, 64, 32, 8, 1), _PROMPTS), 6000: ((64, 8, 1), (128, 1024, 4096))}
FIRST_CONTEXT = min(_GRID)  # of the steps that are profiled
_TOGETHER = 4  # prompts of a step without decodes, beside one
_GROWTH = 512  # tokens of context that sequences gain at most while their steps are timed
_FILL_SHARE = 0.8  # of the KV cache, that a case may fill
_PROFILED = ((1, 0), (64, 0), (256, 0), (1, 512), (64, 128), (64, 1024), (64, 4096))


@dataclass(frozen=True)
class PlannedStep:
    """A case that is to be measured. ``step_type``: alone, decode, mixed or kernels."""

    step_type: str
    decodes: int
    context: int
    prompts: int = 0
    prompt_tokens: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PlannedStep:
        """What a record is of: contexts grow while their steps are timed."""
        context = max((known for known in _GRID if known <= record["context"]), default=0)
        return cls(record["kind"], record["decodes"], context, record["prompts"], record["prompt_tokens"])


class Limits(Protocol):
    """What decides which steps an engine can run."""

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def kv_tokens(self) -> int: ...


@dataclass(frozen=True)
class EngineLimits:
    """The limits of an engine that does not run here."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int

    @classmethod
    def of(cls, engine: Mapping[str, Any]) -> EngineLimits:
        """Those of the first line of a file."""
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_tokens")
        return cls(*(int(engine[name]) for name in names))


def planned_steps(limits: Limits) -> list[PlannedStep]:
    """All steps to time and to profile, in the order that they are measured in."""
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    alone = [PlannedStep("alone", 0, 0, count, count * tokens) for tokens in _PROMPTS if tokens < most
             for count in (1, _TOGETHER) if count <= limits.max_num_seqs
             and (count == 1 or count * tokens <= limits.max_num_batched_tokens)]  # fmt: skip
    timed = []
    for context, (counts, prompts) in _GRID.items():
        for count in (n for n in counts if _fits(limits, n, context)):
            timed.append(PlannedStep("decode", count, context))
            timed += [PlannedStep("mixed", count, context, 1, tokens) for tokens in prompts
                      if tokens < most and tokens + count <= limits.max_num_batched_tokens]  # fmt: skip
    profiled = [PlannedStep(KERNELS, count, FIRST_CONTEXT, int(tokens > 0), tokens) for count, tokens in _PROFILED
                if _fits(limits, count, FIRST_CONTEXT) and tokens < most
                and tokens + count <= limits.max_num_batched_tokens]  # fmt: skip
    return [*alone, *timed, *sorted(profiled, key=lambda step: -step.decodes)]


def _fits(limits: Limits, count: int, context: int) -> bool:
    longest = context + _GROWTH
    room = min(_FILL_SHARE * limits.kv_tokens / longest, limits.max_num_seqs)
    return longest < limits.max_model_len and count <= room
