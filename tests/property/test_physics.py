"""Physics that holds for every family, GPU and size."""

from __future__ import annotations

import json
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kernelcast as kc
from kernelcast.forecast.predict_table import OUTPUT
from kernelcast.ops import REGISTRY, parameters_of
from kernelcast.ops.base import Kernel

GPUS = ["h100_sxm", "h200_sxm", "a100_sxm", "l40s", "b200_sxm", "rtx_4090", "v100_sxm", "t4", "mi300x"]
SIZES = {"head_dim": (16, 256),
         "experts": (1, 64), "inter": (1, 2048), "hidden": (1, 4096),
         "topk": (1, 8), "tp": (1, 1), "ep": (1, 1), "world": (2, 64),
         "batch": (1, 8), "heads": (1, 64), "state": (1, 256), "v_dim": (1, 256),
         "nope_dim": (1, 256), "rope_dim": (1, 128), "kv_rank": (1, 1024),
         "kernel_h": (1, 7), "kernel_w": (1, 7), "stride": (1, 3), "dilation": (1, 2),
         "stride_w": (1, 3), "dilation_w": (1, 2), "padding_w": (0, 3), "stride_d": (1, 3), "dilation_d": (1, 2),
         "padding_d": (0, 3),
         "groups": (1, 1), "padding": (0, 3), "height": (16, 128), "width": (16, 128), "q_heads": (1, 64),
         "kv_heads": (1, 1), "key_heads": (1, 1), "value_heads": (1, 64), "key_dim": (16, 256), "value_dim": (16, 256),
         "chunk": (16, 128), "rotary_dim": (2, 2), "block_m": (16, 128), "block_n": (16, 256),
         "block_k": (16, 128), "group_m": (1, 16), "warps": (1, 8), "stages": (1, 4),
         "bytes": (1, 2**30), "vocab": (1000, 200000), "elements": (1, 2**29),
         "depth": (1, 8), "kernel_d": (1, 1), "channels": (1, 512), "spatial": (1, 4096), "out_height": (1, 128),
         "out_width": (1, 128), "images": (1, 4096), "outer": (1, 64), "length": (1, 64), "pooling": (1, 64),
         "size": (1, 10000), "layers": (1, 4), "steps": (1, 256), "o_groups": (1, 8), "o_rank": (1, 1024),
         "index_heads": (1, 64), "index_dim": (16, 128), "q_rank": (1, 2048), "padded_heads": (1, 128),
         "compress_ratio": (1, 128), "block_size": (16, 128), "topk_blocks": (1, 16), "index_topk": (1, 2048),
         "nodes": (1, 1), "sms": (2, 24), "slots": (1, 64)}  # fmt: skip


def a_call(op: str, size: Callable[[int, int], int], flag: Callable[[], bool], choice: Callable[[Any], Any]) -> Kernel:
    """A valid call of ``op`` whose sizes, flags and words are chosen by these."""
    values: dict[str, Any] = {}
    for p in parameters_of(REGISTRY[op]).values():
        if p.type == "lengths":
            continue
        if p.type == "size" and (p.required or p.name in ("batch", "q_len", "kv_len") or flag()):
            low, high = SIZES.get(p.name, (1, min(4096, int(p.high))))
            values[p.name] = size(low, high)
        elif p.type == "flag":
            values[p.name] = flag()
        elif p.type == "choice" and p.name not in ("dtype", "stack"):
            values[p.name] = choice(p.options) if p.required else p.default
    values["dtype"] = "fp16" if "fp16" in REGISTRY[op].dtypes else REGISTRY[op].dtypes[0]
    if {"q_len", "kv_len"} <= values.keys():
        values["kv_len"] = max(values["q_len"], values["kv_len"])
        values["causal"] = values["causal"] or bool(values.get("window"))
    if values.get("bias") == "none":
        values.update({name: False for name in ("bias_gradient",) if name in values})
    if {"k", "cols"} <= values.keys():
        values["k"] = min(values["k"], values["cols"])
    if op == "rope":
        values["head_dim"] *= 2  # rotary dimensions come in pairs
    if {"world", "experts"} <= values.keys():  # as many on each GPU
        values["experts"] *= values["world"]
    if {"slots", "experts"} <= values.keys():  # spare copies
        values["slots"] += values["experts"]
    if {"topk", "experts"} <= values.keys():
        values["topk"] = min(values["topk"], values["experts"])
    return kc.kernel(op, **values)


@st.composite
def calls(draw: st.DrawFn, ops: list[str] | None = None) -> Kernel:
    """Any valid call of any family."""
    op = draw(st.sampled_from(ops or sorted(REGISTRY)))
    return a_call(op, lambda low, high: draw(st.integers(low, high)), lambda: draw(st.booleans()),
                  lambda options: draw(st.sampled_from(options)))  # fmt: skip


@pytest.mark.parametrize("op", sorted(REGISTRY))
@pytest.mark.parametrize("flag", [False, True])
def test_the_largest_call_that_is_drawn_fits_every_gpu(op: str, flag: bool) -> None:
    """Else the tests below would now and then draw a call that is refused."""
    for position in (0, -1):
        call = a_call(op, lambda low, high: high, lambda: flag, itemgetter(position))
        for gpu in GPUS:
            kc.predict(call, gpu)


gpus = st.sampled_from(GPUS)


@given(calls(), gpus)
def test_no_time_beats_a_limit(call: Kernel, gpu: str) -> None:
    p = kc.predict(call, gpu)
    numbers = [p.time_s, p.low_s, p.high_s, p.ceiling_s, p.bound_s, *p.limits.values()]
    assert all(np.isfinite(numbers)) and min(numbers) > 0
    assert p.time_s >= p.bound_s * (1 - 1e-12)
    assert p.bound_s >= max(p.limits.values()) * (1 - 1e-12)
    assert p.bound_s * (1 - 1e-12) <= p.low_s <= p.time_s <= p.high_s
    assert p.bound_s * (1 - 1e-12) <= p.ceiling_s <= p.time_s * (1 + 1e-12)
    assert p.limits[p.bound_by] == max(p.limits.values())
    assert 0 < p.efficiency <= 1 + 1e-12


@given(calls(), gpus)
def test_double_the_bandwidth_halves_the_dram_limit(call: Kernel, gpu: str) -> None:
    slow = kc.gpu(gpu)
    fast = slow.replace(dram_bytes_per_s=2 * slow.dram_bytes_per_s)
    before, after = kc.predict(call, slow), kc.predict(call, fast)
    for old, new in zip(before.kernels, after.kernels, strict=True):
        assert new.limits.get("dram", 0.0) == pytest.approx(old.limits.get("dram", 0.0) / 2)
    assert after.time_s <= before.time_s * (1 + 1e-9)


@given(calls(["gemm", "attention", "moe", "softmax", "rmsnorm"]), gpus, st.sampled_from([1.5, 2.0, 4.0]))
def test_a_faster_clock_scales_what_it_drives(call: Kernel, gpu: str, factor: float) -> None:
    """All on-chip limits go with the clock; DRAM and the launch floor do not."""
    slow = kc.gpu(gpu)
    change = {"clock_boost_hz": slow.clock_boost_hz * factor}
    if slow.clock_tensor_hz:
        change["clock_tensor_hz"] = slow.clock_tensor_hz * factor
    before, after = kc.predict(call, slow), kc.predict(call, slow.replace(**change))
    for old, new in zip(before.kernels, after.kernels, strict=True):
        if old.tile != new.tile:
            continue  # a faster chip may prefer another tile
        for name in ("tensor", "fma", "xu", "smem", "l2", "issue"):
            assert new.limits.get(name, 0.0) == pytest.approx(old.limits.get(name, 0.0) / factor)
        assert new.limits.get("dram", 0.0) == pytest.approx(old.limits.get("dram", 0.0))
        assert new.limits["launch"] == old.limits["launch"]


@given(st.lists(calls(), min_size=1, max_size=12), gpus)
@settings(max_examples=40)
def test_many_at_once_equal_one_by_one(batch: list[Kernel], gpu: str) -> None:
    together = kc.predict_many(batch, gpu)
    for call, found in zip(batch, together, strict=True):
        alone = kc.predict(call, gpu)
        assert found.op == call.op
        assert found.time_s == pytest.approx(alone.time_s, rel=1e-12)
        assert found.limits == pytest.approx(alone.limits, rel=1e-12)


def as_table(batch: list[Kernel]) -> dict[str, list[Any]]:
    names = sorted({n for c in batch for n in parameters_of(type(c)) if n not in ("q_lens", "kv_lens")})
    table: dict[str, list[Any]] = {name: [getattr(c, name, None) for c in batch] for name in names}
    return {"op": [c.op for c in batch], **table}


@given(st.lists(calls(), min_size=2, max_size=12), gpus, st.data())
@settings(max_examples=40)
def test_a_table_equals_its_parts_and_its_calls(batch: list[Kernel], gpu: str, data: st.DataObject) -> None:
    table = as_table(batch)
    whole = kc.predict_table(table, gpu)
    cut = data.draw(st.integers(1, len(batch) - 1))
    halves = [kc.predict_table({k: v[s] for k, v in table.items()}, gpu) for s in (slice(cut), slice(cut, None))]
    for name in OUTPUT:
        np.testing.assert_array_equal(whole[name], [*halves[0][name], *halves[1][name]])
    times = [p.time_s * 1e6 for p in kc.predict_many(batch, gpu)]
    assert list(whole["predicted_us"]) == pytest.approx(times, rel=1e-12)


def test_a_gpu_that_was_not_measured_is_predicted_alike_in_tables_of_any_size() -> None:
    """Its forecast is a weighted mean over measured generations, whose rounding must not follow the number of rows."""
    batch = [kc.kernel("reduce_scatter", bytes=size, world=3, dtype="fp16") for size in range(1000, 30_000, 500)]
    whole = kc.predict_table(as_table(batch), "t4")["predicted_us"]
    assert list(whole) == [kc.predict_table(as_table([call]), "t4")["predicted_us"][0] for call in batch]


@given(st.integers(1, 16), st.integers(1, 3000), st.integers(0, 3000), st.sampled_from(["attention", "mla"]),
       st.sampled_from(["fa2", "fa3", "flashinfer", "trtllm"]), gpus)  # fmt: skip
def test_ragged_with_equal_lengths_is_uniform(
    batch: int, queries: int, before: int, op: str, backend: str, gpu: str
) -> None:
    heads: dict[str, Any] = {"q_heads": 28, "backend": backend, "dtype": "fp16"}
    if op == "attention":
        heads |= {"kv_heads": 4, "head_dim": 128}
    keys = queries + before
    uniform = kc.predict(kc.kernel(op, batch=batch, q_len=queries, kv_len=keys, **heads), gpu)
    ragged = kc.predict(kc.kernel(op, q_lens=[queries] * batch, kv_lens=[keys] * batch, **heads), gpu)
    assert ragged.time_s == pytest.approx(uniform.time_s, rel=1e-12)
    assert ragged.limits == pytest.approx(uniform.limits, rel=1e-12)
    assert [p.tasks for p in ragged.kernels] == [p.tasks for p in uniform.kernels]


@given(calls(), gpus)
def test_json_round_trip(call: Kernel, gpu: str) -> None:
    found = kc.predict(call, gpu).to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again["time_s"] == found["time_s"]
    assert kc.kernel(again["op"], **again["parameters"]) == call


@example(33, 1024, 1025, "h100_sxm")  # the tile that pipelines favour waits longer than another
@given(st.integers(1, 4096), st.integers(1024, 8192), st.integers(1024, 8192), gpus)
def test_more_work_is_not_faster(m: int, n: int, k: int, gpu: str) -> None:
    """Physics: doubling any side of a GEMM does not make it faster, but for the little that another tile may win."""
    physics = kc.Conditions(predictor="generic")
    base = kc.predict(kc.Gemm(m=m, n=n, k=k, dtype="fp16"), gpu, physics).time_s
    for sides in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        grown = kc.predict(kc.Gemm(m=sides[0], n=sides[1], k=sides[2], dtype="fp16"), gpu, physics).time_s
        assert grown >= base * 0.95
