"""Long calls timed by events around one op are kernels like those of a traced step: the same rows under that stack.

Events around one op hold the host's launch too: latency = kernel + host. The shortest row of an op on a GPU is next to
nothing but that. In a call of several times as long it matters little, and what is left when it is taken off is the
kernel. Without these rows a network knows fp32 kernels of old GPUs only with launches inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.forecast.predictor import sustained_start_s
from kernelcast.hardware import gpu

EAGER = "torch_eager"  # times with launch overhead: never to be taken for those of an unknown stack
KERNELS = "torch"  # the stack whose times are those of kernels alone
_LONG = 4.0  # times the shortest row: 1% of noise in the host's time is then 0.3% of the call


def with_kernels(columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The rows, and behind them every long event-timed one as its kernel."""
    eager = np.asarray(columns["stack"] == EAGER)
    keep = np.zeros(len(eager), dtype=bool)
    kernel_us = np.array(columns["latency_us"], dtype=np.float64)
    places, ops = columns["gpu"].astype(str), columns["op"].astype(str)
    for place in np.unique(places[eager]) if eager.any() else ():
        for op in np.unique(ops[eager & (places == place)]):
            rows = np.flatnonzero(eager & (places == place) & (ops == op))
            shortest_us = float(kernel_us[rows].min())
            host_us = max(0.0, shortest_us - sustained_start_s(gpu(str(place))) * 1e6)
            long = rows[kernel_us[rows] > _LONG * shortest_us]
            keep[long] = True
            kernel_us[long] -= host_us
    again = {name: column[keep] for name, column in columns.items()}
    again["latency_us"] = kernel_us[keep]
    again["stack"] = np.full(int(keep.sum()), KERNELS, dtype=object)
    return {name: np.concatenate([column, again[name]]) for name, column in columns.items()}
