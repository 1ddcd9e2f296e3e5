"""The command line's contract: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from running import Run, strict

import kernelcast
from kernelcast.app.cli.commands import tidy
from kernelcast.app.cli.kernel import example_lines
from kernelcast.hardware import gpu_ids
from kernelcast.ops import REGISTRY

GEMM = ["kernel", "gemm", "--m", "4096", "--n", "4096", "--k", "4096", "--gpu", "h100_sxm"]
PREDICTION_KEYS = {
    "op", "parameters", "gpu", "gpu_id", "time_s", "low_s", "high_s", "ceiling_s", "bound_s", "bound_by", "limits",
    "efficiency", "support", "predictor", "phases",
}  # fmt: skip


def ok(run: Run, *arguments: str) -> str:
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def refused(run: Run, *arguments: str) -> str:
    """The one line that refuses ``arguments``."""
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("kernelcast: error: ")
    assert err.count("\n") == 1, err
    return err


def changed(arguments: Sequence[str], option: str, value: str) -> list[str]:
    result = list(arguments)
    result[result.index(option) + 1] = value
    return result


# ---- kernel ----


def test_kernel_json_is_what_python_predicts(run: Run) -> None:
    found = strict(ok(run, *GEMM, "--json"))
    assert set(found) >= PREDICTION_KEYS
    expected = kernelcast.predict(kernelcast.kernel("gemm", m=4096, n=4096, k=4096), "h100_sxm")
    assert found["time_s"] == expected.time_s
    assert found["bound_by"] == expected.bound_by == "tensor"
    assert found["gpu_id"] == "h100_sxm"
    assert found["parameters"] == {"m": 4096, "n": 4096, "k": 4096, "dtype": "bf16"}
    assert found["bound_s"] <= found["low_s"] <= found["time_s"] <= found["high_s"]


def test_kernel_text_says_time_bound_pipelines_tasks_and_support(run: Run) -> None:
    out = ok(run, *GEMM)
    found = strict(ok(run, *GEMM, "--json"))
    assert f"{found['time_s'] * 1e6:.0f} µs" in out
    assert "tensor binds" in out
    assert found["support"] in out
    assert found["predictor"] in out
    for pipeline in found["limits"]:
        assert re.search(rf"^ {pipeline} ", out, re.MULTILINE), pipeline
    assert "\x1b" not in out, "colour only on a terminal"


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    "arguments",
    [[*GEMM, "--set", "dram_bytes_per_s=7e12"], ["gpus"], ["gpu", "b200_sxm"], ["ops"], ["--help"], ["kernel"]],
    ids=" ".join,
)
def test_text_fits_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = ok(run, *arguments)
    assert max(map(len, out.splitlines())) <= columns
    if arguments[:2] in (["kernel", "gemm"], ["gpu", "b200_sxm"]):
        assert "…" not in out, "nothing is cut off"


def test_set_changes_the_gpu_and_says_so(run: Run) -> None:
    memory_bound = ["kernel", "gemm", "--m", "1", "--n", "16384", "--k", "16384", "--gpu", "h100_sxm"]
    plain = strict(ok(run, *memory_bound, "--json"))
    faster = strict(ok(run, *memory_bound, "--set", "dram_bytes_per_s=6.7e12", "--json"))
    assert faster["limits"]["dram"] == pytest.approx(plain["limits"]["dram"] / 2)  # 3.35 -> 6.7 TB/s
    assert faster["gpu_changes"] == {"dram_bytes_per_s": 6.7e12}
    assert "dram_bytes_per_s=6.7e+12" in ok(run, *memory_bound, "--set", "dram_bytes_per_s=6.7e12")


def test_without_leaves_limits_out(run: Run) -> None:
    one = strict(ok(run, *GEMM, "--without", "tensor", "--json"))
    assert "tensor" not in one["limits"]
    assert one["bound_by"] != "tensor"
    two = strict(ok(run, *GEMM, "--without", "tensor", "--without", "smem", "--json"))
    assert two == strict(ok(run, *GEMM, "--without", "tensor,smem", "--json"))
    assert two["without"] == ["tensor", "smem"]


def test_a_warm_cache_reads_less_from_dram(run: Run) -> None:
    small = ["kernel", "gemm", "--m", "1", "--n", "2048", "--k", "2048", "--gpu", "h100_sxm", "--json"]
    cold = strict(ok(run, *small, "--cache", "cold"))
    warm = strict(ok(run, *small, "--cache", "warm"))
    assert cold["phases"][0]["dram_bytes"] >= 2048 * 2048 * 2  # the weights
    assert warm["phases"][0]["dram_bytes"] < cold["phases"][0]["dram_bytes"]  # 8 MB stay in an L2 of 50
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")


def test_dashes_and_underscores_are_alike(run: Run) -> None:
    def attention(dash: str) -> str:
        options = "--batch 4 --q_len 64 --kv_len 512 --q_heads 32 --kv_heads 8 --head_dim 128 --gpu h100_sxm"
        return ok(
            run, "kernel", "attention", *options.replace("_", dash).replace(f"h100{dash}", "h100_").split(), "--json"
        )

    assert strict(attention("-")) == strict(attention("_"))
    assert (
        strict(ok(run, "kernel", "silu-mul", "--rows", "64", "--cols", "64", "--gpu", "h100_sxm", "--json"))["op"]
        == "silu_mul"
    )


def test_switches_take_words_too() -> None:
    switches = {"--causal": "--no-causal"}
    assert tidy(["--causal", "--m", "1"], switches) == ["--causal", "--m", "1"]
    assert tidy(["--causal", "false", "--kv_len", "1"], switches) == ["--no-causal", "--kv-len", "1"]
    assert tidy(["--causal=True"], switches) == ["--causal"]
    assert tidy(["--set", "sm_count=1", "--m", "0"], switches) == ["--set", "sm_count=1", "--m", "0"]


def test_switches_reach_the_call(run: Run) -> None:
    base = shlex.split(
        "kernel attention --batch 4 --q-len 4096 --kv-len 4096 --q-heads 32 --kv-heads 8 --head-dim 128 "
        "--gpu h100_sxm --json"
    )
    causal, full, word = (
        strict(ok(run, *base, *extra)) for extra in (["--causal"], ["--no-causal"], ["--causal", "false"])
    )
    assert causal["parameters"]["causal"] is True
    assert full["time_s"] > causal["time_s"]
    assert word == full


@pytest.mark.parametrize("lens", ["512,1,1", "[512, 1, 1]"])
def test_lengths_are_commas_or_json(run: Run, lens: str) -> None:
    options = "--q-heads 32 --kv-heads 8 --head-dim 128 --gpu h100_sxm --json"
    out = ok(run, "kernel", "attention", "--q-lens", lens, "--kv-lens", "512,900,7000", *options.split())
    assert strict(out)["parameters"]["q_lens"] == [512, 1, 1]


@pytest.mark.parametrize("op", sorted(REGISTRY))
def test_every_example_in_help_runs(run: Run, op: str) -> None:
    """From the registry to the help page to a prediction."""
    assert REGISTRY[op].examples, f"{op} has no example"
    code, out, err = run("kernel", op, "--help")
    assert code == 0, err
    joined = re.sub(r" *\\\s*\n\s*", " ", out)  # what a shell does with a backslash
    commands = re.findall(r"^ *kernelcast (kernel .*?) *$", joined, re.MULTILINE)
    assert len(commands) == len(REGISTRY[op].examples) == len(example_lines(REGISTRY[op]))
    for command in commands:
        found = strict(ok(run, *shlex.split(command), "--json"))
        assert found["op"] == op
        assert found["time_s"] >= found["bound_s"] > 0


@pytest.mark.parametrize("op", sorted(REGISTRY))
def test_every_op_prints_text_that_fits(run: Run, op: str) -> None:
    command = example_lines(REGISTRY[op])[0].replace("\\\n", " ")
    lines = ok(run, *shlex.split(command)[1:]).splitlines()
    assert lines[0].startswith(op)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", ["gpus", "gpu", "kernels", "ops", "kernel", "sweep"])
def test_every_help_has_an_example_that_runs(run: Run, command: str, tmp_path: Path) -> None:
    out = ok(run, command, "--help")
    example = re.sub(r" *\\\s*\n\s*", " ", out.partition("Example:")[2])
    lines = [line.strip() for line in example.splitlines() if line.strip()]
    assert any(line.startswith(f"kernelcast {command}") for line in lines)
    script = "\n".join(lines).replace("kernelcast ", f"{shlex.quote(sys.executable)} -m kernelcast ")
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernel_without_an_op_lists_them(run: Run) -> None:
    out = ok(run, "kernel")
    for op in REGISTRY:
        assert re.search(rf"^│ {op} ", out, re.MULTILINE), op


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kernel", "gemmm"], ["unknown op 'gemmm'", "did you mean gemm"]),
        (["kernel", "matmul"], ["unknown op 'matmul' (did you mean gemm, bmm?); `kernelcast ops` lists "]),
        (["kernel", "swiglu"], ["did you mean silu_mul?"]),
        (["kernel", "zzz"], ["unknown op 'zzz'; `kernelcast ops` lists "]),
        (changed(GEMM, "--gpu", "3050"), ["did you mean rtx_3060", "kernelcast collect --specs", "docs/new-gpu.md"]),
        (["infer", "qwen3-9b", "--gpu", "8xH100"], ["unknown model 'qwen3-9b' (did you mean qwen3-8b"]),
        (["infer", "qwen3-8b", "--gpu", "8xH100"], ["is 8 GPUs: name one, h100_sxm", "--tp, --pp and --dp"]),
        (changed(GEMM, "--gpu", "h2000"), ["unknown gpu 'h2000'", "h200_sxm"]),
        ([*GEMM, "--dtype", "fp9"], ["unknown dtype 'fp9'", "did you mean fp8"]),
        ([*GEMM, "--dtyp", "fp8"], ["unknown option '--dtyp'", "did you mean --dtype"]),
        (["kernel", "gemm", "--m", "1"], ["gemm needs --n, --k, --gpu", "--help"]),
        (changed(GEMM, "--m", "-5"), ["m must be", "-5"]),
        (changed(GEMM, "--m", "0"), ["m must be", "not 0"]),
        (changed(GEMM, "--m", "1e30"), ["m must be", "1e+30"]),
        (changed(GEMM, "--m", "1.5"), ["m must be a whole number", "1.5"]),
        (changed(GEMM, "--m", "abc"), ["m must be a number", "'abc'"]),
        (changed(GEMM, "--m", "nan"), ["m must be a number", "nan"]),
        ([*changed(GEMM, "--gpu", "a100_sxm"), "--dtype", "fp8"], ["a100_sxm has no fp8", "bf16"]),
        (changed(changed(GEMM, "--m", "2000000"), "--n", "2000000"), ["gemm needs", "GiB", "h100_sxm has 79.6 GiB"]),
        ([*GEMM, "--set", "dram_byte_per_s=1e12"], ["unknown GPU field", "dram_bytes_per_s"]),
        ([*GEMM, "--set", "dram_bytes_per_s"], ["--set takes FIELD=NUMBER", "'dram_bytes_per_s'"]),
        ([*GEMM, "--set", "dram_bytes_per_s=fast"], ["--set takes FIELD=NUMBER", "fast"]),
        ([*GEMM, "--set", "dram_bytes_per_s=-1"], ["dram_bytes_per_s must be a positive number", "-1"]),
        ([*GEMM, "--without", "l3"], ["unknown limit 'l3'", "did you mean l2"]),
        ([*GEMM, "--cache", "hot"], ["unknown cache 'hot'", "cold, model, warm"]),
        ([*GEMM, "extra"], ["extra"]),
        ([*GEMM, "--stack"], ["--stack", "requires an argument"]),
        (["kernel", "attention", "--q-lens", "a,b", "--q-heads", "8", "--head-dim", "64", "--gpu", "h100_sxm"],
         ["--q-lens must be a list such as 128,64", "'a,b'"]),
    ],
)  # fmt: skip
def test_kernel_refuses_in_one_line(run: Run, arguments: list[str], said: list[str]) -> None:
    line = refused(run, *arguments)
    for words in said:
        assert words in line


def test_without_may_not_leave_nothing(run: Run) -> None:
    every = "tensor,fma,xu,smem,l2,dram,issue,link,launch"
    assert "keep at least one" in refused(run, *GEMM, "--without", every)


# ---- GPUs ----


def test_gpus_lists_the_catalogue_oldest_first(run: Run) -> None:
    listed = [entry["id"] for entry in strict(ok(run, "gpus", "--json"))]
    assert sorted(listed) == sorted(gpu_ids())
    assert listed.index("v100_sxm") < listed.index("a100_sxm") < listed.index("h100_sxm") < listed.index("b200_sxm")
    text = ok(run, "gpus")
    assert all(gpu_id in text for gpu_id in gpu_ids())
    assert re.search(r"^h100_sxm .* hopper +132 +80 3\.35 +989 +989 +1979 +450 +700$", text, re.MULTILINE)


def test_a_pattern_filters_the_ops(run: Run) -> None:
    code, out, _ = run("ops", "top*k", "--json")
    assert code == 0 and {op["op"] for op in strict(out)} == {"index_topk", "top_k_top_p_sampling", "topk"}
    code, _, err = run("ops", "matmul")
    assert code == 2 and "did you mean gemm, bmm?" in err


def test_a_pattern_filters_the_gpus_by_all_of_their_names(run: Run) -> None:
    forties = {entry["id"] for entry in strict(ok(run, "gpus", "RTX 40", "--json"))}
    assert {"rtx_4060", "rtx_4070_ti_super", "rtx_4090"} <= forties
    assert all(gpu_id.startswith("rtx_40") for gpu_id in forties)
    assert strict(ok(run, "gpus", "rtx", "4090", "--json")) == strict(ok(run, "gpus", "rtx 4090", "--json"))
    assert "qwen3-30b-a3b-fp8" in ok(run, "models", "qwen3", "30b")
    assert "h200_nvl" in ok(run, "gpus", "hopper")
    assert [entry["id"] for entry in strict(ok(run, "gpus", "spark", "--json"))] == ["gb10"]
    assert [entry["id"] for entry in strict(ok(run, "gpus", "sm_121", "--json"))] == ["gb10"]
    assert "'sm_120' is an architecture" in refused(run, "gpu", "sm_120")
    assert "unknown gpu 'zzz'" in refused(run, "gpus", "zzz")


def test_gpu_shows_every_field_with_its_source(run: Run) -> None:
    found = strict(ok(run, "gpu", "h100_sxm", "--json"))
    assert found["sm_count"] == 132
    # 132 SMs x 4096 FLOPs/clk x 1.83 GHz
    assert found["derived"]["tensor_flops_per_s"]["bf16"] == pytest.approx(132 * 4096 * 1.83e9)
    text = ok(run, "gpu", "h100_sxm")
    for source in set(found["sources"].values()):
        assert source.split()[0] in text
    assert "3.35 TB/s" in text
    assert "50 MiB" in text


def test_gpu_by_the_name_that_its_driver_prints(run: Run) -> None:
    assert strict(ok(run, "gpu", "NVIDIA H200", "--json"))["id"] == "h200_sxm"


def test_gpu_what_if_is_marked(run: Run) -> None:
    found = strict(ok(run, "gpu", "h100_sxm", "--set", "sm_count=144", "--json"))
    assert (found["sm_count"], found["changes"], found["sources"]["sm_count"]) == (144, {"sm_count": 144}, "what-if")
    assert "what if: sm_count=144" in ok(run, "gpu", "h100_sxm", "--set", "sm_count=144")


def test_own_gpu_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100_sxm"\nname = "Mine"\ndram_bytes_per_s = 6.7e12\n')
    found = strict(ok(run, *changed(GEMM, "--gpu", str(path)), "--json"))
    assert (found["gpu"], found["gpu_id"]) == ("Mine", "mine")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("base = ", "not readable as TOML"),
        ('base = "h100_sxm"\nname = "x"\nsm_cuont = 1\n', "unknown GPU field 'sm_cuont' (did you mean sm_count"),
        ('name = "x"\n', "missing"),
        ('base = "h100sxx"\nname = "x"\n', "base: unknown gpu 'h100sxx' (did you mean h100_sxm"),
        ('base = "h100_sxm"\nname = "x"\ndram_bytes_per_s = 3350\n', "dram_bytes_per_s 3350 is too low: it is in"),
        ('base = "h100_sxm"\nsm_count = -1\n', "sm_count must be a positive number, not -1"),
    ],
)
def test_broken_gpu_file(run: Run, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    assert said in refused(run, "gpu", str(path))


def test_gpu_refuses_in_one_line(run: Run, tmp_path: Path) -> None:
    assert "did you mean" in refused(run, "gpu", "h100sxx")
    assert "missing ID" in refused(run, "gpu")
    assert "no GPU file" in refused(run, "gpu", str(tmp_path / "none.toml"))
    assert "unknown option '--jsn'" in refused(run, "gpus", "--jsn")


# ---- ops, and the program itself ----


def test_ops_is_the_registry(run: Run) -> None:
    listed = {entry["op"]: entry for entry in strict(ok(run, "ops", "--json"))}
    assert set(listed) == set(REGISTRY)
    assert [p["name"] for p in listed["gemm"]["parameters"]] == ["m", "n", "k", "layout", "inputs", "dtype", "stack"]
    assert listed["gemm"]["parameters"][0]["required"] is True
    text = ok(run, "ops")
    assert all(re.search(rf"^ {op} ", text, re.MULTILINE) for op in REGISTRY)


def test_version_and_no_command(run: Run) -> None:
    assert ok(run, "--version").startswith(f"kernelcast {kernelcast.__version__}, weights ")
    assert "Usage" in ok(run)


def test_unknown_command(run: Run) -> None:
    assert "unknown command 'kernal' (did you mean kernel" in refused(run, "kernal")
    assert "unknown option '--jso'" in refused(run, "--jso")


def test_interrupt_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kernelcast.app.questions.kernel.predict", interrupt)
    code, out, err = run(*GEMM)
    assert (code, out, err.strip()) == (130, "", "")


def kernelcast_process(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernelcast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **more)


def test_as_a_program() -> None:
    good = kernelcast_process(*GEMM, "--json")
    assert good.returncode == 0
    assert strict(good.stdout)["op"] == "gemm"
    bad = kernelcast_process("kernel", "gemmm")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "Traceback" not in bad.stderr


def test_a_reader_that_stops_early_is_no_error() -> None:
    script = f"{shlex.quote(sys.executable)} -m kernelcast ops --json | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""


def test_a_terminal_without_unicode() -> None:
    done = kernelcast_process(*GEMM, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "tensor binds" in done.stdout


def test_import_is_light() -> None:
    """``import kernelcast`` brings no command line, no files, no terminal; a command brings no DuckDB."""
    heavy = "{'duckdb', 'typer', 'rich', 'torch'} & set(sys.modules)"
    code = f"import sys, kernelcast; assert not {heavy}, {heavy}"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    command = f"from kernelcast.app.cli import main; main({[*GEMM, '--json']!r})"
    code = f"import sys; {command}; assert 'duckdb' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_without_the_lab_its_commands_say_where_they_are(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelcast.plugins.entry_points", lambda group: [])
    for name in ("fit", "evaluate", "data", "collect-models"):
        code, out, err = run(name, "--help")
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert f"{name} is a command of kernelcast-lab, which is not installed" in err
