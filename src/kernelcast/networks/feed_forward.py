"""What a feed-forward part launches: a dense block, or experts with what goes between the GPUs that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernelcast.calls import Launch
from kernelcast.errors import KernelcastError
from kernelcast.kernels.which import served_experts
from kernelcast.networks.exchange import exchanged
from kernelcast.networks.launching import Pass
from kernelcast.networks.layers import Dense, Experts


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
