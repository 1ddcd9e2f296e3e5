"""Do the laws hold on the forecasts that users get? Random calls of every op, random stacks, backends and formats.

    python benchmarks/laws.py --calls 200

A better part (more DRAM, L2, clock, SMs, …) is never slower, a worse one never faster; a field set to its own value
changes nothing; twice and twice again is four times. Prints how many pairs were tried and how many broke a law, and
exits 1 if any did.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernelcast as kc
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import Gpu
from same_numbers import random_calls

GPUS = ("h200_sxm", "a100_sxm", "b200_sxm", "l40s", "rtx_4090", "gb200", "h20", "v100_sxm", "mi300x", "h100_pcie")
FIELDS = (
    "dram_bytes_per_s", "l2_bytes", "clock_boost_hz", "sm_count", "l2_bytes_per_clk", "smem_bytes_per_clk_sm",
    "tensor_flops_per_clk_sm.bf16", "launch_floor_s", "link_bytes_per_s", "xu_ops_per_clk_sm",
)  # fmt: skip
WORSE_IF_MORE = ("launch_floor_s",)
WHOLE = ("sm_count", "l2_bytes")
Columns = dict[str, NDArray[Any]]


def table_of(count: int, seed: int, only: Sequence[str] = ()) -> Columns:
    calls = random_calls(count, seed, only)
    names = dict.fromkeys(name for call in calls for name in call if name != "gpu")
    return {name: np.array([*(call.get(name) for call in calls), None], dtype=object)[:-1] for name in names}


def changed(base: Gpu, field: str, factor: float) -> Gpu:
    value = (base.number(field) or 0.0) * factor
    return base.replace(**{field: max(1, int(value)) if field in WHOLE else value})


def times(columns: Columns, chip: Gpu) -> NDArray[np.float64]:
    return np.asarray(predict_columns(columns, chip)[0]["predicted_us"], dtype=np.float64)


def broken(columns: Columns, base: Gpu, field: str, draw: random.Random) -> tuple[int, int]:
    """Pairs tried, and those in which the better GPU is slower."""
    factors = sorted([1.0, *(2 ** draw.uniform(-1.5, 2) for _ in range(3))])
    found = [times(columns, changed(base, field, factor)) for factor in factors]
    found = found[::-1] if field in WORSE_IF_MORE else found
    pairs = list(itertools.pairwise(found))
    tried = sum(int(np.sum(np.isfinite(a) & np.isfinite(b))) for a, b in pairs)
    return tried, sum(int(np.sum(b > a * (1 + 1e-9))) for a, b in pairs)


def inconsistent(columns: Columns, base: Gpu, field: str) -> int:
    """Own value changes nothing; twice and twice again is four times."""
    own, plain = times(columns, changed(base, field, 1.0)), times(columns, base)
    twice = changed(changed(base, field, 2.0), field, 2.0)
    composed, once = times(columns, twice), times(columns, changed(base, field, 4.0))
    return int(np.sum((own != plain) & np.isfinite(plain)) + np.sum((composed != once) & np.isfinite(once)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    columns, draw = table_of(given.calls, given.seed), random.Random(given.seed)
    tried, wrong, odd = 0, Counter[str](), Counter[str]()
    for name in GPUS:
        base = kc.gpu(name)
        for field in FIELDS:
            if base.number(field):
                pairs, bad = broken(columns, base, field, draw)
                tried, wrong[field] = tried + pairs, wrong[field] + bad
                odd[field] += inconsistent(columns, base, field)
        print(f"{name}: {tried:,} pairs, {sum(wrong.values())} broken, {sum(odd.values())} inconsistent", flush=True)
    print({field: count for field, count in (wrong + odd).items() if count} or "all laws hold")
    sys.exit(sum(wrong.values()) + sum(odd.values()) > 0)


if __name__ == "__main__":
    main()
