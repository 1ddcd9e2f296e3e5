"""Sequences of one pass, and many passes as columns; what of them the launches of a pass follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError

MAX_DECODE_TOKENS = 8  # new tokens of a sequence that a step with drafted tokens checks
_MOST_ABSORBED = 2  # new tokens of a prompt's beginning that latent attention takes as a decode

Ints = NDArray[np.int64]
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Batch:
    """Sequences of one pass: ``new`` tokens each, after ``past`` ones in the cache."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    head_rows: int = 1  # logits that each sequence needs: one, or all new tokens where guesses are checked

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
    def form(self) -> BatchTraits:
        return BatchTraits(*_told(self.sequences, self.tokens, self.past_tokens, self.most_new, self.least_past))

    def sizes(self, rows: int) -> LaunchSizes:
        """What its launches follow; ``rows`` of the head."""
        form, contexts = self.form, self.contexts
        new = {"batch": self.sequences, "q_len": self.new[0]} if form.even_new else {"q_lens": self.new}
        lengths = {**new, "kv_len": contexts[0]} if form.even else {"q_lens": self.new, "kv_lens": contexts}
        return LaunchSizes(form, self.tokens, rows, self.tokens, sum(contexts), lengths, new)

    def shared(self, parts: int) -> Batch:
        """The heaviest of so many parts, sequences dealt out in turn."""
        if parts == 1:
            return self
        order = sorted(range(self.sequences), key=lambda i: -(self.new[i] + self.past[i]))
        rows = sorted(order[::parts])
        return Batch(tuple(self.new[i] for i in rows), tuple(self.past[i] for i in rows), self.head_rows)


@dataclass(frozen=True)
class BatchTraits:
    """What of a batch decides which kernels run, beside the deployment."""

    even_new: bool  # all sequences have as many new tokens
    even: bool  # and as long a past: attention takes one size for all, else a list
    cached: bool  # some sequence has a past
    absorbed: bool  # so few new tokens that latent attention reads the latent itself
    checks: bool  # so few, after a past, that a step of decode is meant


def _told(sequences: Any, tokens: Any, past_tokens: Any, most_new: Any, least_past: Any) -> tuple[Any, ...]:
    """The form of a batch, or columns of those of many."""
    even_new, after = tokens == sequences * most_new, least_past > 0
    few = most_new <= MAX_DECODE_TOKENS
    return (
        even_new,
        even_new & (past_tokens == sequences * least_past),
        past_tokens > 0,
        (few & after) | (most_new <= _MOST_ABSORBED),
        few & after,
    )


@dataclass(frozen=True)
class LaunchSizes:
    """What the sizes of launches follow, of one batch (numbers) or of many of one form (columns). ``tokens`` and
    ``rows`` (of the head) have each different value once; the others an entry each different batch."""

    form: BatchTraits
    tokens: Any
    rows: Any
    batch_tokens: Any
    context_tokens: Any  # of all sequences, new and past
    lengths: dict[str, Any]  # as attention takes them: one size for all, or a list
    new: dict[str, Any]  # the same without the past


@dataclass(frozen=True)
class BatchColumns:
    """Many batches, one a row. Of an uneven one ``uneven`` has the lengths; of an even one it is None."""

    sequences: Ints
    tokens: Ints
    past_tokens: Ints
    most_new: Ints
    least_past: Ints
    head_rows: Ints
    uneven: NDArray[Any]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> BatchColumns:
        numbers = [(b.sequences, b.tokens, b.past_tokens, b.most_new, b.least_past, b.head_rows) for b in batches]
        sequences, tokens, past, new, least, heads = np.array(numbers, dtype=np.int64).reshape(-1, 6).T
        found = cls(sequences, tokens, past, new, least, heads, objects(batches))
        found.uneven[found._told[1]] = None
        return found

    @classmethod
    def evenly(cls, sequences: Ints | int, new: Ints | int, past: Ints | int, head_rows: int = 1) -> BatchColumns:
        """Of one size for all sequences of each; a number holds for all batches."""
        sequences, new, past = np.broadcast_arrays(sequences, new, past)
        rows = np.full(len(new), head_rows, dtype=np.int64)
        none = np.full(len(new), None, dtype=object)
        return cls(sequences, sequences * new, sequences * past, new, past, rows, none)

    @classmethod
    def joined(cls, parts: Sequence[BatchColumns]) -> BatchColumns:
        """One after another."""
        columns = {one.name: np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)}
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Rows) -> BatchColumns:
        return BatchColumns(**{one.name: getattr(self, one.name)[rows] for one in fields(self)})

    def batch(self, at: int) -> Batch:
        if self.uneven[at] is not None:
            found: Batch = self.uneven[at]
            return found
        count = int(self.sequences[at])
        new, past = (count * (int(column[at]),) for column in (self.most_new, self.least_past))
        return Batch(new, past, int(self.head_rows[at]))

    def shared(self, ranks: int, micro_batches: int) -> tuple[BatchColumns, Ints]:
        """What one rank runs of each, and in how many parts that follow one another: the heaviest part of the heaviest
        rank."""
        parts = np.minimum(micro_batches, -(-self.sequences // ranks))
        if ranks == micro_batches == 1:
            return self, parts
        found = self.evenly(-(-self.sequences // (ranks * parts)), self.most_new, self.least_past)
        columns = {one.name: getattr(found, one.name).copy() for one in fields(found)} | {"head_rows": self.head_rows}
        for at in np.flatnonzero(~self._told[1]):
            own = BatchColumns.of([self.uneven[at].shared(ranks * int(parts[at]))])
            for name, column in columns.items():
                column[at] = getattr(own, name)[0]
        return BatchColumns(**columns), parts

    @property
    def _told(self) -> tuple[NDArray[np.bool_], ...]:
        return _told(self.sequences, self.tokens, self.past_tokens, self.most_new, self.least_past)

    def forms(self) -> list[tuple[BatchTraits, Rows]]:
        """The different forms, and the rows of each."""
        told = self._told
        codes = np.bitwise_or.reduce([column.astype(np.int64) << bit for bit, column in enumerate(told)])
        return [
            (BatchTraits(*(bool(code >> bit & 1) for bit in range(len(told)))), np.flatnonzero(codes == code))
            for code in np.unique(codes).tolist()
        ]

    def sizes(self, form: BatchTraits, rows: Ints) -> tuple[LaunchSizes, dict[str, Rows]]:
        """Of batches of one form, with ``rows`` of the head each: what their launches follow, and where each batch has
        its own, by what that is (``Launch.scales_with``)."""
        tokens, tokens_at = np.unique(self.tokens, return_inverse=True)
        heads, heads_at = np.unique(rows, return_inverse=True)
        known: dict[Any, int] = {}
        keys = zip(self.sequences.tolist(), self.most_new.tolist(), self.least_past.tolist(), strict=True)
        at = [known.setdefault(key, len(known)) for key in (keys if form.even else self.uneven.tolist())]
        own = self.take(np.unique(at, return_index=True)[1])
        new: dict[str, Any] = {"batch": own.sequences, "q_len": own.most_new}
        if not form.even_new:
            new = {"q_lens": objects([batch.new for batch in own.uneven])}
        if form.even:
            lengths = {**new, "kv_len": own.most_new + own.least_past}
        else:
            lengths = {"q_lens": objects([batch.new for batch in own.uneven])}
            lengths["kv_lens"] = objects([batch.contexts for batch in own.uneven])
        return (
            LaunchSizes(form, tokens, heads, own.tokens, own.tokens + own.past_tokens, lengths, new),
            {"tokens": tokens_at, "sequences": heads_at, "lengths": np.array(at, dtype=np.intp)},
        )


def objects(items: Sequence[Any]) -> NDArray[Any]:
    """A column of whatever these are; tuples stay tuples."""
    found = np.empty(len(items), dtype=object)
    for at, item in enumerate(items):
        found[at] = item
    return found
