"""For everybody: what axe-core finds, and no sideways scrolling, on a desktop and a phone, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from browser.visits import DESKTOP, PHONE, Visit

PAGES = {
    "model": "/model?model=mixtral-8x7b&gpu=h200_sxm&batch=8&tp=2&sweep=batch",
    "kernel": "/kernel?op=attention&gpu=h200_sxm",
    "compare": "/compare?model=llama-3.1-8b&gpus=h100_sxm&gpus=h200_sxm&batch=8&what_if=dram_bytes_per_s*1.5&tpot=7ms"
    "&sweep=batch",
    "serve": "/serve?model=llama-3.1-8b&gpu=h100_sxm&request_rate=4&num_prompts=40&input_len=256&output_len=16",
    "train": "/train?section=search&model=llama-3.1-8b&gpu=h100_sxm&count=16&global_batch=128&seq=8192&tokens=1e12",
    "diagnose": "/diagnose",
    "evidence": "/evidence?cell=gemm+h200_sxm&op=gemm",
}
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
COLOURS = {"type": "rule", "values": ["color-contrast"]}  # all that the other theme changes
SETTINGS: tuple[tuple[str, Any, Any, Any], ...] = (
    ("desktop, light", DESKTOP, "light", TAGS),
    ("desktop, dark", DESKTOP, "dark", COLOURS),
    ("phone, dark", PHONE, "dark", TAGS),
    ("phone, light", PHONE, "light", COLOURS),
)


def findings(visit: Visit, where: str, rules: Any) -> list[str]:
    """What axe-core calls serious or critical. Its own probing breaks the policy of styles: that is not the page's."""
    known = len(visit.faults)
    options = {"preload": False, "resultTypes": ["violations"], "runOnly": rules}
    found = Axe().run(visit.page, options=options).response["violations"]
    del visit.faults[known:]
    visit.page.evaluate("window.violations.length = 0")
    return [
        f"{where}: {one['id']} ({one['impact']}): {one['help']}: {[node['target'] for node in one['nodes']][:5]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def too_wide(visit: Visit, where: str) -> list[str]:
    """Elements that make the page scroll sideways; those in a box that scrolls by itself do not."""
    wide = visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return [f"{where}: {wide} px too wide"] if wide > 0 else []


@pytest.mark.parametrize("name", PAGES)
def test_nothing_serious_is_found(visit: Visit, name: str, profile: Path) -> None:
    visit.open(PAGES[name])
    if name == "diagnose":
        visit.find("#file").set_input_files(profile)
    expect(visit.find("#kinds" if name == "evidence" else "#answer h2").first).to_be_visible()
    visit.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    faults = []
    for where, size, scheme, rules in SETTINGS:
        visit.page.set_viewport_size(size)
        visit.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        expect(visit.find("html")).to_have_attribute("data-theme", scheme)
        faults += findings(visit, where, rules) + too_wide(visit, where)
    assert not faults, "\n".join(faults)
