"""Recommendation: many small lookups in large tables, then a little arithmetic."""

import itertools

import torch
from torch import nn
from torch.nn import functional


def _mlp(*sizes):
    layers = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Dlrm(nn.Module):
    """MLPerf's: 26 bags, dense features through an MLP, all pairs of dot products, an MLP."""

    def __init__(self, tables=26, rows=1_000_000, width=128):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = _mlp(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = _mlp(pairs + width, 1024, 1024, 512, 256, 1)
        self.register_buffer("places", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense, ids, offsets):
        x = self.bottom(dense)
        features = torch.stack([x] + [bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True)], 1)
        products = features @ features.mT
        return self.top(torch.cat((x, products[:, self.places[0], self.places[1]]), 1)).squeeze(1)


def dlrm(batch, seq, dtype, mode):
    """``seq`` ids in every bag."""
    model = _Dlrm(rows=200_000).to(dtype)
    ids = [torch.randint(0, 200_000, (batch * seq,)) for _ in range(26)]
    offsets = [torch.arange(0, batch * seq, seq) for _ in range(26)]
    clicked = torch.randint(0, 2, (batch,)).float()
    inputs = (torch.randn(batch, 13).to(dtype), ids, offsets)
    return model, inputs, lambda out: functional.binary_cross_entropy_with_logits(out.float(), clicked)


class _DeepFm(nn.Module):
    def __init__(self, fields=39, rows=1_000_000, width=16):
        super().__init__()
        self.table, self.first = nn.Embedding(rows, width), nn.Embedding(rows, 1)
        self.deep = _mlp(fields * width, 400, 400, 400, 1)

    def forward(self, ids):
        x = self.table(ids)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1)
        return self.first(ids).sum((1, 2)) + pairs + self.deep(x.flatten(1)).squeeze(1)


def deepfm(batch, dtype, mode):
    clicked = torch.randint(0, 2, (batch,)).float()
    ids = torch.randint(0, 1_000_000, (batch, 39))
    return _DeepFm().to(dtype), ids, lambda out: functional.binary_cross_entropy_with_logits(out.float(), clicked)
