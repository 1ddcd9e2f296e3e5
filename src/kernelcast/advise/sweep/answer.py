"""Settings x infer -> columns of answers. What cannot run is a row with its reason.

``_inferred`` is the one place that knows how infer is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.advise.sweep.file import OWN, Sweep
from kernelcast.advise.sweep.layouts import Cut, layout_of
from kernelcast.advise.sweep.space import Block, Space
from kernelcast.advise.sweep.values import Integers
from kernelcast.errors import KernelcastError
from kernelcast.networks.forward import Deployment
from kernelcast.networks.precision import Precision
from kernelcast.predict import Conditions
from kernelcast.serving.infer import infer_many
from kernelcast.serving.memory import NoRoomError
from kernelcast.serving.result import Inference
from kernelcast.serving.workload import Workload

Columns = dict[str, NDArray[Any]]
OK, NO_ROOM, ILLEGAL, REFUSED = "ok", "does not fit", "illegal", "refused"
_TIMES = {"ttft": "prefill", "tpot": "tpot", "total": "total"}
_NUMBERS = ("mean_ttft_s", "tokens_per_s", "requests_per_s", "memory_bytes", "available_bytes", "fits",
            *(f"{name}_s{end}" for name in _TIMES for end in ("", "_low", "_high")))  # fmt: skip
_TEXTS = ("status", "reason", "precision", "bound_by", "support")


def answered(space: Space, block: Block, prices: Mapping[str, float], conditions: Conditions) -> Columns:
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
    rows = len(which)
    found: Columns = {name: np.full(rows, np.nan) for name in _NUMBERS}
    found |= {name: np.full(rows, None, dtype=object) for name in _TEXTS}
    cases: list[tuple[Deployment, Workload]] = []
    row_of: list[int] = []
    named = (sizes[name].tolist() for name in ("batch", "input_len", "output_len", "cached", "chunk"))
    for row, (at, batch, inputs, outputs, cached, chunk) in enumerate(zip(which.tolist(), *named, strict=True)):
        place = places[at]
        if isinstance(place, Illegal):
            found["status"][row], found["reason"][row] = ILLEGAL, place.reason
            continue
        found["precision"][row] = place.precision.label
        try:
            workload = Workload.equal(batch, inputs, outputs, cached, None if chunk < 0 else chunk)
        except KernelcastError as error:
            found["status"][row], found["reason"][row] = ILLEGAL, str(error)
            continue
        cases.append((place, workload))
        row_of.append(row)
    refused: set[int] = set()

    def skip(at: int, error: KernelcastError) -> None:
        refused.add(at)
        row, room = row_of[at], getattr(error, "memory", None)
        found["status"][row] = NO_ROOM if isinstance(error, NoRoomError) else REFUSED
        found["reason"][row] = str(error)
        if room is not None:
            found["memory_bytes"][row], found["available_bytes"][row] = room.used_bytes, room.available_bytes
            found["fits"][row] = 0.0

    results = infer_many(cases, conditions, skip=skip)
    for result, at in zip(results, (at for at in range(len(cases)) if at not in refused), strict=True):
        _fill(found, row_of[at], result)
    return found


def _fill(found: Columns, row: int, result: Inference) -> None:
    for name, of in _TIMES.items():
        span = getattr(result, of)
        for end, value in (("", span.time_s), ("_low", span.low_s), ("_high", span.high_s)):
            found[f"{name}_s{end}"][row] = value
    found["mean_ttft_s"][row], found["tokens_per_s"][row] = result.mean_ttft_s, result.tokens_per_s
    found["requests_per_s"][row] = len(result.workload.inputs) / result.total.time_s
    found["memory_bytes"][row], found["available_bytes"][row] = (
        result.memory.used_bytes,
        result.memory.available_bytes,
    )
    found["fits"][row], found["status"][row], found["support"][row] = 1.0, OK, result.support
    most: dict[str, float] = {}
    for share in result.shares:
        most[share.bound_by] = most.get(share.bound_by, 0.0) + share.time_s
    found["bound_by"][row] = max(most, key=lambda name: most[name])
