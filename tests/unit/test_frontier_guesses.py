"""Which public serving points guess tokens ahead, of tables that do not say it. Every number here is invented."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_lab_serving import write

from kernelcast_lab.data import serving
from kernelcast_lab.data.inferencex import RUNS, UNKNOWN, draft_tokens_of

DUMP = "db-dump/2026-04-27; config_id=1"
_PARTS = ("decode", "prefill")
_SIZES = {"tp_size": 8.0, "pp_size": 1.0, "attention_dp_size": 1.0, "moe_tp_size": 8.0, "moe_ep_size": 1.0}


def row(version: str, day: str | None = None, source: str = "source_file=2026-04-01.csv", in_flight: int = 8,
        **changes: Any) -> dict[str, Any]:  # fmt: skip
    """DeepSeek-R1 on eight B200 by TensorRT-LLM, unless told otherwise."""
    told = "; ".join([source, f"silicon_concurrency={in_flight}", *([f"measured={day}"] if day else [])])
    found: dict[str, Any] = {
        "id": "a", "silicon_data_source": told, "backend": "trtllm", "backend_version": version, "mode": "agg",
        "model_path": "deepseek-ai/DeepSeek-R1-0528", "system": "b200_sxm", "isl": 1024, "osl": 1024,
        "gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4", "batch_size": float(in_flight), **_SIZES,
        "silicon_ttft_ms": 300.0, "silicon_tpot_ms": 12.0,
    }  # fmt: skip
    for part in _PARTS:
        found |= {f"{part}_{name}": None for name in (*_SIZES, "batch_size", "num_workers")}
    return {**found, **changes}


def sglang(day: str, **changes: Any) -> dict[str, Any]:
    return row("0.5.9", day, backend="sglang", gemm_quant_mode="fp8_block", moe_quant_mode="fp8_block", **changes)


def split(decode_dp: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Two workers that decode four requests each on eight GPUs, one that reads prompts on four; TensorRT-LLM."""
    parts: dict[str, Any] = {"decode_num_workers": 2.0, "decode_batch_size": 4.0 / decode_dp,
                             "prefill_num_workers": 1.0, "prefill_batch_size": 1.0}  # fmt: skip
    sizes = {"decode": {**_SIZES, "tp_size": 8.0 / decode_dp, "attention_dp_size": decode_dp},
             "prefill": {**_SIZES, "tp_size": 4.0, "moe_tp_size": 4.0}}  # fmt: skip
    for part, own in sizes.items():
        parts |= {f"{part}_{name}": size for name, size in own.items()}
    nothing: dict[str, Any] = dict.fromkeys((*_SIZES, "batch_size"))
    return row("1.2", "2026-02-01", mode="disagg", **nothing, **{**parts, **changes})


# ---- by the image and the day ----


@pytest.mark.parametrize(
    ("changes", "guesses"),
    [
        ({}, 3),  # a run that its image tells, on any day
        ({"day": "2026-01-01"}, 3),
        ({"attention_dp_size": 8.0, "tp_size": 1.0}, 1),  # with attention DP its recipe guesses one token
        ({"attention_dp_size": None}, 3),
        ({"version": "1.2.0rc5"}, 0),  # another image
        ({"system": "h200_sxm"}, 0),  # where that image ran no recipe with guesses
        ({"model_path": "openai/gpt-oss-120b"}, 0),
        ({"mode": "disagg", "backend": "vllm"}, 0),
        # a run of its day alone: the same image without guesses on others
        ({"version": "1.1.0rc2.post2", "day": "2026-01-14"}, 3),
        ({"version": "1.1.0rc2.post2", "day": "2026-01-15"}, 0),
        ({"version": "1.1.0rc2.post2"}, 0),
    ],
)
def test_a_run_is_told_by_its_image_and_its_day(changes: dict[str, Any], guesses: int) -> None:
    assert draft_tokens_of([row(**{"version": "1.2.0rc6.post3", **changes})]) == [guesses]


def test_every_run_says_which_gpus_and_where_it_is_public() -> None:
    assert all(
        run.gpus and run.source.startswith("https://") and run.draft_tokens >= run.draft_tokens_dp >= 1 for run in RUNS
    )
    assert {run.mode for run in RUNS} == {"agg", "disagg"}


def test_what_the_dump_has_too_is_without() -> None:
    """Two exports of one measurement share its times, to a millisecond and a tenth of one."""
    other: dict[str, Any] = {"silicon_ttft_ms": 450.0, "silicon_tpot_ms": 6.0}
    rows = [
        row("1.2.0rc6.post3", source=DUMP),
        row("1.2.0rc6.post3", id="its twin", silicon_ttft_ms=300.3, silicon_tpot_ms=12.04),
        row("1.2.0rc6.post3", id="another", in_flight=16, batch_size=16.0, **other),
    ]
    assert draft_tokens_of(rows) == [0, 0, 3]


def test_an_export_without_a_day_takes_that_of_its_twin() -> None:
    first = row("1.1.0rc2.post2", "2026-01-14")
    assert draft_tokens_of([first, row("1.1.0rc2.post2", id="dayless")]) == [3, 3]
    assert draft_tokens_of([first, row("1.1.0rc2.post2", id="dayless", silicon_tpot_ms=13.0)]) == [3, 0]


# ---- sweeps of both sorts ----


def test_of_two_unlike_points_of_one_setting_the_faster_guesses() -> None:
    slow, fast = (sglang("2026-03-25", id=name, silicon_tpot_ms=tpot_ms) for name, tpot_ms in (("s", 14.0), ("f", 8.0)))
    assert draft_tokens_of([slow, fast]) == [0, 2]
    assert draft_tokens_of([fast, slow]) == [2, 0]  # whichever comes first
    elsewhere = {**slow, "tp_size": 4.0}  # another setting: neither has a twin
    assert draft_tokens_of([elsewhere, fast]) == [UNKNOWN, UNKNOWN]


def test_without_two_unlike_twins_nobody_can_tell() -> None:
    alone = sglang("2026-03-25")
    assert draft_tokens_of([alone]) == [UNKNOWN]
    assert draft_tokens_of([alone, sglang("2026-03-25", id="as fast")]) == [UNKNOWN, UNKNOWN]
    three = [sglang("2026-03-25", id=str(tpot_ms), silicon_tpot_ms=tpot_ms) for tpot_ms in (8.0, 11.0, 14.0)]
    assert draft_tokens_of(three) == 3 * [UNKNOWN]
    assert draft_tokens_of([sglang("2026-03-24")]) == [0]  # the day before


def test_the_dump_tells_one_of_two() -> None:
    """The plain point of a sweep of both: the dump has it. Its twin of the same setting is the faster."""
    plain, twin = sglang("2026-03-25", silicon_tpot_ms=14.0), sglang("2026-03-25", id="fast", silicon_tpot_ms=8.0)
    dump = sglang("2026-03-25", source=DUMP, silicon_tpot_ms=14.0)
    assert draft_tokens_of([dump, plain, twin]) == [0, 0, 2]


def test_attention_dp_of_those_that_decode_counts_in_split_deployments() -> None:
    both = [split(silicon_tpot_ms=20.0), split(silicon_tpot_ms=11.0)]
    assert draft_tokens_of(both) == [0, 3]
    ranks = [split(4.0, silicon_tpot_ms=20.0), split(4.0, silicon_tpot_ms=11.0)]
    assert draft_tokens_of(ranks) == [0, 1]
    assert draft_tokens_of([split()]) == [UNKNOWN]


# ---- what becomes of it ----


def read(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    write(folder / "aiconfigurator/e2e_silicon.parquet", rows)
    return folder


def test_points_that_nobody_can_tell_are_left_out(tmp_path: Path) -> None:
    rows = [
        row("1.2.0rc6.post3", id="guesses"),
        row("1.2.0rc5", id="plain", silicon_tpot_ms=15.0),
        sglang("2026-03-25", id="untold"),
        sglang("2026-03-25", id="bad", batch_size=4.0),  # of two replicas, whatever it guesses
    ]
    folder = read(tmp_path, rows)
    assert {point.id: point.draft_tokens for point in serving.serving_points(folder)} == {"guesses": 3, "plain": 0}
    assert serving.left_out(folder) == {"guesses_untold": 1, "several_replicas": 1}


def test_split_points_that_nobody_can_tell_are_left_out(tmp_path: Path) -> None:
    untold = split(id="untold", in_flight=8, isl=2048)
    told = [split(id=name, silicon_tpot_ms=tpot_ms) for name, tpot_ms in (("plain", 20.0), ("fast", 11.0))]
    points = serving.split_points(read(tmp_path, [untold, *told]))
    assert {point.decode.id: point.decode.draft_tokens for point in points} == {"plain": 0, "fast": 3}
    assert all(point.prefill.draft_tokens == 0 for point in points)  # reading prompts guesses nothing
    # 2 workers x 4 requests in flight
    assert {(p.decode_workers, p.prefill_workers, p.decode.concurrency, p.prefill.tp) for p in points} == {(2, 1, 8, 4)}
