"""A visit to the page: what it shows, what was said in the console, and what it asked of whom."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request, Response, expect
from playwright.sync_api import sync_playwright as _playwright

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 780}
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the page works without a network
]  # fmt: skip
REFUSED = r"status (of )?4(00|22)\b"  # by the server: a wrong question
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LISTENER = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


def browser_path() -> str | None:
    """Chromium or Chrome of this machine, or playwright's own."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    with _playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@dataclass
class Visit:
    """One browser context with one page. ``faults`` is what went wrong and was not announced by ``allow``."""

    context: BrowserContext
    page: Page
    url: str
    faults: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)

    @classmethod
    def to(cls, browser: Browser, url: str, wait_ms: float, **options: Any) -> Visit:
        context = browser.new_context(**{"viewport": DESKTOP, "color_scheme": "light", **options})
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        context.add_init_script(_LISTENER)
        page = context.new_page()
        page.set_default_timeout(wait_ms)
        visit = cls(context, page, url)
        page.on("console", visit._said)
        page.on("pageerror", lambda error: visit.faults.append(f"error: {error}"))
        page.on("request", visit._asked)
        page.on("requestfailed", visit._failed)
        page.on("response", visit._answered)
        return visit

    def allow(self, pattern: str) -> None:
        """A fault that the test provokes, as a regular expression."""
        self.allowed.append(pattern)

    def end(self) -> None:
        violations = self.page.evaluate("window.violations ?? []")
        self.context.close()
        unforeseen = [fault for fault in self.faults if not any(re.search(one, fault) for one in self.allowed)]
        assert not unforeseen, "\n".join(unforeseen)
        assert not violations, f"against the content security policy: {violations}"

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _asked(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            self.faults.append(f"asked outside: {request.url}")

    def _failed(self, request: Request) -> None:
        # the browser's own doing: a newer question aborts the one before, a reload what is still loading
        if request.failure != "net::ERR_ABORTED":
            self.faults.append(f"failed: {request.method} {request.url} {request.failure}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"status {response.status}: {response.url}")

    # what the page shows

    def open(self, path: str) -> None:
        """By address, until the first answer is there."""
        self.page.goto(self.url + path)
        self.settled()

    def settled(self) -> None:
        expect(self.page.locator(".results[aria-busy=false]")).to_be_visible()

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def figure(self, name: str) -> Locator:
        """A headline number, by the name of its key in ``--json``."""
        return self.page.locator(f'[data-figure="{name}"]').first

    def value(self, name: str) -> float:
        """The number behind it, with all digits."""
        return float(self.figure(name).get_attribute("data-value") or "nan")

    def shows_command(self, command: str) -> None:
        """Waits until the answer shown is that of this command."""
        expect(self.find("#command")).to_have_text(command)
        self.settled()

    def cells(self, table: str) -> list[list[str]]:
        """The texts of a table's body, row by row."""
        script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent.trim()))"
        found: list[list[str]] = self.page.locator(f"{table} tbody tr").evaluate_all(script)
        return found

    def pick(self, box: str, typed: str) -> None:
        """Choose in a combobox by keyboard alone: search, and take the first that is found."""
        self.find(f"#{box}").focus()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.type(typed)
        expect(self.find(f"#{box}")).to_have_attribute("aria-activedescendant", re.compile("."))
        self.page.keyboard.press("Enter")

    def query_has(self, *words: str) -> None:
        """Waits until the address has these words."""
        for word in words:
            expect(self.page).to_have_url(re.compile(rf"[?&]{re.escape(word)}(&|$)"))

    def clipboard(self) -> str:
        found: str = self.page.evaluate("navigator.clipboard.readText()")
        return found


def problem_text(err: str) -> str:
    """An error of the command line as the page shows it: it names parameters, not flags."""
    line = " ".join(err.removeprefix("kernelcast: error: ").split())
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), line)


def columns(text: str, label: str, cells: int = 2) -> list[str]:
    """The first line of a printed answer that begins with this label, cut where two spaces or more stand."""
    for line in text.splitlines():
        if line.strip().startswith(label):
            return re.split(r"\s{2,}", line.strip())[:cells]
    raise AssertionError(f"{label!r} is not in\n{text}")
