"""The Diagnose page beside ``kernelcast diagnose``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from browser.visits import REFUSED, Visit, columns

Run = Callable[..., tuple[int, str, str]]
_DROPPED = """(text) => {
  const data = new DataTransfer();
  data.items.add(new File([text], "calls.csv"));
  return data;
}"""


def test_a_trace_is_ranked_as_the_command_ranks_it(visit: Visit, run: Run, profile: Path) -> None:
    visit.open("/diagnose")
    visit.find("#file").set_input_files(profile)
    expect(visit.find("#ranking")).to_be_visible()
    visit.shows_command(f"kernelcast diagnose {profile.name}")
    code, out, err = run("diagnose", profile)
    assert code == 0, err

    shown = visit.cells("#ranking")
    for row in shown:
        rank, call, count, share, measured, predicted, ceiling, win, reason = columns(out, f"{row[0]}  ", 9)
        assert row[:8] == [rank, call, count, share, measured, predicted, ceiling, win]
        assert row[8].startswith(reason)
    assert shown[0][1] == "gemm 4096x4096x4096 fp32"  # the fault that was planted
    assert "dtype fallback" in shown[0][8]
    gpu_time = re.findall(r"[\d.,]+ [mµ]?s", columns(out.replace("GPU time", "GPU time  "), "GPU time")[1])
    expect(visit.figure("gpu_time_us")).to_have_text(gpu_time[0])
    expect(visit.figure("predicted_us")).to_have_text(gpu_time[1])
    expect(visit.figure("ceiling_us")).to_have_text(gpu_time[3])

    answer = json.loads(run("diagnose", profile, "--json")[1])
    assert (
        float(visit.find("#ranking tbody tr").first.get_attribute("data-win") or 0)
        == answer["kernels"][0]["could_win_us"]
    )
    assert visit.value("could_win_us") == answer["could_win_us"]


def test_another_gpu_and_format_are_asked_again(visit: Visit, run: Run, profile: Path) -> None:
    visit.open("/diagnose")
    visit.find("#file").set_input_files(profile)
    visit.shows_command(f"kernelcast diagnose {profile.name}")
    visit.pick("gpu", "h100_sxm")
    visit.shows_command(f"kernelcast diagnose {profile.name} --gpu h100_sxm")
    _, out, _ = run("diagnose", profile, "--gpu", "h100_sxm")
    assert visit.cells("#ranking")[0][:8] == columns(out, "1  ", 8)
    visit.query_has("gpu=h100_sxm")


def test_files_that_are_no_runs_are_refused_in_words(visit: Visit, run: Run, profile: Path, tmp_path: Path) -> None:
    visit.allow(REFUSED)
    visit.open("/diagnose")
    expect(visit.find("#answer")).to_contain_text("Choose a measured run")
    wrong = tmp_path / "notes.json"
    wrong.write_text("[1, 2", encoding="utf-8")
    visit.find("#file").set_input_files(wrong)
    expect(visit.find("#problem")).to_contain_text("notes.json")
    _, _, err = run("diagnose", wrong)
    assert (visit.find("#problem").text_content() or "").split("notes.json")[-1] in " ".join(err.split())
    visit.find("#file").set_input_files(profile)
    expect(visit.find("#ranking")).to_be_visible()
    expect(visit.find("#problem")).to_have_count(0)


def test_a_file_is_chosen_by_keyboard_or_dropped(visit: Visit, profile: Path) -> None:
    visit.allow(REFUSED)
    visit.page.on("filechooser", lambda _: None)  # from the start: choosers are caught only where somebody listens
    visit.open("/diagnose")
    visit.find("#file").focus()
    with visit.page.expect_file_chooser() as chosen:
        visit.page.keyboard.press("Enter")
    chosen.value.set_files(profile)
    expect(visit.find("#file-told")).to_contain_text(profile.name)
    expect(visit.find("#ranking")).to_be_visible()

    table = "op,m,n,k,dtype,measured_us\ngemm,4096,4096,4096,bf16,400\n"
    dropped = visit.page.evaluate_handle(_DROPPED, table)
    visit.find("#drop").dispatch_event("drop", {"dataTransfer": dropped})
    expect(visit.find("#problem")).to_contain_text("gpu")  # a table does not say where it was measured
    visit.pick("gpu", "h200_sxm")
    visit.shows_command("kernelcast diagnose calls.csv --gpu h200_sxm")
    assert [row[1] for row in visit.cells("#ranking")] == ["gemm 4096x4096x4096 bf16"]
