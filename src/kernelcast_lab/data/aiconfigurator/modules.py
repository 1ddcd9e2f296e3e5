"""Tables of whole attention layers, projections inside, and of the parts of sparse ones.

``num_heads`` is what one rank has. A layer is timed as modelling code runs it. Three traps:

- vLLM's collector ran norms and rotations as PyTorch's own chains of kernels, where an engine has one each, until
  ``enable_engine_fused_ops`` (collector/vllm/utils.py), which of the latent layers only B200's campaign had, and of
  DeepSeek's sparse ones none: these calls are not ``fused``.
- Prefills of SGLang's and vLLM's sparse layers, and of SGLang's wide-EP layer, are timed without a CUDA graph: flat at
  0.3 to 2.3 ms up to thousands of tokens. What is well above that is the GPU's time.
- TensorRT-LLM has no kernel for MiniMax M3's blocks before Blackwell (seconds for a decode), and compiles the one that
  it has there while it is timed (3 to 400 ms, whatever the tokens).
"""

from __future__ import annotations

from kernelcast_lab.data.aiconfigurator.common import KV, PAGE, attention_backend, table
from kernelcast_lab.data.mapping import OpMap, Rules, TableMap, blackwell, case, hopper

_LINEAR = {"bfloat16": "bf16", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
_PREFILL = {"q_len": "isl", "kv_len": "isl + step", "page_size": "0"}
_DECODE = {"q_len": "1", "kv_len": "step + 1", "page_size": PAGE}
_SHARED = {"batch": "batch_size", "q_heads": "num_heads", "causal": "true", "kv_dtype": case("kv_cache_dtype", KV)}
_FEW_TOKENS, _HOST_MARGIN = 256, 1.5
_DSA, _V4, _MSA = (f"\"table\" LIKE '{name}%'" for name in ("dsa", "dsv4", "msa"))
_WIDE_EP = "\"table\" LIKE 'wideep%'"
_VLLM, _SGLANG = (f"lower(framework) = '{name}'" for name in ("vllm", "sglang"))


def _backend() -> str:
    """As of single kernels, and FlashMLA, which TensorRT-LLM's sparse layers run on Hopper (its
    examples/models/core/deepseek_v3/README.md); vLLM's FLASH_ATTN on Blackwell is FlashAttention 4."""
    name = "lower(kernel_source)"
    return f"""(CASE
        WHEN {name} LIKE '%flashmla%' OR {name} LIKE '%flash_mla%' THEN 'flashmla'
        WHEN {name} = 'default' AND {_DSA} AND {hopper()} THEN 'flashmla'
        WHEN {name} LIKE '%msaimpl' OR {name} LIKE 'msa_fmha%' THEN 'msa'
        WHEN {name} = 'flash_attn' AND {blackwell()} THEN 'fa4'
        WHEN {name} LIKE 'flash_attn%' AND {hopper()} THEN 'fa3'
        ELSE {attention_backend()} END)"""


def _host_bound(condition: str) -> tuple[str, str]:
    """Calls timed without a graph, as long as the host takes for them: of a few tokens it is all that is seen."""
    alike = "gpu, framework, model, op_name, kernel_source, gemm_type, kv_cache_dtype, num_heads"
    few = f"batch_size * isl <= {_FEW_TOKENS}"
    host_us = f"median(latency_us) FILTER ({few} AND origin = 'base') OVER (PARTITION BY {alike})"
    return "eager", f"({condition}) AND ({few} OR latency_us < {_HOST_MARGIN} * {host_us})"


def _mla(lengths: dict[str, str], absorbed: str) -> TableMap:
    cells = {"backend": _backend(), "absorbed": absorbed, "fused": f"NOT ({_VLLM}) OR _gpu = 'b200_sxm'"}
    return table(OpMap("mla_layer", {**_SHARED, **lengths, **cells}, case("gemm_type", _LINEAR)))


def _wide_ep(lengths: dict[str, str], absorbed: str) -> OpMap:
    """SGLang's layer for wide expert parallelism, whose rows lie among those of single kernels."""
    cells = {"backend": _backend(), "absorbed": absorbed}
    return OpMap("mla_layer", {**_SHARED, **lengths, **cells}, "'fp8_block'", _WIDE_EP)


def wide_ep_prefill() -> OpMap:
    return _wide_ep(_PREFILL, "'no'")


def wide_ep_decode() -> OpMap:
    """``isl`` is the length of the cache."""
    return _wide_ep({**_DECODE, "kv_len": "isl + 1"}, "'yes'")


WIDE_EP_HOST = _host_bound(f"{_WIDE_EP} AND op_name = 'mla_context'")


def _dsa(lengths: dict[str, str]) -> OpMap:
    glm = "architecture LIKE 'Glm%'"
    sizes = {"hidden": (6144, 7168), "q_rank": (2048, 1536), "nope_dim": (192, 128), "v_dim": (256, 128)}
    sizes |= {"index_heads": (32, 64)}
    cells = {
        **{name: f"CASE WHEN {glm} THEN {of_glm} ELSE {other} END" for name, (of_glm, other) in sizes.items()},
        "indexer": "op_name NOT LIKE '%skip_indexer'",
        "path": "CASE WHEN kernel_source LIKE '%dense_mha%' THEN 'dense' ELSE 'sparse' END",
        "backend": _backend(),
        "fused": f"NOT ({_VLLM})",
    }
    return OpMap("dsa_layer", {**_SHARED, **lengths, **cells}, case("gemm_type", _LINEAR), _DSA)


def _v4(lengths: dict[str, str]) -> OpMap:
    """DeepSeek V4's Flash and Pro. FlashMLA is given all heads of the model, those of other ranks as zeros."""
    flash = "model LIKE '%Flash%'"
    sizes = {"hidden": (4096, 7168), "q_rank": (1024, 1536), "index_topk": (512, 1024)}
    cells = {
        **{name: f"CASE WHEN {flash} THEN {of_flash} ELSE {pro} END" for name, (of_flash, pro) in sizes.items()},
        "padded_heads": f"CASE WHEN lower(framework) = 'trtllm' THEN NULL WHEN {flash} THEN 64 ELSE 128 END",
        "compress_ratio": "compress_ratio",
        "backend": _backend(),
    }
    return OpMap("compressed_layer", {**_SHARED, **lengths, **cells}, case("gemm_type", _LINEAR), _V4)


def _msa(lengths: dict[str, str]) -> OpMap:
    cells = {"kv_heads": "greatest(1, num_heads // 16)", "backend": _backend()}
    return OpMap("block_sparse_layer", {**_SHARED, **lengths, **cells}, case("gemm_type", _LINEAR), _MSA)


def _sparse(lengths: dict[str, str], *drops: tuple[str, str]) -> TableMap:
    plain = ("reference_code", f"{_MSA} AND kernel_source = 'default'")
    each = ("prefill_of_one", "isl = 1 AND step > 0 AND op_name LIKE '%context%'")
    compiling = ("eager", f"{_MSA} AND lower(framework) = 'trtllm'")
    ops = _dsa(lengths), _v4(lengths), _msa(lengths)
    return table(*ops, drops=(plain, each, compiling, *drops), optional={"compress_ratio": "NULL"})


def _parts() -> TableMap:
    """Kernels of sparse layers alone. SGLang's collector gives every token of a request the keys of its last one, but
    for scores, and FlashMLA on Blackwell 128 heads where a model has 64; vLLM's builds what the engine would."""
    glm = "architecture LIKE 'Glm%'"
    shared = {"batch": "batch_size", **_PREFILL, "compress_ratio": "compress_ratio"}
    shared["page_size"] = f"CASE WHEN {glm} THEN 0 ELSE {PAGE} END"
    whole = {"causal": f"NOT ({_SGLANG})"}
    topk = f"CASE WHEN {glm} THEN 2048 WHEN model LIKE '%Flash%' THEN 512 ELSE 1024 END"
    attended = {
        "topk": f"CASE WHEN {glm} THEN 2048 ELSE 0 END",
        "window": f"CASE WHEN {glm} THEN 0 ELSE 128 END",
        "q_heads": f"CASE WHEN {glm} AND {blackwell()} THEN 128 ELSE num_heads END",
        "rope_dim": f"CASE WHEN {glm} THEN 64 ELSE 0 END",
        "kv_dtype": f"CASE WHEN {glm} THEN 'bf16' ELSE 'fp8' END",
        "backend": "'flashmla'",
    }
    drops: Rules = (("degenerate_values", "score_mode LIKE '%flat'"),)
    return table(
        OpMap("mqa_logits", {**shared, "causal": "true", "index_heads": f"CASE WHEN {glm} THEN 32 ELSE 64 END"},
              "'fp8'", "op_name LIKE '%mqa_logits%'"),
        OpMap("index_topk", {**shared, **whole, "topk": topk}, "'bf16'", "op_name LIKE '%topk%'"),
        OpMap("sparse_mla", {**shared, **whole, **attended}, "'bf16'", "op_name LIKE '%attn_module'"),
        drops=drops,
    )  # fmt: skip


def tables() -> dict[str, TableMap]:
    """Tables by name."""
    latent = "kernel_source IN ('FLASHINFER_MLA', 'FLASHMLA', 'FLASH_ATTN_MLA', 'TRITON_MLA')"
    eager = f"({_DSA} AND ({_VLLM} OR {_SGLANG})) OR ({_MSA} AND {_SGLANG})"
    return {
        "mla_context_module": _mla(_PREFILL, f"CASE WHEN {latent} THEN 'yes' ELSE 'no' END"),
        "mla_generation_module": _mla(_DECODE, "'yes'"),
        "sparse_attention_context": _sparse(_PREFILL, _host_bound(eager)),
        "sparse_attention_generation": _sparse(_DECODE),
        "sparse_attention_parts": _parts(),
    }
