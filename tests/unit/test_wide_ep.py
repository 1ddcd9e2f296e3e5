"""Wide expert parallelism by hand: where tokens go, what crosses which link, the busiest rank, hyper-connections."""

from __future__ import annotations

from itertools import pairwise
from math import comb

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.ops.base import Kernel, columns_of
from kernelcast.ops.expert_exchange import row_bytes
from kernelcast.ops.moe import Moe
from kernelcast.ops.routing import ExpertRouting, busiest, groups_reached
from kernelcast.ops.work import Array, Work

V3 = {"hidden": 7168, "topk": 8, "experts": 256}


def works(call: Kernel, gpu: str = "h200_sxm") -> tuple[Work, ...]:
    return type(call).work(columns_of([call]), kc.gpu(gpu))


def number(value: float) -> Array:
    return np.array([float(value)])


def one(value: Array | float) -> float:
    return float(np.ravel(value)[0])


def routing(tokens: int, ep: int = 1, skew: float = 0.0, *, random: bool = False, **more: float) -> ExpertRouting:
    slots = 256 + more.get("spare", 0.0)
    return ExpertRouting(number(tokens), number(8), number(slots / ep), number(ep), number(skew), random, **more)


# ---- where tokens go ----


def test_ranks_that_a_token_reaches() -> None:
    # 8 of 256 experts miss a given rank of 32 with C(224, 8) / C(256, 8) = 0.338: 8 x 0.662 = 5.29 ranks
    missed = comb(224, 8) / comb(256, 8)
    assert one(groups_reached(number(8), number(8), number(256), "random")) == pytest.approx(8 * (1 - missed))
    assert 8 * (1 - missed) == pytest.approx(5.29, abs=0.01)
    assert one(groups_reached(number(8), number(8), number(256), "balanced")) == 8
    assert one(groups_reached(number(64), number(8), number(256), "balanced")) == 8  # no more than it has experts
    assert one(groups_reached(number(8), number(1), number(256), "random")) == pytest.approx(1)


def test_dispatch_within_a_node_sends_a_row_to_each_other_rank() -> None:
    call = kc.kernel("deepep_dispatch", tokens=1000, world=8, **V3)
    # a row: 7,168 bytes of fp8, a 4-byte scale for each 128 of them, 16 of head
    row = 7168 * (1 + 4 / 128) + 16
    assert one(row_bytes(columns_of([call]))) == row == 7408
    ranks = 8 * (1 - comb(224, 8) / comb(256, 8))
    (work,) = works(call)
    assert one(work.link_bytes) == pytest.approx(1000 * ranks * 7 / 8 * row)
    assert work.link == ""
    # 24 SMs read and store each row, here and at the peer
    assert one(work.tasks) == 24
    assert one(work.l2_bytes) * 24 == pytest.approx(1000 * 4 * ranks * row)


def test_a_token_crosses_the_network_once_to_each_node() -> None:
    call = kc.kernel("deepep_combine", tokens=1000, world=32, nodes=4, fabric="ib_ndr", **V3)
    places = 4 * (1 - comb(192, 8) / comb(256, 8))
    (work,) = works(call)
    assert work.link == "ib_ndr"
    # bf16, and three of four nodes are elsewhere; NVLink (450 GB/s) has more rows but is done sooner than 50 GB/s
    assert one(work.link_bytes) == pytest.approx(1000 * places * 3 / 4 * (2 * 7168 + 16))
    # DeepSeek-V3 picks experts of 4 nodes at most: of 8 nodes a token reaches no more than of 4, 7/8 of them elsewhere
    wide = kc.kernel("deepep_combine", tokens=1000, world=64, nodes=8, node_limit=4, fabric="ib_ndr", **V3)
    reach = 4 * (1 - comb(96, 8) / comb(128, 8))
    assert one(works(wide)[0].link_bytes) == pytest.approx(1000 * reach * 7 / 8 * (2 * 7168 + 16))


def test_nvlink_counts_where_the_network_is_faster() -> None:
    # two nodes over 800 Gb/s: 0.996 rows at 100 GB/s are done before 6.3 x 7/8 rows at NVLink's 450 GB/s
    call = kc.kernel("deepep_combine", tokens=1000, world=16, nodes=2, fabric="ib_xdr", **V3)
    ranks = 16 * (1 - comb(240, 8) / comb(256, 8))
    assert one(works(call)[0].link_bytes) == pytest.approx(1000 * ranks * 7 / 8 * (2 * 7168 + 16) * 100 / 450)


def test_low_latency_sends_a_row_an_expert_by_all_sms() -> None:
    call = kc.kernel("deepep_dispatch", tokens=128, world=16, nodes=2, fabric="ib_ndr", mode="low_latency", **V3)
    (work,) = works(call)
    # 8 experts, half of them on the other node
    assert one(work.link_bytes) == pytest.approx(128 * 4 * 7408)
    assert one(work.tasks) == kc.gpu("h200_sxm").sm_count


@pytest.mark.parametrize("op", ["deepep_dispatch", "deepep_combine"])
def test_fewer_sms_and_more_tokens_take_longer(op: str) -> None:
    times = [kc.predict(kc.kernel(op, tokens=4096, world=8, sms=sms, **V3), "h200_sxm").time_s for sms in (24, 12, 4)]
    assert times == sorted(times)
    grown = [kc.predict(kc.kernel(op, tokens=n, world=8, **V3), "h200_sxm").time_s for n in (1, 64, 1024, 16384)]
    assert grown == sorted(grown)


@pytest.mark.parametrize(
    ("bad", "says"),
    [({"nodes": 2}, "need a fabric"), ({"world": 12}, "is no multiple of"), ({"topk": 300}, "more than experts"),
     ({"world": 16, "nodes": 3, "fabric": "ib_ndr"}, "is no multiple of")],
)  # fmt: skip
def test_contradictions_are_refused(bad: dict[str, object], says: str) -> None:
    with pytest.raises(kc.KernelcastError, match=says):
        kc.kernel("deepep_dispatch", **{"tokens": 8, "world": 8, **V3, **bad})


def test_alltoall_dealt_out_evenly_reaches_every_rank() -> None:
    call = kc.kernel("alltoall_dispatch", tokens=1000, world=8, routing="balanced", dtype="nvfp4", **V3)
    # 4 bits and an 8-bit scale for each 16: 0.5625 bytes an element; 7 of 8 ranks are elsewhere
    assert one(works(call, "gb200")[0].link_bytes) == pytest.approx(1000 * 7 * (7168 * 0.5625 + 16))


# ---- the busiest rank ----


def drawn(tokens: int, ep: int, skew: float) -> tuple[float, float]:
    """Pairs of the busiest rank and its experts in use, on average over draws as AIConfigurator makes them."""
    rng, found = np.random.default_rng(0), []
    low, high = (1.0, 0.8 * tokens) if tokens * 8 > 256 else (0.01, 2.0)
    for _ in range(300):
        bend = 1 - skew
        load = (low**bend + rng.random(256) * (high**bend - low**bend)) ** (1 / bend)
        load = np.rint(np.minimum(load / load.sum() * tokens * 8, tokens)).reshape(ep, -1)
        most = load.sum(axis=1).argmax()
        found.append((load[most].sum(), np.count_nonzero(load[most])))
    pairs, active = np.mean(found, axis=0)
    return float(pairs), float(active)


@pytest.mark.parametrize(
    ("tokens", "ep", "skew"),
    [(4096, 8, 1.2), (4096, 8, 0.6), (4096, 64, 1.2), (65536, 32, 1.01), (64, 4, 1.2), (16, 8, 1.01)],
)
def test_the_busiest_rank_is_that_of_drawn_loads(tokens: int, ep: int, skew: float) -> None:
    pairs, active = drawn(tokens, ep, skew)
    found = routing(tokens, ep, skew)
    assert one(found.pairs) == pytest.approx(pairs, rel=0.12)
    assert one(found.active()) == pytest.approx(active, rel=0.12)


def test_chance_loads_the_busiest_of_eight_ranks_a_little_more() -> None:
    # 128 tokens x 8 / 8 ranks = 128 pairs, deviation sqrt(128 x 7/8) = 10.6; the largest of 8 is about 1.4 of them more
    assert one(routing(128, 8, random=True).pairs) == pytest.approx(128 + 1.4 * 10.6, rel=0.02)
    assert one(routing(128, 8).pairs) == 128
    assert one(busiest(number(0.0), number(8))) == 1


def test_no_pair_is_lost_where_an_expert_has_every_token() -> None:
    found = ExpertRouting(number(4096), number(2), number(8), number(1), number(1.2), random=False)
    load, share = found._skewed()
    assert one(np.sum(load, axis=0) * share) == pytest.approx(2 * 4096)
    assert float(load.max()) <= 4096 + 1e-9


def test_more_skew_is_more_for_the_busiest_rank() -> None:
    for tokens in (64, 1024, 65536):
        for ep in (1, 8, 64):
            loads = [one(routing(tokens, ep, skew, random=not skew).pairs) for skew in (0.0, 0.6, 0.8, 1.01, 1.2)]
            assert loads == sorted(loads)
    used = [one(routing(64, 1, skew).active()) for skew in (0.6, 0.8, 1.01, 1.2)]
    assert used == sorted(used, reverse=True)  # fewer experts are read, which is why few tokens may be faster


def test_spare_slots_and_placement_level_the_ranks() -> None:
    alone, placed = routing(8192, 64, 1.2), routing(8192, 64, 1.2, placed=1.0)
    spare = routing(8192, 64, 1.2, placed=1.0, spare=128.0)
    mean = 8192 * 8 / 64
    assert one(alone.pairs) > one(placed.pairs) > one(spare.pairs) >= mean


def test_uneven_rows_are_no_faster_where_every_expert_has_many() -> None:
    """By physics: 16 rows an expert and more, dealt out evenly, by chance and by power laws."""
    sizes = {"hidden": 4096, "inter": 1536, "experts": 128, "topk": 8}
    generic = kc.Conditions(predictor="generic")
    ways: tuple[dict[str, object], ...] = ({}, {"routing": "random"}, {"skew": 1.01}, {"skew": 1.2})
    for tokens in (1024, 4096, 16384):
        for ep in (1, 8):
            calls = [kc.kernel("moe", tokens=tokens, ep=ep, block_m=64, block_n=128, **sizes, **way) for way in ways]
            times = [kc.predict(call, "h200_sxm", generic).time_s for call in calls]
            assert all(later >= 0.99 * before for before, later in pairwise(times)), (tokens, ep)


# ---- experts behind an exchange ----


def test_experts_behind_deepep() -> None:
    sizes = {"tokens": 8192, "hidden": 7168, "inter": 2048, "experts": 256, "topk": 8, "ep": 8, "dtype": "fp8_block"}
    sort, first, _, _, add = works(kc.kernel("moe", backend="deepep_contiguous", **sizes))
    # 8,192 x 8 / 8 = 8,192 pairs over 32 experts: 256 rows each, two blocks of 128
    assert one(first.tile["row_blocks"]) == 64
    # dealt out evenly every token has an expert here (8 of 8 ranks): each comes once and goes to one place
    assert one(sort.activation_bytes) == pytest.approx(8192 * 2 * 7168 * (1 + 4 / 128))
    assert one(add.tasks) == 8192
    # rows in slabs an expert: no sort before, no sum behind
    assert len(works(kc.kernel("moe", backend="deepep_masked", **sizes))) == 3
    # tokens that are known to come count as they are
    known = kc.kernel("moe", backend="deepep_contiguous", received=65536, **sizes)
    assert one(works(known)[4].tasks) == 65536


def test_spare_slots_are_cut_over_the_ranks() -> None:
    call = kc.kernel("moe", tokens=4096, hidden=7168, inter=2048, experts=256, topk=8, ep=32, slots=288,
                     eplb=True, skew=1.2, backend="wideep_cutlass", dtype="nvfp4")  # fmt: skip
    assert isinstance(call, Moe)
    with pytest.raises(kc.KernelcastError, match="more than slots"):
        kc.kernel("moe", tokens=8, hidden=64, inter=64, experts=256, topk=8, slots=128)


# ---- hyper-connections ----


def test_hyper_connections_by_hand() -> None:
    # behind a block: its result and four streams in, four out, of 16 bits; 4 + 16 numbers a token in fp32
    (post,) = works(kc.kernel("mhc_post", tokens=100, hidden=4096))
    assert one(post.activation_bytes) == 100 * (9 * 4096 * 2 + 20 * 4)
    project, mix = works(kc.kernel("mhc_pre", tokens=100, hidden=4096))
    # four streams by 24 columns, then four streams in and the block's input out
    assert one(project.useful_flops) == 2 * 100 * 16384 * 24
    assert one(mix.activation_bytes) == 100 * (5 * 4096 * 2 + 2 * 24 * 4)
