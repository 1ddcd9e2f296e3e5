"""Steps of a serving engine that `kernelcast collect --engine` timed one by one: a file of JSON lines.

The first line says what ran (``FILE_TYPE``); each other is a step of some composition, or the kernels of one.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.files import read_text
from kernelcast.models.architecture import Architecture

FILE_TYPE = "kernelcast engine steps"
UNFINISHED = ".progress.jsonl"  # how the name of a file ends while its steps are measured
# How a step was timed: one of many alike, which only decode or have a prompt each; ``alone``: in an idle engine
GROUPS = {"decode": "decode", "mixed": "mixed", "alone": "prompts alone"}
KERNELS = "kernels"
ENGINES = ("vllm",)
_NEEDED = ("model", "gpu", "engine", "release")
_COUNTS = ("decodes", "prompts", "prompt_tokens", "repeats")
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")
_AS_ACTIVATIONS = ("auto", "bfloat16", "float16", "half", "None")  # formats of a KV cache


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What a step computes: ``decodes`` sequences of ``context`` tokens each in the KV cache, and ``prompts`` with
    ``prompt_tokens`` together after ``past`` ones."""

    decodes: int
    context: float
    prompts: int = 0
    prompt_tokens: int = 0
    past: float = 0.0

    @property
    def text(self) -> str:
        """'64 x 1,024 + 512': sequences by their context, and tokens of a prompt."""
        prompts = f"{self.prompts} x " if self.prompts > 1 else ""
        parts = [f"{self.decodes:,} x {self.context:,.0f}"] if self.decodes else []
        parts += [f"{prompts}{self.prompt_tokens // self.prompts:,}"] if self.prompts else []
        return " + ".join(parts)


@dataclass(frozen=True, kw_only=True)
class MeasuredStep(Composition):
    """A step, the mean of ``repeats`` alike. ``spread``: half the distance of their quartiles, as a share. ``gpu_s``:
    from its first to its last kernel; None: not known."""

    step_type: str
    step_s: float
    spread: float
    repeats: int
    host_s: float | None = None  # of the calls that launch it
    gpu_s: float | None = None

    @property
    def group(self) -> str:
        return GROUPS[self.step_type]


@dataclass(frozen=True, kw_only=True)
class ProfiledStep(Composition):
    """Events of a profiler in a step: how often each, and seconds; kernels, copies, and calls of the CUDA runtime."""

    events: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class StepTable:
    """The content of a file. ``engine``: what its first line says."""

    path: Path
    engine: Mapping[str, Any]
    steps: tuple[MeasuredStep, ...]
    profiled: tuple[ProfiledStep, ...]

    @property
    def stack(self) -> str:
        """The engine's release, as ``kernelcast.stacks`` names it; without what follows its numbers."""
        release = _RELEASE.match(str(self.engine["release"]))
        if release is None:
            raise KernelcastError(f"{self.path}: the release of the engine, {self.engine['release']!r}, is no number")
        return f"{self.engine['engine']}=={release[1]}"

    def count(self, name: str) -> int | None:
        """A whole number of the first line; None: it has none."""
        value = self.engine.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def kv_dtype(self) -> str | None:
        name = str(self.engine.get("kv_cache_dtype", "auto"))
        if name.startswith("fp8"):
            return "fp8"
        if name not in _AS_ACTIVATIONS:
            raise KernelcastError(f"{self.path}: a KV cache in {name!r} is not known; give `kv_dtype`")
        return None

    def dtype(self, model: Architecture) -> str | None:
        """The weights' format where the engine did not run them as the checkpoint stores them; None: it did."""
        method = self.engine.get("quantization")
        if method is None:
            if str(self.engine.get("dtype")).rpartition(".")[2] in ("float16", "half"):
                return "fp16"
            return "bf16" if model.quantization else None
        if model.quantization is not None:
            return None
        if method == "fp8":
            return "fp8"
        raise KernelcastError(
            f"{self.path}: the engine ran weights of {method!r}, which the config of {model.name} does not say: give "
            "`dtype`, or the checkpoint's own config.json as `model`"
        )

    @property
    def graph_mode(self) -> str | None:
        """vLLM's cudagraph_mode: NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE; None: not known."""
        mode = self.engine.get("cudagraph_mode")
        return None if mode is None else str(mode).rpartition(".")[2].upper()

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        sizes = self.engine.get("cudagraph_capture_sizes") or ()
        return tuple(sorted(size for size in sizes if isinstance(size, int) and size > 0))

    @property
    def kv_tokens(self) -> int | None:
        """That the engine's KV cache has room for."""
        if tokens := self.count("kv_tokens"):
            return tokens
        blocks, size = self.count("kv_blocks"), self.count("block_size")
        return blocks * size if blocks and size else None


def is_steps(path: Path) -> bool:
    """Whether a file begins as one of steps does."""
    if not path.is_file():
        return False
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            first = json.loads(file.readline(1 << 20))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and first.get("kind") == FILE_TYPE


def read_steps(path: Path) -> StepTable:
    """All steps of a file; refuses one that is not whole."""
    if path.name.endswith(UNFINISHED):
        whole = path.name.removesuffix(UNFINISHED) + ".jsonl"
        raise KernelcastError(
            f"{path} is of a run that was interrupted: the same `kernelcast collect --engine vllm … -o {whole}` goes on"
            " with it"
        )
    try:
        lines = read_text(path).splitlines()
    except FileNotFoundError:
        raise KernelcastError(f"no file {path}") from None
    except UnicodeDecodeError:
        raise KernelcastError(f"{path} is not text: steps are lines of JSON") from None
    records = list(_records(path, lines))
    engine = records[0] if records else {}
    if engine.get("kind") != FILE_TYPE:
        raise KernelcastError(f'{path} has no steps of an engine: "kind" of its first line is not {FILE_TYPE!r}')
    missing = [name for name in _NEEDED if not isinstance(engine.get(name), str)]
    if missing:
        raise KernelcastError(f"{path}: the first line does not say its {', '.join(missing)}")
    if engine["engine"] not in ENGINES:
        raise KernelcastError(f"{path}: steps of the engine {engine['engine']!r}; known: {', '.join(ENGINES)}")
    steps, profiled = [], []
    for number, record in enumerate(records[1:], 2):
        where = f"{path}: line {number}"
        if record.get("kind") == KERNELS:
            profiled.append(_profiled(where, record))
        else:
            steps.append(_measured(where, record))
    if not steps:
        raise KernelcastError(f"{path} has no step: the run ended before the first one")
    return StepTable(path, MappingProxyType(engine), tuple(steps), tuple(profiled))


def _records(path: Path, lines: list[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise KernelcastError(f"{path}: line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise KernelcastError(f"{path}: line {number} is not a step but {line[:40]!r}")
        yield record


def _composition(where: str, record: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"context": _number(where, record, "context"), "past": _number(where, record, "past")}
    for name in _COUNTS:
        values[name] = _number(where, record, name)
        if values[name] % 1:
            raise KernelcastError(f"{where}: {name} is a whole number, not {values[name]}")
        values[name] = int(values[name])
    if not values["decodes"] and not values["prompts"]:
        raise KernelcastError(f"{where}: a step decodes sequences or prefills prompts; this has neither")
    if bool(values["prompts"]) != bool(values["prompt_tokens"]) or values["prompt_tokens"] < values["prompts"]:
        raise KernelcastError(
            f"{where}: {values['prompts']} prompts do not have {values['prompt_tokens']} prompt_tokens"
        )
    if not values["repeats"]:
        raise KernelcastError(f"{where}: repeats is 1 or more, not 0")
    return values


def _number(where: str, record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise KernelcastError(f"{where}: {name} is a number of 0 or more, not {value!r}")
    return value


def _measured(where: str, record: Mapping[str, Any]) -> MeasuredStep:
    kind = record.get("kind")
    if kind not in GROUPS:
        raise KernelcastError(f"{where}: unknown kind {kind!r} of a step; known: {', '.join((*GROUPS, KERNELS))}")
    step_us = _number(where, record, "step_us")
    if not step_us:
        raise KernelcastError(f"{where}: step_us is above 0")
    others: dict[str, Any] = {f"{name}_s": _number(where, record, f"{name}_us") / 1e6 for name in ("host", "gpu")
              if record.get(f"{name}_us") is not None}  # fmt: skip
    return MeasuredStep(**_composition(where, record), step_type=kind, step_s=step_us / 1e6,
                        spread=_number(where, record, "spread"), **others)  # fmt: skip


def _profiled(where: str, record: Mapping[str, Any]) -> ProfiledStep:
    values = _composition(where, record)
    repeats, events = values.pop("repeats"), record.get(KERNELS)
    try:
        each = {name: (count / repeats, micros / 1e6 / repeats) for name, (count, micros) in events.items()}  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        raise KernelcastError(f"{where}: kernels are names with a count and microseconds each") from None
    return ProfiledStep(**values, events=MappingProxyType(each))
