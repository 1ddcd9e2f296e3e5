"""Record the runs of this folder: `vllm serve` with dummy weights under loads of `vllm bench serve`.

Usage, on a machine with the GPU, vLLM and this repository:  python record.py OUT SECONDS FOLDER...
A FOLDER holds a model's config.json and a tokenizer; its name is the model's in kernelcast. Results are
OUT/MODEL_LOAD.json, as read by `kernelcast replay`, without generated text, and OUT/MODEL.log, what the server said of
its memory. Models are left out when SECONDS end. The client imports vLLM once for all loads of a model, and its first
load is a warm-up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
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
PORT, START_S, RUN_S = 8123, 200, 30
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


def client(model: str, folder: str, out: str, until: float, names: list[str]) -> None:
    """All loads of one model, in this process, which imports vLLM while the server starts."""
    import argparse

    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    if not wait(until):
        return
    for name in ("warm_up", *names):
        tokens, written, ratio, prompts, rate, most = LOADS.get(name, WARM_UP)
        if time.time() > until - RUN_S:
            print(f"{model} {name}: no time", flush=True)
            continue
        given = ["--backend", "vllm", "--model", model, "--tokenizer", folder, "--port", str(PORT), "--dataset-name",
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
        for key in ("generated_texts", "errors"):
            result.pop(key, None)
        result |= {"ttfts": [round(x, 5) for x in result["ttfts"]],
                   "itls": [[round(x, 5) for x in row] for row in result["itls"]]}  # fmt: skip
        path.write_text(json.dumps(result))


def wait(until: float, server: subprocess.Popen[bytes] | None = None) -> bool:
    while time.time() < until and (server is None or server.poll() is None):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
            return True
        except OSError:
            time.sleep(0.5)
    return False


def serve(folder: Path, out: Path, until: float) -> None:
    model = folder.name
    most = min(16384, json.loads((folder / "config.json").read_text())["max_position_embeddings"])
    names = [name for name, load in LOADS.items() if load[0] * (1 + load[2]) + load[1] * (1 + load[2]) < most]
    command = [sys.executable, __file__, "serve", str(folder), "--load-format", "dummy", "--port", str(PORT),
               "--max-model-len", str(most), "--served-model-name", model]  # fmt: skip
    began, path = time.time(), out / f"{model}.log"
    job = [sys.executable, __file__, "--client", model, str(folder), str(out), str(until), *names]
    with path.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                                  env={**os.environ, BY_CHANCE: "1"})  # fmt: skip
        loads = subprocess.Popen(job, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        if wait(min(until - RUN_S, began + START_S), server):
            print(f"{model} up after {time.time() - began:.0f} s", flush=True)
            loads.wait(timeout=max(20.0, until - time.time()))
            print(f"{model} done after {time.time() - began:.0f} s", flush=True)
        else:
            print(f"{model} did not start", path.read_text(errors="replace")[-3000:], flush=True)
    except subprocess.TimeoutExpired:
        print(f"{model}: out of time", flush=True)
    finally:
        for process in (server, loads):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = path.read_text(errors="replace").splitlines()
    path.write_text("\n".join(line[:400] for line in lines if KEPT.search(line))[:20000] + "\n")


if BY_CHANCE in os.environ:  # the engine's process, too, imports this file as its main module (spawn)
    larger_routers()

if __name__ == "__main__":
    if BY_CHANCE in os.environ:
        from vllm.entrypoints.cli.main import main

        main()
    elif sys.argv[1] == "--client":
        client(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]), sys.argv[6:])
    else:
        destination, limit = Path(sys.argv[1]), time.time() + float(sys.argv[2])
        destination.mkdir(exist_ok=True)
        for given in map(Path, sys.argv[3:]):
            if time.time() < limit - 2 * RUN_S:
                serve(given, destination, limit)
                time.sleep(1)
