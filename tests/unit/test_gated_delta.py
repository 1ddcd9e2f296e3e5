"""gated_delta and causal_conv1d by hand, and where a model's linear attention puts them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from demand import of, one, whole, works

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.inference.batch import Batch
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment, forward
from kernelcast.inference.memory import cache_bytes
from kernelcast.models import model
from kernelcast.stacks import stack

HEADS: dict[str, Any] = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
PHYSICS = kc.Conditions(predictor="generic")


def seconds(op: str, on: str = "h200_sxm", **values: Any) -> float:
    return kc.predict(kc.kernel(op, **values), on, conditions=PHYSICS).time_s


# ---- decode


@pytest.mark.parametrize(("state", "width"), [("fp32", 4), ("bf16", 2)])
def test_decode_streams_the_state_in_and_out(state: str, width: int) -> None:
    work = one("gated_delta", batch=8, q_len=1, **HEADS, state_dtype=state)
    assert of(work, "streamed_bytes") == 2 * 8 * 32 * 128 * 128 * width  # read and written
    assert of(work, "tasks") == 8 * 32 * (128 / 32)  # 32 columns of a state a warp
    assert of(work, "activation_bytes") == 8 * (2 * 16 * 128 + 2 * 32 * 128) * 2  # q, k; v, o in bf16
    assert whole(work, "fma_flops") == 7 * 8 * 32 * 128 * 128
    assert of(work, "tensor_flops") == 0 and of(work, "launches") == 1


def test_a_check_of_drafts_reads_the_state_once_and_writes_it_after_each_token() -> None:
    work = one("gated_delta", batch=8, q_len=4, **HEADS, kernel="recurrent")
    assert of(work, "streamed_bytes") == (1 + 4) * 8 * 32 * 128 * 128 * 4
    assert of(work, "serial_steps") == 4


# ---- prefill


def test_triton_counts_the_products_of_every_chunk() -> None:
    found = works("gated_delta", batch=2, q_len=1024, **HEADS, backend="triton")
    assert len(found) == 6  # the decays' sum, scores, inverse, WY form, walk, outputs
    units = 2 * 16 * 32  # sequences x chunks of 64 x value heads
    flops = [whole(work, "tensor_flops") / units for work in found]
    assert flops == [
        0,
        2 * 64 * 64 * 128,  # k k^T
        0,  # the inverse runs on the vector units
        2 * 64 * 64 * (128 + 128),  # w and u
        2 * 64 * 128 * 128 * 2,  # w S, and k^T v into the state
        2 * 64 * 128 * 128 + 2 * 64 * 64 * (128 + 128),  # q S, q k^T, (q k^T) v
    ]
    inverse, walk = found[2], found[4]
    assert whole(inverse, "fma_flops") == units * 64**3 / 2
    assert of(inverse, "serial_steps") == 56  # 14 of the 16 rows of each of four blocks
    assert of(walk, "serial_steps") == 1024 / 64 and of(walk, "tasks") == 2 * 32 * 128 / 32
    token_bytes = (16 + 32 + 2 * 32) * 128 * 2  # k, w; values in and out
    assert of(walk, "activation_bytes") == 2 * 1024 * token_bytes + units * 128 * 128 * 2  # and a state a chunk
    assert of(walk, "streamed_bytes") == 2 * 2 * 32 * 128 * 128 * 4


def test_flashinfer_is_one_kernel_with_the_same_products() -> None:
    values = {"batch": 2, "q_len": 1024, **HEADS}
    chain = works("gated_delta", **values, backend="triton")
    _, fused = works("gated_delta", **values, backend="flashinfer")
    assert whole(fused, "tensor_flops") == sum(whole(work, "tensor_flops") for work in chain)
    assert of(fused, "tasks") == 2 * 32 and of(fused, "serial_steps") == 16
    inputs = 2 * 1024 * (2 * 16 * 128 + 2 * 32 * 128) * 2
    assert of(fused, "activation_bytes") == inputs + 2 * 2 * 1024 * 32 * 4  # and the gates in fp32


def test_a_last_chunk_is_padded_and_no_useful_work() -> None:
    whole_chunk = works("gated_delta", batch=1, q_len=128, **HEADS)[-1]
    padded = works("gated_delta", batch=1, q_len=96, **HEADS)[-1]
    assert whole(padded, "tensor_flops") == whole(whole_chunk, "tensor_flops")
    assert of(padded, "useful_flops") == 0.75 * of(whole_chunk, "useful_flops")


def test_the_stack_and_the_gpu_choose_the_kernel() -> None:
    def count(on: str, **more: Any) -> int:
        return len(works("gated_delta", on=on, batch=1, q_len=512, **HEADS, **more))

    assert count("h200_sxm", stack="vllm") == count("b200_sxm") == 2
    assert count("h200_sxm", stack="sglang") == count("l40s", stack="vllm") == 6


def test_a_ragged_batch_is_its_parts() -> None:
    equal = seconds("gated_delta", batch=3, q_len=200, **HEADS)
    assert seconds("gated_delta", q_lens=[200, 200, 200], **HEADS) == pytest.approx(equal)
    mixed = works("gated_delta", q_lens=[1, 1, 100], **HEADS)
    assert of(mixed[0], "streamed_bytes") == 2 * 2 * 32 * 128 * 128 * 4  # two decodes
    assert of(mixed[-1], "tasks") == 32 and of(mixed[-1], "serial_steps") == 2  # and a prefill of two chunks


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("on", ["h200_sxm", "l40s"])
def test_more_work_is_never_faster(backend: str, on: str) -> None:
    lengths = [seconds("gated_delta", on, batch=2, q_len=64 * 2**i, **HEADS, backend=backend) for i in range(9)]
    batches = [seconds("gated_delta", on, batch=2**i, q_len=256, **HEADS, backend=backend) for i in range(9)]
    decodes = [seconds("gated_delta", on, batch=2**i, q_len=1, **HEADS) for i in range(11)]
    for times in (lengths, batches, decodes):
        assert np.all(np.diff(times) >= 0)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batch": 1, "q_len": 8, **HEADS, "key_heads": 3}, "value_heads 32 is no multiple of key_heads 3"),
        ({"batch": 1, **HEADS}, "give batch and q_len, or q_lens"),
        ({"batch": 1, "q_len": 8, "q_lens": [8], **HEADS}, "not both"),
        ({"batch": 1, "q_len": 8, **HEADS, "dtype": "fp32"}, "dtype"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelcastError, match=said):
        kc.kernel("gated_delta", **values)


# ---- the convolution


def test_convolution_bytes_and_flops() -> None:
    work = one("causal_conv1d", batch=2, q_len=1024, channels=8192, width=4)
    elements = 2 * 1024 * 8192
    assert of(work, "activation_bytes") == 2 * elements * 2  # in and out
    assert of(work, "streamed_bytes") == 2 * (2 * 8192 * 3 * 2) + 8192 * 4 * 2  # state in and out; weights
    assert whole(work, "fma_flops") == pytest.approx((2 * 4 + 2) * elements)
    assert of(work, "tasks") == 2 * 1024 / 8 * 8192 / 256


def test_a_decode_shifts_the_state_of_the_convolution() -> None:
    work = one("causal_conv1d", batch=64, q_len=1, channels=8192, width=4)
    assert of(work, "tasks") == 64 * 8192 / 256
    assert of(work, "streamed_bytes") == 2 * 64 * 8192 * 3 * 2 + 8192 * 4 * 2


# ---- in a model


def deployment(tp: int = 4, on: str = "h200_sxm") -> Deployment:
    return Deployment(model("qwen3-next-80b-a3b"), kc.gpu(on), stack("vllm"), layout=Layout(tp=tp))


def test_qwen3_next_runs_36_linear_layers() -> None:
    found = forward(deployment(), Batch((2048,) * 8, (0,) * 8))
    (delta,) = [c for c in found if c.op == "gated_delta"]
    (conv,) = [c for c in found if c.op == "causal_conv1d"]
    assert delta.count == conv.count == 36
    sizes = delta.arguments
    assert (sizes["key_heads"], sizes["value_heads"], sizes["batch"], sizes["q_len"]) == (4, 8, 8, 2048)
    assert conv.arguments["channels"] == (2 * 16 + 32) * 128 / 4
    products: Counter[tuple[int, int]] = Counter()
    for call in (c for c in found if c.op == "gemm"):
        products[call.arguments["n"], call.arguments["k"]] += int(call.count)
    # q, k; v and the gate; beta and alpha, over four GPUs; and back
    assert products[(2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) // 4, 2048] == 36
    assert products[2048, 32 * 128 // 4] == 36 + 12  # the other layers' 16 heads of 256 are as wide
    gated = [c for c in found if c.arguments.get("rows") == 8 * 2048 * 8 and c.arguments["cols"] == 128]
    assert [c.count for c in gated] == [36]


def test_unequal_sequences_and_drafts_keep_their_kernels() -> None:
    def delta(new: tuple[int, ...], past: tuple[int, ...]) -> dict[str, Any]:
        (call,) = [c for c in forward(deployment(), Batch(new, past)) if c.op == "gated_delta"]
        return call.arguments

    assert delta((1, 1), (100, 7))["batch"] == 2  # how long the past is does not matter
    assert delta((1, 300), (100, 0))["q_lens"] == (1, 300)
    assert delta((4, 4), (100, 7))["kernel"] == "recurrent" and delta((4, 4), (0, 0))["kernel"] == "auto"


def test_key_heads_bound_tensor_parallelism() -> None:
    with pytest.raises(KernelcastError, match="tp 3 does not divide the 16 key heads"):
        deployment(tp=3)


def test_states_are_cut_by_tp_and_do_not_grow() -> None:
    states = 36 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)  # fp32; the convolution's inputs in 16 bits
    keys = 12 * 2 * 2 * 256 * 2  # of a token, in the twelve layers of softmax attention
    assert cache_bytes(deployment(tp=1), 1000) == states + 1000 * keys
    assert cache_bytes(deployment(tp=2), 1000) == (states + 1000 * keys) / 2
    assert cache_bytes(deployment(tp=4), 1000) == states / 4 + 1000 * keys / 2  # two heads of keys
