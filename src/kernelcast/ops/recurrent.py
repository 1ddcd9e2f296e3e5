"""recurrent and recurrent_backward: layers of LSTM, GRU and plain RNN over a sequence, as cuDNN runs them.

A layer's input product is one matrix product over all time steps. What is left is a chain: step after step a product of
the state with the recurrent weights, then the gates. How the chain runs is one of three algorithms, which PyTorch
chooses by sizes and format (get_algo in aten/src/ATen/native/cudnn/RNN.cpp):

standard    a product and a kernel of its gates for every step of every layer and direction
persistent  one kernel keeps the recurrent weights in registers for all steps (fp16, one layer, one direction)
small       one kernel a layer, whose CTAs keep all weights of a small state and take a part of the batch each

The time is the sum of what the kernels take, one after another: a program that launches them from Python seldom gets
layers to overlap. Counts and kernels below were seen in profiles of cuDNN 9.19 on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Conflicts, Kernel, choice, conflict, flag, grain, size
from kernelcast.ops.recurrent_steps import (
    RecurrentSizes,
    aligned_rows,
    bias_gradients,
    cleared_memory,
    input_gradients,
    input_products,
    mma_runs,
    persistent_kernel,
    small_kernel,
    step_gates,
    step_product,
    weight_gradients,
)
from kernelcast.ops.work import Array, Works

CELLS = ("lstm", "gru", "rnn")
ALGORITHMS = ("standard", "persistent", "small")
# The largest state of "small", forward and backward, and where "persistent" may run (RNN.cpp, use_rnn_persist_small_h,
# use_persist_common_heuristics, use_persist_device_heuristics).
_SMALL = {"lstm": (192, 128), "gru": (192, 128), "rnn": (384, 256)}
_PERSISTENT_HIDDEN, _PERSISTENT_BATCH = 1024, 128
_MANY_STEPS = 256.0  # from there on twice the steps take twice the time


class _Recurrent(Kernel):
    """What both passes share."""

    family = "recurrent"
    timed_as_sum = True
    batch_parameter = "batch"
    dtypes = ("fp32", "tf32", "fp16", "bf16")

    batch: int = size("sequences; of a packed batch the mean over its steps")
    steps: int = size("time steps")
    input: int = size("features of a step's input")
    hidden: int = size("features of the state")
    layers: int = size("layers, one on another", default=1, high=4096)
    bidirectional: bool = flag("a second chain from the last step to the first", default=False)
    projection: int | None = size("features that the state is projected to (LSTM alone), default: none", default=None)
    cell: str = choice("gates of a step", CELLS, default="lstm")
    algorithm: str | None = choice("how the chain runs, default: as PyTorch chooses", ALGORITHMS, default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        if calls.choice("cell") == "lstm":
            return []
        return conflict(~np.isnan(calls["projection"]), "projection is the LSTM's alone", {})

    @classmethod
    def configuration(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        names = np.array(ALGORITHMS, dtype=object)
        return {**calls.choices, "algorithm": names[algorithms(calls, cls is Recurrent)]}

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        sizes = RecurrentSizes.of(calls)
        which = algorithms(calls, cls is Recurrent)
        found = {f"log_{name}": np.log2(calls[name]) for name in ("batch", "input", "hidden")}
        found["log_steps"] = np.log2(np.minimum(calls["steps"], _MANY_STEPS))
        found |= {f"grain_{name}": grain(calls[name]) for name in ("batch", "input", "hidden")}
        found |= {f"runs_{name}": (which == at).astype(np.float64) for at, name in enumerate(ALGORITHMS)}
        return found | {
            "wavefront": sizes.wavefront.astype(np.float64),
            "projected": (sizes.out < sizes.hidden).astype(np.float64),
            "gates": np.full(calls.count, sizes.gates),
            "aligned": aligned_rows(calls.dtype, sizes.hidden, sizes.out).astype(np.float64),
            "mma": mma_runs(calls.dtype, sizes, cls is not Recurrent).astype(np.float64),
            "aligned_input": aligned_rows(calls.dtype, sizes.input).astype(np.float64),
            "log_weights": np.log2(sizes.recurrent_weights),
        }


def algorithms(calls: Calls, forward: bool) -> NDArray[np.intp]:
    """Which of ALGORITHMS each call runs; PyTorch's choice on a large GPU (98 SMs or more) where nobody says. In bf16
    cuDNN has the standard one alone."""
    said, cell = calls.choice("algorithm"), calls.choice("cell")
    if said is not None:
        return np.full(calls.count, ALGORITHMS.index(said))
    batch, hidden = calls["batch"], calls["hidden"]
    projected = ~np.isnan(calls["projection"])
    small = ~projected & (hidden <= _SMALL[cell][0 if forward else 1]) & (calls.choice("dtype") != "bf16")
    kept = (hidden <= _PERSISTENT_HIDDEN) & (hidden % 128 == 0) & (calls["input"] % 128 == 0)
    kept &= (calls["layers"] == 1) & (calls["bidirectional"] == 0) & (batch % 8 == 0) & (batch <= _PERSISTENT_BATCH)
    kept &= ~projected & (calls.choice("dtype") == "fp16") & (cell != "gru")
    kept &= (cell != "rnn") | (batch < 96) | (hidden < 896)
    return np.where(small, 2, np.where(kept, 1, 0)).astype(np.intp)


class Recurrent(_Recurrent):
    """A stack of recurrent layers over a whole sequence (nn.LSTM, nn.GRU, nn.RNN)."""

    op = "recurrent"
    examples = (
        {"batch": 64, "steps": 100, "input": 512, "hidden": 512},
        {"batch": 32, "steps": 200, "input": 256, "hidden": 128, "layers": 2, "bidirectional": True, "cell": "gru"},
        {"batch": 64, "steps": 100, "input": 512, "hidden": 512, "dtype": "fp16", "training": True},
    )

    training: bool = flag("keeps what the backward pass needs", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sizes, kind, which = RecurrentSizes.of(calls), calls.dtype, algorithms(calls, True)
        stepped = which == 0
        kept = np.where(calls["training"] > 0, sizes.gates + 1, 0.0)
        return (
            *input_products(gpu, kind, sizes, stepped),
            step_product(gpu, kind, sizes, stepped, sizes.gate_rows, sizes.out, tile=True),
            step_product(gpu, kind, sizes, stepped & (sizes.out < sizes.hidden), sizes.out, sizes.hidden),
            step_gates(gpu, kind, sizes, stepped, 2 * sizes.gates + 3 + kept),
            persistent_kernel(gpu, kind, sizes, which == 1, kept),
            small_kernel(gpu, kind, sizes, which == 2, kept),
        )


class RecurrentBackward(_Recurrent):
    """Gradients of recurrent with respect to its input, its weights and its first state."""

    op = "recurrent_backward"
    examples = (
        {"batch": 64, "steps": 100, "input": 512, "hidden": 512},
        {"batch": 32, "steps": 200, "input": 256, "hidden": 128, "layers": 2, "bidirectional": True, "cell": "gru"},
    )

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sizes, kind, which = RecurrentSizes.of(calls), calls.dtype, algorithms(calls, False)
        stepped = which == 0
        return (
            step_product(gpu, kind, sizes, stepped, sizes.out, sizes.gate_rows, tile=True),
            step_product(gpu, kind, sizes, stepped & (sizes.out < sizes.hidden), sizes.hidden, sizes.out),
            step_gates(gpu, kind, sizes, stepped, 2 * sizes.gates + 5),
            persistent_kernel(gpu, kind, sizes, which == 1, 2 * sizes.gates + 2, backward=True),
            small_kernel(gpu, kind, sizes, which == 2, 2 * sizes.gates + 2, backward=True),
            *input_gradients(gpu, kind, sizes, stepped),
            *weight_gradients(gpu, kind, sizes),
            bias_gradients(gpu, kind, sizes),
            *cleared_memory(gpu, kind, sizes, stepped),
        )
