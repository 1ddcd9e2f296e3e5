"""Diagnoses of recorded runs on an H200 (validation/profiles), and of planted faults: the right reason comes first."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from profiler_trace import BF16, kernel, linear, op, trace, wave_plus_tile

from kernelcast.diagnose.diagnose import DiagnosedCall, Diagnosis, diagnose, most_used_dtype
from kernelcast.diagnose.profiler_trace import profile_of
from kernelcast.diagnose.read import read_measured
from kernelcast.hardware import gpu

PROFILES = Path(__file__).parents[2] / "validation" / "profiles"
H200 = gpu("h200_sxm")


@functools.cache
def recorded(name: str, run_dtype: str | None = None) -> Diagnosis:
    profile, chip = read_measured(PROFILES / name)
    assert chip == H200
    return diagnose(profile, chip, run_dtype=run_dtype)


def fault(name: str, file: str = "planted_faults.json.gz", run_dtype: str | None = None) -> DiagnosedCall:
    (row,) = [row for row in recorded(file, run_dtype).rows if f"fault.{name}" in row.measured.marks]
    return row


def reason(row: DiagnosedCall) -> str:
    return row.main.name if row.main else ""


@pytest.mark.parametrize("name", ["llama_8b_4_layers_prefill.json.gz", "llama_8b_4_layers_decode.json.gz"])
def test_a_forward_pass_is_matched(name: str) -> None:
    """A Hugging Face Llama of four layers; 90% is the promise."""
    found = recorded(name)
    assert found.matched_share >= 0.98
    assert (PROFILES / name).stat().st_size < 150_000
    assert found.profile.gpu_time_us == pytest.approx(sum(row.measured.total_us for row in found.rows))
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)


def test_the_prefill_is_predicted_and_its_decode_waits_for_the_host() -> None:
    prefill, decode = (recorded(f"llama_8b_4_layers_{name}.json.gz") for name in ("prefill", "decode"))
    assert prefill.total_us("time_us") == pytest.approx(prefill.measured_matched_us, rel=0.10)
    assert decode.idle is not None and "85% of the time" in decode.idle.detail
    products = [row for row in prefill.rows if row.metrics.op == "gemm" and row.share > 0.05]
    assert {reason(row) for row in products} == {"compute-bound"}
    chains = [row for row in prefill.rows if reason(row) == "unfused"]
    assert sum(row.share for row in chains) > 0.1  # norms and rotary embeddings, op by op


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unaligned_k", "unaligned sizes"),
        ("unaligned_n", "unaligned sizes"),
        ("fp32_gemm", "dtype fallback"),
        ("fp32_attention", "dtype fallback"),
        ("tiny", "launch-bound"),
        ("at_peak", "memory-bound"),
        ("aligned", "compute-bound"),
        ("one_wave", "compute-bound"),
        ("wave_plus_tile_c", "tail wave"),  # 356 tiles: 2.70 waves
    ],
)
def test_a_recorded_fault_is_named(name: str, expected: str) -> None:
    assert reason(fault(name)) == expected


@pytest.mark.parametrize(("name", "expected"), [("no_split_k", "split-K missing"), ("few_ctas", "low occupancy")])
def test_more_recorded_faults(name: str, expected: str) -> None:
    assert reason(fault(name, "planted_faults_more.json.gz")) == expected


def test_what_a_fault_costs() -> None:
    """The aligned product beside the unaligned one took 178 us of its 1,022."""
    aligned, unaligned = fault("aligned"), fault("unaligned_k")
    won = unaligned.measured.time_us - aligned.measured.time_us
    assert unaligned.saving_us == pytest.approx(won, rel=0.1)
    ranked = [row.measured.marks for row in recorded("planted_faults.json.gz").rows[:4]]
    assert ranked == [("fault.fp32_gemm",), ("fault.unaligned_k",), ("fault.unaligned_n",), ("fault.fp32_attention",)]


def test_a_product_more_than_the_gpu_has_sms() -> None:
    """133 products on 132 SMs, of fp32 as it is meant: 584 us, where 132 take 372."""
    one, more = (fault(f"fp32_{count}", "planted_waves.json.gz", "fp32") for count in (132, 133))
    assert reason(more) == "tail wave" and more.main is not None
    assert more.main.detail.startswith("532 tiles of 64x64 on 132 SMs x 4: 1.01 waves, the last 1% full")
    assert more.main.explained_us > more.measured.time_us - one.measured.time_us > 200
    assert "tail wave" not in [r.name for r in one.reasons]
    # in a run of bf16 that both are fp32 matters more, and the wave is told after it
    beside = fault("fp32_133", "planted_waves.json.gz")
    assert [r.name for r in beside.reasons[:2]] == ["dtype fallback", "tail wave"]


def test_a_product_more_than_sms_with_one_operand_for_all() -> None:
    """An operand expanded over the batch is read once: the batch is one product, which memory does not bind."""
    more, one = (fault(f"shared_{count}", "planted_waves.json.gz") for count in (133, 132))
    assert (more.metrics.op, more.metrics.parameters["m"], more.metrics.parameters["n"]) == ("gemm", 256, 133 * 128)
    assert reason(more) == "tail wave" and "tail wave" not in [r.name for r in one.reasons]


def test_one_wave_plus_one_tile() -> None:
    found = diagnose(profile_of(wave_plus_tile(), H200), H200)
    more, one = found.rows
    assert more.metrics.parameters["m"] == 2432 and reason(more) == "tail wave"
    assert more.main is not None and "133 tiles of 128x256 on 132 SMs: 1.01 waves" in more.main.detail
    assert more.main.explained_us == pytest.approx(171.6 * (1 - 133 / 264))
    assert "tail wave" not in [r.name for r in one.reasons]


@pytest.mark.parametrize(
    ("size", "told", "place"),
    [
        ((1153, 896, 896, "tf32"), "133 tiles of 64x128 on 120 SMs: 1.11 waves, the last 11% full", 0),
        ((846, 4800, 1600, "bf16"), "266 tiles of 128x128 on 132 SMs x 2: 1.01 waves, the last 1% full", 1),
    ],
)
def test_a_wave_and_a_few_tiles_as_measured(
    size: tuple[int, int, int, str], told: str, place: int, tmp_path: Path
) -> None:
    """Rows of our campaign on the H200; the sizes of the second are unaligned as well, which explains more."""
    duckdb = pytest.importorskip("duckdb")
    m, n, k, dtype = size
    source, path = PROFILES.parent / "kernelcast" / "h200_sxm.parquet", tmp_path / "rows.parquet"
    chosen = f"op = 'gemm' AND m = {m} AND n = {n} AND k = {k} AND dtype = '{dtype}'"
    duckdb.sql(f"COPY (SELECT * FROM '{source}' WHERE {chosen}) TO '{path}'")
    profile, chip = read_measured(path)
    for row in diagnose(profile, chip).rows:
        assert row.reasons[place].name == "tail wave" and row.reasons[place].detail.startswith(told)
    assert profile.calls


def test_a_kernel_that_the_gpu_cannot_hold_is_not_matched() -> None:
    huge = linear(1, 10_000_000, 100_000, 64)
    found = diagnose(profile_of(trace(huge, kernel(1, "nvjet_x", 5.0)), H200), H200)
    (row,) = found.unmatched
    assert "needs" in row.unmatched and "GiB" in row.unmatched
    assert found.matched_share == 0.0


def test_the_runs_format_is_that_of_most_products() -> None:
    events = []
    for number in range(5):
        kind = "float" if number == 0 else BF16
        events += [op(number, "aten::mm", [[64, 64], [64, 64]], [kind, kind], at_us=10.0 * number, lasts_us=5),
                   kernel(number, "gemm", 1000.0 if number == 0 else 5.0, at_us=2000.0 * number)]  # fmt: skip
    profile = profile_of(trace(*events), H200)
    assert most_used_dtype(profile.calls) == "bf16"
    assert diagnose(profile, H200, run_dtype="fp16").run_dtype == "fp16"


def test_nsight_compute_is_read_for_what_it_tells() -> None:
    profile, _ = read_measured(PROFILES / "ncu_metrics.csv", H200)
    found = diagnose(profile, H200)
    assert profile.launches == 6
    (add,) = found.matched
    assert add.metrics.op == "pointwise" and add.measured.time_us == pytest.approx(17.1, abs=0.1)
    fp32 = next(row for row in found.unmatched if "xmma" in row.measured.name)
    assert reason(fp32) == "dtype fallback" and "k is in neither" in fp32.unmatched
