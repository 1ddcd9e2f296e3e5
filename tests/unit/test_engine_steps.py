"""Steps of a serving engine, timed in it: with a fake engine that keeps two steps in flight, as vLLM does."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kernelcast.collect.engine_steps import TimedStep, measure_steps, profile_steps
from kernelcast.collect.vllm_engine import composed
from kernelcast.errors import KernelcastError


class FakeEngine:
    """Decodes cost 1 ms and 10 us a sequence; prompts 1 us a token; the host takes 2 ms to launch a step with one."""

    max_num_seqs, max_num_batched_tokens, max_model_len, kv_tokens = 64, 2048, 16384, 200_000

    def __init__(self, *, stuck: bool = False) -> None:
        self.clock, self.count, self.stuck = 0.0, 0, stuck
        self.requests: dict[str, list[int]] = {}  # prompt tokens left, context, tokens left to write
        self.queue: deque[TimedStep] = deque()
        self.done: list[TimedStep] = []

    def add(self, prompt_tokens: int, output_tokens: int) -> str:
        self.count += 1
        self.requests[str(self.count)] = [prompt_tokens, 0, output_tokens]
        return str(self.count)

    def abort(self, requests: list[str]) -> None:
        for name in requests:
            self.requests.pop(name, None)

    def _schedule(self) -> TimedStep:
        room, decodes, context, prompts, tokens, past = self.max_num_batched_tokens, 0, 0, 0, 0, 0
        for name, request in list(self.requests.items()):
            if request[0] and room:
                taken = min(room, request[0])
                past += request[1]
                request[0] -= taken
                request[1] += taken
                prompts, tokens, room = prompts + 1, tokens + taken, room - taken
            elif not request[0]:
                decodes, context, room = decodes + 1, context + request[1], room - 1
                request[1] += 1
            request[2] -= not request[0]
            if not request[2]:
                del self.requests[name]
        return TimedStep(decodes, context / max(decodes, 1), prompts, tokens, past, self.clock)

    def step(self) -> bool:
        if self.stuck:
            return True
        if not self.requests and not self.queue:
            return False
        if self.requests:
            step = self._schedule()
            step.host_s = 2e-3 if step.prompts else 2e-4
            self.clock += step.host_s
            self.queue.append(step)
            if len(self.queue) < 2:
                return True
        first = self.queue.popleft()
        work_s = 1e-3 + 1e-5 * first.decodes + 1e-6 * first.prompt_tokens
        began = max(first.scheduled_s, self.done[-1].done_s if self.done else 0.0)
        first.done_s = self.clock = max(began + work_s, self.clock)
        self.done.append(first)
        return True

    def take(self) -> list[TimedStep]:
        taken, self.done = self.done[:], self.done[-1:] if False else []
        return taken

    def profiled(self, run: Callable[[], None]) -> dict[str, tuple[int, float]]:
        run()
        return {"gemm": (12, 3e-3)}


def test_every_case_is_timed() -> None:
    records = list(measure_steps(FakeEngine()))
    kinds = {record["kind"] for record in records}
    assert kinds == {"alone", "decode", "first", "behind"}
    decode = [record for record in records if record["kind"] == "decode"]
    assert [(record["decodes"], record["context"] > 5000) for record in decode] == [
        (64, False), (32, False), (8, False), (1, False), (8, True), (1, True)
    ]  # fmt: skip
    assert decode[0]["repeats"] == 12
    mixed = next(record for record in records if record["kind"] == "behind" and record["decodes"] == 32)
    assert (mixed["prompts"], mixed["prompt_tokens"], mixed["repeats"]) == (1, 32, 6)
    alone = [(record["prompts"], record["prompt_tokens"]) for record in records if record["kind"] == "alone"]
    assert (1, 512) in alone and (4, 2048) in alone and (1, 2048) not in alone  # the step has room for 2,048


def test_kernels_are_counted_per_step() -> None:
    records = list(profile_steps(FakeEngine()))
    assert [(record["decodes"], record["prompt_tokens"]) for record in records] == [
        (64, 0), (64, 128), (64, 1024), (1, 0), (1, 512)
    ]  # fmt: skip
    assert records[0]["kernels"] == {"gemm": [12, 3000.0]} and records[0]["repeats"] == 3


def test_an_engine_that_does_not_step_ends_it() -> None:
    with pytest.raises(KernelcastError, match="does not"):
        list(measure_steps(FakeEngine(stuck=True)))


def test_what_a_scheduled_step_of_vllm_computes() -> None:
    cached = SimpleNamespace(req_ids=["a", "b", "c"], num_computed_tokens=[100, 300, 512], num_output_tokens=[5, 1, 0])
    output = SimpleNamespace(
        scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1, "b": 1, "c": 512, "d": 256},
        scheduled_new_reqs=[SimpleNamespace(req_id="d", num_computed_tokens=0)],
    )  # fmt: skip
    step = composed(output, 0.0)
    assert (step.decodes, step.context, step.prompts, step.prompt_tokens) == (2, 200.0, 2, 768)
    assert step.past == pytest.approx(512 * 512 / 768)
