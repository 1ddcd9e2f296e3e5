"""infer and models from the command line: their keys, their text, their files, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from running import Run, strict

from kernelcast.models import model, model_ids
from kernelcast.models.catalogue import MODELS
from kernelcast.stacks import stack, stack_ids

LLAMA = shlex.split("infer llama-3.1-8b --gpu h100_sxm --batch 4 --input-len 512 --output-len 32")
TIMES = ("ttft_s", "tpot_s", "prefill_s", "decode_s", "total_s")
KEYS = {"tokens_per_s", "memory_bytes", "breakdown", "support", "predictor", "model", "gpu", "gpus", "stack"}


def ok(run: Run, *arguments: str) -> str:
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    return out


def told(run: Run, *arguments: str) -> dict[str, Any]:
    """The JSON of a command."""
    found: dict[str, Any] = strict(ok(run, *arguments, "--json"))
    return found


def refused(run: Run, *arguments: str, exit_code: int = 2) -> str:
    """The one line that refuses ``arguments``."""
    code, out, err = run(*arguments)
    assert (code, out) == (exit_code, "")
    assert err.startswith("kernelcast: error: ") and err.count("\n") == 1, err
    return err


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    """All but the name that the model goes by."""
    return {key: value for key, value in found.items() if key != "model"}


# ---- JSON and text ----


def test_json_has_the_keys_of_the_contract(run: Run) -> None:
    found = told(run, *LLAMA)
    assert set(found) >= KEYS
    for key in TIMES:
        assert 0 < found[f"{key}_low"] <= found[key] <= found[f"{key}_high"]
    assert found["ttft_s"] == found["prefill_s"]
    assert found["tpot_s"] == pytest.approx(found["decode_s"] / 31)
    assert found["total_s"] == found["prefill_s"] + found["decode_s"]
    assert found["tokens_per_s"] == pytest.approx(4 * 32 / found["total_s"])
    # weights 8,030,261,248 x 2; 4 x 544 tokens x 128 KiB of cache
    assert found["memory"]["weights_bytes"] == 16_060_522_496
    assert found["memory"]["cache_bytes"] == 4 * 544 * 131_072
    assert found["memory_bytes"] < found["memory"]["available_bytes"] < found["memory"]["gpu_bytes"]
    assert sum(part["time_s"] for part in found["breakdown"]) == pytest.approx(found["total_s"])
    assert {part["phase"] for part in found["breakdown"]} == {"prefill", "decode"}


def test_text_says_the_answer_the_parts_and_the_memory(run: Run) -> None:
    out, found = ok(run, *LLAMA), told(run, *LLAMA)
    assert out.splitlines()[0] == "llama-3.1-8b  bf16  on  NVIDIA H100 80GB HBM3  vLLM"
    assert "4 requests, 512 tokens in, 32 out" in out
    assert re.search(rf"time to first token +{found['ttft_s'] * 1e3:.1f} ms", out)  # three digits
    assert re.search(rf"time per output token +{found['tpot_s'] * 1e3:.2f} ms", out)
    for part in {entry["part"] for entry in found["breakdown"]}:
        assert re.search(rf"^ {part} ", out, re.MULTILINE), part
    assert "weights 15.0 GiB" in out and " MiB" not in out
    assert found["predictor"] in out
    assert "1 request, 512 tokens in" in ok(run, *LLAMA[:4], "--input-len", "512", "--output-len", "32")
    assert "\x1b" not in out, "colour only on a terminal"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--batch 5000", ["GiB more than", "the largest batch of such requests is"]),
        ("--tp 1 --prefill-workers 1 --batch 5000", ["the decode pool", "GiB more than"]),
    ],
)
def test_what_does_not_fit_has_an_exit_code_of_its_own(run: Run, arguments: str, said: list[str]) -> None:
    line = refused(run, "infer", "llama-3.1-8b", "--gpu", "h100_sxm", *shlex.split(arguments), exit_code=3)
    assert all(words in line for words in said)
    line = refused(run, "infer", "llama-3.1-405b", "--gpu", "h100_sxm", exit_code=3)
    assert "weights alone are too large" in line and "--tp" in line


def test_the_evidence_says_whose_it_is_and_what_decided(run: Run) -> None:
    words = ("infer", "llama-3.1-8b", "--batch", "1", "--input-len", "128", "--output-len", "4", "--gpu")
    graphics = " ".join(ok(run, *words, "rtx_4090").split())
    assert "evidence nothing measured on RTX 4090; borrowed from L40S" in graphics and " calls of " not in graphics
    assert "support extrapolated, by the run: the nearest one measured end to end differs in" in graphics
    measured = " ".join(ok(run, *words, "h100_sxm").split())
    assert re.search(r"evidence [\d,]+ calls of \d+ configurations?; .* borrowed from H200", measured)
    assert "answered " not in measured


@pytest.mark.parametrize("command", ["infer", "simulate", "plan", "compare", "trace"])
def test_help_cuts_no_flag_off(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip("│ ") for line in ok(run, command, "--help").splitlines()]
    flags = {line.split()[0] for line in lines if line.startswith("--")}
    monkeypatch.setenv("COLUMNS", "400")
    wide = {word.strip(",") for line in ok(run, command, "--help").splitlines() for word in line.split()[1:2]}
    assert not [line for line in lines if line.startswith("--") and "…" in line.split()[0]]
    assert {name for name in wide if name.startswith("--") and len(name) < 30} <= flags


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("arguments", [LLAMA, ["models"], ["infer", "--help"]], ids=lambda a: a[0] + str(len(a)))
def test_text_fits_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = ok(run, *arguments)
    width = max(len(line) for line in out.splitlines() if not line.startswith("  kernelcast "))  # examples stay whole
    assert width <= columns


def test_the_examples_in_help_run(run: Run) -> None:
    for command in ("infer", "models"):
        example = ok(run, command, "--help").partition("Example:")[2]
        lines = [line for line in re.sub(r" *\\\s*\n\s*", " ", example).splitlines() if line.strip()]
        assert lines
        for line in lines:
            assert ok(run, *shlex.split(line)[1:])
    help_text = ok(run, "infer", "--help")
    assert all(name in help_text for name in stack_ids() if "==" not in name)


@pytest.mark.parametrize("engine", stack_ids())
def test_every_stack_answers(run: Run, engine: str) -> None:
    found = told(run, *LLAMA, "--stack", engine)
    assert found["stack"] == engine
    assert stack(engine).name in ok(run, *LLAMA, "--stack", engine).splitlines()[0]


def test_a_cut_model_names_its_gpus_and_talks(run: Run) -> None:
    found = told(run, *LLAMA, "--tp", "2", "--pp", "2")
    assert (found["gpus"], found["layout"]) == (4, {"tp": 2, "pp": 2, "dp": 1, "ep": 1})
    assert found["tokens_per_s_per_gpu"] == pytest.approx(found["tokens_per_s"] / 4)
    assert "communication" in {part["part"] for part in found["breakdown"]}
    assert "4 x NVIDIA H100 80GB HBM3  vLLM, tp 2, pp 2" in ok(run, *LLAMA, "--tp", "2", "--pp", "2")


def test_formats_are_told(run: Run) -> None:
    found = told(run, *LLAMA, "--dtype", "fp8", "--kv-dtype", "fp8")
    assert found["precision"] == "fp8, KV cache fp8"
    assert found["memory"]["cache_bytes"] == 4 * 544 * 65_536
    assert "decode" in ok(run, "infer", "gpt-oss-20b", "--gpu", "h100_sxm")  # 4-bit experts, as its checkpoint is


def test_an_encoder_has_no_decode(run: Run) -> None:
    found = told(run, "infer", "bert-base", "--gpu", "h100_sxm", "--input-len", "512", "--output-len", "1")
    assert (found["decode_s"], found["tpot_s"], found["decode_steps"]) == (0, 0, 0)
    assert found["total_s"] == found["prefill_s"] > 0


def test_json_of_a_gpu_without_bf16_is_json(run: Run) -> None:
    found = told(run, "infer", "llama-2-7b", "--gpu", "v100_sxm", "--dtype", "fp16", "--output-len", "4")
    assert 0 < found["mfu"] < 1


def test_a_what_if_gpu_decodes_faster_with_more_bandwidth(run: Run) -> None:
    faster = told(run, *LLAMA, "--set", "dram_bytes_per_s=6.7e12")
    assert faster["decode_s"] < told(run, *LLAMA)["decode_s"]
    assert "dram_bytes_per_s" in faster["gpu"]


def test_speculation_from_the_command_line(run: Run) -> None:
    # 31 tokens after the first; (1 - 0.5^3) / 0.5 = 1.75 a step: 18 steps
    found = told(run, *LLAMA, "--draft-tokens", "2", "--acceptance", "0.5", "--draft-model", "llama-3.2-1b")
    assert found["decode_steps"] == 18
    assert "draft model" in {part["part"] for part in found["breakdown"]}
    assert "1.75 tokens a step" in ok(run, *LLAMA, "--draft-tokens", "2", "--acceptance", "0.5")


# ---- models ----


def test_a_config_json_is_as_good_as_its_bundled_name(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text((MODELS / "llama-3.1-8b.json").read_text())
    bundled = told(run, *LLAMA)
    for name in (str(config), str(folder), "meta-llama/Llama-3.1-8B-Instruct"):
        found = told(run, "infer", name, *LLAMA[2:])
        assert numbers(found) == numbers(bundled)
    assert told(run, "infer", str(config), *LLAMA[2:])["model"] == "mine"


def test_models_lists_what_is_bundled(run: Run) -> None:
    found = told(run, "models")
    traced = {name for name, entry in found.items() if entry.get("command") == "trace"}
    assert set(found) - traced == set(model_ids()) and {"sdxl", "whisper-large-v3"} <= traced
    assert found["llama-3.1-8b"] == {
        "id": "meta-llama/Llama-3.1-8B", "format": "bf16",
        "parameters": 8_030_261_248, "active_parameters": 8_030_261_248, "layers": 32, "hidden": 4096,
        "vocab": 128256, "max_context": 131_072,
    }  # fmt: skip
    assert found["qwen3-30b-a3b"]["active_parameters"] == model("qwen3-30b-a3b").active_parameters.total
    out = ok(run, "models")
    assert all(re.search(rf"^{re.escape(name)} ", out, re.MULTILINE) for name in model_ids())
    assert re.search(r"^llama-3\.1-8b +meta-llama/Llama-3\.1-8B +8\.03 B +bf16", out, re.MULTILINE)


def test_a_pattern_filters_the_models_by_all_of_their_names(run: Run) -> None:
    assert set(told(run, "models", "qwen3 30b")) == {name for name in model_ids() if name.startswith("qwen3-30b")}
    assert re.search(r"^qwen2\.5-32b +Qwen/QwQ-32B +32\.76 B +bf16", ok(run, "models", "QwQ"), re.MULTILINE)
    assert set(told(run, "models", "*coder*480b")) == {"qwen3-coder-480b-a35b"}
    assert told(run, "models", "qwen3-32b-nvfp4")["qwen3-32b-nvfp4"]["format"] == "nvfp4, KV cache fp8"
    assert "unknown model 'falcon-40b'" in refused(run, "models", "falcon-40b")
    assert told(run, "models", "distil-whisper") == {
        "distil-large-v3": {"id": "distil-whisper/distil-large-v3", "parameters": 756_405_760, "command": "trace"}
    }


# ---- files ----


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.csv", "input_tokens,output_tokens\n512,32\n512,32\n512,32\n512,32\n"),
        ("r.csv", "arrival_s,output_tokens,input_tokens,user\n" + 4 * "0.5,32,512,me\n"),
        ("r.jsonl", 4 * '{"input_tokens": 512, "output_tokens": 32}\n'),
    ],
)
def test_requests_of_a_file_are_as_those_of_options(run: Run, tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert told(run, *LLAMA[:4], "--requests", str(path)) == told(run, *LLAMA)


def test_requests_of_a_parquet_file(run: Run, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "r.parquet"
    duckdb.sql("SELECT 512 AS input_tokens, 32 AS output_tokens FROM range(4)").write_parquet(str(path))
    assert told(run, *LLAMA[:4], "--requests", str(path)) == told(run, *LLAMA)


def test_requests_differ_and_may_be_cached(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("input_tokens,output_tokens,cached_tokens\n100,5,90\n1000,50,0\n")
    found = told(run, *LLAMA[:4], "--requests", str(path))
    assert (found["requests"], found["input_tokens"], found["output_tokens"]) == (2, 1100, 55)
    assert found["decode_steps"] == 49
    out = ok(run, *LLAMA[:4], "--requests", str(path))
    assert "2 requests, 100 to 1,000 tokens in, 5 to 50 out" in out


def test_trace_is_a_chrome_trace_whose_events_sum_to_the_step(run: Run, tmp_path: Path) -> None:
    # one decode step: kernels by part as the breakdown has them, and behind them what the gaps leave of the host's time
    path = tmp_path / "trace.json"
    arguments = [*LLAMA[:4], "--batch", "4", "--input-len", "512", "--output-len", "2"]
    found = told(run, *arguments, "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event["ph"] == "X"]
    decode = [part for part in found["breakdown"] if part["phase"] == "decode" and part["part"] != "host"]
    assert max(event["ts"] + event["dur"] for event in kernels) == pytest.approx(1e6 * found["decode_s"], abs=1)
    for part in decode:
        own = sum(event["dur"] for event in kernels if event["cat"] == part["part"])
        assert own == pytest.approx(1e6 * part["time_s"], rel=1e-3, abs=0.1)
    assert sum(event["name"] == "attention" for event in kernels) == 32
    ends = [event["ts"] + event["dur"] for event in kernels]
    assert all(end <= event["ts"] + 0.01 for end, event in zip(ends, kernels[1:], strict=False)), "none overlap"
    assert {event["name"] for event in events if event["ph"] == "M"} == {"process_name", "thread_name"}


def test_trace_of_a_batch_that_decodes_nothing_is_its_prefill(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ["infer", "bert-base", "--gpu", "h100_sxm", "--input-len", "128", "--output-len", "1"]
    found = told(run, *arguments, "--trace", str(path))
    drawn = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    parts = sum(part["time_s"] for part in found["breakdown"] if part["part"] != "host")
    kernels_us = sum(event["dur"] for event in drawn if event["cat"] != "host")
    assert kernels_us == pytest.approx(1e6 * parts, rel=1e-3)
    # a pass of a captured size replays a graph: its gaps lie between the kernels
    ends_us = max(event["ts"] + event["dur"] for event in drawn)
    assert ends_us == pytest.approx(1e6 * found["prefill_s"], abs=1)


@pytest.mark.parametrize(
    "cut", [("--dp", "2"), ("--tp", "2"), ("--pp", "2"), ("--pp", "2", "--micro-batches", "4"), ("--stack", "torch")]
)
def test_a_trace_draws_the_time_that_is_told(run: Run, tmp_path: Path, cut: tuple[str, ...]) -> None:
    path = tmp_path / "trace.json"
    arguments = [*LLAMA[:4], "--batch", "8", "--input-len", "512", "--output-len", "2", *cut]
    found = told(run, *arguments, "--trace", str(path))
    drawn = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in drawn) == pytest.approx(1e6 * found["decode_s"], abs=1)


def test_plot_is_a_picture(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "parts.png"
    ok(run, *LLAMA, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("infer llama-3.1-8c --gpu h100_sxm", ["unknown model 'llama-3.1-8c'", "did you mean llama-3.1-8b"]),
        ("infer none/config.json --gpu h100_sxm", ["no config.json at 'none/config.json'"]),
        ("infer llama-3.1-8b --gpu h2000", ["unknown gpu 'h2000'", "h200_sxm"]),
        ("infer llama-3.1-8b", ["which GPU?", "--gpu"]),
        ("infer --gpu h100_sxm", ["missing MODEL"]),
        ("infer llama-3.1-8b --gpu h100_sxm --stack vlm", ["unknown stack 'vlm'", "did you mean vllm"]),
        ("infer llama-3.1-8b --gpu h100_sxm --dtype bf17", ["unknown number format of weights 'bf17'", "bf16"]),
        ("infer llama-3.1-8b --gpu h100_sxm --kv-dtype int4", ["unknown number format of the KV cache 'int4'", "fp8"]),
        ("infer llama-3.1-8b --gpu a100_sxm --dtype fp8", ["a100_sxm has no fp8", "bf16"]),
        ("infer llama-3.1-8b --gpu h100_sxm --predictor oracle", ["unknown predictor 'oracle'"]),
        ("infer llama-3.1-8b --gpu h100_sxm --set sm_cuont=1", ["unknown GPU field 'sm_cuont'"]),
        ("infer llama-3.1-8b --gpu h100_sxm --batch 0", ["batch must be 1 or more, not 0"]),
        (
            "infer llama-3.1-8b --gpu h100_sxm --batch two",
            ["--batch must be a whole number", "kernelcast infer --help"],
        ),
        ("infer llama-3.1-8b --gpu h100_sxm --input-len 0", ["at least one input token"]),
        ("infer llama-3.1-8b --gpu h100_sxm --cached 1024", ["cached tokens must be fewer"]),
        ("infer llama-3.1-8b --gpu h100_sxm --chunk -1", ["chunk", "-1"]),
        ("infer llama-3.1-8b --gpu h100_sxm --output-len 200000", ["exceeds the context of llama-3.1-8b, 131,072"]),
        ("infer llama-3.1-8b --gpu h100_sxm --tp 3", ["tp 3 does not divide the 32 heads"]),
        ("infer llama-3.1-8b --gpu h100_sxm --tp 2 --ep 2", ["ep 2: llama-3.1-8b has no experts"]),
        ("infer llama-3.1-8b --gpu h100_sxm --pp 64", ["pp 64 is more than the 32 layers"]),
        ("infer qwen3-next-80b-a3b --gpu h100_sxm --tp 3", ["tp 3 does not divide the 16 key heads"]),
        ("infer bert-base --gpu h100_sxm --input-len 100 --output-len 2", ["an encoder", "--output-len must be 1"]),
        ("infer llama-3.1-8b --gpu h100_sxm --draft-model llama-3.2-1b", ["--draft-tokens"]),
        ("infer llama-3.1-8b --gpu h100_sxm --draft-tokens 2 --acceptance 1.5", ["between 0 and 1", "1.5"]),
        ("infer llama-3.1-8b --gpu h100_sxm --requests none.csv", ["no file none.csv"]),
        ("infer llama-3.1-8b --gpu h100_sxm --btach 2", ["unknown option '--btach'", "did you mean --batch"]),
        ("models --jsn", ["unknown option '--jsn'"]),
    ],
)
def test_infer_refuses_in_one_line_and_writes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [] if arguments.startswith("models") else ["--trace", "trace.json", "--plot", "plot.png"]
    line = refused(run, *shlex.split(arguments), *files)
    for words in said:
        assert words in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("input_tokens,tokens\n1,2\n", "needs a column 'output_tokens'; this has input_tokens, tokens"),
        ("prompt,output_tokens\n1,2\n", "needs a column 'input_tokens'"),
        ("input_tokens,output_tokens\n10,5\n10,many\n", "row 2: output_tokens must be a whole number of tokens"),
        ("input_tokens,output_tokens\n10,5\n10,2.5\n", "row 2: output_tokens must be a whole number of tokens, not"),
        ("input_tokens,output_tokens\n10,5\n-1,5\n", "row 2: input_tokens must be a whole number of tokens, not -1"),
        (
            "input_tokens,output_tokens\n10,5\n,5\n",
            "row 2: input_tokens must be a whole number of tokens, not an empty",
        ),
        ("input_tokens,output_tokens\n10,inf\n", "row 1: output_tokens must be a whole number of tokens, not inf"),
        ("input_tokens,output_tokens\n10,0\n", "one output token"),
        ("input_tokens,output_tokens,cached_tokens\n10,5,10\n", "cached tokens must be fewer"),
        ("input_tokens,output_tokens,arrival_s\n10,5,soon\n", "row 1: arrival_s must be a number of seconds"),
        ("input_tokens,output_tokens\n", "has no request"),
        ("", "is empty"),
    ],
)
def test_a_bad_file_of_requests_is_one_line(run: Run, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(content)
    assert said in refused(run, *LLAMA[:4], "--requests", str(path))


def test_sizes_beside_a_file_of_requests_are_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("input_tokens,output_tokens\n10,5\n")
    said = refused(run, *LLAMA, "--requests", str(path))
    assert "leave out --batch, --input-len, --output-len" in said


def test_a_place_that_cannot_be_written_to_is_one_line(run: Run, tmp_path: Path) -> None:
    assert "none" in refused(run, *LLAMA, "--trace", str(tmp_path / "none" / "trace.json"))
    pytest.importorskip("matplotlib")
    assert "Format 'odd' is not supported" in refused(run, *LLAMA, "--plot", str(tmp_path / "plot.odd"))
    assert not list(tmp_path.iterdir())


def test_an_encoder_is_one_pass(run: Run) -> None:
    text = ok(run, "infer", "bert-base", "--gpu", "h100_sxm", "--input-len", "100")
    assert "one pass" in text and "first token" not in text and "decode steps" not in text
