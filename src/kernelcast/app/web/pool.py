"""Worker processes that are kept warm: one task at a time each, which they leave when it takes too long or when nobody
waits for it any more; one that does not is killed, and replaced.

An executor of ``concurrent.futures`` does not do: it breaks as a whole when one of its processes is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelcast.app.web.limits import HEAVY, PATIENCE_S, RESTARTED, WORKER_LIMITS, Limits
from kernelcast.app.web.problems import Problem
from kernelcast.app.web.worker import pack, receive

_COMMAND = (sys.executable, "-P", "-m", "kernelcast.app.web.worker")  # -P: nothing from the current folder
_READ_BYTES = 2**20  # that a pipe is read by
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 10.0  # before a worker that does not start is started again
# One thread each: small products on several threads of several workers wait for one another
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class WorkerReply:
    """``status``: 200, or 422 where ``body`` is the line that refuses."""

    status: int
    body: bytes


@dataclass(eq=False)
class _WorkerProcess:
    process: asyncio.subprocess.Process
    killed: bool = False

    def kill(self) -> None:
        """Once: asyncio looks after a process that has ended."""
        if not self.killed and self.process.returncode is None:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def send(self, header: Mapping[str, Any], payload: bytes = b"") -> asyncio.StreamWriter:
        target = self.process.stdin
        assert target is not None
        target.write(pack(dict(header), payload))
        return target

    async def call(self, header: Mapping[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        await self.send(header, payload).drain()
        return await self.reply()

    async def reply(self) -> tuple[dict[str, Any], bytes]:
        source = self.process.stdout
        assert source is not None
        return await receive(source)

    async def ask(
        self, question: Mapping[str, Any], payload: bytes, begun: asyncio.Future[None]
    ) -> tuple[dict[str, Any], bytes]:
        """The answer; ``begun`` is done once the worker has turned to it: a new one may be loading something."""
        await self.call(question, payload)
        if not begun.done():
            begun.set_result(None)
        return await self.reply()


class _IdleWorkers:
    """Workers that wait for a question, and questions that wait for a worker: by when they came, and how long such
    questions may wait. A kernel takes milliseconds, so it goes before a model that came up to five seconds earlier."""

    def __init__(self) -> None:
        self._workers: deque[_WorkerProcess] = deque()
        self._waiting: list[tuple[float, int, asyncio.Future[_WorkerProcess]]] = []
        self._order = itertools.count()

    def put(self, worker: _WorkerProcess) -> None:
        while self._waiting:
            *_, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._workers.append(worker)

    async def get(self, patience_s: float) -> _WorkerProcess:
        if self._workers:
            return self._workers.popleft()
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        heapq.heappush(self._waiting, (loop.time() + patience_s, next(self._order), waiter))
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.put(waiter.result())
            raise


@dataclass
class WorkerPool:
    """``async with WorkerPool(limits) as pool: await pool.run("kernel", {...})``"""

    limits: Limits
    _idle: _IdleWorkers = field(default_factory=_IdleWorkers)
    workers: set[_WorkerProcess] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _closed: bool = False
    replaced: int = 0  # workers that were killed or ended

    def __post_init__(self) -> None:
        self._heavy = asyncio.Semaphore(self.limits.heavy_at_once)
        self._numbers = itertools.count(1)  # of questions
        self._waiting = {True: 0, False: 0}  # tasks that wait for a worker: heavy, light

    async def __aenter__(self) -> WorkerPool:
        for _ in range(self.limits.workers):
            self._start_later()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        for worker in tuple(self.workers):
            worker.kill()
        for worker in tuple(self.workers):
            await self._ended(worker)

    async def run(self, task: str, arguments: Mapping[str, Any], payload: bytes = b"") -> WorkerReply:
        """The answer of the next free worker; a ``Problem`` where there is none, or none in time."""
        seconds, brief_s = self.limits.seconds.get(task, self.limits.seconds["list"]), self.limits.brief_seconds
        restarted = task in RESTARTED and seconds > brief_s
        if restarted:  # so that a few of them cannot keep every worker from the short ones
            with contextlib.suppress(TimeoutError):
                return await self._asked(task, arguments, payload, brief_s, heavy=False)
        try:
            return await self._asked(task, arguments, payload, seconds, heavy=restarted or task in HEAVY)
        except TimeoutError:
            raise Problem(504, f"this takes longer than {seconds:g} s, the limit of {task}: request less, "
                               "or use the command line, which has no limit") from None  # fmt: skip

    async def _asked(
        self, task: str, arguments: Mapping[str, Any], payload: bytes, seconds: float, *, heavy: bool
    ) -> WorkerReply:
        """The answer of a worker; ``TimeoutError`` after so many seconds of its time."""
        async with contextlib.AsyncExitStack() as held:
            worker = await self._free_worker(heavy, PATIENCE_S.get(task, 0.0), held)
            number = next(self._numbers)
            question = {"task": task, "arguments": arguments, "number": number}
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asked = asyncio.ensure_future(worker.ask(question, payload, begun))
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await asyncio.wait((asked, begun), return_when=asyncio.FIRST_COMPLETED)
                async with asyncio.timeout(seconds):
                    header, body = await asyncio.shield(asked)
            except (asyncio.IncompleteReadError, ConnectionError):
                self._replace(worker)
                raise Problem(503, "the worker ended before its answer (out of memory?)", retry_s=2) from None
            except BaseException:  # too long, or the client is gone: whoever is next waits for this worker
                self._spawn(self._stopped(worker, asked, begun, number, held.pop_all()))
                raise
            self._free(worker, header)
            return WorkerReply(int(header["status"]), body)

    async def _stopped(
        self, worker: _WorkerProcess, asked: asyncio.Future[Any], begun: asyncio.Future[None], number: int,
        held: contextlib.AsyncExitStack,
    ) -> None:  # fmt: skip
        """Have a worker leave a question, which keeps it warm; it is killed only if it does not."""
        async with held:
            try:
                worker.send({"cancel": number})
                await asyncio.wait((asked, begun), timeout=self.limits.start_seconds,
                                   return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
                async with asyncio.timeout(self.limits.stop_seconds):
                    header, _ = await asked
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                self._replace(worker)
            else:
                self._free(worker, header)

    def _free(self, worker: _WorkerProcess, header: Mapping[str, Any]) -> None:
        if header["retires"]:
            self._replace(worker)
        else:
            self._idle.put(worker)

    async def _free_worker(self, heavy: bool, patience_s: float, held: contextlib.AsyncExitStack) -> _WorkerProcess:
        """The next idle worker; long tasks leave one to short ones, until ``held`` ends."""
        waiting = self._waiting[heavy]
        if waiting >= (self.limits.heavy_waiting if heavy else self.limits.light_waiting):
            raise Problem(429, f"{waiting} questions wait already; try again in a moment", retry_s=2)
        self._waiting[heavy] += 1
        try:
            async with asyncio.timeout(self.limits.waiting_seconds):
                if heavy:
                    await held.enter_async_context(self._heavy)
                return await self._alive(patience_s)
        except TimeoutError:
            raise Problem(503, "all workers are busy; try again in a moment", retry_s=5) from None
        finally:
            self._waiting[heavy] -= 1

    async def _alive(self, patience_s: float) -> _WorkerProcess:
        """The next idle worker; a worker that ended meanwhile is replaced."""
        while (worker := await self._idle.get(patience_s)).process.returncode is not None:
            self._replace(worker)
        return worker

    def _replace(self, worker: _WorkerProcess) -> None:
        worker.kill()
        self.replaced += 1
        self._spawn(self._ended(worker))
        self._start_later()

    def _start_later(self) -> None:
        if not self._closed:
            self._spawn(self._start())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        """A new worker, idle once it is ready; if it ends before, it is started again, later each time."""
        delay_s = _FIRST_DELAY_S
        while not self._closed:
            process = await asyncio.create_subprocess_exec(
                *_COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_READ_BYTES,
                env={**os.environ, **_ENVIRONMENT}, start_new_session=True,  # Ctrl-C is for the server alone
            )  # fmt: skip
            worker = _WorkerProcess(process)
            self.workers.add(worker)
            try:
                await worker.call({name: getattr(self.limits, name) for name in WORKER_LIMITS})
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._ended(worker)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
                continue
            except asyncio.CancelledError:
                worker.kill()
                raise
            self._idle.put(worker)
            return

    async def _ended(self, worker: _WorkerProcess) -> None:
        worker.kill()
        await worker.process.wait()
        if worker.process.stdin is not None:
            worker.process.stdin.close()
        self.workers.discard(worker)
