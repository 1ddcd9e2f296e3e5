"""Is twice the work ever faster? Random products, expert layers and attention calls, and the same with twice the batch.

    python benchmarks/more_work.py --calls 3000

Libraries choose other kernels for other sizes, and their choices are not monotone: of measured pairs of GEMMs that
differ by twice m alone, one in ten is faster by over 2%, at m = 1 one in four. A forecast that follows them breaks the
law too. Printed: pairs that are faster by over 2%, and how many of these have no measured reason: no such pair in the
evidence of their kind, at that size or next to it.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np

import kernelcast as kc
from kernelcast.forecast.predict_table import forecast_table, predict_columns
from kernelcast.ops import REGISTRY
from laws import Columns, table_of

FASTER = 0.98
REASON = 0.01  # of measured pairs of the kind at that size, from which the tables give a reason
GPUS = ("h200_sxm", "h100_sxm", "a100_sxm", "b200_sxm", "b300_sxm", "l40s", "rtx_4090", "h20")
OPS = tuple(op for op, kernel in REGISTRY.items() if kernel.batch_parameter)


def doubled(columns: Columns) -> Columns:
    """The same calls with twice of what grows."""
    found = {name: column.copy() for name, column in columns.items()}
    for row, op in enumerate(columns["op"]):
        found[REGISTRY[op].batch_parameter][row] *= 2
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args()
    every = table_of(given.calls, given.seed, OPS)
    chosen = np.array(
        [op in OPS and every[REGISTRY[op].batch_parameter][row] is not None for row, op in enumerate(every["op"])]
    )
    columns = {name: column[chosen] for name, column in every.items()}
    tried, faster, unexplained = Counter[str](), Counter[str](), Counter[str]()
    for place in GPUS:
        forecast = forecast_table(columns, kc.gpu(place))
        once = forecast.output()
        twice, _ = predict_columns(doubled(columns), kc.gpu(place))
        ratio = twice["predicted_us"] / once["predicted_us"]
        for row, op in enumerate(columns["op"]):
            if np.isfinite(ratio[row]):
                tried[op] += 1
            if ratio[row] < FASTER:
                size = columns[REGISTRY[op].batch_parameter][row]
                entry = forecast.match[row].entry
                powers = [str(2 ** (int(np.log2(size)) + step)) for step in (-1, 0, 1)]
                share = max(entry.faster_doubled.get(power, 0.0) for power in powers) if entry else 0.0
                faster[op] += 1
                unexplained[op] += share < REASON
    for op in tried:
        print(f"{op:10} {tried[op]:8,} pairs  {faster[op] / tried[op]:6.2%} faster  "
              f"{unexplained[op] / tried[op]:6.2%} without a measured reason")  # fmt: skip
    whole = sum(tried.values())
    print(f"{'all':10} {whole:8,} pairs  {sum(faster.values()) / whole:6.2%} faster  "
          f"{sum(unexplained.values()) / whole:6.2%} without a measured reason")  # fmt: skip


if __name__ == "__main__":
    main()
