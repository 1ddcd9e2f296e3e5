"""recurrent and recurrent_backward: layers of LSTM, GRU and plain RNN over a sequence, as cuDNN runs them.

The input product of a layer is one matrix product over all time steps. The rest is a chain of steps, each a product of
the state with the recurrent weights, then the gates. PyTorch selects one of three algorithms by sizes and dtype
(get_algo in aten/src/ATen/native/cudnn/RNN.cpp): standard (a product and a gate kernel for every step, layer and
direction), persistent (one kernel keeps the recurrent weights in registers for all steps; fp16, one layer, one
direction), small (one kernel per layer, whose CTAs keep all weights of a small state and take a part of the batch
each).

The time is the sum of the kernels: launched from Python, layers seldom overlap. Counts and kernels were seen in
profiles of cuDNN 9.19 on an H200.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, ConfigurationColumns, Conflicts, Kernel, choice, conflict, flag, grain, size
from kernelcast.ops.dtypes import DType, matmul_pipe
from kernelcast.ops.gemm import matmul_work
from kernelcast.ops.vector import ACCUMULATOR_BYTES, fill_kernel, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

CELLS = ("lstm", "gru", "rnn")
ALGORITHMS = ("standard", "persistent", "small")
# The largest state of "small", forward and backward, and where "persistent" may run (RNN.cpp, use_rnn_persist_small_h,
# use_persist_common_heuristics, use_persist_device_heuristics).
_SMALL = {"lstm": (192, 128), "gru": (192, 128), "rnn": (384, 256)}
_PERSISTENT_HIDDEN, _PERSISTENT_BATCH = 1024, 128
_MANY_STEPS = 256.0  # from there on twice the steps take twice the time


class _Recurrent(Kernel):
    """Parameters of both passes."""

    family = "recurrent"
    timed_as_sum = True
    batch_parameter = "batch"
    dtypes = ("fp32", "tf32", "fp16", "bf16")

    batch: int = size("sequences; for a packed batch the mean over its steps")
    steps: int = size("time steps")
    input: int = size("input features")
    hidden: int = size("features of the hidden state")
    layers: int = size("stacked layers", default=1, high=4096)
    bidirectional: bool = flag("bidirectional layers", default=False)
    projection: int | None = size("projection size (LSTM only), default: none", default=None)
    cell: str = choice("type of cell", CELLS, default="lstm")
    algorithm: str | None = choice("cuDNN algorithm of the steps, default: PyTorch's choice", ALGORITHMS, default=None)

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        if calls.choice("cell") == "lstm":
            return []
        return conflict(~np.isnan(calls["projection"]), "projection is the LSTM's alone", {})

    @classmethod
    def configuration(cls, calls: Calls) -> ConfigurationColumns:
        names = np.array(ALGORITHMS, dtype=object)
        return {**calls.choices, "algorithm": names[algorithms(calls, cls is Recurrent)]}

    @classmethod
    def shape_features(cls, calls: Calls, gpu: Gpu) -> dict[str, Array]:
        sizes = RecurrentSizes(calls)
        which = algorithms(calls, cls is Recurrent)
        features = {f"log_{name}": np.log2(calls[name]) for name in ("batch", "input", "hidden")}
        features["log_steps"] = np.log2(np.minimum(calls["steps"], _MANY_STEPS))
        features |= {f"grain_{name}": grain(calls[name]) for name in ("batch", "input", "hidden")}
        features |= {f"runs_{name}": (which == at).astype(np.float64) for at, name in enumerate(ALGORITHMS)}
        return features | {
            "wavefront": sizes.wavefront.astype(np.float64),
            "projected": (sizes.out < sizes.hidden).astype(np.float64),
            "gates": np.full(calls.count, sizes.gates),
            "aligned": aligned_rows(calls.dtype, sizes.hidden, sizes.out).astype(np.float64),
            "mma": mma_runs(calls.dtype, sizes, cls is not Recurrent).astype(np.float64),
            "aligned_input": aligned_rows(calls.dtype, sizes.input).astype(np.float64),
            "log_weights": np.log2(sizes.recurrent_weights),
        }


def algorithms(calls: Calls, forward: bool) -> NDArray[np.intp]:
    """Index in ALGORITHMS for each call; by default PyTorch's choice on a large GPU (98 SMs or more). In bf16 cuDNN has
    only the standard one."""
    given, cell = calls.choice("algorithm"), calls.choice("cell")
    if given is not None:
        return np.full(calls.count, ALGORITHMS.index(given))
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

    training: bool = flag("save what the backward pass needs", default=False)

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sizes, dtype, which = RecurrentSizes(calls), calls.dtype, algorithms(calls, True)
        stepped = which == 0
        kept = np.where(calls["training"] > 0, sizes.gates + 1, 0.0)
        return (
            *input_products(gpu, dtype, sizes, stepped),
            step_product(gpu, dtype, sizes, stepped, sizes.gate_rows, sizes.out, tile=True),
            step_product(gpu, dtype, sizes, stepped & (sizes.out < sizes.hidden), sizes.out, sizes.hidden),
            step_gates(gpu, dtype, sizes, stepped, 2 * sizes.gates + 3 + kept),
            persistent_kernel(gpu, dtype, sizes, which == 1, kept),
            small_kernel(gpu, dtype, sizes, which == 2, kept),
        )


class RecurrentBackward(_Recurrent):
    """Gradients of recurrent: input, weights and initial state."""

    op = "recurrent_backward"
    examples = (
        {"batch": 64, "steps": 100, "input": 512, "hidden": 512},
        {"batch": 32, "steps": 200, "input": 256, "hidden": 128, "layers": 2, "bidirectional": True, "cell": "gru"},
    )

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        sizes, dtype, which = RecurrentSizes(calls), calls.dtype, algorithms(calls, False)
        stepped = which == 0
        return (
            step_product(gpu, dtype, sizes, stepped, sizes.out, sizes.gate_rows, tile=True),
            step_product(gpu, dtype, sizes, stepped & (sizes.out < sizes.hidden), sizes.hidden, sizes.out),
            step_gates(gpu, dtype, sizes, stepped, 2 * sizes.gates + 5),
            persistent_kernel(gpu, dtype, sizes, which == 1, 2 * sizes.gates + 2, backward=True),
            small_kernel(gpu, dtype, sizes, which == 2, 2 * sizes.gates + 2, backward=True),
            *input_gradients(gpu, dtype, sizes, stepped),
            *weight_gradients(gpu, dtype, sizes),
            bias_gradients(gpu, dtype, sizes),
            *cleared_memory(gpu, dtype, sizes, stepped),
        )


_GATES = {"lstm": 4.0, "gru": 3.0, "rnn": 1.0}
_SPECIAL = {"lstm": 5.0, "gru": 3.0, "rnn": 1.0}  # sigmoids and tanhs of an element of the state
_GATE_THREADS = 128.0
_FILLS = 3.0
_QUARTERS = 4.0
_GRADIENT_STEPS = 2.0
# Round numbers of cycles, read off calls measured on an H200. Of a k-step of a small product, and more for each
# sequence of the batch where tensor cores have less to offer; with rows that are no multiple of 16 bytes, where TMA
# cannot load, older kernels run.
_PRODUCT_CYCLES = {"bf16": (130.0, 0.0), "fp16": (130.0, 0.0), "tf32": (250.0, 1.5), "fp32": (200.0, 6.0)}
_UNALIGNED_CYCLES = {"bf16": (900.0, 400.0), "fp16": (900.0, 400.0), "tf32": (400.0, 250.0), "fp32": (250.0, 250.0)}
_ODD = 2.0  # times that, where rows of 16 bits are no multiple of 4 bytes
_TMA_BYTES, _LEAST_BYTES = 16, 4
# Of a row of bp2's sums, in 16 and in 32 bits.
_BIAS_CYCLES = {"lstm": (15.0, 25.0), "gru": (40.0, 60.0), "rnn": (15.0, 25.0)}
# persistent: of a step, beside what each tile of 16 sequences takes, forward and backward.
_TILE = 16.0
_TILE_CYCLES = ((0.0, 3000.0), (2000.0, 5000.0))
_PLAIN = 1.5  # times that, of the forward kernel for a state without gates
_KEPT_BYTES = 128 * 1024  # of weights in an SM's registers
# small: a CTA per sequence, a thread per output, its row of weights in registers, what fits, the rest in L1; or,
# on tensor cores, a CTA per eight sequences. Of a step: to exchange the state, for each weight, for each byte beyond
# registers; and to load a weight first.
_EXCHANGE_CYCLES = (700.0, 1000.0)
_WEIGHT_CYCLES = 0.016
_SPILLED_CYCLES = 1 / 20
_OTHER_REGISTERS = 32.0
_LOAD_CYCLES = 1.1
_MMA_ROWS = 8.0
_MMA_GRAIN = (8.0, 32.0)  # that divides the state
_MMA_CYCLES = ((1500.0, 0.04), (2000.0, 0.03))  # of a step, and more for each weight
_DEMANDS = (
    "tensor_flops", "fma_flops", "xu_ops", "smem_bytes", "l2_bytes", "multicast_bytes", "other_warp_instructions",
    "streamed_bytes", "activation_bytes", "refetched_bytes", "step_cycles", "task_cycles", "launches", "useful_flops",
)  # fmt: skip


class RecurrentSizes:
    """Sizes of each call; arrays (calls,)."""

    def __init__(self, calls: Calls) -> None:
        cell = calls.choice("cell")
        self.gates, self.special, self.bias_cycles = _GATES[cell], _SPECIAL[cell], _BIAS_CYCLES[cell]
        self.batch, self.steps, self.layers = calls["batch"], calls["steps"], calls["layers"]
        self.rows = self.batch * self.steps  # of the input product
        self.input, self.hidden = calls["input"], calls["hidden"]
        self.out = calls.given("projection", self.hidden)  # features that a chain hands on
        self.directions = 1 + calls["bidirectional"]
        self.chains = self.layers * self.directions
        self.length = self.steps * self.chains  # steps of all chains
        # layers that overlap; both directions of a layer must end before the next begins
        self.wavefront = (self.layers > 1) & (self.directions == 1)
        self.gate_rows = self.gates * self.hidden  # outputs of a step's product
        self.recurrent_weights = self.gate_rows * self.out
        self.later_input = self.directions * self.out  # features that the layers above the first read
        inputs = self.directions * (self.input + (self.layers - 1) * self.later_input)
        self.weights = self.gate_rows * (inputs + self.chains * (self.out + 2))  # with two biases per chain


def _times(work: Work, count: Array, tile: bool = False) -> Work:
    """``count`` such kernels one after another, none where it is 0. ``tile``: keep the tile as a feature."""
    on = np.asarray(count > 0, dtype=np.float64)
    more: dict[str, Any] = {name: np.asarray(getattr(work, name)) * count for name in _DEMANDS}
    return replace(
        work,
        tasks=work.tasks * on,
        tile=work.tile if tile else {},
        **more,
    )


def _pieces(sizes: RecurrentSizes) -> Array:
    """Products that a layer's input product is split into: layers of one direction follow each other a quarter of the
    steps apart, and the remainder is one more."""
    quarter = np.floor(sizes.steps / _QUARTERS)
    rest = (np.mod(sizes.steps, _QUARTERS) > 0).astype(np.float64)
    return np.where(sizes.wavefront & (quarter > 0), _QUARTERS + rest, 1.0)


def input_products(gpu: Gpu, dtype: DType, sizes: RecurrentSizes, stepped: NDArray[np.bool_]) -> Works:
    """Input products of the first layer, and of those above."""
    pieces = np.where(stepped, _pieces(sizes), 1.0)
    rows = ceil_div(sizes.rows, pieces)
    first = matmul_work(gpu, dtype, rows, sizes.gate_rows, sizes.input)
    later = matmul_work(gpu, dtype, rows, sizes.gate_rows, sizes.later_input)
    above = sizes.directions * (sizes.layers - 1)
    return _times(first, pieces * sizes.directions), _times(later, pieces * above)


def input_gradients(gpu: Gpu, dtype: DType, sizes: RecurrentSizes, stepped: NDArray[np.bool_]) -> Works:
    """The first layer's at once; between layers of one direction a few steps at a time, since the layer below waits."""
    first = matmul_work(gpu, dtype, sizes.rows, sizes.input, sizes.gate_rows)
    waits = stepped & sizes.wavefront
    rows = np.where(waits, sizes.batch * np.minimum(_GRADIENT_STEPS, sizes.steps), sizes.rows)
    later = matmul_work(gpu, dtype, rows, sizes.later_input, sizes.gate_rows)
    above = sizes.directions * (sizes.layers - 1)
    return _times(first, sizes.directions), _times(later, above * ceil_div(sizes.rows, rows))


def weight_gradients(gpu: Gpu, dtype: DType, sizes: RecurrentSizes) -> Works:
    """Gradients of input and recurrent weights, summed over all steps."""
    first = matmul_work(gpu, dtype, sizes.gate_rows, sizes.input, sizes.rows, weights=False)
    later = matmul_work(gpu, dtype, sizes.gate_rows, sizes.later_input, sizes.rows, weights=False)
    state = matmul_work(gpu, dtype, sizes.gate_rows, sizes.out, sizes.rows, weights=False)
    above = sizes.directions * (sizes.layers - 1)
    return _times(first, sizes.directions), _times(later, above), _times(state, sizes.chains)


def bias_gradients(gpu: Gpu, dtype: DType, sizes: RecurrentSizes) -> Work:
    """elementWise_bp2: a warp adds up the rows of its columns one after another, without atomics."""
    warps = ceil_div(sizes.gate_rows, gpu.warp_threads)
    work = vector_kernel(
        gpu,
        tasks=warps,
        threads=float(gpu.warp_threads),
        moved_bytes=sizes.rows * sizes.gate_rows * dtype.act_bytes,
        flops=sizes.rows * sizes.gate_rows,
        steps=sizes.rows,
    )
    return _times(
        replace(work, step_cycles=np.full_like(sizes.rows, sizes.bias_cycles[dtype.act_bytes > 2])), sizes.chains
    )


def cleared_memory(gpu: Gpu, dtype: DType, sizes: RecurrentSizes, stepped: NDArray[np.bool_]) -> Works:
    """PyTorch zeroes the gradients of weights and of both last states, and cuDNN adds to them. fp32 products use
    split-K, in memory that is zeroed before every step."""
    gradients = fill_kernel(gpu, sizes.weights * dtype.out_bytes)
    narrow = dtype.act_bytes < ACCUMULATOR_BYTES
    steps = sizes.length * stepped * (not narrow)
    return replace(gradients, launches=_FILLS), _times(
        fill_kernel(gpu, sizes.batch * sizes.out * dtype.out_bytes), steps
    )


def step_product(
    gpu: Gpu,
    dtype: DType,
    sizes: RecurrentSizes,
    runs: NDArray[np.bool_],
    cols: Array,
    inner: Array,
    tile: bool = False,
) -> Work:
    """A step's product with the state: weights come from L2, or from DRAM where they do not fit."""
    product = matmul_work(gpu, dtype, sizes.batch, cols, inner, weights=False)
    weights = cols * inner * dtype.weight_bytes
    beside = np.where(sizes.wavefront, sizes.layers, 1.0)  # chains whose steps interleave
    lost = np.clip(beside * weights / gpu.l2_bytes - 1, 0, 1) * weights
    aligned = aligned_rows(dtype, cols, inner)
    whole = ceil_div(inner, product.tile["tile_k"])  # only products of aligned 16 bits were seen to split k
    fast, each = _PRODUCT_CYCLES[dtype.name]
    slow = np.where(inner > cols, *reversed(_UNALIGNED_CYCLES[dtype.name]))  # backward sums over the gates
    odd = np.where(np.mod(sizes.hidden * dtype.act_bytes, _LEAST_BYTES) > 0, _ODD, 1.0)
    split = aligned if dtype.act_bytes < ACCUMULATOR_BYTES else np.zeros_like(aligned)
    step = replace(
        product,
        serial_steps=np.where(split, product.serial_steps, whole),
        activation_bytes=sizes.batch * (cols * dtype.out_bytes + inner * dtype.act_bytes),
        refetched_bytes=lost,
        step_cycles=np.where(aligned, fast, slow * odd) + each * sizes.batch,
        task_cycles=np.zeros_like(sizes.rows),
    )
    steps = _times(step, sizes.length * runs, tile)
    # only the interleaved weights and one step's values are live at a time
    return replace(
        steps, streamed_bytes=beside * weights * runs, activation_bytes=np.where(runs, step.activation_bytes, 0.0)
    )


def aligned_rows(dtype: DType, *widths: Array) -> NDArray[np.bool_]:
    """Whether rows of these widths are multiples of 16 bytes."""
    return np.all([np.mod(width * dtype.act_bytes, _TMA_BYTES) == 0 for width in widths], axis=0)


def step_gates(gpu: Gpu, dtype: DType, sizes: RecurrentSizes, runs: NDArray[np.bool_], moved: Array | float) -> Work:
    """A step's gates. ``moved``: values read and written per element of the state."""
    elements = sizes.batch * sizes.hidden
    gates = vector_kernel(
        gpu,
        tasks=ceil_div(elements, _GATE_THREADS),
        threads=_GATE_THREADS,
        moved_bytes=elements * moved * dtype.act_bytes,
        flops=elements * 8 * sizes.gates,
        xu_ops=elements * 2 * sizes.special,
        converted=elements * moved if dtype.act_bytes < ACCUMULATOR_BYTES else 0.0,
    )
    # a step's values stay in L2; outputs of the input product, and what is saved, may not
    sequence = elements * (moved - sizes.gates - 2) * dtype.act_bytes
    lost = sequence * np.clip(sequence * sizes.steps / gpu.l2_bytes - 1, 0, 1)
    steps = _times(replace(gates, refetched_bytes=lost), sizes.length * runs)
    return replace(steps, activation_bytes=np.where(runs, gates.activation_bytes, 0.0))


def persistent_kernel(
    gpu: Gpu, dtype: DType, sizes: RecurrentSizes, runs: NDArray[np.bool_], kept: Array | float, backward: bool = False
) -> Work:
    """All steps in one kernel, whose CTAs hold a part of the weights each; between steps they wait for the new state
    through L2."""
    tiles = np.maximum(1.0, sizes.batch / _TILE)
    ctas = np.minimum(gpu.sm_count, ceil_div(sizes.recurrent_weights * dtype.weight_bytes, _KEPT_BYTES))
    step, tile = _TILE_CYCLES[backward]
    slower = _PLAIN if sizes.gates == 1 and not backward else 1.0
    work = replace(
        _chain(gpu, dtype, sizes, ctas, tiles * _TILE, kept),
        step_cycles=(step + tiles * tile) * slower,
    )
    return _times(work, sizes.chains * runs)


def small_kernel(
    gpu: Gpu, dtype: DType, sizes: RecurrentSizes, runs: NDArray[np.bool_], kept: Array | float, backward: bool = False
) -> Work:
    """All steps of a chain in one kernel of independent CTAs."""
    wide = mma_runs(dtype, sizes, backward)
    threads = ceil_div(sizes.gate_rows, gpu.warp_threads) * gpu.warp_threads
    registers = np.minimum(255.0, gpu.registers_per_sm / threads) - _OTHER_REGISTERS
    spilled = threads * np.maximum(0.0, sizes.out - registers) * ACCUMULATOR_BYTES
    alone = _EXCHANGE_CYCLES[backward] + sizes.recurrent_weights * _WEIGHT_CYCLES + spilled * _SPILLED_CYCLES
    step, weight = _MMA_CYCLES[backward]
    ctas = np.where(wide, ceil_div(sizes.batch, _MMA_ROWS), sizes.batch)
    work = replace(
        _chain(gpu, dtype, sizes, ctas, np.where(wide, ctas * _MMA_ROWS, sizes.batch), kept),
        step_cycles=np.where(wide, step + sizes.recurrent_weights * weight, alone),
        task_cycles=np.where(wide, 0.0, sizes.recurrent_weights * _LOAD_CYCLES),
        threads=np.minimum(threads, 1024.0),
        registers_per_thread=np.minimum(255.0, sizes.out + _OTHER_REGISTERS),
    )
    return _times(work, sizes.chains * runs)


def mma_runs(dtype: DType, sizes: RecurrentSizes, backward: bool) -> NDArray[np.bool_]:
    """Whether a small state is multiplied on tensor cores."""
    even = (np.mod(sizes.batch, _MMA_ROWS) == 0) & (np.mod(sizes.hidden, _MMA_GRAIN[backward]) == 0)
    return even & (dtype.name == "fp16")


def _chain(gpu: Gpu, dtype: DType, sizes: RecurrentSizes, ctas: Array, rows: Array, kept: Array | float) -> Work:
    """A kernel that runs all steps of a chain; ``rows``: sequences, padding included."""
    macs = rows * sizes.recurrent_weights * sizes.steps
    on_tensor = dtype.name == "fp16" and matmul_pipe(gpu, dtype.name) == "tensor"
    elements = sizes.rows * sizes.hidden
    each = 1 / ctas
    return Work(
        tasks=ctas,
        tensor_flops=2 * macs * each * on_tensor,
        tensor_dtype=dtype.math,
        fma_flops=(2 * macs * (not on_tensor) + 8 * sizes.gates * elements) * each,
        xu_ops=2 * sizes.special * elements * each,
        l2_bytes=elements * (sizes.gates + 2 + kept) * dtype.act_bytes * each,
        streamed_bytes=sizes.recurrent_weights * dtype.weight_bytes,
        activation_bytes=elements * (sizes.gates + 1 + kept) * dtype.act_bytes,
        threads=256.0,
        registers_per_thread=255.0,
        serial_steps=sizes.steps,
        useful_flops=2 * sizes.rows * sizes.recurrent_weights,
    )
