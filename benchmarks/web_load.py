"""The page's server under load: `python benchmarks/web_load.py` starts it, asks from this process, prints latencies.

`--clients 50 --seconds 30`: kernels and models in turn, no question twice, by one client and then by so many at once.
`--think 0.5`: seconds between an answer and the next question of a client. `--aborting 5`: so many of the clients ask
long questions and hang up after a moment; no worker may end of it, and no error come but 429 and 503 with Retry-After.
`--fuzz 5000`: instead, so many questions with words drawn from the OpenAPI document and some that are none; every
answer must be one or a problem.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GPUS = ("h200_sxm", "h100_sxm", "a100_sxm", "b200_sxm", "l40s")
MODELS = ("llama-3.1-8b", "qwen3-8b", "llama-3.1-70b", "qwen3-30b-a3b")  # as cut below, each fits on all of them
KERNEL_SHARE = 0.75
PROBLEM = "application/problem+json"
Question = tuple[str, dict[str, Any]]


class Connection:
    """HTTP/1.1 with as little of its own time as can be: the server has the same two cores."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.retry_after: str | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, words: Any) -> tuple[int, str, bytes]:
        """The status, the content's type and the content."""
        body = words if isinstance(words, bytes) else json.dumps(words).encode()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        reader, writer = self._streams
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        content = await reader.readexactly(int(fields["content-length"]))
        self.retry_after = fields.get("retry-after")
        if fields.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), fields["content-type"], content

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def drawn(draws: random.Random) -> Question:
    """A kernel or a model, of sizes that were most likely not asked before."""
    gpu = draws.choice(GPUS)
    if draws.random() < KERNEL_SHARE:
        sizes = {name: draws.randrange(64, 16_384) for name in ("m", "n", "k")}
        return "kernel", {"op": "gemm", "gpu": gpu, "parameters": sizes}
    words = {
        "batch": draws.randrange(1, 32),
        "input_len": draws.randrange(64, 2048),
        "output_len": draws.randrange(2, 512),
    }
    model = draws.choice(MODELS)
    return "infer", {"model": model, "gpu": gpu, "tp": {"llama-3.1-70b": 8, "qwen3-30b-a3b": 4}.get(model, 1), **words}


def drawn_long(draws: random.Random) -> Question:
    """A question that takes seconds."""
    load = {"model": "llama-3.1-8b", "gpu": "h100_sxm", "request_rate": 50, "num_prompts": 50_000, "output_len": 2000}
    slow = {"model": "qwen3-0.6b", "gpu": "h200_sxm", "chunk": 1, "input_len": draws.randrange(20_000, 30_000)}
    every = {"model": "llama-3.1-70b", "gpus": ["all"], "input_len": draws.randrange(64, 2048)}
    return draws.choice((("simulate", {**load, "seed": draws.randrange(2**31)}), ("infer", slow), ("compare", every)))


async def aborting(port: int, until: float, draws: random.Random, errors: Counter[str]) -> None:
    """A client that hangs up before its answer comes."""
    while time.perf_counter() < until:
        connection = Connection(port)
        question, words = drawn_long(draws)
        try:
            async with asyncio.timeout(draws.uniform(0.05, 0.8)):
                status, _, content = await connection.post(f"/api/v1/{question}", words)
            if status not in (200, 429, 503):
                errors[f"{status} {content[:300].decode()}"] += 1
        except TimeoutError:
            errors["hung up"] += 1
        connection.close()


async def client(
    port: int, until: float, draws: random.Random, took: dict[str, list[float]], errors: Counter[str], think_s: float
) -> None:
    connection = Connection(port)
    while time.perf_counter() < until:
        if think_s:
            await asyncio.sleep(draws.uniform(0, 2 * think_s))
        question, words = drawn(draws)
        started = time.perf_counter()
        status, _, content = await connection.post(f"/api/v1/{question}", words)
        took[question].append(time.perf_counter() - started)
        if status in (429, 503) and connection.retry_after:
            errors[f"{status} with Retry-After"] += 1
        elif status != 200:
            errors[f"{status} {content[:300].decode()}"] += 1


async def load(port: int, clients: int, seconds: float, hang_up: int = 0, think_s: float = 0.0) -> bool:
    """Latencies of so many clients; whether all was answered."""
    took: dict[str, list[float]] = {"kernel": [], "infer": []}
    errors: Counter[str] = Counter()
    until = time.perf_counter() + seconds
    await asyncio.gather(
        *(client(port, until, random.Random(f"{clients} {one}"), took, errors, think_s)
          for one in range(clients - hang_up)),
        *(aborting(port, until, random.Random(f"long {one}"), errors) for one in range(hang_up)),
    )  # fmt: skip
    for question, times in took.items():
        ordered = sorted(times)
        p50, p95 = (1e3 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95))
        print(f"{clients:3d} clients  {question:6s}  {len(times):6,} answers  {len(times) / seconds:6.1f}/s"
              f"  p50 {p50:7.1f} ms  p95 {p95:7.1f} ms")  # fmt: skip
    for error, count in errors.most_common(5):
        print(f"  {count} x {error}")
    return all(error == "hung up" or error.endswith("with Retry-After") for error in errors)


def odd(schema: Any, draws: random.Random, depth: int = 0) -> Any:
    """A value that a schema allows, or, now and then, one that none does."""
    if draws.random() < 0.04:
        return draws.choice(
            (None, "", -1, 1e308, 10**30, "../x.toml", "/etc/passwd", [], {}, True, "\u2603", [[]], 0.1)
        )
    if "anyOf" in schema:
        return odd(draws.choice(schema["anyOf"]), draws, depth)
    if "enum" in schema:
        return draws.choice(schema["enum"])
    low, high = schema.get("minimum", 0), schema.get("maximum", 1e6)
    if schema.get("type") == "integer":
        return draws.choice((int(low), int(high), int(low + (high - low) ** draws.random())))
    if schema.get("type") == "number":
        return draws.choice((low, high, low + (high - low) ** draws.random(), draws.random()))
    if schema.get("type") == "array":
        return [odd(schema.get("items", {}), draws, depth + 1) for _ in range(draws.randrange(0, 4))]
    if schema.get("type") == "boolean":
        return draws.random() < 0.5
    if schema.get("type") == "string":
        return draws.choice(
            ("500ms", "1,2", "ttft:500", "dram_bytes_per_s*1.5", "5x2,9x2", "l40s=1", "sm_count=0", "x")
        )
    return {}


def odd_question(document: Any, draws: random.Random) -> Question:
    """An example of the document with a few words changed or added."""
    schemas = document["components"]["schemas"]
    question = draws.choices(("kernel", "infer", "curves", "simulate", "compare", "plan"), (50, 26, 4, 10, 6, 4))[0]
    schema = schemas[f"{question.title()}Body"]
    words = dict(schema["examples"][0])
    if question == "kernel":
        words["op"] = draws.choice(schemas["KernelBody"]["properties"]["op"]["enum"])
        own = schemas[f"parameters_{words['op']}"]
        chosen = [name for name in own["properties"] if name in own["required"] or draws.random() < 0.3]
        words["parameters"] = {name: odd(own["properties"][name], draws) for name in chosen}
    if question in ("simulate", "plan"):
        words |= {"num_prompts": 4, "output_len": 4}
    for name in draws.sample(sorted(schema["properties"]), draws.randrange(0, 4)):
        if name not in ("parameters", "config", "name"):
            words[name] = odd(schema["properties"][name], draws)
    return question, words


async def fuzz(port: int, count: int, seed: int) -> bool:
    """Whether every answer was one or a problem; prints those that tell of a fault of the library."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    document = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
    draws, statuses, faults = random.Random(seed), Counter[str](), Counter[str]()
    questions = iter([odd_question(document, draws) for _ in range(count)])
    good = True

    async def one() -> None:
        nonlocal good
        connection = Connection(port)
        for question, words in questions:
            status, kind, content = await connection.post(f"/api/v1/{question}", words)
            statuses[f"{question} {status}"] += 1
            told = json.loads(content)
            well = "answer" in told if status == 200 else kind == PROBLEM and told["status"] == status
            if not well or (status >= 500 and status not in (503, 504)):
                good = False
                print(f"  {question} {json.dumps(words)}: {status} {content[:300].decode()}")
            if status == 504:
                print(f"  {question} {json.dumps(words)}: took too long")
            if "cannot answer" in str(told.get("detail")):
                faults[f"{question} {told['detail'][:160]}"] += 1
                if faults[f"{question} {told['detail'][:160]}"] == 1:
                    print(f"  {question} {json.dumps(words)}\n    {told['detail'][:300]}")

    await asyncio.gather(*(one() for _ in range(4)))
    print(", ".join(f"{name}: {number:,}" for name, number in sorted(statuses.items())))
    print(f"{sum(faults.values())} of {count:,} were answered by a fault of the library")
    return good


@contextmanager
def served(workers: int) -> Iterator[tuple[int, Callable[[], float], Callable[[], set[int]]]]:
    """A server of its own: its port, the memory that it and its workers hold, in MB, and its workers."""
    command = [sys.executable, "-m", "kernelcast", "web", "--port", "0", "--workers", str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[2].rpartition(":")[2])

        def memory_mb() -> float:
            told = subprocess.run(["ps", "-o", "rss=", "-p", str(process.pid), "--ppid", str(process.pid)],
                                  capture_output=True, text=True, check=False).stdout  # fmt: skip
            return sum(map(int, told.split())) / 1e3

        def children() -> set[int]:
            told = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True,
                                  check=False).stdout  # fmt: skip
            return {int(pid) for pid in told.split()}

        yield port, memory_mb, children
        process.send_signal(2)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=max(2, os.cpu_count() or 2))
    parser.add_argument("--aborting", type=int, default=0, metavar="N", help="of the clients that hang up")
    parser.add_argument("--think", type=float, default=0.0, metavar="S", help="seconds before a client asks again")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="ask N odd questions instead")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with served(asked.workers) as (port, memory_mb, children):
        asyncio.run(load(port, 2, 5.0))  # warm
        if asked.fuzz:
            return 0 if asyncio.run(fuzz(port, asked.fuzz, asked.seed)) else 1
        print(f"-- {asked.workers} workers")
        before = children()
        good = [asyncio.run(load(port, 1, min(asked.seconds, 10.0)))]
        good.append(asyncio.run(load(port, asked.clients, asked.seconds, asked.aborting, asked.think)))
        time.sleep(3)  # what was told to stop has stopped
        alive = before & children()
        print(f"workers that live since the start: {len(alive)} of {len(before)}")
        good.append(not asked.aborting or alive == before)
        print(f"memory {memory_mb():,.0f} MB")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
