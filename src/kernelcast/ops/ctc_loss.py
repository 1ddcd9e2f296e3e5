"""ctc_loss: connectionist temporal classification as PyTorch runs it (aten/src/ATen/native/cuda/LossCTC.cu).

A CTA takes a few sequences and walks over the steps: each of 2 S + 1 states (targets with blanks between) adds up what
the step before left in itself and its two neighbours, then all wait for one another. Backward walks the other way, and
a kernel of its own turns both into the gradient of every class at every step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Kernel, flag, size
from kernelcast.ops.vector import INDEX_BYTES, MAX_THREADS, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

# A step waits for three sums of the step before, from L2, and for a barrier: a round number of cycles.
_STEP_CYCLES = 1500.0


class CtcLoss(Kernel):
    """Loss of sequences of ``steps`` distributions over ``classes`` against ``targets`` labels each."""

    op = "ctc_loss"
    batch_parameter = "batch"
    timed_as_sum = True
    dtypes = ("fp32",)
    examples = ({"batch": 16, "steps": 500, "targets": 60, "classes": 32, "dtype": "fp32"},)

    batch: int = size("sequences")
    steps: int = size("time steps")
    targets: int = size("labels of a sequence")
    classes: int = size("classes, the blank among them")
    backward: bool = flag("the gradient by the log-probabilities, after the forward pass", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        states = 2 * calls["targets"] + 1
        walk = _walk(gpu, calls, states)
        elements = calls["batch"] * calls["steps"] * calls["classes"]
        gradient = vector_kernel(
            gpu,
            tasks=ceil_div(elements, 1024.0),
            threads=256.0,
            moved_bytes=(2 * elements + 2 * calls["batch"] * calls["steps"] * states) * calls.dtype.act_bytes,
            flops=4 * elements,
            xu_ops=2 * elements,
            launches=2.0,  # and one that fills it first
            runs=calls["backward"] > 0,
        )
        return walk, gradient


def _walk(gpu: Gpu, calls: Calls, states: Array) -> Work:
    """All steps in one kernel."""
    threads = np.minimum(MAX_THREADS, 2 ** np.ceil(np.log2(states)))
    beside = np.minimum(np.floor(MAX_THREADS / threads), calls["batch"])
    cells = calls["batch"] * calls["steps"] * states
    work = vector_kernel(
        gpu,
        tasks=ceil_div(calls["batch"], beside),
        threads=threads * beside,
        moved_bytes=2 * cells * calls.dtype.act_bytes + calls["batch"] * calls["targets"] * INDEX_BYTES,
        again_bytes=4 * cells * calls.dtype.act_bytes,
        flops=8 * cells,
        xu_ops=4 * cells,
        steps=calls["steps"] * ceil_div(states, MAX_THREADS),
    )
    return replace(work, step_cycles=np.full_like(states, _STEP_CYCLES))
