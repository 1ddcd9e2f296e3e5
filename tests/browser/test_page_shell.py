"""What all pages share: navigation, the theme, the keyboard, and a server that goes away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from browser.conftest import WAIT_MS
from browser.served import start
from browser.visits import Visit

PAGES = ("model", "kernel", "compare", "serve", "train", "diagnose", "evidence")

# whether the element with the focus, or the label that stands for it, has an outline or a ring
_RINGED = """() => {
  const focused = document.activeElement;
  const drawn = [focused, focused.nextElementSibling].filter(Boolean).map((one) => getComputedStyle(one));
  return drawn.some((style) => style.outlineStyle !== "none" || style.boxShadow !== "none");
}"""


def test_the_navigation_leads_everywhere_and_back(visit: Visit) -> None:
    visit.open("/?model=llama-3.1-8b&gpu=l40s")
    for name in PAGES[1:]:
        visit.find(f'nav a[data-page="{name}"]').click()
        expect(visit.find("h1")).to_have_text(name.title())
        expect(visit.find("nav a[aria-current=page]")).to_have_text(name.title())
        expect(visit.page).to_have_title(re.compile(name.title()))
        expect(visit.page).to_have_url(re.compile(rf"/{name}(\?|$)"))
    visit.page.go_back()
    expect(visit.find("h1")).to_have_text("Diagnose")
    visit.find('nav a[data-page="model"]').click()
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu l40s")  # a page is found as it was left
    expect(visit.find("#about")).to_contain_text("measured calls")


def test_the_chosen_gpu_is_carried_to_the_next_page(visit: Visit) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm")
    visit.pick("gpu", "a100_sxm")
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu a100_sxm")
    visit.find('nav a[data-page="kernel"]').click()
    visit.shows_command("kernelcast kernel gemm --m 4096 --n 4096 --k 4096 --gpu a100_sxm")


def test_no_such_page(visit: Visit) -> None:
    visit.allow("404")
    answer = visit.page.goto(f"{visit.url}/nowhere")
    assert answer is not None and answer.status == 404


def test_the_theme_is_the_system_s_until_one_is_chosen(visit: Visit) -> None:
    visit.page.emulate_media(color_scheme="dark")
    visit.open("/model")
    root, button = visit.find("html"), visit.find("#theme")
    dark = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    expect(root).to_have_attribute("data-theme", "dark")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.focus()
    visit.page.keyboard.press("Enter")
    expect(root).to_have_attribute("data-theme", "light")
    assert visit.page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    visit.page.reload()  # the choice is kept
    expect(root).to_have_attribute("data-theme", "light")
    expect(button).to_have_attribute("aria-pressed", "false")


def test_the_keyboard_alone_reaches_and_asks(visit: Visit) -> None:
    visit.open("/model")
    seen = []
    for _ in range(30):
        visit.page.keyboard.press("Tab")
        focused = visit.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")
        seen.append(focused)
        assert visit.page.evaluate(_RINGED), f"{focused} does not show that it has the focus"
        if focused == "batch":
            break
    assert seen[0] == "Skip to the page"
    order = ["Model", "Kernel", "Evidence", "theme", "model", "gpu", "stack", "batch-slider", "batch"]
    assert [name for name in seen if name in order] == order
    visit.page.keyboard.press("ControlOrMeta+a")
    visit.page.keyboard.type("16")
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 16")

    visit.find("#gpu").focus()
    visit.page.keyboard.press("ArrowDown")
    expect(visit.find("#gpu")).to_have_attribute("aria-expanded", "true")
    visit.page.keyboard.type("nothing like it")
    expect(visit.page.get_by_text("Nothing by this name")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(visit.find("#gpu")).to_have_value("NVIDIA H200")
    expect(visit.find("#gpu")).to_have_attribute("aria-expanded", "false")


def test_the_skip_link_leads_past_the_navigation(visit: Visit) -> None:
    visit.open("/model")
    visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    expect(visit.find("#main")).to_be_focused()


@pytest.mark.slow
def test_a_server_that_goes_away_is_told_and_comes_back(chromium: Browser, tmp_path: Path) -> None:
    first = start(tmp_path)
    visit = Visit.to(chromium, first.url, WAIT_MS)
    visit.allow("ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE")
    visit.open("/kernel?op=gemm&gpu=h200_sxm&m=64&n=64&k=64")
    expect(visit.figure("next_time_s")).to_be_visible()  # nothing is in flight when the server stops
    first.stop()
    visit.find("#m").fill("128")
    expect(visit.find("#problem")).to_contain_text("does not answer")
    expect(visit.find("#m")).to_have_value("128")
    second = start(tmp_path, first.port)
    visit.page.get_by_role("button", name="Try again").click()
    visit.shows_command("kernelcast kernel gemm --m 128 --n 64 --k 64 --gpu h200_sxm")
    expect(visit.figure("time_s")).to_be_visible()
    visit.end()
    second.stop()
