"""Pictures that docs/web.md shows: every page on a desktop and a phone, light and dark.

    python docs/web_pictures.py [NAME ...]

Needs Chromium, playwright and Pillow (extras dev and plots). Starts a server of its own and ends it.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.served import start  # noqa: E402
from browser.visits import FLAGS, browser_path  # noqa: E402

OUT = ROOT / "docs" / "pictures" / "web"
COLOURS = 128  # of a picture: the pages are flat, but small signs keep their colours
WAIT_MS = 120_000
SCREENS: dict[str, dict[str, Any]] = {
    "": {"viewport": {"width": 1280, "height": 900}},
    "_phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
PAGES = {
    "model": "/model?model=qwen3-235b-a22b&gpu=b200_sxm&batch=32&input_len=2048&output_len=256&tp=4&ep=4&dtype=fp8"
    "&sweep=batch",
    "kernel": "/kernel?op=gemm&gpu=h200_sxm&m=4096&n=4096&k=4096",
    "compare": "/compare?model=llama-3.1-70b&gpus=a100_sxm&gpus=h100_sxm&gpus=h200_sxm&gpus=b200_sxm&gpus=l40s"
    "&what_if=dram_bytes_per_s*1.5",
    "serve": "/serve?model=llama-3.1-8b&gpu=h100_sxm&request_rate=24&num_prompts=400&output_len=256"
    "&goodput=ttft%3A500&goodput=tpot%3A30",
    "plan": "/serve?section=plan&model=llama-3.1-8b&gpus=l40s&gpus=h100_sxm&request_rate=8&num_prompts=200"
    "&input_len=1024&output_len=128&ttft_p99=500ms&tpot_p99=50ms&max_gpus=4",
    "train": "/train?section=search&model=llama-3.1-70b&gpu=h100_sxm&count=64&global_batch=256&seq=8192&tokens=1e12",
    "diagnose": "/diagnose",
    "evidence": "/evidence?cell=attention+h200_sxm",
}  # fmt: skip


def _diagnosed(page: Page) -> None:
    page.locator("#file").set_input_files(ROOT / "validation" / "profiles" / "planted_faults.json.gz")
    page.locator("#ranking").wait_for()


_FIRST = {"evidence": "#map-card"}  # of what a phone shows; else the answer from its top
READY: dict[str, Callable[[Page], None]] = {"diagnose": _diagnosed}


@contextmanager
def server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        served = start(Path(folder))
        try:
            yield served.url
        finally:
            served.stop()


def take(browser: Browser, url: str, name: str, screen: str, scheme: Any) -> bytes:
    """A picture of the page once its answer is there; on a phone of the answer."""
    context = browser.new_context(**SCREENS[screen], color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(url + PAGES[name])
    if ready := READY.get(name):
        ready(page)
    page.locator("#command:not(:empty)").wait_for()
    page.locator(".results[aria-busy=false]").wait_for()
    page.wait_for_load_state("networkidle")
    if screen:
        page.evaluate("name => document.querySelector(name).scrollIntoView()", _FIRST.get(name, ".results"))
    found = page.screenshot(full_page=not screen, clip=None if screen else _clip(page))
    context.close()
    return found


def _clip(page: Page) -> Any:
    """The first two screens of a page that is longer."""
    height = page.evaluate("document.documentElement.scrollHeight")
    return {"x": 0, "y": 0, "width": SCREENS[""]["viewport"]["width"], "height": min(height, 1300)}


def save(picture: bytes, path: Path) -> None:
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e3:.0f} kB")


def main(names: list[str]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    shown = (ROOT / "docs" / "web.md").read_text(encoding="utf-8")
    path = browser_path()
    if path is None:
        raise SystemExit("no browser: install chromium")
    with server() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        for name in names or PAGES:
            for screen in SCREENS:
                for scheme in ("light", "dark"):
                    file = f"{name}{screen}{'_dark' if scheme == 'dark' else ''}.png"
                    if f"/{file}" in shown:
                        save(take(browser, url, name, screen, scheme), OUT / file)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
