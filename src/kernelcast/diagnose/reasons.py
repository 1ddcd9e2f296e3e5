"""Why a kernel takes longer than it could: a small rule for each reason, over a call's metrics, with its threshold.

A rule returns the time that it explains, what it saw, and what to try; None where it does not hold. Several may hold;
what explains most comes first. Explained times overlap: they do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kernelcast.diagnose.metrics import WIDTH_BITS, CallMetrics, unaligned_sizes

TAIL_SHARE = 0.08  # of the SMs' time that idles in the last wave
PADDING_SHARE = 0.08  # of the tiles' area outside of the result
WIN_SHARE = 0.05  # of the measured time, from which another size or format is worth a mention
PEAK_SHARE = 0.75  # of the peak of DRAM or tensor cores, from which these bind: the best sustain 0.87 to 0.92
IMPOSSIBLE_SHARE = 1.1  # of a peak: clocks and counts are good to a few per cent
FILLED_SHARE = 0.70  # of the SMs that have a CTA, under which the GPU is not filled
OCCUPANCY_SHARE = 0.30  # of the warps that an SM could hold, under which loads are not hidden
TINY_US = 5.0  # a kernel this short is mostly its launch,
TINY_WORK_SHARE = 0.5  # unless its work takes this share of it
IDLE_SHARE = 0.10  # of a run that the GPU waits, from which the run is launch-bound
REFETCHED_SHARE = 0.10  # of the measured time that bytes read twice take
L2_HIT_SHARE = 0.30  # of the sectors that hit L2, under which it does not help
STRIDED_SHARE = 0.20  # of the measured time that vector loads would save
SLOWER_RATIO = 1.15  # over the usual time, and beyond its interval: less is clocks and noise
MUCH_SLOWER_RATIO = 2.0  # whatever the interval
EXPLAINED_SHARE = 0.5  # of what is beyond the usual time: a reason that explains less is not the reason
TILE_RATIO = 1.20  # work on the busiest SM, over what the best tile would give it
SPLIT_FILLED_SHARE = 0.5  # of the SMs that have a tile, up to which splitting the inner axis fills the others
SPLIT_STEPS = 8  # steps of 64 along the inner axis, from which splitting it pays


@dataclass(frozen=True)
class Reason:
    name: str
    explained_us: float  # of one call
    detail: str
    advice: str


_TILED = ("gemm", "bmm", "moe_gemm", "conv2d", "conv2d_dgrad", "conv2d_wgrad")
Rule = Callable[[CallMetrics], Reason | None]


def tail_wave(call: CallMetrics) -> Reason | None:
    """The last wave of tiles leaves most SMs idle."""
    grid = call.grid
    if grid.waves <= 1 or grid.tail < TAIL_SHARE or not call.sm_bound:
        return None
    what = f"tiles of {grid.tile_m}x{grid.tile_n}" if grid.tile_m else "CTAs"
    sms = f"{grid.slots} SMs" if grid.slots <= call.sm_count else f"{call.sm_count} SMs x {grid.ctas_per_sm}"
    return Reason(
        "tail wave",
        call.saving_us(grid.tail),
        f"{grid.tasks:,} {what} on {sms}: {grid.waves:.2f} waves, the last "
        f"{grid.last_wave:.0%} full, so that {grid.tail:.0%} of the SMs' time idles",
        "another batch or sequence length so that tiles fill whole waves; a smaller tile, stream-K or split-K",
    )


def padding(call: CallMetrics) -> Reason | None:
    """Tiles reach over the edge of the result."""
    grid, share = call.grid, call.grid.padding
    if share is None:
        share = call.forecast.padding if call.forecast and call.op in _TILED else 0.0
    if share < PADDING_SHARE or not call.sm_bound:
        return None
    tile = f"tiles of {grid.tile_m}x{grid.tile_n}" if grid.tile_m else "its tiles"
    sizes = " x ".join(str(call.parameters[name]) for name in ("m", "n") if name in call.parameters)
    return Reason(
        "padding",
        call.saving_us(share),
        f"{tile} over {sizes or 'this result'}: {share:.0%} of the arithmetic is outside of it",
        "sizes that are multiples of the tile (128 or 256); batch more rows together",
    )


def unaligned(call: CallMetrics) -> Reason | None:
    """Rows that do not start at multiples of 16 bytes: no TMA, narrow loads, an older kernel."""
    sizes = unaligned_sizes(call.op, call.parameters)
    if not sizes or call.aligned is None:
        return None
    saved_us = call.measured_us - call.aligned.time_us
    if saved_us < WIN_SHARE * call.measured_us:
        return None
    unaligned_text = ", ".join(f"{name}={call.parameters[name]}" for name in sizes)
    loads = call.grid.align_elements
    seen = f"; the kernel loads {loads} number{'s' if loads > 1 else ''} at a time" if loads else ""
    multiple = max(sizes.values())
    return Reason(
        "unaligned sizes",
        saved_us,
        f"{unaligned_text}: no multiple of {multiple} in {call.parameters.get('dtype', 'bf16')}{seen}",
        f"pad {' and '.join(sizes)} to a multiple of {multiple} (better 64): about {call.aligned.time_us:,.1f} µs",
    )


def dtype_fallback(call: CallMetrics) -> Reason | None:
    """Matrix work in a wider format than the rest of the run, or on vector units."""
    bits, wanted = WIDTH_BITS.get(call.dtype, 0), WIDTH_BITS.get(call.run_dtype, 16)
    if not call.is_matrix or bits < 32 or (bits <= wanted and (call.dtype != "fp32" or call.fp32_is_meant)):
        return None
    given = str(call.parameters.get("dtype", call.dtype))
    if WIDTH_BITS.get(given, 32) < 32:  # the tensors are narrow, the kernel is not
        saved_us, target = call.gap_us, given
        advice = "channels_last tensors, channels that are multiples of 8, torch.backends.cudnn.benchmark"
    else:
        target = call.run_dtype if wanted < 32 else "tf32"
        saved_us = call.measured_us - call.narrow.time_us if call.narrow else 0.0
        gain = f": about {call.narrow.time_us:,.1f} µs" if call.narrow else ""
        advice = f"cast its inputs to {target} or run it under autocast{gain}"
        advice += '; or torch.set_float32_matmul_precision("high")' if target != "tf32" and call.is_product else ""
    if call.forecast is not None and saved_us < WIN_SHARE * call.measured_us:
        return None
    units = "on vector units, without tensor cores" if call.dtype == "fp32" else "at half the rate"
    run = f" while the run is in {call.run_dtype}" if wanted < 32 else ""
    return Reason("dtype fallback", max(0.0, saved_us), f"{call.dtype} {units}{run}", advice)


def split_k(call: CallMetrics) -> Reason | None:
    """Few tiles with a long inner axis that is not split."""
    grid, k = call.grid, int(call.parameters.get("k", 0))
    filled = grid.tasks / call.sm_count if grid.tasks else 1.0
    if not call.is_product or grid.split_k > 1 or filled > SPLIT_FILLED_SHARE or k < 64 * SPLIT_STEPS:
        return None
    return Reason(
        "split-K missing",
        call.saving_us(1 - filled),
        f"{grid.tasks} tiles on {call.sm_count} SMs, each {k:,} long: {1 - filled:.0%} of the SMs do nothing",
        f"split k into {max(2, round(1 / filled))} parts (split-K or stream-K), or run several such products as one",
    )


def few_ctas(call: CallMetrics) -> Reason | None:
    """Too few CTAs for the SMs; ``split_k`` says it better where it holds."""
    ctas = call.grid.ctas
    filled = ctas / call.sm_count
    if not ctas or call.measured_us <= TINY_US or filled >= FILLED_SHARE or split_k(call) is not None:
        return None
    return Reason(
        "low occupancy",
        call.saving_us(1 - filled),
        f"{ctas} CTA{'s'[ctas == 1 :]} on {call.sm_count} SMs: {1 - filled:.0%} of the GPU idles",
        "more rows or a larger batch; a kernel that splits long rows over several CTAs",
    )


def few_warps(call: CallMetrics) -> Reason | None:
    """Too few warps on an SM to hide loads, where all SMs have some."""
    if call.measured_us <= TINY_US or call.grid.ctas / call.sm_count < FILLED_SHARE:
        return None
    held = call.counters.get("occupancy", call.grid.occupancy)
    if call.is_matrix or held >= OCCUPANCY_SHARE or call.dram_share > PEAK_SHARE:
        return None
    return Reason(
        "low occupancy",
        min(call.gap_us, call.measured_us * (1 - held / OCCUPANCY_SHARE)),
        f"an SM holds {held:.0%} of its warps: too few to hide the latency of memory",
        "fewer registers or less shared memory a CTA (launch bounds, smaller tiles), more CTAs",
    )


def memory_bound(call: CallMetrics) -> Reason | None:
    """DRAM runs near its peak: nothing to save in the kernel, only fewer bytes help."""
    if call.dram_share < PEAK_SHARE:
        return None
    if call.dram_share > IMPOSSIBLE_SHARE:
        return Reason(
            "in L2",
            0.0,
            f"{call.dram_bytes / 1e6:,.1f} MB in less time than DRAM takes: they were in L2, or it ran on another GPU",
            "forecast it with a warm cache, or for the GPU that it was measured on",
        )
    how = "larger batches over the same weights" if call.is_matrix else "fuse it with its neighbours"
    return Reason(
        "memory-bound",
        0.0,
        f"{call.dram_bytes / 1e6:,.1f} MB at {call.dram_share:.0%} of DRAM's peak: the kernel is as fast as memory",
        f"only fewer bytes help: {how}, or a narrower format",
    )


def compute_bound(call: CallMetrics) -> Reason | None:
    """Tensor cores run near their peak: the kernel is good, less arithmetic helps."""
    forecast = call.forecast
    limit_us = forecast.limits_us.get("tensor", 0.0) if forecast else 0.0
    if forecast is None or limit_us < PEAK_SHARE * call.measured_us:
        return None
    if limit_us > IMPOSSIBLE_SHARE * call.measured_us:
        return Reason(
            "faster than the GPU",
            0.0,
            f"{limit_us / call.measured_us:.1f} times the peak of the tensor cores: it ran on another GPU, or in "
            "another format or shape than the profile says",
            "forecast it for the GPU that it was measured on",
        )
    return Reason(
        "compute-bound",
        0.0,
        f"tensor cores at {limit_us / call.measured_us:.0%} of their peak; the best kernels of this op reach "
        f"{limit_us / forecast.ceiling_us:.0%}, where power and clocks allow",
        "less arithmetic: a narrower format (fp8), sparsity, or a smaller product",
    )


def unfused(call: CallMetrics) -> Reason | None:
    """Part of a sequence of kernels that read and write element by element: one kernel could do the work of all."""
    if call.measured_us <= TINY_US or call.chain_saved_us < WIN_SHARE * call.measured_us:
        return None
    return Reason(
        "unfused",
        call.chain_saved_us,
        f"one of {call.chain:.0f} element-wise kernels in a row, each of which reads and writes its tensors again",
        "one kernel for all of them: torch.compile, or a fused norm, rotary embedding or activation",
    )


def strided(call: CallMetrics) -> Reason | None:
    """Each element's address is computed: tensors of different layouts, or a broadcast tensor."""
    if call.vector is None:
        return None
    saved_us = min(call.measured_us - call.vector.time_us, call.max_saving_us)
    if saved_us < STRIDED_SHARE * call.measured_us or call.measured_us <= TINY_US:
        return None
    return Reason(
        "strided access",
        saved_us,
        "its tensors have different layouts in memory, or one is broadcast: no vector loads, each address is computed",
        f"contiguous tensors of one layout: about {call.vector.time_us:,.1f} µs; or a compiled kernel",
    )


def l2_misses(call: CallMetrics) -> Reason | None:
    """Bytes come from DRAM more than once, and take longer than the arithmetic beside them."""
    if not call.is_matrix:  # what an element-wise kernel reads is in L2 or not: no fault of the kernel
        return None
    forecast, counted, hit = call.forecast, call.counters.get("dram_bytes"), call.counters.get("l2_hit_share")
    least, again = (forecast.dram_bytes, forecast.refetched_bytes) if forecast else (0.0, 0.0)
    extra = again if counted is None else counted - least
    beside_us = max((v for name, v in forecast.limits_us.items() if name != "dram"), default=0.0) if forecast else 0.0
    extra_us = (least + extra) / call.dram_bytes_per_s * 1e6 - max(beside_us, least / call.dram_bytes_per_s * 1e6)
    missed = forecast is None and hit is not None and hit < L2_HIT_SHARE
    if extra_us < REFETCHED_SHARE * call.measured_us and not missed:
        return None
    seen = f"{hit:.0%} of its reads hit L2; " if hit is not None else ""
    return Reason(
        "L2 misses",
        min(max(0.0, extra_us), call.max_saving_us) if forecast else 0.0,
        seen + (f"{extra / 1e6:,.1f} MB come from DRAM more than once" if forecast else "the rest comes from DRAM"),
        "tiles in an order that reuses L2 (grouped rasterisation), larger tiles, or operands split to fit L2",
    )


def launch_bound(call: CallMetrics) -> Reason | None:
    """A kernel that is little more than its launch. Gaps between kernels are the run's, not a kernel's: ``idle``."""
    each_us = call.measured_us / max(1, call.launches)
    work_us = call.forecast.work_us if call.forecast else 0.0
    if each_us > TINY_US or work_us > TINY_WORK_SHARE * call.measured_us:
        return None
    chain = f", one of {call.chain:.0f} kernels in a row that one could replace" if call.chain > 1 else ""
    wait = f", and the GPU waits {call.idle_us:,.1f} µs before it" if call.idle_us > 0 else ""
    return Reason(
        "launch-bound",
        call.measured_us - work_us,
        f"{call.measured_us:,.2f} µs for {work_us:,.2f} µs of work{wait}{chain}",
        "fuse it (torch.compile), replay a CUDA graph, or give a launch more work (a larger batch)",
    )


def idle(idle_us: float, duration_us: float) -> Reason | None:
    """The whole run: the GPU has nothing to do because the host is late with launches."""
    if not duration_us or idle_us / duration_us < IDLE_SHARE:
        return None
    return Reason(
        "launch-bound",
        idle_us,
        f"the GPU waits {idle_us / duration_us:.0%} of the time for the host",
        "a CUDA graph, torch.compile, or a larger batch; profiling itself slows the host down",
    )


def wrong_tile(call: CallMetrics) -> Reason | None:
    """Another tile would put less work on the busiest SM; not where the kernel is as fast as any of its op."""
    grid, forecast = call.grid, call.forecast
    if forecast is None or call.measured_us <= forecast.time_us or not call.is_product or not call.sm_bound:
        return None
    best_m, best_n = forecast.tile.get("tile_m"), forecast.tile.get("tile_n")
    split = grid.split_k > 1 or forecast.tile.get("split_k", 1) > 1
    if split or not grid.tile_m or not grid.tile_n or not best_m or not best_n:
        return None
    waves, best_waves = -(-grid.tasks // max(1, grid.slots)), -(-forecast.tasks // call.sm_count)
    ratio = waves * grid.tile_m * grid.tile_n / (best_waves * best_m * best_n)
    if ratio < TILE_RATIO:
        return None
    best = f"{best_m:.0f}x{best_n:.0f}"
    return Reason(
        "wrong tile",
        call.saving_us(1 - 1 / ratio),
        f"tiles of {grid.tile_m}x{grid.tile_n} give the busiest SM {ratio:.2f} times the work of {best}",
        f"tiles of {best}: cuBLASLt's other algorithms, or a tuned Triton or CUTLASS kernel",
    )


def slower(call: CallMetrics) -> Reason | None:
    """Slower than similar calls on this GPU, for a reason that no other rule explains."""
    forecast = call.forecast
    if forecast is None or call.measured_us <= min(
        max(forecast.high_us, SLOWER_RATIO * forecast.time_us), MUCH_SLOWER_RATIO * forecast.time_us
    ):
        return None
    return Reason(
        "unexplained",
        call.measured_us - forecast.time_us,
        f"calls like it take {forecast.time_us:,.1f} µs, nine in ten at most {forecast.high_us:,.1f} µs",
        "measure it again alone: clocks, other work on the GPU, or another kernel of the library",
    )


RULES: tuple[Rule, ...] = (
    dtype_fallback, unaligned, tail_wave, padding, split_k, few_ctas, few_warps, unfused, strided, l2_misses,
    launch_bound, wrong_tile, memory_bound, compute_bound,
)  # fmt: skip


def reasons(call: CallMetrics) -> tuple[Reason, ...]:
    """All rules that hold, those that explain most first; ``slower`` only where the others explain less than half."""
    holding = sorted((r for rule in RULES if (r := rule(call)) is not None), key=lambda r: -r.explained_us)
    rest = slower(call)
    if rest is not None and (not holding or holding[0].explained_us < EXPLAINED_SHARE * rest.explained_us):
        holding.insert(0, rest)
    return tuple(holding)
