"""Steps of a serving engine, timed in it: with a fake engine that keeps two steps in flight, as vLLM does."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from step_tables import ENGINE, forecast

from kernelcast.collect import vllm_engine
from kernelcast.collect.engine_steps import TimedStep, measure_steps, profile_steps
from kernelcast.collect.step_file import StepRun, write_steps
from kernelcast.collect.step_plan import EngineLimits, PlannedStep, planned_steps
from kernelcast.collect.vllm_engine import composed, installed_release
from kernelcast.errors import KernelcastError
from kernelcast.serving.step_replay import replay_steps
from kernelcast.serving.step_table import read_steps


class FakeEngine:
    """Decodes cost 1 ms and 10 us a sequence; prompts 1 us a token; the host takes 2 ms to launch a step with one."""

    max_num_seqs, max_num_batched_tokens, max_model_len, kv_tokens = 64, 2048, 16384, 200_000

    def __init__(self, *, stuck: bool = False) -> None:
        self.clock, self.count, self.stuck = 0.0, 0, stuck
        self.requests: dict[str, list[int]] = {}  # prompt tokens left, context, tokens left to write
        self.queue: deque[TimedStep] = deque()
        self.ended_s = 0.0
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
        began = max(first.scheduled_s, self.ended_s)
        first.done_s = self.ended_s = self.clock = max(began + work_s, self.clock)
        self.done.append(first)
        return True

    def take(self) -> list[TimedStep]:
        taken, self.done = self.done, []
        return taken

    def profiled(self, run: Callable[[], None]) -> dict[str, tuple[int, float]]:
        run()
        return {"gemm": (12, 3e-3)}


def test_every_case_is_timed() -> None:
    records = list(measure_steps(FakeEngine()))
    kinds = {record["kind"] for record in records}
    assert kinds == {"alone", "decode", "mixed"}
    decode = [record for record in records if record["kind"] == "decode"]
    assert [(record["decodes"], record["context"] > 5000) for record in decode] == [
        (64, False), (32, False), (8, False), (1, False), (8, True), (1, True)
    ]  # fmt: skip
    assert decode[0]["repeats"] == 12
    mixed = next(record for record in records if record["kind"] == "mixed" and record["decodes"] == 32)
    assert (mixed["prompts"], mixed["prompt_tokens"], mixed["repeats"]) == (1, 32, 7)
    alone = [(record["prompts"], record["prompt_tokens"]) for record in records if record["kind"] == "alone"]
    assert (1, 512) in alone and (4, 2048) in alone and (1, 2048) not in alone  # the step has room for 2,048


def test_a_step_is_the_longer_of_host_and_gpu() -> None:
    """Two steps are in flight: one ends for the host once the next is launched. 2 ms of the host for a prompt; of the
    GPU 1 ms, 10 us a sequence, 1 us a token."""
    records = {(r["decodes"], r["prompt_tokens"]): r for r in measure_steps(FakeEngine()) if r["kind"] == "mixed"}
    for count, tokens in ((1, 32), (32, 128), (32, 1024), (8, 512)):
        step_us = max(2000, 1000 + 10 * count + tokens)
        assert records[count, tokens]["step_us"] == pytest.approx(step_us, rel=1e-3)
        assert records[count, tokens]["host_us"] == 2000


def test_dummy_routers_choose_by_chance() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    hidden, names = (
        2048,
        ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.router.bias", "mlp.gate_up.weight"),
    )
    weights = {f"layers.0.{name}": torch.rand(64, hidden if "weight" in name else 1) * 2e-3 - 1e-3 for name in names}
    weights["layers.0.mlp.experts.gate.weight"] = weights["layers.0.mlp.gate.weight"]  # held twice, as vLLM does
    before = weights["layers.0.mlp.gate_up.weight"].clone()
    tokens = torch.rand(100, hidden) * 2e-3 - 1e-3  # after a norm of such weights

    def distinct() -> int:
        scores = torch.softmax((tokens @ weights["layers.0.mlp.gate.weight"].T).bfloat16(), -1)
        return len(
            set((scores + weights["layers.0.mlp.gate.e_score_correction_bias"].T).topk(6).indices.flatten().tolist())
        )

    assert distinct() == 6  # the same for all tokens
    vllm_engine.route_by_chance(weights)
    assert distinct() == 64 and not weights["layers.0.mlp.router.bias"].any()
    assert torch.equal(weights["layers.0.mlp.gate_up.weight"], before)


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


# ---- the plan and the file ----
ABOUT = {name: ENGINE[name] for name in ("gpu", "model", "engine_args")}
LIMITS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 16384, "kv_blocks": 12_500}


class BrokenEngine(FakeEngine):
    """Ends with an error of its own once it has measured for a while."""

    def __init__(self, turns: int, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.turns, self.error = turns, error

    def step(self) -> bool:
        self.turns -= 1
        if self.turns < 0:
            raise self.error("CUDA error: an illegal memory access\nwas encountered")
        return super().step()


def measured(out: Path, engine: FakeEngine | None = None, seconds: float | None = None, **more: Any) -> StepRun:
    @contextmanager
    def started() -> Iterator[tuple[FakeEngine, Mapping[str, Any]]]:
        settings = {name: value for name, value in ENGINE.items() if name not in ABOUT and name != "kind"}
        yield engine or FakeEngine(), {**settings, **LIMITS, **more.pop("settings", {})}

    return write_steps(out, {**ABOUT, **more}, started, seconds)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_planned_is_what_is_measured() -> None:
    engine = FakeEngine()
    records = [*measure_steps(engine), *profile_steps(engine)]
    assert list(dict.fromkeys(PlannedStep.of(record) for record in records)) == planned_steps(FakeEngine())
    limits = EngineLimits(64, 2048, 16384, 200_000)
    assert planned_steps(limits) == planned_steps(FakeEngine())


def test_the_plan_is_within_the_limits() -> None:
    steps = planned_steps(EngineLimits(16, 1024, 4096, 12_000))
    # 80% of 12,000 tokens are six sequences of 1,024 that grow by 512: one, of 8 and 1; 6,000 are too long
    assert {(step.decodes, step.context) for step in steps if step.decodes} == {(1, 1024)}
    assert max(step.prompt_tokens + step.decodes for step in steps) <= 1024
    assert [step.prompt_tokens for step in steps if step.step_type == "alone"] == [32, 128, 128, 512, 512]
    assert not [step for step in planned_steps(EngineLimits(16, 1024, 1024, 12_000)) if step.decodes]


def test_a_file_of_a_whole_run_is_replayed(tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    done = measured(out)
    assert done.left == 0 and done.records == len(read_steps(out).steps) + len(read_steps(out).profiled)
    assert list(tmp_path.iterdir()) == [out]
    service, forecasts = forecast(out)
    found = replay_steps(service, forecasts)
    assert set(found.groups) == {"decode", "mixed", "prompts alone", "all"}
    assert found.table.kv_tokens == 200_000 and service.pool.settings.max_num_seqs == 64


def test_a_run_whose_time_is_over_goes_on(tmp_path: Path) -> None:
    out, whole = tmp_path / "steps.jsonl", tmp_path / "whole.jsonl"
    measured(whole)
    first = measured(out, seconds=1e-9)  # one record, and its time is over
    assert first.records == 1 and first.left == len(planned_steps(FakeEngine())) - 1
    assert len(read_steps(out).steps) == 1
    assert measured(out).left == 0
    keys = [(r["kind"], r["decodes"], r["prompts"], r["prompt_tokens"]) for r in lines_of(out)[1:]]
    assert keys == [(r["kind"], r["decodes"], r["prompts"], r["prompt_tokens"]) for r in lines_of(whole)[1:]]
    before = out.read_bytes()
    assert measured(out, BrokenEngine(0)).left == 0 and out.read_bytes() == before  # no engine starts


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_run_keeps_what_it_has(tmp_path: Path, error: type[BaseException]) -> None:
    out, progress = tmp_path / "steps.jsonl", tmp_path / "steps.progress.jsonl"
    expected = KernelcastError if error is RuntimeError else error
    with pytest.raises(expected) as raised:
        measured(out, BrokenEngine(300, error))
    if error is RuntimeError:
        said = "RuntimeError: CUDA error: an illegal memory access was encountered; what was measured is in"
        assert str(raised.value).startswith(said) and "run the same command again" in str(raised.value)
    assert not out.exists() and len(kept := lines_of(progress)) > 10
    with progress.open("a") as file:
        file.write('{"kind": "decode", "dec')  # a torn line
    assert measured(out).left == 0 and not progress.exists()
    assert lines_of(out)[: len(kept)] == kept
    cases = [PlannedStep.of(record) for record in lines_of(out)[1:]]
    assert list(dict.fromkeys(cases)) == planned_steps(FakeEngine())


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    out.write_text('{"op": "gemm"}')
    with pytest.raises(KernelcastError, match="is there and has no steps of an engine"):
        measured(out)
    assert out.read_text() == '{"op": "gemm"}'
    out.unlink()
    measured(out, seconds=1e-9)
    before = out.read_bytes()
    with pytest.raises(KernelcastError, match=r"has steps of model 'llama-3.1-8b', not of 'qwen3-4b'"):
        measured(out, model="qwen3-4b")
    with pytest.raises(KernelcastError, match=r"has steps of release '0.22.1', not of '0.23.0'"):
        measured(out, settings={"release": "0.23.0"})
    assert out.read_bytes() == before and list(tmp_path.iterdir()) == [out]
    out.write_text(out.read_text() + "torn {\n")
    with pytest.raises(KernelcastError, match="is damaged"):
        measured(out)


@pytest.mark.parametrize(
    ("release", "said"),
    [
        (None, "needs vLLM 0.14 or newer: pip install vllm"),
        ("0.8.5", "needs vLLM 0.14 or newer, not 0.8.5"),
        ("0.14.0", ""),
    ],
)
def test_vllm_must_be_new_enough(monkeypatch: pytest.MonkeyPatch, release: str | None, said: str) -> None:
    def version(name: str) -> str:
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(vllm_engine, "version", version)
    if not said:
        assert installed_release() == release
        return
    with pytest.raises(KernelcastError, match=said):
        installed_release()


# ---- the command, on a machine with a GPU and vLLM that are not there ----
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def collect(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`kernelcast collect --engine` of this engine; or of one that does not start."""
    device = pytest.importorskip("kernelcast.collect.device")
    monkeypatch.setattr("kernelcast.app.cli.collect.needs_cuda", lambda: None)
    monkeypatch.setattr(device, "identified", lambda name: SimpleNamespace(id="h200_sxm"))
    monkeypatch.setattr(device, "facts", lambda: {"device": "NVIDIA H200"})
    monkeypatch.setattr(vllm_engine, "installed_release", lambda: "0.22.1")

    def collected(engine: FakeEngine | Exception, *more: str) -> tuple[int, str, str]:
        @contextmanager
        def started(model: str, arguments: str) -> Iterator[tuple[FakeEngine, Mapping[str, Any]]]:
            if isinstance(engine, Exception):
                raise engine
            yield engine, {**{name: value for name, value in ENGINE.items() if name not in ABOUT}, **LIMITS}

        monkeypatch.setattr(vllm_engine, "measured_engine", started)
        out = tmp_path / "runs" / "steps.jsonl"
        return run("collect", "--engine", "vllm", "--model", "llama-3.1-8b", "-o", out, *more)

    return collected


def test_the_command_measures_a_file_that_replay_takes(collect: Run, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "steps.jsonl"
    code, text, _ = collect(FakeEngine(), "--budget", "0.000000001s")
    planned = len(planned_steps(FakeEngine()))
    assert code == 0 and f"1 steps in {out}" in text and f"{planned - 1} steps of the plan are left" in text
    code, text, _ = collect(FakeEngine(), "--json")
    assert code == 0 and json.loads(text) == {"file": str(out), "steps": len(lines_of(out)) - 1, "left": 0}
    assert json.loads(run("replay", out, "--json")[1])["engine"]["release"] == "0.22.1"


def test_the_command_says_how_to_go_on(collect: Run, tmp_path: Path) -> None:
    progress = tmp_path / "runs" / "steps.progress.jsonl"
    code, out, err = collect(BrokenEngine(300, KeyboardInterrupt))
    said = f"kernelcast: what was measured is in {progress}: run the same command again to go on with it"
    assert code == 130 and out == "" and said in err and progress.exists()
    code, out, err = collect(BrokenEngine(100))
    assert code == 2 and out == "" and "RuntimeError: CUDA error" in err and f"is in {progress}" in err
    code, out, err = collect(ValueError("no memory\nfor cache blocks"))
    assert code == 2 and "error: the engine does not start: ValueError: no memory for cache blocks" in err
    code, out, err = collect(FakeEngine(), "--engine-args=--max-num-seqs 8")
    assert code == 2 and "has steps of engine_args '', not of '--max-num-seqs 8'" in err.replace(
        "--engine-args", "engine_args"
    )
    assert collect(FakeEngine())[0] == 0 and not progress.exists()
