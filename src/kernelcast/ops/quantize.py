"""quantize: activations to 8 or 4 bits, with a static scale or one per token, tensor or block."""

from __future__ import annotations

import numpy as np

from kernelcast.hardware import Gpu
from kernelcast.ops.base import Calls, Configuration, Conflicts, choice, conflict, size
from kernelcast.ops.dtypes import DType, find_dtype
from kernelcast.ops.vector import VECTOR_ELEMENTS, MemoryKernel, block_reduction, row_threads, vector_kernel
from kernelcast.ops.work import Array, Work, Works, ceil_div

_FORMATS = ("fp8", "fp8_block", "int8", "nvfp4")
_SCALES = ("static", "token", "tensor", "block")
_BLOCK_FORMATS = ("fp8_block", "nvfp4")  # their scales are part of the format
_SCALE_BYTES = 4.0  # fp32
_AMAX_FLOPS = 1.0  # a maximum; the absolute value is a modifier of its operand
_ROUND_FLOPS = 3.0  # scale, and clamp from both sides
_BLOCK = 128.0  # elements that share a scale in fp8 and int8; nvfp4's 16 are in one thread


class Quantize(MemoryKernel):
    """Quantises activations from ``dtype`` to ``to``.

    static: the scale is known, one pass. token: the CTA of a row finds its maximum first. block: a few lanes find
    theirs by shuffles. tensor: one kernel finds the maximum, a second scales (vLLM's dynamic_scaled_fp8_quant), so the
    input is read twice.
    """

    op = "quantize"
    examples = (
        {"rows": 4096, "cols": 4096},
        {"rows": 4096, "cols": 4096, "to": "fp8", "scale": "tensor"},
        {"rows": 4096, "cols": 4096, "to": "int8", "scale": "static"},
        {"rows": 4096, "cols": 4096, "to": "fp8_block"},
        {"rows": 4096, "cols": 4096, "to": "nvfp4"},
    )

    rows: int = size("rows (tokens)")
    cols: int = size("columns")
    to: str = choice("dtype of the result", _FORMATS, default="fp8")
    scale: str | None = choice(
        "elements that share a scale, default: token, or block for a block format", _SCALES, default=None
    )

    @classmethod
    def conflicts(cls, calls: Calls) -> Conflicts:
        to, scale = calls.choice("to"), calls.choice("scale")
        wrong = to in _BLOCK_FORMATS and scale not in (None, "block")
        return conflict(np.full(calls.count, wrong), f"{to} has block scales: scale must be block, not {scale}", {})

    @classmethod
    def with_defaults(cls, configuration: Configuration, gpu: Gpu) -> dict[str, str | None]:
        return {
            **configuration,
            "scale": configuration["scale"] or ("block" if configuration["to"] in _BLOCK_FORMATS else "token"),
        }

    @classmethod
    def work(cls, calls: Calls, gpu: Gpu) -> Works:
        rows, cols, to = calls["rows"], calls["cols"], calls.choice("to")
        scale = calls.choice("scale") or ("block" if to in _BLOCK_FORMATS else "token")
        read_bytes = cols * calls.dtype.act_bytes  # of a row
        written_bytes = cols * find_dtype(to).act_bytes  # with the scales of a block format
        if scale == "block" and to not in _BLOCK_FORMATS:
            written_bytes = written_bytes + ceil_div(cols, _BLOCK) * _SCALE_BYTES
        if scale == "tensor":
            amax = _row_pass(gpu, rows, cols, read_bytes + _SCALE_BYTES, _AMAX_FLOPS, reduces=True)
            return amax, _row_pass(gpu, rows, cols, read_bytes + written_bytes, _ROUND_FLOPS)
        if scale == "token":
            written_bytes = written_bytes + _SCALE_BYTES
        flops = _ROUND_FLOPS + (0.0 if scale == "static" else _AMAX_FLOPS)
        return (_row_pass(gpu, rows, cols, read_bytes + written_bytes, flops, reduces=scale == "token"),)


def quantised_rows(gpu: Gpu, dtype: DType, rows: Array, cols: Array) -> Work:
    """16-bit activations to the dtype of a narrow matrix product, one scale per row."""
    return _row_pass(gpu, rows, cols, cols * (2.0 + dtype.act_bytes), _ROUND_FLOPS + _AMAX_FLOPS, reduces=True)


def _row_pass(gpu: Gpu, rows: Array, cols: Array, row_bytes: Array, flops: float, *, reduces: bool = False) -> Work:
    """One kernel, one CTA per row: reads and writes ``row_bytes``, with ``flops`` per element."""
    threads = row_threads(gpu, cols)
    smem_bytes, reduce_instructions = block_reduction(gpu, threads)
    return vector_kernel(
        gpu,
        tasks=rows,
        threads=threads,
        moved_bytes=rows * row_bytes,
        flops=flops * rows * cols,
        xu_ops=rows * reduces,  # the reciprocal of the scale
        converted=1.5 * rows * cols,  # 16 bits to fp32 one at a time, fp32 to 8 bits two at a time
        smem_bytes=rows * smem_bytes * reduces,
        warp_instructions=rows * reduce_instructions * reduces,
        smem_bytes_per_cta=4 * threads / gpu.warp_threads * reduces,
        steps=ceil_div(cols, threads * VECTOR_ELEMENTS) + reduces,
    )
