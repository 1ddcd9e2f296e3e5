"""The page and its files, with tags and headers that keep browsers safe."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from kernelcast.app.web.app import PAGES, PageFiles
from web.conftest import problem_of


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_the_index(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    assert "<html" in response.text
    again = client.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_headers_of_every_answer(client: TestClient) -> None:
    for response in (client.get("/"), client.get("/api/v1/stacks"), client.get("/nothing")):
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in response.headers


def test_large_answers_are_compressed(client: TestClient) -> None:
    response = client.get("/api/v1/ops", headers={"Accept-Encoding": "gzip"})
    assert response.headers["content-encoding"] == "gzip"
    assert int(response.headers["content-length"]) < len(response.content) / 4


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/",
                                  "/static/..%2fapp.py", "/static/nothing.js"])  # fmt: skip
def test_no_file_but_those_of_the_folder(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    problem_of(response)


def test_files_are_sent_as_they_are_now(tmp_path: Path) -> None:
    (tmp_path / "js").mkdir()
    (tmp_path / "js" / "a.js").write_text("let a = 1;")
    files = TestClient(PageFiles(directory=tmp_path))
    first = files.get("/js/a.js")
    assert first.text == "let a = 1;" and first.headers["content-type"] == "text/javascript; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache"
    assert files.get("/js/a.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    (tmp_path / "js" / "a.js").write_text("let a = 22;")
    assert files.get("/js/a.js", headers={"If-None-Match": first.headers["etag"]}).text == "let a = 22;"
    (tmp_path / "b.css").write_text("p{}")  # a file that is new
    assert files.get("/b.css").status_code == 200
