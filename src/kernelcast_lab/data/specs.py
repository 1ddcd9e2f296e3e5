"""What measured tables say of GPUs, by the definitions of ``kernelcast collect --specs`` (docs/new-gpu.md).

Large products have all sides of 1,024 and more and take 100 µs at the peak; the share of the peak that the best
hundredth of them passes is what the GPU sustains. Of an engine's layer the quantisation before it is taken off. Tables
whose times have the host's launches inside (``_WITH_HOST``) say nothing of the smallest, and are left out.
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
class SustainedSpecs:
    """A GPU and a number format; None: too few calls. DRAM and the smallest call are of 16-bit formats alone."""

    gpu: str
    dtype: str
    large: int
    tensor_fraction: float | None
    long_fraction: float | None
    dram_fraction: float | None = None
    smallest_s: float | None = None


def specs_in(roots: Sequence[Path]) -> list[SustainedSpecs]:
    """Of every GPU and format with enough products in the folders."""
    names = [(root, name) for root in roots for name in tables(root) if with_op(root, name, "gemm")]
    rows = merged(read(*each, ops=["gemm"]) for each in names if each[1].partition("/")[0] not in _WITH_HOST)
    return list(_of(rows))


def _of(rows: Measurements) -> Iterable[SustainedSpecs]:
    for name in rows.gpus:
        target = gpu(name)
        on_gpu = rows.select(rows.columns["gpu"] == name).columns
        for dtype in sorted(set(on_gpu["dtype"].tolist())):
            members = {key: column[on_gpu["dtype"] == dtype] for key, column in on_gpu.items()}
            math = format_of(dtype).math
            if target.tensor_flops_per_s(math) and dtype != "int4":  # weights of 4 bits are multiplied in 16
                result = of_format(members, target, dtype)
                if result.tensor_fraction is not None:
                    yield result


def of_format(rows: Columns, target: Gpu, dtype: str) -> SustainedSpecs:
    """Products of one format on one GPU."""
    m, n, k, seconds = rows["m"], rows["n"], rows["k"], rows["latency_us"] * 1e-6
    at_peak_s = 2.0 * m * n * k / target.tensor_flops_per_s(format_of(dtype).math)
    large = (np.minimum(np.minimum(m, n), k) >= LEAST_SIDE) & (at_peak_s >= LEAST_S)
    shares = at_peak_s[large] / (seconds[large] - _quantising_s({c: v[large] for c, v in rows.items()}, target))
    long = shares[seconds[large] >= LONG_S]
    memory = smallest = None
    if dtype in SIXTEEN:
        number_format = format_of(dtype)
        weights = n * k * number_format.weight_bytes
        moved = weights + m * k * number_format.act_bytes + m * n * number_format.out_bytes
        few = (m <= FEW_ROWS) & (weights >= TIMES_L2 * target.l2_bytes)
        memory = _quantile(moved[few] / seconds[few] / target.dram_bytes_per_s, MEMORY_BEST)
        smallest = _quantile(seconds, SMALLEST)
    return SustainedSpecs(
        target.id, dtype, int(large.sum()), _quantile(shares, BEST), _quantile(long, 0.5), memory, smallest
    )


def _quantile(values: NDArray[Any], at: float) -> float | None:
    return float(np.quantile(values, at)) if len(values) >= LEAST_CALLS else None


def _quantising_s(rows: Columns, target: Gpu) -> NDArray[np.float64]:
    """What physics expects of the kernels before the product: the layer, less the same with inputs that are ready.
    Products in int8 are a plugin of TensorRT's on inputs that are."""
    count = len(rows["m"])
    if not count:
        return np.zeros(0)
    calls, before = {name: rows[name] for name in ("op", "m", "n", "k", "dtype", "stack")}, _quantises(rows)
    ready = {**calls, "inputs": np.array(["ready" if each else None for each in before], dtype=object)}
    whole, alone = (predict_columns(columns, target, _GENERIC)[0]["predicted_us"] for columns in (calls, ready))
    return np.where(before, np.maximum(0.0, whole - alone), 0.0) * 1e-6


def _quantises(rows: Columns) -> NDArray[np.bool_]:
    from kernelcast.ops.gemm import QUANTISING_KERNELS

    narrow = np.array([format_of(value).act_bytes < 2 and value != "int8" for value in rows["dtype"]])
    return narrow & np.isin(rows["stack"].astype(str), list(QUANTISING_KERNELS))


def by_gpu(result: Iterable[SustainedSpecs]) -> dict[str, dict[str, Any]]:
    """As the fields of a GPU file."""
    gpus: dict[str, dict[str, Any]] = {}
    for each in result:
        fields = gpus.setdefault(each.gpu, {"sustained_tensor_fractions": {}})
        if each.dtype not in SIXTEEN:
            fields["sustained_tensor_fractions"][each.dtype] = each.tensor_fraction
            continue
        fields |= {
            "sustained_tensor_fraction": each.tensor_fraction,
            "long_tensor_fraction": each.long_fraction,
            "sustained_dram_fraction": each.dram_fraction,
            "sustained_launch_s": each.smallest_s,
        }
    return gpus
