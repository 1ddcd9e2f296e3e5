"""End-to-end evidence: levels of support of a whole run, and spreads beyond the kernels' intervals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kernelcast as kc
from kernelcast.forecast.end_to_end import (
    EXACT,
    TITLES,
    EndToEnd,
    FittedSpread,
    Setting,
    end_to_end,
    gpu_class,
    metric_quantity,
    widened,
    worse,
)
from kernelcast.inference.deployment import Deployment, Layout
from kernelcast.inference.infer import infer
from kernelcast.inference.workload import Workload
from kernelcast.models import model
from kernelcast.stacks import stack, stack_ids
from kernelcast.stacks.training_stack import training_stack_ids

RUN = Setting("open loop", "vllm", "0.22", "h200_sxm", "data center", "dense", "tp2", "bf16")
EVIDENCE = EndToEnd(
    {RUN: 5},
    (
        FittedSpread("open loop", "ttft", "vllm", "data center", "seen", 1.0, 0.1, 0.5, 0.2, 12),
        FittedSpread("open loop", "ttft", None, None, None, 1.0, 0.3, 1.0, 0.4, 40),
    ),
)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "seen"),
        ({"parallelism": "tp8"}, "seen"),  # the same kind of parallelism
        ({"dtype": "fp8", "workload": "offline"}, "seen"),  # aspects of the recipe, not of the run
        ({"release": "v0.22.1"}, "seen"),  # a patch of it
        ({"stack": "vllm==0.5", "release": "0.5"}, "near"),  # another release of the same engine
        ({"gpu": "h100_sxm"}, "near"),
        ({"model_class": "experts"}, "near"),
        ({"parallelism": "tp2 pp2"}, "near"),
        ({"gpu": "h100_sxm", "model_class": "experts"}, "extrapolated"),
        ({"gpu": "rtx_4090", "gpu_class": "graphics"}, "extrapolated"),  # GPU and its class
        ({"stack": "sglang"}, "extrapolated"),
    ],
)
def test_the_level_of_a_run_counts_what_differs_from_the_nearest_measured_one(
    changes: dict[str, str], level: str
) -> None:
    assert EVIDENCE.level(replace(RUN, **changes)) == level


def test_each_aspect_has_a_level_of_its_own() -> None:
    other = replace(RUN, gpu="h100_sxm", parallelism="tp4", model_class="experts", release="0.11")
    assert EVIDENCE.aspects(other) == {
        "engine": "near", "host": "near", "parallelism": "near", "recipe": "extrapolated",
    }  # fmt: skip
    assert set(EVIDENCE.aspects(RUN).values()) == {"seen"}


def test_the_most_specific_spread_holds() -> None:
    assert EVIDENCE.spread(RUN, "ttft") == ((1.0, 0.1), (0.5, 0.2))
    assert EVIDENCE.spread(replace(RUN, gpu="h100_sxm"), "ttft") == (
        (1.0, 0.3),
        (1.0, 0.4),
    )  # near: no group of its own
    assert EVIDENCE.spread(RUN, "tpot") == EXACT == EVIDENCE.spread(RUN, "throughput")
    assert EndToEnd({}, ()).spread(RUN, "ttft") == EXACT


def test_a_throughput_of_which_little_was_measured_is_off_as_a_token_is_the_other_way() -> None:
    tokens = FittedSpread("open loop", "tpot", None, None, None, 1.0, 0.1, 0.5, 0.2, 12)
    assert EndToEnd({RUN: 5}, (tokens,)).spread(RUN, "throughput") == ((0.5, 0.2), (1.0, 0.1))
    several = FittedSpread("open loop", "throughput", None, None, None, 1.0, 0.3, 1.0, 0.3, 12)
    assert EndToEnd({RUN: 5}, (tokens, several)).spread(RUN, "throughput") == ((1.0, 0.3), (1.0, 0.3))


def test_a_spread_is_an_independent_error_of_the_logarithm() -> None:
    time = np.array([[2.0, 0.0], [2.0 * math.exp(-0.3), 0.0], [2.0 * math.exp(0.3), 0.0]])
    wide = widened(time, ((1.0, 0.4), (0.5, 0.0)))  # 3, 4, 5 below; half above
    assert wide[:, 0] == pytest.approx([2.0, 2.0 * math.exp(-0.5), 2.0 * math.exp(0.15)])
    assert wide[:, 1].tolist() == [0.0, 0.0, 0.0]
    assert widened(time, EXACT) is time
    # of a throughput that a tenth of a step's error shows in: 0.04 beside 0.3
    part = widened(time, ((1.0, 0.4), (1.0, 0.0)), 0.1)
    assert part[1, 0] == pytest.approx(2.0 * math.exp(-math.hypot(0.3, 0.04)))


def test_written_evidence_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "end_to_end.json"
    whole = replace(EVIDENCE, errors={"sources": [{"source": "a", "mean": 1.5}]}, about={"made": "today"})
    whole.write(path)
    assert EndToEnd.read(path) == whole
    assert EndToEnd.read(tmp_path / "none.json") == EndToEnd({}, ())


def test_errors_are_listed_by_source_and_by_what_they_are_kept_by() -> None:
    lines = [
        {"source": source, "of": of, "support": level}
        for source, of, level in (
            ("timm", "time_s", "extrapolated"),
            ("nobody's", "mean_ttft_ms", "seen"),
            ("served", "TPOT", "near"),
        )
    ]
    whole = replace(EVIDENCE, errors={"sources": lines, "by_support": lines})
    assert [line["title"] for line in whole.error_lines()] == [TITLES["timm"], "nobody's", TITLES["served"]]
    assert [line["quantity"] for line in whole.error_lines()] == ["time", "mean ttft", "TPOT"]
    assert [line["support"] for line in whole.error_lines("support")] == ["seen", "near", "extrapolated"]
    assert whole.error_lines("gpu") == []


def test_metrics_belong_to_quantities() -> None:
    names = ("mean_ttft_ms", "p99_itl_ms", "mean_tpot_ms", "p90_e2el_ms", "output_throughput", "completed")
    assert [metric_quantity(name) for name in names] == ["ttft", "tpot", "tpot", "time", "throughput", None]
    assert worse("seen", "near", "seen") == "near"
    classes = [gpu_class(kc.gpu(name)) for name in ("h100_sxm", "l40s", "rtx_4090", "mi300x")]
    assert classes[:3] == ["data center", "graphics", "graphics"] and classes[3] not in classes[:3]


def test_what_ships_has_runs_and_every_spread_is_of_ten_results_or_more() -> None:
    shipped = end_to_end()
    assert len(shipped.runs) > 50 and sum(shipped.runs.values()) > 500
    engines = {run.engine for run in shipped.runs}
    assert engines <= {name.partition("==")[0] for name in stack_ids()} | set(training_stack_ids())
    for spread in shipped.spreads:
        assert spread.cases >= 10
        assert all(0.3 <= share <= 1 and 0 <= added < 5 for share, added in spread.spread)


def test_a_measured_server_has_no_spread_of_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = EndToEnd({}, (FittedSpread("static batch", "time", None, None, None, 1.0, 0.5, 1.0, 0.5, 40),))
    monkeypatch.setattr(EndToEnd, "read", lambda: wide)
    end_to_end.cache_clear()
    try:
        load = Workload.equal(4, 512, 32)
        place = Deployment(model("llama-3.1-8b"), kc.gpu("h200_sxm"), stack("vllm"), layout=Layout(tp=2))
        unknown, measured = infer(place, load), infer(replace(place, stack=replace(place.stack, spread=0.05)), load)
        assert unknown.total.value == measured.total.value
        assert (
            math.log(unknown.total.high / unknown.total.value)
            > 0.5
            > math.log(measured.total.high / measured.total.value)
        )
        assert unknown.support == "extrapolated"  # nothing was measured end to end
        assert unknown.supports.to_dict()["engine"] == "extrapolated"
    finally:
        end_to_end.cache_clear()


def test_an_older_release_is_a_file_beside_the_newest() -> None:
    old, new = stack("vllm==0.5"), stack("vllm")
    assert (old.engine, old.release, old.kernels) == ("vllm", "0.5", new.kernels)
    assert stack(f"vllm=={new.release}") == new
    by_older = replace(stack("vllm==0.8"), release="0.11", name="vLLM 0.11 (as 0.8)")
    assert stack("vllm==0.11") == by_older  # by the newest file that is not newer
    assert stack("vllm==0.8.5.post1") == replace(stack("vllm==0.8"), release="0.8.5.post1")
    assert stack("vllm==99").name == f"vLLM 99 (as {new.release})"
    assert stack("trtllm==1.1.0rc3").release == "1.1.0rc3"
    with pytest.raises(kc.KernelcastError, match=r"release of vLLM '0\.4'.*known: .*0\.5"):
        stack("vllm==0.4")
    load = Workload.equal(32, 256, 65)
    place = Deployment(model("llama-3.1-8b"), kc.gpu("h100_sxm"), stack("vllm==0.14"))
    slower = infer(replace(place, stack=old), load).decode.value - infer(place, load).decode.value
    each = old.step_s - place.stack.step_s + 32 * (old.sequence_s - place.stack.sequence_s)  # of a step, on the host
    assert slower == pytest.approx(64 * each, rel=0.02)
