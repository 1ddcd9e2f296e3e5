"""Which kernel runs: instruction paths, the file that names kernels, what a new GPU inherits, and what was measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.forecast.learned import WEIGHTS, load
from kernelcast.hardware import gpu, gpu_ids
from kernelcast.hardware.gpu import PATHS, path_of
from kernelcast.ops import REGISTRY, kernel, parameters_of
from kernelcast.ops.kernel_selection import (
    default_backend,
    kernel_choice,
    kernel_choice_rows,
    kernel_choices,
    served_experts,
    stack_backend,
)
from kernelcast.stacks.kernel_choices import FILE, KernelChoice

DECODE = {"batch": 8, "q_len": 1, "kv_len": 2048, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
ENTRIES = list(kernel_choices().entries.values())

# ---- instruction paths ----


@pytest.mark.parametrize(
    ("gpu_id", "path"),
    [("p100_sxm", "fma"), ("v100_sxm", "mma.sync"), ("a100_sxm", "mma.sync"), ("l40s", "mma.sync"), ("h20", "wgmma"),
     ("b300_sxm", "tcgen05"), ("rtx_5090", "mma.sync"), ("mi300x", "mfma")],
)  # fmt: skip
def test_the_path_of_a_gpu(gpu_id: str, path: str) -> None:
    assert gpu(gpu_id).instruction_path == path and not gpu(gpu_id).path_inherited


def test_every_capability_of_the_catalogue_is_known() -> None:
    assert not [name for name in gpu_ids() if gpu(name).path_inherited]


@pytest.mark.parametrize(
    ("capability", "path"),
    [("3.5", "fma"), ("8.8", "mma.sync"), ("9.1", "wgmma"), ("10.7", "tcgen05"), ("11.1", "tcgen05"),
     ("12.3", "mma.sync"), ("13.0", "tcgen05"), ("gfx1250", "mfma")],
)  # fmt: skip
def test_what_an_unknown_capability_inherits(capability: str, path: str) -> None:
    found, source = path_of(capability)
    assert found == path and source.startswith("inherited") and capability in source


def test_a_file_may_name_its_path(tmp_path: Path) -> None:
    def file(text: str) -> Any:
        (tmp_path / "new.toml").write_text(f'base = "b200_sxm"\nname = "New"\n{text}\n[sources]\n')
        return gpu(str(tmp_path / "new.toml"))

    assert file('compute_capability = "14.0"').path_inherited
    named = file('compute_capability = "14.0"\ninstruction_path = "wgmma"')
    assert named.instruction_path == "wgmma" and not named.path_inherited
    with pytest.raises(KernelcastError, match="unknown instruction_path 'wgma'"):
        file('instruction_path = "wgma"')
    with pytest.raises(KernelcastError, match="compute_capability must be"):
        file('compute_capability = "hopper"')
    with pytest.raises(KernelcastError, match="in quotes"):
        file("compute_capability = 9.0")


def test_another_capability_has_its_own_path() -> None:
    assert replace(gpu("h200_sxm"), compute_capability="10.0").instruction_path == "tcgen05"
    assert replace(gpu("h200_sxm"), instruction_path="mma.sync").instruction_path == "mma.sync"
    assert gpu("h200_sxm").replace(sm_count=100).instruction_path == "wgmma"


# ---- the file ----


def name(entry: KernelChoice) -> str:
    return " ".join(entry.key)


@pytest.mark.parametrize("entry", ENTRIES, ids=name)
def test_every_entry_names_what_exists(entry: KernelChoice) -> None:
    cls = REGISTRY[entry.op]
    assert entry.dtype in ("*", *cls.dtypes)
    assert entry.family in kernel_choices().families and all(len(source) > 10 for source in entry.sources)
    if entry.backend is not None:
        assert entry.backend in parameters_of(cls)["backend"].options
    assert entry.tiles or entry.family in ("cudnn", "nccl")  # whose tiles nobody documents, and links have none


def test_every_family_and_source_is_used() -> None:
    import tomllib

    raw = tomllib.loads(FILE.read_text())
    keys = [kernels.get("source", group.get("source")) for group in raw["runs"] for kernels in group["kernels"]]
    assert {key for one in keys for key in ([one] if isinstance(one, str) else one)} == set(raw["sources"])
    assert {entry.family for entry in ENTRIES} | set(kernel_choices().backends.values()) == set(
        kernel_choices().families
    )
    assert set(kernel_choices().homes) == set(PATHS)


@pytest.mark.parametrize("gpu_id", gpu_ids())
def test_an_op_whose_backend_nobody_says_has_one_everywhere(gpu_id: str) -> None:
    for op in ("attention", "mla", "attention_backward", "masked_attention", "gated_delta"):
        assert default_backend(op, gpu(gpu_id), "bf16") in parameters_of(REGISTRY[op])["backend"].options


def test_no_kernel_is_named_where_it_cannot_run() -> None:
    """A family of one instruction path, on a GPU that has another: its entries are of other places."""
    for gpu_id in gpu_ids():
        for line in kernel_choice_rows(gpu(gpu_id)):
            if line["stack"] != "*":
                assert kernel_choices().can_run(line["family"], gpu(gpu_id)), (gpu_id, line)


FAULTS = [
    ('family = "cublas"', 'family = "cublass"', "unknown family of gemm 'cublass'"),
    ('op = ["gemm", "bmm"]', 'op = ["gem", "bmm"]', "unknown op of gem 'gem'"),
    ('dtype = "fp32", family', 'dtype = "fp31", family', "unknown dtype of gemm fp31 'fp31'"),
    ('on = "mfma", family', 'on = "mfm", family', "unknown on of gemm mfm 'mfm'"),
    ('path = "fma" },', 'path = "fmaa" },', "unknown path of gemm fp32 'fmaa'"),
    ('source = "nvidia_libraries"\nkernels = [\n    { family', "kernels = [\n    { family", "source is missing"),
    (
        'source = "nvidia_libraries"\nkernels = [\n    { f',
        'source = "x"\nkernels = [\n    { f',
        "unknown source in runs",
    ),
    ('{ family = "cublas" },', '{ family = "cublas" }, { family = "cublas" },', "gemm: there are two entries"),
    ('{ family = "cublas" },', '{ famly = "cublas" },', "unknown field in runs of"),
    ('{ family = "cublas" },', "{ },", "'family' is missing"),
    ('backend = "fa3" }', 'backend = "fa9" }', "unknown backend of attention wgmma 'fa9'"),
    ("[homes]", "[home]", "unknown table 'home'"),
    ("[backends]", "[families.backends]", "the table backends is missing"),
    ("[families]", "[families", "not readable as TOML"),
    ('stack = "vllm"', 'stack = "vlm"', "unknown stack of vlm gemm fp8 'vlm'"),
    ('tiles = "gemm.matrix_unit"', 'tiles = "gemm.unit"', "tiles = 'gemm.unit' is nothing in ops/"),
    ('family = "fa3", backend = "fa3"', 'family = "fa3", backend = "marlin"', "* attention: unknown backend 'marlin'"),
    ('dtype = "fp8", family = "triton", backend', 'dtype = "int4", family = "triton", backend', "unknown dtype 'int4'"),
]


@pytest.mark.parametrize(("right", "wrong", "said"), FAULTS)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    text = FILE.read_text()
    assert right in text
    (tmp_path / "kernels.toml").write_text(text.replace(right, wrong, 1))
    with pytest.raises(KernelcastError) as error:
        kernel_choices(tmp_path / "kernels.toml")
    assert said in str(error.value) and "kernels.toml" in str(error.value) and "\n" not in str(error.value)


# ---- the most specific entry ----


def of(stack: str | None, place: str, op: str, dtype: str = "bf16", kv: str | None = None) -> str | None:
    found = kernel_choice(stack, gpu(place), op, dtype, kv)
    return (found.backend or found.family) if found else None


def test_dtype_before_place_and_capability_before_path() -> None:
    assert of("vllm", "l40s", "gemm", "fp8_block") == "triton" and of("vllm", "h20", "gemm", "fp8_block") == "deepgemm"
    assert of("vllm", "rtx_5090", "gemm", "fp8_block") == "cutlass"  # its own, not that of mma.sync
    assert of("vllm", "rtx_a6000", "gemm", "fp8_block") == "marlin"
    assert (
        of("vllm", "l40s", "attention", kv="bf16") == "fa2"
        and of("vllm", "l40s", "attention", kv="fp8") == "flashinfer"
    )
    assert of(None, "h200_sxm", "attention") == "fa3" and of("torch", "h200_sxm", "attention") == "cudnn"
    assert of("trtllm", "h200_sxm", "gemm", "bf16") == "cublas" and of("vllm", "mi300x", "gemm") == "hipblaslt"


def test_a_stack_takes_no_backend_of_any_stack() -> None:
    words = {"stack": "torch_eager", "dtype": "bf16", "kv_dtype": "bf16"}
    assert stack_backend("attention", words, gpu("h200_sxm")) is None
    assert stack_backend("attention", {**words, "stack": None}, gpu("h200_sxm")) is None
    assert stack_backend("attention", {**words, "stack": "torch"}, gpu("h200_sxm")) == "cudnn"


def test_served_experts_may_run_as_another_format() -> None:
    assert served_experts("vllm", gpu("h100_sxm"), "fp8") == ("fp8_block", "triton")
    assert served_experts("vllm", gpu("b200_sxm"), "fp8") == ("fp8", "trtllm")
    assert served_experts("vllm", gpu("p100_sxm"), "bf16") == ("bf16", None)


def test_a_backend_that_an_engine_is_told_to_take_keeps_the_format_that_it_serves() -> None:
    """TensorRT-LLM quantises activations of gpt-oss to 8 bits on Blackwell in both of its kernels, not in Triton's;
    vLLM's CUTLASS experts stay in fp8 with one scale a tensor."""
    for backend in ("trtllm", "cutlass"):
        assert served_experts("trtllm", gpu("b200_sxm"), "mxfp4", backend) == ("mxfp4_fp8", backend)
    assert served_experts("trtllm", gpu("b200_sxm"), "mxfp4", "triton") == ("mxfp4", "triton")
    assert served_experts("trtllm", gpu("h200_sxm"), "mxfp4", "triton") == ("mxfp4", "triton")
    assert served_experts("sglang", gpu("b200_sxm"), "mxfp4", "trtllm") == ("mxfp4_fp8", "trtllm")
    assert served_experts("vllm", gpu("h100_sxm"), "fp8", "cutlass") == ("fp8", "cutlass")
    assert served_experts("vllm", gpu("p100_sxm"), "bf16", "triton") == ("bf16", "triton")


# ---- inheritance ----


def test_a_new_capability_inherits_by_its_path() -> None:
    """sm_120 runs what sm_89 does, not what sm_100 does, but for vLLM's experts, whose own kernels were measured;
    a later data-centre GPU what sm_100 does."""
    assert of("vllm", "rtx_5090", "moe") != of("vllm", "l40s", "moe")
    for stack in ("vllm", "sglang", "trtllm", "torch", "flashinfer"):
        for op in ("attention", "mla", "moe")[: 2 if stack == "vllm" else 3]:
            assert of(stack, "rtx_5090", op) == of(stack, "l40s", op), (stack, op)
    later = replace(gpu("b200_sxm"), id="later", compute_capability="13.0")
    assert kernel_choice("vllm", later, "moe", "nvfp4") == kernel_choice("vllm", gpu("b200_sxm"), "moe", "nvfp4")
    call = kernel("attention", **DECODE, stack="vllm")
    told = {place.id: kc.predict(call, place).runs for place in (gpu("l40s"), gpu("rtx_5090"), gpu("b200_sxm"), later)}
    assert [run.how for run in told.values()] == ["named", "inherited", "named", "inherited"]
    assert [run.family for run in told.values()] == ["fa2", "fa2", "trtllm-gen", "trtllm-gen"]
    assert [run.path_inherited for run in told.values()] == [False, False, False, True]
    assert told["later"].path == "tcgen05"


# ---- what a call is told ----


def test_what_was_asked_and_what_was_measured() -> None:
    asked = kc.predict(kernel("attention", **DECODE, stack="vllm", backend="flashinfer"), "h200_sxm").runs
    assert (asked.how, asked.family, asked.path) == ("asked", "flashinfer", "mma.sync")
    layer = {"tokens": 64, "hidden": 2048, "inter": 768, "experts": 128, "topk": 8}
    found = kc.predict(kernel("moe", **layer, stack="sglang"), "b200_sxm")
    assert found.runs.how == "measured" and found.runs.backend == found.answered_as["backend"]["answered"] == "trtllm"
    assert found.runs.sources == found.match.entry.sources  # type: ignore[union-attr]
    assert kc.predict(kernel("relu", rows=64, cols=64), "h200_sxm").runs.how == "unknown"


def test_a_kernel_that_does_not_run_here_is_not_told() -> None:
    """A batch of unequal lengths is answered as FlashAttention 3's on an H200, which an L40S has not."""
    mixed = {"q_lens": [512, 1], "kv_lens": [512, 4000], "q_heads": 32, "kv_heads": 8, "head_dim": 128}
    found = kc.predict(kernel("attention", **mixed, stack="vllm"), "l40s")
    assert found.answered_as["backend"]["answered"] == "fa3" and found.runs.family == "fa2"


# ---- what was measured ----


def contradictions() -> dict[KernelChoice, list[str]]:
    """By entry: what was measured of its stack, capability, op and formats, where its backend was run by no call."""
    run: dict[tuple[Any, ...], Counter[str]] = {}
    for path in sorted(WEIGHTS.glob("*.safetensors")):
        weights = load(WEIGHTS, path.stem)
        for entry in weights.evidence.entries if weights else ():
            words = entry.configuration
            if words.get("backend") and words["stack"] is not None:
                key = words["stack"], entry.gpu, entry.op, words["dtype"], words.get("kv_dtype")
                run.setdefault(key, Counter())[str(words["backend"])] += entry.calls
    assert len(run) > 100
    found: dict[KernelChoice, list[str]] = {}
    for (stack, place, op, dtype, kv_dtype), backends in run.items():
        said = kernel_choice(stack, gpu(place), op, dtype, kv_dtype, exact_stack=True)
        if said and said.backend and said.backend not in backends:
            found.setdefault(said, []).append(f"{place} {dtype} {kv_dtype}: {dict(backends)}")
    return found


def test_the_file_does_not_contradict_what_was_measured() -> None:
    """But where a note explains it; and no note is left over."""
    found = contradictions()
    assert {name(entry): told for entry, told in found.items() if not entry.note} == {}
    assert {name(entry) for entry in ENTRIES if entry.note} == {name(entry) for entry in found}
