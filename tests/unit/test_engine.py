"""An engine under load: nothing is lost, nothing is counted twice, and one request alone is what `infer` says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast import models
from kernelcast.app.report.simulate import advice
from kernelcast.errors import KernelcastError
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu
from kernelcast.inference.batch import Batch
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment, forward
from kernelcast.inference.infer import infer
from kernelcast.inference.workload import Speculation, Workload
from kernelcast.ops.flash import ragged_wait_s
from kernelcast.results import Interval
from kernelcast.schedule import KernelTime, joined
from kernelcast.serving.load import Load
from kernelcast.serving.metrics import RequestTimes, StepLog
from kernelcast.serving.service import EnginePool, EngineSettings, Service, engine_settings
from kernelcast.serving.simulate import Cluster, Simulation, simulate
from kernelcast.serving.step_times import StepTimes, StepTimeTables, padded, step_time_tables
from kernelcast.stacks import stack

STACKS = ("vllm", "sglang", "trtllm")


def asked(
    arrivals: Any, inputs: Any, outputs: Any, shared: Any = (), concurrency: int = 0, follows: Any = None
) -> Load:
    """A load from lists."""
    followed = None if follows is None else np.asarray(follows)
    given = (np.asarray(inputs), np.asarray(outputs))
    return Load(np.asarray(arrivals), given[0], given[1], shared, concurrency, follows=followed)


@cache
def place(
    name: str = "vllm", tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, model: str = "llama-3.1-8b"
) -> Deployment:
    return Deployment(models.model(model), gpu("h100_sxm"), stack(name), layout=Layout(tp, pp, dp, ep))


@cache
def tables() -> StepTimeTables:
    return step_time_tables()


def small(name: str, **given: object) -> EngineSettings:
    """A cache that a few requests fill."""
    usual = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_blocks": 4096 // _block(name),
        "chunked_prefill": True,
    }
    return engine_settings(place(name), {**usual, **given})


def _block(name: str) -> int:
    return int(dict(stack(name).scheduler)["block_size"])


def run(service: Service, load: Load, **more: object) -> Simulation:
    return simulate(service, load, intervals=False, tables=tables(), **more)  # type: ignore[arg-type]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    count = draw(st.integers(1, 30))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.02, 0.5]), min_size=count, max_size=count))
    inputs = draw(st.lists(st.integers(1, 1200), min_size=count, max_size=count))
    outputs = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    shared: tuple[tuple[tuple[int, int], ...], ...] = ()
    if draw(st.booleans()):
        streams = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        shared = tuple(
            ((s, n),) if s == 0 else ((1, max(1, n // 3)), (5 + s, max(1, n // 3))) if n > 3 else ()
            for s, n in zip(streams, inputs, strict=True)
        )
    follows = None
    if draw(st.booleans()):
        follows = [draw(st.integers(-1, at - 1)) for at in range(count)]
    concurrency = draw(st.sampled_from([0, 0, 1, 3]))
    return asked(np.cumsum(gaps), inputs, outputs, shared, concurrency, follows=follows)


class Watched(Cluster):
    """Looks at every cache after every stretch of steps."""

    def _log_steps(self, start_s, end_s, steps, decoding, prompts, engine):  # type: ignore[no-untyped-def]
        super()._log_steps(start_s, end_s, steps, decoding, prompts, engine)
        assert end_s >= start_s
        for rank in engine.ranks:
            assert 0 <= rank.blocks.free <= rank.blocks.count
            held = sum(r.blocks for r in rank.running.values())
            assert held <= rank.blocks.used
            assert len(rank.running) <= rank.settings.max_num_seqs


@settings(max_examples=60, deadline=None)
@given(loads(), st.sampled_from(STACKS), st.booleans(), st.sampled_from(["grow", "estimate", "reserve"]))
def test_every_request_ends_once_and_every_block_comes_back(load: Load, name: str, ahead: bool, capacity: str) -> None:
    own = small(name, async_scheduling=ahead, capacity=capacity)
    fleet = Watched(Service(EnginePool(place(name), own)), load, tables())
    fleet.run()
    served = RequestTimes.of(fleet.requests, load)
    assert fleet.done == len(load)
    assert served.done.all()
    assert (served.scheduled_s >= served.arrival_s).all()
    assert (served.first_token_s > served.scheduled_s).all()
    assert (served.last_token_s >= served.first_token_s).all()
    assert (served.arrival_s >= load.arrivals_s).all()
    one = load.outputs == 1
    assert (served.last_token_s[one] == served.first_token_s[one]).all()
    for engine in fleet.decode_engines:
        for rank in engine.ranks:
            assert rank.blocks.free == rank.blocks.count
            assert not rank.running
            assert not rank.waiting
            assert rank.decoding == 0
            assert rank.context_sum == pytest.approx(0, abs=1e-6)
            assert not any(rank._filling)
    if load.follows is not None:
        for at, before in enumerate(load.follows.tolist()):
            if before >= 0:
                assert served.arrival_s[at] >= served.last_token_s[before]


@settings(max_examples=30, deadline=None)
@given(loads(), st.sampled_from(STACKS))
def test_tokens_out_are_tokens_asked(load: Load, name: str) -> None:
    """Every stretch decodes so many sequences for so many steps, every prompt gives one token: they add up."""
    fleet = Cluster(Service(EnginePool(place(name), small(name))), load, tables())
    fleet.run()
    decoded = sum(n * d for n, d in zip(fleet.step_log.steps, fleet.step_log.decoding, strict=True))
    again = sum(request.preempted for request in fleet.requests)
    first = len(load) + again  # a request that was put back gets its next token from reading its own words
    lost = sum(r.preempted and not np.isfinite(r.first_s) for r in fleet.requests)
    asked = int(load.outputs.sum())
    assert decoded + len(load) <= asked
    assert decoded + first + lost >= asked


@settings(max_examples=15, deadline=None)
@given(loads(), st.sampled_from(STACKS), st.sampled_from(["round_robin", "least_loaded", "cache_aware"]))
def test_replicas_and_handed_over_caches_lose_nothing(load: Load, name: str, router: str) -> None:
    pool = EnginePool(place(name), small(name), 2)
    for service in (Service(pool, router=router), Service(pool, EnginePool(place(name), small(name)), router)):
        fleet = Watched(service, load, tables())
        fleet.run()
        assert RequestTimes.of(fleet.requests, load).done.all()
        if service.prefill:  # engines that read prompts decode nothing, the others read nothing
            readers = range(len(fleet.prefill_engines))
            notes = zip(fleet.step_log.engine, fleet.step_log.decoding, fleet.step_log.prompt_tokens, strict=True)
            again = any(request.preempted for request in fleet.requests)
            assert all(decoding == 0 if at in readers else prompts == 0 or again for at, decoding, prompts in notes)
        assert all(rank.blocks.free == rank.blocks.count for engine in fleet._every for rank in engine.ranks)


@settings(max_examples=10, deadline=None)
@given(loads())
def test_the_same_seed_gives_the_same_rows(load: Load) -> None:
    service = Service(EnginePool(place(), small("vllm")), speculation=Speculation(3, 0.6))
    first, second = (run(service, load, seed=5).request_times for _ in range(2))
    assert (first.last_token_s == second.last_token_s).all()


def test_ranks_in_lockstep_and_pipelines_serve_all() -> None:
    rng = np.random.default_rng(0)
    load = asked(np.sort(rng.uniform(0, 2, 60)), rng.integers(10, 800, 60), rng.integers(1, 100, 60))
    spread = place(dp=2, ep=2, model="qwen3-30b-a3b")
    for where in (place(pp=2), spread):
        found = run(Service(EnginePool(where, engine_settings(where))), load)
        assert found.request_times.done.all()


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(("inputs", "outputs"), [(1000, 100), (200, 400), (3000, 2)])
def test_one_request_alone_is_what_infer_says(name: str, inputs: int, outputs: int) -> None:
    bare = replace(stack(name), request_s=0.0, front_s=0.0, token_s=0.0)
    where = replace(place(name), stack=bare)
    found = run(
        Service(EnginePool(where, engine_settings(where, {"chunked_prefill": True}))), asked([0.0], [inputs], [outputs])
    )
    alone = infer(where, Workload.equal(1, inputs, outputs))
    # Passes between those that are predicted are on a line: products of 3,000 rows lie between 2,976 and 3,008, and odd
    # remainders are forecast up to 1.8% faster than either.
    assert found.metrics["mean_e2el_ms"] / 1e3 == pytest.approx(alone.total.value, rel=0.02)
    # A scheduler that works ahead launches the next step before it hands on the first token
    next_s = where.stack.overlapped_step_s + where.stack.overlapped_sequence_s
    held_s = next_s if engine_settings(where).async_scheduling else 0.0
    assert found.metrics["mean_ttft_ms"] / 1e3 == pytest.approx(alone.ttft_s + held_s, rel=0.02)


def test_twice_the_gpus_are_not_slower() -> None:
    rng = np.random.default_rng(3)
    load = asked(np.sort(rng.uniform(0, 20, 400)), rng.integers(200, 2000, 400), rng.integers(50, 300, 400))
    one, two, cut = (
        run(Service(pool, router="least_loaded"), load).metrics
        for pool in (EnginePool(place()), EnginePool(place(), replicas=2), EnginePool(place(tp=2)))
    )
    for key in ("mean_e2el_ms", "p90_e2el_ms", "mean_tpot_ms"):
        assert two[key] <= 1.001 * one[key]
        assert cut[key] <= 1.001 * one[key]


def exactly(where: Deployment, batch: Batch) -> Interval:
    """The kernels of a step, every sequence with its own lengths."""
    times, launches = Times(where.gpu), forward(where, batch)
    times.predict(launch.call for launch in launches)
    return joined(KernelTime.of("", launch, times) for launch in launches)


def exactly_mixed(where: Deployment, prompt: Batch, decodes: Batch) -> float:
    """The kernels of a step of both; attention (FlashAttention 3) is no longer than that of each, one after the other,
    and no shorter than the longer one."""

    def attention(batch: Batch) -> float:
        times, launches = Times(where.gpu), [each for each in forward(where, batch) if each.op == "attention"]
        times.predict(launch.call for launch in launches)
        return joined(KernelTime.of("", launch, times) for launch in launches).value

    both = Batch((*decodes.new, *prompt.new), (*decodes.past, *prompt.past))
    joint, apart = attention(both), [attention(prompt), attention(decodes)]
    return exactly(where, both).value - joint + float(np.clip(joint, max(apart), sum(apart)))


def host_s(times: StepTimes, kernels_s: float, tokens: int, sequences: int) -> float:
    """What the GPU waits for the host in a step."""
    stack = times.deployment.stack
    graph, decodes = tokens <= stack.graph_tokens, tokens == sequences
    return float(stack.waits_s(kernels_s, times.launched, sequences, graph=graph, decodes=decodes))


def test_lines_between_predicted_passes_are_within_a_percent() -> None:
    """Against every sequence with its own lengths."""
    where = place()
    load = asked([0.0], [8000], [2000])
    times = tables().of(EnginePool(where), load)
    rng, off = np.random.default_rng(1), []
    for _ in range(40):
        count = int(rng.integers(1, 250))
        past = tuple(int(x) for x in rng.uniform(0.5, 1.5, count) * rng.integers(100, 6000))
        exact = exactly(where, Batch(count * (1,), past)).value
        off.append((times.decode(count, sum(past)) - host_s(times, exact, count, count)) / exact - 1)
    assert np.mean(np.abs(off)) < 0.01
    both = []
    for _ in range(40):
        count, context, tokens = int(rng.integers(1, 200)), int(rng.integers(100, 6000)), int(rng.integers(20, 4000))
        exact = exactly_mixed(where, Batch((tokens,), (0,)), Batch(count * (1,), count * (context,)))
        host = host_s(times, exact, tokens + count, count + 1)
        both.append((times.mixed(count, count * context, tokens, 0.0, count + 1) - host) / exact - 1)
    assert np.mean(np.abs(both)) < 0.025
    assert np.quantile(np.abs(both), 0.9) < 0.05


def test_lines_between_predicted_prompts() -> None:
    where = place()
    times = tables().of(EnginePool(where), asked([0.0], [8000], [2000]))
    off = []
    for tokens in np.random.default_rng(1).integers(20, 8000, 80).tolist():
        exact = exactly(where, Batch((tokens,), (0,))).value
        off.append((times.mixed(0, 0.0, tokens, 0.0, 1) - host_s(times, exact, tokens, 1)) / exact - 1)
    assert np.mean(np.abs(off)) < 0.015


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(
    "prompts", [(2, 4000, 0), (8, 1000, 0), (64, 128, 0), (4, 2048, 4096)], ids=lambda p: f"{p[0]}x{p[1]}+{p[2]}"
)
def test_prompts_of_one_step_attend_to_themselves_alone(name: str, prompts: tuple[int, int, int]) -> None:
    """8 prompts of 1,000 tokens have an eighth of the causal pairs of one of 8,000."""
    where, (count, tokens, past) = place(name), prompts
    own = engine_settings(where, {"chunked_prefill": True, "max_num_batched_tokens": 8192})
    times = tables().of(EnginePool(where, own), asked([0.0], [8000], [2000]))
    exact = exactly(where, Batch(count * (tokens,), count * (past,))).value
    found = times.mixed(0, 0.0, count * tokens, float(past), count, prompts=float(count))
    waits = host_s(times, exact, count * tokens, count)
    assert found - waits == pytest.approx(exact, rel=0.015)


def test_a_step_of_unequal_prompts_counts_them_by_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 300 and 100 tokens attend to (300^2 + 100^2) / 2 pairs, as 400^2 / (300^2 + 100^2) = 1.6 equal ones
    of 400 tokens in all do."""
    seen = []
    plain = StepTimes.mixed

    def watched(self: StepTimes, *given: Any) -> float:
        seen.append(given[-2])
        return plain(self, *given)

    monkeypatch.setattr(StepTimes, "mixed", watched)
    run(Service(EnginePool(place())), asked([0.0, 0.0, 0.0], [2000, 300, 100], [1, 1, 1]))
    assert seen == [1.0, pytest.approx(1.6)]


def test_the_longest_context_of_a_decode_that_nothing_splits_ends_it_alone() -> None:
    """RTX PRO 6000: 188 SMs, each with the memory for one task of FlashAttention 2. 47 requests of 8 KV heads are two
    rounds of tasks. One twice as long as the mean takes as long as both rounds, begins in the first round (after a
    quarter of the time, on average), and is so much late; a tile of 128 keys takes 7500 cycles alone."""
    card = gpu("rtx_pro_6000_server")
    alone_s = 2000 / 128 * 7500 / card.clock_boost_hz

    def wait_s(requests: int, longest: int = 2000, packed: bool = True) -> float:
        return ragged_wait_s(card, requests, 1000, longest, heads=8, head_dim=128, packed=packed)

    assert wait_s(47) == pytest.approx(0.25 * alone_s)
    assert wait_s(37) == 0.0  # 296 tasks, fewer than 0.8 x 2 x 188: their keys are split
    assert wait_s(37, packed=False) > 0  # beside a prompt they are not
    assert wait_s(47, longest=1000) == 0.0


@pytest.mark.parametrize(("on", "waits"), [("rtx_pro_6000_server", True), ("h100_sxm", False)])
def test_unequal_contexts_wait_for_the_longest_where_flashattention_2_decodes(
    on: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []
    ragged_s = StepTimes.ragged_s

    def noted(self: StepTimes, sequences: int, context_sum: float, longest: float, *, mixed: bool = False) -> float:
        if sequences:
            seen.append((longest, ragged_s(self, sequences, context_sum, longest, mixed=mixed)))
        return ragged_s(self, sequences, context_sum, longest, mixed=mixed)

    monkeypatch.setattr(StepTimes, "ragged_s", noted)
    service = Service(EnginePool(replace(place(), gpu=gpu(on))))
    inputs = np.full(64, 100)
    inputs[20] = 4000
    simulate(service, asked(np.zeros(64), inputs, np.full(64, 8)), tables=tables())
    assert max(longest for longest, _ in seen) == 4000 + 7 - 1  # the last step reads all but the last token
    assert (max(wait_s for _, wait_s in seen) > 0) == waits


def test_a_prefix_is_read_once() -> None:
    """100 prompts of one system prompt of 1,000 tokens and 24 of their own: all but the first read 24 and what does not
    fill a block (1,000 = 62 blocks of 16 and 8 tokens)."""
    load = asked(np.arange(100) / 2, 100 * [1024], 100 * [8], 100 * (((0, 1000),),))
    found = run(Service(EnginePool(place())), load)
    assert found.request_times.cached[0] == 0
    assert (found.request_times.cached[1:] == 992).all()
    off = run(Service(EnginePool(place(), engine_settings(place(), {"prefix_caching": False}))), load)
    assert not off.request_times.cached.any()
    assert found.metrics["mean_ttft_ms"] < off.metrics["mean_ttft_ms"]


def test_a_chat_finds_its_own_answers_cached() -> None:
    """Each turn is the whole conversation: turn k has k x 100 asked and (k - 1) x 50 answered tokens before it."""
    inputs = [100, 250, 400]
    load = asked([0.0, 10.0, 20.0], inputs, 3 * [50], tuple(((7, n),) for n in inputs), follows=[-1, 0, 1])
    cached = run(Service(EnginePool(place())), load).request_times.cached
    assert cached.tolist() == [0, (100 + 49) // 16 * 16, (250 + 49) // 16 * 16]


def test_a_full_cache_evicts_the_longest_unused_prefix() -> None:
    """Room for 4,096 tokens; three prompts of 1,500 tokens in turn push each other out, two do not."""
    own = small("vllm")
    for prompts, hits in ((2, True), (3, False)):
        shared = tuple(((at % prompts, 1500),) for at in range(12))
        load = asked(np.arange(12) * 5.0, 12 * [1501], 12 * [2], shared)
        cached = run(Service(EnginePool(place(), own)), load).request_times.cached[prompts:]
        assert (cached > 0).all() if hits else (cached < 1200).all()


def test_steps_replay_the_next_larger_graph() -> None:
    """vLLM captures 1, 2, 4, then every 8 to 256 and every 16 to 512 tokens."""
    sizes = stack("vllm").graph_sizes
    assert [padded(sizes, n) for n in (1, 3, 5, 9, 256, 257, 512, 513)] == [1, 4, 8, 16, 256, 272, 512, 513]


def test_who_comes_during_a_step_runs_in_the_one_after_the_next() -> None:
    """A scheduler that works ahead: with steps of length s, a request waits for the rest of one and all of the next."""
    both = []
    for ahead in (False, True):
        serial = stack("vllm").synchronous()  # steps of one length
        alike: dict[str, Any] = {"request_s": 0.0, "front_s": 0.0, "token_s": 0.0, "launch_s": 0.0}
        where = replace(place(), stack=replace(serial, eager_ops=(), **alike))
        own = engine_settings(where, {"async_scheduling": ahead})
        found = run(Service(EnginePool(where, own)), asked([0.0, 1.0], [64, 16], [400, 2]))
        both.append((found.request_times.ttft_s[1], found.request_times.tpot_s[0]))
    (soon, step), (later, _) = both
    assert later - soon == pytest.approx(step, rel=0.2)


def test_tokens_wait_until_the_next_step_is_launched() -> None:
    """Two prompts of 1,000 tokens in steps of 1,024: the second step has 976, more than the largest graph. Both are
    launched by a host of 20 ms an op, far longer than their kernels: the first prompt's token comes with the end of the
    second launch where a step is launched ahead, else with its own."""
    serial = stack("vllm").synchronous()
    alike: dict[str, Any] = {"request_s": 0.0, "front_s": 0.0, "token_s": 0.0, "launch_s": 0.02, "eager_ops": ()}
    first_s: dict[tuple[bool, float], float] = {}
    for ahead, factor in ((False, 1.0), (True, 1.0), (True, 2.0)):
        where = replace(place(), stack=replace(serial, **alike, launch_factor=factor))
        own = engine_settings(where, {"async_scheduling": ahead, "max_num_batched_tokens": 1024})
        found = run(Service(EnginePool(where, own)), asked([0.0, 0.0], [1000, 1000], [2, 2]))
        first_s[ahead, factor] = float(found.request_times.ttft_s[0])
    alone_s = 0.02 * sum(each.count for each in forward(place(), Batch((1000,), (0,))))
    assert first_s[False, 1.0] == pytest.approx(alone_s, rel=0.02)
    assert first_s[True, 1.0] == pytest.approx(2 * alone_s, rel=0.02)
    assert first_s[True, 2.0] == pytest.approx(4 * alone_s, rel=0.02)


def test_a_token_that_is_held_back_lengthens_the_last_gap() -> None:
    """Five steps of 10 ms, the tokens of the last 30 ms late."""
    log = StepLog([0.0], [0.05], [5], [3], [0], [0], [0.1], [0])
    log.hold(0.04, 0.03)
    assert (log.start_s, log.end_s, log.steps) == ([0.0, 0.04], [0.04, pytest.approx(0.08)], [4, 1])
    seconds, count, _ = log.gaps()
    assert {round(s, 3): n for s, n in zip(seconds, count, strict=True) if n} == {0.01: 12, 0.04: 3}


def test_servers_of_few_sequences_capture_fewer_graphs() -> None:
    """vLLM: up to twice the tokens that a step decodes; SGLang's sizes do not depend on them."""
    engine = stack("vllm")
    assert [engine.captured(n).graph_tokens for n in (4, 20, 128, 256, 1024)] == [8, 40, 256, 512, 512]
    assert engine.captured(1024) is engine and stack("sglang").captured(4) is stack("sglang")
    seen = tables().of(EnginePool(place(), small("vllm")), asked([0.0], [100], [10])).deployment.stack.graph_tokens
    assert seen == 2 * small("vllm").max_num_seqs


def test_a_burst_waits_until_vllms_front_end_has_read_all_of_it() -> None:
    """64 requests of 16 tokens at once, 10 ms of the front end and 1 us a token each: the first is tokenised after 0.64
    s and 16 us, and after 10 ms where they pass one after another. The last is as late in both."""
    waits = []
    for rounds in (True, False):
        slow = replace(stack("vllm"), request_s=0.0, front_s=0.01, token_s=1e-6, front_rounds=rounds)
        where = replace(place(), stack=slow)
        found = run(Service(EnginePool(where, engine_settings(where))), asked(64 * [0.0], 64 * [16], 64 * [1]))
        waits.append(found.request_times.scheduled_s)
    (together, each), last = waits, 64 * (0.01 + 16e-6)
    assert together[0] == pytest.approx(64 * 0.01 + 16e-6)
    assert each[0] == pytest.approx(0.01 + 16e-6)
    step_s = 0.03  # it may wait for a running step
    assert last <= together[-1] < last + step_s and last <= each[-1] < last + step_s
    later = replace(stack("vllm"), request_s=0.0, front_s=0.01, token_s=0.0)
    where = replace(place(), stack=later)
    found = run(Service(EnginePool(where, engine_settings(where))), asked([0.0, 0.004, 0.006, 0.05], 4 * [16], 4 * [1]))
    # the first alone, the two that came meanwhile together, and one that finds nobody there
    assert found.request_times.scheduled_s[0] == pytest.approx(0.01)
    assert found.request_times.scheduled_s[3] == pytest.approx(0.06)
    assert found.request_times.scheduled_s[1] == pytest.approx(0.03)
    assert 0.03 <= found.request_times.scheduled_s[2] < 0.03 + step_s


def test_each_stage_of_tensorrts_pipeline_adds_its_host() -> None:
    engine = stack("trtllm")
    four = place("trtllm", pp=4).stack
    assert four.step_s == engine.step_s + 4 * engine.pipeline_step_s
    assert four.sequence_s == engine.sequence_s + 4 * engine.pipeline_sequence_s
    assert four.in_pipeline(4) == four  # once
    assert place("trtllm").stack == engine


def test_what_no_engine_would_take_is_refused() -> None:
    service = Service(EnginePool(place(), small("vllm")))
    with pytest.raises(KernelcastError, match="exceeds the KV cache of 4,096 tokens"):
        run(service, asked([0.0], [5000], [10]))
    with pytest.raises(KernelcastError, match="exceeds the context"):
        run(Service(EnginePool(place())), asked([0.0], [140_000], [10]))
    with pytest.raises(KernelcastError, match="does not chunk prefill"):
        run(Service(EnginePool(place("trtllm"))), asked([0.0], [9000], [10]))
    with pytest.raises(KernelcastError, match="has no scheduler"):
        engine_settings(place("torch"))
    with pytest.raises(KernelcastError, match="leaves no memory"):
        engine_settings(place(model="llama-3.1-70b"))


def test_an_interrupt_keeps_what_is_done() -> None:
    def told(variant: str, done: int) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    found = simulate(
        Service(EnginePool(place())),
        asked(np.arange(100) / 50, 100 * [100], 100 * [20]),
        tables=tables(),
        progress=told,
    )
    assert not found.complete
    assert 20 <= found.request_times.done.sum() < 100
    assert found.metrics["completed"] == found.request_times.done.sum()


def test_more_than_an_engine_can_hold_is_an_answer() -> None:
    found = run(Service(EnginePool(place())), asked(np.arange(600) / 1000, 600 * [4000], 600 * [200]))
    assert found.saturated
    assert found.binding
    calm = run(Service(EnginePool(place())), asked(np.arange(200) / 2, 200 * [400], 200 * [50]))
    assert not calm.saturated


def test_a_whole_prompt_as_long_as_a_step_waits_until_nothing_decodes() -> None:
    """TensorRT-LLM without chunked prefill: 8,192 tokens and one that decodes exceed a step of 8,192. A step of 8,192 +
    4 takes a prompt beside the 4 that may run, and chunks need no more than the 8,192."""
    where, load = place("trtllm"), asked([0.0] * 6, [8192] * 6, [400] * 6)

    def most(**given: object) -> tuple[int, str, str]:
        pool = EnginePool(where, engine_settings(where, {"max_num_seqs": 4, **given}))
        found = run(Service(pool), load)
        return max(found.step_log.decoding), found.binding, advice(found)

    alone, binding, said = most(max_num_batched_tokens=8192)
    assert (alone, binding) == (1, "max_num_batched_tokens without chunked prefill")
    assert "Set enable_chunked_prefill, or max_num_batched_tokens to 8,196" in said
    assert most(max_num_batched_tokens=8196)[::2] == (4, "")
    assert most(max_num_batched_tokens=8192, chunked_prefill=True)[::2] == (4, "")


def test_intervals_hold_the_likely_value() -> None:
    load = asked(np.arange(100) / 8, 100 * [800], 100 * [100])
    found = simulate(Service(EnginePool(place())), load, tables=tables())
    for key, value in found.metrics.items():
        assert found.low[key] <= value <= found.high[key]
    assert found.low["mean_tpot_ms"] < found.metrics["mean_tpot_ms"] < found.high["mean_tpot_ms"]


def test_a_scheduler_that_looks_every_thirty_steps_lets_requests_wait() -> None:
    """On average for half of them, and one step more where it works ahead."""
    waits = []
    for every in (1, 30):
        where = replace(place("sglang"), stack=replace(stack("sglang"), request_s=0.0, front_s=0.0, token_s=0.0))
        own = engine_settings(where, {"recv_interval": every})
        load = asked([0.0, *(1 + np.arange(40) * 0.301)], 41 * [16], [3000, *(40 * [2])])
        served = run(Service(EnginePool(where, own)), load).request_times
        waits.append(float(served.ttft_s[1:].mean() / served.tpot_s[0]))
    assert waits[1] - waits[0] == pytest.approx(14.5, abs=4)


def test_a_step_that_only_prefills_lengthens_one_gap_of_those_that_wait() -> None:
    """Three sequences decode five steps of 1 ms; a prompt of 10 ms; four decode ten steps of 1 ms."""
    ends = [0.005, 0.015, 0.025]
    log = StepLog(start_s=[0.0, *ends[:-1]], end_s=ends, steps=[5, 1, 10], decoding=[3, 0, 4], engine=[0, 0, 0])
    seconds, count, _ = log.gaps()
    assert sum(count) == 5 * 3 + 10 * 4
    assert {round(float(gap), 6): float(n) for gap, n in zip(seconds, count, strict=True) if gap > 2e-3} == {0.011: 3.0}
    alone = StepLog(start_s=[0.0, 0.01], end_s=[0.01, 0.02], steps=[1, 10], decoding=[0, 1], engine=[0, 0])
    seconds, count, _ = alone.gaps()  # of the prompt itself: its first token comes at the end of it
    assert seconds[count > 0] == pytest.approx([1e-3])
