"""tune from the command line, where there is no GPU: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from running import Run, strict

MOE = shlex.split("tune moe qwen3-30b-a3b --gpu h200_sxm --tokens 1,64 --no-measure")


def test_files_of_both_engines_hold_the_predicted_best_and_it_says_so(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*MOE, "-o", str(tmp_path))
    assert (code, err) == (0, "")
    assert "predicted best" in out and out.count("predicted ->") == 2
    vllm = tmp_path / "E=128,N=768,device_name=NVIDIA_H200.json"
    sglang = tmp_path / "configs" / "triton_3_6_0" / vllm.name
    entries = json.loads(vllm.read_text())
    assert list(entries) == ["1", "64"] and entries == json.loads(sglang.read_text())
    assert entries["1"]["BLOCK_SIZE_M"] == 16  # one row an expert


def test_json_has_what_was_found(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*MOE, "--json", "--stack", "vllm", "-o", str(tmp_path))
    found = strict(out)
    assert code == 0 and len(found["files"]) == 1
    first, second = found["tuned"]
    assert (first["tokens"], second["tokens"], first["inter"]) == (1, 64, 768)
    assert first["measured"] is False and first["measured_s"] is None and first["configs_in_space"] == 1256
    assert 0 < first["predicted_s"] < second["predicted_s"]
    assert set(first["speedup"]) == {"vllm", "sglang"} and set(first["config"]) == set(first["defaults"]["vllm"])


def test_sizes_may_stand_for_a_model(run: Run) -> None:
    given = "tune moe --hidden 2048 --inter 1536 --tp 2 --experts 128 --topk 8 --gpu h200_sxm --tokens 64 --no-measure"
    _, out, _ = run(*shlex.split(given), "--json")
    _, named, _ = run(*MOE, "--json")
    assert strict(out)["tuned"][0] == strict(named)["tuned"][1]


def test_a_gemm_has_no_default_to_compare_with(run: Run) -> None:
    code, out, _ = run(*shlex.split("tune gemm --m 512 --n 4096 --k 4096 --gpu h200_sxm --no-measure --json"))
    (found,) = strict(out)["tuned"]
    assert code == 0 and found["speedup"] == {} and found["k"] == 4096


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("tune moe qwen3-30b-a3b", "which GPU?"),
        ("tune moe llama-3.1-8b --gpu h200_sxm", "has no experts"),
        ("tune moe --gpu h200_sxm --hidden 64", "--inter, --experts, --topk missing"),
        ("tune moe qwen3-30b-a3b --hidden 64 --gpu h200_sxm", "leave out --hidden"),
        ("tune moe qwen3-30b-a3b --tp 7 --gpu h200_sxm", "sharded over 7 GPUs"),
        ("tune moe qwen3-30b-a3b --tokens 1,x --gpu h200_sxm", "--tokens takes counts"),
        ("tune moe qwen3-30b-a3b --stack trtllm --gpu h200_sxm", "trtllm"),
        ("tune moe qwen3-30b-a3b --dtype int4 --gpu h200_sxm", "int4"),
        ("tune gemm --m 64 --n 64 --gpu h200_sxm", "missing --k"),
        ("tune gem --m 64", "unknown command"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run: Run, arguments: str, says: str) -> None:
    code, out, err = run(*shlex.split(arguments))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and says in err
