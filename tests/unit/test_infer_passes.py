"""Passes of one static batch by hand: how prompts are cut, who decodes when, and what speculation changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from deployments import deployed, quiet

from kernelcast.errors import KernelcastError
from kernelcast.forecast.predict_table import Times
from kernelcast.inference.batch import Batch
from kernelcast.inference.forward import forward
from kernelcast.inference.infer import infer
from kernelcast.inference.memory import cache_bytes, weight_bytes
from kernelcast.inference.workload import Speculation, Workload, step_weights, workload_passes

# ---- prefill ----


def test_a_prefill_is_one_pass_unless_it_is_cut() -> None:
    assert Workload((5, 3), (1, 1)).prefills() == [Batch((5, 3), (0, 0))]
    assert Workload((5, 3), (1, 1), chunk=8).prefills() == [Batch((5, 3), (0, 0))]
    assert Workload((5, 3), (1, 1), cached=(2, 0)).prefills() == [Batch((3, 3), (2, 0))]


def test_chunks_take_the_prompts_in_turn() -> None:
    # 5 + 3 in fours: 4 of the first; its last with 3 of the second
    assert Workload((5, 3), (1, 1), chunk=4).prefills() == [Batch((4,), (0,)), Batch((1, 3), (4, 0))]
    # (10 - 2) + 3 + (6 - 1) = 16 new tokens in fives: 5 after 2; 3 after 7 and 2 after 0; 1 after 2 and 4 after 1;
    # and the last one after 5
    uneven = Workload((10, 3, 6), (1, 1, 1), cached=(2, 0, 1), chunk=5).prefills()
    assert uneven == [Batch((5,), (2,)), Batch((3, 2), (7, 0)), Batch((1, 4), (2, 1)), Batch((1,), (5,))]
    # a chunk of one token: each with all before it
    single = Workload((2, 1), (1, 1), chunk=1).prefills()
    assert single == [Batch((1,), (0,)), Batch((1,), (1,)), Batch((1,), (0,))]


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 101, 999, 1000])
def test_chunks_cover_every_token_once(chunk: int) -> None:
    workload = Workload((100, 650, 250), (1, 1, 1), cached=(10, 0, 249), chunk=chunk)
    passes = workload.prefills()
    assert [batch.tokens for batch in passes[:-1]] == (len(passes) - 1) * [min(chunk, 90 + 650 + 1)]
    seen = [place for b in passes for n, past in zip(b.new, b.past, strict=True) for place in range(past, past + n)]
    assert seen == [*range(10, 100), *range(650), 249]


def test_a_chunked_prefill_is_the_sum_of_its_passes() -> None:
    place = deployed(engine=quiet())
    whole = infer(place, Workload.equal(1, 300, 1, chunk=200)).prefill.value
    # the second chunk is a prompt of 300 whose first 200 tokens are cached
    parts = [infer(place, Workload.equal(1, n, 1, cached=c)).prefill.value for n, c in ((200, 0), (300, 200))]
    assert whole == pytest.approx(sum(parts), rel=1e-12)


# ---- decode ----


def test_requests_leave_when_they_have_their_tokens() -> None:
    # the first token comes from the prefill: outputs 3, 1, 5 take 2, 0 and 4 steps
    steps = Workload((10, 20, 30), (3, 1, 5)).decodes()
    assert steps == [
        (1, Batch((1, 1), (10, 30))), (2, Batch((1, 1), (11, 31))), (3, Batch((1,), (32,))), (4, Batch((1,), (33,))),
    ]  # fmt: skip


def test_one_output_token_needs_no_decode() -> None:
    found = infer(deployed(), Workload.equal(2, 100, 1))
    assert Workload.equal(2, 100, 1).decodes() == []
    assert (found.steps, found.decode.value, found.tpot.value) == (0, 0.0, 0.0)
    assert found.total == found.prefill


def test_few_steps_are_predicted_one_by_one() -> None:
    # outputs 3 and 5: steps 1 and 2 with both, 3 and 4 with one; each as if it were the only one
    place = deployed(engine=quiet())
    found = infer(place, Workload((100, 100), (3, 5)))
    known = Times(place.gpu)
    total = 0.0
    for past in ((100, 100), (101, 101), (102,), (103,)):
        calls = forward(place, Batch(len(past) * (1,), past))
        known.predict(launch.call for launch in calls)
        total += sum(known[launch.call].interval.value * launch.count for launch in calls)
    assert found.decode.value == pytest.approx(total, rel=1e-12)


def test_predicted_steps_stand_for_all_of_a_line() -> None:
    # 299 steps, the first 99 with two requests: every weight on its own stretch, and exact for t = 1 and t = step
    workload = Workload((10, 10), (100, 300))
    steps = np.array([step for step, _ in workload.decodes()])
    weights = step_weights(tuple(steps.tolist()))
    assert workload_passes(workload).counts.tolist() == [1.0, *weights]
    assert len(steps) < 30
    for first, last in ((1, 99), (100, 299)):
        inside = (steps >= first) & (steps <= last)
        assert steps[inside][[0, -1]].tolist() == [first, last]
        assert weights[inside].sum() == pytest.approx(last - first + 1)
        assert weights[inside] @ steps[inside] == pytest.approx((first + last) * (last - first + 1) / 2)


def test_steps_between_lie_near_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload((500, 2000), (200, 400))
    sampled = infer(deployed(), workload).decode.value
    monkeypatch.setattr("kernelcast.inference.workload._SAMPLED_STEPS", 1000)
    assert sampled == pytest.approx(infer(deployed(), workload).decode.value, rel=0.01)


# ---- speculation ----


@pytest.mark.parametrize(
    ("draft_tokens", "acceptance", "expected"),
    [(2, 0.5, 1.75), (4, 0.8, 3.3616), (3, 1.0, 4.0), (3, 0.0, 1.0)],  # 1 + 0.5 + 0.25; (1 - 0.8^5) / 0.2
)
def test_tokens_a_speculative_step_gives(draft_tokens: int, acceptance: float, expected: float) -> None:
    assert Speculation(draft_tokens, acceptance).tokens_per_step == pytest.approx(expected)


def test_speculation_takes_fewer_and_wider_steps() -> None:
    # 128 tokens after the first at 1.75 a step: 74 steps, each with the 2 guesses and one token of its own
    workload = Workload.equal(1, 1000, 129, speculation=Speculation(2, 0.5))
    steps = workload.decodes()
    assert steps[0] == (1, Batch((3,), (1000,), head_rows=3))  # all three are checked
    assert steps[-1] == (74, Batch((3,), (1000 + int(73 * 1.75),), head_rows=3))
    found, plain = infer(deployed(), workload), infer(deployed(), Workload.equal(1, 1000, 129))
    assert (found.steps, plain.steps) == (74, 128)
    assert found.decode.value < plain.decode.value
    assert found.tpot.value == pytest.approx(found.decode.value / 128)
    assert found.step.value == pytest.approx(found.decode.value / 74)
    # wider, but its products of three rows may be the faster ones: GEMVs are slow in the tables too
    assert found.step.value > 0.98 * plain.step.value


def test_a_draft_model_runs_once_a_guess() -> None:
    free = Workload.equal(1, 1000, 129, speculation=Speculation(2, 0.5))
    draft = deployed("llama-3.2-1b", engine=quiet())
    paid = replace(free, speculation=Speculation(2, 0.5, draft))
    place = deployed(engine=quiet())
    without, found = infer(place, free), infer(place, paid)
    share, first = (next(s for s in found.shares if (s.phase, s.part) == (phase, "draft model"))
                    for phase in ("decode", "prefill"))  # fmt: skip
    assert found.prefill.value - without.prefill.value == pytest.approx(first.time_s)  # it reads the prompt too
    beside = weight_bytes(draft) + cache_bytes(draft, 1129)
    assert found.memory.used_bytes - without.memory.used_bytes == pytest.approx(beside)
    assert found.decode.value - without.decode.value == pytest.approx(share.time_s)
    # 74 steps x 2 guesses of a pass of the small model
    launched = sum(call.count for call in forward(draft, Batch((1,), (1000,))))
    assert share.kernels == pytest.approx(74 * 2 * launched)


@pytest.mark.parametrize(("tokens", "acceptance"), [(0, 0.5), (2, -0.1), (2, 1.1)])
def test_speculation_that_cannot_be_is_refused(tokens: int, acceptance: float) -> None:
    with pytest.raises(KernelcastError):
        Speculation(tokens, acceptance)
