"""How to start the chosen service: the command line of each engine, with its own names for what was chosen.

Names and what they count: vLLM's limits are of one data-parallel rank; SGLang's are of all ranks together, and its tp
counts them all (python/sglang/srt/server_args.py); TensorRT-LLM's attention DP runs one rank on each GPU of tp
(tensorrt_llm/llmapi/llm_args.py) and is set in a file.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from kernelcast.inference.forward import Deployment
from kernelcast.search.plan.grid import Setting
from kernelcast.serving.service import EngineSettings

_QUANTISED_ONLINE = ("fp8",)  # formats that vLLM and SGLang make of a bf16 checkpoint themselves
_NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


def commands(setting: Setting, hub_name: str) -> list[str]:
    """Lines to run, and comments that say where and how often."""
    place = setting.place.deployment
    make = _MAKERS[place.stack.id]
    lines = _notes(place)
    if setting.reader is None or setting.reader_limits is None:
        lines += _times(setting.replicas, place, "")
        lines += make(place, setting.limits, hub_name, "")
        return lines + (_router(place.stack.id, setting) if setting.replicas > 1 else [])
    reader = setting.reader.deployment
    lines += _times(setting.readers, reader, "to read prompts")
    lines += make(reader, setting.reader_limits, hub_name, "prefill")
    lines += _times(setting.replicas, place, "to decode")
    return lines + make(place, setting.limits, hub_name, "decode") + _router(place.stack.id, setting)


def _notes(place: Deployment) -> list[str]:
    kind, own = place.precision.weights, place.model.quantization
    if own is not None or kind in ("bf16", "fp16", "fp32", "tf32"):
        return []
    if place.stack.id != "trtllm" and kind in _QUANTISED_ONLINE:
        return ["# fp8 is made of the 16-bit checkpoint at start; check that its answers are good enough"]
    return [f"# name a checkpoint in {kind} in place of this one, and check that its answers are good enough"]


def _times(count: int, place: Deployment, task: str) -> list[str]:
    gpus = f"{place.layout.gpus} GPU{'s' if place.layout.gpus > 1 else ''}"
    if count == 1 and not task:
        return []
    each = "one engine" if count == 1 else f"{count} engines"
    return [f"# {each}{f' {task}' if task else ''}, on {gpus}{' each' if count > 1 else ''}"]


def _line(*words: object) -> str:
    return shlex.join(map(str, words))


def _given(pairs: Sequence[tuple[str, int]]) -> list[object]:
    """Flags with their numbers; those of 1 are what engines take anyway."""
    return [word for flag, value in pairs if value > 1 for word in (flag, value)]


def _vllm(place: Deployment, limits: EngineSettings, name: str, task: str) -> list[str]:
    layout = place.layout
    words: list[object] = ["vllm", "serve", name, *_given([("--tensor-parallel-size", layout.tp),
             ("--pipeline-parallel-size", layout.pp), ("--data-parallel-size", layout.dp)])]  # fmt: skip
    words += ["--enable-expert-parallel"] if layout.ep > 1 else []
    words += _formats(place, "--kv-cache-dtype")
    words += ["--max-num-seqs", limits.max_num_seqs, "--max-num-batched-tokens", limits.max_num_batched_tokens]
    words += ["--gpu-memory-utilization", f"{place.stack.used_share:g}"]
    words += ["--kv-transfer-config", _NIXL] if task else []
    return [_line(*words)]


def _sglang(place: Deployment, limits: EngineSettings, name: str, task: str) -> list[str]:
    layout = place.layout
    words: list[object] = ["python", "-m", "sglang.launch_server", "--model-path", name,
             *_given([("--tp", layout.tp * layout.dp), ("--pp", layout.pp), ("--dp", layout.dp)])]  # fmt: skip
    words += ["--enable-dp-attention"] if layout.dp > 1 else []
    words += _given([("--ep", layout.ep)]) + _formats(place, "--kv-cache-dtype")
    words += ["--max-running-requests", limits.max_num_seqs * layout.dp]
    words += ["--chunked-prefill-size", limits.max_num_batched_tokens * layout.dp]
    words += ["--mem-fraction-static", f"{place.stack.used_share:g}"]
    words += ["--disaggregation-mode", task] if task else []
    return [_line(*words)]


def _trtllm(place: Deployment, limits: EngineSettings, name: str, task: str) -> list[str]:
    layout, file = place.layout, f"{task or 'engine'}.yaml"
    kept = ["enable_attention_dp: true"] if layout.dp > 1 else []
    kept += ["disable_overlap_scheduler: true"] if task == "prefill" else []
    kept += ["cache_transceiver_config: {backend: DEFAULT}"] if task else []
    cache = place.precision.cache
    kept += [f"kv_cache_config: {{dtype: {cache}}}"] if cache == "fp8" else []
    words: list[object] = ["trtllm-serve", name, "--backend", "pytorch", *_given([("--tp_size", layout.tp * layout.dp),
             ("--pp_size", layout.pp), ("--ep_size", layout.ep)])]  # fmt: skip
    words += ["--max_batch_size", limits.max_num_seqs, "--max_num_tokens", limits.max_num_batched_tokens]
    words += ["--kv_cache_free_gpu_memory_fraction", f"{place.stack.used_share:g}"]
    words += ["--extra_llm_api_options", file] if kept else []
    files = [_line("printf", "%s\\n", *kept) + f" > {file}"] if kept else []
    return [*files, _line(*words)]


def _formats(place: Deployment, cache_flag: str) -> list[object]:
    kinds = place.precision
    words: list[object] = []
    if place.model.quantization is None and kinds.weights in _QUANTISED_ONLINE:
        words += ["--quantization", kinds.weights]
    elif kinds.weights in ("fp16", "fp32"):
        words += ["--dtype", {"fp16": "float16", "fp32": "float32"}[kinds.weights]]
    if kinds.cache == "fp8":
        words += [cache_flag, "fp8" if place.stack.id == "vllm" else "fp8_e4m3"]
    return words


def _router(stack: str, setting: Setting) -> list[str]:
    if setting.reader is None:
        if stack == "sglang":
            urls = " ".join(f"http://server{at}:30000" for at in range(1, setting.replicas + 1))
            return [f"python -m sglang_router.launch_router --policy round_robin --worker-urls {urls}"]
        return [f"# and a router that takes turns in front of the {setting.replicas}"]
    if stack == "sglang":
        words = [f"--prefill http://reader{at}:30000" for at in range(1, setting.readers + 1)]
        words += [f"--decode http://writer{at}:30000" for at in range(1, setting.replicas + 1)]
        return [" ".join(["python -m sglang_router.launch_router --pd-disaggregation", *words])]
    if stack == "trtllm":
        return [f"# disagg.yaml lists the {setting.readers} as context_servers, the {setting.replicas} as "
                "generation_servers", "trtllm-serve disaggregated -c disagg.yaml"]  # fmt: skip
    return ["# and a proxy that sends each request to one that reads, then to one that decodes"]


_MAKERS: dict[str, Callable[[Deployment, EngineSettings, str, str], list[str]]] = {
    "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm,
}  # fmt: skip
