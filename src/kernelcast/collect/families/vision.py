"""Convolutions and layers over feature maps of vision, audio, video and diffusion models, and random ones between."""

from __future__ import annotations

import math

from kernelcast.collect.sampling import SHAPES, Draw, Drawn, Table

_MOST_ELEMENTS = 2**27  # of the input or the output of a call: 256 MiB in 16 bits
_MOST_FLOPS = 6e11  # of a call: about 2 ms of an H200 in TF32
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DTYPES = ("bf16", "bf16", "bf16", "fp16", "tf32", "tf32")
_MAP_DTYPES = ("bf16", "bf16", "bf16", "fp16", "fp32")
_FORWARD, _GRADIENTS = ("conv2d",), ("conv2d_dgrad", "conv2d_wgrad")

_CONVOLUTIONS = SHAPES["convolutions"]
_NETWORKS = ("resnet", "resnet", "vgg", "mobile", "mobile", "inception", "diffusion", "diffusion", "segmentation", None)


def _densenet(draw: Draw) -> tuple[int, int, int, int, int]:
    side, first, layers = draw.pick(((56, 64, 6), (28, 128, 12), (14, 256, 24), (7, 512, 16)))
    if draw.chance(0.3):
        return 128, 32, side, 3, 1
    channels = first + 32 * draw.pick(range(layers + 1))
    return channels, channels // 2 if draw.chance(0.15) else 128, side, 1, 1


def _real(draw: Draw) -> Drawn:
    """A layer of a model, of images of its size or of a near one."""
    network = draw.pick(_NETWORKS)
    c, k, side, kernel, stride = draw.pick(_CONVOLUTIONS[network]) if network else _densenet(draw)
    if side > 1 and draw.chance(0.35):
        side = max(1, round(side * draw.pick((0.5, 0.75, 8 / 7, 1.25, 1.5, 2))))
    width = side if draw.chance(0.9) else max(1, round(side * draw.pick((0.5, 0.75, 4 / 3, 2))))
    return _planes(c, k, side, width, kernel, stride, kernel // 2)


def _planes(c: int, k: int, height: int, width: int, kernel: int, stride: int, padding: int) -> Drawn:
    return {"in_channels": c, "out_channels": k, "height": height, "width": width, "kernel_h": kernel,
            "kernel_w": kernel, "stride": stride, "padding": padding}  # fmt: skip


def _special(draw: Draw) -> Drawn:
    """Patches, merges of pixels, dilated filters and filters of one row or column."""
    layer = draw.pick(("patch", "patch", "merge", "dilated", "dilated", "line"))
    if layer == "patch":
        k, side, kernel = draw.pick(SHAPES["patches"]["layers"])
        return _planes(3, k, side, side, kernel, kernel, 0)
    if layer == "merge":
        c, k, side, pixels = draw.pick(SHAPES["merges"]["layers"])
        return _planes(c, k, side, side, pixels, pixels, 0)
    if layer == "dilated":
        c, k, side = draw.pick(((2048, 256, 28), (2048, 256, 33), (2048, 256, 65), (512, 512, 33), (512, 512, 28),
                                (256, 256, 65), (960, 256, 33), (320, 256, 65)))  # fmt: skip
        step = draw.pick((2, 2, 4, 6, 12, 18, 24, 36))
        return _planes(c, k, side, side, 3, 1, step) | {"dilation": step}
    c, k, length = draw.pick(((192, 192, 7), (128, 128, 7), (160, 192, 7), (384, 384, 3), (64, 64, 5)))
    side = draw.pick((8, 17, 17, 35))
    across = draw.chance(0.5)
    sizes = _planes(c, k, side, side, 1, 1, 0)
    names = ("kernel_w", "padding_w") if across else ("kernel_h", "padding")
    sizes |= {names[0]: length, names[1]: length // 2}
    return sizes if across else sizes | {"padding_w": 0}


def _random(draw: Draw) -> Drawn:
    side = draw.size(4, 256) if draw.chance(0.5) else draw.pick((7, 8, 14, 16, 20, 28, 32, 40, 56, 64, 80, 112, 128))
    kernel = draw.pick((1, 1, 1, 1, 3, 3, 3, 3, 3, 5, 7, 2, 4))
    most = 2048 if kernel == 1 else 1280 if kernel == 3 else 256  # as models have them
    channels = [draw.size(8, most, draw.pick((1, 8, 8, 16, 32, 32, 64, 64))) for _ in range(2)]
    if draw.chance(0.08):
        channels[0] = draw.pick((1, 2, 3, 3, 4, 6))
    stride = draw.pick((1, 1, 1, 2)) if kernel % 2 else draw.pick((kernel, 2))
    return _planes(channels[0], channels[1], side, side, kernel, stride, kernel // 2 if kernel % 2 else 0)


def _batched(draw: Draw, sizes: Drawn, most: int = 256) -> int:
    """Images: as many as drawn, halved until the call is short."""
    outputs, inputs = 1.0, 1.0
    for name, stride in (("depth", "stride_d"), ("height", "stride"), ("width", "stride_w")):
        length = sizes.get(name, 1)
        inputs *= length
        outputs *= max(1, length / sizes.get(stride, sizes["stride"] if stride == "stride_w" else 1))
    taps = sizes["kernel_h"] * sizes["kernel_w"] * sizes.get("kernel_d", 1)
    c, k = sizes["in_channels"], sizes["out_channels"]
    flops = 2 * outputs * k * c / sizes.get("groups", 1) * taps
    fits = min(_MOST_FLOPS / flops, _MOST_ELEMENTS / max(inputs * c, outputs * k))
    batch = draw.pick([b for b in _BATCHES if b <= most]) if draw.chance(0.7) else draw.size(1, most)
    while batch > 1 and batch > fits:
        batch //= 2
    return batch


def _call(draw: Draw, ops: tuple[str, ...], sizes: Drawn, *, most: int = 256, last: float = 0.35) -> Drawn:
    """``last``: the share of calls with channels last."""
    precision = {"dtype": "fp32", "tf32": "off"} if draw.chance(0.03) else {"dtype": draw.pick(_DTYPES)}
    return {"op": draw.pick(ops), "batch": _batched(draw, sizes, most), **sizes,
            "layout": "nhwc" if draw.chance(last) else "nchw", **precision, "stack": "torch"}  # fmt: skip


def _dense(draw: Draw, ops: tuple[str, ...]) -> Drawn:
    source = draw.pick(("real",) * 13 + ("special",) * 2 + ("random",) * 5)
    sizes = {"real": _real, "special": _special, "random": _random}[source](draw)
    if sizes["in_channels"] <= 3:  # the gradient of an image is not needed
        ops = tuple(op for op in ops if op != "conv2d_dgrad")
    return _call(draw, ops, sizes)


def _grouped(draw: Draw) -> Drawn:
    """Depthwise and grouped filters."""
    depthwise = draw.chance(0.68)
    if draw.chance(0.75):
        if depthwise:
            c, side, kernel, stride = draw.pick(SHAPES["depthwise"]["layers"])
            members = 1
        else:
            c, side, kernel, stride, members = draw.pick(SHAPES["grouped"]["layers"])
        side = max(kernel // 2 + 1, round(side * draw.pick((1, 1, 1, 1, 0.5, 8 / 7, 1.5, 2))))
    else:
        members = 1 if depthwise else draw.pick((2, 4, 8, 8, 16, 24, 32, 32, 64, 128))
        c = members * draw.size(2, min(64, max(4, 1536 // members))) if members > 1 else draw.size(16, 1536, 8)
        side, kernel, stride = draw.size(5, 160), draw.pick((3, 3, 3, 5, 5, 7, 7, 9)), draw.pick((1, 1, 1, 2))
    sizes = _planes(c, c, side, side, kernel, stride, kernel // 2) | {"groups": c // members}
    if draw.chance(0.04):
        sizes["out_channels"] = 2 * c
    if draw.chance(0.05):
        sizes |= {"dilation": 2, "padding": kernel // 2 * 2}
    # cuDNN compiles its depthwise kernels of channels last for each shape, which takes half a second
    return _call(draw, draw.pick((_FORWARD, _GRADIENTS)), sizes, last=0.17 if members == 1 else 0.3)


def _line(draw: Draw) -> Drawn:
    """One axis: speech, audio, sequences, as rows of one."""
    sorts = ("whisper", "wav2vec", "wav2vec", "depthwise", "depthwise", "vocoder", "random", "random")
    layer = "position" if draw.chance(0.05) else draw.pick(sorts)  # cuDNN takes 34 ms for one of eight sequences
    groups = dilation = 1
    if layer == "whisper":
        wide = draw.pick((384, 512, 768, 1024, 1280))
        c, k, length, kernel, stride = draw.pick(((80, wide, 3000, 3, 1), (wide, wide, 3000, 3, 2)))
        padding = 1
    elif layer == "wav2vec":
        at, seconds = draw.pick(range(7)), draw.pick((1, 5, 10, 10, 20, 30))
        kernel, stride = (10, 5) if at == 0 else (3 if at < 5 else 2, 2)
        c, k, padding = 1 if at == 0 else 512, 512, 0
        length = 16000 * seconds if at == 0 else 3200 * seconds // 2 ** (at - 1)
    elif layer == "position":
        c = k = draw.pick((768, 1024))
        length, kernel, stride, padding, groups = draw.pick((49, 149, 249, 499)), 128, 1, 64, 16
    elif layer == "depthwise":  # of state spaces (causal) and of Conformers
        c = k = groups = draw.pick((256, 512, 1024, 1536, 2048, 3072, 4096, 5120))
        kernel = draw.pick((4, 4, 4, 3, 15, 31))
        length, stride, padding = draw.pick((128, 256, 512, 1000, 1024, 2048, 4096)), 1, kernel // 2
        padding = kernel - 1 if kernel == 4 else padding
    elif layer == "vocoder":
        c = k = draw.pick((32, 64, 128, 256, 512))
        length, kernel, stride = draw.pick((256, 1024, 4096, 8192, 32768)), draw.pick((3, 7, 11)), 1
        dilation = draw.pick((1, 1, 3, 5))
        padding = kernel // 2 * dilation
    else:
        c, k = (draw.size(4, 2048, draw.pick((1, 8, 32, 64))) for _ in range(2))
        length, kernel, stride = draw.size(16, 65536), draw.pick((1, 3, 3, 5, 7, 9)), draw.pick((1, 1, 1, 2))
        padding = kernel // 2
    sizes = {"in_channels": c, "out_channels": k, "height": 1, "width": length, "kernel_h": 1, "kernel_w": kernel,
             "stride": 1, "padding": 0, "stride_w": stride, "padding_w": padding, "groups": groups}  # fmt: skip
    return _call(
        draw, draw.pick((_FORWARD, _FORWARD, _GRADIENTS)), sizes, most=1 if layer == "position" else 64, last=0.0
    )


def _volume(draw: Draw) -> Drawn:
    """Three axes: video and volumes."""
    layer = draw.pick(("video", "video", "parts", "patch", "volume", "random"))
    frames, groups, step = draw.pick((4, 8, 8, 16, 16, 32)), 1, 1
    if layer == "video":
        c, side = draw.pick(((64, 56), (128, 28), (256, 14), (512, 7), (64, 112)))
        k, kernel, stride = c * draw.pick((1, 1, 2)), (3, 3), draw.pick((1, 1, 2))
        frames, step = max(2, frames * 7 // side) if side < 14 else frames, stride
        if draw.chance(0.15):  # the first layer
            c, k, side, kernel, stride, step = 3, draw.pick((64, 45)), 112, draw.pick(((3, 7), (1, 7))), 2, 1
    elif layer == "parts":  # R(2+1)D and video diffusion: planes, then frames
        c, side = draw.pick(((64, 56), (144, 56), (230, 28), (288, 28), (460, 14), (576, 14), (320, 32), (640, 16)))
        k, kernel, stride = draw.pick((64, 128, 256, c)), draw.pick(((1, 3), (3, 1))), 1
    elif layer == "patch":
        k, side, c, at = draw.pick(((768, 224, 3, 16), (1024, 224, 3, 16), (1408, 224, 3, 14), (1536, 60, 16, 2)))
        kernel, stride, step = (draw.pick((1, 2)), at), at, 0
    elif layer == "volume":  # UNets of scans, decoders of video latents
        c, k = (draw.pick((1, 16, 32, 64, 96, 128, 256)) for _ in range(2))
        side = frames = draw.pick((16, 24, 32, 48, 64, 96))
        kernel, stride = draw.pick(((3, 3), (3, 3), (1, 1))), 1
    else:
        c, k = (draw.size(4, 768, draw.pick((1, 8, 32))) for _ in range(2))
        side, kernel, stride = draw.size(6, 96), draw.pick(((3, 3), (3, 3), (1, 1), (5, 5))), draw.pick((1, 1, 2))
        groups, step = (c if draw.chance(0.2) else 1), stride
        k = c if groups > 1 else k
    padding = 0 if layer == "patch" else kernel[1] // 2
    sizes = _planes(c, k, side, side, kernel[1], stride, padding) | {
        "depth": frames, "kernel_d": kernel[0], "stride_d": step or kernel[0],
        "padding_d": 0 if layer == "patch" else kernel[0] // 2, "groups": groups}  # fmt: skip
    return _call(draw, draw.pick((_FORWARD, _FORWARD, _GRADIENTS)), sizes, most=32, last=0.2)


def _transposed(draw: Draw) -> Drawn:
    """Forward of a transposed convolution: the input gradient of a strided convolution."""
    kernel, padding = draw.pick(((2, 0), (2, 0), (4, 1), (4, 1), (3, 1), (8, 2), (16, 4)))
    stride = max(2, kernel // 2)
    if draw.chance(0.25):  # vocoders and audio decoders, one axis
        c = draw.pick((32, 64, 128, 256, 512))
        length = draw.pick((128, 512, 1024, 4096, 16384)) * stride
        sizes = {"in_channels": c // 2, "out_channels": c, "height": 1, "width": length, "kernel_h": 1,
                 "kernel_w": kernel, "stride": 1, "padding": 0, "stride_w": stride, "padding_w": padding}  # fmt: skip
        return _call(draw, ("conv2d_dgrad",), sizes, most=64, last=0.0)
    out = draw.pick((64, 128, 256, 256, 512, 1024)) if draw.chance(0.6) else draw.size(8, 1024, 8)
    back = draw.pick((out, out // 2, max(1, out // 4), 3))
    side = draw.pick((4, 7, 8, 14, 16, 28, 32, 56, 64, 128)) * math.gcd(stride, 4)
    return _call(draw, ("conv2d_dgrad",), _planes(back, out, side, side, kernel, stride, padding), most=128)


def _conv(draw: Draw, op: str) -> Drawn:
    """Channels last, of any size."""
    side, kernel = draw.pick((7, 8, 14, 16, 28, 32, 56, 64, 112, 224)), draw.pick((1, 1, 3, 3, 3, 5, 7))
    channels = [draw.size(8, 2048, draw.pick((8, 32, 64))) for _ in range(2)]
    return {"op": op, "batch": draw.size(1, 128), "in_channels": channels[0], "out_channels": channels[1],
            "height": side, "width": side, "kernel_h": kernel, "kernel_w": kernel, "stride": draw.pick((1, 1, 2)),
            "padding": kernel // 2, "dtype": draw.pick(("bf16", "fp16", "tf32")), "stack": "torch"}  # fmt: skip


# ---- layers over feature maps


def _map(draw: Draw, most: int = _MOST_ELEMENTS) -> tuple[int, int, int]:
    """(images, channels, side) of a real network, or any."""
    if draw.chance(0.55):
        channels, side = draw.pick(SHAPES["feature_maps"]["layers"])
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
    dtype = draw.pick(_MAP_DTYPES)
    weights = {"weights": "fp32"} if dtype != "fp32" and draw.chance(0.5) else {}
    call = {"op": op, "batch": batch, "channels": channels, "spatial": side * side, **_layout(draw), "dtype": dtype,
            "training": op == "batch_norm_backward" or draw.chance(0.65), **weights, "stack": "torch"}  # fmt: skip
    variant = draw.pick(range(12))
    if variant == 0:  # instance norm: one image of all channels
        return call | {"batch": 1, "channels": batch * channels, "layout": "nchw", "training": True}
    if variant == 1:  # audio and points: long and thin, or no pixels at all
        return call | {"spatial": draw.pick((1, draw.size(100, 20000))), "channels": draw.size(16, 1024, 8),
                       "batch": draw.size(8, 256), "layout": "nchw"}  # fmt: skip
    return call


def _group_norm(draw: Draw, op: str) -> Drawn:
    batch, channels, side = _map(draw)
    groups = draw.pick((32, 32, 32, 8, 16, 1, 4))
    channels = max(groups, channels // groups * groups)
    return {"op": op, "batch": batch, "channels": channels, "spatial": side * side, "groups": groups,
            "dtype": draw.pick(_MAP_DTYPES), "stack": "torch"}  # fmt: skip


def _pooled(draw: Draw) -> Drawn:
    op = draw.pick(("max_pool", "max_pool", "avg_pool", "max_pool_backward", "max_pool_backward", "avg_pool_backward"))
    batch, channels, side = _map(draw, 2**26)
    window, stride, padding = draw.pick(
        ((3, 2, 1), (3, 2, 1), (2, 2, 0), (2, 2, 0), (3, 2, 0), (3, 1, 1), (5, 1, 2), (7, 7, 0), (4, 4, 0), (9, 1, 4))
    )
    window, stride = min(window, side), min(stride, side)
    call = {"op": op, "batch": batch, "channels": channels, "height": side, "width": side, "kernel_h": window,
            "kernel_w": window, "stride": stride, "padding": padding, **_layout(draw), "dtype": draw.pick(_MAP_DTYPES),
            "stack": "torch"}  # fmt: skip
    variant = draw.pick(range(10))
    if variant == 0:  # of a sequence
        return call | {"height": 1, "kernel_h": 1, "width": side * side, "layout": "nchw"}
    if variant == 1:  # of a video
        depth = draw.pick((4, 8, 16, 32))
        return call | {"depth": depth, "kernel_d": min(window, depth, 3), "batch": max(1, batch // depth),
                       "layout": "nchw"}  # fmt: skip
    return call


def _adaptive(draw: Draw) -> Drawn:
    batch, channels, side = _map(draw, 2**26)
    out = draw.pick((7, 6, 3, 2, 14))
    return {"op": draw.pick(("adaptive_avg_pool", "adaptive_avg_pool_backward")), "batch": batch, "channels": channels,
            "height": side, "width": side, "out_height": out, "out_width": out, **_layout(draw),
            "dtype": draw.pick(_MAP_DTYPES), "stack": "torch"}  # fmt: skip


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
            "dtype": draw.pick(_MAP_DTYPES), "stack": "torch"}  # fmt: skip


def _padded(draw: Draw) -> Drawn:
    batch, channels, side = _map(draw, 2**26)
    added = min(draw.pick((2, 2, 1, 4, 6, 6, 8)), 2 * (side - 1))
    return {"op": draw.pick(("pad", "pad", "pad_backward")), "images": batch * channels, "height": side, "width": side,
            "out_height": side + added, "out_width": side + added,
            "mode": draw.pick(("constant", "reflect", "reflect", "replicate")),
            "dtype": draw.pick(_MAP_DTYPES), "stack": "torch"}  # fmt: skip


def _moved(draw: Draw) -> Drawn:
    op = draw.pick(("roll", "channels_last", "channels_last", "channel_cat"))
    batch, channels, side = _map(draw)
    dtype = draw.pick(_MAP_DTYPES)
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
    "conv2d": (lambda draw: _conv(draw, "conv2d"), 2),
    "conv2d-backward": (lambda draw: _conv(draw, draw.pick(_GRADIENTS)), 1.5),
    "conv-forward": (lambda draw: _dense(draw, _FORWARD), 26),
    "conv-gradients": (lambda draw: _dense(draw, _GRADIENTS), 18),
    "conv-depthwise": (_grouped, 14),
    "conv-1d": (_line, 5),
    "conv-3d": (_volume, 5),
    "conv-transposed": (_transposed, 5),
    "batch-norm": (lambda draw: _normed(draw, "batch_norm"), 8),
    "batch-norm-backward": (lambda draw: _normed(draw, "batch_norm_backward"), 7),
    "group-norm": (lambda draw: _group_norm(draw, "group_norm"), 4.5),
    "group-norm-backward": (lambda draw: _group_norm(draw, "group_norm_backward"), 4.5),
    "pooling": (_pooled, 10),
    "adaptive-pooling": (_adaptive, 2),
    "interpolate": (_resized, 3),
    "padding": (_padded, 1.5),
    "layouts": (_moved, 2.5),
}
