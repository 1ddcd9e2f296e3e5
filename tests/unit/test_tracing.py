"""Tracing on meta tensors: what is recorded, that a GPU's way is taken, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernelcast.errors import KernelcastError
from kernelcast.tracing import trace
from kernelcast.tracing.aten.table import op_flops
from kernelcast.tracing.cuda_like import gpu_present
from kernelcast.tracing.traced import Trace


class Block(nn.Module):
    """Attention and an MLP, as a transformer's layer."""

    def __init__(self, width: int = 64, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + self.mlp(x)


class Images(nn.Module):
    """Convolutions of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 32, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.point(self.depthwise(x)), 1).flatten(1))


def names(found: Trace, phase: str | None = None) -> list[str]:
    return [op.name for op in found.ops if op.op_type == "kernel" and phase in (None, op.phase)]


def test_every_op_of_forward_backward_and_optimizer_is_seen() -> None:
    found = trace(nn.Linear(8, 4), torch.randn(2, 8), "training")
    assert names(found, "forward") == ["addmm", "mean"]
    # weight gradient by a product, bias gradient by a sum; the input needs none
    assert names(found, "backward").count("mm") == 1
    assert "sum" in names(found, "backward")
    assert "_fused_adamw_" in names(found, "optimizer")
    assert found.parameters == 8 * 4 + 4
    assert [g.elements for g in found.gradients] in ([4, 32], [32, 4])


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("kind", ["block", "images"])
def test_flops_equal_torchs_own_counter(kind: str, mode: Any) -> None:
    with torch.device("meta"):
        model: nn.Module = Block(dropout=0.0) if kind == "block" else Images()
        inputs = torch.randn(2, 16, 64) if kind == "block" else torch.randn(2, 3, 32, 32)
    found = trace(model, inputs, mode, attention="fused", optimizer=None)
    ours = sum(op_flops(op) for op in found.ops)
    model.train(mode == "training")
    # the counter sees what a GPU would run: attention as one op, whose scores are computed again in the backward pass
    with gpu_present(), FlopCounterMode(display=False) as counter, torch.set_grad_enabled(mode == "training"):
        out = model(inputs)
        if mode == "training":
            out.mean().backward()
    assert ours == counter.get_total_flops() > 0


def test_a_gpus_way_is_taken_dropout_and_attention_are_one_kernel() -> None:
    with torch.device("meta"):
        model, x = Block(), torch.randn(2, 16, 64)
    seen = names(trace(model, x, "training"))
    assert seen.count("native_dropout") == 1
    assert seen.count("_scaled_dot_product_cudnn_attention") == 1
    assert seen.count("_scaled_dot_product_cudnn_attention_backward") == 1
    assert "_safe_softmax" not in seen
    assert "_safe_softmax" in names(trace(model, x, attention="math"))


def test_a_backward_op_knows_the_module_of_its_forward() -> None:
    with torch.device("meta"):
        model, x = Block(), torch.randn(2, 16, 64)
    products = [op.module for op in trace(model, x, "training").phase("backward") if op.name == "mm"]
    assert products == ["mlp.2", "mlp.2", "mlp.0", "mlp.0", "out", "out", "qkv", "qkv"]


def test_activation_checkpointing_runs_the_forward_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(dropout=0.0) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    with torch.device("meta"):
        plain, again = nn.Sequential(*(Block(dropout=0.0) for _ in range(4))), Checkpointed()
        x = torch.randn(8, 128, 64)
    without, with_ = trace(plain, x, "training"), trace(again, x, "training")
    assert names(with_, "forward").count("addmm") == 16
    assert names(with_, "backward").count("addmm") == 12  # of each block all but the last: nothing needs its output
    assert names(without, "backward").count("addmm") == 0
    assert with_.footprint.activations < without.footprint.activations


def test_accumulated_gradients_repeat_the_passes_but_not_the_step() -> None:
    with torch.device("meta"):
        model, x = Block(), torch.randn(2, 16, 64)
    once, thrice = (trace(model, x, "training", accumulate=n) for n in (1, 3))
    assert names(thrice, "forward") == 3 * names(once, "forward")
    assert names(thrice, "optimizer") == names(once, "optimizer")
    assert thrice.samples == 6


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_multiplies_in_16_bits_and_casts_a_weight_once(device: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return torch.softmax(self.linear(self.linear(x)), -1)

    ops = trace(Twice(), torch.randn(4, 8), "training").phase("forward")
    products = [op for op in ops if op.name == "addmm"]
    assert {op.arguments[1].dtype for op in products} == {"bf16"}
    assert [op.inputs[0].dtype for op in ops if op.name == "_softmax"] == ["fp32"]
    casts = [op for op in ops if op.name == "_to_copy" and op.outputs[0].shape == (8, 8)]
    assert len(casts) == 1


def test_memory_is_that_of_the_tensors_that_live() -> None:
    found = trace(nn.Linear(256, 512), torch.randn(64, 256), "training").footprint
    assert found.parameters == 4 * (256 * 512 + 512)
    assert found.optimizer >= 2 * found.parameters  # two moments, and the steps
    assert found.inputs == 4 * 64 * 256
    whole = trace(nn.Sequential(nn.Linear(64, 4096), nn.ReLU()), torch.randn(128, 64)).footprint
    assert whole.activations == 2 * 4 * 128 * 4096  # the product and its ReLU; nothing is kept for a backward pass


def test_the_model_is_left_as_it_was() -> None:
    model = Block()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    trace(model, torch.randn(2, 16, 64), "training")
    assert not model.training
    assert all(value.device.type == "cpu" and value.grad is None for value in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_tied_weights_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 100, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids))

    found = trace(Tied(), torch.randint(100, (2, 8)), "training")
    assert found.parameters == 1600
    assert len(found.gradients) == 1
    assert (found.samples, found.tokens) == (2, 16)


def test_a_program_may_branch_on_constants_but_not_on_data() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(4, device=x.device)
            return x * 2 if bool((mask == 1).all()) else x

    assert names(trace(Masked(), torch.randn(4))) == ["ones", "eq", "all", "mul"]

    class Greedy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(KernelcastError, match="needs the value of a tensor"):
        trace(Greedy(), torch.randn(4))


def test_code_that_sends_tensors_to_a_gpu_traces_without_one() -> None:
    class Sent(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.zeros(4, device="cuda") if torch.cuda.is_available() else torch.zeros(4)
            return x.cuda() + y.to("cuda:0")

    assert "add" in names(trace(Sent(), torch.randn(4)))


def test_foreach_optimizers_are_seen_as_lists() -> None:
    found = trace(Block(), torch.randn(2, 16, 64), "training", optimizer="adamw-foreach")
    kinds = set(names(found, "optimizer"))
    assert any(kind.startswith("_foreach_") for kind in kinds)
    mine = trace(
        Block(), torch.randn(2, 16, 64), "training", optimizer=lambda w: torch.optim.SGD(w, lr=0.1, fused=True)
    )
    assert names(mine, "optimizer") == ["_fused_sgd_"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mode": "tuning"}, "mode must be one of inference, training, not 'tuning'"),
        ({"mode": "training", "optimizer": "lion"}, "unknown optimizer 'lion'; known: adamw"),
        ({"accumulate": 0}, "accumulate must be 1 or more"),
        ({"attention": "flash"}, "attention must be one of fused, math"),
        ({"mode": "training", "loss": lambda out: out}, "a loss is one number, not a tensor of shape"),
        ({"mode": "training", "loss": lambda out: out.detach().mean()}, "the loss depends on no parameter"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelcastError) as caught:
        trace(nn.Linear(8, 4), torch.randn(2, 8), **given)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_fails_names_the_module() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4))
    with pytest.raises(KernelcastError, match=r"does not trace in 1, after t: a and b must have same reduction dim"):
        trace(model, torch.randn(2, 8))


def test_repeating_a_trace_is_the_same_and_fast() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block() for _ in range(24))), torch.randn(2, 16, 64)
    start = time.perf_counter()
    first = trace(model, x, "training")
    assert time.perf_counter() - start < 5  # about 0.3 s
    assert names(first) == names(trace(model, x, "training"))
