"""Calibration: the arithmetic of prior and fit, what must hold whatever was measured, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.collect.calibrate import calibrate
from kernelcast.collect.calibrate.fit import ProcessFit, chosen_scales, fit, penalty, spread_out
from kernelcast.forecast.calibration import Calibration, FamilyCalibration, load_calibration
from kernelcast.forecast.features import GPU_FEATURES
from kernelcast.forecast.predict import CHUNK_CALLS
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.forecast.prior import CallPoints, Prior, PriorScales, matern, plain_prior, sharers, with_hidden

GPU = "h200_sxm"
TIMES = ("predicted_us", "low_us", "high_us", "ceiling_us")


def table(rows: int = 120, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "op": np.full(rows, "gemm", dtype=object),
        "dtype": np.array(["bf16", "fp8"], dtype=object)[rng.integers(0, 2, rows)],
        **{side: np.floor(2 ** rng.uniform(5, 13, rows)) for side in ("m", "n", "k")},
    }


def measured(rows: int = 120, seed: int = 0, slow: float = 1.3) -> dict[str, Any]:
    """Times that this GPU never had: the forecast times ``slow``, and 1% of noise."""
    columns = table(rows, seed)
    said, _ = predict_columns(columns, GPU)
    noise = np.exp(0.01 * np.random.default_rng(seed + 1).standard_normal(rows))
    return {**columns, "latency_us": said["predicted_us"] * slow * noise}


BF16 = {"op": "gemm", "dtype": "bf16", "stack": "vllm"}
FP8 = {"op": "gemm", "dtype": "fp8", "stack": "vllm"}


def prior(features: int = 1, **changes: Any) -> Prior:
    """Shares that tell their parts apart: 1, 2, 4, 8 of the biases, 16, 32, 64 of the smooth ones, in hundredths."""
    found = Prior(
        names=tuple(f"x{at}" for at in range(features)),
        mean=np.zeros(features, dtype=np.float32),
        scale=np.ones(features, dtype=np.float32),
        metric=np.ones((3, features), dtype=np.float32),
        biases=(0.01, 0.02, 0.04, 0.08),
        smooth=(0.16, 0.32, 0.64),
        leaning=0.0,
        noise=0.1,
    )
    return replace(found, **changes)


def placed(x: Any, words: Any = (BF16,), code: Any = None, leaning: Any = None) -> CallPoints:
    """Calls at x (a feature, or columns of them), by default of one kind."""
    place = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
    lean = np.zeros(len(x)) if leaning is None else np.asarray(leaning, dtype=np.float64)
    numbers = np.zeros(len(x), dtype=np.intp) if code is None else np.asarray(code)
    return CallPoints.of(place, lean, [sharers(one) for one in words], numbers)


def made(**changes: Any) -> FamilyCalibration:
    """One point at 0 on one feature, of bf16, weight 0.5."""
    family = FamilyCalibration(
        rows=10,
        error_before=20.0,
        error_after=10.0,
        expected_before=20.0,
        expected_after=10.0,
        formats={"op=gemm dtype=bf16": (10, 20.0, 10.0)},
        prior=prior(),
        setting=PriorScales(),
        position=np.zeros((1, 1), dtype=np.float32),
        leaning=np.zeros(1, dtype=np.float32),
        groups=(sharers(BF16),),
        code=np.zeros(1, dtype=np.int64),
        weights=np.array([0.5], dtype=np.float32),
        few=np.zeros(1, dtype=np.int64),
        factor=np.array([[1 / np.sqrt(1.27 + 0.1)]], dtype=np.float32),  # all shares together, and the noise
        noise=0.1,
        low=1.2,
        high=1.3,
        reaches={},
        constants={},
        least=-2.0,
        most=2.0,
    )
    return replace(family, **changes)


def corrected(family: FamilyCalibration, x: float, words: dict[str, str]) -> tuple[float, float, float]:
    found = family.correction(("x0",), np.array([[x]], dtype=np.float32), np.zeros(1), words)
    return tuple(float(one[0]) for one in found)  # type: ignore[return-value]


def fitted(rows: CallPoints, error: Any, known: Prior, setting: PriorScales | None = None) -> ProcessFit:
    errors = np.asarray(error, dtype=np.float64)
    return fit(known, rows, errors, setting or PriorScales(), np.arange(len(errors)))


def chosen(known: Prior, rows: CallPoints, error: Any) -> PriorScales:
    return chosen_scales(known, rows, np.asarray(error), np.arange(len(rows)))


def said(known: Prior, rows: CallPoints, found: ProcessFit, asked: CallPoints) -> Any:
    """What the fit says of other calls, in units of the width."""
    return known.covariance(asked, rows) @ found.weights


# ---- arithmetic ----


def test_who_shares_an_error() -> None:
    full = {"stack": "vllm", "op": "gemm", "layout": "tn", "dtype": "fp8", "inputs": None}
    assert sharers(full) == ("op=gemm dtype=fp8", "vllm", "dtype=fp8 layout=tn op=gemm stack=vllm")
    assert sharers({"op": "rmsnorm"}) == ("op=rmsnorm", "", "op=rmsnorm")


def test_likeness_falls_with_distance() -> None:
    # one length away: (1 + √3) exp(-√3) = 0.4834; rounding may make a squared distance a little negative
    assert matern(np.array([0.0, 1.0, 1e4, -1e-12])) == pytest.approx([1.0, 0.4834, 0.0, 1.0], abs=1e-4)


def test_covariance_is_the_sum_of_the_parts_that_two_calls_share() -> None:
    words = (BF16, FP8, {**FP8, "stack": "torch"}, {**BF16, "layout": "tn"})
    calls = placed(np.zeros(4), words, [0, 1, 2, 3])
    found = prior().covariance(calls, calls)
    # all; another format of the same stack; another format and stack; another kind of the same format and stack
    assert found[0] == pytest.approx([1.27, 0.01 + 0.04 + 0.16, 0.01 + 0.16, 0.01 + 0.02 + 0.04 + 0.16 + 0.32])
    assert found[1, 2] == pytest.approx(0.01 + 0.02 + 0.16 + 0.32)
    assert np.array_equal(found, found.T)
    assert np.diag(found) == pytest.approx(prior().variance(calls))
    # far away only the biases are left, one length away 0.4834 of the smooth parts
    apart = prior().covariance(placed([0.0]), placed([1.0, 1e3]))[0]
    assert apart == pytest.approx([0.15 + 0.4834 * 1.12, 0.15], abs=1e-3)


def test_covariance_with_a_leaning_a_metric_and_a_setting() -> None:
    known = prior(2, leaning=0.5, metric=np.array([[2, 0], [0, 0], [0, 0]], dtype=np.float32))
    one, other = placed([[0, 0]], leaning=[0.2]), placed([[1, 7]], leaning=[-0.6])
    # of all calls by twice the first feature, within a format and a kind by nothing
    near = (1 + 2 * np.sqrt(3)) * np.exp(-2 * np.sqrt(3))
    assert known.covariance(one, other)[0, 0] == pytest.approx(0.15 - 0.5 * 0.12 + 0.16 * near + 0.96)
    setting = PriorScales(biases=3.0, smooth=0.5, noise=9.0, length=2.0)  # twice the length: 1 apart
    assert known.covariance(one, other, setting)[0, 0] == pytest.approx(
        3 * (0.15 - 0.06) + 0.5 * (0.16 * 0.48335 + 0.96), abs=1e-4
    )
    assert known.variance(one, setting)[0] == pytest.approx(3 * (0.15 + 0.5 * 0.04) + 0.5 * 1.12)


def test_features_are_placed_by_name_and_not_by_miles() -> None:
    known = replace(prior(2), mean=np.array([1, 0], dtype=np.float32), scale=np.array([2, 1], dtype=np.float32))
    values = np.array([[4.0, 9.0, 3.0]], dtype=np.float32)
    assert known.positions(("x1", "other", "x0"), values).tolist() == [[1.0, 4.0]]
    assert known.positions(("x1", "other", "x0"), 100 * values).tolist() == [[5.0, 5.0]]


def test_the_plain_prior_knows_no_gpu() -> None:
    names = ("a", next(iter(GPU_FEATURES)), "b")
    found = plain_prior(names, np.arange(3, dtype=np.float32), np.ones(3, dtype=np.float32))
    assert found.names == ("a", "b") and found.mean.tolist() == [0, 2]
    assert sum(found.biases) + sum(found.smooth) + found.leaning + found.noise == pytest.approx(1.0)


def test_a_prior_that_does_not_fit_together_is_refused() -> None:
    arrays, plain = prior(2).to_dict()
    again = Prior.from_dict(arrays, plain)
    assert again.biases == prior().biases and again.smooth == prior().smooth and again.names == ("x0", "x1")
    for broken in ("mean", "scale", "metric"):
        with pytest.raises(ValueError, match="do not fit together"):
            Prior.from_dict(
                {**arrays, broken: np.ones((3, 3), dtype=np.float32)[:, : 3 if broken == "metric" else 1]}, plain
            )
    for told in ({"noise": -0.1}, {"biases": (0.1, 0.1)}, {"smooth": (0.1, 0.1)}, {"smooth": (0.1, -0.1, 0.1)}):
        with pytest.raises(ValueError, match="not a share"):
            Prior.from_dict(arrays, {**plain, **told})


def test_equal_errors_are_shrunk_as_by_hand() -> None:
    """n errors of b at one place: each pair covaries by v, noise s on the diagonal. The mean of the posterior there is
    b n v / (n v + s); of a call that shares only c with them b n c / (n v + s)."""
    v, c = 1.27, 0.15  # far away the biases are shared
    for count in (1, 2, 10, 200):
        rows = placed(np.zeros(count))
        found = fitted(rows, np.full(count, 0.3), prior())
        # all errors are within the noise: less of it the more of them there are, and the weight of small errors
        noise = found.noise[0]
        assert 0.3 * 0.1 / 1.25 < noise < 0.1 and np.all(found.noise == noise)
        here, far = said(prior(), rows, found, placed([0.0, 1e4]))
        assert here == pytest.approx(0.3 * count * v / (count * v + noise), rel=1e-2)
        assert far == pytest.approx(0.3 * count * c / (count * v + noise), rel=1e-2)


def test_two_calls_by_hand() -> None:
    """Errors a and b of calls that covary by c, with noise: the inverse of a 2x2 matrix."""
    rows = placed([0.0, 1.0])
    v, c = 1.27, 0.15 + 1.12 * 0.48335
    found = fitted(rows, [0.04, 0.02], prior())  # well inside the noise
    d = v + found.noise[0]
    wanted = np.array([d * 0.04 - c * 0.02, d * 0.02 - c * 0.04]) / (d**2 - c**2)
    assert found.weights == pytest.approx(wanted, rel=1e-2)
    # each without the other: 0.04 - c / d 0.02, and its variance v - c² / d before the noise
    assert found.left_out == pytest.approx([0.04 - c / d * 0.02, 0.02 - c / d * 0.04], rel=1e-2)
    assert found.noise[1] == pytest.approx(found.noise[0], rel=0.05)
    assert found.spread**2 == pytest.approx(np.full(2, v - c**2 / d + 0.1), rel=1e-2)


def test_left_out_errors_are_those_of_a_fit_without_the_group() -> None:
    rng = np.random.default_rng(0)
    rows = placed(rng.standard_normal((24, 2)), (BF16, FP8), rng.integers(0, 2, 24), 0.3 * rng.standard_normal(24))
    known, setting = prior(2, leaning=0.2), PriorScales(2.0, 0.5, 3.0, 0.7)
    error, group = 0.05 * rng.standard_normal(24), np.arange(24) % 6
    found = fit(known, rows, error, setting, group)
    covariance = known.covariance(rows, rows, setting)
    noise = np.full(24, 0.3 + 1e-5)
    among = covariance + np.diag(found.noise)
    for one in range(6):
        out, rest = np.flatnonzero(group == one), np.flatnonzero(group != one)
        told = covariance[np.ix_(out, rest)] @ np.linalg.solve(among[np.ix_(rest, rest)], error[rest])
        assert error[out] - told == pytest.approx(found.left_out[out], abs=2e-3)
        taken = covariance[np.ix_(out, rest)] @ np.linalg.solve(
            among[np.ix_(rest, rest)], covariance[np.ix_(rest, out)]
        )
        left = np.diag(covariance)[out] - np.diag(taken) + noise[out]
        assert found.spread[out] == pytest.approx(np.sqrt(left), rel=5e-3)


def test_few_rows_move_little_and_one_outlier_less() -> None:
    known = prior(smooth=(0.0, 0.0, 0.0))
    biases = []
    for count in (2, 10, 200):
        rows = placed(np.zeros(count))
        biases.append(float(said(known, rows, fitted(rows, np.full(count, 0.3), known), rows)[0]))
    assert 0 < biases[0] < biases[1] < biases[2] < 0.3
    assert biases[2] > 0.29
    wild = np.full(50, 0.1)
    wild[7] = 30.0  # a mean would be 0.7
    rows = placed(np.zeros(50))
    assert float(said(known, rows, fitted(rows, wild, known), rows)[0]) == pytest.approx(0.1, abs=0.02)


def test_a_call_follows_those_near_it_and_not_those_far_away() -> None:
    words = (BF16, {**BF16, "layout": "tn"}, FP8)
    calls = placed([*np.repeat([0.0, 4.5], 20), 0.0, 4.5, 1e4, 0.0, 0.0], words, [0] * 43 + [1, 2])
    rows = calls.select(np.arange(40))
    found = fitted(rows, np.repeat([1.0, -1.0], 20), prior())
    here, there, far, other, least = said(prior(), rows, found, calls.select(np.arange(40, 45)))
    assert here == pytest.approx(1.0, abs=0.03) and there == pytest.approx(-1.0, abs=0.03)
    assert abs(far) < 0.01  # which both speak of alike
    # of another kind it follows less, of another format still less: 0.48 and 0.16 of the 1.12 are smooth across these
    assert other == pytest.approx(0.48 / 1.12, abs=0.03) and least == pytest.approx(0.16 / 1.12, abs=0.03)


def test_two_ways_to_correct_agree() -> None:
    """What a file says of a call (single precision, by blocks, by words) and the prior's own covariance."""
    rng = np.random.default_rng(1)
    known, setting = prior(3, leaning=0.3), PriorScales(0.3, 2.0, 0.3, 0.7)
    words = (BF16, FP8, {**FP8, "stack": "torch"})
    place = rng.standard_normal((40, 3)).astype(np.float16).astype(np.float64)
    rows = placed(place, words, rng.integers(0, 3, 40), 0.2 * rng.standard_normal(40))
    found = fit(known, rows, rng.standard_normal(40), setting, np.arange(40))
    family = made(
        prior=known, setting=setting, position=place.astype(np.float32), leaning=rows.leaning.astype(np.float32),
        groups=tuple(sharers(one) for one in words), code=_codes(rows), weights=found.weights.astype(np.float32),
        few=found.few.astype(np.int64), factor=found.factor.astype(np.float32),
    )  # fmt: skip
    values, leaning = rng.standard_normal((23, 3)).astype(np.float32), 0.2 * rng.standard_normal(23)
    strange = {"op": "gemm", "dtype": "int8", "stack": "vllm"}
    for at, one in enumerate((*words, strange)):
        error, left, before = family.correction(known.names, values, leaning, one)
        both = CallPoints.of(
            np.concatenate([values.astype(np.float64), rows.position]), np.concatenate([leaning, rows.leaning]),
            [sharers(word) for word in (*words, strange)], np.concatenate([np.full(23, at), _codes(rows)]),
        )  # fmt: skip
        asked, points = both.select(np.arange(23)), both.select(np.arange(23, 63))
        across = known.covariance(asked, points, setting)
        assert error == pytest.approx(across @ found.weights, abs=1e-4)
        assert before == pytest.approx(known.variance(asked, setting))
        assert left == pytest.approx(before - np.sum((across @ found.factor.T) ** 2, axis=1), abs=1e-3)


def _codes(rows: CallPoints) -> np.ndarray[Any, np.dtype[np.int64]]:
    """0 bf16 vllm, 1 fp8 vllm, 2 fp8 torch, from the numbers of formats and stacks, which are by the alphabet."""
    return np.where(rows.format == rows.format.min(), 0, np.where(rows.stack == rows.stack.max(), 1, 2)).astype(
        np.int64
    )


def test_what_is_left_of_the_variance() -> None:
    error, left, before = corrected(made(), 0.0, BF16)
    assert error == pytest.approx(0.5 * 1.27)  # its weight times all shares
    assert before == pytest.approx(1.27)
    assert left == pytest.approx(1.27 - 1.27**2 / 1.37, abs=1e-5)
    error, left, _ = corrected(made(), 0.0, FP8)
    assert error == pytest.approx(0.5 * 0.21) and left == pytest.approx(1.27 - 0.21**2 / 1.37, abs=1e-5)


def test_points_cover_the_rows() -> None:
    place = np.concatenate([np.linspace(0, 1, 99), [50.0]])[:, None]
    picked = spread_out(place, 5)
    assert len(picked) == 5 and {0, 99} <= set(picked.tolist())  # the ends are the farthest
    assert spread_out(place[:3], 5).tolist() == [0, 1, 2]


# ---- the setting ----


def test_a_setting_is_less_likely_the_farther_it_is_from_what_was_learned() -> None:
    assert penalty(PriorScales()) == 0.0
    assert penalty(PriorScales(smooth=np.e)) == pytest.approx(0.5)
    assert penalty(PriorScales(biases=0.05)) > penalty(PriorScales(biases=0.3)) > 0
    # one call of a usual error says next to nothing against it
    setting = chosen(prior(), placed([0.0]), [0.79])
    assert [getattr(setting, name) for name in ("biases", "smooth", "noise", "length", "unshared", "hidden")] == (
        pytest.approx([1.0] * 6, abs=0.01)
    )


def test_the_setting_follows_the_errors() -> None:
    rng = np.random.default_rng(2)
    rows = placed(rng.standard_normal((250, 2)), (BF16, FP8), rng.integers(0, 2, 250))
    known = prior(2, biases=(0.1, 0.1, 0.1, 0.1), smooth=(0.2, 0.1, 0.1))
    noise = np.sqrt(0.1) * rng.standard_normal(250)
    noisy = chosen(known, rows, noise)
    assert noisy.smooth / noisy.noise < 0.05 and noisy.biases / noisy.noise < 0.5
    assert noisy.noise == pytest.approx(1.0, rel=0.3)
    covariance = known.covariance(rows, rows) + 1e-9 * np.eye(250)
    smooth = np.linalg.cholesky(covariance) @ rng.standard_normal(250)
    learned, large = (chosen(known, rows, factor * smooth + noise) for factor in (1.0, 2.5))
    assert noisy.smooth / noisy.noise < learned.smooth / learned.noise < large.smooth / large.noise
    assert noisy.smooth < learned.smooth < large.smooth
    biased = chosen(known, rows, np.full(250, 2.0) + 0.03 * rng.standard_normal(250))
    assert biased.noise < 0.3 and biased.biases > biased.noise
    # all errors twice as large: every part is four times as large, and what they have in common stays
    twice = chosen(known, rows, 2 * (smooth + noise))
    assert twice.smooth / twice.noise == pytest.approx(learned.smooth / learned.noise, rel=0.1)
    assert twice.smooth == pytest.approx(4 * learned.smooth, rel=0.4)


def test_calls_that_networks_do_not_tell_apart_err_alike() -> None:
    """Errors that follow the hidden units and no feature: they are found with the part over these, and only then."""
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((200, 4)).astype(np.float32)
    values, error = np.zeros((200, 1), dtype=np.float32), np.sin(2 * hidden[:, 0].astype(np.float64))
    off = []
    for known in (prior(), prior().with_hidden(hidden)):
        place = known.positions(*with_hidden(("x0",), values, hidden))
        rows, there = placed(place[:160]), placed(place[160:])
        setting = chosen(known, rows, error[:160])
        found = fitted(rows, error[:160], known, setting)
        off.append(float(np.mean(np.abs(known.covariance(there, rows, setting) @ found.weights - error[160:]))))
    assert off[1] < 0.5 * off[0] and off[0] > 0.4
    assert prior().with_hidden(hidden[:, :0]).names == ("x0",)  # of a predictor without networks
    many = prior().with_hidden((rng.standard_normal((50, 300)) * np.arange(300)).astype(np.float32))
    assert len(many.names) == 81 and many.names[-1] == "hidden_299" and "hidden_0" not in many.names


# ---- what must hold ----


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    found, _ = calibrate(measured(), GPU)
    return found


def test_a_bias_is_found_and_the_error_said_is_of_calls_not_seen(calibration: Calibration) -> None:
    family = calibration.families["gemm"]
    assert family.rows == 120
    assert family.error_before == pytest.approx(23, abs=1)  # 1 / 1.3 is 23% short
    assert family.error_after < 3
    fresh = measured(seed=9)
    results, _ = predict_columns(fresh, GPU, kc.Conditions(calibration=calibration))
    error = np.abs(results["predicted_us"] / fresh["latency_us"] - 1)
    assert error.mean() < 0.04
    inside = (fresh["latency_us"] >= results["low_us"]) & (fresh["latency_us"] <= results["high_us"])
    assert inside.mean() > 0.7


def test_an_interval_holds_four_calls_in_five_that_were_not_seen() -> None:
    """Errors as a GPU has them: of a format, along the sizes, and noise."""

    def slow(columns: dict[str, Any], seed: int) -> dict[str, Any]:
        count = len(columns["op"])
        along = 0.15 * np.sin(np.log2(columns["m"])) + np.where(columns["dtype"] == "fp8", 0.25, 0.1)
        noise = 0.06 * np.random.default_rng(seed).standard_normal(count)
        return {**columns, "latency_us": predict_columns(columns, GPU)[0]["predicted_us"] * np.exp(along + noise)}

    found, _ = calibrate(slow(table(300), 1), GPU)
    fresh = slow(table(1000, seed=7), 2)
    results, _ = predict_columns(fresh, GPU, kc.Conditions(calibration=found))
    inside = (fresh["latency_us"] >= results["low_us"]) & (fresh["latency_us"] <= results["high_us"])
    assert 0.7 < inside.mean() < 0.9
    family = found.families["gemm"]
    assert family.error_after == pytest.approx(
        100 * np.mean(np.abs(results["predicted_us"] / fresh["latency_us"] - 1)), rel=0.3
    )
    assert sum(rows for rows, _, _ in family.formats.values()) == 300
    assert all(after < before for _, before, after in family.formats.values())
    assert set(family.formats) == {"op=gemm dtype=bf16", "op=gemm dtype=fp8"}


# One is slow, one slower with ten times the scatter, one fast: (dtype, stack), factor, scatter
CONFIGURATIONS = ((("bf16", "vllm"), 1.3, 0.03), (("fp8", "vllm"), 1.6, 0.3), (("bf16", "sglang"), 0.8, 0.03))


def of_configurations(each: int, seed: int, wild: float = 0.0) -> dict[str, Any]:
    """``each`` calls of each; a share ``wild`` of them took five times as long."""
    rng = np.random.default_rng(seed)
    columns = table(each * len(CONFIGURATIONS), seed)
    for at, name in enumerate(("dtype", "stack")):
        columns[name] = np.repeat(np.array([choice[at] for choice, _, _ in CONFIGURATIONS], dtype=object), each)
    factor, scatter = (np.repeat([kind[at] for kind in CONFIGURATIONS], each) for at in (1, 2))
    noise = scatter * rng.standard_normal(len(factor)) + np.where(rng.random(len(factor)) < wild, np.log(5), 0.0)
    return {**columns, "latency_us": predict_columns(columns, GPU)[0]["predicted_us"] * factor * np.exp(noise)}


def errors_after(rows: dict[str, Any], fresh: dict[str, Any]) -> Any:
    results, _ = predict_columns(fresh, GPU, kc.Conditions(calibration=calibrate(rows, GPU)[0]))
    inside = (fresh["latency_us"] >= results["low_us"]) & (fresh["latency_us"] <= results["high_us"])
    return np.abs(np.log(results["predicted_us"] / fresh["latency_us"])).reshape(3, -1), inside.reshape(3, -1)


@pytest.mark.parametrize("each", [10, 30, 100])
def test_never_worse_than_a_constant_for_each_configuration(each: int) -> None:
    rows, fresh = of_configurations(each, 1), of_configurations(200, 2)
    errors, _ = errors_after(rows, fresh)
    ratio = {name: np.log(each["latency_us"] / predict_columns(each, GPU)[0]["predicted_us"]).reshape(3, -1)
             for name, each in (("rows", rows), ("fresh", fresh))}  # fmt: skip
    constant = np.abs(ratio["fresh"] - np.median(ratio["rows"], axis=1, keepdims=True)).mean(axis=1)
    # what the one that scatters says does not blur the others, beyond what ten calls leave open
    assert np.all(errors.mean(axis=1) <= constant * 1.05 + 0.4 / each)


def test_an_interval_is_as_wide_as_its_configuration_scatters() -> None:
    _, inside = errors_after(of_configurations(100, 3), of_configurations(400, 4))
    assert np.all((inside.mean(axis=1) > 0.7) & (inside.mean(axis=1) < 0.92))


def test_a_configuration_keeps_its_constant_with_wild_calls_in_it() -> None:
    fresh = of_configurations(200, 6)
    plain, after = (errors_after(of_configurations(60, 5, wild), fresh)[0].mean(axis=1) for wild in (0.0, 0.1))
    assert np.all(after < plain + 0.03)


def test_a_single_call_of_a_configuration_does_not_move_the_others() -> None:
    rows = of_configurations(30, 7)
    one = {name: np.append(column[:30], column[30]) for name, column in rows.items()}  # 30 of the first, 1 of the next
    one["latency_us"][-1] *= 4
    fresh = of_configurations(200, 8)
    alone, both = (errors_after(each, fresh)[0].mean(axis=1)
                   for each in ({name: column[:30] for name, column in rows.items()}, one))  # fmt: skip
    assert both[0] < alone[0] + 0.01


def test_what_a_configuration_does_not_share() -> None:
    words, setting = (BF16, {**BF16, "layout": "tn"}), PriorScales(unshared=3.0)
    calls = placed(np.zeros(2), words, [0, 1])
    # its own are 8 hundredths of the biases and 64 of the smooth parts
    assert prior().covariance(calls, calls, setting)[0] == pytest.approx([1.27 + 2 * 0.72, 1.27 - 0.72])
    assert prior().variance(calls, setting) == pytest.approx(np.full(2, 1.27 + 2 * 0.72))


def test_one_wild_measurement_changes_next_to_nothing() -> None:
    columns = measured(60)
    wild = {**columns, "latency_us": columns["latency_us"].copy()}
    wild["latency_us"][11] *= 20
    asked = table(200, 3)
    plain, after = (
        predict_columns(asked, GPU, kc.Conditions(calibration=calibrate(rows, GPU)[0]))[0]["predicted_us"]
        for rows in (columns, wild)
    )
    assert np.median(np.abs(np.log(after / plain))) < 0.02


def test_a_correction_stays_in_the_range_of_the_errors_seen(calibration: Calibration) -> None:
    family = calibration.families["gemm"]
    asked = table(300, 5)
    plain, after = (
        predict_columns(asked, GPU, kc.Conditions(calibration=one))[0]["predicted_us"] for one in (None, calibration)
    )
    shift = np.log(after / plain)
    assert family.least == 0.0 and 0.25 < family.most < 0.3
    assert np.all((shift >= -1e-9) & (shift <= family.most + 1e-9))


def test_noise_alone_corrects_next_to_nothing() -> None:
    columns = measured(30, slow=1.0)
    columns["latency_us"] *= np.exp(0.2 * np.random.default_rng(5).standard_normal(30))
    found, _ = calibrate(columns, GPU)
    plain, _ = predict_columns(table(500, 3), GPU)
    after, _ = predict_columns(table(500, 3), GPU, kc.Conditions(calibration=found))
    assert np.median(np.abs(np.log(after["predicted_us"] / plain["predicted_us"]))) < 0.05


def test_the_order_of_the_rows_does_not_matter(calibration: Calibration) -> None:
    columns = measured()
    turned = {name: column[::-1] for name, column in columns.items()}
    again, _ = calibrate(turned, GPU)
    one, two = calibration.families["gemm"], again.families["gemm"]
    assert one.setting == two.setting and one.groups == two.groups and one.formats == two.formats
    for name in ("position", "leaning", "code", "weights", "few", "factor"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name


def test_a_call_does_not_depend_on_its_table(calibration: Calibration) -> None:
    conditions = kc.Conditions(calibration=calibration)
    columns = table(CHUNK_CALLS + 700, seed=4)
    whole, _ = predict_columns(columns, GPU, conditions)
    order = np.random.default_rng(1).permutation(len(columns["op"]))[:333]
    part, _ = predict_columns({name: column[order] for name, column in columns.items()}, GPU, conditions)
    for name in TIMES:
        assert np.array_equal(part[name], whole[name][order]), name
    at = int(order[0])
    call = kc.kernel("gemm", dtype=columns["dtype"][at], **{s: int(columns[s][at]) for s in ("m", "n", "k")})
    assert kc.predict(call, GPU, conditions).time_s * 1e6 == whole["predicted_us"][at]


def test_no_prediction_beats_its_bound() -> None:
    with pytest.raises(kc.KernelcastError, match="less than half of what the hardware allows"):
        calibrate(measured(slow=0.05), GPU)  # twenty times faster than the forecast: nonsense, and it must not pass
    columns = measured()
    warm, _ = predict_columns(columns, GPU, kc.Conditions(rotation=1))
    columns["latency_us"] = 0.6 * warm["bound_us"]  # nor this, which could be a bound that is a little off
    found, _ = calibrate(columns, GPU)
    results, _ = predict_columns(columns, GPU, kc.Conditions(calibration=found))
    bound = results["bound_us"]
    assert np.all(bound <= results["low_us"]) and np.all(results["low_us"] <= results["predicted_us"])
    assert np.all(results["predicted_us"] <= results["high_us"])
    assert np.all((bound <= results["ceiling_us"]) & (results["ceiling_us"] <= results["predicted_us"]))


def test_other_families_stay_as_they_are(calibration: Calibration) -> None:
    norm = kc.kernel("rmsnorm", rows=4096, cols=4096)
    plain, after = (kc.predict(norm, GPU, c) for c in (kc.Conditions(), kc.Conditions(calibration=calibration)))
    assert after.time_s == plain.time_s
    assert after.predictor == f"{plain.predictor}+calibrated"


def test_a_calibrated_gpu_is_seen() -> None:
    """h100_pcie was never measured; calls like those that were now are."""
    columns = table(200)
    said, _ = predict_columns(columns, "h100_pcie")
    found, _ = calibrate({**columns, "latency_us": said["predicted_us"] * 1.2}, "h100_pcie")
    after, _ = predict_columns(columns, "h100_pcie", kc.Conditions(calibration=found))
    assert set(said["support"]) <= {"near", "extrapolated"}
    assert set(after["support"]) == {"seen"}


def test_a_what_if_of_the_same_gpu_is_allowed_and_stays_monotone(calibration: Calibration) -> None:
    conditions = kc.Conditions(calibration=calibration)
    call = kc.Gemm(m=1, n=8192, k=8192)
    base = kc.predict(call, GPU, conditions)
    faster = kc.predict(call, kc.gpu(GPU, dram_bytes_per_s=9e12), conditions)
    assert faster.time_s <= base.time_s


# ---- what is refused ----


def test_another_gpu_is_refused(calibration: Calibration) -> None:
    conditions = kc.Conditions(calibration=calibration)
    with pytest.raises(kc.KernelcastError, match="made on h200_sxm, not on a100_sxm"):
        kc.predict(kc.Gemm(m=64, n=64, k=64), "a100_sxm", conditions)
    with pytest.raises(kc.KernelcastError, match="made on h200_sxm, not on a100_sxm"):
        kc.predict_table(table(3), "a100_sxm", conditions)
    mixed = {**table(2), "gpu": np.array([GPU, "a100_sxm"], dtype=object)}
    _, bad = predict_columns(mixed, None, conditions)
    assert list(bad.messages) == [1]


def test_another_predictor_is_refused_and_other_weights_warn(calibration: Calibration) -> None:
    with pytest.raises(kc.KernelcastError, match=r"corrects learned-.*, not generic-1"):
        kc.Conditions(predictor="generic", calibration=calibration)
    with pytest.raises(kc.KernelcastError, match="is analytical"):
        kc.Conditions(without=("l2",), calibration=calibration)
    with pytest.warns(UserWarning, match="made for learned-1999, this is learned-"):
        kc.Conditions(calibration=replace(calibration, predictor="learned-1999"))
    with pytest.raises(kc.KernelcastError, match="without one"):
        calibrate(measured(12), GPU, kc.Conditions(calibration=calibration))


def test_bad_measurements_are_named() -> None:
    with pytest.raises(kc.KernelcastError, match="9 measured calls; a calibration needs 10 or more"):
        calibrate(measured(9), GPU)
    columns = measured(20)
    columns["latency_us"][[2, 5]] = np.nan, -1.0
    columns["op"][7] = "gem"
    with pytest.raises(
        kc.KernelcastError, match=r"3 bad rows: rows 3, 6: latency_us must be .*; row 8: unknown op 'gem'"
    ):
        calibrate(columns, GPU)
    found, bad = calibrate(columns, GPU, skip_bad=True)
    assert found.rows == 17 and len(bad.messages) == 3
    with pytest.raises(kc.KernelcastError, match=r"2 GPUs \(a100_sxm, h200_sxm\)"):
        calibrate({**measured(20), "gpu": np.array([GPU, "a100_sxm"] * 10, dtype=object)})
    with pytest.raises(kc.KernelcastError, match="measured on h200_sxm, not on l40s"):
        calibrate({**measured(20), "gpu": np.array(["NVIDIA H200"] * 20, dtype=object)}, "l40s")
    with pytest.raises(kc.KernelcastError, match="unknown gpu 'h2000'"):
        calibrate({**measured(20), "gpu": np.array(["h2000"] * 20, dtype=object)})
    with pytest.raises(kc.KernelcastError, match="which GPU was measured"):
        calibrate(measured(20))
    with pytest.raises(kc.KernelcastError, match="was not measured"):
        calibrate(measured(20), kc.gpu(GPU, sm_count=100))


# ---- the file ----


def test_file_round_trip(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "my_h200.safetensors"
    calibration.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    again = load_calibration(path)
    assert (again.gpu, again.predictor, again.rows) == (GPU, calibration.predictor, 120)
    columns = table(300, 6)
    one, two = (predict_columns(columns, GPU, kc.Conditions(calibration=c))[0] for c in (calibration, path))
    assert all(np.array_equal(one[name], two[name]) for name in TIMES)


def test_many_calls_stay_under_a_megabyte(tmp_path: Path) -> None:
    found, _ = calibrate(measured(2200), GPU)
    family = found.families["gemm"]
    assert len(family.position) == len(family.weights) == 2000 and family.factor.shape == (256, 256)
    found.save(tmp_path / "many")
    assert (tmp_path / "many").stat().st_size < 1e6


def test_files_that_are_no_calibrations(calibration: Calibration, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    text, other, cut, whole = (tmp_path / name for name in ("text", "other", "cut", "whole"))
    text.write_text("op,m\n")
    save_file({"x": np.zeros(3)}, other)
    calibration.save(whole)
    cut.write_bytes(whole.read_bytes()[:-100])
    for number in (1, 2, 3, 4, 5, 9):
        of_then = whole.read_bytes().replace(b'"format":"6"', b'"format":"%d"' % number)
        (tmp_path / f"format {number}").write_bytes(of_then)
    for path, message in (
        (tmp_path / "none", "no calibration file"),
        (text, "not a calibration"),
        (other, "not a calibration; `kernelcast calibrate` makes one"),
        (cut, "not a calibration"),
        (tmp_path / "format 1", "of format 1, this version reads 6; calibrate again"),
        (tmp_path / "format 2", "of format 2, this version reads 6; calibrate again"),
        (tmp_path / "format 3", "of format 3, this version reads 6; calibrate again"),
        (tmp_path / "format 4", "of format 4, this version reads 6; calibrate again"),
        (tmp_path / "format 5", "of format 5, this version reads 6; calibrate again"),
        (tmp_path / "format 9", "of format 9, this version reads 6; calibrate again"),
    ):
        with pytest.raises(kc.KernelcastError, match=message) as refused:
            kc.Conditions(calibration=path)
        assert "\n" not in str(refused.value)


def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    Calibration(GPU, "learned-1", "0", {"gemm": made()}).save(path)
    assert load_calibration(path).families["gemm"].weights.tolist() == [0.5]
    wrong: tuple[dict[str, Any], ...] = (
        {"code": np.array([3], dtype=np.int64)},
        {"few": np.array([1], dtype=np.int64)},
        {"position": np.zeros((2, 1), dtype=np.float32)},
        {"leaning": np.zeros(2, dtype=np.float32)},
        {"factor": np.zeros((2, 2), dtype=np.float32)},
        {"groups": (("op=gemm", "vllm"),)},
        {"prior": prior(2)},
        {"prior": prior(noise=-1.0)},
        {"prior": prior(scale=np.ones(2, dtype=np.float32))},
    )
    for broken in wrong:
        Calibration(GPU, "learned-1", "0", {"gemm": made(**broken)}).save(path)
        with pytest.raises(kc.KernelcastError, match="a broken calibration"):
            load_calibration(path)


def test_an_interval_is_as_wide_as_its_kind_was_off() -> None:
    from kernelcast.collect.calibrate.fit import _reaches

    # 3,000 errors each, evenly from -1 to 1 and from -3 to 3: 23 in 25 are below 0.84 and 2.52; of 3,030 parts 30 are
    # what was thought before
    even = np.linspace(-1, 1, 3000)
    form = np.array(["f"] * 6000)
    found = _reaches(np.concatenate([even, 3 * even]), form, np.array(["narrow"] * 3000 + ["wide"] * 3000), (1.5, 1.5))
    for kind, reach in (("narrow", 0.84), ("wide", 2.52)):
        assert found[kind] == pytest.approx((reach, reach), rel=0.02)
    assert found["narrow"][0] < found["f"][0] < found["wide"][0]
    few = _reaches(3 * even[:1], form[:1], np.array(["one"]), (1.5, 1.5))["one"]
    assert few[1] == pytest.approx(1.5, rel=0.15)  # one call says next to nothing


def test_a_calibration_knows_the_reach_of_a_kind_a_format_or_the_family() -> None:
    words: dict[str, str | None] = {"op": "gemm", "dtype": "bf16", "stack": "vllm"}
    form, _, kind = sharers(words)
    family = made()
    assert family.reach(words) == (1.2, 1.3)
    family = replace(family, reaches={form: (1.0, 1.1)})
    assert family.reach(words) == (1.0, 1.1)
    family = replace(family, reaches={form: (1.0, 1.1), kind: (2.0, 2.1)})
    assert family.reach(words) == (2.0, 2.1)
    assert family.reach({**words, "stack": "sglang"}) == (1.0, 1.1)
