"""Steps of a serving engine, timed one by one inside it: `kernelcast collect --engine vllm`.

The engine runs with dummy weights and its server's defaults, without the HTTP front end. Requests are added so that
steps have the wanted composition: sequences that decode, of one context, and a prompt beside them. All steps are timed
first; the profiler, which slows every launch after it, comes last.

A file of steps has a line of JSON each: what ran (``FILE_TYPE``), then the steps, as they are measured.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kernelcast.errors import KernelcastError

FILE_TYPE = "kernelcast engine steps"
# Contexts: sequences that decode, from most (those too many are aborted), and the prompts beside them
_PROMPTS = (32, 128, 512, 1024, 2048, 4096, 7900)
_GRID = {1024: ((256, 128, 64, 32, 8, 1), _PROMPTS), 6000: ((64, 8, 1), (128, 1024, 4096))}
_SETTLE, _DECODE_STEPS, _BURST = 4, 12, 3  # steps: before the first that counts; pure decode; with a prompt each
_BURSTS, _LONG = 3, 4096  # of prompts of one length; one burst alone from this length on
_FILL_SHARE = 0.8  # of the KV cache, that a case may fill
_PROFILED = ((1, 0), (64, 0), (256, 0), (1, 512), (64, 128), (64, 1024), (64, 4096))
_PROFILED_STEPS = 3


@dataclass(frozen=True)
class StepCase:
    """What a step computes: ``decodes`` sequences with ``context`` tokens each in the KV cache, and ``prompts`` equal
    prompts of ``prompt_tokens`` after ``past`` ones."""

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


class Engine(Protocol):
    """An engine that runs in this process."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int

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


def write_steps(
    out: Path, about: Mapping[str, Any], start: Callable[[], Started], seconds: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:  # fmt: skip
    """Measure all steps into ``out``; the number of them. What is measured when ``seconds`` end is a whole file; a run
    that was interrupted leaves its steps in FILE.progress.jsonl."""
    until, count = time.monotonic() + (seconds or float("inf")), 0
    progress = out.with_suffix(".progress.jsonl")
    with start() as (engine, settings), progress.open("w", encoding="utf-8") as file:
        print(json.dumps({"kind": FILE_TYPE, **about, **settings}), file=file)
        for record in itertools.chain(measure_steps(engine, say), profile_steps(engine, say)):
            print(json.dumps(record), file=file, flush=True)
            count += 1
            if time.monotonic() > until:
                break
    progress.replace(out)
    return count


def planned(engine: Engine) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Contexts, each with the numbers of sequences that fit, from most."""
    for context, (wanted, _) in _GRID.items():
        if context + 512 < engine.max_model_len:
            most = min(_FILL_SHARE * engine.kv_tokens / (context + 512), engine.max_num_seqs)
            if counts := tuple(n for n in wanted if n <= most):
                yield context, counts


def measure_steps(engine: Engine, say: Callable[[str], None] = lambda text: None) -> Iterator[dict[str, Any]]:
    """Every case as a record: its step time (median, quartiles), the host's and the GPU's part."""
    longest = min(engine.max_num_batched_tokens, engine.max_model_len) - 1
    say("prompts alone")
    for tokens in filter(longest.__ge__, _PROMPTS):
        yield from _alone(engine, tokens, 1)
        if 4 * tokens <= engine.max_num_batched_tokens:
            yield from _alone(engine, tokens, 4)
    for context, counts in planned(engine):
        say(f"{counts[0]} sequences of {context} tokens")
        running = _filled(engine, counts[0], context)
        for count in counts:
            engine.abort(running[count:])
            running = running[:count]
            yield from _decoding(engine, count, filter(longest.__ge__, _GRID[context][1]))
        _emptied(engine, running)


def profile_steps(engine: Engine, say: Callable[[str], None] = lambda text: None) -> Iterator[dict[str, Any]]:
    """Kernels of some cases, per step."""
    context = min(_GRID)
    counts = sorted({count for count, _ in _PROFILED}, reverse=True)
    room = _FILL_SHARE * engine.kv_tokens / (context + 512)
    counts = [count for count in counts if count <= min(room, engine.max_num_seqs)]
    running = _filled(engine, counts[0], context)
    for count in counts:
        engine.abort(running[count:])
        running = running[:count]
        for decodes, tokens in _PROFILED:
            if decodes != count or tokens + count > engine.max_num_batched_tokens:
                continue
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
                **asdict(StepCase(count, round(engine.take()[-1].context), tokens, 1 if tokens else 0)),
                "kind": "kernels",
                "repeats": _PROFILED_STEPS,
                "kernels": {name: [n, round(seconds * 1e6, 2)] for name, (n, seconds) in kernels.items()},
            }
    _emptied(engine, running)


def _alone(engine: Engine, tokens: int, prompts: int) -> Iterator[dict[str, Any]]:
    """Steps of prompts and nothing else."""
    for _ in range(_BURST):
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


def _decoding(engine: Engine, count: int, prompts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Steps that decode ``count`` sequences, alone and with a prompt each."""
    steps = _turn(engine, _SETTLE + _DECODE_STEPS)
    yield from _record(_case(steps[-1]), "decode", steps[_SETTLE:], _apart(steps)[_SETTLE:])
    for tokens in prompts:
        if tokens + count > engine.max_num_batched_tokens:
            continue
        steps = _turn(engine, 2)
        for _ in range(1 if tokens >= _LONG else _BURSTS):
            steps += _burst(engine, tokens)
        apart = _apart(steps)
        mixed = [at for at, step in enumerate(steps) if step.prompts == 1 and step.prompt_tokens == tokens]
        for kind, before in (("first", False), ("behind", True)):  # a step with a prompt before it hides less
            if chosen := [at for at in mixed if (steps[at - 1].prompts > 0) == before]:
                case = _case(steps[chosen[0]])
                yield from _record(case, kind, [steps[at] for at in chosen], [apart[at] for at in chosen])


def _burst(engine: Engine, tokens: int) -> list[TimedStep]:
    """Steps with a prompt each, one behind another, and at least one without."""
    for _ in range(_BURST):
        engine.add(tokens, 1)
        engine.step()
    return _until(engine, lambda done: sum(step.prompts > 0 for step in done) >= _BURST and not done[-1].prompts, 64)


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
        **asdict(case), "kind": kind, "repeats": len(seconds), "step_us": round(statistics.median(ordered) * 1e6, 1),
        "spread": round((quartiles[2] - quartiles[0]) / 2 / statistics.median(ordered), 4),
        "host_us": round(statistics.median(step.host_s for step in steps) * 1e6, 1),
        "gpu_us": None if math.isnan(gpu_s) else round(gpu_s * 1e6, 1),
    }  # fmt: skip
