"""Fused steps: what joins, what crosses the boundary of a kernel, and that fusing only ever takes work away."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kernelcast.forecast.conditions import Conditions
from kernelcast.hardware import gpu
from kernelcast.tracing import trace
from kernelcast.tracing.aten.table import op_flops
from kernelcast.tracing.fusion import FUSED, boundary_bytes, fuse
from kernelcast.tracing.traced import Op, Trace
from kernelcast.training.step import run_step

ROWS, COLS = 512, 256
TENSOR = ROWS * COLS * 4  # bytes


def traced(function: object, *shapes: tuple[int, ...], mode: str = "inference") -> Trace:
    return trace(function, [torch.empty(shape, device="meta") for shape in shapes], mode, optimizer=None)  # type: ignore[arg-type]


def moved(op: Op) -> float:
    return boundary_bytes(op.inputs) + boundary_bytes(op.outputs or op.inputs[:1])


def total_bytes(found: Trace) -> float:
    return sum(moved(op) for op in found.kernels)


def names(found: Trace) -> list[str]:
    return [op.name for op in found.ops]


def test_a_chain_moves_what_crosses_its_boundary() -> None:
    found = fuse(traced(lambda x, y: (x * 2 + y).tanh(), (ROWS, COLS), (ROWS, COLS)))
    assert names(found) == [FUSED]
    assert boundary_bytes(found.ops[0].inputs) == 2 * TENSOR  # x and y; neither x * 2 nor the sum
    assert boundary_bytes(found.ops[0].outputs) == TENSOR


def test_what_others_read_is_written() -> None:
    found = fuse(traced(lambda x, w: ((x + 1).exp() @ w) + (x + 1).exp().sum(), (ROWS, COLS), (COLS, COLS)))
    assert "mm" in names(found)
    first = next(op for op in found.ops if op.name == FUSED)
    assert boundary_bytes(first.outputs) >= TENSOR


def test_softmax_with_what_scales_and_masks_it_is_one_kernel() -> None:
    found = fuse(traced(lambda x, mask: (x / 8 + mask).softmax(-1), (4, 8, 64, 64), (4, 1, 1, 64)))
    assert names(found) == [FUSED]
    assert found.ops[0].options["cols"] == 64
    assert boundary_bytes(found.ops[0].inputs) == 4 * 8 * 64 * 64 * 4 + 4 * 64 * 4


def test_rows_of_another_length_are_another_kernel() -> None:
    found = fuse(traced(lambda x: x.softmax(-1).view(ROWS * 2, COLS // 2).softmax(-1), (ROWS, COLS)))
    assert len(found.kernels) == 2


def test_branches_of_one_input_join_and_products_do_not() -> None:
    found = fuse(traced(lambda x, w: (0.5 * x) * (1 + (x**3).tanh()) @ w, (ROWS, COLS), (COLS, COLS)))
    assert names(found) == [FUSED, "mm"]
    assert found.ops[0].options["ops"] == 5


def test_no_two_kernels_wait_for_one_another() -> None:
    """y needs the product, which needs the sum: the last op cannot go back into the first kernel."""
    found = fuse(traced(lambda x, w: (x + 1).tanh() * ((x + 1).tanh() @ w).relu(), (ROWS, COLS), (COLS, COLS)))
    assert names(found).index("mm") < len(names(found)) - 1
    written: set[int] = set()
    inputs = {x.storage for op in found.ops for x in op.inputs} - {x.storage for op in found.ops for x in op.outputs}
    for op in found.ops:
        assert {x.storage for x in op.inputs} <= written | inputs
        written |= {x.storage for x in op.outputs}


class Block(nn.Module):
    """A layer of a transformer in parts."""

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.norm, self.heads, self.rate = nn.LayerNorm(width), heads, rate
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        shares = (parts[0] @ parts[1].transpose(-1, -2) / 8).softmax(-1)
        shares = nn.functional.dropout(shares, self.rate, self.training)
        x = x + self.out((shares @ parts[2]).transpose(1, 2).reshape(x.shape))
        inner = self.up(self.norm(x))
        return x + self.down(0.5 * inner * (1 + torch.tanh(inner + 0.04 * inner**3)))


@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 4),
    length=st.sampled_from([32, 128, 512]),
    heads=st.sampled_from([1, 4]),
    mode=st.sampled_from(["inference", "training"]),
    place=st.sampled_from(["a100_pcie", "v100_pcie", "h100_sxm"]),
)
def test_fusing_takes_bytes_and_time_away_and_no_work(
    batch: int, length: int, heads: int, mode: str, place: str
) -> None:
    before = trace(Block(256, heads, 0.1), torch.empty(batch, length, 256, device="meta"), mode, optimizer=None)  # type: ignore[arg-type]
    after = fuse(before)
    assert len(after.kernels) < len(before.kernels)
    assert total_bytes(after) <= total_bytes(before)
    assert sum(op_flops(op) for op in after.kernels) == sum(op_flops(op) for op in before.kernels)
    assert {op.phase for op in after.ops} == {op.phase for op in before.kernels}
    physics = Conditions(predictor="generic")
    faster, slower = (run_step(step, gpu(place), physics) for step in (after, before))
    assert faster.kernel_time_s <= slower.kernel_time_s * 1.001
    assert faster.time_s <= slower.time_s * 1.001
    assert faster.compiled and not slower.compiled


def test_special_functions_are_kept() -> None:
    found = fuse(traced(lambda x: x.exp().log().tanh(), (ROWS, COLS)))
    whole = sum(op.options["xu_ops"] for op in found.ops)
    assert whole >= 3 * ROWS * COLS


@pytest.mark.parametrize("name", ["embedding", "cumsum"])
def test_lookups_and_scans_stay(name: str) -> None:
    functions = {
        "embedding": lambda table: nn.functional.embedding(torch.ones(8, dtype=torch.int64), table + 1) * 2,
        "cumsum": lambda x: (x + 1).cumsum(-1) * 2,
    }
    assert name in names(fuse(traced(functions[name], (64, 32))))


def test_a_sum_of_everything_reads_once() -> None:
    found = fuse(traced(lambda x, y: ((x - y) ** 2).mean(), (ROWS, COLS), (ROWS, COLS)))
    assert names(found) == [FUSED]
    assert moved(found.ops[0]) == 2 * TENSOR + 4  # both tensors; one number


def test_a_norm_with_statistics_of_its_input_reads_it_twice() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x.relu(), None, None, training=True).relu()

    found = fuse(traced(block, (4, 8, 16, 16)))
    size = 4 * 8 * 16 * 16 * 4
    assert [boundary_bytes(op.inputs) // size for op in found.kernels] == [1, 1]
    assert sum(moved(op) for op in found.kernels) == pytest.approx(4 * size, rel=0.02)  # and relu's result is kept


def test_a_layer_norm_of_long_rows_reads_them_twice() -> None:
    """Few long rows are split among CTAs: a kernel for the statistics, one that reads x again and weight and bias."""
    found = fuse(traced(nn.LayerNorm((4, 4096)), (16, 4, 4096)))
    x = 16 * 4 * 4096 * 4
    assert [op.name for op in found.ops] == ["var_mean", FUSED]
    assert sum(moved(op) for op in found.ops) == pytest.approx(
        3 * x + 2 * x / 16, rel=0.001
    )  # read twice, written once
    assert names(fuse(traced(nn.LayerNorm(4096), (16, 4096)))) == ["native_layer_norm"]


@pytest.mark.parametrize("dim", [1, -1])
def test_softmax_and_logsumexp_of_any_axis_join_what_surrounds_them(dim: int) -> None:
    found = fuse(traced(lambda x: (x + 1).softmax(dim).sigmoid(), (8, 64, 128)))
    assert names(found) == [FUSED] and moved(found.ops[0]) == 2 * 8 * 64 * 128 * 4
    found = fuse(traced(lambda x: torch.logsumexp(x, dim), (8, 64, 128)))
    assert names(found) == [FUSED] and boundary_bytes(found.ops[0].inputs) == 8 * 64 * 128 * 4


def test_a_convolution_channels_last_is_copied_to_the_format_of_the_eager_result() -> None:
    convolution, copy = fuse(traced(nn.Conv2d(16, 64, 3, bias=False), (8, 16, 30, 30))).ops
    assert convolution.outputs[0].stride[1] == 1 and (copy.name, copy.outputs[0].stride[3]) == (FUSED, 1)
    assert moved(copy) == 2 * 8 * 64 * 28 * 28 * 4
    joined = fuse(traced(nn.Sequential(nn.Conv2d(16, 64, 3, bias=False), nn.ReLU()), (8, 16, 30, 30))).ops
    assert [op.name for op in joined] == ["convolution", FUSED]  # which writes it so
    assert moved(joined[1]) == moved(copy)


@pytest.mark.parametrize(("window", "name"), [(5, FUSED), (6, "max_pool2d_with_indices")])
def test_small_windows_are_pooled_where_the_result_is_needed(window: int, name: str) -> None:
    found = fuse(traced(nn.Sequential(nn.MaxPool2d(window), nn.ReLU()), (8, 16, 60, 60)))
    assert names(found)[0] == name and len(found.ops) == (1 if name == FUSED else 2)


def test_both_branches_of_a_sum_run_where_it_is_made() -> None:
    found = fuse(traced(lambda x, w, v: (x @ w).relu() + (x @ v).tanh(), (ROWS, COLS), (COLS, COLS), (COLS, COLS)))
    assert sorted(names(found)) == [FUSED, "mm", "mm"]
    fused = found.ops[names(found).index(FUSED)]
    assert moved(fused) == 3 * TENSOR  # two products and the sum
