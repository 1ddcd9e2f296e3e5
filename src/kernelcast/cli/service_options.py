"""Options that say what answers requests: GPUs, how a model is cut over them, and how its engine schedules.

Flags are called as the engines call theirs; where they differ, each name is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kernelcast.cli.cluster_options import ClusterChoice
from kernelcast.cli.drafts import DraftModel, speculation
from kernelcast.cli.option_groups import option_of
from kernelcast.cli.options import (
    CalibrationFile,
    Changes,
    GpuName,
    PredictorName,
    WeightsFolder,
    chosen_conditions,
    chosen_gpu,  # fmt: skip
)
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.networks.architecture import Architecture
    from kernelcast.networks.deployment import Deployment
    from kernelcast.predict import Conditions
    from kernelcast.serving.engine.fleet import Pool, Service
    from kernelcast.serving.load import Load
    from kernelcast.serving.workload import Speculation
    from kernelcast.stacks import Stack

_place = option_of("Deployment")
_engine = option_of("Engine")
_several = option_of("Replicas")


@dataclass(frozen=True)
class ServiceChoice(ClusterChoice):
    """The options as they were given; None: not given."""

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
    changes: Changes = None
    max_num_seqs: Annotated[
        int | None,
        _engine("--max-num-seqs", "--max-running-requests", "--max-batch-size", help="requests that run at a time"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        _engine("--max-num-batched-tokens", "--chunked-prefill-size", "--max-num-tokens", help="tokens of a step"),
    ] = None
    num_gpu_blocks: Annotated[
        int | None, _engine("--num-gpu-blocks-override", help="blocks of the KV cache; default: what memory leaves")
    ] = None
    block_size: Annotated[int | None, _engine("--block-size", "--page-size", help="tokens of a block")] = None
    memory_share: Annotated[
        float | None,
        _engine("--gpu-memory-utilization", "--mem-fraction-static", help="share of the memory that the engine fills"),
    ] = None
    prefix_caching: Annotated[
        bool | None, _engine("--enable-prefix-caching/--no-enable-prefix-caching", help="reuse what prompts share")
    ] = None
    chunked_prefill: Annotated[
        bool | None, _engine("--enable-chunked-prefill/--no-enable-chunked-prefill", help="cut long prompts")
    ] = None
    async_scheduling: Annotated[
        bool | None, _engine("--async-scheduling/--no-async-scheduling", help="schedule a step while one runs")
    ] = None
    policy: Annotated[
        str | None, _engine("--schedule-policy", metavar="NAME", help="who is next: fcfs, lpm (longest cached prefix)")
    ] = None
    capacity: Annotated[
        str | None,
        _engine("--capacity-policy", metavar="NAME", help="blocks: grow (vLLM), estimate (SGLang), reserve (TensorRT)"),
    ] = None
    recv_interval: Annotated[
        int | None, _engine("--scheduler-recv-interval", help="steps between looks at new requests (1)")
    ] = None
    dp_wait: Annotated[
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
    transfer: Annotated[
        str | None, _several("--transfer-fabric", metavar="ID", help="that KV caches are handed over; default: ib_ndr")
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


def chosen_service(choice: ServiceChoice, model: str, load: Load) -> Service:
    """The service that the options describe; its KV cache is sized for requests like the load's."""
    from kernelcast.serving.engine.fleet import Service

    place = deployed(choice, model, choice.tp)
    context = int((load.inputs + load.outputs / 2).mean())
    prefill = None
    if choice.prefill_replicas:
        other = (
            place if choice.prefill_tp in (None, choice.tp) else deployed(choice, model, int(choice.prefill_tp or 1))
        )
        prefill = _pool(choice, other, context, choice.prefill_replicas)
    elif choice.prefill_tp is not None or choice.transfer is not None:
        raise KernelcastError("--prefill-tp and --transfer-fabric need --prefill-replicas, as in --prefill-replicas 1")
    pool = _pool(choice, place, context, choice.replicas)
    return Service(pool, prefill, choice.router, _speculation(choice, place), choice.transfer)


def deployed(choice: ServiceChoice, model: str, tp: int) -> Deployment:
    from kernelcast import networks
    from kernelcast.networks.precision import Precision

    if choice.gpu is None:
        raise KernelcastError("which GPU? give --gpu, as in --gpu h200_sxm")
    if choice.overlap:
        raise KernelcastError("two-batch overlap is forecast of static batches alone: see `kernelcast infer`")
    found = networks.model(model)
    formats = Precision.of(found, choice.dtype, choice.kv_dtype)
    layout = choice.layout(tp, choice.pp, choice.dp, choice.ep)
    return choice.place(found, chosen_gpu(choice.gpu, choice.changes), _stack(choice), formats, layout)


def _stack(choice: ServiceChoice) -> Stack:
    from kernelcast.serving.engine.terms import read_terms
    from kernelcast.stacks import stack

    found = stack(choice.stack)
    if choice.server is not None:
        found = read_terms(choice.server, found, {chosen_gpu(str(choice.gpu), choice.changes).label})
    if choice.memory_share is not None:
        if not 0 < choice.memory_share <= 1:
            raise KernelcastError(f"--gpu-memory-utilization lies between 0 and 1, not at {choice.memory_share:g}")
        found = replace(found, used_share=choice.memory_share)
    return found


def _pool(choice: ServiceChoice, place: Deployment, context: int, replicas: int) -> Pool:
    from kernelcast.serving.engine.fleet import Pool
    from kernelcast.serving.engine.settings import settings_of

    given: dict[str, Any] = {
        name: getattr(choice, name)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "prefix_caching", "chunked_prefill",
                     "async_scheduling", "policy", "capacity", "recv_interval", "dp_wait")
    }  # fmt: skip
    return Pool(place, settings_of(place, {**given, "kv_blocks": choice.num_gpu_blocks}, context), replicas)


def _speculation(choice: ServiceChoice, place: Deployment) -> Speculation | None:
    from kernelcast.networks.precision import Precision

    def deployed(draft: Architecture) -> Deployment:
        return replace(place, model=draft, precision=Precision.of(draft, choice.dtype, choice.kv_dtype))

    return speculation(choice.draft_tokens, choice.acceptance, choice.draft_model, place, deployed)
