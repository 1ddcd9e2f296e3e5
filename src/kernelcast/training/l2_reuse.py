"""What of a step's tensors L2 still holds when an op reads them: by the bytes that pass between two uses.

A kernel writes its result through L2, and the next one finds it there if both fit. As L2 is filled in order, of tensors
that are walked from their start either all is left or nothing (``kept_share`` in ``machine/limits.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.machine.limits import kept_of_passed, passed_of_kept
from kernelcast.tracing.traced import Op


def input_rotations(ops: Sequence[Op], gpu: Gpu, repeated: bool) -> list[float | None]:
    """Of each op, how many sets of its tensors pass between two uses of one (``input_rotation``); None: what holds of
    all calls. ``repeated``: that is the same call again and again, as of a step of one op.

    Weights and what the step reads from elsewhere do not count, nor does the optimizer, before which a whole step
    passes.
    """
    sizes = [_sizes(op) if op.op_type == "kernel" and op.phase != "optimizer" else {} for op in ops]
    if repeated and sum(1 for each in sizes if each) == 1:
        return [None] * len(ops)
    passed, used = 0.0, dict[int, float]()  # bytes, before which each storage was written or read
    rotations: list[float | None] = []
    for op, each in zip(ops, sizes, strict=True):
        moved = float(sum(each.values()))
        read = {x.storage for x in op.inputs}
        since = {storage: passed - used[storage] if storage in read else 0.0
                 for storage in each if storage in used or storage not in read}  # fmt: skip
        kept = [each[storage] * float(kept_of_passed(max(moved, bytes_), gpu)) for storage, bytes_ in since.items()]
        share = sum(kept) / max(1, sum(each[storage] for storage in since))
        rotations.append(_rotation(share, moved, gpu) if share else np.inf if repeated and since else None)
        for x in op.outputs or op.inputs[:1]:
            used[x.storage] = passed
        used.update({storage: passed for storage in each if storage in used})
        passed += moved
    return rotations


def _sizes(op: Op) -> dict[int, int]:
    """Bytes of each storage that the op reads or writes."""
    sizes: dict[int, int] = {}
    for x in (*op.inputs, *op.outputs):
        sizes[x.storage] = max(sizes.get(x.storage, 0), x.bytes)
    return sizes


def _rotation(share: float, moved: float, gpu: Gpu) -> float:
    """The rotation of which as much is kept as of these tensors on average."""
    return max(1.0, round(passed_of_kept(share, gpu) / moved, 2)) if share < 1 else 1.0
