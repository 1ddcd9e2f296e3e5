"""Training as people do it: bytes a parameter, what the optimizer's step reads and writes, and where autocast casts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.tracing import trace
from kernelcast.tracing.traced import Trace
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.scale import scale
from kernelcast.training.step import run_step


def model(dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(dtype)


def traced(dtype: torch.dtype, precision: str, **more: Any) -> Trace:
    x = torch.empty(8, 512, dtype=dtype, device="meta")
    return trace(model(dtype), x, "training", precision=precision, **more)


def bytes_each(found: Trace) -> tuple[float, ...]:
    held = found.footprint
    return tuple(round(part / found.parameters, 2) for part in (held.parameters, held.gradients, held.optimizer))


@pytest.mark.parametrize(
    ("dtype", "precision", "optimizer", "bytes_"),
    [
        (torch.bfloat16, "pure", "adamw", (2, 2, 4)),
        (torch.bfloat16, "mixed", "adamw", (2, 2, 12)),  # a master copy and two moments
        (torch.float16, "mixed", "adam", (2, 2, 12)),
        (torch.bfloat16, "mixed", "sgd", (2, 2, 4)),
        (torch.bfloat16, "mixed", "sgd-momentum", (2, 2, 8)),
        (torch.bfloat16, "mixed", "adamw-foreach", (2, 2, 12)),
        (torch.float32, "autocast", "adamw", (4, 4, 8)),
        (torch.float32, "pure", "adamw", (4, 4, 8)),
    ],
)
def test_bytes_a_parameter(dtype: torch.dtype, precision: str, optimizer: str, bytes_: tuple[int, ...]) -> None:
    assert bytes_each(traced(dtype, precision, optimizer=optimizer)) == bytes_


def test_a_mixed_step_reads_narrow_gradients_updates_masters_and_writes_copies() -> None:
    update, copy = (op for op in traced(torch.bfloat16, "mixed").phase("optimizer") if op.op_type == "kernel")
    assert (update.name, copy.name) == ("_fused_adamw_", "_foreach_copy_")
    assert [{x.dtype for x in one} for one in update.arguments[:4]] == [{"fp32"}, {"bf16"}, {"fp32"}, {"fp32"}]
    assert [{x.dtype for x in one} for one in copy.arguments[:2]] == [{"bf16"}, {"fp32"}]
    masters = {x.storage for x in update.arguments[0]}
    assert masters == {x.storage for x in copy.arguments[1]}


def test_any_other_optimizer_is_given_widened_gradients() -> None:
    found = traced(torch.bfloat16, "mixed", optimizer=lambda weights: torch.optim.RMSprop(weights, foreach=True))
    names = [op.name for op in found.phase("optimizer") if op.op_type == "kernel"]
    assert names[0] == names[-1] == "_foreach_copy_"
    assert len(names) > 3


def test_autocast_casts_a_weight_once_and_keeps_it_for_the_backward_pass() -> None:
    found = traced(torch.float32, "autocast")
    ops = found.phase("forward")
    casts = [op.inputs[0].shape for op in ops if op.name == "_to_copy" and op.outputs[0].dtype == "bf16"]
    assert sorted(casts).count((2048, 512)) == sorted(casts).count((512, 2048)) == 1
    assert {x.dtype for op in found.ops if op.name in ("addmm", "mm") for x in op.inputs} == {"bf16"}
    assert {g.bytes // g.elements for g in found.gradients} == {4}
    x = torch.empty(8, 512, device="meta")
    fp16 = trace(model(torch.float32), x, "training", precision="autocast", dtype="fp16")
    assert {x.dtype for op in fp16.ops if op.name == "addmm" for x in op.inputs} == {"fp16"}


@pytest.mark.parametrize(
    ("dtype", "more", "text"),
    [
        (torch.float32, {"precision": "mixed"}, "keeps weights in 16 bits"),
        (torch.bfloat16, {"precision": "autocast"}, "keeps weights in fp32"),
        (torch.bfloat16, {"precision": "amp"}, "precision must be one of pure, mixed, autocast"),
    ],
)
def test_what_a_model_cannot_be_trained_in_is_said(dtype: torch.dtype, more: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelcastError, match=text):
        traced(dtype, **more)


def test_zero_shards_masters_and_moments() -> None:
    found, chip = traced(torch.bfloat16, "mixed"), kc.gpu("h200_sxm")
    whole = found.footprint.optimizer
    sharded = scale(found, chip, TrainingLayout(dp=4, zero=1)).memory
    assert sharded["optimizer"] == pytest.approx(whole / 4, rel=0.01)
    assert sharded["parameter"] == found.footprint.parameters
    cut = scale(found, chip, TrainingLayout(dp=4)).memory
    assert cut["optimizer"] == pytest.approx(whole, rel=0.01)
    # a rank steps a quarter of the parameters
    alone, one = scale(found, chip, TrainingLayout(dp=4)), scale(found, chip, TrainingLayout(dp=4, zero=1))
    assert one.parts_s["optimizer"] < alone.parts_s["optimizer"]


def test_a_step_whose_optimizer_moves_more_than_the_memory_holds_is_timed() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16384, 16384, bias=False) for _ in range(30))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with torch.device("meta"):
        large, x = Large().bfloat16(), torch.empty(1, 16384, dtype=torch.bfloat16)
    found = trace(large, x, "training", precision="mixed")
    # 8.05e9 parameters of 16 bytes fit in 151 GB, though 225 GB move
    step = run_step(found, kc.gpu("h200_sxm"))
    assert step.phase_kernel_s("optimizer") > 28 * found.parameters / kc.gpu("h200_sxm").dram_bytes_per_s


def test_pieces_of_an_optimizer_s_pass_hold_as_much() -> None:
    """Weights and biases alternate in a model's parameters: every second one of them is nearly all of it."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16384, 16384) for _ in range(30))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with torch.device("meta"):
        large, x = Large().bfloat16(), torch.empty(1, 16384, dtype=torch.bfloat16)
    found = trace(large, x, "training", precision="mixed")
    chip = kc.gpu("h100_sxm")  # a rank's half of the states are 56 GB, of which 113 GB move
    step = scale(found, chip, TrainingLayout(dp=2, zero=3))
    assert step.parts_s["optimizer"] > 28 / 2 * found.parameters / chip.dram_bytes_per_s
