"""Record the runs of this folder: `vllm serve` with dummy weights under loads of `vllm bench serve`.

Usage, on a machine with the GPU and vLLM:  python record.py OUT SECONDS FOLDER...
A FOLDER holds a model's config.json and a tokenizer; its name is the model's in kernelcast. Results are
OUT/MODEL_LOAD.json, as read by `kernelcast replay`, without generated text, and OUT/MODEL.log, what the server said of
its memory. Models are left out when SECONDS end. The client imports vLLM once for all loads of a model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

# name: input, output, range ratio, prompts, request rate, concurrency
LOADS = {
    "single": (512, 128, 0.0, 8, "inf", 1),
    "mid": (1024, 256, 0.5, 180, "12", None),
    "loop64": (1024, 256, 0.3, 192, "inf", 64),
    "long": (6000, 128, 0.3, 36, "2", None),
}
PORT, START_S, RUN_S = 8123, 150, 40
KEPT = re.compile("KV cache|backend|Maximum concurrency|graph|non-default|chunked|took|Error|error|memory|MoE|config")


def client(model: str, folder: str, out: str, until: float, names: list[str]) -> None:
    """All loads of one model, in this process."""
    import argparse

    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for name in names:
        tokens, written, ratio, prompts, rate, most = LOADS[name]
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
        result = json.loads(path.read_text())
        for key in ("generated_texts", "errors"):
            result.pop(key, None)
        result |= {"ttfts": [round(x, 5) for x in result["ttfts"]],
                   "itls": [[round(x, 5) for x in row] for row in result["itls"]]}  # fmt: skip
        path.write_text(json.dumps(result))


def wait(server: subprocess.Popen[bytes], until: float) -> bool:
    while time.time() < until and server.poll() is None:
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
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--load-format", "dummy",
               "--port", str(PORT), "--max-model-len", str(most), "--served-model-name", model]  # fmt: skip
    began, path = time.time(), out / f"{model}.log"
    with path.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        if wait(server, min(until - RUN_S, began + START_S)):
            print(f"{model} up after {time.time() - began:.0f} s", flush=True)
            job = [sys.executable, __file__, "--client", model, str(folder), str(out), str(until), *names]
            subprocess.run(job, timeout=max(20.0, until - time.time()), check=False, stdout=subprocess.DEVNULL)
        else:
            print(f"{model} did not start", path.read_text(errors="replace")[-3000:], flush=True)
    except subprocess.TimeoutExpired:
        print(f"{model}: out of time", flush=True)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    lines = path.read_text(errors="replace").splitlines()
    path.write_text("\n".join(line[:400] for line in lines if KEPT.search(line))[:20000] + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--client":
        client(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]), sys.argv[6:])
    else:
        destination, limit = Path(sys.argv[1]), time.time() + float(sys.argv[2])
        destination.mkdir(exist_ok=True)
        for given in map(Path, sys.argv[3:]):
            if time.time() < limit - 2 * RUN_S:
                serve(given, destination, limit)
                time.sleep(1)
