"""The requests of an attention call, or the sequences of linear attention: equal or ragged, their lengths and heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import (
    Calls,
    ConfigurationColumns,
    Conflicts,
    Kernel,
    conflict,
    labels,
    lengths,
    not_multiple,
    size,
)
from kernelcast.ops.work import Array


@dataclass(frozen=True)
class RequestBatch:
    """The requests of each call, ``copies`` of each entry; equal requests are one entry, ragged ones one each."""

    queries: Array
    keys: Array
    copies: Array
    starts: NDArray[np.int64] | None  # first entry of each call; None: entry i is call i
    call: NDArray[np.int64]  # call of each entry

    @classmethod
    def of(cls, calls: Calls) -> RequestBatch:
        """Linear attention has no kv_len: its cached context costs nothing, so keys are the queries."""
        keyed = "kv" if "kv_len" in calls.numbers else "q"
        if "q_lens" not in calls.lists:
            return cls(calls["q_len"], calls[f"{keyed}_len"], calls["batch"], None, np.arange(calls.count))
        queries, keys = calls.lists["q_lens"], calls.lists[f"{keyed}_lens"]
        rows = np.repeat(np.arange(calls.count), queries.counts)
        return cls(queries.flat, keys.flat, np.ones_like(queries.flat), queries.starts[:-1], rows)

    @property
    def count(self) -> Array:
        return self.total(np.ones(1))

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
    """Head counts and dimensions, one entry per call. ``shared_where``: V is a part of K (MLA's latent)."""

    queries: Array
    kv: Array
    qk_dim: Array
    v_dim: Array
    shared_where: NDArray[np.bool_] | bool = False
    most_packed: float = np.inf  # query heads a KV head; with more, every query head walks the keys alone

    @property
    def kv_dim(self) -> Array:
        """Values that a KV head caches per token."""
        return self.qk_dim + np.where(self.shared_where, 0.0, self.v_dim)


def length_features(calls: Calls, heads: Heads) -> dict[str, Array]:
    """Shape of a batch, equal or ragged: how many, how long, how unequal."""
    requests = RequestBatch.of(calls)
    mean_keys = requests.total(requests.keys) / requests.count
    return {
        "log_requests": np.log2(requests.count),
        "log_queries": np.log2(requests.total(requests.queries) / requests.count),
        "log_keys": np.log2(mean_keys),
        "longest_keys": np.log2(requests.most(requests.keys) / mean_keys),
        "cached": 1 - requests.total(requests.queries) / requests.total(requests.keys),
        "log_q_heads": np.log2(heads.queries),
        "log_kv_heads": np.log2(heads.kv),
        "log_qk_dim": np.log2(heads.qk_dim),
        "causal": calls["causal"],
    }


def equal_heads(calls: Calls, most_packed: float = np.inf) -> Heads:
    """Heads whose keys and values have the same dimension; kv_heads defaults to q_heads."""
    return Heads(
        queries=calls["q_heads"],
        kv=calls.given("kv_heads", calls["q_heads"]),
        qk_dim=calls["head_dim"],
        v_dim=calls["head_dim"],
        most_packed=most_packed,
    )


def head_conflicts(calls: Calls) -> Conflicts:
    """q_heads is a multiple of kv_heads."""
    kv_heads = calls.given("kv_heads", calls["q_heads"])
    return not_multiple({**calls.numbers, "kv_heads": kv_heads}, "q_heads", "kv_heads")


def length_conflicts(calls: Calls, op: str) -> Conflicts:
    """Either batch, q_len and kv_len, or q_lens and kv_lens."""
    every = np.ones(calls.count, dtype=bool)
    ragged = [name for name in ("q_lens", "kv_lens") if name in calls.lists]
    scalars = ("batch", "q_len", "kv_len")
    if len(ragged) == 1:
        return [(every, f"q_lens and kv_lens go together, only {ragged[0]} is given")]
    if ragged:
        both = np.any([~np.isnan(calls[name]) for name in scalars], axis=0)
        counts = {name: calls.lists[name].counts for name in ragged}
        broken = conflict(both, "give q_lens and kv_lens, or batch, q_len and kv_len, not both", {}) or conflict(
            counts["q_lens"] != counts["kv_lens"], "q_lens has {q_lens} requests, kv_lens {kv_lens}", counts
        )
    else:
        missing = (conflict(np.isnan(calls[x]), f"{op} needs {x}, or q_lens and kv_lens", {}) for x in scalars)
        broken = [problem for rule in missing for problem in rule]
    return broken or _late_queries(calls)


def _late_queries(calls: Calls) -> Conflicts:
    """Under a causal mask a request has at least as many keys as queries."""
    requests = RequestBatch.of(calls)
    short = requests.each(calls["causal"]) * (requests.queries - requests.keys) > 0
    text = "causal attention of {queries:g} queries over {keys:g} keys: give kv_len >= q_len"
    broken = conflict(short, text, {"queries": requests.queries, "keys": requests.keys})
    return [(np.isin(np.arange(calls.count), requests.call[short]), wrong) for _, wrong in broken]


class EqualRequests(Kernel):
    """Attention of a batch of requests of the same lengths (training)."""

    batch: int = size("requests")
    q_len: int = size("queries per request")
    kv_len: int = size("keys per request")
    q_heads: int = size("query heads", high=65536)
    kv_heads: int | None = size("KV heads; fewer than q_heads is GQA, default: q_heads", default=None, high=65536)
    head_dim: int = size("head dimension", high=4096)

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        return {**calls.choices, "mask": labels(calls["causal"] > 0, "causal", "none")}

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return head_conflicts(calls) or length_conflicts(calls, cls.op)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return length_features(calls, equal_heads(calls))


class SequenceKernel(Kernel):
    """A family over sequences with a state instead of keys: parameters, rules and features of their lengths."""

    feature_sizes: ClassVar[tuple[str, ...]]  # further sizes that are features

    batch: int | None = size("sequences", default=None)
    q_len: int | None = size("new tokens per sequence", default=None)
    q_lens: tuple[int, ...] | None = lengths("new tokens of each sequence (ragged batch)", default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        given = [~np.isnan(calls[name]) for name in ("batch", "q_len")]
        wrong = np.any(given, axis=0) if "q_lens" in calls.lists else ~np.all(given, axis=0)
        return conflict(wrong, "give batch and q_len, or q_lens, and not both", {})

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        requests = RequestBatch.of(calls)
        mean = requests.total(requests.queries) / requests.count
        return {
            "log_requests": np.log2(requests.count),
            "log_queries": np.log2(mean),
            "longest_queries": np.log2(requests.most(requests.queries) / mean),
            **{f"log_{name}": np.log2(calls[name]) for name in cls.feature_sizes},
        }
