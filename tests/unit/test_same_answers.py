"""A call's answer is its own: whatever table it stands in, wherever that is cut, and however often it is there."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kernelcast as kc
from kernelcast.forecast.network import BLOCK_ROWS, PANEL_COLUMNS, STRIDE_ROWS, Layers, in_blocks
from kernelcast.forecast.predict_table import OUTPUT
from kernelcast.forecast.table import different
from kernelcast.machine import analyse
from kernelcast.machine.analyse import _FEW_CALLS, _least, overlapped
from kernelcast.ops import REGISTRY
from kernelcast.ops.base import Calls, Ragged, twos
from kernelcast.ops.work import Work, chosen

GPU = "h200_sxm"
TIMES = tuple(name for name in OUTPUT if name.endswith("_us"))
predict_module = importlib.import_module("kernelcast.forecast.predict")  # the package has a function of this name


def table(rows: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """GEMMs, norms and collectives in turn, in two formats."""
    rng = np.random.default_rng(seed)
    op = np.array(["gemm", "rmsnorm", "all_reduce"], dtype=object)[np.arange(rows) % 3]

    def of(wanted: str, low: float, high: float) -> NDArray[np.float64]:
        sizes = np.floor(2 ** rng.uniform(low, high, rows))
        return np.where(op == wanted, sizes, np.nan)

    gemm = {side: of("gemm", 4, 13) for side in ("m", "n", "k")}
    norm = {"rows": of("rmsnorm", 0, 13), "cols": of("rmsnorm", 8, 13)}
    link = {"bytes": of("all_reduce", 12, 26), "world": np.where(op == "all_reduce", 4.0, np.nan)}
    dtype = np.where((op == "gemm") & (rng.random(rows) < 0.4), "fp8", "bf16").astype(object)
    return {"op": op, **gemm, **norm, **link, "dtype": dtype}


def cut(columns: dict[str, NDArray[Any]], rows: Any) -> dict[str, NDArray[Any]]:
    return {name: column[rows] for name, column in columns.items()}


def test_rows_are_those_of_calls_one_by_one() -> None:
    columns = table(60)
    whole = kc.predict_table(columns, GPU)
    for row in range(60):
        given = {name: column[row] for name, column in columns.items() if name not in ("op", "dtype")}
        sizes = {name: int(value) for name, value in given.items() if value == value}
        one = kc.predict(kc.kernel(columns["op"][row], dtype=columns["dtype"][row], **sizes), GPU)
        told = (one.time_s, one.low_s, one.high_s, one.ceiling_s, one.bound_s)
        assert [whole[name][row] for name in TIMES] == pytest.approx([1e6 * value for value in told], rel=1e-9)
        assert (whole["bound_by"][row], whole["support"][row]) == (one.bound_by, one.support)


@pytest.mark.parametrize("chunk", [37, 300, 1024])
def test_a_table_cut_elsewhere_is_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    columns = table(3 * 900)
    whole = kc.predict_table(columns, GPU)
    monkeypatch.setattr(predict_module, "CHUNK_CALLS", chunk)
    monkeypatch.setattr(predict_module, "SMALL_CALLS", 10)
    again = kc.predict_table(columns, GPU)
    order = np.random.default_rng(1).permutation(len(columns["op"]))[:500]
    part = kc.predict_table(cut(columns, order), GPU)
    for name in OUTPUT:
        equal_nan = name in (*TIMES, "evidence_calls", "evidence_error")
        assert np.array_equal(again[name], whole[name], equal_nan=equal_nan), name
        assert np.array_equal(part[name], whole[name][order], equal_nan=equal_nan), name


def test_a_call_that_is_there_often_has_the_answer_of_one_that_is_there_once() -> None:
    columns = table(300)
    rows = np.random.default_rng(2).integers(0, 300, 2000)
    once, often = kc.predict_table(columns, GPU), kc.predict_table(cut(columns, rows), GPU)
    for name in OUTPUT:
        equal_nan = name in (*TIMES, "evidence_calls", "evidence_error")
        assert np.array_equal(often[name], once[name][rows], equal_nan=equal_nan), name


def test_bad_rows_among_repeated_ones_are_named_each() -> None:
    columns = cut(table(9), np.tile(np.arange(9), 4))
    columns["m"][[0, 9]] = 0.0
    columns["n"][18] = columns["k"][18] = columns["m"][18] = 2.0**30  # does not fit in memory
    found = kc.predict_table(columns, GPU, skip_bad=True)
    assert np.flatnonzero(np.isnan(found["predicted_us"])).tolist() == [0, 9, 18]
    with pytest.raises(kc.KernelcastError, match=r"3 bad rows: rows 1, 10: .*; row 19: gemm needs"):
        kc.predict_table(columns, GPU)


def test_different_calls_and_what_stands_beside_them() -> None:
    a, b = np.array([1.0, 2.0, 1.0, 1.0]), np.array([5.0, np.nan, 5.0, np.nan])
    calls = Calls(count=4, numbers={"a": a, "b": b}, choices={})
    first, alike = different(calls)
    assert first is not None and sorted(first.tolist()) == [0, 1, 3]
    assert np.array_equal(a[first][alike], a) and np.array_equal(b[first][alike], b, equal_nan=True)
    first, _ = different(calls, (np.array([1.0, 1.0, 2.0, 1.0]), 3.0))  # rows 0 and 2 differ in it
    assert first is None
    lists = {"q_lens": Ragged.of([[1], [1], [1], [1]])}
    assert different(Calls(4, {"a": np.ones(4)}, {}, lists))[0] is None


def test_panels_round_like_whole_layers_and_blocks_alike_anywhere() -> None:
    rng = np.random.default_rng(3)
    shapes = ((20, 2 * PANEL_COLUMNS), (2 * PANEL_COLUMNS, 50), (50, 3))
    weights = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    net = Layers(weights, tuple(rng.standard_normal(shape[1]).astype(np.float32) for shape in shapes))
    rows = rng.standard_normal((STRIDE_ROWS + BLOCK_ROWS + 3, 16)).astype(np.float32)
    found = net(rows, (17, 19))
    hidden: NDArray[Any] = np.concatenate([rows, np.tile([0, 1, 0, 1], (len(rows), 1))], axis=1).astype(np.float64)
    for weight, bias in zip(weights, net.biases, strict=True):
        hidden = np.maximum(hidden, 0 if weight is not weights[0] else -np.inf) @ weight + bias
    assert found == pytest.approx(hidden, rel=1e-4, abs=1e-3)
    assert np.array_equal(net(np.asfortranarray(rows), (17, 19)), found)  # whatever lies beside what in memory
    for start, stop in ((0, 1), (5, 14), (100, 101), (len(rows) - 3, len(rows))):
        assert np.array_equal(net(rows[start:stop], (17, 19)), found[start:stop])
    assert in_blocks(np.asfortranarray(rows[:16])).flags.c_contiguous


def test_a_network_that_is_deaf_to_inputs_answers_as_if_they_were_nought() -> None:
    rng = np.random.default_rng(4)
    weights = (rng.standard_normal((6, 8)).astype(np.float32), rng.standard_normal((8, 1)).astype(np.float32))
    net = Layers(weights, (np.zeros(8, np.float32), np.zeros(1, np.float32)))
    rows = rng.standard_normal((10, 6)).astype(np.float32)
    blank = rows.copy()
    blank[:, [1, 4]] = 0
    assert np.array_equal(net.without_inputs([1, 4])(rows, ()), net(blank, ()))


def test_few_and_many_calls_are_ranked_alike() -> None:
    scores = np.round(np.random.default_rng(5).random((7, _FEW_CALLS + 1)), 1)  # with equals
    many, few = _least(scores, 3), _least(scores[:, :5], 3)
    assert np.array_equal(many[0], np.argsort(scores, axis=0, kind="stable")[:3])
    assert np.array_equal(many[0][:, :5], few[0]) and np.array_equal(many[1][:, :5], few[1])


def test_chosen_takes_one_candidate_of_each_call() -> None:
    candidate = np.array([1, 0, 1])
    values = np.arange(6.0).reshape(2, 3)
    assert np.asarray(chosen(values, candidate)).tolist() == [3, 1, 5]
    assert np.asarray(chosen(values[:, :1], candidate)).tolist() == [3, 0, 3]
    assert np.asarray(chosen(values[:1], candidate)).tolist() == [0, 1, 2]
    assert chosen(7.0, candidate) == 7.0
    ranks = np.array([[1, 0, 1], [0, 1, 0]])
    assert np.asarray(chosen(values, ranks)).tolist() == [[3, 1, 5], [0, 4, 2]]


def test_a_pipeline_without_demand_takes_no_time() -> None:
    (found,) = analyse(Work(tasks=np.array([[132.0, 264.0]]), l2_bytes=1e6), kc.gpu(GPU))
    named = dict(zip(predict_module.PIPELINES, found.limits, strict=True))
    assert named["l2"].min() > 0 and named["l2"].shape == (2,)
    assert all(np.array_equal(named[name], [0, 0]) for name in ("tensor", "fma", "xu", "smem", "link"))
    assert overlapped([np.array([3.0]), np.array([4.0])])[0] == pytest.approx((3**4 + 4**4) ** 0.25)


def test_twos_are_what_the_greatest_common_divisor_says() -> None:
    sizes = np.array([0, 1, 2, 3, 96, 128, 4096, 12345])
    assert twos(sizes.astype(np.float64), 128).tolist() == np.log2(np.gcd(sizes, 128)).tolist()


def test_every_example_is_the_same_alone_and_in_a_crowd() -> None:
    """All families: their own work broadcasts in its own way."""
    for op, kernel in sorted(REGISTRY.items()):
        example = dict(kernel.examples[0])
        if any(isinstance(value, list | tuple) for value in example.values()):
            continue
        one = kc.predict(kc.kernel(op, **example), GPU)
        many = kc.predict_many([kc.kernel(op, **example)] * 40, GPU)
        assert many[0].time_s == many[-1].time_s == pytest.approx(one.time_s, rel=1e-12), op
