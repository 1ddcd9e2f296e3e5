"""Layers over feature maps: of convolutional networks, UNets and autoencoders, detectors, and random ones between."""

from __future__ import annotations

from kernelcast.collect.families.table import Drawn, Table
from kernelcast.collect.shapes import Draw

_MOST_ELEMENTS = 2**27  # of a feature map: 256 MiB in 16 bits
# (channels, side) of maps that are normalised or pooled in real networks
_MAPS = (
    (64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7),
    (32, 112), (96, 112), (24, 56), (144, 56), (192, 28), (240, 28), (384, 14), (576, 14), (960, 7), (1280, 7),
    (64, 224), (128, 112), (512, 56), (32, 56), (160, 28), (672, 14), (1152, 14), (1024, 7), (48, 150), (640, 10),
    (320, 64), (640, 32), (1280, 16), (1280, 8), (320, 32), (128, 512), (128, 256), (256, 256), (512, 128), (512, 64),
    (64, 572), (128, 284), (256, 140), (512, 68), (1024, 32), (32, 160), (256, 80), (512, 40), (1024, 20),
)  # fmt: skip
_DTYPES = ("bf16", "bf16", "bf16", "fp16", "fp32")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _map(draw: Draw, most: int = _MOST_ELEMENTS) -> tuple[int, int, int]:
    """(images, channels, side) of a real network, or any."""
    if draw.chance(0.55):
        channels, side = draw.pick(_MAPS)
        batch = draw.pick(_BATCHES)
    else:
        side = draw.size(4, 256, draw.pick((1, 1, 2, 8)))
        channels = draw.size(8, 2048, draw.pick((1, 8, 8, 32, 64)))
        batch = draw.size(1, 256) if draw.chance(0.5) else draw.pick(_BATCHES)
    return max(1, min(batch, most // (channels * side * side))), channels, side


def _layout(draw: Draw) -> Drawn:
    return {"layout": draw.pick(("nchw", "nchw", "nhwc"))}


def _normed(draw: Draw, op: str) -> Drawn:
    batch, channels, side = _map(draw)
    dtype = draw.pick(_DTYPES)
    weights = {"weights": "fp32"} if dtype != "fp32" and draw.chance(0.5) else {}
    call = {"op": op, "batch": batch, "channels": channels, "spatial": side * side, **_layout(draw), "dtype": dtype,
            "training": op == "batch_norm_backward" or draw.chance(0.65), **weights, "stack": "torch"}  # fmt: skip
    kind = draw.pick(range(12))
    if kind == 0:  # instance norm: one image of all channels
        return call | {"batch": 1, "channels": batch * channels, "layout": "nchw", "training": True}
    if kind == 1:  # audio and points: long and thin, or no pixels at all
        return call | {"spatial": draw.pick((1, draw.size(100, 20000))), "channels": draw.size(16, 1024, 8),
                       "batch": draw.size(8, 256), "layout": "nchw"}  # fmt: skip
    return call


def _grouped(draw: Draw, op: str) -> Drawn:
    batch, channels, side = _map(draw)
    groups = draw.pick((32, 32, 32, 8, 16, 1, 4))
    channels = max(groups, channels // groups * groups)
    return {"op": op, "batch": batch, "channels": channels, "spatial": side * side, "groups": groups,
            "dtype": draw.pick(_DTYPES), "stack": "torch"}  # fmt: skip


def _pooled(draw: Draw) -> Drawn:
    op = draw.pick(("max_pool", "max_pool", "avg_pool", "max_pool_backward", "max_pool_backward", "avg_pool_backward"))
    batch, channels, side = _map(draw, 2**26)
    window, stride, padding = draw.pick(
        ((3, 2, 1), (3, 2, 1), (2, 2, 0), (2, 2, 0), (3, 2, 0), (3, 1, 1), (5, 1, 2), (7, 7, 0), (4, 4, 0), (9, 1, 4))
    )
    window, stride = min(window, side), min(stride, side)
    call = {"op": op, "batch": batch, "channels": channels, "height": side, "width": side, "kernel_h": window,
            "kernel_w": window, "stride": stride, "padding": padding, **_layout(draw), "dtype": draw.pick(_DTYPES),
            "stack": "torch"}  # fmt: skip
    kind = draw.pick(range(10))
    if kind == 0:  # of a sequence
        return call | {"height": 1, "kernel_h": 1, "width": side * side, "layout": "nchw"}
    if kind == 1:  # of a video
        depth = draw.pick((4, 8, 16, 32))
        return call | {"depth": depth, "kernel_d": min(window, depth, 3), "batch": max(1, batch // depth),
                       "layout": "nchw"}  # fmt: skip
    return call


def _adaptive(draw: Draw) -> Drawn:
    batch, channels, side = _map(draw, 2**26)
    out = draw.pick((7, 6, 3, 2, 14))
    return {"op": draw.pick(("adaptive_avg_pool", "adaptive_avg_pool_backward")), "batch": batch, "channels": channels,
            "height": side, "width": side, "out_height": out, "out_width": out, **_layout(draw),
            "dtype": draw.pick(_DTYPES), "stack": "torch"}  # fmt: skip


def _resized(draw: Draw) -> Drawn:
    batch, channels, side = _map(draw, 2**24)
    if draw.chance(0.15):  # scores of classes, to the size of the image
        channels, side, scale = draw.pick((1, 19, 21, 150)), draw.pick((28, 32, 64, 65, 128)), draw.pick((4.0, 8.0))
        batch = max(1, min(batch, 2**26 // int(channels * (side * scale) ** 2)))
    else:
        scale = draw.pick((8, 8, 8, 6, 2, 16)) / 4
    out = max(1, int(side * scale))
    return {"op": draw.pick(("interpolate", "interpolate", "interpolate_backward")), "batch": batch,
            "channels": channels, "height": side, "width": side, "out_height": out, "out_width": out,
            "mode": draw.pick(("nearest", "nearest", "bilinear", "bilinear", "bicubic")), **_layout(draw),
            "dtype": draw.pick(_DTYPES), "stack": "torch"}  # fmt: skip


def _padded(draw: Draw) -> Drawn:
    batch, channels, side = _map(draw, 2**26)
    added = min(draw.pick((2, 2, 1, 4, 6, 6, 8)), 2 * (side - 1))
    return {"op": draw.pick(("pad", "pad", "pad_backward")), "images": batch * channels, "height": side, "width": side,
            "out_height": side + added, "out_width": side + added,
            "mode": draw.pick(("constant", "reflect", "reflect", "replicate")),
            "dtype": draw.pick(_DTYPES), "stack": "torch"}  # fmt: skip


def _moved(draw: Draw) -> Drawn:
    op = draw.pick(("roll", "channels_last", "channels_last", "channel_cat"))
    batch, channels, side = _map(draw)
    dtype = draw.pick(_DTYPES)
    if op == "roll":
        axis = draw.pick((1, 2))
        inner = channels * side if axis == 1 else channels
        return {"op": op, "outer": batch * (1 if axis == 1 else side), "length": side, "inner": inner,
                "shift": draw.pick((3, 3, 4, 6, 12)), "dtype": dtype, "stack": "torch"}  # fmt: skip
    sizes = {"op": op, "batch": batch, "channels": channels, "spatial": side * side, "dtype": dtype, "stack": "torch"}
    if op == "channels_last":
        return sizes | {"to": draw.pick(("nhwc", "nchw"))}
    return sizes | {"parts": min(channels, draw.pick((2, 2, 3, 4, 8, 16, 24))), **_layout(draw)}


TABLE: Table = {
    "batch-norm": (lambda draw: _normed(draw, "batch_norm"), 8),
    "batch-norm-backward": (lambda draw: _normed(draw, "batch_norm_backward"), 7),
    "group-norm": (lambda draw: _grouped(draw, "group_norm"), 4.5),
    "group-norm-backward": (lambda draw: _grouped(draw, "group_norm_backward"), 4.5),
    "pooling": (_pooled, 10),
    "adaptive-pooling": (_adaptive, 2),
    "interpolate": (_resized, 3),
    "padding": (_padded, 1.5),
    "layouts": (_moved, 2.5),
}
