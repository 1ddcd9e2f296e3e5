"""Hand-worked demand of layers over feature maps: norms, pooling, resampling, layouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from demand import of, one, whole, works

import kernelcast as kc
from kernelcast.hardware import gpu
from kernelcast.ops import kernel
from kernelcast.ops.vector import paced, vector_kernel

H100 = gpu("h100_sxm")


def test_ctas_start_no_faster_than_the_gpu_starts_them() -> None:
    tasks = np.array([1e6])
    work = paced(vector_kernel(H100, tasks=tasks, threads=32.0, moved_bytes=tasks * 32, steps=2.0), H100)
    # 32 CTAs of a warp are resident on each of 132 SMs; at 0.84 a cycle a round of them takes 5,029 cycles, two steps
    assert of(work, "step_cycles") == pytest.approx(132 * 32 / 0.84 / 2)
    one_cta = paced(vector_kernel(H100, tasks=np.ones(1), threads=32.0, moved_bytes=np.full(1, 32.0)), H100, 700.0)
    assert of(one_cta, "step_cycles") == 700  # steps take longer than the start of one


def test_batch_norm_walks_a_channel_through_all_images() -> None:
    collect, small, normalise = works("batch_norm", batch=32, channels=64, spatial=12544)
    elements = 32 * 64 * 12544
    # a CTA a channel; 512 threads side by side take 12,544 pixels in 25 steps, 32 images one after another
    assert (of(collect, "tasks"), of(collect, "threads"), of(collect, "serial_steps")) == (64, 512, 25 * 32)
    assert of(collect, "activation_bytes") == elements * 2
    assert of(small, "launches") == 1
    # (64 channels, 32 images) of 512 threads
    assert (of(normalise, "tasks"), of(normalise, "serial_steps")) == (64 * 32, 25)
    assert of(normalise, "activation_bytes") == 2 * elements * 2


def test_batch_norm_of_small_maps_puts_images_side_by_side() -> None:
    collect, _, normalise = works("batch_norm", batch=32, channels=2048, spatial=49)
    # 64 threads cover 49 pixels, 8 images at a time: 4 steps
    assert (of(collect, "tasks"), of(collect, "threads"), of(collect, "serial_steps")) == (2048, 512, 4)
    assert (of(normalise, "tasks"), of(normalise, "threads")) == (2048 * 32, 64)
    kept = works("batch_norm", batch=32, channels=2048, spatial=49, training=False)
    assert len(kept) == 2 and of(kept[0], "launches") == 2  # 1/σ and a copy, then the normalisation


def test_batch_norm_gradient_reads_twice_and_channels_last_in_two_kernels() -> None:
    back = one("batch_norm_backward", batch=32, channels=64, spatial=12544)
    elements = 32 * 64 * 12544
    assert of(back, "activation_bytes") == 3 * elements * 2  # x and dy in, dx out
    assert of(back, "refetched_bytes") == 2 * elements * 2  # x and dy again, beyond L2
    assert of(back, "serial_steps") == 2 * 25 * 32
    sums, apply = works("batch_norm_backward", batch=32, channels=64, spatial=12544, layout="nhwc")
    # 32 channels x 16 rows of threads; 401,408 rows over 128 CTAs, of which each thread takes 196, four at a time
    assert (of(sums, "tasks"), of(sums, "threads"), of(sums, "serial_steps")) == (2 * 128, 512, 49)
    assert of(apply, "activation_bytes") == 3 * elements * 2


def test_rows_of_a_few_channels_are_not_shared_by_ctas() -> None:
    collect, _, _ = works("batch_norm", batch=32, channels=2048, spatial=49, layout="nhwc")
    # 1,568 rows / (16 x 16) = 7 CTAs would share them: fewer than 8 do not
    assert of(collect, "tasks") == 2048 / 32


@pytest.mark.parametrize(
    ("dtype", "weights", "kernels"),
    [("fp32", None, 1), ("fp16", "fp32", 1), ("fp16", None, 3), ("bf16", "fp32", 3), ("bf16", None, 3)],
)
def test_cudnn_takes_what_pytorch_gives_it(dtype: str, weights: str | None, kernels: int) -> None:
    given = {"weights": weights} if weights else {}
    assert len(works("batch_norm", batch=8, channels=64, spatial=3136, dtype=dtype, **given)) == kernels


def test_group_norm_takes_a_cta_for_each_group_of_an_image() -> None:
    moments, params, apply = works("group_norm", batch=8, channels=320, spatial=4096, groups=32)
    elements = 8 * 320 * 4096
    # 10 channels of 4,096 pixels by 512 threads: 80 steps
    assert (of(moments, "tasks"), of(moments, "threads"), of(moments, "serial_steps")) == (256, 512, 80)
    assert whole(moments, "xu_ops") == elements
    assert of(params, "tasks") == 8 * 320 / 256
    assert of(apply, "activation_bytes") == 2 * elements * 2
    back = works("group_norm_backward", batch=8, channels=320, spatial=4096, groups=32)
    assert [of(work, "tasks") for work in back[:3]] == [2560, 10, 256]  # a channel of an image; a number each; a group
    assert of(back[3], "activation_bytes") == 3 * elements * 2
    with pytest.raises(kc.KernelcastError, match="channels 100 is no multiple of groups 32"):
        kernel("group_norm", batch=1, channels=100, spatial=1, groups=32)


POOL: dict[str, Any] = {"batch": 32, "channels": 64, "height": 112, "width": 112}


def test_max_pool_writes_places_of_eight_bytes() -> None:
    work = one("max_pool", **POOL, kernel_h=3, kernel_w=3, stride=2, padding=1)
    outputs = 32 * 64 * 56 * 56
    assert of(work, "activation_bytes") == 32 * 64 * 112 * 112 * 2 + outputs * (2 + 8)
    assert (of(work, "tasks"), of(work, "threads")) == (outputs / 256, 256)
    zeros, back = works("max_pool_backward", **POOL, kernel_h=3, kernel_w=3, stride=2, padding=1)
    assert of(zeros, "activation_bytes") == 32 * 64 * 112 * 112 * 2
    assert of(back, "tasks") == 32 * 64 * 49  # 12,544 pixels / 256, no CTA of two channels
    small = works("max_pool_backward", batch=32, channels=64, height=7, width=7, kernel_h=2, kernel_w=2, stride=2)[1]
    assert of(small, "tasks") == 32 * 64  # each 49 of 256 threads


def test_max_pool_channels_last_is_cut_along_channels_rows_and_columns() -> None:
    work = one("max_pool", **POOL, kernel_h=3, kernel_w=3, stride=2, padding=1, layout="nhwc")
    # 32 channels x 32 columns of threads; 64 channels in one go (4 each), 56 columns and rows in steps of 64 and 2
    assert (of(work, "tasks"), of(work, "threads")) == (32 * 1 * 1 * 28, 1024)


def test_windows_that_leave_gaps_do_not_read_all() -> None:
    work = one("avg_pool", batch=1, channels=8, height=64, width=64, kernel_h=1, kernel_w=1, stride=4)
    assert of(work, "activation_bytes") == 2 * 8 * 16 * 16 * 2


def test_padding_is_at_most_half_of_a_window_along_each_axis() -> None:
    row = one("avg_pool", batch=1, channels=8, height=1, width=100, kernel_h=1, kernel_w=3, stride=2, padding=1)
    assert of(row, "activation_bytes") == (8 * 100 + 8 * 50) * 2  # (100 + 2 - 3) // 2 + 1 = 50 outputs, one row
    with pytest.raises(kc.KernelcastError, match="does not fit"):
        kernel("max_pool", batch=1, channels=1, height=4, width=4, kernel_h=7, kernel_w=7, stride=1)


def test_volumes_are_cut_into_tiles_of_32_by_8() -> None:
    work = one(
        "max_pool", batch=2, channels=4, depth=8, height=28, width=28, kernel_d=2, kernel_h=2, kernel_w=2, stride=2
    )
    assert (of(work, "tasks"), of(work, "threads")) == (2 * 4 * 4 * 1 * 2, 256)  # 14 x 14 outputs of each of 4 frames


def test_adaptive_pooling_takes_a_cta_a_channel() -> None:
    sizes: dict[str, Any] = {"batch": 32, "channels": 512, "height": 14, "width": 14, "out_height": 7, "out_width": 7}
    work = one("adaptive_avg_pool", **sizes)
    assert (of(work, "tasks"), of(work, "serial_steps")) == (32 * 512, 40 + 4)  # windows of 2 x 2
    assert of(work, "activation_bytes") == 32 * 512 * (196 + 49) * 2
    zeros, even = works("adaptive_avg_pool_backward", **sizes)
    assert of(zeros, "activation_bytes") == 32 * 512 * 196 * 2
    assert of(even, "serial_steps") == 1 + 2 * 1  # 14 rows by 8 threads; an input lies in one window
    _, uneven = works("adaptive_avg_pool_backward", **{**sizes, "height": 15})
    assert of(uneven, "serial_steps") == 4 + (3 + 1) * 2  # windows of up to 4 rows, added to by atomics


IMAGE: dict[str, Any] = {"batch": 8, "channels": 256, "height": 64, "width": 64, "out_height": 128, "out_width": 128}


def test_bilinear_threads_go_through_all_images() -> None:
    moved = 8 * 256 * (64 * 64 + 128 * 128) * 2
    work = one("interpolate", **IMAGE, mode="bilinear")
    assert (of(work, "tasks"), of(work, "serial_steps")) == (16, 8 * 256)  # 128 x 128 / 1024 CTAs
    assert of(work, "activation_bytes") == moved
    last = one("interpolate", **IMAGE, mode="bilinear", layout="nhwc")
    assert (of(last, "tasks"), of(last, "serial_steps")) == (8 * 256 * 16, 1)
    assert len(works("interpolate", **IMAGE, mode="bicubic")) == 2  # and zeros before
    zeros, added = works("interpolate_backward", **IMAGE, mode="bilinear")
    assert of(zeros, "activation_bytes") == 8 * 256 * 64 * 64 * 2
    assert of(added, "activation_bytes") == moved + 8 * 256 * 64 * 64 * 2  # dx is read to be added to


def test_padding_and_moving() -> None:
    sizes: dict[str, Any] = {"images": 100, "height": 8, "width": 8, "out_height": 10, "out_width": 10}
    fill, copy = works("pad", **sizes)
    assert (of(fill, "activation_bytes"), of(copy, "activation_bytes")) == (100 * 100 * 2, 2 * 100 * 64 * 2)
    assert of(one("pad", **sizes, mode="reflect"), "activation_bytes") == 100 * (64 + 100) * 2
    assert len(works("pad_backward", **sizes)) == 1 and len(works("pad_backward", **sizes, mode="replicate")) == 2
    turned = one("channels_last", batch=2, channels=64, spatial=100)
    assert of(turned, "activation_bytes") == 2 * 2 * 64 * 100 * 2
    # a sector for each element read, of which L1 has kept two fifths
    assert whole(turned, "l2_bytes") == pytest.approx(2 * 64 * 100 * (2 + 2 + 0.6 * 30))
    assert of(one("roll", outer=2, length=7, inner=512), "tasks") == math.ceil(2 * 7 * 512 / 512)
    joined = one("channel_cat", batch=2, channels=64, spatial=100, parts=4)
    assert of(joined, "activation_bytes") == 2 * 2 * 64 * 100 * 2


def test_batch_norm_reads_from_dram_again_what_l2_does_not_hold() -> None:
    """64 channels of 4 MiB: an L4's 48 MiB hold none of them until the second pass, which reads 256 MiB again. On an
    H200 so few CTAs are slower than its DRAM."""
    call = {"batch": 16, "channels": 64, "spatial": 65536, "dtype": "fp32", "layout": "nchw", "stack": "torch"}
    for name, again in (("l4", 2**28), ("h200_sxm", 0)):
        assert [float(np.max(work.refetched_bytes)) for work in works("batch_norm", name, **call)] == [again]


def test_a_pointwise_kernel_is_vectorised_where_nothing_else_is_said() -> None:
    """1 GiB in and out: strided kernels of an H200 reach half of DRAM's rate; vectorised ones are no such kernels."""
    call = {"rows": 2**18, "cols": 1024, "dtype": "fp32", "stack": "torch"}
    plain, strided = (kc.predict(kernel("pointwise", **call, access=way), "h200_sxm") for way in (None, "strided"))
    assert plain.time_s < 0.8 * strided.time_s
