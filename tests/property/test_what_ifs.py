"""Laws of what-ifs, on the forecasts that users get: learned, with random stacks, backends and formats."""

from __future__ import annotations

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
