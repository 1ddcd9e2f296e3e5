"""Runners of spatial and indexed ops launch what their calls say: tried on the CPU, where autograd is the same."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernelcast.collect.choose import choose  # noqa: E402
from kernelcast.collect.families.indexed import TABLE as INDEXED  # noqa: E402
from kernelcast.collect.families.vision import TABLE as VISION  # noqa: E402
from kernelcast.collect.pool import TensorPool  # noqa: E402
from kernelcast.collect.runners import indexed, vision  # noqa: E402
from kernelcast.hardware import gpu  # noqa: E402
from kernelcast.ops import REGISTRY, kernel  # noqa: E402

RUNNERS = {
    op: runner
    for op, runner in {**vision.RUNNERS, **indexed.RUNNERS}.items()
    if REGISTRY[op].family in ("spatial", "indexed")
}
SMALL: dict[str, dict[str, Any]] = {
    "batch_norm": {"batch": 4, "channels": 8, "spatial": 30, "weights": "fp32"},
    "group_norm": {"batch": 4, "channels": 8, "spatial": 30, "groups": 4},
    "max_pool": {"batch": 2, "channels": 4, "height": 9, "width": 8, "kernel_h": 3, "kernel_w": 2, "stride": 2,
                 "padding": 1, "layout": "nhwc"},
    "avg_pool": {"batch": 2, "channels": 4, "height": 9, "width": 8, "depth": 4, "kernel_d": 2, "kernel_h": 3,
                 "kernel_w": 2, "stride": 2, "dtype": "fp32"},
    "adaptive_avg_pool": {"batch": 2, "channels": 4, "height": 9, "width": 8, "out_height": 3, "out_width": 4},
    "interpolate": {"batch": 2, "channels": 4, "height": 9, "width": 8, "out_height": 18, "out_width": 12,
                    "mode": "bilinear", "layout": "nhwc"},
    "pad": {"images": 6, "height": 9, "width": 8, "out_height": 12, "out_width": 9, "mode": "reflect"},
    "channels_last": {"batch": 2, "channels": 4, "spatial": 12},
    "channel_cat": {"batch": 2, "channels": 11, "spatial": 12, "parts": 3, "layout": "nhwc"},
    "roll": {"outer": 2, "length": 7, "inner": 3, "shift": 2},
    "embedding_bag": {"bags": 5, "pooling": 3, "hidden": 8, "vocab": 40, "dtype": "fp32", "mode": "mean"},
    "gather_elements": {"rows": 6, "cols": 4, "size": 9, "expanded": True},
    "scatter": {"rows": 6, "cols": 4, "size": 9, "axis": "cols"},
    "scatter_add": {"rows": 6, "cols": 4, "size": 9},
    "index": {"rows": 6, "cols": 4, "size": 9, "indices": 2},
    "index_add": {"rows": 6, "cols": 4, "size": 9},
    "index_put": {"rows": 6, "cols": 4, "size": 9, "accumulate": True},
    "sort": {"rows": 3, "cols": 17, "keys": "int64"},
    "topk": {"rows": 3, "cols": 17, "k": 5},
    "searchsorted": {"elements": 50, "boundaries": 6, "dtype": "fp32"},
    "histogram": {"elements": 50, "bins": 6, "dtype": "fp32"},
}  # fmt: skip
SHAPES = {  # of what a launch gives back
    "batch_norm": (4, 8, 5, 6), "batch_norm_backward": (4, 8, 5, 6), "max_pool": (2, 4, 5, 5),
    "avg_pool_backward": (2, 4, 4, 9, 8), "adaptive_avg_pool": (2, 4, 3, 4), "interpolate": (2, 4, 18, 12),
    "pad": (3, 2, 12, 9), "pad_backward": (3, 2, 9, 8), "channel_cat": (2, 11, 3, 4), "embedding_bag": (5, 8),
    "embedding_bag_backward": (40, 8), "gather_elements": (6, 4), "scatter": (6, 9), "scatter_add": (9, 4),
    "index": (6, 4), "index_add": (9, 4), "sort": (3, 17), "topk": (3, 5), "histogram": (6,),
}  # fmt: skip


@pytest.mark.parametrize("op", sorted(RUNNERS))
def test_every_runner_launches(op: str) -> None:
    call = kernel(op, **{**SMALL[op.removesuffix("_backward")], "stack": "torch"})
    pool = TensorPool(2**20, l2_bytes=2**14, device="cpu")
    recipe = RUNNERS[op](call)
    for tensors in pool.sets(*recipe.tensors)[:2]:
        launch = recipe.launch(*tensors)
        found: Any = launch()
        assert launch is not None
        first = found[0] if isinstance(found, tuple) else found
        if op in SHAPES:
            assert tuple(first.shape) == SHAPES[op]
        launch()  # again and again, as a graph replays it


def test_every_op_of_both_families_has_a_runner_and_is_drawn() -> None:
    ops = {op for op, cls in REGISTRY.items() if cls.family in ("spatial", "indexed")}
    assert ops == set(RUNNERS)
    drawn = choose(
        gpu("h200_sxm"), 1500, only=[*(name for name in VISION if not name.startswith("conv")), *INDEXED], seed=1
    )
    assert {wanted.call.op for wanted in drawn} == ops


def test_a_channels_last_map_is_given_as_one() -> None:
    call = kernel("max_pool", **SMALL["max_pool"], stack="torch")
    recipe = RUNNERS["max_pool"](call)
    (x,) = TensorPool(2**20, l2_bytes=2**14, device="cpu").sets(*recipe.tensors)[0]
    found: Any = recipe.launch(x)()
    assert found.is_contiguous(memory_format=torch.channels_last)
