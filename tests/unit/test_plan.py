"""The cheapest service that keeps its goals: against all settings of a small grid, one by one."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.forecast.conditions import DEFAULT
from kernelcast.hardware.prices import Price, read_prices
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.models import hub_name, model
from kernelcast.models.precision import Precision
from kernelcast.search.layouts import layouts
from kernelcast.search.plan.bounds import EngineBounds, LoadSummary
from kernelcast.search.plan.commands import commands
from kernelcast.search.plan.plan import Plan, plan, surer_of
from kernelcast.search.plan.simulator import ServiceSimulator, share_of
from kernelcast.search.plan.space import EngineOption, SearchSpace, ServiceCandidate
from kernelcast.serving.goals import Goal, parse_ms, worst
from kernelcast.serving.load import Load
from kernelcast.serving.service import engine_settings
from kernelcast.serving.simulate import simulate
from kernelcast.serving.step_times import step_time_tables
from kernelcast.stacks import stack

LLAMA = model("llama-3.1-8b")
PRICES = {"l40s": Price(0.8, "2026-01-01", "a test"), "h100_sxm": Price(4.0, "2026-01-01", "a test")}


def goals(ttft_ms: float, tpot_ms: float) -> tuple[Goal, ...]:
    return Goal("ttft", "p99", ttft_ms), Goal("tpot", "p99", tpot_ms)


def load(rate: float, count: int = 240) -> Load:
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / rate, count))
    return Load(arrivals, np.full(count, 512), np.full(count, 64))


def grid(prices: dict[str, Price] | None = None, **more: Any) -> SearchSpace:
    given: dict[str, Any] = {"max_gpus": 4, "tp": (1, 2), "pp": (1,), "formats": ("bf16",), "max_num_seqs": (64, 256),
                             "max_num_batched_tokens": (2048, 8192), "disaggregated": "no"}  # fmt: skip
    chips = tuple((kc.gpu(name), price) for name, price in (prices or PRICES).items())
    return SearchSpace(chips, (stack("vllm"),), **{**given, **more})


def asked(rate: float, ttft_ms: float, tpot_ms: float, **more: Any) -> Plan:
    return plan(LLAMA, load(rate), goals(ttft_ms, tpot_ms), grid(**more))


def every(requests: Load, within: SearchSpace) -> list[ServiceCandidate]:
    """All settings of one pool, by hand."""
    context = int((requests.inputs + requests.outputs / 2).mean())
    return [ServiceCandidate(place, limits, replicas) for place in within.engines(LLAMA, context, Counter())
            for limits in place.limits for replicas in range(1, within.max_gpus // place.gpus + 1)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "ttft_ms", "tpot_ms"), [(6.0, 500, 40), (30.0, 300, 25)])
def test_the_choice_is_the_cheapest_of_all(rate: float, ttft_ms: float, tpot_ms: float) -> None:
    found = asked(rate, ttft_ms, tpot_ms)
    requests, wanted, tables = load(rate), goals(ttft_ms, tpot_ms), step_time_tables()
    meets = {}
    for setting in every(requests, grid()):
        run = simulate(setting.service(), requests, intervals=False, tables=tables)
        meets[setting] = worst(wanted, run.metrics)[1] <= 1 and not run.saturated
    cheapest = min(setting.usd_per_hour for setting, met in meets.items() if met)
    assert found.choice is not None and found.choice.usd_per_hour == pytest.approx(cheapest)
    assert found.settings == len(meets) == sum(found.discarded.values())


def test_the_choice_meets_its_goals_when_simulated_on_its_own() -> None:
    found = asked(20.0, 400, 30)
    assert found.choice is not None and found.choice.meets and found.choice.sure is not None
    again = simulate(found.choice.candidate.service(), load(20.0))
    for goal in found.goals:
        assert again.metrics[goal.key] == found.choice.simulation.metrics[goal.key] <= goal.limit_ms
        assert found.choice.simulation.low[goal.key] <= found.choice.simulation.high[goal.key]


@pytest.mark.slow
def test_a_looser_goal_is_never_dearer_and_more_load_never_cheaper() -> None:
    def cost(rate: float, tpot_ms: float) -> float:
        choice = asked(rate, 600, tpot_ms).choice
        return choice.usd_per_hour if choice else float("inf")

    by_goal = [cost(24.0, tpot_ms) for tpot_ms in (6, 12, 24, 48)]
    by_load = [cost(rate, 30) for rate in (4.0, 12.0, 36.0, 400.0)]
    assert by_goal == sorted(by_goal, reverse=True) and by_goal[0] > by_goal[-1]
    assert by_load == sorted(by_load) and by_load[0] < by_load[-1]


@pytest.mark.slow
def test_sure_means_the_slow_end() -> None:
    likely, surely = asked(30.0, 300, 25), plan(LLAMA, load(30.0), goals(300, 25), grid(), sure=True)
    assert likely.choice is not None and surely.choice is not None
    assert surely.choice.sure and surely.choice.usd_per_hour >= likely.choice.usd_per_hour


def test_the_slow_end_that_decides_is_the_one_that_is_printed() -> None:
    """A borderline choice of ``sure`` must not break its goal at the slow end that stands beside it."""
    within = grid({"l40": price(0.5)}, formats=("fp8",))
    candidate = every(load(4.0), within)[0]
    slow = ServiceSimulator(load(4.0), goals(1000, 40), DEFAULT, 0, "high")
    printed = slow.both_ends(candidate).simulation
    decides = slow.full(candidate).simulation.metrics
    for goal in goals(1000, 40):
        assert printed.metrics[goal.key] < decides[goal.key] == pytest.approx(printed.high[goal.key])


def test_what_more_money_buys_and_where_it_breaks() -> None:
    found = asked(12.0, 500, 40)
    assert found.choice in found.front and found.headroom is not None
    costs, shares = [t.usd_per_hour for t in found.front], [t.share for t in found.front]
    assert costs == sorted(costs) and shares == sorted(shares, reverse=True)
    assert found.load.request_rate <= found.headroom.holds < found.headroom.breaks
    assert found.headroom.binds in ("KV cache", "max_num_seqs", "compute")


def price(usd: float) -> Price:
    return Price(usd, "2026-01-01", "a test")


def test_the_best_measured_plan_stands_beside_one_that_nobody_measured() -> None:
    found = asked(6.0, 500, 60, prices={"l40": price(0.5), "h100_nvl": price(2.0), "h200_sxm": price(4.0)}, max_gpus=2)
    assert found.choice is not None and found.choice.support == "extrapolated"
    assert [run.support for run in found.better_known] == ["seen", "near"]
    assert found.measured is found.better_known[0] and found.measured.meets
    assert [run.candidate.engine.deployment.gpu.id for run in found.better_known] == ["h200_sxm", "h100_nvl"]
    costs = [*(run.usd_per_hour for run in found.better_known), found.choice.usd_per_hour]
    assert costs == sorted(costs, reverse=True)


def test_at_the_same_price_the_measured_gpu_is_chosen() -> None:
    found = asked(6.0, 500, 60, prices={"b200_sxm": price(4.0), "h200_sxm": price(4.0)}, max_gpus=1)
    assert found.choice is not None and found.choice.candidate.engine.deployment.gpu.id == "h200_sxm"
    assert found.choice.support == "seen" and found.measured is found.choice and not found.better_known


def run_of(usd: float, support: str, share: float, slow: float) -> Any:
    return SimpleNamespace(usd_per_hour=usd, support=support, share=share, slow_share=slow, sure=slow <= 1)


def test_what_is_called_surer_is_surer() -> None:
    choice = run_of(2.0, "near", 0.8, 1.5)
    guessed, wide = run_of(2.5, "extrapolated", 0.2, 0.4), run_of(2.6, "near", 0.3, 0.9)
    misses, good, dear = run_of(2.7, "seen", 0.9, 1.1), run_of(3.0, "near", 0.5, 0.7), run_of(4.0, "seen", 0.3, 0.4)
    assert surer_of(choice, [guessed, wide, misses, dear, good]) is good  # not on worse evidence, nor a wider interval
    assert surer_of(choice, [guessed, wide, misses]) is None
    assert surer_of(run_of(2.0, "near", 0.5, 0.9), [dear]) is None  # it is sure itself


def test_a_surer_plan_meets_the_goals_at_the_slow_end_on_no_worse_evidence() -> None:
    prices, levels = {"h100_sxm": price(4.0)}, ("seen", "near", "extrapolated")
    first = asked(20.0, 2000, 40, prices=prices).choice
    assert first is not None  # a goal between its likely time and that at the slow end
    ends = [metrics["p99_tpot_ms"] for metrics in (first.simulation.metrics, first.simulation.high)]
    found = asked(20.0, 2000, float(np.sqrt(ends[0] * ends[1])), prices=prices)
    assert found.choice is not None and found.choice.sure is False and found.surer is not None
    assert found.surer.sure and found.surer.slow_share <= 1 < found.choice.slow_share
    assert levels.index(found.surer.support or "") <= levels.index(found.choice.support or "")


def test_a_budget_is_kept() -> None:
    free = asked(20.0, 400, 30)
    assert free.choice is not None
    kept = asked(20.0, 400, 30, budget=free.choice.usd_per_hour)
    assert kept.choice is not None and kept.choice.usd_per_hour == free.choice.usd_per_hour
    assert all(run.usd_per_hour <= free.choice.usd_per_hour + 1e-9 for run in kept.front)
    short = asked(20.0, 400, 30, budget=free.choice.usd_per_hour - 0.1)
    assert short.choice is None and short.best_effort is not None and short.best_effort.nearest is not None
    assert short.best_effort.nearest.usd_per_hour < free.choice.usd_per_hour and short.best_effort.rate < 20
    assert short.settings == sum(short.discarded.values())


def test_a_limit_that_binds_is_named() -> None:
    found = asked(8.0, 5000, 1000, max_num_seqs=(2,), max_gpus=1, prices={"h100_sxm": PRICES["h100_sxm"]})
    around = found.headroom or found.best_effort
    assert around is not None and around.binds == "max_num_seqs"


def test_a_load_that_nothing_carries_is_answered() -> None:
    found = asked(2000.0, 500, 30, max_gpus=2)
    assert found.choice is None and found.best_effort is not None and found.best_effort.nearest is not None
    assert 0 < found.best_effort.rate < 2000 and found.best_effort.nearest.candidate.gpus <= 2
    held = load(2000.0).faster(found.best_effort.rate / load(2000.0).request_rate)
    run = simulate(found.best_effort.nearest.candidate.service(), held, intervals=False)
    assert worst(found.goals, run.metrics)[1] <= 1.01


def test_goals_that_no_gpu_reaches_are_answered() -> None:
    found = asked(1.0, 500, 0.5)
    assert found.choice is None and found.best_effort is not None and found.best_effort.rate == 0
    assert (
        found.best_effort.nearest is not None and found.best_effort.nearest.nearest.metric == "tpot" and found.runs < 20
    )


def test_prices_decide() -> None:
    cheap = {**PRICES, "h100_sxm": Price(0.5, "", "given")}
    first, second = asked(6.0, 500, 40), asked(6.0, 500, 40, prices=cheap)
    assert first.choice is not None and second.choice is not None
    chips = [found.choice.candidate.engine.deployment.gpu.id for found in (first, second) if found.choice]
    assert chips == ["l40s", "h100_sxm"]


def test_pools_that_read_apart_can_be_asked_for() -> None:
    found = asked(12.0, 800, 20, disaggregated="only", prices={"h100_sxm": PRICES["h100_sxm"]})
    assert found.choice is not None and found.choice.candidate.prefill_replicas >= 1
    assert found.choice.simulation.service.prefill is not None and found.choice.meets


def test_a_closed_loop_and_requests_all_at_once() -> None:
    closed = Load(np.zeros(120), np.full(120, 512), np.full(120, 64), max_concurrency=16)
    found = plan(LLAMA, closed, goals(800, 40), grid())
    assert found.choice is not None and found.headroom is not None and found.headroom.closed
    at_once = Load(np.zeros(60), np.full(60, 512), np.full(60, 64))
    later = plan(LLAMA, at_once, (Goal("e2el", "p99", 60_000),), grid())
    assert later.choice is not None and later.headroom is None


def test_an_interrupt_keeps_the_best_so_far() -> None:
    def stop(done: int, total: int, extra: str) -> None:
        if extra.startswith("best"):
            raise KeyboardInterrupt

    found = plan(LLAMA, load(12.0), goals(500, 40), grid(), on_progress=stop)
    assert not found.complete and found.choice is not None and found.choice.meets and found.choice.sure is None


def test_bounds_are_on_the_fast_side() -> None:
    requests, wanted = load(8.0), goals(500, 40)
    demand = LoadSummary.of(requests)
    trials = ServiceSimulator(requests, wanted, DEFAULT, 0, "likely")
    for setting in every(requests, grid(max_num_seqs=(256,), max_num_batched_tokens=(8192,))):
        if setting.replicas > 1:
            continue
        floor, run = EngineBounds(setting.engine, demand, tuple(wanted)), trials.full(setting).simulation.metrics
        for goal in wanted:
            assert floor.share(goal) * goal.limit_ms <= run[goal.key]
        assert run["request_throughput"] <= floor.peak_rate * 1.01


def test_an_engines_share_is_what_a_router_that_takes_turns_sends() -> None:
    closed = Load(np.zeros(10), np.arange(1, 11), np.full(10, 4), max_concurrency=5)
    mine = share_of(closed, 3)
    assert mine.inputs.tolist() == [1, 4, 7, 10] and mine.max_concurrency == 2


# ---- what a plan chooses from ----
def test_cuts_of_dense_models_and_of_experts() -> None:
    dense = layouts(LLAMA, 64, (1, 2, 4, 8), (1, 2))
    assert {layout.dp for layout in dense} == {1} and len(dense) == 8
    experts = layouts(model("qwen3-30b-a3b"), 64, (1, 2, 4, 8), (1,))
    assert {layout.ep for layout in experts} >= {1, 8} and all(layout.tp * layout.dp <= 8 for layout in experts)


def test_formats_that_a_gpu_lacks_are_left_out() -> None:
    within = grid({"a100_sxm": Price(1, "", "")}, formats=None)
    kinds = {place.deployment.precision.weights for place in within.engines(LLAMA, 512, Counter())}
    assert kinds == {"bf16"}


def test_a_model_that_fits_nowhere() -> None:
    found = plan(model("llama-3.1-405b"), load(1.0), goals(500, 30), grid())
    assert found.choice is None and found.best_effort is not None and found.best_effort.nearest is None
    assert set(found.discarded) == {"does not fit in memory"}


# ---- goals and prices ----
@pytest.mark.parametrize(("text", "ms"), [("500ms", 500), ("0.5s", 500), ("500", 500), ("2 s", 2000), ("1.5e3", 1500)])
def test_times_are_read(text: str, ms: float) -> None:
    assert parse_ms(text) == pytest.approx(ms)


@pytest.mark.parametrize("text", ["", "fast", "-5ms", "0", "5 hours", "1.2.3s", "nan", "inf"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(KernelcastError, match="takes a time above 0"):
        parse_ms(text)


def test_prices_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('[h100]\nusd_per_hour = 2\ndate = "today"\nsource = "ours"\n')
    assert read_prices(file) == {"h100_sxm": Price(2, "today", "ours")}
    assert read_prices(file, ["h100_sxm=1.5"])["h100_sxm"].usd_per_hour == 1.5
    file.write_text("[h100_sxm]\nusd_per_hour = 2\n")
    with pytest.raises(KernelcastError, match="needs usd_per_hour, date, source"):
        read_prices(file)
    for wrong in ("h100_sxm", "h100_sxm=cheap", "h100_sxm=0"):
        with pytest.raises(KernelcastError):
            read_prices(None, [wrong])


# ---- how to start it ----
def chosen(engine: str, name: str, dtype: str | None = None, cache: str | None = None, **cut: Any) -> ServiceCandidate:
    found = model(name)
    place = Deployment(found, kc.gpu("h200_sxm"), stack(engine), Precision.of(found, dtype, cache), Layout(**cut), 1.2)
    limits = engine_settings(place, {"max_num_seqs": 128, "max_num_batched_tokens": 4096})
    return ServiceCandidate(EngineOption(place, Price(1, "", ""), (limits,)), limits, 1)


def test_vllm_is_started_with_its_own_flags() -> None:
    (note, line) = commands(chosen("vllm", "llama-3.1-70b", "fp8", "fp8", tp=4, pp=2), "meta-llama/Llama-3.1-70B")
    assert note.startswith("#")
    assert line == (
        "vllm serve meta-llama/Llama-3.1-70B --tensor-parallel-size 4 --pipeline-parallel-size 2 --quantization fp8 "
        "--kv-cache-dtype fp8 --max-num-seqs 128 --max-num-batched-tokens 4096 --gpu-memory-utilization 0.92"
    )


def test_sglang_counts_all_ranks() -> None:
    (line,) = commands(chosen("sglang", "deepseek-v3", tp=2, dp=4, ep=8), "deepseek-ai/DeepSeek-V3")
    for flag in ("-m sglang.launch_server", "--tp-size 8", "--dp-size 4", "--enable-dp-attention", "--ep-size 8",
                 "--max-running-requests 512", "--chunked-prefill-size 16384"):  # fmt: skip
        assert flag in line, flag
    assert "--quantization" not in line  # its checkpoint is fp8 already


def test_sglang_takes_its_flags() -> None:
    """Several of its flags begin with --pp, which argparse refuses as an abbreviation (server_args.py)."""
    server = argparse.ArgumentParser()
    for size in ("tensor", "pipeline", "data", "expert"):
        server.add_argument(f"--{size}-parallel-size", f"--{size[0]}p-size", type=int, default=1)
    server.add_argument("--pp-max-micro-batch-size", type=int)
    server.add_argument("--pp-async-batch-depth", type=int)
    (line,) = commands(chosen("sglang", "llama-3.1-70b", tp=2, pp=2), "meta-llama/Llama-3.1-70B")
    taken, _ = server.parse_known_args(shlex.split(line)[3:])
    assert (taken.tensor_parallel_size, taken.pipeline_parallel_size) == (2, 2)


def test_tensorrt_names_its_own() -> None:
    lines = commands(chosen("trtllm", "deepseek-v3", tp=1, dp=8, ep=8), "deepseek-ai/DeepSeek-V3")
    assert "enable_attention_dp: true" in lines[0] and lines[0].endswith("> engine.yaml")
    for flag in ("trtllm-serve deepseek-ai/DeepSeek-V3", "--tp_size 8", "--ep_size 8", "--max_batch_size 128",
                 "--max_num_tokens 4096", "--extra_llm_api_options engine.yaml"):  # fmt: skip
        assert flag in lines[1], flag


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ("NixlConnector", "# 2 prefill engines", "# 3 decode engines", "proxy")),
        ("sglang", ("--disaggregation-mode prefill", "--disaggregation-mode decode", "--pd-disaggregation")),
        ("trtllm", ("cache_transceiver_config", "trtllm-serve disaggregated -c disagg.yaml")),
    ],
)
def test_pools_apart_are_started_apart(engine: str, words: tuple[str, ...]) -> None:
    one = chosen(engine, "llama-3.1-8b")
    told = "\n".join(commands(ServiceCandidate(one.engine, one.limits, 3, one.engine, one.limits, 2), "m"))
    for word in words:
        assert word in told, word


def test_names_that_engines_load() -> None:
    assert hub_name("llama-3.1-8b") == "meta-llama/Llama-3.1-8B"
    assert hub_name("llama-3.1-8b-instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert hub_name("Qwen/Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"
