"""The evidence of a forecast, the parameters that were filled in or substituted, and its support."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.forecast.evidence import (
    Evidence,
    EvidenceMatch,
    MeasuredConfiguration,
    Substitution,
    beyond,
    configurations_of,
    range_steps,
)
from kernelcast.forecast.learned import WEIGHTS, load
from kernelcast.ops import kernel_class
from kernelcast.ops.base import columns_of
from kernelcast.ops.kernel_selection import kernel_choice
from kernelcast.schedule import EvidenceSummary
from kernelcast.stacks import stack

DECODE = {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
FAMILIES = sorted(path.stem for path in WEIGHTS.glob("*.safetensors"))


def told(op: str, gpu: str, **parameters: Any) -> kc.Prediction:
    return kc.predict(kc.kernel(op, **parameters), gpu)


def evidence(family: str) -> Evidence:
    weights = load(WEIGHTS, family)
    assert weights is not None
    return weights.evidence


# ---- what was measured ----


# of these only this project measured some, a few hundred or thousand calls of many kinds
SMALL = ("masked_attention", "grouped_mm", "multi_tensor", "spatial", "indexed", "recurrent", "mhc")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_ships_its_evidence(family: str) -> None:
    found = evidence(family)
    assert found.entries and all(entry.calls > 0 and entry.ranges for entry in found.entries)
    small = family in SMALL
    tested = [entry for entry in found.entries if entry.tested >= (1 if small else 30)]
    assert tested
    assert all(entry.error is not None and entry.inside is not None for entry in tested)
    held = np.average([entry.inside or 0.0 for entry in tested], weights=[entry.tested for entry in tested])
    assert (0.65 if small else 0.75) <= held <= (0.95 if small else 0.90)  # on shapes that no network saw
    assert Evidence.from_dict(found.to_dict()) == found


def test_an_answer_carries_its_evidence() -> None:
    found = told("gemm", "b200_sxm", m=4096, n=4096, k=4096, stack="vllm")
    assert found.support == "seen" and found.answered_as == {}
    assert found.evidence is not None
    assert (found.evidence["gpu"], found.evidence["words"]["stack"]) == ("b200_sxm", "vllm")
    assert found.evidence["calls"] > 30_000 and found.evidence["error"] < 0.1
    assert found.evidence["ranges"]["m"][1] >= 4096
    assert set(found.to_dict()) >= {"support", "evidence", "answered_as", "phases"}


def test_tables_carry_it_too() -> None:
    table = {"op": ["gemm", "kv_write"], "m": [64, None], "n": [4096, None], "k": [4096, None]}
    table |= {"tokens": [None, 4096], "kv_heads": [None, 8], "head_dim": [None, 128]}
    found = kc.predict_table({**table, "stack": ["vllm", "torch"]}, "h200_sxm")
    assert found["evidence_calls"][0] > 30_000 and found["evidence_calls"][1] == 0
    assert 0 < found["evidence_error"][0] < 0.1 and np.isnan(found["evidence_error"][1])
    assert list(found["answered_as"]) == ["", ""]


# ---- support is a lookup ----


def test_what_is_called_seen_is_what_was_measured() -> None:
    """Every GPU, stack, backend and format of a decode that can be asked: seen where that very kind was measured."""
    kernel, known = kernel_class("attention"), evidence("attention")
    backends = kernel.parameters["backend"].options
    every = itertools.product(
        sorted(known.gpus), ("vllm", "sglang", "trtllm", "flashinfer", "torch"), backends, ("bf16", "fp16"),
        ("bf16", "fp8"),
    )  # fmt: skip
    sizes = kernel.sizes(columns_of([kc.kernel("attention", **DECODE)]))
    seen = measured = count = 0
    for place, software, backend, dtype, cache in every:
        words = {"stack": software, "backend": backend, "dtype": dtype, "kv_dtype": cache, "page_size": 64}
        found = told("attention", place, **DECODE, **words)
        asked = found.match.configuration
        kinds = [one for one in known.by_op["attention"] if one.gpu == place and one.configuration == asked]
        inside = [one for one in kinds if not range_steps(beyond(one, sizes, 1))[0]]
        count, seen, measured = count + 1, seen + (found.support == "seen"), measured + bool(inside)
        assert (found.support == "seen") == bool(inside), words
    assert count == 9 * 5 * 7 * 4 and 0 < seen == measured < 0.2 * count


@pytest.mark.parametrize("op", ["ctc_loss", "kv_write"])
def test_an_op_that_nobody_measured_is_extrapolated(op: str) -> None:
    found = kc.predict(kc.kernel(op, **kernel_class(op).examples[0]), "h200_sxm")
    assert found.support == "extrapolated" and found.evidence is None


def test_far_outside_of_the_ranges_is_not_seen() -> None:
    sizes = {"n": 4096, "k": 4096, "stack": "vllm"}
    seen = told("gemm", "h200_sxm", m=4096, **sizes)
    assert seen.support == "seen" and seen.evidence is not None
    most = int(seen.evidence["ranges"]["m"][1])
    near, far = (told("gemm", "h200_sxm", m=times * most, **sizes) for times in (2, 16))
    assert (near.support, far.support) == ("near", "extrapolated")


def test_octaves_outside_of_a_range() -> None:
    entry = MeasuredConfiguration("gemm", "h100_sxm", {}, {}, 10, {"m": (1.0, 1023.0)}, (), ())
    octaves = beyond(entry, {"m": np.array([1.0, 1023.0, 2047.0, 8191.0, 16383.0, np.nan])}, 6)
    np.testing.assert_allclose(octaves, [0, 0, 1, 3, 4, 0])
    assert range_steps(octaves).tolist() == [0, 0, 1, 2, 2, 0]


# ---- words ----


@pytest.mark.parametrize(("gpu", "software"), [("b200_sxm", "vllm"), ("h200_sxm", "sglang"), ("gb200", "trtllm")])
def test_an_engine_decodes_over_pages_by_its_own_backend(gpu: str, software: str) -> None:
    own = kernel_choice(software, kc.gpu(gpu), "attention", "bf16")
    assert own is not None
    whole = told("attention", gpu, **DECODE, stack=software, backend=own.backend, page_size=stack(software).page_size)
    short = told("attention", gpu, **DECODE, stack=software)
    assert (short.time_s, short.low_s, short.support) == (whole.time_s, whole.low_s, "seen")
    assert short.answered_as["paged"] == {"asked": None, "answered": "yes"}
    assert whole.answered_as == {}


def test_flashinfers_fa2_is_flashinfer() -> None:
    named = [told("attention", "h200_sxm", **DECODE, stack="flashinfer", page_size=16, backend=b)
             for b in ("fa2", "flashinfer")]  # fmt: skip
    assert named[0].time_s == named[1].time_s and named[0].support == "seen"
    assert named[0].match.text == "backend flashinfer for fa2"


def test_pytorch_runs_fp32_convolutions_as_tf32() -> None:
    sizes = {"batch": 32, "in_channels": 256, "out_channels": 256, "height": 14, "width": 14, "kernel_h": 3,
             "kernel_w": 3, "padding": 1, "stack": "torch"}  # fmt: skip
    fp32, tf32 = (told("conv2d", "h200_sxm", **sizes, dtype=dtype) for dtype in ("fp32", "tf32"))
    assert fp32.time_s == tf32.time_s and fp32.answered_as["dtype"]["answered"] == "tf32"
    assert "tensor" in fp32.limits
    assert "dtype" not in told("conv2d", "v100_pcie", **sizes, dtype="fp32").answered_as  # which has no TF32


def test_moe_without_a_backend_is_its_stacks() -> None:
    sizes = {"tokens": 512, "hidden": 4096, "inter": 14336, "experts": 8, "topk": 2, "stack": "sglang"}
    assert told("moe", "h200_sxm", **sizes).time_s == told("moe", "h200_sxm", **sizes, backend="triton").time_s


def test_sizes_of_a_model_tell_the_backend() -> None:
    """vLLM's 8-bit experts on an H100 were measured with Triton on one rank, with CUTLASS on several."""
    sizes = {"tokens": 512, "hidden": 7168, "inter": 2048, "experts": 256, "topk": 8, "stack": "vllm"}
    one, many = (told("moe", "h100_sxm", **sizes, dtype="fp8_block", ep=ep) for ep in (1, 8))
    assert [found.answered_as["backend"]["answered"] for found in (one, many)] == ["triton", "cutlass"]


def test_without_a_stack_the_interval_holds_other_stacks() -> None:
    sizes = {"m": 128, "n": 4096, "k": 4096, "dtype": "fp8"}
    loose, named = told("gemm", "h200_sxm", **sizes), told("gemm", "h200_sxm", **sizes, stack="vllm")
    assert loose.time_s == named.time_s and loose.answered_as["stack"]["answered"] == "vllm"
    assert loose.high_s > named.high_s and loose.low_s < named.low_s


# ---- the nearest kind ----


def test_what_nobody_measured_is_its_nearest_kind_times_physics() -> None:
    """Random routing is in no table: over several ranks the same layer dealt out evenly, times the ratio of generic
    times."""
    sizes = {"tokens": 64, "hidden": 2048, "inter": 768, "experts": 128, "topk": 8, "ep": 4, "stack": "vllm"}
    asked, near = (told("moe", "h200_sxm", **sizes, routing=way) for way in ("random", "balanced"))
    physics = kc.Conditions(predictor="generic")
    ratio = [kc.predict(kc.kernel("moe", **sizes, backend="triton", routing=way), "h200_sxm", physics).time_s
             for way in ("random", "balanced")]  # fmt: skip
    step = evidence("moe").substitution("routing", "random", "balanced")
    assert asked.time_s == pytest.approx(near.time_s * ratio[0] / ratio[1] * np.exp(step.shift), rel=1e-6)
    assert asked.support == "near" and asked.answered_as["routing"] == {"asked": "random", "answered": "balanced"}
    assert asked.high_s / asked.time_s > near.high_s / near.time_s


def test_a_format_that_the_gpu_lacks_is_told_by_name_alone() -> None:
    found = told("attention", "v100_sxm", batch=4, q_len=512, kv_len=512, q_heads=8, head_dim=64, dtype="fp16")
    assert found.support == "extrapolated" and np.isfinite(found.time_s)


@pytest.mark.parametrize("stack_name", [None, "vllm", "sglang", "trtllm", "nccl", "torch"])
@pytest.mark.parametrize("gpu", ["a100_sxm", "h100_sxm", "h200_sxm"])
def test_a_collective_of_given_bytes_takes_as_long_in_fp16_as_in_bf16(gpu: str, stack_name: str | None) -> None:
    """Engines' all-reduces were measured in bf16, NCCL's in fp16: the library decides, not the format."""
    library = "nccl" if stack_name == "torch" else stack_name or "vllm"
    for sent in (2**16, 2**20, 2**25):
        asked = [
            told("all_reduce", gpu, bytes=sent, world=4, stack=stack_name, dtype=dtype)
            for dtype in ("fp16", "bf16", "fp32")
        ]
        assert len({(p.time_s, p.low_s, p.high_s, p.support) for p in asked}) == 1
        assert {p.match.entry.configuration["stack"] for p in asked if p.match.entry} == {library}


@pytest.mark.parametrize("stack_name", ["vllm", "sglang", "trtllm"])
def test_what_was_measured_in_bf16_alone_answers_fp16(stack_name: str) -> None:
    """The same bytes at the same rate: not the fp16 of another library on another GPU."""
    for sizes in (DECODE, {**DECODE, "batch": 1, "q_len": 4096}):
        asked, measured = (told("attention", "h100_sxm", **sizes, stack=stack_name, dtype=d) for d in ("fp16", "bf16"))
        assert asked.match.entry is measured.match.entry and asked.support == "near"
        assert asked.time_s == pytest.approx(measured.time_s, rel=1e-9)
        assert asked.high_s > measured.high_s and asked.low_s < measured.low_s


def test_a_cache_in_fp16_is_one_in_bf16() -> None:
    """A cache only has bytes: the library is that of a call in bf16, and what else a call does not say too."""
    sizes = {"q_lens": [512, 1, 1], "kv_lens": [512, 900, 7000], "q_heads": 16, "kv_heads": 2, "head_dim": 128}
    for stack_name, gpu in ((None, "gb200"), ("flashinfer", "h200_sxm"), ("sglang", "h100_sxm")):
        asked = [told("attention", gpu, **sizes, stack=stack_name, kv_dtype=cache) for cache in ("fp16", "bf16")]
        assert asked[0].match.entry is asked[1].match.entry
        assert (asked[0].time_s, asked[0].high_s, asked[0].support) == (
            asked[1].time_s,
            asked[1].high_s,
            asked[1].support,
        )


def test_the_nearest_kind_costs_the_least() -> None:
    def entry(**words: str) -> MeasuredConfiguration:
        return MeasuredConfiguration("gemm", "h100_sxm", {"layout": "tn", "inputs": None, **words}, {}, 10, {}, (), ())

    steps = {"dtype": Substitution(0.1, 0.2, 0.3, 0.2, 4), "stack vllm sglang": Substitution(-0.1, 0.05, 0.05, 0.05, 2)}
    found = Evidence((entry(dtype="fp8", stack="vllm"), entry(dtype="bf16", stack="sglang")), steps)
    words = {"dtype": "bf16", "stack": "vllm", "layout": None, "inputs": None}
    (near,) = found.matches(kernel_class("gemm"), words, kc.gpu("h100_sxm"), "h100_sxm")
    assert near.substituted == (("stack", "vllm", "sglang"),) and (near.shift, near.low) == (-0.1, 0.05)
    assert near.entry is found.entries[1] and near.distance == 1


def test_kinds_of_as_many_calls_are_all_looked_at() -> None:
    """Two backends measured equally often: the numbers of a call tell which, none is lost."""
    words = {"dtype": "bf16", "stack": "vllm", "routing": "balanced", "config": "chosen"}
    entries = [
        MeasuredConfiguration("moe", "h100_sxm", {**words, "backend": backend}, {}, 10, {"ep": (ep, ep)}, (), ())
        for backend, ep in (("cutlass", 8.0), ("trtllm", 1.0))
    ]
    matches = Evidence(tuple(entries)).matches(
        kernel_class("moe"), {**words, "backend": None}, kc.gpu("h100_sxm"), "h100_sxm"
    )
    assert [one.configuration["backend"] for one in matches] == ["cutlass", "trtllm"]


def test_kinds_of_a_mixed_table() -> None:
    calls = columns_of([kc.kernel("attention", **{**DECODE, "q_len": q, "kv_len": kv}) for q, kv in
                        ((1, 4096), (512, 512), (4, 900), (1, 1))])  # fmt: skip
    found = {words["phase"]: rows for rows, words in configurations_of(kernel_class("attention"), calls)}
    assert {phase: rows.tolist() for phase, rows in found.items() if rows is not None} == {
        "decode": [0, 2], "prefill": [1, 3],
    }  # fmt: skip
    mixed = columns_of([kc.kernel("attention", q_lens=[512, 1], kv_lens=[512, 900], q_heads=8, head_dim=64)])
    assert [words["phase"] for _, words in configurations_of(kernel_class("attention"), mixed)] == ["mixed"]


# ---- intervals ----


@pytest.mark.parametrize("family", FAMILIES)
def test_intervals_are_never_narrower_farther_away(family: str) -> None:
    weights = load(WEIGHTS, family)
    assert weights is not None
    near, far = weights.spreads["near"], weights.spreads["extrapolated"]
    assert 0 <= near.low <= far.low and 0 <= near.high <= far.high


def test_more_steps_are_wider() -> None:
    def width(gpu: str | kc.Gpu, **words: Any) -> float:
        found = kc.predict(kc.kernel("attention", **DECODE, **words), gpu)
        return float(np.log(found.high_s / found.low_s))

    new = replace(kc.gpu("h200_sxm"), id="another", compute_capability="11.0")
    seen = width("h200_sxm", stack="vllm")
    assert seen < width("h200_sxm", stack="vllm", dtype="fp16")
    assert seen < width(replace(new, compute_capability="9.0"), stack="vllm") < width(new, stack="vllm")


def test_a_whole_model_tells_what_it_rests_on() -> None:
    from kernelcast.inference.forward import Deployment
    from kernelcast.inference.infer import infer
    from kernelcast.inference.workload import Workload
    from kernelcast.models import model

    found = infer(Deployment(model("llama-3.1-8b"), kc.gpu("h100_sxm"), stack("vllm")), Workload.equal(8, 1024, 64))
    rests = found.rests_on
    assert rests.calls > 50_000 and rests.error is not None and 0.01 < rests.error < 0.1
    assert sum(rests.support.values()) == pytest.approx(1) and rests.support["seen"] > 0.5
    assert sum(share for _, share in rests.configurations) == pytest.approx(1)
    assert rests.to_dict()["kinds"][0]["op"] == "gemm"
    parts = [ran.interval for one in found.passes for ran in one.kernels if ran.part == "host"]
    assert parts and all(span.low < span.value < span.high for span in parts)  # other hosts are slower


# ---- of a whole run, in words ----
def match(asked: str, measured: str, *changes: tuple[str, str | None, str | None], new: int = 0) -> EvidenceMatch:
    entry = kc.evidence(op="silu_mul", gpu=measured)[0]
    return EvidenceMatch({}, entry=entry, substituted=changes, distance=len(changes) + new, gpu=asked)


def test_a_summary_counts_only_what_was_measured_on_the_gpu() -> None:
    own = match("h200_sxm", "h200_sxm")
    assert own.entry is not None
    other = match("h200_sxm", "h100_sxm", ("dtype", "bf16", "fp16"), ("gpu", "h200_sxm", "h100_sxm"))
    whole = EvidenceSummary(((own, 0.9), (other, 0.1)), {"seen": 0.9, "extrapolated": 0.1})
    assert whole.text.startswith(f"{own.entry.calls:,} calls of 1 configuration; ")
    assert whole.text.endswith("; 10% borrowed from H100 80GB HBM3; of the time 90% seen, 10% extrapolated")
    assert whole.changes == ["silu_mul in fp16 for bf16 (10.0%)"]


def test_a_gpu_that_was_not_measured_shows_no_counts_of_others() -> None:
    borrowed = match("rtx_4090", "h200_sxm", ("gpu", "rtx_4090", "h200_sxm"), new=1)
    assert EvidenceSummary(((borrowed, 1.0),), {"extrapolated": 1.0}).text == (
        "nothing measured on RTX 4090; borrowed from H200; of the time 100% extrapolated"
    )
    of_another = match("mine", "h200_sxm", ("gpu", "mine", "h200_sxm"))  # a GPU of a file, whose family was measured
    assert EvidenceSummary(((of_another, 1.0),), {"near": 1.0}).text.startswith("none of it was measured on mine; ")
