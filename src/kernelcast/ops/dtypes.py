"""Number formats: bytes of each operand, and the arithmetic unit that multiplies it."""

from __future__ import annotations

from dataclasses import dataclass

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu


@dataclass(frozen=True)
class DType:
    """Bytes an element of activations, weights and outputs takes, and the dtype the math runs in."""

    name: str
    act_bytes: float
    weight_bytes: float
    out_bytes: float
    math: str


# Scales count: fp8_block has an fp32 scale per 128 activations (and per 128x128 weights, negligible);
# nvfp4 an fp8 scale per 16 elements; int4 weight-only an fp16 scale per group of 128. int8_wo: weights alone have 8
# bits (integers, or fp8 on a GPU without its arithmetic, as Marlin runs it), one scale per column. mxfp4 (OCP's
# microscaling formats): 4-bit floats with one exponent for 32, beside 16-bit activations, 8-bit ones with an exponent
# for 32 too (mxfp4_fp8), or 4-bit ones (w4a4_mxfp4). TensorRT-LLM calls the first two W4A16_MXFP4 and W4A8_MXFP4_MXFP8,
# vLLM and AMD Quark the first and the last w_mxfp4 and w_mxfp4_a_mxfp4.
_ALL = (
    DType("fp32", 4, 4, 4, "fp32"),
    DType("tf32", 4, 4, 4, "tf32"),
    DType("fp16", 2, 2, 2, "fp16"),
    DType("bf16", 2, 2, 2, "bf16"),
    DType("fp8", 1, 1, 2, "fp8"),
    DType("fp8_block", 1 + 4 / 128, 1, 2, "fp8"),
    DType("int8", 1, 1, 2, "int8"),
    DType("nvfp4", 0.5 + 1 / 16, 0.5 + 1 / 16, 2, "nvfp4"),
    DType("int4", 2, 0.5 + 2 / 128, 2, "fp16"),
    DType("int8_wo", 2, 1, 2, "fp16"),
    DType("mxfp4", 2, 0.5 + 1 / 32, 2, "fp16"),
    DType("mxfp4_fp8", 1 + 1 / 32, 0.5 + 1 / 32, 2, "fp8"),
    DType("w4a4_mxfp4", 0.5 + 1 / 32, 0.5 + 1 / 32, 2, "mxfp4"),
)
DTYPES = {d.name: d for d in _ALL}
# As PyTorch, engines and checkpoints write them. AWQ and GPTQ store 4 bits unless their config says otherwise;
# compressed-tensors names schemes by the bits of weights and activations, where 8 and 8 are integers. An fp8 that says
# how its bits are divided takes as long as the other.
_SPELLINGS = {
    **dict.fromkeys(("float32", "float", "single"), "fp32"), "tfloat32": "tf32",
    **dict.fromkeys(("float16", "half"), "fp16"), "bfloat16": "bf16",
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2", "float8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3",
                     "fbgemm_fp8", "ptpc_fp8", "fp8_dynamic", "w8a8_fp8", "fp8_inc"), "fp8"),
    **dict.fromkeys(("deepseek_fp8", "fp8_block_scales"), "fp8_block"),
    **dict.fromkeys(("w8a8", "w8a8_int8", "smoothquant"), "int8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "gptq_int4", "w4a16", "w4a16_awq", "w4a16_gptq"),
                    "int4"),
    **dict.fromkeys(("w8a16", "gptq_int8"), "int8_wo"),
    **dict.fromkeys(("modelopt_fp4", "nvfp4_w4a4"), "nvfp4"), "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4_fp8",
}  # fmt: skip


def canonical_dtype(name: str) -> str:
    """The name here of a format as people write it: torch.bfloat16, FP8, half, awq; an unknown name as it is."""
    folded = name.strip().lower().removeprefix("torch.").replace("-", "_")
    folded = _SPELLINGS.get(folded, folded)
    return folded if folded in DTYPES else name


def find_dtype(name: str) -> DType:
    name = canonical_dtype(name)
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def same_widths(name: str | None, other: str | None) -> bool:
    """Whether operands of two formats have as many bits, 16 or fewer (scales aside): fp16 and bf16, int4 and mxfp4,
    nvfp4 and w4a4_mxfp4."""
    if name not in DTYPES or other not in DTYPES:
        return False
    bits, others = ([round(8 * each) for each in (DTYPES[n].act_bytes, DTYPES[n].weight_bytes)] for n in (name, other))
    return bits == others and max(bits) <= 16


def supports_dtype(gpu: Gpu, name: str) -> bool:
    """Whether the GPU multiplies ``name`` matrices at all."""
    math = find_dtype(name).math
    on_vectors = math in ("fp32", "fp16") and gpu.fma_flops_per_clk_sm.get(math)
    return bool(gpu.tensor_flops_per_clk_sm.get(math) or on_vectors)


def matmul_flops_per_s(gpu: Gpu, name: str) -> float:
    """The peak of products of ``name`` matrices, which MFU is relative to: of fp8_block that of fp8."""
    return gpu.product_flops_per_s(find_dtype(name).math)


def matmul_pipe(gpu: Gpu, name: str) -> str:
    """'tensor' or 'fma': the unit that multiplies ``name`` matrices on this GPU. Refuses what it cannot do."""
    if supports_dtype(gpu, name):
        return "tensor" if gpu.tensor_flops_per_clk_sm.get(find_dtype(name).math) else "fma"
    able = [d.name for d in _ALL if d.math in gpu.tensor_flops_per_clk_sm or d.math == "fp32"]
    instead = "; engines run such checkpoints in fp16 there: dtype=fp16" if name == "bf16" and "fp16" in able else ""
    raise KernelcastError(f"{gpu.id} has no {name} matrix arithmetic; it has {', '.join(able)}{instead}")
