"""The baselines by hand: roofline, PipeWeave's cycles, NeuSight's law; export; and that fitting them learns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.forecast.network import Encoder, Layers
from kernelcast.forecast.predictor import Predictor, PredictorInput
from kernelcast.machine.analyse import PIPELINES, analyse
from kernelcast.ops.base import columns_of, kernel_class
from kernelcast.results import EXTRAPOLATED
from kernelcast_lab.baselines import Neusight, Pipeweave, Roofline, neusight, pipeweave
from kernelcast_lab.baselines.family_net import FamilyNet, NetBaseline

H100_BF16 = 132 * 4096 * 1.83e9  # SMs x FLOPs a clock x tensor clock
H100_DRAM = 3.35e12


def question(gpu: str, op: str, *calls: Mapping[str, Any]) -> PredictorInput:
    kernel, place = kernel_class(op), kc.gpu(gpu)
    columns = columns_of([kc.kernel(op, **call) for call in calls])
    return PredictorInput(kernel, columns, place, [analyse(work, place) for work in kernel.work(columns, place)])


def time_s(model: Predictor, asked: PredictorInput) -> NDArray[np.float64]:
    return model.estimate(asked).time_s


def constant_net(names: tuple[str, ...], *outputs: float) -> FamilyNet:
    """A network that says the same of every row."""
    zeros, ones = np.zeros(len(names), dtype=np.float32), np.ones(len(names), dtype=np.float32)
    layers = Layers((np.zeros((len(names), len(outputs)), dtype=np.float32),), (np.array(outputs, dtype=np.float32),))
    return FamilyNet(Encoder(names, zeros, ones, zeros, ones, {}), layers)


def logit(share: float) -> float:
    return float(np.log(share / (1 - share)))


# ---- roofline ----


def test_roofline_of_gemms_is_flops_over_peak_or_bytes_over_bandwidth() -> None:
    asked = question("h100_sxm", "gemm", {"m": 4096, "n": 4096, "k": 4096}, {"m": 1, "n": 4096, "k": 4096})
    found = Roofline().estimate(asked)
    # 2 x 4096^3 FLOPs take 139 us, three matrices of 32 MiB only 30 us
    assert found.time_s[0] == pytest.approx(2 * 4096**3 / H100_BF16)
    # one row: B of 32 MiB and two vectors of 8 KiB
    assert found.time_s[1] == pytest.approx((4096 * 4096 + 2 * 4096) * 2 / H100_DRAM)
    for other in (found.low_s, found.high_s, found.ceiling_s):
        assert np.array_equal(other, found.time_s)
    assert list(found.support) == [EXTRAPOLATED] * 2


def test_roofline_has_no_launch_floor_and_is_not_raised_to_the_bound() -> None:
    asked = question("h100_sxm", "gemm", {"m": 1, "n": 64, "k": 64})
    assert time_s(Roofline(), asked)[0] == pytest.approx((64 * 64 + 2 * 64) * 2 / H100_DRAM)
    assert time_s(Roofline(), asked)[0] < asked.bound_s[0]


def test_roofline_of_vector_math_uses_the_vector_peak() -> None:
    # exact GELU gate in fp32: 31 FLOPs for 12 bytes; at 67 TFLOP/s and 3.35 TB/s the bytes win
    asked = question("h100_sxm", "gelu_mul", {"rows": 4096, "cols": 4096, "dtype": "fp32"})
    math, memory = 31 * 4096**2 / (132 * 256 * 1.98e9), 12 * 4096**2 / H100_DRAM
    assert time_s(Roofline(), asked)[0] == pytest.approx(max(math, memory))
    fast = kc.gpu("h100_sxm").replace(dram_bytes_per_s=100 * H100_DRAM)
    work = asked.kernel.work(asked.calls, fast)
    again = PredictorInput(asked.kernel, asked.calls, fast, [analyse(w, fast) for w in work])
    assert time_s(Roofline(), again)[0] == pytest.approx(math)


def test_roofline_adds_up_the_kernels_of_a_call() -> None:
    layer = {"tokens": 8192, "hidden": 4096, "inter": 14336, "experts": 8, "topk": 2}
    pairs, peak = 8192 * 2, H100_BF16
    gemms = 2 * pairs * 4096 * 14336 * 3 / peak  # gate and up, then down: both bound by math
    found = time_s(Roofline(), question("h100_sxm", "moe", layer))[0]
    # SiLU reads 2 x inter and writes inter of 2 bytes; the sum reads two experts and writes one row
    silu = pairs * 3 * 14336 * 2 / H100_DRAM
    add_up = 8192 * 3 * 4096 * 2 / H100_DRAM
    route = (8192 * 8 * 4 + pairs * 16) / H100_DRAM
    assert found == pytest.approx(gemms + silu + add_up + route)


def test_roofline_of_a_collective_is_the_least_bytes_over_the_link() -> None:
    # two GPUs send each other the tensor once, however they do it: no latency even for a small one
    asked = question("h100_sxm", "all_reduce", {"bytes": 2**24, "world": 2}, {"bytes": 8192, "world": 2})
    assert time_s(Roofline(), asked) == pytest.approx([2**24 / 450e9, 8192 / 450e9])


# ---- PipeWeave ----


def test_pipeweave_sees_cycles_of_each_pipe() -> None:
    asked = question("a100_sxm", "gemm", {"m": 4096, "n": 4096, "k": 4096})
    found = pipeweave.inputs(asked)
    cycles = dict(zip(found.names, np.expm1(found.values[0].astype(np.float64)), strict=True))
    tile = {name: value[0] for name, value in asked.best[0].tile.items()}
    tiles = np.ceil(4096 / tile["tile_m"]) * np.ceil(4096 / tile["tile_n"]) * tile["split_k"]
    # 2,048 FLOPs a clock on each of 108 SMs; the busiest has ceil(tiles / 108) tiles
    tile_flops = 2 * tile["tile_m"] * tile["tile_n"] * 4096 / tile["split_k"]
    assert cycles["tensor_all"] == pytest.approx(2 * 4096**3 / (2048 * 108), rel=1e-5)
    assert cycles["tensor_sm_max"] == pytest.approx(np.ceil(tiles / 108) * tile_flops / 2048, rel=1e-5)
    # 96 MiB over the bytes of a clock; the busiest SM moves ceil(tiles / 108) tiles' bytes at 1/108 of that
    per_clock = asked.gpu.dram_bytes_per_s / asked.gpu.clock_boost_hz
    dram = 3 * 4096**2 * 2 / per_clock
    assert cycles["dram_all"] == pytest.approx(dram, rel=1e-5)
    assert cycles["dram_sm_max"] == pytest.approx(dram * np.ceil(tiles / 108) * 108 / tiles, rel=1e-5)
    assert cycles["fma_all"] == cycles["xu_all"] == 0
    assert cycles["sm_count"] == pytest.approx(108, rel=1e-5)
    assert cycles["tensor_flops_per_clk_sm"] == pytest.approx(2048, rel=1e-5)
    assert found.theoretical_s[0] == pytest.approx(2 * 4096**3 / (2048 * 108) / asked.gpu.clock_boost_hz)


def test_pipeweave_main_pipe_of_kernels_without_matrix_math() -> None:
    norm, copy = (question("h100_sxm", op, {"rows": 4096, "cols": 4096}) for op in ("rmsnorm", "copy"))
    assert pipeweave.inputs(norm).theoretical_s[0] == pytest.approx(4 * 4096**2 / (132 * 256 * 1.98e9))
    issue = PIPELINES.index("issue")
    assert pipeweave.inputs(copy).theoretical_s[0] == copy.best[0].limits[issue][0] > 0


def test_pipeweave_divides_the_theoretical_time_by_efficiency() -> None:
    asked = question("h100_sxm", "gemm", {"m": 4096, "n": 4096, "k": 4096})
    names = pipeweave.inputs(asked).names
    theory = 2 * 4096**3 / H100_BF16
    for output, efficiency in ((logit(0.8), 0.8), (-50.0, pipeweave.LEAST_EFFICIENCY)):
        model = Pipeweave({"gemm": constant_net(names, output)})
        assert time_s(model, asked)[0] == pytest.approx(theory / efficiency, rel=1e-6)


# ---- NeuSight ----


def test_neusight_law() -> None:
    # σ(γ) = 0.5 and σ(α) = 0.25: utilisation 0.5 - 0.25 / 4 = 0.4375 with four waves, 0.25 with one
    waves, tile_s = np.array([4.0, 1.0]), np.array([1e-5, 1e-5])
    found = neusight.law_s(waves, tile_s, np.full(2, 0.0), np.full(2, logit(0.25)))
    assert found == pytest.approx([4e-5 / 0.4375, 1e-5 / 0.25])
    # a law below 0 is held at the least utilisation
    held = neusight.law_s(np.ones(1), np.full(1, 1e-5), np.full(1, -5.0), np.full(1, 5.0))
    assert held == pytest.approx([1e-5 / neusight.LEAST_UTILISATION])


def test_neusight_tiles_and_time_of_a_gemm() -> None:
    asked = question("h100_sxm", "gemm", {"m": 4096, "n": 4096, "k": 4096})
    tile = {name: value[0] for name, value in asked.best[0].tile.items()}
    count = (4096 / tile["tile_m"]) * (4096 / tile["tile_n"]) * tile["split_k"]
    tile_math_s = 2 * tile["tile_m"] * tile["tile_n"] * 4096 / tile["split_k"] / (4096 * 1.83e9)
    tile_bytes = 3 * 4096**2 * 2 / count
    found = neusight.tiles(asked.best[0], asked.gpu)
    assert found.waves[0] == np.ceil(count / 132)
    assert 2.0 ** found.values[0] == pytest.approx(
        [
            tile_math_s,
            tile_bytes / (H100_DRAM / 132),
            tile_bytes / (asked.gpu.dram_bytes / 132),
            tile_bytes / (asked.gpu.l2_bytes / 132),
        ],
        rel=1e-5,
    )
    model = Neusight({"gemm": constant_net(neusight.NAMES, logit(0.9), logit(0.1))})
    waves = np.ceil(count / 132)
    assert time_s(model, asked)[0] == pytest.approx(waves * tile_math_s / (0.9 - 0.1 / waves), rel=1e-6)


@pytest.mark.parametrize("op", ["gemm", "rmsnorm", "attention"])
def test_neusight_is_never_faster_than_the_roofline(op: str) -> None:
    sizes = [1, 7, 64, 300, 4096]
    calls: list[dict[str, Any]] = {
        "gemm": [{"m": m, "n": n, "k": 512} for m in sizes for n in sizes],
        "rmsnorm": [{"rows": rows, "cols": 1024} for rows in sizes],
        "attention": [{"batch": 2, "q_len": q, "kv_len": 4096, "q_heads": 8, "head_dim": 128} for q in sizes],
    }[op]
    asked = question("a100_sxm", op, *calls)
    best = Neusight({asked.kernel.family: constant_net(neusight.NAMES, 50.0, -50.0)})  # utilisation 1
    assert np.all(time_s(best, asked) >= 0.999999 * time_s(Roofline(), asked))


def test_neusight_adds_bytes_over_bandwidth_of_kernels_without_tiles() -> None:
    layer = {"tokens": 8192, "hidden": 4096, "inter": 14336, "experts": 8, "topk": 2}
    asked = question("h100_sxm", "moe", layer)
    tiled, rest = neusight.split(asked)
    assert (len(tiled), len(rest)) == (2, 3)
    half = constant_net(neusight.NAMES, 0.0, -50.0)
    law = [2 * t.waves * t.roofline_s for t in (neusight.tiles(phase, asked.gpu) for phase in tiled)]
    moved = sum(phase.footprint_bytes for phase in rest) / H100_DRAM
    assert time_s(Neusight({"moe": half}), asked) == pytest.approx(sum(law) + moved)


# ---- what they do not know, and export ----


def test_families_without_weights() -> None:
    gemm = question("h100_sxm", "gemm", {"m": 4096, "n": 4096, "k": 4096})
    for model in (Pipeweave(), Neusight()):
        assert time_s(model, gemm) == pytest.approx(time_s(Roofline(), gemm))
    # to NeuSight an op that it does not model is its bytes and nothing else
    conv = question("h100_sxm", "conv2d", kernel_class("conv2d").examples[0])
    moved = sum(phase.footprint_bytes for phase in conv.best) / H100_DRAM
    assert time_s(Neusight(), conv) == pytest.approx(moved)


def random_net(names: tuple[str, ...], outputs: int, seed: int) -> FamilyNet:
    draw = np.random.default_rng(seed)
    vocabulary = {"op": ("bmm", "gemm"), "dtype": ("bf16", "fp8")}
    width = len(names) + 4

    def floats(*shape: int) -> NDArray[np.float32]:
        return draw.normal(size=shape, scale=0.2).astype(np.float32)

    encoder = Encoder(
        names, floats(len(names)) - 40, floats(len(names)) + 40, floats(len(names)),
        np.abs(floats(len(names))) + 1, vocabulary,
    )  # fmt: skip
    return FamilyNet(encoder, Layers((floats(width, 8), floats(8, outputs)), (floats(8), floats(outputs))))


@pytest.mark.parametrize("kind", [Pipeweave, Neusight])
def test_export_round_trip_gives_the_same_times(kind: type[NetBaseline]) -> None:
    asked = question("h100_sxm", "gemm", *({"m": m, "n": 4096, "k": 1024} for m in (1, 100, 5000)))
    names = neusight.NAMES if kind is Neusight else pipeweave.inputs(asked).names
    outputs = 2 if kind is Neusight else 1
    model = kind.merged([kind({"gemm": random_net(names, outputs, 1)}), kind({"moe": random_net(names, outputs, 2)})])
    arrays, about = model.to_arrays()
    assert all(array.dtype == np.float32 for array in arrays.values())
    again = kind.from_arrays(arrays, json.loads(json.dumps(about)))
    assert set(again.nets) == {"gemm", "moe"}
    predictors: list[Any] = [model, again]
    first, second = (time_s(p, asked) for p in predictors)
    assert np.array_equal(first, second)
    assert len(set(first)) == 3


def test_weights_of_another_method_are_refused() -> None:
    arrays, about = Pipeweave().to_arrays()
    with pytest.raises(KernelcastError, match="weights of pipeweave-1, not of neusight-1"):
        Neusight.from_arrays(arrays, about)


# ---- fitting ----


def test_folded_batch_norm_equals_the_trained_network() -> None:
    torch = pytest.importorskip("torch")
    from kernelcast_lab.fit.train import Net

    torch.manual_seed(0)
    net = Net(6, (16, 8), 1, normed=True, dropout=0.1, first_guess=[0.3])
    with torch.no_grad():
        for norm in net.norms:
            for name, low in (("weight", 0.5), ("bias", -1.0), ("running_mean", -1.0), ("running_var", 0.2)):
                getattr(norm, name).uniform_(low, low + 2)
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    expected = net.eval()(torch.from_numpy(rows)).detach().numpy()
    assert net.exported()(rows, []) == pytest.approx(expected, abs=1e-5)


def measured_gemms(count: int) -> dict[str, NDArray[Any]]:
    """Made-up times: a launch and 70% of the roofline."""
    draw = np.random.default_rng(0)
    columns: dict[str, NDArray[Any]] = {
        "op": np.full(count, "gemm", dtype=object),
        "gpu": draw.choice(np.array(["h100_sxm", "a100_sxm"], dtype=object), count),
        "dtype": draw.choice(np.array(["bf16", "fp16"], dtype=object), count),
        **{name: np.floor(2 ** draw.uniform(6, 12, count)) for name in ("m", "n", "k")},
    }
    flops, moved = 2 * columns["m"] * columns["n"] * columns["k"], columns["n"] * columns["k"] * 2
    h100 = columns["gpu"] == "h100_sxm"
    best_s = np.maximum(flops / np.where(h100, H100_BF16, 312e12), moved / np.where(h100, H100_DRAM, 2.0e12))
    columns["latency_us"] = 3.0 + best_s * 1e6 / 0.7
    return columns


@pytest.mark.parametrize("kind", ["pipeweave", "neusight"])
def test_fitting_learns_and_is_repeatable(kind: str) -> None:
    pytest.importorskip("torch")
    from kernelcast_lab.fit import baselines

    fit: Any = {"pipeweave": baselines.fit_pipeweave, "neusight": baselines.fit_neusight}[kind]
    columns = measured_gemms(1500)
    seen = np.arange(1500) < 1200

    def error(model: Predictor) -> float:
        pairs = [(time_s(model, asked), truth) for asked, truth in baselines.measured_inputs(columns, "gemm", ~seen)]
        return float(np.mean(np.concatenate([np.abs(p - t) / t for p, t in pairs])))

    short, long = (fit(columns, "gemm", epochs=epochs, seed=1, rows=seen) for epochs in (1, 40))
    assert error(long) < 0.5 * error(short)
    assert error(long) < 0.5 * error(Roofline())
    again = fit(columns, "gemm", epochs=1, seed=1, rows=np.flatnonzero(seen))
    for name, array in short.to_arrays()[0].items():
        assert np.array_equal(array, again.to_arrays()[0][name])


def test_fitting_says_what_it_cannot_do() -> None:
    pytest.importorskip("torch")
    from kernelcast_lab.fit import baselines

    columns = measured_gemms(20)
    with pytest.raises(KernelcastError, match="0 measured calls of the family moe"):
        baselines.fit_pipeweave(columns, "moe", epochs=1, seed=0)
    with pytest.raises(KernelcastError, match="no network for collective"):
        baselines.fit_neusight(columns, "collective", epochs=1, seed=0)
    with pytest.raises(KernelcastError, match="kernels of one GPU"):
        baselines.fit_pipeweave(columns, "collective", epochs=1, seed=0)
