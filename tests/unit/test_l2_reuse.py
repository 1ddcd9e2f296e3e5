"""What of a step's tensors L2 still holds: by what passes between two uses."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcast.hardware import gpu
from kernelcast.machine.limits import kept_of_passed, passed_of_kept
from kernelcast.tracing.traced import Op, Tensor
from kernelcast.training.l2_reuse import input_rotations

ADA = gpu("rtx_4090")  # 72 MiB of L2 in one piece
SMALL, LARGE = 8 << 20, 64 << 20  # bytes of a tensor


def tensor(size: int, storage: int) -> Tensor:
    return Tensor((size // 4,), (1,), "fp32", storage)


def relu(read: int, written: int, size: int) -> Op:
    return Op("relu", (tensor(size, read),), {}, (tensor(size, written),), "kernel", "forward", "")


def test_a_small_result_is_found_by_the_next_kernel() -> None:
    """16 MiB pass between the write and the read, of 72; the step's input comes from elsewhere, its result stays."""
    assert input_rotations([relu(0, 1, SMALL), relu(1, 2, SMALL)], ADA, repeated=False) == [1.0, 1.0]


def test_a_large_result_is_gone() -> None:
    """128 MiB pass: none is left of 72 x 1.25."""
    ops = [relu(0, 1, LARGE), relu(1, 2, LARGE)]
    assert input_rotations(ops, ADA, repeated=False) == [None, None]
    assert input_rotations(ops, ADA, repeated=True) == [np.inf, np.inf]  # nor is it there in the next step


def test_what_passes_between_counts() -> None:
    """The small tensor is read again after 16 + 2 x 128 MiB; half of the kernel's bytes are its result, which stays."""
    ops = [relu(0, 1, SMALL), relu(2, 3, LARGE), relu(4, 5, LARGE), relu(1, 6, SMALL)]
    rotation = input_rotations(ops, ADA, repeated=False)[-1]
    assert rotation is not None
    assert float(kept_of_passed(rotation * 2 * SMALL, ADA)) == pytest.approx(0.5, abs=0.01)


def test_one_kernel_again_and_again_is_what_conditions_say() -> None:
    assert input_rotations([relu(0, 1, LARGE)], ADA, repeated=True) == [None]


def test_an_optimizer_reads_what_a_step_ago_was_there() -> None:
    update = Op("add_", (tensor(SMALL, 0), tensor(SMALL, 1)), {}, (), "kernel", "optimizer", "")
    assert input_rotations([relu(2, 1, SMALL), update], ADA, repeated=False) == [1.0, None]


def test_shares_and_bytes_are_each_other_s_inverse() -> None:
    for share in (0.1, 0.5, 0.9):
        assert float(kept_of_passed(passed_of_kept(share, ADA), ADA)) == pytest.approx(share)
