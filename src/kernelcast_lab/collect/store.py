"""Measured models as files: JSON lines while measuring, one gzipped JSON to keep.

The first loses nothing when a run is interrupted, and says which cases are done. The second is small, the same bytes
for the same content, and is what validation reads.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernelcast.errors import KernelcastError
from kernelcast_lab.collect.cases import MODELS, Case, Config, with_layers
from kernelcast_lab.collect.trace import KernelRow, OpRow, Other, StepProfile

FORMAT = "kernelcast model cases 1"
Record = dict[str, Any]


def error_line(error: BaseException) -> str:
    """'OutOfMemoryError: CUDA out of memory. …', at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@dataclass(frozen=True)
class StepTiming:
    """Times of whole steps: the median, and the fastest and slowest."""

    median_ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class Timing:
    """Whole steps of a case, timed."""

    wall: StepTiming  # on the host's clock, the device idle before and after
    gpu: StepTiming  # between CUDA events around the step
    repeats: int
    parameters: int
    peak_memory_bytes: int
    sm_clock_mhz: float | None = None  # right after the timed steps, where NVML says
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class Measured(Timing):
    """What a runner finds out about a case."""

    profile: StepProfile


@dataclass(frozen=True)
class MeasuredCase:
    """A measured case: what ran, on what, and how long it and its kernels took."""

    case: Case
    config: Config
    environment: Record
    measured: Measured

    @property
    def wall_ms(self) -> float:
        return self.measured.wall.median_ms

    @property
    def kernel_sum_ms(self) -> float:
        return self.measured.profile.kernel_sum_ms


def json_lines(path: Path) -> Iterator[Any]:
    """Every whole line of a file, if there is one; an incomplete last line is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise KernelcastError(f"{path}: line {number} is not JSON") from None


class Journal:
    """The JSON-lines file of a run: an environment a run, a line a case."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> Iterator[Record]:
        for number, record in enumerate(json_lines(self.path), start=1):
            if not isinstance(record, dict) or "kind" not in record:
                raise KernelcastError(f"{self.path}: line {number} is not a record of measured models")
            yield record

    def done(self, record_type: str = "case", retry: bool = False) -> set[str]:
        """Ids of the cases that need not run again; with ``retry`` the failed ones do."""
        last = {record["id"]: record for record in self.records() if record["kind"] == record_type}
        return {name for name, record in last.items() if not (retry and "error" in record)}

    def timings(self) -> dict[str, Timing]:
        """Of cases by id: what was timed, the last of each."""
        result = {record["id"]: record for record in self.records() if record["kind"] == "timing"}
        return {name: _timing(record["measured"]) for name, record in result.items() if "error" not in record}

    def append(self, record: Record) -> None:
        """Add one line and hand it to the disk; an incomplete last line is removed first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            # Times in ms to the nanosecond: what follows is noise that does not compress.
            rounded = json.loads(json.dumps(record), parse_float=lambda number: round(float(number), 6))
            file.write(json.dumps(rounded, separators=(",", ":")).encode() + b"\n")


def case_record(case: Case, run: str, seconds: float, result: Timing | str, record_type: str = "case") -> Record:
    """The line of a case: its result, or its error message."""
    record: Record = {"kind": record_type, "id": case.id, "run": run, "case": asdict(case), "seconds": seconds}
    return {**record, "error": result} if isinstance(result, str) else {**record, "measured": asdict(result)}


def pack(journal: Path, packed: Path) -> tuple[int, int]:
    """Write a journal's cases (the last try of each) as one gzipped JSON; how many there are, and how many failed."""
    if not journal.exists():
        raise KernelcastError(f"{journal}: no such file")
    last: dict[str, Record] = {}
    environments: dict[str, Record] = defaultdict(dict)
    for record in Journal(journal).records():
        if record["kind"] == "case":
            last[record["id"]] = record
        elif record["kind"] == "environment":  # the start of a run, and what is known at its end
            environments[record["run"]].update(record["facts"])
    if not last:
        raise KernelcastError(f"{journal}: holds no case")
    good = [record for record in last.values() if "error" not in record]
    failed = [{"id": record["id"], "error": record["error"]} for record in last.values() if "error" in record]
    runs = {record["run"] for record in good}
    names = {record["case"]["model"] for record in good}
    content = {
        "format": FORMAT,
        "models": {name: config for name, config in MODELS.items() if name in names},
        "environments": {run: facts for run, facts in environments.items() if run in runs},
        "cases": [{key: record[key] for key in ("run", "case", "measured")} for record in good],
        "failed": failed,
    }
    packed.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, separators=(",", ":"))
    packed.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    return len(good), len(failed)


def load_cases(path: str | Path) -> tuple[MeasuredCase, ...]:
    """The measured cases of a packed file; their rows add up to their sums, or it is refused."""
    path = Path(path)
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        raise KernelcastError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise KernelcastError(f"{path}: not a gzipped JSON file ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise KernelcastError(f"{path}: not a file of measured models (format {FORMAT!r})")
    return tuple(_measured_case(path, content, record) for record in content["cases"])


def _measured_case(path: Path, content: Record, record: Record) -> MeasuredCase:
    case = Case(**record["case"])
    measured = dict(record["measured"])
    profile = dict(measured["profile"])
    shaped = ({**row, "grid": tuple(row["grid"]), "block": tuple(row["block"])} for row in profile["kernels"])
    profile["kernels"] = tuple(KernelRow(**row) for row in shaped)
    profile["ops"] = tuple(OpRow(**row) for row in profile["ops"])
    profile |= {name: Other(**profile[name]) for name in ("other_kernels", "other_ops")}
    del measured["profile"]
    timing = _timing(measured)
    result = Measured(**vars(timing), profile=_checked(path, case, StepProfile(**profile)))
    config = with_layers(content["models"][case.model], case.layers)
    return MeasuredCase(case, config, content["environments"][record["run"]], result)


def _timing(values: Record) -> Timing:
    return Timing(**values | {name: StepTiming(**values[name]) for name in ("wall", "gpu")})


def _checked(path: Path, case: Case, profile: StepProfile) -> StepProfile:
    """Refuse rows that do not add up: a file that was edited or truncated."""
    parts = [("kernels", profile.kernels, profile.other_kernels)]
    if profile.ops:
        parts.append(("ops", profile.ops, profile.other_ops))  # type: ignore[arg-type]
    for name, rows, other in parts:
        time_ms = (sum(row.total_us for row in rows) + other.total_us) / 1e3
        calls = sum(row.calls for row in rows) + other.calls
        if abs(time_ms - profile.kernel_sum_ms) > 1e-3 + 1e-4 * profile.kernel_sum_ms or calls != profile.kernel_calls:
            raise KernelcastError(
                f"{path}: {name} of {case.id} add up to {time_ms:.3f} ms in {calls} calls, "
                f"not to {profile.kernel_sum_ms:.3f} ms in {profile.kernel_calls}"
            )
    return profile
