"""The API's operations: validate the parameters, run the task in a worker, return its answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from kernelcast.app.web.bodies import BODIES, CurvesBody, QuestionBody
from kernelcast.app.web.guards import StrictRoute
from kernelcast.app.web.limits import Limits
from kernelcast.app.web.parameters import GPU_IDS, OPS, choice, text
from kernelcast.app.web.pool import WorkerPool
from kernelcast.app.web.problems import Problem, documented
from kernelcast.diagnose.metrics import WIDTH_BITS
from kernelcast.errors import unknown

PREFIX = "/api/v1"
GpuOrNone: Any = choice("gpu", GPU_IDS, empty=True)
OpOrNone: Any = choice("op", OPS, empty=True)
Text: Any = text()
Format: Any = choice("dtype", tuple(WIDTH_BITS), empty=True)
_FILE_NAME = r"^[^/\\\x00-\x1f-][^/\\\x00-\x1f]*$"  # no path, and nothing that a shell takes for an option
_ABOUT = {
    "kernel": ("One kernel call", "Its time, what limits it, and what the best kernel would reach."),
    "infer": ("One static batch of a language model", "How fast it runs, what takes the time, and whether it fits."),
    "curves": (
        "A batch at many sizes",
        "Curves over batch or prompt length, one a GPU or layout; a point is one infer.",
    ),
    "simulate": ("A served model under load", "Latencies, throughput, and what binds."),
    "compare": ("A model on many GPUs", "Each at its best layout, batch and format, in order."),
    "plan": ("The cheapest GPUs that keep latency goals", "Which, how many, and how to run a model on them."),
    "train": (
        "A training step of a transformer",
        "How long it takes on many GPUs, where the time goes, whether it fits.",
    ),
}


class Envelope(BaseModel):
    """A forecast, and the command and the Python that give the same."""

    answer: dict[str, Any] = Field(description="exactly what the command prints with --json")
    command: str = Field(description="the command line that gives the same answer")
    python: str = Field(description="the Python that gives the same answer")


class LoadOverTime(BaseModel):
    time_s: list[float] = Field(max_length=400)
    running: list[float] = Field(description="requests that decode, of all engines")
    waiting: list[float] = Field(description="requests that wait, of all engines")
    kv_share: list[float] = Field(description="of the KV cache in use, mean over engines")


class SimulationEnvelope(Envelope):
    over_time: LoadOverTime


class WhatFits(BaseModel):
    largest_batch: int = Field(description="of such requests")
    largest_input_len: int = Field(description="of the prompts of such a batch")


class PartKernel(BaseModel):
    """The longest kernel of a part, in the first pass of prefill or the middle one of decode."""

    phase: str
    part: str
    op: str
    parameters: dict[str, Any]
    time_s: float


class Cost(BaseModel):
    usd_per_gpu_hour: float
    usd_per_hour: float
    usd_per_million_tokens: float
    date: str = Field(description="when the price was read")


class InferEnvelope(Envelope):
    fits: WhatFits
    kernels: list[PartKernel]
    cost: Cost | None = Field(description="null where the GPU has no list price")


class TrainEnvelope(Envelope):
    parts: dict[str, str] = Field(description="what each part of the step is")


_ENVELOPES = {"simulate": SimulationEnvelope, "infer": InferEnvelope, "train": TrainEnvelope}


class ForecastService:
    """A cache of answers before the pool of workers: the same question has the same answer until the program ends."""

    def __init__(self, pool: WorkerPool, limits: Limits) -> None:
        self.pool = pool
        self._lists: dict[str, bytes] = {}
        self._cache: OrderedDict[str, bytes] = OrderedDict()  # the latest, up to so many bytes
        self._max_bytes, self._bytes = limits.cache_bytes, 0

    async def answer(
        self, task: str, arguments: dict[str, Any], payload: bytes = b"", *, lists: bool = False
    ) -> Response:
        """The answer as JSON. ``lists``: of a catalogue, which is kept for good; an answer on a file is not kept."""
        key = f"{task} {json.dumps(arguments, sort_keys=True)}"
        cache = self._lists if lists else self._cache
        body = None if payload else cache.get(key)
        if body is None:
            reply = await self.pool.run(task, arguments, payload)
            body = reply.body
            if reply.status != 200:
                raise Problem(reply.status, body.decode(errors="replace"))
            if lists:
                self._lists[key] = body
            elif not payload:
                self._keep(key, body)
        elif not lists:
            self._cache.move_to_end(key)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    def _keep(self, key: str, body: bytes) -> None:
        size = len(key) + len(body)
        if key in self._cache or size > self._max_bytes // 4:  # it would push out most of the others
            return
        self._cache[key] = body
        self._bytes += size
        while self._bytes > self._max_bytes:
            oldest, dropped = self._cache.popitem(last=False)
            self._bytes -= len(oldest) + len(dropped)


GetService = Callable[[], ForecastService]


async def unless_gone(request: Request, work: Awaitable[Response]) -> Response:
    """The work's response; where the client goes away first the work is stopped, and nobody reads what is returned."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)
        return await task
    finally:
        for waiting in (task, gone):
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await waiting


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def add_questions(router: APIRouter, service: GetService) -> None:
    """POST /kernel, /infer, /curves, /simulate, /compare, /plan."""
    for command, body in {**BODIES, "curves": CurvesBody}.items():
        summary, description = _ABOUT[command]
        model = _ENVELOPES.get(command, Envelope)
        router.add_api_route(
            f"/{command}",
            _handler(command, body, service),
            methods=["POST"],
            name=command,
            summary=summary,
            description=description,
            response_class=Response,
            responses={
                200: {"model": model, "description": "the forecast"},
                **documented(400, 408, 413, 415, 422, 429, 503, 504),
            },
        )


def _handler(command: str, shape: type[QuestionBody], service: GetService) -> Callable[..., Awaitable[Response]]:
    async def forecast(request: Request, body: QuestionBody) -> Response:
        return await unless_gone(request, service().answer(command, body.arguments()))

    forecast.__annotations__ = {"request": Request, "body": shape, "return": Response}
    return forecast


def add_lists(router: APIRouter, service: GetService, limits: Limits) -> None:
    """GET /about, /gpus, /models, /ops, /stacks, /parameters, /evidence."""
    errors = documented(422, 429, 503, 504)

    def add(name: str, summary: str, path: str = "", *, in_schema: bool = True) -> None:
        async def catalogue() -> Response:
            return await service().answer(name, {}, lists=True)

        responses: dict[int | str, Any] = {200: {"model": dict[str, Any], "description": summary}, **errors}
        router.add_api_route(path or f"/{name}", catalogue, methods=["GET"], name=name, summary=summary,
                             response_class=Response, responses=responses, include_in_schema=in_schema)  # fmt: skip

    add("gpus", "The GPUs of the catalogue")
    add("models", "The bundled models")
    add("ops", "The ops and their parameters")
    add("stacks", "Stacks, fabrics and number formats")
    add("parameters", "The parameters of every question")
    add("parameters", "The same", "/words", in_schema=False)  # its name in earlier releases
    add("grid", "Evidence by GPU, op and stack", "/evidence/grid")

    shape = {"model": dict[str, Any]}

    @router.get("/about", summary="Version, weights and limits of this server", response_class=Response,
                responses={200: shape, **errors})  # fmt: skip
    async def about() -> Response:
        return await service().answer("about", {"limits": limits.fields()}, lists=True)

    @router.get("/gpus/{gpu_id}", summary="One GPU with the source of every number", response_class=Response,
                responses={200: shape, **documented(404), **errors})  # fmt: skip
    async def one_gpu(gpu_id: Annotated[str, Path(examples=["h200_sxm"], max_length=200)]) -> Response:
        if gpu_id not in GPU_IDS:
            raise Problem(404, str(unknown("gpu", gpu_id, GPU_IDS)))
        return await service().answer("gpu", {"gpu_id": gpu_id}, lists=True)

    @router.get("/evidence/published", summary="Errors of whole answers on published results and live runs",
                response_class=Response, responses={200: shape, **errors})  # fmt: skip
    async def published(by: Literal["source", "gpu", "model", "stack", "support"] = "source") -> Response:
        return await service().answer("published", {"by": by}, lists=True)

    @router.get("/evidence", summary="What was measured, and how well it is forecast", response_class=Response,
                responses={200: shape, **errors})  # fmt: skip
    async def evidence(
        by: Literal["kind", "op", "gpu", "stack"] = "kind",
        op: Annotated[list[OpOrNone] | None, Query(max_length=8)] = None,
        gpu: Annotated[list[GpuOrNone] | None, Query(max_length=8)] = None,
        stack: Annotated[list[Text] | None, Query(max_length=8)] = None,
    ) -> Response:
        only = {"op": op, "gpu": gpu, "stack": stack}
        given = {name: chosen for name, value in only.items() if (chosen := [item for item in value or () if item])}
        return await service().answer("evidence", {"by": by, **given})


def add_diagnose(router: APIRouter, service: GetService) -> None:
    """POST /diagnose: the bytes of a file, which stay in memory."""
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @router.post(
        "/diagnose",
        summary="Where a measured run loses time, and what to try",
        description="The body is the file: a torch.profiler trace, a CSV of Nsight Compute, or a table of calls with "
        "measured_us. It is read in memory and not kept.",
        response_class=Response,
        responses={200: {"model": Envelope}, **documented(400, 408, 413, 415, 422, 429, 503, 504)},
        openapi_extra={"requestBody": {"required": True, "content": binary}},
    )
    async def diagnose(
        request: Request,
        filename: Annotated[str, Query(max_length=200, pattern=_FILE_NAME, examples=["trace.json.gz"],
                                       description="its ending says what the file is")],
        gpu: Annotated[GpuOrNone | None, Query(description="that it was measured on; default: as the file names")]
        = None,
        dtype: Annotated[Format | None, Query(description="that products should be in; default: most of them")] = None,
    ) -> Response:  # fmt: skip
        content = await request.body()
        if not content:
            raise Problem(400, "the body is empty: it should be the file")
        arguments = {"filename": filename, "gpu": gpu, "dtype": dtype}
        given = {name: value for name, value in arguments.items() if value}
        return await unless_gone(request, service().answer("diagnose", given, content))


def routers(service: GetService, limits: Limits) -> list[APIRouter]:
    strict, plain = APIRouter(prefix=PREFIX, route_class=StrictRoute), APIRouter(prefix=PREFIX)
    add_questions(strict, service)
    add_lists(plain, service, limits)
    add_diagnose(plain, service)
    return [strict, plain]
