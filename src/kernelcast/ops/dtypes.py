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


def find_dtype(name: str) -> DType:
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


def matmul_pipe(gpu: Gpu, name: str) -> str:
    """'tensor' or 'fma': the unit that multiplies ``name`` matrices on this GPU. Refuses what it cannot do."""
    if supports_dtype(gpu, name):
        return "tensor" if gpu.tensor_flops_per_clk_sm.get(find_dtype(name).math) else "fma"
    able = [d.name for d in _ALL if d.math in gpu.tensor_flops_per_clk_sm or d.math == "fp32"]
    raise KernelcastError(f"{gpu.id} has no {name} matrix arithmetic; it has {', '.join(able)}")
