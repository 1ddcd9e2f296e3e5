"""Recurrent layers: speech and translation before attention, taggers, forecasts of series, and sizes between them."""

from __future__ import annotations

from kernelcast.collect.sampling import Draw, Drawn, Table

# Elements of all gates of all layers, which is what is saved for the backward pass.
_MOST_GATES = 2**28
_MOST_KERNELS = (250, 250, 250, 1000)  # of a call by the standard algorithm: a step of a layer is about two


def _widths(draw: Draw) -> tuple[int, int]:
    """(input, hidden) of a layer."""
    if draw.chance(0.25):  # states small enough to stay on an SM
        hidden = draw.pick((32, 64, 64, 100, 128, 128, 150, 160, 192))
    elif draw.chance(0.6):
        hidden = draw.pick((200, 256, 256, 300, 320, 384, 512, 512, 640, 650, 768, 1024, 1024, 1280, 1500, 2048))
    else:
        hidden = draw.size(24, 2048, draw.pick((1, 8, 8, 32, 64, 128)))
    width = hidden if draw.chance(0.4) else draw.pick((16, 40, 64, 80, 128, 128, 256, 300, 512, 512, 768, 1024, 2048))
    return width, hidden


def _layers(draw: Draw, op: str) -> Drawn:
    width, hidden = _widths(draw)
    layers = draw.pick((1, 1, 1, 1, 1, 2, 3, 4))  # measurements of one carry over to the others
    both = draw.chance(0.2)
    batch = draw.size(1, 256, draw.pick((1, 8, 8, 16))) if draw.chance(0.7) else 2 ** draw.pick(range(9))
    dtype = draw.pick(3 * ("bf16", "fp16", "tf32") + ("fp32",))
    packed = draw.chance(0.1)
    stepped = hidden > 128 or dtype == "bf16" or packed
    most = max(8, draw.pick(_MOST_KERNELS) // (2 * layers * (1 + both)))
    steps = draw.size(8, min(most, 600) if stepped else 600)
    cell = draw.pick(("lstm", "lstm", "lstm", "gru", "gru", "rnn"))
    steps = max(4, min(steps, _MOST_GATES // (batch * hidden * 4 * layers)))
    call: Drawn = {"op": op, "batch": batch, "steps": steps, "input": width, "hidden": hidden, "layers": layers,
                   "bidirectional": both, "cell": cell, "stack": "torch", "dtype": dtype}  # fmt: skip
    if op == "recurrent":
        call["training"] = draw.chance(0.5)
    if cell == "lstm" and draw.chance(0.06):
        call["projection"] = max(8, hidden // draw.pick((2, 4)) // 8 * 8)
    elif packed:
        call["algorithm"] = "standard"  # which a packed batch takes
    return call


def _kept(draw: Draw, op: str) -> Drawn:
    """One layer whose weights stay in registers: the algorithm that PyTorch requests of cuDNN for fp16 of these
    sizes."""
    call = {"op": op, "batch": draw.pick((8, 16, 24, 32, 48, 64, 64, 96, 128)), "steps": draw.size(8, 1000),
            "input": draw.pick((128, 256, 512, 512, 768, 1024)),
            "hidden": draw.pick((256, 256, 384, 512, 512, 640, 768, 1024, 1024)),
            "cell": draw.pick(("lstm", "lstm", "rnn")), "dtype": "fp16", "stack": "torch"}  # fmt: skip
    return call | ({"training": draw.chance(0.5)} if op == "recurrent" else {})


def _one_step(draw: Draw) -> Drawn:
    """A single step of a decoder or an agent, dominated by launches."""
    width, hidden = _widths(draw)
    return {"op": "recurrent", "batch": draw.size(1, 256), "steps": draw.pick((1, 1, 2, 4)), "input": width,
            "hidden": hidden, "layers": draw.pick((1, 1, 2, 4)), "cell": draw.pick(("lstm", "lstm", "gru", "rnn")),
            "dtype": draw.pick(("bf16", "fp16", "tf32")), "training": draw.chance(0.3), "stack": "torch"}  # fmt: skip


def _ctc(draw: Draw) -> Drawn:
    return {"op": "ctc_loss", "batch": draw.size(1, 64), "steps": draw.size(32, 2000), "targets": draw.size(4, 300),
            "classes": draw.pick((29, 32, 64, 500, 1000, 5000)), "backward": draw.chance(0.5), "dtype": "fp32",
            "stack": "torch"}  # fmt: skip


def _thin(draw: Draw) -> Drawn:
    """Products with a vector, as state-space models make at every step of a loop, and their gradients."""
    wide, state = draw.size(64, 4096, draw.pick((16, 64))), draw.pick((8, 16, 16, 32, 64, 128, 256))
    m, n, k = draw.pick(((wide, 1, state), (state, 1, wide), (wide, state, 1), (1, wide, state), (1, state, wide)))
    return {"op": "bmm", "batch": draw.size(1, 256), "m": m, "n": n, "k": k,
            "dtype": draw.pick(("bf16", "bf16", "fp16", "fp32")), "stack": "torch"}  # fmt: skip


# family: (how it is drawn, its part of all calls)
TABLE: Table = {
    "recurrent": (lambda draw: _layers(draw, "recurrent"), 7.4),
    "recurrent-kept": (lambda draw: _kept(draw, "recurrent"), 0.9),
    "recurrent-step": (_one_step, 0.7),
    "recurrent-backward": (lambda draw: _layers(draw, "recurrent_backward"), 6.0),
    "ctc": (_ctc, 0.3),
    "bmm-thin": (_thin, 1.2),
    "recurrent-kept-backward": (lambda draw: _kept(draw, "recurrent_backward"), 1.0),
}
