"""How fast `kernelcast sweep` works off a million settings: 5 models x 5 GPUs x 4 cuts x 2 formats x 5,000 sizes.

python benchmarks/sweep_million.py --settings 20000     chunks taken at random from the million, on all cores
python benchmarks/sweep_million.py                      all of it
python benchmarks/sweep_million.py --file million.toml  writes the file for `kernelcast sweep million.toml`
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import time
import tomllib
from pathlib import Path

from kernelcast.forecast.conditions import Conditions
from kernelcast.search.sweep.engines import FailedChunk, sweep_engine
from kernelcast.search.sweep.file import sweep_of
from kernelcast.search.sweep.rows import SweepJob, hourly_prices
from kernelcast.search.sweep.run import default_chunk

FILE = """model = ["llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b"]
gpu = ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s"]
tp = [1, 2, 4, 8]
dtype = ["bf16", "fp8"]
batch = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
input_len = { from = 128, to = 16384, steps = 25, scale = "log" }
output_len = { from = 16, to = 1024, steps = 10, scale = "log" }
"""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--settings", type=int, default=0, help="about so many, at random from all")
    asked.add_argument("--workers", type=int, default=None)
    asked.add_argument("--engine", default="processes")
    asked.add_argument("--file", type=Path, default=None)
    given = asked.parse_args()
    if given.file:
        given.file.write_text(FILE)
        return
    sweep = sweep_of(tomllib.loads(FILE))
    work = SweepJob(sweep, Conditions(), hourly_prices(sweep.gpus))
    chunks = list(work.space.chunks(default_chunk(work.space.count)))
    if given.settings:
        wanted = max(1, round(given.settings / chunks[0].count))
        chunks = sorted(random.Random(0).sample(chunks, wanted), key=lambda chunk: chunk.number)
    settings, size, most, start = sum(chunk.count for chunk in chunks), 0, 0, time.perf_counter()
    for chunk, rows in sweep_engine(given.engine, given.workers).run(work, chunks):
        if isinstance(rows, FailedChunk):
            raise SystemExit(f"chunk {chunk.number} {rows.why}")
        size += len(rows)
        most = max(most, memory_bytes())
    took = time.perf_counter() - start
    cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        f"{settings:,} of {work.space.count:,} settings in {took:.1f} s ({cpu:.1f} s of CPU time): "
        f"{settings / took:,.0f} settings/s, {work.space.count / settings * took / 60:.1f} min for all; "
        f"at most {most / 2**20:,.0f} MiB in all processes, {size / settings:.0f} bytes a row"
    )


def memory_bytes() -> int:
    """The most that each process has held so far, added up."""
    found = 0
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        path = Path(f"/proc/{pid}/status")
        if path.exists():
            held = [line for line in path.read_text().splitlines() if line.startswith("VmHWM")]
            found += int(held[0].split()[1]) * 1024 if held else 0
    return found


if __name__ == "__main__":
    main()
