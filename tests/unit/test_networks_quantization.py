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
