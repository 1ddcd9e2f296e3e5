"""Traces as torch.profiler writes them, made by hand: ops with their ATen arguments, and the kernels they launch."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
BF16 = "c10::BFloat16"


def op(
    number: int, name: str, dims: list[Any], types: list[str], *, at_us: float = 0.0, lasts_us: float = 10.0,
    strides: list[Any] | None = None, values: list[str] | None = None,
) -> Event:  # fmt: skip
    """An op on the host. Strides are contiguous where none are given."""
    given = strides or [_contiguous(shape) if kind not in ("Scalar", "ScalarList", "") else [] for shape, kind in
                        zip(dims, types, strict=True)]  # fmt: skip
    args = {"External id": number, "Input Dims": dims, "Input type": types, "Input Strides": given,
            "Concrete Inputs": values or [""] * len(dims)}  # fmt: skip
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": at_us, "dur": lasts_us, "args": args}


def _contiguous(shape: list[int]) -> list[int]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return steps[::-1]


def kernel(
    number: int | None, name: str, time_us: float, *, at_us: float = 0.0, grid: tuple[int, int, int] = (132, 1, 1),
    block: tuple[int, int, int] = (128, 1, 1), registers: int = 32, smem: int = 0, cat: str = "kernel",
) -> Event:  # fmt: skip
    args: Event = {"stream": 7, "device": 0, "correlation": number}
    if number is not None:
        args["External id"] = number
    if cat == "kernel":
        args |= {"grid": list(grid), "block": list(block), "registers per thread": registers, "shared memory": smem}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": at_us, "dur": time_us, "args": args}


def trace(*events: Event, gpu: str = "NVIDIA H200") -> dict[str, Any]:
    return {"deviceProperties": [{"id": 0, "name": gpu}], "traceEvents": list(events)}


def linear(number: int, m: int, n: int, k: int, *, at_us: float = 0.0) -> Event:
    """A Linear's product: the weight lies [n, k]."""
    return op(number, "aten::mm", [[m, k], [k, n]], [BF16, BF16], strides=[[k, 1], [1, k]], at_us=at_us)


def wave_plus_tile() -> dict[str, Any]:
    """7 x 19 = 133 tiles of 256x128 on 132 SMs, beside 132 of them, by the kernel and the time of a whole wave that the
    recorded product of 1536x2816x8192 took on an H200 (85.8 us). cuBLAS itself takes other tiles at this size."""
    name, facts = (
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        {"block": (384, 1, 1), "registers": 168, "smem": 213188},
    )
    return trace(
        linear(1, 1536, 2816, 8192),
        kernel(1, name, 85.8, grid=(2, 66, 1), **facts),  # type: ignore[arg-type]
        linear(2, 2432, 1792, 8192, at_us=20),
        kernel(2, name, 2 * 85.8, at_us=100, grid=(2, 66, 1), **facts),  # type: ignore[arg-type]
    )
