"""In which formats a step of training keeps its numbers, and what that makes the optimizer do.

pure: weights, gradients and moments in the model's own format, as ``torch.optim`` does to a model that was converted.
mixed: weights and gradients in 16 bits, beside them master weights and moments in fp32, as Megatron's and DeepSpeed's
optimizers for bf16 keep them: 2 + 2 + 4 + 4 + 4 bytes a parameter with AdamW. The step reads the 16-bit gradients,
updates the master weights and writes them back as 16-bit copies.
autocast: weights, gradients and moments in fp32; products inside torch.autocast, which casts each weight once a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelcast.errors import KernelcastError

PRECISIONS = ("pure", "mixed", "autocast")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "adamw-foreach": lambda weights: torch.optim.AdamW(weights, foreach=True),
    "adam": lambda weights: torch.optim.Adam(weights, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3, fused=True),
    "sgd-momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
}
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
_NARROW = (torch.bfloat16, torch.float16)


def check_precision(precision: str, mode: str, weights: list[Any]) -> None:
    """Whether a model can be trained so."""
    if precision not in PRECISIONS:
        raise KernelcastError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    floats = [x for x in weights if x.is_floating_point()]
    if precision == "mixed" and mode != "training":
        raise KernelcastError("precision 'mixed' is of training: master weights are the optimizer's")
    if precision == "mixed" and not any(x.dtype in _NARROW for x in floats):
        raise KernelcastError("precision 'mixed' keeps weights in 16 bits: convert the model, as with .bfloat16()")
    if precision == "autocast" and any(x.dtype in _NARROW for x in floats):
        raise KernelcastError("precision 'autocast' keeps weights in fp32: convert the model with .float()")


class Plain:
    """An optimizer on the weights themselves."""

    def __init__(self, weights: list[Any], make: MakeOptimizer) -> None:
        self.weights, self.optimizer = weights, make(weights)

    def prepare(self) -> None:
        """A first step, which makes the states and is not counted: every later one has them."""
        for x in self.weights:
            x.grad = torch.empty_like(x) if x.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self.optimizer.step()

    def states(self) -> list[Any]:
        return list(self.optimizer.state.values())


class Master(Plain):
    """An optimizer on fp32 copies of the weights."""

    def __init__(self, weights: list[Any], make: MakeOptimizer) -> None:
        self.models = [x for x in weights if x.requires_grad]
        with torch.no_grad():
            self.masters = [torch.nn.Parameter(torch.empty_like(x, dtype=torch.float32)) for x in self.models]
        super().__init__(self.masters, make)

    def step(self) -> None:
        with torch.no_grad():
            used = [(x, master) for x, master in zip(self.models, self.masters, strict=True) if x.grad is not None]
            if not self._fused(used):  # gradients are widened first, as a program on top of any optimizer has to
                wide = [torch.empty_like(master) for _, master in used]
                torch._foreach_copy_(wide, [x.grad for x, _ in used])
                for (_, master), gradient in zip(used, wide, strict=True):
                    master.grad = gradient
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            torch._foreach_copy_([x for x, _ in used], [master for _, master in used])

    def _fused(self, used: list[tuple[Any, Any]]) -> bool:
        """PyTorch's fused kernels on 16-bit gradients, as those of Apex and Transformer Engine read them."""
        group = self.optimizer.param_groups[0]
        states = [self.optimizer.state.get(master, {}) for _, master in used]
        kind = type(self.optimizer)
        if not group.get("fused") or kind not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
            return False
        masters, gradients = [master for _, master in used], [x.grad for x, _ in used]
        common = {"lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": False}
        if kind is torch.optim.SGD:
            moments = [state["momentum_buffer"] for state in states] if group["momentum"] else []
            torch._fused_sgd_(masters, gradients, moments, momentum=group["momentum"], dampening=0.0, nesterov=False,
                              is_first_step=False, **common)  # fmt: skip
            return True
        run = torch._fused_adamw_ if kind is torch.optim.AdamW else torch._fused_adam_
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        run(masters, gradients, first, second, [], steps, beta1=beta1, beta2=beta2, eps=group["eps"], amsgrad=False,
            **common)  # fmt: skip
        return True

    def states(self) -> list[Any]:
        return [*super().states(), *self.masters]


def optimizer_of(weights: list[Any], optimizer: str | MakeOptimizer, precision: str) -> Plain:
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    return Master(weights, make) if precision == "mixed" else Plain(weights, make)
