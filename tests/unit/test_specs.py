"""A GPU measured by microbenchmarks: the file that is written of what was seen, and forecasts that rest on it."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.collect.power_meter import BoardLimits
from kernelcast.collect.specs_draft import GpuProperties, Microbenchmarks, SustainedRun, base_of, start_draft, write
from kernelcast.collect.specs_file import campaign_ratio, complete_draft, reference_gpu
from kernelcast.errors import KernelcastError
from kernelcast.hardware import gpu, gpu_ids, load_gpu, origin_of, root_of
from kernelcast.hardware.gpu import path_of
from kernelcast.hardware.load import contradictions

BOARD = BoardLimits(sm_mhz=1980, memory_mhz=3201, memory_bits=6144, pcie_generation=5, pcie_lanes=16, nvlinks=18,
              power_limit_w=700)  # fmt: skip
H200 = GpuProperties(
    name="NVIDIA H200", capability="9.0", sm_count=132, l2_bytes=62914560, smem_bytes_per_sm=233472,
    smem_bytes_per_cta=232448, registers_per_sm=65536, max_threads_per_sm=2048, dram_bytes=150108000000, board=BOARD,
    software="driver 580, PyTorch 2.11",
)  # fmt: skip
PEAK = 132 * 1.83e9 * 4096  # of bf16
SHAPE = "8192 x 8192 x 8192"


def seen(**own: Any) -> Microbenchmarks:
    """As the H200 of reference.toml."""
    bursts = {"bf16": 0.83 * PEAK, "fp16": 0.80 * PEAK, "tf32": 0.42 * PEAK, "fp8": 2 * 0.791 * PEAK, "int8": PEAK}
    plain = Microbenchmarks(
        bursts=bursts, shapes=dict.fromkeys(bursts, SHAPE),
        longs={"bf16": SustainedRun(0.69 * PEAK, 698.0, 1500.0, True)},
        dram_read=4.4e12, dram_copy=4.2e12, dram_decode=0.897 * 4.8e12, l2_read={0.14: 11.39e12, 0.5: 9e12},
        smem=0.9 * 33.4e12, exponentials=0.95 * 4.18e12, fma=0.95 * 66.9e12, launch_floor_s=0.7e-6, gap_s=0.9e-6,
        smallest_gemm_s=2.04e-6, skipped={"nvfp4": "its tensor cores have no such format"},
    )  # fmt: skip
    return dataclasses.replace(plain, **own)


def made(told: GpuProperties, found: Microbenchmarks, path: Path) -> kc.Gpu:
    return write(complete_draft(start_draft(told, path), told, found))


# ---- the file of a catalogued GPU ----


def test_a_catalogued_gpu_gets_a_file_of_what_was_measured_each_number_with_how(tmp_path: Path) -> None:
    found, known = made(H200, seen(), tmp_path / "my_h200.toml"), gpu("h200_sxm")
    assert (found.id, found.unit_of, found.known_as) == ("my_h200", "h200_sxm", "h200_sxm")
    assert found.sustained_tensor_fraction == pytest.approx(0.88, rel=1e-4)
    assert found.sustained_tensor_fractions["fp8"] == pytest.approx(known.sustained_tensor_fractions["fp8"], rel=1e-4)
    assert found.sustained_tensor_fractions["fp16"] == pytest.approx(0.80 * 0.88 / 0.83, rel=1e-4)  # as bf16
    assert found.sustained_tensor_fractions["int8"] == pytest.approx(0.5, rel=1e-4)  # no campaign has it
    assert found.long_tensor_fraction == pytest.approx(0.69 * campaign_ratio("long_tensor_fraction")[0], rel=1e-4)
    assert found.sustained_dram_fraction == pytest.approx(0.87, rel=1e-4)
    assert found.l2_bytes_per_clk == 6144  # 11.39 TB/s is 93.6% of it, as on the reference
    assert (found.launch_floor_s, found.sustained_launch_s) == pytest.approx((0.7e-6, 2.6e-6), rel=1e-4)
    assert found.clock_sustained_hz == 1.5e9
    assert found.tensor_flops_per_j == known.tensor_flops_per_j  # whole models told it
    raw = tomllib.loads((tmp_path / "my_h200.toml").read_text())
    assert "sm_count" not in raw and "dram_bytes" not in raw  # within 1% of the catalogue's
    written = {name for name in raw if isinstance(raw[name], list)}
    assert written and all(found.sources[name].startswith("measured") for name in written)
    assert all(found.sources[f"sustained_tensor_fractions.{d}"].startswith("measured") for d in ("fp8", "int8"))
    assert "# not measured: nvfp4" in (tmp_path / "my_h200.toml").read_text()


def test_forecasts_of_a_unit_are_those_of_its_gpu_where_its_numbers_are(tmp_path: Path) -> None:
    # what physics reads is as in the catalogue: nothing moves, and nothing is less sure
    unit = made(H200, seen(), tmp_path / "my_h200.toml").replace
    found = load_gpu(tmp_path / "my_h200.toml")
    for call in (
        kc.Gemm(m=4096, n=4096, k=4096, dtype="bf16", stack="vllm"),
        kc.Gemm(m=8, n=8192, k=8192, stack="vllm"),
    ):
        known, own = kc.predict(call, "h200_sxm"), kc.predict(call, found)
        assert own.time_s == pytest.approx(known.time_s, rel=0.01)
        assert own.support == known.support == "seen"
        assert own.evidence == known.evidence
        assert (own.low_s, own.high_s) == pytest.approx((known.low_s, known.high_s), rel=0.01)
    # a what-if of the unit still rests on the catalogued one, and is a what-if
    faster = kc.predict(kc.Gemm(m=8, n=8192, k=28672, stack="vllm"), unit(dram_bytes_per_s=9.6e12))
    assert faster.support == "near"
    assert faster.time_s < 0.7 * kc.predict(kc.Gemm(m=8, n=8192, k=28672, stack="vllm"), "h200_sxm").time_s


def test_a_slower_unit_is_slower_by_what_was_measured_and_less_sure_by_as_much(tmp_path: Path) -> None:
    slow = made(H200, seen(dram_decode=0.897 * 4.8e12 / 1.25), tmp_path / "slow.toml")
    call = kc.Gemm(m=8, n=8192, k=28672, dtype="bf16", stack="vllm")  # waits for DRAM
    known, own = kc.predict(call, "h200_sxm"), kc.predict(call, slow)
    assert own.time_s / known.time_s == pytest.approx(1.25, rel=0.03)
    assert own.low_s <= known.time_s * 1.01  # the interval holds the catalogue's answer too
    assert own.support == "seen"


def test_a_unit_goes_by_the_id_of_its_gpu_where_others_know_it(tmp_path: Path) -> None:
    found = made(H200, seen(), tmp_path / "my_h200.toml")
    assert origin_of(found) is gpu("h200_sxm") and root_of(found.replace(sm_count=100)) is gpu("h200_sxm")
    assert origin_of(gpu("h200_sxm")) is None
    from kernelcast.energy import power_model

    model = power_model(found)
    assert model is not None and model.measured == "h200_sxm" and model.support == "near"


def test_a_lower_power_limit_and_clock_are_told_and_stay_consistent(tmp_path: Path) -> None:
    board = dataclasses.replace(BOARD, power_limit_w=500, sm_mhz=1755)
    found = made(dataclasses.replace(H200, board=board), seen(), tmp_path / "capped.toml")
    assert found.power_w == 500
    # 0.88 (campaigns' measure) of the peak at 1830 MHz is 0.918 of that at 1755
    assert found.clock_boost_hz == found.tensor_clock_hz == 1.755e9
    assert found.sustained_tensor_fraction == pytest.approx(0.88 * 1.83 / 1.755, rel=1e-4)


def test_rates_above_the_published_peak_move_the_tensor_clock_then_the_rate(tmp_path: Path) -> None:
    factor = campaign_ratio("sustained_tensor_fraction")[0]
    bursts = {"bf16": 0.8 * PEAK, "fp8": 2.04 * PEAK}
    found = made(H200, seen(bursts=bursts, shapes=dict.fromkeys(bursts, SHAPE)), tmp_path / "a.toml")
    assert found.tensor_clock_hz == pytest.approx(1.02 * 1.83e9, rel=1e-3)
    fp8 = min(1.0, campaign_ratio("sustained_tensor_fractions.fp8")[0])
    assert found.sustained_tensor_fractions["fp8"] == pytest.approx(fp8, abs=2e-4)
    assert found.sustained_tensor_fraction == pytest.approx(factor * 0.8 / 1.02, rel=1e-3)
    bursts = {"bf16": 0.8 * PEAK, "fp8": 2.4 * PEAK}  # 1.2 of the peak, and the boost clock is 1.082 times
    found = made(H200, seen(bursts=bursts, shapes=dict.fromkeys(bursts, SHAPE)), tmp_path / "b.toml")
    assert found.tensor_clock_hz == found.clock_boost_hz
    assert found.tensor_flops_per_s("fp8") == pytest.approx(2.4 * PEAK, rel=1e-3)
    assert found.tensor_flops_per_clk_sm["bf16"] == 4096
    for one in (found, made(H200, seen(dram_decode=5e12, dram_read=5.2e12), tmp_path / "c.toml")):
        assert not list(contradictions(one))
    assert one.dram_bytes_per_s == pytest.approx(5.2e12, rel=1e-3)


def test_what_could_not_be_measured_leaves_the_base(tmp_path: Path) -> None:
    found = made(H200, Microbenchmarks(skipped={"bf16": "no"}), tmp_path / "bare.toml")
    known = gpu("h200_sxm")
    assert found.sustained_tensor_fraction == known.sustained_tensor_fraction
    assert found.launch_floor_s == known.launch_floor_s


# ---- the file of a GPU that the catalogue does not know ----


def test_a_new_gpu_of_a_known_capability_gets_a_whole_file(tmp_path: Path) -> None:
    told = dataclasses.replace(H200, name="NVIDIA H300")
    found = made(told, seen(), tmp_path / "h300.toml")
    assert found.unit_of is None and found.known_as == "h300"
    assert found.compute_capability == "9.0" and found.link_kind == "nvlink4"
    assert found.link_bytes_per_s == 450e9  # 18 links of 25 GB/s
    assert found.dram_bytes_per_s == pytest.approx(2 * 3201e6 * 6144 / 8, rel=1e-4)
    assert found.tensor_flops_per_j == pytest.approx(0.69 * PEAK / 700, rel=1e-4)
    assert not list(contradictions(found))
    assert found.l2_bytes_per_clk == pytest.approx(6144, rel=2e-3)  # what the H200 has
    assert kc.predict(kc.Gemm(m=4096, n=4096, k=4096), found).support in ("near", "extrapolated")


def test_a_new_capability_inherits_by_instruction_path_and_measured_rates_decide(tmp_path: Path) -> None:
    assert [base_of(c)[0] for c in ("9.0", "12.1", "13.0", "11.0", "8.7")] == [
        "_sm90", "_sm120", "_sm103", "_sm103", "_sm86",
    ]  # fmt: skip
    assert path_of("12.1")[0] == path_of("8.9")[0] == "mma.sync"
    base = gpu("rtx_pro_6000_server").tensor_flops_per_clk_sm
    told = dataclasses.replace(
        H200, name="NVIDIA RTX 7090", capability="12.7", board=dataclasses.replace(BOARD, nvlinks=0)
    )
    peak = {dtype: 132 * 1.98e9 * base[dtype] for dtype in ("bf16", "fp8", "int8")}
    # half the 16-bit rate of the base, as GeForce cards have; int8 of twice the base's
    bursts = {"bf16": 0.45 * peak["bf16"], "fp8": 0.42 * peak["fp8"], "int8": 1.7 * peak["int8"]}
    found = made(told, seen(bursts=bursts, shapes=dict.fromkeys(bursts, SHAPE), exponentials=0.9 * 132 * 1.98e9 * 32),
                 tmp_path / "rtx_7090.toml")  # fmt: skip
    assert found.tensor_flops_per_clk_sm["bf16"] == base["bf16"] / 2
    assert found.tensor_flops_per_clk_sm["fp8"] == base["fp8"] / 2
    assert found.tensor_flops_per_clk_sm["int8"] == base["int8"] * 2
    assert found.tensor_flops_per_clk_sm["nvfp4"] == base["nvfp4"]
    assert found.sustained_tensor_fraction == pytest.approx(0.9 * 0.88 / 0.83, rel=1e-3)
    assert found.xu_ops_per_clk_sm == 32
    assert found.link_kind == "pcie5" and found.compute_capability == "12.7"
    assert "nearest that runs mma.sync" in (tmp_path / "rtx_7090.toml").read_text()


def test_names_that_would_mislead_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelcastError, match=r"h200_sxm is a GPU of the catalogue.*my_h200_sxm\.toml"):
        start_draft(H200, tmp_path / "h200_sxm.toml")


def test_a_driver_that_gives_another_name_can_be_helped(tmp_path: Path) -> None:
    told = dataclasses.replace(H200, name="GRID H200-141C")
    assert start_draft(told, tmp_path / "mine.toml").base == "_sm90"
    assert start_draft(told, tmp_path / "mine.toml", "h200_sxm").texts["unit_of"] == "h200_sxm"


def test_the_reference_is_a_gpu_of_the_catalogue_and_its_ratios_are_near_one() -> None:
    known = gpu(reference_gpu()["gpu"])
    for name in ("sustained_tensor_fraction", "sustained_dram_fraction", "sustained_launch_s"):
        factor, told = campaign_ratio(name)
        assert factor == pytest.approx(known.number(name) / reference_gpu()[name])
        assert 0.75 < factor < 1.35 and f"times {factor:.3f}" in told
    assert campaign_ratio("sustained_tensor_fractions.nvfp4") == (1.0, "")  # not measured both ways
    assert campaign_ratio("sustained_tensor_fractions.tf32") == campaign_ratio("sustained_tensor_fraction")


# ---- a file that contradicts itself ----

CONTRADICTIONS = {
    "[published_flops_per_s]\nbf16 = 2000e12": r"bf16 is 2e\+15, but 132 SMs x 1830 MHz x 4096 .* give 9\.894e\+14",
    "[published_flops_per_s]\nfp32 = 100e12": r"fp32 is 1e\+14, but 132 SMs x 1980 MHz x 256 \(fma",
    "clock_tensor_hz = 2.5e9": r"clock_tensor_hz 2\.5e\+09 is more than clock_boost_hz 1\.98e\+09",
    "clock_base_hz = 2.5e9": "clock_base_hz",
    "clock_sustained_hz = 2.5e9": "clock_sustained_hz",
    "l2_bytes = 999999999999": r"l2_bytes 1e\+12 is more than dram_bytes 1\.5",
    "l2_bytes_per_clk = 1000": r"1\.98e\+12 B/s, less than dram_bytes_per_s 4\.8e\+12",
    "long_tensor_fraction = 0.95": r"long_tensor_fraction 0\.95 is more than sustained_tensor_fraction 0\.88",
    "launch_floor_s = 5e-6": r"launch_floor_s 5e-06 is more than sustained_launch_s 2\.6e-06",
    "sustained_tensor_fraction = 1.02": "at most 1, not 1.02",
    "[sustained_tensor_fractions]\nfp8 = 1.02": r"sustained_tensor_fractions\.fp8 is a share of the peak, at most 1",
    "[sustained_tensor_fractions]\nnvfp4 = 0.5": r"sustained_tensor_fractions\.nvfp4, but .* has no nvfp4",
    "power_w = 0": "power_w must be a positive number, not 0",
    'unit_of = "h2000"': "unit_of: unknown gpu 'h2000'",
    'link_kind = "nvlink9"': "unknown fabric 'nvlink9'",
}


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused_in_one_line_with_the_numbers(line: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(f'base = "h200_sxm"\n{line}\n')
    with pytest.raises(KernelcastError, match=CONTRADICTIONS[line]) as refused:
        load_gpu(path)
    assert "\n" not in str(refused.value)


def test_no_file_of_the_catalogue_contradicts_itself() -> None:
    assert {name: told for name in gpu_ids() if (told := list(contradictions(gpu(name))))} == {}


# ---- new fields ----


def test_shares_by_format_are_numbers_like_others() -> None:
    known = gpu("h200_sxm")
    changed = known.replace(**{"sustained_tensor_fractions.fp8": 0.5})
    assert changed.sustained_tensor_fractions["fp8"] == 0.5
    assert changed.changes == {"sustained_tensor_fractions.fp8": 0.5}
    with pytest.raises(KernelcastError, match="at most 1"):
        known.replace(**{"sustained_tensor_fractions.fp8": 1.5})
    from kernelcast.app.report.lists import gpu_fields
    from kernelcast.app.report.text import field_text

    fields = gpu_fields(known)
    assert set(fields["sustained_tensor_fractions"]) >= {"fp8"} and "unit_of" in fields
    assert field_text("sustained_tensor_fractions", 0.5) == "50.0%"


def test_every_share_by_format_is_of_a_format_that_the_gpu_has() -> None:
    for name in gpu_ids():
        found = gpu(name)
        assert "bf16" not in found.sustained_tensor_fractions  # 16 bits are the plain field
        assert np.all(np.fromiter(found.sustained_tensor_fractions.values(), float) > 0.2)
