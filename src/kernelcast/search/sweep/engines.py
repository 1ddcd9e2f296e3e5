"""What an engine is, the simplest one, and all by name."""

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
from kernelcast.errors import KernelcastError, unknown
from kernelcast.search.sweep.rows import Work, weights_of
from kernelcast.search.sweep.space import Chunk

ENGINES = ("processes", "ray", "one")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # of a worker's NumPy
TRIES = 3  # workers that a chunk may kill


@dataclass(frozen=True)
class Lost:
    """A chunk that nobody could work off, and why."""

    said: str


class Engine(Protocol):
    def run(self, work: Work, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes | Lost]]:
        """The rows of every chunk, as they are finished."""


@dataclass(frozen=True)
class One:
    """This process alone."""

    def run(self, work: Work, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes | Lost]]:
        for chunk in chunks:
            yield chunk, work.rows(chunk)


def engine(name: str, workers: int | None = None, address: str | None = None) -> Engine:
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if workers is not None and workers < 1:
        raise KernelcastError(f"--workers is a number of 1 or more, not {workers}")
    if address is not None and name != "ray":
        raise KernelcastError("--address is that of a Ray cluster: give --engine ray too")
    if name == "ray":
        return OnRay(address, workers)
    count = workers or cores()
    return Processes(count) if name == "processes" and count > 1 else One()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_thread() -> None:
    """A worker has a core to itself: it predicts without threads of its own."""
    importlib.import_module("kernelcast.forecast.predict").THREADS = 1  # type: ignore[attr-defined]


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


_WAIT_S = 10.0
_AHEAD = 2  # chunks a core that are handed out at once


@dataclass(frozen=True)
class OnRay:
    """``address``: of a cluster (auto: the one on this machine); None: a local cluster of ``workers`` cores."""

    address: str | None = None
    workers: int | None = None

    def run(self, work: Work, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes | Lost]]:
        ray = _ray()
        mine = not ray.is_initialized()
        if mine:
            self._join(ray)
        try:
            yield from _handed_out(ray, work, chunks)
        finally:
            if mine:
                ray.shutdown()

    def _join(self, ray: Any) -> None:
        told = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
        if self.address:
            del told["include_dashboard"]
        _check_reachable(self.address or "")
        try:
            ray.init(self.address or "local", num_cpus=None if self.address else self.workers, **told)
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise KernelcastError(f"no Ray cluster at {self.address or 'this machine'}: {said}") from None


def _check_reachable(address: str) -> None:
    """Ray itself waits for minutes, and then ends the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # auto
        return
    try:
        socket.create_connection((host, int(port)), timeout=_WAIT_S).close()
    except (OSError, ValueError) as error:
        raise KernelcastError(f"no Ray cluster at {address}: {error}") from None


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise KernelcastError("--engine ray needs Ray: pip install 'kernelcast[ray]'") from None
    return ray


def _handed_out(ray: Any, work: Work, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes | Lost]]:
    """A few chunks a core at once; Ray gives the chunk of a worker or a node that died to another."""
    task = ray.remote(num_cpus=1, max_retries=TRIES - 1, runtime_env={"env_vars": THREADS})(_rows)
    held, basis = ray.put(work), (__version__, weights_of(work.conditions))
    left, running = iter(chunks), dict[Any, Chunk]()
    while True:
        ahead = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))  # nodes may join and leave
        while len(running) < ahead and (chunk := next(left, None)) is not None:
            running[task.remote(held, chunk, basis)] = chunk
        if not running:
            return
        ready, _ = ray.wait(list(running), timeout=5.0)
        for reference in ready:
            chunk = running.pop(reference)
            try:
                yield chunk, ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # raised by our own code there
                raise error.cause from None
            except ray.exceptions.RayError as error:
                yield chunk, Lost(f"killed {TRIES} workers ({type(error).__name__})")


def _rows(work: Work, chunk: Chunk, basis: tuple[str, str]) -> bytes:
    """On a node."""
    here = (__version__, weights_of(work.conditions))
    if here != basis:
        raise KernelcastError(
            f"a node of the Ray cluster has kernelcast {here[0]} with weights {here[1][:8]}, and this sweep is of "
            f"{basis[0]} with {basis[1][:8]}: install the same on all nodes"
        )
    one_thread()
    return work.rows(chunk)
