"""Record the runs of this folder: `vllm serve` with dummy weights under loads of `vllm bench serve`.

Usage, on a machine with the GPU, vLLM and this repository:  python record.py OUT SECONDS FOLDER:GIB[:ARGUMENTS]...
A FOLDER holds a model's config.json and a tokenizer; its name is the model's in kernelcast; GIB is its KV cache,
ARGUMENTS are more of `vllm serve`. All servers start at once, since that takes minutes; their loads are run in turn,
while the other servers are idle. Results are OUT/MODEL_LOAD.json, as read by `kernelcast replay`, without generated
text, and OUT/MODEL.log, what the server said of its memory. Loads are left out when SECONDS end. The client imports
vLLM once for all loads of a model, and its first load is a warm-up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# name: input, output, range ratio, prompts, request rate, concurrency
LOADS = {
    "single": (512, 128, 0.0, 8, "inf", 1),
    "mid": (1024, 256, 0.5, 150, "12", None),
    "loop64": (1024, 256, 0.3, 160, "inf", 64),
    "long": (6000, 128, 0.3, 30, "2", None),
}
WARM_UP = (1024, 32, 0.5, 80, "inf", None)  # kernels that are compiled at their first call; not kept
FIRST_PORT, START_S, RUN_S = 8123, 270, 30
KEPT = re.compile("KV cache|backend|Maximum concurrency|graph|non-default|chunked|took|Error|error|memory|MoE|config")


BY_CHANCE = "RECORD_ROUTERS_BY_CHANCE"  # set where a server and its engine run


def larger_routers() -> None:
    """Routers of dummy weights that choose experts by chance, once they are loaded."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from kernelcast.collect.vllm_engine import route_by_chance

    load = DummyModelLoader.load_weights

    def loaded(self: DummyModelLoader, model: Any, *given: Any, **named: Any) -> None:
        load(self, model, *given, **named)
        route_by_chance(model.state_dict())

    DummyModelLoader.load_weights = loaded


def client(model: str, port: str, folder: str, out: str, arguments: str, until: float, names: list[str]) -> None:
    """All loads of one model, in this process, which imports vLLM while the server starts, and then waits for a
    line."""
    import argparse

    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    sys.stdin.readline()
    for name in ("warm_up", *names):
        tokens, written, ratio, prompts, rate, most = LOADS.get(name, WARM_UP)
        if time.time() > until - RUN_S:
            print(f"{model} {name}: no time", flush=True)
            continue
        given = ["--backend", "vllm", "--model", model, "--tokenizer", folder, "--port", port, "--dataset-name",
                 "random", "--random-input-len", str(tokens), "--random-output-len", str(written),
                 "--random-range-ratio", str(ratio), "--num-prompts", str(prompts), "--request-rate", rate,
                 "--ignore-eos", "--save-result", "--save-detailed", "--result-filename", f"{out}/{model}_{name}.json",
                 "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99", "--seed", "7",
                 "--disable-tqdm", *(["--max-concurrency", str(most)] if most else [])]  # fmt: skip
        main(parser.parse_args(given))
        path = Path(out) / f"{model}_{name}.json"
        if name == "warm_up":
            path.unlink()
            continue
        result = json.loads(path.read_text())
        for key in ("generated_texts", "errors", "itls"):
            result.pop(key, None)
        result |= {"serve_args": arguments, "tokenizer_id": model, "ttfts": [round(x, 5) for x in result["ttfts"]]}
        path.write_text(json.dumps(result))


def healthy(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
    except OSError:
        return False
    return True


@dataclass
class Server:
    """A model's server, and the client that waits for a line on its standard input before it begins."""

    model: str
    port: int
    log: Path
    process: subprocess.Popen[bytes]
    loads: subprocess.Popen[bytes]

    @classmethod
    def started(cls, folder: Path, cache_gib: str, arguments: str, port: int, out: Path, until: float) -> Server:
        model, log = folder.name, out / f"{folder.name}.log"
        most = min(16384, json.loads((folder / "config.json").read_text())["max_position_embeddings"])
        names = [name for name, load in LOADS.items() if (load[0] + load[1]) * (1 + load[2]) < most]
        memory = ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", f"{cache_gib}G"]
        command = [sys.executable, __file__, "serve", str(folder), "--load-format", "dummy", "--port", str(port),
                   "--max-model-len", str(most), "--served-model-name", model, *memory,
                   *shlex.split(arguments)]  # fmt: skip
        job = [sys.executable, __file__, "--client", model, str(port), str(folder), str(out), arguments, str(until),
               *names]  # fmt: skip
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                                       env={**os.environ, BY_CHANCE: "1"})  # fmt: skip
            loads = subprocess.Popen(job, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        return cls(model, port, log, process, loads)

    @property
    def waits(self) -> bool:
        return self.process.poll() is None and not healthy(self.port)

    def run(self, until: float) -> None:
        """Its loads, and its end."""
        began = time.time()
        if not self.waits and self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.loads.communicate(b"\n", timeout=max(20.0, until - time.time()))
            print(f"{self.model}: loads took {time.time() - began:.0f} s", flush=True)
        else:
            print(f"{self.model} did not start", self.log.read_text(errors="replace")[-3000:], flush=True)
        self.end()

    def end(self) -> None:
        for process in (self.process, self.loads):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = self.log.read_text(errors="replace").splitlines()
        self.log.write_text("\n".join(line[:400] for line in lines if KEPT.search(line))[:20000] + "\n")


def record(out: Path, until: float, given: list[str]) -> None:
    out.mkdir(exist_ok=True)
    began, servers = time.time(), []
    for port, text in enumerate(given, FIRST_PORT):
        folder, cache_gib, arguments, *_ = *text.split(":", 2), ""
        servers.append(Server.started(Path(folder), cache_gib, arguments, port, out, until))
    while time.time() < began + START_S and any(server.waits for server in servers):
        time.sleep(0.5)
    print(f"servers up after {time.time() - began:.0f} s", flush=True)
    for server in [server for server in servers if server.waits]:
        print(f"{server.model} is not up", server.log.read_text(errors="replace")[-3000:], flush=True)
        server.end()
        servers.remove(server)
    for server in servers:
        server.run(until)


if BY_CHANCE in os.environ:  # the engine's process, too, imports this file as its main module (spawn)
    larger_routers()

if __name__ == "__main__":
    if BY_CHANCE in os.environ:
        from vllm.entrypoints.cli.main import main

        main()
    elif sys.argv[1] == "--client":
        client(*sys.argv[2:7], float(sys.argv[7]), sys.argv[8:])
    else:
        record(Path(sys.argv[1]), time.time() + float(sys.argv[2]), sys.argv[3:])
