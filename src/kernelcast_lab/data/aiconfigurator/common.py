"""What the tables of AIConfigurator have in common: names, rules, which attention backend a kernel source is."""

from __future__ import annotations

from collections.abc import Mapping

from kernelcast_lab.data.mapping import OpMap, Rules, TableMap, hopper

SOURCE = "aiconfigurator"
FLOATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8"}
KV = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8"}
PAGE = "64"  # tokens a page of the KV cache in decode
EXPERT_SIZES = {
    "tokens": "num_tokens",
    "hidden": "hidden_size",
    "inter": "inter_size",
    "experts": "num_experts",
    "topk": "topk",
    "tp": "moe_tp_size",
    "ep": "moe_ep_size",
}

_DROPS = (("backfill", "origin = 'backfill'"), ("older_version", "origin = 'older'"), ("suspect", "suspect"))


def table(*ops: OpMap, drops: Rules = (), optional: Mapping[str, str] | None = None, **condition: str) -> TableMap:
    fields = {
        "stack": "lower(framework)",
        "version": "version",
        "kernel_source": "kernel_source",
        "rotation": "1",
        **condition,
    }
    lacking = {"origin": "'base'", "suspect": "false", **(optional or {})}
    return TableMap(SOURCE, ops, drops=(*_DROPS, *drops), optional=lacking, **fields)


def attention_backend() -> str:
    """Which of our attention backends a kernel_source is. Names without a version follow the GPU generation."""
    name = "lower(kernel_source)"
    return f"""(CASE
        WHEN {name} LIKE '%fa4' OR {name} LIKE '%attention_v4' THEN 'fa4'
        WHEN {name} LIKE '%fa3' OR {name} LIKE '%attention_v3' THEN 'fa3'
        WHEN {name} LIKE '%fa2' THEN 'fa2'
        WHEN {name} LIKE '%trtllm%' OR {name} IN ('torch_flow', 'default') THEN 'trtllm'
        WHEN {name} LIKE '%flashinfer%' THEN 'flashinfer'
        WHEN {name} LIKE '%triton%' THEN 'triton'
        WHEN {name} LIKE '%flash_att%' THEN (CASE WHEN {hopper()} THEN 'fa3' ELSE 'fa2' END)
        END)"""
