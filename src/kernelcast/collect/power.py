"""Power of calls on this machine's GPU, point after point, each kept at once as a line of JSON. Needs PyTorch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from kernelcast.collect.pool import Pool
from kernelcast.collect.power_meter import Idle, Meter, Nvml, measured
from kernelcast.collect.power_plan import Job
from kernelcast.collect.runners import prepared
from kernelcast.collect.session import DeviceLostError
from kernelcast.collect.timing import captured, replayed_s, stream
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import predict
from kernelcast.hardware import Gpu
from kernelcast.ops import kernel

_GRAPH_S = 1.5e-3  # a replay lasts about this, or one launch of each set
_MOST_LAUNCHES = 1024
_CHUNK_S = 15e-3  # of replays, before the host looks again
_IN_FLIGHT = 3  # chunks: the GPU never waits for the host
_POOL_BYTES = {False: 6 * 2**30, True: 2**30}  # of random numbers, of zeros


class Replays:
    """Replays of a graph, or steps of a model, some chunks ahead of the GPU; with rests where a job has them."""

    def __init__(self, replay: Callable[[], object], calls: int, replay_s: float, job: Job | None = None) -> None:
        chunk_s = job.busy_s if job and job.busy_s else _CHUNK_S
        self._replay, self._calls = replay, calls
        self._chunk = max(1, round(chunk_s / replay_s))
        self._rest_s = job.rest_s if job else 0.0
        self._marks: list[Any] = []

    def push(self) -> int:
        for _ in range(self._chunk):
            self._replay()
        mark: Any = torch.cuda.Event()
        mark.record()
        self._marks.append(mark)
        if self._rest_s:
            self.finish()
            time.sleep(self._rest_s)
        elif len(self._marks) >= _IN_FLIGHT:
            self._marks.pop(0).synchronize()
        return self._chunk * self._calls

    def finish(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._marks.clear()


class PowerDevice:
    """Measures jobs on the current CUDA device."""

    def __init__(self, target: Gpu, meter: Meter | None = None) -> None:
        properties: Any = torch.cuda.get_device_properties(0)
        self._meter = meter or Nvml(str(getattr(properties, "uuid", "")) or None)
        self._l2_bytes = properties.L2_cache_size
        self._target = target
        self._pools: dict[bool, Pool] = {}

    def measure(self, job: Job) -> dict[str, Any]:
        if not job.words:
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
        call = kernel(**job.words)
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
        found = measured(Replays(graph.replay, count, replay_s, job), self._meter)
        found |= {"rotation": len(ready.launches), "kernel_source": ready.source, "alone_s": replay_s / count}
        return found

    def _pool(self, zeros: bool) -> Pool:
        if zeros not in self._pools:
            self._pools[zeros] = (_Zeros if zeros else Pool)(_POOL_BYTES[zeros], self._l2_bytes)
        return self._pools[zeros]


class _Zeros(Pool):
    def _random(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self._bytes // dtype.itemsize, dtype=dtype, device=self._device)


class Device(Protocol):
    """What measures a job."""

    def measure(self, job: Job) -> dict[str, Any]: ...


def run(
    jobs: Sequence[Job],
    device: Device,
    lines: Path,
    seconds: float | None,
    say: Callable[[int, int, str], None] = lambda done, total, note: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, int]:
    """Measures the jobs that ``lines`` lacks; how many could not run, and how many are left."""
    begin, failed, longest = clock(), 0, 2.0
    known = {record["key"] for record in read_lines(lines)}
    todo = [job for job in jobs if job.key not in known]
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a") as file:
        file.write("" if _ends_whole(lines) else "\n")  # a line that a kill cut short stays by itself
        for at, job in enumerate(todo):
            start = clock()
            if seconds is not None and start - begin + min(longest, 4.0) > seconds:
                return failed, len(todo) - at
            record = job.record | {"at_s": round(start - begin, 3)}
            try:
                record |= {"status": "ok", **device.measure(job)}
            except Exception as error:  # whatever a library raises is this job's result
                told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                record |= {"status": "failed", "error": told}
                failed += 1
                if isinstance(error, DeviceLostError):
                    file.write(json.dumps(record) + "\n")
                    raise KernelcastError(f"{told}; run again to go on") from None
            file.write(json.dumps(record) + "\n")
            file.flush()
            longest = clock() - start
            say(at + 1, len(todo), f"({failed} failed)" if failed else "")
    return failed, 0


def _ends_whole(path: Path) -> bool:
    return not path.stat().st_size or path.read_bytes().endswith(b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records so far; a last line that was cut short is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
