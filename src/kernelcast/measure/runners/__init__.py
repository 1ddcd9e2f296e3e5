"""How each op is launched: from a planned call to launches on rotating tensors, one module a library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernelcast.errors import KernelcastError
from kernelcast.kernels import Kernel
from kernelcast.measure.pool import Pool


@dataclass(frozen=True)
class Prepared:
    """Ready to launch: one function a set of tensors. ``source``: the library, as tables name it."""

    launches: Sequence[Callable[[], object]]
    source: str


Runner = Callable[[Kernel, Pool], Prepared]


class NotMeasurableError(KernelcastError):
    """No runner here launches this call."""


def prepared(call: Kernel, pool: Pool) -> Prepared:
    """The launches of a call; its op, library and backend decide who launches it."""
    from kernelcast.measure.runners import attention, conv, matmul, memory, own, serving

    if call.stack == "flashinfer":
        table = serving.RUNNERS
    elif call.stack is None:
        table = own.RUNNERS
    else:
        table = {**matmul.RUNNERS, **attention.RUNNERS, **memory.RUNNERS, **conv.RUNNERS}
    if call.op not in table:
        raise NotMeasurableError(f"nothing here launches {call.op} of the stack {call.stack or 'none'}")
    return table[call.op](call, pool)
