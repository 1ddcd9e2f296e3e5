"""Random routing: how many experts are used and how many row blocks that makes, against drawing it."""

from __future__ import annotations

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.ops.grouped import active_experts, random_blocks


def drawn(tokens: int, experts: int, topk: int, block_m: int) -> tuple[float, float]:
    """Active experts and row blocks, on average over random choices of experts."""
    rng = np.random.default_rng(0)
    active, blocks = [], []
    for _ in range(200):
        chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk]
        load = np.bincount(chosen.ravel(), minlength=experts)
        active.append(np.count_nonzero(load))
        blocks.append(np.ceil(load / block_m).sum())
    return float(np.mean(active)), float(np.mean(blocks))


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "block_m"),
    [(1, 8, 2, 16), (16, 128, 8, 16), (64, 64, 6, 16), (300, 16, 4, 64), (1000, 8, 2, 128), (500, 60, 4, 32)],
)
def test_means_are_those_of_drawn_choices(tokens: int, experts: int, topk: int, block_m: int) -> None:
    one, two, three, four = (np.array([float(x)]) for x in (tokens, experts, topk, block_m))
    active, blocks = drawn(tokens, experts, topk, block_m)
    assert active_experts(one, two, three)[0] == pytest.approx(active, rel=0.02)
    assert random_blocks(one, two, three, four)[0] == pytest.approx(blocks, rel=0.03)


def test_one_expert_takes_every_token() -> None:
    one = np.ones(1)
    assert active_experts(np.array([37.0]), one, one)[0] == pytest.approx(1)
    assert random_blocks(np.array([37.0]), one, one, np.array([16.0]))[0] == pytest.approx(3)


def test_a_small_batch_reads_fewer_experts_when_routed_at_random() -> None:
    sizes = {"tokens": 16, "hidden": 2048, "inter": 768, "experts": 128, "topk": 8}
    balanced = kc.predict(kc.kernel("moe", **sizes), "h200_sxm")
    random = kc.predict(kc.kernel("moe", **sizes, routing="random"), "h200_sxm")
    assert random.time_s < 0.8 * balanced.time_s  # 82 of 128 experts
    many = {**sizes, "tokens": 8192}
    same = [kc.predict(kc.kernel("moe", **many, routing=way), "h200_sxm").time_s for way in ("balanced", "random")]
    # 512 rows an expert fill blocks of 128 when dealt out evenly; by chance the last block of each is half empty
    assert same[1] == pytest.approx(same[0] * (1 + 64 / 512), rel=0.05)
