"""A server's benchmark, and what its file says of the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from kernelcast.app.questions.parameters import argument, option
from kernelcast.app.questions.shared import Intervals, Seed, model_names
from kernelcast.app.questions.simulate import ServiceParameters
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.serving.metrics import BenchResult
    from kernelcast.serving.service import Service
    from kernelcast.serving.step_table import StepTable

AnyService = TypeVar("AnyService", bound=ServiceParameters)
_NUMBERS = ("tp", "pp", "dp", "max_num_seqs", "max_num_batched_tokens")  # that a file may say of its server
_STACKS = {"vllm": "vllm", "sglang": "sglang", "tensorrt": "trtllm", "trtllm": "trtllm"}  # how backends' names begin


@dataclass(frozen=True, kw_only=True)
class ReplayQuestion(ServiceParameters):
    """A benchmark of a server, simulated."""

    command: ClassVar[str] = "replay"

    bench: Annotated[
        Path,
        argument("BENCH", "results of `vllm bench serve`, SGLang's bench_serving, inference-perf; a table of served "
                 "requests; or steps of `kernelcast collect --engine`"),
    ]  # fmt: skip
    model: Annotated[
        str | None,
        option(metavar="NAME", help="a name of `kernelcast models`; default: the file's", values=model_names),
    ] = None
    calibrate: Annotated[bool, option(help="fit the server's overheads beyond the forecast to the benchmark")] = False
    calibrate_on: Annotated[
        str | None, option(metavar="N|stage:N", help="fit to the first N requests or a stage only")
    ] = None
    output: Annotated[Path | None, option("-o", metavar="FILE.json", help="what was fitted, for --server")] = None
    seed: Seed = 0
    intervals: Intervals = True


def with_server(
    bench: BenchResult, model: str | None, service: AnyService, given: set[str]
) -> tuple[str, AnyService, list[str]]:
    """The model, the service with what the file says in place of parameters that were not given, and what was
    assumed."""
    server, assumed = bench.server, []
    parameters: dict[str, Any] = {}
    for name in _NUMBERS:
        value = server.get(name)
        if name not in given and isinstance(value, int) and value > 0:
            parameters[name] = value
    if service.gpu is None and isinstance(server.get("gpu"), str):
        parameters["gpu"] = server["gpu"]
    if service.kv_dtype is None and str(server.get("kv_cache_dtype", "auto")).startswith("fp8"):
        parameters["kv_dtype"] = "fp8"
    if "stack" not in given:
        parameters["stack"], sure = _stack(bench)
        if not sure:
            assumed.append(f"the file does not say what served it: stack {parameters['stack']}")
    stated = [f"{name} {parameters[name]}" for name in _NUMBERS if name in parameters]
    names = [str(bench.server[key]) for key in ("model", "tokenizer") if bench.server.get(key)]
    name = model or _model(bench.path, names)
    stated = [*([] if model else [name]), *stated]
    if stated:
        assumed.insert(0, f"as the file says: {', '.join(stated)}")
    chosen = replace(service, **parameters)
    unknown = [name for name in ("max_num_seqs", "max_num_batched_tokens") if getattr(chosen, name) is None]
    if unknown:
        assumed.append(f"the engine's defaults for {' and '.join(unknown)}: give the server's own where it has others")
    return name, chosen, assumed


def _stack(bench: BenchResult) -> tuple[str, bool]:
    """What served, and whether the file says it."""
    for name_ in (str(bench.server.get("backend", "")), bench.benchmark):
        for begins, name in _STACKS.items():
            if name_.startswith(begins):
                return name, True
    return "vllm", False


def _model(path: Path, names: Sequence[str]) -> str:
    """The model that a file names: as it stands, by its tokenizer, or by the last part of a path."""
    from kernelcast import models

    for name in [*names, *(name.rstrip("/").rpartition("/")[2] for name in names if name.startswith(("/", ".", "~")))]:
        try:
            models.model(name)
        except KernelcastError:
            continue
        return name
    problem = f"calls its model {names[0]!r}, which is not known" if names else "does not name its model"
    raise KernelcastError(f"{path} {problem}: give `model`, as in llama-3.1-8b")


_REQUESTS = ("replicas", "prefill_replicas", "draft_tokens", "draft_model", "pp", "dp", "ep")
_OF_ENGINE = {"tp": "tp", "max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_num_batched_tokens",
              "block_size": "block_size"}  # fmt: skip


def engine_service(
    table: StepTable, question: AnyService, model: str | None, given: set[str]
) -> tuple[Service, list[str]]:
    """The engine whose steps a table has: what was not given is as its first line says. And what was assumed."""
    from kernelcast import models
    from kernelcast.serving.step_replay import engine_load

    question.refuse(_REQUESTS, "steps are those of one engine, as their file says")
    name, parameters = model or _model(table.path, [str(table.engine["model"])]), dict[str, Any]()
    for parameter, key in _OF_ENGINE.items():
        if parameter not in given and (count := table.count(key)):
            parameters[parameter] = count
    if question.gpu is None:
        parameters["gpu"] = str(table.engine["gpu"])
    if "stack" not in given:
        parameters["stack"] = table.stack
    if question.kv_dtype is None:
        parameters["kv_dtype"] = table.kv_dtype
    if question.dtype is None:
        parameters["dtype"] = table.dtype(models.model(name))
        parameters["quantization"] = question.quantization or (None if parameters["dtype"] is None else "none")
    if "routing" not in given:  # its weights are drawn at random, which route so
        parameters["routing"] = "random"
    for parameter, key, type_ in (("async_scheduling", "async_scheduling", bool),
                                  ("gpu_memory_utilization", "gpu_memory_utilization", float)):  # fmt: skip
        if parameter not in given and isinstance(table.engine.get(key), type_):
            parameters[parameter] = table.engine[key]
    chosen, load = replace(question, **parameters), engine_load(table)
    notes = (
        ["decode steps replay whole CUDA graphs: the engine's were in pieces"]
        if table.graph_mode == "PIECEWISE"
        else []
    )
    try:
        return chosen.service(name, load), notes
    except KernelcastError as error:
        if not table.count("kv_blocks") or "no memory for a KV" not in str(error):
            raise
        held = replace(chosen, num_gpu_blocks_override=table.count("kv_blocks"))
        return held.service(name, load), [*notes, f"the engine's own KV cache, since by the forecast {error}"]
