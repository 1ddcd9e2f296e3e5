"""What measured tables say of GPUs, by the definitions of ``kernelcast collect --specs`` (docs/new-gpu.md).

Large products have all sides of 1,024 and more and take 100 µs at the peak; the share of the peak that the best
hundredth of them passes is what the GPU sustains. Of an engine's layer the quantisation before it is taken off. Tables
whose times have the host's launches inside (``_WITH_HOST``) tell nothing of the smallest, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import Gpu, gpu
from kernelcast.ops.dtypes import find_dtype as format_of
from kernelcast_lab.data.measurements import Columns, Measurements, merged
from kernelcast_lab.data.shared import read, tables, with_op

LEAST_SIDE, LEAST_S = 1024, 100e-6  # of a large product, the latter at the peak
LONG_S = 3e-3  # measured: the power limit has lowered the clock
FEW_ROWS, TIMES_L2 = 16, 4.0  # of products that wait for DRAM: rows, and weights over L2
BEST, MEMORY_BEST, SMALLEST = 0.99, 0.90, 0.01  # quantiles
LEAST_CALLS = 50
SIXTEEN = ("bf16", "fp16")
_WITH_HOST = ("neusight", "vidur")
_GENERIC = Conditions(predictor="generic")


@dataclass(frozen=True)
class Found:
    """A GPU and a number format; None: too few calls tell it. DRAM and the smallest are told by 16 bits alone."""

    gpu: str
    dtype: str
    large: int
    tensor_fraction: float | None
    long_fraction: float | None
    dram_fraction: float | None = None
    smallest_s: float | None = None


def found_in(roots: Sequence[Path]) -> list[Found]:
    """Of every GPU and format with enough products in the folders."""
    names = [(root, name) for root in roots for name in tables(root) if with_op(root, name, "gemm")]
    rows = merged(read(*one, ops=["gemm"]) for one in names if one[1].partition("/")[0] not in _WITH_HOST)
    return list(_of(rows))


def _of(rows: Measurements) -> Iterable[Found]:
    for name in rows.gpus:
        chip = gpu(name)
        own = rows.select(rows.columns["gpu"] == name).columns
        for dtype in sorted(set(own["dtype"].tolist())):
            members = {key: column[own["dtype"] == dtype] for key, column in own.items()}
            math = format_of(dtype).math
            if chip.tensor_flops_per_s(math) and dtype != "int4":  # weights of 4 bits are multiplied in 16
                found = of_format(members, chip, dtype)
                if found.tensor_fraction is not None:
                    yield found


def of_format(rows: Columns, chip: Gpu, dtype: str) -> Found:
    """Products of one format on one GPU."""
    m, n, k, seconds = rows["m"], rows["n"], rows["k"], rows["latency_us"] * 1e-6
    at_peak_s = 2.0 * m * n * k / chip.tensor_flops_per_s(format_of(dtype).math)
    large = (np.minimum(np.minimum(m, n), k) >= LEAST_SIDE) & (at_peak_s >= LEAST_S)
    shares = at_peak_s[large] / (seconds[large] - _quantising_s({c: v[large] for c, v in rows.items()}, chip))
    long = shares[seconds[large] >= LONG_S]
    memory = smallest = None
    if dtype in SIXTEEN:
        kind = format_of(dtype)
        weights = n * k * kind.weight_bytes
        moved = weights + m * k * kind.act_bytes + m * n * kind.out_bytes
        few = (m <= FEW_ROWS) & (weights >= TIMES_L2 * chip.l2_bytes)
        memory = _quantile(moved[few] / seconds[few] / chip.dram_bytes_per_s, MEMORY_BEST)
        smallest = _quantile(seconds, SMALLEST)
    return Found(chip.id, dtype, int(large.sum()), _quantile(shares, BEST), _quantile(long, 0.5), memory, smallest)


def _quantile(values: NDArray[Any], at: float) -> float | None:
    return float(np.quantile(values, at)) if len(values) >= LEAST_CALLS else None


def _quantising_s(rows: Columns, chip: Gpu) -> NDArray[np.float64]:
    """What physics expects of the kernels before the product: the layer, less the same with inputs that are ready.
    Products in int8 are a plugin of TensorRT's on inputs that are."""
    count = len(rows["m"])
    if not count:
        return np.zeros(0)
    asked, before = {name: rows[name] for name in ("op", "m", "n", "k", "dtype", "stack")}, _quantises(rows)
    ready = {**asked, "inputs": np.array(["ready" if one else None for one in before], dtype=object)}
    whole, alone = (predict_columns(columns, chip, _GENERIC)[0]["predicted_us"] for columns in (asked, ready))
    return np.where(before, np.maximum(0.0, whole - alone), 0.0) * 1e-6


def _quantises(rows: Columns) -> NDArray[np.bool_]:
    from kernelcast.ops.gemm import QUANTISING_KERNELS

    narrow = np.array([format_of(word).act_bytes < 2 and word != "int8" for word in rows["dtype"]])
    return narrow & np.isin(rows["stack"].astype(str), list(QUANTISING_KERNELS))


def by_gpu(found: Iterable[Found]) -> dict[str, dict[str, Any]]:
    """As the fields of a GPU file."""
    gpus: dict[str, dict[str, Any]] = {}
    for one in found:
        fields = gpus.setdefault(one.gpu, {"sustained_tensor_fractions": {}})
        if one.dtype not in SIXTEEN:
            fields["sustained_tensor_fractions"][one.dtype] = one.tensor_fraction
            continue
        fields |= {
            "sustained_tensor_fraction": one.tensor_fraction,
            "long_tensor_fraction": one.long_fraction,
            "sustained_dram_fraction": one.dram_fraction,
            "sustained_launch_s": one.smallest_s,
        }
    return gpus
