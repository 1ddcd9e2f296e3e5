"""``kernelcast collect --power``: power of calls from memory-bound to compute-bound, of rests, and of work with rests.

What a plan measures needs no GPU; calls come mixed, so that a run that ends early has some of every sort. Each point is
kept at once as a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from kernelcast.app.cli.collect import needs_cuda
from kernelcast.app.cli.commands import progress_bar
from kernelcast.collect.choose import PlannedCall, choose
from kernelcast.collect.device import facts, identified
from kernelcast.collect.pool import TensorPool
from kernelcast.collect.power_meter import Idle, Meter, Nvml, measured
from kernelcast.collect.runners import prepared
from kernelcast.collect.schema import columns_of, write_rows
from kernelcast.collect.session import DeviceLostError, Progress, Session, read_lines
from kernelcast.collect.timing import Replays, captured, replayed_s, stream
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import predict, predict_many
from kernelcast.hardware import Gpu, gpu
from kernelcast.ops import kernel, kernel_class

_GRAPH_S = 1.5e-3  # a replay lasts about this, or one launch of each set
_MOST_LAUNCHES = 1024
_POOL_BYTES = {False: 6 * 2**30, True: 2**30}  # of random numbers, of zeros
Parameters = dict[str, Any]
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
    """A point to measure. ``parameters``: of the call; none while idle. ``warm``: from L2. ``zeros``: inputs of zeros,
    which switch fewer transistors than random numbers. ``rest_s``: pause after ``busy_s`` of work."""

    family: str
    parameters: Parameters
    warm: bool = False
    zeros: bool = False
    busy_s: float = 0.0
    rest_s: float = 0.0

    @property
    def key(self) -> str:
        identity = json.dumps(
            [self.family, self.parameters, self.warm, self.zeros, self.busy_s, self.rest_s], sort_keys=True
        )
        return hashlib.sha256(identity.encode()).hexdigest()[:20]

    @property
    def record(self) -> dict[str, Any]:
        return {"key": self.key, "family": self.family, "call": self.parameters, "warm": self.warm, "zeros": self.zeros,
                "busy_s": self.busy_s, "rest_s": self.rest_s}  # fmt: skip


def plan(target: Gpu, seed: int = 0) -> list[Job]:
    """All points for a GPU, mixed; rests between."""
    calls = [job for job in (*_products(), *_attention(), *_memory(), *_mixes(), *_drawn(target, seed)) if _good(job)]
    order = np.random.default_rng(seed).permutation(len(calls))
    mixed = list({calls[at].key: calls[at] for at in order}.values())
    jobs = []
    for at in range(0, len(mixed), _IDLE_EVERY):
        rest_s = _RESTS_S[at // _IDLE_EVERY % len(_RESTS_S)] + at / 1e5  # no two alike: each is a point of its own
        jobs += [Job("idle", {}, rest_s=rest_s), *mixed[at : at + _IDLE_EVERY]]
    return jobs


def _good(job: Job) -> bool:
    """Whether the parameters make a call: one mistake must not lose a whole plan."""
    try:
        kernel_class(job.parameters["op"])
        kernel(**job.parameters)
    except KernelcastError:
        return False
    return True


def _gemm(dtype: str, m: int, n: int, k: int) -> Parameters:
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
        parameters = _attend(max(1, 8192 // length), length, length, *_HEADS[(0, 2, 3)[at]], "fa2", True)
        yield Job("attention-backward", parameters | {"op": "attention_backward"})


def _attend(
    batch: int, q_len: int, kv_len: int, q_heads: int, kv_heads: int, head_dim: int, backend: str, causal: bool
) -> Parameters:
    return {"op": "attention", "batch": batch, "q_len": q_len, "kv_len": kv_len, "q_heads": q_heads,
            "kv_heads": kv_heads, "head_dim": head_dim, "causal": causal, "backend": backend, "dtype": "bf16",
            "stack": "torch"}  # fmt: skip


def _cells(op: str, rows: int, cols: int, dtype: str = "bf16") -> Parameters:
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
    for parameters in (_gemm("bf16", 8192, 8192, 8192), _gemm("bf16", 64, 28672, 4096), _gemm("fp8", 8192, 8192, 8192),
                  _cells("add", 8192, 14336)):  # fmt: skip
        yield Job("zeros", parameters, zeros=True)
    for parameters in (
        _gemm("bf16", 1, 64, 64),
        _cells("add", 1, 64),
        _cells("rmsnorm", 4, 256),
        _gemm("bf16", 16, 256, 256),
    ):
        yield Job("tiny", parameters, warm=True)
    for busy_s, rest_s in ((2e-3, 2e-3), (2e-3, 8e-3), (20e-3, 20e-3)):
        yield Job("duty", _gemm("bf16", 4096, 4096, 4096), busy_s=busy_s, rest_s=rest_s)
        yield Job("duty", _cells("add", 8192, 4096), busy_s=busy_s, rest_s=rest_s)


def _drawn(target: Gpu, seed: int) -> Iterator[Job]:
    for family, count in _RANDOM.items():
        try:
            drawn = [planned.call for planned in choose(target, 4 * count, only=(family,), seed=seed + 101)]
            times = predict_many(drawn, target, Conditions(predictor="generic"))
            long = [call for call, forecast in zip(drawn, times, strict=True) if forecast.time_s >= _LEAST_S]
            for call in long[:count]:
                yield Job(family, _plain(PlannedCall(family, call).parameters))
        except KernelcastError:
            continue


def _plain(parameters: Parameters) -> Parameters:
    return {name: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
            for name, value in parameters.items()}  # fmt: skip


class PowerDevice:
    """Measures jobs on the current CUDA device."""

    def __init__(self, target: Gpu, meter: Meter | None = None) -> None:
        properties: Any = torch.cuda.get_device_properties(0)
        self._meter = meter or Nvml(str(getattr(properties, "uuid", "")) or None)
        self._l2_bytes = properties.L2_cache_size
        self._target = target
        self._pools: dict[bool, TensorPool] = {}

    def measure(self, job: Job) -> dict[str, Any]:
        if not job.parameters:
            return measured(Idle(), self._meter, warm_s=job.rest_s)
        try:
            with torch.cuda.stream(stream()):
                return self._call(job)
        except Exception as error:
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise DeviceLostError(" ".join(str(error).split())[:200]) from None
            torch.cuda.empty_cache()
            raise

    def _call(self, job: Job) -> dict[str, Any]:
        call = kernel(**job.parameters)
        pool = self._pool(job.zeros)
        pool.warm = job.warm
        ready = prepared(call, pool)
        ready.launches[0]()
        torch.cuda.synchronize()
        guess_s = max(1e-6, predict(call, self._target, Conditions(predictor="generic")).time_s)
        rounds = max(1, min(math.ceil(_GRAPH_S / guess_s / len(ready.launches)), _MOST_LAUNCHES // len(ready.launches)))
        graph = captured([*ready.launches] * rounds)
        replay_s = min(replayed_s(graph, 3))
        count = rounds * len(ready.launches)
        result = measured(Replays(graph.replay, count, replay_s, job.busy_s, job.rest_s), self._meter)
        result |= {"rotation": len(ready.launches), "kernel_source": ready.source, "alone_s": replay_s / count}
        return result

    def describe(self, batch: Sequence[Job]) -> list[dict[str, Any]]:
        return []  # not profiled

    def _pool(self, zeros: bool) -> TensorPool:
        if zeros not in self._pools:
            self._pools[zeros] = (_Zeros if zeros else TensorPool)(_POOL_BYTES[zeros], self._l2_bytes)
        return self._pools[zeros]


class _Zeros(TensorPool):
    def _random(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self._bytes // dtype.itemsize, dtype=dtype, device=self._device)


# seconds: of a call while it repeats, rests between included (busy_s of work, rest_s of none). power_w: by the energy
# counter; instant_w: mean of the driver's readings of the moment. reasons: NVML's bits of why the clock is not higher.
POWER = {
    "family": "VARCHAR", "warm": "BOOLEAN", "zeros": "BOOLEAN", "busy_s": "DOUBLE", "rest_s": "DOUBLE",
    "seconds": "DOUBLE", "joules": "DOUBLE", "power_w": "DOUBLE", "instant_w": "DOUBLE", "sm_mhz": "DOUBLE",
    "memory_mhz": "DOUBLE", "temperature_c": "DOUBLE", "reasons": "INTEGER", "at_s": "DOUBLE", "alone_s": "DOUBLE",
}  # fmt: skip


def write_power(records: Iterable[Mapping[str, Any]], path: Path, target: Gpu, facts: Mapping[str, Any]) -> int:
    """A complete file or none; the number of rows. Jobs that could not run are left out."""
    rows = [_row(record, target) for record in records if record["status"] == "ok"]
    types = columns_of({row["op"] for row in rows if row["op"]}) | POWER
    return write_rows(rows, types, path, facts, by="family, op, dtype")


def _row(record: Mapping[str, Any], target: Gpu) -> dict[str, Any]:
    call = {name: json.dumps(value) if isinstance(value, list) else value for name, value in record["call"].items()}
    seconds = record.get("seconds_per_call")
    kept = {name: record.get(name) for name in POWER}
    return {
        **kept, "op": None, **call, "gpu": target.known_as, "kernel_source": record.get("kernel_source"),
        "source": "kernelcast", "rotation": record.get("rotation"), "input_rotation": record.get("rotation"),
        "seconds": seconds, "joules": seconds * record["power_w"] if seconds else None,
        "latency_us": seconds * 1e6 if seconds else None,
    }  # fmt: skip


def collect(
    out: Path | None, name: str | None, seconds: float | None, seed: int, plan_only: bool, as_json: bool
) -> None:
    """The command; ``name``: of the GPU in the catalogue."""
    if plan_only:
        counts = Counter(job.family for job in plan(gpu(name or "h200_sxm"), seed))
        typer.echo(json.dumps(counts) if as_json else "\n".join(f"{name:20} {n:6,}" for name, n in counts.items()))
        return
    if out is None or out.suffix != ".parquet":
        raise KernelcastError("where should the results go? give -o FILE.parquet")
    needs_cuda()
    target = identified(name)
    lines = out.with_suffix(".progress.jsonl")  # kept: it has the counter's readings too
    with progress_bar() as start:
        show = start("power")

        def say(progress: Progress) -> None:
            show(progress.done, progress.total, f"({progress.failed} failed)" if progress.failed else "")

        done = Session(PowerDevice(target), lines, seconds, say=say).run(plan(target, seed))
    rows = write_power(read_lines(lines), out, target, {**facts(), "seed": seed})
    failed, left = done.failed, done.total - done.done
    result = {"file": str(out), "rows": rows, "failed": failed, "left": left}
    typer.echo(json.dumps(result) if as_json else f"{rows:,} points in {out} ({failed} could not run, {left} left)")
