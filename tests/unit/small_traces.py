"""Traces of small models, written by hand: no torch needed."""

from __future__ import annotations

from typing import Any

from kernelcast.tracing.traced import Footprint, Gradient, Op, Phase, Tensor, Trace

BF16 = 2


class Recording:
    """Numbers memory and keeps ops, as a recorder does."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._count = 0

    def tensor(self, *shape: int, dtype: str = "bf16") -> Tensor:
        self._count += 1
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= size
        return Tensor(shape, tuple(reversed(stride)), dtype, self._count)

    def op(self, name: str, phase: Phase, module: str, arguments: tuple[Any, ...], *shape: int) -> Tensor:
        out = self.tensor(*shape)
        self.ops.append(Op(name, arguments, {}, (out,), "kernel", phase, module))
        return out

    def turned(self, x: Tensor, phase: Phase, module: str) -> Tensor:
        out = Tensor(x.shape[::-1], x.stride[::-1], x.dtype, x.storage)
        self.ops.append(Op("t", (x,), {}, (out,), "view", phase, module))
        return out


def mlp(layers: int = 4, tokens: int = 512, hidden: int = 1024, inner: int = 4096) -> Trace:
    """x + fc2(relu(fc1(x))), so many times: forward, backward and a fused AdamW, all in bf16."""
    r = Recording()
    x = r.tensor(tokens, hidden)
    w1 = [r.tensor(inner, hidden) for _ in range(layers)]
    w2 = [r.tensor(hidden, inner) for _ in range(layers)]
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for i in range(layers):
        up, act, down = (f"layers.{i}.mlp.{name}" for name in ("fc1", "act", "fc2"))
        wide = r.op("mm", "forward", up, (x, r.turned(w1[i], "forward", up)), tokens, inner)
        bent = r.op("relu", "forward", act, (wide,), tokens, inner)
        narrow = r.op("mm", "forward", down, (bent, r.turned(w2[i], "forward", down)), tokens, hidden)
        kept.append((x, wide, bent))
        x = r.op("add", "forward", f"layers.{i}", (x, narrow), tokens, hidden)
    grad = r.op("ones_like", "backward", "", (x,), tokens, hidden)
    grads: dict[int, Tensor] = {}
    ready: list[Gradient] = []
    for i in reversed(range(layers)):
        up, act, down = (f"layers.{i}.mlp.{name}" for name in ("fc1", "act", "fc2"))
        given, wide, bent = kept[i]
        turned = r.turned(grad, "backward", down)
        grads[2 * i + 1] = r.op("mm", "backward", down, (turned, bent), hidden, inner)
        ready.append(Gradient(hidden * inner * BF16, hidden * inner, len(r.ops) - 1))
        inside = r.op("mm", "backward", down, (grad, w2[i]), tokens, inner)
        before = r.op("threshold_backward", "backward", act, (inside, wide, 0), tokens, inner)
        turned = r.turned(before, "backward", up)
        grads[2 * i] = r.op("mm", "backward", up, (turned, given), inner, hidden)
        ready.append(Gradient(hidden * inner * BF16, hidden * inner, len(r.ops) - 1))
        back = r.op("mm", "backward", up, (before, w1[i]), tokens, hidden)
        grad = r.op("add", "backward", f"layers.{i}", (grad, back), tokens, hidden)
    weights = tuple(w for pair in zip(w1, w2, strict=True) for w in pair)
    moments = tuple(tuple(r.tensor(*w.shape) for w in weights) for _ in range(2))
    steps = tuple(r.tensor(dtype="fp32") for _ in weights)
    lists = (weights, tuple(grads[i] for i in range(2 * layers)), *moments, (), steps)
    r.ops.append(Op("_fused_adamw_", lists, {}, (), "kernel", "optimizer", ""))
    size = 2 * layers * hidden * inner
    return Trace(
        name="mlp", mode="training", ops=tuple(r.ops), parameters=size, parameter_tensors=2 * layers,
        # most lives as the backward pass begins: all results, the last layer's gradients, one gradient of a weight
        footprint=Footprint(
            parameters=size * BF16, gradients=hidden * inner * BF16, optimizer=2 * size * BF16,
            inputs=tokens * hidden * BF16, activations=(layers + 1) * tokens * (hidden + 2 * inner) * BF16,
        ),
        gradients=tuple(ready), module_calls={"forward": 4 * layers}, tokens=tokens, samples=1,
    )  # fmt: skip


def experts(tokens: int = 1024, hidden: int = 512, inner: int = 1024, count: int = 8) -> Trace:
    """Two grouped products over ``count`` experts, forward and their weights' gradients."""
    r = Recording()
    x, ends = r.tensor(tokens, hidden), r.tensor(count, dtype="int32")
    w1, w2 = r.tensor(count, hidden, inner), r.tensor(count, inner, hidden)
    path = "layers.0.mlp.experts"
    wide = r.op("_grouped_mm", "forward", path, (x, w1, ends), tokens, inner)
    bent = r.op("relu", "forward", path, (wide,), tokens, inner)
    out = r.op("_grouped_mm", "forward", path, (bent, w2, ends), tokens, hidden)
    grad = r.op("ones_like", "backward", "", (out,), tokens, hidden)
    g2 = r.op("_grouped_mm", "backward", path, (r.turned(bent, "backward", path), grad, ends), count, inner, hidden)
    ready = [Gradient(g2.bytes, g2.elements, len(r.ops) - 1)]
    turned = Tensor((count, hidden, inner), (inner * hidden, 1, hidden), "bf16", w2.storage)
    inside = r.op("_grouped_mm", "backward", path, (grad, turned, ends), tokens, inner)
    g1 = r.op("_grouped_mm", "backward", path, (r.turned(x, "backward", path), inside, ends), count, hidden, inner)
    ready.append(Gradient(g1.bytes, g1.elements, len(r.ops) - 1))
    lists = ((w1, w2), (g1, g2), (r.tensor(*w1.shape), r.tensor(*w2.shape)), (r.tensor(*w1.shape), r.tensor(*w2.shape)))
    r.ops.append(Op("_fused_adamw_", lists, {}, (), "kernel", "optimizer", ""))
    size = w1.elements + w2.elements
    return Trace("experts", "training", tuple(r.ops), size, 2,
                 Footprint(parameters=size * BF16, gradients=size * BF16, optimizer=2 * size * BF16),
                 tuple(ready), {}, tokens, 1)  # fmt: skip
