"""Files that are sent to do harm: each is answered in time, by an answer or a problem, in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest

from kernelcast.app.web.limits import Limits

MIB = 2**20
MOST_MIB, MOST_S = 1536, 30.0  # of all processes together above idle; until an answer
KERNEL = {"op": "gemm", "gpu": "h200_sxm", "parameters": {"m": 64, "n": 64, "k": 64}}
ROW = '{"op": "rmsnorm", "rows": 64, "cols": 64, "dtype": "bf16", "measured_us": 9}'
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory of processes is counted by /proc"),
]


def gz(*parts: tuple[bytes, int]) -> bytes:
    """Each part so many times, compressed; never in memory as a whole."""
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as file:
        for part, count in parts:
            at_once = max(1, min(count, MIB // len(part)))
            for _ in range(count // at_once):
                file.write(part * at_once)
    return raw.getvalue()


def trace(*events: dict[str, Any]) -> bytes:
    return json.dumps({"traceEvents": events}).encode()


def parquet(folder: Path, select: str) -> bytes:
    path = folder / "made.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({select}) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
    return path.read_bytes()


KERNEL_EVENT = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"correlation": 1}}
OP_EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9, "args": {"External id": 1}}
_CALL = "SELECT 'gemm' AS op, 64 AS m, 64 AS n, 64 AS k, 'bf16' AS dtype, 9.0 AS measured_us"


def _nested(levels: int) -> bytes:
    """Ops within ops, and a kernel of the innermost."""
    ops = [{**OP_EVENT, "ts": at, "dur": 4 * levels - 2 * at, "args": {"External id": at}} for at in range(levels)]
    launch = {**OP_EVENT, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": levels, "dur": 1,
              "args": {"correlation": 1, "External id": levels - 1}}  # fmt: skip
    return trace(*ops, launch, {**KERNEL_EVENT, "ts": levels + 1})


FILES: dict[str, Callable[[Path], bytes]] = {
    "spaces.json.gz": lambda _: gz((b" ", 512 * MIB)),
    "zeros.json.gz": lambda _: gz((b"\0", 4096 * MIB)),
    "lists.json.gz": lambda _: gz((b"[", 1), (b"[],", 40 * MIB), (b"0]", 1)),
    "objects.json.gz": lambda _: gz((b'{"traceEvents": [', 1), (b"{},", 40 * MIB), (b"{}]}", 1)),
    "events.json.gz": lambda _: gz((b'{"traceEvents": [', 1), (b'{"ph":"X"},', 10**7), (b"{}]}", 1)),
    "floats.json.gz": lambda _: gz((b'{"traceEvents": [', 1), (b"1.5,", 30 * MIB), (b"{}]}", 1)),
    "wide_text.json.gz": lambda _: gz(('["\U0001f600'.encode(), 1), (b"a", 120 * MIB), (b'"]', 1)),
    "full_events.json.gz": lambda _: gz(
        (b'{"traceEvents": [', 1), (json.dumps(KERNEL_EVENT).encode() + b",", 490_000), (b"{}]}", 1)
    ),
    "distinct.json.gz": lambda _: gz(
        (trace(*({**KERNEL_EVENT, "ts": at, "name": f"kernel_{at}"} for at in range(300_000))), 1)
    ),
    "cut.json.gz": lambda _: gz((b"[1],", 10**6))[:-9],
    "garbage.json.gz": lambda _: b"\x1f\x8b" + bytes(range(256)) * 4096,
    "deep.json": lambda _: b"[" * 50 * MIB,
    "deep_args.json": lambda _: b'{"traceEvents": [{"args": ' + b'{"a":' * 10**6 + b"0" + b"}" * 10**6 + b"}]}",
    "digits.json": lambda _: b'{"traceEvents": [{"ph": "X", "ts": ' + b"9" * 10**6 + b"}]}",
    "types.json": lambda _: trace({**KERNEL_EVENT, "ts": "x"}, {**KERNEL_EVENT, "args": []}, {"ph": 7}),
    "no_numbers.json": lambda _: trace({**KERNEL_EVENT, "ts": float("nan"), "dur": -math.inf}),
    "grid.json": lambda _: trace({**KERNEL_EVENT, "args": {"grid": [1e300, -5, 2], "block": "xyz"}}),
    "shapes.json": lambda _: trace({**OP_EVENT, "args": {"External id": 1, "Input Dims": [[10**30, -1]] * 9}},
                                   {**KERNEL_EVENT, "args": {"External id": 1}}),
    "name.json": lambda _: trace({**KERNEL_EVENT, "name": "void " * (11 * MIB)}),
    "nested.json": lambda _: _nested(100_000),
    "not_a_trace.json": lambda _: b'"' + b"x" * 60 * MIB + b'"',
    "rows.csv": lambda _: b"op,m,measured_us\n" + b"gemm,1,2\n" * (7 * 10**6),
    "empty_rows.csv": lambda _: b"op\n" + b"\n" * (60 * MIB),
    "columns.csv": lambda _: ",".join(f"c{at}" for at in range(10**6)).encode() + b"\n" + b"," * (10**6 - 1) + b"\n",
    "cell.csv": lambda _: b'op,measured_us\n"' + b"x" * 60 * MIB,
    "bytes.csv": lambda _: bytes(range(256)) * 10**5,
    "ncu.csv": lambda _: b'"ID","Kernel Name","Grid Size","Block Size","Metric Name","Metric Unit","Metric Value"\n'
    + b'"0","k","1","1","Duration","us","1"\n' * (16 * 10**5),
    "rows.jsonl": lambda _: b"{}\n" * (2 * 10**7),
    "calls.jsonl": lambda _: (ROW + "\n").encode() * 19_900,
    "keys.jsonl": lambda _: "".join(f'{{"op": "gemm", "k{at}": 1}}\n' for at in range(19_900)).encode(),
    "deep.jsonl": lambda _: b'{"op": ' + b"[" * 10**6 + b"]" * 10**6 + b"}\n",
    "rows.parquet": lambda folder: parquet(folder, f"{_CALL} FROM range(10000000)"),
    "strings.parquet": lambda folder: parquet(
        folder, "SELECT repeat('x', 1000000) AS op, 9.0 AS measured_us FROM range(19900)"
    ),
    "lists.parquet": lambda folder: parquet(
        folder, "SELECT 'attention' AS op, range(10000000) AS q_lens, 9.0 AS measured_us FROM range(4)"
    ),
    "columns.parquet": lambda folder: parquet(
        folder, "SELECT 'gemm' AS op, " + ", ".join(f"1 AS c{at}" for at in range(20_000))
    ),
    "cut.parquet": lambda folder: parquet(folder, f"{_CALL} FROM range(100)")[:-200] + b"PAR1",
    "magic.parquet": lambda _: b"PAR1" * 1000,
    "bomb.exe": lambda _: b"MZ" * MIB,
}  # fmt: skip


class Watched:
    """A server of two workers, and the most memory that it and they hold together."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "kernelcast", "web", "--port", "0", "--workers", "2"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[2]
        self.peak_mib = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.peak_mib = max(self.peak_mib, self.held_mib())
            time.sleep(0.02)

    def held_mib(self) -> float:
        """Of the server and its children."""
        total_kb = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, TypeError):
                status = (folder / "status").read_text()
                parent = int(re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
                if self.process.pid in (parent, int(folder.name)):
                    total_kb += int(re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
        return total_kb / 1024


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    found = Watched()
    for _ in range(2):  # warm, on both workers
        httpx.post(f"{found.url}/api/v1/kernel", json=KERNEL, timeout=60)
    time.sleep(20)
    yield found
    found.process.send_signal(2)
    found.process.wait(20)


def test_files_that_are_sent_to_do_harm(watched: Watched, tmp_path: Path) -> None:
    idle_mib, slowest_s, statuses = watched.held_mib(), 0.0, {}
    watched.peak_mib = 0.0
    for name, made in FILES.items():
        content = made(tmp_path)
        assert len(content) <= Limits().upload_bytes, name
        before, started = watched.peak_mib, time.monotonic()
        response = httpx.post(
            f"{watched.url}/api/v1/diagnose?filename={name}&gpu=h200_sxm", content=content, timeout=120,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
        took_s = time.monotonic() - started
        slowest_s, statuses[name] = max(slowest_s, took_s), response.status_code
        rose = f"{watched.peak_mib - idle_mib:.0f}" if watched.peak_mib > before else "-"
        print(f"{name:22s} {len(content) / MIB:7.2f} MiB  {took_s:5.1f} s  +{rose:>5s} MiB  {response.status_code} "
              f"{response.text[:150]}")  # fmt: skip
        assert response.status_code in (200, 422, 503, 504), (name, response.text)
        assert httpx.post(f"{watched.url}/api/v1/kernel", json=KERNEL, timeout=60).status_code == 200, name
    print(f"{len(FILES)} files: slowest {slowest_s:.1f} s, at most {watched.peak_mib - idle_mib:.0f} MiB above idle "
          f"({idle_mib:.0f} MiB)")  # fmt: skip
    assert slowest_s < MOST_S
    assert watched.peak_mib - idle_mib < MOST_MIB
    assert statuses["calls.jsonl"] == 200
