"""Calibration: the arithmetic of its two levels, what must hold whatever was measured, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.calibrate import calibrate
from kernelcast.calibrate.fit import Design, Setting, fit, ridge, spread_out
from kernelcast.efficiency.calibration import (
    ELSEWHERE,
    Calibration,
    FamilyCalibration,
    bias_keys,
    load_calibration,
    matern,
    regimes,
)
from kernelcast.predict import CHUNK_CALLS
from kernelcast.tables import predict_columns

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


def made(**changes: Any) -> FamilyCalibration:
    """One point at 0 on one feature, weight 0.5, and a few biases."""
    family = FamilyCalibration(
        rows=10,
        error_before=20.0,
        error_after=10.0,
        biases={"all": (0.1, 0.2, 0.4), "dtype=bf16": (0.01, 0.01, 0.01)},
        names=("x",),
        mean=np.zeros(1, dtype=np.float32),
        scale=np.ones(1, dtype=np.float32),
        points=np.zeros((1, 1), dtype=np.float32),
        weights=np.array([0.5], dtype=np.float32),
        groups=("dtype=bf16 op=gemm",),
        group=np.zeros(1, dtype=np.int64),
        low=0.5,
        high=2.0,
        least=-2.0,
        most=2.0,
        settings={"shared": 1.0},
    )
    return replace(family, **changes)


def corrected(family: FamilyCalibration, x: float, time_s: float, **words: str | None) -> float:
    values = np.array([[x]], dtype=np.float32)
    shift, _ = family.correction(("x",), values, np.array([time_s]), {"op": "gemm", **words})
    return float(shift[0])


# ---- arithmetic ----


def test_regimes_share_between_their_centres() -> None:
    # 10 µs is halfway between the centres 3.16 and 31.6 in the log; beyond the last centre nothing changes
    found = regimes(np.array([1e-6, 3.1623e-6, 10e-6, 31.623e-6, 1.0]))
    assert found == pytest.approx(np.array([[1, 0, 0], [1, 0, 0], [0.5, 0.5, 0], [0, 1, 0], [0, 0, 1]]), abs=1e-4)


def test_biases_add_up() -> None:
    far = 1e6  # from the one point: the local part is gone
    # all: (0.1 + 0.2) / 2 at 10 µs; dtype=bf16 adds 0.01; fp8 has no bias of its own
    assert corrected(made(), far, 10e-6, dtype="bf16") == pytest.approx(0.15 + 0.01, abs=1e-5)
    assert corrected(made(), far, 10e-6, dtype="fp8") == pytest.approx(0.15, abs=1e-5)
    assert bias_keys({"op": "gemm", "stack": None, "dtype": "fp8"}) == [
        "all", "dtype=fp8", "op=gemm", "dtype=fp8 op=gemm together",
    ]  # fmt: skip


def test_the_local_part_fades() -> None:
    family = made(biases={})
    assert corrected(family, 0.0, 1e-5, dtype="bf16") == pytest.approx(0.5)  # on the point: its whole weight
    # one length scale away: (1 + √3) exp(-√3) = 0.4834
    assert corrected(family, 1.0, 1e-5, dtype="bf16") == pytest.approx(0.5 * 0.4834, abs=1e-4)
    assert corrected(family, 0.0, 1e-5, dtype="fp8") == pytest.approx(0.5 * ELSEWHERE)  # other words
    assert corrected(family, 50.0, 1e-5, dtype="bf16") == pytest.approx(0.0, abs=1e-12)
    assert float(matern(np.array([0.0]))[0]) == 1.0


def test_the_correction_stays_in_the_range_of_the_errors_seen() -> None:
    assert corrected(made(most=0.2), 0.0, 1.0, dtype="bf16") == 0.2


def test_shrinkage_by_hand() -> None:
    # n errors of 0.3 each, prior variance 4, noise variance 1 / 2: 0.3 * n * 2 * 4 / (n * 2 * 4 + 1)
    for count in (1, 10, 1000):
        columns = np.full((count, 1), 2.0)  # the prior's standard deviation
        found = ridge(columns, np.full(count, 0.3), np.full(count, 2.0))
        assert 2.0 * found[0] == pytest.approx(0.3 * 8 * count / (8 * count + 1))


def design(target: np.ndarray[Any, Any], place: np.ndarray[Any, Any]) -> Design:
    count = len(target)
    return Design(
        keys=("all",),
        prior=np.ones(1),
        member=np.ones((count, 1)),
        regime=np.tile([0.0, 1.0, 0.0], (count, 1)),
        place=place,
        code=np.zeros(count, dtype=np.intp),
        target=target,
    )


def test_few_rows_move_little_and_one_outlier_less() -> None:
    setting = Setting(shared=0.5, local=0.0, length=1.0)
    biases = []
    for count in (2, 10, 200):
        rows = design(np.full(count, 0.3), np.zeros((count, 1)))
        biases.append(float(fit(rows, setting).correction(rows)[0]))
    assert 0 < biases[0] < biases[1] < biases[2] < 0.3
    assert biases[2] > 0.28
    wild = np.full(50, 0.1)
    wild[7] = 3.0  # a mean would be 0.158
    rows = design(wild, np.zeros((50, 1)))
    assert float(fit(rows, Setting(3.0, 0.0, 1.0)).correction(rows)[0]) == pytest.approx(0.1, abs=0.005)


def test_points_cover_the_rows() -> None:
    place = np.concatenate([np.linspace(0, 1, 99), [50.0]])[:, None]
    picked = spread_out(place, 5)
    assert len(picked) == 5 and {0, 99} <= set(picked.tolist())  # the ends are the farthest
    assert spread_out(place[:3], 5).tolist() == [0, 1, 2]


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
    assert one.biases == two.biases and one.settings == two.settings
    assert np.array_equal(one.points, two.points) and np.array_equal(one.weights, two.weights)


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
    assert list(bad.found) == [1]


def test_another_predictor_is_refused_and_other_weights_warn(calibration: Calibration) -> None:
    with pytest.raises(kc.KernelcastError, match=r"corrects learned-.*, not generic-1"):
        kc.Conditions(predictor="generic", calibration=calibration)
    with pytest.raises(kc.KernelcastError, match="asks physics alone"):
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
    assert found.rows == 17 and len(bad.found) == 3
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


def test_a_thousand_calls_stay_under_a_megabyte(tmp_path: Path) -> None:
    found, _ = calibrate(measured(1500), GPU)
    assert len(found.families["gemm"].points) == 1000
    found.save(tmp_path / "many")
    assert (tmp_path / "many").stat().st_size < 300e3


def test_files_that_are_no_calibrations(calibration: Calibration, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    text, other, cut, old = (tmp_path / name for name in ("text", "other", "cut", "old"))
    text.write_text("op,m\n")
    save_file({"x": np.zeros(3)}, other)
    calibration.save(old)
    cut.write_bytes(old.read_bytes()[:-100])
    old.write_bytes(old.read_bytes().replace(b'"format":"2"', b'"format":"9"'))
    for path, message in (
        (tmp_path / "none", "no calibration file"),
        (text, "not a calibration"),
        (other, "not a calibration; `kernelcast calibrate` makes one"),
        (cut, "not a calibration"),
        (old, "of format 9, this version reads 1 and 2"),
    ):
        with pytest.raises(kc.KernelcastError, match=message):
            kc.Conditions(calibration=path)


def test_arrays_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    for broken in (
        {"group": np.array([3], dtype=np.int64)},
        {"points": np.zeros((2, 1), dtype=np.float32)},
        {"biases": {"all": (0.1,)}},
    ):
        Calibration(GPU, "learned-1", "0", {"gemm": made(**broken)}).save(path)
        with pytest.raises(kc.KernelcastError, match="a broken calibration"):
            load_calibration(path)
