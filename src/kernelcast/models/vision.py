"""The vision encoder of a model that reads images: a transformer over patches, and what projects its output to the
text model; read from the ``vision_config`` of a config.json.

The rules are those of the classes in transformers, of which every weight is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernelcast.models.fields import Fields
from kernelcast.models.layers import NormOp, norm_weights

_CHANNELS = 3
# preprocessor_config.json: max_pixels of Qwen2.5-VL is 16384 x 28 x 28, longest_edge of Qwen3-VL 16384 x 32 x 32
_QWEN_TOKENS = 16384


@dataclass(frozen=True)
class VisionEncoder:
    """An encoder over patches of pixels. ``weights``: all of it, the projection to the text model included."""

    hidden: int
    layers: int
    heads: int
    inter: int
    gated: bool  # of its feed-forward part
    activation: str
    norm: NormOp
    patch: int  # pixels of a side
    weights: int
    merge: int = 1  # patches of a side that become one token of the text model
    out_hidden: int = 0  # of a token of the text model
    image: int | None = None  # pixels of a side, where it is fixed
    full_layers: int | None = None  # layers whose attention is over all patches; None: all
    window: int | None = None  # pixels of a side that the others see
    pixels: int = 0  # numbers of a patch over its frames
    most_tokens: int = 0  # tokens of the largest image that the model's processor passes on; 0: not known

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def patches(self, side: int) -> int:
        """Patches of an image of so many pixels a side, in whole tokens of the text model."""
        return self.tokens(side) * self.merge**2

    def tokens(self, side: int) -> int:
        """Tokens of the text model for an image."""
        return (-(-(self.image or side) // (self.patch * self.merge))) ** 2

    @property
    def window_patches(self) -> int:
        """Patches in a window of attention."""
        return ((self.window or 0) // self.patch) ** 2


def _layers(v: Fields, norm: NormOp = "layernorm", gated: bool = False, bias: bool = True,
            activation: str = "gelu_pytorch_tanh") -> VisionEncoder:  # fmt: skip
    """The layers alone: attention with four square matrices, a feed-forward block, two norms."""
    sizes = v.counts(
        hidden="vt_hidden_size, hidden_size",
        layers="vt_num_hidden_layers, depth, num_hidden_layers",
        heads="vt_num_attention_heads, num_heads, num_attention_heads",
        inter="vt_intermediate_size, intermediate_size",
    )
    hidden, inter, ups = sizes["hidden"], sizes["inter"], 2 if gated else 1
    matrices = 4 * hidden**2 + (ups + 1) * hidden * inter
    biases = 4 * hidden + ups * inter + hidden if bias else 0
    weights = sizes["layers"] * (matrices + biases + 2 * norm_weights(norm, hidden))
    return VisionEncoder(
        **sizes, gated=gated, activation=activation, norm=norm, patch=v.count("patch_size"), weights=weights
    )


def _with(layers: VisionEncoder, merge: int, out_hidden: int, *weights: int, **more: Any) -> VisionEncoder:
    """The encoder with the ``weights`` before and after its layers."""
    return replace(layers, merge=merge, out_hidden=out_hidden, weights=layers.weights + sum(weights), **more)


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _merger(hidden: int, merge: int, out: int, norm: int) -> int:
    """Neighbouring patches side by side through two products."""
    wide = hidden * merge**2
    return norm + _linear(wide, wide) + _linear(wide, out)


def _pixels(v: Fields) -> int:
    """Numbers of a patch over its frames."""
    return _CHANNELS * v.count("temporal_patch_size") * v.count("patch_size") ** 2


def _qwen2_5_vl(v: Fields, text_hidden: int) -> VisionEncoder:
    """RMSNorms, a gated block, and windows in all but a few layers."""
    base = _layers(v, "rmsnorm", True, activation=v.activation("hidden_act"))
    merge, out = v.count("spatial_merge_size"), v.count("out_hidden_size")
    weights = _pixels(v) * base.hidden + _merger(base.hidden, merge, out, base.hidden)
    full_layers = len(v.integers("fullatt_block_indexes"))
    return _with(base, merge, out, weights, full_layers=full_layers, window=v.count("window_size"),
                 pixels=_pixels(v), most_tokens=_QWEN_TOKENS)  # fmt: skip


def _qwen3_vl(v: Fields, text_hidden: int) -> VisionEncoder:
    """Qwen3-VL feeds the output of some layers to the text model too, each through a merger; Qwen3.5 does not."""
    base = _layers(v, activation=v.activation("hidden_act"))
    merge, out = v.count("spatial_merge_size"), v.count("out_hidden_size")
    before = _linear(_pixels(v), base.hidden) + v.count("num_position_embeddings") * base.hidden
    merger = _merger(base.hidden, merge, out, 2 * base.hidden)
    deepstack = _merger(base.hidden, merge, out, 2 * base.hidden * merge**2)
    deep = len(v.integers("deepstack_visual_indexes")) * deepstack
    return _with(base, merge, out, before, merger, deep, pixels=_pixels(v), most_tokens=_QWEN_TOKENS)


def _kimi(v: Fields, text_hidden: int) -> VisionEncoder:
    """MoonViT: learned positions of a grid, a last norm, and a merger of 2 x 2 patches."""
    base, sides = _layers(v), v.integers("merge_kernel_size")
    if len(set(sides)) != 1:
        raise v.refuse(f"'merge_kernel_size' is {list(sides)}; it has to be two equal numbers")
    grid = v.count("init_pos_emb_height") * v.count("init_pos_emb_width")
    before = _linear(_CHANNELS * base.patch**2, base.hidden) + grid * base.hidden + 2 * base.hidden
    merger = _merger(v.count("mm_hidden_size"), sides[0], text_hidden, 2 * v.count("mm_hidden_size"))
    return _with(base, sides[0], text_hidden, before, merger)


def _pixtral(v: Fields, text_hidden: int) -> VisionEncoder:
    """Mistral's: RMSNorms, gated, no biases; patches are merged before they are projected."""
    base = _layers(v, "rmsnorm", True, False, v.activation("hidden_act"))
    merge, bias = v.count("spatial_merge_size"), v.flag("multimodal_projector_bias")
    before = _CHANNELS * base.patch**2 * base.hidden + base.hidden
    merged = base.hidden + base.hidden * merge**2 * base.hidden
    projected = _linear(base.hidden, text_hidden, bias) + _linear(text_hidden, text_hidden, bias)
    return _with(base, merge, text_hidden, before, merged, projected)


def _siglip(v: Fields, text_hidden: int) -> VisionEncoder:
    """Gemma 3: a fixed image, pooled to mm_tokens_per_image tokens and projected."""
    base, image = _layers(v), v.count("image_size")
    grid = image // base.patch
    before = _linear(_CHANNELS * base.patch**2, base.hidden) + grid**2 * base.hidden
    after = 2 * base.hidden + base.hidden + base.hidden * text_hidden
    merge = grid // round(v.count("mm_tokens_per_image") ** 0.5)
    return _with(base, merge, text_hidden, before, after, image=image)


def _llama4(v: Fields, text_hidden: int) -> VisionEncoder:
    """A class token, learned positions, patches shuffled into channels and projected in three products."""
    base, image = _layers(v, activation="gelu"), v.count("image_size")
    merge = round(1 / float(v.value("pixel_shuffle_ratio") or 1))
    before = _CHANNELS * base.patch**2 * base.hidden + base.hidden + ((image // base.patch) ** 2 + 1) * base.hidden
    wide, out = v.count("projector_input_dim"), v.count("projector_output_dim")
    after = base.hidden * merge**2 * wide + out * out + v.count("vision_output_dim") * text_hidden
    return _with(base, merge, text_hidden, before, 4 * base.hidden, after, image=image)


def _minimax_m3(v: Fields, text_hidden: int) -> VisionEncoder:
    """A norm before the layers; each patch is projected by two products, then 2 x 2 of them by two more."""
    base = _layers(v, activation="gelu")
    merge, wide = v.count("spatial_merge_size"), v.count("projector_hidden_size")
    before = _pixels(v) * base.hidden + 2 * base.hidden
    projected = _linear(base.hidden, wide) + _linear(wide, text_hidden)
    merged = _linear(text_hidden * merge**2, wide) + _linear(wide, text_hidden)
    return _with(base, merge, text_hidden, before, projected, merged)


# by the model_type of the whole file
_READERS: dict[str, Callable[[Fields, int], VisionEncoder]] = {
    "gemma3": _siglip,
    **dict.fromkeys(("kimi_k25", "kimi_k3"), _kimi),
    "llama4": _llama4,
    "minimax_m3_vl": _minimax_m3,
    "mistral3": _pixtral,
    "qwen2_5_vl": _qwen2_5_vl,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), _qwen3_vl),
}
_OUTER = ("mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_size", "spatial_merge_size")


def read_vision(config: Mapping[str, object], name: str, text_hidden: int) -> VisionEncoder | None:
    """The vision encoder of a config.json; None where there is none, or none that is known here."""
    vision, model_type = config.get("vision_config"), str(config["model_type"])
    if not isinstance(vision, Mapping) or model_type not in _READERS:
        return None
    outer = {key: config[key] for key in _OUTER if key in config}
    return _READERS[model_type](Fields({**outer, **vision}, name, f"{model_type}, images"), text_hidden)
