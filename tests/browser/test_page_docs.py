"""docs/web.md: its commands are asked of a server, and its pictures are there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from browser.served import Served

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "web.md"
MOST_BYTES = 1.5e6  # of all pictures


def asked() -> list[str]:
    """All curl commands of the page, a line each."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", "", "".join(blocks)).splitlines()
    return [line for line in lines if line.startswith("curl ")]


def answer(command: str, served: Served) -> dict[str, object]:
    if shutil.which("curl") is None:
        pytest.fail("no curl") if "CI" in os.environ else pytest.skip("no curl")
    here = command.replace("127.0.0.1:8321", f"127.0.0.1:{served.port}").replace("curl -s", "curl -sS --fail-with-body")
    done = subprocess.run(["sh", "-c", here], cwd=ROOT, capture_output=True, check=False)  # as a reader would
    assert done.returncode == 0, f"{command}\n{done.stdout[:500]!r}{done.stderr!r}"
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_every_operation_has_an_example_that_is_answered(served: Served) -> None:
    paths = set()
    for command in asked():
        path = re.findall(r"8321(/[^?'\s]*)", command)[0]
        paths.add(path.replace("/gpus/h200_sxm", "/gpus/{gpu_id}"))
        if not path.endswith("/plan"):  # takes long: below
            found = answer(command, served)
            assert ("answer" in found) == (" -d " in command or "--data-binary" in command), command
    described = answer(asked()[0], served)["paths"]
    assert isinstance(described, dict)
    assert paths == {"/openapi.json", *described}


@pytest.mark.slow
def test_the_example_of_a_plan_is_answered(served: Served) -> None:
    (command,) = (one for one in asked() if "/api/v1/plan" in one)
    found = answer(command, served)["answer"]
    assert isinstance(found, dict) and found["choice"]["gpu"] == "l40s"


def test_the_limits_that_it_tells_are_the_server_s(served: Served) -> None:
    limits = answer("curl -s http://127.0.0.1:8321/api/v1/about", served)["limits"]
    assert isinstance(limits, dict)
    text = PAGE.read_text(encoding="utf-8")
    assert f"| body of a question | {limits['body_bytes'] // 2**20} MiB, " in text
    assert f"{limits['upload_bytes'] // 2**20} MiB, {limits['unpacked_bytes'] // 2**20} MiB unpacked" in text
    assert f"{limits['file_rows']:,} rows of a table, {limits['file_events']:,} events of a trace" in text
    told = re.findall(
        r"kernel (\d+), diagnose (\d+), infer (\d+), curves and simulate (\d+), compare (\d+), plan (\d+), train (\d+)",
        text,
    )[0]
    names = ("kernel", "diagnose", "infer", "simulate", "compare", "plan", "train")
    assert [float(one) for one in told] == [limits["seconds"][name] for name in names]
    assert limits["seconds"]["curves"] == limits["seconds"]["simulate"]


def test_its_pictures_are_there_and_small() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = {PAGE.parent / name for name in re.findall(r"pictures/web/\w+\.png", text)}
    assert named and all(path.exists() for path in named)
    pictures = list((PAGE.parent / "pictures" / "web").glob("*.png"))
    assert sum(path.stat().st_size for path in pictures) < MOST_BYTES
