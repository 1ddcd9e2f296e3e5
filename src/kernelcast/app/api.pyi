"""Made by ``python -m kernelcast.app.questions.source`` from the questions' parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

from kernelcast.app.questions.evidence import evidence as evidence
from kernelcast.forecast import Calibration
from kernelcast.hardware import Gpu
from kernelcast.inference.disaggregated import Disaggregated
from kernelcast.inference.infer import Inference
from kernelcast.models.architecture import Architecture
from kernelcast.search.compare.compare import Comparison
from kernelcast.search.plan.plan import Plan
from kernelcast.serving.simulate import Simulation

# fmt: off

@overload
def infer(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, stack: str = "vllm",
    batch: int | None = None, input_len: int | None = None, output_len: int | None = None, requests: Path | None = None,
    cached: int | None = None, chunk: int | None = None, dtype: str | None = None, kv_dtype: str | None = None,
    tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, images: int = 0, image_size: int = 1024, micro_batches: int = 1,
    sequence_parallel: bool = False, draft_tokens: int = 0, acceptance: float = 0.7, draft_model: str | None = None,
    set: Sequence[str] | None = None, power_cap: float | None = None, routing: str = "expected", skew: float = 0.0,
    exchange: str | None = None, moe_backend: str | None = None, redundant_experts: int = 0,
    two_batch_overlap: bool = False, fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8
) -> Inference: ...
@overload
def infer(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, stack: str = "vllm",
    batch: int | None = None, input_len: int | None = None, output_len: int | None = None, requests: Path | None = None,
    cached: int | None = None, chunk: int | None = None, dtype: str | None = None, kv_dtype: str | None = None,
    tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, images: int = 0, image_size: int = 1024, micro_batches: int = 1,
    sequence_parallel: bool = False, draft_tokens: int = 0, acceptance: float = 0.7, draft_model: str | None = None,
    set: Sequence[str] | None = None, power_cap: float | None = None, routing: str = "expected", skew: float = 0.0,
    exchange: str | None = None, moe_backend: str | None = None, redundant_experts: int = 0,
    two_batch_overlap: bool = False, fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8,
    prefill_workers: int, decode_workers: int | None = None, prefill_tp: int | None = None,
    prefill_pp: int | None = None, prefill_dp: int | None = None, prefill_ep: int | None = None,
    prefill_batch: int | None = None, transfer_fabric: str | None = None
) -> Disaggregated: ...
def infer_pools(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, stack: str = "vllm",
    batch: int | None = None, input_len: int | None = None, output_len: int | None = None, requests: Path | None = None,
    cached: int | None = None, chunk: int | None = None, dtype: str | None = None, kv_dtype: str | None = None,
    tp: int = 1, pp: int = 1, ep: int = 1, dp: int = 1, images: int = 0, image_size: int = 1024, micro_batches: int = 1,
    sequence_parallel: bool = False, draft_tokens: int = 0, acceptance: float = 0.7, draft_model: str | None = None,
    set: Sequence[str] | None = None, power_cap: float | None = None, routing: str = "expected", skew: float = 0.0,
    exchange: str | None = None, moe_backend: str | None = None, redundant_experts: int = 0,
    two_batch_overlap: bool = False, fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8,
    prefill_workers: int, decode_workers: int | None = None, prefill_tp: int | None = None,
    prefill_pp: int | None = None, prefill_dp: int | None = None, prefill_ep: int | None = None,
    prefill_batch: int | None = None, transfer_fabric: str | None = None
) -> Disaggregated: ...
def simulate(
    model: str | Path | Architecture, gpu: str | Path | Gpu | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, goodput: Sequence[str] | None = None,
    offline: bool = False, intervals: bool = True, routing: str = "expected", skew: float = 0.0,
    exchange: str | None = None, moe_backend: str | None = None, redundant_experts: int = 0,
    two_batch_overlap: bool = False, fabric: str | None = None, between_nodes: str = "ib_ndr", gpus_per_node: int = 8,
    stack: str = "vllm", dtype: str | None = None, kv_dtype: str | None = None, tp: int = 1, pp: int = 1, dp: int = 1,
    ep: int = 1, set: Sequence[str] | None = None, server: Path | None = None, max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None, num_gpu_blocks_override: int | None = None,
    block_size: int | None = None, gpu_memory_utilization: float | None = None,
    enable_prefix_caching: bool | None = None, enable_chunked_prefill: bool | None = None,
    async_scheduling: bool | None = None, schedule_policy: str | None = None, capacity_policy: str | None = None,
    scheduler_recv_interval: int | None = None, attention_dp_timeout_iters: int | None = None, draft_tokens: int = 0,
    acceptance: float = 0.7, draft_model: str | None = None, replicas: int = 1, router: str = "round_robin",
    prefill_replicas: int = 0, prefill_tp: int | None = None, transfer_fabric: str | None = None,
    ttft_p99: str | None = None, ttft_p95: str | None = None, ttft_p90: str | None = None, ttft_p50: str | None = None,
    ttft_mean: str | None = None, tpot_p99: str | None = None, tpot_p95: str | None = None, tpot_p90: str | None = None,
    tpot_p50: str | None = None, tpot_mean: str | None = None, e2el_p99: str | None = None, e2el_p95: str | None = None,
    e2el_p90: str | None = None, e2el_p50: str | None = None, e2el_mean: str | None = None,
    request_rate: float | None = None, num_prompts: int | None = None, input_len: int | None = None,
    output_len: int | None = None, max_concurrency: int | None = None, seed: int = 0, arrivals: str | None = None,
    burstiness: float | None = None, burst_s: float | None = None, pause_s: float | None = None,
    ramp_up_strategy: str | None = None, ramp_up_start_rps: float | None = None, ramp_up_end_rps: float | None = None,
    stages: str | None = None, random_range_ratio: float | None = None, lengths: str | None = None,
    input_len_std: float | None = None, output_len_std: float | None = None, random_prefix_len: int | None = None,
    num_prefixes: int | None = None, prefix_len: int | None = None, suffix_len: int | None = None,
    num_groups: int | None = None, prompts_per_group: int | None = None, system_prompt_len: int | None = None,
    question_len: int | None = None, multi_turn: bool = False, trace: Path | None = None,
    trace_format: str | None = None, skip_bad: bool = False, rate_scale: float | None = None, limit: int | None = None
) -> Simulation: ...
def compare(
    model: str | Path | Architecture, gpus: str | Sequence[str] | None = None, *, predictor: str = "learned",
    calibration: Path | Calibration | None = None, weights: Path | None = None, batch: int | None = None,
    max_gpus: int = 8, what_if: list[str] | None = None, by: str | None = None, prices: Path | None = None,
    price: list[str] | None = None, price_kind: str = "on_demand", rate: float | None = None,
    input_len: int | None = None, output_len: int | None = None, ttft: str | None = None, tpot: str | None = None,
    e2el: str | None = None, stack: str | None = None, formats: str | None = None, kv_dtype: str | None = None,
    thorough: bool = False, sensitivity: bool = False
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
    server: Path | None = None, request_rate: float | None = None, num_prompts: int | None = None,
    input_len: int | None = None, output_len: int | None = None, max_concurrency: int | None = None, seed: int = 0,
    arrivals: str | None = None, burstiness: float | None = None, burst_s: float | None = None,
    pause_s: float | None = None, ramp_up_strategy: str | None = None, ramp_up_start_rps: float | None = None,
    ramp_up_end_rps: float | None = None, stages: str | None = None, random_range_ratio: float | None = None,
    lengths: str | None = None, input_len_std: float | None = None, output_len_std: float | None = None,
    random_prefix_len: int | None = None, num_prefixes: int | None = None, prefix_len: int | None = None,
    suffix_len: int | None = None, num_groups: int | None = None, prompts_per_group: int | None = None,
    system_prompt_len: int | None = None, question_len: int | None = None, multi_turn: bool = False,
    trace: Path | None = None, trace_format: str | None = None, skip_bad: bool = False, rate_scale: float | None = None,
    limit: int | None = None
) -> Plan: ...
