"""Training stacks as data (``training/*.toml``): what an implementation fuses, overlaps and keeps, and its host."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelcast.toml_folder import ids_in, read_from

_FOLDER = Path(__file__).parent / "training"


@dataclass(frozen=True, kw_only=True)
class TrainingStack:
    """How a framework runs a transformer's step; ``sources``: where each number is from."""

    id: str
    name: str
    release: str
    joined_projections: bool  # q, k, v as one product; gate and up as one
    fused_norms: bool  # a norm and its gradient are one kernel each; else the kernels of eager PyTorch
    fused_activation: bool  # SwiGLU (and its gradient) in one kernel
    fused_rope: bool
    fused_cross_entropy: bool  # the loss over sharded logits without copies of them
    fused_residual: bool  # dropout, bias and residual in one kernel (torch.compile, jit)
    grouped_gemm: bool  # experts of a rank in one kernel; else one product an expert
    fused_experts: bool  # their activation and the casts around it are in the grouped products
    token_permutation_fused: bool
    fused_gradient_accumulation: bool  # wgrad products add to the fp32 gradient
    zero: int  # that its recipes take: 1, the distributed optimizer, 3, FSDP
    overlap_grad_reduce: bool  # defaults of the recipes that are published
    overlap_param_gather: bool
    attention_backend: str  # cudnn, fa2, fa3; sdpa: as PyTorch chooses
    attention_slowdown: tuple[float, float]  # of its kernels over that backend's: forward, backward
    bucket_parameters: float  # gradients that are sent together, parameters that are gathered together
    interference: float  # share of their speed that kernels lose beside a collective
    skew_s: float  # that ranks wait for the last of them at a collective, where the host launches one by one
    sync_s: float  # that a layer of experts waits for the host to learn how many tokens came to each
    reserved_bytes: float  # CUDA context, libraries, fragments
    nccl_bytes: float  # buffers of communicators, where there are several GPUs
    sources: tuple[tuple[str, str], ...]
    launch_s: float = 0.0  # host time of a kernel where no graph runs, where no ``host`` is named
    step_s: float = 0.0  # host time of a step beyond launches: data, logging, the gradient norm's synchronisation
    host: str = ""  # a measured one (``stacks/hosts``), whose costs are those of PyTorch's eager ops
    linear_views: tuple[float, float] = (0.0, 0.0)  # ops without a kernel of a linear layer: forward, backward
    linear_calls: float = 0.0  # of Python functions, of a linear layer
    parameter_calls: float = 0.0  # the same, of a tensor of parameters in the update
    loss_values: tuple[float, float] = (2.0, 2.0)  # of a fused cross entropy, for each logit: both passes
    gradient_passes: float = 2.0  # over gradients beside the update: their norm; cleared for the next step
    joined_models: tuple[str, ...] = ()  # model types whose q, k and v are one product all the same
    dropout: tuple[tuple[str, str], ...] = ()  # where model types have it: embedding, residual, attention
    saved: tuple[tuple[str, float], ...] = ()  # tensors of its input's size that a module keeps, beside its output
    kernels: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]] = field(default_factory=dict, hash=False)
    # by module and pass: the ops that eager code launches; without them a module is timed by the bytes it moves

    def __post_init__(self) -> None:
        for name in ("attention_slowdown", "linear_views", "joined_models", "loss_values"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "kernels", dict(self.kernels))


def training_stack_ids() -> list[str]:
    return ids_in(_FOLDER)


@functools.cache
def training_stack(name: str) -> TrainingStack:
    return read_from(_FOLDER, TrainingStack, name.lower())
