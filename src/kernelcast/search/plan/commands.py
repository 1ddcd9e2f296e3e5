"""How to start the chosen service: the command line of each engine, in its flags.

Names and what they count: vLLM's limits are of one data-parallel rank; SGLang's are of all ranks together, and its tp
counts them all (python/sglang/srt/server_args.py, where --pp abbreviates several flags, which argparse refuses);
TensorRT-LLM's attention DP runs one rank on each GPU of tp (tensorrt_llm/llmapi/llm_args.py) and is set in a file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from kernelcast.inference.forward import Deployment
from kernelcast.search.plan.space import ServiceCandidate
from kernelcast.serving.service import EngineSettings

_QUANTIZED_ONLINE = ("fp8",)  # formats that vLLM and SGLang make of a bf16 checkpoint themselves
_NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'


def commands(candidate: ServiceCandidate, hub_name: str) -> list[str]:
    """Lines to run, and comments that say where and how often."""
    deployment = candidate.engine.deployment
    command = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[deployment.stack.engine]
    lines = _notes(deployment)
    if candidate.prefill is None or candidate.prefill_limits is None:
        lines += _count(candidate.replicas, deployment, "")
        lines += command(deployment, candidate.limits, hub_name, "")
        return lines + (_router(deployment.stack.engine, candidate) if candidate.replicas > 1 else [])
    prefill = candidate.prefill.deployment
    lines += _count(candidate.prefill_replicas, prefill, "prefill ")
    lines += command(prefill, candidate.prefill_limits, hub_name, "prefill")
    lines += _count(candidate.replicas, deployment, "decode ")
    lines += command(deployment, candidate.limits, hub_name, "decode")
    return lines + _router(deployment.stack.engine, candidate)


def _notes(deployment: Deployment) -> list[str]:
    weights = deployment.precision.weights
    if deployment.model.quantization is not None or weights in ("bf16", "fp16", "fp32", "tf32"):
        return []
    if deployment.stack.engine != "trtllm" and weights in _QUANTIZED_ONLINE:
        return ["# fp8 is made of the 16-bit checkpoint at start; check that its answers are good enough"]
    return [f"# name a checkpoint in {weights} in place of this one, and check that its answers are good enough"]


def _count(count: int, deployment: Deployment, phase: str) -> list[str]:
    if count == 1 and not phase:
        return []
    gpus = f"{deployment.layout.gpus} GPU{'s' if deployment.layout.gpus > 1 else ''}"
    return [f"# {count} {phase}engine{'s' if count > 1 else ''}, on {gpus}{' each' if count > 1 else ''}"]


def _line(*arguments: object, flags: Mapping[str, object]) -> str:
    """``flags``: True has no value; 1 and None are what engines take anyway."""
    given = {name: value for name, value in flags.items() if value is True or value not in (None, False, 1)}
    pairs = [argument for name, value in given.items() for argument in ((name,) if value is True else (name, value))]
    return shlex.join(map(str, (*arguments, *pairs)))


def _formats(deployment: Deployment) -> dict[str, object]:
    precision = deployment.precision
    online = deployment.model.quantization is None and precision.weights in _QUANTIZED_ONLINE
    cache = "fp8" if deployment.stack.engine == "vllm" else "fp8_e4m3"
    return {
        "--quantization": precision.weights if online else None,
        "--dtype": None if online else {"fp16": "float16", "fp32": "float32"}.get(precision.weights),
        "--kv-cache-dtype": cache if precision.cache == "fp8" else None,
    }


def _vllm(deployment: Deployment, limits: EngineSettings, name: str, phase: str) -> list[str]:
    layout = deployment.layout
    return [_line("vllm", "serve", name, flags={
        "--tensor-parallel-size": layout.tp, "--pipeline-parallel-size": layout.pp, "--data-parallel-size": layout.dp,
        "--enable-expert-parallel": layout.ep > 1, **_formats(deployment), "--max-num-seqs": str(limits.max_num_seqs),
        "--max-num-batched-tokens": str(limits.max_num_batched_tokens),
        "--gpu-memory-utilization": f"{deployment.stack.memory_share:g}",
        "--kv-transfer-config": _NIXL if phase else None,
    })]  # fmt: skip


def _sglang(deployment: Deployment, limits: EngineSettings, name: str, phase: str) -> list[str]:
    layout = deployment.layout
    return [_line("python", "-m", "sglang.launch_server", "--model-path", name, flags={
        "--tp-size": layout.tp * layout.dp, "--pp-size": layout.pp, "--dp-size": layout.dp,
        "--enable-dp-attention": layout.dp > 1, "--ep-size": layout.ep, **_formats(deployment),
        "--max-running-requests": str(limits.max_num_seqs * layout.dp),
        "--chunked-prefill-size": str(limits.max_num_batched_tokens * layout.dp),
        "--mem-fraction-static": f"{deployment.stack.memory_share:g}", "--disaggregation-mode": phase or None,
    })]  # fmt: skip


def _trtllm(deployment: Deployment, limits: EngineSettings, name: str, phase: str) -> list[str]:
    layout, file = deployment.layout, f"{phase or 'engine'}.yaml"
    options = ["enable_attention_dp: true"] if layout.dp > 1 else []
    options += ["disable_overlap_scheduler: true"] if phase == "prefill" else []
    options += ["cache_transceiver_config: {backend: DEFAULT}"] if phase else []
    options += ["kv_cache_config: {dtype: fp8}"] if deployment.precision.cache == "fp8" else []
    files = [_line("printf", "%s\\n", *options, flags={}) + f" > {file}"] if options else []
    return [*files, _line("trtllm-serve", name, "--backend", "pytorch", flags={
        "--tp_size": layout.tp * layout.dp, "--pp_size": layout.pp, "--ep_size": layout.ep,
        "--max_batch_size": str(limits.max_num_seqs), "--max_num_tokens": str(limits.max_num_batched_tokens),
        "--kv_cache_free_gpu_memory_fraction": f"{deployment.stack.memory_share:g}",
        "--extra_llm_api_options": file if options else None,
    })]  # fmt: skip


def _router(stack: str, candidate: ServiceCandidate) -> list[str]:
    decodes, prefills = candidate.replicas, candidate.prefill_replicas
    if candidate.prefill is None:
        if stack == "sglang":
            urls = " ".join(f"http://server{at}:30000" for at in range(1, decodes + 1))
            return [f"python -m sglang_router.launch_router --policy round_robin --worker-urls {urls}"]
        return [f"# and a round-robin router in front of the {decodes}"]
    if stack == "sglang":
        arguments = [f"--prefill http://prefill{at}:30000" for at in range(1, prefills + 1)]
        arguments += [f"--decode http://decode{at}:30000" for at in range(1, decodes + 1)]
        return [" ".join(["python -m sglang_router.launch_router --pd-disaggregation", *arguments])]
    if stack == "trtllm":
        return [f"# disagg.yaml lists the {prefills} as context_servers, the {decodes} as generation_servers",
                "trtllm-serve disaggregated -c disagg.yaml"]  # fmt: skip
    return ["# and a proxy that sends each request to a prefill engine, then to a decode engine"]
