"""``kernelcast compare``: what it tells, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Run, instead, strict

SMALL = ("compare", "llama-3.1-8b", "--gpus", "h100_sxm,h200_nvl,p4", "--batch", "4", "--max-gpus", "2")


def test_the_order_comes_first(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "compare.png"
    code, out, err = run(*SMALL, "--what-if", "dram_bytes_per_s*1.5", "--sensitivity", "--plot", picture)
    assert (code, err) == (0, "") and picture.stat().st_size > 10_000
    for told in ("one batch of 4; up to 2 equal GPUs", "as the checkpoint is", "TPOT ms (80%)", "best       cheapest: ",
                 "[1]        with dram_bytes_per_s*1.5", "no         p4, p4 [1]: needs 8.7 GiB a GPU on 2 of them",
                 "1% more of it buys tokens a dollar", "DRAM bandwidth", "no price   h200_nvl"):  # fmt: skip
        assert told in out, told
    assert max(len(line) for line in out.splitlines()) <= 100


def test_prices_of_one_day_have_one_date(run: Run) -> None:
    _, out, _ = run("compare", "llama-3.1-8b", "--gpus", "h100_sxm", "--batch", "4", "--max-gpus", "1")
    (line,) = (line for line in out.splitlines() if line.startswith("prices "))
    assert ", read 20" in line and " to " not in line.partition(";")[0]


def test_a_winner_that_nobody_measured_has_a_measured_one_beside_it(run: Run) -> None:
    words = ("compare", "llama-3.1-8b", "--gpus", "mi300x,h100_sxm", "--batch", "4", "--max-gpus", "1")
    _, out, _ = run(*words, "--price", "mi300x=0.1")
    assert "best       cheapest: 1 x mi300x" in out
    assert "near       cheapest on better evidence: 1 x h100_sxm" in out
    assert "measured   none of these was measured as a whole" in out
    _, out, _ = run(*words, "--price", "mi300x=100")
    assert "best       cheapest: 1 x h100_sxm" in out and "better evidence" not in out


def test_a_format_that_is_asked_for_has_a_row(run: Run) -> None:
    words = ("compare", "llama-3.1-8b", "--gpus", "h100_sxm,a100_sxm", "--batch", "4", "--max-gpus", "1")
    found = strict(run(*words, "--formats", "bf16,fp8", "--json")[1])
    rows = {(row["gpu"], row["format"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 4
    assert rows["h100_sxm", "fp8"]["precision"] == "fp8" and rows["h100_sxm", "bf16"]["precision"] == "bf16"
    assert not rows["a100_sxm", "fp8"]["fits"] and "no fp8 arithmetic" in rows["a100_sxm", "fp8"]["why"]
    code, out, _ = run(*words, "--formats", "bf16,fp8")
    assert code == 0 and "h100_sxm fp8 1 x tp1" in out and "h100_sxm bf16 1 x tp1" in out
    assert "no         a100_sxm fp8: has no fp8 arithmetic" in out
    assert [row["format"] for row in strict(run(*words, "--json")[1])["rows"]] == [None, None]


def test_limits_decide_the_exit_code(run: Run) -> None:
    words = ("compare", "llama-3.1-8b", "--gpus", "h100_sxm", "--max-gpus", "1", "--tpot")
    assert run(*words, "50ms")[0] == 0
    code, out, err = run(*words, "1ms")
    assert (code, err) == (3, "") and "best       none meets all limits; h100_sxm is nearest" in out


@pytest.mark.parametrize("columns", [80, 100])
def test_nothing_is_cut_off(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run("compare", "llama-3.1-8b", "--gpus", "rtx_pro_6000_server,h100_sxm", "--formats", "bf16,nvfp4",
                    "--what-if", "dram_bytes_per_s*1.5", "--sensitivity", "--batch", "4")  # fmt: skip
    assert "…" not in out and "rtx_pro_6000_server" in out and max(map(len, out.splitlines())) <= columns


def test_as_data(run: Run) -> None:
    code, out, _ = run(*SMALL, "--json", "--sensitivity")
    found = strict(out)
    assert code == 0 and found["model"] == "llama-3.1-8b" and found["batch"] == 4 and found["price_kind"] == "on_demand"
    assert [row["rank"] for row in found["rows"]] == [1, 2, 3]
    first, unpriced, unfit = found["rows"]
    assert first["gpu"] == "h100_sxm" and first["fits"] and first["meets"] and first["price"]["source"]
    assert first["ttft_s_low"] <= first["ttft_s"] <= first["ttft_s_high"]
    assert first["tpot_s_low"] <= first["tpot_s"] <= first["tpot_s_high"]
    assert first["usd_per_million_tokens"] == pytest.approx(first["usd_per_hour"] / 3600 / first["tokens_per_s"] * 1e6)
    assert first["tokens_per_s_per_gpu"] == pytest.approx(first["tokens_per_s"] / first["gpus"])
    assert sum(first["bound_shares"].values()) == pytest.approx(1) and first["support"] in ("seen", "near")
    assert unpriced["price"] is None and unpriced["usd_per_million_tokens"] is None
    assert not unfit["fits"] and "needs 8.7 GiB a GPU on 2" in unfit["why"]
    assert found["sensitivity"][0]["percent_per_percent"]["DRAM bandwidth"] > 0


def test_reserved_is_another_price_and_unknown_stays_unknown(run: Run) -> None:
    found = strict(run("compare", "llama-3.1-8b", "--gpus", "h100_sxm,gb200", "--batch", "4", "--price-kind",
                       "reserved", "--json")[1])  # fmt: skip
    prices = {row["gpu"]: row["price"] for row in found["rows"]}
    assert prices["gb200"] is None and "reserved" in prices["h100_sxm"]["source"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "which GPUs? give --gpus"),
        (("--gpus", ","), "--gpus is a list with commas"),
        (("--gpus", "h2000"), "unknown gpu 'h2000'"),
        (("--gpus", "h100_sxm", "--what-if", "drm*2"), "unknown GPU field 'drm'"),
        (("--gpus", "h100_sxm", "--what-if", "dram_bytes_per_s+2"), "--what-if takes FIELD=NUMBER or FIELD*FACTOR"),
        (("--gpus", "h100_sxm", "--zero", "3"), "these are of --training: leave out --zero"),
        (("--gpus", "h100_sxm", "--dtype", "bf16,fp8"), "a row each format is asked for by --formats, as in bf16,fp8"),
        (("--gpus", "h100_sxm", "--ttft", "soon"), "--ttft takes a time above 0"),
        (("--gpus", "h100_sxm", "--prices", "/nowhere.toml"), "no file /nowhere.toml"),
        (("--training", "--gpus", "h100_sxm", "--rate", "3"), "--training does not serve: leave out --rate"),
    ],
)
def test_what_is_refused(run: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("compare", "llama-3.3-70b", *arguments)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_a_model_that_fits_nowhere_is_an_answer_of_its_own(run: Run) -> None:
    words = ("compare", "llama-3.3-70b", "--gpus", "a2,t4", "--max-gpus", "1")
    code, out, err = run(*words, "--formats", "fp16")
    assert (code, out) == (3, "") and "fits on no GPU of 2 within --max-gpus 1" in err and err.count("\n") == 1
    code, _, err = run(*instead(words, "--gpus", "t4"), "--formats", "fp8")
    assert code == 2 and "has no fp8 arithmetic" in err  # however much memory it had


@pytest.mark.slow
def test_a_training_is_traced_once(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    picture = tmp_path / "training.png"
    words = ("compare", "--training", "gpt2", "--gpus", "h100_sxm,a100_sxm", "--batch", "2", "--seq", "128",
             "--max-gpus", "1", "--tokens", "1e9")  # fmt: skip
    code, out, err = run(*words, "--plot", picture)
    assert (code, err) == (0, "") and "1e+09 tokens in all" in out and picture.stat().st_size > 5_000
    found = strict(run(*words, "--json")[1])
    first = found["rows"][0]
    assert first["usd"] == pytest.approx(first["hours"] * first["price"]["usd_per_hour"])
    assert first["time_s_low"] <= first["time_s"] <= first["time_s_high"] and first["fits"]


def test_a_narrow_terminal_cuts_no_figure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("compare", "qwen3-30b-a3b", "--gpus", "h100_sxm,rtx_pro_6000_server", "--batch", "4")
    assert "USD/M" in out and "…" not in out and max(len(line) for line in out.splitlines()) <= 80
