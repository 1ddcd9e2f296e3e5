"""Serving stacks as data: what each fuses, which kernels it takes on which GPU, and what its host costs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast.hardware import Gpu
from kernelcast.toml_folder import ids_in, read_from

_FOLDER = Path(__file__).parent / "stacks"


@dataclass(frozen=True)
class Stack:
    """One file of ``stacks/``. Host times in seconds, measured or estimated as the file says."""

    id: str
    name: str
    kernels: str  # whose measured layers (gemm, attention, moe, all-reduce) it runs
    mla_kernels: str  # whose latent attention
    small_ops: str  # whose norms, activations and rotations
    joined_projections: bool  # q, k, v as one product; gate and up as one
    fused_residual: bool  # the residual is added inside the norm
    fused_activation: bool  # activation times the other half in one kernel
    fused_quantisation: bool  # activations leave norms and activation functions in the format of the next product
    graphs: bool  # decode steps replay a CUDA graph
    mixed_steps: bool  # prompts are read in the same steps as others decode; else before them
    head_rows: str  # rows of the head in a prefill: "last" of each sequence, or "all"
    step_s: float  # host time of a decode step that the GPU waits for: scheduling, inputs, sampled tokens
    prefill_s: float  # the same of a prefill
    request_s: float  # from a request's arrival to its prefill where nothing else runs: tokens, queues, processes
    launch_s: float  # host time of one kernel where no graph runs
    gap_s: float  # between two kernels of a graph, beyond what a kernel's own time has
    reserved_bytes: float  # context, libraries, graphs
    used_share: float  # of the memory, that it fills at most
    page_size: int
    attention: tuple[tuple[str, str], ...]  # compute capability (or its beginning): backend
    mla: tuple[tuple[str, str], ...]
    moe: tuple[tuple[str, str], ...]  # compute capability or number format: backend
    sources: tuple[tuple[str, str], ...]
    unfused: tuple[tuple[str, Any], ...] = ()  # ops that run as several kernels: each a table of its op and sizes

    def parts(self, op: str) -> Sequence[Mapping[str, Any]]:
        """The kernels that ``op`` is run as; none where it is one kernel of its own."""
        return dict(self.unfused).get(op, ())

    def attention_backend(self, gpu: Gpu) -> str | None:
        return _longest(self.attention, gpu.compute_capability)

    def mla_backend(self, gpu: Gpu) -> str | None:
        return _longest(self.mla, gpu.compute_capability)

    def moe_backend(self, gpu: Gpu, dtype: str) -> str | None:
        """By number format and capability together, then by format, then by capability."""
        table = dict(self.moe)
        for key in (f"{dtype} {gpu.compute_capability.split('.')[0]}", dtype):
            if key in table:
                return table[key]
        return _longest(self.moe, gpu.compute_capability)


def _longest(table: tuple[tuple[str, str], ...], capability: str) -> str | None:
    """The entry whose name the compute capability begins with; of several the longest."""
    fits = [(len(name), backend) for name, backend in table if capability.startswith(name)]
    return max(fits)[1] if fits else None


def stack_ids() -> list[str]:
    return ids_in(_FOLDER)


@functools.cache
def stack(name: str) -> Stack:
    """The stack called ``name``."""
    return read_from(_FOLDER, Stack, name)
