"""A server's benchmark, and what its file says of the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from kernelcast.app.questions.parameters import argument, option
from kernelcast.app.questions.shared import Intervals, Seed, model_names
from kernelcast.app.questions.simulate import ServiceParameters
from kernelcast.errors import KernelcastError

if TYPE_CHECKING:
    from kernelcast.serving.metrics import BenchResult

AnyService = TypeVar("AnyService", bound=ServiceParameters)
_NUMBERS = ("tp", "pp", "dp", "max_num_seqs", "max_num_batched_tokens")  # that a file may say of its server
_STACKS = {"vllm": "vllm", "sglang": "sglang", "tensorrt": "trtllm", "trtllm": "trtllm"}  # how backends' names begin


@dataclass(frozen=True, kw_only=True)
class ReplayQuestion(ServiceParameters):
    """A benchmark of a server, simulated."""

    command: ClassVar[str] = "replay"

    bench: Annotated[
        Path,
        argument("BENCH", "results of `vllm bench serve`, SGLang's bench_serving, inference-perf; or a table of served "
                 "requests"),
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
            assumed.append(f"the file does not say what served it: {parameters['stack']} (`stack`)")
    stated = [f"{name} {parameters[name]}" for name in _NUMBERS if name in parameters]
    name = model or _model(bench)
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


def _model(bench: BenchResult) -> str:
    """The model that the file names: as it stands, by its tokenizer, or by the last part of a path."""
    from kernelcast import models

    names = [str(bench.server[key]) for key in ("model", "tokenizer") if bench.server.get(key)]
    for name in [*names, *(name.rstrip("/").rpartition("/")[2] for name in names if name.startswith(("/", ".", "~")))]:
        try:
            models.model(name)
        except KernelcastError:
            continue
        return name
    problem = f"calls its model {names[0]!r}, which is not known" if names else "does not name its model"
    raise KernelcastError(f"{bench.path} {problem}: give `model`, as in llama-3.1-8b")
