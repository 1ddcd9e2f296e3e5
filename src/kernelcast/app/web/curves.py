"""Curves: the same batch of a model at many sizes, on several GPUs or layouts; each point is one `kernelcast infer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernelcast.app.questions.infer import InferQuestion
from kernelcast.app.questions.source import as_command
from kernelcast.errors import KernelcastError
from kernelcast.inference.infer import infer_columns
from kernelcast.inference.memory import largest_batch, largest_input

_SIZES = {"batch": "batch", "input_len": "input-len"}  # that a curve may be over, and their flags
_FIGURES = ("ttft_s", "ttft_s_low", "ttft_s_high", "tpot_s", "tpot_s_low", "tpot_s_high", "total_s", "tokens_per_s",
            "memory_bytes", "available_bytes", "support", "bound_by")  # fmt: skip


def what_fits(question: InferQuestion) -> dict[str, int]:
    """The largest batch of such requests, and the longest prompts of such a batch."""
    deployment, workload = question.batch_of()
    return {
        "largest_batch": largest_batch(deployment, workload),
        "largest_input_len": largest_input(deployment, workload),
    }


def curves(
    question: InferQuestion, shown: InferQuestion, cases: Sequence[Mapping[str, Any]], vary: str, sizes: Sequence[int]
) -> dict[str, Any]:
    """A curve a case: what differs from ``question`` there, as its GPU or TP. All points are forecast together."""
    asked, refused = [], {}
    for number, case in enumerate(cases):
        for size in sizes:
            try:
                asked.append(((number, size), replace(question, **{**case, vary: size}).batch_of()))
            except KernelcastError as error:
                refused[number, size] = str(error)
    columns = infer_columns([batch for _, batch in asked], question.conditions) if asked else {}
    points: dict[tuple[int, int], dict[str, Any]] = {}
    for at, (key, (deployment, _)) in enumerate(asked):
        figures = {name: columns[name][at] for name in _FIGURES}
        rate = columns["tokens_per_s"][at] / deployment.layout.gpus
        points[key] = {"why": columns["refused"][at], **figures, "tokens_per_s_per_gpu": rate}
    return {
        "vary": vary,
        "curves": [
            {"case": dict(case), **_fits(replace(question, **case)),
             "points": [{vary: size, **points.get((number, size), {"why": refused.get((number, size))})}
                        for size in sizes]}
            for number, case in enumerate(cases)
        ],
        "command": "\n".join(_loop(replace(shown, **case), vary, sizes) for case in cases),
    }  # fmt: skip


def _fits(question: InferQuestion) -> dict[str, Any]:
    try:
        deployment, _ = question.batch_of()
        return {"gpu": deployment.gpu.name, "gpus": deployment.layout.gpus, **what_fits(question)}
    except KernelcastError:
        return {"gpu": None, "gpus": None, "largest_batch": 0, "largest_input_len": 0}


def _loop(shown: InferQuestion, vary: str, sizes: Sequence[int]) -> str:
    """The commands of a curve, as a shell runs them."""
    without: dict[str, Any] = {vary: None}
    command = as_command(replace(shown, **without))
    return f"for n in {' '.join(map(str, sizes))}; do {command} --{_SIZES[vary]} $n; done"
