"""Whatever the OpenAPI document allows, and what it does not: an answer or a problem, never a fault."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
import uvicorn
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kernelcast.app.web.app import create_app
from kernelcast.app.web.serve import listening
from kernelcast.ops import REGISTRY, parameters_of
from kernelcast.ops.base import Parameter
from web.conftest import LIMITS, problem_of

# What takes long is drawn in small sizes, so that most requests are answered rather than stopped
_MODELS = ["llama-3.1-8b", "qwen3-30b-a3b", "gpt2", "deepseek-v2-lite"]
_GPUS = ["h100_sxm", "l40s", "mi300x"]
_BOUNDS: dict[str, dict[str, Any]] = {
    "model": {"type": "string", "enum": _MODELS},
    "draft_model": {"type": "string", "enum": ["gpt2", "mtp"]},
    "gpus": {"type": "array", "items": {"type": "string", "enum": _GPUS}, "minItems": 1, "maxItems": 2},
    "max_gpus": {"type": "integer", "minimum": 1, "maximum": 2},
    "num_prompts": {"type": "integer", "minimum": 1, "maximum": 30},
    "input_len": {"type": "integer", "minimum": 1, "maximum": 1024},
    "output_len": {"type": "integer", "minimum": 1, "maximum": 32},
    "thorough": {"type": "boolean", "enum": [False]},
}
_BOUNDED = {
    "SimulateBody": ("model", "num_prompts"),
    "CompareBody": ("model", "gpus"),
    "PlanBody": ("model", "num_prompts", "gpus"),
}
_BRIEF = replace(LIMITS, seconds={**LIMITS.seconds, "simulate": 2.0, "compare": 2.0, "plan": 2.0, "train": 2.0})
_EXAMPLES = {"infer": 30, "simulate": 15, "compare": 8, "plan": 6, "train": 15, "kernel": 20, "diagnose": 15,
             "evidence": 10}  # fmt: skip
_CHECKS: list[Any] = [status_code_conformance, content_type_conformance, response_schema_conformance]
_QUIET: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None, "phases": [Phase.generate],
                          "suppress_health_check": list(HealthCheck)}  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    bound = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(_BRIEF), log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    bound.close()


def operations() -> list[Any]:
    document = create_app(_BRIEF).openapi()
    parameters = document["components"]["schemas"]["KernelBody"]["properties"]["parameters"]
    del parameters["anyOf"]  # 127 ops take minutes to draw from; the test below draws each by its own parameters
    for name, required in _BOUNDED.items():
        body = document["components"]["schemas"][name]
        body["properties"] |= {field: bound for field, bound in _BOUNDS.items() if field in body["properties"]}
        del body["properties"]["config"]  # `infer` draws some
        body["required"] = sorted({*body.get("required", ()), *required})
    schema: Any = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.slow
@pytest.mark.parametrize("operation", operations(), ids=lambda one: one.label)
def test_every_operation_by_its_document(url: str, operation: Any) -> None:
    name = operation.path.removeprefix("/api/v1/").partition("/")[0]
    asked: Counter[int] = Counter()
    for mode in schemathesis.GenerationMode:

        @settings(max_examples=_EXAMPLES.get(name, 3), **_QUIET)
        @given(operation.as_strategy(generation_mode=mode))
        def tried(case: Any) -> None:
            response = case.call(base_url=url, timeout=60)
            asked[response.status_code] += 1
            assert response.status_code < 500 or response.status_code in (503, 504), response.text
            if response.status_code >= 400:
                assert response.headers["content-type"] == ["application/problem+json"]
                assert response.json()["status"] == response.status_code and response.json()["detail"]
            if response.status_code != 405:  # of methods that are not there
                case.validate_response(response, checks=_CHECKS)

        with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with a question that has no words
            tried()
    assert asked


def values(spec: Parameter) -> st.SearchStrategy[Any]:
    """What a parameter may be; sizes of all magnitudes."""
    if spec.type == "flag":
        return st.booleans()
    if spec.type == "choice":
        return st.sampled_from(spec.options)
    low, high = max(spec.low, 0.0), min(spec.high, 1e15)
    powers = st.floats(0, 1).map(lambda share: (low + 1) * ((high + 1) / (low + 1)) ** (share**2) - 1)
    if spec.type == "real":
        return powers.map(lambda value: min(max(value, spec.low), spec.high))
    sizes = powers.map(lambda value: int(min(max(round(value), spec.low), spec.high)))
    return st.lists(sizes, min_size=1, max_size=4) if spec.type == "lengths" else sizes


@st.composite
def calls(draw: Any, op: str) -> dict[str, Any]:
    given_: dict[str, Any] = {"op": op}
    for name, spec in parameters_of(REGISTRY[op]).items():
        if spec.required or draw(st.integers(0, 3)) == 0:
            given_[name] = draw(values(spec))
    return given_


@pytest.mark.slow
def test_every_op_by_its_parameters(client: TestClient) -> None:
    """The schema of an op is what it takes: what is refused is a rule between parameters, or what a GPU lacks."""
    answered: Counter[str] = Counter()
    for op in sorted(REGISTRY):

        @settings(max_examples=2, **_QUIET)
        @given(calls(op), st.sampled_from(("h200_sxm", "a100_sxm", "mi300x", "v100_sxm")))
        def tried(parameters: Any, gpu: str) -> None:
            op = parameters.pop("op")
            response = client.post("/api/v1/kernel", json={"op": op, "gpu": gpu, "parameters": parameters})
            assert response.status_code in (200, 422), response.text
            if response.status_code == 422:
                assert "cannot answer" not in problem_of(response), response.text
            else:
                answered[op] += 1
                assert response.json()["answer"]["time_s"] > 0

        tried()
    assert len(answered) > len(REGISTRY) / 2
