"""Results in a notebook: HTML that holds the answer, is well formed and escaped; and the notebook that ships runs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import kernelcast as kc
from kernelcast.app.report.html import html_of
from kernelcast.results import HtmlRepr

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
GEMM = kc.Gemm(m=4096, n=4096, k=4096, dtype="bf16")


class Read(HTMLParser):
    """Tables, text, and whether every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text, self.bars = "", 0
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"div", "style", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "span", "code"}
        self.open.append(tag)
        self.bars += ("class", "bar") in attrs
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row[0] == first)


def shown(found: HtmlRepr) -> Read:
    """What a notebook shows; nothing is printed on the way."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        html = found._repr_html_()
    assert printed.getvalue() == ""
    return Read(html)


def test_a_prediction_shows_its_answer_first() -> None:
    found = kc.predict(GEMM, "h200_sxm")
    page = shown(found)
    assert page.rows[0] == ["predicted", f"{found.time_s * 1e6:.0f} µs",
                            f"interval {found.low_s * 1e6:.0f} µs – {found.high_s * 1e6:.0f} µs"]  # fmt: skip
    assert page.row(found.bound_by)[3] == "100%"
    assert page.bars == len(found.limits)  # a bar a pipeline
    assert page.row("support")[1].startswith(found.support) and "calls of this configuration" in page.row("evidence")[1]


def test_a_gpu_shows_its_numbers_with_their_sources() -> None:
    page = shown(kc.gpu("h200_sxm").replace(dram_bytes_per_s=7e12))
    assert page.row("dram_bytes_per_s")[1] == "7 TB/s"
    assert "what if: dram_bytes_per_s=7e+12" in page.text


def test_a_batch_shows_times_parts_memory_and_evidence() -> None:
    found = kc.infer("llama-3.1-8b", gpu="h200_sxm", batch=8, input_len=512, output_len=32)
    page = shown(found)
    assert page.row("total")[1] == f"{found.total.value * 1e3:.0f} ms" and " to " in page.row("total")[2]
    assert {"mlp", "attention", "projections"} <= {row[0] for row in page.rows}
    assert page.bars >= 4
    assert "GiB" in page.row("memory")[1] and "calls of" in page.row("evidence")[1]


def test_a_load_shows_percentiles() -> None:
    found = kc.simulate("llama-3.1-8b", gpu="h100_sxm", request_rate=8, num_prompts=60, input_len=256, output_len=32)
    page = shown(found)
    assert page.row("time to first token")[3] == "mean" and "requests/s" in page.row("throughput")[1]


def test_a_comparison_shows_a_row_a_gpu() -> None:
    page = shown(kc.compare("llama-3.1-8b", gpus="h100_sxm,l40s", batch=8))
    assert {"h100_sxm", "l40s"} <= {row[0] for row in page.rows}
    assert page.row("GPU")[:3] == ["GPU", "layout", "batch"] and "cheapest" in page.row("best")[1]


@pytest.mark.slow
def test_a_plan_shows_the_command_that_starts_it() -> None:
    found = kc.plan("llama-3.2-1b", gpus="l40s", ttft_p99="1s", request_rate=2, max_gpus=1, num_prompts=200)
    page = shown(found)
    assert "vllm serve" in page.text and page.row("TTFT p99")[1] == "1.000 s"


def test_steps_show_their_phases() -> None:
    torch = pytest.importorskip("torch")
    step = kc.run_step(kc.trace(torch.nn.Linear(512, 512), (torch.zeros(64, 512),), "training"), kc.gpu("h200_sxm"))
    page = shown(step)
    assert {"step", "forward", "backward", "optimizer"} <= {row[0] for row in page.rows}


def test_text_is_escaped() -> None:
    """A name from somebody's file is no markup."""
    bad = "<script>alert('x')</script> & co"
    html = html_of(dataclasses.replace(kc.gpu("h200_sxm"), name=bad, aliases=(bad,), sources={"sm_count": bad}))
    assert "<script" not in html and Read(html).text.count(bad) == 3


def test_what_nobody_can_show_is_said() -> None:
    with pytest.raises(TypeError, match="nobody knows how to show a HtmlRepr"):
        HtmlRepr()._repr_html_()


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """As a notebook runs it: the value of a last expression is shown."""
    parsed = ast.parse(source)
    last = parsed.body.pop() if isinstance(parsed.body[-1], ast.Expr) else None
    exec(compile(parsed, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    book = json.loads(path.read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    names: dict[str, Any] = {"__name__": "__main__"}
    tables = 0
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None  # figures would grow old
            value = run_cell("".join(cell["source"]), names)
            show_html: Callable[[], str] | None = getattr(value, "_repr_html_", None)
            tables += len(Read(show_html()).rows) > 3 if show_html else 0
    assert tables >= 3 and list(tmp_path.iterdir()) == []
