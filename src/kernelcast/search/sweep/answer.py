"""Settings x infer -> columns of answers. What cannot run is a row with its reason.

``_inferred`` is the one place that knows how infer is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import Conditions
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import infer_columns
from kernelcast.inference.workload import Workload
from kernelcast.models.precision import Precision
from kernelcast.search.sweep.columns import SIZES
from kernelcast.search.sweep.file import OWN, Sweep
from kernelcast.search.sweep.layouts import Cut, layout_of
from kernelcast.search.sweep.space import Block, Space
from kernelcast.search.sweep.values import Integers

Columns = dict[str, NDArray[Any]]
OK, NO_ROOM, ILLEGAL, REFUSED = "ok", "does not fit", "illegal", "refused"
_NUMBERS = ("tokens_per_s", "memory_bytes", "available_bytes", "fits",
            *(f"{name}_s{end}" for name in ("ttft", "tpot", "total") for end in ("", "_low", "_high")))  # fmt: skip
_TEXTS = ("status", "reason", "precision", "bound_by", "support")


def answers(space: Space, block: Block, prices: Mapping[str, float], conditions: Conditions) -> Columns:
    """Every setting's own columns, and what is predicted of it."""
    asked = space.columns(block)
    unique, which = np.unique(block.places, return_inverse=True)
    models, *middle, layouts = space.codes(unique)
    cuts = space.cuts(models, layouts)
    codes = np.stack([models, *middle], axis=1)
    places = [
        _place(space.sweep, *code, cut=tuple(cut)) for code, cut in zip(codes.tolist(), cuts.tolist(), strict=True)
    ]
    found = _inferred(places, which, block.sizes, conditions)
    found["requests_per_s"] = asked["batch"] / found["total_s"]
    found["tokens_per_s_per_gpu"] = found["tokens_per_s"] / asked["gpus"]
    hourly = np.array([prices.get(name, np.nan) for name in asked["gpu"]])
    found["usd_per_hour"] = hourly * asked["gpus"]
    found["dollars_per_million_tokens"] = found["usd_per_hour"] / 3600.0 / found["tokens_per_s"] * 1e6
    for end in ("", "_low", "_high"):  # of one token there is none after the first
        found[f"tpot_s{end}"][asked["output_len"] == 1] = np.nan
    chunk = asked["chunk"].astype(np.float64)
    return asked | {"chunk": np.where(chunk < 0, np.nan, chunk)} | found


@dataclass(frozen=True)
class Illegal:
    """A place that cannot be, and why."""

    reason: str


def _place(
    sweep: Sweep, model: int, gpu: int, stack: int, dtype: int, kv_dtype: int, skew: int, *, cut: Cut
) -> Deployment | Illegal:
    formats = [None if word == OWN else word for word in (sweep.dtypes[dtype], sweep.kv_dtypes[kv_dtype])]
    architecture = sweep.models[model]
    try:
        return Deployment(
            architecture, sweep.gpus[gpu], sweep.stacks[stack], Precision.of(architecture, *formats), layout_of(cut),
            sweep.skews[skew],
        )  # fmt: skip
    except KernelcastError as error:
        return Illegal(str(error))


def _inferred(
    places: Sequence[Deployment | Illegal], which: Integers, sizes: Mapping[str, Integers], conditions: Conditions
) -> Columns:
    """Of each setting: the place ``places[which]``, a batch of ``sizes``."""
    found: Columns = {name: np.full(len(which), np.nan) for name in _NUMBERS}
    found |= {name: np.full(len(which), None, dtype=object) for name in _TEXTS}
    asked, batch_of = np.unique(np.stack([sizes[name] for name in SIZES], axis=1), axis=0, return_inverse=True)
    batches = [_batch(*row) for row in asked.tolist()]  # many places are asked the same
    cases: list[tuple[Deployment, Workload]] = []
    rows: list[int] = []
    for row, (at, of) in enumerate(zip(which.tolist(), batch_of.tolist(), strict=True)):
        place, batch = places[at], batches[of]
        if isinstance(place, Illegal) or isinstance(batch, Illegal):
            found["status"][row] = ILLEGAL
            found["reason"][row] = place.reason if isinstance(place, Illegal) else batch.reason
            continue
        found["precision"][row] = place.precision.label
        cases.append((place, batch))
        rows.append(row)
    if cases:
        told = infer_columns(cases, conditions)
        for name in (*_NUMBERS, "bound_by", "support"):
            found[name][rows] = told[name]
        found["reason"][rows] = told["refused"]
        answered = np.array([why is None for why in told["refused"]])
        found["status"][rows] = np.where(answered, OK, np.where(told["fits"], REFUSED, NO_ROOM))
    return found


def _batch(batch: int, inputs: int, outputs: int, cached: int, chunk: int) -> Workload | Illegal:
    try:
        return Workload.equal(batch, inputs, outputs, cached, None if chunk < 0 else chunk)
    except KernelcastError as error:
        return Illegal(str(error))
