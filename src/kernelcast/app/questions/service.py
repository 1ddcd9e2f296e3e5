"""Words that say what answers requests: GPUs, how a model is cut over them, and how its engine schedules.

Flags are called as the engines call theirs; where they differ, each name is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.app.questions.cluster import ClusterChoice
from kernelcast.app.questions.drafts import DraftModel, speculation
from kernelcast.app.questions.shared import (
    CalibrationFile,
    Changes,
    GpuName,
    PredictorName,
    WeightsFolder,
    chosen_conditions,
    chosen_gpu,
    chosen_model,
)
from kernelcast.app.questions.words import flags_under
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.forecast.conditions import Conditions
    from kernelcast.inference.deployment import Deployment
    from kernelcast.inference.workload import Speculation
    from kernelcast.models.architecture import Architecture
    from kernelcast.serving.load import Load
    from kernelcast.serving.service import EnginePool, Service
    from kernelcast.stacks import Stack

_place = flags_under("Deployment")
_engine = flags_under("Engine")
_several = flags_under("Replicas")


@dataclass(frozen=True)
class ServiceChoice(ClusterChoice):
    """The words as they were given; None: not given."""

    gpu: GpuName = None
    stack: Annotated[str, _place("--stack", metavar="NAME", help="vllm, sglang, trtllm")] = "vllm"
    dtype: Annotated[str | None, _place("--dtype", metavar="FORMAT", help="of weights; default: the checkpoint's")] = (
        None
    )
    kv_dtype: Annotated[
        str | None, _place("--kv-dtype", "--kv-cache-dtype", metavar="FORMAT", help="of the KV cache")
    ] = None
    tp: Annotated[int, _place("--tp", "--tensor-parallel-size", help="GPUs that cut every layer")] = 1
    pp: Annotated[int, _place("--pp", "--pipeline-parallel-size", help="pipeline stages")] = 1
    dp: Annotated[int, _place("--dp", help="attention-DP ranks that share the experts, in lockstep")] = 1
    ep: Annotated[int, _place("--ep", help="parts that experts are dealt out to")] = 1
    set: Changes = None
    max_num_seqs: Annotated[
        int | None,
        _engine("--max-num-seqs", "--max-running-requests", "--max-batch-size", help="requests that run at a time"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _engine("--max-num-batched-tokens", "--chunked-prefill-size", "--max-num-tokens", help="tokens of a step"),
    ] = None
    num_gpu_blocks_override: Annotated[
        int | None, _engine("--num-gpu-blocks-override", help="blocks of the KV cache; default: what memory leaves")
    ] = None
    block_size: Annotated[int | None, _engine("--block-size", "--page-size", help="tokens of a block")] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _engine("--gpu-memory-utilization", "--mem-fraction-static", help="share of the memory that the engine fills"),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None, _engine("--enable-prefix-caching/--no-enable-prefix-caching", help="reuse what prompts share")
    ] = None
    enable_chunked_prefill: Annotated[
        bool | None, _engine("--enable-chunked-prefill/--no-enable-chunked-prefill", help="cut long prompts")
    ] = None
    async_scheduling: Annotated[
        bool | None, _engine("--async-scheduling/--no-async-scheduling", help="schedule a step while one runs")
    ] = None
    schedule_policy: Annotated[
        str | None, _engine("--schedule-policy", metavar="NAME", help="who is next: fcfs, lpm (longest cached prefix)")
    ] = None
    capacity_policy: Annotated[
        str | None,
        _engine("--capacity-policy", metavar="NAME", help="blocks: grow (vLLM), estimate (SGLang), reserve (TensorRT)"),
    ] = None
    scheduler_recv_interval: Annotated[
        int | None, _engine("--scheduler-recv-interval", help="steps between looks at new requests (1)")
    ] = None
    attention_dp_timeout_iters: Annotated[
        int | None, _engine("--attention-dp-timeout-iters", help="steps that DP ranks wait for others to read too (0)")
    ] = None
    draft_tokens: Annotated[int, _engine("--draft-tokens", help="speculative decoding: guesses a step")] = 0
    acceptance: Annotated[float, _engine("--acceptance", help="probability that a guess is right")] = 0.7
    draft_model: DraftModel = None
    replicas: Annotated[int, _several("--replicas", help="engines behind a router")] = 1
    router: Annotated[str, _several("--router", metavar="NAME", help="round_robin, least_loaded, cache_aware")] = (
        "round_robin"
    )
    prefill_replicas: Annotated[
        int, _several("--prefill-replicas", help="engines that only read prompts (disaggregated); 0: none")
    ] = 0
    prefill_tp: Annotated[int | None, _several("--prefill-tp", help="tp of those; default: --tp")] = None
    transfer_fabric: Annotated[
        str | None,
        _several("--transfer-fabric", metavar="ID", help="that KV caches are handed over; default: what links nodes"),
    ] = None
    server: Annotated[
        Path | None, _place("--server", metavar="FILE", help="what `kernelcast replay --calibrate` learnt of a server")
    ] = None
    predictor: PredictorName = "learned"
    calibration: CalibrationFile = None
    weights: WeightsFolder = None

    @property
    def conditions(self) -> Conditions:
        return chosen_conditions(None, "model", self.predictor, self.calibration, self.weights)


def chosen_service(choice: ServiceChoice, model: str | Path | Architecture, load: Load) -> Service:
    """The service that the options describe; its KV cache is sized for requests like the load's."""
    from kernelcast.serving.service import Service

    place = deployed(choice, model, choice.tp)
    context = int((load.inputs + load.outputs / 2).mean())
    prefill = None
    if choice.prefill_replicas:
        other = (
            place if choice.prefill_tp in (None, choice.tp) else deployed(choice, model, int(choice.prefill_tp or 1))
        )
        prefill = _pool(choice, other, context, choice.prefill_replicas)
    elif choice.prefill_tp is not None or choice.transfer_fabric is not None:
        raise KernelcastError("--prefill-tp and --transfer-fabric need --prefill-replicas, as in --prefill-replicas 1")
    pool = _pool(choice, place, context, choice.replicas)
    return Service(pool, prefill, choice.router, _speculation(choice, place), choice.transfer_fabric)


def deployed(choice: ServiceChoice, model: str | Path | Architecture, tp: int) -> Deployment:
    from kernelcast.models.precision import Precision

    chip = chosen_gpu(choice.gpu, choice.set)
    if choice.two_batch_overlap:
        raise KernelcastError("two-batch overlap is forecast of static batches alone: see `kernelcast infer`")
    found = chosen_model(model)
    formats = Precision.of(found, choice.dtype, choice.kv_dtype)
    layout = choice.layout(tp, choice.pp, choice.dp, choice.ep)
    return choice.place(found, chip, _stack(choice), formats, layout)


def _stack(choice: ServiceChoice) -> Stack:
    from kernelcast.serving.service import read_overheads
    from kernelcast.stacks import stack

    found = stack(choice.stack)
    if choice.server is not None:
        found = read_overheads(choice.server, found, {chosen_gpu(choice.gpu, choice.set).label})
    share = choice.gpu_memory_utilization
    if share is not None:
        if not 0 < share <= 1:
            raise KernelcastError(f"--gpu-memory-utilization lies between 0 and 1, not at {share:g}")
        found = replace(found, used_share=share)
    return found


def _pool(choice: ServiceChoice, place: Deployment, context: int, replicas: int) -> EnginePool:
    from kernelcast.serving.service import EnginePool, engine_settings

    given: dict[str, Any] = {
        "max_num_seqs": choice.max_num_seqs, "max_num_batched_tokens": choice.max_num_batched_tokens,
        "kv_blocks": choice.num_gpu_blocks_override, "block_size": choice.block_size,
        "prefix_caching": choice.enable_prefix_caching, "chunked_prefill": choice.enable_chunked_prefill,
        "async_scheduling": choice.async_scheduling, "policy": choice.schedule_policy,
        "capacity": choice.capacity_policy, "recv_interval": choice.scheduler_recv_interval,
        "dp_wait": choice.attention_dp_timeout_iters,
    }  # fmt: skip
    return EnginePool(place, engine_settings(place, given, context), replicas)


def _speculation(choice: ServiceChoice, place: Deployment) -> Speculation | None:
    from kernelcast.models.precision import Precision

    def deployed(draft: Architecture) -> Deployment:
        return replace(place, model=draft, precision=Precision.of(draft, choice.dtype, choice.kv_dtype))

    return speculation(choice.draft_tokens, choice.acceptance, choice.draft_model, place, deployed)
