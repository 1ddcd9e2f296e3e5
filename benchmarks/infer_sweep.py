"""How fast many settings are inferred: 10,000 of model, GPU, TP, batch and length; or those of another checkout beside.

python benchmarks/infer_sweep.py
python benchmarks/infer_sweep.py --against ../before/src --rounds 2     # in turn, the best of each; and how far apart
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b")
GPUS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s")
TPS, BATCHES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
LENGTHS = ((128, 128), (256, 256), (512, 128), (1024, 256), (1024, 1024), (2048, 256), (4096, 128), (4096, 512),
           (8192, 256), (16384, 128))  # fmt: skip
_OWN = Path(__file__).parents[1] / "src"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--against", type=Path, help="src of another checkout, run in turn with this one")
    options.add_argument("--rounds", type=int, default=1, help="runs of each, the best counts")
    options.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.once:
        once(given.once)
        return
    sources = [_OWN, *([given.against.resolve()] if given.against else [])]
    with tempfile.TemporaryDirectory() as folder:
        runs = [(source, _run(source, Path(folder))) for _ in range(given.rounds) for source in sources]
        for source in sources:
            best = min((told for of, told in runs if of == source), key=lambda told: told["cpu_s"])
            print(f"{source}: {best['settings']:,} settings, {best['refused']:,} do not fit; {best['wall_s']:.1f} s, "
                  f"{best['cpu_s']:.1f} s of CPU, {best['cpu_s'] / best['settings'] * 1e3:.2f} ms each; "
                  f"{best['memory_mb']:,.0f} MB")  # fmt: skip
        found = [np.load(Path(folder) / f"{_number(source)}.npy") for source in sources]
    if len(found) == 2:
        print(f"largest difference of a time or an end of its interval: {np.abs(found[0] / found[1] - 1).max():.1e}")


def _number(source: Path) -> str:
    return "own" if source == _OWN else "other"


def _run(source: Path, folder: Path) -> dict[str, Any]:
    """A process of its own, so that nothing is known from before."""
    path = folder / f"{_number(source)}.npy"
    command = [sys.executable, __file__, "--once", str(path)]
    told = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(source)}, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def once(path: Path) -> None:
    """All settings in this process: prefill and decode with their intervals to ``path``, what it took as JSON."""
    import kernelcast as kc
    from kernelcast.inference.deployment import Layout
    from kernelcast.inference.forward import Deployment
    from kernelcast.inference.infer import infer_many
    from kernelcast.inference.workload import Workload
    from kernelcast.models import model
    from kernelcast.stacks import stack

    gpus, engine = [kc.gpu(name) for name in GPUS], stack("vllm")
    start, start_cpu = time.perf_counter(), time.process_time()
    models = [model(name) for name in MODELS]
    places = [Deployment(m, g, engine, layout=Layout(tp=tp)) for m, g, tp in itertools.product(models, gpus, TPS)]
    workloads = [Workload.equal(batch, *lengths) for batch, lengths in itertools.product(BATCHES, LENGTHS)]
    cases, refused = list(itertools.product(places, workloads)), []
    found = infer_many(cases, skip=lambda at, error: refused.append(at))
    spans = [(one.prefill, one.decode) for one in found]
    took = {"wall_s": time.perf_counter() - start, "cpu_s": time.process_time() - start_cpu}
    np.save(path, np.array([[end for s in both for end in (s.value, s.low, s.high)] for both in spans]))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**took, "settings": len(cases), "refused": len(refused), "memory_mb": used}))


if __name__ == "__main__":
    main()
