"""Tables of wide expert parallelism: DeepEP, the experts behind it, DeepSeek-V4's hyper-connections.

comm_deepep is DeepEP's own test, a row a setting with both directions: ``num_token`` counts the tokens of one rank.
mhc times both places of a layer (before and behind attention, and the feed-forward part) as one.
"""

from __future__ import annotations

from dataclasses import replace

from kernelcast.files import text
from kernelcast_lab.data.aiconfigurator import kernels
from kernelcast_lab.data.aiconfigurator.common import EXPERT_SIZES, SOURCE, table
from kernelcast_lab.data.mapping import OpMap, TableMap, case

_LINK = "ib_ndr"  # DeepEP's rows of one campaign reach 43 to 48 GB/s a GPU between nodes: ports of 400 Gb/s
_PLACES = 2  # of a layer


def _deepep() -> TableMap:
    """Between nodes only an older version was measured, on H100; the same numbers stand under H200.

    Eight nodes by the normal kernels run at 15 GB/s a GPU, a third of what two and four nodes of the same campaign
    reach and of what DeepEP publishes for 64 GPUs (51 GB/s counting a token's own node); the low-latency kernels reach
    44 GB/s there, so that it is no fault of the ports.
    """
    low = "op_name = 'll'"
    world = "node_num * CASE WHEN _gpu IN ('gb200', 'gb300') THEN 4 ELSE 8 END"  # GPUs of a test's node
    sizes = {"tokens": "num_token", "hidden": "hidden_size", "topk": "num_topk", "experts": "num_experts"}
    setting = {
        "world": world,
        "nodes": "node_num",
        "fabric": f"CASE WHEN node_num > 1 THEN {text(_LINK)} END",
        "mode": f"CASE WHEN {low} THEN 'low_latency' ELSE 'normal' END",
        "routing": "'random'",
    }

    def way(name: str, dtype: str) -> OpMap:
        took = f"CASE WHEN {low} THEN {name}_avg_t_us ELSE {name}_transmit_us + {name}_notify_us END"
        sms = f"coalesce({name}_sms, 24)"
        return OpMap(f"deepep_{name}", {**sizes, **setting, "sms": sms}, text(dtype), latency_us=took)

    columns = ("_sms", "_avg_t_us", "_transmit_us", "_notify_us")
    drops = (
        ("copied", "origin <> 'base' AND gpu <> 'h100_sxm'"),
        ("older_version", "origin <> 'base' AND node_num = 1"),
        ("unclear_fabric", f"node_num > 4 AND NOT {low}"),
    )
    lacking = {f"{name}{column}": "NULL" for name in ("dispatch", "combine") for column in columns}
    result = table(way("dispatch", "fp8_block"), way("combine", "bf16"), rotation="NULL", optional=lacking)
    return replace(result, drops=drops)


def _alltoall() -> TableMap:
    """TensorRT-LLM's exchange over NVLink stands among the collectives. What comes back has 16 bits, or 4."""
    comm = kernels.tables()["comm"]
    formats = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}
    parameters = {
        "tokens": "num_tokens",
        "hidden": "hidden_size",
        "topk": "topk",
        "experts": "num_experts",
        "world": "moe_ep_size",
        "routing": "distribution",
        "kernel": "CASE WHEN kernel_source LIKE '%OneSided' THEN 'one_sided' ELSE 'two_sided' END",
    }
    back = "CASE WHEN op_name LIKE '%low_precision' THEN 'nvfp4' ELSE 'bf16' END"
    ops = (
        OpMap("alltoall_prepare", parameters, "'bf16'", "op_name = 'alltoall_prepare'"),
        OpMap("alltoall_dispatch", parameters, case("moe_dtype", formats), "op_name = 'alltoall_dispatch'"),
        OpMap("alltoall_combine", parameters, back, "op_name LIKE 'alltoall_combine%'"),
    )
    columns = ("moe_dtype", "num_tokens", "hidden_size", "topk", "num_experts", "moe_ep_size", "distribution")
    return replace(comm, ops=(*comm.ops, *ops), optional={**comm.optional, **dict.fromkeys(columns, "NULL")})


def _experts() -> TableMap:
    """``num_tokens`` counts those of all ranks; times are the busiest rank's.

    SGLang's prefill was timed without a CUDA graph (floors near 0.4 ms on Hopper): long calls are kept. It hands a rank
    the tokens of all, those of no use to it too. Where tokens do not fill blocks of 128 an expert, its uniform rows
    leave out the padding, and so most experts.
    """
    alpha = "regexp_extract(distribution, '^power_law_([0-9.]+?)(_eplb)?$', 1)"
    backend = {"moe_context": "deepep_contiguous", "moe_generation": "deepep_masked"}
    parameters = {
        **EXPERT_SIZES,
        "skew": f"CASE WHEN distribution IN ('uniform', 'balanced') THEN 0 ELSE CAST({alpha} AS DOUBLE) END",
        "gated": "true",
        "slots": "CASE WHEN num_slots > num_experts THEN num_slots END",
        "eplb": "distribution LIKE '%eplb'",
        "received": "CASE op_name WHEN 'moe_context' THEN num_tokens WHEN 'moe_generation' THEN NULL"
        " ELSE rank0_num_tokens END",
        "backend": case("op_name", backend, "'wideep_cutlass'"),
    }
    drops = (
        ("unknown_distribution", "distribution LIKE 'power_law_sampled%'"),
        (
            "other_shape",
            "op_name = 'moe_context' AND distribution = 'uniform' AND num_tokens * topk % (128 * num_experts) <> 0",
        ),
        ("eager", "op_name = 'moe_context' AND latency_us < 1000"),
    )
    dtype = case("moe_dtype", {"fp8_block": "fp8_block", "nvfp4": "nvfp4"})
    lacking = dict.fromkeys(("num_slots", "rank0_num_tokens"), "NULL")
    return table(OpMap("moe", parameters, dtype), drops=drops, optional=lacking)


def _mhc() -> TableMap:
    parameters = {"tokens": "num_tokens", "hidden": "hidden_size", "mult": "hc_mult"}
    ops = (OpMap(f"mhc_{name}", parameters, "'bf16'", f"op_name = '{name}'") for name in ("pre", "post"))
    return table(*ops, latency_us=f"latency_us / {_PLACES}")


def tables() -> dict[str, TableMap]:
    return {
        "comm_deepep": _deepep(),
        "comm": _alltoall(),
        "mhc": _mhc(),
        "moe_wideep": _experts(),
        # One layer's MLP in one shape: the products and the activation in it have families of their own.
        "mlp_wideep": TableMap(SOURCE),
    }
