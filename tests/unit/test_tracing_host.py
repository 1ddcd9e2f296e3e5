"""What a trace tells of the host's part: as many calls of Python as without tracing, and autograd's nodes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from kernelcast.tracing import trace
from kernelcast.tracing.frames import PythonCalls
from kernelcast.tracing.traced import PHASES


def plain_calls(run: Callable[[], Any]) -> int:
    """Without tracing, by the profile function: all calls but comprehensions and the questions that cost nothing."""
    left_out = {"<listcomp>", "<dictcomp>", "is_scripting", "is_compiling"}
    count = 0

    def event(frame: Any, name: str, _: Any) -> None:
        nonlocal count
        count += name == "call" and frame.f_code.co_name not in left_out

    run()  # what is asked once and kept
    before = sys.getprofile()
    sys.setprofile(event)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


class Layer(nn.Module):
    """Functions of Python around functions of PyTorch, some of which are Python themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [half(part) for part in x.chunk(2)]
        return self.drop(F.gelu(self.norm(self.linear(torch.cat(parts)))))


def half(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


def test_as_many_calls_are_counted_as_a_run_without_tracing_makes() -> None:
    model, x = nn.Sequential(*(Layer() for _ in range(6))), torch.randn(4, 8)

    def run() -> None:
        with torch.no_grad():
            model.eval()(x)

    found = trace(model, x).python_calls
    # each of 6 x 4 modules is called by two functions of Module and has a forward; beside them half, F.gelu and others
    assert found["forward"] == pytest.approx(plain_calls(run) - plain_calls(model.eval), abs=6)
    assert found["forward"] > 6 * 4 * 3
    assert set(found) == {"forward"}


def test_calls_are_the_same_again_and_stand_before_their_ops() -> None:
    model, x = nn.Sequential(*(Layer() for _ in range(6))), torch.randn(4, 8)
    first, again = trace(model, x, "training"), trace(model, x, "training")
    assert first.python_calls == again.python_calls
    assert set(first.python_calls) == set(PHASES)
    at = [op.at for op in first.ops]
    assert at == sorted(at) == [op.at for op in again.ops]
    forward = [op.at for op in first.phase("forward")]
    # a layer more is a layer's calls more: the last of them comes as far behind the first as the counts say
    assert forward[-1] <= first.python_calls["forward"] <= forward[-1] + 10
    assert first.phase("optimizer")[0].at > forward[-1]
    assert at[-1] <= sum(first.python_calls.values())


def test_what_runs_only_once_is_not_counted() -> None:
    class Cached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import this_module_does_not_matter  # type: ignore[import-not-found]  # noqa: F401

            return x * slow_once(x.shape[0])

    class Finder:
        """Runs Python code of its own when a module is imported."""

        def find_spec(self, name: str, *_: Any) -> Any:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, self) if name == "this_module_does_not_matter" else None  # type: ignore[arg-type]

        def create_module(self, _: Any) -> None:
            return None

        def exec_module(self, _: Any) -> None:
            for _ in range(100):
                half(torch.zeros(()))

    sys.meta_path.insert(0, Finder())
    try:
        first = trace(Cached(), torch.randn(4)).python_calls["forward"]
    finally:
        sys.meta_path.pop(0)
    assert first == trace(Cached(), torch.randn(4)).python_calls["forward"] < 10
    sys.modules.pop("this_module_does_not_matter")


@functools.lru_cache
def slow_once(size: int) -> int:
    return size


def test_a_profiler_that_was_there_is_there_again() -> None:
    def mine(*_: Any) -> None:
        return None

    sys.setprofile(mine)
    try:
        with PythonCalls() as calls:
            half(torch.zeros(()))
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert calls.count == 1


def test_every_node_of_autograd_counts_those_that_launch_nothing_too() -> None:
    # of a product: AddmmBackward, TBackward, two AccumulateGrad; MeanBackward behind
    assert trace(nn.Linear(8, 4), torch.randn(2, 8), "training").nodes == 5
    assert trace(nn.Linear(8, 4), torch.randn(2, 8), "training", accumulate=3).nodes == 15
    assert trace(nn.Linear(8, 4), torch.randn(2, 8)).nodes == 0
