"""What the host costs an eager run: it launches kernels one by one, and the GPU waits where it is too slow."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from kernelcast.toml_folder import ids_in, read_from

_FOLDER = Path(__file__).parent / "hosts"


@dataclass(frozen=True)
class Host:
    """One file of ``hosts/``: seconds of one thread of Python and PyTorch's dispatcher."""

    id: str
    name: str
    kernel_s: float  # an op of the forward pass that launches a kernel
    view_s: float  # one that does not
    module_s: float  # a call of an nn.Module, beside its ops
    backward_kernel_s: float  # an op of the backward pass, on autograd's thread
    backward_view_s: float
    gap_s: float  # between two kernels of a stream, both launched in time
    graph_gap_s: float  # between two kernels of a CUDA graph
    graph_s: float  # to launch a graph
    faster: float  # share of its time that it may need less, eight times of ten
    slower: float  # and more
    sources: tuple[tuple[str, str], ...]


def host_ids() -> list[str]:
    return ids_in(_FOLDER)


@functools.cache
def host(name: str) -> Host:
    """The host called ``name``."""
    return read_from(_FOLDER, Host, name)
