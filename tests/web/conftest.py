"""One server for the tests of a process: its workers take seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from kernelcast.app.web.app import create_app
from kernelcast.app.web.limits import Limits

LIMITS = replace(Limits(), workers=2, body_bytes=64 * 1024, upload_bytes=4 * 2**20, unpacked_bytes=8 * 2**20)


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(LIMITS), base_url="http://localhost:8321") as found:
        yield found


@pytest.fixture
def ask(client: TestClient) -> Any:
    """A question that is answered: the envelope."""

    def asked(question: str, /, **words: Any) -> dict[str, Any]:
        response = client.post(f"/api/v1/{question}", json=words)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    return asked


@pytest.fixture
def refused(client: TestClient) -> Any:
    """A question that is not answered: the problem."""

    def asked(status: int, question: str, /, **words: Any) -> str:
        response = client.post(f"/api/v1/{question}", json=words)
        assert response.status_code == status, response.text
        return problem_of(response)

    return asked


def problem_of(response: Any) -> str:
    """The one line of a problem, which has all that RFC 9457 asks for."""
    assert response.headers["content-type"] == "application/problem+json"
    told = response.json()
    assert told["type"] == "about:blank" and told["title"] and told["status"] == response.status_code
    detail: str = told["detail"]
    assert detail and "\n" not in detail
    return detail
