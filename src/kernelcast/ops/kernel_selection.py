"""Kernel selection: the kernel that a call is taken to run, from ``stacks/kernels.toml`` checked against the ops."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.ops.base import REGISTRY, STACKS, Configuration, kernel_class, parameters_of
from kernelcast.ops.dtypes import DTYPES
from kernelcast.stacks.kernel_choices import FILE, KernelChoice, KernelChoices, read_kernel_choices

PHASES = ("prefill", "decode", "mixed")
BASIS = {
    "named": "the file names it for this GPU",
    "inherited": "the file names it for the instruction path, of other GPUs",
    "measured": "what was measured of this configuration, not what the file says",
    "asked": "the call says so",
    "unknown": "the file says nothing",
}


@dataclass(frozen=True)
class SelectedKernel:
    """The kernel that a call is taken to run, and on what basis."""

    family: str | None
    backend: str | None
    path: str  # instruction path
    path_inherited: bool  # by a rule: the path of the compute capability is not known
    how: str  # of BASIS
    tiles: str | None  # what gives its tiles, in ops/
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        """'deepgemm by wgmma (the file names it for this GPU)'."""
        path = f"{self.path}, inherited" if self.path_inherited else self.path
        return f"{self.family or 'unknown'} by {path} ({BASIS[self.how]})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def kernel_choices(path: Path = FILE) -> KernelChoices:
    """The file, where all that it names exists. A test checks the entries of the one that ships against their ops:
    here that would import every op."""
    known = {"stack": STACKS, "dtype": DTYPES, "kv_dtype": DTYPES, "phase": PHASES}
    table = read_kernel_choices(path, known if path == FILE else {**known, "op": REGISTRY})
    for entry in table.entries.values() if path != FILE else ():
        try:
            _check(entry)
        except KernelcastError as error:
            raise KernelcastError(f"{path.name}: {entry.stack} {entry.op}: {error}") from None
    return table


def _check(entry: KernelChoice) -> None:
    """An entry against its op: dtypes, backends, and the function that gives its tiles."""
    kernel = kernel_class(entry.op)
    for name in (entry.dtype, entry.served_dtype or "*"):
        if name not in ("*", *kernel.dtypes):
            raise unknown("dtype", name, kernel.dtypes)
    options = parameters_of(kernel)["backend"].options if "backend" in parameters_of(kernel) else ()
    for backend in (entry.backend, *entry.served_backends):
        if backend is not None and backend not in options:
            raise unknown("backend", backend, options)
    if entry.tiles:
        module, _, name = entry.tiles.partition(".")
        try:
            getattr(importlib.import_module(f"kernelcast.ops.{module}"), name)
        except (ImportError, AttributeError):
            raise KernelcastError(f"tiles = {entry.tiles!r} is nothing in ops/") from None


def kernel_choice(
    stack: str | None, gpu: Gpu, op: str, dtype: str, kv_dtype: str | None = None, exact_stack: bool = False,
    phase: str | None = None,
) -> KernelChoice | None:  # fmt: skip
    """The file's entry for a call. ``exact_stack``: only an entry of this stack, not one of any stack."""
    return kernel_choices().find(stack, gpu, op, dtype, kv_dtype, exact_stack, phase)


def stack_backend(op: str, configuration: Configuration, gpu: Gpu) -> str | None:
    """The backend that the stack of a call takes; None where the file does not say."""
    stack, dtype = configuration.get("stack"), str(configuration["dtype"])
    if stack is None:
        return None
    kv_dtype, phase = configuration.get("kv_dtype"), configuration.get("phase")
    entry = kernel_choice(stack, gpu, op, dtype, kv_dtype, exact_stack=True, phase=phase)
    return entry.backend if entry else None


def default_backend(op: str, gpu: Gpu, dtype: str, stack: str | None = None) -> str:
    """The backend of a call that names none: the stack's, else the one that most stacks take."""
    entry = kernel_choice(stack, gpu, op, dtype)
    if entry is None or entry.backend is None:
        raise KernelcastError(
            f"{FILE.name} has no backend of {op} on {gpu.id}: an entry of any stack and GPU is missing"
        )
    return entry.backend


def served_experts(stack: str, gpu: Gpu, dtype: str, requested: str | None = None) -> tuple[str, str | None]:
    """Format and backend of the measured kernel that a served model's experts run as. ``requested``: the backend that
    the engine is told to take, which runs in the format given unless the engine serves another one by it."""
    entry = kernel_choice(stack, gpu, "moe", dtype, exact_stack=True)
    if entry is None:
        return dtype, requested
    backends = entry.served_backends or (entry.backend,)
    if requested is None or requested in backends:
        return entry.served_dtype or dtype, requested or backends[0]
    return dtype, requested


def selected_kernel(
    op: str, configuration: Configuration, gpu: Gpu, requested: str | None, measured: tuple[str, ...] = ()
) -> SelectedKernel:
    """The kernel of a call of this configuration, defaults filled in. ``requested``: the backend that the call itself
    names; ``measured``: sources of its evidence."""
    table, backend, dtype = kernel_choices(), configuration.get("backend"), str(configuration["dtype"])
    entry = kernel_choice(
        configuration.get("stack"), gpu, op, dtype, configuration.get("kv_dtype"), phase=configuration.get("phase")
    )
    family = table.backends.get(backend or "")
    if backend and requested is None and family and not table.can_run(family, gpu):
        family = backend = None  # the evidence is of a kernel of other GPUs, which does not run here
    if family is None or (entry is not None and backend == entry.backend):
        if entry is None:
            return SelectedKernel(None, backend, gpu.instruction_path, gpu.path_inherited, "unknown", None, ())
        choice, how = entry, "inherited" if table.inherited(entry, gpu) else "named"
    else:
        tiles = entry.tiles if entry else ""
        choice = KernelChoice(
            stack="*", op=op, family=family, backend=backend, sources=() if requested else measured, tiles=tiles
        )
        how = "measured"
    return SelectedKernel(
        family=choice.family,
        backend=choice.backend,
        path=table.path(choice, gpu),
        path_inherited=gpu.path_inherited,
        how="asked" if requested else how,
        tiles=choice.tiles or None,
        sources=choice.sources,
    )


def kernel_choice_rows(gpu: Gpu | None, stacks: Sequence[str] = (), ops: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The entries of these stacks and ops (default: all). For a GPU: those that hold there, with entries of any stack
    where these stacks have none."""
    table = kernel_choices()
    entries = [entry for entry in table.entries.values() if not ops or entry.op in ops]
    if gpu is None:
        return [asdict(entry) for entry in entries if not stacks or entry.stack in stacks]
    hold: dict[KernelChoice, None] = {}
    for stack in stacks or dict.fromkeys(entry.stack for entry in entries):
        for entry in entries:
            if entry.stack in (stack, "*"):
                match = table.find(stack, gpu, entry.op, entry.dtype, entry.kv_dtype, phase=entry.phase)
                hold |= {match: None} if match and match.key[:-1] == entry.key[:-1] else {}
    how = {entry: "inherited" if table.inherited(entry, gpu) else "named" for entry in hold}
    return [{**asdict(entry), "path": table.path(entry, gpu), "how": how[entry]} for entry in hold]
