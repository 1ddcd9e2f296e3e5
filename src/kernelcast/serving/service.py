"""A service: scheduler settings of its engines (their launchers' defaults), pools, and measured server overheads."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import DoesNotFit, KernelcastError, warn
from kernelcast.files import complete
from kernelcast.forecast.end_to_end import EXACT, Setting, WholeSupport, end_to_end, metric_quantity, widened
from kernelcast.hardware import Gpu
from kernelcast.inference.deployment import scheduler_defaults
from kernelcast.inference.forward import Deployment
from kernelcast.inference.memory import cache_bytes, encoder_bytes, memory, state_bytes, weight_bytes
from kernelcast.inference.workload import Speculation
from kernelcast.results import support_of
from kernelcast.schedule import EvidenceSummary
from kernelcast.serving.load import Load
from kernelcast.stacks import Stack

CAPACITIES = ("grow", "estimate", "reserve")
POLICIES = ("fcfs", "lpm")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Scheduler settings of one engine. ``capacity``: how KV cache blocks are allocated. grow: as needed, and the
    latest request is preempted when none is left; estimate: by the estimated remaining output of running requests;
    reserve: all that a request may need, at admission."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int  # of a step that only prefills, over all prompts
    chunked_prefill: bool
    prefix_caching: bool
    async_scheduling: bool  # a step is scheduled while the one before it runs
    block_size: int
    capacity: str
    recv_interval: int = 1  # steps between two polls for new requests (SGLang's --scheduler-recv-interval)
    policy: str = "fcfs"  # the next waiting request: the first, or (lpm) the request with the longest cached prefix
    kv_blocks: int = 0  # of one rank; 0: as many as the memory has
    # Steps that attention-DP ranks delay prefill for, until all ranks have a prompt: a rank that prefills alone keeps
    # the others waiting (TensorRT-LLM's attention_dp_config: enable_balance, timeout_iters); 0: none
    dp_wait: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "block_size", "recv_interval"):
            if getattr(self, name) < 1:
                raise KernelcastError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.dp_wait < 0:
            raise KernelcastError(f"dp_wait must be 0 or more, not {self.dp_wait}")
        for name, known in (("capacity", CAPACITIES), ("policy", POLICIES)):
            if getattr(self, name) not in known:
                raise KernelcastError(f"{name} is one of {', '.join(known)}, not {getattr(self, name)!r}")

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size


def engine_settings(deployment: Deployment, given: dict[str, Any] | None = None, context: int = 4096,
                    draft: Deployment | None = None, offline_prompt: int = 0) -> EngineSettings:  # fmt: skip
    """The stack's defaults on this GPU, overridden by ``given`` (None: not given). ``context``: of a typical request,
    which sets the cache bytes per token where layers have a window or a state. ``draft``: a draft model in the same
    memory. ``offline_prompt``: tokens of the longest prompt of an offline run; 0: of a server."""
    overrides = {name: value for name, value in (given or {}).items() if value is not None}
    usual = _defaults(deployment.stack, deployment.gpu, offline=offline_prompt > 0)
    states = deployment.stack.state_share > 0 and state_bytes(deployment) > 0
    shared = states and overrides.get("prefix_caching", usual["prefix_caching"])
    holds = {"states": shared, "pipeline": deployment.layout.pp > 1}
    if any(holds[name] for name in deployment.stack.synchronous_with):
        usual["async_scheduling"] = False
    settings = EngineSettings(**{**usual, **overrides})
    if offline_prompt and not settings.chunked_prefill and "max_num_batched_tokens" not in overrides:
        # as trtllm-bench sets max_num_tokens: the longest prompt fits beside all sequences that may decode
        least = offline_prompt + settings.max_num_seqs
        settings = replace(settings, max_num_batched_tokens=max(settings.max_num_batched_tokens, least))
    if not settings.kv_blocks:
        settings = replace(settings, kv_blocks=kv_blocks(deployment, settings, context, draft))
    if states:
        settings = replace(settings, max_num_seqs=min(settings.max_num_seqs, _held_states(deployment, settings)))
    if settings.max_num_batched_tokens < settings.max_num_seqs and "max_num_batched_tokens" in overrides:
        if "max_num_seqs" in overrides:
            raise KernelcastError(
                f"max_num_batched_tokens {settings.max_num_batched_tokens} is less than max_num_seqs "
                f"{settings.max_num_seqs}: a step could not decode them all"
            )
        settings = replace(settings, max_num_seqs=settings.max_num_batched_tokens)
    return settings


def _defaults(stack: Stack, gpu: Gpu, *, offline: bool = False) -> dict[str, Any]:
    raw = scheduler_defaults(stack, gpu, offline)
    if not raw:
        raise KernelcastError(f"{stack.name} has no scheduler: requests under load are served by vllm, sglang, trtllm")
    raw.setdefault("max_prefill_tokens", raw["max_num_batched_tokens"])
    known = {field.name for field in fields(EngineSettings)}
    if extra := set(raw) - known:
        raise KernelcastError(f"{stack.id}.toml: [scheduler] has unknown {', '.join(sorted(extra))}")
    return raw


def kv_blocks(deployment: Deployment, settings: EngineSettings, context: int, draft: Deployment | None = None,
              step_tokens: int = 0) -> int:  # fmt: skip
    """Blocks of one rank: what weights, the largest step and the stack itself leave of the memory it fills. A draft
    model has its weights there, and its own KV cache of every token. ``step_tokens``: see ``cache_bytes``."""
    models = [deployment, *([draft] if draft else [])]
    stack, gpu = deployment.stack, deployment.gpu
    room, taken = _cache_room(deployment, settings, models)
    # Of a rank: ``cache_bytes`` is the mean over ranks.
    each = sum(cache_bytes(model, context, step_tokens) for model in models) * deployment.layout.dp / context
    if stack.state_share and (states := state_bytes(deployment) * deployment.layout.dp):
        room, each = room * (1 - stack.state_share), each - states / context
    if room <= 0:
        gib = 2**30
        if taken["weights"] + taken["stack"] >= gpu.allocatable_bytes:
            advice = "more GPUs (`tp`) or a smaller format: the weights alone are too large"
        else:
            advice = "more GPUs (`tp`), a smaller format or `max_num_batched_tokens`, or a higher " \
                     "`gpu_memory_utilization`"  # fmt: skip
        raise DoesNotFit(
            f"{deployment.model.name} on {deployment.layout.gpus} x {gpu.id} leaves no memory for a KV "
            f"cache: weights take {taken['weights'] / gib:.1f} GiB, steps of {settings.max_num_batched_tokens:,} "
            f"tokens {taken['activation'] / gib:.1f}, {stack.name} itself {taken['stack'] / gib:.1f} of the "
            f"{gpu.allocatable_bytes / gib:.1f} of a GPU, of which it fills a share of {stack.memory_share:g}; give "
            f"{advice}"
        )
    if not each:
        return 1 << 40
    return math.floor(room / (each * settings.block_size))


def _cache_room(
    deployment: Deployment, settings: EngineSettings, models: Sequence[Deployment]
) -> tuple[float, dict[str, float]]:
    """Bytes of a GPU that KV cache and states may take, and what leaves them: the largest step, weights, the stack."""
    tokens, stack = max(settings.max_num_batched_tokens, 1), deployment.stack
    held = memory(deployment, {}, tokens, min(settings.max_num_seqs, tokens))
    encoder, outputs = encoder_bytes(deployment, tokens)
    taken = {"weights": sum(weight_bytes(each) for each in models), "stack": held["stack"],
             "activation": max(held["activation"] + outputs, encoder)}  # fmt: skip
    available = deployment.gpu.allocatable_bytes
    return stack.cache_room_bytes(available, taken["stack"], taken["weights"], taken["activation"]), taken


def _held_states(deployment: Deployment, settings: EngineSettings) -> int:
    """Sequences of one rank that the pool of states has room for."""
    stack, (room, _) = deployment.stack, _cache_room(deployment, settings, [deployment])
    count = stack.state_share * room / (state_bytes(deployment) * deployment.layout.dp)
    return max(1, math.floor(count) // (stack.request_states if settings.prefix_caching else 1))


def logged_tokens(deployment: Deployment, settings: EngineSettings, longest: int) -> int:
    """The tokens that vLLM logs as its KV cache: of as many requests of ``longest`` tokens as fit while each is in a
    prefill of a whole step, which windows keep (get_max_concurrency_for_kv_cache_config, v1/core/kv_cache_utils.py)."""
    return settings.block_size * kv_blocks(deployment, settings, longest, step_tokens=settings.max_num_batched_tokens)


OVERHEADS = ("request_s", "front_s", "token_s", "step_s", "sequence_s", "launch_factor", "prompt_factor",
             "decode_factor")  # fmt: skip
# Host times that an engine overlaps with the GPU: in files, as a step that was scheduled synchronously has none
_OVERLAPPED = ("overlapped_step_s", "overlapped_sequence_s")
HOST_FACTOR = "host_factor"  # measured over usual times of the host, its launches too; the other terms have it in them
HOST_OVERHEADS = (*OVERHEADS[:6], *_OVERLAPPED, HOST_FACTOR)
SPREAD = "spread"  # relative error of its latencies after the fit
_TERMS = (*OVERHEADS, *_OVERLAPPED, SPREAD, HOST_FACTOR)
_FILE_TYPE = "kernelcast server"


def write_overheads(path: Path, stack: Stack, about: dict[str, Any], host_factor: float = 1.0) -> None:
    """The overheads of a stack; ``about``: what they were fitted to; ``host_factor``: in its host times already."""
    terms = {name: getattr(stack, name) for name in (*OVERHEADS, *_OVERLAPPED, SPREAD)}
    content = {"kind": _FILE_TYPE, "stack": stack.id, "about": about, "terms": terms | {HOST_FACTOR: host_factor}}
    with complete(path.resolve()) as part:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def without_overheads(stack: Stack) -> Stack:
    """``stack`` without overheads, to compare two servers regardless of them."""
    none: dict[str, Any] = dict.fromkeys((*OVERHEADS, SPREAD), 0.0)
    return replace(stack, **none)


def _fits(name: str, value: Any) -> bool:
    """Seconds are 0 or more, factors above 0, a spread is a share."""
    if name not in _TERMS or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    above = value > 0 if name.endswith("factor") else value >= 0
    return above and value < (1.0 if name == SPREAD else math.inf)


def read_overheads(path: Path, stack: Stack, gpus: Collection[str]) -> Stack:
    """``stack`` with the overheads of a file. The factors of step times hold for the GPU that was measured: where
    ``gpus`` (labels) has another GPU, only the host times are used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KernelcastError(
            f"no file {path}; `kernelcast replay BENCH.json --calibrate -o FILE` writes one"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KernelcastError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("kind") != _FILE_TYPE or not isinstance(content.get("terms"), dict):
        raise KernelcastError(f'{path} is not a file of `kernelcast replay --calibrate`: "kind" is not {_FILE_TYPE!r}')
    if content.get("stack") != stack.id:
        raise KernelcastError(f"{path} describes a server of {content.get('stack')}, not of {stack.id}: give `stack`")
    overheads = content["terms"]
    for name, value in overheads.items():
        if not _fits(name, value):
            known = ", ".join(_TERMS)
            raise KernelcastError(f"{path}: {name} = {value!r} is none of {known} with a number that it can be")
    measured_on = content.get("about", {}).get("gpu")
    if set(gpus) != {measured_on}:
        warn(f"{path} was fitted on {measured_on}: for other GPUs only its host times are used")
        overheads = {name: value for name, value in overheads.items() if name in HOST_OVERHEADS}
    others = {name: value for name, value in overheads.items() if name != HOST_FACTOR}
    return replace(stack.with_host(overheads.get(HOST_FACTOR, 1.0)), **others)


ROUTERS = ("round_robin", "least_loaded", "cache_aware")


def whole_support(setting: Setting, kernels: EvidenceSummary) -> WholeSupport:
    """Support of a run by its setting and the evidence behind its kernels."""
    return WholeSupport.of(setting, support_of((share, level) for level, share in kernels.support.items()))


@dataclass(frozen=True)
class EnginePool:
    """Equal engines. ``settings`` not given: those of the stack's launcher."""

    deployment: Deployment
    settings: EngineSettings = field(default=None)  # type: ignore[assignment]  # never None once it is made
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.settings is None:
            object.__setattr__(self, "settings", engine_settings(self.deployment))
        if not self.settings.async_scheduling:
            stack = self.deployment.stack.synchronous()
            object.__setattr__(self, "deployment", replace(self.deployment, stack=stack))
        if self.replicas < 1:
            raise KernelcastError(f"replicas must be 1 or more, not {self.replicas}")

    @property
    def gpus(self) -> int:
        return self.replicas * self.deployment.layout.gpus


@dataclass(frozen=True)
class Service:
    """One pool of engines; or, disaggregated, a prefill pool and a decode pool. ``offline``: used as a library, without
    a server."""

    pool: EnginePool
    prefill: EnginePool | None = None  # disaggregated
    router: str = "round_robin"
    speculation: Speculation | None = None
    transfer: str | None = None  # the fabric of the KV transfer; None: see ``transfer_fabric``
    offline: bool = False

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise KernelcastError(f"a router is one of {', '.join(ROUTERS)}, not {self.router!r}")
        if self.offline and self.prefill:
            raise KernelcastError("an offline run has no server that sends KV caches: leave out `prefill_replicas`")
        if self.offline:
            deployment = self.pool.deployment
            inside = replace(deployment, stack=deployment.stack.without_server())
            object.__setattr__(self, "pool", replace(self.pool, deployment=inside))

    def setting(self, load: Load) -> Setting:
        """What decides whether such a run was measured."""
        return self.pool.deployment.setting("offline" if self.offline else load.form)

    def supports(self, load: Load, kernels: EvidenceSummary) -> WholeSupport:
        """Of its kernels, and of a run as a whole."""
        return whole_support(self.setting(load), kernels)

    def interval(self, load: Load, metric: str, values: Sequence[float], measured: bool,
                 follows: float = 1.0) -> tuple[float, float]:  # fmt: skip
        """Both ends of a metric: ``values``: as forecast, then at both ends of every step. ``measured``: this server
        was, so that nothing of the whole is in doubt. ``follows``: see ``follows_steps``."""
        quantity = None if measured else metric_quantity(metric)
        spread = end_to_end().spread(self.setting(load), quantity) if quantity else EXACT
        ends = np.array([values[0], min(values), max(values)])
        _, low, high = widened(ends, spread, follows if quantity == "throughput" else 1.0)
        return float(low), float(high)

    @property
    def gpus(self) -> int:
        return self.pool.gpus + (self.prefill.gpus if self.prefill else 0)
