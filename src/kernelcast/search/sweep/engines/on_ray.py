"""A Ray cluster: one that runs at an address, or a local one for this sweep. Rows come back here to be written, so
that nodes need no common disk, only the same kernelcast."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kernelcast._version import __version__
from kernelcast.errors import KernelcastError
from kernelcast.search.sweep.engines.base import THREADS, TRIES, Lost, one_thread
from kernelcast.search.sweep.folder import weights_of
from kernelcast.search.sweep.space import Chunk
from kernelcast.search.sweep.work import Work

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
