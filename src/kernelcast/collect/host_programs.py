"""Small models that keep the host busy and the GPU nearly idle: what a host takes is read off them.

Their ops are those of real models, in other proportions each: many kernels and few views, many views, much Python,
hardly any; so that each of the host's costs weighs heavily in some and lightly in others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDTH, _HEADS, _LENGTH = 64, 4, 32


class Encoder(nn.Module):
    """A transformer block; ``by_hand``: attention as two products, with the views that takes."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.by_hand = by_hand

    def heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], _HEADS, -1).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.by_hand:
            return functional.scaled_dot_product_attention(q, k, v)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return functional.softmax(scores, dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        found = self.attend(self.heads(self.query(y)), self.heads(self.key(y)), self.heads(self.value(y)))
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gated(nn.Module):
    """A block of a language model as libraries write it: norms, rotation and gates by element-wise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))
        self.gate, self.up, self.down = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))

    def normed(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x[..., : _WIDTH // 2], x[..., _WIDTH // 2 :]
        return x * 0.5 + torch.cat((-b, a), dim=-1) * 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.rotated(self.normed(x))
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Residual(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 16, 1, bias=False)
        self.middle = nn.Conv2d(16, 16, 3, padding=1, groups=groups, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms[0](self.narrow(x)))
        y = self.relu(self.norms[1](self.middle(y)))
        return self.relu(x + self.norms[2](self.wide(y)))


class Looped(nn.Module):
    """A recurrence written as a loop: tiny ops and views, hardly any Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(_WIDTH, 2 * _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        decay, inputs = self.project(x).chunk(2, dim=-1)
        decay, state, out = torch.sigmoid(decay), torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = decay[:, at] * state + inputs[:, at]
            out.append(state[:, None])
        return torch.cat(out, dim=1)


def programs() -> Iterator[tuple[str, nn.Module, Any]]:
    """Name, model and inputs, on the default device; in bf16."""
    tokens = torch.randn(1, _LENGTH, _WIDTH, dtype=torch.bfloat16)
    pixels = torch.randn(1, 16, 8, 8, dtype=torch.bfloat16)
    made: dict[str, tuple[list[nn.Module], Tensor]] = {
        "encoder": ([Encoder(False) for _ in range(16)], tokens),
        "encoder by hand": ([Encoder(True) for _ in range(16)], tokens),
        "gated": ([Gated() for _ in range(24)], tokens),
        "residual": ([Residual() for _ in range(16)], pixels),
        "depthwise": ([Residual(16) for _ in range(16)], pixels),
        "perceptron": ([part for _ in range(40) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())], tokens),
        "loop": ([Looped() for _ in range(8)], tokens),
    }
    for name, (parts, inputs) in made.items():
        yield name, nn.Sequential(*parts).to(torch.bfloat16), inputs
    yield from _of_transformers()


def _of_transformers() -> Iterator[tuple[str, nn.Module, Any]]:
    """Where the library is there: much Python between the ops."""
    try:
        import transformers
    except ImportError:
        return
    sizes: dict[str, Any] = {
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_attention_heads": _HEADS,
        "vocab_size": 256,
    }
    ids = {"input_ids": torch.randint(4, 250, (1, _LENGTH))}
    llama = transformers.LlamaConfig(**sizes, num_hidden_layers=12, num_key_value_heads=2)
    bert = transformers.BertConfig(**sizes, num_hidden_layers=12)
    yield "llama", transformers.LlamaModel._from_config(llama, dtype=torch.bfloat16), ids | {"use_cache": False}
    yield "bert", transformers.BertModel._from_config(bert, dtype=torch.bfloat16), ids
