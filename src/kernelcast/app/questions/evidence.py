"""What was measured, and how well it is forecast."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from kernelcast.app.questions.parameters import Question, option
from kernelcast.app.questions.shared import WeightsFolder, gpu_names, op_names, stack_names
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.forecast.end_to_end import ERRORS_BY, FILE, EndToEnd, end_to_end
from kernelcast.forecast.evidence import MeasuredConfiguration
from kernelcast.forecast.learned import WEIGHTS, load
from kernelcast.hardware import Gpu, gpu_ids
from kernelcast.hardware import gpu as named_gpu
from kernelcast.ops import kernel_class

GROUPS = ("kind", "op", "gpu", "stack")
_MOST_LINES = 40


@dataclass(frozen=True)
class EvidenceQuestion(Question):
    """Configurations that were measured: of these ops, on these GPUs, by these stacks (none: all)."""

    command: ClassVar[str] = "evidence"

    op: Annotated[list[str], option(help="only this op; may be repeated", values=op_names)] = field(
        default_factory=list
    )
    gpu: Annotated[list[str], option(metavar="ID", help="only this GPU; may be repeated", values=gpu_names)] = field(
        default_factory=list
    )
    stack: Annotated[list[str], option(help="only this stack; may be repeated", values=stack_names)] = field(
        default_factory=list
    )
    where: Annotated[
        list[str],
        option(metavar="NAME=VALUE", help="only configurations with this value (dtype=fp8); may be repeated"),
    ] = field(default_factory=list)
    by: Annotated[str | None, option(metavar="|".join(GROUPS), help="a line for each; default: as fits")] = None
    runs: Annotated[bool, option(help="instead: which kernel runs, by stack, op and format, and what was measured")] = (
        False
    )
    published: Annotated[
        bool,
        option(
            help=f"instead: errors of whole answers on published results and live runs (--by {'|'.join(ERRORS_BY)})"
        ),
    ] = False
    weights: WeightsFolder = None

    def answer(self) -> list[MeasuredConfiguration]:
        refuse_unknown("`by`", [self.by] if self.by else [], GROUPS)
        return evidence(self.op, self.gpu, self.stack, self.where, self.weights)

    def why_none(self) -> str:
        """Why no configuration fits: what of it was never measured, and what was."""
        entries = all_entries(self.weights or WEIGHTS)
        for name in self.gpu:
            target = named_gpu(name)
            if not any(entry.gpu == target.id for entry in entries):
                return f"nothing was measured on {target.name} ({target.id}): {_measured_kin(target, entries)}"
        given = {name: value for name in ("op", "gpu", "stack", "where") if (value := getattr(self, name))}
        fitting = {name: len(evidence(**{**given, name: ()}, weights=self.weights)) for name in given}
        without = ", ".join(f"{count:,} without {name}" for name, count in fitting.items())
        return f"no measured configuration fits all that is given ({without})"

    def published_errors(self) -> tuple[EndToEnd, str]:
        """How whole answers compare with what was measured end to end, and by what they are asked for."""
        given = [f"`{name}`" for name in ("op", "gpu", "stack", "where", "runs") if getattr(self, name)]
        if given:
            raise KernelcastError(f"published results are listed whole: leave out {', '.join(given)}")
        refuse_unknown("`by`", [self.by] if self.by else [], ERRORS_BY)
        return EndToEnd.read(self.weights / FILE.name) if self.weights else end_to_end(), self.by or ERRORS_BY[0]

    def group(self, entries: Sequence[MeasuredConfiguration]) -> str:
        """What a line of the table stands for."""
        return self.by or ("kind" if len(entries) <= _MOST_LINES else "op" if not self.op else "gpu")


def evidence(
    op: str | Sequence[str] = (),
    gpu: str | Sequence[str] = (),
    stack: str | Sequence[str] = (),
    where: str | Sequence[str] = (),
    weights: Path | None = None,
) -> list[MeasuredConfiguration]:
    """Configurations that were measured: of these ops, on these GPUs, by these stacks (none: all), with these values
    (``dtype=fp8``). Each entry has its configuration, how many calls, the held-out error, and ``to_dict()``."""
    ops, gpus, stacks, pairs = (_list(given) for given in (op, gpu, stack, where))
    for name in ops:
        kernel_class(name)  # refuses an unknown one
    gpu_ids = [named_gpu(name).id for name in gpus]
    entries = all_entries(weights or WEIGHTS)
    refuse_unknown("stack", stacks, sorted({str(entry.configuration["stack"]) for entry in entries}))
    values = [_pair(text, entries) for text in pairs]
    return [
        entry
        for entry in entries
        if (not ops or entry.op in ops)
        and (not gpu_ids or entry.gpu in gpu_ids)
        and (not stacks or str(entry.configuration["stack"]) in stacks)
        and all(str(entry.configuration.get(name)) == value for name, value in values)
    ]


@functools.lru_cache(maxsize=4)
def all_entries(folder: Path = WEIGHTS) -> tuple[MeasuredConfiguration, ...]:
    """All configurations of all families, by op and GPU."""
    loaded = [load(folder, path.stem) for path in sorted(folder.glob("*.safetensors"))]
    entries = [entry for weights in loaded if weights for entry in weights.evidence.entries]
    if not entries:
        raise KernelcastError(f"no evidence in {folder}: no FAMILY.safetensors, as `kernelcast fit -o DIR` writes")
    return tuple(
        sorted(entries, key=lambda entry: (entry.op, entry.gpu, str(sorted(map(str, entry.configuration.items())))))
    )


def _measured_kin(target: Gpu, entries: Sequence[MeasuredConfiguration]) -> str:
    """What forecasts for a GPU that nobody measured rest on."""
    measured = [named_gpu(name) for name in dict.fromkeys(entry.gpu for entry in entries) if name in gpu_ids()]
    for what, field_name in (("compute capability", "compute_capability"), ("matrix instruction", "instruction_path")):
        value = getattr(target, field_name)
        if kin := sorted(gpu.id for gpu in measured if getattr(gpu, field_name) == value):
            return f"forecasts rest on the measured GPUs nearest to it; of its {what}, {value}: {', '.join(kin)}"
    return "forecasts rest on physics and on what other GPUs sustain, with a wide interval"


def _list(given: str | Sequence[str]) -> list[str]:
    names = [given] if isinstance(given, str) or not isinstance(given, Sequence) else list(given)
    for name in names:
        if not isinstance(name, str):
            raise KernelcastError(f"evidence() takes names, or lists of names, not {name!r}")
    return names


def _pair(text: str, entries: Sequence[MeasuredConfiguration]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise KernelcastError(f"`where` {text!r}: give NAME=VALUE, as dtype=fp8")
    refuse_unknown("name", [name], sorted({known for entry in entries for known in entry.configuration}))
    return name, value
