"""Executors of chunks: this process, several on this machine, or a Ray cluster. The rows are the same."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from kernelcast._version import __version__
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.search.sweep.rows import SweepJob, weights_digest
from kernelcast.search.sweep.space import Chunk
from kernelcast.search.sweep.training import TrainingSweepJob

ENGINES = ("processes", "ray", "one")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # of a worker's NumPy
TRIES = 3  # workers that a chunk may kill
_HOPELESS = 8  # workers that died in a row before any chunk was finished
_WAIT_S = 10.0
_AHEAD = 2  # chunks per core that a cluster is given at once


@dataclass(frozen=True)
class FailedChunk:
    """``why``: what every worker that tried it died of."""

    why: str


Result = tuple[Chunk, bytes | FailedChunk]


class SweepEngine(Protocol):
    def run(self, job: SweepJob | TrainingSweepJob, chunks: Sequence[Chunk]) -> Iterator[Result]:
        """The rows of every chunk, as they are finished."""


def sweep_engine(name: str, workers: int | None = None, address: str | None = None) -> SweepEngine:
    refuse_unknown("engine", [name], ENGINES)
    if workers is not None and workers < 1:
        raise KernelcastError(f"`workers` is a number of 1 or more, not {workers}")
    if address is not None and name != "ray":
        raise KernelcastError("`address` is that of a Ray cluster: give `engine` ray too")
    if name == "ray":
        return RayEngine(address, workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = workers or cores
    return ProcessEngine(count) if name == "processes" and count > 1 else SerialEngine()


def disable_threads() -> None:
    """A worker has a core to itself: it predicts without threads."""
    importlib.import_module("kernelcast.forecast.predict").THREADS = 1  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SerialEngine:
    """This process alone."""

    def run(self, job: SweepJob | TrainingSweepJob, chunks: Sequence[Chunk]) -> Iterator[Result]:
        for chunk in chunks:
            yield chunk, job.rows(chunk)


@dataclass(frozen=True)
class ProcessEngine:
    """Several processes, one thread each. One that dies is replaced, and its chunk given to another. (An executor of
    ``concurrent.futures`` breaks as a whole when a process dies, and its processes outlive a killed parent.)"""

    workers: int

    def run(self, job: SweepJob | TrainingSweepJob, chunks: Sequence[Chunk]) -> Iterator[Result]:
        waiting, deaths, deaths_in_a_row = deque(chunks), Counter[int](), 0
        busy: dict[Any, _Worker] = {}  # by the end of the pipe that is here
        try:
            while waiting or busy:
                while waiting and len(busy) < self.workers:
                    worker = _Worker(job, waiting.popleft())
                    busy[worker.pipe] = worker
                for pipe in wait(list(busy)):
                    worker = busy.pop(pipe)
                    chunk, rows = worker.chunk, worker.rows()
                    if rows is not None:
                        deaths_in_a_row = 0
                        if waiting:
                            worker.give(waiting.popleft())
                            busy[pipe] = worker
                        else:
                            worker.stop()
                        yield chunk, rows
                        continue
                    deaths[chunk.number] += 1
                    deaths_in_a_row += 1
                    if deaths_in_a_row >= _HOPELESS:
                        raise KernelcastError(f"{deaths_in_a_row} workers died one after another ({worker.cause})")
                    if deaths[chunk.number] < TRIES:
                        waiting.appendleft(chunk)
                    else:
                        yield chunk, FailedChunk(f"killed {TRIES} workers ({worker.cause})")
        finally:
            for worker in busy.values():
                worker.stop()


class _Worker:
    """A process and the chunk that it has."""

    def __init__(self, job: SweepJob | TrainingSweepJob, chunk: Chunk) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that has threads may hang
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, job), daemon=True)
        with starting_worker():
            self._process.start()
        theirs.close()  # so that its end is seen here
        self.give(chunk)

    def give(self, chunk: Chunk) -> None:
        self.chunk = chunk
        with suppress(OSError):  # dead already: ``rows`` sees it
            self.pipe.send(chunk)

    def rows(self) -> bytes | None:
        """None: it died."""
        try:
            answer: bytes | Exception = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return None
        if isinstance(answer, Exception):
            self.stop()
            raise answer
        return answer

    @property
    def cause(self) -> str:
        code = self._process.exitcode or 0
        return f"signal {signal.Signals(-code).name}: out of memory?" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        self._process.terminate()
        self._process.join()


@contextmanager
def starting_worker() -> Iterator[None]:
    """A process that starts in here has one thread a NumPy call, and ignores Ctrl-C from its first moment on: that is
    for the process that hands out work."""
    before = dict(os.environ)
    masks = hasattr(signal, "pthread_sigmask")
    if masks:
        resource_tracker.ensure_running()  # its first start unblocks the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(THREADS)  # NumPy reads these when it is loaded
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(pipe: Connection, job: SweepJob) -> None:
    """A worker process: chunks in, rows out, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it cannot be blocked from the first moment
    disable_threads()
    with suppress(EOFError, OSError):
        while True:
            chunk = pipe.recv()
            answer: Any
            try:
                answer = job.rows(chunk)
            except Exception as error:
                answer = error
            pipe.send(answer)


@dataclass(frozen=True)
class RayEngine:
    """``address``: of a cluster (auto: the one on this machine); None: a local cluster of ``workers`` cores. Rows are
    written by this process, so nodes need no shared disk, only the same kernelcast."""

    address: str | None = None
    workers: int | None = None

    def run(self, job: SweepJob | TrainingSweepJob, chunks: Sequence[Chunk]) -> Iterator[Result]:
        try:
            import ray
        except ImportError:
            raise KernelcastError("`engine` ray needs Ray: pip install 'kernelcast[ray]'") from None
        mine = not ray.is_initialized()
        if mine:
            self._join(ray)
        try:
            yield from _run_on(ray, job, chunks)
        finally:
            if mine:
                ray.shutdown()

    def _join(self, ray: Any) -> None:
        host, colon, port = (self.address or "").removeprefix("ray://").rpartition(":")
        try:
            if colon:  # Ray itself waits for minutes, and then ends the process
                socket.create_connection((host, int(port)), timeout=_WAIT_S).close()
            local = {} if self.address else {"num_cpus": self.workers, "include_dashboard": False}
            ray.init(self.address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
        except (OSError, RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise KernelcastError(f"no Ray cluster at {self.address or 'this machine'}: {why}") from None


def _run_on(ray: Any, job: SweepJob | TrainingSweepJob, chunks: Sequence[Chunk]) -> Iterator[Result]:
    """A few chunks per core at once; Ray gives the chunk of a worker or a node that died to another."""
    task = ray.remote(num_cpus=1, max_retries=TRIES - 1, runtime_env={"env_vars": THREADS})(_rows_on_node)
    shared, versions = ray.put(job), (__version__, weights_digest(job.conditions))
    waiting, running = iter(chunks), dict[Any, Chunk]()
    while True:
        ahead = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))  # nodes may join and leave
        while len(running) < ahead and (chunk := next(waiting, None)) is not None:
            running[task.remote(shared, chunk, versions)] = chunk
        if not running:
            return
        ready, _ = ray.wait(list(running), timeout=5.0)
        for reference in ready:
            chunk = running.pop(reference)
            try:
                yield chunk, ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # raised by our code there
                raise error.cause from None
            except ray.exceptions.RayError as error:
                yield chunk, FailedChunk(f"killed {TRIES} workers ({type(error).__name__})")


def _rows_on_node(job: SweepJob | TrainingSweepJob, chunk: Chunk, versions: tuple[str, str]) -> bytes:
    here = (__version__, weights_digest(job.conditions))
    if here != versions:
        raise KernelcastError(
            f"a node of the Ray cluster has kernelcast {here[0]} with weights {here[1][:8]}, and this sweep is of "
            f"{versions[0]} with {versions[1][:8]}: install the same on all nodes"
        )
    disable_threads()
    return job.rows(chunk)
