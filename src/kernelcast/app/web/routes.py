"""The API's operations: check the words, ask a worker, pass its answer on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from kernelcast.app.web.answers import Answers
from kernelcast.app.web.bodies import BODIES, Body
from kernelcast.app.web.limits import HEAVY, Limits
from kernelcast.app.web.pool import Pool
from kernelcast.app.web.problems import Problem, documented
from kernelcast.app.web.requests import StrictRoute
from kernelcast.app.web.vocabulary import GPU_IDS, OPS, named, text
from kernelcast.diagnose.metrics import WIDTH_BITS
from kernelcast.errors import unknown

PREFIX = "/api/v1"
GpuId: Any = named("gpu", GPU_IDS)
GpuOrNone: Any = named("gpu", GPU_IDS, empty=True)
OpOrNone: Any = named("op", OPS, empty=True)
Text: Any = text()
Format: Any = named("dtype", tuple(WIDTH_BITS), empty=True)
_FILE_NAME = r"^[^/\\\x00-\x1f-][^/\\\x00-\x1f]*$"  # no path, and nothing that a shell takes for an option
_ABOUT = {
    "kernel": ("One kernel call", "Its time, what limits it, and what the best kernel would reach."),
    "infer": ("One static batch of a language model", "How fast it runs, what takes the time, and whether it fits."),
    "simulate": ("A served model under load", "What its users feel: latencies, throughput, and what binds."),
    "compare": ("A model on many kinds of GPU", "Each at its best layout, batch and format, in order."),
    "plan": ("The cheapest GPUs that keep latency goals", "Which, how many, and how to run a model on them."),
}


class Envelope(BaseModel):
    """A forecast and how to ask for it elsewhere."""

    answer: dict[str, Any] = Field(description="exactly what the command prints with --json")
    command: str = Field(description="the command line that gives the same answer")
    python: str = Field(description="the Python that gives the same answer")


class OverTime(BaseModel):
    time_s: list[float] = Field(max_length=400)
    running: list[float] = Field(description="requests that decode, of all engines")
    waiting: list[float] = Field(description="requests that wait, of all engines")
    kv_share: list[float] = Field(description="of the KV cache in use, mean over engines")


class Simulated(Envelope):
    over_time: OverTime


class Desk:
    """Where questions are put: the cache of answers before the pool of workers."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        self.pool = pool
        self.kept, self.listed = Answers(limits.cache_bytes), Answers(limits.cache_bytes)

    async def answer(self, task: str, words: dict[str, Any], payload: bytes = b"", *, lists: bool = False) -> Response:
        """A question's answer; one without a file may be kept."""
        kept = self.listed if lists else self.kept
        key = Answers.key(task, words)
        body = None if payload else kept.get(key)
        if body is None:
            reply = await self.pool.ask(task, words, payload)
            body = reply.body
            if reply.status != 200:
                raise Problem(reply.status, body.decode(errors="replace"))
            if not payload:
                kept.put(key, body)
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


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
        for one in (task, gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def add_questions(router: APIRouter, desk: Callable[[], Desk]) -> None:
    """POST /kernel, /infer, /simulate, /compare, /plan."""
    for command, body in BODIES.items():
        summary, about = _ABOUT[command]
        shape = Simulated if command == "simulate" else Envelope
        router.add_api_route(
            f"/{command}",
            _asking(command, body, desk),
            methods=["POST"],
            name=command,
            summary=summary,
            description=about,
            response_class=Response,
            responses={
                200: {"model": shape, "description": "the forecast"},
                **documented(400, 408, 413, 415, 422, 429, 503, 504),
            },
        )


def _asking(command: str, shape: type[Body], desk: Callable[[], Desk]) -> Callable[..., Awaitable[Response]]:
    async def ask(request: Request, body: Body) -> Response:
        work = desk().answer(command, body.given())
        return await (unless_gone(request, work) if command in HEAVY else work)

    ask.__annotations__ = {"request": Request, "body": shape, "return": Response}
    return ask


def add_lists(router: APIRouter, desk: Callable[[], Desk], limits: Limits) -> None:
    """GET /about, /gpus, /models, /ops, /stacks, /words, /evidence."""
    errors = documented(422, 429, 503, 504)

    def listed(name: str, summary: str) -> None:
        async def told() -> Response:
            return await desk().answer(name, {}, lists=True)

        router.add_api_route(f"/{name}", told, methods=["GET"], name=name, summary=summary, response_class=Response,
                             responses={200: {"model": dict[str, Any], "description": summary}, **errors})  # fmt: skip

    listed("gpus", "The GPUs of the catalogue")
    listed("models", "The bundled models")
    listed("ops", "The ops and their parameters")
    listed("stacks", "Stacks, fabrics and number formats")
    listed("words", "The words of every question")

    shape = {"model": dict[str, Any]}

    @router.get("/about", summary="What answers, and within which limits", response_class=Response,
                responses={200: shape, **errors})  # fmt: skip
    async def about() -> Response:
        return await desk().answer("about", {"limits": limits.told()}, lists=True)

    @router.get("/gpus/{gpu_id}", summary="One GPU with the source of every number", response_class=Response,
                responses={200: shape, **documented(404), **errors})  # fmt: skip
    async def one_gpu(gpu_id: Annotated[str, Path(examples=["h200_sxm"], max_length=200)]) -> Response:
        if gpu_id not in GPU_IDS:
            raise Problem(404, str(unknown("gpu", gpu_id, GPU_IDS)))
        return await desk().answer("gpu", {"gpu_id": gpu_id}, lists=True)

    @router.get("/evidence", summary="What was measured, and how well it is forecast", response_class=Response,
                responses={200: shape, **errors})  # fmt: skip
    async def evidence(
        by: Literal["kind", "op", "gpu", "stack"] = "kind",
        op: Annotated[list[OpOrNone] | None, Query(max_length=8)] = None,
        gpu: Annotated[list[GpuOrNone] | None, Query(max_length=8)] = None,
        stack: Annotated[list[Text] | None, Query(max_length=8)] = None,
    ) -> Response:
        only = {"op": op, "gpu": gpu, "stack": stack}
        given = {name: words for name, value in only.items() if (words := [word for word in value or () if word])}
        return await desk().answer("evidence", {"by": by, **given})

    @router.get("/evidence/grid", summary="The same by GPU, op and stack", response_class=Response,
                responses={200: shape, **errors})  # fmt: skip
    async def grid() -> Response:
        return await desk().answer("grid", {}, lists=True)


def add_diagnose(router: APIRouter, desk: Callable[[], Desk]) -> None:
    """POST /diagnose: the bytes of a file, which stay in memory."""
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @router.post(
        "/diagnose",
        summary="Where a measured run loses time, and what to try",
        description="The body is the file: a torch.profiler trace, a CSV of Nsight Compute, or a table of calls with "
        "measured_us. It is read in memory and not kept.",
        response_class=Response,
        responses={200: {"model": Envelope}, **documented(400, 408, 413, 422, 429, 503, 504)},
        openapi_extra={"requestBody": {"required": True, "content": binary}},
    )
    async def diagnose(
        request: Request,
        filename: Annotated[str, Query(max_length=200, pattern=_FILE_NAME, examples=["trace.json.gz"],
                                       description="its ending says what the file is")],
        gpu: Annotated[GpuOrNone | None, Query(description="that it ran on; default: the one that the file names")]
        = None,
        dtype: Annotated[Format | None, Query(description="that products should be in; default: most of them")] = None,
    ) -> Response:  # fmt: skip
        content = await request.body()
        if not content:
            raise Problem(400, "the body is empty: it should be the file")
        words = {"filename": filename, "gpu": gpu, "dtype": dtype}
        given = {name: value for name, value in words.items() if value}
        return await unless_gone(request, desk().answer("diagnose", given, content))


def routers(desk: Callable[[], Desk], limits: Limits) -> list[APIRouter]:
    strict, plain = APIRouter(prefix=PREFIX, route_class=StrictRoute), APIRouter(prefix=PREFIX)
    add_questions(strict, desk)
    add_lists(plain, desk, limits)
    add_diagnose(plain, desk)
    return [strict, plain]
