"""One layer of Llama-3.1-8B, kernel by kernel, on three GPUs: a prefill of 2,048 tokens and a decode step.

Run it with `make demo`, or `python examples/llama_layer.py`.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

import kernelcast as kc

HIDDEN, INTER, Q_HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
GPUS = ("h200_sxm", "a100_sxm", "l40s")


def layer(tokens: int, batch: int, context: int) -> dict[str, kc.Kernel]:
    """The kernels of one layer when ``batch`` requests bring ``tokens`` new tokens in all, at that context."""
    return {
        "input norm": kc.kernel("rmsnorm", rows=tokens, cols=HIDDEN, residual=True),
        "qkv GEMM": kc.kernel("gemm", m=tokens, n=(Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, k=HIDDEN),
        "RoPE": kc.kernel(
            "rope", tokens=tokens, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM
        ),
        "KV write": kc.kernel("kv_write", tokens=tokens, kv_heads=KV_HEADS, head_dim=HEAD_DIM),
        "attention": kc.kernel(
            "attention", batch=batch, q_len=tokens // batch, kv_len=context,
            q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=16,
        ),
        "out GEMM": kc.kernel("gemm", m=tokens, n=HIDDEN, k=Q_HEADS * HEAD_DIM),
        "second norm": kc.kernel("rmsnorm", rows=tokens, cols=HIDDEN, residual=True),
        "gate-up": kc.kernel("gemm", m=tokens, n=2 * INTER, k=HIDDEN),
        "SiLU x up": kc.kernel("silu_mul", rows=tokens, cols=INTER),
        "down GEMM": kc.kernel("gemm", m=tokens, n=HIDDEN, k=INTER),
    }  # fmt: skip


def show(title: str, calls: dict[str, kc.Kernel]) -> None:
    results = {gpu: kc.predict_many(list(calls.values()), gpu) for gpu in GPUS}
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("kernel")
    for gpu in GPUS:
        table.add_column(f"{gpu}\nµs", justify="right")
        table.add_column("\nbound by")
    for row, name in enumerate(calls):
        cells = [(f"{results[g][row].time_s * 1e6:,.1f}", results[g][row].bound_by) for g in GPUS]
        table.add_row(name, *(text for pair in cells for text in pair))
    table.add_section()
    sums = [f"{sum(p.time_s for p in results[g]) * 1e6:,.1f}" for g in GPUS]
    table.add_row("one layer", *(text for total in sums for text in (total, "")), style="bold")
    Console().print(table)


def main() -> None:
    show("Llama-3.1-8B, one layer, bf16: prefill of one request of 2,048 tokens", layer(2048, 1, 2048))
    show("Llama-3.1-8B, one layer, bf16: decode step of 64 requests at 2,048 tokens", layer(64, 64, 2048))
    rests_on = kc.predict(kc.kernel("gemm", m=64, n=4096, k=4096), GPUS[0]).predictor
    Console().print(f"Predictor {rests_on}; no GPU was used.", style="dim")


if __name__ == "__main__":
    main()
