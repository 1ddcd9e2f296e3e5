"""attention and mla by hand: tiles under a mask, bytes of a decode, splits of the keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernelcast as kc
from kernelcast.forecast.predict import Prediction
from kernelcast.ops.flash import floor_sum, kv_steps, visible_pairs


def column(*values: float) -> list[np.ndarray]:
    return [np.array([float(v)]) for v in values]


def attention(**parameters: object) -> Prediction:
    heads = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
    alone = kc.Conditions(predictor="generic")  # the kernel by itself, of no engine
    return kc.predict(kc.kernel("attention", **{**heads, **parameters}), "h100_sxm", alone)


def test_causal_tiles_of_four_by_four() -> None:
    # 512 queries and keys in tiles of 128 x 128: row i of tiles sees i + 1 of them: 1 + 2 + 3 + 4 = 10 of 16.
    assert kv_steps(*column(512, 512, 1, 128, 128, 1, 0))[0] == 10
    assert kv_steps(*column(512, 512, 1, 128, 128, 0, 0))[0] == 16


def test_chunked_prefill_sees_the_cache() -> None:
    # 256 new tokens on 512 cached ones, tiles of 128: rows see 4 + 1 and 4 + 2 tiles.
    assert kv_steps(*column(256, 768, 1, 128, 128, 1, 0))[0] == 5 + 6


def test_sliding_window_skips_old_tiles() -> None:
    # 512 tokens, window 128, tiles of 128: tile 0 sees tile 0; every later one itself and the one before.
    assert kv_steps(*column(512, 512, 1, 128, 128, 1, 128))[0] == 1 + 2 + 2 + 2


def test_packed_heads_share_a_tile() -> None:
    # 16 tokens x 8 heads of a group = 128 rows: one tile of queries, which sees one tile of keys.
    assert kv_steps(*column(16, 16, 8, 128, 128, 1, 0))[0] == 1


lengths = st.integers(1, 700)


@given(lengths, st.integers(0, 900), st.sampled_from([1, 2, 7, 8]), st.sampled_from([16, 64, 128]),
       st.sampled_from([32, 96, 128]), st.booleans(), st.sampled_from([0, 1, 64, 100, 5000]))  # fmt: skip
def test_tiles_and_pairs_equal_counting(
    queries: int, before: int, group: int, tile_q: int, tile_kv: int, causal: bool, window: int
) -> None:
    """The closed forms against a loop over tiles and over queries."""
    causal = causal or window > 0
    keys = queries + before
    steps = pairs = 0
    for first in range(0, queries * group, tile_q):
        last = min(first + tile_q, queries * group) - 1
        end = before + last // group + 1 if causal else keys
        start = max(0, before + first // group + 1 - window) if window else 0
        steps += -(-end // tile_kv) - start // tile_kv
    for query in range(queries):
        seen = before + query + 1 if causal else keys
        pairs += min(seen, window) if window else seen
    args = (queries, keys, group, tile_q, tile_kv, causal, window)
    assert kv_steps(*column(*args))[0] == steps
    assert visible_pairs(*column(queries, keys, causal, window))[0] == pairs


@given(st.integers(0, 200), st.integers(1, 60), st.integers(0, 300), st.integers(0, 300))
def test_floor_sum_equals_adding_up(count: int, divisor: int, step: int, start: int) -> None:
    expected = sum((start + step * i) // divisor for i in range(count))
    assert floor_sum(*column(count, divisor, step, start))[0] == expected


def test_decode_reads_the_cache_once() -> None:
    # 64 requests, 4096 tokens each, 8 KV heads of 128, K and V in bf16. The newest token is fresh, the other
    # 4095 come from DRAM: 64 x 4095 x 8 x 128 x 2 x 2 bytes = 1.07 GB, 320 us at 3.35 TB/s.
    p = attention(batch=64, q_len=1, kv_len=4096, page_size=16)
    cached = 64 * 4095 * 8 * 128 * 2 * 2
    assert p.kernels[0].dram_bytes == cached
    assert p.limits["dram"] == pytest.approx(cached / 3.35e12)
    assert p.bound_by == "dram"
    fp8 = attention(batch=64, q_len=1, kv_len=4096, page_size=16, kv_dtype="fp8")
    assert fp8.kernels[0].dram_bytes == cached / 2


def test_decode_of_one_request_splits_its_keys() -> None:
    # One request has 8 tasks (one a KV head): keys are split until tasks fill 132 SMs, then merged.
    p = attention(batch=1, q_len=1, kv_len=65536)
    splits = p.kernels[0].tile["kv_splits"]
    assert 8 * splits <= 132 < 8 * 2 * splits
    assert len(p.kernels) == 2  # the merge is a kernel of its own
    many = attention(batch=64, q_len=1, kv_len=4096)
    assert many.kernels[0].tile["kv_splits"] == 1 and len(many.kernels) == 1


def test_useful_flops_of_causal_prefill() -> None:
    # pairs under the mask: 1024 x 1025 / 2; QK and PV: 2 x 2 x 128 FLOPs a pair and head
    p = attention(batch=2, q_len=1024, kv_len=1024)
    useful = 2 * (1024 * 1025 / 2) * 32 * 4 * 128
    done = p.limits["tensor"] * kc.gpu("h100_sxm").tensor_flops_per_s("bf16")
    assert p.kernels[0].padding == pytest.approx(1 - useful / (done + _vector_flops(p)), rel=1e-6)


def _vector_flops(p: Prediction) -> float:
    gpu = kc.gpu("h100_sxm")
    return p.kernels[0].limits["fma"] * gpu.fma_flops_per_s("fp32")


def test_mla_decode_reads_one_latent_for_all_heads() -> None:
    # 512 + 64 numbers a token in bf16, whatever the number of heads
    p = kc.predict(kc.kernel("mla", batch=32, q_len=1, kv_len=4096, q_heads=128), "h100_sxm")
    assert p.kernels[0].dram_bytes == 32 * 4095 * 576 * 2
    few = kc.predict(kc.kernel("mla", batch=32, q_len=1, kv_len=4096, q_heads=16), "h100_sxm")
    assert few.kernels[0].dram_bytes == p.kernels[0].dram_bytes


def test_mla_prefill_expands_the_heads() -> None:
    # 192 numbers a key and 128 a value for each head: 2 x (192 + 128) FLOPs a pair
    p = kc.predict(kc.kernel("mla", batch=1, q_len=4096, kv_len=4096, q_heads=16, causal=False), "a100_sxm")
    flops = p.limits["tensor"] * kc.gpu("a100_sxm").tensor_flops_per_s("bf16")
    assert flops == pytest.approx(4096 * 4096 * 16 * 2 * (192 + 128))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"batch": 1, "q_len": 8}, "needs kv_len"),
        ({"batch": 1, "q_len": 8, "kv_len": 4}, "kv_len >= q_len"),
        ({"q_lens": [1, 2], "kv_lens": [3]}, "2 requests"),
        ({"q_lens": [1, 2]}, "go together"),
        ({"batch": 1, "q_len": 1, "kv_len": 4, "q_lens": [1], "kv_lens": [4]}, "not both"),
        ({"batch": 1, "q_len": 1, "kv_len": 4, "kv_heads": 5}, "multiple of kv_heads"),
        ({"batch": 1, "q_len": 1, "kv_len": 4, "window": 4, "causal": False}, "needs causal"),
        ({"q_lens": [], "kv_lens": []}, "list of one or more"),
    ],
)
def test_contradictions_are_refused(bad: dict[str, object], says: str) -> None:
    with pytest.raises(kc.KernelcastError, match=says):
        attention(**bad)
