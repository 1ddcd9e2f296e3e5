"""AIConfigurator (github ai-dynamo/aiconfigurator, Apache-2.0): kernels as serving engines call them.

One folder a GPU, family, framework and version under systems/data, one Parquet file a table, times in ms. How it
measures: CUDA-graph replay, 3 warm-ups, 6 replays averaged, no L2 flush. Only GEMM rotates its weights; attention,
MLA and MoE find again in L2 what fits there (L40S decode times beat DRAM by up to 4.6 times).
"""

from __future__ import annotations

from kernelcast_lab.data.mapping import OpMap, TableMap, case, hopper, l2_bytes

SOURCE = "aiconfigurator"
_FLOATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8"}
_GEMM = {**_FLOATS, "fp8_static": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4", "sq": "int8"}
_MOE = {**_FLOATS, "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4"}
_KV = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8"}
_PAGE = "64"  # tokens a page of the KV cache in decode

_STACK = "lower(framework)"
_OPTIONAL = {"origin": "'base'", "suspect": "false"}
_DROPS = (("backfill", "origin = 'backfill'"), ("older_version", "origin = 'older'"), ("suspect", "suspect"))


def _table(*ops: OpMap, drops: tuple[tuple[str, str], ...] = (), **more: object) -> TableMap:
    optional = {**_OPTIONAL, **more.pop("optional", {})}  # type: ignore[dict-item]
    fields: dict[str, object] = {"stack": _STACK, "version": "version", "kernel_source": "kernel_source", **more}
    return TableMap(SOURCE, ops, drops=(*_DROPS, *drops), optional=optional, **fields)  # type: ignore[arg-type]


def _backend() -> str:
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


def _attention(**own: str) -> OpMap:
    shared = {
        "batch": "batch_size",
        "q_heads": "num_heads",
        "head_dim": "head_dim",
        "backend": _backend(),
    }
    return OpMap("attention", {**shared, **own}, case("attn_dtype", _FLOATS))


def _self_attention(**own: str) -> OpMap:
    heads = "CASE WHEN num_key_value_heads = 0 THEN num_heads ELSE num_key_value_heads END"  # 0: as many
    return _attention(kv_heads=heads, kv_dtype=case("kv_cache_dtype", _KV), window="window_size", causal="true", **own)


def _mla(**own: str) -> OpMap:
    # num_heads is what one rank has: times follow it, and do not change with tp_size.
    shared = {
        "batch": "batch_size",
        "q_heads": "num_heads",
        "kv_dtype": case("kv_cache_dtype", _KV),
        "causal": "true",
        "backend": _backend(),
    }
    return OpMap("mla", {**shared, **own}, case("mla_dtype", _FLOATS))


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
    """The library behind a kernel source; TensorRT-LLM's torch flow is CUTLASS unless it says otherwise."""
    names = ("marlin", "cutlass", "deepgemm", "trtllm", "min_latency", "triton", "fused_moe")
    ours = {"min_latency": "trtllm", "fused_moe": "triton"}
    cases = " ".join(f"WHEN lower(kernel_source) LIKE '%{n}%' THEN '{ours.get(n, n)}'" for n in names)
    return f"CASE {cases} ELSE 'cutlass' END"


def _moe() -> OpMap:
    skew = {"balanced": "0", "power_law_1.01": "1.01", "power_law_1.2": "1.2"}
    return OpMap(
        "moe",
        {
            "tokens": "num_tokens",
            "hidden": "hidden_size",
            "inter": "inter_size",
            "experts": "num_experts",
            "topk": "topk",
            "tp": "moe_tp_size",
            "ep": "moe_ep_size",
            "skew": case("distribution", skew),
            "gated": f"NOT ({_ungated()})",
            "backend": _moe_backend(),
        },
        case("moe_dtype", _MOE),
    )


def _bmm() -> tuple[OpMap, OpMap]:
    """Absorbing MLA's up-projections in decode: a product a head (128 by 512 before attention, 512 by 128 after)."""
    dtype = case("bmm_dtype", _FLOATS)
    sizes = {"batch": "num_heads", "m": "num_tokens"}
    return (
        OpMap("bmm", {**sizes, "n": "512", "k": "128"}, dtype, "op_name = 'mla_gen_pre'"),
        OpMap("bmm", {**sizes, "n": "128", "k": "512"}, dtype, "op_name = 'mla_gen_post'"),
    )


def _collectives() -> tuple[OpMap, ...]:
    """``message_size`` counts elements; nccl-tests' sizes are what our ``bytes`` means for each op."""
    word = "coalesce(nccl_dtype, allreduce_dtype)"
    width = f"(CASE {word} WHEN 'int8' THEN 1 ELSE 2 END)"
    dtype = case(word, {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"})
    parameters = {"bytes": f"CAST(message_size AS BIGINT) * {width}", "world": "num_gpus"}
    names = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
             "alltoall": "all_to_all"}  # fmt: skip
    return tuple(OpMap(ours, parameters, dtype, f"op_name = '{theirs}'") for theirs, ours in names.items())


def _gated_delta() -> tuple[OpMap, OpMap]:
    """Qwen3.5's linear attention: the kernels of prefill and decode, and the convolution over queries, keys, values.

    The state is fp32 in SGLang's collector. vLLM's asks for bf16, but its decode takes as long and leaves L2 at the
    same batches, so it is taken for fp32 too. SGLang's prefill has the norms inside.
    """
    shared = {"batch": "batch_size", "q_len": "seq_len"}
    delta = {
        "key_heads": "num_k_heads",
        "value_heads": "num_v_heads",
        "key_dim": "head_k_dim",
        "value_dim": "head_v_dim",
        "state_dtype": "'fp32'",
        "qk_norm": "lower(framework) = 'sglang'",
        "kernel": "CASE WHEN phase = 'context' THEN 'chunked' ELSE 'recurrent' END",
        "backend": "CASE WHEN kernel_source LIKE '%flashinfer' THEN 'flashinfer' ELSE 'triton' END",
    }
    channels = "2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim"
    gdn = "\"table\" = 'gdn_perf' AND kernel_source LIKE"
    return (
        OpMap("gated_delta", {**shared, **delta}, "'bf16'", f"{gdn} '%delta_rule%'"),
        OpMap(
            "causal_conv1d", {**shared, "channels": channels, "width": "d_conv"}, "'bf16'", f"{gdn} 'causal_conv1d%'"
        ),
    )


def tables() -> dict[str, TableMap]:
    """Tables by name. Those without ops have no kernel family: sparse attention, whole modules, DeepEP."""
    gemm = OpMap("gemm", {"m": "m", "n": "n", "k": "k"}, case("gemm_dtype", _GEMM))
    quantize = OpMap(
        "quantize", {"rows": "m", "cols": "k", "to": case("quant_dtype", {"fp8": "fp8"}), "scale": "'static'"}, "'bf16'"
    )
    wideep = ("no_kernel_family", "\"table\" LIKE 'wideep%'")  # the projections around attention are inside
    # SGLang's prefill runs on the latent, 3.4 times the arithmetic, except by TensorRT-LLM's kernel.
    latent = "CASE WHEN lower(framework) = 'sglang' AND kernel_source NOT LIKE '%trtllm%' THEN 'yes' ELSE 'no' END"
    no_window = {"window_size": "0", "num_key_value_heads": "num_heads"}
    known = {
        "gemm": _table(
            gemm,
            drops=(("eager", "lower(framework) = 'vllm' AND gemm_dtype = 'fp8_block'"),),
            rotation=_gemm_rotation(),
            # A static scale leaves the quantisation of the input out: another kernel, not a repeat.
            kernel_source="CASE WHEN gemm_dtype = 'fp8_static' THEN kernel_source || ' (static scale)'"
            " ELSE kernel_source END",
        ),
        "attention_context": _table(
            _self_attention(q_len="isl", kv_len="isl", page_size="0"), optional=no_window, rotation="1"
        ),
        "attention_generation": _table(
            _self_attention(q_len="1", kv_len="step + 1", page_size=_PAGE), optional=no_window, rotation="1"
        ),
        "attention_encoder": _table(_attention(q_len="isl", kv_len="isl", causal="false", page_size="0"), rotation="1"),
        "moe": _table(
            _moe(),
            drops=(("unknown_distribution", "distribution NOT IN ('balanced', 'power_law_1.01', 'power_law_1.2')"),),
            rotation="1",
        ),
        "mla_context": _table(
            _mla(q_len="isl", kv_len="isl", page_size="0", absorbed=latent), drops=(wideep,), rotation="1"
        ),
        "mla_generation": _table(
            _mla(q_len="1", kv_len="step + 1", page_size=_PAGE, absorbed="'yes'"), drops=(wideep,), rotation="1"
        ),
        "linear_attention": _table(
            *_gated_delta(),
            # Convolutions of the keys alone; prefill without a state, decode that reads it in another format.
            drops=(("part_of_op", "lower(framework) = 'trtllm' OR version = '0.5.10'"),),
            rotation="1",
        ),
        "mla_bmm": _table(*_bmm(), rotation="1"),
        "comm": _table(
            *_collectives(),
            drops=(("eager", "kernel_source LIKE '%eager'"),),
            stack="CASE WHEN kernel_source = 'NCCL' THEN 'nccl' ELSE lower(framework) END",
            optional={"nccl_dtype": "NULL", "allreduce_dtype": "NULL", "num_gpus": "NULL", "message_size": "NULL"},
        ),
        "quantize": _table(
            quantize,
            drops=(
                ("difference_of_timings", "op_name = 'compute_scale'"),
                ("not_one_kernel", "lower(framework) = 'sglang'"),  # divide, clamp, cast, copy in PyTorch
            ),
        ),
    }
    other = (
        "sparse_attention_context",
        "sparse_attention_generation",
        "sparse_attention_parts",
        "mla_context_module",
        "mla_generation_module",
        "mhc",
        "moe_wideep",
        "mlp_wideep",
        "comm_deepep",
    )
    return known | {name: _table() for name in other}
