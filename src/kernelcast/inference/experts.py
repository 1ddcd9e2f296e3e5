"""Kernels of a feed-forward part: a dense MLP, or experts with the dispatch of tokens between the GPUs that hold them.

How tokens reach the GPUs of their experts and come back, by engine (``Stack.exchange``). ``nccl``: two all-to-alls.
``allgather``: every GPU gets all tokens, and sums are reduce-scattered (vLLM's default, --all2all-backend).
``deepep``: DeepSeek's library, its low-latency kernels in decode (SGLang, --moe-a2a-backend; vLLM too).
``alltoall``: TensorRT-LLM's own kernels over NVLink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Launch
from kernelcast.inference.launching import Pass
from kernelcast.models.layers import Dense, Experts
from kernelcast.ops.kernel_selection import served_experts

There = tuple[list[Launch], list[Launch], str | None]
"""Launches before and after the experts, and the experts' kernel where the exchange decides it."""


def exchanged(run: Pass, block: Experts, count: int) -> There:
    """Nothing where one rank has every token. Experts that are cut, not dealt out, see all tokens."""
    if run.layout.dp == 1:
        return [], [], None
    return (_allgather if run.layout.ep == 1 else _EXCHANGES[run.stack.exchange])(run, block, count)


def _one_byte(run: Pass) -> bool:
    """Whether tokens are sent in eight bits: as the experts take them."""
    return run.routed not in ("bf16", "fp16", "fp32", "tf32", "int4", "int8_wo", "mxfp4")


def _nccl(run: Pass, block: Experts, count: int) -> There:
    world = run.layout.tp * run.layout.dp
    pairs = run.tokens * min(block.topk, run.layout.ep) / run.layout.tp
    there, back = (
        run.sent("all_to_all", count, np.maximum(world, pairs * block.width(run.model.hidden) * each), world)
        for each in (1.0 if _one_byte(run) else run.precision.between_bytes, run.precision.between_bytes)
    )
    return [there], [back], None


def _allgather(run: Pass, block: Experts, count: int) -> There:
    world = run.layout.tp * run.layout.dp
    all_bytes = run.tokens * run.layout.dp * block.width(run.model.hidden) * run.precision.between_bytes
    there, back = (run.sent(op, count, all_bytes, world) for op in ("all_gather", "reduce_scatter"))
    return [there], [back], None


def _deepep(run: Pass, block: Experts, count: int) -> There:
    decodes = run.form.checks
    words = _words(run, block) | {"mode": "low_latency" if decodes else "normal"}
    world = run.layout.tp * run.layout.dp
    if not run.layout.near(run.gpu, world):
        words |= {"nodes": -(-world // run.layout.gpus_per_node), "fabric": run.layout.between_nodes}
    sent = "fp8_block" if _one_byte(run) else "bf16"  # scales travel along
    there, back = (
        run.call("communication", f"deepep_{what}", count, **words, dtype=kind, stack="sglang")
        for what, kind in (("dispatch", sent), ("combine", "bf16"))
    )
    blocks = run.routed == "fp8_block"
    return [there], [back], ("deepep_masked" if decodes else "deepep_contiguous") if blocks else None


def _alltoall(run: Pass, block: Experts, count: int) -> There:
    if not run.layout.near(run.gpu, run.layout.tp * run.layout.dp):  # over NVLink alone
        return _nccl(run, block, count)
    words, sent = _words(run, block) | {"stack": "trtllm"}, "fp8" if _one_byte(run) else "bf16"
    kinds = (("prepare", "bf16"), ("dispatch", "nvfp4" if run.routed == "nvfp4" else sent), ("combine", "bf16"))
    first, there, back = (
        run.call("communication", f"alltoall_{what}", count, **words, dtype=kind) for what, kind in kinds
    )
    return [first, there], [back], None


def _words(run: Pass, block: Experts) -> dict[str, Any]:
    """GPUs that share a rank's tokens send a part each."""
    layout = run.layout
    return {"tokens": -(-run.tokens // layout.tp), "hidden": block.width(run.model.hidden), "topk": block.topk,
            "experts": block.experts, "world": layout.tp * layout.dp}  # fmt: skip


_EXCHANGES: Mapping[str, Callable[[Pass, Experts, int], There]] = {
    "nccl": _nccl,
    "allgather": _allgather,
    "deepep": _deepep,
    "alltoall": _alltoall,
}
EXCHANGES = tuple(_EXCHANGES)


def dense(run: Pass, block: Dense, count: int, part: str) -> Iterator[Launch]:
    inter, width = block.inter // run.layout.tp, run.model.hidden
    if not inter:
        raise KernelcastError(f"{run.layout.tp} GPUs cannot cut a block of width {block.inter}")
    activation = run.activation(block.activation)
    if block.gated and run.stack.joined_projections:
        yield run.product(part, count, run.tokens, 2 * inter, width, run.blocks)
    else:
        yield run.product(part, count * (2 if block.gated else 1), run.tokens, inter, width, run.blocks)
    if block.gated and run.stack.fused_activation and activation != "relu":
        yield from run.small("activation", f"{activation}_mul", count, rows=run.tokens, cols=inter)
    else:
        yield from run.small("activation", activation, count, rows=run.tokens, cols=inter)
        if block.gated:
            yield from run.small("activation", "mul", count, rows=run.tokens, cols=inter)
    yield run.product(part, count, run.tokens, width, inter, run.blocks)


def experts(run: Pass, block: Experts, count: int) -> Iterator[Launch]:
    """Routed experts and the shared one; the sum over the GPUs that cut them is inside."""
    hidden, layout = run.model.hidden, run.layout
    width = block.width(hidden)
    yield run.call("router", "gemm", count, m=run.tokens, n=block.experts, k=hidden, dtype=run.precision.between)
    if block.latent:
        yield run.product("experts", count, run.tokens, width, hidden, run.blocks)
    there, back, backend = exchanged(run, block, count)
    beside = "all" if run.deployment.overlap else ""
    yield from (replace(launch, beside=beside) for launch in there)
    kind = run.routed
    own: str | None = run.stack.moe_backend or backend
    if own is None:  # a kernel that was asked for runs in the format that it is given
        kind, own = served_experts(run.stack.kernels, run.gpu, kind)
    yield run.call("experts", "moe", count, tokens=run.tokens * layout.dp, hidden=width, inter=block.inter,
                   experts=block.experts, topk=block.topk, tp=layout.expert_tp, ep=layout.ep, **run.deployment.routed,
                   **run.deployment.slots(block.experts),
                   gated=block.gated, backend=own, dtype=kind)  # fmt: skip
    yield from (replace(launch, beside=beside) for launch in back)
    if block.latent:
        if block.latent_norm:
            yield from run.small("norms", "rmsnorm", count, rows=run.tokens, cols=width)
        yield run.product("experts", count, run.tokens, hidden, width, run.blocks)
    if block.shared:
        for launch in dense(run, block.shared, count, "shared experts"):
            yield replace(launch, beside="experts" if run.stack.shared_stream else "")
        if layout.dp > 1:  # else the sum over the experts has it
            yield from run.joined(count)
        yield from run.small("residual", "add", count, rows=run.tokens, cols=hidden)
    if layout.dp == 1:
        yield from run.joined(count)
