"""The requests of an attention call: equal or ragged, how long, with which heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernelcast.kernels.base import Calls
from kernelcast.kernels.work import Array


@dataclass(frozen=True)
class Requests:
    """The requests of each call, ``copies`` of each entry; equal ones are one entry, ragged ones stand alone."""

    queries: Array
    keys: Array
    copies: Array
    starts: NDArray[np.int64] | None  # first entry of each call; None: entry i is call i
    call: NDArray[np.int64]  # call of each entry

    @classmethod
    def of(cls, calls: Calls) -> Requests:
        if "q_lens" not in calls.lists:
            rows = np.arange(calls.count)
            return cls(calls["q_len"], calls["kv_len"], calls["batch"], None, rows)
        queries, keys = calls.lists["q_lens"], calls.lists["kv_lens"]
        rows = np.repeat(np.arange(calls.count), queries.counts)
        return cls(queries.flat, keys.flat, np.ones_like(queries.flat), queries.starts[:-1], rows)

    def total(self, values: Array) -> Array:
        """Sum over each call's requests, copies counted."""
        values = np.broadcast_to(values, self.queries.shape) * self.copies
        return values if self.starts is None else np.add.reduceat(values, self.starts)

    def most(self, values: Array) -> Array:
        return values if self.starts is None else np.maximum.reduceat(values, self.starts)

    def least(self, values: Array) -> Array:
        return values if self.starts is None else np.minimum.reduceat(values, self.starts)

    def each(self, values: Array) -> Array:
        """A value per call, repeated for each of its requests."""
        return values if self.starts is None else values[self.call]


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes, one entry a call. ``shared_where``: V is a part of K (MLA's latent)."""

    queries: Array
    kv: Array
    qk_dim: Array
    v_dim: Array
    shared_where: NDArray[np.bool_] | bool = False
    most_packed: float = np.inf  # query heads a KV head; with more, every query head walks the keys alone

    @property
    def kv_dim(self) -> Array:
        """Numbers a KV head stores for a token."""
        return self.qk_dim + np.where(self.shared_where, 0.0, self.v_dim)


def length_hints(calls: Calls, heads: Heads) -> dict[str, Array]:
    """Shape of a batch, equal or ragged: how many, how long, how unequal."""
    requests = Requests.of(calls)
    count = requests.total(np.ones_like(requests.queries))
    mean_keys = requests.total(requests.keys) / count
    return {
        "log_requests": np.log2(count),
        "log_queries": np.log2(requests.total(requests.queries) / count),
        "log_keys": np.log2(mean_keys),
        "longest_keys": np.log2(requests.most(requests.keys) / mean_keys),
        "cached": 1 - requests.total(requests.queries) / requests.total(requests.keys),
        "log_q_heads": np.log2(heads.queries),
        "log_kv_heads": np.log2(heads.kv),
        "log_qk_dim": np.log2(heads.qk_dim),
        "causal": calls["causal"],
    }


def equal_heads(calls: Calls, most_packed: float = np.inf) -> Heads:
    """Heads of a call whose keys and values have one size; as many KV heads as query heads where none are given."""
    return Heads(
        queries=calls["q_heads"],
        kv=calls.given("kv_heads", calls["q_heads"]),
        qk_dim=calls["head_dim"],
        v_dim=calls["head_dim"],
        most_packed=most_packed,
    )


def head_conflicts(calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
    """Query heads share KV heads evenly."""
    kv_heads = calls.given("kv_heads", calls["q_heads"])
    uneven = np.mod(calls["q_heads"], kv_heads) != 0
    if not uneven.any():
        return []
    pair = calls["q_heads"][uneven][0], kv_heads[uneven][0]
    return [(uneven, f"q_heads {pair[0]:g} is no multiple of kv_heads {pair[1]:g}")]


def length_conflicts(calls: Calls, op: str) -> list[tuple[NDArray[np.bool_], str]]:
    """Either batch, q_len, kv_len or q_lens and kv_lens, and queries that end where the keys end."""
    every = np.ones(calls.count, dtype=bool)
    ragged = [name for name in ("q_lens", "kv_lens") if name in calls.lists]
    scalars = ("batch", "q_len", "kv_len")
    if len(ragged) == 1:
        return [(every, f"q_lens and kv_lens go together, only {ragged[0]} is given")]
    if ragged:
        both = np.any([~np.isnan(calls[name]) for name in scalars], axis=0)
        if both.any():
            return [(both, "give q_lens and kv_lens, or batch, q_len and kv_len, not both")]
        uneven = calls.lists["q_lens"].counts != calls.lists["kv_lens"].counts
        if uneven.any():
            pair = [calls.lists[name].counts[uneven][0] for name in ("q_lens", "kv_lens")]
            return [(uneven, f"q_lens has {pair[0]} requests, kv_lens {pair[1]}")]
    else:
        broken = [(np.isnan(calls[name]), f"{op} needs {name}, or q_lens and kv_lens") for name in scalars]
        broken = [(mask, text) for mask, text in broken if mask.any()]
        if broken:
            return broken
    requests = Requests.of(calls)
    short = requests.each(calls["causal"]) * (requests.queries - requests.keys) > 0
    if short.any():
        at = np.flatnonzero(short)[0]
        text = (
            f"causal attention of {requests.queries[at]:g} queries over {requests.keys[at]:g} keys: "
            "give kv_len >= q_len"
        )
        return [(np.isin(np.arange(calls.count), requests.call[short]), text)]
    return []


def sequences_of(calls: Calls) -> Requests:
    """The sequences of each call; what is already in the state costs nothing, so keys are the queries."""
    if "q_lens" not in calls.lists:
        return Requests(calls["q_len"], calls["q_len"], calls["batch"], None, np.arange(calls.count))
    flat, counts = calls.lists["q_lens"].flat, calls.lists["q_lens"].counts
    rows = np.repeat(np.arange(calls.count), counts)
    return Requests(flat, flat, np.ones_like(flat), calls.lists["q_lens"].starts[:-1], rows)


def sequence_conflicts(calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
    given = [~np.isnan(calls[name]) for name in ("batch", "q_len")]
    wrong = np.any(given, axis=0) if "q_lens" in calls.lists else ~np.all(given, axis=0)
    return [(wrong, "give batch and q_len, or q_lens, and not both")] if wrong.any() else []


def sequence_hints(calls: Calls) -> dict[str, Array]:
    requests = sequences_of(calls)
    count = requests.total(np.ones_like(requests.queries))
    mean = requests.total(requests.queries) / count
    return {
        "log_requests": np.log2(count),
        "log_queries": np.log2(mean),
        "longest_queries": np.log2(requests.most(requests.queries) / mean),
    }
