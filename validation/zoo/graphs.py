"""Graph networks by gathers and scatters, without a library of their own."""

import torch
from torch import nn
from torch.nn import functional


class _Sage(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.own, self.near = nn.Linear(before, after), nn.Linear(before, after, bias=False)

    def forward(self, x, source, target):
        sums = torch.zeros_like(x).index_add_(0, target, x.index_select(0, source))
        counts = torch.zeros(len(x), dtype=x.dtype, device=x.device).scatter_add_(
            0, target, torch.ones(len(target), dtype=x.dtype, device=x.device)
        )
        return self.own(x) + self.near(sums / counts.clamp(min=1)[:, None])


class _Graph(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, source, target):
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x, source, target))
        return self.layers[-1](x, source, target)


def _graph(layers, batch, dtype, width):
    """``batch`` nodes with twelve edges each, 47 classes."""
    nodes, edges = batch, 12 * batch
    labels = torch.randint(0, 47, (nodes,))
    inputs = (torch.randn(nodes, width).to(dtype), torch.randint(0, nodes, (edges,)), torch.randint(0, nodes, (edges,)))
    return _Graph(layers).to(dtype), inputs, lambda out: functional.cross_entropy(out.float(), labels)


def graph_sage(batch, dtype, mode):
    return _graph((_Sage(100, 256), _Sage(256, 256), _Sage(256, 47)), batch, dtype, 100)


class _Gat(nn.Module):
    def __init__(self, before, after, heads=4):
        super().__init__()
        self.heads, self.project = heads, nn.Linear(before, heads * after, bias=False)
        self.left, self.right = (nn.Parameter(torch.zeros(heads, after)) for _ in range(2))

    def forward(self, x, source, target):
        x = self.project(x).unflatten(-1, (self.heads, -1))
        score = functional.leaky_relu((x * self.left).sum(-1)[source] + (x * self.right).sum(-1)[target], 0.2)
        weight = torch.exp(score - score.max())
        total = torch.zeros(len(x), self.heads, dtype=x.dtype, device=x.device).index_add_(0, target, weight)
        weight = weight / total[target].clamp(min=1e-6)
        return torch.zeros_like(x).index_add_(0, target, x[source] * weight[..., None]).flatten(1)


def gat(batch, dtype, mode):
    return _graph((_Gat(100, 64), _Gat(256, 64), _Gat(256, 12)), batch, dtype, 100)
