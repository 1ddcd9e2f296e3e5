"""Static batches from prompt to last token: prefill, then decode steps until every request has its output.

Decode steps differ only in how much attention reads, which grows evenly: a few steps are predicted and the rest lie on
lines between them. Many batches are one question: those of one deployment are columns, and every different kernel call
of a GPU is predicted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError
from kernelcast.hardware import Gpu
from kernelcast.networks.forward import Deployment
from kernelcast.predict import DEFAULT, Conditions
from kernelcast.serving.answers import Answers
from kernelcast.serving.result import Inference
from kernelcast.serving.workload import Workload
from kernelcast.timeline.power import capped, under_cap
from kernelcast.times import Gathered, Times

_PASSES = 1 << 17  # that are laid out at a time, which bounds the memory of many cases
_CASES = 512  # of one deployment that are columns of one another

Cases = Sequence[tuple[Deployment, Workload]]


def infer(deployment: Deployment, workload: Workload, conditions: Conditions = DEFAULT) -> Inference:
    """Predict one batch."""
    return infer_many([(deployment, workload)], conditions)[0]


def infer_many(
    cases: Cases, conditions: Conditions = DEFAULT, *, skip: Callable[[int, KernelcastError], None] | None = None
) -> list[Inference]:
    """Predict many batches; a kernel call that several share is computed once. ``skip`` is told of each case that is
    refused (it does not fit, say); without it the first refusal ends all."""
    found: dict[int, Inference] = {}
    refused: dict[int, KernelcastError] = {}
    for numbers, answers in _answered(cases, conditions):
        for at, number in enumerate(numbers):
            if at in answers.refused:
                refused[number] = answers.refused[at]
            else:
                found[number] = Inference.of(answers, at)
        if refused and skip is None:
            raise refused[min(refused)]
    for number in sorted(refused):
        skip(number, refused[number])  # type: ignore[misc]  # it was raised otherwise
    return [found[number] for number in sorted(found)]


def infer_columns(cases: Cases, conditions: Conditions = DEFAULT) -> dict[str, NDArray[Any]]:
    """Predict many batches, columns out: one entry a case, in order; ``Inference`` says what each column means.

    Times: ttft_s, prefill_s, decode_s, total_s, tpot_s, step_s, each also as *_low and *_high. Numbers: tokens_per_s,
    steps, output_tokens, flops, mfu, bandwidth_use, memory_bytes, available_bytes; fits: true or false. Words: bound_by
    (what binds most of the time), support, and refused: None, or why there is no answer. Of a case that is refused
    times and what follows from them are NaN, bound_by and support None.
    """
    columns: dict[str, NDArray[Any]] = {}
    for numbers, answers in _answered(cases, conditions):
        for name, values in _columns(answers).items():
            if name not in columns:
                columns[name] = np.empty(len(cases), dtype=values.dtype)
            columns[name][numbers] = values
    return columns


def _columns(answers: Answers) -> dict[str, NDArray[Any]]:
    times = {
        "ttft": answers.prefill_s, "prefill": answers.prefill_s, "decode": answers.decode_s, "total": answers.total_s,
        "tpot": answers.tpot_s, "step": answers.step_s,
    }  # fmt: skip
    found = {
        f"{name}_s{end}": column[at] for name, column in times.items() for at, end in enumerate(("", "_low", "_high"))
    }
    for name in ("tokens_per_s", "steps", "output_tokens", "flops", "mfu", "bandwidth_use"):
        found[name] = getattr(answers, name)
    count, memory = len(answers.workloads), answers.memory
    found |= {"memory_bytes": memory.used_bytes, "available_bytes": np.full(count, memory.available_bytes)}
    words = {"bound_by": answers.shares.bound_by, "support": answers.shares.support} if answers.laid else {}
    for name in ("bound_by", "support"):
        found[name] = np.full(count, None, dtype=object)
        found[name][answers.answered] = words[name][answers.answered] if words else None
    found["refused"] = np.full(count, None, dtype=object)
    for at, error in answers.refused.items():
        found["refused"][at] = str(error)
    return found | {"fits": memory.fits}


def _answered(cases: Cases, conditions: Conditions) -> Iterator[tuple[list[int], Answers]]:
    """The numbers of the cases of each deployment, and their answers."""
    for gpu, places in _by_gpu(cases):
        chunk = _Chunk(Times(gpu, conditions))
        for numbers in (place[at : at + _CASES] for place in places for at in range(0, len(place), _CASES)):
            deployment = cases[numbers[0]][0]
            chunk.add(numbers, Answers(deployment, [cases[number][1].on(deployment) for number in numbers]))
            if chunk.passes > _PASSES:
                yield from chunk.laid()
                chunk = _Chunk(chunk.times)
        yield from chunk.laid()


def _by_gpu(cases: Cases) -> list[tuple[Gpu, list[list[int]]]]:
    """The numbers of the cases of each deployment, by GPU; neither is a key of a dictionary."""
    places: dict[int, list[int]] = {}
    for number, (deployment, _) in enumerate(cases):
        places.setdefault(id(deployment), []).append(number)
    found: list[tuple[Gpu, list[list[int]]]] = []
    for numbers in places.values():
        gpu = cases[numbers[0]][0].gpu
        same = next((members for known, members in found if known is gpu or known == gpu), None)
        if same is None:
            found.append((gpu, [numbers]))
        else:
            same.append(numbers)
    return found


@dataclass
class _Chunk:
    """Answers on one GPU under way: their calls are predicted in one table."""

    times: Times
    gathered: Gathered = field(default_factory=Gathered)
    members: list[tuple[list[int], Answers]] = field(default_factory=list)
    passes: int = 0

    def add(self, numbers: list[int], answers: Answers) -> None:
        answers.gather(self.gathered)
        self.members.append((numbers, answers))
        self.passes += sum(len(passes.owner) for passes, _ in answers.laid)

    def laid(self) -> Iterator[tuple[list[int], Answers]]:
        gpu, conditions = self.times.gpu, self.times.conditions
        found = self.gathered.predicted(gpu, conditions)
        if capped(gpu):
            found = under_cap(self.gathered, found, gpu, conditions)
        for numbers, answers in self.members:
            answers.lay(found, self.times)
            yield numbers, answers
