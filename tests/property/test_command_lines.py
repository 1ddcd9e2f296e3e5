"""Random command lines: any command with any of its flags, right values and wrong ones, ends with an exit code that is
documented, and what is wrong is one line."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelcast.app.cli.app import INTERRUPTED, build, main
from kernelcast.stacks.engine_flags import aliases_of

EXAMPLES = int(os.environ.get("KERNELCAST_COMMAND_LINES", "150"))
CODES = (0, 2, 3, INTERRUPTED)
MODEL = "def build(batch):\n    import torch\n    return torch.nn.Linear(8, 8), (torch.zeros(batch, 8),)\n"
FILES = {
    "table.csv": "op,m,n,k\ngemm,1,64,64\ngemm,x,64,64\n",
    "requests.csv": "input_tokens,output_tokens\n128,4\n256,8\n",
    "arrivals.csv": "arrival_s,input_tokens,output_tokens\n0,128,4\n1,256,8\n",
    "measured.csv": "op,m,n,k,dtype,measured_us\ngemm,1,64,64,bf16,5\n",
    "train.toml": "[parallelism]\ntensor_parallel_degree = 2\n[training]\nseq_len = 64\n",
    "small.toml": 'model = "llama-3.2-1b"\ngpu = "l40s"\nbatch = [1, 2]\noutput_len = 4\n',
    "server.json": "{}",
    "model.py": MODEL,
    "empty": "",
}
# Begun so, an answer is quick; "web" would not end
QUICK = {
    "calibrate": ["calibrate", "measured.csv", "--gpu", "l40s"],
    "collect": ["collect", "--plan", "--calls", "8", "--gpu", "l40s"],
    "compare": ["compare", "llama-3.2-1b", "--gpus", "l40s", "--max-gpus", "1", "--batch", "2", "--output-len", "4"],
    "diagnose": ["diagnose", "measured.csv", "--gpu", "l40s"],
    "evidence": ["evidence", "--op", "gemm"],
    "gpu": ["gpu", "l40s"],
    "gpus": ["gpus"],
    "infer": ["infer", "llama-3.2-1b", "--gpu", "l40s", "--output-len", "4"],
    "kernel gemm": ["kernel", "gemm", "--m", "64", "--n", "64", "--k", "64", "--gpu", "l40s"],
    "kernel attention": ["kernel", "attention", "--batch", "1", "--q-len", "64", "--kv-len", "64", "--q-heads", "8",
                         "--kv-heads", "8", "--head-dim", "64", "--gpu", "l40s"],
    "kernel moe": ["kernel", "moe", "--tokens", "64", "--hidden", "64", "--inter", "64", "--experts", "8", "--topk",
                   "2", "--gpu", "l40s"],
    "kernels": ["kernels", "table.csv", "--gpu", "l40s", "-o", "out.csv"],
    "models": ["models"],
    "ops": ["ops"],
    "plan": ["plan", "llama-3.2-1b", "--gpus", "l40s", "--max-gpus", "1", "--tp", "1", "--pp", "1", "--max-num-seqs",
             "8", "--max-num-batched-tokens", "512", "--dtype", "bf16", "--num-prompts", "8", "--output-len", "4",
             "--input-len", "64", "--request-rate", "2", "--disaggregated", "no", "--ttft-p99", "1s"],
    "query": ["query", "small.sweep", "--top", "1"],
    "replay": ["replay", "server.json", "--gpu", "l40s"],
    "simulate": ["simulate", "llama-3.2-1b", "--gpu", "l40s", "--num-prompts", "8", "--output-len", "4",
                 "--request-rate", "4", "--no-intervals"],
    "sweep": ["sweep", "small.toml", "--engine", "one"],
    "trace": ["trace", "model.py:build", "--gpu", "l40s"],
    "train": ["train", "llama-3.2-1b", "--gpus", "2xl40s", "--seq", "64"],
    "tune gemm": ["tune", "gemm", "--m", "64", "--n", "64", "--k", "64", "--gpu", "l40s", "--no-measure"],
    "tune moe": ["tune", "moe", "--hidden", "64", "--inter", "64", "--experts", "8", "--topk", "2", "--tokens", "8",
                 "--gpu", "l40s", "--no-measure"],
}  # fmt: skip
VALUES = (
    "0", "1", "2", "3", "-1", "8", "64", "0.5", "1.5", "1e9", "nan", "inf", "-inf", "1e400", "99999999999999999999",
    "9" * 5000, "2147483647", "-99999999999999999999", "true", "auto", "x", "", " ", ",", "1,2", "a,b", "é\u2028",
    "500ms", "ttft:500", "tpot:0", "5x2", "1e9x1", "all", "none", "bfloat16", "torch.float16", "fp8_e4m3", "awq",
    "fp8", "int4", "nvfp4", "l40s", "mi300x", "h100_sxm,l40s", "vllm", "sglang", "trtllm", "torch", "llama-3.2-1b",
    "mtp", "random", "dram_bytes_per_s*2", "dram_bytes_per_s=3.35", "sm_count=1e300", "l40s=2", "op=gemm", "nccl",
    "nvlink4", "lognormal", "linear", "constant", "gemm", "dram", "generic", "training", "kv_dtype=fp8",
    "batch:max", "SELECT 1", "0:1", "nowhere/at/all", "empty", "requests.csv", "arrivals.csv", "table.csv",
    "small.toml", "train.toml", "2xl40s", "server.json", "out.png", "out.json", "out.csv", "--gpu", "-", "--", "[1]",
    "{}", "\x00",
)  # fmt: skip
NUMBERS = (
    "0", "1", "2", "4", "16", "100", "-1", "0.5", "0.9", "1.5", "1e9", "nan", "inf", "-inf", "1e400", "2147483647",
    "2147483648", "99999999999999999999", "-99999999999999999999", "9" * 5000, "1_0", "x", "",
)  # fmt: skip
# which would measure this machine or start processes
LEFT_OUT = {"--workers", "--address", "--help"}
MEASURING = {"--host", "--specs", "--link", "--power", "--engine", "--again", "--plan"}  # of collect


@functools.cache
def flags_of(command: str) -> dict[str, tuple[str, ...]]:
    """The flags of a command, engines' names among them, and values that they may take; none: of a switch."""
    found: Any = typer.main.get_command(build())
    for name in QUICK[command][: 1 + command.count(" ")]:
        found = found.get_command(None, name)
    params = {param.name: param for param in found.params}
    flags: dict[str, tuple[str, ...]] = {"--mroe": VALUES, "--trust-remote-code": (), "--port": NUMBERS}
    for name, param in params.items():
        values = () if getattr(param, "is_flag", False) else VALUES if param.metavar else NUMBERS
        aliases = [f"--{alias.replace('_', '-')}" for alias in aliases_of(name, params)]
        flags |= dict.fromkeys((*param.opts, *param.secondary_opts, *aliases), values)
    left_out = LEFT_OUT | MEASURING if command == "collect" else LEFT_OUT
    return {flag: values for flag, values in flags.items() if flag.startswith("-") and flag not in left_out}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(sorted(QUICK)))
    line, flags = [*QUICK[command]], flags_of(command)
    wrong = st.sampled_from(VALUES) | st.text(max_size=5)
    for flag in draw(st.lists(st.sampled_from(sorted(flags)), max_size=3, unique=True)):
        if flag in line and draw(st.booleans()):  # in its place, so that it is not there twice
            at = line.index(flag)
            del line[at : at + 2]
        line.append(draw(st.sampled_from((flag, flag.replace("-", "_").replace("__", "--", 1)))))
        if flags[flag]:
            line.append(draw(st.sampled_from(flags[flag])))
    if draw(st.integers(0, 7)) == 0:  # something else in one place, or nothing
        at = draw(st.integers(0, len(line) - 1))
        line[at : at + 1] = draw(st.lists(wrong, max_size=1))
    return line


@pytest.fixture(scope="module", autouse=True)
def _in_a_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("lines")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for command in QUICK:
        flags_of(command)  # imports, before anything is drawn
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def ended(line: list[str]) -> tuple[int, str]:
    """The exit code, and what stands on standard error; an exception that is no answer goes on."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    return code, err.getvalue()


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(command_lines())
def test_any_command_line_ends_with_a_documented_code(line: list[str]) -> None:
    code, err = ended(line)
    assert code in CODES, (code, err)
    assert "Traceback" not in err
    if code == 2:
        errors = [text for text in err.split("\n") if text.startswith("kernelcast: error: ")]
        assert len(errors) == 1 and len(errors[0]) < 4000, err
