"""diagnose from the command line: its text, its JSON, its picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import Run, strict

PROFILES = Path(__file__).parents[2] / "validation" / "profiles"
PREFILL, FAULTS = (str(PROFILES / f"{name}.json.gz") for name in ("llama_8b_4_layers_prefill", "planted_faults"))
KEYS = {
    "gpu", "source", "gpu_time_us", "span_us", "idle_us", "launch_bound", "matched_share", "predicted_us", "ceiling_us",
    "could_win_us", "run_dtype", "kernels", "unmatched", "support", "predictor",
}  # fmt: skip
ROW = {
    "rank", "op", "parameters", "name", "shapes", "kernels", "count", "measured_us", "total_us", "share",
    "predicted_us", "low_us", "high_us", "ceiling_us", "bound_us", "bound_by", "gap_us", "could_win_us", "support",
    "reasons",
}  # fmt: skip


def refused(run: Run, *arguments: str) -> str:
    code, out, err = run("diagnose", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kernelcast: error: ") and err.count("\n") == 1, err
    return err


def test_json_has_its_keys_and_adds_up(run: Run) -> None:
    code, out, err = run("diagnose", PREFILL, "--gpu", "h200_sxm", "--json")
    assert (code, err) == (0, "")
    found = strict(out)
    assert set(found) >= KEYS and found["matched_share"] >= 0.9
    rows = found["kernels"]
    assert all(set(row) >= ROW for row in rows)
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    wins = [row["could_win_us"] for row in rows]
    assert wins == sorted(wins, reverse=True) and sum(wins) == pytest.approx(found["could_win_us"])
    total = sum(row["total_us"] for row in rows + found["unmatched"])
    assert total == pytest.approx(found["gpu_time_us"])
    for row in rows:
        assert row["bound_us"] <= row["ceiling_us"] * 1.0001
        assert set(row["reasons"][0]) == {"name", "explained_us", "detail", "advice"} if row["reasons"] else True


def test_text_ranks_explains_and_advises(run: Run) -> None:
    code, out, err = run("diagnose", FAULTS, "--top", "5")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert "100% of it matched" in out and "dtype fallback" in out and "pad k to a multiple of 8" in out
    assert "and 8 more calls" in out
    (first,) = [line for line in lines if line.lstrip().startswith("1 ")]
    assert "gemm 4096x4096x4096 fp32" in first and first.endswith("dtype fallback")


def test_kernels_without_a_match_are_listed(run: Run) -> None:
    code, out, _ = run("diagnose", str(PROFILES / "ncu_metrics.csv"), "--gpu", "h200_sxm")
    assert code == 0
    assert "could not be matched" in out and "k is in neither" in out.replace("\n" + " " * 59, " ")
    assert "--clock-control none" in out


def test_another_gpu_is_told(run: Run) -> None:
    code, out, _ = run("diagnose", FAULTS, "--gpu", "a100_sxm", "--top", "1")
    assert code == 0 and "measured   on NVIDIA H200; predicted for NVIDIA A100" in out


def test_the_roofline_is_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    code, _, err = run("diagnose", PREFILL, "--plot", str(path))
    assert (code, err) == (0, "")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert "--plot" in refused(run, PREFILL, "--plot", str(tmp_path / "roofline.word"))


def test_a_table(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text("op,m,n,k,dtype,measured_us,gpu\ngemm,4096,4096,4095,bf16,1022,h200_sxm\n")
    code, out, _ = run("diagnose", str(path), "--json")
    assert code == 0
    (row,) = strict(out)["kernels"]
    assert row["reasons"][0]["name"] == "unaligned sizes" and row["op"] == "gemm"


def test_wrong_input_is_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    assert "no GPU kernels" in refused(run, str(path), "--gpu", "h200_sxm")
    assert "no file" in refused(run, str(tmp_path / "none.json"))
    assert "which GPU" in refused(run, str(PROFILES / "ncu_metrics.csv"))
    assert "unknown" in refused(run, FAULTS, "--gpu", "h2000")
    assert "--top must be 1 or more" in refused(run, FAULTS, "--top", "0")
    assert "unknown dtype" in refused(run, FAULTS, "--dtype", "bf17")
