"""Scales of whole runs: the arithmetic of the solve."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcast.collect.calibrate.scales import (
    MeasuredTime,
    Pieces,
    ScaleFit,
    Slopes,
    cross_validated,
    scales_of,
    solve,
)

SURE = 1e-4  # of noise: measured as good as exactly
PRIORS = {"a": 0.3, "b": 0.3}


def run(name: str, measured_s: float, noise: float = SURE, rest: float = 0.0, **seconds: float) -> MeasuredTime:
    """A run whose forecast is these seconds by kind, one after another."""
    return MeasuredTime(
        name, "time_s", measured_s, Pieces(tuple(seconds), (np.array([[*seconds.values(), rest]]),)), noise
    )


def found(solved: ScaleFit, key: str) -> tuple[float, float]:
    at = solved.keys.index(key)
    return float(solved.log_scales[at]), float(solved.sds[at])


def test_two_known_scales_are_found_again() -> None:
    """a takes 1.3 times, b 0.8 times as long, and a second of something else stays."""
    runs = [run(f"{a} {b}", 1.3 * a + 0.8 * b + 1, rest=1.0, a=a, b=b) for a, b in ((1, 9), (5, 5), (9, 1))]
    solved = solve(runs, PRIORS)
    assert np.exp(solved.log_scales) == pytest.approx([1.3, 0.8], rel=1e-4)
    assert solved.contradiction == pytest.approx(1.0, abs=0.3)
    assert all(abs(one.error_with(solved.by_key)) < 1e-4 for one in runs)


def test_one_number_moves_kinds_by_share_and_prior_variance() -> None:
    """Linear for a small error e: b_f = e s_f² p_f / (sum p² s² + noise²)."""
    error, noise, priors = 0.01, 0.02, {"a": 0.1, "b": 0.2}
    solved = solve([run("one", np.exp(error), noise, a=0.75, b=0.25)], priors)
    whole = 0.75**2 * 0.1**2 + 0.25**2 * 0.2**2 + noise**2
    expected = [error * 0.75 * 0.1**2 / whole, error * 0.25 * 0.2**2 / whole]
    assert solved.log_scales == pytest.approx(expected, rel=0.01)
    # and the posterior: s² - (s² p)² / whole
    left = [0.1**2 - (0.1**2 * 0.75) ** 2 / whole, 0.2**2 - (0.2**2 * 0.25) ** 2 / whole]
    assert solved.sds**2 == pytest.approx(left, rel=0.01)


def test_what_no_run_saw_stays_where_it_was() -> None:
    solved = solve([run("one", 1.5, a=1.0)], {**PRIORS, "c": 0.4})
    assert [*found(solved, "b"), *found(solved, "c")] == pytest.approx([0.0, 0.3, 0.0, 0.4])
    assert set(scales_of(solved, [run("one", 1.5, a=1.0)], PRIORS | {"c": 0.4})) == {"a"}


def test_contradictions_end_between_and_are_less_sure() -> None:
    agree = [run(name, 1.2, 0.03, a=1.0) for name in "xy"]
    differ = [run("x", 1.0, 0.03, a=1.0), run("y", 1.44, 0.03, a=1.0)]
    (same, sure), (between, unsure) = (found(solve(runs, {"a": 0.3}), "a") for runs in (agree, differ))
    assert between == pytest.approx(same, rel=1e-6)  # log 1.2, shrunk a little
    # two runs 6.1 times their noise to either side: a cost of about 37 each
    assert unsure > 3 * sure and unsure < 0.3


def test_more_runs_are_surer_and_none_is_surer_than_its_noise() -> None:
    sds = [found(solve([run(str(i), 1.1, 0.05, a=1.0) for i in range(count)], {"a": 0.3}), "a")[1]
           for count in (1, 4, 16)]  # fmt: skip
    assert sds[0] == pytest.approx((0.05**-2 + 0.3**-2) ** -0.5, rel=1e-6)
    assert sds[1] == pytest.approx((4 * 0.05**-2 + 0.3**-2) ** -0.5, rel=1e-6)
    assert sds[0] > sds[1] > sds[2]


def test_a_gpu_that_waits_for_its_host_says_nothing_of_kernels() -> None:
    """Kernels of 1 s beside 2 s of launches: the longer counts, and only it is seen."""
    forecast = Pieces(("a", "host"), (np.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]),))
    seen = MeasuredTime("one", "time_s", 2.4, forecast, 0.01)
    solved = solve([seen], {"a": 0.3, "host": 0.4})
    assert list(found(solved, "a")) == pytest.approx([0.0, 0.3])
    assert found(solved, "host")[0] == pytest.approx(np.log(1.2), rel=0.01)
    # with kernels three times as long the GPU no longer waits
    log_s, shares = forecast.at(np.log([3.0, 1.0]))
    assert (np.exp(log_s), shares.tolist()) == (pytest.approx(3.0), [1.0, 0.0])


def test_slopes_of_a_queue_are_steeper() -> None:
    """A load whose latency goes with the third power of its steps: 1.1³ is what 1.1 times as long steps give."""
    seen = MeasuredTime("one", "ttft_s", 1.1**3, Slopes(("a",), 1.0, np.array([3.0])), SURE)
    assert np.exp(solve([seen], {"a": 0.3}).log_scales[0]) == pytest.approx(1.1, rel=1e-4)


def test_runs_are_scored_by_the_others() -> None:
    runs = [run("x", 1.2, 0.01, a=1.0), run("y", 1.2, 0.01, a=1.0), run("z", 1.0, 0.01, b=1.0)]
    after = cross_validated(runs, PRIORS)
    assert after[:2] == pytest.approx([0.0, 0.0], abs=0.002) and after[2] == pytest.approx(0.0)
    assert runs[0].error == pytest.approx(1 / 1.2 - 1)
    twice = [run("x", 1.2, 0.01, a=1.0), run("x", 1.2, 0.01, a=1.0)]  # two numbers of one run go together
    assert cross_validated(twice, PRIORS) == pytest.approx([1 / 1.2 - 1] * 2)
