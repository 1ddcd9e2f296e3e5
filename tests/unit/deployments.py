"""Deployments of bundled models for tests of inference, and what is read off their results."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

import kernelcast as kc
from kernelcast.errors import KernelcastError
from kernelcast.inference.deployment import Layout
from kernelcast.inference.forward import Deployment
from kernelcast.inference.infer import Inference, infer
from kernelcast.inference.workload import Workload
from kernelcast.models import model
from kernelcast.models.precision import Precision
from kernelcast.stacks import Stack, stack

LLAMA = "llama-3.1-8b"


def quiet() -> Stack:
    """vLLM with a host that takes no time."""
    engine = stack("vllm")
    nothing: dict[str, Any] = {f.name: 0.0 for f in fields(engine) if f.name.endswith("_s")}
    return replace(engine, **nothing, eager_ops=())


def deployed(name: str = LLAMA, *, on: str = "h100_sxm", engine: Stack | None = None, dtype: str | None = None,
             cache: str | None = None, **layout: Any) -> Deployment:  # fmt: skip
    found = model(name)
    return Deployment(found, kc.gpu(on), engine or stack("vllm"), Precision.of(found, dtype, cache), Layout(**layout))


def times(found: Inference) -> dict[tuple[str, str], float]:
    return {(share.phase, share.part): share.time_s for share in found.shares}


def refusal(deployment: Deployment, workload: Workload) -> str:
    with pytest.raises(KernelcastError) as error:
        infer(deployment, workload)
    assert "\n" not in str(error.value)
    return str(error.value)
