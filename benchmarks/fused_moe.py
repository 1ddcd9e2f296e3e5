"""Our two fused MoE kernels on this machine's GPU: right against float32 on fresh random inputs, and how fast.

  python benchmarks/fused_moe.py [--tokens 1,64,1024] [--model qwen3-30b-a3b]

``plain`` runs as engines would (vLLM's and SGLang's default configs) and as tuned by kernelcast; ``swift`` with its own
default rule. Times are of whole layers, sorting to weighted sum, in a CUDA graph. Needs PyTorch, Triton and a GPU.
"""

from __future__ import annotations

import argparse

import torch

import swift_moe
from kernelcast.collect.device import identified
from kernelcast.collect.fused_moe import ConfigBench, Measurer
from kernelcast.tune.configs import Config, MoeProblem, sglang_default, swift_default, vllm_default
from kernelcast.tune.tune import tune
from kernelcast_lab.collect.moe_configs import TESTED

ODD = (
    (1, 8, 2, 512, 256),
    (7, 8, 2, 512, 256),
    (130, 16, 4, 320, 192),
    (300, 60, 4, 768, 352),
    (1000, 32, 8, 1024, 512),
)
CHECKED = (
    Config(16, 64, 128, 1, 4, 4),
    Config(32, 128, 64, 16, 8, 3),
    Config(64, 64, 32, 8, 4, 3),
    Config(128, 128, 64, 16, 8, 3),
)


def check() -> float:
    """The worst relative error of whole layers; sizes that are no multiple of a block too."""
    worst = 0.0
    for tokens, experts, topk, hidden, inter in ODD:
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        w13 = torch.randn(experts, 2 * inter, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5
        w2 = torch.randn(experts, hidden, inter, device="cuda", dtype=torch.bfloat16) / inter**0.5
        share, chosen = torch.softmax(torch.randn(tokens, experts, device="cuda"), 1).topk(topk, 1)
        expert, weight = chosen.flatten().to(torch.int32), share.flatten().contiguous()
        truth = swift_moe.reference(x, w13, w2, expert, weight, topk)
        for config in CHECKED:
            for kernel, first in (("plain", w13), ("swift", swift_moe.alternating(w13))):
                at = swift_moe.Buffers.of(x, topk, inter)
                for buffer in vars(at).values():
                    buffer.fill_(float("nan"))  # what is not written shows
                out = swift_moe.layer(kernel, x, first, w2, expert, weight, topk, config, at)
                worst = max(worst, float((out.float() - truth).norm() / truth.norm()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096")
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(TESTED))
    given = parser.parse_args()
    torch.seed()
    error = check()
    print(f"{2 * len(ODD) * len(CHECKED)} layers against float32: worst relative error {error:.1e}")
    if not error < 1e-2:
        raise SystemExit("wrong result")
    chip, measurer = identified(None), Measurer()
    experts, topk, hidden, inter = TESTED[given.model]
    print(
        f"{given.model} on {chip.name}: layer in us\n"
        "tokens    vLLM  SGLang   tuned   swift  swift over vLLM  tuned config"
    )
    for tokens in map(int, given.tokens.split(",")):
        problem = MoeProblem(tokens, hidden, inter, experts, topk)
        tuned = tune(problem, chip, measurer).config
        runs = (("plain", vllm_default(tokens, experts)), ("plain", sglang_default(tokens, experts)), ("plain", tuned),
                ("swift", swift_default(tokens, experts, topk)))  # fmt: skip
        bench = ConfigBench(problem)
        times = [swift_moe.layer_s(bench, config, kernel)[0] * 1e6 for kernel, config in runs]
        print(f"{tokens:6}", *(f"{t:7.1f}" for t in times), f"{times[0] / times[3]:15.2f}", f" {tuned}")


if __name__ == "__main__":
    main()
