"""What a batch of the gated delta rule holds: sequences read in chunks and token by token, heads, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelcast.kernels.base import Calls
from kernelcast.kernels.dtypes import dtype
from kernelcast.kernels.requests import sequences_of
from kernelcast.kernels.vector import ACCUMULATOR_BYTES
from kernelcast.kernels.work import Array, ceil_div


@dataclass(frozen=True)
class DeltaSizes:
    """The chunked and the recurrent sequences of each call; all arrays (calls,)."""

    tokens: Array  # of chunked sequences
    chunks: Array  # of all of them
    longest: Array  # chunks of the longest sequence
    sequences: Array  # chunked
    steps: Array  # recurrent: tokens of all sequences
    longest_steps: Array
    recurrent: Array  # sequences
    keys: Array  # heads
    values: Array
    k: Array  # elements of a head
    v: Array
    chunk: Array
    element_bytes: float
    state_bytes: float  # of one element
    math: str

    @classmethod
    def of(cls, calls: Calls) -> DeltaSizes:
        requests, how = sequences_of(calls), calls.choice("kernel")
        queries, chunk = requests.queries, calls["chunk"]
        alone = queries == 1 if how == "auto" else np.full(queries.shape, how == "recurrent")
        chunks = np.where(alone, 0.0, ceil_div(queries, requests.each(chunk)))
        steps = np.where(alone, queries, 0.0)
        kind = dtype(calls.choice("dtype"))
        return cls(
            tokens=requests.total(queries - steps),
            chunks=requests.total(chunks),
            longest=requests.most(chunks),
            sequences=requests.total(1.0 - alone),
            steps=requests.total(steps),
            longest_steps=requests.most(steps),
            recurrent=requests.total(1.0 * alone),
            keys=calls["key_heads"],
            values=calls["value_heads"],
            k=calls["key_dim"],
            v=calls["value_dim"],
            chunk=chunk,
            element_bytes=kind.act_bytes,
            state_bytes=dtype(calls.choice("state_dtype")).act_bytes,
            math=kind.math,
        )

    @property
    def runs(self) -> Array:
        """1 where any sequence is chunked."""
        return np.where(self.chunks > 0, 1.0, 0.0)

    @property
    def state(self) -> Array:
        """Elements of one head's state."""
        return self.k * self.v

    @property
    def qk_bytes(self) -> Array:
        """Queries, or keys, of all chunked tokens."""
        return self.tokens * self.keys * self.k * self.element_bytes

    @property
    def wide_bytes(self) -> Array:
        """Numbers of key_dim a value head and token, as w is."""
        return self.tokens * self.values * self.k * self.element_bytes

    @property
    def value_bytes(self) -> Array:
        return self.tokens * self.values * self.v * self.element_bytes

    @property
    def gate_bytes(self) -> Array:
        """One of beta, or the decay's sum, in fp32."""
        return self.tokens * self.values * ACCUMULATOR_BYTES

    @property
    def square_bytes(self) -> Array:
        """chunk x chunk numbers for each chunk and value head, in fp32."""
        return self.tokens * self.values * self.chunk * ACCUMULATOR_BYTES

    @property
    def kept_state_bytes(self) -> Array:
        """States of the chunked sequences, read at the start and written at the end."""
        return 2 * self.sequences * self.values * self.state * self.state_bytes
