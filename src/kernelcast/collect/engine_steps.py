"""Steps of a serving engine, timed one by one inside it: `kernelcast collect --engine vllm`.

The engine runs with dummy weights and its server's defaults, without the HTTP front end. Requests are added so that
steps have the wanted composition: sequences that decode, of one context, and a prompt beside them. All steps are timed
first; the profiler, which slows every launch after it, comes last.

``step_plan`` says which steps, ``step_file`` writes them; ``kernelcast.serving.step_table`` reads the file.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from kernelcast.collect.step_plan import FIRST_CONTEXT, Limits, PlannedStep, planned_steps
from kernelcast.errors import KernelcastError
from kernelcast.serving.step_table import KERNELS

_SETTLE, _DECODE_STEPS, _ALONE = 4, 12, 3  # steps: before the first that counts; pure decode; of prompts alone
# Steps with a prompt each, in a row, and how many of them begin and end it: a step ends for the host once the next is
# launched, so that the first takes as long as the launches of two, and the last as that of a step without a prompt
_BURST, _BEGIN, _END = 10, 2, 1
_LONG, _LONG_BURST = 4096, 6  # prompts from this length on
_PROFILED_STEPS = 3


@dataclass(frozen=True)
class StepCase:
    """What a step computes: ``decodes`` sequences with ``context`` tokens each in the KV cache, and ``prompts`` equal
    prompts of ``prompt_tokens`` together after ``past`` ones."""

    decodes: int
    context: int
    prompt_tokens: int = 0
    prompts: int = 0
    past: int = 0


@dataclass
class TimedStep:
    """One step as the engine ran it; seconds. ``done_s``: when its tokens came, on the host's clock; ``host_s``: of
    the calls that launch it; ``gpu_s``: from its first to its last kernel, NaN where the GPU is in another process."""

    decodes: int
    context: float
    prompts: int
    prompt_tokens: int
    past: float
    scheduled_s: float
    done_s: float = float("nan")
    host_s: float = 0.0
    events: tuple[Any, Any] | None = field(default=None, repr=False)

    @property
    def gpu_s(self) -> float:
        if self.events is None:
            return float("nan")
        self.events[1].synchronize()
        seconds: float = self.events[0].elapsed_time(self.events[1]) / 1e3
        return seconds


class Engine(Limits, Protocol):
    """An engine that runs in this process."""

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        """A request of random tokens; returns its id."""
        ...

    def abort(self, requests: list[str]) -> None: ...

    def step(self) -> bool:
        """One turn of the engine's loop; False where nothing is left to run."""
        ...

    def take(self) -> list[TimedStep]:
        """Steps that ended since the last call."""
        ...

    def profiled(self, run: Callable[[], None]) -> dict[str, tuple[int, float]]:
        """GPU kernels, and calls of the CUDA runtime, of ``run``: how often each, and seconds."""
        ...


Started = AbstractContextManager[tuple[Engine, Mapping[str, Any]]]  # an engine, and its settings


def measure_steps(
    engine: Engine, say: Callable[[str], None] = lambda text: None, todo: Collection[PlannedStep] | None = None
) -> Iterator[dict[str, Any]]:
    """Every step of ``todo`` (None: of the whole plan) as a record: its time (mean, quartiles), the host's and the
    GPU's part."""
    steps = [step for step in (planned_steps(engine) if todo is None else todo) if step.step_type != KERNELS]
    for step in steps:
        if step.step_type == "alone":
            say(f"{step.prompts} prompts of {step.prompt_tokens // step.prompts} tokens")
            yield from _alone(engine, step.prompt_tokens // step.prompts, step.prompts)
    for context, of_context in _grouped(steps, "context"):
        running: list[str] = []
        for count, wanted in _grouped(of_context, "decodes"):
            say(f"{count} sequences of {context} tokens")
            running = _kept(engine, running, count, context)
            yield from _decoding(engine, count, wanted)
        _emptied(engine, running)


def _grouped(steps: Sequence[PlannedStep], name: str) -> Iterator[tuple[int, list[PlannedStep]]]:
    """Steps that decode, by their context or their sequences, in order."""
    decoding = [step for step in steps if step.decodes]
    for value in dict.fromkeys(getattr(step, name) for step in decoding):
        yield value, [step for step in decoding if getattr(step, name) == value]


def _kept(engine: Engine, running: list[str], count: int, context: int) -> list[str]:
    """``count`` sequences that decode: of those that run, or new ones."""
    if not running:
        return _filled(engine, count, context)
    engine.abort(running[count:])
    return running[:count]


def profile_steps(
    engine: Engine, say: Callable[[str], None] = lambda text: None, todo: Collection[PlannedStep] | None = None
) -> Iterator[dict[str, Any]]:
    """Kernels of the steps of ``todo`` (None: of the plan's), each over several steps."""
    steps = [step for step in (planned_steps(engine) if todo is None else todo) if step.step_type == KERNELS]
    running: list[str] = []
    for count, wanted in _grouped(steps, "decodes"):
        running = _kept(engine, running, count, FIRST_CONTEXT)
        for step in wanted:
            tokens = step.prompt_tokens
            say(f"kernels of {count} sequences{f' and a prompt of {tokens}' if tokens else ''}")
            _turn(engine, _SETTLE)
            engine.take()

            def run(tokens: int = tokens) -> None:
                for _ in range(_PROFILED_STEPS):
                    if tokens:
                        engine.add(tokens, 1)
                    engine.step()

            kernels = engine.profiled(run)
            yield {
                **asdict(StepCase(count, round(engine.take()[-1].context), tokens, step.prompts)),
                "kind": KERNELS,
                "repeats": _PROFILED_STEPS,
                "kernels": {name: [n, round(seconds * 1e6, 2)] for name, (n, seconds) in kernels.items()},
            }
    _emptied(engine, running)


def _alone(engine: Engine, tokens: int, prompts: int) -> Iterator[dict[str, Any]]:
    """Steps of prompts and nothing else."""
    for _ in range(_ALONE):
        for _ in range(prompts):
            engine.add(tokens, 1)
        _emptied(engine, [])
    steps = [step for step in engine.take() if step.prompts == prompts and not step.decodes][1:]
    seconds = [step.done_s - step.scheduled_s for step in steps]
    yield from _record(StepCase(0, 0, tokens * prompts, prompts), "alone", steps, seconds)


def _filled(engine: Engine, count: int, context: int) -> list[str]:
    """``count`` sequences that decode."""
    running = [engine.add(context, 100_000) for _ in range(count)]
    most = 64 + 2 * count * context // engine.max_num_batched_tokens
    _until(engine, lambda steps: sum(step.decodes == count and not step.prompts for step in steps) >= 2, most + count)
    return running


def _until(engine: Engine, ended: Callable[[list[TimedStep]], bool], most: int = 1000) -> list[TimedStep]:
    """Steps until ``ended``; no engine needs ``most`` turns."""
    steps = engine.take()
    for _ in range(most):
        if ended(steps):
            return steps
        engine.step()
        steps += engine.take()
    raise KernelcastError(f"the engine does not run the steps that it was given: {steps[-1:]}")


def _emptied(engine: Engine, running: list[str]) -> None:
    engine.abort(running)
    for _ in range(1000):
        if not engine.step():
            return
    raise KernelcastError("the engine does not end the requests that it was given")


def _turn(engine: Engine, count: int) -> list[TimedStep]:
    return _until(engine, lambda steps: len(steps) >= count, 2 * count + 8)


def _decoding(engine: Engine, count: int, wanted: Sequence[PlannedStep]) -> Iterator[dict[str, Any]]:
    """Steps that decode ``count`` sequences, alone and with a prompt each."""
    if any(step.step_type == "decode" for step in wanted):
        steps = _turn(engine, _SETTLE + _DECODE_STEPS)
        yield from _record(_case(steps[-1]), "decode", steps[_SETTLE:], _apart(steps)[_SETTLE:])
    for tokens in (step.prompt_tokens for step in wanted if step.prompts):
        steps = _turn(engine, 2)
        steps += _burst(engine, tokens)
        apart = _apart(steps)
        chosen = _middle([step.prompts == 1 and step.prompt_tokens == tokens for step in steps])
        yield from _record(_case(steps[chosen[0]]), "mixed", [steps[at] for at in chosen], [apart[at] for at in chosen])


def _burst(engine: Engine, tokens: int) -> list[TimedStep]:
    """Steps with a prompt each, one behind another, and at least one without."""
    count = _BURST if tokens < _LONG else _LONG_BURST
    for _ in range(count):
        engine.add(tokens, 1)
        engine.step()
    return _until(engine, lambda done: sum(step.prompts > 0 for step in done) >= count and not done[-1].prompts, 64)


def _middle(wanted: Sequence[bool]) -> list[int]:
    """Where the longest row of wanted steps is, without its begin and end; all of it where it is too short."""
    rows = [
        list(row) for is_wanted, row in itertools.groupby(range(len(wanted)), key=lambda at: wanted[at]) if is_wanted
    ]
    longest = max(rows, key=len)
    return longest[_BEGIN : len(longest) - _END] or longest


def _case(step: TimedStep) -> StepCase:
    return StepCase(step.decodes, round(step.context), step.prompt_tokens, step.prompts, round(step.past))


def _apart(steps: list[TimedStep]) -> list[float]:
    """From the end of the step before to the end of each."""
    ends = [step.done_s for step in steps]
    return [ends[0] - steps[0].scheduled_s, *(after - before for before, after in itertools.pairwise(ends))]


def _record(case: StepCase, kind: str, steps: list[TimedStep], seconds: list[float]) -> Iterator[dict[str, Any]]:
    if not seconds:
        return
    ordered, gpu_s = sorted(seconds), statistics.median(step.gpu_s for step in steps)
    quartiles = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [ordered[0]] * 3
    yield {
        **asdict(case), "kind": kind, "repeats": len(seconds), "step_us": round(statistics.mean(seconds) * 1e6, 1),
        "spread": round((quartiles[2] - quartiles[0]) / 2 / statistics.mean(seconds), 4),
        "host_us": round(statistics.median(step.host_s for step in steps) * 1e6, 1),
        "gpu_us": None if math.isnan(gpu_s) else round(gpu_s * 1e6, 1),
    }  # fmt: skip
