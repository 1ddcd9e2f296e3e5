"""Made by ``python -m kernelcast.app.questions.source`` from the questions' parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from kernelcast.app.questions.evidence import evidence as evidence
from kernelcast.forecast import Calibration
from kernelcast.hardware import Gpu
from kernelcast.inference.disaggregated import Disaggregated
from kernelcast.inference.infer import Inference
from kernelcast.models.architecture import Architecture
from kernelcast.search.compare.compare import Comparison
from kernelcast.search.plan.plan import Plan
from kernelcast.serving.simulate import Simulation
from kernelcast.tracing.traced import Trace
from kernelcast.training.run import TrainingRun
from kernelcast.training.scale import ScaledStep
from kernelcast.training.step import Step

# fmt: off

class _InferAliases(TypedDict, total=False):
    backend: str
    batch_size: int | None
    concurrency: int | None
    random_input_len: int | None
    random_output_len: int | None
    q: str | None
    kv_cache_dtype: str | None
    tensor_parallel_size: int
    tp_size: int
    pipeline_parallel_size: int
    pp_size: int
    expert_parallel_size: int
    ep_size: int
    data_parallel_size: int
    num_speculative_tokens: int
    speculative_num_draft_tokens: int
    speculative_model: str | None
    speculative_draft_model_path: str | None
    all2all_backend: str | None
    enable_attention_dp: bool
    num_redundant_experts: int
    ep_num_redundant_experts: int
    enable_two_batch_overlap: bool
    enable_dbo: bool
    context_length: int | None
    max_seq_len: int | None
    max_running_requests: int | None
    max_batch_size: int | None
    chunked_prefill_size: int | None
    max_num_tokens: int | None
    mem_fraction_static: float | None
    kv_cache_free_gpu_memory_fraction: float | None
    kv_cache_free_gpu_mem_fraction: float | None
    free_gpu_memory_fraction: float | None
    disable_cuda_graph: bool
    enable_cuda_graph: bool
class _SimulateAliases(TypedDict, total=False):
    all2all_backend: str | None
    enable_attention_dp: bool
    num_redundant_experts: int
    ep_num_redundant_experts: int
    enable_two_batch_overlap: bool
    enable_dbo: bool
    backend: str
    q: str | None
    kv_cache_dtype: str | None
    tensor_parallel_size: int
    tp_size: int
    pipeline_parallel_size: int
    pp_size: int
    data_parallel_size: int
    expert_parallel_size: int
    ep_size: int
    context_length: int | None
    max_seq_len: int | None
    max_running_requests: int | None
    max_batch_size: int | None
    chunked_prefill_size: int | None
    max_num_tokens: int | None
    mem_fraction_static: float | None
    kv_cache_free_gpu_memory_fraction: float | None
    kv_cache_free_gpu_mem_fraction: float | None
    free_gpu_memory_fraction: float | None
    disable_cuda_graph: bool
    enable_cuda_graph: bool
    page_size: int | None
    tokens_per_block: int | None
    disable_radix_cache: bool | None
    disable_overlap_schedule: bool | None
    num_speculative_tokens: int
    speculative_num_draft_tokens: int
    speculative_model: str | None
    speculative_draft_model_path: str | None
    qps: float | None
    rps: float | None
    random_input_len: int | None
    random_output_len: int | None
    concurrency: int | None
    prefix_repetition_num_prefixes: int | None
    prefix_repetition_prefix_len: int | None
    prefix_repetition_suffix_len: int | None
    gsp_num_groups: int | None
    gsp_prompts_per_group: int | None
    gsp_system_prompt_len: int | None
    gsp_question_len: int | None
class _CompareAliases(TypedDict, total=False):
    batch_size: int | None
    concurrency: int | None
    gpu: str | Sequence[str] | None
    request_rate: float | None
    qps: float | None
    rps: float | None
    random_input_len: int | None
    random_output_len: int | None
    backend: str | None
    quantization: str | None
    q: str | None
    kv_cache_dtype: str | None
class _PlanAliases(TypedDict, total=False):
    gpu: str | None
    backend: str
    quantization: str | None
    q: str | None
    kv_cache_dtype: str | None
    tensor_parallel_size: str
    tp_size: str
    pipeline_parallel_size: str
    pp_size: str
    data_parallel_size: str | None
    expert_parallel_size: str | None
    ep_size: str | None
    max_running_requests: str | None
    max_batch_size: str | None
    chunked_prefill_size: str | None
    max_num_tokens: str | None
    qps: float | None
    rps: float | None
    random_input_len: int | None
    random_output_len: int | None
    concurrency: int | None
    prefix_repetition_num_prefixes: int | None
    prefix_repetition_prefix_len: int | None
    prefix_repetition_suffix_len: int | None
    gsp_num_groups: int | None
    gsp_prompts_per_group: int | None
    gsp_system_prompt_len: int | None
    gsp_question_len: int | None
class _TrainAliases(TypedDict, total=False):
    gpu: str | int | Gpu | None
    micro_batch_size: int | None
    per_device_train_batch_size: int | None
    batch_size: int | None
    global_batch_size: int | None
    grad_accum_steps: int | None
    seq_length: int | None
    seq_len: int | None
    max_length: int | None
    fp8_recipe: str | None
    mixed_precision: str | None
    dtype: str | None
    cuda_graph_impl: str | None
    tensor_model_parallel_size: int | None
    pipeline_model_parallel_size: int | None
    context_parallel_size: int | None
    expert_model_parallel_size: int | None
    expert_tensor_parallel_size: int | None
    data_parallel_size: int | None
    virtual_pipeline_model_parallel_size: int | None
    num_virtual_stages_per_pipeline_rank: int | None
    num_layers_per_virtual_pipeline_stage: int | None
    use_distributed_optimizer: bool | None
    cp_comm_type: str | None
    moe_token_dispatcher_type: str | None
    moe_flex_dispatcher_backend: str | None
    overlap_grad_reduce: bool | None
    tp_comm_overlap: bool | None
    overlap_moe_expert_parallel_comm: bool | None
    moe_a2a_overlap: bool | None
    nproc_per_node: int | None
    fp8_param: bool | None
    recompute_granularity: str | None
    recompute_num_layers: int | None
    cpu_offloading_num_layers: int | None
    optimizer_cpu_offload: bool | None
    lora_dim: int | None
    lora_r: int | None
    save_interval: int | None
class _TraceAliases(TypedDict, total=False):
    batch_size: int
    concurrency: int
    quantization: str | None
    q: str | None
    data_parallel_size: int
    tensor_parallel_size: int
    tp_size: int
    pipeline_parallel_size: int
    pp_size: int
    expert_parallel_size: int
    ep_size: int
@overload
def infer(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, stack: str = "vllm",
    batch: int | None = None, input_len: int | None = None, output_len: int | None = None, requests: Path | None = None,
    cached: int | None = None, chunk: int | None = None, dtype: str | None = None, quantization: str | None = None,
    kv_dtype: str | None = None, tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, images: int = 0,
    image_size: int = 1024, micro_batches: int = 1, sequence_parallel: bool = False, draft_tokens: int = 0,
    acceptance: float = 0.7, draft_model: str | None = None, set: Sequence[str] | None = None,
    power_cap: float | None = None, routing: str = "expected", skew: float = 0.0, exchange: str | None = None,
    moe_backend: str | None = None, enable_expert_parallel: bool = False, dp_size: int | None = None,
    enable_dp_attention: bool = False, redundant_experts: int = 0, two_batch_overlap: bool = False,
    fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8, max_model_len: int | None = None,
    max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None,
    enable_chunked_prefill: bool | None = None, gpu_memory_utilization: float | None = None,
    enforce_eager: bool = False, **aliases: Unpack[_InferAliases]
) -> Inference: ...
@overload
def infer(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, stack: str = "vllm",
    batch: int | None = None, input_len: int | None = None, output_len: int | None = None, requests: Path | None = None,
    cached: int | None = None, chunk: int | None = None, dtype: str | None = None, quantization: str | None = None,
    kv_dtype: str | None = None, tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, images: int = 0,
    image_size: int = 1024, micro_batches: int = 1, sequence_parallel: bool = False, draft_tokens: int = 0,
    acceptance: float = 0.7, draft_model: str | None = None, set: Sequence[str] | None = None,
    power_cap: float | None = None, routing: str = "expected", skew: float = 0.0, exchange: str | None = None,
    moe_backend: str | None = None, enable_expert_parallel: bool = False, dp_size: int | None = None,
    enable_dp_attention: bool = False, redundant_experts: int = 0, two_batch_overlap: bool = False,
    fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8, max_model_len: int | None = None,
    max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None,
    enable_chunked_prefill: bool | None = None, gpu_memory_utilization: float | None = None,
    enforce_eager: bool = False, prefill_workers: int, decode_workers: int | None = None, prefill_tp: int | None = None,
    prefill_pp: int | None = None, prefill_dp: int | None = None, prefill_ep: int | None = None,
    prefill_batch: int | None = None, transfer_fabric: str | None = None, **aliases: Unpack[_InferAliases]
) -> Disaggregated: ...
def infer_pools(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, stack: str = "vllm",
    batch: int | None = None, input_len: int | None = None, output_len: int | None = None, requests: Path | None = None,
    cached: int | None = None, chunk: int | None = None, dtype: str | None = None, quantization: str | None = None,
    kv_dtype: str | None = None, tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, images: int = 0,
    image_size: int = 1024, micro_batches: int = 1, sequence_parallel: bool = False, draft_tokens: int = 0,
    acceptance: float = 0.7, draft_model: str | None = None, set: Sequence[str] | None = None,
    power_cap: float | None = None, routing: str = "expected", skew: float = 0.0, exchange: str | None = None,
    moe_backend: str | None = None, enable_expert_parallel: bool = False, dp_size: int | None = None,
    enable_dp_attention: bool = False, redundant_experts: int = 0, two_batch_overlap: bool = False,
    fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8, max_model_len: int | None = None,
    max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None,
    enable_chunked_prefill: bool | None = None, gpu_memory_utilization: float | None = None,
    enforce_eager: bool = False, prefill_workers: int, decode_workers: int | None = None, prefill_tp: int | None = None,
    prefill_pp: int | None = None, prefill_dp: int | None = None, prefill_ep: int | None = None,
    prefill_batch: int | None = None, transfer_fabric: str | None = None, **aliases: Unpack[_InferAliases]
) -> Disaggregated: ...
def simulate(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, goodput: Sequence[str] | None = None,
    offline: bool = False, intervals: bool = True, routing: str = "expected", skew: float = 0.0,
    exchange: str | None = None, moe_backend: str | None = None, enable_expert_parallel: bool = False,
    dp_size: int | None = None, enable_dp_attention: bool = False, redundant_experts: int = 0,
    two_batch_overlap: bool = False, fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8,
    stack: str = "vllm", dtype: str | None = None, quantization: str | None = None, kv_dtype: str | None = None,
    tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, set: Sequence[str] | None = None, server: Path | None = None,
    max_model_len: int | None = None, max_num_seqs: int | None = None, max_num_batched_tokens: int | None = None,
    enable_chunked_prefill: bool | None = None, gpu_memory_utilization: float | None = None,
    enforce_eager: bool = False, num_gpu_blocks_override: int | None = None, block_size: int | None = None,
    enable_prefix_caching: bool | None = None, async_scheduling: bool | None = None, schedule_policy: str | None = None,
    capacity_policy: str | None = None, scheduler_recv_interval: int | None = None,
    attention_dp_timeout_iters: int | None = None, draft_tokens: int = 0, acceptance: float = 0.7,
    draft_model: str | None = None, replicas: int = 1, router: str = "round_robin", prefill_replicas: int = 0,
    prefill_tp: int | None = None, transfer_fabric: str | None = None, ttft_p99: str | None = None,
    ttft_p95: str | None = None, ttft_p90: str | None = None, ttft_p50: str | None = None, ttft_mean: str | None = None,
    tpot_p99: str | None = None, tpot_p95: str | None = None, tpot_p90: str | None = None, tpot_p50: str | None = None,
    tpot_mean: str | None = None, e2el_p99: str | None = None, e2el_p95: str | None = None, e2el_p90: str | None = None,
    e2el_p50: str | None = None, e2el_mean: str | None = None, request_rate: float | None = None,
    dataset_name: str | None = None, num_prompts: int | None = None, input_len: int | None = None,
    output_len: int | None = None, max_concurrency: int | None = None, seed: int = 0, arrivals: str | None = None,
    burstiness: float | None = None, burst_s: float | None = None, pause_s: float | None = None,
    ramp_up_strategy: str | None = None, ramp_up_start_rps: float | None = None, ramp_up_end_rps: float | None = None,
    stages: str | None = None, random_range_ratio: float | None = None, lengths: str | None = None,
    input_len_std: float | None = None, output_len_std: float | None = None, random_prefix_len: int | None = None,
    num_prefixes: int | None = None, prefix_len: int | None = None, suffix_len: int | None = None,
    num_groups: int | None = None, prompts_per_group: int | None = None, system_prompt_len: int | None = None,
    question_len: int | None = None, multi_turn: bool = False, trace: Path | None = None,
    trace_format: str | None = None, skip_bad: bool = False, rate_scale: float | None = None, limit: int | None = None,
    **aliases: Unpack[_SimulateAliases]
) -> Simulation: ...
def compare(
    model: str | Path | Architecture, gpus: str | Sequence[str] | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, batch: int | None = None,
    max_gpus: int = 8, what_if: list[str] | None = None, by: str | None = None, prices: Path | None = None,
    price: list[str] | None = None, price_kind: str = "on_demand", rate: float | None = None,
    input_len: int | None = None, output_len: int | None = None, ttft: str | None = None, tpot: str | None = None,
    e2el: str | None = None, stack: str | None = None, formats: str | None = None, kv_dtype: str | None = None,
    thorough: bool = False, sensitivity: bool = False, **aliases: Unpack[_CompareAliases]
) -> Comparison: ...
def plan(
    model: str | Path | Architecture, gpus: str | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, ttft_p99: str | None = None,
    ttft_p95: str | None = None, ttft_p90: str | None = None, ttft_p50: str | None = None, ttft_mean: str | None = None,
    tpot_p99: str | None = None, tpot_p95: str | None = None, tpot_p90: str | None = None, tpot_p50: str | None = None,
    tpot_mean: str | None = None, e2el_p99: str | None = None, e2el_p95: str | None = None, e2el_p90: str | None = None,
    e2el_p50: str | None = None, e2el_mean: str | None = None, max_gpus: int = 64, budget: float | None = None,
    stack: str = "vllm", dtype: str | None = None, kv_dtype: str | None = None, tp: str = "1,2,4,8", pp: str = "1,2",
    dp: str | None = None, ep: str | None = None, max_num_seqs: str | None = None,
    max_num_batched_tokens: str | None = None, disaggregated: str = "also", sure: bool = False,
    prices: Path | None = None, price: list[str] | None = None, price_kind: str = "on_demand",
    server: Path | None = None, request_rate: float | None = None, dataset_name: str | None = None,
    num_prompts: int | None = None, input_len: int | None = None, output_len: int | None = None,
    max_concurrency: int | None = None, seed: int = 0, arrivals: str | None = None, burstiness: float | None = None,
    burst_s: float | None = None, pause_s: float | None = None, ramp_up_strategy: str | None = None,
    ramp_up_start_rps: float | None = None, ramp_up_end_rps: float | None = None, stages: str | None = None,
    random_range_ratio: float | None = None, lengths: str | None = None, input_len_std: float | None = None,
    output_len_std: float | None = None, random_prefix_len: int | None = None, num_prefixes: int | None = None,
    prefix_len: int | None = None, suffix_len: int | None = None, num_groups: int | None = None,
    prompts_per_group: int | None = None, system_prompt_len: int | None = None, question_len: int | None = None,
    multi_turn: bool = False, trace: Path | None = None, trace_format: str | None = None, skip_bad: bool = False,
    rate_scale: float | None = None, limit: int | None = None, **aliases: Unpack[_PlanAliases]
) -> Plan: ...
def train(
    model: str | Path | Architecture | None = None, gpus: str | int | Gpu | None = None, *, config: Path | None = None,
    search: bool = False, micro_batch: int | None = None, global_batch: int | None = None,
    gradient_accumulation_steps: int | None = None, seq: int | None = None, precision: str | None = None,
    stack: str | None = None, optimizer: str | None = None, cuda_graphs: str | None = None, mtp: bool | None = None,
    predictor: str = "learned", calibration: Path | Calibration | None = None, weights: Path | None = None,
    prices: Path | None = None, price: list[str] | None = None, price_kind: str = "on_demand",
    set: Sequence[str] | None = None, power_cap: float | None = None, tp: int | None = None, pp: int | None = None,
    cp: int | None = None, ep: int | None = None, expert_tp: int | None = None, dp: int | None = None,
    virtual_stages: int | None = None, layers_per_virtual_stage: int | None = None, schedule: str | None = None,
    stage_layers: str | None = None, sequence_parallel: bool | None = None, zero: int | None = None,
    distributed_optimizer: bool | None = None, cp_comm: str | None = None, dispatcher: str | None = None,
    overlap: bool | None = None, tp_overlap: bool | None = None, expert_overlap: bool | None = None,
    routing: str | None = None, gpus_per_node: int | None = None, between_nodes: str | None = None,
    fp8_param_gather: bool | None = None, activation_func_fp8_input_store: bool | None = None,
    recompute: str | None = None, recompute_modules: str | None = None, recompute_method: str | None = None,
    recompute_layers: int | None = None, gradients: str | None = None, offload_layers: int | None = None,
    offload_optimizer: bool | None = None, lora_rank: int | None = None, lora_targets: str | None = None,
    qlora: bool = False, frozen: str | None = None, packed: bool | None = None, mean_length: int | None = None,
    tokens: float | None = None, checkpoint_every: int | None = None, checkpoint_s: float = 0.0,
    mtbf: float | None = None, restart_s: float = 600.0, jitter: float = 0.0, **aliases: Unpack[_TrainAliases]
) -> TrainingRun: ...
@overload
def trace(
    model: str | Path, gpu: str | Path | Gpu, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, mode: str = "inference", batch: int = 1,
    cache: bool | None = None, logits: str | None = None, compile: bool = False, tp_plan: str | None = None,
    schedule: str = "1f1b", virtual_stages: int = 1, sequence_parallel: bool = False, set: Sequence[str] | None = None,
    power_cap: float | None = None, seq: int | None = None, dtype: str | None = None, precision: str | None = None,
    image_size: int | None = None, optimizer: str = "adamw", accumulate: int = 1, attention: str = "fused",
    checkpointing: bool = False, graph: bool = False, host: str | None = None, dp: int = 1, tp: int = 1, pp: int = 1,
    ep: int = 1, zero: int = 0, micro_batches: int = 1, **aliases: Unpack[_TraceAliases]
) -> Step | ScaledStep: ...
@overload
def trace(
    model: str | Path, gpu: None = None, *, predictor: str = "learned", calibration: Path | Calibration | None = None,
    weights: Path | None = None, mode: str = "inference", batch: int = 1, cache: bool | None = None,
    logits: str | None = None, compile: bool = False, tp_plan: str | None = None, schedule: str = "1f1b",
    virtual_stages: int = 1, sequence_parallel: bool = False, set: Sequence[str] | None = None,
    power_cap: float | None = None, seq: int | None = None, dtype: str | None = None, precision: str | None = None,
    image_size: int | None = None, optimizer: str = "adamw", accumulate: int = 1, attention: str = "fused",
    checkpointing: bool = False, graph: bool = False, host: str | None = None, dp: int = 1, tp: int = 1, pp: int = 1,
    ep: int = 1, zero: int = 0, micro_batches: int = 1, **aliases: Unpack[_TraceAliases]
) -> Trace: ...
@overload
def trace(model: object, inputs: object, mode: str = "inference", **more: Any) -> Trace: ...
