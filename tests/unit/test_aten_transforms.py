"""Fourier transforms, sampled grids and CTC loss as kernel calls, with their bytes by hand."""

from __future__ import annotations

from typing import Any

import pytest
from demand import of, works

from kernelcast.tracing.aten import OpSettings, op_launches
from kernelcast.tracing.traced import Op, Tensor


def dense(*shape: int, dtype: str = "fp32") -> Tensor:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return Tensor(shape, tuple(reversed(stride)), dtype, 1)


def launched(name: str, *arguments: Any, out: tuple[Tensor, ...]) -> list[dict[str, Any]]:
    found = op_launches(Op(name, arguments, {}, out, "kernel", "forward", ""), OpSettings())
    assert not found.by_bytes
    return [{**launch.call.arguments, "count": launch.count} for launch in found.launches]


def moved(call: dict[str, Any]) -> tuple[float, float]:
    """Bytes read and written."""
    total = call["rows"] * call["cols"] * 4
    return round(call["reads"] * total, -1), round(call["writes"] * total, -1)


@pytest.mark.parametrize(("length", "kernels"), [
    (400, 1), (8192, 1), (8193, 2 * 8), (160000, 2), (1009, 8),
])  # fmt: skip
def test_a_transform_is_a_pass_where_rows_fit_in_shared_memory(length: int, kernels: int) -> None:
    """8,193 = 3 x 2,731 and 1,009 have prime factors above 127, for which cuFFT takes eight times the passes."""
    x, out = dense(16, length), dense(16, length // 2 + 1, dtype="complex64")
    found = launched("_fft_r2c", x, [1], 0, True, out=(out,))
    assert len(found) == kernels
    written = 16 * (length // 2 + 1) * 8
    assert moved(found[0]) == pytest.approx((16 * length * 4, written), rel=1e-3)


def test_each_axis_has_its_pass_and_what_is_around_it() -> None:
    image = dense(8, 224, 224, dtype="complex64")
    last, first = launched("_fft_c2c", image, [1, 2], 0, True, out=(image,))
    assert last.get("access") is None and first["access"] == "strided"  # rows lie end to end, columns across
    half = dense(8, 4097, dtype="complex64")
    copy, transform, scale = launched("_fft_c2r", half, [1], 2, 8192, out=(dense(8, 8192),))
    assert moved(copy) == pytest.approx((8 * 4097 * 8,) * 2, rel=1e-3)  # cuFFT writes over its input
    assert moved(transform) == pytest.approx((8 * 4097 * 8, 8 * 8192 * 4), rel=1e-3)
    assert moved(scale) == pytest.approx((8 * 8192 * 4,) * 2, rel=1e-3)


def test_frames_are_added_up_where_they_overlap() -> None:
    frames, wave = dense(16, 1001, 400), dense(16, 160400)
    fill, added = launched("unfold_backward", frames, [16, 160400], 1, 400, 160, out=(wave,))
    assert fill["op"] == "fill" and fill["rows"] * fill["cols"] == 16 * 160400
    assert moved(added) == pytest.approx((frames.bytes, wave.bytes), rel=1e-3)


def test_points_of_a_grid_read_at_most_four_neighbours() -> None:
    x, grid, out = dense(8, 64, 56, 56), dense(8, 7, 7, 2), dense(8, 64, 7, 7)
    (sampled,) = launched("grid_sampler_2d", x, grid, 0, 0, False, out=(out,))
    read = 4 * 8 * 64 * 49 * 4 + 8 * 49 * 2 * 4  # of each point, and the grid
    assert moved(sampled) == pytest.approx((read, 8 * 64 * 49 * 4), rel=1e-3)
    fill, added = launched("grid_sampler_2d_backward", out, x, grid, 0, 0, False, (True, True), out=(x, grid))
    assert fill["op"] == "fill" and fill["rows"] * fill["cols"] == 8 * 64 * 56 * 56
    assert moved(added)[1] == pytest.approx(4 * 8 * 64 * 49 * 4 + 8 * 49 * 2 * 4, rel=1e-3)  # four atomics a number
    (grid_alone,) = launched("grid_sampler_2d_backward", out, x, grid, 0, 0, False, (False, True), out=(grid,))
    assert moved(grid_alone)[1] == pytest.approx(8 * 49 * 2 * 4, rel=2e-2)


def test_an_affine_grid_ends_in_small_products() -> None:
    *_, product = launched("affine_grid_generator", dense(8, 2, 3), [8, 64, 56, 56], False, out=(dense(8, 56, 56, 2),))
    assert [product[name] for name in ("batch", "m", "n", "k")] == [8, 56 * 56, 2, 3]


def test_ctc_walks_over_the_steps() -> None:
    chances, alpha = dense(500, 16, 32), dense(16, 500, 121)
    labels = dense(16, 60, dtype="int64")
    (forward,) = launched("_ctc_loss", chances, labels, (), (), 0, out=(dense(16), alpha))
    told = {"op": "ctc_loss", "batch": 16, "steps": 500, "targets": 60, "classes": 32, "backward": False}
    assert forward == {**told, "dtype": "fp32", "stack": "torch", "count": 1}
    arguments = (dense(16), chances, labels, (), (), dense(16), alpha, 0)
    (backward,) = launched("_ctc_loss_backward", *arguments, out=(chances,))
    assert backward["backward"] and backward["targets"] == 60
    (walk,) = works("ctc_loss", batch=16, steps=500, targets=60, classes=32, dtype="fp32")
    assert of(walk, "serial_steps") == 500
    assert of(walk, "threads") == 128 * 8  # 121 states, eight sequences a CTA
    assert of(walk, "tasks") == 2
    _, gradient = works("ctc_loss", batch=16, steps=500, targets=60, classes=32, backward=True, dtype="fp32")
    assert of(gradient, "activation_bytes") == (2 * 16 * 500 * 32 + 2 * 16 * 500 * 121) * 4


def test_a_normed_weight_is_read_twice() -> None:
    v, g = dense(64, 32, 7), dense(64, 1, 1)
    (norm,) = launched("_weight_norm_interface", v, g, 0, out=(v, g))
    assert moved(norm) == pytest.approx((2 * 64 * 32 * 7 * 4, (64 * 32 * 7 + 64) * 4), rel=1e-3)


def test_distances_are_a_product_of_rows_with_their_squares() -> None:
    *around, product, clamp, root = launched(
        "_euclidean_dist", dense(8, 500, 64), dense(8, 300, 64), out=(dense(8, 500, 300),)
    )
    assert [product[name] for name in ("op", "batch", "m", "n", "k")] == ["bmm", 8, 500, 300, 66]
    assert len(around) == 6 and moved(clamp) == moved(root) == pytest.approx((8 * 500 * 300 * 4,) * 2, rel=1e-3)
