"""The learned efficiency at run time: words, stand-ins, support, and what must hold whatever the weights say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.forecast.features import GPU_FEATURES, aligned, features
from kernelcast.forecast.learned import (
    WEIGHTS,
    FamilyWeights,
    architecture_distance,
    clock_shift,
    format_shift,
    load,
    nearest_measured_gpu,
    pack,
    shares,
    unpack,
    with_gpu_features,
)
from kernelcast.forecast.network import BLOCK_ROWS, Encoder, Layers
from kernelcast.machine import analyse
from kernelcast.ops.base import REGISTRY, columns_of
from kernelcast.ops.gemm import Gemm

FAMILIES = ("gemm", "attention", "moe", "mla", "moe_gemm", "memory", "collective", "conv2d")


def tiny_encoder() -> Encoder:
    return Encoder(
        names=("a", "b"),
        low=np.array([0, 0], dtype=np.float32),
        high=np.array([10, 1], dtype=np.float32),
        mean=np.array([5, 0], dtype=np.float32),
        scale=np.array([5, 1], dtype=np.float32),
        vocabulary={"gpu": ("h100_sxm", "l40s"), "stack": ("vllm",)},
    )


def test_encoder_clips_and_standardises() -> None:
    encoder = tiny_encoder()
    rows = np.array([[20, -1], [5, 0.5]], dtype=np.float32)
    # 20 is clipped to 10: (10 - 5) / 5 = 1; -1 to 0
    assert encoder.numbers(rows).tolist() == [[1, 0], [0, 0.5]]
    # two numbers, then h100_sxm, l40s, vllm
    assert encoder.positions({"gpu": "l40s", "stack": None}) == [3]
    assert encoder.positions({"gpu": "b200_sxm", "stack": "vllm"}) == [4]


def test_network_by_hand() -> None:
    # hidden = relu(2 x + 1 for the word), output = 3 hidden - 1
    net = Layers(
        (np.array([[2.0], [1.0]], dtype=np.float32), np.array([[3.0]], dtype=np.float32)),
        (np.array([0.0], dtype=np.float32), np.array([-1.0], dtype=np.float32)),
    )
    x = np.array([[1.0], [-4.0]], dtype=np.float32)
    assert net(x, [1])[:, 0].tolist() == [3 * 3 - 1, -1]
    assert net(x, [])[:, 0].tolist() == [3 * 2 - 1, -1]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    net = Layers(
        tuple(rng.standard_normal(s).astype(np.float32) for s in ((30, 64), (64, 3))),
        tuple(rng.standard_normal(s).astype(np.float32) for s in (64, 3)),
    )
    x = rng.standard_normal((5 * BLOCK_ROWS + 3, 30)).astype(np.float32)
    whole = net(x, [])
    for start, stop in ((0, 1), (3, 11), (17, 43)):
        assert np.array_equal(net(x[start:stop], []), whole[start:stop])


def test_an_unmeasured_gpu_takes_its_nearest_kin() -> None:
    measured = ("a100_sxm", "h100_sxm", "l40s", "b200_sxm")
    assert nearest_measured_gpu(kc.gpu("h100_sxm"), measured).id == "h100_sxm"
    assert nearest_measured_gpu(kc.gpu("h200_sxm"), measured).id == "h100_sxm"
    assert nearest_measured_gpu(kc.gpu("l4"), measured).id == "l40s"
    # no GPU of capability 10.3 was measured: memory, SMs and power make the B200 the nearest
    assert nearest_measured_gpu(kc.gpu("gb300"), measured).id == "b200_sxm"
    assert nearest_measured_gpu(kc.gpu("rtx_5090"), measured).id == "l40s"  # mma.sync, and fp8, which an A100 has not
    assert nearest_measured_gpu(kc.gpu("mi300x"), (*measured, "mi210")).id == "mi210"
    assert (
        nearest_measured_gpu(kc.gpu("mi300x"), measured).vendor == "nvidia"
    )  # nothing of its path: the nearest of all


def test_a_borrowed_name_is_whole() -> None:
    """What tells a GPU by name comes from the stand-in; everything else stays."""
    call = columns_of([kc.Gemm(m=64, n=4096, k=4096)])
    target, kin = kc.gpu("h200_sxm"), kc.gpu("a100_sxm")
    ranked = [analyse(work, target, keep=3) for work in Gemm.work(call, target)]
    found = features(ranked, Gemm.shape_features(call, target), target)
    borrowed = with_gpu_features(found.names, found.values, kin, target)
    changed = {name for at, name in enumerate(found.names) if borrowed[0, at] != found.values[0, at]}
    assert changed and changed <= {*GPU_FEATURES, "launch_share", "over_bound"}
    # a launch floor of 1.5 us in place of 0.7: log2(1.5 / 0.7) = 1.10 more
    at = found.names.index("launch_share")
    assert borrowed[0, at] - found.values[0, at] == pytest.approx(np.log2(1.5 / 0.7), abs=1e-4)
    # the bound of this call is DRAM's, 7 us: it stays. That of a tiny call is the floor itself, and moves with it
    over = found.names.index("over_bound")
    assert borrowed[0, over] == found.values[0, over]
    tiny = columns_of([kc.Gemm(m=1, n=64, k=64)])
    ranked = [analyse(work, target, keep=3) for work in Gemm.work(tiny, target)]
    small = features(ranked, Gemm.shape_features(tiny, target), target)
    moved = with_gpu_features(small.names, small.values, kin, target)[0, over] - small.values[0, over]
    assert moved == pytest.approx(-np.log2(1.5 / 0.7), abs=1e-4)


def test_a_stand_in_s_power_limit_is_not_the_target_s() -> None:
    # long products reach 0.52 of an L40S's peak and 0.88 of an L20's; both are taken to sustain 0.75 in short ones
    l40s, l20 = kc.gpu("l40s"), kc.gpu("l20")
    assert clock_shift(l40s, l20) == pytest.approx(np.log(0.52 / 0.88))
    assert clock_shift(l20, l40s) == -clock_shift(l40s, l20)
    assert clock_shift(l40s, l40s) == 0 == clock_shift(kc.gpu("h100_sxm"), kc.gpu("h20"))


def test_a_stand_in_s_rate_in_a_format_is_not_the_target_s() -> None:
    # of its peak a B200 sustains 0.80 in 16 bits and 0.74 in fp8, a B300 0.89 and 0.77
    sustained = "sustained_tensor_fraction"
    b200 = kc.gpu("b200_sxm").replace(**{sustained: 0.8, f"{sustained}s.fp8": 0.74, f"{sustained}s.int8": 0.56})
    b300 = kc.gpu("b300_sxm").replace(**{sustained: 0.89, f"{sustained}s.fp8": 0.77})
    assert "int8" not in b300.sustained_tensor_fractions
    shift = np.log((0.74 / 0.8) / (0.77 / 0.89))
    assert format_shift(b200, b300, "fp8") == pytest.approx(shift) and shift > 0  # it loses more: slower there
    assert format_shift(b300, b200, "fp8") == pytest.approx(-shift)
    assert format_shift(b200, b300, "int8") == 0  # measured on one of them
    assert format_shift(b200, b300, "bf16") == 0 == format_shift(b200, b300, None)
    assert format_shift(b200, b200, "fp8") == 0


def weights_of(family: str) -> FamilyWeights:
    weights = load(WEIGHTS, family)
    assert weights is not None
    return weights


def test_a_new_generation_is_asked_as_one_gpu_of_each_that_ran_such_calls() -> None:
    weights, target, kin = weights_of("gemm"), kc.gpu("gb10"), kc.gpu("rtx_pro_6000_server")
    words = {"op": "gemm", "dtype": "bf16", "stack": "vllm"}
    found = weights._known(kin, target, words)
    capabilities = [one.compute_capability for one in found]
    assert len(set(capabilities)) == len(capabilities) > 2 and target.compute_capability not in capabilities
    ran = {
        entry.gpu
        for entry in weights.evidence.by_op["gemm"]
        if (entry.network_choices["dtype"], entry.network_choices["stack"]) == ("bf16", "vllm")
    }
    assert {one.id for one in found} <= ran
    assert set(capabilities) == {kc.gpu(name).compute_capability for name in ran if kc.gpu(name).vendor == "nvidia"}
    # an A100 has no fp8; and of a kind that nobody ran, every generation of the vendor that has tensor cores speaks
    fp8 = weights._known(kin, target, {**words, "dtype": "fp8"})
    assert "8.0" in capabilities and "8.0" not in {one.compute_capability for one in fp8}
    nobody = weights._known(kin, target, {**words, "stack": "nobody"})
    assert {"7.0", "7.5", *capabilities} <= {one.compute_capability for one in nobody}
    assert {one.vendor for one in nobody} == {"nvidia"} and "6.0" not in {one.compute_capability for one in nobody}


def test_a_correction_holds_in_part_where_the_binding_pipeline_is_slower() -> None:
    """An RTX 4090 multiplies at half the rate of an L40S: of a product that tensor cores bind for all of its time, half
    of what the L40S loses beside them is kept; of one that they bind for half, three quarters."""
    weights, target = weights_of("gemm"), kc.gpu("rtx_4090")
    values = np.zeros((2, len(weights.encoder.names)), dtype=np.float32)
    values[:, weights.encoder.names.index("tensor_busiest")] = 0.0, -1.0  # log2 of the share
    values[:, weights.encoder.names.index("dram_share")] = -10.0
    assert weights._kept(values, kc.gpu("l40s"), target, "bf16") == pytest.approx([0.5, 0.75])
    assert weights._kept(values, kc.gpu("l40s"), kc.gpu("h200_sxm"), "bf16") == 1.0  # which the networks know


def test_a_new_generation_is_the_mean_over_the_known_ones_and_of_networks_without_names() -> None:
    weights, target = weights_of("gemm"), kc.gpu("gb10")
    calls = columns_of([kc.Gemm(m=m, n=4096, k=4096) for m in (1, 64, 4096)])
    ranked = [analyse(work, target, keep=3) for work in Gemm.work(calls, target)]
    given = features(ranked, Gemm.shape_features(calls, target), target)
    values = aligned(given.names, given.values, weights.encoder.names)
    words = {"op": "gemm", "dtype": "bf16", "stack": "vllm"}
    known = weights._known(kc.gpu("rtx_pro_6000_server"), target, words)
    each = [weights._as(one, target, values, words) for one in known]
    unnamed = weights.without_names.outputs(values, target, words)
    kept = [np.broadcast_to(weights._kept(values, one, target, "bf16"), len(values)) for one in known]
    alike = shares(known, target, weights._likeness)
    unnamed[:, 0] *= np.average(kept, axis=0, weights=alike)
    wanted = (np.average(each, axis=0, weights=alike) + unnamed) / 2
    assert weights.outputs(values, target, words) == pytest.approx(wanted, abs=1e-6)
    assert not np.allclose(each[0], each[-1], atol=1e-3)
    # its own generation answers alone, though it was not measured itself
    pcie = kc.gpu("h100_pcie")
    kin = nearest_measured_gpu(pcie, weights.encoder.vocabulary["gpu"])
    assert np.array_equal(weights.outputs(values, pcie, words), weights._as(kin, pcie, values, words))


@pytest.mark.parametrize("family", ["gemm", "attention", "moe"])
def test_shipped_weights_know_how_errors_hang_together(family: str) -> None:
    weights = weights_of(family)
    known = weights.prior
    assert known is not None
    assert min(*known.biases, *known.smooth, known.leaning, known.noise) > 0
    assert known.metric.shape == (3, len(known.names)) and np.all(known.metric > 0) and np.all(known.scale > 0)
    assert not set(known.names) & set(GPU_FEATURES) and set(known.names) <= set(weights.encoder.names)
    tensors, meta = pack(weights)
    told = {name: json.loads(text) for name, text in meta.items()}
    again = unpack({name: array.astype(np.float32) for name, array in tensors.items()}, told).prior
    assert again is not None
    assert (again.names, again.biases, again.smooth) == (known.names, known.biases, known.smooth)
    assert (again.leaning, again.noise) == (known.leaning, known.noise)
    assert all(np.array_equal(getattr(again, name), getattr(known, name)) for name in ("mean", "scale", "metric"))
    none = pack(replace(weights, prior=None))
    assert not [name for name in none[0] if name.startswith("prior.")] and json.loads(none[1]["prior"]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_weights_say_what_they_are(family: str) -> None:
    weights = load(WEIGHTS, family)
    assert weights is not None
    assert weights.about["rows"] > 1000 and len(weights.about["data_hash"]) == 32
    assert len(weights.encoder.names) == len(weights.encoder.low)
    assert np.all(weights.encoder.low <= weights.encoder.high)
    assert set(weights.spreads) <= {"near", "extrapolated"}
    tensors, meta = pack(weights)
    again = unpack(
        {name: t.astype(np.float32) for name, t in tensors.items()},
        {name: json.loads(text) for name, text in meta.items()},
    )
    assert again.encoder.vocabulary == weights.encoder.vocabulary
    assert np.array_equal(again.main[0].weights[0], weights.main[0].weights[0])


def test_all_weights_stay_small() -> None:
    """20 families and two baselines: a megabyte each."""
    assert sum(path.stat().st_size for path in Path(WEIGHTS).rglob("*") if path.is_file()) < 20e6


def test_support_says_how_far_the_data_are() -> None:
    call = kc.Gemm(m=512, n=4096, k=4096)
    assert kc.predict(call, "h200_sxm").support == "seen"
    assert kc.predict(call, "h100_pcie").support == "near"  # its capability was measured, it was not
    assert kc.predict(call, "rtx_5090").support == "near"
    assert kc.predict(call, "gb10").support == "extrapolated"
    assert kc.predict(call, kc.gpu("h200_sxm").replace(dram_bytes_per_s=7e12)).support == "near"
    assert kc.predict(call, "h200_sxm").predictor.startswith("learned-")


def test_intervals_widen_with_distance() -> None:
    call = kc.Gemm(m=512, n=4096, k=4096)
    width = [(p.high_s / p.low_s) for p in (kc.predict(call, g) for g in ("h200_sxm", "h100_pcie", "rtx_5090"))]
    assert width[0] < width[1] < width[2]


def test_a_left_out_limit_asks_physics() -> None:
    p = kc.predict(kc.Gemm(m=512, n=4096, k=4096), "h200_sxm", kc.Conditions(without=("l2",)))
    assert p.predictor == "generic-1"


@pytest.mark.parametrize("name", ["learned", "generic", "roofline", "pipeweave", "neusight"])
def test_every_predictor_answers_every_op(name: str) -> None:
    from kernelcast.ops import REGISTRY

    for op, cls in REGISTRY.items():
        p = kc.predict(kc.kernel(op, **cls.examples[0]), "h200_sxm", kc.Conditions(predictor=name))
        assert np.isfinite(p.time_s) and p.time_s > 0, (name, op)


def test_an_op_without_weights_names_the_predictor_that_answered() -> None:
    assert load(WEIGHTS, REGISTRY["mamba2"].family) is None
    call = kc.kernel("mamba2", **REGISTRY["mamba2"].examples[0])
    assert kc.predict(call, "h200_sxm").predictor == "generic-1"
    assert kc.predict(Gemm(m=64, n=64, k=64), "h200_sxm").predictor.startswith("learned-")


def test_unknown_predictor_is_refused() -> None:
    with pytest.raises(kc.KernelcastError, match=r"unknown predictor 'learnt'.*learned"):
        kc.Conditions(predictor="learnt")


def test_scalar_prediction_is_fast() -> None:
    import time

    call, gpu = kc.Gemm(m=512, n=4096, k=4096), kc.gpu("h200_sxm")
    kc.predict(call, gpu)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        kc.predict(call, gpu)
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3  # under 1 ms on a quiet machine, see benchmarks/


def test_kin_count_more_than_strangers() -> None:
    # an H100 for a B200: one path away, log(7.672 / 3.35) = 0.83; an L40S: two paths, log(7.672 / 0.864) = 2.18
    target, h100, l40s = (kc.gpu(name) for name in ("b200_sxm", "h100_sxm", "l40s"))
    near, far = architecture_distance(h100, target), architecture_distance(l40s, target)
    rates = [one.dram_bytes_per_s for one in (target, h100, l40s)]
    assert near == pytest.approx(1 + np.log(rates[0] / rates[1]))
    assert far == pytest.approx(2 + np.log(rates[0] / rates[2]))
    assert shares([h100, l40s], target, 0.0).tolist() == [0.5, 0.5]
    odds = np.exp(2 * (far - near))
    assert shares([h100, l40s], target, 2.0) == pytest.approx([odds / (1 + odds), 1 / (1 + odds)])
    assert architecture_distance(target, target) == 0
