"""Formats by part of a model: what each product runs in, what weights take, and GPUs without the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from deployments import deployed
from model_configs import config_of

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.inference.batch import Batch
from kernelcast.inference.deployment import Deployment
from kernelcast.inference.forward import forward
from kernelcast.inference.infer import infer
from kernelcast.inference.memory import weight_bytes
from kernelcast.inference.workload import Workload
from kernelcast.models.config import parse
from kernelcast.models.precision import Precision
from kernelcast.stacks import stack

DECODE = Batch(new=(1, 1, 1), past=(50, 60, 70))
FP8 = {"quant_method": "fp8"}  # one scale a tensor
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
MLP_ALONE = {**FP8, "modules_to_not_convert": ["self_attn"]}
EXPERTS_ALONE = {"quant_method": "modelopt", "quant_algo": "NVFP4",
                 "ignore": [f"model.layers.{n}.self_attn*" for n in range(48)]}  # fmt: skip


def place(quantization: dict[str, Any] | None, on: str = "h200_sxm", name: str = "llama-3.2-1b",
          dtype: str | None = None) -> Deployment:  # fmt: skip
    config = {key: value for key, value in config_of(name).items() if not key.startswith("_")}
    given = parse(config | ({"quantization_config": quantization} if quantization else {}), "mine")
    return Deployment(given, kc.gpu(on), stack("vllm"), Precision.of(given, dtype))


def formats(where: Deployment) -> dict[str, set[str]]:
    """Of the products of each part."""
    found: dict[str, set[str]] = {}
    for call in forward(where, DECODE):
        if call.op in ("gemm", "moe"):
            found.setdefault(call.part, set()).add(call.arguments["dtype"])
    return found


# ---- products ----


@pytest.mark.parametrize(
    ("quantization", "on", "projections", "mlp"),
    [
        (None, "a100_sxm", "bf16", "bf16"),
        (FP8, "h200_sxm", "fp8", "fp8"),
        (FP8, "a100_sxm", "int8_wo", "int8_wo"),
        (BLOCKS, "h200_sxm", "fp8_block", "fp8_block"),
        (BLOCKS, "a100_sxm", "int8_wo", "int8_wo"),
        (MLP_ALONE, "h200_sxm", "bf16", "fp8"),
        (MLP_ALONE, "a100_sxm", "bf16", "int8_wo"),
    ],
)
def test_each_part_runs_in_its_own_format(quantization: dict[str, Any], on: str, projections: str, mlp: str) -> None:
    found = formats(place(quantization, on))
    assert (found["projections"], found["mlp"], found["head"]) == ({projections}, {mlp}, {"bf16"})


def test_experts_apart() -> None:
    for on, kind in (("b200_sxm", "nvfp4"), ("h200_sxm", "int4")):
        found = formats(place(EXPERTS_ALONE, on, "qwen3-30b-a3b"))
        assert found == {"projections": {"bf16"}, "router": {"bf16"}, "experts": {kind}, "head": {"bf16"}}


# ---- what answers, what is refused ----


def test_a_checkpoint_in_fp8_answers_on_ampere_as_weights_alone() -> None:
    """Decode of one request reads weights: half the bytes of bf16, but for the head."""
    one = Workload.equal(1, 128, 9)
    narrow, whole = (infer(place(how, "a100_sxm"), one) for how in (FP8, None))
    assert narrow.deployment.precision.weight_only(kc.gpu("a100_sxm")) == ("fp8",)
    assert narrow.step.value < whole.step.value
    weight_only = infer(place(None, "a100_sxm", dtype="int8_wo"), one)
    assert narrow.step.value == weight_only.step.value  # the same kernels
    assert infer(place(BLOCKS, "a100_sxm"), one).step.value == weight_only.step.value


@pytest.mark.parametrize("quantization", [None, FP8])
def test_arithmetic_that_was_asked_for_is_refused_where_there_is_none(quantization: dict[str, Any] | None) -> None:
    with pytest.raises(KernelcastError, match="a100_sxm has no fp8 matrix arithmetic; it has") as error:
        infer(place(quantization, "a100_sxm", dtype="fp8"), Workload.equal(1, 128, 9))
    assert "\n" not in str(error.value)


# ---- memory ----

# Llama-3.2-1B by hand: 16 layers of width 2048, 32 heads of 64 over 8 key-value heads, a gated block of 8192
ATTENTION = 16 * (2048 * (32 + 2 * 8) * 64 + 32 * 64 * 2048)
MLP = 16 * 3 * 2048 * 8192
WHOLE = 2 * (128256 * 2048 + (2 * 16 + 1) * 2048)  # bytes of the table, which is the head too, and of norms


@pytest.mark.parametrize(
    ("quantization", "expected_bytes"),
    [
        (None, 2 * (ATTENTION + MLP) + WHOLE),
        (FP8, ATTENTION + MLP + WHOLE),
        (MLP_ALONE, 2 * ATTENTION + MLP + WHOLE),
        ({**FP8, "modules_to_not_convert": ["mlp"]}, ATTENTION + 2 * MLP + WHOLE),
    ],
)
@pytest.mark.parametrize("on", ["h200_sxm", "a100_sxm"])
def test_weights_take_what_each_part_is_stored_in(quantization: Any, expected_bytes: int, on: str) -> None:
    assert weight_bytes(place(quantization, on)) == expected_bytes


def test_shared_experts_are_stored_as_dense_blocks() -> None:
    """DeepSeek-R1 in NVFP4 keeps attention in bf16; experts, shared ones and the first three blocks have 4 bits and a
    byte of scale for 16."""
    where = deployed("deepseek-r1-nvfp4", on="b200_sxm")
    parts, narrow = where.model.parameters, 0.5 + 1 / 16
    blocks = parts.mlp + parts.experts
    expected = 2 * (parts.attention + parts.norms + parts.embedding + parts.head) + narrow * blocks
    assert weight_bytes(where) == pytest.approx(expected)
    found = formats(where)
    assert (found["mlp"], found["shared experts"], found["experts"]) == ({"nvfp4"}, {"nvfp4"}, {"nvfp4"})
    assert found["router"] == {"bf16"}
