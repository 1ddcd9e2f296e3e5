"""ATen ops as kernel calls: which kernel runs, with which sizes; and how tensors lie."""

from __future__ import annotations

from typing import Any

import pytest

from kernelcast.ops import REGISTRY, kernel
from kernelcast.tracing.aten import OpSettings, known_ops, op_launches
from kernelcast.tracing.aten.elementwise import access, coalesced
from kernelcast.tracing.traced import Op, Tensor

HOPPER = OpSettings(capability="9.0")


def dense(*shape: int, dtype: str = "bf16", storage: int = 1) -> Tensor:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return Tensor(shape, tuple(reversed(stride)), dtype, storage)


def op(name: str, *arguments: Any, out: Tensor | tuple[Tensor, ...] = (), **options: Any) -> Op:
    outputs = (out,) if isinstance(out, Tensor) else out
    return Op(name, arguments, options, outputs, "kernel", "forward", "")


def calls(found: Op, settings: OpSettings = HOPPER) -> list[dict[str, Any]]:
    return [call.arguments for call in op_launches(found, settings).launches]


def one(found: Op, settings: OpSettings = HOPPER) -> dict[str, Any]:
    (only,) = calls(found, settings)
    return only


def test_a_linear_and_its_gradients_by_how_operands_lie() -> None:
    x, weight = dense(300, 64), Tensor((64, 128), (1, 64), "bf16")  # weight.t()
    forward = one(op("addmm", dense(128), x, weight, out=dense(300, 128)))
    assert (forward["m"], forward["n"], forward["k"], forward["layout"]) == (300, 128, 64, "tn")
    # grad @ weight: both as they are; grad.t() @ x: the first across
    grad = dense(300, 128)
    assert one(op("mm", grad, dense(128, 64), out=dense(300, 64)))["layout"] == "nn"
    assert one(op("mm", Tensor((128, 300), (1, 128), "bf16"), x, out=dense(128, 64)))["layout"] == "nt"


def test_a_matrix_by_a_column_is_a_row_by_its_transpose() -> None:
    """cuBLAS runs both as a matrix-vector product."""
    column = dense(4096, 1)
    for found in (op("mm", dense(256, 4096), column, out=dense(256, 1)), op("mv", dense(256, 4096), dense(4096))):
        sizes = one(found)
        assert (sizes["op"], sizes["m"], sizes["n"], sizes["k"], sizes["layout"]) == ("gemm", 1, 256, 4096, "tn")
    across = Tensor((256, 4096), (1, 256), "bf16")
    assert one(op("mm", across, column, out=dense(256, 1)))["layout"] == "nn"


def test_a_batch_that_shares_an_operand_is_one_product() -> None:
    a, b = Tensor((7, 16, 64), (0, 64, 1), "bf16"), dense(7, 64, 32)
    found = one(op("bmm", a, b, out=dense(7, 16, 32)))
    assert (found["op"], found["m"], found["n"], found["k"]) == ("gemm", 16, 7 * 32, 64)
    found = one(op("bmm", dense(7, 16, 64), Tensor((7, 64, 32), (0, 32, 1), "bf16"), out=dense(7, 16, 32)))
    assert (found["op"], found["m"], found["n"], found["k"]) == ("gemm", 7 * 16, 32, 64)
    found = one(op("bmm", dense(7, 16, 64), b, out=dense(7, 16, 32)))
    assert (found["op"], found["batch"], found["m"], found["n"]) == ("bmm", 7, 16, 32)


def test_tf32_only_where_it_is_on() -> None:
    product = op("mm", dense(8, 8, dtype="fp32"), dense(8, 8, dtype="fp32"), out=dense(8, 8, dtype="fp32"))
    assert one(product)["dtype"] == "fp32"
    assert one(product, OpSettings(tf32=True))["dtype"] == "tf32"


@pytest.mark.parametrize(("capability", "dtype", "backend"), [
    ("9.0", "bf16", "cudnn"), ("10.0", "bf16", "cudnn"), ("8.0", "bf16", "fa2"), ("12.0", "fp16", "fa2"),
])  # fmt: skip
def test_attention_by_the_library_of_the_gpu(capability: str, dtype: str, backend: str) -> None:
    q, k = dense(2, 32, 100, 64, dtype=dtype), dense(2, 8, 100, 64, dtype=dtype)
    found = one(op("_scaled_dot_product_cudnn_attention", q, k, k, None, False, 0.0, True, False, out=q),
                OpSettings(capability=capability))  # fmt: skip
    assert found["backend"] == backend
    assert (found["q_heads"], found["kv_heads"], found["kv_len"], found["causal"]) == (32, 8, 100, True)


def test_axes_are_joined_where_every_tensor_lies_end_to_end() -> None:
    whole = dense(4, 32, 128)
    assert coalesced([whole, whole], whole.shape) == [(4 * 32 * 128, [1, 1])]
    turned = Tensor((4, 128, 32), (4096, 1, 128), "bf16")  # the last two exchanged
    assert len(coalesced([turned, dense(4, 128, 32)], turned.shape)) == 3
    row = dense(128)
    assert coalesced([whole, row], whole.shape) == [(128, [1, 1]), (128, [128, 0])]


@pytest.mark.parametrize(("other", "way"), [
    (dense(4, 128), "vector"),
    (dense(128), "strided"),  # a row for all
    (dense(4, 1), "strided"),  # a number a row
    (Tensor((4, 128), (1, 4), "bf16"), "strided"),  # across
    (dense(4, 128, dtype="fp32"), "cast"),
])  # fmt: skip
def test_how_a_kernel_reaches_its_tensors(other: Tensor, way: str) -> None:
    assert access([dense(4, 128), other], dense(4, 128)) == way


def test_a_plain_sum_is_a_kernel_by_name_a_broadcast_one_by_what_it_moves() -> None:
    out = dense(300, 512)
    assert one(op("add", out, out, out=out)) == {
        "op": "add",
        "rows": 300,
        "cols": 512,
        "dtype": "bf16",
        "stack": "torch",
    }
    assert one(op("add", out, 1.0, out=out))["op"] == "scale"
    scaled = one(op("mul", out, dense(512), out=out))
    assert (scaled["op"], scaled["access"], scaled["tensors"], scaled["axes"]) == ("pointwise", "strided", 2.0, 2)
    assert scaled["reads"] == pytest.approx(1 + 1 / 300, abs=1e-4)
    assert scaled["writes"] == 1.0


def test_a_narrow_tensor_is_the_vector_that_it_is() -> None:
    """[128, 256, 7, 7]: as 1,605,632 numbers in rows of 1,024, not in rows of seven."""
    narrow = dense(128, 256, 7, 7)
    found = one(op("relu", narrow, out=narrow))
    assert (found["rows"], found["cols"]) == (128 * 256 * 49 // 1024, 1024)
    odd = dense(1001, 7)
    found = one(op("relu", odd, out=odd))
    assert found["cols"] == 1024 and found["rows"] == round(7007 / 1024)
    tiny = dense(3, 7)
    assert one(op("relu", tiny, out=tiny))["rows"] * one(op("relu", tiny, out=tiny))["cols"] == 21


def test_a_sum_of_tensors_that_lie_across_one_another_is_a_transposing_copy() -> None:
    """[32, 256, 1152] that a convolution wrote channels first, and one in order: a sector for every element."""
    turned, out = Tensor((32, 256, 1152), (256 * 1152, 1, 256), "bf16"), dense(32, 256, 1152)
    found = one(op("add", out, turned, out=out))
    assert (found["op"], found["batch"], found["rows"], found["cols"]) == ("transpose", 32, 1152, 256)
    same = one(op("add", turned, turned, out=turned))
    assert same["op"] == "add"


def test_products_with_a_vector_have_no_tiles() -> None:
    """As a recurrence in Python makes them: [4, 1536, 16] by [4, 16, 1]; and its gradient, a column by a row."""
    out = dense(4, 1536, 1)
    found = one(op("bmm", dense(4, 1536, 16), dense(4, 16, 1), out=out))
    assert (found["op"], found["rows"], found["cols"]) == ("reduce_sum", 4 * 1536, 16)
    outer = one(op("bmm", dense(4, 1536, 1), dense(4, 1, 16), out=dense(4, 1536, 16)))
    assert outer["op"] == "pointwise"
    assert one(op("bmm", dense(4, 1, 128), dense(4, 128, 512), out=dense(4, 1, 512)))["op"] == "bmm"


def test_copies_casts_and_transposes() -> None:
    out = dense(300, 128)
    assert one(op("clone", out, out=out))["op"] == "copy"
    cast = one(op("_to_copy", out, out=dense(300, 128, dtype="fp32"), dtype="fp32"))
    assert (cast["op"], cast["dtype"], cast["to"]) == ("copy", "bf16", "fp32")
    turned = one(op("clone", Tensor((300, 128), (1, 300), "bf16"), out=out))
    assert (turned["op"], turned["rows"], turned["cols"]) == ("transpose", 128, 300)
    part = one(op("clone", Tensor((300, 64), (128, 1), "bf16"), out=dense(300, 64)))
    assert (part["op"], part["access"]) == ("pointwise", "strided")


def test_a_padded_gradient_fills_the_whole_and_copies_a_part() -> None:
    grad, whole = dense(300, 64), dense(300, 128)
    found = calls(op("slice_backward", grad, (300, 128), 1, 0, 64, 1, out=whole))
    assert [c["op"] for c in found] == ["fill", "pointwise"]
    assert found[0]["rows"] * found[0]["cols"] == 300 * 128
    assert found[1]["rows"] * found[1]["cols"] == 300 * 64


@pytest.mark.parametrize(("axes", "axis", "rows", "cols"), [((1,), "cols", 300, 128), ((0,), "rows", 300, 128)])
def test_reductions_know_their_axis(axes: tuple[int, ...], axis: str, rows: int, cols: int) -> None:
    out = dense(300) if axis == "cols" else dense(128)
    found = one(op("sum", dense(300, 128), axes, False, out=out))
    assert (found["axis"], found["rows"], found["cols"]) == (axis, rows, cols)


def test_an_optimizer_is_one_call_over_all_tensors() -> None:
    weights = tuple(dense(n, storage=n) for n in (100, 200, 300))
    found = one(op("_fused_adamw_", weights, weights, weights, weights, (), ()))
    assert (found["op"], found["elements"], found["tensors"]) == ("adamw", 600, 3)


def test_convolutions_with_their_gradients() -> None:
    x, weight = dense(2, 3, 32, 32), dense(16, 3, 7, 7)
    forward = one(
        op("convolution", x, weight, None, (2, 2), (3, 3), (1, 1), False, (0, 0), 1, out=dense(2, 16, 16, 16))
    )
    assert (forward["op"], forward["stride"], forward["padding"], forward["height"]) == ("conv2d", 2, 3, 32)
    grad = dense(2, 16, 16, 16)
    back = calls(op("convolution_backward", grad, x, weight, (16,), (2, 2), (3, 3), (1, 1), False, (0, 0), 1,
                    (True, True, True), out=(x, weight, dense(16))))  # fmt: skip
    assert [c["op"] for c in back] == ["conv2d_dgrad", "conv2d_wgrad", "reduce_sum"]


def test_an_unknown_op_costs_what_it_moves_and_says_so() -> None:
    found = op_launches(op("my_op", dense(1000, storage=1), dense(1000, storage=2), out=dense(1000, storage=3)), HOPPER)
    assert found.by_bytes
    (call,) = found.launches
    assert call.arguments["reads"] == 2.0
    assert call.arguments["writes"] == 1.0


def test_every_rule_names_a_kernel_that_exists() -> None:
    """Element-wise ops by the table; the others above."""
    out = dense(64, 128)
    for name in known_ops():
        if name.startswith(
            ("_", "conv", "nll", "embedding", "cat", "stack", "index", "scatter", "gather", "masked_s", "topk")
        ):
            continue
        try:
            found = op_launches(op(name, out, out, out=out), HOPPER)
        except (TypeError, ValueError, IndexError, StopIteration, AttributeError):
            continue  # takes other arguments; tested above
        for call in found.launches:
            given = call.arguments
            assert given["op"] in REGISTRY
            kernel(**given)  # its parameters are right


def test_facts_of_tensors() -> None:
    expanded = Tensor((8, 4, 128), (128, 0, 1), "bf16")
    assert (expanded.elements, expanded.distinct, expanded.bytes) == (4096, 1024, 2048)
    assert dense(3, 4).dense and Tensor((4, 3), (1, 4), "fp32").dense
    assert not Tensor((3, 4), (8, 1), "fp32").dense and not expanded.dense


def test_logsumexp_is_nine_kernels() -> None:
    """amax; abs, eq, masked_fill of the maxima; sub, exp; sum; log, add."""
    x = dense(64, 1000, dtype="fp32")
    found = calls(op("logsumexp", x, [1], True, out=dense(64, 1, dtype="fp32")))
    assert [each["op"] for each in found] == [
        "reduce_sum", "neg", "add", "masked_fill", "pointwise", "exp", "reduce_sum", "log", "add",
    ]  # fmt: skip
