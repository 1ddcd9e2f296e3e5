"""moe by hand: padded rows, weights read, experts that get no token."""

from __future__ import annotations

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.ops.base import columns_of, kernel_class, parameters_of
from kernelcast.ops.grouped import TRITON_CONFIG
from kernelcast.ops.moe import Moe, RankLayer
from kernelcast.ops.routing import balanced_blocks
from kernelcast.ops.work import axis

MIXTRAL = {"hidden": 4096, "inter": 14336, "experts": 8, "topk": 2}


def layer(**parameters: object) -> RankLayer:
    return RankLayer.of(columns_of([kc.kernel("moe", **{**MIXTRAL, **parameters})]))


def test_padded_rows_of_a_balanced_layer() -> None:
    # 100 tokens x 2 = 200 pairs over 8 experts: 25 each, padded to 32 with block_m 16: 8 x 2 = 16 blocks.
    assert layer(tokens=100).blocks(axis([16]))[0, 0] == 16
    # with block_m 64 each expert is one block
    assert layer(tokens=100).blocks(axis([64]))[0, 0] == 8
    # 101 tokens: 202 pairs, two experts with 26 rows: the same blocks of 16
    assert layer(tokens=101).blocks(axis([16]))[0, 0] == 16
    # 3 pairs over 8 experts: three experts with one row
    assert balanced_blocks(np.array([3.0]), np.array([8.0]), axis([16]))[0, 0] == 3


def test_only_experts_with_tokens_are_read() -> None:
    # one token goes to 2 of 8 experts: two experts' w13 (4096 x 28672) and w2 (14336 x 4096), in bf16
    p = kc.predict(kc.kernel("moe", tokens=1, **MIXTRAL), "h200_sxm")
    assert sum(phase.dram_bytes for phase in p.kernels) == 2 * (4096 * 28672 + 14336 * 4096) * 2
    assert p.bound_by == "dram"
    full = kc.predict(kc.kernel("moe", tokens=1024, **MIXTRAL), "h200_sxm")
    assert sum(phase.dram_bytes for phase in full.kernels) >= 8 * (4096 * 28672 + 14336 * 4096) * 2


def test_ranks_hold_their_share() -> None:
    whole, cut = layer(tokens=1024), layer(tokens=1024, tp=2, ep=4)
    assert cut.inter[0] == whole.inter[0] / 2
    assert cut.experts[0] == 2
    assert cut.pairs[0] == whole.pairs[0] / 4
    assert cut.around[0] == cut.pairs[0]
    assert layer(tokens=1024, ep=4, backend="triton").around[0] == whole.pairs[0]


def test_skew_leaves_experts_idle_and_fills_others() -> None:
    even, skewed = layer(tokens=64, experts=128, topk=8), layer(tokens=64, experts=128, topk=8, skew=1.2)
    assert even.active()[0] == 128
    assert skewed.active()[0] < 128
    load, share = skewed._skewed()
    # no pair is lost but those over the tokens an expert can get
    assert float(np.sum(load * share)) <= 64 * 8 + 1e-6
    assert float(np.max(load)) <= 64


def test_given_blocks_are_used() -> None:
    call = kc.kernel("moe", tokens=512, **MIXTRAL, block_m=32, block_n=64, block_k=64, warps=4, stages=3)
    tile = kc.predict(call, "a100_sxm").kernels[1].tile
    assert (tile["block_m"], tile["block_n"], tile["block_k"]) == (32, 64, 64)
    # 1024 pairs / 8 experts = 128 rows = 4 blocks each
    assert tile["row_blocks"] == 32


def test_five_kernels_in_turn() -> None:
    works = Moe.work(columns_of([kc.kernel("moe", tokens=512, **MIXTRAL)]), kc.gpu("a100_sxm"))
    assert len(works) == 5
    # both GEMMs: 2 x pairs x (hidden x 2 inter + inter x hidden)
    useful = sum(float(np.max(np.broadcast_to(works[i].useful_flops, (1, 1)))) for i in (1, 3))
    assert useful == 2 * 1024 * (4096 * 28672 + 14336 * 4096)


@pytest.mark.parametrize(
    ("bad", "says"),
    [({"tp": 3}, "is no multiple of"), ({"ep": 3}, "is no multiple of"), ({"topk": 9}, "more than experts"),
     ({"skew": -1}, "from 0"), ({"dtype": "fp32"}, "unknown dtype")],
)  # fmt: skip
def test_contradictions_are_refused(bad: dict[str, object], says: str) -> None:
    with pytest.raises(kc.KernelcastError, match=says):
        layer(tokens=8, **bad)


@pytest.mark.parametrize(("op", "own_last"), [("moe", "backend"), ("moe_gemm", "second")])
def test_a_config_is_listed_after_the_sizes_of_a_layer(op: str, own_last: str) -> None:
    names = list(parameters_of(kernel_class(op)))
    assert names[0] == "tokens"
    assert names[names.index(own_last) + 1 :] == [*TRITON_CONFIG, "dtype", "stack"]


def test_a_config_given_in_part_means_the_same_in_any_company() -> None:
    """A call whose block_m is given has nothing to choose from, also beside one that chooses."""
    sizes = {"tokens": 3446, "experts": 50, "topk": 1, "k": 2122, "n": 3981, "dtype": "fp16"}
    calls = [kc.kernel("moe_gemm", **sizes, block_m=116, group_m=7, stages=1), kc.kernel("moe_gemm", **sizes)]
    together = [found.time_s for found in kc.predict_many(calls, "mi300x")]
    assert together == [kc.predict(call, "mi300x").time_s for call in calls]
