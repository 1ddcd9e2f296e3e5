"""Number formats read from a checkpoint's own config."""

from __future__ import annotations

from typing import Any

import pytest

from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu
from kernelcast.models.catalogue import config
from kernelcast.models.config import parse
from kernelcast.models.precision import Precision


def stored(quantization: dict[str, Any], of: str = "llama-3.1-8b") -> Precision:
    return Precision.of(parse({**config(of)[1], "quantization_config": quantization}, "mine"))


def group(weights: tuple[int, str], inputs: tuple[int, str] | None, **more: Any) -> dict[str, Any]:
    kinds = [pair and {"num_bits": pair[0], "type": pair[1]} for pair in (weights, inputs)]
    return {"targets": ["Linear"], "weights": {**(kinds[0] or {}), **more}, "input_activations": kinds[1]}


def compressed(one: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": one}, "ignore": ["lm_head"], **more}


def quark(weights: str, inputs: str | None, size: int | None = 32, **more: Any) -> dict[str, Any]:
    """As AMD Quark writes it, --quant_scheme w_mxfp4_a_mxfp4 and the like."""
    tensors = [kind and {"dtype": kind, "group_size": size, "scale_format": "e8m0"} for kind in (weights, inputs)]
    everywhere = {"weight": tensors[0], "input_tensors": tensors[1], "output_tensors": None}
    return {"quant_method": "quark", "global_quant_config": everywhere, "exclude": ["lm_head"], **more}


FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor"}
EXPERTS_ALONE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@pytest.mark.parametrize(
    "quantization, label",
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["lm_head"]}, "int4"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": False}, "int4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        (compressed(group((8, "float"), (8, "float"), strategy="channel")), "fp8"),
        (compressed(group((8, "float"), (8, "float"), strategy="block")), "fp8_block"),
        (compressed(group((8, "int"), (8, "int"))), "int8"),
        (compressed(group((4, "int"), None, group_size=128)), "int4"),
        (compressed(group((4, "float"), (4, "float"), group_size=16)), "nvfp4"),
        (compressed(group((4, "float"), None, group_size=32), format="mxfp4-pack-quantized"), "mxfp4"),
        (compressed(group((4, "float"), (8, "float"), group_size=32), format="mxfp4-pack-quantized"), "mxfp4_fp8"),
        (compressed(group((4, "float"), (4, "float"), group_size=32), format="mxfp4-pack-quantized"), "w4a4_mxfp4"),
        (quark("fp4", None), "mxfp4"),
        (quark("fp4", "fp4"), "w4a4_mxfp4"),
        (quark("fp4", "fp8_e4m3"), "mxfp4_fp8"),
        (quark("fp8_e4m3", "fp8_e4m3", None), "fp8"),
        (
            quark("fp4", "fp4", layer_quant_config={"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}),
            "w4a4_mxfp4, KV cache fp8",
        ),
        (compressed(group((8, "float"), (8, "float")), kv_cache_scheme=FP8_CACHE), "fp8, KV cache fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8, KV cache fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "nvfp4"),
    ],
)
def test_of_a_dense_model(quantization: dict[str, Any], label: str) -> None:
    assert stored(quantization).label == label


@pytest.mark.parametrize(
    "quantization, label",
    [
        (compressed(group((4, "int"), None), ignore=EXPERTS_ALONE), "bf16, experts int4"),  # as Kimi-K2-Thinking
        ({"quant_method": "modelopt", "quant_algo": "NVFP4",
          "ignore": [f"model.layers.{n}.self_attn*" for n in range(48)]}, "bf16, experts nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}}, "fp8, experts nvfp4"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        (quark("fp4", "fp4", exclude=["lm_head", "*self_attn*", "*.gate"]), "bf16, experts w4a4_mxfp4"),
        (quark("fp4", "fp4", layer_quant_config={"*self_attn*": quark("fp8_e4m3", "fp8_e4m3")["global_quant_config"]}),
         "fp8, experts w4a4_mxfp4"),
        # two of 48 layers kept whole: the others tell
        ({"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.{n}.self_attn.q_proj" for n in (0, 47)]},
         "fp8"),
    ],
)  # fmt: skip
def test_of_a_model_with_experts(quantization: dict[str, Any], label: str) -> None:
    assert stored(quantization, "qwen3-30b-a3b").label == label


@pytest.mark.parametrize(
    "quantization, reason",
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes weights"),
        (quark("fp4", "fp4", 16), "quark's scales of more than one level"),
        (quark("int8", None, None), "quark's int8 weights with 16-bit activations"),
        (compressed(group((4, "float"), None)), "4-bit float weights with 16-bit float activations"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt's W4A8_AWQ"),
    ],
)  # fmt: skip
def test_what_has_no_kernels_is_told_and_a_format_may_be_given(quantization: dict[str, Any], reason: str) -> None:
    with pytest.raises(KernelcastError, match=f"mine ships as {reason}, which has no kernels here; give `dtype`"):
        stored(quantization)
    given = parse({**config("llama-3.1-8b")[1], "quantization_config": quantization}, "mine")
    assert Precision.of(given, "bf16").label == "bf16"


@pytest.mark.parametrize(
    "quantization, label",
    [
        ({"quant_method": "gptq", "bits": 8}, "int8_wo"),
        (compressed(group((8, "int"), None)), "int8_wo"),
        (compressed(group((8, "float"), None)), "int8_wo"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}, "bf16, mlp int4"),
    ],
)
def test_weights_alone_and_parts_apart(quantization: dict[str, Any], label: str) -> None:
    assert stored(quantization).label == label


def test_stored_weights_run_alone_where_a_gpu_has_not_their_arithmetic() -> None:
    quantization = compressed(group((8, "float"), (8, "float")))
    kinds, ampere, hopper = stored(quantization), gpu("a100_sxm"), gpu("h100_sxm")
    assert kinds.label == "fp8" and kinds.weight_only(ampere) == ("fp8",) and kinds.weight_only(hopper) == ()
    assert kinds.runs("fp8", ampere) == "int8_wo" and kinds.runs("fp8", hopper) == "fp8"
    assert Precision("fp8").runs("fp8", ampere) == "fp8"  # asked for: refused where it is predicted
    assert Precision("nvfp4", stored=True).runs("nvfp4", hopper) == "int4"
    four = Precision("w4a4_mxfp4", stored=True)
    assert four.runs("w4a4_mxfp4", hopper) == "mxfp4" and four.runs("w4a4_mxfp4", gpu("mi355x")) == "w4a4_mxfp4"


def test_a_cache_that_is_asked_for_wins() -> None:
    quantization = compressed(group((8, "float"), (8, "float")), kv_cache_scheme=FP8_CACHE)
    model = parse({**config("llama-3.1-8b")[1], "quantization_config": quantization}, "mine")
    assert Precision.of(model, None, "bf16").cache == "bf16"
    assert Precision.of(model).cache == "fp8"


def test_a_config_without_a_method_is_refused() -> None:
    with pytest.raises(KernelcastError, match="'quantization_config' has no 'quant_method'"):
        stored({"bits": 4})


@pytest.mark.parametrize(
    "quantization",
    [
        compressed({"targets": ["re:*("], "weights": {"num_bits": 8, "type": "float"}, "input_activations": None}),
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": "fp8"}},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"self_attn.q_proj": {}}},
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": 3},
    ],
)
def test_what_cannot_be_read_is_one_line(quantization: dict[str, Any]) -> None:
    with pytest.raises(KernelcastError, match=r"'quantization_config' is not as .* writes it") as refused:
        stored(quantization)
    assert "\n" not in str(refused.value)
