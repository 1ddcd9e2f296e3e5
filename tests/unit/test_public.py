"""Published results as questions, and their errors against those of the last release.

``python tests/unit/test_public.py`` writes the forecasts of the sample again (KERNELCAST_DATA names the tables): what
the next change is compared with.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelcast.forecast.end_to_end import EXACT, EndToEnd, Setting
from kernelcast_lab.data.gpustack import served_load, server_parameters
from kernelcast_lab.data.published import PublishedCase
from kernelcast_lab.data.shared import NotExpressibleError, known_model
from kernelcast_lab.evaluate.public import NAMES, ScoredCase, SourceScores, digest, figures, sampled, score
from kernelcast_lab.evaluate.public_report import page, short_table, write_page
from kernelcast_lab.evaluate.public_spreads import fit_spreads, quantity_of, with_spreads

DATA = os.environ.get("KERNELCAST_DATA")
LAST = Path(__file__).parent / "public_forecasts.json"
SAMPLES = {"aiter_gemm": 400, "aiter_moe": 79, "static_batches": 80, "trtllm_offline": 16, "served": 12, "timm": 8,
           "kernelbench": 24, "simumax": 3, "training_llm": 3, "pipeweave": None, "llmservingsim": None,
           "vllm_h200": None, "serving_points": 12}  # fmt: skip
SETTING = Setting("open loop", "vllm", "0.22", "h200_sxm", "data center", "dense", "", "bf16")


def gate_cases(source: str) -> dict[str, ScoredCase]:
    scored = score(DATA, source, SAMPLES[source]).scored
    return {f"{case.id} {case.quantity}": case for case in scored}


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="KERNELCAST_DATA names no folder of measured tables")
@pytest.mark.parametrize("source", SAMPLES)
def test_no_source_is_forecast_worse_than_by_the_last_release(source: str) -> None:
    last, found = json.loads(LAST.read_text())[source], gate_cases(source)
    known = sorted(set(last) & set(found))
    assert len(known) >= 0.9 * len(last), f"{len(last) - len(known)} of {len(last)} rows are not answered any more"
    before = np.array([abs(math.log(last[name] / found[name].measured)) for name in known])
    after = np.array([abs(math.log(found[name].predicted / found[name].measured)) for name in known])
    worse = after - before
    noise = 2 * float(np.std(worse)) / math.sqrt(len(known)) + 0.005
    moved = sorted(zip(worse.tolist(), known, strict=True), reverse=True)[:5]
    rows = "; ".join(f"{name} {found[name].error:+.0f}% ({by:+.2f})" for by, name in moved)
    assert float(np.mean(worse)) <= noise, f"{source}: errors grew by {np.mean(worse):.3f}; most: {rows}"


def case(number: int, measured: float, model: str = "a") -> ScoredCase:
    of = ("made", f"made/{number}", "h200_sxm", model, "vllm", "mean_ttft_ms")
    return ScoredCase(*of, measured, 1.0, 0.95, 1.05, "near", "near", SETTING)


def test_spreads_hold_eight_of_ten_of_the_other_half() -> None:
    drawn = np.random.default_rng(0).normal(0.1, 0.3, 2000)  # on average 10% slower than forecast
    cases = [case(at, math.exp(x), f"m{at}") for at, x in enumerate(drawn.tolist())]
    scores = SourceScores("made", len(cases), tuple(cases), {}, {})
    evidence = fit_spreads(cases)
    (line,) = with_spreads([scores], evidence)[0].lines()
    assert 0.77 < line["coverage"] < 0.83 and 900 < line["held_out"] < 1100
    (_, low), (_, high) = evidence.spread(SETTING, "ttft")
    # the tenths of a normal lie 1.28 standard deviations from its mean; the kernels' own 5% is subtracted in squares
    assert low == pytest.approx(math.sqrt((1.28 * 0.3 - 0.1) ** 2 - 0.05**2), rel=0.1)
    assert high == pytest.approx(math.sqrt((1.28 * 0.3 + 0.1) ** 2 - 0.05**2), rel=0.1)
    assert sum(evidence.runs.values()) == sum(each.development for each in cases)


def test_results_of_one_machine_count_as_few() -> None:
    """Ten of each of 12 models that are all off alike are 12 results: the spread is the largest of them."""
    off = np.random.default_rng(0).normal(0.0, 0.3, 12)
    cases = [case(10 * at + each, math.exp(x), f"m{at}") for at, x in enumerate(off.tolist()) for each in range(10)]
    (_, low), (_, high) = fit_spreads(cases).spread(SETTING, "ttft")
    assert low == pytest.approx(math.sqrt(off.min() ** 2 - math.log(0.95) ** 2), abs=0.01)
    assert high == pytest.approx(math.sqrt(off.max() ** 2 - math.log(1.05) ** 2), abs=0.01)


def test_a_model_on_a_gpu_counts_once_however_many_results_there_are_of_it() -> None:
    """Of 40 models one was run 400 times and is never off; of the others a fifth are 40% slower than forecast."""
    cases = [case(at, 1.0) for at in range(400)]
    cases += [case(400 + at, 1.4 if at % 5 == 0 else 1.0, f"m{at}") for at in range(100)]
    _, (_, high) = fit_spreads(cases).spread(SETTING, "ttft")
    assert high == pytest.approx(math.sqrt(math.log(1.4) ** 2 - math.log(1.05) ** 2), abs=0.01)


def test_a_throughput_that_no_step_decides_sets_no_spread_and_has_none() -> None:
    idle, busy = ([replace(case(at, 1.5, f"m{at}"), quantity="output_throughput", follows=follows)
                   for at in range(60)] for follows in (0.02, 1.0))  # fmt: skip
    assert fit_spreads(idle).spread(SETTING, "throughput") == EXACT
    evidence = fit_spreads(busy)
    wide, tight = (with_spreads([SourceScores("made", 1, (each[0],), {}, {})], evidence)[0].scored[0]
                   for each in (busy, idle))  # fmt: skip
    assert wide.high == pytest.approx(1.5, rel=0.001) and tight.high == pytest.approx(1.05, rel=0.001)


def test_intervals_that_are_too_wide_shrink() -> None:
    drawn = np.random.default_rng(1).normal(0.0, 0.05 / 1.28 / 2, 1000)  # half as wide as the interval of 5%
    evidence = fit_spreads(case(at, math.exp(x), f"m{at}") for at, x in enumerate(drawn.tolist()))
    for share, added in evidence.spread(SETTING, "ttft"):
        assert share == pytest.approx(0.5, rel=0.15) and added < 0.002


def test_few_results_set_no_spread() -> None:
    assert fit_spreads([case(at, 2.0) for at in range(12)]).spreads == ()


def test_a_sample_is_the_same_whatever_else_is_in_the_table() -> None:
    cases = [PublishedCase("made", f"made/{at}", "h200_sxm", "a", "vllm", "infer") for at in range(50)]
    first = sampled(cases, 5)
    assert sampled(cases[::-1], 5) == first and {each.id for each in first} <= {each.id for each in sampled(cases, 9)}
    assert digest("made/1") == digest("made/1") != digest("made/2")


def test_flags_of_a_server_become_parameters() -> None:
    name, parameters = server_parameters(
        "vllm serve Qwen/Qwen3-32B-FP8 --tensor-parallel-size 2 --max-num-seqs=512 --kv-cache-dtype fp8_e4m3"
        " --enable-expert-parallel --reasoning-parser qwen3"
    )
    assert name == "Qwen/Qwen3-32B-FP8"
    assert parameters == {"tp": 2, "max_num_seqs": 512, "kv_dtype": "fp8", "enable_expert_parallel": True}
    name, parameters = server_parameters(
        "python3 -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp 8 --enable-dp-attention --dp 8"
    )
    assert (name, parameters) == ("deepseek-ai/DeepSeek-V3", {"tp": 8, "dp_size": 8, "enable_dp_attention": True})
    _, parameters = server_parameters(
        "python3 -m sglang.launch_server --model-path zai-org/GLM-5 --tp-size=8 --moe-a2a-backend=deepep"
    )
    assert parameters == {"tp": 8, "ep": 8, "exchange": "deepep"}  # the experts are on all GPUs then
    _, parameters = server_parameters("trtllm-serve Qwen/Qwen3-32B --max_seq_len=40960 --enable_chunked_prefill")
    assert parameters == {"enable_chunked_prefill": True}
    for text, feature in (("--speculative-algorithm EAGLE", "speculative"), ("--no-such-flag 1", "no-such-flag")):
        with pytest.raises(NotExpressibleError, match=feature):
            server_parameters(f"vllm serve Qwen/Qwen3-8B {text}")
    assert known_model("meta-llama/Meta-Llama-3-8B") == ("llama-3-8b", None)
    assert known_model("Qwen/Qwen3-8B-FP8") == ("qwen3-8b", "fp8_block")


PAGE_ROW = {
    "serve_cmd": "vllm serve Qwen/Qwen3.5-9B --performance-mode=throughput", "engine_text": None, "requests": 100,
    "hardware_text": "NVIDIA H100 80GB HBM3", "mean_isl": 342.0, "mean_osl": 281.0, "num_prompts": None,
    "max_concurrency": 31, "output_tok_s": 2100.0, "mean_ttft_ms": 40.0, "mean_tpot_ms": 1.3, "mean_itl_ms": 9.0,
    "request_rate": None, "duration_s": 12.5,
}  # fmt: skip


def page_row(page: str, heading: str, label: str, median_itl_ms: float) -> dict[str, Any]:
    made = {"file": f"docs/performance-lab/{page}.md", "section": f"Results > {heading}", "label": label}
    return {**PAGE_ROW, **made, "median_itl_ms": median_itl_ms}


def test_a_section_of_a_page_has_its_own_command_release_and_rate() -> None:
    asked = served_load(page_row("qwen3.5-9b/h100-latency", "16k", "- Backend Parameters:", 9.0))  # type: ignore[arg-type]
    assert asked["stack"] == "vllm==0.17" and asked["parameters"]["max_num_batched_tokens"] == 16384
    assert asked["parameters"]["request_rate"] == 8.0 and asked["parameters"]["arrivals"] == "constant"
    # guidellm's time between tokens is what others call TPOT, and nothing where the client did not count them
    # nor are its tokens a second: 100 requests of 281 tokens in 12.5 s are compared
    assert asked["measured"] == {"output_throughput": 2248.0, "mean_ttft_ms": 40.0, "mean_tpot_ms": 9.0}
    for heading, label, median_ms, reason in (
        ("Rate 1", "- Optimized Backend Parameters:", 0.0, "speculative"),
        ("no such section", "- Backend Parameters:", 9.0, "no command line"),
    ):
        with pytest.raises(NotExpressibleError, match=reason):
            served_load(page_row("qwen3.5-9b/h100-latency", heading, label, median_ms))  # type: ignore[arg-type]
    asked = served_load(page_row("qwen3.5-9b/h100-latency", "Rate 1", "- Baseline Backend Parameters:", 0.0))  # type: ignore[arg-type]
    assert (
        set(asked["measured"]) == {"output_throughput", "mean_ttft_ms"} and asked["parameters"]["request_rate"] == 1.0
    )
    with pytest.raises(NotExpressibleError, match="keeps the server waiting"):
        served_load(page_row("qwen3.5-9b/h100", "vLLM", "- Backend Parameters:", 0.0))  # type: ignore[arg-type]


def test_the_page_shows_every_table() -> None:
    cases = [case(at, 1.0 + at / 50) for at in range(40)]
    scores = [SourceScores("served", 90, tuple(cases), {"a feature": 50}, {"an error": 2})]
    evidence = replace(EndToEnd({}, ()), errors=figures(scores), about={"made": "2026-01-01", "command": "evaluate"})
    text = page(evidence)
    assert "| served benchmarks of others" in text and "missing: a feature" in text and "refused: an error" in text
    assert "50 of 90" in text and "| h200_sxm | served | mean ttft | 40 |" in text
    assert quantity_of(cases[0]) == "ttft" and set(SAMPLES) <= set(NAMES)


def test_the_readme_has_the_figures_of_the_installed_package(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert short_table(EndToEnd.read()) in readme
    path = tmp_path / "README.md"
    path.write_text(readme.replace("%", "x"))
    assert short_table(EndToEnd.read()) in write_page(EndToEnd.read(), path).read_text()


if __name__ == "__main__":
    lines = {name: {key: round(each.predicted, 9) for key, each in gate_cases(name).items()} for name in SAMPLES}
    LAST.write_text(json.dumps(lines, indent=0) + "\n")
