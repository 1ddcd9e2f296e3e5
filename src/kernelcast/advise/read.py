"""Whatever was measured, by what the file is: a torch.profiler trace, a CSV of Nsight Compute, or a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kernelcast.advise.chrome_events import load_trace
from kernelcast.advise.measured import Profile
from kernelcast.advise.read_ncu import is_ncu, read_ncu
from kernelcast.advise.read_profile import gpu_name, profile_of
from kernelcast.advise.read_table import read_table
from kernelcast.calls.call import columns_of
from kernelcast.calls.table import BadRows
from kernelcast.errors import KernelcastError
from kernelcast.files import ENDINGS
from kernelcast.hardware import Gpu, gpu
from kernelcast.measured.physics import add_too_fast

_TRACES = (".json", ".gz")


def read_measured(path: Path, chip: Gpu | None = None) -> tuple[Profile, Gpu]:
    """The measured calls and the GPU: ``chip``, else the one that the file names."""
    if not path.exists():
        raise KernelcastError(f"no file {path}")
    if not path.is_file():
        raise KernelcastError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise KernelcastError(f"{path} is empty")
    ending = path.suffix.lower()
    if ending in _TRACES:
        trace = load_trace(path)
        place = chip or _named(path, gpu_name(trace))
        try:
            return profile_of(trace, place), place
        except KernelcastError as error:
            raise KernelcastError(f"{path}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError):
            raise KernelcastError(
                f"{path}: an event of the trace has no ts, dur or name, or they are not numbers"
            ) from None
    if ending == ".csv" and is_ncu(path):
        return read_ncu(path), chip or _named(path, "")
    if ending in ENDINGS:
        profile = read_table(path)
        place = chip or _named(path, profile.gpu_name)
        bad = BadRows()
        times_us = np.array([measured.time_us for measured in profile.calls])
        add_too_fast(columns_of([measured.calls[0].call for measured in profile.calls]), times_us, place, bad)
        if bad.found:
            raise KernelcastError(f"{path}: {bad.text()}")
        return profile, place
    known = "a torch.profiler trace (.json, .json.gz), a CSV of ncu, or a table"
    raise KernelcastError(f"{path}: what is it? It should be {known} ({', '.join(ENDINGS)})")


def _named(path: Path, name: str) -> Gpu:
    if not name:
        raise KernelcastError(f"which GPU? {path} does not say; give --gpu, as in --gpu h200_sxm")
    return gpu(name)
