"""Which library PyTorch takes for attention, by mask, format, heads and GPU; and what runs beside its kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_aten import calls, dense, one, op
from torch.nn.functional import scaled_dot_product_attention

from kernelcast.tracing import trace
from kernelcast.tracing.aten import OpSettings
from kernelcast.tracing.traced import Tensor

A100, H100, L40S, V100 = (OpSettings(capability=x) for x in ("8.0", "9.0", "8.9", "7.0"))


def sdpa(q: Tensor, k: Tensor, bias: Tensor | None = None, dropout: float = 0.0, causal: bool = False) -> Any:
    return op("_scaled_dot_product_cudnn_attention", q, k, k, bias, False, dropout, causal, False, out=q)


@pytest.mark.parametrize(("settings", "dtype", "size", "masked", "kernel", "backend"), [
    (H100, "bf16", 64, False, "attention", "cudnn"),
    (H100, "bf16", 64, True, "masked_attention", "cudnn"),
    (A100, "bf16", 64, False, "attention", "fa2"),
    (A100, "bf16", 64, True, "masked_attention", "efficient"),
    (H100, "fp32", 64, False, "masked_attention", "efficient"),
    (H100, "bf16", 256, False, "attention", "cudnn"),
    (OpSettings(capability="10.0"), "bf16", 256, False, "attention", "fa2"),
    (H100, "bf16", 512, False, "masked_attention", "efficient"),
    (V100, "fp16", 64, False, "masked_attention", "efficient"),
])  # fmt: skip
def test_the_first_library_whose_checks_pass(
    settings: OpSettings, dtype: str, size: int, masked: bool, kernel: str, backend: str
) -> None:
    q = dense(2, 16, 128, size, dtype=dtype)
    found = one(sdpa(q, q, dense(1, 16, 128, 128, dtype=dtype) if masked else None), settings)
    assert (found["op"], found["backend"]) == (kernel, backend)
    assert found.get("bias", "none") == ("heads" if masked else "none")


@pytest.mark.parametrize(("shape", "kind"), [
    ((2, 16, 128, 96), "full"), ((1, 16, 128, 96), "heads"), ((2, 1, 128, 96), "batch"), ((128, 96), "shared"),
    ((2, 1, 1, 96), "keys"),
])  # fmt: skip
def test_a_bias_by_the_axes_that_it_has(shape: tuple[int, ...], kind: str) -> None:
    assert one(sdpa(dense(2, 16, 128, 64), dense(2, 16, 96, 64), dense(*shape)))["bias"] == kind


def test_the_mask_of_one_query_weighs_nothing() -> None:
    """A decode step: a number a key beside the key itself, so that it is the measured attention of one query."""
    q, k, mask = dense(16, 32, 1, 128), dense(16, 32, 1024, 128), dense(16, 1, 1, 1024)
    found = one(sdpa(q, k, mask), H100)
    assert (found["op"], found["q_len"], found["backend"]) == ("attention", 1, "cudnn")
    assert one(sdpa(q, k, mask), A100)["op"] == "masked_attention"  # another kernel, whose own it is
    assert one(sdpa(dense(16, 32, 2, 128), k, dense(16, 1, 2, 1024)), H100)["op"] == "masked_attention"


def test_rows_of_a_bias_that_start_anywhere_are_copied_for_the_memory_efficient_kernel() -> None:
    q, bias = dense(2, 16, 197, 64), dense(1, 16, 197, 197)
    assert [x["op"] for x in calls(sdpa(q, q, bias), A100)] == ["fill", "pointwise", "masked_attention"]
    assert [x["op"] for x in calls(sdpa(q, q, bias), H100)] == ["masked_attention"]
    aligned = Tensor(bias.shape, (16 * 197 * 200, 197 * 200, 200, 1), "bf16")
    assert [x["op"] for x in calls(sdpa(q, q, aligned), A100)] == ["masked_attention"]


def test_grouped_heads_with_a_mask_fall_to_math_where_there_is_no_cudnn() -> None:
    q, k = dense(2, 16, 128, 64), dense(2, 4, 128, 64)
    found = [x["op"] for x in calls(sdpa(q, k, dense(2, 1, 128, 128)), A100)]
    assert found.count("bmm") == 2
    assert found.count("copy") == 5  # Q, K and V to fp32; weights and output back
    assert one(sdpa(q, k, dense(2, 1, 128, 128)), H100)["kv_heads"] == 4


def test_keys_that_is_causal_hides_from_all_do_not_count() -> None:
    found = one(sdpa(dense(2, 16, 64, 64), dense(2, 16, 128, 64), causal=True))
    assert (found["kv_len"], found["causal"]) == (64, True)


def traced(mode: str = "inference", heads: int = 8, size: int = 16, **given: Any) -> list[str]:
    """Names of the ops that a call on [2, 8, 24, 16] takes."""

    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(16))
            self.bias = torch.nn.Parameter(torch.zeros(1, 8, 24, 24))

        def forward(self, q: Any, k: Any) -> Any:
            mask = self.bias if given.get("mask") == "learned" else given.get("mask")
            return scaled_dot_product_attention(q * self.weight, k, k, mask, enable_gqa=given.get("gqa", False))

    with torch.device("meta"):
        q, k = torch.randn(2, 8, 24, 16), torch.randn(2, heads, 24, size)
        model = Attend()
    if given.get("dtype"):
        q, k, model = q.to(given["dtype"]), k.to(given["dtype"]), model.to(given["dtype"])
    return [x.name for x in trace(model, (q, k), mode, optimizer=None).kernels]  # type: ignore[arg-type]


def test_heads_that_broadcast_fall_to_math_and_grouped_ones_do_not() -> None:
    assert "_safe_softmax" in traced(heads=1, dtype=torch.bfloat16)
    assert "_scaled_dot_product_cudnn_attention" in traced(heads=1, gqa=True, dtype=torch.bfloat16)
    assert "_safe_softmax" in traced(heads=1, gqa=True)  # fp32: the memory-efficient kernel has no groups


def test_a_mask_of_bits_becomes_numbers_and_a_learned_bias_takes_its_own_kernel() -> None:
    bits = torch.ones(2, 1, 24, 24, dtype=torch.bool, device="meta")
    assert traced(mask=bits).count("where") == 1
    names = traced("training", mask="learned")
    assert "_scaled_dot_product_efficient_attention_backward" in names
    assert names.count("sum") >= 1  # over the batch, to the bias's own shape


def test_a_bias_whose_axes_were_exchanged_falls_to_math() -> None:
    """T5's, [queries, keys, heads] in memory."""
    bias = torch.zeros(24, 24, 8, device="meta").permute(2, 0, 1).unsqueeze(0)
    found = traced(mask=bias)
    assert "_safe_softmax" in found
    assert "_scaled_dot_product_cudnn_attention" in traced(mask=bias.contiguous())


def test_an_encoder_layer_in_inference_takes_its_fast_path() -> None:
    with torch.device("meta"):
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        x = torch.randn(2, 24, 64)
    fast = [op.name for op in trace(layer.eval(), x).kernels]
    # Q, K and V at once and no copy of them; the activation within the first product; two sums, two norms
    assert fast == ["addmm", "_scaled_dot_product_cudnn_attention", "addmm", "add", "native_layer_norm",
                    "_addmm_activation", "addmm", "add", "native_layer_norm"]  # fmt: skip
    slow = [op.name for op in trace(layer.train(), x, "training", optimizer=None).phase("forward")]
    assert "native_dropout" in slow
    assert "_addmm_activation" not in slow


def test_multihead_attention_that_hands_out_weights_has_no_fused_kernel() -> None:
    with torch.device("meta"):
        attend = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
        x = torch.randn(2, 24, 64)
    assert "_softmax" in [op.name for op in trace(lambda x: attend(x, x, x), x).kernels]
    fused = [op.name for op in trace(lambda x: attend(x, x, x, need_weights=False), x).kernels]
    assert fused == ["addmm", "_scaled_dot_product_cudnn_attention", "addmm"]
