"""kernelcast collect, as far as it goes without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernelcast as kc


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kernelcast", *args], capture_output=True, text=True)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return command("collect", *args)


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def test_the_plan_needs_no_gpu() -> None:
    found = run("--calls", "60", "--plan", "--gpu", "a100_sxm")
    assert found.returncode == 0, found.stderr
    assert "gemm" in found.stdout
    lines = run("--calls", "60", "--plan", "--json").stdout.splitlines()
    assert all("op" in json.loads(line) for line in lines)
    assert 50 <= len(lines) <= 60


@pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")
def test_without_a_gpu_one_line_says_so_and_nothing_is_written(tmp_path: Path) -> None:
    found = run("-o", str(tmp_path / "x.parquet"))
    assert found.returncode == 2
    assert found.stderr.startswith("kernelcast: error: collect needs ")
    assert len(found.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--budget", "soon", "--plan"), "--budget 'soon' is no time; write it as 300s, 5m or 1h"),
        (("--budget", "0s", "--plan"), "is no time"),
        (("-o", "x.csv", "--plan"), "end its name in .parquet"),
        (("--family", "gem", "--plan"), "unknown family 'gem'"),
        (("--gpu", "h999", "--plan"), "unknown gpu"),
        (("--next", "none", "--plan"), "--next is for --for-calibration"),
        (("--for-calibration", "--next", "none", "--plan"), "no calibration file none; `kernelcast calibrate` makes"),
        (("--for-calibration", "--next", __file__, "--plan"), "not a calibration"),
        ((), "give -o FILE.parquet"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args: tuple[str, ...], told: str) -> None:
    found = run(*args)
    assert found.returncode == 2
    assert told in found.stderr
    assert len(found.stderr.splitlines()) == 1


ENGINE = ("--engine", "vllm", "--model", "llama-3.1-8b")


def test_the_plan_of_an_engines_steps_needs_no_gpu() -> None:
    found = run(*ENGINE, "--plan", "--gpu", "h200_sxm", "--engine-args", "--max-num-seqs 48 --max-model-len 4096")
    assert found.returncode == 0, found.stderr
    assert "max_num_seqs 48, " in found.stdout and "max_model_len 4,096, " in found.stdout
    assert "32 sequences of 1,024 tokens" in found.stdout and "64 sequences" not in found.stdout
    lines = run(*ENGINE, "--plan", "--json").stdout.splitlines()
    kinds = {json.loads(line)["kind"] for line in lines}
    assert kinds == {"alone", "decode", "mixed", "kernels"} and len(lines) > 60


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--engine", "orca", "--plan"), "--engine 'orca': steps of vllm can be measured"),
        (("--engine", "vllm", "--plan"), "give --model, as in llama-3.1-8b"),
        (("--engine", "vllm", "--model", "lama", "--plan"), "unknown model 'lama'"),
        ((*ENGINE, "-o", "steps.parquet"), "end its name in .jsonl"),
        (ENGINE, "give -o FILE.jsonl"),
        ((*ENGINE, "--plan", "--family", "gemm"), "leave out --family"),
        ((*ENGINE, "--plan", "--gpu", "h999"), "unknown gpu"),
        ((*ENGINE, "--plan", "--engine-args", "--max-num-seqs some"), "invalid int value: 'some'"),
        (("--model", "llama-3.1-8b", "--plan"), "are of a serving engine: give --engine"),
    ],
)
def test_steps_of_an_engine_are_refused_in_one_line(args: tuple[str, ...], told: str) -> None:
    found = run(*args)
    assert found.returncode == 2 and told in found.stderr and len(found.stderr.splitlines()) == 1


@pytest.mark.skipif(has_cuda(), reason="this machine has a GPU")
def test_steps_of_an_engine_need_a_gpu(tmp_path: Path) -> None:
    found = run(*ENGINE, "-o", str(tmp_path / "steps.jsonl"))
    assert found.returncode == 2 and found.stderr.startswith("kernelcast: error: collect needs ")
    assert len(found.stderr.splitlines()) == 1 and list(tmp_path.iterdir()) == []


def test_the_next_calls_are_those_that_a_calibration_does_not_know(tmp_path: Path) -> None:
    plan = ("--calls", "12", "--family", "gemm", "--for-calibration", "--plan", "--json", "--gpu", "h200_sxm")
    first = run(*plan)
    assert first.returncode == 0, first.stderr
    said = re.compile(r"kernelcast: h200_sxm: .* off by ([\d.]+)%, and by ([\d.]+)% once these 12 are measured\n")
    before, after = map(float, said.fullmatch(first.stderr).groups())  # type: ignore[union-attr]
    assert 0 < after < before
    assert len(first.stdout.splitlines()) == 12
    calls = [kc.Gemm(m=32 * i, n=4096, k=4096) for i in range(1, 41)]
    times = [found.time_s * 1.1e6 for found in kc.predict_many(calls, "h200_sxm")]  # a tenth slower than the forecast
    rows = [f"gemm,{call.m},4096,4096,bf16,{time}" for call, time in zip(calls, times, strict=True)]
    (tmp_path / "calls.csv").write_text("\n".join(["op,m,n,k,dtype,latency_us", *rows]) + "\n")
    file = str(tmp_path / "h200")
    made = command("calibrate", str(tmp_path / "calls.csv"), "--gpu", "h200_sxm", "-o", file)
    assert made.returncode == 0, made.stderr
    found = run(*plan, "--next", file)
    assert found.returncode == 0, found.stderr
    then = [float(one) for one in said.fullmatch(found.stderr).groups()]  # type: ignore[union-attr]
    assert then[1] < then[0] < before
    assert len(found.stdout.splitlines()) == 12 and found.stdout != first.stdout
    other = run(*plan[:-1], "a100_sxm", "--next", file)
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1
    assert "made on h200_sxm, not on a100_sxm" in other.stderr


def test_a_unit_answers_beside_its_gpu_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "my_h200.toml").write_text(
        'base = "h200_sxm"\nname = "mine"\nunit_of = "h200_sxm"\nsustained_dram_fraction = 0.86\n'
    )
    asked = ("kernel", "gemm", "--m", "16", "--n", "8192", "--k", "8192", "--gpu", str(tmp_path / "my_h200.toml"))
    found = command(*asked)
    assert found.returncode == 0 and "of h200_sxm: its forecast" in found.stdout and "on h200_sxm" in found.stdout
    found = command(*asked, "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["gpu_unit_of"] == "h200_sxm"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--specs",), "a GPU is written as TOML: give -o FILE.toml"),
        (("--link", "-o", "x.parquet"), "a fabric is written as TOML: give -o FILE.toml, not x.parquet"),
        (("--specs", "--link", "-o", "x.toml"), "--specs and --link measure different things"),
    ],
)
def test_specs_and_links_are_refused_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    found = run(*arguments)
    assert found.returncode == 2 and told in found.stderr and len(found.stderr.splitlines()) == 1
