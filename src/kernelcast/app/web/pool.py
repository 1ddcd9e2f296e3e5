"""Worker processes that are kept warm: one question at a time each, killed when it takes too long, and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelcast.app.web import frames
from kernelcast.app.web.limits import HEAVY, Limits
from kernelcast.app.web.problems import Problem

_COMMAND = (sys.executable, "-P", "-m", "kernelcast.app.web.worker")  # -P: nothing from the folder that one stands in
_READ_BYTES = 2**20  # that a pipe is read by
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 10.0  # before one that does not start is started again
# One thread each: small products on several threads of several workers wait for one another
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Reply:
    """``status``: 200, or 422 where ``body`` is the line that refuses."""

    status: int
    body: bytes


@dataclass(eq=False)
class _Worker:
    process: asyncio.subprocess.Process
    killed: bool = False

    def kill(self) -> None:
        """Once: a process that has ended is asyncio's to look after."""
        if self.killed or self.process.returncode is not None:
            return
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            if hasattr(signal, "SIGKILL"):
                os.kill(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    async def ask(self, header: Mapping[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        source, target = self.process.stdout, self.process.stdin
        assert source is not None and target is not None
        target.write(frames.packed(dict(header), payload))
        await target.drain()
        return await frames.received(source)


@dataclass
class _Lane:
    """Questions of one kind of length: how many may wait."""

    most: int
    waiting: int = 0

    @contextlib.contextmanager
    def place(self) -> Any:
        if self.waiting >= self.most:
            raise Problem(429, f"{self.waiting} questions wait already; ask again in a moment", retry_s=2)
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


@dataclass
class Pool:
    """``async with Pool(limits) as pool: await pool.ask("kernel", {...})``"""

    limits: Limits
    _idle: asyncio.Queue[_Worker] = field(default_factory=asyncio.Queue)
    _all: set[_Worker] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _closed: bool = False
    replaced: int = 0  # workers that were killed or ended

    def __post_init__(self) -> None:
        self._heavy = asyncio.Semaphore(self.limits.heavy_at_once)
        self._lanes = {True: _Lane(self.limits.heavy_waiting), False: _Lane(self.limits.light_waiting)}

    async def __aenter__(self) -> Pool:
        for _ in range(self.limits.workers):
            self._later()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        for worker in tuple(self._all):
            worker.kill()
        for worker in tuple(self._all):
            await self._ended(worker)

    async def ask(self, task: str, words: Mapping[str, Any], payload: bytes = b"") -> Reply:
        """The answer of the next free worker; a ``Problem`` where there is none, or none in time."""
        async with self._taken(task in HEAVY) as worker:
            seconds = self.limits.seconds.get(task, self.limits.seconds["list"])
            try:
                async with asyncio.timeout(seconds):
                    header, body = await worker.ask({"task": task, "words": words}, payload)
            except TimeoutError:
                self._replace(worker)
                raise Problem(504, f"this takes longer than {seconds:g} s, which is all that {task} may: ask for less, "
                                   "or use the command line, which has no limit") from None  # fmt: skip
            except (asyncio.IncompleteReadError, ConnectionError):
                self._replace(worker)
                raise Problem(503, "the worker ended before its answer (out of memory?)", retry_s=2) from None
            except BaseException:  # whoever asked is gone
                self._replace(worker)
                raise
            if header["retires"]:
                self._replace(worker)
            else:
                self._idle.put_nowait(worker)
        return Reply(int(header["status"]), body)

    @contextlib.asynccontextmanager
    async def _taken(self, heavy: bool) -> AsyncIterator[_Worker]:
        """A worker of one's own; long questions leave one to short ones."""
        async with contextlib.AsyncExitStack() as held:
            try:
                with self._lanes[heavy].place():
                    async with asyncio.timeout(self.limits.waiting_seconds):
                        if heavy:
                            await held.enter_async_context(self._heavy)
                        worker = await self._alive()
            except TimeoutError:
                raise Problem(503, "all workers are busy; ask again in a moment", retry_s=5) from None
            yield worker

    async def _alive(self) -> _Worker:
        """The next idle worker; one that ended meanwhile is replaced."""
        while (worker := await self._idle.get()).process.returncode is not None:
            self._replace(worker)
        return worker

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self.replaced += 1
        self._run(self._ended(worker))
        self._later()

    def _later(self) -> None:
        if not self._closed:
            self._run(self._start())

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        """A new worker, idle once it is ready; one that ends before is started again, later each time."""
        delay_s = _FIRST_DELAY_S
        while not self._closed:
            process = await asyncio.create_subprocess_exec(
                *_COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_READ_BYTES,
                env={**os.environ, **_ENVIRONMENT}, start_new_session=True,  # Ctrl-C is for the server alone
            )  # fmt: skip
            worker = _Worker(process)
            self._all.add(worker)
            try:
                await worker.ask({name: getattr(self.limits, name) for name in
                                  ("worker_bytes", "worker_keep_bytes", "unpacked_bytes")}, b"")  # fmt: skip
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._ended(worker)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
                continue
            except asyncio.CancelledError:
                worker.kill()
                raise
            self._idle.put_nowait(worker)
            return

    async def _ended(self, worker: _Worker) -> None:
        worker.kill()
        await worker.process.wait()
        if worker.process.stdin is not None:
            worker.process.stdin.close()
        self._all.discard(worker)
