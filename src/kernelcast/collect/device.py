"""The GPU of this machine: what it is, and a call's time and kernels on it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from kernelcast.collect.choose import PlannedCall
from kernelcast.collect.pool import TensorPool
from kernelcast.collect.runners import Prepared, prepared
from kernelcast.collect.session import DeviceLostError
from kernelcast.collect.timing import Launched, Timing, profiled, stream, timed
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict import predict
from kernelcast.hardware import Gpu, gpu

_POOL_SHARE = 0.08  # of the free memory, twice for each of up to four number formats
_SMALLEST_POOL = 2**30


def identified(name: str | None = None) -> Gpu:
    """The catalogue's entry for this machine's GPU, or for ``name``."""
    if name:
        return gpu(name)
    name_here = torch.cuda.get_device_name()
    try:
        return gpu(name_here)
    except KernelcastError:
        raise KernelcastError(
            f"this GPU calls itself {name_here!r}, which the catalogue does not know: give `gpu`"
        ) from None


class CudaDevice:
    """Measures calls on the current CUDA device."""

    def __init__(self, target: Gpu, *, profile: bool = True) -> None:
        properties = torch.cuda.get_device_properties(0)
        free, _ = torch.cuda.mem_get_info()
        self._pool = TensorPool(max(_SMALLEST_POOL, int(free * _POOL_SHARE)), properties.L2_cache_size)
        self._target = target
        self._profile = profile

    def measure(self, planned: PlannedCall) -> dict[str, Any]:
        self._pool.warm = planned.warm
        try:
            if type(planned.call).timed_as_sum:
                return self._launched(planned)
            try:
                timing, ready = self._timed(planned)
            except torch.OutOfMemoryError:  # perhaps of memory that graphs of earlier calls hold
                torch.cuda.empty_cache()
                timing, ready = self._timed(planned)
        except Exception as error:
            _alive(error)
            raise
        return {
            "latency_us": round(timing.seconds * 1e6, 4),
            "spread": round(timing.spread, 4),
            "replays": timing.replays,
            "launches": timing.launches,
            "rotation": len(ready.launches),
            "kernel_source": ready.source,
        }

    def _launched(self, planned: PlannedCall) -> dict[str, Any]:
        """Run it once, so that its libraries are ready; the profile has the times of its kernels (``describe``)."""
        with torch.cuda.stream(stream()):
            ready = prepared(planned.call, self._pool)
            ready.launches[0]()
            torch.cuda.synchronize()
        return {"launches": 1, "rotation": 1, "kernel_source": ready.source}

    def _timed(self, planned: PlannedCall) -> tuple[Timing, Prepared]:
        with torch.cuda.stream(stream()):
            ready = prepared(planned.call, self._pool)
        guess = predict(planned.call, self._target, Conditions(predictor="generic")).time_s
        return timed(ready.launches, guess), ready

    def describe(self, batch: Sequence[PlannedCall]) -> list[dict[str, Any]]:
        if not self._profile or not batch:
            return []
        self._pool.warm = True  # one set will do
        makers = [lambda planned=planned: prepared(planned.call, self._pool).launches[0] for planned in batch]
        return [_longest(kernels) for kernels in profiled(makers)]


def _alive(error: Exception) -> None:
    """Raise where the CUDA context is lost: a fault of one kernel (a bad address, say) fails every later call of the
    process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise DeviceLostError(" ".join(str(error).split())[:200]) from None


def _longest(launched: Sequence[Launched]) -> dict[str, Any]:
    """The number of kernels of a call, their total time, and the fields of the longest."""
    kernels = [kernel_ for kernel_ in launched if kernel_.grid]
    if not kernels:
        return {"kernels": 0}
    longest = max(kernels, key=lambda kernel: kernel.time_us)
    return {
        "kernels": len(kernels),
        "kernels_us": round(sum(kernel_.time_us for kernel_ in launched), 3),
        "kernel_name": longest.name,
        "grid": "x".join(map(str, longest.grid)),
        "block": "x".join(map(str, longest.block)),
        "registers": longest.registers,
        "smem_bytes": longest.smem_bytes,
    }


def facts() -> dict[str, str]:
    """The machine and its software versions, as far as known."""
    import triton

    versions = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": triton.__version__,
    }
    try:
        import flashinfer

        versions["flashinfer"] = flashinfer.__version__
    except ImportError:
        pass
    query = "driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout  # fmt: skip
        versions |= dict(
            zip(query.split(","), (part.strip() for part in output.split("\n")[0].split(",")), strict=True)
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
    return versions
