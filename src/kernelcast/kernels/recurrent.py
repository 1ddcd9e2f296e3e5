"""recurrent and recurrent_backward: layers of LSTM, GRU and plain RNN over a sequence, as cuDNN runs them.

A layer's input product is one matrix product over all time steps. What is left is a chain: step after step a product of
the state with the recurrent weights, then the gates. How the chain runs is one of three algorithms, which PyTorch
chooses by sizes and format (get_algo in aten/src/ATen/native/cudnn/RNN.cpp):

standard    kernels for every step, a product and its gates; layers overlap on streams, layer l a step behind l - 1
persistent  one kernel keeps the recurrent weights in registers for all steps (fp16, one layer, one direction)
small       one kernel, whose CTAs keep all weights of a small state and take a part of the batch each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Conflicts, Kernel, choice, conflict, flag, grain, size
from kernelcast.kernels.dtypes import DType
from kernelcast.kernels.gemm import matmul_work
from kernelcast.kernels.reduce import reduction
from kernelcast.kernels.vector import ACCUMULATOR_BYTES, VECTOR_BYTES, vector_kernel
from kernelcast.kernels.work import Array, Work, Works, ceil_div

CELLS = ("lstm", "gru", "rnn")
ALGORITHMS = ("standard", "persistent", "small")
_GATES = {"lstm": 4.0, "gru": 3.0, "rnn": 1.0}
_SPECIAL = {"lstm": 5.0, "gru": 3.0, "rnn": 1.0}  # sigmoids and tanhs of an element of the state
# The largest state of "small", forward and backward, and where "persistent" may run (RNN.cpp, use_rnn_persist_small_h,
# use_persist_common_heuristics, use_persist_device_heuristics).
_SMALL = {"lstm": (192, 128), "gru": (192, 128), "rnn": (384, 256)}
_PERSISTENT_HIDDEN, _PERSISTENT_BATCH, _PERSISTENT_SMS = 1024, 128, 98
_GATE_THREADS = 128.0


class _Recurrent(Kernel):
    """What both passes share."""

    family = "recurrent"
    grows = "batch"
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
    def kinds(cls, calls: Calls) -> Mapping[str, str | NDArray[Any] | None]:
        names = np.array(ALGORITHMS, dtype=object)
        return {**calls.choices, "algorithm": names[algorithms(calls, cls is Recurrent)]}

    @classmethod
    def hints(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        sizes = RecurrentSizes.of(calls)
        which = algorithms(calls, cls is Recurrent)
        found = {f"log_{name}": np.log2(calls[name]) for name in ("batch", "steps", "input", "hidden", "layers")}
        found |= {f"grain_{name}": grain(calls[name]) for name in ("batch", "input", "hidden")}
        found |= {f"runs_{name}": (which == at).astype(np.float64) for at, name in enumerate(ALGORITHMS)}
        return found | {
            "bidirectional": calls["bidirectional"],
            "projected": (sizes.out < sizes.hidden).astype(np.float64),
            "gates": np.full(calls.count, _GATES[calls.choice("cell")]),
            "log_rows": np.log2(sizes.rows),
            "log_weights": np.log2(sizes.recurrent_weights),
        }


def algorithms(calls: Calls, forward: bool) -> NDArray[np.intp]:
    """Which of ALGORITHMS each call runs; PyTorch's choice on a large GPU (98 SMs or more) where nobody says."""
    said, cell = calls.choice("algorithm"), calls.choice("cell")
    if said is not None:
        return np.full(calls.count, ALGORITHMS.index(said))
    batch, hidden = calls["batch"], calls["hidden"]
    projected = ~np.isnan(calls["projection"])
    small = ~projected & (hidden <= _SMALL[cell][0 if forward else 1])
    kept = (hidden <= _PERSISTENT_HIDDEN) & (hidden % 128 == 0) & (calls["input"] % 128 == 0)
    kept &= (calls["layers"] == 1) & (calls["bidirectional"] == 0) & (batch % 8 == 0) & (batch <= _PERSISTENT_BATCH)
    kept &= ~projected & (calls.choice("dtype") == "fp16") & (cell != "gru")
    kept &= (cell != "rnn") | (batch < 96) | (hidden < 896)
    return np.where(small, 2, np.where(kept, 1, 0)).astype(np.intp)


@dataclass(frozen=True)
class RecurrentSizes:
    """Of each call; arrays (calls,)."""

    rows: Array  # of the input product: sequences x steps
    batch: Array
    steps: Array
    input: Array
    hidden: Array
    out: Array  # features that a chain hands on: the state's, or the projection's
    layers: Array
    chains: Array  # directions x layers
    directions: Array
    gates: float
    special: float

    @classmethod
    def of(cls, calls: Calls) -> RecurrentSizes:
        directions = 1 + calls["bidirectional"]
        cell = calls.choice("cell")
        return cls(
            rows=calls["batch"] * calls["steps"],
            batch=calls["batch"],
            steps=calls["steps"],
            input=calls["input"],
            hidden=calls["hidden"],
            out=calls.given("projection", calls["hidden"]),
            layers=calls["layers"],
            chains=calls["layers"] * directions,
            directions=directions,
            gates=_GATES[cell],
            special=_SPECIAL[cell],
        )

    @property
    def gate_rows(self) -> Array:
        """Outputs of a step's product."""
        return self.gates * self.hidden

    @property
    def recurrent_weights(self) -> Array:
        return self.gate_rows * self.out

    @property
    def later_input(self) -> Array:
        """Features that the layers above the first read."""
        return self.directions * self.out


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
        sizes, kind = RecurrentSizes.of(calls), calls.dtype
        which = algorithms(calls, True)
        saved = np.where(calls["training"] > 0, sizes.gates + 1, 0.0)
        return (
            *_over_sequence(gpu, kind, sizes, sizes.rows, sizes.gate_rows),
            *_chain(gpu, kind, sizes, which, saved),
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
        sizes, kind = RecurrentSizes.of(calls), calls.dtype
        which = algorithms(calls, False)
        return (
            *_chain(gpu, kind, sizes, which, np.full(calls.count, 2 * sizes.gates + 2)),
            *_input_gradients(gpu, kind, sizes),
            *_weight_gradients(gpu, kind, sizes),
        )


def _times(work: Work, count: Array) -> Work:
    """``count`` such kernels, none where it is 0."""
    return replace(
        work,
        tasks=work.tasks * count,
        launches=work.launches * count,
        streamed_bytes=work.streamed_bytes * count,
        activation_bytes=work.activation_bytes * count,
        refetched_bytes=work.refetched_bytes * count,
        useful_flops=work.useful_flops * count,
    )


def _over_sequence(gpu: Gpu, kind: DType, sizes: RecurrentSizes, rows: Array, cols: Array) -> Works:
    """Input products of all steps at once: of the first layer, and of those above."""
    first = matmul_work(gpu, kind, rows, cols, sizes.input)
    later = matmul_work(gpu, kind, rows, cols, sizes.later_input)
    return _times(first, sizes.directions), _times(later, sizes.directions * (sizes.layers - 1))


def _input_gradients(gpu: Gpu, kind: DType, sizes: RecurrentSizes) -> Works:
    first = matmul_work(gpu, kind, sizes.rows, sizes.input, sizes.gate_rows)
    later = matmul_work(gpu, kind, sizes.rows, sizes.later_input, sizes.gate_rows)
    return _times(first, sizes.directions), _times(later, sizes.directions * (sizes.layers - 1))


def _weight_gradients(gpu: Gpu, kind: DType, sizes: RecurrentSizes) -> Works:
    """Of the input's and the state's weights, summed over all steps; and of the biases."""
    first = matmul_work(gpu, kind, sizes.gate_rows, sizes.input, sizes.rows, weights=False)
    later = matmul_work(gpu, kind, sizes.gate_rows, sizes.later_input, sizes.rows, weights=False)
    state = matmul_work(gpu, kind, sizes.gate_rows, sizes.out, sizes.rows, weights=False)
    bias = reduction(gpu, sizes.rows, sizes.gate_rows, kind.act_bytes)
    return (
        _times(first, sizes.directions),
        _times(later, sizes.directions * (sizes.layers - 1)),
        _times(state, sizes.chains),
        _times(bias, sizes.chains),
    )


def _chain(gpu: Gpu, kind: DType, sizes: RecurrentSizes, which: NDArray[np.intp], saved: Array) -> Works:
    """The steps one after another. ``saved``: numbers that go to or come from memory for an element of the state."""
    standard, small = which == 0, which == 2
    # layers follow one another a step apart; all of them and both directions run side by side
    length = sizes.steps + np.where(standard, sizes.layers - 1, sizes.steps * (sizes.layers - 1))
    beside = sizes.chains * sizes.steps / length
    product = matmul_work(gpu, kind, sizes.batch, sizes.gate_rows, sizes.out, batch=beside, weights=False)
    elements = sizes.chains * sizes.rows * sizes.hidden
    weights = sizes.chains * sizes.recurrent_weights * kind.weight_bytes
    from_l2 = np.where(standard, 1.0, 0.0)
    stepped = replace(
        product,
        tensor_flops=product.tensor_flops * length,
        fma_flops=product.fma_flops * length,
        smem_bytes=product.smem_bytes * length,
        l2_bytes=product.l2_bytes * np.where(standard, length, 1.0),
        multicast_bytes=product.multicast_bytes * from_l2 * length,
        streamed_bytes=weights,
        activation_bytes=elements * kind.act_bytes * 2,
        refetched_bytes=np.where(standard, np.clip(weights / gpu.l2_bytes - 1, 0, 1) * weights * sizes.steps, 0.0),
        serial_steps=product.serial_steps * length,
        step_cycles=np.where(standard, product.step_cycles, 100.0),
        task_cycles=np.where(standard, product.task_cycles * length, np.where(small, 1500.0, 4000.0) * length),
        launches=np.where(standard, length, 1.0),
        useful_flops=product.useful_flops * length,
    )
    gates = vector_kernel(
        gpu,
        tasks=ceil_div(beside * sizes.batch * sizes.hidden, _GATE_THREADS),
        threads=_GATE_THREADS,
        moved_bytes=elements * (sizes.gates * (ACCUMULATOR_BYTES + kind.act_bytes) + (2 + saved) * kind.act_bytes),
        flops=elements * 10 * sizes.gates,
        xu_ops=elements * 2 * sizes.special,
        converted=elements * sizes.gates if kind.act_bytes < VECTOR_BYTES / 4 else 0.0,
        launches=length,
        runs=standard,
    )
    return stepped, gates
