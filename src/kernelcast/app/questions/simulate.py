"""A served model under load: its deployment, engine and replicas, and what its users see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kernelcast.app.questions import shared
from kernelcast.app.questions.deployment import ClusterParameters, EngineLimits, speculation
from kernelcast.app.questions.load import LoadParameters, build_load
from kernelcast.app.questions.parameters import Question, option
from kernelcast.app.questions.plan import GoalParameters
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.inference.deployment import Deployment
    from kernelcast.inference.workload import Speculation
    from kernelcast.models.architecture import Architecture
    from kernelcast.serving.load import Load
    from kernelcast.serving.metrics import LatencyGoals
    from kernelcast.serving.service import EnginePool, Service
    from kernelcast.serving.simulate import Simulation
    from kernelcast.stacks import Stack

Report = Callable[[str, int, int], None]  # which run, how many requests of it are done, and of how many
_GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class DeploymentParameters(ClusterParameters, shared.PredictorParameters):
    """A model on GPUs; None: not given."""

    panel: ClassVar[str | None] = "Deployment"

    gpu: shared.GpuName = None
    stack: shared.StackName = "vllm"
    dtype: shared.WeightsFormat = None
    quantization: shared.QuantizationMethod = None
    kv_dtype: shared.KvFormat = None
    tp: shared.Tp = 1
    pp: shared.Pp = 1
    dp: shared.Dp = 1
    ep: shared.Ep = 1
    set: shared.Changes = None
    server: shared.ServerFile = None


@dataclass(frozen=True)
class EngineParameters(EngineLimits):
    """How an engine schedules, by the engines' names of these parameters; None: the engine's default."""

    panel: ClassVar[str | None] = "Engine"

    num_gpu_blocks_override: Annotated[
        int | None, option(help="KV cache blocks; default: what fits in the memory that is left")
    ] = None
    block_size: Annotated[int | None, option(help="tokens of a KV cache block")] = None
    enable_prefix_caching: Annotated[
        bool | None, option("--enable-prefix-caching/--no-enable-prefix-caching", help="reuse KV cache of prefixes")
    ] = None
    async_scheduling: Annotated[
        bool | None, option("--async-scheduling/--no-async-scheduling", help="schedule a step while another runs")
    ] = None
    schedule_policy: Annotated[
        str | None,
        option(metavar="NAME", help="order of waiting requests: fcfs, lpm (longest cached prefix)",
               values=partial(shared.names_of, "serving.service", "POLICIES")),
    ] = None  # fmt: skip
    capacity_policy: Annotated[
        str | None,
        option(metavar="NAME", help="allocation of KV cache blocks: grow (vLLM), estimate (SGLang), reserve (TensorRT)",
               values=partial(shared.names_of, "serving.service", "CAPACITIES")),
    ] = None  # fmt: skip
    scheduler_recv_interval: Annotated[int | None, option(help="steps between polls for new requests (1)")] = None
    attention_dp_timeout_iters: Annotated[
        int | None, option(help="steps that data parallel ranks wait to prefill together (0)")
    ] = None
    draft_tokens: shared.DraftTokens = 0
    acceptance: shared.Acceptance = 0.7
    draft_model: shared.DraftModel = None


@dataclass(frozen=True)
class ReplicaParameters(Question):
    """Engines behind a router."""

    panel: ClassVar[str | None] = "Replicas"

    replicas: Annotated[int, option(help="engines behind a router", maximum=4096)] = 1
    router: Annotated[
        str,
        option(metavar="NAME", help="round_robin, least_loaded, cache_aware",
               values=partial(shared.names_of, "serving.service", "ROUTERS")),
    ] = "round_robin"  # fmt: skip
    prefill_replicas: Annotated[
        int, option(help="prefill replicas (disaggregated serving); 0: aggregated", maximum=4096)
    ] = 0
    prefill_tp: Annotated[int | None, option(help="tensor parallel size of a prefill replica; default: --tp")] = None
    transfer_fabric: shared.TransferFabric = None


@dataclass(frozen=True)
class ServiceParameters(ReplicaParameters, EngineParameters, DeploymentParameters):
    """Engines that serve a model."""

    def service(self, model: str | Path | Architecture, load: Load, *, offline: bool = False) -> Service:
        """The service; its KV cache is sized for requests like the load's."""
        from kernelcast.serving.service import Service

        deployment = self._deployment(model, self.tp)
        context = int((load.inputs + load.outputs / 2).mean())
        prefill = None
        if self.prefill_replicas:
            same = self.prefill_tp in (None, self.tp)
            other = deployment if same else self._deployment(model, int(self.prefill_tp or 1))
            prefill = self._pool(other, context, self.prefill_replicas)
        elif self.given("prefill_tp", "transfer_fabric"):
            raise KernelcastError("`prefill_tp` and `transfer_fabric` need `prefill_replicas`, such as 1")
        drafting = self._speculation(deployment)
        longest = int(load.inputs.max()) if offline else 0
        pool = self._pool(deployment, context, self.replicas * self.engines_at_once, drafting, longest)
        return Service(pool, prefill, self.router, drafting, self.transfer_fabric, offline)

    def _deployment(self, model: str | Path | Architecture, tp: int) -> Deployment:
        gpu = shared.resolve_gpu(self.gpu, self.set)
        if self.two_batch_overlap:
            raise KernelcastError("two-batch overlap is forecast of static batches alone: see `kernelcast infer`")
        if self.routing == "identical":
            raise KernelcastError(
                "under load, copies of one prompt are apart: routing identical is of `kernelcast infer`"
            )
        architecture = shared.resolve_model(model)
        formats = shared.precision(architecture, self.dtype, self.quantization, self.kv_dtype)
        return self.deployment(architecture, gpu, self._stack(), formats, self.layout(tp, self.pp, self.dp, self.ep))

    def _stack(self) -> Stack:
        from kernelcast.serving.service import read_overheads
        from kernelcast.stacks import stack

        engine = stack(self.stack)
        if self.server is not None:
            engine = read_overheads(self.server, engine, {shared.resolve_gpu(self.gpu, self.set).label})
        return self.started(engine)

    def _pool(self, deployment: Deployment, context: int, replicas: int, drafting: Speculation | None = None,
              offline_prompt: int = 0) -> EnginePool:  # fmt: skip
        from kernelcast.inference.deployment import step_tokens
        from kernelcast.serving.service import EnginePool, engine_settings

        tokens, chunked = self.step_limits
        ranks = self.ranks_of_limits(deployment.layout)
        if ranks > 1:  # the chunk is of all ranks, by default too
            tokens = tokens or step_tokens(deployment.stack, deployment.gpu)
        given: dict[str, Any] = {
            "max_num_seqs": self.max_num_seqs and max(1, self.max_num_seqs // ranks),
            "max_num_batched_tokens": tokens and max(1, tokens // ranks),
            "kv_blocks": self.num_gpu_blocks_override, "block_size": self.block_size,
            "prefix_caching": self.enable_prefix_caching, "chunked_prefill": chunked,
            "async_scheduling": self.async_scheduling, "policy": self.schedule_policy,
            "capacity": self.capacity_policy, "recv_interval": self.scheduler_recv_interval,
            "dp_wait": self.attention_dp_timeout_iters,
        }  # fmt: skip
        draft = drafting.draft if drafting else None
        settings = engine_settings(deployment, given, context, draft, offline_prompt)
        self.check_cache(deployment, settings.kv_tokens)
        return EnginePool(deployment, settings, replicas)

    def _speculation(self, deployment: Deployment) -> Speculation | None:
        def deploy(draft: Architecture) -> Deployment:
            formats = shared.precision(draft, self.dtype, self.quantization, self.kv_dtype)
            return replace(deployment, model=draft, precision=formats)

        return speculation(self.draft_tokens, self.acceptance, self.draft_model, deployment, deploy)


@dataclass(frozen=True, kw_only=True)
class SimulateQuestion(LoadParameters, GoalParameters, ServiceParameters):
    """A service under a load; None: not given."""

    command: ClassVar[str] = "simulate"

    model: shared.ModelName
    goodput: Annotated[
        Sequence[str] | None,
        option(
            metavar="NAME:MS",
            help="a limit of each request: ttft, tpot or e2el in ms; may be repeated",
            type=list[str] | None,
        ),
    ] = None
    offline: Annotated[
        bool,
        option(help="all requests at once, without a server: vllm bench throughput, trtllm-bench throughput, "
               "LLM.generate"),
    ] = False  # fmt: skip
    intervals: shared.Intervals = True

    def answer(self, report: Report | None = None) -> Simulation:
        """The simulation. ``report`` gets which run is under way, how many of its requests are done, of how many."""
        from kernelcast.serving.simulate import simulate

        goals, model = parse_goals(self.goodput or ()), shared.resolve_model(self.model)
        load = build_load(self, self.longest_request(model), at_once=self.offline)
        service = self.service(model, load, offline=self.offline)
        progress = None if report is None else lambda run, done: report(run, done, len(load))
        return simulate(service, load, self.conditions, goals=goals, targets=self.targets, seed=self.seed,
                        intervals=self.intervals, capacity=True, progress=progress)  # fmt: skip


def parse_goals(pairs: Sequence[str]) -> LatencyGoals:
    """``ttft:500`` and the like, milliseconds as vLLM takes them."""
    from kernelcast.serving.metrics import LatencyGoals

    goals = {}
    for pair in (item for text in pairs for item in text.split()):
        name, colon, text = pair.partition(":")
        try:
            value = float(text.removesuffix("ms"))
        except ValueError:
            colon = ""
        if not colon or name not in _GOALS or not value > 0:
            raise KernelcastError(f"`goodput` takes NAME:MS of {', '.join(_GOALS)}, as in ttft:500, not {pair!r}")
        goals[f"{name}_s"] = value / 1e3
    return LatencyGoals(**goals)
