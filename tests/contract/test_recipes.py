"""A newcomer adds a kernel, a GPU, a fabric, a model, a stack or a host in one file: CONTRIBUTING.md's own code, in a
copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = re.compile(r"<!-- recipe: (?P<append>append )?src/(?P<path>\S+) -->\n```\w+\n(?P<code>.*?)```\n", re.DOTALL)
COMMAND = re.compile(r"^kernelcast .*$", re.MULTILINE)


def recipes() -> dict[str, str]:
    """Files of the recipes by path under src/."""
    return {m["path"]: m["code"] for m in RECIPE.finditer((ROOT / "CONTRIBUTING.md").read_text())}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the recipes' files added, and no other edit."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(ROOT / "src" / "kernelcast", folder / "kernelcast", ignore=shutil.ignore_patterns("__pycache__"))
    for recipe in RECIPE.finditer((ROOT / "CONTRIBUTING.md").read_text()):
        path, code = folder / recipe["path"], recipe["code"]
        before = path.read_text() if recipe["append"] else ""
        assert path.exists() == bool(recipe["append"]), f"{path.name} is in the package already: it proves nothing"
        path.write_text(before + code)
    return folder


def run(copy: Path, *arguments: str) -> str:
    """The output of ``kernelcast`` from the copy."""
    done = subprocess.run(
        [sys.executable, "-m", "kernelcast", *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_contributing_has_one_of_each() -> None:
    rooms = [("ops",), ("hardware", "catalogue"), ("hardware",), ("models", "configs"), ("stacks", "catalogue"),
             ("stacks", "hosts"), ("stacks", "training"), ("training",)]  # fmt: skip
    assert [Path(path).parts[1:-1] for path in recipes()] == rooms


def test_the_new_kernel_has_a_command_whose_time_is_above_its_memory_bound(copy: Path) -> None:
    found = json.loads(run(copy, "kernel", "axpby", "--elements", "268435456", "--gpu", "h200_sxm", "--json"))
    assert found["op"] == "axpby"
    # 3 tensors x 2^28 elements x 2 bytes at 4.8 TB/s, less what may have stayed in an L2 of 60 MiB
    all_bytes, kept_bytes = 3 * 2**28 * 2, 60 * 2**20
    assert (all_bytes - kept_bytes) / 4.8e12 <= found["bound_s"] * 1.000001
    assert found["bound_s"] <= all_bytes / 4.8e12
    assert found["time_s"] > found["bound_s"]


def test_help_and_list_of_ops_name_the_new_kernel(copy: Path) -> None:
    assert "Weighted sum of two tensors" in run(copy, "kernel", "axpby", "--help")
    listed = {op["op"]: op for op in json.loads(run(copy, "ops", "--json"))}
    assert [p["name"] for p in listed["axpby"]["parameters"]] == ["elements", "dtype", "stack"]
    assert "axpby" in run(copy, "kernel", "--help")


def test_tables_take_the_new_kernel_on_the_new_gpu(copy: Path) -> None:
    (copy / "calls.csv").write_text("op,elements,m,n,k,gpu\naxpby,1000000,,,,h200_wide\ngemm,,64,64,64,H200 wide\n")
    run(copy, "kernels", "calls.csv", "-o", "times.jsonl")
    rows = [json.loads(line) for line in (copy / "times.jsonl").read_text().splitlines()]
    assert [row["op"] for row in rows] == ["axpby", "gemm"]
    assert all(row["predicted_us"] >= row["bound_us"] > 0 for row in rows)


def test_the_new_gpu_is_listed_and_has_what_its_base_has(copy: Path) -> None:
    assert "h200_wide" in run(copy, "gpus")
    wide, plain = (json.loads(run(copy, "gpu", name, "--json")) for name in ("h200_wide", "h200_sxm"))
    assert wide["dram_bytes_per_s"] == 7.0e12
    assert wide["sources"]["dram_bytes_per_s"].startswith("assumed")
    assert wide["sm_count"] == plain["sm_count"]


def test_a_new_link_is_as_fast_as_its_file_says(copy: Path) -> None:
    call = ("kernel", "all_reduce", "--bytes", "67108864", "--world", "16", "--gpu", "h200_sxm", "--json", "--fabric")
    fast, slow = (json.loads(run(copy, *call, fabric))["bound_s"] for fabric in ("ib_double_ndr", "ib_ndr"))
    assert slow == pytest.approx(2 * fast, rel=0.01)  # 100 against 50 GB/s


def test_a_new_model_has_the_parameters_that_its_file_names(copy: Path) -> None:
    found = json.loads(run(copy, "models", "--json"))["little-llama"]
    layer = 512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 4096  # q, k and v; o; gate, up, down
    assert found["parameters"] == 2 * 32000 * 512 + 8 * layer + 17 * 512


def test_a_new_stack_and_a_new_host_are_what_their_base_is_but_for_what_they_say(copy: Path) -> None:
    infer = ("infer", "llama-3.2-1b", "--gpu", "h200_sxm", "--json", "--stack")
    eager, graphs = (json.loads(run(copy, *infer, name)) for name in ("vllm_eager", "vllm"))
    assert eager["prefill_s"] >= graphs["prefill_s"] and eager["decode_s"] > graphs["decode_s"]
    pytest.importorskip("torch")
    trace = ("trace", "gpt2", "--gpu", "rtx_4090", "--seq", "128", "--json", "--host")
    fast, slow = (json.loads(run(copy, *trace, name)) for name in ("fast_desktop", "server"))
    assert fast["kernel_time_s"] == slow["kernel_time_s"] and fast["time_s"] < slow["time_s"]


def test_a_new_framework_and_a_new_precision_are_what_they_say(copy: Path) -> None:
    train = ("train", "llama-3.2-1b", "--gpus", "8xH100", "--global-batch", "64", "--json")
    plain, slow, narrow = (
        json.loads(run(copy, *train, *more))
        for more in ((), ("--stack", "megatron_slow_host"), ("--precision", "fp8_forward"))
    )
    assert slow["parts_s"]["compute"] == plain["parts_s"]["compute"] and slow["time_s"] >= plain["time_s"]
    assert narrow["parts_s"]["compute"] < plain["parts_s"]["compute"]


def test_the_commands_of_the_recipes_run(copy: Path) -> None:
    commands = COMMAND.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(commands) >= 8
    for command in commands:
        assert run(copy, *command.split()[1:])
