"""What is asked of a server, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernelcast.errors import KernelcastError

Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Load:
    """Requests over time, one entry each, by arrival.

    ``shared`` has, of each request, the pieces that its prompt begins with and that other prompts may begin with too,
    as (stream, tokens): the first ``tokens`` tokens of the token stream ``stream``; what the pieces leave is the
    prompt's own. A system prompt of 100 tokens is ((3, 100),). A turn of a chat is one piece over the whole prompt:
    where pieces cover the prompt, the answer goes on in the last stream, so that the next turn finds it cached.
    """

    arrivals_s: NDArray[np.float64]  # not decreasing; the earliest moment that each is sent
    inputs: NDArray[np.int64]  # tokens of the prompt
    outputs: NDArray[np.int64]  # tokens of the answer
    shared: tuple[Pieces, ...] = ()  # empty: nothing is shared
    max_concurrency: int = 0  # 0: open loop; else a request is sent only when fewer are under way
    ids: tuple[str, ...] = ()  # request ids of a file; empty: 0, 1, 2, ..
    stages: NDArray[np.int64] | None = None  # which stage (0, 1, ..) each belongs to
    follows: NDArray[np.int64] | None = None  # the request whose answer each waits for, by index; -1: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrivals_s", _array(self.arrivals_s, np.float64))
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if self.stages is not None:
            object.__setattr__(self, "stages", _whole("stages", self.stages))
        self._check_lengths()
        _check_times(self.arrivals_s)
        for name in ("inputs", "outputs"):
            tokens = getattr(self, name)
            if tokens.min() < 1:
                row = int(np.argmax(tokens < 1))
                raise KernelcastError(f"request {row}: {name} must be at least 1 token, not {tokens[row]}")
        if self.follows is not None:
            object.__setattr__(self, "follows", _whole("follows", self.follows))
            if (self.follows >= np.arange(len(self))).any() or self.follows.min() < -1:
                raise KernelcastError("a request follows one before it (by index), or none (-1)")
        if self.max_concurrency < 0:
            raise KernelcastError(f"max_concurrency is 0 (no limit) or more, not {self.max_concurrency}")
        if self.stages is not None and self.stages.min() < 0:
            raise KernelcastError(f"stages are counted from 0, not {self.stages.min()}")
        self._check_shared()

    def _check_lengths(self) -> None:
        if not len(self.arrivals_s):
            raise KernelcastError("a load needs at least one request")
        lists = {"inputs": self.inputs, "outputs": self.outputs}
        lists |= {name: getattr(self, name) for name in ("shared", "ids") if getattr(self, name)}
        lists |= {name: getattr(self, name) for name in ("stages", "follows") if getattr(self, name) is not None}
        for name, values in lists.items():
            if len(values) != len(self.arrivals_s):
                raise KernelcastError(f"{name} has {len(values)} entries for {len(self.arrivals_s)} arrivals")

    def _check_shared(self) -> None:
        for row, pieces in enumerate(self.shared):
            if not pieces:
                continue
            if any(stream < 0 or tokens < 1 for stream, tokens in pieces):
                raise KernelcastError(f"request {row}: shared pieces are (stream from 0, tokens from 1), not {pieces}")
            covered = sum(tokens for _, tokens in pieces)
            if covered > self.inputs[row]:
                raise KernelcastError(f"request {row}: {covered} tokens are shared of a prompt of {self.inputs[row]}")

    def __len__(self) -> int:
        return len(self.arrivals_s)

    @property
    def duration_s(self) -> float:
        """From the start until the last request is sent, at the earliest."""
        return float(self.arrivals_s[-1])

    @property
    def request_rate(self) -> float:
        """Requests per second between the first and the last; infinite where all come at once."""
        between_s = float(self.arrivals_s[-1] - self.arrivals_s[0])
        return (len(self) - 1) / between_s if between_s else float("inf")

    @property
    def input_tokens(self) -> int:
        return int(self.inputs.sum())

    @property
    def output_tokens(self) -> int:
        return int(self.outputs.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer: the context that a server must allow."""
        return int((self.inputs + self.outputs).max())

    def take(self, rows: slice | Sequence[int] | NDArray[Any]) -> Load:
        """Some of the requests, by index or mask, in the order of their arrival."""
        kept = np.arange(len(self))[rows]
        return replace(
            self,
            arrivals_s=self.arrivals_s[kept],
            inputs=self.inputs[kept],
            outputs=self.outputs[kept],
            shared=tuple(self.shared[row] for row in kept) if self.shared else (),
            ids=tuple(self.ids[row] for row in kept) if self.ids else (),
            stages=None if self.stages is None else self.stages[kept],
            follows=None if self.follows is None else _renumbered(self.follows, kept),
        )

    def faster(self, scale: float) -> Load:
        """The same requests at ``scale`` times the rate."""
        if not 0 < scale < np.inf:
            raise KernelcastError(f"a rate is scaled by a number above 0, not {scale:g}")
        return replace(self, arrivals_s=self.arrivals_s / scale)

    def from_first(self) -> Load:
        """The same requests with the clock started at the first of them."""
        return replace(self, arrivals_s=self.arrivals_s - self.arrivals_s[0])


def _renumbered(follows: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whom the kept ones follow, counted among themselves; who followed one that is gone follows none."""
    place = np.full(len(follows) + 1, -1)
    place[kept] = np.arange(len(kept))
    return place[follows[kept]]


def _array(values: ArrayLike, kind: type[np.generic]) -> NDArray[Any]:
    """Of its own, and locked: a load is a value."""
    array = np.array(values, dtype=kind)
    array.setflags(write=False)
    return array


def _whole(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    floats = array.dtype.kind == "f" and np.all(np.isfinite(array)) and np.all(array == np.floor(array))
    if len(array) and array.dtype.kind not in "iu" and not floats:
        raise KernelcastError(f"{name} must be whole numbers")
    return _array(array, np.int64)


def _check_times(arrivals_s: NDArray[np.float64]) -> None:
    wrong = ~((arrivals_s >= 0) & (arrivals_s < np.inf))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise KernelcastError(f"request {row}: an arrival is a number of seconds from 0 on, not {arrivals_s[row]:g}")
    back = np.diff(arrivals_s) < 0
    if back.any():
        row = int(np.argmax(back)) + 1
        raise KernelcastError(
            f"request {row} arrives at {arrivals_s[row]:g} s, before the one in front of it at"
            f" {arrivals_s[row - 1]:g} s: sort requests by arrival"
        )
