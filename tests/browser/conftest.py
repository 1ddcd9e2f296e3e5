"""One browser and one server for all tests of this folder; a visit is a fresh profile in that browser.

Without a browser the tests are skipped, but not where CI is set: there they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from browser.served import Served, start
from browser.visits import FLAGS, Visit, browser_path

WAIT_MS = 20_000  # a busy machine is slow, not wrong


# Of the folder and not of the session: playwright keeps an event loop open, and tests of other folders start their own
@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        words = "no browser: install chromium (apt-get install chromium, or playwright install chromium)"
        pytest.fail(words) if "CI" in os.environ else pytest.skip(words)
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server that most tests ask; it must end without leaving processes behind."""
    found = start(tmp_path_factory.mktemp("served"))
    yield found
    found.stop()


@pytest.fixture
def visit(chromium: Browser, served: Served) -> Iterator[Visit]:
    """A desktop browser that saw nothing yet; at the end nothing may have gone wrong in it."""
    found = Visit.to(chromium, served.url, WAIT_MS)
    yield found
    found.end()


@pytest.fixture
def profile() -> Path:
    """A trace of torch.profiler with faults planted in it."""
    return Path(__file__).parents[2] / "validation" / "profiles" / "planted_faults.json.gz"
