"""A sweep from its file to its folder: chunks that are missing are worked off, and what is finished stays."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kernelcast.errors import KernelcastError
from kernelcast.search.sweep.engines import Lost
from kernelcast.search.sweep.engines.base import Engine
from kernelcast.search.sweep.folder import Folder, rests_on
from kernelcast.search.sweep.space import Chunk
from kernelcast.search.sweep.work import Work

CHUNK_SETTINGS = 2000  # of a large sweep: a second or so of one core
_LEAST, _PARTS = 256, 32  # of a small one, that several workers have something to do


class Told(Protocol):
    """Hears how many settings of how many are done, and how many of them before this run."""

    def __call__(self, done: int, total: int, before: int) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What a run did. ``settings``: of the whole sweep; ``before``: of these, finished when it began."""

    folder: Path
    settings: int
    before: int
    seconds: float

    @property
    def settings_per_s(self) -> float:
        return (self.settings - self.before) / self.seconds if self.seconds else 0.0


def run_sweep(
    work: Work, path: Path, engine: Engine, *, chunk_settings: int | None = None, fresh: bool = False,
    told: Told | None = None,
) -> Outcome:  # fmt: skip
    """Refuses a sweep without settings, and a folder that holds another sweep."""
    start, folder = time.perf_counter(), Folder(path)
    settings = work.space.count
    if not settings:
        raise KernelcastError(f"no setting keeps where = {list(work.sweep.where)}")
    size = chunk_settings or usual_chunk(settings)
    chunks = list(work.space.chunks(size))
    with folder.held():
        if fresh:
            folder.clear()
        folder.begin(rests_on(work, size), settings, len(chunks))
        done = folder.done()
        missing = [chunk for chunk in chunks if chunk.number not in done]
        before = settings - sum(chunk.count for chunk in missing)
        lost = _worked_off(work, missing, engine, folder, before, settings, told)
    if lost:
        raise KernelcastError(_lost_text(lost, path))
    return Outcome(path, settings, before, time.perf_counter() - start)


def usual_chunk(settings: int) -> int:
    """By the number of settings alone, so that every engine cuts alike."""
    return min(CHUNK_SETTINGS, max(_LEAST, math.ceil(settings / _PARTS)))


def _worked_off(
    work: Work, missing: list[Chunk], engine: Engine, folder: Folder, done: int, settings: int, told: Told | None
) -> dict[Chunk, Lost]:
    lost: dict[Chunk, Lost] = {}
    before = done
    if told:
        told(done, settings, before)
    for chunk, rows in engine.run(work, missing) if missing else ():
        if isinstance(rows, Lost):
            lost[chunk] = rows
            continue
        folder.write(chunk.number, rows)
        done += chunk.count
        if told:
            told(done, settings, before)
    return lost


def _lost_text(lost: dict[Chunk, Lost], path: Path) -> str:
    chunk, why = next(iter(lost.items()))
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"settings {chunk.first:,} to {chunk.first + chunk.count - 1:,}{others} {why.said}; all other rows are in "
        f"{path}, and the same command tries these again (--workers 1 takes the least memory)"
    )
