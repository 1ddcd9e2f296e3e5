"""What hand-worked tests read off one call: its kernels, and a number of one of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelcast.hardware import gpu
from kernelcast.ops import kernel
from kernelcast.ops.base import columns_of
from kernelcast.ops.work import Work


def works(op: str, on: str = "h100_sxm", **values: Any) -> tuple[Work, ...]:
    """The kernels of one call that run."""
    call = kernel(op, **values)
    found = type(call).work(columns_of([call]), gpu(on))
    return tuple(work for work in found if np.any(np.asarray(work.launches) > 0))


def one(op: str, **values: Any) -> Work:
    (work,) = works(op, **values)
    return work


def of(work: Work, name: str) -> float:
    """A number of the only call's only candidate."""
    return float(np.broadcast_to(np.asarray(getattr(work, name), dtype=float), work.shape)[0, 0])


def whole(work: Work, name: str) -> float:
    """Demand of all tasks."""
    return of(work, "tasks") * of(work, name)
