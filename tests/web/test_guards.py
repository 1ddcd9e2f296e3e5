"""Who may ask, how much, how fast, how long: bad bodies, too many, too slow; and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import Request, Response
from fastapi.testclient import TestClient

from kernelcast.app.web.app import create_app
from kernelcast.app.web.connections import bounded
from kernelcast.app.web.guards import Guards, strict_json
from kernelcast.app.web.limits import Limits, machine_bytes
from kernelcast.app.web.pool import WorkerPool, _IdleWorkers
from kernelcast.app.web.problems import Problem
from kernelcast.app.web.routes import unless_gone
from kernelcast.app.web.serve import address, listening
from kernelcast.app.web.worker import readable_folders
from kernelcast.errors import KernelcastError
from web.conftest import LIMITS, problem_of

KERNEL = {"op": "gemm", "gpu": "h200_sxm", "parameters": {"m": 64, "n": 64, "k": 64}}
SLOW = {"model": "qwen3-0.6b", "gpu": "h200_sxm", "chunk": 1, "input_len": 30_000}  # a pass a token
LONG = {"model": "llama-3.1-8b", "gpu": "h100_sxm", "request_rate": 50, "num_prompts": 50_000, "output_len": 2000}
PATHS = (
    "../x.toml",
    "/etc/passwd",
    "file.py:fn",
    "~/x.json",
    "C:\\x.toml",
    "my_gpu.toml",
    "./h200_sxm",
    "h200_sxm\x00",
)


@pytest.mark.parametrize("host", ["localhost", "localhost:8321", "127.0.0.1:8321", "[::1]:8321", "LOCALHOST"])
def test_this_machine_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/v1/stacks", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8321", "", "[", "0.0.0.0"])
def test_other_names_are_not(client: TestClient, host: str) -> None:
    """A page whose name is made to point here (DNS rebinding) still says its own name."""
    response = client.get("/api/v1/stacks", headers={"Host": host})
    assert response.status_code == 421
    problem_of(response)


def test_names_may_be_allowed() -> None:
    app = create_app(LIMITS, ["kernels.example"])
    found = TestClient(app, base_url="http://kernels.example").get("/")  # no lifespan, so no workers
    assert found.status_code == 200


def test_other_sites_pages_are_not_answered(client: TestClient) -> None:
    response = client.post("/api/v1/kernel", json=KERNEL, headers={"Sec-Fetch-Site": "cross-site"})
    assert response.status_code == 403
    problem_of(response)
    assert client.post("/api/v1/kernel", json=KERNEL, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("path", ["kernel", "diagnose?filename=t.json"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost", "http://localhost:9", "file://"]
)
def test_a_page_of_another_origin_is_not_answered(client: TestClient, path: str, origin: str) -> None:
    """Of another name, of none (a sandboxed frame, a file), or of another port of this machine."""
    media_type = "application/octet-stream" if "diagnose" in path else "application/json"
    headers = {"Origin": origin, "Content-Type": media_type}
    response = client.post(f"/api/v1/{path}", content=json.dumps(KERNEL), headers=headers)
    assert response.status_code == 403
    problem_of(response)
    own = client.post("/api/v1/kernel", json=KERNEL, headers={"Origin": "http://localhost:8321"})
    assert own.status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_files_of_a_type_that_forms_send(client: TestClient, kind: str) -> None:
    response = client.post("/api/v1/diagnose?filename=t.json", content=b"[]", headers={"Content-Type": kind})
    assert response.status_code == 415 and "application/octet-stream" in problem_of(response)


def test_bodies_that_hold_a_parser_are_refused_at_once(client: TestClient) -> None:
    """The server reads bodies between all other work: deep, broken and long ones take milliseconds."""
    for body, said in (
        (b"[" * 60_000, "64 levels deep"),
        (b"[" * 30_000 + b"]" * 30_000, "64 levels deep"),
        (b"[" * 70 + b'"' + rb"\"" * 30_000, "64 levels deep"),  # a string without an end, of escaped quotes
        (b"[" + b'"' + rb"\"" * 30_000, "not JSON"),
        (b"{" + b'"a":{' * 9_000 + b"}" * 9_000 + b"}", "64 levels deep"),
    ):
        started = time.monotonic()
        response = client.post("/api/v1/kernel", content=body, headers={"Content-Type": "application/json"})
        assert time.monotonic() - started < 1.0
        assert response.status_code == 400 and said in problem_of(response), (body[:20], response.text)


def test_bodies_of_too_many_values() -> None:
    for body in (b"[" + b"0," * 500_000 + b"0]", b"[" + b"{}," * 300_000 + b"0]"):
        with pytest.raises(Problem, match="65,536 values"):
            strict_json(body)
    assert strict_json(b'["' + b"," * 500_000 + b'"]') == ["," * 500_000]  # commas in a text are none


def test_a_wrong_address_is_a_page_for_a_browser(client: TestClient) -> None:
    page = client.get("/no/such/page", headers={"Accept": "text/html,*/*"})
    assert (
        page.status_code == 404 and page.headers["content-type"].startswith("text/html") and "/static/js" in page.text
    )
    for path, accept in (
        ("/no/such/page", "application/json"),
        ("/api/v1/nothing", "text/html"),
        ("/static/x", "text/html"),
    ):
        other = client.get(path, headers={"Accept": accept})
        assert other.status_code == 404
        problem_of(other)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "empty"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "UTF-8"),
        (b'{"op": NaN}', 400, "NaN is no number"),
        (b'{"op": -Infinity}', 400, "-Infinity is no number"),
        (b'{"power_cap": 1e999}', 400, "larger than any number"),
        (b'{"power_cap": 1' + b"0" * 5000 + b"}", 400, "5001 digits"),
        (b'{"op": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400, "nested"),
        (b"[" * 60_000, 400, "nested"),
        (b'{"op": "gemm", "op": "gemm"}', 400, "same key twice"),
        (b"[1, 2]", 422, "the body"),
        (b'"gemm"', 422, "the body"),
        (b"null", 422, "the body"),
        (b'{"op": "gemm", "gpu": "h20", "parameters": {"m": 1' + b"0" * 30 + b', "n": 1, "k": 1}}', 422,
         "must be from"),
        (b'{"op": "gemm", "gpu": "h20", "parameters": {"m": null}}', 422, "parameters"),
        (b'{"op": "gemm", "gpu": "h20", "parameters": {"m": {"a": 1}}}', 422, "parameters"),
        (b'{"op": "\\ud800", "gpu": "h20"}', 422, "unknown op"),
    ],
)  # fmt: skip
def test_bodies_that_are_none(client: TestClient, body: bytes, status: int, said: str) -> None:
    response = client.post("/api/v1/kernel", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    assert said in problem_of(response)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/xml"])
def test_bodies_of_another_type(client: TestClient, kind: str) -> None:
    """A form of another site can send these without asking; JSON it cannot."""
    response = client.post("/api/v1/kernel", content=json.dumps(KERNEL), headers={"Content-Type": kind})
    assert response.status_code == 415
    problem_of(response)


def test_brackets_in_texts_are_no_nesting(client: TestClient) -> None:
    response = client.post("/api/v1/kernel", json={**KERNEL, "set": ['["' * 60]})
    assert response.status_code == 422 and "`set` takes" in problem_of(response)


def test_methods_and_pages_that_are_not_there(client: TestClient) -> None:
    for response, status in ((client.get("/api/v1/kernel"), 405), (client.post("/api/v1/gpus"), 405),
                             (client.get("/api/v2/gpus"), 404), (client.put("/"), 405)):  # fmt: skip
        assert response.status_code == status
        problem_of(response)


def _sent(limits: Limits, messages: list[dict[str, Any]], path: str = "/api/v1/kernel", headers: Any = ()) -> Any:
    """The status of a request whose body comes in these parts, and how many of them were read."""
    answers: list[dict[str, Any]] = []
    parts = iter(messages)
    read = 0

    async def receive() -> Any:
        nonlocal read
        part = next(parts, None)
        if part is None:
            await asyncio.sleep(3600)
        read += 1
        return part

    async def send(message: Any) -> None:
        answers.append(message)

    media_type = b"application/octet-stream" if path.endswith("diagnose") else b"application/json"
    sent = [(b"host", b"localhost"), (b"content-type", media_type), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": sent,
             "query_string": b"filename=t.json", "scheme": "http", "server": ("localhost", 1), "root_path": "",
             "http_version": "1.1"}  # fmt: skip
    app: Any = create_app(limits)
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert dict(answers[0]["headers"])[b"content-type"] == b"application/problem+json"
    return answers[0]["status"], read


def test_a_body_that_is_too_large_is_not_read() -> None:
    limits = replace(LIMITS, body_bytes=1000)
    assert _sent(limits, [], headers=[(b"content-length", b"1001")]) == (413, 0)
    part = {"type": "http.request", "body": b" " * 400, "more_body": True}
    assert _sent(limits, [part] * 100) == (413, 3)  # without a length: 3 x 400 are too many
    assert _sent(replace(LIMITS, upload_bytes=1000), [part] * 100, path="/api/v1/diagnose") == (413, 3)


def test_a_body_that_is_too_slow() -> None:
    part = {"type": "http.request", "body": b"{", "more_body": True}
    started = time.monotonic()
    assert _sent(replace(LIMITS, body_seconds=0.2), [part]) == (408, 1)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(("limit", "path"), [("requests", "/"), ("uploads", "/api/v1/diagnose")])
def test_no_more_requests_than_the_limit(limit: str, path: str) -> None:
    async def tried() -> list[tuple[int, bytes | None]]:
        entered = asyncio.Event()
        statuses: list[tuple[int, bytes | None]] = []

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            entered.set()
            await asyncio.sleep(0.2)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        only: Any = {limit: 1}
        guards = Guards(slow, replace(LIMITS, **only))
        scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"localhost")]}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append((message["status"], dict(message["headers"]).get(b"retry-after")))

        first = asyncio.create_task(guards(dict(scope), None, send))  # type: ignore[arg-type]
        await entered.wait()
        await guards(dict(scope), None, send)  # type: ignore[arg-type]
        await first
        await guards(dict(scope), None, send)  # type: ignore[arg-type]
        return statuses

    assert asyncio.run(tried()) == [(429, b"2"), (200, None), (200, None)]


def test_what_takes_too_long_is_stopped_and_the_next_is_answered() -> None:
    async def tried() -> None:
        limits = replace(LIMITS, workers=2, heavy_waiting=1, seconds={**LIMITS.seconds, "simulate": 1.0})
        async with WorkerPool(limits) as pool:
            assert (await pool.run("kernel", KERNEL)).status == 200
            running = {worker.process.pid for worker in pool.workers}
            first = asyncio.create_task(pool.run("simulate", LONG))
            await asyncio.sleep(0.2)
            waits = asyncio.create_task(pool.run("simulate", {**LONG, "seed": 2}))
            await asyncio.sleep(0.1)
            with pytest.raises(Problem) as full:  # one runs, one waits, and no third may
                await pool.run("simulate", {**LONG, "seed": 3})
            assert full.value.status_code == 429 and full.value.headers == {"Retry-After": "2"}
            assert (await pool.run("kernel", KERNEL)).status == 200  # short questions have a worker left
            for late in (first, waits):
                with pytest.raises(Problem) as error:
                    await late
                assert error.value.status_code == 504 and "longer than 1 s" in str(error.value.detail)
            assert (await pool.run("kernel", KERNEL)).status == 200
            assert (await pool.run("infer", {"model": "llama-3.1-8b", "gpu": "h100_sxm"})).status == 200
            assert pool.replaced == 0  # they were told to leave it, and did
            assert running <= {worker.process.pid for worker in pool.workers}

    asyncio.run(tried())


def test_a_worker_that_does_not_leave_a_question_is_killed() -> None:
    async def tried() -> None:
        limits = replace(LIMITS, workers=1, seconds={**LIMITS.seconds, "simulate": 0.5}, stop_seconds=0.5)
        async with WorkerPool(limits) as pool:
            assert (await pool.run("kernel", KERNEL)).status == 200
            (worker,) = pool.workers
            asked = asyncio.create_task(pool.run("simulate", LONG))
            await asyncio.sleep(0.3)
            os.kill(worker.process.pid, signal.SIGSTOP)  # as one that is in native code
            with pytest.raises(Problem) as error:
                await asked
            assert error.value.status_code == 504
            assert (await pool.run("kernel", KERNEL)).status == 200 and pool.replaced == 1
            assert worker.process.returncode is not None

    asyncio.run(tried())


def test_questions_that_turn_out_long_leave_a_worker_to_short_ones() -> None:
    """Six batches whose prompts are prefilled a token a step take seconds each; a kernel takes milliseconds."""

    async def tried() -> None:
        limits = replace(LIMITS, brief_seconds=0.4)
        async with WorkerPool(limits) as pool:
            assert (await pool.run("infer", {"model": "qwen3-0.6b", "gpu": "h200_sxm"})).status == 200
            asked = [asyncio.create_task(pool.run("infer", {**SLOW, "batch": at + 1})) for at in range(6)]
            await asyncio.sleep(0.1)
            started = time.monotonic()
            assert (await pool.run("kernel", KERNEL)).status == 200  # behind six that are brief until they are not
            assert time.monotonic() - started < 6 * limits.brief_seconds
            took = []
            for _ in range(3):  # on a machine that other tests share
                started = time.monotonic()
                assert (await pool.run("kernel", KERNEL)).status == 200
                took.append(time.monotonic() - started)
            assert min(took) < limits.brief_seconds
            for task in asked:
                task.cancel()
            assert (await pool.run("kernel", KERNEL)).status == 200 and pool.replaced == 0

    asyncio.run(tried())


def test_a_worker_that_ends_is_replaced() -> None:
    async def tried() -> None:
        async with WorkerPool(replace(LIMITS, workers=1)) as pool:
            assert (await pool.run("kernel", KERNEL)).status == 200
            (worker,) = pool.workers
            worker.process.kill()  # as the system does where memory ends
            await worker.process.wait()
            assert (await pool.run("kernel", KERNEL)).status == 200 and pool.replaced == 1
            asked = asyncio.create_task(pool.run("simulate", LONG))
            await asyncio.sleep(0.3)
            (worker,) = pool.workers
            worker.process.kill()  # in the middle of an answer
            with pytest.raises(Problem) as error:
                await asked
            assert error.value.status_code == 503 and error.value.headers == {"Retry-After": "2"}
            assert (await pool.run("kernel", KERNEL)).status == 200
            (worker,) = pool.workers
            for question, words in (("simulate", LONG), ("infer", SLOW), ("simulate", LONG)):
                stopped = asyncio.create_task(pool.run(question, words))
                await asyncio.sleep(0.3)
                stopped.cancel()  # whoever asked went away
                with pytest.raises(asyncio.CancelledError):
                    await stopped
                assert (await pool.run("kernel", KERNEL)).status == 200 and pool.replaced == 2
            assert pool.workers == {worker}

    asyncio.run(tried())


def test_a_worker_that_held_much_memory_is_replaced() -> None:
    async def tried() -> None:
        async with WorkerPool(replace(LIMITS, workers=1, worker_keep_bytes=1)) as pool:
            for answers in (1, 2):
                assert (await pool.run("kernel", KERNEL)).status == 200 and pool.replaced == answers

    asyncio.run(tried())


def test_work_stops_when_the_client_goes_away() -> None:
    async def tried(left_after_s: float) -> tuple[int, bool]:
        stopped = False

        async def work() -> Response:
            nonlocal stopped
            try:
                await asyncio.sleep(0.3)
            except asyncio.CancelledError:
                stopped = True
                raise
            return Response(status_code=200)

        async def receive() -> Any:
            await asyncio.sleep(left_after_s)
            return {"type": "http.disconnect"}

        found = await unless_gone(Request({"type": "http"}, receive), work())
        return found.status_code, stopped

    assert asyncio.run(tried(0.05)) == (499, True)
    assert asyncio.run(tried(60)) == (200, False)


# --- No way from a word to a file ---


@pytest.mark.parametrize("path", PATHS)
def test_no_word_reaches_the_file_system(client: TestClient, monkeypatch: Any, path: str) -> None:
    """They are refused before a worker hears of them: this process opens nothing, and asks nobody."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("kernel", {**KERNEL, "gpu": path}),
        ("kernel", {**KERNEL, "op": path}),
        ("infer", {"model": path, "gpu": "h200_sxm"}),
        ("compare", {"model": "llama-3.1-8b", "gpus": [path]}),
        ("compare", {"model": "llama-3.1-8b", "gpus": f"h200_sxm,{path}"}),
        ("compare", {"model": "llama-3.1-8b", "gpus": ["h200_sxm"], "price": [f"{path}=2"]}),
        ("plan", {"model": "llama-3.1-8b", "gpus": [path], "ttft_p99": "1s", "request_rate": 1}),
        *(("infer", {"model": "llama-3.1-8b", "gpu": "h200_sxm", word: path})
          for word in ("stack", "fabric", "between_nodes", "draft_model", "predictor", "dtype", "kv_dtype", "requests",
                       "calibration", "weights", "plot")),
        *(("simulate", {"model": "llama-3.1-8b", "gpu": "h200_sxm", "num_prompts": 1, word: path})
          for word in ("transfer_fabric", "server", "trace", "trace_format", "router", "timeline", "stages")),
        *(("plan", {"model": "llama-3.1-8b", "ttft_p99": "1s", "request_rate": 1, word: path})
          for word in ("prices", "server", "stack")),
    ]  # fmt: skip
    opened: list[Any] = []
    _HEARD.append(opened)
    pool = client.app.state.service.pool  # type: ignore[attr-defined]

    def nobody(*words: Any) -> None:
        raise AssertionError(f"a worker was asked {words}")

    monkeypatch.setattr(pool, "run", nobody)
    try:
        for question, words in bodies:
            response = client.post(f"/api/v1/{question}", json=words)
            assert response.status_code == 422, (question, words, response.text)
            problem_of(response)
    finally:
        _HEARD.remove(opened)
    assert not opened


_HEARD: list[list[Any]] = []  # of whoever listens for files that are opened


def _hook(event: str, given: tuple[Any, ...]) -> None:
    if _HEARD and event in ("open", "os.listdir", "os.scandir"):
        for heard in _HEARD:
            heard.append(given[0])


sys.addaudithook(_hook)


def test_files_in_parameters_are_refused_by_the_worker(refused: Any) -> None:
    for path in PATHS:
        words = {"op": "all_reduce", "gpu": "h200_sxm", "parameters": {"bytes": 99, "world": 2, "fabric": path}}
        assert "unknown fabric" in refused(422, "kernel", **words)


def test_workers_have_given_up_files_and_sockets(tmp_path: Any) -> None:
    (tmp_path / "secret.toml").write_text("a = 1")
    program = f"""
import socket, subprocess, pathlib
from kernelcast.app.web import tasks, worker
next(tasks.warm_up())
worker.enter_sandbox(8 << 30)
def refused(act):
    try:
        act()
    except PermissionError:
        return True
    return False
print([refused(act) for act in (
    lambda: open({str(tmp_path / "secret.toml")!r}), lambda: open("/etc/passwd"), lambda: open("/etc/../etc/passwd"),
    lambda: pathlib.Path({str(tmp_path)!r}).joinpath("new").write_text("x"), lambda: list(pathlib.Path("/").iterdir()),
    lambda: subprocess.run(["true"]), lambda: socket.create_connection(("127.0.0.1", 9)),
    lambda: open(worker.__file__, "a"), lambda: pathlib.Path(worker.__file__).unlink(),
    lambda: open(worker.__file__))])
print(tasks.TASKS["infer"]({{"model": "qwen3-0.6b", "gpu": "l4"}}, b"", {{}})["command"])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    told, command = found.stdout.splitlines()
    assert told == str([*[True] * 9, False]) and command == "kernelcast infer qwen3-0.6b --gpu l4"
    assert (tmp_path / "secret.toml").read_text() == "a = 1" and readable_folders()


# --- The command ---


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`kernelcast web` on a free port."""
    command = [sys.executable, "-m", "kernelcast", "web", "--port", "0", "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[2], process
        process.kill()


def test_the_command_serves_until_ctrl_c(server: tuple[str, subprocess.Popen[str]]) -> None:
    url, process = server
    assert url.startswith("http://127.0.0.1:")
    answers: list[httpx.Response] = []
    ask = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/api/v1/kernel", json=KERNEL, timeout=60)))
    ask.start()
    assert httpx.get(url, timeout=60).status_code == 200  # the page needs no worker
    ask.join()
    assert answers[0].status_code == 200 and answers[0].json()["answer"]["op"] == "gemm"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as slow:  # one that never ends its body
        slow.sendall(b"POST /api/v1/kernel HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Content-Length: 100\r\n\r\n{")  # fmt: skip
        assert httpx.get(f"{url}/api/v1/stacks", timeout=60).status_code == 200
        process.send_signal(2)
        assert process.wait(15) in (0, 130)
    assert process.stderr is not None and process.stderr.read() == ""


@contextlib.contextmanager
def served(limits: Limits) -> Iterator[tuple[str, int]]:
    """The app with these limits, in a thread: where it listens."""
    bound = listening("127.0.0.1", 0)
    config = uvicorn.Config(create_app(limits), log_config=None, access_log=False, http=bounded(limits))
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound]})
    thread.start()
    while not running.started:
        time.sleep(0.05)
    try:
        yield bound.getsockname()
    finally:
        running.should_exit = True
        thread.join()
        bound.close()


def test_connections_that_wait_are_closed() -> None:
    """One that says nothing, one that sends its header a byte at a time, the same after an answer; one too many."""

    def until_closed(at: tuple[str, int], opening: bytes, each: bytes) -> float:
        started = time.monotonic()
        with socket.create_connection(at) as one:
            one.settimeout(0.1)
            one.sendall(opening)
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - started < 5:
                    with contextlib.suppress(TimeoutError):
                        if not one.recv(65_536):
                            break
                    one.sendall(each)
        return time.monotonic() - started

    with served(replace(LIMITS, header_seconds=0.6, connections=3)) as at:
        page = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
        for opening, each in ((b"", b""), (page, b"A"), (page + b"\r\n", b"G")):
            assert 0.3 < until_closed(at, opening, each) < 2.5
        held = [socket.create_connection(at) for _ in range(3)]
        assert until_closed(at, b"", b"") < 0.5  # the fourth, at once
        time.sleep(1.0)  # the others are closed by now
        assert httpx.get(f"http://127.0.0.1:{at[1]}/").status_code == 200
        for one in held:
            one.close()


@pytest.mark.parametrize(("question", "words"), [("infer", SLOW), ("simulate", LONG)])
def test_a_client_that_hangs_up_frees_the_worker(question: str, words: dict[str, Any]) -> None:
    """A question of half a minute, asked by one who goes: the only worker lives on and answers the next at once."""
    body = json.dumps(words).encode()
    head = f"POST /api/v1/{question} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served(replace(LIMITS, workers=1, brief_seconds=20.0)) as at:
        url = f"http://127.0.0.1:{at[1]}/api/v1/kernel"
        assert httpx.post(url, json=KERNEL, timeout=60).status_code == 200
        before = _children()
        for _ in range(3):
            with socket.create_connection(at) as one:
                one.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                time.sleep(0.4)
        started = time.monotonic()
        assert httpx.post(url, json=KERNEL, timeout=60).status_code == 200
        assert time.monotonic() - started < 10
        assert before and _children() == before


def _children() -> set[str]:
    """Processes that this one started and that run."""
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "app.web.worker"], capture_output=True, text=True)
    return set(found.stdout.split())


def test_a_port_that_is_taken_is_one_line(run: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = run("web", "--port", taken.getsockname()[1])
    assert code == 2 and err.count("\n") == 1 and "address already in use; give another --port" in err


def test_without_fastapi_one_line_says_what_to_install(run: Any, monkeypatch: Any) -> None:
    from kernelcast.app.cli import web

    monkeypatch.setattr(web, "_NEEDED", ("fastapi_that_is_not_there", "uvicorn"))
    code, _, err = run("web")
    assert code == 2 and "pip install 'kernelcast[web]'" in err and err.count("\n") == 1


def test_addresses() -> None:
    assert address("127.0.0.1", 8321) == "http://127.0.0.1:8321"
    assert address("::1", 1) == "http://[::1]:1" and address("0.0.0.0", 1) == "http://127.0.0.1:1"
    with pytest.raises(KernelcastError, match="no such address"):
        listening("no.such.name.invalid", 0)


def test_memory_of_a_worker_is_a_share_of_the_machine_s() -> None:
    for workers in (2, 16, 10_000):
        share = 0.6 * machine_bytes() / workers
        assert Limits(workers=workers).worker_bytes == min(8 << 30, max(1 << 30, int(share)))
    assert Limits(worker_bytes=5 << 30).worker_bytes == 5 << 30


def test_short_questions_go_before_long_ones_that_came_a_moment_earlier() -> None:
    async def tried() -> list[str]:
        idle, order = _IdleWorkers(), []
        workers: list[Any] = [object(), object()]

        async def take(name: str, patience_s: float) -> None:
            await idle.get(patience_s)
            order.append(name)

        asked = [asyncio.create_task(take(*each)) for each in (("model", 5.0), ("gone", 0.0), ("kernel", 0.0))]
        await asyncio.sleep(0)
        idle.put(workers[0])  # to the first that waits, which has gone by the time that it hears of it
        asked[1].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        idle.put(workers[1])
        await asyncio.gather(*asked, return_exceptions=True)
        return order

    assert asyncio.run(tried()) == ["kernel", "model"]
