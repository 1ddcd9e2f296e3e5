"""Ways to cut a model over GPUs: those that a file lists, or all that the model allows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.models.architecture import Architecture
from kernelcast.models.layers import Experts
from kernelcast.models.precision import Precision
from kernelcast.search.sweep.columns import CUTS
from kernelcast.search.sweep.values import Values
from kernelcast.stacks import Stack

Cut = tuple[int, ...]  # the numbers of CUTS; sequence_parallel is 0 or 1
MAX_GPUS = 8


def layout_of(cut: Cut) -> Layout:
    """Refuses what no model could be cut by."""
    tp, pp, dp, ep, micro_batches, sequence_parallel = cut
    return Layout(tp, pp, dp, ep, bool(sequence_parallel), micro_batches)


def listed_cuts(given: Mapping[str, Any]) -> tuple[Cut, ...]:
    """Of the keys of a file: ``layout`` as a list of tables, else the product of tp, pp, dp, ep, …"""
    layout = given.get("layout")
    if layout is None:
        return tuple(itertools.product(*(_numbers(name, given.get(name, _usual(name))) for name in CUTS)))
    if not isinstance(layout, list) or not layout or not all(isinstance(one, dict) for one in layout):
        raise KernelcastError(f'layout is "all" or a list such as [{{ tp = 4 }}, {{ tp = 4, pp = 2 }}], not {layout!r}')
    found = []
    for one in layout:
        for name in one:
            if name not in CUTS:
                raise unknown("part of a layout", name, CUTS)
        found.append(tuple(_numbers(name, one.get(name, _usual(name)))[0] for name in CUTS))
    return tuple(dict.fromkeys(found))


def _usual(name: str) -> Any:
    return False if name == "sequence_parallel" else 1


def _numbers(name: str, given: Any) -> Sequence[int]:
    if name != "sequence_parallel":
        return Values.read(name, given, 1, sampled=False).listed or ()
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(one, bool) for one in listed):
        raise KernelcastError(f"sequence_parallel is true, false or a list of both, not {given!r}")
    return [int(one) for one in dict.fromkeys(listed)]


def legal_cuts(model: Architecture, gpu: Gpu, stack: Stack, max_gpus: int) -> tuple[Cut, ...]:
    """All cuts by powers of two within so many GPUs that the model allows. Attention DP and EP are of models with
    experts."""
    powers = [1 << at for at in range(max_gpus.bit_length())]
    experts = any(isinstance(run.layer.mlp, Experts) for run in model.layers)
    several = powers if experts else [1]
    place = Deployment(model, gpu, stack, Precision())
    found = []
    for tp, pp, dp, ep in itertools.product(powers, powers, several, several):
        if tp * pp * dp > max_gpus or ep > tp * dp:
            continue
        try:
            replace(place, layout=Layout(tp, pp, dp, ep))
        except KernelcastError:
            continue
        found.append((tp, pp, dp, ep, 1, 0))
    return tuple(found)
