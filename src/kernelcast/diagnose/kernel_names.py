"""What a kernel's name says: its category of work, tile, number format, split-K, alignment.

Names are those of cuBLAS (nvjet, xmma), CUTLASS, cuDNN, FlashAttention, PyTorch and Triton as profilers print them.
Which tile side runs along which axis was checked on an H200 (validation/kernelcast): all 9,274 products of known size
whose grid counts tiles (nvjet, CUTLASS, xmma of sm80) fit. cuBLAS computes the transposed product of row-major
matrices, so that the first side of an nvjet or CUTLASS tile is along n; that of an xmma tile is along m.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

Name = TypeVar("Name", bound=str)
KernelCategory = Literal["matmul", "attention", "conv", "reduce", "pointwise", "copy", "helper", "other"]

MATRIX_CATEGORIES: tuple[KernelCategory, ...] = ("matmul", "attention", "conv")
# one kernel could do the work of several of these in sequence
FUSIBLE_CATEGORIES: tuple[KernelCategory, ...] = ("pointwise", "copy", "reduce")

_SIDES = r"(\d+)x(\d+)"
_NVJET = re.compile(rf"nvjet_(?:sm\d+_)?(?P<formats>[a-z]+)_{_SIDES}_(\d+)x\d+_(\d+)x(\d+)_")
_XMMA = re.compile(
    rf"xmma_(?:gemm|fprop|dgrad|wgrad)\w*?_(?P<formats>[a-z0-9]+_[a-z0-9]+_[a-z0-9]+)_.*tilesize{_SIDES}x"
)
_CUTLASS = re.compile(rf"(?:tensorop|simt|wmma)\w*?gemm\w*?_{_SIDES}_")
_CLASSIC = re.compile(rf"(?:ampere|volta|turing|maxwell)_\w*?gemm\w*?_{_SIDES}_")
_ALIGN = re.compile(r"_aligna?(\d+)")  # xmma has one for each operand: aligna4_alignc4
# nvjet's letters, one a matrix: t bf16, h fp16, s fp32, q fp8
_NVJET_FORMATS = {"t": "bf16", "h": "fp16", "q": "fp8", "s": "tf32", "d": "fp64"}
_XMMA_FORMATS = (("bf16", "bf16"), ("f16", "fp16"), ("e4m3", "fp8"), ("e5m2", "fp8"), ("i8", "int8"), ("f32", "fp32"),
                 ("f64", "fp64"))  # fmt: skip
# C++ types among a template's arguments; cuDNN's vector kernels (..._sgemm<half>) compute in fp32
_DTYPES = (
    ("fp32", ("convolve_sgemm",)),
    ("bf16", ("bfloat16", "bf16")),
    ("fp16", ("half", "f16")),
    ("fp8", ("e4m3", "e5m2")),
    ("fp32", ("float", "_f32", "sgemm")),
)
_CUTLASS_DTYPES = (
    ("bf16", ("bf16",)),
    ("fp32", ("sgemm", "simt")),
    ("fp16", ("s1688gemm_f16", "f16_s", "fp16", "_h16")),
    ("tf32", ("s1688gemm", "tf32")),
    *_DTYPES,
)
_SPLIT = ("splitk", "split_k", "segment_k_on")
_CATEGORIES: tuple[tuple[KernelCategory, tuple[str, ...]], ...] = (
    ("helper", ("splitkreduce", "splitk_reduce", "splitkv_combine", "memset", "nchwtonhwc", "nhwctonchw",
                "convert_kernel", "scale_bias", "reduce_splitk", "compute_grad_offset", "cublaslt_",
                "fill_kernel_prologue")),
    ("attention", ("flash_fwd", "flash_bwd", "sdpa", "fmha", "flashattn", "attention", "batchprefill", "batchdecode",
                   "flashinfer::single", "mha_")),
    ("conv", ("conv", "fprop", "dgrad", "wgrad", "winograd", "implicit_gemm")),
    ("matmul", ("gemm", "nvjet", "gemv", "_mm", "matmul", "dot_kernel", "cutlass")),
    ("copy", ("catarray", "memcpy", "copy_kernel", "direct_copy", "index_elementwise", "indexselect", "gather",
              "scatter", "transpose", "bfloat16_copy", "indexing")),
    ("reduce", ("reduce_kernel", "softmax", "layer_norm", "layernorm", "rmsnorm", "rms_norm", "norm_kernel", "moments",
                "gammabeta", "scan")),
    ("pointwise", ("elementwise", "fused_dropout", "multi_tensor_apply", "arange", "fill", "triu_tril", "act_and_mul",
                   "rotary", "quantise", "quantize")),
)  # fmt: skip
# Of a serving engine: what its step computes, where the category alone does not say it. Expert products are named
# after their layer in vLLM, SGLang, FlashInfer and CUTLASS; all-reduces after NCCL, vLLM's custom one, FlashInfer's.
EnginePart = Literal["gemm", "attention", "moe", "elementwise", "collectives", "sampling", "other"]
_ENGINE_PARTS: tuple[tuple[EnginePart, tuple[str, ...]], ...] = (
    ("collectives", ("nccl", "cross_device_reduce", "allreduce", "all_reduce", "allgather", "all_gather",
                     "reducescatter", "reduce_scatter", "alltoall", "all_to_all", "multimem", "deep_ep", "one_shot",
                     "two_shot")),
    ("moe", ("moe", "topkgating", "topk_gating", "topk_softmax", "grouped_topk", "expert", "grouped_gemm",
             "groupproblem")),
    ("sampling", ("argmax", "sampling", "sampler", "exponential", "topktopp", "top_k_top_p", "softmax", "gathertopk",
                  "radixsort", "sort_by_key", "cumsum", "multinomial")),
    ("attention", ("mla", "paged", "reshape_and_cache", "concat_and_cache", "prepare_varlen", "merge_attn_states",
                   "splitkv", "flash::")),
    ("gemm", ("splitk",)),
    ("elementwise", ("quant",)),
)  # fmt: skip
_PART_OF_CATEGORY: dict[KernelCategory, EnginePart] = {
    "pointwise": "elementwise", "reduce": "elementwise", "copy": "elementwise"
}  # fmt: skip
# TorchInductor's own kernels are named after all that they join: _mm of the product that follows, moe_forward, quant
_INDUCTOR: tuple[tuple[str, KernelCategory], ...] = (
    ("triton_poi_fused_clone", "copy"), ("triton_poi_", "pointwise"), ("triton_red_", "reduce"),
    ("triton_per_", "reduce"),
)  # fmt: skip
_CUDA_CALL = re.compile(r"cu(da)?[A-Z]")  # of the runtime or the driver, on the host
_PROFILER = ("Activity Buffer Request", "Lazy Function Loading", "Runtime Triggered Module Loading",
             "Command Buffer Full", "Instrumentation", "Resource", "Context Sync", "Stream Sync", "Event Sync",
             "Stream Wait Event", "Device Sync")  # fmt: skip
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "LaunchCooperativeKernel")


@dataclass(frozen=True)
class KernelName:
    """What a kernel's name says; None and False where it does not."""

    category: KernelCategory
    tile_m: int | None = None  # rows of PyTorch's output that a CTA computes
    tile_n: int | None = None
    cluster_m: int = 1
    cluster_n: int = 1
    dtype: str | None = None  # that the arithmetic runs in
    split_k: bool = False
    persistent: bool = False  # as many CTAs as the GPU holds, each of which takes several tiles
    align_elements: int | None = None  # numbers that one load takes
    strided: bool = False  # a copy that computes the address of each element


@functools.cache
def parse_kernel_name(name: str) -> KernelName:
    folded = name.lower()
    category = _generated(folded) or _named(folded, _CATEGORIES) or "other"
    if category not in MATRIX_CATEGORIES:
        return KernelName(category, dtype=_named(folded, _DTYPES), strided="catarraybatchedcopy<" in folded)
    split = any(part in folded for part in _SPLIT)
    if match := _NVJET.search(folded):
        _, side_n, side_m, _, cluster_n, cluster_m = match.groups()
        return KernelName("matmul", int(side_m), int(side_n), int(cluster_m), int(cluster_n),
                          _NVJET_FORMATS.get(match["formats"][0]), split, persistent=True)  # fmt: skip
    align = _ALIGN.search(folded)
    elements = int(align[1]) if align else None
    if match := _XMMA.search(folded):
        _, side_m, side_n = match.groups()
        return KernelName(category, int(side_m), int(side_n), dtype=_xmma_dtype(match["formats"]), split_k=split,
                          persistent="sm90" in folded, align_elements=elements)  # fmt: skip
    if match := _CUTLASS.search(folded) or _CLASSIC.search(folded):
        side_n, side_m = match.groups()
        return KernelName(category, int(side_m), int(side_n), dtype=_named(folded, _CUTLASS_DTYPES), split_k=split,
                          align_elements=elements)  # fmt: skip
    return KernelName(category, dtype=_named(folded, _DTYPES), split_k=split)


@functools.cache
def engine_part(name: str) -> EnginePart:
    """What a serving engine runs a kernel for, by its name and category."""
    category = parse_kernel_name(name).category
    if _generated(name.lower()):
        return "elementwise"
    if category == "attention":  # before all that its long templates may name
        return "attention"
    named = _named(name.lower(), _ENGINE_PARTS)
    if category in MATRIX_CATEGORIES:
        return "moe" if named == "moe" else "gemm"
    return named or _PART_OF_CATEGORY.get(category, "other")


def runs_on_gpu(name: str) -> bool:
    """Whether an event of a profiler is a kernel or a copy, and not a call of the CUDA runtime."""
    return not _CUDA_CALL.match(name) and not name.startswith(_PROFILER)


def is_launch(name: str) -> bool:
    """Whether it is a call that launches a kernel or a CUDA graph."""
    return bool(_CUDA_CALL.match(name)) and any(part in name for part in _LAUNCHES)


def _generated(folded: str) -> KernelCategory | None:
    """The category of a kernel that TorchInductor generated."""
    return next((category for prefix, category in _INDUCTOR if folded.startswith(prefix)), None)


def _named(folded: str, table: Iterable[tuple[Name, Iterable[str]]]) -> Name | None:
    """The first entry of the table with a part that is in the kernel's name."""
    return next((name for name, parts in table if any(part in folded for part in parts)), None)


def _xmma_dtype(formats: str) -> str | None:
    """'f32f32_tf32f32_f32': operands, then what the arithmetic runs in."""
    operands, compute, *_ = formats.split("_")
    if compute.startswith("tf32"):
        return "tf32"
    return next((dtype for prefix, dtype in _XMMA_FORMATS if operands.startswith(prefix)), None)
