"""Sequences of one pass, and many passes as columns; the properties that the launches of a pass scale with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError

MAX_DECODE_TOKENS = 8  # new tokens of a sequence that a step with draft tokens verifies
_MOST_ABSORBED = 2  # new tokens at the start of a prompt that latent attention treats as a decode

Ints = NDArray[np.int64]
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Batch:
    """Sequences of one pass: ``new`` tokens each, after ``past`` ones in the cache."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    head_rows: int = 1  # logits that each sequence needs: one, or all new tokens where draft tokens are verified

    def __post_init__(self) -> None:
        if not self.new or len(self.new) != len(self.past):
            raise KernelcastError(f"a batch needs new and past tokens of every sequence, not {self.new}, {self.past}")
        if min(self.new) < 1 or min(self.past) < 0:
            raise KernelcastError("every sequence of a batch has at least one new token, and no negative past")

    @property
    def tokens(self) -> int:
        return sum(self.new)

    @property
    def sequences(self) -> int:
        return len(self.new)

    @property
    def past_tokens(self) -> int:
        return sum(self.past)

    @property
    def most_new(self) -> int:
        return max(self.new)

    @property
    def least_past(self) -> int:
        return min(self.past)

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(map(add, self.new, self.past))

    @property
    def traits(self) -> BatchTraits:
        return BatchTraits(*_traits(self.sequences, self.tokens, self.past_tokens, self.most_new, self.least_past))

    def sizes(self, rows: int) -> LaunchSizes:
        """The sizes that its launches scale with; ``rows``: of the head."""
        traits, contexts = self.traits, self.contexts
        new = {"batch": self.sequences, "q_len": self.new[0]} if traits.uniform_new else {"q_lens": self.new}
        lengths = {**new, "kv_len": contexts[0]} if traits.uniform else {"q_lens": self.new, "kv_lens": contexts}
        return LaunchSizes(traits, self.tokens, rows, self.tokens, sum(contexts), lengths, new)

    def heaviest_part(self, parts: int) -> Batch:
        """The heaviest of so many parts, sequences assigned round-robin by length."""
        if parts == 1:
            return self
        order = sorted(range(self.sequences), key=lambda i: -(self.new[i] + self.past[i]))
        rows = sorted(order[::parts])
        return Batch(tuple(self.new[i] for i in rows), tuple(self.past[i] for i in rows), self.head_rows)


@dataclass(frozen=True)
class BatchTraits:
    """The properties of a batch that decide which kernels run, beside the deployment."""

    uniform_new: bool  # all sequences have as many new tokens
    uniform: bool  # and as long a past: attention takes one size for all, else a list
    has_past: bool  # some sequence has a past
    absorbed: bool  # so few new tokens that MLA runs with absorbed weights
    decodes: bool  # so few new tokens after a past that it is a decode step


def _traits(sequences: Any, tokens: Any, past_tokens: Any, most_new: Any, least_past: Any) -> tuple[Any, ...]:
    """The traits of a batch, or columns of those of many."""
    uniform_new, after = tokens == sequences * most_new, least_past > 0
    few = most_new <= MAX_DECODE_TOKENS
    return (
        uniform_new,
        uniform_new & (past_tokens == sequences * least_past),
        past_tokens > 0,
        (few & after) | (most_new <= _MOST_ABSORBED),
        few & after,
    )


@dataclass(frozen=True)
class LaunchSizes:
    """The sizes that launches scale with, of one batch (numbers) or of many with the same traits (columns). ``tokens``
    and ``rows`` (of the head) have each different value once; the others an entry each different batch."""

    traits: BatchTraits
    tokens: Any
    rows: Any
    batch_tokens: Any
    context_tokens: Any  # of all sequences, new and past
    lengths: dict[str, Any]  # as attention takes them: one size for all, or a list
    new: dict[str, Any]  # the same without the past


@dataclass(frozen=True)
class BatchColumns:
    """Many batches, a row each. ``ragged``: the batch itself where its sequences differ, else None."""

    sequences: Ints
    tokens: Ints
    past_tokens: Ints
    most_new: Ints
    least_past: Ints
    head_rows: Ints
    ragged: NDArray[Any]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> BatchColumns:
        numbers = [(b.sequences, b.tokens, b.past_tokens, b.most_new, b.least_past, b.head_rows) for b in batches]
        sequences, tokens, past, new, least, heads = np.array(numbers, dtype=np.int64).reshape(-1, 6).T
        columns = cls(sequences, tokens, past, new, least, heads, objects(batches))
        columns.ragged[columns._traits[1]] = None
        return columns

    @classmethod
    def uniform(cls, sequences: Ints | int, new: Ints | int, past: Ints | int, head_rows: int = 1) -> BatchColumns:
        """Batches whose sequences are all of one size; a scalar applies to all batches."""
        sequences, new, past = np.broadcast_arrays(sequences, new, past)
        rows = np.full(len(new), head_rows, dtype=np.int64)
        none = np.full(len(new), None, dtype=object)
        return cls(sequences, sequences * new, sequences * past, new, past, rows, none)

    @classmethod
    def concatenate(cls, parts: Sequence[BatchColumns]) -> BatchColumns:
        """The batches of all these, in order."""
        columns = {
            column.name: np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)
        }
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Rows) -> BatchColumns:
        return BatchColumns(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    def batch(self, at: int) -> Batch:
        if self.ragged[at] is not None:
            batch: Batch = self.ragged[at]
            return batch
        count = int(self.sequences[at])
        new, past = (count * (int(column[at]),) for column in (self.most_new, self.least_past))
        return Batch(new, past, int(self.head_rows[at]))

    def heaviest_part(self, ranks: int, micro_batches: int) -> tuple[BatchColumns, Ints]:
        """The micro-batch that one rank runs of each, and how many run in sequence: the heaviest part of the heaviest
        rank."""
        parts = np.minimum(micro_batches, -(-self.sequences // ranks))
        if ranks == micro_batches == 1:
            return self, parts
        uniform = self.uniform(-(-self.sequences // (ranks * parts)), self.most_new, self.least_past)
        columns = {field.name: getattr(uniform, field.name).copy() for field in fields(uniform)} | {
            "head_rows": self.head_rows
        }
        for at in np.flatnonzero(~self._traits[1]):
            part = BatchColumns.of([self.ragged[at].heaviest_part(ranks * int(parts[at]))])
            for name, column in columns.items():
                column[at] = getattr(part, name)[0]
        return BatchColumns(**columns), parts

    @property
    def _traits(self) -> tuple[NDArray[np.bool_], ...]:
        return _traits(self.sequences, self.tokens, self.past_tokens, self.most_new, self.least_past)

    def by_traits(self) -> list[tuple[BatchTraits, Rows]]:
        """The distinct traits, and the rows of each."""
        traits = self._traits
        codes = np.bitwise_or.reduce([column.astype(np.int64) << bit for bit, column in enumerate(traits)])
        return [
            (BatchTraits(*(bool(code >> bit & 1) for bit in range(len(traits)))), np.flatnonzero(codes == code))
            for code in np.unique(codes).tolist()
        ]

    def sizes(self, traits: BatchTraits, rows: Ints) -> tuple[LaunchSizes, dict[str, Rows]]:
        """The sizes that launches of batches with the same traits scale with (``rows``: of the head), and the entry
        of each batch (by ``Launch.scales_with``)."""
        tokens, tokens_at = np.unique(self.tokens, return_inverse=True)
        heads, heads_at = np.unique(rows, return_inverse=True)
        known: dict[Any, int] = {}
        keys = zip(self.sequences.tolist(), self.most_new.tolist(), self.least_past.tolist(), strict=True)
        at = [known.setdefault(key, len(known)) for key in (keys if traits.uniform else self.ragged.tolist())]
        distinct = self.take(np.unique(at, return_index=True)[1])
        new: dict[str, Any] = {"batch": distinct.sequences, "q_len": distinct.most_new}
        if not traits.uniform_new:
            new = {"q_lens": objects([batch.new for batch in distinct.ragged])}
        if traits.uniform:
            lengths = {**new, "kv_len": distinct.most_new + distinct.least_past}
        else:
            lengths = {"q_lens": objects([batch.new for batch in distinct.ragged])}
            lengths["kv_lens"] = objects([batch.contexts for batch in distinct.ragged])
        return (
            LaunchSizes(traits, tokens, heads, distinct.tokens, distinct.tokens + distinct.past_tokens, lengths, new),
            {"tokens": tokens_at, "sequences": heads_at, "lengths": np.array(at, dtype=np.intp)},
        )


def objects(items: Sequence[Any]) -> NDArray[Any]:
    """A column of these values; tuples stay tuples."""
    column = np.empty(len(items), dtype=object)
    for at, item in enumerate(items):
        column[at] = item
    return column
