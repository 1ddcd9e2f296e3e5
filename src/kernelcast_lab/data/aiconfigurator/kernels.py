"""Tables of single kernels, or of one layer's kernel as an engine calls it."""

from __future__ import annotations

from kernelcast.files import text
from kernelcast_lab.data.aiconfigurator.common import EXPERT_SIZES, FLOATS, KV, PAGE, attention_backend, table
from kernelcast_lab.data.aiconfigurator.modules import WIDE_EP_HOST, wide_ep_decode, wide_ep_prefill
from kernelcast_lab.data.mapping import OpMap, TableMap, blackwell, case, l2_bytes

_GEMM = {**FLOATS, "fp8_static": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4", "sq": "int8"}
_MOE = {**FLOATS, "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4", "w4a16_mxfp4": "mxfp4",
        "w4a8_mxfp4_mxfp8": "mxfp4_fp8"}  # fmt: skip


def _attention(**condition: str) -> OpMap:
    shared = {"batch": "batch_size", "q_heads": "num_heads", "head_dim": "head_dim", "backend": attention_backend()}
    return OpMap("attention", {**shared, **condition}, case("attn_dtype", FLOATS))


def _self_attention(**condition: str) -> TableMap:
    heads = "CASE WHEN num_key_value_heads = 0 THEN num_heads ELSE num_key_value_heads END"  # 0: as many
    shared = {"kv_heads": heads, "kv_dtype": case("kv_cache_dtype", KV), "window": "window_size", "causal": "true"}
    return table(_attention(**shared, **condition), optional={"window_size": "0", "num_key_value_heads": "num_heads"})


def _mla(wide_ep: OpMap, **condition: str) -> TableMap:
    # num_heads is what one rank has: times follow it, and do not change with tp_size.
    shared = {"batch": "batch_size", "q_heads": "num_heads", "causal": "true", "backend": attention_backend()}
    parameters = {**shared, "kv_dtype": case("kv_cache_dtype", KV), **condition}
    call = OpMap("mla", parameters, case("mla_dtype", FLOATS), f"NOT ({wide_ep.where})")
    return table(call, wide_ep, drops=(WIDE_EP_HOST,), optional={"model": "NULL", "gemm_type": "NULL"})


def _gemm() -> TableMap:
    return table(
        OpMap("gemm", {"m": "m", "n": "n", "k": "k"}, case("gemm_dtype", _GEMM)),
        drops=(("eager", "lower(framework) = 'vllm' AND gemm_dtype = 'fp8_block'"),),
        rotation=_gemm_rotation(),
        # A static scale leaves the quantisation of the input out: another kernel, not a repeat.
        kernel_source="CASE WHEN gemm_dtype = 'fp8_static' THEN kernel_source || ' (static scale)'"
        " ELSE kernel_source END",
    )


def _gemm_rotation() -> str:
    """Sets of weights that take turns: 6; TensorRT-LLM's collector makes as many as fill L2, at most 5."""
    width = "(CASE WHEN gemm_dtype IN ('bfloat16', 'float16') THEN 2 WHEN gemm_dtype IN ('nvfp4', 'int4_wo') THEN 0.5"
    weights = f"(CAST(n AS DOUBLE) * k * {width} ELSE 1 END))"
    fills = f"greatest(1, least(5, ceil({l2_bytes()} / {weights})))"
    return f"CASE WHEN lower(framework) = 'trtllm' THEN {fills} ELSE 6 END"


def _ungated() -> str:
    """Nemotron-H's experts have no gate in any stack: its times fit two matrices, not three; one stack says so."""
    shapes = "(1024, 2688, 512), (2048, 5120, 512), (4096, 2688, 512), (8192, 5120, 512), (2688, 1856, 128)"
    return f"kernel_source LIKE '%nongated%' OR (hidden_size, inter_size, num_experts) IN ({shapes})"


def _moe_backend() -> str:
    """The library behind a kernel source; TensorRT-LLM's torch flow is CUTLASS unless it says otherwise, but of mxfp4:
    its generated kernels on Blackwell, Triton's before (tensorrt_llm/_torch/modules/fused_moe/create_moe.py)."""
    names = ("marlin", "cutlass", "deepgemm", "trtllm", "min_latency", "triton", "fused_moe")
    ours = {"min_latency": "trtllm", "fused_moe": "triton"}
    cases = " ".join(f"WHEN lower(kernel_source) LIKE '%{n}%' THEN '{ours.get(n, n)}'" for n in names)
    flow = f"CASE WHEN moe_dtype NOT LIKE '%mxfp4%' THEN 'cutlass' WHEN {blackwell()} THEN 'trtllm' ELSE 'triton' END"
    return f"CASE {cases} ELSE {flow} END"


def _moe() -> TableMap:
    skew = {"balanced": "0", "power_law_1.01": "1.01", "power_law_1.2": "1.2"}
    parameters = {
        **EXPERT_SIZES,
        "skew": case("distribution", skew),
        "gated": f"NOT ({_ungated()})",
        "backend": _moe_backend(),
    }
    unknown = f"distribution NOT IN ({', '.join(map(text, skew))})"
    # One of four ranks takes 0.9 of all experts' time with 8,192 tokens evenly routed, on every GPU but the B200, and
    # Marlin's there too; 0.49 in SGLang 0.5.14: all tokens were sent to it.
    one_rank = "lower(framework) = 'sglang' AND version = '0.5.10' AND moe_ep_size > 1"
    drops = (("unknown_distribution", unknown), ("other_shape", one_rank))
    return table(OpMap("moe", parameters, case("moe_dtype", _MOE)), drops=drops)


def _bmm() -> TableMap:
    """Absorbing MLA's up-projections in decode: a product a head (128 by 512 before attention, 512 by 128 after)."""
    dtype = case("bmm_dtype", FLOATS)
    sizes = {"batch": "num_heads", "m": "num_tokens"}
    return table(
        OpMap("bmm", {**sizes, "n": "512", "k": "128"}, dtype, "op_name = 'mla_gen_pre'"),
        OpMap("bmm", {**sizes, "n": "128", "k": "512"}, dtype, "op_name = 'mla_gen_post'"),
    )


def _collectives() -> TableMap:
    """``message_size`` counts elements; nccl-tests' sizes are what our ``bytes`` means for each op."""
    value = "coalesce(nccl_dtype, allreduce_dtype)"
    width = f"(CASE {value} WHEN 'int8' THEN 1 ELSE 2 END)"
    dtype = case(value, {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"})
    # More than a pair of the L40S lies behind host bridges that do not pass traffic between GPUs: 5 GB/s each of four
    # where a pair has 20, 1.5 of eight. That is one host, not the card.
    shared = "CASE WHEN _gpu = 'l40s' AND num_gpus > 2 THEN 'pcie4_shared' END"
    parameters = {"bytes": f"CAST(message_size AS BIGINT) * {width}", "world": "num_gpus", "fabric": shared}
    names = {name: name for name in ("all_reduce", "all_gather", "reduce_scatter")} | {"alltoall": "all_to_all"}
    return table(
        *(OpMap(ours, parameters, dtype, f"op_name = '{theirs}'") for theirs, ours in names.items()),
        drops=(("eager", "kernel_source LIKE '%eager'"),),
        rotation="NULL",
        stack="CASE WHEN kernel_source = 'NCCL' THEN 'nccl' ELSE lower(framework) END",
        optional=dict.fromkeys(("nccl_dtype", "allreduce_dtype", "num_gpus", "message_size"), "NULL"),
    )


def _quantize() -> TableMap:
    parameters = {"rows": "m", "cols": "k", "to": case("quant_dtype", {"fp8": "fp8"}), "scale": "'static'"}
    drops = (
        ("difference_of_timings", "op_name = 'compute_scale'"),
        ("not_one_kernel", "lower(framework) = 'sglang'"),  # divide, clamp, cast, copy in PyTorch
    )
    return table(OpMap("quantize", parameters, "'bf16'"), drops=drops, rotation="NULL")


def tables() -> dict[str, TableMap]:
    """Tables by name."""
    # SGLang's prefill runs on the latent, 3.4 times the arithmetic, except by TensorRT-LLM's kernel.
    latent = "CASE WHEN lower(framework) = 'sglang' AND kernel_source NOT LIKE '%trtllm%' THEN 'yes' ELSE 'no' END"
    prefill = {"q_len": "isl", "kv_len": "isl", "page_size": "0"}
    decode = {"q_len": "1", "kv_len": "step + 1", "page_size": PAGE}
    return {
        "gemm": _gemm(),
        "attention_context": _self_attention(**prefill),
        "attention_generation": _self_attention(**decode),
        "attention_encoder": table(_attention(**prefill, causal="false")),
        "moe": _moe(),
        "mla_context": _mla(wide_ep_prefill(), **prefill, absorbed=latent),
        "mla_generation": _mla(wide_ep_decode(), **decode, absorbed="'yes'"),
        "mla_bmm": _bmm(),
        "comm": _collectives(),
        "quantize": _quantize(),
    }


# ---- Tables of linear attention: gated delta rule, Kimi delta attention, and the convolutions before them and
# Mamba-2. The collectors say what each row timed (collector/FRAMEWORK/collect_gdn.py, collect_kda.py,
# collect_mamba2.py).


_SHARED = {
    "batch": "batch_size",
    "q_len": "seq_len",
    "kernel": "CASE WHEN phase = 'context' THEN 'chunked' ELSE 'recurrent' END",
}
# TensorRT-LLM has Dao-AILab's convolution; of Qwen3.5 it was timed over the keys alone.
_DAO = "lower(framework) = 'trtllm'"
_OPTIONAL = dict.fromkeys(
    ("num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "nheads", "head_dim", "n_groups", "d_state"), "NULL"
)


def _gated_delta() -> OpMap:
    """Qwen3.5's. The state is fp32 in SGLang's collector. vLLM's sets bf16, but its decode takes as long and leaves L2
    at the same batches, so it is taken for fp32 too. SGLang's prefill has the norms inside; TensorRT-LLM's is timed
    without a state."""
    parameters = {
        **_SHARED,
        "key_heads": "num_k_heads",
        "value_heads": "num_v_heads",
        "key_dim": "head_k_dim",
        "value_dim": "head_v_dim",
        "state_dtype": "'fp32'",
        "qk_norm": "lower(framework) = 'sglang'",
        "stateless": "lower(framework) = 'trtllm'",
        "backend": "CASE WHEN kernel_source LIKE '%flashinfer' THEN 'flashinfer' ELSE 'triton' END",
    }
    return OpMap("gated_delta", parameters, "'bf16'", "\"table\" = 'gdn_perf' AND kernel_source LIKE '%delta_rule%'")


def _kda() -> OpMap:
    """Kimi K3's. Fused decodes have the convolution inside, and the norm (in SGLang's checks where heads are 12)."""
    parameters = {
        **_SHARED,
        "heads": "num_v_heads",
        "key_dim": "head_k_dim",
        "value_dim": "head_v_dim",
        "width": "d_conv",
        "fused": "kernel_source LIKE '%kda%decode%' AND kernel_source NOT LIKE '%packed%'",
        "state_dtype": "'fp32'",
        "backend": "CASE WHEN kernel_source LIKE 'flashkda%' THEN 'flashkda' ELSE 'triton' END",
    }
    timed = "(kernel_source LIKE '%kda%' OR kernel_source LIKE '%delta_rule%')"
    return OpMap("kda", parameters, "'bf16'", f"\"table\" = 'kda_perf' AND {timed}")


def _convolutions() -> OpMap:
    """Over queries, keys and values; in Mamba-2 over x, B and C. Kimi's prefill has a kernel for each of the three."""
    packed = "2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim"
    channels = f"""CASE WHEN "table" = 'mamba2_perf' THEN nheads * head_dim + 2 * n_groups * d_state
        WHEN {_DAO} THEN num_k_heads * head_k_dim ELSE {packed} END"""
    parameters = {
        **_SHARED,
        "channels": channels,
        "width": "d_conv",
        "parts": "CASE WHEN kernel_source LIKE '%qkv3' THEN 3 ELSE 1 END",
        "backend": f"CASE WHEN {_DAO} THEN 'cuda' ELSE 'triton' END",
    }
    return OpMap("causal_conv1d", parameters, "'bf16'", "kernel_source LIKE 'causal_conv1d%'")


def linear_tables() -> dict[str, TableMap]:
    drops = (
        # Kernels that SGLang replaced, on the A100 alone: they would speak for what it runs there now.
        ("older_kernels", "version = '0.5.10'"),
        # A decode that reads its state in bf16 and writes it in fp32, which no engine does.
        ("part_of_op", f"{_DAO} AND kernel_source = 'fused_recurrent_gated_delta_rule'"),
        # Three launches with copies of metadata between them: no less than 400 to 1,400 us.
        ("eager", "lower(framework) = 'vllm' AND kernel_source = 'causal_conv1d_fn_qkv3'"),
        # One launch a graph: its start is inside, twice the time of the same kernel among Qwen3.5's.
        ("timed_alone", "\"table\" = 'kda_perf' AND kernel_source = 'causal_conv1d_update' AND phase = 'generation'"),
        # Above 100 us up to five times the H100's time of the same kernel, and up to three times apart when repeated:
        # something else ran on that machine. Shorter calls agree with the H100's.
        ("disturbed", "_gpu = 'h200_sxm' AND version = '0.5.14' AND latency_us > 100"),
    )
    return {"linear_attention": table(_gated_delta(), _kda(), _convolutions(), drops=drops, optional=_OPTIONAL)}
