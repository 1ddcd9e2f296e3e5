"""A sweep from its file to its folder: chunks that are missing are worked off, and what is finished stays."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickle
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kernelcast._version import __version__
from kernelcast.errors import KernelcastError
from kernelcast.files import complete
from kernelcast.search.sweep.engines import Engine, Lost
from kernelcast.search.sweep.rows import Work, weights_of
from kernelcast.search.sweep.space import Chunk

FORMAT = 1
MANIFEST = "manifest.json"
CHUNKS = "chunk-*.parquet"
_NAME = re.compile(r"chunk-(\d+)\.parquet")
_LEFT = (".*.part.parquet", ".*.part.json")  # of writers that were killed
_LOCK = ".lock"


def rests_on(work: Work, chunk_settings: int) -> dict[str, Any]:
    """All that decides the rows, by names that an error can tell."""
    sweep, conditions = work.sweep, work.conditions
    parts = [
        *(("model", one.name, one) for one in sweep.models),
        *(("gpu", one.id, one) for one in sweep.gpus),
        *(("stack", one.id, one) for one in sweep.stacks),
    ]
    return {
        "format": FORMAT,
        "kernelcast": __version__,
        "weights": weights_of(conditions),
        "predictor": conditions.loaded_predictor.name,
        "calibration": _sha(pickle.dumps(conditions.calibration)) if conditions.calibration else None,
        "asked": json.loads(json.dumps(dict(sweep.asked), default=str)),
        "digests": {f"{kind} {name}": _sha(repr(one).encode()) for kind, name, one in parts},
        "prices": dict(sorted(work.prices.items())),
        "chunk_settings": chunk_settings,
    }


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class Folder:
    """Where a sweep's rows are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise KernelcastError(f"{self.path} is no folder of a sweep: it has no {MANIFEST}") from None
        except (OSError, ValueError) as error:
            raise KernelcastError(f"{self.path / MANIFEST} is not readable: {error}") from None
        if not isinstance(found, dict) or "rests_on" not in found:
            raise KernelcastError(f"{self.path / MANIFEST} is no manifest of a sweep")
        return found

    @property
    def begun(self) -> bool:
        return (self.path / MANIFEST).exists()

    def done(self) -> set[int]:
        """Numbers of the chunks that are finished."""
        names = (_NAME.fullmatch(path.name) for path in self.path.glob(CHUNKS))
        return {int(name[1]) for name in names if name}

    def write(self, number: int, rows: bytes) -> None:
        with complete(self.path / f"chunk-{number:06d}.parquet") as part:
            part.write_bytes(rows)

    def begin(self, basis: Mapping[str, Any], settings: int, chunks: int) -> None:
        """A new sweep, or the same one that goes on; another one's folder is refused."""
        if self.begun:
            self._check(basis)
        else:
            text = json.dumps({"rests_on": basis, "settings": settings, "chunks": chunks}, indent=1)
            with complete(self.path / MANIFEST) as part:
                part.write_text(text + "\n", encoding="utf-8")

    def _check(self, basis: Mapping[str, Any]) -> None:
        was = self.manifest["rests_on"]
        changed = next((name for name in basis if basis[name] != was.get(name)), None)
        if changed is None:
            return
        raise KernelcastError(
            f"{self.path} was begun with {_difference(changed, was.get(changed), basis[changed])}; its rows would not "
            f"match: give --fresh to start anew in it ({len(self.done())} finished chunks are lost), or another -o"
        )

    def clear(self) -> None:
        """Chunks first: a manifest without them is a sweep that has just begun."""
        for path in [*self.path.glob(CHUNKS), self.path / MANIFEST]:
            path.unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Made where it is missing, and for one sweep at a time; leftovers of killed ones are removed."""
        if self.path.exists() and not self.path.is_dir():
            raise KernelcastError(f"{self.path} is a file; a sweep writes to a folder")
        foreign = [] if self.begun or not self.path.is_dir() else [p for p in self.path.iterdir() if p.name[0] != "."]
        if foreign:
            raise KernelcastError(f"{self.path} is not empty and no folder of a sweep: give another -o")
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("w") as lock:
            _take(lock, self.path)
            for pattern in _LEFT:
                for path in self.path.glob(pattern):
                    path.unlink(missing_ok=True)
            yield


def _take(lock: Any, path: Path) -> None:
    """The system lets go of it when the process ends, however it ends."""
    with contextlib.suppress(ImportError):  # not on Windows
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KernelcastError(f"another sweep is writing to {path}: wait for it, or give another -o") from None


def _difference(name: str, was: Any, now: Any) -> str:
    """'batch = [1, 2] (now [1, 4])'."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        key = next(key for key in sorted({*was, *now}) if was.get(key) != now.get(key))
        if name == "digests":
            return f"other numbers of {key}"
        what = f"price {key}" if name == "prices" else key
        return f"{what} = {_short(was.get(key))}, now {_short(now.get(key))}"
    names = {"kernelcast": "kernelcast", "chunk_settings": "chunks of settings:", "weights": "weights"}
    return f"{names.get(name, name)} {_short(was)}, now {_short(now)}"


def _short(value: Any) -> str:
    shown = "nothing" if value is None else json.dumps(value) if not isinstance(value, str) else value
    return shown if len(shown) <= 60 else shown[:57] + "…"


CHUNK_SETTINGS = 2000  # of a large sweep: a second or so of one core
_LEAST, _PARTS = 256, 32  # of a small one, that several workers have something to do


class OnSettings(Protocol):
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
    on_progress: OnSettings | None = None,
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
        lost = _worked_off(work, missing, engine, folder, before, settings, on_progress)
    if lost:
        raise KernelcastError(_lost_text(lost, path))
    return Outcome(path, settings, before, time.perf_counter() - start)


def usual_chunk(settings: int) -> int:
    """By the number of settings alone, so that every engine cuts alike."""
    return min(CHUNK_SETTINGS, max(_LEAST, math.ceil(settings / _PARTS)))


def _worked_off(
    work: Work,
    missing: list[Chunk],
    engine: Engine,
    folder: Folder,
    done: int,
    settings: int,
    on_progress: OnSettings | None,
) -> dict[Chunk, Lost]:
    lost: dict[Chunk, Lost] = {}
    before = done
    if on_progress:
        on_progress(done, settings, before)
    for chunk, rows in engine.run(work, missing) if missing else ():
        if isinstance(rows, Lost):
            lost[chunk] = rows
            continue
        folder.write(chunk.number, rows)
        done += chunk.count
        if on_progress:
            on_progress(done, settings, before)
    return lost


def _lost_text(lost: dict[Chunk, Lost], path: Path) -> str:
    chunk, why = next(iter(lost.items()))
    others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    return (
        f"settings {chunk.first:,} to {chunk.first + chunk.count - 1:,}{others} {why.said}; all other rows are in "
        f"{path}, and the same command tries these again (--workers 1 takes the least memory)"
    )
