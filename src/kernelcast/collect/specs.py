"""Microbenchmarks of this machine's GPU: what a forecast leans on, in about a minute. Needs PyTorch, Triton and CUDA.

Bursts last a few milliseconds after a rest, as a kernel in a benchmark does; long runs last seconds, so that the power
limit sets the clock. What each number means is in docs/new-gpu.md; ``specs_file`` makes a GPU file of them. Kernels of
Triton's are imported where they run: the rest can do without.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernelcast.collect.power_meter import BoardLimits, Nvml
from kernelcast.collect.power_meter import measured as measured_power
from kernelcast.collect.specs_draft import GpuProperties, Microbenchmarks, SustainedRun
from kernelcast.collect.timing import Replays, captured, replayed_s, stream, timed
from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu

BURSTS, REST_S, BURST_S = 4, 0.08, 2e-3
LONG_S = 1.5  # warming up, and again measured
SHORTEST_S, LONGEST_S = 100e-6, 4e-3  # at the peak: large, and not so long that power decides
_LONG = ("bf16", "fp8", "nvfp4")
_L2_SHARES = (0.125, 0.25, 0.5, 0.75)
_SMALL = tuple((m, n, k) for m in (1, 16) for n in (32, 64, 128) for k in (32, 64, 128))
_DECODE = tuple((m, n, k) for m in (8, 16) for n, k in ((8192, 28672), (28672, 8192), (16384, 32768)))
_OFF = 0.01  # of sums and fixed points

Say = Callable[[int, int, str], None]


def properties() -> GpuProperties:
    from kernelcast.collect.device import facts

    device: Any = torch.cuda.get_device_properties(0)
    known = facts()
    software = f"driver {known.get('driver_version', 'unknown')}, PyTorch {known['torch']}, CUDA {known['cuda']}"
    meter = _meter()
    return GpuProperties(
        name=device.name,
        capability=f"{device.major}.{device.minor}",
        sm_count=device.multi_processor_count,
        l2_bytes=device.L2_cache_size,
        smem_bytes_per_sm=device.shared_memory_per_multiprocessor,
        smem_bytes_per_cta=device.shared_memory_per_block_optin,
        registers_per_sm=device.regs_per_multiprocessor,
        max_threads_per_sm=device.max_threads_per_multi_processor,
        dram_bytes=device.total_memory,
        board=meter.board() if meter else BoardLimits(),
        software=f"{software}, Triton {known['triton']}",
    )


def _meter() -> Nvml | None:
    device: Any = torch.cuda.get_device_properties(0)
    try:
        return Nvml(str(getattr(device, "uuid", "")) or None)
    except KernelcastError:
        return None


def measure(target: Gpu, say: Say = lambda done, total, note: None) -> Microbenchmarks:
    """Run all microbenchmarks. ``target``: an approximate description of the GPU, for sizes. Failures are noted and
    skipped."""
    results = Microbenchmarks()
    parts = [*_products(target, results), *_others(target, results)]
    with torch.cuda.stream(stream()):
        for at, (name, part) in enumerate(parts):
            say(at, len(parts), name)
            try:
                part()
            except Exception as error:  # any exception: the GPU or the library does not support it
                results.skipped[name] = " ".join(f"{error}".split())[:160] or type(error).__name__
                _alive(name, error)
            torch.cuda.empty_cache()
    say(len(parts), len(parts), "")
    return results


def _alive(name: str, error: Exception) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise KernelcastError(f"the GPU is lost after measuring {name}: {' '.join(str(error).split())[:160]}") from None


def _products(target: Gpu, results: Microbenchmarks) -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in FORMATS:
        peak = target.tensor_flops_per_s("fp8" if dtype == "fp8_block" else dtype)
        if not peak:
            results.skipped[dtype] = "its tensor cores have no such format"
            continue
        yield dtype, partial(_bursts, dtype, peak, results)
        if dtype in _LONG:
            yield f"{dtype}, long", partial(_long, dtype, peak, results)


def _bursts(dtype: str, peak: float, results: Microbenchmarks) -> None:
    """The best of several large shapes."""
    best, failed = 0.0, ""
    for m, n, k in fitting(peak):
        try:
            product = checked(FORMATS[dtype](m, n, k), dtype)
        except torch.OutOfMemoryError as error:
            failed = str(error)
            continue
        seconds = burst_s(product.launch, 2.0 * m * n * k / peak)
        rate = 2.0 * m * n * k / seconds
        if rate > best:
            best, results.shapes[dtype] = rate, f"{m} x {n} x {k}"
        del product
        torch.cuda.empty_cache()
    if not best:
        raise KernelcastError(failed or "no shape fits this GPU")
    results.bursts[dtype] = best


def fitting(peak: float) -> list[tuple[int, int, int]]:
    """Shapes that are large on this GPU, and short enough."""
    each = [(shape, 2.0 * math.prod(shape) / peak) for shape in SHAPES]
    return [shape for shape, time_s in each if SHORTEST_S <= time_s <= LONGEST_S] or [SHAPES[0]]


def checked(product: Product, dtype: str) -> Product:
    off = product.off()
    allowed = TOLERANCES.get(dtype, FP8_TOLERANCE)
    if not off <= allowed:
        raise KernelcastError(f"its product is wrong by {off:.2g} of the largest entry, more than {allowed:g}")
    return product


def burst_s(launch: Callable[[], object], guess_s: float) -> float:
    """Seconds of a launch: the median of bursts after rests. The first replay of a burst wakes the clocks."""
    launch()
    torch.cuda.synchronize()
    count = max(1, round(BURST_S / guess_s))
    graph = captured([launch] * count)
    samples = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        time.sleep(REST_S)
        samples += replayed_s(graph, 3)[1:]
    return statistics.median(samples) / count


def _long(dtype: str, peak: float, results: Microbenchmarks) -> None:
    """Repeat the best shape of the bursts for seconds."""
    if dtype not in results.bursts:
        raise KernelcastError(results.skipped.get(dtype, "no burst of it ran"))
    meter = _meter()
    if meter is None:
        raise KernelcastError("NVIDIA's driver reports no power and clocks here")
    m, n, k = (int(side) for side in results.shapes[dtype].split(" x "))
    product = FORMATS[dtype](m, n, k)
    flops = 2.0 * m * n * k
    guess_s = flops / results.bursts[dtype]
    product.launch()
    count = max(1, round(BURST_S / guess_s))
    graph = captured([product.launch] * count)
    reading = measured_power(Replays(graph.replay, count, count * guess_s), meter, warm_s=LONG_S, window_s=LONG_S)
    reasons = int(reading.get("reasons") or 0)
    rate = flops / reading["seconds_per_call"]
    results.longs[dtype] = SustainedRun(rate, float(reading["power_w"]), reading.get("sm_mhz"), bool(reasons & 0x4))


def _others(target: Gpu, results: Microbenchmarks) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "DRAM", partial(_dram, target, results)
    yield "DRAM by products", partial(_decode, target, results)
    yield "L2", partial(_l2, target, results)
    yield "exponentials", partial(_arithmetic, target, results, "exponentials")
    yield "FMA", partial(_arithmetic, target, results, "fma")
    yield "shared memory", partial(_shared, target, results)
    yield "launches", partial(_launches, results)
    yield "smallest products", partial(_smallest, target, results)


def _dram(target: Gpu, results: Microbenchmarks) -> None:
    from kernelcast.collect import specs_kernels

    free, _ = torch.cuda.mem_get_info()
    size = min(max(2**31, 16 * target.l2_bytes), free // 4)
    chunk = 16 * specs_kernels.BLOCK  # elements
    programs = size // (4 * chunk)
    x = torch.rand(programs * chunk, device="cuda")
    out = torch.empty(programs, device="cuda")
    guess_s = x.nbytes / target.dram_bytes_per_s
    results.dram_read = x.nbytes / timed([partial(specs_kernels.read, x, out)], guess_s).seconds
    _near("sums of what was read", float(out.sum(dtype=torch.float64)), float(x.sum(dtype=torch.float64)))
    y = torch.empty_like(x)
    # not copy_: a graph has the copy engines do that
    results.dram_copy = 2 * x.nbytes / timed([partial(torch.neg, x, out=y)], 2 * guess_s).seconds
    if not torch.equal(-x[-chunk:], y[-chunk:]):
        raise KernelcastError("a copy differs from its source")


def _decode(target: Gpu, results: Microbenchmarks) -> None:
    """Products with few rows, weights far larger than L2."""
    rates, dtype = [], _sixteen(target)
    for m, n, k in _DECODE:
        if 2 * n * k < 3 * target.l2_bytes:
            continue
        a, b = (torch.randn(rows, k, device="cuda", dtype=dtype) for rows in (m, n))
        out = torch.empty(m, n, device="cuda", dtype=dtype)
        moved = a.nbytes + b.nbytes + out.nbytes
        rates.append(moved / timed([partial(torch.mm, a, b.t(), out=out)], moved / target.dram_bytes_per_s).seconds)
    results.dram_decode = max(rates)


def _l2(target: Gpu, results: Microbenchmarks) -> None:
    """A part of L2 that is read again and again, past L1."""
    from kernelcast.collect import specs_kernels

    for share in _L2_SHARES:
        programs = 4 * target.sm_count
        block = (
            specs_kernels.BLOCK if target.l2_bytes >= 32 * programs * specs_kernels.BLOCK else specs_kernels.BLOCK // 4
        )
        chunk = max(1, round(share * target.l2_bytes / (4 * programs * block))) * block
        x = torch.rand(programs * chunk, device="cuda")
        out = torch.empty(programs, device="cuda")
        rounds = max(2, round(400e-6 * target.l2_bytes_per_s / x.nbytes))
        seconds = timed([partial(specs_kernels.read, x, out, rounds, block)], 400e-6).seconds
        _near("sums of what was read", float(out.sum(dtype=torch.float64)), rounds * float(x.sum(dtype=torch.float64)))
        results.l2_read[x.nbytes / target.l2_bytes] = rounds * x.nbytes / seconds


def _arithmetic(target: Gpu, results: Microbenchmarks, what: str) -> None:
    from kernelcast.collect import specs_kernels

    x = torch.rand(target.sm_count * 16 * 1024, device="cuda")
    out = torch.empty_like(x)
    run: Callable[[Tensor, Tensor, int], int] = (
        specs_kernels.exponentials if what == "exponentials" else specs_kernels.multiply_adds
    )
    rounds = 64
    count = run(x, out, rounds)
    rate = count / timed([partial(run, x, out, rounds)], 500e-6).seconds
    _near("a fixed point", float(out.mean()), 0.641186 if what == "exponentials" else 0.5)
    if what == "exponentials":
        results.exponentials = rate
    else:
        results.fma = 2 * rate


def _shared(target: Gpu, results: Microbenchmarks) -> None:
    from kernelcast.collect import specs_kernels

    rounds = 256
    run = specs_kernels.ReadShared(4 * target.sm_count)
    count = run(rounds)
    results.smem = count / timed([partial(run, rounds)], 300e-6).seconds
    _near("sums of shared memory", float(run.out.mean()), run.expected(rounds))


def _launches(results: Microbenchmarks) -> None:
    """The shortest kernel in a graph; and what a kernel takes beside its work: twice the time of one minus that of
    another with twice the work."""
    from kernelcast.collect import specs_kernels

    out = torch.empty(64, device="cuda")
    empty = (partial(specs_kernels.touch, out), partial(out[:1].fill_, 0.5))
    results.launch_floor_s = min(timed([launch], 1e-6).seconds for launch in empty)
    x = torch.rand(1024, device="cuda")
    y = torch.empty_like(x)
    once, twice = (timed([partial(specs_kernels.multiply_adds, x, y, n)], 5e-6).seconds for n in (64, 128))
    results.gap_s = max(0.0, 2 * once - twice)


def _smallest(target: Gpu, results: Microbenchmarks) -> None:
    times, dtype = [], _sixteen(target)
    for m, n, k in _SMALL:
        a, b = (torch.randn(rows, k, device="cuda", dtype=dtype) for rows in (m, n))
        out = torch.empty(m, n, device="cuda", dtype=dtype)
        times.append(timed([partial(torch.mm, a, b.t(), out=out)], 2e-6).seconds)
    results.smallest_gemm_s = statistics.median(times)


def _sixteen(target: Gpu) -> torch.dtype:
    return torch.bfloat16 if "bf16" in target.tensor_flops_per_clk_sm else torch.float16


def _near(what: str, got: float, wanted: float) -> None:
    if not abs(got / wanted - 1) <= _OFF:
        raise KernelcastError(f"{what}: {got:.6g}, should be {wanted:.6g}")


# ---- large matrix products of each number format through PyTorch (cuBLAS, cuBLASLt), checked


Launch = Callable[[], Tensor]
# As in campaigns' large products: square, and layers of models.
SHAPES = (
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (4096, 14336, 4096),
    (8192, 8192, 8192),
    (16384, 8192, 4096),
    (8192, 28672, 8192),
    (16384, 16384, 16384),
)
DEVICE = "cuda"
_ROWS = 16  # of a product that are checked


@dataclass(frozen=True)
class Product:
    """One product that is ready to run. ``factors``: what it multiplies, as float32, [m, k] and [n, k], computed on
    demand."""

    launch: Launch
    factors: Callable[[], tuple[Tensor, Tensor]]

    def off(self) -> float:
        """Relative error of the first rows: the largest difference from float32 over the largest entry."""
        a, b = self.factors()
        wanted = a @ b.t()
        got = self.launch()[: len(a)].float()
        return float((got - wanted).abs().max() / wanted.abs().max())


def _plain(dtype: torch.dtype, m: int, n: int, k: int) -> Product:
    a, b = (torch.randn(rows, k, device=DEVICE, dtype=dtype) for rows in (m, n))
    out = torch.empty(m, n, device=DEVICE, dtype=dtype)
    return Product(partial(torch.mm, a, b.t(), out=out), lambda: (a[:_ROWS].float(), b.float()))


def _tf32(m: int, n: int, k: int) -> Product:
    torch.backends.cuda.matmul.allow_tf32 = True
    return _plain(torch.float32, m, n, k)


def _fp8_factors(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(rows, k, device=DEVICE).to(torch.float8_e4m3fn) for rows in (m, n))
    return a, b


def _fp8(m: int, n: int, k: int) -> Product:
    a, b = _fp8_factors(m, n, k)
    scale = torch.ones((), device=DEVICE)
    launch = partial(
        torch._scaled_mm, a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return Product(launch, lambda: (a[:_ROWS].float(), b.float()))


def _fp8_block(m: int, n: int, k: int) -> Product:
    """A scale for 128 activations and for 128 by 128 weights."""
    a, b = _fp8_factors(m, n, k)
    scale_a = torch.ones(k // 128, m, device=DEVICE).t()
    scale_b = torch.ones(n // 128, k // 128, device=DEVICE).t()
    launch = partial(torch._scaled_mm, a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    return Product(launch, lambda: (a[:_ROWS].float(), b.float()))


def _int8(m: int, n: int, k: int) -> Product:
    a, b = (torch.randint(-127, 128, (rows, k), device=DEVICE, dtype=torch.int8) for rows in (m, n))
    return Product(partial(torch._int_mm, a, b.t()), lambda: (a[:_ROWS].float(), b.float()))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _nvfp4(m: int, n: int, k: int) -> Product:
    """Two numbers a byte, the first in the low half; scales of 1, whose order in memory then says nothing."""
    held = [torch.randint(0, 256, (rows, k // 2), device=DEVICE, dtype=torch.uint8) for rows in (m, n)]
    a, b = (bytes_.view(torch.float4_e2m1fn_x2) for bytes_ in held)
    scale_a, scale_b = (torch.ones(rows * k // 16, device=DEVICE).to(torch.float8_e4m3fn) for rows in (m, n))
    launch = partial(torch._scaled_mm, a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=DEVICE)

    def numbers(packed: Tensor) -> Tensor:
        return table[torch.stack((packed & 15, packed >> 4), dim=-1).long()].view(len(packed), -1)

    return Product(launch, lambda: (numbers(held[0][:_ROWS]), numbers(held[1])))


FORMATS: dict[str, Callable[[int, int, int], Product]] = {
    "bf16": partial(_plain, torch.bfloat16),
    "fp16": partial(_plain, torch.float16),
    "tf32": _tf32,
    "fp8": _fp8,
    "fp8_block": _fp8_block,
    "int8": _int8,
    "nvfp4": _nvfp4,
}
# Tolerance of a product: the rounding of its result and of its accumulator.
TOLERANCES = {"bf16": 0.02, "fp16": 0.01, "tf32": 0.01, "int8": 1e-4}
FP8_TOLERANCE = 0.03
