"""Times steps like those of ``steps.json``: ``python record.py steps.json > again.json``. Needs PyTorch and a GPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HIDDEN, INTER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 4096, 14336, 32, 8, 128, 128256, 4
WARM_UPS, SECONDS = 5, 10.0  # of steps one after another, so that the clock settles


def narrow(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """To 8 bits with one scale of the tensor, and what that scale divides by."""
    scale = torch.finfo(dtype).max / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).to(dtype), scale.reciprocal()


def product(a: torch.Tensor, b: torch.Tensor, fast: bool, a_dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """a (m, k) times the transpose of b (n, k), both row-major."""
    (a8, a_scale), (b8, b_scale) = narrow(a, a_dtype), narrow(b, torch.float8_e4m3fn)
    return torch._scaled_mm(
        a8.contiguous(), b8.contiguous().t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dgrad = product(grad, weight.t(), fast=False, a_dtype=torch.float8_e5m2)
        wgrad = product(grad.t(), x.t(), fast=False, a_dtype=torch.float8_e5m2)
        return dgrad, wgrad


class Linear(nn.Linear):
    fp8 = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fp8:
            return functional.linear(x, self.weight.to(x.dtype))
        return Scaled.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self, fp8: bool, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        query, keys = HEADS * DIM, KV_HEADS * DIM
        sizes = {"q": (HIDDEN, query), "k": (HIDDEN, keys), "v": (HIDDEN, keys), "o": (query, HIDDEN),
                 "gate": (HIDDEN, INTER), "up": (HIDDEN, INTER), "down": (INTER, HIDDEN)}  # fmt: skip
        for name, (k, n) in sizes.items():
            setattr(self, name, Linear(k, n, bias=False))
            getattr(self, name).fp8 = fp8
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))

    def attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (getattr(self, name)(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for name in "qkv")
        out = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o(out.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = (
            lambda y, norm=norm: functional.rms_norm(y, (HIDDEN,), norm.weight.to(y.dtype)) for norm in self.norms
        )
        x = x + self.attention(first(x), cos, sin)
        y = second(x)
        return x + (checkpoint(self.mlp, y, use_reentrant=False) if self.recompute == "mlp" else self.mlp(y))


class Model(nn.Module):
    def __init__(self, fp8: bool, recompute: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fp8, recompute) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(HIDDEN), Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            again = layer.recompute == "full"
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if again else layer(x, cos, sin)
        logits = self.head(functional.rms_norm(x, (HIDDEN,), self.norm.weight.to(x.dtype)))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels)


def timed(step: Callable[[], None]) -> float:
    for _ in range(WARM_UPS):
        step()
    torch.cuda.synchronize()
    times, end = [], time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[len(times) // 2 :])[len(times) // 4]  # median of the second half


def measured(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        weights = torch.float32 if case["precision"] == "bf16" else torch.bfloat16
        model = Model(case["precision"] == "fp8", case["recompute"]).to(weights)
        x = torch.randn(case["micro_batch"], case["seq"], HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(VOCAB, (case["micro_batch"] * case["seq"],))
        angles = torch.outer(torch.arange(case["seq"]), 500000.0 ** -(torch.arange(0, DIM, 2) / DIM)).repeat(1, 2)
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    run = torch.compile(model) if case["mode"] == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        run(x, *tables, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = timed(step)
    return {**case, "seconds": round(seconds, 4), "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())["steps"]
    json.dump([measured(case) for case in cases], sys.stdout, indent=2)


if __name__ == "__main__":
    main()
