"""How fast tables are predicted, how cost grows, and how much memory that takes.

`make bench` prints the table; `--check` exits 1 when a promise of the README is broken. Each case runs in a fresh
process, so that peak memory is its own. `--against ../other/src` measures this checkout and another in turn, so that
whatever else the machine does meets both, and prints the best of each side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# Rows per second at a million rows, by table and predictor.
PROMISES = {("gemm", "generic"): 200_000, ("mixed", "generic"): 100_000, ("gemm", "learned"): 50_000,
            ("mixed", "learned"): 50_000}  # fmt: skip
SCALAR_S = 1e-3
PEAK_MEMORY_BYTES = 2e9
IMPORT_S, CLI_S = 0.3, 1.0


def gemm_table(rows: int, rng: np.random.Generator) -> dict[str, Any]:
    sides = {side: np.floor(2 ** rng.uniform(4, 14, rows)).astype(np.int64) for side in ("m", "n", "k")}
    return {"op": np.full(rows, "gemm", dtype=object), **sides}


def mixed_table(rows: int, rng: np.random.Generator) -> dict[str, Any]:
    """Every family in equal parts, parameters around those of its examples."""
    from kernelcast.ops import REGISTRY, parameters_of

    picks = [(op, dict(example)) for op, cls in sorted(REGISTRY.items()) for example in cls.examples[:1]]
    choice = rng.integers(0, len(picks), rows)
    names = sorted({name for _, example in picks for name in example})
    table: dict[str, Any] = {"op": np.array([op for op, _ in picks], dtype=object)[choice]}
    for name in names:
        column: np.ndarray = np.full(rows, None, dtype=object)
        for index, (op, example) in enumerate(picks):
            if name not in example:
                continue
            at = choice == index
            column[at] = _spread(example[name], parameters_of(REGISTRY[op])[name].type, int(at.sum()), name, rng)
        words = any(isinstance(example.get(name), str) for _, example in picks)
        table[name] = column if words else column.astype(np.float64)
    return table


def _spread(value: Any, kind: str, count: int, name: str, rng: np.random.Generator) -> Any:
    """Sizes that may vary freely vary; those bound to others stay."""
    free = ("m", "n", "k", "rows", "tokens", "batch", "bytes", "kv_len", "hidden")
    if kind == "size" and name in free and name != "kv_len":
        return np.maximum(1, np.floor(value * 2 ** rng.uniform(-3, 1, count)))
    return value


def measure(kind: str, predictor: str, rows: int) -> dict[str, float]:
    """Predict one table in this process; ``one``: a single call, many times."""
    import kernelcast as kc

    if kind == "one":
        return {"rows": 1, "seconds": scalar_s()}

    table = {"gemm": gemm_table, "mixed": mixed_table}[kind](rows, np.random.default_rng(0))
    conditions = kc.Conditions(predictor=predictor)
    kc.predict_table({name: column[:1000] for name, column in table.items()}, "h200_sxm", conditions)  # warm up
    start = time.perf_counter()
    kc.predict_table(table, "h200_sxm", conditions)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rows": rows, "seconds": seconds, "rows_per_s": rows / seconds, "peak_bytes": peak}


def scalar_s() -> float:
    """Median seconds of one prediction."""
    import kernelcast as kc

    call, gpu = kc.Gemm(m=512, n=4096, k=4096), kc.gpu("h200_sxm")
    times = []
    for _ in range(200):
        start = time.perf_counter()
        kc.predict(call, gpu)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


HERE = Path(__file__).resolve().parents[1] / "src"


def side_by_side(other: Path, rows: int, rounds: int) -> None:
    """This checkout and another in turn, each measurement in a fresh process; the best of each."""
    places = {"before": other, "now": HERE}
    print(f"{'':28} {'before':>12} {'now':>12} {'ratio':>7}   best of {rounds} in turn, {rows:,} rows")
    for kind in ("gemm", "mixed"):
        speeds: dict[str, list[float]] = {name: [] for name in places}
        for _ in range(rounds):
            for name, source in places.items():
                speeds[name].append(in_fresh_process(kind, "learned", rows, source)["rows_per_s"])
        before, now = max(speeds["before"]), max(speeds["now"])
        print(f"{f'{kind} rows, learned':28} {before:10,.0f}/s {now:10,.0f}/s {now / before:6.2f}x")
    times: dict[str, list[float]] = {name: [] for name in places}
    for _ in range(rounds):
        for name, source in places.items():
            times[name].append(in_fresh_process("one", "learned", 0, source)["seconds"] * 1e3)
    before, now = min(times["before"]), min(times["now"])
    print(f"{'one prediction from Python':28} {before:9.3f} ms {now:9.3f} ms {before / now:6.2f}x")


def in_fresh_process(kind: str, predictor: str, rows: int, source: Path = HERE) -> dict[str, float]:
    """With the kernelcast that lies in ``source``."""
    command = [sys.executable, __file__, "--one", kind, predictor, str(rows)]
    told = {**os.environ, "PYTHONPATH": str(source)}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=told)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def wall(command: list[str], repeats: int = 5) -> float:
    """Median seconds of a command."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "PREDICTOR", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another checkout")
    parser.add_argument("--rows", type=int, default=200_000, help="of a table, with --against")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts, with --against")
    parser.add_argument("--check", action="store_true", help="exit 1 when slower than promised")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], options.one[1], int(options.one[2]))))
        return 0
    if options.against:
        side_by_side(options.against.resolve(), options.rows, options.rounds)
        return 0
    broken = []
    print(f"{'table':8} {'predictor':9} {'rows':>9} {'seconds':>8} {'rows/s':>9} {'peak GB':>8}")
    for (kind, predictor), promise in PROMISES.items():
        for rows in (10_000, 100_000, 1_000_000):
            found = in_fresh_process(kind, predictor, rows)
            speed, peak = found["rows_per_s"], found["peak_bytes"] / 1e9
            print(f"{kind:8} {predictor:9} {rows:9,} {found['seconds']:8.2f} {speed:9,.0f} {peak:8.2f}")
        if found["rows_per_s"] < promise or found["peak_bytes"] > PEAK_MEMORY_BYTES:
            broken.append(f"{kind}, {predictor}: {promise:,} rows/s in 2 GB")
    bare = wall([sys.executable, "-c", "pass"])
    imported = wall([sys.executable, "-c", "import kernelcast"]) - bare
    call = ["kernel", "gemm", "--m", "4096", "--n", "4096", "--k", "4096", "--gpu", "h200_sxm"]
    cli = wall([sys.executable, "-m", "kernelcast", *call])
    one = scalar_s()
    print(f"import kernelcast: {imported:.3f} s beside Python's own start; one CLI call: {cli:.3f} s")
    print(f"one prediction from Python: {one * 1e3:.2f} ms")
    if imported > IMPORT_S or cli > CLI_S or one > SCALAR_S:
        broken.append(f"import in {IMPORT_S} s, CLI in {CLI_S} s, one prediction in {SCALAR_S} s")
    if options.check and broken:
        print("slower than promised: " + "; ".join(broken), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
