"""What to measure the power of: calls from memory-bound to compute-bound, rests, and work with rests between.

Needs no GPU and no PyTorch. Calls come mixed, so that a run cut short has some of every kind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.collect.choose import Wanted, choose
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import predict_many
from kernelcast.hardware import Gpu
from kernelcast.ops import kernel, kernel_class

Words = dict[str, Any]
# (n, k) of linear layers: Llama 3.1 8B, Llama 3.1 70B, a vocabulary
_LINEAR = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 28672), (128256, 4096))
_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SQUARES = (1024, 2048, 4096, 8192, 16384)
_HEADS = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (16, 16, 64))
_CELLS = ((64, 4096), (2048, 4096), (8192, 14336))
_POINTWISE = ("add", "mul", "silu", "gelu", "exp", "rsqrt", "dropout")
_ROWWISE = ("rmsnorm", "layernorm", "softmax")
_RANDOM = {"backward": 8, "strided": 8, "moved": 8, "reduce": 4, "mean": 4, "bmm": 8, "gemm": 16, "gemm-fp8": 8,
           "attention": 8, "embedding": 3, "embedding-backward": 2, "optimizer": 3, "quantize": 4, "moe-config": 4,
           "conv2d": 8, "conv2d-backward": 4}  # fmt: skip
_IDLE_EVERY = 40
_RESTS_S = (0.5, 1.0, 3.0)  # before the window: clocks fall after a while
_LEAST_S = 6e-6  # of drawn calls: kernels as short as a launch have points of their own


@dataclass(frozen=True)
class Job:
    """One point. ``words``: of the call; none for a rest. ``warm``: from L2. ``zeros``: inputs of zeros, which switch
    fewer transistors than the random numbers that all other calls read. ``rest_s``: pause after ``busy_s`` of work."""

    family: str
    words: Words
    warm: bool = False
    zeros: bool = False
    busy_s: float = 0.0
    rest_s: float = 0.0

    @property
    def key(self) -> str:
        told = json.dumps([self.family, self.words, self.warm, self.zeros, self.busy_s, self.rest_s], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:20]

    @property
    def record(self) -> dict[str, Any]:
        return {"key": self.key, "family": self.family, "call": self.words, "warm": self.warm, "zeros": self.zeros,
                "busy_s": self.busy_s, "rest_s": self.rest_s}  # fmt: skip


def plan(target: Gpu, seed: int = 0) -> list[Job]:
    """All points for a GPU, mixed; rests between."""
    calls = [job for job in (*_products(), *_attention(), *_memory(), *_mixes(), *_drawn(target, seed)) if _good(job)]
    order = np.random.default_rng(seed).permutation(len(calls))
    mixed = list({calls[at].key: calls[at] for at in order}.values())
    found = []
    for at in range(0, len(mixed), _IDLE_EVERY):
        rest_s = _RESTS_S[at // _IDLE_EVERY % len(_RESTS_S)] + at / 1e5  # no two alike: each is a point of its own
        found += [Job("idle", {}, rest_s=rest_s), *mixed[at : at + _IDLE_EVERY]]
    return found


def _good(job: Job) -> bool:
    """Whether the call is one; a whole plan is not lost for a word of one."""
    try:
        kernel_class(job.words["op"])
        kernel(**job.words)
    except KernelcastError:
        return False
    return True


def _gemm(dtype: str, m: int, n: int, k: int) -> Words:
    return {"op": "gemm", "m": m, "n": n, "k": k, "dtype": dtype, "stack": "torch"}


def _products() -> Iterator[Job]:
    for at, (n, k) in enumerate(_LINEAR):
        for m in _ROWS[at % 2 :: 2]:
            yield Job("gemm", _gemm("bf16", m, n, k))
    for dtype, sizes in (("bf16", _SQUARES), ("fp16", _SQUARES[1:]), ("fp8", _SQUARES), ("tf32", _SQUARES[:4]),
                         ("fp32", _SQUARES[:3])):  # fmt: skip
        for size in sizes:
            yield Job("gemm", _gemm(dtype, size, size, size))
    for dtype, rows in (("fp8", (1, 32, 128, 512, 2048, 8192)), ("fp16", (16, 1024)), ("tf32", (16, 256, 2048)),
                        ("fp32", (16, 256))):  # fmt: skip
        for at, m in enumerate(rows):
            yield Job("gemm", _gemm(dtype, m, *_LINEAR[at % 4]))


def _attention() -> Iterator[Job]:
    for at, length in enumerate((512, 1024, 2048, 4096, 8192, 16384)):
        for turn, backend in enumerate(("fa2", "cudnn")):
            for causal in (True, False):
                q_heads, kv_heads, size = _HEADS[(at + turn + 2 * causal) % 4]
                batch = max(1, min(16, 16384 // length)) if causal else 1
                yield Job("attention", _attend(batch, length, length, q_heads, kv_heads, size, backend, causal))
    for at, batch in enumerate((1, 8, 32, 64, 128)):
        for turn, length in enumerate((1024, 4096, 16384)):
            if batch * length <= 2**20:
                yield Job("decode", _attend(batch, 1, length, *_HEADS[(at + turn) % 3], "cudnn", False))
    for at, length in enumerate((512, 2048, 4096)):
        words = _attend(max(1, 8192 // length), length, length, *_HEADS[(0, 2, 3)[at]], "fa2", True)
        yield Job("attention-backward", words | {"op": "attention_backward"})


def _attend(
    batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, head_dim: int, backend: str, causal: bool
) -> Words:
    return {"op": "attention", "batch": batch, "q_len": q_len, "kv_len": kv_len, "q_heads": q_heads,
            "kv_heads": kv_heads, "head_dim": head_dim, "causal": causal, "backend": backend, "dtype": "bf16",
            "stack": "torch"}  # fmt: skip


def _cells(op: str, rows: int, cols: int, dtype: str = "bf16") -> Words:
    return {"op": op, "rows": rows, "cols": cols, "dtype": dtype, "stack": "torch"}


def _memory() -> Iterator[Job]:
    for at, op in enumerate((*_POINTWISE, *_ROWWISE)):
        for turn, (rows, cols) in enumerate(_CELLS):
            yield Job("memory", _cells(op, rows, cols, "fp32" if (at + turn) % 4 == 3 else "bf16"))
    for op in ("add", "exp", "rmsnorm", "softmax"):
        yield Job("memory", _cells(op, 1024, 4096), warm=True)
    for rows in (1024, 65536):
        yield Job("memory", _cells("copy", rows, 4096) | {"to": "fp32"})
        yield Job("memory", _cells("fill", rows, 4096))
    for m, n, k in ((16, 4096, 4096), (128, 4096, 4096), (1, 2048, 2048)):
        yield Job("gemm", _gemm("bf16", m, n, k), warm=True)


def _mixes() -> Iterator[Job]:
    """Zeros for numbers, kernels as short as a launch, work with rests."""
    for words in (_gemm("bf16", 8192, 8192, 8192), _gemm("bf16", 64, 28672, 4096), _gemm("fp8", 8192, 8192, 8192),
                  _cells("add", 8192, 14336)):  # fmt: skip
        yield Job("zeros", words, zeros=True)
    for words in (
        _gemm("bf16", 1, 64, 64),
        _cells("add", 1, 64),
        _cells("rmsnorm", 4, 256),
        _gemm("bf16", 16, 256, 256),
    ):
        yield Job("tiny", words, warm=True)
    for busy_s, rest_s in ((2e-3, 2e-3), (2e-3, 8e-3), (20e-3, 20e-3)):
        yield Job("duty", _gemm("bf16", 4096, 4096, 4096), busy_s=busy_s, rest_s=rest_s)
        yield Job("duty", _cells("add", 8192, 4096), busy_s=busy_s, rest_s=rest_s)


def _drawn(target: Gpu, seed: int) -> Iterator[Job]:
    for family, count in _RANDOM.items():
        try:
            drawn = [wanted.call for wanted in choose(target, 4 * count, only=(family,), seed=seed + 101)]
            times = predict_many(drawn, target, Conditions(predictor="generic"))
            long = [call for call, found in zip(drawn, times, strict=True) if found.time_s >= _LEAST_S]
            for call in long[:count]:
                yield Job(family, _plain(Wanted(family, call).parameters))
        except KernelcastError:
            continue


def _plain(words: Words) -> Words:
    return {name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for name, value in words.items()}  # fmt: skip
