"""KernelBench's problems as PyTorch modules: what each computes and on which shapes, for its two sets of shapes.

``kernelbench.toml`` has a table a problem. ``run``: steps on ``x``, one after another. A step that begins with ``nn.``
is a module, ``t = ...`` keeps a value, any other is the next ``x``. ``inputs``: shapes of x, y and z; ``weights``:
shapes of parameters; like the steps, in the sizes of ``old`` (before July 2025), ``new`` (since) or ``both``, which
may have steps of their own (``new_run``). ``define`` has the blocks of networks.
The published times (``public/kernelbench_timings``) are of CUDA events around one call, without gradients, of modules
that were left in training mode.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.toml_folder import read_toml
from kernelcast_lab.data.shared import NotExpressibleError, Row

if TYPE_CHECKING:
    import torch

PROBLEMS = Path(__file__).with_name("kernelbench.toml")
VERSIONS = {"v0.1-shapes (pre 2025-07)": "old", "v0.2/0.3-shapes (HEAD 2026-03)": "new"}  # by ``kb_version``
GPUS = {"Tesla T4": "t4", "NVIDIA L4": "l4", "NVIDIA A100-SXM4-80GB": "a100_sxm", "NVIDIA H100 80GB HBM3": "h100_sxm"}
# (fused as TorchInductor does, replayed from a CUDA graph), by mode without "torch_compile_"
MODES = {
    "torch": (False, False), "cudagraphs": (False, True), "inductor_default": (True, False),
    "inductor_max-autotune": (True, True), "inductor_max-autotune-no-cudagraphs": (True, False),
    "inductor_reduce-overhead": (True, True),
}  # fmt: skip


@functools.cache
def problems() -> Mapping[str, Mapping[str, Any]]:
    """What is known of each problem, by 'level1/1_Square_matrix_multiplication_'."""
    levels = read_toml(PROBLEMS)
    define, known = levels.pop("define"), {}
    for level, names in levels.items():
        for name, each in names.items():
            shapes = dict.fromkeys(("old", "new"), each["both"]) if "both" in each else {}
            known[f"{level}/{name}"] = {"define": define, **each, **shapes}
    return known


def cases() -> Iterator[tuple[str, str]]:
    """Every problem with each version whose shapes are known."""
    return ((name, version) for name, each in problems().items() for version in ("old", "new") if version in each)


def build(problem: str, version: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A problem's module and its inputs, on the meta device."""
    from kernelcast_lab.data.kernelbench_module import Steps, empty

    known = _known(problem, version)
    return Steps(known, version), tuple(empty(shape, known[version]) for shape in known["inputs"])


def _known(problem: str, version: str) -> Mapping[str, Any]:
    if problem not in problems():
        raise unknown("problem of KernelBench", problem, problems())
    known = problems()[problem]
    if version not in known:
        has = " and ".join(repr(name) for name in ("old", "new") if name in known)
        raise KernelcastError(f"shapes {version!r} of {problem} are not known; {PROBLEMS.name} has {has}")
    return known


def kernelbench(row: Row) -> Mapping[str, Any]:
    """A row of the published times as a question."""
    problem = f"{row['level']}/{str(row['problem']).removesuffix('.py')}"
    version, mode = VERSIONS.get(str(row["kb_version"])), str(row["mode"]).removeprefix("torch_compile_")
    if version is None:
        raise NotExpressibleError(f"shapes of KernelBench's {row['kb_version']}")
    try:
        _known(problem, version)
    except KernelcastError:
        raise NotExpressibleError(f"KernelBench's {problem} with {version} shapes") from None
    target = GPUS[row["hardware"]]
    return {"gpu": target, "model": problem, "stack": str(row["mode"]), "release": "2.5", "command": "kernelbench",
            "measured": {"time_s": row["mean_ms"] / 1e3},
            "parameters": {"problem": problem, "version": version, "mode": mode, "gpu": target}}  # fmt: skip
