"""quantize: activations to 8 or 4 bits, with a known scale or one of a token, the tensor or a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kernelcast.hardware import Gpu
from kernelcast.kernels.base import Calls, Kernel, choice, size
from kernelcast.kernels.dtypes import DType, dtype
from kernelcast.kernels.norm import (
    VECTOR_DTYPES,
    VECTOR_ELEMENTS,
    block_reduction,
    row_threads,
    side_instructions,
)
from kernelcast.kernels.work import Array, Phases, Work, ceil_div

_FORMATS = ("fp8", "fp8_block", "int8", "nvfp4")
_SCALES = ("static", "token", "tensor", "block")
_BLOCK_FORMATS = ("fp8_block", "nvfp4")  # their scales are part of the format
_SCALE_BYTES = 4.0  # fp32
_AMAX_FLOPS = 1.0  # a maximum; the absolute value is a modifier of its operand
_ROUND_FLOPS = 3.0  # scale, and clamp from both sides
_BLOCK = 128.0  # elements that share a scale in fp8 and int8; nvfp4's 16 are one thread's own


@dataclass(frozen=True, kw_only=True)
class Quantize(Kernel):
    """Quantises activations from ``dtype`` to ``to``.

    static: the scale is known, one pass. token: the CTA of a row finds its maximum first. block: a few lanes
    find theirs by shuffles. tensor: one kernel finds the maximum of all, a second scales (vLLM's
    dynamic_scaled_fp8_quant), so the input is read twice.
    """

    family: ClassVar[str] = "memory"
    op: ClassVar[str] = "quantize"
    dtypes: ClassVar[tuple[str, ...]] = VECTOR_DTYPES
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rows": 4096, "cols": 4096},
        {"rows": 4096, "cols": 4096, "to": "fp8", "scale": "tensor"},
        {"rows": 4096, "cols": 4096, "to": "int8", "scale": "static"},
        {"rows": 4096, "cols": 4096, "to": "fp8_block"},
        {"rows": 4096, "cols": 4096, "to": "nvfp4"},
    )

    rows: int = size("rows (tokens)")
    cols: int = size("columns")
    to: str = choice("number format of the result", _FORMATS, default="fp8")
    scale: str | None = choice(
        "what shares a scale; not given: token, or block for a block format", _SCALES, default=None
    )

    @classmethod
    def conflicts(cls, calls: Calls) -> list[tuple[NDArray[np.bool_], str]]:
        to, scale = calls.choice("to"), calls.choice("scale")
        if to not in _BLOCK_FORMATS or scale in (None, "block"):
            return []
        message = f"{to} has block scales: scale must be block, not {scale}"
        return [(np.ones(calls.count, dtype=np.bool_), message)]

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Phases:
        rows, cols, source, to = calls["rows"], calls["cols"], calls.choice("dtype"), calls.choice("to")
        scale = calls.choice("scale") or ("block" if to in _BLOCK_FORMATS else "token")
        read_bytes = cols * dtype(source).act_bytes  # of a row
        written_bytes = cols * dtype(to).act_bytes  # with the scales of a block format
        if scale == "block" and to not in _BLOCK_FORMATS:
            written_bytes = written_bytes + ceil_div(cols, _BLOCK) * _SCALE_BYTES
        if scale == "tensor":
            amax = _row_pass(gpu, rows, cols, read_bytes, _SCALE_BYTES + 0 * cols, _AMAX_FLOPS, reduces=True)
            return amax, _row_pass(gpu, rows, cols, read_bytes, written_bytes, _ROUND_FLOPS)
        if scale == "token":
            written_bytes = written_bytes + _SCALE_BYTES
        flops = _ROUND_FLOPS + (0.0 if scale == "static" else _AMAX_FLOPS)
        return (_row_pass(gpu, rows, cols, read_bytes, written_bytes, flops, reduces=scale == "token"),)


def quantised_rows(gpu: Gpu, kind: DType, rows: Array, cols: Array) -> Work:
    """Activations of 16 bits to the format that a narrow matrix product reads, a scale a row."""
    return _row_pass(gpu, rows, cols, cols * 2.0, cols * kind.act_bytes, _ROUND_FLOPS + _AMAX_FLOPS, reduces=True)


def _row_pass(
    gpu: Gpu,
    rows: Array,
    cols: Array,
    read_bytes: Array,
    written_bytes: Array,
    flops_per_element: float,
    *,
    reduces: bool = False,
) -> Work:
    """One kernel, one CTA a row: reads it, reduces it over the CTA where asked, and writes."""
    threads = row_threads(gpu, cols)
    smem_bytes, reduce_instructions = block_reduction(gpu, threads)
    l2_bytes = read_bytes + written_bytes
    return Work(
        tasks=rows,
        longest_count=rows,
        fma_flops=flops_per_element * cols,
        xu_ops=1.0 if reduces else 0.0,  # the reciprocal of the scale
        smem_bytes=smem_bytes if reduces else 0.0,
        l2_bytes=l2_bytes,
        # 16 bits to fp32 one at a time, fp32 to 8 bits two at a time
        other_warp_instructions=side_instructions(gpu, l2_bytes, 1.5 * cols)
        + (reduce_instructions if reduces else 0.0),
        activation_bytes=rows * l2_bytes,
        threads=threads,
        registers_per_thread=32.0,
        smem_bytes_per_cta=4 * threads / gpu.warp_threads if reduces else 0.0,
        serial_steps=ceil_div(cols, threads * VECTOR_ELEMENTS) + reduces,
        useful_flops=flops_per_element * rows * cols,
    )
