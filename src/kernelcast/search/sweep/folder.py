"""The folder of a sweep: a manifest of what its rows rest on, and one Parquet file a finished chunk.

A file is complete or not there, so that a sweep that was killed at any instant goes on with the missing chunks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelcast._version import __version__
from kernelcast.errors import KernelcastError
from kernelcast.files import complete
from kernelcast.forecast.conditions import Conditions, chosen
from kernelcast.forecast.learned import WEIGHTS
from kernelcast.search.sweep.work import Work

FORMAT = 1
MANIFEST = "manifest.json"
CHUNKS = "chunk-*.parquet"
_NAME = re.compile(r"chunk-(\d+)\.parquet")
_LEFT = (".*.part.parquet", ".*.part.json")  # of writers that were killed
_LOCK = ".lock"


def weights_of(conditions: Conditions) -> str:
    """A digest of all fitted weights that answer."""
    folder = getattr(conditions.predictor, "folder", WEIGHTS)
    return _digest_of(folder)


@functools.cache
def _digest_of(weights: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(weights.glob("*.safetensors")):
        found.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:32]


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
        "predictor": chosen(conditions).name,
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
    told = "nothing" if value is None else json.dumps(value) if not isinstance(value, str) else value
    return told if len(told) <= 60 else told[:57] + "…"
