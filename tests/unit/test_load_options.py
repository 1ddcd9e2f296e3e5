"""Options of a load: what they make, and which do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kernelcast.app.cli.commands import add_command
from kernelcast.app.questions.load import LoadParameters, build_load, parse_stages
from kernelcast.app.questions.parameters import argument
from kernelcast.app.questions.shared import Json
from kernelcast.errors import KernelcastError, KernelcastWarning
from kernelcast.serving.load import arrivals, vllm_draws

Model = Annotated[str, argument("MODEL", "a name")]


def of(**words: Any) -> Any:
    return build_load(LoadParameters(**words))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,1\n4,20,2\n2,0,3\n6,30,3\n")
    return path


def test_a_rate_and_lengths() -> None:
    load = of(request_rate=4.0, num_prompts=50, input_len=100, output_len=10, max_concurrency=8, seed=3)
    assert np.array_equal(load.arrivals_s, arrivals(50, 4.0, vllm_draws(3)))
    assert set(load.inputs) == {100} and set(load.outputs) == {10} and load.max_concurrency == 8
    again = of(request_rate=4.0, num_prompts=50, input_len=100, output_len=10, max_concurrency=8, seed=3)
    assert np.array_equal(load.arrivals_s, again.arrivals_s)


def test_what_is_usual_is_vllms() -> None:
    load = of(request_rate=4.0)
    assert (len(load), load.inputs[0], load.outputs[0], load.max_concurrency) == (1000, 1024, 128, 0)
    at_once = of(num_prompts=5, max_concurrency=2)
    assert at_once.arrivals_s.tolist() == [0] * 5


def test_arrivals_of_all_kinds() -> None:
    assert of(request_rate=2.0, num_prompts=3, arrivals="constant").arrivals_s.tolist() == [0, 0.5, 1]
    gamma = of(request_rate=2.0, num_prompts=5000, burstiness=0.25)
    assert np.diff(gamma.arrivals_s).std() > 0.8  # twice the mean gap
    bursts = of(request_rate=2.0, num_prompts=500, arrivals="bursty", burst_s=1.0, pause_s=9.0)
    assert np.all(bursts.arrivals_s % 10 <= 1 + 1e-9)
    rising = of(num_prompts=1000, ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=20.0)
    assert np.diff(rising.arrivals_s)[:100].mean() > 4 * np.diff(rising.arrivals_s)[-100:].mean()
    stages = of(stages="2x10,4x5", arrivals="constant")
    assert len(stages) == 40 and np.bincount(stages.stages).tolist() == [20, 20]


def test_lengths_and_prefixes() -> None:
    even = of(request_rate=1.0, random_range_ratio=0.5, input_len=100)
    assert even.inputs.min() >= 50 and even.inputs.max() <= 150 and even.inputs.std() > 10
    normal = of(request_rate=1.0, lengths="normal", input_len=500, input_len_std=50.0)
    assert normal.inputs.std() == pytest.approx(50, rel=0.15) and set(normal.outputs) == {128}
    assert of(request_rate=1.0, input_len=10, random_prefix_len=5).shared[0] == ((0, 5),)
    repeated = of(request_rate=1.0, num_prompts=20, num_prefixes=4, prefix_len=64, suffix_len=16)
    assert set(repeated.inputs) == {80} and {pieces[0][1] for pieces in repeated.shared} == {64}
    words: dict[str, Any] = {"num_groups": 2, "prompts_per_group": 2, "system_prompt_len": 50, "question_len": 5}
    chat = of(request_rate=1.0, num_prompts=8, output_len=3, multi_turn=True, **words)
    assert chat.inputs.tolist() == [55] * 4 + [63] * 4
    staged = of(stages="1x5,1x6", num_prefixes=5)
    assert len(staged) == 10 and len(staged.stages) == 10


def test_a_trace_may_be_cut_and_scaled(trace: Path) -> None:
    with pytest.warns(KernelcastWarning, match="1 row left out"):
        load = of(trace=trace, skip_bad=True, rate_scale=2.0, limit=2, max_concurrency=4)
    assert load.arrivals_s.tolist() == [0, 2] and load.inputs.tolist() == [10, 20] and load.max_concurrency == 4


def test_a_trace_without_times_takes_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("input_tokens,output_tokens\n10,1\n20,2\n")
    load = of(trace=path, request_rate=1.0, arrivals="constant", num_prompts=3)
    assert load.arrivals_s.tolist() == [0, 1, 2] and load.inputs.tolist() == [10, 20, 10]
    assert len(of(trace=path, request_rate=1.0)) == 2
    with pytest.raises(KernelcastError, match="has no arrival_s: give `request_rate`"):
        of(trace=path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "which load\\? give `trace`, or `request_rate`"),
        ({"request_rate": 1.0, "limit": 5}, "there is no `trace`: leave out `limit`"),
        ({"request_rate": 1.0, "rate_scale": 2.0, "skip_bad": True}, "leave out `skip_bad`, `rate_scale`"),
        ({"request_rate": 0.0}, "above 0 requests/s"),
        ({"request_rate": 1.0, "num_prompts": 0}, "`num_prompts` must be 1 or more, not 0"),
        ({"request_rate": 1.0, "max_concurrency": 0}, "`max_concurrency` must be 1 or more, not 0"),
        ({"request_rate": 1.0, "seed": -1}, "`seed` must be a whole number"),
        ({"request_rate": 1.0, "input_len": 0}, "from 1 on, not 0"),
        ({"request_rate": 1.0, "arrivals": "constant", "burstiness": 2.0}, "`burstiness` is of gamma arrivals"),
        ({"request_rate": 1.0, "arrivals": "odd"}, "unknown arrival process 'odd'"),
        ({"request_rate": 1.0, "pause_s": 0.0}, "`arrivals` bursty takes them: leave out `pause_s`"),
        ({"stages": "1x5", "request_rate": 1.0}, "`stages` gives the rates: leave out `request_rate`"),
        ({"stages": "1x5", "num_prompts": 5}, "`stages` gives the number of requests: leave out `num_prompts`"),
        ({"stages": "5/600"}, "RATExSECONDS, as in 5x600,10x600, not '5/600'"),
        ({"ramp_up_strategy": "linear"}, "a ramp needs `ramp_up_strategy`, `ramp_up_start_rps` and"),
        ({"ramp_up_start_rps": 1.0, "request_rate": 1.0}, "leave out `request_rate`"),
        ({"request_rate": 1.0, "random_range_ratio": 0.5, "lengths": "normal"}, "leave out `random_range_ratio`"),
        ({"request_rate": 1.0, "input_len_std": 5.0, "lengths": "fixed"}, "leave out `input_len_std`"),
        ({"request_rate": 1.0, "lengths": "long"}, "unknown distribution of lengths 'long'"),
        ({"request_rate": 1.0, "num_prefixes": 2, "input_len": 5}, "leave out `input_len`"),
        ({"request_rate": 1.0, "num_groups": 2, "random_prefix_len": 5}, "leave out `random_prefix_len`"),
    ],
)
def test_what_does_not_go_together_is_one_line(words: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelcastError, match=said):
        of(**words)


def test_a_trace_says_sizes_and_times_itself(trace: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_len": 5, "num_groups": 2}, "every request with its sizes: leave out `input_len`, `num_groups`"),
        ({"num_prompts": 5, "skip_bad": True}, "leave out `num_prompts`"),
        ({"request_rate": 5.0, "skip_bad": True}, "leave out `request_rate`"),
        ({"rate_scale": 0.0, "skip_bad": True}, "scaled by a number above 0, not 0"),
        ({"limit": 0}, "`limit` must be 1 or more"),
        ({}, "line 4: input_tokens must be"),
        ({"trace_format": "excel"}, "unknown layout of a trace 'excel'"),
    ]
    for words, said in cases:
        with pytest.raises(KernelcastError, match=said):
            of(trace=trace, **words)


def test_what_is_too_long_for_the_model_is_refused_or_skipped(trace: Path) -> None:
    choice = LoadParameters(request_rate=1.0, input_len=90, output_len=20)
    with pytest.raises(KernelcastError, match="have 110 tokens together, and the model takes 100"):
        build_load(choice, max_context=100)
    assert len(build_load(LoadParameters(trace=trace, skip_bad=True), max_context=25)) == 2


def test_stages_are_parsed() -> None:
    assert parse_stages("5x600, 10X30.5") == [(5, 600), (10, 30.5)]


def test_a_command_takes_all_of_them() -> None:
    app = typer.Typer()
    seen: list[Any] = []

    def simulate(model: Model, load: LoadParameters, json: Json = False) -> None:
        """A command."""
        seen.append((model, load, json))

    add_command(app, simulate)
    runner = CliRunner()
    result = runner.invoke(app, ["m", "--request-rate", "4", "--gsp-num-groups", "3", "--skip-bad", "--json"])
    assert result.exit_code == 0, result.output
    assert seen == [("m", LoadParameters(request_rate=4.0, num_groups=3, skip_bad=True), True)]
    assert "--ramp-up-strategy" in runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output
