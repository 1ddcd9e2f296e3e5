"""GPUStack's performance lab: `bench_serving` and guidellm against servers whose command lines are published."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelcast_lab.data.shared import NotExpressibleError, Row, known_gpu, known_model

_FLAGS = {
    "-tp": "tp", "--tp": "tp", "--tp-size": "tp", "--tp_size": "tp", "--tensor-parallel-size": "tp",
    "-pp": "pp", "--pp-size": "pp", "--pp_size": "pp", "--ep-size": "ep", "--ep_size": "ep",
    "--dp": "dp_size", "--dp-size": "dp_size", "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max_num_tokens": "max_num_batched_tokens", "--max-num-seqs": "max_num_seqs",
    "--max-running-requests": "max_num_seqs", "--mem-fraction-static": "gpu_memory_utilization",
}  # fmt: skip
_SWITCHES = {
    "--enable-dp-attention": "enable_dp_attention", "--enable-expert-parallel": "enable_expert_parallel",
    "--enable_chunked_prefill": "enable_chunked_prefill", "--async-scheduling": "async_scheduling",
}  # fmt: skip
_NO_EFFECT = (
    "--host", "--port", "--max-model-len", "--max_seq_len", "--context-length", "--reasoning-parser",
    "--tool-call-parser", "--chat-template", "--enable-prefix-caching", "--model", "--model-path",
    "--language-model-only", "--cuda-graph-max-bs", "--enable-torch-compile", "--attention-backend",
    "--nsa-prefill-backend", "--nsa-decode-backend",
)  # fmt: skip
_ENGINES = {"vllm": "vllm", "python3": "sglang", "trtllm-serve": "trtllm"}
_AT_ONCE = 1000  # requests a second, of guidellm's runs without a rate
# ShareGPT's conversations as vLLM samples them: mean lengths of a hundred or a thousand requests, by tokenizer
_SHAREGPT_MEANS = (200, 240), (180, 230)


def served_load(row: Row) -> Mapping[str, Any]:
    """A server under the published load. Requests have the mean lengths; those of the data set are not published."""
    text, page = str(row["serve_cmd"] or ""), _pages().get(row["file"].partition("performance-lab/")[2][:-3], {})
    if page:
        text = _section_command(page, row)
    command = re.search(r"(vllm serve|python3 -m sglang.launch_server|trtllm-serve)\s.*", text.replace("\n", " "))
    if command is None:
        raise NotExpressibleError("no command line of the server")
    stack = _ENGINES[command.group().split()[0]]
    name, parameters = server_parameters(command.group().replace("/workspace/", "deepseek-ai/"))
    machine = re.search(r"(\d+)?\s*×?\s*NVIDIA (A100|H100|H200)", str(row["hardware_text"]))
    if machine is None:
        raise NotExpressibleError(f"the accelerator of {row['hardware_text']!r}")
    known, dtype = known_model(name)
    if row["mean_isl"] is None or row["mean_osl"] is None:
        raise NotExpressibleError("lengths of the requests")
    target = known_gpu(machine.group(2))
    load, measured = _guided(page, row) if page else _benched(row)
    if dtype and target.startswith("a100"):
        dtype = "int8_wo"  # engines multiply 8-bit weights with 16-bit activations on Ampere
    formats, release = {"dtype": dtype} if dtype else {}, _release(page.get("engines") or row["engine_text"], stack)
    if stack == "vllm" and release:  # older ones of the others have no file
        stack = f"{stack}=={release}"
    return {"gpu": target, "model": known, "stack": stack, "release": release, "command": "simulate",
            "measured": {key: value for key, value in measured.items() if value},
            "parameters": {"model": known, "gpu": target, "stack": stack, **formats, **parameters, **load}}  # fmt: skip


def _lengths(row: Row) -> dict[str, Any]:
    return {"num_prompts": int(row["requests"] or row["num_prompts"] or 1000),
            "input_len": round(row["mean_isl"]), "output_len": round(row["mean_osl"])}  # fmt: skip


def _benched(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """The load of `vllm bench serve`, and what it measured."""
    load = _lengths(row) | {"request_rate": row["request_rate"] or float("inf")}
    if row["max_concurrency"]:
        load["max_concurrency"] = int(row["max_concurrency"])
    lengths = zip((load["input_len"], load["output_len"]), _SHAREGPT_MEANS, strict=True)
    if all(low <= length <= high for length, (low, high) in lengths):
        load["lengths"] = "exponential"
    measured = {name: row[name] for name in ("mean_ttft_ms", "mean_tpot_ms")}
    return load, {"output_throughput": row["output_tok_s"], **measured}


def _guided(page: Mapping[str, Any], row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same of guidellm. Its tokens a second are a mean of rates between events (rate_distribution_from_timings in
    guidellm/schemas), 2% above tokens over duration where few requests last beyond the others: the requests of its
    duration are compared, each with the tokens that are asked for."""
    load, heading = _lengths(row), _heading(row)
    rate = page["rates"].get(heading, page["rates"][""])
    counted = row["median_itl_ms"] > 0
    if rate == _AT_ONCE:
        if not counted:
            raise NotExpressibleError("a client that keeps the server waiting (guidellm: median time between tokens 0)")
        load |= {"request_rate": float("inf"), "max_concurrency": int(row["max_concurrency"])}
    else:
        load |= {"request_rate": float(rate), "arrivals": "constant"}
    if load["input_len"] < 400:  # its other loads are of a thousand tokens and more
        load["lengths"] = "exponential"
    throughput = load["num_prompts"] * load["output_len"] / row["duration_s"]
    measured = {"output_throughput": throughput, "mean_ttft_ms": row["mean_ttft_ms"]}
    return load, measured | ({"mean_tpot_ms": row["mean_itl_ms"]} if counted else {})


@functools.cache
def _pages() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "gpustack.toml").read_text())


def _heading(row: Row) -> str:
    return str(row["section"]).rpartition(" > ")[2]


def _section_command(page: Mapping[str, Any], row: Row) -> str:
    heading, label = _heading(row), str(row["label"])
    if "Baseline" in label:
        return str(page.get("baselines", {}).get(heading, page["baseline"]))
    return str(page["optimized"] if "Optimized" in label else page["commands"].get(heading, ""))


def _release(engines: object, stack: str) -> str:
    """Of the page's list of engines: "vLLM: v0.11.0; SGLang: v0.5.3"."""
    name = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}[stack]
    match = re.search(rf"{name}: v?(\d+\.\d+)", str(engines or ""))
    return match.group(1) if match else ""


def server_parameters(command: str) -> tuple[str, dict[str, Any]]:
    """The model of a server's command line, and its flags as kernelcast's parameters."""
    words = [word for part in shlex.split(command) for word in (part.split("=", 1) if part[:2] == "--" else [part])]
    parameters: dict[str, Any] = {}
    name, at = "", 1
    while at < len(words):
        word, value = words[at], words[at + 1] if at + 1 < len(words) else ""
        at += 1
        if word in _FLAGS:
            parameters[_FLAGS[word]] = float(value) if "." in value else int(value)
        elif word in _SWITCHES:
            parameters[_SWITCHES[word]] = True
        elif word == "--kv-cache-dtype":
            parameters["kv_dtype"] = value.partition("_")[0]
        elif word == "--moe-a2a-backend":
            parameters["exchange"] = value
        elif word.startswith("--speculative"):
            raise NotExpressibleError("speculative decoding whose acceptance is not published")
        elif word.startswith("--performance-mode"):
            raise NotExpressibleError("vLLM's --performance-mode")
        elif word.startswith("-") and word not in _NO_EFFECT and word != "-m":
            raise NotExpressibleError(f"the flag {word}")
        elif word in ("--model", "--model-path"):
            name = value
        elif not name and not word.startswith("-") and "/" in word and word.count("/") == 1:
            name = word
    if "exchange" in parameters:  # SGLang spreads the experts over all GPUs then
        parameters["ep"] = parameters["tp"]
    if not name:
        raise NotExpressibleError("the model of the server's command line")
    return name, parameters
