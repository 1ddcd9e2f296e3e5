"""Results of benchmarks of real servers: the load that was sent, and what was measured under it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.files import ENDINGS, open_table
from kernelcast.serving.load.bench_json import read_result, result_kind
from kernelcast.serving.load.cells import numbers, place, shown
from kernelcast.serving.load.files import read_trace
from kernelcast.serving.load.inference_perf import is_report, read_report
from kernelcast.serving.load.metrics import latencies_ms, throughput
from kernelcast.serving.load.results import Bench, server_words


def read_bench(path: Path, *, seed: int = 0) -> Bench:
    """A file (or, of inference-perf, a folder) with results, whatever it comes from; the last run of several.

    ``seed``: of a load that has to be made again, since the file has no requests one by one.
    """
    try:
        return _read(path, seed)
    except KernelcastError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KernelcastError(f"{path} is not as its benchmark writes it: {type(error).__name__} {error}") from None


def _read(path: Path, seed: int) -> Bench:
    if path.is_dir():
        return read_report(path, seed=seed)
    if not path.is_file():
        raise KernelcastError(f"no file {path}")
    if path.suffix.lower() in (".csv", ".parquet"):
        return read_served(path)
    found, notes = _runs(path)
    if is_report(found):
        return read_report(path, seed=seed)
    if isinstance(found, dict) and result_kind(found):
        return read_result(path, found, seed=seed, notes=notes)
    if path.suffix.lower() in ENDINGS:
        return read_served(path)
    raise KernelcastError(
        f"{path} is no result of a benchmark that kernelcast knows: `vllm bench serve --save-result`, SGLang's"
        " bench_serving, inference-perf, or a table with arrival_s, first_token_s, last_token_s"
    )


def _runs(path: Path) -> tuple[Any, tuple[str, ...]]:
    """The JSON of a file; where it has a line for each run, the last."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise KernelcastError(f"{path} is not text; a result of a benchmark is JSON, CSV or Parquet") from None
    try:
        return json.loads(text), ()
    except json.JSONDecodeError as error:
        said = f"line {error.lineno}: {error.msg}" if text.strip() else "it is empty"
    try:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError:
        found = []
    if not found:
        raise KernelcastError(f"{path} is not JSON: {said}")
    return found[-1], (f"the file has {len(found)} runs; this is the last",)


def read_served(path: Path) -> Bench:
    """A table with one row a request that was served: arrival_s, first_token_s, last_token_s, and its tokens."""
    wanted = ("arrival_s", "first_token_s", "last_token_s")
    with open_table(path) as source:
        missing = [name for name in wanted if name not in source.types]
        if missing:
            raise KernelcastError(
                f"{path}: a table of served requests needs columns {', '.join(wanted)}; {', '.join(missing)} not found"
            )
        cells = source.named(*wanted)
    sent, first, last = (numbers(cells[name]) for name in wanted)
    with np.errstate(invalid="ignore"):
        bad = ~((sent <= first) & (first <= last) & (last < np.inf))
    if bad.any():
        row = int(np.argmax(bad))
        times = ", ".join(shown(cells[name][row]) for name in wanted)
        raise KernelcastError(f"{path}: {place(path, row)}: {', '.join(wanted)} must follow one another, not {times}")
    trace = read_trace(path, "kernelcast", skip_bad=True)  # sorted; rows that are bad in themselves are told of
    if trace.skipped:
        raise KernelcastError(f"{path}: {trace.told()}")
    order = np.argsort(sent, kind="stable")
    load, ttft, e2el = trace.load(), (first - sent)[order], (last - sent)[order]
    metrics = latencies_ms(load.outputs, ttft, e2el)
    metrics |= throughput(load.inputs, load.outputs, max(float(last.max() - sent.min()), 1e-9))
    return Bench(path, "requests", load, True, metrics, _meta_beside(path), ttft, e2el)


def _meta_beside(path: Path) -> dict[str, Any]:
    """What a JSON file beside a table says of the server: NAME_meta.json beside NAME_requests.parquet, or meta.json."""
    stem = path.stem.removesuffix("_requests").removesuffix("requests")
    for name in (f"{stem}_meta.json" if stem else "", f"{path.stem}.json", "meta.json"):
        beside = path.with_name(name) if name else path
        if name and beside.is_file():
            try:
                found = json.loads(beside.read_text(encoding="utf-8"))
            except (json.JSONDecodeError, UnicodeDecodeError):
                continue
            if isinstance(found, dict):
                engine = found.get("engine_kwargs")
                return server_words({**found, **(engine if isinstance(engine, dict) else {})})
    return {}
