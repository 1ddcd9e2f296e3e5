"""Whatever was measured, by what the file is: a torch.profiler trace, a CSV of Nsight Compute, or a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.diagnose.chrome_events import load_trace
from kernelcast.diagnose.measured import Profile
from kernelcast.diagnose.read_ncu import is_ncu, read_ncu
from kernelcast.diagnose.read_profile import gpu_name, profile_of
from kernelcast.diagnose.read_table import read_table
from kernelcast.errors import KernelcastError
from kernelcast.files import ENDINGS
from kernelcast.forecast.calls import columns_of
from kernelcast.forecast.predict_table import add_too_fast
from kernelcast.forecast.table import BadRows
from kernelcast.hardware import Gpu, gpu

TRACES = (".json", ".gz")


def read_measured(path: Path, chip: Gpu | None = None) -> tuple[Profile, Gpu]:
    """The measured calls and the GPU: ``chip``, else the one that the file names."""
    if not path.exists():
        raise KernelcastError(f"no file {path}")
    if not path.is_file():
        raise KernelcastError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise KernelcastError(f"{path} is empty")
    ending = path.suffix.lower()
    if ending in TRACES:
        trace = load_trace(path)
        place = chip or named_in(path, gpu_name(trace))
        return trace_profile(trace, place, path), place
    if ending == ".csv" and is_ncu(path):
        return read_ncu(path), chip or named_in(path, "")
    if ending in ENDINGS:
        profile = read_table(path)
        place = chip or named_in(path, profile.gpu_name)
        refuse_too_fast(profile, place, path)
        return profile, place
    raise what_is_it(path)


def what_is_it(path: Path) -> KernelcastError:
    known = "a torch.profiler trace (.json, .json.gz), a CSV of ncu, or a table"
    return KernelcastError(f"{path}: what is it? It should be {known} ({', '.join(ENDINGS)})")


def trace_profile(trace: dict[str, Any], chip: Gpu, path: Path) -> Profile:
    """The measured calls of a trace; what is wrong with it in one line."""
    try:
        return profile_of(trace, chip)
    except KernelcastError as error:
        raise KernelcastError(f"{path}: {error}") from None
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        raise KernelcastError(
            f"{path}: an event of the trace has no ts, dur or name, or they are not numbers"
        ) from None


def refuse_too_fast(profile: Profile, chip: Gpu, path: Path) -> None:
    """Rows of a table that this GPU cannot have run."""
    bad = BadRows()
    times_us = np.array([measured.time_us for measured in profile.calls])
    add_too_fast(columns_of([measured.calls[0].call for measured in profile.calls]), times_us, chip, bad)
    if bad.found:
        raise KernelcastError(f"{path}: {bad.text()}")


def named_in(path: Path, name: str) -> Gpu:
    """The GPU that a file names."""
    if not name:
        raise KernelcastError(f"which GPU? {path} does not say; give --gpu, as in --gpu h200_sxm")
    return gpu(name)
