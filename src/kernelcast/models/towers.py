"""Reading the part of a config that describes images: each kind of tower from its own keys.

The rules are those of the classes in transformers, of which every weight is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kernelcast.models.fields import Fields
from kernelcast.models.layers import NormKind, norm_weights
from kernelcast.models.vision import VisionTower

_CHANNELS = 3


@dataclass(frozen=True)
class _Encoder:
    """The layers alone: attention with four square matrices, a feed-forward block, two norms."""

    hidden: int
    layers: int
    heads: int
    inter: int
    norm: NormKind = "layernorm"
    gated: bool = False
    bias: bool = True
    activation: str = "gelu_pytorch_tanh"

    @property
    def weights(self) -> int:
        ups = 2 if self.gated else 1
        matrices = 4 * self.hidden**2 + (ups + 1) * self.hidden * self.inter
        biases = 4 * self.hidden + ups * self.inter + self.hidden if self.bias else 0
        return self.layers * (matrices + biases + 2 * norm_weights(self.norm, self.hidden))

    def tower(self, patch: int, merge: int, out_hidden: int, around: int, **more: int | None) -> VisionTower:
        """With ``around`` weights before and behind the layers."""
        return VisionTower(
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            inter=self.inter,
            gated=self.gated,
            activation=self.activation,
            norm=self.norm,
            patch=patch,
            merge=merge,
            out_hidden=out_hidden,
            weights=self.weights + around,
            **more,
        )


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _merger(hidden: int, merge: int, out: int, norm: int) -> int:
    """Neighbouring patches side by side through two products."""
    wide = hidden * merge**2
    return norm + _linear(wide, wide) + _linear(wide, out)


def _qwen2_5_vl(v: Fields, text_hidden: int) -> VisionTower:
    """RMSNorms, a gated block, and windows in all but a few layers."""
    layers, full = v.count("depth"), v.whole_numbers("fullatt_block_indexes")
    one = _Encoder(v.count("hidden_size"), layers, v.count("num_heads"), v.count("intermediate_size"), "rmsnorm", True,
                   activation=v.activation("hidden_act"))  # fmt: skip
    patch, merge, out = v.count("patch_size"), v.count("spatial_merge_size"), v.count("out_hidden_size")
    pixels = _CHANNELS * v.count("temporal_patch_size") * patch**2
    around = pixels * one.hidden + _merger(one.hidden, merge, out, one.hidden)
    return one.tower(patch, merge, out, around, full_layers=len(full), window=v.count("window_size"))


def _qwen3_vl(v: Fields, text_hidden: int) -> VisionTower:
    """Qwen3-VL feeds some layers' output to the text part too, each through a merger of its own; Qwen3.5 does not."""
    one = _Encoder(v.count("hidden_size"), v.count("depth"), v.count("num_heads"), v.count("intermediate_size"),
                   activation=v.activation("hidden_act"))  # fmt: skip
    patch, merge, out = v.count("patch_size"), v.count("spatial_merge_size"), v.count("out_hidden_size")
    pixels = _CHANNELS * v.count("temporal_patch_size") * patch**2
    around = _linear(pixels, one.hidden) + v.count("num_position_embeddings") * one.hidden
    around += _merger(one.hidden, merge, out, 2 * one.hidden)
    deep = _merger(one.hidden, merge, out, 2 * one.hidden * merge**2)
    around += len(v.whole_numbers("deepstack_visual_indexes")) * deep
    return one.tower(patch, merge, out, around)


def _kimi(v: Fields, text_hidden: int) -> VisionTower:
    """MoonViT: learned positions of a grid, a last norm, and a merger of 2 x 2 patches."""
    one = _Encoder(v.count("vt_hidden_size"), v.count("vt_num_hidden_layers"), v.count("vt_num_attention_heads"),
                   v.count("vt_intermediate_size"))  # fmt: skip
    patch = v.count("patch_size")
    sides = v.whole_numbers("merge_kernel_size")
    if len(set(sides)) != 1:
        raise v.refuse(f"'merge_kernel_size' is {list(sides)}; it has to be two equal numbers")
    grid = v.count("init_pos_emb_height") * v.count("init_pos_emb_width")
    around = _linear(_CHANNELS * patch**2, one.hidden) + grid * one.hidden + 2 * one.hidden
    around += _merger(v.count("mm_hidden_size"), sides[0], text_hidden, 2 * v.count("mm_hidden_size"))
    return one.tower(patch, sides[0], text_hidden, around)


def _pixtral(v: Fields, text_hidden: int) -> VisionTower:
    """Mistral's: RMSNorms, gated, no biases; patches are merged before they are projected."""
    one = _Encoder(v.count("hidden_size"), v.count("num_hidden_layers"), v.count("num_attention_heads"),
                   v.count("intermediate_size"), "rmsnorm", True, False, v.activation("hidden_act"))  # fmt: skip
    patch, merge, bias = v.count("patch_size"), v.count("spatial_merge_size"), v.flag("multimodal_projector_bias")
    before = _CHANNELS * patch**2 * one.hidden + one.hidden
    merged = one.hidden + one.hidden * merge**2 * one.hidden
    projected = _linear(one.hidden, text_hidden, bias) + _linear(text_hidden, text_hidden, bias)
    return one.tower(patch, merge, text_hidden, before + merged + projected)


def _siglip(v: Fields, text_hidden: int) -> VisionTower:
    """Gemma 3: a fixed image, pooled to mm_tokens_per_image tokens and projected."""
    one = _Encoder(v.count("hidden_size"), v.count("num_hidden_layers"), v.count("num_attention_heads"),
                   v.count("intermediate_size"))  # fmt: skip
    patch, image = v.count("patch_size"), v.count("image_size")
    grid = image // patch
    side = round(v.count("mm_tokens_per_image") ** 0.5)
    before = _linear(_CHANNELS * patch**2, one.hidden) + grid**2 * one.hidden
    behind = 2 * one.hidden + one.hidden + one.hidden * text_hidden
    return one.tower(patch, grid // side, text_hidden, before + behind, image=image)


def _llama4(v: Fields, text_hidden: int) -> VisionTower:
    """A class token, learned positions, patches shuffled into channels and projected in three products."""
    one = _Encoder(v.count("hidden_size"), v.count("num_hidden_layers"), v.count("num_attention_heads"),
                   v.count("intermediate_size"), activation="gelu")  # fmt: skip
    patch, image = v.count("patch_size"), v.count("image_size")
    merge = round(1 / float(v.value("pixel_shuffle_ratio") or 1))
    before = _CHANNELS * patch**2 * one.hidden + one.hidden + ((image // patch) ** 2 + 1) * one.hidden
    wide, out = v.count("projector_input_dim"), v.count("projector_output_dim")
    behind = one.hidden * merge**2 * wide + out * out + v.count("vision_output_dim") * text_hidden
    return one.tower(patch, merge, text_hidden, before + 4 * one.hidden + behind, image=image)


def _minimax_m3(v: Fields, text_hidden: int) -> VisionTower:
    """A norm before the layers; each patch is projected by two products, then 2 x 2 of them by two more."""
    one = _Encoder(v.count("hidden_size"), v.count("num_hidden_layers"), v.count("num_attention_heads"),
                   v.count("intermediate_size"), activation="gelu")  # fmt: skip
    patch, merge, wide = v.count("patch_size"), v.count("spatial_merge_size"), v.count("projector_hidden_size")
    before = _CHANNELS * v.count("temporal_patch_size") * patch**2 * one.hidden + 2 * one.hidden
    projected = _linear(one.hidden, wide) + _linear(wide, text_hidden)
    merged = _linear(text_hidden * merge**2, wide) + _linear(wide, text_hidden)
    return one.tower(patch, merge, text_hidden, before + projected + merged)


# by the model_type of the whole file
TOWERS: dict[str, Callable[[Fields, int], VisionTower]] = {
    "gemma3": _siglip,
    "kimi_k25": _kimi,
    "kimi_k3": _kimi,
    "llama4": _llama4,
    "minimax_m3_vl": _minimax_m3,
    "mistral3": _pixtral,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
}
_OUTER = ("mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_size", "spatial_merge_size")


def tower(config: Mapping[str, object], name: str, model_type: str, text_hidden: int) -> VisionTower | None:
    """The tower of a file that describes one; None where there is none, or none that is known here."""
    found = config.get("vision_config")
    if not isinstance(found, Mapping) or model_type not in TOWERS:
        return None
    outer = {key: config[key] for key in _OUTER if key in config}
    return TOWERS[model_type](Fields({**outer, **found}, name, f"{model_type}, images"), text_hidden)
