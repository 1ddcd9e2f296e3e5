"""Tables of linear attention: gated delta rule, Kimi delta attention, and the convolutions before them and Mamba-2.

The collectors say what each row timed (collector/FRAMEWORK/collect_gdn.py, collect_kda.py, collect_mamba2.py).
"""

from __future__ import annotations

from kernelcast_lab.data.aiconfigurator.common import table
from kernelcast_lab.data.mapping import OpMap, TableMap

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
    """Qwen3.5's. The state is fp32 in SGLang's collector. vLLM's asks for bf16, but its decode takes as long and leaves
    L2 at the same batches, so it is taken for fp32 too. SGLang's prefill has the norms inside; TensorRT-LLM's is timed
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


def tables() -> dict[str, TableMap]:
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
