"""AIConfigurator (github ai-dynamo/aiconfigurator, Apache-2.0): kernels as serving engines call them.

One folder a GPU, family, framework and version under systems/data (once: GPU/framework/version/TABLE_perf.txt), one
Parquet file a table, times in ms. Of each table the newest version that measured in full is the one to use. How it
measures: CUDA-graph replay, 3 warm-ups, 6 replays averaged, no L2 flush. Only GEMM rotates its weights; attention,
MLA and MoE find again in L2 what fits there (L40S decode times beat DRAM by up to 4.6 times).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast.files import text
from kernelcast_lab.data.checkout import Part, counts, parts, relation
from kernelcast_lab.data.mapping import OpMap, Rules, TableMap, case, hopper, l2_bytes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SOURCE = "aiconfigurator"
LOOKS_FOR = "systems/data/GPU/FAMILY/FRAMEWORK/VERSION/TABLE_perf.parquet"
_PLACES = (
    "aic-core/src/aiconfigurator_core/systems/data",
    "src/aiconfigurator/systems/data",
    "systems/data",
    "data",
    ".",
)
_PATTERNS = ("*/*/*/*/*_perf.parquet", "*/*/*/*_perf.parquet", "*/*/*/*_perf.txt")
_FULL = 0.5  # a version with this share of the most rows measured in full
# Names of files that are not those of tables.
_TABLES = dict.fromkeys(("nccl", "custom_allreduce", "trtllm_alltoall"), "comm")
_TABLES |= {"computescale": "quantize", "scale_matrix": "quantize", "gdn": "linear_attention"}
_TABLES |= {f"{phase}_attention": f"attention_{phase}" for phase in ("context", "generation", "encoder")}
_TABLES |= {f"{wide}{phase}_mla": f"mla_{phase}" for wide in ("", "wideep_") for phase in ("context", "generation")}
_FLOATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8"}
_GEMM = {**_FLOATS, "fp8_static": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4", "sq": "int8"}
_MOE = {**_FLOATS, "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4_wo": "int4"}
_KV = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8"}
_PAGE = "64"  # tokens a page of the KV cache in decode

_DROPS = (("backfill", "origin = 'backfill'"), ("older_version", "origin = 'older'"), ("suspect", "suspect"))


def _table(*ops: OpMap, drops: Rules = (), optional: Mapping[str, str] | None = None, **own: str) -> TableMap:
    fields = {
        "stack": "lower(framework)",
        "version": "version",
        "kernel_source": "kernel_source",
        "rotation": "1",
        **own,
    }
    lacking = {"origin": "'base'", "suspect": "false", **(optional or {})}
    return TableMap(SOURCE, ops, drops=(*_DROPS, *drops), optional=lacking, **fields)


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
    shared = {"batch": "batch_size", "q_heads": "num_heads", "head_dim": "head_dim", "backend": _backend()}
    return OpMap("attention", {**shared, **own}, case("attn_dtype", _FLOATS))


def _self_attention(**own: str) -> TableMap:
    heads = "CASE WHEN num_key_value_heads = 0 THEN num_heads ELSE num_key_value_heads END"  # 0: as many
    shared = {"kv_heads": heads, "kv_dtype": case("kv_cache_dtype", _KV), "window": "window_size", "causal": "true"}
    return _table(_attention(**shared, **own), optional={"window_size": "0", "num_key_value_heads": "num_heads"})


def _mla(**own: str) -> TableMap:
    # num_heads is what one rank has: times follow it, and do not change with tp_size.
    shared = {"batch": "batch_size", "q_heads": "num_heads", "causal": "true", "backend": _backend()}
    call = OpMap("mla", {**shared, "kv_dtype": case("kv_cache_dtype", _KV), **own}, case("mla_dtype", _FLOATS))
    wideep = ("no_kernel_family", "\"table\" LIKE 'wideep%'")  # the projections around attention are inside
    return _table(call, drops=(wideep,))


def _gemm() -> TableMap:
    return _table(
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
    """The library behind a kernel source; TensorRT-LLM's torch flow is CUTLASS unless it says otherwise."""
    names = ("marlin", "cutlass", "deepgemm", "trtllm", "min_latency", "triton", "fused_moe")
    ours = {"min_latency": "trtllm", "fused_moe": "triton"}
    cases = " ".join(f"WHEN lower(kernel_source) LIKE '%{n}%' THEN '{ours.get(n, n)}'" for n in names)
    return f"CASE {cases} ELSE 'cutlass' END"


def _moe() -> TableMap:
    skew = {"balanced": "0", "power_law_1.01": "1.01", "power_law_1.2": "1.2"}
    parameters = {
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
    }
    unknown = f"distribution NOT IN ({', '.join(map(text, skew))})"
    return _table(OpMap("moe", parameters, case("moe_dtype", _MOE)), drops=(("unknown_distribution", unknown),))


def _bmm() -> TableMap:
    """Absorbing MLA's up-projections in decode: a product a head (128 by 512 before attention, 512 by 128 after)."""
    dtype = case("bmm_dtype", _FLOATS)
    sizes = {"batch": "num_heads", "m": "num_tokens"}
    return _table(
        OpMap("bmm", {**sizes, "n": "512", "k": "128"}, dtype, "op_name = 'mla_gen_pre'"),
        OpMap("bmm", {**sizes, "n": "128", "k": "512"}, dtype, "op_name = 'mla_gen_post'"),
    )


def _collectives() -> TableMap:
    """``message_size`` counts elements; nccl-tests' sizes are what our ``bytes`` means for each op."""
    word = "coalesce(nccl_dtype, allreduce_dtype)"
    width = f"(CASE {word} WHEN 'int8' THEN 1 ELSE 2 END)"
    dtype = case(word, {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"})
    parameters = {"bytes": f"CAST(message_size AS BIGINT) * {width}", "world": "num_gpus"}
    names = {name: name for name in ("all_reduce", "all_gather", "reduce_scatter")} | {"alltoall": "all_to_all"}
    return _table(
        *(OpMap(ours, parameters, dtype, f"op_name = '{theirs}'") for theirs, ours in names.items()),
        drops=(("eager", "kernel_source LIKE '%eager'"),),
        rotation="NULL",
        stack="CASE WHEN kernel_source = 'NCCL' THEN 'nccl' ELSE lower(framework) END",
        optional=dict.fromkeys(("nccl_dtype", "allreduce_dtype", "num_gpus", "message_size"), "NULL"),
    )


def _gated_delta() -> TableMap:
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
    conv = {**shared, "channels": channels, "width": "d_conv"}
    gdn = "\"table\" = 'gdn_perf' AND kernel_source LIKE"
    return _table(
        OpMap("gated_delta", {**shared, **delta}, "'bf16'", f"{gdn} '%delta_rule%'"),
        OpMap("causal_conv1d", conv, "'bf16'", f"{gdn} 'causal_conv1d%'"),
        # Convolutions of the keys alone; prefill without a state, decode that reads it in another format.
        drops=(("part_of_op", "lower(framework) = 'trtllm' OR version = '0.5.10'"),),
    )


def _quantize() -> TableMap:
    parameters = {"rows": "m", "cols": "k", "to": case("quant_dtype", {"fp8": "fp8"}), "scale": "'static'"}
    drops = (
        ("difference_of_timings", "op_name = 'compute_scale'"),
        ("not_one_kernel", "lower(framework) = 'sglang'"),  # divide, clamp, cast, copy in PyTorch
    )
    return _table(OpMap("quantize", parameters, "'bf16'"), drops=drops, rotation="NULL")


def tables() -> dict[str, TableMap]:
    """Tables by name. Those without ops have no kernel family: sparse attention, whole modules, DeepEP."""
    # SGLang's prefill runs on the latent, 3.4 times the arithmetic, except by TensorRT-LLM's kernel.
    latent = "CASE WHEN lower(framework) = 'sglang' AND kernel_source NOT LIKE '%trtllm%' THEN 'yes' ELSE 'no' END"
    prefill = {"q_len": "isl", "kv_len": "isl", "page_size": "0"}
    decode = {"q_len": "1", "kv_len": "step + 1", "page_size": _PAGE}
    known = {
        "gemm": _gemm(),
        "attention_context": _self_attention(**prefill),
        "attention_generation": _self_attention(**decode),
        "attention_encoder": _table(_attention(**prefill, causal="false")),
        "moe": _moe(),
        "mla_context": _mla(**prefill, absorbed=latent),
        "mla_generation": _mla(**decode, absorbed="'yes'"),
        "linear_attention": _gated_delta(),
        "mla_bmm": _bmm(),
        "comm": _collectives(),
        "quantize": _quantize(),
    }
    sparse = [f"sparse_attention_{part}" for part in ("context", "generation", "parts")]
    modules = ["mla_context_module", "mla_generation_module", "mhc", "moe_wideep", "mlp_wideep", "comm_deepep"]
    return known | {name: TableMap(SOURCE) for name in (*sparse, *modules)}


def find(path: Path) -> list[Part]:
    """The tables of a checkout; none when it is not one."""
    for place in _PLACES:
        root = path / place
        files = sorted({file for pattern in _PATTERNS for file in root.glob(pattern)}) if root.is_dir() else []
        if files:
            return parts(_labelled(root, file) for file in files)
    return []


def _labelled(root: Path, file: Path) -> tuple[str, Path, Mapping[str, str]]:
    chip, *_, framework, version, name = file.relative_to(root).parts
    stem = name.rsplit("_perf.", 1)[0]
    labels = {"gpu": chip, "framework": framework, "version": version, "table": f"{stem}_perf"}
    return _TABLES.get(stem, stem), file, labels


def rows(connection: DuckDBPyConnection, part: Part) -> str:
    """The part with times in microseconds and ``origin``: base, older, or newer_partial."""
    found = counts(connection)
    origins = _origins(part, {path: found.get(str(path), 0) for path, _ in part.files})
    marked = Part(part.table, tuple((path, {**labels, "origin": origins[path]}) for path, labels in part.files))
    return relation(connection, marked, {"latency_us": "r.latency * 1000"}, needed=("latency",))


def _origins(part: Part, sizes: Mapping[Path, int]) -> dict[Path, str]:
    """By GPU, framework and table: the newest full version is the base."""
    groups: dict[tuple[str, ...], list[tuple[tuple[tuple[int, int], ...], Path]]] = defaultdict(list)
    for path, labels in part.files:
        groups[labels["gpu"], labels["framework"], labels["table"]].append((version_key(labels["version"]), path))
    origins: dict[Path, str] = {}
    for versions in groups.values():
        most = max(sizes[path] for _, path in versions)
        base = max(age for age, path in versions if sizes[path] >= _FULL * most)
        for age, path in versions:
            origins[path] = "base" if age == base else "older" if age < base else "newer_partial"
    return origins


def version_key(version: str) -> tuple[tuple[int, int], ...]:
    """0.5.9 < 0.5.10, 1.3.0rc15 < 1.3.0 < 1.3.0.post1."""
    words = {"rc": -1, "dev": -2, "a": -4, "b": -3, "post": 2}
    tokens = re.findall(r"\d+|[a-z]+", version.lower())
    return (*((1, int(t)) if t.isdigit() else (words.get(t, 0), 0) for t in tokens), (0, 0))
