"""Train: the step, its memory and its run are the command line's; a search fills the form; a step that does not fit."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

import kernelcast
from browser.visits import REFUSED, Visit, columns, problem_text

Run = Callable[..., tuple[int, str, str]]
JOB = "model=llama-3.1-8b&gpu=h100_sxm&count=16&global_batch=128&seq=8192"
COMMAND = "kernelcast train llama-3.1-8b --gpus 16xh100_sxm --global-batch 128 --seq 8192"


def answered(run: Run, visit: Visit) -> tuple[dict[str, Any], str]:
    """What the command that the page shows prints, as JSON and as text."""
    words = shlex.split(visit.find("#command").text_content() or "")[1:]
    code, out, err = run(*words, "--json")
    assert code in (0, 3), err
    _, printed, _ = run(*words)
    return json.loads(out), printed


def test_every_number_is_the_command_s(visit: Visit, run: Run) -> None:
    visit.open(f"/train?{JOB}&tp=2&pp=2&tokens=1e12")
    visit.shows_command(f"{COMMAND} --tp 2 --pp 2 --tokens 1000000000000")
    answer, printed = answered(run, visit)
    for name in ("time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "memory_bytes"):
        assert visit.value(name) == answer[name]
    assert visit.value("usd") == answer["run"]["usd"]
    assert visit.value("days") == answer["run"]["hours"] / 24
    parts = {row[0]: row[1:3] for row in visit.cells("#parts-table")}
    assert parts == {name: columns(printed, f"{name}  ", 3)[1:] for name in parts}
    assert set(parts) == {name for name, seconds in answer["parts_s"].items() if seconds > 5e-4 * answer["time_s"]}
    cells = {row[0]: row for row in visit.cells("#breakdown-table")}
    assert cells["mlp"][1] == columns(printed, "mlp", 2)[1]
    expect(visit.find("#memory .note")).to_contain_text("✓ Fits")
    expect(visit.find("#memory")).to_contain_text("stages, first to last")
    expect(visit.find("#evidence")).to_contain_text(f"{answer['evidence']['calls']:,}")
    expect(visit.find("#run")).to_contain_text(f"of {answer['run']['price_date']}")


def test_a_change_asks_by_itself_and_the_address_follows(visit: Visit) -> None:
    visit.open("/train")  # a first visit begins with a job that fits, and its cost
    visit.shows_command(
        "kernelcast train llama-3.1-8b --gpus 16xh200_sxm --global-batch 128 --seq 8192 --tokens 1000000000000"
    )
    visit.find("#tokens").fill("")
    visit.find("#count").fill("8")
    visit.find("#recompute").select_option("full")
    visit.shows_command(
        "kernelcast train llama-3.1-8b --gpus 8xh200_sxm --global-batch 128 --seq 8192 --recompute full"
    )
    expect(visit.find("#title-line")).to_contain_text("recompute full")
    visit.query_has("count=8", "global_batch=128", "recompute=full")
    visit.page.reload()
    visit.settled()
    expect(visit.find("#count")).to_have_value("8")
    expect(visit.find("#tokens")).to_have_value("")
    visit.find("#copy-link").click()
    expect(visit.find("#copy-link")).to_have_text("Copied")
    assert "recompute=full" in visit.clipboard()


def test_a_row_of_a_search_fills_the_form(visit: Visit, run: Run) -> None:
    visit.open(f"/train?{JOB}&tp=2")
    visit.page.get_by_text("Fastest layout", exact=True).click()
    expect(visit.find("#tp")).to_have_value("")  # a size that is given would stay
    expect(visit.find("#ask")).to_have_text("Find the fastest layout")
    visit.find("#ask").click()
    visit.shows_command("kernelcast train llama-3.1-8b --gpus 16xh100_sxm --search --global-batch 128 --seq 8192")
    search = answered(run, visit)[0]["search"]
    rows = visit.cells("#layouts-table")
    assert len(rows) == len(search["ranked"])
    expect(visit.find("#searched")).to_contain_text(f"{search['tried']:,} layouts, {search['too_large']:,} do not fit")
    recomputed = next(at for at, row in enumerate(search["ranked"]) if row["recompute"] == "selective")
    pipeline = next(at for at, row in enumerate(search["ranked"]) if row["layout"]["virtual_stages"] > 1)
    for at in (recomputed, pipeline):
        visit.page.locator("#layouts-table tbody tr").nth(at).get_by_role("button", name="Use").click()
        expect(visit.find("#section-layout")).to_be_checked()
        expect(visit.page.locator("#command:not(:has-text('--search'))")).to_be_visible()
        visit.settled()
        assert visit.value("time_s") == search["ranked"][at]["time_s"]
        assert visit.value("memory_bytes") == search["ranked"][at]["memory_bytes"]
        visit.page.get_by_text("Fastest layout", exact=True).click()  # its answer is still there
        expect(visit.find("#layouts-table")).to_be_visible()


def test_a_step_that_does_not_fit_says_what_would_help(visit: Visit, run: Run) -> None:
    visit.open("/train?model=llama-3.1-8b&gpu=h100_sxm&count=8&global_batch=64&seq=8192&zero=0")
    answer, _ = answered(run, visit)
    assert not answer["fits"]
    missing = answer["memory"]["missing_bytes"] / 2**30
    expect(visit.find("#memory .note")).to_contain_text(f"Does not fit: {missing:.1f} GiB")
    expect(visit.find("#memory .bar-mark")).to_have_count(1)
    visit.find("#use-search").click()
    expect(visit.find("#layouts-table")).to_be_visible()
    expect(visit.find("#memory .note")).to_contain_text("✓ Fits")


def test_what_is_wrong_is_told_in_the_command_s_words(visit: Visit, run: Run) -> None:
    visit.allow(REFUSED)
    visit.open(f"/train?{JOB}&tp=3")
    _, _, err = run(*shlex.split(COMMAND)[1:], "--tp", "3")
    expect(visit.find("#problem")).to_have_text(problem_text(err).replace("`", ""))
    visit.find("#count").fill("")
    expect(visit.page.locator(".empty")).to_have_text("Choose GPUs.")


def test_a_model_of_one_s_own(visit: Visit, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visit.open(f"/train?{JOB}")
    source = Path(kernelcast.__file__).parent / "models" / "configs" / "llama-3.1-8b.json"
    config = {key: value for key, value in json.loads(source.read_text()).items() if not key.startswith("_")}
    (tmp_path / "mine.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    visit.find("#config").set_input_files(tmp_path / "mine.json")
    expect(visit.find("#command")).to_have_text(re.compile(r"^kernelcast train mine\.json "))
    visit.settled()
    monkeypatch.chdir(tmp_path)
    assert visit.value("time_s") == answered(run, visit)[0]["time_s"]
