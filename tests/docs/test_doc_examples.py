"""Every code block of README.md and of docs/ runs, and prints what the page shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from doc_blocks import REASONS, ROOT, Block, Page, blocks, matches, pages, steps
from doc_files import make_files


def label(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages() if blocks(page)], ids=label)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("validation", "docs", "src"):  # what commands of the pages read, as in a checkout
        (tmp_path / name).symlink_to(ROOT / name, target_is_directory=True)
    make_files(label(page), tmp_path)
    running = Page(label(page), tmp_path)
    previous: Block | None = None
    for block in blocks(page):
        if not block.not_run:
            running.run(block, previous)
        previous = block
    assert not running.faults, "\n\n".join(running.faults)


def test_what_is_not_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = {(label(page), block.line): block.not_run for page in pages() for block in blocks(page) if block.not_run}
    total = sum(len(blocks(page)) for page in pages())
    with capsys.disabled():
        print(f"{os.linesep}{len(left_out)} of {total} code blocks are not run")
    wrong = {place: said for place, said in left_out.items() if said not in REASONS}
    assert not wrong, f"reasons are {', '.join(REASONS)}"
    assert len(left_out) <= total / 4


def test_output_is_compared_line_by_line() -> None:
    printed = ["a  1.0 ms", "b  2.0 ms", "c  3.0 ms"]
    assert not matches(("a  1.0 ms", "…", "c  3.0 ms"), printed)
    assert not matches(("a  … ms", "b  2.0 ms", "…"), printed)
    assert "a  1.4 ms" in matches(("a  1.4 ms", "…"), printed)
    assert "not shown: c" in matches(("a  1.0 ms", "b  2.0 ms"), printed)
    assert matches(("a  1.0 ms", "c  3.0 ms"), printed)
    assert matches((*printed, "d"), printed)


def test_only_the_last_digit_of_a_decimal_may_be_rounded_the_other_way() -> None:
    assert not matches(("p99  62.37 ms of 1,200",), ["p99  62.38 ms of 1,200"])
    assert matches(("p99  62.37 ms of 1,200",), ["p99  62.39 ms of 1,200"])
    assert matches(("p99  62.37 ms of 1,200",), ["p99  62.37 ms of 1,201"])  # what is counted is counted
    assert matches(("p99  62.37 ms",), ["p99  62.37 µs"])
    assert matches(("kernelcast 0.1.0",), ["kernelcast 0.2.0"])


def test_commands_go_on_after_a_backslash_and_in_quotes() -> None:
    found = steps('$ kernelcast a \\\n    --b 1\nout\n$ kernelcast query "SELECT\n  1"\n2\n')
    assert [step.command for step in found] == ["kernelcast a --b 1", 'kernelcast query "SELECT\n  1"']
    assert [step.shown for step in found] == [("out",), ("2",)]


def test_blocks_know_their_comment_and_their_neighbour(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "x\n\n<!-- file: a.toml -->\n```toml\na = 1\n```\n```text\n1\n```\n"
        "\nno\n<!-- not run: needs a GPU -->\n```sh\nnvcc\n```\n"
    )
    first, second, third = blocks(page)
    assert (first.file, first.kind, first.line, first.text) == ("a.toml", "toml", 4, "a = 1\n")
    assert second.adjoins and second.kind == "text"
    assert (third.not_run, third.adjoins) == ("needs a GPU", False)
