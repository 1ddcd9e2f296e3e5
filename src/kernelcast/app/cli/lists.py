"""gpus, gpu, ops, models and evidence: what is in the catalogues, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from kernelcast.app.cli.commands import add_command
from kernelcast.app.questions.evidence import EvidenceQuestion, all_entries
from kernelcast.app.questions.parameters import argument
from kernelcast.app.questions.shared import Changes, Json, gpu_names, resolve_gpu
from kernelcast.app.report.json import print_json, to_json
from kernelcast.errors import KernelcastError
from kernelcast.forecast.learned import WEIGHTS
from kernelcast.hardware import Gpu, gpu_ids, unknown_gpu
from kernelcast.hardware import gpu as find_gpu
from kernelcast.ops import REGISTRY

Pattern = Annotated[
    list[str] | None, argument("PATTERN", "only those with this in one of their names; * and ? as in a shell")
]
GpuId = Annotated[str, argument("ID", "an id or name from `kernelcast gpus`, or a TOML file", values=gpu_names)]


def register(app: typer.Typer) -> None:
    add_command(app, gpus, "kernelcast gpus", "kernelcast gpus blackwell", "kernelcast gpus rtx 40 --json")
    add_command(app, gpu, "kernelcast gpu h200_sxm", "kernelcast gpu h200_sxm --set dram_bytes_per_s=7e12")
    add_command(app, ops, "kernelcast ops --json")
    add_command(app, models, "kernelcast models", "kernelcast models qwen3", "kernelcast models coder --json")
    add_command(
        app, evidence,
        "kernelcast evidence",
        "kernelcast evidence --op attention --gpu b200_sxm --stack vllm",
        "kernelcast evidence --by gpu --json",
        "kernelcast evidence --runs --gpu rtx_5090 --stack vllm",
        "kernelcast evidence --published --by gpu",
    )  # fmt: skip


def gpus(pattern: Pattern = None, json: Json = False) -> None:
    """List the GPUs of the catalogue."""
    from kernelcast.app.report.lists import architecture_age, gpu_summary, print_gpus

    catalogue = sorted(map(find_gpu, gpu_ids()), key=architecture_age)
    if pattern:
        names = {each.id: (each.id, each.name, each.architecture, _architecture_code(each), *each.aliases)
                 for each in catalogue}  # fmt: skip
        fitting = matching(names, pattern, unknown_gpu)
        catalogue = [each for each in catalogue if each.id in fitting]
    if json:
        print(to_json([gpu_summary(gpu) for gpu in catalogue]))
    else:
        print_gpus(catalogue)


def _architecture_code(gpu: Gpu) -> str:
    """As compilers name it: sm_120, gfx942."""
    code = gpu.compute_capability
    return code if code.startswith("gfx") else f"sm_{code.replace('.', '')}"


def gpu(id: GpuId, set: Changes = None, json: Json = False) -> None:
    """Show one GPU: every number, where it is from, and the peaks that follow."""
    from kernelcast.app.report.lists import gpu_fields, print_gpu

    target = resolve_gpu(id, set)
    if json:
        print(to_json(gpu_fields(target)))
    else:
        print_gpu(target)


def ops(pattern: Pattern = None, json: Json = False) -> None:
    """List the ops and their parameters."""
    from kernelcast.app.report.lists import op_fields, print_ops
    from kernelcast.ops.op_names import unknown_op

    names = sorted(REGISTRY)
    if pattern:
        names = list(matching({name: (name,) for name in names}, pattern, lambda name: unknown_op(name, REGISTRY)))
    kernels = [REGISTRY[op] for op in names]
    if json:
        print(to_json([op_fields(kernel) for kernel in kernels]))
    else:
        print_ops(kernels)


def models(pattern: Pattern = None, json: Json = False) -> None:
    """List the bundled models."""
    from kernelcast.app.report.lists import model_fields, print_models, traced_fields
    from kernelcast.models import hub_name, model, model_ids
    from kernelcast.models.catalogue import names_of, traced_names, traced_table, unknown_model

    traced, hub_names = traced_names(), {name: hub_name(name) for name in model_ids()}
    fitting = {name: name for name in (*hub_names, *traced)}
    if pattern:  # a model that shares the layers by its own id
        fitting = matching({name: names_of(name) for name in hub_names} | traced, pattern, unknown_model)
        hub_names |= {name: spelling for name, spelling in fitting.items() if "/" in spelling}
    entries = {name: traced_fields(traced_table()["models"][name]) if name in traced
               else model_fields(model(name)) | {"id": hub_names[name]} for name in fitting}  # fmt: skip
    if json:
        print_json(entries)
    else:
        print_models(entries)


def matching(
    names: Mapping[str, Iterable[str]], pattern: Sequence[str], unknown: Callable[[str], KernelcastError]
) -> dict[str, str]:
    """Those with a name that has the pattern in it, whatever the case and the separators; and the first such name.
    ``pattern``: its parts, as a shell splits them."""
    sought = f"*{_folded(' '.join(pattern))}*"
    found = {each: [one for one in spellings if fnmatchcase(_folded(one), sought)] for each, spellings in names.items()}
    if not any(found.values()):
        raise unknown(" ".join(pattern))
    return {each: spellings[0] for each, spellings in found.items() if spellings}


def _folded(text: str) -> str:
    return re.sub(r"[\s_-]+", "", text.lower())


def evidence(question: EvidenceQuestion, json: Json = False) -> None:
    """What was measured, by configuration, and how far off forecasts of it are.

    A configuration is an op on a GPU with its stack, backend, number formats, prefill or decode, … For each: how many
    calls, the ranges of their numbers, and on calls that no fit saw the error and the share in the interval.
    """
    from kernelcast.app.report import lists

    if question.published:
        from kernelcast.app.report.published import print_published, published_fields

        errors = question.published_errors()
        if json:
            print(to_json(published_fields(*errors)))
        else:
            print_published(*errors)
        return
    entries = question.answer()
    if question.runs:
        measured = all_entries(question.weights or WEIGHTS)
        names: list[str | None] = [*question.gpu] or [None]
        lines = [line for name in names for line in lists.runs_fields(name, question.stack, question.op, measured)]
        if json:
            print(to_json({"runs": lines}))
        else:
            lists.print_runs(lines)
    elif json:
        reason = {} if entries else {"reason": question.why_none()}
        print(to_json({**lists.evidence_fields(entries, question.by or "kind"), **reason}))
    elif entries:
        lists.print_evidence(entries, question.group(entries))
    else:
        lists.print_no_evidence(question.why_none())
