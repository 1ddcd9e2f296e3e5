"""Several processes on this machine, one thread each. One that dies is replaced, and its chunk is given to another."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast.search.sweep.engines.base import THREADS, TRIES, Lost, one_thread
from kernelcast.search.sweep.space import Chunk
from kernelcast.search.sweep.work import Work

_HOPELESS = 8  # workers that died in a row before any chunk was finished


@dataclass(frozen=True)
class Processes:
    workers: int

    def run(self, work: Work, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes | Lost]]:
        waiting, deaths, in_a_row = deque(chunks), Counter[int](), 0
        pool: dict[Connection, _Worker] = {}
        try:
            while waiting or pool:
                while waiting and len(pool) < self.workers:
                    started = _Worker(work)
                    pool[started.pipe] = started
                    started.give(waiting.popleft())
                for pipe in wait(list(pool)):
                    worker = pool[pipe]  # type: ignore[index]
                    chunk, answer = worker.chunk, worker.answer()
                    if answer is None:  # it died
                        del pool[worker.pipe]
                        deaths[chunk.number] += 1
                        in_a_row += 1
                        if in_a_row >= _HOPELESS:
                            raise KernelcastError(f"{in_a_row} workers died one after another ({worker.how()})")
                        if deaths[chunk.number] < TRIES:
                            waiting.appendleft(chunk)
                        else:
                            yield chunk, Lost(f"killed {TRIES} workers ({worker.how()})")
                        continue
                    in_a_row = 0
                    if waiting:
                        worker.give(waiting.popleft())
                    else:
                        del pool[worker.pipe]
                        worker.stop()
                    yield chunk, answer
        finally:
            for worker in pool.values():
                worker.stop()


class _Worker:
    """A process and the chunk that it has."""

    chunk: Chunk

    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that has threads may hang
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work_off, args=(theirs, work), daemon=True)
        with _variables(), _unheard():
            self._process.start()
        theirs.close()  # so that its end is seen here

    def give(self, chunk: Chunk) -> None:
        self.chunk = chunk
        with suppress(OSError):  # dead already: told when its answer is asked for
            self.pipe.send(chunk)

    def answer(self) -> bytes | None:
        """None: it died."""
        try:
            found: bytes | Exception = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def how(self) -> str:
        code = self._process.exitcode or 0
        return f"signal {signal.Signals(-code).name}: out of memory?" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


@contextmanager
def _unheard() -> Iterator[None]:
    """Ctrl-C is for the one that hands out: a process that starts in here does not hear it, from its first moment on;
    whoever starts it hears it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its first start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work_off(pipe: Connection, work: Work) -> None:
    """The life of a worker: chunks in, rows out, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it cannot be blocked from the first moment
    one_thread()
    with suppress(EOFError, OSError):
        while True:
            chunk = pipe.recv()
            answer: Any
            try:
                answer = work.rows(chunk)
            except Exception as error:
                answer = error
            pipe.send(answer)


@contextmanager
def _variables() -> Iterator[None]:
    """NumPy reads these when it is loaded, in the new process."""
    was = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(THREADS)
    try:
        yield
    finally:
        for name, value in was.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
