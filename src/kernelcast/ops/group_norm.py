"""group_norm and its gradient, cut as PyTorch's group_norm_kernel.cu does it: small kernels around two large ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, conflict, size
from kernelcast.ops.spatial import SpatialKernel, width_of
from kernelcast.ops.vector import ACCUMULATOR_BYTES, block_reduction, paced, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

_BLOCK_THREADS = 512.0  # kCUDABlockReduceNumThreads, of a CTA that reduces at least so many numbers
_WARP_THREADS = 32.0  # of one that reduces fewer
_CHANNEL_THREADS = 256.0  # kCUDANumThreads, a number a channel
_FEW_IMAGES = 128.0  # kReduceTileSize: up to so many, a thread sums the weights' gradients over the images
_TILE = 32.0
# A thread waits for each element before the next: on our H200 33 us for 80 steps of the statistics.
_STEP_CYCLES = 820.0
_REDUCE_CYCLES = 4000.0  # the threads of a CTA join their sums
_COPY_THREADS, _COPY_ELEMENTS = 128.0, 4.0
_OFFSET_INSTRUCTIONS = 20.0  # of a thread for an element and tensor: its place, over two axes


class _GroupNorm(SpatialKernel):
    """Parameters of both directions."""

    examples = (
        {"batch": 8, "channels": 320, "spatial": 4096, "groups": 32},
        {"batch": 64, "channels": 1024, "spatial": 1, "groups": 8},
    )

    batch: int = size("images")
    channels: int = size("channels")
    spatial: int = size("pixels of a channel of one image")
    groups: int = size("groups of channels, each with statistics of its own in each image")

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        return conflict(
            np.mod(calls["channels"], calls["groups"]) != 0,
            "groups {groups:.0f} must divide channels {channels:.0f}",
            calls.numbers,
        )

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        teams = calls["batch"] * calls["groups"]
        return {
            **super().shape_features(calls, gpu),
            "log_group": np.log2(calls["channels"] / calls["groups"] * calls["spatial"]),
            "log_waves": np.log2(teams / gpu.sm_count),
            "tail": ceil_div(teams, gpu.sm_count) * gpu.sm_count / teams - 1,
        }


class GroupNorm(_GroupNorm):
    """Group norm: a CTA a group of one image for the statistics, then an element-wise kernel over all."""

    op = "group_norm"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        batch, channels, spatial, groups = (calls[name] for name in ("batch", "channels", "spatial", "groups"))
        elements, element_bytes = batch * channels * spatial, width_of(calls)
        moments = _team_sums(gpu, batch * groups, elements, 1.0, element_bytes, flops=7.0)
        return (
            replace(moments, xu_ops=elements / (batch * groups)),  # Welford's division
            _a_channel(gpu, batch * channels, 6.0),
            _elementwise(gpu, elements, 2.0 * element_bytes, 3.0, element_bytes < 4),
        )


class GroupNormBackward(_GroupNorm):
    """Gradients of group norm: sums of each channel of each image, three numbers a group, dx, and the weights'."""

    op = "group_norm_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        batch, channels, spatial, groups = (calls[name] for name in ("batch", "channels", "spatial", "groups"))
        elements, element_bytes = batch * channels * spatial, width_of(calls)
        many = batch > _FEW_IMAGES
        down = np.where(many, ceil_div(batch, _TILE), batch)
        weights = vector_kernel(
            gpu,
            tasks=ceil_div(channels, np.where(many, _TILE, _CHANNEL_THREADS)),
            threads=np.where(many, _TILE * _TILE / 2, _CHANNEL_THREADS),
            moved_bytes=2 * ACCUMULATOR_BYTES * batch * channels + 2 * channels * element_bytes,
            steps=down,
        )
        return (
            _team_sums(gpu, batch * channels, elements, 2.0, element_bytes, flops=3.0),
            _a_channel(gpu, batch * channels, 2.0),
            _team_sums(gpu, batch * groups, batch * channels, 3.0, ACCUMULATOR_BYTES, flops=6.0),
            _elementwise(gpu, elements, 3.0 * element_bytes, 5.0, element_bytes < 4),
            paced(weights, gpu, _STEP_CYCLES),
        )


def _team_sums(gpu: Gpu, teams: Array, elements: Array, reads: float, element_bytes: float, *, flops: float) -> Work:
    """A CTA (a warp where there is little) adds up its neighbours, single elements at a time."""
    each = elements / teams
    threads = np.where(each < _BLOCK_THREADS, _WARP_THREADS, _BLOCK_THREADS)
    smem_bytes, instructions = block_reduction(gpu, threads, 2.0)
    work = vector_kernel(
        gpu,
        tasks=teams,
        threads=threads,
        moved_bytes=reads * elements * element_bytes + 2 * teams * ACCUMULATOR_BYTES,
        flops=flops * elements,
        converted=reads * elements if element_bytes < 4 else 0.0,
        smem_bytes=teams * smem_bytes,
        warp_instructions=teams * instructions + 6 * reads * elements / gpu.warp_threads,
        steps=ceil_div(each, threads),
    )
    return replace(paced(work, gpu, _STEP_CYCLES), task_cycles=_REDUCE_CYCLES)


def _a_channel(gpu: Gpu, channels: Array, numbers: float) -> Work:
    """A scale and a shift for each channel of each image."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(channels, _CHANNEL_THREADS),
        threads=_CHANNEL_THREADS,
        moved_bytes=numbers * ACCUMULATOR_BYTES * channels,
    )


def _elementwise(gpu: Gpu, elements: Array, moved: float, tensors: float, converts: bool) -> Work:
    """Over (images · channels) x pixels with a number or more broadcast over the pixels: every place is computed."""
    return vector_kernel(
        gpu,
        tasks=ceil_div(elements, _COPY_THREADS * _COPY_ELEMENTS),
        threads=_COPY_THREADS,
        moved_bytes=moved * elements,
        flops=4 * elements,
        converted=tensors * elements if converts else 0.0,
        warp_instructions=_OFFSET_INSTRUCTIONS * tensors * elements / gpu.warp_threads,
    )
