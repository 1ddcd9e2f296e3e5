"""How each op is launched: from a call to launches on rotating tensors, one module a library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernelcast.collect.pool import MOST_SETS, TensorPool, TensorSpec
from kernelcast.errors import KernelcastError
from kernelcast.ops import Kernel

Launch = Callable[[], object]


@dataclass(frozen=True)
class Recipe:
    """The tensors that a call needs, and how a set of them becomes a launch. ``source``: the library, as tables name
    it. ``most_sets``: where each keeps memory of its own."""

    tensors: Sequence[TensorSpec]
    launch: Callable[..., Launch]
    source: str
    most_sets: int = MOST_SETS


Runner = Callable[[Any], Recipe]


@dataclass(frozen=True)
class Prepared:
    """Ready to launch: one function a set of tensors."""

    launches: Sequence[Launch]
    source: str


class NotMeasurableError(KernelcastError):
    """No runner here launches this call."""


def prepared(call: Kernel, pool: TensorPool) -> Prepared:
    """The launches of a call; its op, library and backend select the runner."""
    from kernelcast.collect.runners import flashinfer, indexed, memory, products, recurrent, triton, vision

    by_stack = {"flashinfer": (flashinfer,), None: (triton,)}
    modules = by_stack.get(call.stack, (products, vision, memory, indexed, recurrent))
    table: dict[str, Runner] = {op: runner for module in modules for op, runner in module.RUNNERS.items()}
    if call.op not in table:
        raise NotMeasurableError(f"nothing here launches {call.op} of the stack {call.stack or 'none'}")
    recipe = table[call.op](call)
    sets = pool.sets(*recipe.tensors)[: recipe.most_sets]
    return Prepared([recipe.launch(*tensors) for tensors in sets], recipe.source)
