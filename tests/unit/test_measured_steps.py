"""Steps of vLLM 0.22.1 on an H200 that `kernelcast collect --engine vllm` timed (validation/vllm_h200)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelcast.ops.work import Array

STEPS = Path(__file__).parents[2] / "validation" / "vllm_h200" / "llama-3.1-8b-fp8_steps.jsonl"


@pytest.fixture
def replayed(run: Callable[..., tuple[int, str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("replay", STEPS, "--gpu", "h200_sxm", "--json")[1])
    return found


def errors(steps: list[dict[str, Any]]) -> Array:
    return np.array([step["predicted_s"] / step["measured_s"] - 1 for step in steps])


def test_steps_that_the_gpu_decides(replayed: dict[str, Any]) -> None:
    """Those whose launches took the host less than 0.6 of the step."""
    steps = [step for step in replayed["steps"] if step["measured_host_s"] < 0.6 * step["measured_s"]]
    assert len(steps) == 31
    assert np.mean(np.abs(errors(steps))) < 0.06 and abs(np.median(errors(steps))) < 0.04
    assert np.mean(np.abs(errors([step for step in steps if step["kind"] == "decode"]))) < 0.05


def test_the_host_of_steps_with_prompts(replayed: dict[str, Any]) -> None:
    """It was twice as fast in some minutes as in others."""
    steps = [step for step in replayed["steps"] if step["kind"] != "decode"]
    hosts = np.array([step["predicted_host_s"] / step["measured_host_s"] - 1 for step in steps])
    assert np.mean(np.abs(hosts)) < 0.25 and abs(np.median(hosts)) < 0.1


def test_the_cache_that_the_engine_said(replayed: dict[str, Any]) -> None:
    assert abs(replayed["kv_cache"]["error"]) < 0.03
