"""Which kernel a call is taken to run: what ``stacks/kernels.toml`` says, checked against the ops that there are."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.ops.base import REGISTRY, STACKS, Words, kernel_class, parameters_of
from kernelcast.ops.dtypes import DTYPES
from kernelcast.stacks.choices import FILE, Choice, Choices, read_choices

PHASES = ("prefill", "decode", "mixed")
HOW = {
    "named": "the file names it for this GPU",
    "inherited": "the file names it for the instruction path, of other GPUs",
    "measured": "what was measured of this kind, not what the file says",
    "asked": "the call says so",
    "unknown": "the file says nothing",
}


@dataclass(frozen=True)
class Runs:
    """The kernel that a call is taken to run, and how that is known."""

    family: str | None
    backend: str | None
    path: str  # instruction path
    path_inherited: bool  # by a rule: nobody knows the path of the GPU's compute capability
    how: str  # of HOW
    tiles: str | None  # what gives its tiles, in kernels/
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        """'deepgemm by wgmma (the file names it for this GPU)'."""
        path = f"{self.path}, inherited" if self.path_inherited else self.path
        return f"{self.family or 'unknown'} by {path} ({HOW[self.how]})"

    def told(self) -> dict[str, Any]:
        return asdict(self)


@functools.cache
def choices(path: Path = FILE) -> Choices:
    """The file, where all that it names exists."""
    known = {"stack": STACKS, "op": REGISTRY, "dtype": DTYPES, "kv_dtype": DTYPES, "phase": PHASES}
    found = read_choices(path, known)
    for entry in found.entries.values():
        try:
            _check(entry)
        except KernelcastError as error:
            raise KernelcastError(f"{path.name}: {entry.stack} {entry.op}: {error}") from None
    return found


def _check(entry: Choice) -> None:
    """An entry against its op: the formats and the backends that it has, and the rule that gives its tiles."""
    kernel = kernel_class(entry.op)
    for name in (entry.dtype, entry.served_dtype or "*"):
        if name not in ("*", *kernel.dtypes):
            raise unknown("dtype", name, kernel.dtypes)
    words = parameters_of(kernel)["backend"].options if "backend" in parameters_of(kernel) else ()
    for backend in (entry.backend, entry.served_backend):
        if backend is not None and backend not in words:
            raise unknown("backend", backend, words)
    if entry.tiles:
        module, _, name = entry.tiles.partition(".")
        try:
            getattr(importlib.import_module(f"kernelcast.ops.{module}"), name)
        except (ImportError, AttributeError):
            raise KernelcastError(f"tiles = {entry.tiles!r} is nothing in kernels/") from None


def which(
    stack: str | None, gpu: Gpu, op: str, dtype: str, kv_dtype: str | None = None, own: bool = False,
    phase: str | None = None,
) -> Choice | None:  # fmt: skip
    """What the file says. ``own``: of this stack, not of any."""
    return choices().find(stack, gpu, op, dtype, kv_dtype, own, phase)


def stack_backend(op: str, words: Words, gpu: Gpu) -> str | None:
    """The backend that the stack of a call takes; None where the file has no word for it."""
    if words.get("stack") is None:
        return None
    told = str(words["dtype"]), words.get("kv_dtype")
    found = which(words["stack"], gpu, op, *told, own=True, phase=words.get("phase"))
    return found.backend if found else None


def default_backend(op: str, gpu: Gpu, dtype: str, stack: str | None = None) -> str:
    """What a call runs where nobody says: of the stack, else of most."""
    found = which(stack, gpu, op, dtype)
    if found is None or found.backend is None:
        raise KernelcastError(
            f"{FILE.name} has no backend of {op} on {gpu.id}: an entry of any stack and place is missing"
        )
    return found.backend


def served_experts(stack: str, gpu: Gpu, dtype: str) -> tuple[str, str | None]:
    """Format and backend of the measured kernel that a served model's experts run as."""
    found = which(stack, gpu, "moe", dtype, own=True)
    if found is None:
        return dtype, None
    return found.served_dtype or dtype, found.served_backend or found.backend


def runs_of(op: str, words: Words, gpu: Gpu, asked: str | None, measured: tuple[str, ...] = ()) -> Runs:
    """Of a call in these words, what nobody said filled in; ``asked``: the backend that the call itself says;
    ``measured``: the sources of the evidence that it rests on."""
    table, backend = choices(), words.get("backend")
    told = str(words["dtype"]), words.get("kv_dtype")
    found = which(words.get("stack"), gpu, op, *told, phase=words.get("phase"))
    family = table.backends.get(backend or "")
    if backend and asked is None and family and not table.can_run(family, gpu):
        family = backend = None  # answered as a kernel of other GPUs, which does not run here
    if family is None or (found is not None and backend == found.backend):
        if found is None:
            return Runs(None, backend, gpu.instruction_path, gpu.path_inherited, "unknown", None, ())
        how = "asked" if asked else "inherited" if table.inherited(found, gpu) else "named"
        return _told(table, found, gpu, how, found.sources)
    like = Choice(stack="*", op=op, family=family, backend=backend, sources=(), tiles=found.tiles if found else "")
    return _told(table, like, gpu, *(("asked", ()) if asked else ("measured", measured)))


def _told(table: Choices, found: Choice, gpu: Gpu, how: str, sources: tuple[str, ...]) -> Runs:
    path = table.path(found, gpu)
    return Runs(found.family, found.backend, path, gpu.path_inherited, how, found.tiles or None, sources)


def listed(gpu: Gpu | None, stacks: Sequence[str] = (), ops: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The entries of these stacks and ops, all where none is named. Of a GPU: those that hold there, also what is of
    any stack where these have none of their own."""
    table = choices()
    entries = [one for one in table.entries.values() if not ops or one.op in ops]
    if gpu is None:
        return [asdict(one) for one in entries if not stacks or one.stack in stacks]
    hold: dict[Choice, None] = {}
    for stack in stacks or dict.fromkeys(one.stack for one in entries):
        for one in entries:
            if one.stack in (stack, "*"):
                found = table.find(stack, gpu, one.op, one.dtype, one.kv_dtype, phase=one.phase)
                hold |= {found: None} if found and found.key[:-1] == one.key[:-1] else {}
    how = {one: "inherited" if table.inherited(one, gpu) else "named" for one in hold}
    return [{**asdict(one), "path": table.path(one, gpu), "how": how[one]} for one in hold]
