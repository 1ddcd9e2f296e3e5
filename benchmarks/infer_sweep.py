"""How fast `infer_many` sweeps: 10,000 configurations of model, GPU, TP, batch and length.

python benchmarks/infer_sweep.py
"""

from __future__ import annotations

import itertools
import time

import kernelcast as kc
from kernelcast.networks import model
from kernelcast.networks.forward import Deployment
from kernelcast.parallel import Layout
from kernelcast.serving.infer import infer_many
from kernelcast.serving.workload import Workload
from kernelcast.stacks import stack

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b")
GPUS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s")
TPS, BATCHES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
LENGTHS = ((128, 128), (256, 256), (512, 128), (1024, 256), (1024, 1024), (2048, 256), (4096, 128), (4096, 512),
           (8192, 256), (16384, 128))  # fmt: skip


def main() -> None:
    gpus, engine = [kc.gpu(name) for name in GPUS], stack("vllm")
    start = time.perf_counter()
    models = [model(name) for name in MODELS]
    places = [Deployment(m, g, engine, layout=Layout(tp=tp)) for m, g, tp in itertools.product(models, gpus, TPS)]
    workloads = [Workload.equal(batch, *lengths) for batch, lengths in itertools.product(BATCHES, LENGTHS)]
    cases = list(itertools.product(places, workloads))
    refused = 0

    def skip(at: int, error: kc.KernelcastError) -> None:
        nonlocal refused
        refused += 1

    found = infer_many(cases, skip=skip)
    took = time.perf_counter() - start
    print(f"{len(cases):,} configurations, {refused:,} do not fit; {took:.1f} s, {took / len(cases) * 1e3:.2f} ms each")
    best = max(found, key=lambda result: result.tokens_per_s / result.deployment.layout.gpus)
    place = best.deployment
    where = f"{place.layout.gpus} x {place.gpu.id}"
    print(f"most tokens/s a GPU: {place.model.name} on {where}: {best.tokens_per_s:,.0f} in all")


if __name__ == "__main__":
    main()
