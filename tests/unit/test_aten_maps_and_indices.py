"""ATen ops over feature maps and by indices as kernel calls: which kernel runs, with which sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kernelcast.ops import kernel
from kernelcast.tracing.aten import OpSettings, op_launches
from kernelcast.tracing.traced import Op, Tensor


def dense(*shape: int, dtype: str = "bf16") -> Tensor:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return Tensor(shape, tuple(reversed(stride)), dtype, 1)


def last(batch: int, channels: int, height: int, width: int) -> Tensor:
    """Channels innermost."""
    return Tensor((batch, channels, height, width), (channels * height * width, 1, channels * width, channels), "bf16")


def calls(name: str, *arguments: Any, out: Tensor | tuple[Tensor, ...] = ()) -> list[dict[str, Any]]:
    outputs = (out,) if isinstance(out, Tensor) else out
    found = op_launches(Op(name, arguments, {}, outputs, "kernel", "forward", ""), OpSettings())
    assert not found.by_bytes
    for call in found.launches:
        kernel(**call.arguments)  # its parameters are right
    return [{**call.arguments, "count": call.count} for call in found.launches]


def one(name: str, *arguments: Any, out: Tensor | tuple[Tensor, ...] = ()) -> dict[str, Any]:
    (only,) = calls(name, *arguments, out=out)
    return only


X = dense(8, 64, 56, 56)
INDEX = dense(500, dtype="int64")


@pytest.mark.parametrize("trains", [True, False])
def test_batch_norm_by_layout_training_and_format_of_its_weights(trains: bool) -> None:
    weight = dense(64, dtype="fp32")
    for x, layout in ((X, "nchw"), (last(8, 64, 56, 56), "nhwc")):
        found = one("native_batch_norm", x, weight, weight, weight, weight, trains, 0.1, 1e-5, out=(x, weight, weight))
        assert (found["op"], found["batch"], found["channels"], found["spatial"]) == ("batch_norm", 8, 64, 56 * 56)
        assert (found["layout"], found["training"], found["weights"]) == (layout, trains, "fp32")
    back = one("native_batch_norm_backward", X, X, weight, weight, weight, weight, weight, trains, 1e-5,
               [True, True, True], out=(X, weight, weight))  # fmt: skip
    assert (back["op"], back["training"]) == ("batch_norm_backward", trains)
    assert "weights" not in one("_batch_norm_no_update", X, dense(64), dense(64), weight, weight, 0.1, 1e-5, out=X)
    assert one("_batch_norm_no_update", X, None, None, weight, weight, 0.1, 1e-5, out=X)["training"] is False


def test_group_norm_takes_the_sizes_that_it_is_given() -> None:
    found = one("native_group_norm", X, dense(64), dense(64), 8, 64, 3136, 32, 1e-5, out=X)
    assert (found["op"], found["spatial"], found["groups"]) == ("group_norm", 3136, 32)
    back = one(
        "native_group_norm_backward", X, X, dense(8, 32), dense(8, 32), dense(64), 8, 64, 3136, 32, [True], out=X
    )
    assert (back["op"], back["batch"], back["channels"]) == ("group_norm_backward", 8, 64)


def test_pooling_by_windows_and_layout() -> None:
    y = dense(8, 64, 28, 28)
    found = one("max_pool2d_with_indices", X, [3, 3], [2, 2], [1, 1], out=(y, dense(8, 64, 28, 28, dtype="int64")))
    assert (found["op"], found["kernel_w"], found["stride"], found["padding"]) == ("max_pool", 3, 2, 1)
    back = one("max_pool2d_with_indices_backward", y, last(8, 64, 56, 56), [3, 3], [2, 2], [1, 1], [1, 1], False,
               dense(8, 64, 28, 28, dtype="int64"), out=X)  # fmt: skip
    assert (back["op"], back["height"], back["layout"]) == ("max_pool_backward", 56, "nhwc")
    found = one("avg_pool2d", X, [2, 2], out=y)  # without a stride windows lie side by side
    assert (found["op"], found["stride"], found["padding"]) == ("avg_pool", 2, 0)
    found = one("avg_pool3d_backward", dense(2, 8, 2, 8, 8), dense(2, 8, 4, 16, 16), [2, 2, 2], [], [0, 0, 0], False,
                True, None, out=dense(2, 8, 4, 16, 16))  # fmt: skip
    assert (found["op"], found["depth"], found["kernel_d"], found["stride"]) == ("avg_pool_backward", 4, 2, 2)
    found = one("_adaptive_avg_pool2d_backward", dense(8, 64, 7, 7), X, out=X)
    assert (found["op"], found["height"], found["out_height"]) == ("adaptive_avg_pool_backward", 56, 7)


def test_resampling_by_mode() -> None:
    y = dense(8, 64, 112, 112)
    for name, mode in (("upsample_nearest2d", "nearest"), ("upsample_bilinear2d", "bilinear"),
                       ("_upsample_bicubic2d_aa", "bicubic")):  # fmt: skip
        found = one(name, X, [112, 112], 2.0, 2.0, out=y)
        assert (found["op"], found["mode"], found["height"], found["out_width"]) == ("interpolate", mode, 56, 112)
        back = one(f"{name}_backward", y, [112, 112], [8, 64, 56, 56], out=X)
        assert (back["op"], back["height"], back["out_width"]) == ("interpolate_backward", 56, 112)
    found = one("upsample_nearest1d", dense(2, 8, 256), [512], 2.0, out=dense(2, 8, 512))
    assert (found["height"], found["width"], found["out_width"]) == (1, 256, 512)


def test_padding_and_rolling() -> None:
    found = one("reflection_pad2d", X, [1, 1, 1, 1], out=dense(8, 64, 58, 58))
    assert (found["op"], found["images"], found["out_height"], found["mode"]) == ("pad", 512, 58, "reflect")
    back = one("replication_pad1d_backward", dense(2, 8, 258), dense(2, 8, 256), [1, 1], out=dense(2, 8, 256))
    assert (back["op"], back["images"], back["width"], back["out_width"]) == ("pad_backward", 16, 256, 258)
    filled = calls("constant_pad_nd", X, [1, 1, 1, 1], 0.0, out=dense(8, 64, 58, 58))
    assert [call["op"] for call in filled] == ["fill", "pointwise"]
    assert len(calls("constant_pad_nd", dense(8, 64, 58, 58), [-1, -1, -1, -1], out=X)) == 1  # a copy of the inside
    # a kernel for each axis: [8, 64, 56, 56] by rows is 512 x 56 x 56, by columns 28,672 x 56 x 1
    rolls = calls("roll", X, [-3, -3], [2, 3], out=X)
    assert [(c["outer"], c["length"], c["inner"], c["shift"]) for c in rolls] == [(512, 56, 56, 3), (28672, 56, 1, 3)]


def test_embedding_bags_with_their_dense_and_sparse_gradients() -> None:
    table, bags, starts = dense(1000, 16, dtype="fp32"), dense(50, 16, dtype="fp32"), dense(50, dtype="int64")
    found = one("_embedding_bag", table, INDEX, starts, False, 1, False, None, out=(bags, INDEX, starts))
    assert (found["op"], found["bags"], found["pooling"], found["mode"]) == ("embedding_bag", 50, 10, "mean")
    given = (bags, INDEX, starts, INDEX, starts, starts, 1000, False, 0)
    back = one("_embedding_bag_backward", *given, False, None, out=table)
    assert (back["op"], back["vocab"], back["mode"]) == ("embedding_bag_backward", 1000, "sum")
    sparse = one("_embedding_bag_backward", *given, True, None, out=bags)
    assert (sparse["op"], sparse["rows"], sparse["cols"]) == ("gather", 500, 16)


def test_narrow_tables_are_looked_up_as_rows_are() -> None:
    ids = dense(64, 64, dtype="int64")
    wide, narrow = dense(50257, 1024), dense(100000, 16, dtype="fp32")  # 2 KiB and 64 bytes a row
    found = one("embedding", wide, ids, out=dense(64, 64, 1024))
    assert (found["op"], found["tokens"], found["vocab"]) == ("embedding", 4096, 50257)
    found = one("embedding", narrow, ids, out=dense(64, 64, 16, dtype="fp32"))
    assert (found["op"], found["rows"], found["cols"], found["size"]) == ("index", 4096, 16, 100000)
    back = one("embedding_dense_backward", dense(64, 64, 1024), ids, 50257, -1, False, out=wide)
    assert (back["op"], back["tokens"]) == ("embedding_backward", 4096)
    back = one("embedding_dense_backward", dense(64, 64, 16, dtype="fp32"), ids, 100000, -1, False, out=narrow)
    assert (back["op"], back["bags"], back["pooling"]) == ("embedding_bag_backward", 4096, 1)
    few = one("embedding_dense_backward", dense(9, 16), dense(9, dtype="int64"), 100000, -1, False, out=narrow)
    assert few["op"] == "embedding_backward"


def test_advanced_indices() -> None:
    x = dense(100, 20, 16)
    found = one("index", x, [INDEX], out=dense(500, 20, 16))
    assert (found["op"], found["rows"], found["cols"], found["size"], found["indices"]) == ("index", 500, 320, 100, 1)
    found = one("index", x, [None, INDEX, INDEX], out=dense(100, 500))
    assert (found["rows"], found["cols"], found["size"], found["indices"]) == (500, 100, 320, 2)
    put = calls("index_put", x, [INDEX], dense(500, 20, 16), True, out=x)
    assert [call["op"] for call in put] == ["copy", "index_put"]  # without the underscore into a copy
    assert put[1]["accumulate"] is True and put[1]["rows"] == 500
    put = calls("index_put_", x, [INDEX], dense(1), out=x)  # one number for all rows
    assert [(call["op"], call["rows"], call["cols"]) for call in put] == [("index_put", 500, 320)]
    added = calls("index_add_", dense(100, 16), 0, INDEX, dense(500, 16), out=dense(100, 16))
    assert [(c["op"], c["rows"], c["cols"], c["size"]) for c in added] == [("index_add", 500, 16, 100)]
    found = one("index_select", x, 1, INDEX, out=dense(100, 500, 16))  # 100 x 500 rows of 16
    assert (found["op"], found["rows"], found["cols"], found["size"]) == ("index", 50000, 16, 2000)


def test_gather_and_scatter_along_rows_and_columns() -> None:
    expanded = Tensor((500, 16), (1, 0), "int64")
    found = one("gather", dense(100, 16), 0, expanded, out=dense(500, 16))
    assert (found["op"], found["axis"], found["expanded"], found["size"]) == ("gather_elements", "rows", True, 100)
    found = one("gather", dense(500, 30), 1, dense(500, 16, dtype="int64"), out=dense(500, 16))
    assert (found["axis"], found["rows"], found["cols"], found["size"]) == ("cols", 500, 16, 30)
    mean = calls("scatter_reduce_", dense(100, 16), 0, expanded, dense(500, 16), "mean", out=dense(100, 16))
    assert [(call["op"], call["count"]) for call in mean] == [("scatter_add", 2)]  # the sum, and how many
    assert (
        calls("scatter", dense(500, 30), -1, dense(500, 16, dtype="int64"), dense(500, 16), out=dense(500, 30))[1]["op"]
        == "scatter"
    )


def test_sorting_and_counting() -> None:
    ids = dense(4096, dtype="int64")
    found = one("sort", ids, out=(ids, ids))
    assert (found["op"], found["rows"], found["cols"], found["keys"]) == ("sort", 1, 4096, "int64")
    down = calls("sort", dense(1000, 64), 0, out=(dense(1000, 64), dense(1000, 64)))
    assert [call["op"] for call in down] == ["pointwise", "sort"]
    assert (down[1]["rows"], down[1]["cols"]) == (64, 1000)
    assert one("topk", dense(64, 1000), 50, out=(dense(64, 50), dense(64, 50)))["k"] == 50
    assert one("kthvalue", dense(64, 1000), 50, out=(dense(64), dense(64)))["k"] == 1
    found = one("searchsorted", dense(30), dense(64, 1000), out=dense(64, 1000))
    assert (found["elements"], found["boundaries"]) == (64000, 30)
    assert one("bucketize", dense(64, 1000), dense(30), out=dense(64, 1000))["boundaries"] == 30
    assert one("histc", ids, 128, out=dense(128))["bins"] == 128


def test_feature_maps_are_joined_by_their_channels() -> None:
    for layout, parts in (("nchw", [X, X]), ("nhwc", [last(8, 64, 56, 56)] * 2)):
        out = dense(8, 128, 56, 56) if layout == "nchw" else last(8, 128, 56, 56)
        found = one("cat", parts, 1, out=out)
        assert (found["op"], found["channels"], found["spatial"], found["parts"]) == ("channel_cat", 128, 3136, 2)
        assert found["layout"] == layout
    assert one("cat", [dense(8, 64), dense(8, 64)], 1, out=dense(8, 128))["op"] == "cat"


def test_kernels_over_rows_copy_what_lies_across_first() -> None:
    across = Tensor((8, 1500, 1024), (1024 * 1500, 1, 1500), "bf16")  # a convolution's output, turned
    weight = dense(1024)
    found = calls("native_layer_norm", across, [1024], weight, weight, 1e-5, out=dense(8, 1500, 1024))
    assert [(call["op"], call["rows"]) for call in found] == [("transpose", 1024), ("layernorm", 12000)]
    given = (dense(8, 1500, 1024), across, [1024], dense(8, 1500, 1), dense(8, 1500, 1), weight, weight, [True] * 3)
    back = calls("native_layer_norm_backward", *given, out=dense(8, 1500, 1024))
    assert [call["op"] for call in back] == ["transpose", "layernorm_backward"]
    assert [call["op"] for call in calls("_softmax", across, -1, False, out=across)] == ["transpose", "softmax"]
    one_row = Tensor((1, 64), (999, 1), "bf16")  # an axis of one may have any stride
    assert [call["op"] for call in calls("_softmax", one_row, -1, False, out=one_row)] == ["softmax"]
