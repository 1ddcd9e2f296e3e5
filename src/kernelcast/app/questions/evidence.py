"""What was measured, and how well it is forecast."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.forecast.evidence import MeasuredConfiguration
from kernelcast.forecast.learned import WEIGHTS, load
from kernelcast.hardware import gpu as named_gpu
from kernelcast.ops import REGISTRY


def evidence(
    op: str | Sequence[str] = (),
    gpu: str | Sequence[str] = (),
    stack: str | Sequence[str] = (),
    where: str | Sequence[str] = (),
    weights: Path | None = None,
) -> list[MeasuredConfiguration]:
    """Kinds of calls that were measured: of these ops, on these GPUs, by these stacks (none: all), with these words
    (``dtype=fp8``). Each entry has its words, how many calls, the error on those that no fit saw, and ``told()``."""
    ops, gpus, stacks, pairs = (_list(given) for given in (op, gpu, stack, where))
    refuse_unknown("op", ops, REGISTRY)
    places = [named_gpu(name).id for name in gpus]
    entries = all_entries(weights or WEIGHTS)
    refuse_unknown("stack", stacks, sorted({str(entry.configuration["stack"]) for entry in entries}))
    words = [_pair(text, entries) for text in pairs]
    return [
        entry
        for entry in entries
        if (not ops or entry.op in ops)
        and (not places or entry.gpu in places)
        and (not stacks or str(entry.configuration["stack"]) in stacks)
        and all(str(entry.configuration.get(name)) == value for name, value in words)
    ]


@functools.lru_cache(maxsize=4)
def all_entries(folder: Path = WEIGHTS) -> tuple[MeasuredConfiguration, ...]:
    """All kinds of all families, by op, GPU and words."""
    loaded = [load(folder, path.stem) for path in sorted(folder.glob("*.safetensors"))]
    found = [entry for weights in loaded if weights for entry in weights.evidence.entries]
    if not found:
        raise KernelcastError(f"no evidence in {folder}: no FAMILY.safetensors, as `kernelcast fit -o DIR` writes")
    return tuple(
        sorted(found, key=lambda entry: (entry.op, entry.gpu, str(sorted(map(str, entry.configuration.items())))))
    )


def _list(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _pair(text: str, entries: Sequence[MeasuredConfiguration]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise KernelcastError(f"--where {text!r}: give WORD=VALUE, as dtype=fp8")
    refuse_unknown("word", [name], sorted({known for entry in entries for known in entry.configuration}))
    return name, value
