"""interpolate and pad with their gradients: one thread per output pixel."""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, choice, size
from kernelcast.ops.spatial import ImageKernel, SpatialKernel, channels_last, each_output, layout
from kernelcast.ops.vector import fill_kernel
from kernelcast.ops.work import Array, Work, Works

MODES = ("nearest", "bilinear", "bicubic")
_NEIGHBOURS = {"nearest": 1.0, "bilinear": 4.0, "bicubic": 16.0}  # inputs of an output
_FLOPS = {"nearest": 0.0, "bilinear": 7.0, "bicubic": 60.0}
# Of a thread for an output: the divisions that give its image, channel, row and column; more with channels last.
_OFFSET_INSTRUCTIONS = {"nchw": 47.0, "nhwc": 136.0}
_NEIGHBOUR_INSTRUCTIONS, _LOOP_INSTRUCTIONS = 20.0, 4.0  # per input; where its offset is known from the last image
_ATOMIC_INSTRUCTIONS = {"nchw": 110.0, "nhwc": 30.0}  # rows of a map are added to the same 32-bit addresses
_THREADS = 1024.0
_STEP_CYCLES = 40.0
# Of an image and channel, in a thread that goes through all of them (2,048: 852 us bilinear, 1,338 us bicubic, 11 ms
# where its neighbours in the warp are a row of channels apart, 50 ms adding sixteen to addresses that others add to).
_LOOP_CYCLES = {"bilinear": 820.0, "bicubic": 1290.0}
_SCATTERED_CYCLES, _ADDING_CYCLES = 10900.0, 48000.0
_GATHERED_CYCLES = 330.0  # of an output of an image that a thread adds up
_CONTENTION = 1.5  # of H200 times for scales of 2, 4 and 8, in 16 bits
PADS = ("constant", "reflect", "replicate")
_COPY_THREADS, _COPY_ELEMENTS = 128.0, 4.0
_COPY_INSTRUCTIONS = 60.0
_BORDER_INSTRUCTIONS, _BORDER_ATOMIC_INSTRUCTIONS = 146.0, 30.0  # of a thread for an element of the padded image


class _Interpolate(ImageKernel):
    """Parameters of both directions."""

    examples = (
        {"batch": 8, "channels": 256, "height": 64, "width": 64, "out_height": 128, "out_width": 128},
        {"batch": 8, "channels": 21, "height": 65, "width": 65, "out_height": 513, "out_width": 513,
         "mode": "bilinear"},
    )  # fmt: skip

    out_height: int = size("rows of the output")
    out_width: int = size("columns of the output")
    mode: str = choice("interpolation mode", MODES, default="nearest")
    layout: str = layout()

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        inputs, outputs = calls["height"] * calls["width"], calls["out_height"] * calls["out_width"]
        return {
            **super().shape_features(calls, gpu),
            "log_planes": np.log2(calls["batch"] * calls["channels"]),
            "log_outputs": np.log2(outputs),
            "log_scale": np.log2(outputs / inputs),
        }

    @classmethod
    def _pixels(cls, calls: Calls) -> tuple[Array, Array, Array]:
        """(images · channels, pixels of the input, of the output)"""
        planes = calls["batch"] * calls["channels"]
        return planes, calls["height"] * calls["width"], calls["out_height"] * calls["out_width"]


class Interpolate(_Interpolate):
    """Images resized (upsample_nearest2d, upsample_bilinear2d, upsample_bicubic2d).

    Bilinear and bicubic kernels give a thread an output pixel and loop over all images and channels.
    """

    op = "interpolate"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        planes, inputs, outputs = cls._pixels(calls)
        mode, element_bytes = calls.choice("mode"), calls.dtype.act_bytes
        through = mode == "bicubic" or (mode == "bilinear" and not channels_last(calls))
        loops = planes if through else np.ones_like(planes)  # of a thread
        cycles = (_SCATTERED_CYCLES if channels_last(calls) else _LOOP_CYCLES[mode]) if through else _STEP_CYCLES
        neighbours = _NEIGHBOURS[mode]
        work = each_output(
            gpu,
            planes * outputs,
            threads=_THREADS,
            a_thread=loops,
            moved_bytes=planes * (np.minimum(inputs, neighbours * outputs) + outputs) * element_bytes,
            instructions=_OFFSET_INSTRUCTIONS[calls.choice("layout")] / loops
            + (_LOOP_INSTRUCTIONS if through else _NEIGHBOUR_INSTRUCTIONS) * neighbours,
            flops=_FLOPS[mode],
            steps=loops,
            step_cycles=cycles,
        )
        return (work, fill_kernel(gpu, planes * outputs * element_bytes, np.full(calls.count, mode == "bicubic")))


class InterpolateBackward(_Interpolate):
    """Gradient of interpolate. Nearest: an input sums its outputs; else outputs are added to zeros by atomics."""

    op = "interpolate_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        planes, inputs, outputs = cls._pixels(calls)
        mode, element_bytes = calls.choice("mode"), calls.dtype.act_bytes
        moved = planes * (inputs + outputs) * element_bytes
        offsets = _OFFSET_INSTRUCTIONS[calls.choice("layout")]
        if mode == "nearest":
            met = np.maximum(1.0, outputs / inputs)
            # channels first, a thread loops over all images
            loops = calls["batch"] if not channels_last(calls) else np.ones_like(planes)
            instructions = (2 * offsets + _NEIGHBOUR_INSTRUCTIONS * met) if channels_last(calls) else 12 * met
            work = each_output(gpu, planes * inputs, threads=_THREADS / 2, a_thread=loops, moved_bytes=moved,
                               instructions=instructions, flops=met, steps=loops * met,
                               step_cycles=_STEP_CYCLES if channels_last(calls) else _GATHERED_CYCLES)  # fmt: skip
            return (work,)
        adds = _NEIGHBOURS[mode]
        atomic = _ATOMIC_INSTRUCTIONS[calls.choice("layout")] * np.full_like(planes, 0.7 if element_bytes == 4 else 1.0)
        if element_bytes < 4 and not channels_last(calls):  # lanes of a warp add to the same addresses, serialised
            atomic *= np.maximum(1.0, calls["out_width"] / calls["width"] / 2) ** _CONTENTION
        loops = planes if mode == "bicubic" else np.ones_like(planes)
        work = each_output(
            gpu,
            planes * outputs,
            threads=_THREADS,
            a_thread=loops,
            moved_bytes=moved + planes * inputs * element_bytes,
            again_bytes=adds * planes * outputs * element_bytes,
            instructions=offsets + (_NEIGHBOUR_INSTRUCTIONS + atomic) * adds,
            flops=_FLOPS[mode],
            steps=loops,
            step_cycles=_ADDING_CYCLES if mode == "bicubic" else _STEP_CYCLES,
        )
        return (fill_kernel(gpu, planes * inputs * element_bytes), work)


class _Pad(SpatialKernel):
    """Parameters of both directions."""

    examples = (
        {"images": 2048, "height": 64, "width": 64, "out_height": 66, "out_width": 66},
        {"images": 512, "height": 128, "width": 128, "out_height": 134, "out_width": 134, "mode": "reflect"},
    )

    images: int = size("images times channels")
    height: int = size("rows of the input")
    width: int = size("columns of the input")
    out_height: int = size("rows of the padded image")
    out_width: int = size("columns of the padded image")
    mode: str = choice("padding mode", PADS, default="constant")

    @classmethod
    def _sizes(cls, calls: Calls) -> tuple[Array, Array]:
        """Elements of the inputs and of the padded images."""
        small, wide = calls["height"] * calls["width"], calls["out_height"] * calls["out_width"]
        return calls["images"] * small, calls["images"] * wide


class Pad(_Pad):
    """Padded images. Constant: the output is filled, then the image copied into it."""

    op = "pad"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        (inputs, outputs), element_bytes = cls._sizes(calls), calls.dtype.act_bytes
        if calls.choice("mode") == "constant":
            return (fill_kernel(gpu, outputs * element_bytes), _copied(gpu, inputs, element_bytes))
        return (_moved(gpu, outputs, (inputs + outputs) * element_bytes),)


class PadBackward(_Pad):
    """Gradient of pad. Constant: a copy of the inside; else the border's gradients are added by atomics."""

    op = "pad_backward"

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        (inputs, outputs), element_bytes = cls._sizes(calls), calls.dtype.act_bytes
        if calls.choice("mode") == "constant":
            return (_copied(gpu, inputs, element_bytes),)
        added = _moved(gpu, outputs, (2 * inputs + outputs) * element_bytes, _BORDER_ATOMIC_INSTRUCTIONS)
        return (fill_kernel(gpu, inputs * element_bytes), added)


def _copied(gpu: Gpu, elements: Array, element_bytes: float) -> Work:
    """A strided copy: every offset is computed."""
    return each_output(gpu, elements, threads=_COPY_THREADS, a_thread=_COPY_ELEMENTS,
                       moved_bytes=2 * elements * element_bytes, instructions=_COPY_INSTRUCTIONS)  # fmt: skip


def _moved(gpu: Gpu, outputs: Array, moved_bytes: Array, more: float = 0.0) -> Work:
    """One thread per element of the padded image."""
    return each_output(gpu, outputs, threads=256.0, moved_bytes=moved_bytes, instructions=_BORDER_INSTRUCTIONS + more,
                       steps=2.0, step_cycles=_STEP_CYCLES)  # fmt: skip
