"""Kernels that engines run under load: mixed batches as one schedule, 8-bit caches, latent attention, sampling; and how
they are drawn, launched, kept and told of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kernelcast as kc
from kernelcast.app.cli.app import build
from kernelcast.collect.choose import PlannedCall, choose
from kernelcast.collect.families import FAMILIES
from kernelcast.collect.table import read_records, write_table
from kernelcast.ops import kernel
from kernelcast.ops.base import Ragged, columns_of
from kernelcast_lab.data.folds import shape_fold
from kernelcast_lab.data.measurements import read_canonical

H200 = kc.gpu("h200_sxm")
WORDS = ("mixed", "chunked", "decode-", "mla", "sampling")
SERVED = tuple(name for name in FAMILIES if name.startswith("flashinfer-") and any(word in name for word in WORDS))
HEADS: dict[str, Any] = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "stack": "flashinfer"}
MIXED: dict[str, Any] = {"q_lens": [512, 1, 1], "kv_lens": [512, 960, 7008], "page_size": 16}


def work_of(op: str, **words: Any) -> Any:
    call = kernel(op, **words)
    return type(call).work(columns_of([call]), H200)


def first(value: Any) -> float:
    return float(np.ravel(value)[0])


def test_flashinfers_fa3_puts_chunks_and_decodes_in_one_schedule_without_packing_or_splitting() -> None:
    work, merge, offsets = work_of("attention", **HEADS, **MIXED, backend="fa3")
    # tiles of 128 queries of each of 32 heads: 4 of the chunk, one of each decode
    assert first(work.tasks) == 32 * (4 + 1 + 1)
    # tiles of 96 keys: the chunk's tiles see 128, 256, 384 and 512 keys (2 + 3 + 4 + 6), the decodes 10 and 73
    assert first(work.mean_steps) * first(work.tasks) == 32 * (15 + 10 + 73)
    assert first(work.serial_steps) == 73  # nobody splits the longest
    assert first(merge.tasks) == 0
    # 8,480 tokens lie in pages, 4 bytes for each, written by a kernel of its own
    assert first(offsets.activation_bytes) == 8480 * 4 and first(offsets.launches) == 1


def test_flashinfers_fa2_takes_the_tile_of_the_mean_request_and_splits_to_fill_two_ctas_an_sm() -> None:
    work, _ = work_of("attention", **HEADS, **MIXED, backend="flashinfer")
    # (512 + 1 + 1) * 4 rows of 3 requests are 685 each: tiles of 128 rows, of which the chunk has 16, the others one
    assert first(work.tile["tile_q"]) == 128 and first(work.tile["tile_kv"]) == 64
    # 8 KV heads share 264 slots, 33 each: 16 and 17 of the decodes at most, so chunks of 512 tokens: 2 and 14
    assert first(work.tasks) == 8 * (16 + 2 + 14)
    decodes = {"q_lens": [1, 1, 1], "kv_lens": [512, 960, 7008], "page_size": 16}
    (short, _) = work_of("attention", **HEADS, **decodes, backend="flashinfer")
    assert first(short.tile["tile_q"]) == 16 and first(short.tile["tile_kv"]) == 128


def test_fa3_of_an_engine_packs_the_heads_of_a_mixed_batch_and_not_of_long_prompts_alone() -> None:
    engine = {**HEADS, "stack": "vllm", "backend": "fa3"}
    mixed, *_ = work_of("attention", **engine, **MIXED)
    # 512 * 4 rows are 16 tiles; a decode's 4 rows are one, in 8 KV heads: its keys are walked 8 times, not 32
    pairs_walked = first(mixed.mean_steps) * first(mixed.tasks)
    # 2,048 rows are 16 tiles of 32 queries, which see 32, 64, … 512 keys: 1, 1, 1, 2, 2, 2, … 5, 5, 5, 6 tiles of 96
    assert pairs_walked == 8 * (51 + 10 + 73)
    alone, *_ = work_of("attention", **engine, batch=1, q_len=512, kv_len=512)
    # unpacked, tiles of 128 queries and keys: 1 + 2 + 3 + 4 steps in each of 32 heads
    assert first(alone.mean_steps) * first(alone.tasks) == 32 * 10
    (decodes, *_) = work_of("attention", **engine, q_lens=[1, 1], kv_lens=[960, 7008], page_size=16)
    assert first(decodes.mean_steps) * first(decodes.tasks) == 8 * (10 + 73)


def test_an_8_bit_cache_moves_half_the_bytes_and_pays_for_its_conversion() -> None:
    shape: dict[str, Any] = {**HEADS, "batch": 16, "q_len": 1, "kv_len": 4096, "page_size": 16, "backend": "flashinfer"}
    (full, _), (half, _) = work_of("attention", **shape), work_of("attention", **shape, kv_dtype="fp8")
    # 16 requests of 4,095 cached tokens, keys and values of 8 heads of 128 numbers
    assert first(full.streamed_bytes) == 16 * 4095 * 2 * 8 * 128 * 2
    assert first(half.streamed_bytes) == 16 * 4095 * 2 * 8 * 128
    assert first(full.other_warp_instructions) == 0
    # 2.5 instructions a number, 32 numbers at once, tiles of 256 keys: all 65,536 keys of 8 heads once
    converted = first(half.tasks) * first(half.other_warp_instructions) * 32 / 2.5
    assert converted == pytest.approx(16 * 4096 * 8 * 2 * 128)


def test_latent_attention_is_cut_into_chunks_of_256_tokens() -> None:
    work, merge = work_of("mla", q_heads=128, batch=8, q_len=1, kv_len=8192, page_size=64, backend="fa3",
                          stack="flashinfer")  # fmt: skip
    # 128 heads are two tiles of 64 rows; 8 * 2 * 8,192 tokens over 132 SMs are 992.97, 16 steps of 64: chunks of 1,024
    assert first(work.tasks) == 8 * 2 * 8
    assert first(work.serial_steps) == 16
    assert first(merge.tasks) == 8 * 128


def test_a_step_walks_as_many_mean_tasks_as_there_are_rounds_or_the_longest_alone() -> None:
    shape: dict[str, Any] = {**HEADS, "page_size": 16, "backend": "fa3"}
    generic = kc.Conditions(predictor="generic")
    one = kc.predict(kernel("attention", **shape, q_lens=[1], kv_lens=[32768]), H200, generic)
    lens = {"q_lens": [1] * 65, "kv_lens": [32768] + [128] * 64}
    many = kc.predict(kernel("attention", **shape, **lens), H200, generic)
    # 2,080 tasks are 16 rounds, but only one of them is long: not 16 times the longest walk
    assert one.time_s < many.time_s < 2 * one.time_s


def test_sampling_reads_its_rows_once_from_memory_and_again_from_l2() -> None:
    (work,) = work_of("top_k_top_p_sampling", rows=64, cols=128256, stack="flashinfer")
    assert first(work.tasks) == 64
    assert first(work.activation_bytes) == 64 * (128256 * 4 + 4)
    # three rounds of one and a half walks, 4,096 numbers a step: 4.5 * 32 steps
    assert first(work.serial_steps) == 4.5 * 32
    assert first(work.l2_bytes) == pytest.approx(4.5 * 128256 * 4 + 4)


@pytest.mark.parametrize("name", SERVED)
def test_served_families_draw_calls_that_their_runner_takes(name: str) -> None:
    calls: list[Any] = [wanted.call for wanted in choose(H200, 12, only=(name,))]
    assert calls and all(call.stack == "flashinfer" for call in calls)
    if "mixed" in name:
        assert all(min(call.q_lens) == 1 < max(call.q_lens) for call in calls)
    if "fp8" in name:
        assert all(call.kv_dtype == "fp8" for call in calls)


class Recorded:
    """Stands in for FlashInfer: remembers what it was planned with."""

    def __init__(self) -> None:
        self.planned: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        def wrapper(*given: Any, **words: Any) -> Any:
            def plan(*args: Any, **more: Any) -> None:
                self.planned[name] = args, {**words, **more}

            return SimpleNamespace(plan=plan, run=lambda *args, **more: None)

        return wrapper


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    torch = pytest.importorskip("torch")
    from kernelcast.collect.runners import flashinfer as runner

    found = Recorded()
    monkeypatch.setattr(runner, "_wrapper", lambda name, *more, **words: getattr(found, name)(*more, **words))
    monkeypatch.setattr(runner, "_integers", lambda values: list(values))
    monkeypatch.setattr(runner, "_anywhere", lambda pages: torch.randperm(pages))
    return found


def test_a_mixed_batch_is_one_plan_of_the_paged_prefill(recorded: Recorded) -> None:
    from kernelcast.collect.runners import flashinfer as runner

    recipe = runner.attention(kernel("attention", **HEADS, **MIXED, backend="fa3"))
    (queries, pages, order, last, *sizes), words = recorded.planned["BatchPrefillWithPagedKVCacheWrapper"]
    assert (queries, pages, last) == ([0, 512, 513, 514], [0, 32, 92, 530], [16, 16, 16])
    assert sorted(order.tolist()) == list(range(530)) and sizes == [32, 8, 128, 16]
    assert words["backend"] == "fa3" and words["causal"]
    assert [spec.shape for spec in recipe.tensors] == [(514, 32, 128), (530, 2, 16, 8, 128), (514, 32, 128)]


def test_an_8_bit_decode_and_latent_attention_have_the_caches_that_they_read(recorded: Recorded) -> None:
    from kernelcast.collect.pool import DTYPES
    from kernelcast.collect.runners import flashinfer as runner

    words = {**HEADS, "q_lens": [1, 1], "kv_lens": [33, 64], "page_size": 16, "backend": "flashinfer"}
    recipe = runner.attention(kernel("attention", **words, kv_dtype="fp8"))
    (starts, _, last, *_), _ = recorded.planned["BatchDecodeWithPagedKVCacheWrapper"]
    assert (starts, last) == ([0, 3, 7], [1, 16])
    assert recipe.tensors[1].dtype == DTYPES["fp8"] and recipe.tensors[0].dtype == DTYPES["bf16"]
    latent = runner.mla(kernel("mla", q_heads=16, batch=2, q_len=1, kv_len=100, page_size=64, backend="fa3",
                               stack="flashinfer"))  # fmt: skip
    assert [spec.shape for spec in latent.tensors[2:4]] == [(4, 64, 512), (4, 64, 64)]
    expanded = runner.mla(kernel("mla", q_heads=16, batch=2, q_len=100, kv_len=300, absorbed="no", backend="fa3",
                                 stack="flashinfer"))  # fmt: skip
    assert [spec.shape for spec in expanded.tensors] == [(200, 16, 192), (600, 16, 192), (600, 16, 128), (200, 16, 128)]


def test_ragged_calls_are_kept_in_a_table_and_come_back(tmp_path: Path) -> None:
    wanted = PlannedCall("flashinfer-mixed-fa3", kernel("attention", **HEADS, **MIXED, backend="fa3"))
    record = {"key": wanted.key, "family": wanted.family, "warm": False, "call": wanted.parameters, "status": "ok",
              "latency_us": 50.0}  # fmt: skip
    path = tmp_path / "x.parquet"
    write_table([json.loads(json.dumps(record))], path, H200, {})
    assert [r["key"] for r in read_records(path)] == [wanted.key]
    assert json.loads(read_canonical(path).columns["kv_lens"][0]) == MIXED["kv_lens"]


def test_lengths_are_a_part_of_the_shape_however_they_are_written() -> None:
    def fold(*lists: Any) -> list[int]:
        column = np.array([*lists, None], dtype=object)[: len(lists)]
        rows = len(lists)
        return shape_fold({"op": np.array(["attention"] * rows, dtype=object), "q_heads": np.full(rows, 8.0),
                           "q_lens": column}).tolist()  # fmt: skip

    assert fold("[1, 2]") == fold("[1,2]") == fold([1, 2])
    assert len(set(fold(*(f"[1, {n}]" for n in range(40))))) > 3
    bare = {"op": np.array(["attention"], dtype=object), "q_heads": np.array([8.0])}
    assert fold(None) == shape_fold(bare).tolist()  # what has none is where it was


def test_lists_of_several_groups_are_joined() -> None:
    joined = Ragged.joined([Ragged.of([[1, 2], [3]]), Ragged.of([[4, 5, 6]])])
    assert joined.flat.tolist() == [1, 2, 3, 4, 5, 6] and joined.starts.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize(
    ("op", "where", "most"),
    [
        ("attention", "phase=mixed", 0.07),
        ("attention", "phase=decode,kv_dtype=fp8", 0.05),
        ("mla", "phase=decode", 0.07),
        ("top_k_top_p_sampling", "dtype=fp32", 0.1),
    ],
)
def test_evidence_tells_of_kernels_under_load(op: str, where: str, most: float) -> None:
    words = [part for pair in where.split(",") for part in ("--where", pair)]
    asked = ["evidence", "--op", op, "--gpu", "h200_sxm", "--stack", "flashinfer", *words, "--json"]
    found = json.loads(CliRunner().invoke(build(), asked).stdout)
    kinds = [one for one in found["evidence"] if one["tested"]]
    tested = sum(one["tested"] for one in kinds)
    assert tested >= 40
    assert sum(one["error"] * one["tested"] for one in kinds) / tested < most


def test_an_engines_mixed_batch_rests_on_measured_ones() -> None:
    call = kernel("attention", **{**HEADS, "stack": "vllm"}, **MIXED)
    found = kc.predict(call, H200)
    assert found.support == "near"
    assert (found.evidence or {})["words"]["phase"] == "mixed"
