"""Run a sweep into its folder: missing chunks are computed, finished ones are kept."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast._version import __version__
from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.files import complete
from kernelcast.forecast.conditions import Conditions
from kernelcast.search.sweep.engines import FailedChunk, SweepEngine
from kernelcast.search.sweep.file import read_toml_file, sweep_of
from kernelcast.search.sweep.rows import SweepJob, hourly_prices, weights_digest
from kernelcast.search.sweep.space import Chunk
from kernelcast.search.sweep.training import TrainingSweep, TrainingSweepJob

FORMAT = 1
MANIFEST = "manifest.json"
CHUNKS = "chunk-*.parquet"
_NAME = re.compile(r"chunk-(\d+)\.parquet")
_LEFTOVERS = (".*.part.parquet", ".*.part.json")  # of writers that were killed
_LOCK = ".lock"
CHUNK_SETTINGS = 2000  # of a large sweep: a second or so of one core
_LEAST, _PARTS = 256, 32  # of a small one, that several workers have something to do


MODES = ("inference", "training")


def sweep_job(
    path: Path, conditions: Conditions, prices: Path | None = None, price: Sequence[str] = ()
) -> SweepJob | TrainingSweepJob:
    """What a file describes: batches that an engine runs, or training jobs (``mode = "training"``)."""
    given = read_toml_file(path)
    try:
        refuse_unknown("mode", [given.get("mode", MODES[0])], MODES)
        if given.pop("mode", None) == "training":
            training = TrainingSweep.of(given)
            return TrainingSweepJob(training, conditions, hourly_prices(training.gpus, prices, price))
        sweep = sweep_of(given)
    except KernelcastError as error:
        raise KernelcastError(f"{path}: {error}") from None
    return SweepJob(sweep, conditions, hourly_prices(sweep.gpus, prices, price))


def basis_of(job: SweepJob | TrainingSweepJob, chunk_settings: int) -> dict[str, Any]:
    """Everything that determines the rows, by names for error messages."""
    sweep, conditions = job.sweep, job.conditions
    digests = {f"model {each.name}": _sha(repr(each).encode()) for each in sweep.models}
    digests |= {f"gpu {each.id}": _sha(repr(each).encode()) for each in sweep.gpus}
    digests |= {f"stack {each.id}": _sha(repr(each).encode()) for each in sweep.stacks}
    return {
        "format": FORMAT,
        "kernelcast": __version__,
        "weights": weights_digest(conditions),
        "predictor": conditions.loaded_predictor.name,
        "calibration": _sha(pickle.dumps(conditions.calibration)) if conditions.calibration else None,
        "asked": json.loads(json.dumps(dict(sweep.given), default=str)),
        "digests": digests,
        "prices": dict(sorted(job.prices.items())),
        "chunk_settings": chunk_settings,
    }


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class SweepFolder:
    """Where a sweep's rows are: a manifest of their inputs, and one Parquet file per finished chunk. A file is
    complete or not there, so that a sweep killed at any instant goes on with the missing chunks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise KernelcastError(f"{self.path} is no folder of a sweep: it has no {MANIFEST}") from None
        except (OSError, ValueError) as error:
            raise KernelcastError(f"{self.path / MANIFEST} is not readable: {error}") from None
        if not isinstance(manifest, dict) or "rests_on" not in manifest:
            raise KernelcastError(f"{self.path / MANIFEST} is no manifest of a sweep")
        return manifest

    @property
    def begun(self) -> bool:
        return (self.path / MANIFEST).exists()

    def finished(self) -> set[int]:
        """Numbers of the chunks that are finished."""
        names = (_NAME.fullmatch(path.name) for path in self.path.glob(CHUNKS))
        return {int(name[1]) for name in names if name}

    def write(self, number: int, rows: bytes) -> None:
        with complete(self.path / f"chunk-{number:06d}.parquet") as part:
            part.write_bytes(rows)

    def begin(self, basis: Mapping[str, Any], settings: int, chunks: int) -> None:
        """A new sweep, or the same one that goes on; the folder of another sweep is refused."""
        if not self.begun:
            manifest = json.dumps({"rests_on": basis, "settings": settings, "chunks": chunks}, indent=1)
            with complete(self.path / MANIFEST) as part:
                part.write_text(manifest + "\n", encoding="utf-8")
            return
        before = self.manifest["rests_on"]
        changed = next((name for name in basis if basis[name] != before.get(name)), None)
        if changed is not None:
            raise KernelcastError(
                f"{self.path} was begun with {_difference(changed, before.get(changed), basis[changed])}; its rows "
                "would not match: give `fresh` to start anew in it "
                f"({len(self.finished())} finished chunks are lost), or another -o"
            )

    def clear(self) -> None:
        """Chunks first: a manifest without them is a sweep that has just begun."""
        for path in [*self.path.glob(CHUNKS), self.path / MANIFEST]:
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Made where it is missing, and for one sweep at a time; leftovers of killed ones are removed."""
        if self.path.exists() and not self.path.is_dir():
            raise KernelcastError(f"{self.path} is a file; a sweep writes to a folder")
        foreign = [] if self.begun or not self.path.is_dir() else [p for p in self.path.iterdir() if p.name[0] != "."]
        if foreign:
            raise KernelcastError(f"{self.path} is not empty and no folder of a sweep: give another -o")
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("w") as lock:
            with contextlib.suppress(ImportError):  # not on Windows
                import fcntl

                try:  # the system releases it when the process ends, however it ends
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise KernelcastError(
                        f"another sweep is writing to {self.path}: wait for it, or give another -o"
                    ) from None
            for path in itertools.chain.from_iterable(map(self.path.glob, _LEFTOVERS)):
                path.unlink(missing_ok=True)
            yield


def _difference(name: str, before: Any, now: Any) -> str:
    """'batch = [1, 2], now [1, 4]'."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        key = next(key for key in sorted({*before, *now}) if before.get(key) != now.get(key))
        if name == "digests":
            return f"other numbers of {key}"
        label = f"price {key} =" if name == "prices" else f"{key} ="
        before, now = before.get(key), now.get(key)
    else:
        label = "chunks of settings:" if name == "chunk_settings" else name
    return f"{label} {_short(before)}, now {_short(now)}"


def _short(value: Any) -> str:
    shown = "nothing" if value is None else json.dumps(value) if not isinstance(value, str) else value
    return shown if len(shown) <= 60 else shown[:57] + "…"


@dataclass(frozen=True)
class SweepOutcome:
    """``settings``: of the whole sweep; ``before``: of these, finished when this run began."""

    folder: Path
    settings: int
    before: int
    seconds: float

    @property
    def settings_per_s(self) -> float:
        return (self.settings - self.before) / self.seconds if self.seconds else 0.0


def run_sweep(
    job: SweepJob | TrainingSweepJob, path: Path, engine: SweepEngine, *, chunk_settings: int | None = None,
    fresh: bool = False, on_progress: Callable[[int, int, int], None] = lambda done, total, before: None,
) -> SweepOutcome:  # fmt: skip
    """Computes the missing chunks. Refuses a sweep without settings, and a folder that holds another sweep.
    ``on_progress`` gets the settings that are done, all of them, and those that were done before this run."""
    start, folder = time.perf_counter(), SweepFolder(path)
    settings = job.space.count
    if not settings:
        raise KernelcastError(f"no setting keeps where = {list(job.sweep.where)}")
    size = chunk_settings or default_chunk(settings)
    chunks = list(job.space.chunks(size))
    failed: dict[Chunk, FailedChunk] = {}
    with folder.locked():
        if fresh:
            folder.clear()
        folder.begin(basis_of(job, size), settings, len(chunks))
        finished = folder.finished()
        missing = [chunk for chunk in chunks if chunk.number not in finished]
        before = done = settings - sum(chunk.count for chunk in missing)
        on_progress(done, settings, before)
        for chunk, rows in engine.run(job, missing) if missing else ():
            if isinstance(rows, FailedChunk):
                failed[chunk] = rows
                continue
            folder.write(chunk.number, rows)
            done += chunk.count
            on_progress(done, settings, before)
    if failed:
        chunk, failure = next(iter(failed.items()))
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise KernelcastError(
            f"settings {chunk.first:,} to {chunk.first + chunk.count - 1:,}{others} {failure.why}; all other rows are "
            f"in {path}, and the same command tries these again (`workers` 1 takes the least memory)"
        )
    return SweepOutcome(path, settings, before, time.perf_counter() - start)


def default_chunk(settings: int) -> int:
    """The chunk size, by the number of settings alone, so that every executor has the same chunks."""
    return min(CHUNK_SETTINGS, max(_LEAST, math.ceil(settings / _PARTS)))
