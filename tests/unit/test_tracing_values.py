"""Values of small tensors while a model runs on meta tensors: what is known, no longer known, and refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from kernelcast.errors import KernelcastError
from kernelcast.tracing import trace
from kernelcast.tracing.traced import Trace

LENGTHS = torch.tensor([3, 1, 2])


class Asks(nn.Module):
    """A model whose forward is one function of its input and lengths."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.seen = function, None

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        self.seen = self.function(x, lengths)
        return x * 2


def asked(function: Callable[..., Any], lengths: torch.Tensor = LENGTHS) -> Any:
    model = Asks(function)
    trace(model, (torch.randn(3, 4), lengths.clone()))
    return model.seen


def written(x: torch.Tensor, lengths: torch.Tensor) -> list[int]:
    counts = torch.zeros(4, dtype=torch.long)
    counts[1:3] = 7  # through a view
    counts.view(2, 2)[0].add_(1)
    counts[[0, 3]] = torch.tensor([5, 6])  # index_put
    return counts.tolist()


def placed(x: torch.Tensor, lengths: torch.Tensor) -> list[int]:
    mask = torch.arange(4, device=x.device)[None] < lengths[:, None]
    return [int(mask.sum()), int(mask.nonzero().shape[0]), *x[mask].shape, *x.masked_select(mask).shape]


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (lambda x, n: n.tolist(), [3, 1, 2]),
        (lambda x, n: n.cpu().numpy().tolist(), [3, 1, 2]),
        (lambda x, n: int(n.max()) if n.max() > 2 else 0, 3),
        (lambda x, n: (n * 2 + 1).cumsum(0)[-1].item(), 15),
        (lambda x, n: torch.where(n > 1, n, torch.zeros_like(n)).tolist(), [3, 0, 2]),
        (lambda x, n: n.to(torch.float32).div(2).mean().item(), 1.0),
        (lambda x, n: [t.item() for t in n.sort(descending=True).values], [3, 2, 1]),
        (lambda x, n: n.new_ones(2).tolist() + n.new_tensor([4]).tolist(), [1, 1, 4]),
        (lambda x, n: torch.repeat_interleave(n, n).tolist(), [3, 3, 3, 1, 2, 2]),
        (lambda x, n: n.unique().tolist(), [1, 2, 3]),
        (lambda x, n: 1 in n, True),
        (lambda x, n: n[[-1, 0]].tolist(), [2, 3]),
        (lambda x, n: f"expert_{n[0]}", "expert_3"),
        (lambda x, n: torch.equal(n, n.clone()), True),
        (lambda x, n: torch.linspace(0, 1, 5)[3].item(), 0.75),
        (lambda x, n: n.data[1].item(), 1),
        (written, [5, 8, 7, 6]),
        (placed, [6, 6, 6, 6]),
        (lambda x, n: bool(torch.isfinite(x).all()), True),
        (lambda x, n: bool(torch.isnan(x * 3).any()), False),
        (lambda x, n: bool(torch.ones(2000, 2000, dtype=torch.bool).all()), True),
        (lambda x, n: torch.rand([]).item(), 0.5),  # a coin falls on the middle
    ],
)
def test_what_comes_from_constants_and_whole_inputs_is_known(function: Callable[..., Any], answer: Any) -> None:
    assert asked(function) == answer


def unknown_written(x: torch.Tensor, lengths: torch.Tensor) -> Any:
    known = torch.zeros(4)
    known[:2] = x[0, :2]  # data, into a view of what was known
    return known[3].item()


def unknown_copied(x: torch.Tensor, lengths: torch.Tensor) -> Any:
    known = torch.zeros(3, 4)
    known.detach().copy_(x)
    return known.sum().item()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x, n: x.sum().item(), "needs the value of a tensor"),
        (lambda x, n: x.tolist(), r"needs the values of a tensor \(tolist\(\)\)"),
        (lambda x, n: x.argmax(-1)[0].item(), "needs the value of a tensor"),
        (lambda x, n: (x > 0).nonzero(), "size of the result of nonzero"),
        (lambda x, n: x[x > 0], r"a mask chooses \(x\[mask\]\)"),
        (lambda x, n: x.masked_select(x > 0), "size of the result of masked_select"),
        (lambda x, n: torch.equal(x, x), "compares the values of tensors"),
        (lambda x, n: torch.randn(3).tolist(), "needs the values of a tensor"),
        (unknown_written, "needs the value of a tensor"),
        (unknown_copied, "needs the value of a tensor"),
    ],
)
def test_what_depends_on_data_is_refused_with_file_and_line(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(KernelcastError, match=text) as caught:
        asked(function)
    line = function.__code__.co_firstlineno
    place, number = str(caught.value).split(": ")[0].split(":")
    assert place.endswith("tests/unit/test_tracing_values.py")
    assert line <= int(number) <= line + 5
    assert "\n" not in str(caught.value)


def test_whole_inputs_on_meta_answer_yes_and_no_but_not_how_many() -> None:
    ids = torch.empty(3, dtype=torch.long, device="meta")
    assert asked(lambda x, n: (0 in n, bool((n == 1).any()), bool((n != 0).all())), ids.clone()) == (False, False, True)
    with pytest.raises(KernelcastError, match="needs the value of a tensor"):
        asked(lambda x, n: n.max().item(), ids)
    with pytest.raises(KernelcastError, match="size of the result of nonzero"):
        asked(lambda x, n: n.nonzero(), ids)


def kernels(found: Trace) -> list[str]:
    return [op.name for op in found.ops if op.op_type == "kernel"]


def test_a_known_mask_is_looked_up_on_the_gpu_before_it_chooses() -> None:
    model = Asks(lambda x, n: x[n > 1] + 1)
    seen = trace(model, (torch.randn(3, 4), LENGTHS))
    assert kernels(seen)[:4] == ["gt", "nonzero", "index", "add"]
    assert next(op for op in seen.ops if op.name == "index").outputs[0].shape == (2, 4)


def test_a_router_spreads_tokens_evenly_and_says_so() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 4)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)  # type: ignore[operator]

    class Layer(Experts):
        def mlp(self, x: torch.Tensor) -> torch.Tensor:
            chosen = self.router(x).argmax(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                places = (chosen == number).nonzero().flatten()
                out.index_add_(0, places, expert(x[places]))
            return out

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    found = trace(Model(), torch.randn(12, 4))
    products = [op.outputs[0].shape for op in found.ops if op.name == "addmm" and "experts" in op.module]
    assert products == [(3, 4)] * 4  # 12 tokens, 4 experts
    assert found.notes == ("tokens are assumed to be routed evenly to experts",)
    with pytest.raises(KernelcastError, match="depends on the data"):
        trace(Layer(), torch.randn(12, 4))  # nothing says that this is a router


def test_layers_left_out_at_random_in_python_are_the_same_every_time() -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                if random.random() < 0.5:
                    x = x * 2
            return x

    before = random.getstate()
    first, second = (kernels(trace(Dropped(), torch.randn(4))) for _ in range(2))
    assert first == second
    assert 0 < len(first) < 20
    assert random.getstate() == before


def test_a_ctc_loss_is_as_large_as_its_longest_target() -> None:
    def ctc(out: torch.Tensor) -> torch.Tensor:
        scores = F.log_softmax(out, -1).transpose(0, 1)
        return F.ctc_loss(scores, torch.ones(2, 9, dtype=torch.long), torch.tensor([40, 40]), torch.tensor([5, 9]))

    found = trace(nn.Linear(8, 12), torch.randn(2, 40, 8), "training", loss=ctc)
    (op,) = [op for op in found.ops if op.name == "_ctc_loss"]
    assert [out.shape for out in op.outputs] == [(2,), (2, 40, 19)]  # two a letter and one more
    assert "_ctc_loss_backward" in kernels(found)


def test_an_error_names_the_line_that_made_it() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ x  # 4 columns on 2 rows

    with pytest.raises(KernelcastError, match=r"tests/unit/test_tracing_values\.py:\d+: the model does not trace"):
        trace(Wrong(), torch.randn(2, 8))
