"""What vLLM, SGLang and TensorRT-LLM, and their benchmarks, call the parameters of a forecast.

vLLM: vllm/engine/arg_utils.py, vllm/benchmarks/serve.py, datasets.py; SGLang: python/sglang/srt/server_args.py,
bench_serving.py; TensorRT-LLM: tensorrt_llm/commands/serve.py, llmapi/llm_args.py. Names are written with underscores;
command lines take dashes too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.stacks import training_flags

ALIASES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor_parallel_size", "tp_size"),
    "pp": ("pipeline_parallel_size", "pp_size"),
    "dp": ("data_parallel_size",),
    "ep": ("expert_parallel_size", "ep_size"),
    "kv_dtype": ("kv_cache_dtype",),
    "quantization": ("q",),
    "max_model_len": ("context_length", "max_seq_len"),
    "enforce_eager": ("disable_cuda_graph",),
    "gpu_memory_utilization": (
        "mem_fraction_static", "kv_cache_free_gpu_memory_fraction", "kv_cache_free_gpu_mem_fraction",
        "free_gpu_memory_fraction",
    ),
    "max_num_seqs": ("max_running_requests", "max_batch_size"),
    "max_num_batched_tokens": ("chunked_prefill_size", "max_num_tokens"),
    "num_gpu_blocks_override": (),
    "block_size": ("page_size", "tokens_per_block"),
    "enable_dp_attention": ("enable_attention_dp",),
    "redundant_experts": ("num_redundant_experts", "ep_num_redundant_experts"),
    "two_batch_overlap": ("enable_two_batch_overlap", "enable_dbo"),
    "exchange": ("all2all_backend",),
    "draft_tokens": ("num_speculative_tokens", "speculative_num_draft_tokens"),
    "draft_model": ("speculative_model", "speculative_draft_model_path"),
    "stack": ("backend",),
    "batch": ("batch_size", "concurrency"),
    "max_concurrency": ("concurrency",),
    "request_rate": ("qps", "rps"),
    "input_len": ("random_input_len",),
    "output_len": ("random_output_len",),
    "num_groups": ("gsp_num_groups",),
    "prompts_per_group": ("gsp_prompts_per_group",),
    "system_prompt_len": ("gsp_system_prompt_len",),
    "question_len": ("gsp_question_len",),
    "num_prefixes": ("prefix_repetition_num_prefixes",),
    "prefix_len": ("prefix_repetition_prefix_len",),
    "suffix_len": ("prefix_repetition_suffix_len",),
    "rate": ("request_rate", "qps", "rps"),
    "gpus": ("gpu",),
    "formats": ("quantization", "q"),
    "dtype": ("quantization", "q"),
}  # fmt: skip
NEGATIONS: Mapping[str, tuple[str, ...]] = {
    "enable_prefix_caching": ("disable_radix_cache",),
    "async_scheduling": ("disable_overlap_schedule",),
    "enforce_eager": ("enable_cuda_graph",),
}
# Of a server or a benchmark, without effect on how long its work takes; and whether a value follows
WITHOUT_EFFECT: Mapping[str, bool] = {
    **dict.fromkeys(("trust_remote_code", "disable_log_requests", "disable_log_stats", "enable_log_requests",
                     "no_enable_log_requests", "enable_auto_tool_choice", "ignore_eos", "save_result",
                     "save_detailed"), False),
    **dict.fromkeys(("host", "port", "served_model_name", "api_key", "tokenizer", "download_dir", "chat_template",
                     "tool_call_parser", "reasoning_parser", "base_url", "endpoint", "percentile_metrics",
                     "metric_percentiles", "result_dir", "result_filename", "load_format", "tokenizer_mode",
                     "revision"), True),
}  # fmt: skip


def _by_alias(*tables: tuple[Mapping[str, tuple[str, ...]], bool]) -> dict[str, list[tuple[str, bool]]]:
    parameters: dict[str, list[tuple[str, bool]]] = {}
    for names, positive in tables:
        for parameter, aliases in names.items():
            for alias in aliases:
                parameters.setdefault(alias, []).append((parameter, positive))
    return parameters


_PARAMETERS = _by_alias((ALIASES, True), (NEGATIONS, False))
_OF_TRAINING = _by_alias((training_flags.ALIASES, True))


def _trains(known: Collection[str]) -> bool:
    """Whether these are the parameters of a training job, which other projects have other names for."""
    return "global_batch" in known


def without_effect(known: Collection[str]) -> Mapping[str, bool]:
    """Flags that change nothing in a forecast, and whether a value follows."""
    return training_flags.WITHOUT_EFFECT if _trains(known) else WITHOUT_EFFECT


def parameter_called(name: str, known: Collection[str]) -> tuple[str, bool] | None:
    """Which of the ``known`` parameters an engine's ``name`` means, and whether it says yes (False: it turns the
    parameter off); None: it is one of them itself, or means none."""
    if name in known:
        return None
    table = _OF_TRAINING if _trains(known) else _PARAMETERS
    return next((each for each in table.get(name, ()) if each[0] in known), None)


def aliases_of(parameter: str, known: Collection[str]) -> tuple[str, ...]:
    """Other names of a parameter, among these."""
    table = training_flags.ALIASES if _trains(known) else ALIASES
    return tuple(alias for alias in table.get(parameter, ()) if parameter_called(alias, known) == (parameter, True))


def negations_of(parameter: str) -> tuple[str, ...]:
    """Engines' switches that turn a parameter off."""
    return NEGATIONS.get(parameter, ())


def canonical_names(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """``given`` by the parameters' own names; two names of one parameter are refused."""
    named: dict[str, Any] = {}
    called: dict[str, str] = {}
    for name, value in given.items():
        parameter, positive = parameter_called(name, known) or (name, True)
        if parameter in named:
            raise KernelcastError(f"{called[parameter]} and {name} are the same: give one of them")
        named[parameter], called[parameter] = value if positive else not value, name
    return named
