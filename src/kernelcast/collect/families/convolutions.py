"""Convolutions of vision, audio, video and diffusion models: layers of real ones, and random ones between."""

from __future__ import annotations

import math

from kernelcast.collect.families.table import Drawn, Table
from kernelcast.collect.shapes import Draw

_MOST_ELEMENTS = 2**27  # of the input or the output of a call
_MOST_FLOPS = 6e11  # of a call: about 2 ms of an H200 in TF32
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DTYPES = ("bf16", "bf16", "bf16", "fp16", "tf32", "tf32")
_FORWARD, _GRADIENTS = ("conv2d",), ("conv2d_dgrad", "conv2d_wgrad")

# (channels in, channels out, side of the input, side of the filter, stride); padded by half the filter
_RESNET = (
    (3, 64, 224, 7, 2), (64, 64, 56, 1, 1), (64, 64, 56, 3, 1), (64, 256, 56, 1, 1), (256, 64, 56, 1, 1),
    (256, 128, 56, 1, 1), (128, 128, 56, 3, 2), (128, 512, 28, 1, 1), (256, 512, 56, 1, 2), (512, 128, 28, 1, 1),
    (128, 128, 28, 3, 1), (512, 256, 28, 1, 1), (256, 256, 28, 3, 2), (256, 1024, 14, 1, 1), (512, 1024, 28, 1, 2),
    (1024, 256, 14, 1, 1), (256, 256, 14, 3, 1), (1024, 512, 14, 1, 1), (512, 512, 14, 3, 2), (512, 2048, 7, 1, 1),
    (1024, 2048, 14, 1, 2), (2048, 512, 7, 1, 1), (512, 512, 7, 3, 1), (64, 128, 56, 3, 2), (64, 128, 56, 1, 2),
)  # fmt: skip
_VGG = (
    (3, 64, 224, 3, 1), (64, 64, 224, 3, 1), (64, 128, 112, 3, 1), (128, 128, 112, 3, 1), (128, 256, 56, 3, 1),
    (256, 256, 56, 3, 1), (256, 512, 28, 3, 1), (512, 512, 28, 3, 1), (512, 512, 14, 3, 1), (64, 192, 27, 5, 1),
)  # fmt: skip
_MOBILE = (  # MobileNet and EfficientNet: stems, expansions, projections, gates of one pixel, fused blocks
    (3, 32, 224, 3, 2), (3, 24, 384, 3, 2), (32, 16, 112, 1, 1), (16, 96, 112, 1, 1), (96, 24, 56, 1, 1),
    (24, 144, 56, 1, 1), (144, 40, 28, 1, 1), (40, 240, 28, 1, 1), (240, 80, 14, 1, 1), (80, 480, 14, 1, 1),
    (480, 112, 14, 1, 1), (112, 672, 14, 1, 1), (672, 192, 7, 1, 1), (192, 1152, 7, 1, 1), (1152, 320, 7, 1, 1),
    (320, 1280, 7, 1, 1), (96, 4, 1, 1, 1), (4, 96, 1, 1, 1), (240, 10, 1, 1, 1), (1152, 48, 1, 1, 1),
    (48, 1152, 1, 1, 1), (960, 240, 1, 1, 1), (24, 24, 192, 3, 1), (24, 96, 192, 3, 2), (48, 192, 96, 3, 1),
    (192, 48, 96, 1, 1), (80, 320, 48, 3, 1), (320, 80, 48, 1, 1), (160, 640, 24, 1, 1), (176, 1056, 24, 1, 1),
    (1824, 304, 12, 1, 1), (160, 960, 7, 1, 1),
)  # fmt: skip
_INCEPTION = (
    (32, 64, 147, 3, 1), (64, 96, 35, 3, 1), (96, 96, 35, 3, 1), (48, 64, 35, 5, 1), (768, 192, 17, 1, 1),
    (768, 128, 17, 1, 1), (2048, 320, 8, 1, 1), (448, 384, 8, 3, 1), (288, 384, 35, 3, 2), (80, 192, 73, 3, 1),
)  # fmt: skip
_DIFFUSION = (  # UNets of latent diffusion, decoders of their latents
    (4, 320, 64, 3, 1), (320, 320, 64, 3, 1), (320, 320, 64, 3, 2), (320, 640, 32, 3, 1), (640, 640, 32, 3, 1),
    (640, 1280, 16, 3, 1), (1280, 1280, 16, 3, 1), (1280, 1280, 16, 3, 2), (1280, 1280, 8, 3, 1), (2560, 1280, 8, 3, 1),
    (2560, 1280, 16, 3, 1), (1920, 1280, 16, 3, 1), (1920, 640, 32, 3, 1), (1280, 640, 32, 3, 1), (960, 640, 32, 3, 1),
    (960, 320, 64, 3, 1), (640, 320, 64, 3, 1), (320, 320, 64, 1, 1), (640, 640, 32, 1, 1), (2560, 1280, 16, 1, 1),
    (320, 4, 64, 3, 1), (4, 512, 64, 3, 1), (512, 512, 64, 3, 1), (512, 512, 128, 3, 1), (512, 256, 256, 3, 1),
    (256, 256, 256, 3, 1), (256, 128, 512, 3, 1), (128, 128, 512, 3, 1), (128, 3, 512, 3, 1),
)  # fmt: skip
_SEGMENTED = (  # UNets of images, detectors
    (1, 64, 256, 3, 1), (3, 64, 256, 3, 1), (64, 64, 256, 3, 1), (64, 128, 128, 3, 1), (256, 128, 128, 3, 1),
    (256, 512, 32, 3, 1), (1024, 512, 32, 3, 1), (512, 1024, 16, 3, 1), (64, 2, 256, 1, 1), (64, 21, 256, 1, 1),
    (3, 32, 640, 3, 2), (64, 128, 160, 3, 2), (128, 128, 80, 3, 1), (256, 256, 40, 3, 1), (512, 512, 20, 3, 1),
    (256, 255, 80, 1, 1), (256, 256, 100, 3, 1), (256, 256, 50, 3, 1),
)  # fmt: skip
# (channels out, side of the image, side of a patch), without padding
_PATCHES = (
    (768, 224, 16), (1024, 224, 16), (192, 224, 16), (384, 224, 16), (768, 224, 32), (768, 384, 16), (1280, 224, 14),
    (1024, 336, 14), (1152, 384, 14), (768, 224, 14), (96, 224, 4), (128, 224, 4), (192, 224, 4),
)  # fmt: skip
# (channels in, channels out, side of the input, pixels of a side that become one)
_MERGES = (
    (96, 192, 56, 2), (192, 384, 28, 2), (384, 768, 14, 2), (128, 256, 56, 2), (256, 512, 28, 2), (512, 1024, 14, 2),
    (192, 384, 56, 2), (384, 768, 28, 2), (768, 1536, 14, 2), (64, 64, 128, 8), (128, 128, 64, 4), (320, 320, 32, 2),
    (32, 32, 128, 8), (160, 160, 32, 2),
)  # fmt: skip
# (channels, side of the input, side of the filter, stride)
_DEPTHWISE = (
    (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 3, 2), (144, 56, 5, 2), (192, 28, 3, 1),
    (192, 28, 3, 2), (240, 28, 5, 1), (240, 28, 3, 2), (384, 14, 3, 1), (480, 14, 3, 1), (480, 14, 5, 1),
    (576, 14, 3, 1), (576, 14, 3, 2), (672, 14, 5, 1), (672, 14, 5, 2), (960, 7, 3, 1), (960, 7, 5, 1),
    (1152, 7, 5, 1), (1152, 7, 3, 1), (16, 112, 3, 1), (64, 112, 3, 2), (72, 56, 3, 1), (72, 56, 5, 2), (120, 28, 5, 1),
    (640, 24, 3, 1), (1056, 24, 3, 1), (1056, 24, 3, 2), (1824, 12, 3, 1), (768, 14, 3, 1), (256, 56, 3, 1),
    (512, 28, 3, 1), (1024, 14, 3, 1), (384, 28, 31, 1), (128, 56, 31, 1),
    (96, 56, 7, 1), (192, 28, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1), (128, 56, 7, 1), (256, 28, 7, 1),
    (512, 14, 7, 1), (1024, 7, 7, 1), (192, 56, 7, 1), (384, 28, 7, 1), (768, 14, 7, 1), (1536, 7, 7, 1),
)  # fmt: skip
# (channels, side of the input, side of the filter, stride, channels of a group)
_GROUPED = (
    (128, 56, 3, 1, 4), (256, 56, 3, 2, 8), (256, 28, 3, 1, 8), (512, 28, 3, 2, 16), (512, 14, 3, 1, 16),
    (1024, 14, 3, 2, 32), (1024, 7, 3, 1, 32), (256, 56, 3, 1, 4), (512, 28, 3, 1, 8), (1024, 14, 3, 1, 16),
    (2048, 7, 3, 1, 32), (256, 56, 3, 1, 8), (512, 56, 3, 2, 16), (2048, 14, 3, 2, 64), (224, 56, 3, 1, 112),
    (448, 28, 3, 1, 112), (896, 14, 3, 1, 112), (48, 56, 3, 1, 8), (120, 28, 3, 1, 8), (336, 14, 3, 1, 8),
    (72, 56, 3, 1, 24), (216, 28, 3, 1, 24), (576, 14, 3, 1, 24), (528, 56, 3, 2, 264), (1056, 28, 3, 1, 264),
    (240, 28, 1, 1, 80), (256, 27, 5, 1, 128), (96, 56, 3, 1, 48), (224, 56, 3, 1, 56), (448, 56, 3, 2, 56),
    (448, 28, 3, 1, 56), (896, 14, 3, 1, 56), (2016, 7, 3, 1, 56),
)  # fmt: skip


def _densenet(draw: Draw) -> tuple[int, int, int, int, int]:
    side, first, layers = draw.pick(((56, 64, 6), (28, 128, 12), (14, 256, 24), (7, 512, 16)))
    if draw.chance(0.3):
        return 128, 32, side, 3, 1
    channels = first + 32 * draw.pick(range(layers + 1))
    return channels, channels // 2 if draw.chance(0.15) else 128, side, 1, 1


def _real(draw: Draw) -> Drawn:
    """A layer of a model, of images of its size or of a near one."""
    model = draw.pick((_RESNET, _RESNET, _VGG, _MOBILE, _MOBILE, _INCEPTION, _DIFFUSION, _DIFFUSION, _SEGMENTED, None))
    c, k, side, kernel, stride = draw.pick(model) if model else _densenet(draw)
    if side > 1 and draw.chance(0.35):
        side = max(1, round(side * draw.pick((0.5, 0.75, 8 / 7, 1.25, 1.5, 2))))
    width = side if draw.chance(0.9) else max(1, round(side * draw.pick((0.5, 0.75, 4 / 3, 2))))
    return _planes(c, k, side, width, kernel, stride, kernel // 2)


def _planes(c: int, k: int, height: int, width: int, kernel: int, stride: int, padding: int) -> Drawn:
    return {"in_channels": c, "out_channels": k, "height": height, "width": width, "kernel_h": kernel,
            "kernel_w": kernel, "stride": stride, "padding": padding}  # fmt: skip


def _special(draw: Draw) -> Drawn:
    """Patches, merges of pixels, dilated filters and filters of one row or column."""
    kind = draw.pick(("patch", "patch", "merge", "dilated", "dilated", "line"))
    if kind == "patch":
        k, side, kernel = draw.pick(_PATCHES)
        return _planes(3, k, side, side, kernel, kernel, 0)
    if kind == "merge":
        c, k, side, pixels = draw.pick(_MERGES)
        return _planes(c, k, side, side, pixels, pixels, 0)
    if kind == "dilated":
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
    kind = {"dtype": "fp32", "tf32": "off"} if draw.chance(0.03) else {"dtype": draw.pick(_DTYPES)}
    return {"op": draw.pick(ops), "batch": _batched(draw, sizes, most), **sizes,
            "layout": "nhwc" if draw.chance(last) else "nchw", **kind, "stack": "torch"}  # fmt: skip


def _dense(draw: Draw, ops: tuple[str, ...]) -> Drawn:
    kind = draw.pick(("real",) * 13 + ("special",) * 2 + ("random",) * 5)
    sizes = {"real": _real, "special": _special, "random": _random}[kind](draw)
    if sizes["in_channels"] <= 3:  # nobody asks for the gradient of an image
        ops = tuple(op for op in ops if op != "conv2d_dgrad")
    return _call(draw, ops, sizes)


def _grouped(draw: Draw) -> Drawn:
    """Depthwise and grouped filters."""
    depthwise = draw.chance(0.68)
    if draw.chance(0.75):
        if depthwise:
            c, side, kernel, stride = draw.pick(_DEPTHWISE)
            members = 1
        else:
            c, side, kernel, stride, members = draw.pick(_GROUPED)
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
    kinds = ("whisper", "wav2vec", "wav2vec", "depthwise", "depthwise", "vocoder", "random", "random")
    kind = "position" if draw.chance(0.05) else draw.pick(kinds)  # cuDNN takes 34 ms for one of eight sequences
    groups = dilation = 1
    if kind == "whisper":
        wide = draw.pick((384, 512, 768, 1024, 1280))
        c, k, length, kernel, stride = draw.pick(((80, wide, 3000, 3, 1), (wide, wide, 3000, 3, 2)))
        padding = 1
    elif kind == "wav2vec":
        at, seconds = draw.pick(range(7)), draw.pick((1, 5, 10, 10, 20, 30))
        kernel, stride = (10, 5) if at == 0 else (3 if at < 5 else 2, 2)
        c, k, padding = 1 if at == 0 else 512, 512, 0
        length = 16000 * seconds if at == 0 else 3200 * seconds // 2 ** (at - 1)
    elif kind == "position":
        c = k = draw.pick((768, 1024))
        length, kernel, stride, padding, groups = draw.pick((49, 149, 249, 499)), 128, 1, 64, 16
    elif kind == "depthwise":  # of state spaces (causal) and of Conformers
        c = k = groups = draw.pick((256, 512, 1024, 1536, 2048, 3072, 4096, 5120))
        kernel = draw.pick((4, 4, 4, 3, 15, 31))
        length, stride, padding = draw.pick((128, 256, 512, 1000, 1024, 2048, 4096)), 1, kernel // 2
        padding = kernel - 1 if kernel == 4 else padding
    elif kind == "vocoder":
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
        draw, draw.pick((_FORWARD, _FORWARD, _GRADIENTS)), sizes, most=1 if kind == "position" else 64, last=0.0
    )


def _volume(draw: Draw) -> Drawn:
    """Three axes: video and volumes."""
    kind = draw.pick(("video", "video", "parts", "patch", "volume", "random"))
    frames, groups, step = draw.pick((4, 8, 8, 16, 16, 32)), 1, 1
    if kind == "video":
        c, side = draw.pick(((64, 56), (128, 28), (256, 14), (512, 7), (64, 112)))
        k, kernel, stride = c * draw.pick((1, 1, 2)), (3, 3), draw.pick((1, 1, 2))
        frames, step = max(2, frames * 7 // side) if side < 14 else frames, stride
        if draw.chance(0.15):  # the first layer
            c, k, side, kernel, stride, step = 3, draw.pick((64, 45)), 112, draw.pick(((3, 7), (1, 7))), 2, 1
    elif kind == "parts":  # R(2+1)D and video diffusion: planes, then frames
        c, side = draw.pick(((64, 56), (144, 56), (230, 28), (288, 28), (460, 14), (576, 14), (320, 32), (640, 16)))
        k, kernel, stride = draw.pick((64, 128, 256, c)), draw.pick(((1, 3), (3, 1))), 1
    elif kind == "patch":
        k, side, c, at = draw.pick(((768, 224, 3, 16), (1024, 224, 3, 16), (1408, 224, 3, 14), (1536, 60, 16, 2)))
        kernel, stride, step = (draw.pick((1, 2)), at), at, 0
    elif kind == "volume":  # UNets of scans, decoders of video latents
        c, k = (draw.pick((1, 16, 32, 64, 96, 128, 256)) for _ in range(2))
        side = frames = draw.pick((16, 24, 32, 48, 64, 96))
        kernel, stride = draw.pick(((3, 3), (3, 3), (1, 1))), 1
    else:
        c, k = (draw.size(4, 768, draw.pick((1, 8, 32))) for _ in range(2))
        side, kernel, stride = draw.size(6, 96), draw.pick(((3, 3), (3, 3), (1, 1), (5, 5))), draw.pick((1, 1, 2))
        groups, step = (c if draw.chance(0.2) else 1), stride
        k = c if groups > 1 else k
    padding = 0 if kind == "patch" else kernel[1] // 2
    sizes = _planes(c, k, side, side, kernel[1], stride, padding) | {
        "depth": frames, "kernel_d": kernel[0], "stride_d": step or kernel[0],
        "padding_d": 0 if kind == "patch" else kernel[0] // 2, "groups": groups}  # fmt: skip
    return _call(draw, draw.pick((_FORWARD, _FORWARD, _GRADIENTS)), sizes, most=32, last=0.2)


def _transposed(draw: Draw) -> Drawn:
    """Forward of a transposed convolution: the gradient of the input of one that makes images smaller."""
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


TABLE: Table = {
    "conv2d": (lambda draw: _conv(draw, "conv2d"), 2),
    "conv2d-backward": (lambda draw: _conv(draw, draw.pick(_GRADIENTS)), 1.5),
    "conv-forward": (lambda draw: _dense(draw, _FORWARD), 26),
    "conv-gradients": (lambda draw: _dense(draw, _GRADIENTS), 18),
    "conv-depthwise": (_grouped, 14),
    "conv-1d": (_line, 5),
    "conv-3d": (_volume, 5),
    "conv-transposed": (_transposed, 5),
}
