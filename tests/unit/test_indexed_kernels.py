"""Hand-worked demand of ops by an index: embedding bags, gather, scatter, index, sort, counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from demand import of, one, whole, works

from kernelcast.ops.scatter import distinct, index_bits


def test_distinct_places_of_random_draws() -> None:
    drawn = [len(np.unique(np.random.default_rng(seed).integers(0, 1000, 1500))) for seed in range(50)]
    assert distinct(np.array([1500.0]), np.array([1000.0]))[0] == pytest.approx(np.mean(drawn), rel=0.01)
    assert distinct(np.array([1.0, 1e9]), np.array([7.0, 7.0])) == pytest.approx([1.0, 7.0])
    assert distinct(np.array([5.0]), np.array([1.0]))[0] == pytest.approx(1.0)
    assert index_bits(np.array([1.0, 256.0, 257.0])).tolist() == [1, 8, 9]


def test_an_embedding_bag_is_walked_row_by_row() -> None:
    work = one("embedding_bag", bags=2048, pooling=32, hidden=64, vocab=1_000_000, dtype="fp32")
    # 2,048 bags of two chunks of 32 columns, eight warps a CTA
    assert (of(work, "tasks"), of(work, "threads"), of(work, "serial_steps")) == (512, 256, 4 + 32)
    looked = 2048 * 32
    met = 1e6 * (1 - (1 - 1e-6) ** looked)
    assert of(work, "streamed_bytes") == pytest.approx(met * 256)
    assert of(work, "activation_bytes") == looked * 16 + 2048 * (256 + 16)  # index and bag number; the sums, two a bag
    many = one("embedding_bag", bags=20000, pooling=2, hidden=64, vocab=1000, dtype="fp32")
    assert (of(many, "tasks"), of(many, "serial_steps")) == (1024, (4 + 2) * 5)  # 40,000 chunks by 8,192 warps


def test_gradient_of_a_bag_fills_the_table_sorts_and_adds_parts() -> None:
    found = works("embedding_bag_backward", bags=8192, pooling=55, hidden=256, vocab=461_808, dtype="fp32")
    zeros, *_, added, summed = found
    looked = 8192 * 55
    assert of(zeros, "activation_bytes") == 461_808 * 256 * 4
    # a part of each ten rows and one more for each row of the table that there could be
    assert (of(added, "tasks"), of(added, "threads")) == (looked / 10 + looked, 256)
    assert of(summed, "tasks") == looked
    assert len(found) == 1 + 1 + 8 + 1 + 2  # zeros; histogram and 8 passes of 8 bits; small ones; parts and their sums
    few = works("embedding_bag_backward", bags=64, pooling=2, hidden=256, vocab=1000, dtype="fp32")
    assert len(few) == 1 + 1 + 1 + 2  # one CTA sorts


def test_a_row_is_gathered_by_a_cta_where_vectors_fit() -> None:
    rows = one("index", rows=1000, cols=64, size=50, dtype="fp32")
    assert (of(rows, "tasks"), of(rows, "threads")) == (1000, 32)  # 256 bytes: 16 lanes
    assert of(rows, "activation_bytes") == pytest.approx(1000 * 256 + 50 * 256 * (1 - 0.98**1000) + 8000)
    odd = one("index", rows=1000, cols=47, size=50, dtype="fp32")
    assert of(odd, "tasks") == 92  # 47,000 elements, 512 a CTA
    assert of(one("index", rows=1000, cols=64, size=50, indices=2), "tasks") == 125
    wide = one("index", rows=10, cols=4096, size=50, dtype="fp32")
    assert (of(wide, "tasks"), of(wide, "threads")) == (40, 256)  # 16 KiB in four pieces


def test_elements_that_are_picked_one_by_one_take_sectors() -> None:
    work = one("gather_elements", rows=1000, cols=64, size=100_000, dtype="fp32")
    assert (of(work, "tasks"), of(work, "serial_steps")) == (63, 8)  # 64,000 elements, 8 for each of 128 threads
    named = 1e5 * (1 - (1 - 1e-5) ** 1000)
    touched = named * 64 * 32
    assert of(work, "activation_bytes") == pytest.approx(64_000 * (8 + 4) + touched)
    assert whole(work, "l2_bytes") == pytest.approx(64_000 * (8 + 4) + 64_000 * 32)
    rows = one("scatter_add", rows=1000, cols=64, size=100_000, expanded=True, dtype="fp32")
    assert of(rows, "activation_bytes") == pytest.approx(1000 * 8 + 64_000 * 4 + 2 * named * 256)
    small = one("scatter", rows=10, cols=2, size=4, axis="cols")
    assert (of(small, "tasks"), of(small, "serial_steps")) == (1, 1)


def test_index_put_sorts_where_it_adds() -> None:
    sizes: dict[str, Any] = {"rows": 600_000, "cols": 4, "size": 50_000, "dtype": "fp32"}
    assert len(works("index_put", **sizes)) == 1
    found = works("index_put", **sizes, accumulate=True)
    assert len(found) == 1 + 1 + 2 + 1  # checks; histogram and two passes of 16 bits; the sums
    assert of(found[-1], "serial_steps") == 3 + 12  # twelve rows of a place follow each other
    assert of(found[-1], "mean_steps") == 4  # but most warps have none
    added = one("index_add", **sizes)
    assert (of(added, "tasks"), of(added, "threads")) == (132 * 8, 128)


def test_sort_by_length_of_rows() -> None:
    copies, sort = works("sort", rows=64, cols=1000, dtype="fp32")
    assert (of(sort, "tasks"), of(sort, "threads"), of(sort, "serial_steps")) == (64, 32, 8)  # 4 bits in a pass
    assert whole(sort, "smem_bytes") == 64 * 1024 * 8 * 2 * 12  # a tile of 1,024, read and written in each
    _, network = works("sort", rows=64, cols=20, dtype="fp32")
    assert (of(network, "tasks"), of(network, "serial_steps")) == (4, 15)
    _, segments = works("sort", rows=200, cols=50_000, dtype="fp32")
    assert (of(segments, "tasks"), of(segments, "serial_steps"), of(segments, "launches")) == (200, 5 * 50_000, 5)
    assert of(copies, "launches") == 3
    assert len(works("sort", rows=1, cols=10**7, dtype="fp32")) == 1 + 1 + 4
    together = works("sort", rows=64, cols=50_000, dtype="fp32")
    assert len(together) == 1 + (1 + 4) + (1 + 1)  # by value, then by row
    ids = works("sort", rows=1, cols=10**6, keys="int64", dtype="fp32")
    assert len(ids) == 1 + 1 + 8
    assert of(ids[2], "activation_bytes") == 2 * 10**6 * 16


def test_searching_and_counting() -> None:
    work = one("searchsorted", elements=10**6, boundaries=600, dtype="fp32")
    assert of(work, "serial_steps") == 10  # 2^10 > 600
    assert of(work, "activation_bytes") == 10**6 * 12 + 600 * 4
    zeros, count = works("histogram", elements=10**6, bins=100, dtype="fp32")
    assert (of(zeros, "activation_bytes"), of(count, "tasks")) == (400, 132 * 4)
