"""The Model page beside ``kernelcast infer``."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

import kernelcast
from browser.visits import REFUSED, Visit, columns, problem_text

Run = Callable[..., tuple[int, str, str]]
FIGURES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "total_s": "total"}


def printed(run: Run, command: str) -> str:
    """What the command prints, the line breaks of its sentences undone."""
    code, out, err = run(*shlex.split(command)[1:])
    assert code == 0, err
    return out


def same_as_printed(visit: Visit, run: Run, command: str) -> str:
    """Wait for the command's answer, and hold its headline beside what the command prints."""
    visit.shows_command(command)
    out = printed(run, command)
    for name, label in FIGURES.items():
        _, time, interval = columns(out, label, 3)
        expect(visit.figure(name)).to_have_text(time)
        expect(visit.find(f'.figure:has([data-figure="{name}"]) .interval-text')).to_have_text(interval)
    expect(visit.figure("tokens_per_s")).to_have_text(re.findall(r"[\d,.]+ tokens/s", columns(out, "total", 4)[3])[0])
    assert f"memory     {visit.figure('memory_bytes').text_content()} of " in out
    assert f"energy     {visit.figure('energy_j').text_content()} (" in out
    return out


def test_a_question_by_address_is_answered_as_the_command_answers_it(visit: Visit, run: Run) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&batch=8&input_len=2048&output_len=256")
    command = "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 8 --input-len 2048 --output-len 256"
    out = same_as_printed(visit, run, command)

    answer = json.loads(printed(run, f"{command} --json"))
    for name in (*FIGURES, "tokens_per_s", "memory_bytes", "energy_j"):
        assert visit.value(name) == answer[name], name  # to the last digit

    shown = {row[0]: row[1:] for row in visit.cells("#breakdown-table")}
    assert set(shown) == {line["part"] for line in answer["breakdown"]}
    for part in ("mlp", "attention", "sampling"):
        line = columns(out, part, 1 + 6)
        prefill, decode = re.findall(r"[\d.,]+ [mµ]?s\b", " ".join(line))
        assert [shown[part][0], shown[part][3]] == [prefill, decode]
    expect(visit.find("#evidence .badge")).to_have_text(answer["support"])
    aspects = [f"{name} {level}" for name, level in answer["support_by"].items()]
    expect(visit.find("#aspects li")).to_have_text(aspects)
    assert ", ".join(aspects) in " ".join(out.split())
    expect(visit.find("#evidence")).to_contain_text(f"{answer['evidence']['calls']:,}")


def test_controls_move_the_answer_and_the_address(visit: Visit, run: Run) -> None:
    visit.open("/model")
    same_as_printed(visit, run, "kernelcast infer llama-3.1-8b --gpu h200_sxm")
    visit.pick("gpu", "a100_sxm")
    visit.query_has("gpu=a100_sxm")
    same_as_printed(visit, run, "kernelcast infer llama-3.1-8b --gpu a100_sxm")

    visit.find("#batch-slider").focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowRight")  # 1, 2, 3
    expect(visit.find("#batch")).to_have_value("3")
    visit.find("#input_len").fill("700")
    visit.find("#stack").select_option("sglang")
    visit.query_has("batch=3", "input_len=700", "stack=sglang")
    command = "kernelcast infer llama-3.1-8b --gpu a100_sxm --stack sglang --batch 3 --input-len 700"
    same_as_printed(visit, run, command)

    visit.page.reload()
    expect(visit.find("#gpu")).to_have_value(re.compile("A100"))
    expect(visit.find("#batch")).to_have_value("3")
    expect(visit.find("#stack")).to_have_value("sglang")
    visit.shows_command(command)


def test_back_and_forward_walk_through_the_questions(visit: Visit) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm")
    visit.pick("gpu", "l40s")
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu l40s")
    visit.query_has("gpu=l40s")
    visit.page.go_back()
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu h200_sxm")
    expect(visit.find("#gpu")).to_have_value("NVIDIA H200")
    visit.page.go_forward()
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu l40s")
    expect(visit.find("#gpu")).to_have_value("NVIDIA L40S")


def test_a_what_if_is_the_command_with_set(visit: Visit, run: Run) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&set=dram_bytes_per_s*2&tp=2")
    out = same_as_printed(visit, run, "kernelcast infer llama-3.1-8b --gpu h200_sxm --tp 2 --set 'dram_bytes_per_s*2'")
    assert "2 x" in out
    expect(visit.find("#title-line")).to_contain_text("2 x NVIDIA H200")


def test_copies_are_what_they_say(visit: Visit) -> None:
    visit.open("/model?model=llama-3.1-8b&gpu=h200_sxm&batch=4")
    visit.find("#copy-command").click()
    expect(visit.find("#copy-command")).to_have_text("Copied")
    assert visit.clipboard() == "kernelcast infer llama-3.1-8b --gpu h200_sxm --batch 4"
    visit.find("#copy-link").click()
    expect(visit.find("#copy-link")).to_have_text("Copied")
    assert visit.clipboard() == f"{visit.url}/model?model=llama-3.1-8b&gpu=h200_sxm&batch=4"
    visit.find("#copy-python").click()
    expect(visit.find("#copy-python")).to_have_text("Copied")
    names: dict[str, object] = {}
    told = visit.clipboard()
    assert told.startswith("import kernelcast as kc\n")
    exec(compile(told, "<clipboard>", "exec"), names)  # it runs as it is
    answers = [one for one in names.values() if hasattr(one, "ttft_s")]
    assert [one.ttft_s for one in answers] == [visit.value("ttft_s")]


def test_a_model_that_does_not_fit_is_told_in_the_command_s_words(visit: Visit, run: Run) -> None:
    visit.allow(REFUSED)
    visit.open("/model?model=llama-3.1-70b&gpu=l40s")
    code, _, err = run("infer", "llama-3.1-70b", "--gpu", "l40s")
    assert code == 3
    expect(visit.find("#problem")).to_have_text(problem_text(err))
    expect(visit.find("#memory")).to_contain_text("GiB needed")
    visit.pick("gpu", "b300_sxm")  # the page goes on
    expect(visit.figure("ttft_s")).to_be_visible()
    expect(visit.find("#problem")).to_have_count(0)


@pytest.mark.parametrize("query", ["gpu=h900_sxm", "model=llama-9&gpu=h200_sxm"])
def test_unknown_names_in_the_address_are_told(visit: Visit, query: str) -> None:
    visit.allow(REFUSED)
    visit.open(f"/model?{query}")
    name = query.split("&")[0].split("=")[1]
    expect(visit.find("#problem")).to_contain_text(name)
    visit.pick("gpu" if query.startswith("gpu") else "model", "h200_sxm" if query.startswith("gpu") else "llama-3.1-8b")
    visit.shows_command("kernelcast infer llama-3.1-8b --gpu h200_sxm")
    expect(visit.figure("ttft_s")).to_be_visible()


def test_a_config_of_one_s_own_is_asked_in_place_of_a_name(visit: Visit, run: Run, tmp_path: Path) -> None:
    source = Path(kernelcast.__file__).parent / "models" / "configs"
    config = json.loads(next(source.glob("llama-3.1-8b*.json")).read_text(encoding="utf-8"))
    visit.open("/model?model=llama-3.2-1b&gpu=h200_sxm")
    before = visit.figure("tpot_s").text_content() or ""  # both prefills wait for the host's launches of 16 layers
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**config, "num_hidden_layers": 16}), encoding="utf-8")
    visit.find("#config").set_input_files(path)
    expect(visit.find("#title-line")).to_contain_text("mine")
    expect(visit.figure("tpot_s")).not_to_have_text(before)
    answer = json.loads(printed(run, f"kernelcast infer {path} --gpu h200_sxm --json"))
    assert visit.value("tpot_s") == answer["tpot_s"]
    path.write_text("no config", encoding="utf-8")
    visit.find("#config").set_input_files(path)
    expect(visit.find("#config-help")).to_contain_text("not JSON")
    visit.shows_command("kernelcast infer llama-3.2-1b --gpu h200_sxm")
