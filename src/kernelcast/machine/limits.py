"""One pure function a limit: the least time that one pipeline needs for this work, in seconds; and how tasks fall onto
SMs (occupancy, the busiest SM), in closed forms, so that a million calls take one pass.

``share`` is how many mean tasks one SM does: tasks / SMs for the limit proper, more for the busiest SM. The
prediction's bound is the largest of these named terms; any can be left out to see its effect. Pipelines of the core run
at the highest clock of the card (``clock_reserve`` over the boost clock that its published peaks are at).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu, fabric
from kernelcast.hardware.gpu import MFMA, TCGEN05, WGMMA, WIDE
from kernelcast.ops.work import Array, Number, Work, Works

# A warp instruction of mma.sync m16n8k16 does 4,096 FLOPs (PTX ISA). One wgmma m64n256k16 is issued by four
# warps; tcgen05.mma m128n256k16 by one thread. AMD's v_mfma 32x32x8 is one instruction of a wavefront.
_FLOPS_PER_TENSOR_INSTRUCTION = {
    WGMMA: 2 * 64 * 256 * 16 / 4,
    TCGEN05: 2 * 128 * 256 * 16,
    MFMA: 2 * 32 * 32 * 8,
}
_BYTES_PER_LANE = 16.0  # the widest load or store
_L2_EMPTY = 1.25  # of L2's size (or of a partition's): sets that come round in turn, of which none is left
NOTHING: Array = np.zeros(())  # the limit of a pipeline without demand
NOTHING.flags.writeable = False  # it is shared


@dataclass(frozen=True)
class Rotation:
    """How many sets of a call's tensors pass between two uses of one.

    ``weights``: infinity in a model with many layers, 1 for the same call again and again. ``inputs``: 1 where the
    kernel before has just made them, more in a benchmark that takes other inputs each time.
    """

    weights: Number = np.inf
    inputs: Number = 1.0
    beside_bytes: Number = 0.0  # that the call's other kernels stream in each turn

    def part(self, rows: slice | NDArray[np.intp]) -> Rotation:
        """Those of some of the calls."""

        def rows_of(column: Any) -> Any:
            return column[rows] if isinstance(column, np.ndarray) else column

        return Rotation(rows_of(self.weights), rows_of(self.inputs), rows_of(self.beside_bytes))

    def of_each(self, works: Works) -> list[Rotation]:
        """Of each kernel of a call: the others' weights pass between two uses of its own."""
        if len(works) == 1 or (not isinstance(self.weights, np.ndarray) and self.weights == np.inf):
            return [self] * len(works)
        streams = [_of_calls(work.streamed_bytes) for work in works]
        return [replace(self, beside_bytes=sum(streams) - stream) for stream in streams]


def tensor(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Matrix FLOPs of an SM over the SM's matrix rate."""
    if _absent(work.tensor_flops):
        return NOTHING
    return (
        share
        * work.tensor_flops
        * _inverse(gpu.tensor_flops_per_s(work.tensor_dtype) * gpu.clock_reserve / gpu.sm_count)
    )


def fma(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Vector FLOPs of an SM over the SM's vector rate."""
    if _absent(work.fma_flops):
        return NOTHING
    return share * work.fma_flops * _inverse(gpu.fma_flops_per_s(work.fma_dtype) * gpu.clock_reserve / gpu.sm_count)


def xu(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Special functions (exp, rsqrt, …) of an SM over its special-function rate."""
    if _absent(work.xu_ops):
        return NOTHING
    return share * work.xu_ops / (gpu.xu_ops_per_s * gpu.clock_reserve / gpu.sm_count)


def smem(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Shared-memory bytes of an SM over its shared-memory rate."""
    if _absent(work.smem_bytes):
        return NOTHING
    return share * work.smem_bytes / (gpu.smem_bytes_per_s * gpu.clock_reserve / gpu.sm_count)


def issue(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Warp instructions of an SM over what its schedulers issue."""
    return share * warp_instructions(work, gpu) / (gpu.issue_warps_per_s * gpu.clock_reserve / gpu.sm_count)


def l2(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Bytes between SMs and L2: all of them over L2's rate, or one SM's over its own port."""
    clock_hz = gpu.clock_boost_hz * gpu.clock_reserve
    whole = np.asarray(work.tasks) * work.l2_bytes / (gpu.l2_bytes_per_clk * clock_hz)
    port = share * (np.asarray(work.l2_bytes) + work.multicast_bytes) / (gpu.l2_bytes_per_clk_sm * clock_hz)
    return np.maximum(whole, port)


def dram(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Bytes that must cross DRAM's pins, over its rate."""
    return dram_bytes(work, gpu, rotations) / gpu.dram_bytes_per_s


def link(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """Bytes to other GPUs over the link's rate, or its dependent messages one after another."""
    if all(_absent(demand) or not np.any(demand) for demand in (work.link_bytes, work.link_steps)):
        return NOTHING
    between = fabric(work.link or gpu.link_kind, gpu)
    return np.maximum(
        np.asarray(work.link_bytes) / between.bytes_per_s, np.asarray(work.link_steps) * between.latency_s
    )


def launch(work: Work, gpu: Gpu, share: Array, rotations: Rotation) -> Array:
    """The shortest time that a kernel takes on this GPU: launch, first loads, drain."""
    return np.asarray(work.launches) * gpu.launch_floor_s


Limit = Callable[[Work, Gpu, Array, Rotation], Array]
LIMITS: Mapping[str, Limit] = {f.__name__: f for f in (tensor, fma, xu, smem, l2, dram, issue, link, launch)}
PER_SM = ("tensor", "fma", "xu", "smem", "l2", "issue")  # grow with the busiest SM's share


def warp_instructions(work: Work, gpu: Gpu) -> Number:
    """Instructions that a mean task's demand implies, in warps."""
    lanes = gpu.warp_threads
    matrix = _FLOPS_PER_TENSOR_INSTRUCTION.get(gpu.instruction_path, 4096.0)
    demands = (
        (work.tensor_flops, matrix),
        (work.fma_flops, 2 * lanes),
        (work.xu_ops, lanes),
        (work.smem_bytes if gpu.instruction_path not in WIDE else 0.0, _BYTES_PER_LANE * lanes),
        (work.l2_bytes, _BYTES_PER_LANE * lanes),
    )
    implied = [demand / each for demand, each in demands if not _absent(demand)]
    other = [] if implied and _absent(work.other_warp_instructions) else [work.other_warp_instructions]
    return functools.reduce(operator.add, implied + other)


def dram_bytes(work: Work, gpu: Gpu, rotations: Rotation) -> Array:
    """The least DRAM traffic: streamed data that L2 does not still hold, and activations beyond L2's size."""
    streamed = np.asarray(work.streamed_bytes) * (1 - resident_share(work, gpu, rotations, rotations.weights))
    return streamed + np.maximum(0.0, np.asarray(work.activation_bytes) - gpu.l2_bytes)


def extra_dram_bytes(work: Work, gpu: Gpu, rotations: Rotation) -> Array:
    """Expected beyond the least: operands read again, streamed data that L2 might still hold but rarely does, and
    activations that it lost because other inputs came between.

    What was written may still be in L2 when the call ends, so that lost activations bound nothing.
    """
    again = np.asarray(work.refetched_bytes)
    if isinstance(rotations.weights, np.ndarray) or rotations.weights < np.inf:
        hoped, kept = (
            resident_share(work, gpu, rotations, rotations.weights),
            kept_share(work, gpu, rotations, rotations.weights),
        )
        again = again + work.streamed_bytes * (hoped - kept)
    if not isinstance(rotations.inputs, np.ndarray) and rotations.inputs <= 1:
        return again
    moved = np.asarray(work.activation_bytes)
    lost = np.where(
        np.asarray(rotations.inputs) > 1, moved * (1 - kept_share(work, gpu, rotations, rotations.inputs)), 0.0
    )
    return again + np.maximum(0.0, lost - np.maximum(0.0, moved - gpu.l2_bytes))


def resident_share(work: Work, gpu: Gpu, rotations: Rotation, rotation: Number) -> Array:
    """The most of the streamed data that L2 may still hold from the last time, after ``rotation`` such sets passed:
    all of it while the sets fit, none when they are twice L2's size, linear between. It makes the bound."""
    if not isinstance(rotation, np.ndarray) and rotation == np.inf:
        return NOTHING
    return np.clip(2 - _passed_bytes(work, rotations, rotation) / gpu.l2_bytes, 0.0, 1.0)


def kept_share(work: Work, gpu: Gpu, rotations: Rotation, rotation: Number) -> Array:
    """What L2 is expected to hold: all of it while the sets fit, nothing soon after. Sets that come round in turn are
    thrown out just before they are needed. Where L2 has partitions, SMs keep what they read in their own, so that sets
    which all SMs read are there as many times (NVIDIA A100 whitepaper, "L2 cache").

    Decodes of public campaigns, caches read again and again: on an L40S (one partition) 2 to 4 times DRAM's rate up to
    1.0 of L2, DRAM's own from 1.25 on; on B200 (two) above it up to 0.6 of L2, DRAM's from 0.7 on.
    """
    if not isinstance(rotation, np.ndarray) and rotation == np.inf:
        return NOTHING
    return kept_of_passed(_passed_bytes(work, rotations, rotation), gpu)


def kept_of_passed(passed_bytes: Number, gpu: Gpu) -> Array:
    """What L2 is expected to hold of a set after so many bytes, its own among them, have passed."""
    sets = np.asarray(passed_bytes) * gpu.l2_partitions / gpu.l2_bytes
    return np.clip((_L2_EMPTY - sets) / (_L2_EMPTY - 1), 0.0, 1.0)


def passed_of_kept(share: float, gpu: Gpu) -> float:
    """The bytes after which so much of a set is left, where some is."""
    return (_L2_EMPTY - (_L2_EMPTY - 1) * share) * gpu.l2_bytes / gpu.l2_partitions


def _passed_bytes(work: Work, rotations: Rotation, rotation: Number) -> Array:
    """Between two uses of one set; an empty set over an endless rotation is still endless."""
    footprint = np.asarray(work.streamed_bytes) + work.activation_bytes + rotations.beside_bytes
    return np.asarray(rotation * np.maximum(footprint, 1.0))


def _of_calls(values: Number) -> Number:
    """One number a call: what is streamed is the same for every candidate."""
    return values[0] if isinstance(values, np.ndarray) and values.ndim > 1 else values


def _absent(demand: Number) -> bool:
    """No demand on this pipeline: no time."""
    return not isinstance(demand, np.ndarray) and demand == 0


def _inverse(rate: float) -> float:
    """1 / rate; a unit that the GPU lacks (rate 0) costs nothing without demand."""
    return 1 / rate if rate else 0.0


REGISTER_GRAIN = 256.0  # registers are handed to a warp in blocks of 256 (CUDA occupancy calculator)
SMEM_RESERVED_BYTES = 1024.0  # the driver keeps 1 KiB a CTA from compute capability 8.0 on


def ctas_per_sm(work: Work, gpu: Gpu) -> Array:
    """Resident CTAs of this kernel on one SM, by registers, shared memory and threads (CUDA occupancy rules).

    At least 1, also where a guessed footprint would not fit.
    """
    warps = np.ceil(np.asarray(work.threads) / gpu.warp_threads)
    per_warp = np.ceil(np.asarray(work.registers_per_thread) * gpu.warp_threads / REGISTER_GRAIN) * REGISTER_GRAIN
    by_registers = np.floor(gpu.registers_per_sm / (per_warp * warps))
    by_threads = np.floor(gpu.max_threads_per_sm / (warps * gpu.warp_threads))
    by_smem = np.floor(gpu.smem_bytes_per_sm / (np.asarray(work.smem_bytes_per_cta) + SMEM_RESERVED_BYTES))
    fit = np.minimum(np.minimum(by_registers, by_threads), np.minimum(by_smem, gpu.max_ctas_per_sm))
    return np.maximum(1.0, fit)


def busiest_share(work: Work, sms: int) -> Array:
    """Mean tasks' worth of work on the busiest of ``sms`` SMs: the least that its schedule can reach."""
    if work.schedule == "longest_first":
        return longest_first(work.tasks, work.longest, work.shortest, work.longest_count, sms)
    tasks = np.asarray(work.tasks)  # an SM that frees up takes the next
    waves: Array = np.ceil(tasks / sms)
    if not isinstance(work.longest, np.ndarray) and work.longest == 1:  # all are alike
        return waves
    return np.maximum(waves, np.where(tasks > 0, work.longest, 0.0))


def longest_first(tasks: Number, longest: Number, shortest: Number, longest_count: Number, sms: int) -> Array:
    """Unequal tasks, longest first, each to the least loaded SM.

    Three lower limits, of which the largest is close to what the heap reaches: the longest task alone; the
    longest tasks shared out; all work shared out, rounded up to the shortest task (the last to be placed).
    For equal tasks this is ceil(tasks / sms).
    """
    grain = np.maximum(shortest, 1e-9)
    shared = grain * np.ceil(np.asarray(tasks, dtype=np.float64) / (sms * grain) - 1e-9)
    shared = np.where(np.asarray(tasks) > sms, shared, 0.0)  # else no SM has two
    long = longest * np.ceil(np.asarray(longest_count, dtype=np.float64) / sms)
    return np.where(np.asarray(tasks) > 0, np.maximum(shared, np.maximum(long, longest)), 0.0)
