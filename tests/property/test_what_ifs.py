"""Laws of what-ifs, on the forecasts that users get: learned, with random stacks, backends and formats."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

import kernelcast as kc
from kernelcast.hardware import origin_of
from kernelcast.hardware.load import CATALOGUE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200_sxm", "l40s", "rtx_4090"])  # measured, measured with GDDR, not measured
def test_a_better_part_is_never_slower_and_changes_compose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from laws import FIELDS, broken, inconsistent, table_of

    columns, base, draw = table_of(30, seed=11), kc.gpu(name), random.Random(5)
    for field in FIELDS:
        if base.number(field):
            tried, wrong = broken(columns, base, field, draw)
            assert tried > 60 and wrong == 0, field
            assert inconsistent(columns, base, field) == 0, field


def test_ones_own_value_is_no_change() -> None:
    base = kc.gpu("h200_sxm")
    assert base.replace(dram_bytes_per_s=base.dram_bytes_per_s) is base
    assert base.replace(sm_count=100).replace(sm_count=base.sm_count) is base
    there_and_more = base.replace(sm_count=100).replace(l2_bytes=10**8).replace(sm_count=base.sm_count)
    assert dict(there_and_more.changes) == {"l2_bytes": 10**8} and there_and_more.origin is base


def test_a_gpu_is_its_numbers_not_its_name(tmp_path: Path) -> None:
    """Without the peaks that NVIDIA publishes of 132 SMs, which 16 cannot have."""
    file = tmp_path / "h200_sxm.toml"
    whole_file = (CATALOGUE / "h200_sxm.toml").read_text()
    unpublished = re.sub(r"^\[published_flops_per_s\]\n(.+\n)+", "", whole_file, flags=re.MULTILINE)
    file.write_text(re.sub(r"^sm_count = .*$", "sm_count = 16", unpublished, flags=re.MULTILINE))
    small = kc.gpu(str(file))
    call = kc.Gemm(m=4096, n=4096, k=4096, stack="vllm")
    whole, part = kc.predict(call, "h200_sxm"), kc.predict(call, small)
    assert origin_of(small) == kc.gpu("h200_sxm") and origin_of(kc.gpu("h200_sxm")) is None
    assert (whole.support, part.support) == ("seen", "near")
    # compute-bound on 132 SMs: 132 / 16 = 8.25 times as long, or a little more for what the tail adds
    assert 7 < part.time_s / whole.time_s < 10


def test_a_what_if_is_the_answer_on_the_gpu_times_the_ratio_of_physics() -> None:
    base = kc.gpu("h200_sxm")
    call, fast = kc.Gemm(m=1, n=28672, k=8192, stack="vllm"), base.replace(dram_bytes_per_s=2 * base.dram_bytes_per_s)
    known, asked = kc.predict(call, base), kc.predict(call, fast)
    physics = [kc.predict(call, place, kc.Conditions(predictor="generic")).time_s for place in (base, fast)]
    assert asked.time_s / known.time_s == pytest.approx(physics[1] / physics[0])
    assert asked.high_s / asked.time_s >= known.high_s / known.time_s  # and no surer than what was measured
    assert asked.time_s >= asked.bound_s


def from_file(folder: Path, identity: str = "", **numbers: float) -> kc.hardware.Gpu:
    """A GPU of a file that changes numbers of a GB300; a dot names a rate of a format."""
    rates = "".join(f"{name.partition('.')[2]} = {value!r}\n" for name, value in numbers.items() if "." in name)
    lines = "".join(f"{name} = {value!r}\n" for name, value in numbers.items() if "." not in name)
    path = folder / "to_come.toml"
    path.write_text(f'base = "gb300"\nname = "A GPU to come"\n{identity}\n{lines}[tensor_flops_per_clk_sm]\n{rates}')
    return kc.gpu(path)


IDENTITIES = ("", 'compute_capability = "13.0"')  # of the generation of its base, and of one to come


@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "bf16"])
def test_a_better_part_in_a_file_is_never_slower(tmp_path: Path, identity: str, dtype: str) -> None:
    """A chip to come: 22 TB/s of DRAM (the GB300 has 8), and more and more FLOPs a clock in a format."""
    memory = {"dram_bytes_per_s": 22e12, "l2_bytes_per_clk": 14000.0}
    base = kc.gpu("gb300").tensor_flops_per_clk_sm[dtype]
    shapes = [
        kc.Gemm(m=m, n=n, k=k, dtype=dtype, stack=stack)
        for m in (16, 256, 4096, 16384)
        for n, k in ((4096, 4096), (28672, 8192))
        for stack in (None, "vllm", "sglang", "trtllm")
    ]
    layers = [kc.kernel("moe", tokens=tokens, hidden=7168, inter=2048, experts=256, topk=8, ep=8, dtype=dtype,
                        stack="trtllm") for tokens in (64, 4096)]  # fmt: skip
    times = [
        [p.time_s for p in kc.predict_many([*shapes, *layers], from_file(tmp_path, identity, **memory, **rate))]
        for rate in ({f"tensor_flops_per_clk_sm.{dtype}": base * factor} for factor in (1.0, 1.5, 7 / 3, 10 / 3, 10.0))
    ]
    for slower, faster in itertools.pairwise(times):
        assert all(b <= a * (1 + 1e-9) for a, b in zip(slower, faster, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_better_number_in_a_file_is_never_slower(
    tmp_path: Path, identity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from laws import WHOLE, table_of
    from laws import times as times_of

    columns, base = table_of(60, seed=12), kc.gpu("gb300")
    for field in ("dram_bytes_per_s", "l2_bytes", "sm_count", "l2_bytes_per_clk", "clock_boost_hz", "link_bytes_per_s"):
        value = base.number(field)
        assert value
        found = [
            times_of(
                columns, from_file(tmp_path, identity, **{field: round(value * f) if field in WHOLE else value * f})
            )
            for f in (1.0, 1.25, 2.0)
        ]
        for slower, faster in itertools.pairwise(found):
            assert not (faster > slower * (1 + 1e-9)).any(), field


def test_a_file_is_a_what_if_of_the_gpu_that_it_builds_on(tmp_path: Path) -> None:
    call = kc.Gemm(m=16, n=28672, k=8192, stack="vllm")
    fast = {"dram_bytes_per_s": 16e12}
    file, asked = from_file(tmp_path, "", **fast), kc.gpu("gb300").replace(**fast)
    of_file, of_what_if = kc.predict(call, file), kc.predict(call, asked)
    assert (of_file.time_s, of_file.low_s, of_file.high_s) == (of_what_if.time_s, of_what_if.low_s, of_what_if.high_s)
    assert of_file.support == of_what_if.support == "near" and origin_of(file) == kc.gpu("gb300")
    # changes of it compose, and its own value changes nothing
    assert kc.predict(call, file.replace(dram_bytes_per_s=8e12)).time_s == pytest.approx(
        kc.predict(call, "gb300").time_s
    )
    assert kc.predict(call, file.replace(dram_bytes_per_s=16e12)).time_s == of_file.time_s


def test_a_format_that_the_base_has_not_is_forecast_of_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "to_come.toml"
    path.write_text('base = "h200_sxm"\nname = "New"\n[tensor_flops_per_clk_sm]\nnvfp4 = 16384\n')
    found = kc.predict(kc.Gemm(m=4096, n=4096, k=4096, dtype="nvfp4"), str(path))
    assert found.time_s >= found.bound_s and found.support != "seen"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("dram_bytes_per_s=3.35", "dram_bytes_per_s=3.35 is less than a thousandth of what NVIDIA H100 80GB HBM3 has: "
         "3.35e+12, in bytes per second"),
        ("dram_bytes=80", "less than a thousandth"),
        ("clock_boost_hz=1980", "in Hz"),
        ("power_w=700000", None),  # a thousand times 700 W
        ("power_w=7000000", "more than a thousand times what NVIDIA H100 80GB HBM3 has: 700, in watts"),
        ("launch_floor_s=2", "in seconds"),
        ("dram_bytes_per_s*1e9", "more than a thousand times"),
        ("dram_bytes_per_s*100", None),
    ],
)  # fmt: skip
def test_a_number_in_another_unit_is_refused(change: str, said: str | None) -> None:
    base = kc.gpu("h100_sxm")
    if said is None:
        assert kc.changed(base, [change]).changes
        return
    with pytest.raises(kc.KernelcastError, match=re.escape(said)):
        kc.changed(base, [change])
