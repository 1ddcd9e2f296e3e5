"""Steps that were timed inside an engine, each beside its forecast; and the engine's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernelcast.inference.memory import memory
from kernelcast.schedule import EvidenceSummary
from kernelcast.serving.load import Load
from kernelcast.serving.service import EnginePool, Service, logged_tokens
from kernelcast.serving.step_table import GROUPS, Composition, MeasuredStep, StepTable
from kernelcast.serving.step_times import StepTimes, StepTimeTables, host_time
from kernelcast.stacks import Stack

LARGE_HOST = 0.5  # of a step: a host that takes less is hidden by the GPU, and not scored


@dataclass(frozen=True)
class StepComparison:
    """One step: measured, and as forecast. ``host_s``: what the host does to launch it."""

    step: MeasuredStep
    predicted_s: float
    low_s: float
    high_s: float
    host_s: float
    graph: bool  # it replays a CUDA graph, whole or in pieces

    @property
    def error(self) -> float:
        """Relative error of the forecast."""
        return self.predicted_s / self.step.step_s - 1

    @property
    def inside(self) -> bool:
        return self.low_s <= self.step.step_s <= self.high_s

    @property
    def host_error(self) -> float | None:
        """Relative error of the host's time, where it is a large part of the measured step."""
        host_s = self.step.host_s
        return self.host_s / host_s - 1 if host_s and host_s > LARGE_HOST * self.step.step_s else None


@dataclass(frozen=True)
class GroupErrors:
    """Errors of steps of one kind, as shares; ``host``: of the host's time of ``large_hosts`` of them."""

    steps: int
    mean: float
    median: float
    worst: float
    bias: float
    inside: float
    large_hosts: int
    host: float | None

    @classmethod
    def of(cls, steps: Sequence[StepComparison]) -> GroupErrors:
        errors = np.array([step.error for step in steps])
        sizes, inside = np.abs(errors), np.mean([step.inside for step in steps])
        hosts = [abs(error) for step in steps if (error := step.host_error) is not None]
        return cls(len(steps), float(sizes.mean()), float(np.median(sizes)), float(sizes.max()), float(errors.mean()),
                   float(inside), len(hosts), float(np.mean(hosts)) if hosts else None)  # fmt: skip


@dataclass(frozen=True, eq=False)
class StepReplay:
    """All steps of a file beside their forecasts. ``service``: the engine that ran, as it is forecast; the room of its
    KV cache too."""

    table: StepTable
    service: Service
    steps: tuple[StepComparison, ...]
    rests_on: EvidenceSummary
    assumed: tuple[str, ...] = ()

    def calibrated(self, forecasts: StepForecasts, stack: Stack, host: float) -> StepReplay:
        """The same steps with other overheads, and launches that take ``host`` times as long."""
        return replace(self, steps=forecasts.compared(stack, host))

    @property
    def groups(self) -> dict[str, GroupErrors]:
        """Errors by kind of step, and of all."""
        names = [name for name in dict.fromkeys(GROUPS.values()) if any(each.step.group == name for each in self.steps)]
        groups = {name: GroupErrors.of([each for each in self.steps if each.step.group == name]) for name in names}
        return groups | {"all": GroupErrors.of(self.steps)}

    @property
    def logged_tokens(self) -> int:
        """Of the KV cache, as the engine logs them."""
        pool = self.service.pool
        longest = self.table.count("max_model_len") or pool.deployment.model.max_context
        return logged_tokens(pool.deployment, pool.settings, longest)

    @property
    def memory_bytes(self) -> dict[str, tuple[float | None, float]]:
        """Parts of a GPU's memory: as the engine counted them, and as forecast."""
        pool, held = self.service.pool, self.table.engine.get("memory_bytes")
        measured: Mapping[str, object] = held if isinstance(held, Mapping) else {}
        settings, deployment = pool.settings, pool.deployment
        parts = memory(deployment, {}, settings.max_num_batched_tokens, settings.max_num_seqs)
        share_bytes = deployment.stack.memory_share * float(deployment.gpu.dram_bytes)

        def counted(*names: str) -> float | None:
            sizes = [float(size) for name in names if isinstance(size := measured.get(name), int | float)]
            return sum(sizes) if sizes else None

        return {
            "weights": (counted("weights"), float(parts["weights"])),
            "activation": (counted("activation"), float(parts["activation"])),
            "stack": (counted("context", "graphs"), float(parts["stack"])),
            "share": (counted("used_share"), share_bytes),
        }


def engine_load(table: StepTable) -> Load:
    """One request as long as the longest sequence of the steps: what their tables must cover."""
    tokens = [max(step.context + 1, step.past + step.prompt_tokens) for step in table.steps]
    return Load(np.zeros(1), np.array([int(max(tokens))]), np.array([1]))


def as_measured(pool: EnginePool, table: StepTable) -> EnginePool:
    """The engine with the CUDA graphs that it captured."""
    stack = pool.deployment.stack
    mode, sizes = table.graph_mode, table.graph_sizes
    if mode is not None:
        stack = replace(stack, graphs=mode != "NONE", graph_prompts=mode not in ("NONE", "FULL_DECODE_ONLY"))
    if sizes:
        stack = replace(stack, graph_sizes=tuple((size, size, 1) for size in sizes))
    return replace(pool, deployment=replace(pool.deployment, stack=stack))


class StepForecasts:
    """Forecasts of a table's steps, with any overheads."""

    def __init__(self, pool: EnginePool, table: StepTable, tables: StepTimeTables) -> None:
        self.pool, self.table = as_measured(pool, table), table
        self.times = tables.of(self.pool, engine_load(table))

    @property
    def stack(self) -> Stack:
        return self.pool.deployment.stack

    def on(self, stack: Stack, host: float = 1.0) -> StepTimes:
        """Times with the overheads of ``stack``, whose launches take ``host`` times as long as the engine's own."""
        return self.times.with_host(replace(self.pool.deployment, stack=stack), host)

    def compared(self, stack: Stack, host: float = 1.0) -> tuple[StepComparison, ...]:
        times = self.on(stack, host)
        return tuple(self._compared(step, times) for step in self.table.steps)

    def _compared(self, step: MeasuredStep, times: StepTimes) -> StepComparison:
        likely, low, high = (step_seconds(times, step, variant) for variant in ("likely", "low", "high"))
        tokens = step.decodes + step.prompt_tokens
        graph = bool(times.deployment.stack.replays(tokens, step.decodes, decodes=not step.prompts))
        host_s = times.host_s(step.decodes + step.prompts, graph=graph, decodes=not step.prompts)
        return StepComparison(step, likely, low, high, host_s, graph)


def step_seconds(times: StepTimes, step: Composition, variant: str = "likely") -> float:
    """A step as an engine in a simulation takes it."""
    stack, context_sum = times.deployment.stack, step.decodes * step.context
    if step.prompts:
        work_s = times.mixed(step.decodes, context_sum, step.prompt_tokens, step.past, step.decodes + step.prompts,
                             variant, step.prompts)  # fmt: skip
    else:
        work_s = times.decode(step.decodes, context_sum, variant)
    each_s = (stack.step_s if step.decodes else stack.prefill_s) + stack.sequence_s * (step.decodes + step.prompts)
    return work_s + host_time(variant, each_s, stack.spread)


def replay_steps(service: Service, forecasts: StepForecasts, assumed: tuple[str, ...] = ()) -> StepReplay:
    """``service``: of one pool, with the settings that the engine had."""
    steps = forecasts.compared(forecasts.stack)
    return StepReplay(forecasts.table, service, steps, forecasts.times.rests_on, assumed)
