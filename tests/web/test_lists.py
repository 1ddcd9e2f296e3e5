"""GET: what can be asked about is what the command line lists."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from kernelcast.app.web.bodies import BODIES
from kernelcast.app.web.limits import Limits
from kernelcast.forecast.end_to_end import ERRORS_BY
from kernelcast.hardware import gpu_ids
from kernelcast.models import model_ids
from kernelcast.ops import REGISTRY
from web.conftest import problem_of


def got(client: TestClient, path: str) -> Any:
    response = client.get(f"/api/v1/{path}")
    assert response.status_code == 200, response.text
    return response.json()


def test_gpus_are_those_of_the_command_line(client: TestClient, run: Any) -> None:
    _, out, _ = run("gpus", "--json")
    found = got(client, "gpus")["gpus"]
    own = [{name: value for name, value in one.items() if name not in ("measured", "usd_per_hour")} for one in found]
    assert own == json.loads(out)
    by_id = {one["id"]: one for one in found}
    assert by_id["h200_sxm"]["measured"] is True and by_id["h200_sxm"]["usd_per_hour"] > 0
    assert not all(one["measured"] for one in found)


def test_one_gpu(client: TestClient, run: Any) -> None:
    _, out, _ = run("gpu", "h200_sxm", "--json")
    assert got(client, "gpus/h200_sxm") == json.loads(out)
    missing = client.get("/api/v1/gpus/h2000")
    assert missing.status_code == 404 and "did you mean gh200, h20, h200_sxm?" in problem_of(missing)


def test_models_are_those_of_the_command_line(client: TestClient, run: Any) -> None:
    _, out, _ = run("models", "--json")
    found = {one.pop("name"): one for one in got(client, "models")["models"]}
    more = ("kind", "experts", "dtype")
    assert {name: {k: v for k, v in one.items() if k not in more} for name, one in found.items()} == json.loads(out)
    assert found["qwen3-30b-a3b"]["experts"] is True and found["llama-3.1-8b"]["experts"] is False
    assert found["bert-base"]["kind"] == "encoder" and found["deepseek-v3"]["dtype"].startswith("fp8")


def test_ops_and_stacks(client: TestClient, run: Any) -> None:
    _, out, _ = run("ops", "--json")
    assert got(client, "ops")["ops"] == json.loads(out)
    found = got(client, "stacks")
    assert {"id": "vllm", "name": "vLLM", "schedules": True} in found["stacks"]
    assert {"id": "torch", "name": "PyTorch", "schedules": False} in found["stacks"]
    assert "ib_ndr" in found["fabrics"] and "fp8" in found["weight_formats"] and "fp8" in found["cache_formats"]


def test_about_says_what_answers_and_its_limits(client: TestClient) -> None:
    found = got(client, "about")
    assert (found["gpus"], found["models"], found["ops"]) == (len(gpu_ids()), len(model_ids()), len(REGISTRY))
    assert found["calls_measured"] > 1e6 and "learned" in found["predictors"]
    assert found["limits"]["seconds"]["simulate"] == Limits().seconds["simulate"]


def test_words_are_those_of_the_bodies_and_name_no_file(client: TestClient) -> None:
    found = got(client, "parameters")
    assert got(client, "words") == found  # its name in earlier releases
    assert set(found) == {"kernel", "infer", "simulate", "compare", "plan", "train"}
    for command, words in found.items():
        names = {word["name"] for word in words}
        assert names == set(BODIES[command].model_fields) - {"config", "name"}
        files = {"calibration", "weights", "server", "trace", "prices", "requests", "plot", "timeline", "requests_out"}
        assert not names & files
        assert all({"name", "flag", "type", "default", "help", "panel", "choices"} <= set(word) for word in words)
    batch = next(word for word in found["infer"] if word["name"] == "batch")
    assert batch["flag"] == "--batch" and batch["type"] == "int" and batch["help"]


@pytest.mark.parametrize(
    "query", ["", "?by=gpu", "?by=op&gpu=h200_sxm", "?by=kind&op=gemm&stack=vllm", "?by=gpu&op=&gpu=&stack="]
)
def test_evidence_is_the_commands(client: TestClient, run: Any, query: str) -> None:
    words = [pair.split("=") for pair in query[1:].split("&") if pair and not pair.endswith("=")]
    _, out, _ = run("evidence", "--json", *(word for name, value in words for word in (f"--{name}", value)))
    assert got(client, f"evidence{query}") == json.loads(out)


@pytest.mark.parametrize("by", ERRORS_BY)
def test_published_errors_are_the_commands(client: TestClient, run: Any, by: str) -> None:
    _, out, _ = run("evidence", "--published", "--by", by, "--json")
    assert got(client, f"evidence/published?by={by}") == json.loads(out)


def test_evidence_refuses(client: TestClient) -> None:
    for query in (
        "?by=colour", "?op=nothing", "?gpu=../h200_sxm.toml", "?stack=nobody", "?stack=/etc/passwd",
        "/published?by=op",
    ):  # fmt: skip
        response = client.get(f"/api/v1/evidence{query}")
        assert response.status_code == 422
        problem_of(response)


def test_grid_sums_to_all_that_was_measured(client: TestClient) -> None:
    found = got(client, "evidence/grid")
    assert sum(cell["calls"] for cell in found["cells"]) == got(client, "about")["calls_measured"]
    assert {cell["gpu"] for cell in found["cells"]} == set(found["gpus"])
    cell = next(c for c in found["cells"] if (c["gpu"], c["op"], c["stack"]) == ("h200_sxm", "gemm", "vllm"))
    assert cell["kinds"] >= 1 and 0 < cell["error"] < 0.2 and 0.5 < cell["inside"] <= 1


def test_openapi_says_ranges_names_and_examples(client: TestClient) -> None:
    found = client.get("/openapi.json").json()
    assert found["info"]["title"] == "kernelcast"
    schemas = found["components"]["schemas"]
    infer = schemas["InferBody"]["properties"]
    assert set(infer["gpu"]["enum"]) == set(gpu_ids())
    batch = next(option for option in infer["batch"]["anyOf"] if option["type"] == "integer")
    assert (batch["minimum"], batch["maximum"]) == (1, 65_536)
    assert schemas["InferBody"]["examples"][0]["model"] == "llama-3.1-8b"
    assert schemas["parameters_gemm"]["required"] == ["m", "n", "k"]
    assert schemas["parameters_gemm"]["properties"]["m"]["maximum"] == 2**31 - 1
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            problems = [r for status, r in operation["responses"].items() if status >= "400"]
            assert problems and all("application/problem+json" in one["content"] for one in problems), path


def test_no_page_loads_from_elsewhere(client: TestClient) -> None:
    for path in ("/docs", "/redoc"):
        assert client.get(path).status_code == 404
