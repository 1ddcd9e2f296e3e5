"""Layers over images: memory formats, kernels with one thread per output; channels_last, channel_cat, roll."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel, choice, grain, size
from kernelcast.ops.vector import SECTOR_BYTES, VECTOR_BYTES, VECTOR_DTYPES, paced, vector_kernel
from kernelcast.ops.work import Array, Number, Work, Works, ceil_div

LAYOUTS = ("nchw", "nhwc")


class SpatialKernel(Kernel):
    """A layer over feature maps, limited by bytes, by serial loads of a thread, or by too few CTAs."""

    family = "spatial"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES


class FeatureMapKernel(SpatialKernel):
    """A layer that treats rows and columns alike."""

    batch: int = size("images")
    channels: int = size("channels")
    spatial: int = size("pixels of one channel of one image")


class ImageKernel(SpatialKernel):
    """A layer over the rows and columns of images."""

    batch: int = size("images")
    channels: int = size("channels")
    height: int = size("rows of the input")
    width: int = size("columns of the input")


def layout() -> str:
    """The parameter."""
    parameter: str = choice("memory format; nhwc: channels last", LAYOUTS, default="nchw")
    return parameter


def channels_last(calls: Calls) -> bool:
    """Whether the memory format is channels last."""
    return bool(calls.choice("layout") == "nhwc")


def each_output(
    gpu: Gpu, outputs: Array, *, threads: float, a_thread: Number = 1.0, instructions: Number, flops: Number = 0.0,
    step_cycles: Number = 0.0, **more: Any,
) -> Work:  # fmt: skip
    """Threads that each compute ``a_thread`` outputs in turn; ``instructions`` and ``flops`` are per output."""
    work = vector_kernel(
        gpu,
        tasks=ceil_div(outputs, threads * np.asarray(a_thread, dtype=np.float64)),
        threads=threads,
        flops=flops * outputs,
        warp_instructions=instructions * outputs / gpu.warp_threads,
        **more,
    )
    return paced(work, gpu, step_cycles)


def scattered_bytes(element_bytes: float, stride: Number) -> Array:
    """Bytes an SM fetches beyond an element whose neighbour in the warp is ``stride`` elements away."""
    return np.clip(element_bytes * np.asarray(stride, dtype=np.float64), element_bytes, SECTOR_BYTES) - element_bytes


_COPY_THREADS, _COPY_ELEMENTS = 128.0, 4.0  # elementwise_kernel<128, 4>
_COPY_INSTRUCTIONS = 72.0  # of a thread per element: its offset in both tensors, over three axes
_ROLL_THREADS, _ROLL_INSTRUCTIONS = 512.0, 130.0  # roll_cuda_kernel: three 64-bit divisions
_CAT_THREADS = 256.0
_UNSHARED = 0.6  # of the sectors that elements read across, what L1 has not kept from the neighbours' reads


class ChannelsLast(FeatureMapKernel):
    """Copy of a feature map to the other memory format (``x.contiguous(memory_format=torch.channels_last)``)."""

    op = "channels_last"
    examples = (
        {"batch": 32, "channels": 64, "spatial": 12544},
        {"batch": 32, "channels": 64, "spatial": 12544, "to": "nchw"},
    )

    to: str = choice("memory format of the copy", LAYOUTS, default="nhwc")

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements, element_bytes = calls["batch"] * calls["channels"] * calls["spatial"], calls.dtype.act_bytes
        apart = calls["spatial"] if calls.choice("to") == "nhwc" else calls["channels"]  # neighbours, in the source
        work = each_output(
            gpu,
            elements,
            threads=_COPY_THREADS,
            a_thread=_COPY_ELEMENTS,
            moved_bytes=2 * elements * element_bytes,
            again_bytes=_UNSHARED * elements * scattered_bytes(element_bytes, apart),
            instructions=_COPY_INSTRUCTIONS,
        )
        return (work,)


class ChannelCat(FeatureMapKernel):
    """Feature maps concatenated along the channels (DenseNet, UNet): ``channels`` in all, from ``parts``."""

    op = "channel_cat"
    examples = ({"batch": 32, "channels": 256, "spatial": 3136, "parts": 4},)

    parts: int = size("tensors concatenated")
    layout: str = layout()

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        chunk = calls["channels"] / calls["parts"] * (1.0 if calls.choice("layout") == "nhwc" else calls["spatial"])
        return {
            **super().shape_features(calls, gpu),
            "log_chunk": np.log2(chunk * calls.dtype.act_bytes),
            "grain_chunk": grain(chunk),
        }

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements, element_bytes = calls["batch"] * calls["channels"] * calls["spatial"], calls.dtype.act_bytes
        work = each_output(
            gpu,
            elements,
            threads=_CAT_THREADS,
            a_thread=VECTOR_BYTES / element_bytes,
            moved_bytes=2 * elements * element_bytes,
            instructions=np.full(calls.count, 75.0 if calls.choice("layout") == "nhwc" else 10.0),
        )
        return (work,)


class Roll(SpatialKernel):
    """Circular shift along one axis (Swin's windows): one kernel per axis."""

    op = "roll"
    examples = ({"outer": 32, "length": 56, "inner": 7168, "shift": 3},)

    outer: int = size("elements of the outer axes")
    length: int = size("elements of the axis")
    inner: int = size("elements of the inner axes")
    shift: int = size("shift in elements", default=1, low=0)

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        return {"log_outer": np.log2(calls["outer"]), "log_length": np.log2(calls["length"]),
                "log_inner": np.log2(calls["inner"])}  # fmt: skip

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        elements = calls["outer"] * calls["length"] * calls["inner"]
        work = each_output(gpu, elements, threads=_ROLL_THREADS, moved_bytes=2 * elements * calls.dtype.act_bytes,
                           instructions=_ROLL_INSTRUCTIONS)  # fmt: skip
        return (work,)
