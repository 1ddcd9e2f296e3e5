"""Many batches as columns: as one by one, and as passes added up kernel by kernel."""

from __future__ import annotations

import math
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deployments import deployed, quiet

from kernelcast.energy.power import WINDOW_S, held_s, throttled_s, with_cap
from kernelcast.errors import KernelcastError
from kernelcast.forecast.calls import Launch
from kernelcast.forecast.end_to_end import widened, worse
from kernelcast.forecast.predict_table import Times
from kernelcast.hardware import gpu
from kernelcast.inference.batch import Batch, BatchColumns
from kernelcast.inference.forward import Deployment, forward, forward_many
from kernelcast.inference.infer import Inference, infer, infer_columns, infer_many
from kernelcast.inference.pass_times import HOST_RANGE, OVERLAPS, PASS_SPREAD, visible_share
from kernelcast.inference.workload import Speculation, Workload, step_weights, workload_passes
from kernelcast.models import model
from kernelcast.results import NOTHING, Interval, support_of
from kernelcast.schedule import KernelTime, joined, shares
from kernelcast.stacks import stack, stack_ids

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt2-xl",
          "gemma-2-9b", "qwen3-next-80b-a3b", "bert-base")  # fmt: skip
GPUS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40")
DTYPES = (None, None, "bf16", "fp16", "fp8", "fp8_block", "int4")


def settings(count: int, seed: int) -> list[tuple[Deployment, Workload]]:
    """Random ones of all kinds; what cannot be deployed is drawn again."""
    draw, found = random.Random(seed), list[tuple[Deployment, Workload]]()
    while len(found) < count:
        cuts = {"tp": (1, 2, 4, 8), "pp": (1, 1, 2), "dp": (1, 1, 2), "ep": (1, 2), "micro_batches": (1, 1, 3)}
        layout = {name: draw.choice(parts) for name, parts in cuts.items()}
        try:
            name, on = draw.choice(MODELS), draw.choice(GPUS)
            engine = replace(stack(draw.choice(stack_ids())), reaches=())  # limits that have tests of their own
            place = deployed(name, on=on, engine=engine,
                             dtype=draw.choice(DTYPES), cache=draw.choice((None, None, "fp8")), **layout)  # fmt: skip
        except KernelcastError:
            continue
        for _ in range(3):
            found.append((place, workload(draw, place)))
    return found


def workload(draw: random.Random, place: Deployment) -> Workload:
    batch = draw.choice((1, 2, 3, 8, 16))
    encodes = place.model.kind == "encoder"
    outputs = (1,) if encodes else (1, 2, 7, 64, 200)
    chunk = draw.choice((None, None, 0, 500))
    guesses = None
    if not encodes and draw.random() < 0.2:
        draft = Deployment(model("llama-3.2-1b"), place.gpu, place.stack) if draw.random() < 0.7 else None
        guesses = Speculation(draw.choice((2, 4)), 0.7, draft)
    if draw.random() < 0.6:
        tokens = draw.choice((1, 50, 128, 400, 1000))
        return Workload.equal(batch, tokens, draw.choice(outputs), draw.choice((0, 0, tokens // 2)), chunk, guesses)
    inputs = tuple(draw.randint(1, 500) for _ in range(batch))
    cached = tuple(draw.choice((0, n // 2)) for n in inputs) if draw.random() < 0.5 else ()
    return Workload(inputs, tuple(draw.choice(outputs) for _ in inputs), cached, chunk, guesses)


def added_up(place: Deployment, workload: Workload, times: Times) -> tuple[dict[str, Interval], list[KernelTime]]:
    """Prefill and decode, kernel by kernel and pass by pass."""
    asked = workload.on(place)
    decodes = asked.decodes()
    weights = step_weights(tuple(step for step, _ in decodes)).tolist()
    phases = [
        ("prefill", place, [(1.0, batch) for batch in asked.prefills()]),
        ("decode", place, list(zip(weights, (batch for _, batch in decodes), strict=True))),
    ]
    if asked.speculation and asked.speculation.draft and decodes:
        draft, (_, middle) = asked.speculation.draft, decodes[len(decodes) // 2]
        guesses = decodes[-1][0] * asked.speculation.draft_tokens
        phases.append(("prefill", draft, [(1.0, batch) for batch in asked.prefills()]))
        phases.append(("decode", draft, [(float(guesses), Batch(len(middle.new) * (1,), middle.past))]))
    spans, ran = {"prefill": NOTHING, "decode": NOTHING}, list[KernelTime]()
    for phase, of, passes in phases:
        for span, kernels in laid(phase, of, passes, times, draft=of is not place):
            spans[phase] += span
            ran += kernels
    return spans, ran


def _between(op: str) -> str:
    """What is launched of an op between the pieces of a graph, which has the projections of a whole layer."""
    return "attention" if op.endswith("_layer") else op


def visible(launches: list[Launch], times: list[tuple[float, float]], tokens: int) -> list[float]:
    """Of each launch, given what one takes and keeps DRAM busy: the share of its time that nothing hides."""
    left = {"": 1.0}
    for overlap in OVERLAPS:
        hiding = beside = dram = 0.0
        for launch, (time_s, dram_s) in zip(launches, times, strict=True):
            if launch.overlaps == overlap:
                beside, dram = beside + launch.count * time_s, dram + launch.count * dram_s
            elif not launch.overlaps and (overlap == "all" or launch.op == "moe"):
                hiding += launch.count * time_s
        left[overlap] = float(visible_share(overlap, hiding, beside, dram, tokens))
    return [left[launch.overlaps] for launch in launches]


def laid(phase: str, place: Deployment, passes: list[tuple[float, Batch]], times: Times, draft: bool) -> Any:
    layout, engine, found = place.layout, place.stack, []
    for count, batch in passes:
        parts = min(layout.micro_batches, math.ceil(batch.sequences / layout.dp))
        mine = batch.heaviest_part(layout.dp * parts)
        rounds = (max(parts, layout.pp) if phase == "decode" else parts + layout.pp - 1) / layout.pp
        launches = forward(place, mine)
        times.predict(launch.call for launch in launches)
        each = [(times[launch.call].interval.value, times[launch.call].dram_s) for launch in launches]
        seen = visible(launches, each, mine.tokens)
        every = [KernelTime.of(phase, launch, times, rounds) for launch in launches]
        kernels = [replace(one, interval=one.interval * share) for one, share in zip(every, seen, strict=True)]
        found.append((count, mine, rounds, launches, kernels, joined(kernels)))
    lasting = sum(count * span.value for count, *_, span in found) >= WINDOW_S
    for count, mine, rounds, launches, kernels, span in found:
        ends = (span.value - span.low, span.high - span.value)
        below, above = (math.hypot(end, share * span.value) for end, share in zip(ends, PASS_SPREAD, strict=True))
        slower = throttled_s if lasting else held_s
        slower_s = rounds * sum(float(x.count * slower(x.call, times[x.call].interval.value, times)) for x in launches)
        if engine.replays(mine.tokens, mine.sequences, decodes=phase == "decode"):
            host_s = sum(launch.count for launch in launches) * engine.gap_s
            between = [launch for launch in launches if launch.scales_with == "lengths" and phase == "prefill"]
            launching_s = sum(
                launch.count * (engine.launching_s(_between(launch.op)) + engine.launch_s) for launch in between
            )
        else:
            host_s = 0.0
            launching_s = sum(launch.count * engine.launching_s(launch.op) for launch in launches)
        busy_s = launching_s + engine.overlapped_step_s * (not draft)
        busy_s += engine.overlapped_sequence_s * mine.sequences * (not draft)
        host_s = max(host_s, busy_s - span.value - slower_s)
        if not draft:
            host_s += engine.step_s if phase == "decode" else engine.prefill_s
            host_s += engine.sequence_s * mine.sequences
        whole = Interval(span.value, span.value - below, span.value + above) + Interval.exact(slower_s)
        beside = (
            [KernelTime.beside(phase, "power limit", Interval.exact(slower_s), "power", "near")] if slower_s else []
        )
        beside += [KernelTime.beside(phase, "host", Interval.exact(host_s), "host")] if host_s else []
        yield (
            (whole + Interval(host_s, *(x * host_s for x in HOST_RANGE))) * count,
            [x * count for x in (*kernels, *beside)],
        )


def ends(span: Interval) -> tuple[float, float, float]:
    return span.value, span.low, span.high


def of_whole(found: Inference, span: Interval) -> list[float]:
    """With the spread of such runs beyond their kernels."""
    whole: list[float] = widened(np.array(ends(span)), found.results.spread).tolist()
    return whole


def test_columns_are_what_kernels_add_up_to() -> None:
    cases = settings(90, seed=18)
    told: dict[int, KernelcastError] = {}
    found = infer_many(cases, skip=lambda at, error: told.update({at: error}))
    kept = [at for at in range(len(cases)) if at not in told]
    assert len(kept) > 45 and len(told) > 10
    columns = infer_columns(cases)
    assert [at for at, why in enumerate(columns["refused"]) if why is None] == kept
    assert all(columns["refused"][at] == str(error) for at, error in told.items())
    times: dict[str, Times] = {}
    for at, one in zip(kept, found, strict=True):
        place, asked = cases[at]
        spans, ran = added_up(place, asked, times.setdefault(place.gpu.id, Times(place.gpu)))
        for phase in ("prefill", "decode"):
            assert ends(getattr(one, phase)) == pytest.approx(of_whole(one, spans[phase]), rel=1e-9)
            assert [columns[f"{phase}_s{end}"][at] for end in ("", "_low", "_high")] == [*ends(getattr(one, phase))]
        expected = {} if one.workload.speculation else {(x.phase, x.part): x for x in shares(ran)}
        if expected:
            assert {(x.phase, x.part) for x in one.shares} == set(expected)
        for share in one.shares if expected else ():
            other = expected[share.phase, share.part]
            if share.time_s:  # what is hidden whole is bound by nothing
                assert (share.bound_by, share.support) == (other.bound_by, other.support)
            assert (share.time_s, share.kernels) == pytest.approx((other.time_s, other.kernels), rel=1e-9)
        assert sum(x.interval.value * p.count for p in one.passes for x in p.kernels) == pytest.approx(one.total.value)
        kernels = support_of((x.time_s, x.support) for x in one.shares)
        assert columns["support"][at] == one.support == worse(kernels, one.supports.run)


def test_a_lower_power_limit_in_columns_is_that_of_each_kernel() -> None:
    capped = with_cap(gpu("h200_sxm"), 400)
    place = Deployment(model("llama-3.1-8b"), capped, stack("vllm"))
    for batch in (1, 16):  # a prompt alone is read before a GPU lowers its clock; a capped one is at its limit
        asked = Workload.equal(batch, 2048, 64)
        found, (spans, _) = infer(place, asked), added_up(place, asked, Times(capped))
        assert ends(found.prefill) == pytest.approx(of_whole(found, spans["prefill"]), rel=1e-9)
        assert found.prefill.value > 1.15 * infer(Deployment(place.model, gpu("h200_sxm"), place.stack), asked).ttft_s
    spans, _ = added_up(place, asked, Times(capped))
    found = infer(place, asked)
    free = infer(Deployment(place.model, gpu("h200_sxm"), place.stack), asked)
    for phase in ("prefill", "decode"):
        assert ends(getattr(found, phase)) == pytest.approx(of_whole(found, spans[phase]), rel=1e-9)
    prefill, decode = (getattr(found, phase).time_s / getattr(free, phase).time_s for phase in ("prefill", "decode"))
    assert prefill > 1.1 * decode > 1.1  # tensor cores wait for the clock, DRAM less
    barely = infer(Deployment(place.model, with_cap(gpu("h200_sxm"), 699), place.stack), asked)
    assert barely.total.value == pytest.approx(free.total.value, rel=0.005)  # no step where a limit begins
    assert found.energy is not None and found.energy.value <= 400 * found.total.value * (1 + 1e-9)


def test_a_setting_does_not_depend_on_those_beside_it() -> None:
    cases = settings(60, seed=3)
    told: dict[int, str] = {}
    found = iter(infer_many(cases, skip=lambda at, error: told.update({at: str(error)})))
    for at, (place, asked) in enumerate(cases):
        if at in told:
            with pytest.raises(KernelcastError) as error:
                infer(place, asked)
            assert str(error.value) == told[at]
        else:
            alone, beside = infer(place, asked), next(found)
            assert ends(beside.total) == pytest.approx(ends(alone.total), rel=1e-9)
            assert beside == alone


def test_columns_are_the_numbers_of_each_inference() -> None:
    cases = [
        (deployed(), Workload.equal(4, 300, 20)),
        (deployed(), Workload.equal(9999, 1024, 128)),
        (deployed("qwen3-30b-a3b", tp=2), Workload((100, 300), (11, 51))),
        (deployed(on="a100_sxm", dtype="fp8"), Workload.equal(1, 100, 10)),
        (deployed(on="l40"), Workload.equal(8, 4096, 1)),
    ]
    columns = infer_columns(cases)
    assert columns["fits"].tolist() == [True, False, True, True, True]
    assert [why is None for why in columns["refused"]] == [True, False, True, False, True]
    assert columns["memory_bytes"][1] > columns["available_bytes"][1] > 0
    for at in (0, 2, 4):
        one = infer(*cases[at])
        numbers = ("tokens_per_s", "steps", "output_tokens", "flops", "mfu", "bandwidth_use")
        assert [columns[name][at] for name in numbers] == [getattr(one, name) for name in numbers]
        for name in ("tpot", "step", "total"):
            assert tuple(columns[f"{name}_s{end}"][at] for end in ("", "_low", "_high")) == ends(getattr(one, name))
        assert columns["ttft_s"][at] == one.ttft_s
        assert columns["memory_bytes"][at] == one.memory.used_bytes
        most: dict[str, float] = {}
        for ran in (ran * p.count for p in one.passes for ran in p.kernels):
            most[ran.bound_by] = most.get(ran.bound_by, 0.0) + ran.time_s
        assert columns["bound_by"][at] == max(most, key=lambda name: most[name])
    for at in (1, 3):
        assert np.isnan(columns["total_s"][at]) and columns["support"][at] is columns["bound_by"][at] is None
    assert infer_columns([]) == {}


@pytest.mark.parametrize("chunk", [0, 1, 7, 100, 128, 256, 300, 2600])
def test_chunks_of_equal_prompts_are_those_of_a_list(chunk: int) -> None:
    for asked in (Workload.equal(13, 200, 1, chunk=chunk), Workload.equal(3, 200, 1, cached=72, chunk=chunk)):
        found, listed = workload_passes(asked), asked.prefills()
        assert [found.batches.batch(int(row)) for row in found.order] == listed
        assert found.counts.sum() == len(listed)
        assert len(set(listed)) == len(found.batches)  # each different one once


def test_launches_of_many_batches_are_those_of_each() -> None:
    batches = [Batch((100,), (0,)), Batch((1, 1), (5, 5)), Batch((1, 1), (5, 9)), Batch((3, 7), (0, 2)),
               Batch((2,), (0,)), Batch((5,), (50,), 5), Batch((100,), (0,)), Batch((40,), (10,))]  # fmt: skip
    for name in ("llama-3.1-8b", "deepseek-v3", "qwen3-next-80b-a3b", "gpt2-xl", "bert-base"):
        for engine in stack_ids():
            place = deployed(name, engine=stack(engine), dp=2, dtype="bf16")
            seen = []
            for rows, launches, places in forward_many(place, BatchColumns.of(batches)):
                for at, row in enumerate(rows.tolist()):
                    own = [
                        (x.part, x.call.row(int(places[x.scales_with][at])), x.count, x.scales_with) for x in launches
                    ]
                    assert own == [(x.part, x.call, x.count, x.scales_with) for x in forward(place, batches[row])]
                    seen.append(row)
            assert sorted(seen) == list(range(len(batches)))


def test_a_part_of_many_is_the_heaviest_of_each() -> None:
    batches = [
        Batch(7 * (1,), 7 * (9,)),
        Batch((5, 6, 7), (0, 9, 0)),
        Batch((1,), (3,)),
        Batch((4, 4, 4, 4), (1, 2, 3, 4)),
    ]
    own, parts = BatchColumns.of(batches).heaviest_part(2, 3)
    assert parts.tolist() == [3, 2, 1, 2]
    assert [own.batch(at) for at in range(4)] == [
        Batch((1, 1), (9, 9)), Batch((6,), (9,)), Batch((1,), (3,)), Batch((4,), (4,)),
    ]  # fmt: skip


def test_many_settings_are_laid_out_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(deployed(), Workload.equal(batch, 64, 40)) for batch in range(1, 20)]
    place = cases[0][0]
    cases += [(place, Workload.equal(batch, 100, 40)) for batch in range(1, 20)]
    whole = infer_columns(cases)
    monkeypatch.setattr("kernelcast.inference.infer._PASSES", 25)
    monkeypatch.setattr("kernelcast.inference.infer._CASES", 4)
    parts = infer_columns(cases)
    assert all((whole[name] == parts[name]).all() for name in whole)


def test_a_row_of_columns_is_light() -> None:
    # a few kilobytes each, not a tree of objects
    place = deployed(engine=quiet())
    cases = [(place, Workload.equal(1 + at % 50, 100 + at // 50, 100)) for at in range(500)]
    infer_columns(cases[:1])
    tracemalloc.start()
    found = infer_many(cases)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held / len(found) < 20_000
