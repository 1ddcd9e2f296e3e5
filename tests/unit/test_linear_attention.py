"""kda, mamba2 and the backends of causal_conv1d by hand; which kind of call each is; the rows that tell of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demand import of, one, whole, works
from measured_files import no_bad_row, rows_of, write_parquet

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.forecast.evidence import configurations_of
from kernelcast.ops import REGISTRY, kernel
from kernelcast.ops.base import columns_of
from kernelcast_lab import data as lab

KIMI: dict[str, Any] = {"heads": 32, "key_dim": 128}
NEMOTRON: dict[str, Any] = {"heads": 128, "head_dim": 64, "state": 128, "groups": 8}
PHYSICS = kc.Conditions(predictor="generic")
STATE = 128 * 128  # elements of a Kimi head's


def seconds(op: str, on: str = "h200_sxm", **values: Any) -> float:
    return kc.predict(kc.kernel(op, **values), on, conditions=PHYSICS).time_s


# ---- kda: decode


def test_kda_decode_streams_the_state_and_reads_a_gate_a_channel() -> None:
    work = one("kda", batch=8, q_len=1, **KIMI)
    assert of(work, "streamed_bytes") == 2 * 8 * 32 * STATE * 4  # in and out, fp32
    token = 4 * 128 + 127  # q, k, v, o; gates of 128 channels, of which gated_delta has one
    assert of(work, "activation_bytes") == 8 * 32 * token * 2
    assert whole(work, "fma_flops") == 7 * 8 * 32 * STATE
    assert whole(work, "xu_ops") == pytest.approx(8 * 32 * (4 + 128))  # two norms, two gates; 128 decays


def test_a_fused_decode_has_the_convolution_inside() -> None:
    alone, fused = (one("kda", batch=8, q_len=1, **KIMI, fused=flag) for flag in (False, True))
    channels = 3 * 32 * 128  # q, k and v
    state, weights = 2 * 8 * channels * 3 * 2, channels * 4 * 4  # bf16, in and out; fp32
    assert of(fused, "streamed_bytes") - of(alone, "streamed_bytes") == state + weights
    assert whole(fused, "fma_flops") - whole(alone, "fma_flops") == pytest.approx(2 * 4 * 8 * channels)


def test_kda_checks_of_drafts_write_a_state_a_token() -> None:
    work = one("kda", batch=16, q_len=4, **KIMI, kernel="recurrent")
    assert of(work, "streamed_bytes") == (1 + 4) * 16 * 32 * STATE * 4
    assert of(work, "serial_steps") == 4


# ---- kda: prefill


def test_kda_chain_counts_the_products_of_every_chunk() -> None:
    found = works("kda", batch=2, q_len=1024, **KIMI, backend="triton")
    units = 2 * 16 * 32  # sequences x chunks of 64 x heads
    flops = [whole(work, "tensor_flops") / units for work in found]
    assert flops == [
        0,  # norms and gates
        2 * 2 * 64 * 64 * 128,  # k k^T and q k^T
        0,  # the inverse
        2 * 64 * 64 * (128 + 128),  # w and u
        2 * 64 * STATE * 2,  # w S, and k^T v into the state
        2 * 64 * STATE + 2 * 64 * 64 * 128,  # q S, (q k^T) v
    ]
    assert [of(work, "launches") for work in found] == [3, 1, 1, 1, 1, 1]
    tokens = 2 * 1024 * 32  # of all heads
    prepare, walk = found[0], found[4]
    assert of(prepare, "activation_bytes") == tokens * 128 * (5 * 2 + 4)  # q, k in and out, gates in; sums in fp32
    # keys, w, values in and out, and a state a chunk
    assert of(walk, "activation_bytes") == tokens * 4 * 128 * 2 + units * STATE * 2


def test_flashkda_is_two_kernels_of_chunks_of_16() -> None:
    prepare, walk = works("kda", batch=2, q_len=1024, **KIMI, backend="flashkda")
    units = 2 * 64 * 32  # sequences x chunks x heads
    assert of(prepare, "tasks") == units and of(prepare, "launches") == 3
    assert whole(prepare, "tensor_flops") == units * 2 * 2 * 16 * 16 * 128
    wide = 2 * 1024 * 32 * 128 * 2  # bytes of all keys
    squares, totals = 2 * units * 16 * 16 * 2, units * 128 * 4
    assert of(prepare, "activation_bytes") == 6 * wide + squares + totals
    assert of(walk, "tasks") == 2 * 32 and of(walk, "serial_steps") == 64
    assert whole(walk, "tensor_flops") == units * 2 * (3 * 16 * STATE + 2 * 16 * 16 * 128)
    assert of(walk, "streamed_bytes") == 2 * 2 * 32 * STATE * 4


@pytest.mark.parametrize("backend", ["triton", "flashkda"])
def test_more_kda_is_never_faster(backend: str) -> None:
    lengths = [seconds("kda", batch=2, q_len=64 * 2**i, **KIMI, backend=backend) for i in range(9)]
    batches = [seconds("kda", batch=2**i, q_len=256, **KIMI, backend=backend) for i in range(9)]
    assert np.all(np.diff(lengths) >= 0) and np.all(np.diff(batches) >= 0)


# ---- mamba2


def test_mamba2_decode_streams_the_state() -> None:
    work = one("mamba2", batch=8, q_len=1, **NEMOTRON)
    assert of(work, "streamed_bytes") == 2 * 8 * 128 * 64 * 128 * 4
    assert of(work, "activation_bytes") == 8 * (2 * 8 * 128 + 2 * 128 * 64) * 2  # B and C; x and y
    assert whole(work, "fma_flops") == 5 * 8 * 128 * 64 * 128


def test_mamba2_prefill_is_five_kernels() -> None:
    found = works("mamba2", batch=2, q_len=1024, **NEMOTRON, chunk=256)
    assert len(found) == 5  # decays, states of chunks, their passing, scores, scan
    chunks, state = 2 * 4, 64 * 128
    flops = [whole(work, "tensor_flops") for work in found]
    seen = (256 + 128) / 2  # of two blocks of 128 tokens the first sees 128, the second 256
    assert flops == [
        0,
        chunks * 128 * 2 * 256 * state,  # x^T B of each head
        0,
        chunks * 8 * 2 * 256 * 256 * 128,  # C B^T of each group
        chunks * 128 * 2 * 256 * (state + seen * 64),  # C S, (C B^T) x
    ]
    passing = found[2]
    assert of(passing, "serial_steps") == 4
    assert of(passing, "activation_bytes") == chunks * 128 * state * (4 + 2)  # what chunks add; the states before them
    assert of(passing, "streamed_bytes") == 2 * 2 * 128 * state * 4


def test_mamba2_answers_by_physics_and_says_so() -> None:
    found = kc.predict(kc.kernel("mamba2", batch=8, q_len=1, **NEMOTRON), "h200_sxm")
    assert (found.predictor, found.support, found.evidence) == ("generic-1", "extrapolated", None)


def test_groups_share_heads_evenly() -> None:
    with pytest.raises(KernelcastError, match="heads 128 is no multiple of groups 3"):
        kc.kernel("mamba2", batch=8, q_len=1, **{**NEMOTRON, "groups": 3})


# ---- the convolution


def test_cuda_convolution_has_a_cta_a_channel() -> None:
    work = one("causal_conv1d", batch=2, q_len=4096, channels=6144, backend="cuda")
    assert of(work, "tasks") == 2 * 6144
    assert of(work, "mean_steps") == 4  # rounds of 128 threads x 8 elements
    elements = 2 * 4096 * 6144
    assert of(work, "activation_bytes") == 2 * elements * 2
    assert of(work, "streamed_bytes") == 2 * (2 * 6144 * 3 * 2) + 6144 * 4 * 2  # state in and out; weights


def test_decodes_and_drafts_walk_the_state() -> None:
    threads = one("causal_conv1d", batch=64, q_len=1, channels=6144, backend="cuda")
    assert of(threads, "tasks") == 64 * 6144 / 128  # a channel a thread
    drafts = one("causal_conv1d", batch=64, q_len=4, channels=6144, kernel="recurrent", backend="triton")
    assert of(drafts, "tasks") == 64 * 6144 / 256 and of(drafts, "serial_steps") == 4


def test_three_convolutions_are_three_launches_of_one_work() -> None:
    packed, apart = (one("causal_conv1d", batch=2, q_len=512, channels=9216, parts=n) for n in (1, 3))
    assert of(apart, "launches") == 3 and of(packed, "launches") == 1
    assert whole(apart, "fma_flops") == whole(packed, "fma_flops")


def test_a_stateless_prefill_moves_no_state() -> None:
    def streamed(stateless: bool) -> float:
        heads: dict[str, Any] = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
        found = works("gated_delta", batch=2, q_len=512, **heads, stateless=stateless)
        return sum(of(work, "streamed_bytes") for work in found)

    assert streamed(False) == 2 * 2 * 32 * STATE * 4 and streamed(True) == 0


# ---- kinds


def words(op: str, **values: Any) -> dict[str, str | None]:
    call = kernel(op, **values)
    ((_, found),) = configurations_of(type(call), columns_of([call]))
    return type(call).with_defaults(found, kc.gpu("h200_sxm"))


def test_a_decode_is_the_same_kind_whatever_prefill_runs() -> None:
    decode = words("kda", batch=8, q_len=1, **KIMI, stack="vllm", backend="flashkda")
    assert (decode["kernel"], decode["backend"], decode["fused"]) == ("recurrent", "triton", "no")
    assert words("kda", batch=8, q_len=1, **KIMI, fused=True)["fused"] == "yes"
    prompt = words("kda", q_lens=[1, 300], **KIMI, stack="vllm", backend="flashkda", fused=True)
    assert (prompt["kernel"], prompt["backend"], prompt["fused"]) == ("chunked", "flashkda", "no")
    assert prompt["lengths"] == "ragged"
    assert words("kda", q_lens=[7, 7], **KIMI)["lengths"] == "equal"


def test_sizes_of_a_ragged_batch_are_means() -> None:
    calls = columns_of([kernel("kda", q_lens=[1, 3, 8], **KIMI)])
    sizes = REGISTRY["kda"].sizes(calls)
    assert (sizes["batch"][0], sizes["q_len"][0]) == (3, 4)


# ---- the table


def test_rows_of_every_collector(tmp_path: Path) -> None:
    """(framework, version, table, kernel_source, phase, batch, length, key heads, value heads, microseconds)"""
    lines: list[tuple[Any, ...]] = [
        ("vllm", "0.1.dev1", "kda", "flashkda_fwd", "context", 2, 1024, 24, 24, 300.0),
        ("vllm", "0.1.dev1", "kda", "fused_kda_decode", "generation", 8, 1, 24, 24, 40.0),
        ("sglang", "0.5.16", "kda", "fused_sigmoid_gating_delta_rule_update", "verify", 8, 4, 24, 24, 90.0),
        ("sglang", "0.5.16", "kda", "causal_conv1d_fn_qkv3", "context", 2, 1024, 24, 24, 80.0),
        ("vllm", "0.1.dev1", "kda", "causal_conv1d_fn_qkv3", "context", 4, 1024, 24, 24, 800.0),  # eager
        ("vllm", "0.1.dev1", "kda", "causal_conv1d_update", "generation", 8, 1, 24, 24, 4.0),  # timed alone
        ("trtllm", "1.3.0", "gdn", "chunk_gated_delta_rule", "context", 2, 1024, 16, 32, 400.0),
        ("trtllm", "1.3.0", "gdn", "causal_conv1d_fn", "context", 8, 1024, 16, 32, 90.0),
        ("trtllm", "1.3.0", "gdn", "fused_recurrent_gated_delta_rule", "generation", 8, 1, 16, 32, 20.0),  # part
        ("sglang", "0.5.14", "gdn", "chunk_gated_delta_rule", "context", 4, 1024, 16, 32, 900.0),  # disturbed
    ]
    names = ("framework", "version", "table", "kernel_source", "phase", "batch_size", "seq_len", "num_k_heads",
             "num_v_heads", "latency_us")  # fmt: skip
    columns: dict[str, list[Any]] = {
        name: list(cells) for name, cells in zip(names, zip(*lines, strict=True), strict=True)
    }
    columns["table"] = [f"{name}_perf" for name in columns["table"]]
    columns |= {"gpu": ["h200_sxm"] * len(lines), "origin": ["base"] * len(lines), "d_conv": [4] * len(lines)}
    columns |= {"head_k_dim": [128] * len(lines), "head_v_dim": [128] * len(lines)}
    write_parquet(tmp_path / "aiconfigurator/linear_attention.parquet", columns)
    found = lab.read(tmp_path, "aiconfigurator/linear_attention")
    no_bad_row(found)
    rows = {(row["op"], row["stack"], row["batch"], row["q_len"]): row for row in rows_of(found)}
    assert len(found) == len(rows) == 6
    prefill, decode = rows["kda", "vllm", 2, 1024], rows["kda", "vllm", 8, 1]
    assert (prefill["backend"], prefill["kernel"], prefill["heads"]) == ("flashkda", "chunked", 24)
    assert (decode["fused"], decode["kernel"], decode["backend"]) == (1, "recurrent", "triton")
    assert rows["kda", "sglang", 8, 4]["kernel"] == "recurrent" and rows["kda", "sglang", 8, 4]["fused"] == 0
    three = rows["causal_conv1d", "sglang", 2, 1024]
    assert (three["parts"], three["channels"], three["backend"]) == (3, 3 * 24 * 128, "triton")
    keys = rows["causal_conv1d", "trtllm", 8, 1024]
    assert (keys["channels"], keys["backend"]) == (16 * 128, "cuda")  # of the keys alone
    delta = rows["gated_delta", "trtllm", 2, 1024]
    assert (delta["stateless"], delta["qk_norm"], delta["backend"]) == (1, 0, "triton")
