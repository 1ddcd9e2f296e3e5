"""Plans of tensor parallelism: from a file, from the model itself, and what stays uncut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kernelcast.errors import KernelcastError
from kernelcast.tracing import trace
from kernelcast.tracing.traced import Trace
from kernelcast.training.tensor_parallel import MEGATRON, TensorParallelPlan, read_plan, shard_tensors


class Model(nn.Module):
    """Names that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"wide": nn.Linear(64, 256), "narrow": nn.Linear(256, 64), "side": nn.Linear(64, 64)})
            for _ in range(2)
        )
        self.last = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        for layer in layers:
            x = x + layer["narrow"](torch.relu(layer["wide"](x))) + layer["side"](x)
        return self.last(x)


PLAN = {"layers.*.wide": "colwise", "layers.*.narrow": "rowwise"}


@pytest.fixture(scope="module")
def found() -> Trace:
    with torch.device("meta"):
        return trace(Model(), torch.empty(8, 64), "training")


def products(cut: Trace, module: str) -> list[tuple[int, ...]]:
    return [op.inputs[-1].shape for op in cut.phase("forward") if op.name == "addmm" and op.module == module]


def test_a_plan_cuts_columns_and_rows_and_lists_what_it_leaves(found: Trace) -> None:
    cut = shard_tensors(found, 4, tp_plan=TensorParallelPlan.of(PLAN))
    assert products(cut, "layers.0.wide") == [(64, 64)]  # 256 columns on 4 ranks
    assert products(cut, "layers.1.narrow") == [(64, 64)]  # 256 rows
    assert products(cut, "layers.0.side") == [(64, 64)]  # whole
    assert cut.unsharded == (("layers.*.side", 2 * 64 * 64), ("last", 64 * 128))
    sums = [op for op in cut.phase("forward") if op.name == "all_reduce"]
    assert len(sums) == 2  # one a layer: behind narrow


def test_gathered_outputs_are_whole_again(found: Trace) -> None:
    cut = shard_tensors(found, 4, tp_plan=TensorParallelPlan.of({**PLAN, "last": "colwise_gather_output"}))
    assert products(cut, "last") == [(64, 32)]
    (gather,) = [op for op in cut.phase("forward") if op.name == "all_gather"]
    assert gather.arguments[0].shape == (8, 128)
    (mean,) = [op for op in cut.phase("forward") if op.name == "mean"]
    assert mean.inputs[0].shape == (8, 128)
    assert ("last", 64 * 128) not in cut.unsharded


def test_replicated_modules_are_listed_too(found: Trace) -> None:
    cut = shard_tensors(found, 4, tp_plan=TensorParallelPlan.of({"layers.*.wide": "replicate", "last": "colwise"}))
    assert dict(cut.unsharded)["layers.*.wide"] == 2 * 64 * 256


def test_a_models_own_plan_fills_what_the_table_leaves(found: Trace) -> None:
    from dataclasses import replace

    with pytest.raises(KernelcastError, match=r"no layer of Model has a name.*tp_plan"):
        shard_tensors(found, 4)
    assert dict(shard_tensors(replace(found, tp_plan=PLAN), 4).unsharded) == {
        "layers.*.side": 2 * 64 * 64,
        "last": 64 * 128,
    }
    # what both name is cut as the table says
    assert TensorParallelPlan.of({"lm_head": "replicate"}, MEGATRON).style("model.lm_head") == "column"


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_plan_is_read_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    lines = "[tp_plan]\n" + "\n".join(f'"{name}" = "{style}"' for name, style in PLAN.items())
    path.write_text(json.dumps(PLAN) if suffix == "json" else lines)
    assert read_plan(path) == PLAN


@pytest.mark.parametrize(
    ("text", "error"),
    [("[tp_plan", "is no plan"), ("a = 1", "it must name modules"), ("", "it must name modules")],
)
def test_what_is_no_plan_is_said(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(KernelcastError, match=error):
        read_plan(path)


def test_an_unknown_way_to_cut_is_said() -> None:
    with pytest.raises(KernelcastError, match=r"the plan shards lm_head 'diagonally'; known: colwise"):
        TensorParallelPlan.of({"lm_head": "diagonally"})
