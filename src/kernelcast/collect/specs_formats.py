"""Large matrix products of each number format through PyTorch (cuBLAS, cuBLASLt), on random numbers, and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Launch = Callable[[], Tensor]
# As in campaigns' large products: square, and layers of models.
SHAPES = (
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (4096, 14336, 4096),
    (8192, 8192, 8192),
    (16384, 8192, 4096),
    (8192, 28672, 8192),
    (16384, 16384, 16384),
)
DEVICE = "cuda"
_ROWS = 16  # of a product that are checked


@dataclass(frozen=True)
class Product:
    """One product that is ready to run. ``factors``: what it multiplies, as float32, [m, k] and [n, k], when asked."""

    launch: Launch
    factors: Callable[[], tuple[Tensor, Tensor]]

    def off(self) -> float:
        """Of the first rows: the largest distance from what float32 gives, over the largest entry."""
        a, b = self.factors()
        wanted = a @ b.t()
        got = self.launch()[: len(a)].float()
        return float((got - wanted).abs().max() / wanted.abs().max())


def _plain(dtype: torch.dtype, m: int, n: int, k: int) -> Product:
    a, b = (torch.randn(rows, k, device=DEVICE, dtype=dtype) for rows in (m, n))
    out = torch.empty(m, n, device=DEVICE, dtype=dtype)
    return Product(partial(torch.mm, a, b.t(), out=out), lambda: (a[:_ROWS].float(), b.float()))


def _tf32(m: int, n: int, k: int) -> Product:
    torch.backends.cuda.matmul.allow_tf32 = True
    return _plain(torch.float32, m, n, k)


def _fp8_factors(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(rows, k, device=DEVICE).to(torch.float8_e4m3fn) for rows in (m, n))
    return a, b


def _fp8(m: int, n: int, k: int) -> Product:
    a, b = _fp8_factors(m, n, k)
    one = torch.ones((), device=DEVICE)
    launch = partial(
        torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return Product(launch, lambda: (a[:_ROWS].float(), b.float()))


def _fp8_block(m: int, n: int, k: int) -> Product:
    """A scale for 128 activations and for 128 by 128 weights."""
    a, b = _fp8_factors(m, n, k)
    scale_a = torch.ones(k // 128, m, device=DEVICE).t()
    scale_b = torch.ones(n // 128, k // 128, device=DEVICE).t()
    launch = partial(torch._scaled_mm, a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    return Product(launch, lambda: (a[:_ROWS].float(), b.float()))


def _int8(m: int, n: int, k: int) -> Product:
    a, b = (torch.randint(-127, 128, (rows, k), device=DEVICE, dtype=torch.int8) for rows in (m, n))
    return Product(partial(torch._int_mm, a, b.t()), lambda: (a[:_ROWS].float(), b.float()))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _nvfp4(m: int, n: int, k: int) -> Product:
    """Two numbers a byte, the first in the low half; scales of 1, whose order in memory then says nothing."""
    held = [torch.randint(0, 256, (rows, k // 2), device=DEVICE, dtype=torch.uint8) for rows in (m, n)]
    a, b = (bytes_.view(torch.float4_e2m1fn_x2) for bytes_ in held)
    scale_a, scale_b = (torch.ones(rows * k // 16, device=DEVICE).to(torch.float8_e4m3fn) for rows in (m, n))
    launch = partial(torch._scaled_mm, a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=DEVICE)

    def numbers(packed: Tensor) -> Tensor:
        return table[torch.stack((packed & 15, packed >> 4), dim=-1).long()].view(len(packed), -1)

    return Product(launch, lambda: (numbers(held[0][:_ROWS]), numbers(held[1])))


FORMATS: dict[str, Callable[[int, int, int], Product]] = {
    "bf16": partial(_plain, torch.bfloat16),
    "fp16": partial(_plain, torch.float16),
    "tf32": _tf32,
    "fp8": _fp8,
    "fp8_block": _fp8_block,
    "int8": _int8,
    "nvfp4": _nvfp4,
}
# How far off a product may be: the rounding of its result, and of what it adds up in.
TOLERANCES = {"bf16": 0.02, "fp16": 0.01, "tf32": 0.01, "int8": 1e-4}
FP8_TOLERANCE = 0.03
