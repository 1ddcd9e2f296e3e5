"""recurrent and recurrent_backward by hand: which algorithm runs, what each of its kernels does, how often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from demand import of, whole, works

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.ops import kernel
from kernelcast.ops.base import columns_of
from kernelcast.ops.recurrent import ALGORITHMS, Recurrent, algorithms
from kernelcast.ops.work import Work

LSTM: dict[str, Any] = {"batch": 64, "steps": 100, "input": 256, "hidden": 512}
PHYSICS = kc.Conditions(predictor="generic")


def seconds(op: str = "recurrent", **values: Any) -> float:
    return kc.predict(kernel(op, **{**LSTM, **values}), "h200_sxm", conditions=PHYSICS).time_s


def useful(work: Work) -> float:
    return of(work, "useful_flops")


@pytest.mark.parametrize(("values", "forward", "backward"), [
    ({}, "standard", "standard"),
    ({"dtype": "fp16"}, "persistent", "persistent"),
    ({"dtype": "fp16", "batch": 136}, "standard", "standard"),  # more than 128
    ({"dtype": "fp16", "batch": 60}, "standard", "standard"),  # no multiple of 8
    ({"dtype": "fp16", "input": 200}, "standard", "standard"),  # no multiple of 128
    ({"dtype": "fp16", "hidden": 1152}, "standard", "standard"),
    ({"dtype": "fp16", "layers": 2}, "standard", "standard"),
    ({"dtype": "fp16", "bidirectional": True}, "standard", "standard"),
    ({"dtype": "fp16", "cell": "gru"}, "standard", "standard"),
    ({"dtype": "fp16", "cell": "rnn", "batch": 96, "hidden": 896}, "standard", "standard"),
    ({"dtype": "fp16", "projection": 128}, "standard", "standard"),
    ({"dtype": "tf32", "hidden": 192}, "small", "standard"),
    ({"dtype": "fp16", "hidden": 128, "layers": 3}, "small", "small"),
    ({"dtype": "fp32", "hidden": 384, "cell": "rnn"}, "small", "standard"),
    ({"dtype": "bf16", "hidden": 64}, "standard", "standard"),  # cuDNN has no other in bf16
    ({"dtype": "fp16", "hidden": 64, "algorithm": "standard"}, "standard", "standard"),  # a packed batch
])  # fmt: skip
def test_the_algorithm_is_pytorchs_choice(values: dict[str, Any], forward: str, backward: str) -> None:
    calls = columns_of([kernel("recurrent", **{**LSTM, **values})])
    assert [ALGORITHMS[algorithms(calls, way)[0]] for way in (True, False)] == [forward, backward]
    assert list(Recurrent.configuration(calls)["algorithm"]) == [forward]  # type: ignore[arg-type]


def test_a_step_is_a_product_and_its_gates() -> None:
    inputs, product, gates = works("recurrent", **LSTM)
    rows = 64 * 100
    assert useful(inputs) == 2 * rows * 2048 * 256 and of(inputs, "launches") == 1
    assert useful(product) == 100 * 2 * 64 * 2048 * 512 and of(product, "launches") == 100
    assert of(product, "streamed_bytes") == 2048 * 512 * 2  # once, then from L2
    assert of(gates, "launches") == 100
    assert of(gates, "tasks") == 64 * 512 / 128
    # gates of both products and three states an element, and five more where training keeps gates and cell
    assert of(gates, "activation_bytes") == 64 * 512 * (8 + 3) * 2  # at a time
    assert whole(gates, "l2_bytes") == 100 * 64 * 512 * (8 + 3) * 2
    *_, training = works("recurrent", **LSTM, training=True)
    assert of(training, "activation_bytes") == 64 * 512 * (8 + 3 + 5) * 2
    # the input's gates, a state and five kept are 66 MB for 100 steps, of which an H100's 52 MB of L2 lose a part
    sequence = 64 * 512 * (4 + 1 + 5) * 2
    assert of(training, "refetched_bytes") == pytest.approx(100 * sequence * (100 * sequence / 52_428_800 - 1))


def test_layers_and_directions_multiply_the_steps() -> None:
    both = works("recurrent", **LSTM, layers=3, bidirectional=True)
    first, later, product, _gates = both
    assert [of(work, "launches") for work in both] == [2, 4, 600, 600]
    assert useful(later) == 4 * 2 * 6400 * 2048 * (2 * 512)  # both directions of the layer below
    assert useful(first) == 2 * 2 * 6400 * 2048 * 256
    assert useful(product) == 600 * 2 * 64 * 2048 * 512
    one_way = works("recurrent", **{**LSTM, "steps": 102}, layers=3)
    # layers of one direction read what is below a quarter of the steps at a time: 4 x 25 steps and the two left
    assert [of(work, "launches") for work in one_way] == [5, 10, 306, 306]


def test_weights_come_from_dram_where_layers_that_take_turns_do_not_fit_in_l2() -> None:
    """4 x 2,048 x 2,048 weights of bf16 are 34 MB; an H200 keeps 63 MB."""
    large = {**LSTM, "hidden": 2048}
    weights, l2 = 4 * 2048 * 2048 * 2, 62_914_560

    def refetched(**values: Any) -> float:
        return of(works("recurrent", on="h200_sxm", **large, **values)[-2], "refetched_bytes") / weights

    assert refetched() == 0 and refetched(layers=2, bidirectional=True) == 0  # one chain after another
    assert refetched(layers=2) == pytest.approx(200 * (2 * weights / l2 - 1))
    assert refetched(layers=4) == 400


def test_a_projection_is_one_more_product() -> None:
    _, product, projected, _gates = works("recurrent", **LSTM, projection=128)
    assert useful(product) == 100 * 2 * 64 * 2048 * 128
    assert useful(projected) == 100 * 2 * 64 * 128 * 512
    with pytest.raises(KernelcastError, match="projection is the LSTM's alone"):
        kernel("recurrent", **LSTM, projection=128, cell="gru")


def test_gradients_by_the_input_the_weights_and_the_biases() -> None:
    product, _gates, inputs, weights, state, bias, fills = works("recurrent_backward", **LSTM)
    assert useful(product) == 100 * 2 * 64 * 2048 * 512
    assert useful(inputs) == useful(weights) == 2 * 6400 * 2048 * 256
    assert useful(state) == 2 * 6400 * 2048 * 512
    assert of(bias, "serial_steps") == 6400 and of(bias, "step_cycles") == 15  # rows are added up one by one
    assert of(fills, "activation_bytes") == 2048 * (256 + 512 + 2) * 2 and of(fills, "launches") == 3
    *_, wide, fills, cleared = works("recurrent_backward", **LSTM, dtype="tf32", cell="gru")
    assert of(wide, "step_cycles") == 60
    assert of(cleared, "activation_bytes") == 100 * 64 * 512 * 4  # before each product of fp32
    *_, fills = works("recurrent_backward", **LSTM, layers=3, bidirectional=True)
    assert of(fills, "activation_bytes") == 2 * 2048 * (256 + 2 * 1024 + 3 * (512 + 2)) * 2
    assert of(bias, "tasks") == 2048 / 32
    _, _, _, later, *_ = works("recurrent_backward", **LSTM, layers=2)
    assert of(later, "launches") == 50 and useful(later) == 50 * 2 * (2 * 64) * 2048 * 512  # two steps at a time


def test_one_kernel_walks_all_steps() -> None:
    _inputs, chain = works("recurrent", **LSTM, dtype="fp16")
    assert useful(chain) == 2 * 6400 * 2048 * 512 and of(chain, "launches") == 1
    assert of(chain, "serial_steps") == 100
    assert of(chain, "step_cycles") == 3000 * (64 / 16)  # four tiles of 16 sequences
    assert of(chain, "tasks") == 2048 * 512 * 2 / (128 * 1024)  # SMs that hold the weights
    chain, *_ = works("recurrent_backward", **LSTM, dtype="fp16")
    assert of(chain, "step_cycles") == 2000 + 5000 * 4
    _, chain = works("recurrent", **LSTM, dtype="fp16", cell="rnn")
    assert of(chain, "step_cycles") == 3000 * 4 * 1.5


def test_a_small_state_stays_with_its_sequence() -> None:
    small = {**LSTM, "hidden": 128}
    _, alone = works("recurrent", **small, dtype="tf32")
    assert of(alone, "tasks") == 64  # a CTA a sequence
    weights = 4 * 128 * 128
    spilled = 512 * (128 - (65536 / 512 - 32)) * 4  # of 512 threads 32 weights each are not in registers
    assert of(alone, "step_cycles") == pytest.approx(700 + weights * 0.016 + spilled / 20)
    assert of(alone, "task_cycles") == weights * 1.1  # loaded one by one first
    _, kept = works("recurrent", **{**LSTM, "hidden": 64}, dtype="tf32")
    assert of(kept, "step_cycles") == pytest.approx(700 + 4 * 64 * 64 * 0.016)  # 64 weights a thread fit
    _, wide = works("recurrent", **small, dtype="fp16")
    assert of(wide, "tasks") == 8 and of(wide, "step_cycles") == pytest.approx(1500 + weights * 0.04)  # on tensor cores
    _, odd = works("recurrent", **{**small, "batch": 60}, dtype="fp16")
    assert of(odd, "tasks") == 60
    back, *_ = works("recurrent_backward", **{**LSTM, "hidden": 40}, dtype="fp16")
    assert of(back, "tasks") == 64  # backward takes states of 32 features a time


def test_rows_that_tma_cannot_load_take_older_kernels() -> None:
    def cycles(op: str = "recurrent", **values: Any) -> float:
        found = works(op, **{**LSTM, **values})
        return of(found[1] if op == "recurrent" else found[0], "step_cycles") / 100

    assert cycles() == 130
    assert cycles(hidden=508) == 900  # 1,016 bytes are no multiple of 16
    assert cycles("recurrent_backward", hidden=508) == 400
    assert cycles(hidden=509) == 2 * 900  # nor of 4
    assert cycles(dtype="tf32") == 250 + 1.5 * 64 and cycles(dtype="fp32") == 200 + 6 * 64
    assert seconds(hidden=508) > seconds(hidden=512)


def test_the_host_launches_so_many_kernels() -> None:
    def kernels(op: str, **values: Any) -> float:
        return sum(of(work, "launches") for work in works(op, **{**LSTM, **values}))

    assert kernels("recurrent") == 200 + 1
    assert kernels("recurrent", layers=2, bidirectional=True) == 800 + 4
    assert kernels("recurrent", dtype="fp16") == 2  # the input's product, and all steps
    assert kernels("recurrent_backward") == 200 + 4 + 3  # gradients of input, both weights and biases; what is cleared
    assert kernels("recurrent_backward", dtype="tf32") == 300 + 4 + 3  # memory cleared for products that split k
    assert kernels("recurrent_backward", layers=2) == 400 + 1 + 50 + 2 + 2 + 2 + 3
    assert kernels("recurrent_backward", dtype="fp16") == 1 + 4 + 3


@pytest.mark.parametrize("op", ["recurrent", "recurrent_backward"])
def test_more_work_takes_longer(op: str) -> None:
    for dtype in ("bf16", "fp16", "tf32"):
        base = seconds(op, dtype=dtype)
        assert seconds(op, dtype=dtype, steps=200) == pytest.approx(2 * base, rel=0.25)
        for change in ({"layers": 2}, {"bidirectional": True}, {"input": 1024}):
            assert seconds(op, dtype=dtype, **change) > base or dtype == "fp16"  # which may leave the one kernel


def test_many_calls_of_several_algorithms_are_answered_together() -> None:
    calls = [kernel("recurrent", **{**LSTM, "hidden": hidden}, dtype="fp16") for hidden in (64, 512, 520)]
    together = [found.time_s for found in kc.predict_many(calls, "h200_sxm", PHYSICS)]
    alone = [seconds(dtype="fp16", hidden=hidden) for hidden in (64, 512, 520)]
    assert np.allclose(together, alone)
