"""When requests are sent, how long they are, what they share."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.errors import KernelcastError
from kernelcast.serving.inference_perf import shared_by_text
from kernelcast.serving.load import (
    Lengths,
    Load,
    arrivals,
    ramp,
    random_prompts,
    repeated_prefixes,
    scaled_to,
    shared_prefix,
    spread_total,
    staged,
    vllm_draws,
)
from kernelcast.serving.metrics import follows_steps


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- a load ----


def test_a_load_is_a_value_that_can_be_cut_and_scaled() -> None:
    load = Load(
        np.array([0.0, 1.0, 4.0]), np.array([10, 20, 30]), np.array([1, 2, 3]), (((7, 5),), (), ((7, 30),)), 2,
        ("a", "b", "c"),
        np.array([0, 0, 1]),
    )  # fmt: skip
    assert (len(load), load.duration_s, load.request_rate, load.longest) == (3, 4.0, 0.5, 33)
    assert (load.input_tokens, load.output_tokens) == (60, 6)
    part = load.take([0, 2])
    assert (part.ids, part.shared, part.max_concurrency) == (("a", "c"), (((7, 5),), ((7, 30),)), 2)
    assert part.stages is not None and part.stages.tolist() == [0, 1]
    assert load.faster(2).arrivals_s.tolist() == [0, 0.5, 2]
    assert load.take(load.inputs > 10).from_first().arrivals_s.tolist() == [0, 3]
    with pytest.raises(ValueError, match="read-only"):
        load.inputs[0] = 1
    assert Load([0.0, 0.0], [1, 1], [1, 1]).request_rate == np.inf  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"arrivals_s": []}, "at least one request"),
        ({"inputs": [1]}, "inputs has 1 entries for 2 arrivals"),
        ({"ids": ("a",)}, "ids has 1 entries"),
        ({"shared": ((),)}, "shared has 1 entries"),
        ({"stages": np.array([0])}, "stages has 1 entries"),
        ({"stages": np.array([0, -1])}, "counted from 0, not -1"),
        ({"arrivals_s": [1.0, 0.5]}, "request 1 arrives at 0.5 s, before the one in front of it at 1 s"),
        ({"arrivals_s": [-1.0, 0.5]}, "request 0: an arrival is a number of seconds from 0 on, not -1"),
        ({"arrivals_s": [0.0, np.nan]}, "request 1: an arrival is a number of seconds"),
        ({"inputs": [1, 0]}, "request 1: inputs must be at least 1 token, not 0"),
        ({"outputs": [0, 1]}, "request 0: outputs must be at least 1 token, not 0"),
        ({"outputs": [1.5, 1]}, "outputs must be whole numbers"),
        ({"max_concurrency": -1}, "max_concurrency is 0"),
        ({"shared": ((), ((1, 6),))}, "request 1: 6 tokens are shared of a prompt of 5"),
        ({"shared": ((), ((1, 0),))}, "request 1: shared pieces are"),
        ({"shared": ((), ((-1, 2),))}, "request 1: shared pieces are"),
    ],
)
def test_a_bad_load_is_refused_in_one_line(words: dict[str, object], said: str) -> None:
    usual = {"arrivals_s": [0.0, 1.0], "inputs": [5, 5], "outputs": [1, 1]}
    with pytest.raises(KernelcastError, match=said):
        Load(**{**usual, **words})  # type: ignore[arg-type]


# ---- arrivals ----


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["poisson", "gamma", "constant", "bursty"]),
    count=st.integers(1, 500),
    rate=st.floats(0.01, 1000),
    shape=st.floats(0.05, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_same_seed_is_the_same_times_in_order(kind: str, count: int, rate: float, shape: float, seed: int) -> None:
    burstiness = shape if kind == "gamma" else 1.0
    once, again = (arrivals(count, rate, vllm_draws(seed), kind, burstiness=burstiness) for _ in range(2))
    assert np.array_equal(once, again)
    assert len(once) == count and once[0] >= 0 and np.all(np.diff(once) >= 0)


def test_poisson_has_its_rate_and_spread() -> None:
    times = arrivals(20_000, 5.0, vllm_draws(1))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(20_000 / 5)  # as vLLM stretches it
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_gamma_gaps(shape: float) -> None:
    gaps = np.diff(arrivals(40_000, 10.0, vllm_draws(2), "gamma", burstiness=shape))
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


def test_times_are_those_that_the_calls_of_vllm_draw() -> None:
    # one call of np.random.gamma a request, summed, then stretched to count / rate
    np.random.seed(7)
    one_by_one = np.cumsum([np.random.gamma(shape=0.5, scale=1 / (3.0 * 0.5)) for _ in range(50)])
    expected = one_by_one * (50 / 3.0) / one_by_one[-1]
    assert arrivals(50, 3.0, vllm_draws(7), "gamma", burstiness=0.5) == pytest.approx(expected)


def test_even_arrivals_and_all_at_once() -> None:
    assert arrivals(4, 2.0, vllm_draws(0), "constant").tolist() == [0, 0.5, 1, 1.5]
    assert arrivals(3, 2.0, vllm_draws(0), "gamma", burstiness=np.inf).tolist() == [0, 0.5, 1]
    assert arrivals(3, np.inf, vllm_draws(0)).tolist() == [0, 0, 0]


def test_bursts_have_pauses_and_the_mean_rate() -> None:
    times = arrivals(10_000, 10.0, vllm_draws(3), "bursty", on_s=5, off_s=15)
    assert np.all(times % 20 <= 5 + 1e-9)  # nothing in the pauses
    assert len(times) / times[-1] == pytest.approx(10, rel=0.02)
    busy = np.count_nonzero(times < 5)
    assert busy == pytest.approx(5 * 40, rel=0.2)  # four times the mean, a quarter of the time


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str) -> None:
    times = ramp(50_000, 5.0, 50.0, vllm_draws(4), strategy)
    assert len(times) == 50_000
    gaps = np.diff(times)
    assert 1 / gaps[:1000].mean() == pytest.approx(5, rel=0.1)
    assert 1 / gaps[-1000:].mean() == pytest.approx(50, rel=0.1)
    # between: by number, the mean of both, or their geometric mean
    middle = 27.5 if strategy == "linear" else 250**0.5
    assert 1 / gaps[24_500:25_500].mean() == pytest.approx(middle, rel=0.1)
    even = ramp(3, 1.0, 2.0, vllm_draws(0), strategy, np.inf)
    assert even[0] == 1 and even[-1] - even[-2] == pytest.approx(0.5)


def test_stages_have_rate_times_seconds_requests_in_their_own_time() -> None:
    times, stages = staged([(5, 60), (10, 30)], vllm_draws(5))
    assert np.bincount(stages).tolist() == [300, 300]
    assert np.all(times[stages == 0] <= 60) and np.all(times[stages == 1] >= 60) and times[-1] == pytest.approx(90)
    even, _ = staged([(2, 1), (1, 2)], vllm_draws(0), "constant")
    assert even.tolist() == [0, 0.5, 1, 2]


def test_bad_arrivals_are_one_line() -> None:
    for words, said in [
        ((0, 1.0), "at least one request"),
        ((1, 0.0), "above 0 requests/s"),
        ((1, -1.0), "above 0 requests/s"),
        ((1, float("nan")), "above 0 requests/s"),
    ]:
        with pytest.raises(KernelcastError, match=said):
            arrivals(*words, vllm_draws(0))
    with pytest.raises(KernelcastError, match=r"arrival process 'poison' .*poisson"):
        arrivals(1, 1.0, vllm_draws(0), "poison")
    with pytest.raises(KernelcastError, match="take gamma"):
        arrivals(1, 1.0, vllm_draws(0), burstiness=2)
    with pytest.raises(KernelcastError, match="burstiness is above 0"):
        arrivals(1, 1.0, vllm_draws(0), "gamma", burstiness=0)
    with pytest.raises(KernelcastError, match="a burst lasts"):
        arrivals(1, 1.0, vllm_draws(0), "bursty", on_s=0)
    with pytest.raises(KernelcastError, match="ramp-up strategy"):
        ramp(1, 1, 2, vllm_draws(0), "steep")
    with pytest.raises(KernelcastError, match="neither of them inf"):
        ramp(1, 1, np.inf, vllm_draws(0))
    with pytest.raises(KernelcastError, match=r"stage 1: .* not one request"):
        staged([(5, 10), (0.1, 1)], vllm_draws(0))
    with pytest.raises(KernelcastError, match="stage 0: a rate and seconds above 0"):
        staged([(5, 0)], vllm_draws(0))
    with pytest.raises(KernelcastError, match="at least one"):
        staged([], vllm_draws(0))
    with pytest.raises(KernelcastError, match="bursts would cross"):
        staged([(5, 10)], vllm_draws(0), "bursty")
    with pytest.raises(KernelcastError, match="a seed is"):
        vllm_draws(-1)


# ---- lengths ----


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["fixed", "uniform", "normal", "lognormal", "exponential"]),
    mean=st.integers(1, 10_000),
    ratio=st.floats(0, 0.99),
    std=st.floats(0, 5000),
    seed=st.integers(0, 1000),
)
def test_lengths_are_whole_and_repeatable(kind: str, mean: int, ratio: float, std: float, seed: int) -> None:
    lengths = Lengths(mean, kind, ratio, std, high=2 * mean)
    once, again = lengths.draw(100, draws(seed)), lengths.draw(100, draws(seed))
    assert np.array_equal(once, again) and once.dtype == np.int64
    assert once.min() >= 1 and once.max() <= 2 * mean


def test_lengths_have_their_mean_and_spread() -> None:
    even = Lengths(1000, "uniform", 0.5).draw(50_000, draws())
    assert (even.min(), even.max()) == (500, 1500) and even.mean() == pytest.approx(1000, rel=0.01)
    for kind in ("normal", "lognormal"):
        found = Lengths(1000, kind, std=200).draw(50_000, draws())
        assert found.mean() == pytest.approx(1000, rel=0.01) and found.std() == pytest.approx(200, rel=0.03)
    cut = Lengths(100, "normal", std=100, low=50, high=120).draw(1000, draws())
    assert (cut.min(), cut.max()) == (50, 120)


@pytest.mark.parametrize(
    "words",
    [
        (0,),
        (1.5,),
        (10, "even"),
        (10, "uniform", 1.0),
        (10, "normal", 0, -1),
        (10, "normal", 0, 1, 0),
        (9, "normal", 0, 1, 5, 4),
    ],
)
def test_bad_lengths_are_refused(words: tuple[object, ...]) -> None:
    with pytest.raises(KernelcastError):
        Lengths(*words)  # type: ignore[arg-type]


# ---- what prompts share ----


def test_a_random_prefix_comes_on_top_as_in_vllm() -> None:
    prompts = random_prompts(3, Lengths(10), Lengths(2), draws(), prefix_len=4)
    assert prompts.inputs.tolist() == [14, 14, 14] and prompts.shared == (((0, 4),),) * 3
    assert random_prompts(3, Lengths(10), Lengths(2), draws()).shared == ()


def test_random_lengths_are_those_that_the_calls_of_vllm_draw() -> None:
    generator = np.random.default_rng(3)
    inputs, outputs = generator.integers(512, 1537, size=20), generator.integers(64, 193, size=20)
    found = random_prompts(20, Lengths(1024, "uniform", 0.5), Lengths(128, "uniform", 0.5), draws(3))
    assert np.array_equal(found.inputs, inputs) and np.array_equal(found.outputs, outputs)


def test_repeated_prefixes_take_turns() -> None:
    found = repeated_prefixes(11, 32, 8, 3, Lengths(4), draws())
    assert len(found.inputs) == 9 and set(found.inputs) == {40}  # 11 // 3 of each, as vLLM
    assert sorted(piece for ((piece, tokens),) in found.shared if tokens == 32) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(KernelcastError, match="need as many requests"):
        repeated_prefixes(2, 32, 8, 3, Lengths(4), draws())


def test_users_of_a_group_share_its_system_prompt() -> None:
    found = shared_prefix(8, 2, 2, 100, Lengths(20), Lengths(5), draws())
    assert set(found.inputs) == {120}
    groups = [pieces[0] for pieces in found.shared]
    assert sorted(groups[:4]) == [(0, 100), (0, 100), (1, 100), (1, 100)]
    assert found.shared[:4] == found.shared[4:]  # who comes again asks the same


def test_a_conversation_grows_by_questions_and_answers() -> None:
    found = shared_prefix(6, 1, 2, 100, Lengths(20), Lengths(5), draws(), multi_turn=True)
    assert found.inputs.tolist() == [120, 120, 145, 145, 170, 170]
    assert found.shared[0] == ((0, 100), (1, 20)) and found.shared[4] == ((0, 100), (1, 70))
    Load(np.zeros(6), found.inputs, found.outputs, found.shared)  # covers each prompt, no more


def test_totals_are_kept() -> None:
    assert spread_total(10, 4).tolist() == [2, 3, 2, 3]
    assert spread_total(2, 4).tolist() == [1, 1, 1, 1]
    assert scaled_to([1, 2, 3], 60).tolist() == [10, 20, 30]


def test_what_texts_share_is_found() -> None:
    system, other = "You are helpful. " * 20, "Another system prompt. " * 20
    prompts = [system + "a" * 100, other + "x" * 50, system + "b" * 100, other + "y" * 50, system + "a" * 100]
    inputs = np.array([len(text) // 4 for text in prompts])
    shared = shared_by_text(prompts, inputs)
    first = shared[0][0]
    assert shared[2] == (first,) and shared[4] == shared[0]
    assert first[1] == pytest.approx(len(system) / 4, abs=1)
    assert sum(tokens for _, tokens in shared[0]) == inputs[0]  # the same prompt twice: all of it
    assert shared[1] == shared[3] and shared[1][0][0] != first[0]
    assert shared_by_text(["a" * 100, "b" * 100], np.array([25, 25])) == ()


def test_a_throughput_follows_steps_only_where_requests_wait_for_the_server() -> None:
    """Steps 21% slower at one end than at the other (ln 1.21 = 0.19): 1% less throughput in an open loop (0.01)."""
    fast = {"mean_e2el_ms": 1000.0, "request_throughput": 8.08}
    slow = {"mean_e2el_ms": 1210.0, "request_throughput": 8.0}
    spread_out = Load(np.arange(4.0), np.full(4, 100), np.full(4, 10))
    assert follows_steps(spread_out, fast, slow) == pytest.approx(math.log(1.01) / math.log(1.21))
    assert follows_steps(replace(spread_out, max_concurrency=2), fast, slow) == 1.0
    assert follows_steps(spread_out, fast, {**slow, "request_throughput": 4.0}) == 1.0
