"""Sweep files: values, constraints, layouts, and settings by number."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeps import SMALL, work

import kernelcast as kc
from kernelcast.forecast.conditions import Conditions
from kernelcast.models import model
from kernelcast.search.sweep.constraint import Constraint
from kernelcast.search.sweep.file import SweepValues, legal_layouts, sweep_of
from kernelcast.search.sweep.run import sweep_job
from kernelcast.search.sweep.space import Space
from kernelcast.stacks import stack

LEAST: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h200_sxm"}


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        (8, (8,)),
        ([4, 1, 4], (4, 1)),
        ({"from": 1, "to": 100, "factor": 2}, (1, 2, 4, 8, 16, 32, 64)),
        ({"from": 3, "to": 12, "factor": 2}, (3, 6, 12)),
        ({"from": 128, "to": 512, "step": 128}, (128, 256, 384, 512)),
        ({"from": 10, "to": 40, "steps": 4}, (10, 20, 30, 40)),
        ({"from": 1, "to": 1000, "steps": 4, "scale": "log"}, (1, 10, 100, 1000)),
        ({"from": 1, "to": 3, "steps": 9}, (1, 2, 3)),
    ],
)
def test_numbers_are_listed_or_spread(given: object, listed: tuple[int, ...]) -> None:
    assert SweepValues.read("batch", given, 1, sampled=False).listed == listed


def test_a_range_is_drawn_from_evenly_or_evenly_in_its_log() -> None:
    share = (np.arange(100_000) + 0.5) / 100_000
    even = SweepValues.read("batch", {"from": 1, "to": 10}, 1, sampled=True).sample(share)
    assert np.bincount(even)[1:].tolist() == 10 * [10_000]
    log = SweepValues.read("batch", {"from": 1, "to": 1023, "scale": "log"}, 1, sampled=True).sample(share)
    assert log.min() == 1 and log.max() == 1023
    for low, high in itertools.pairwise(2**at for at in range(11)):  # each doubling has a tenth
        assert abs(np.mean((log >= low) & (log < high)) - 0.1) < 1e-3


def test_every_setting_of_a_grid_once_and_in_order() -> None:
    space = Space(
        sweep_of({**LEAST, "gpu": ["h100_sxm", "l40s"], "tp": [1, 2], "batch": [1, 2, 4], "output_len": [1, 8]})
    )
    found = space.columns(space.between(0, space.size))
    told = list(zip(*(found[name].tolist() for name in ("gpu", "tp", "batch", "output_len")), strict=True))
    assert told == list(itertools.product(("h100_sxm", "l40s"), (1, 2), (1, 2, 4), (1, 8)))
    assert space.count == 24 and found["gpus"].tolist() == found["tp"].tolist()


@pytest.mark.parametrize("changes", [{}, {"samples": 1000, "seed": 5}, {"where": []}])
@pytest.mark.parametrize("size", [1, 7, 64, 5000])
def test_chunks_hold_every_setting_once(changes: dict[str, Any], size: int) -> None:
    space = work(**changes).space
    whole = space.between(0, space.size)
    chunks = list(space.chunks(size))
    parts = [space.between(chunk.start, chunk.stop) for chunk in chunks]
    assert [len(part.deployments) for part in parts] == [chunk.count for chunk in chunks]
    assert [chunk.first for chunk in chunks] == np.cumsum([0, *(chunk.count for chunk in chunks)])[:-1].tolist()
    assert all(chunk.count == size for chunk in chunks[:-1]) and sum(chunk.count for chunk in chunks) == space.count
    assert np.array_equal(np.concatenate([part.deployments for part in parts]), whole.deployments)
    for name, column in whole.sizes.items():
        assert np.array_equal(np.concatenate([part.sizes[name] for part in parts]), column)


def test_constraints_hold_of_what_is_kept_and_of_nothing_else() -> None:
    everything, kept = (work(where=where).space for where in ([], ["batch * input_len <= 600000 and tp < 3"]))
    columns = everything.columns(everything.between(0, everything.size))
    holds = (columns["batch"] * columns["input_len"] <= 600_000) & (columns["tp"] < 3)
    assert 0 < kept.count == holds.sum() < everything.count
    found = kept.columns(kept.between(0, kept.size))
    for name, column in columns.items():
        assert found[name].tolist() == column[holds].tolist()


def test_samples_are_of_the_seed_fill_the_range_and_keep_constraints() -> None:
    asked = {**LEAST, "gpu": ["h100_sxm", "l40s"], "batch": {"from": 1, "to": 256, "scale": "log"}, "samples": 4000,
             "input_len": {"from": 100, "to": 4000}, "where": ["batch * input_len <= 100000"]}  # fmt: skip
    one, again, other = (Space(sweep_of({**asked, "seed": seed})) for seed in (1, 1, 2))
    found, same, else_ = (space.columns(space.between(0, space.size)) for space in (one, again, other))
    assert one.count == 4000  # drawn again until constraints hold
    assert found["batch"].tolist() == same["batch"].tolist() != else_["batch"].tolist()
    assert (found["batch"] * found["input_len"] <= 100_000).all()
    assert [(found["gpu"] == name).sum() for name in ("h100_sxm", "l40s")] == [2000, 2000]  # dealt out evenly
    assert len(set(zip(found["batch"].tolist(), found["input_len"].tolist(), strict=True))) > 3500
    assert found["batch"].max() > 200 and found["input_len"].max() > 3900


def test_a_million_settings_are_a_few_numbers() -> None:
    """The last setting of 10^9, by arithmetic alone."""
    asked = {**LEAST, "batch": {"from": 1, "to": 1000, "step": 1}, "input_len": {"from": 1, "to": 1000, "step": 1},
             "output_len": {"from": 1, "to": 1000, "step": 1}}  # fmt: skip
    space = Space(sweep_of(asked))
    assert space.size == 10**9
    last = space.between(10**9 - 2, 10**9)
    assert last.sizes["output_len"].tolist() == [999, 1000] and last.sizes["batch"].tolist() == [1000, 1000]


def test_layouts_that_a_model_allows() -> None:
    chip, engine = kc.gpu("h200_sxm"), stack("vllm")
    dense = legal_layouts(model("llama-3.1-8b"), chip, engine, 8)
    assert {cut[:2] for cut in dense} == {(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if t * p <= 8}
    assert all(cut[2:4] == (1, 1) for cut in dense)  # no experts: no attention DP, no EP
    experts = legal_layouts(model("qwen3-30b-a3b"), chip, engine, 4)
    assert (2, 1, 2, 4, 1, 0) in experts and all(tp * pp * dp <= 4 for tp, pp, dp, *_ in experts)
    space = Space(sweep_of({**LEAST, "model": ["llama-3.1-8b", "qwen3-30b-a3b"], "layout": "all", "max_gpus": 4}))
    assert space.deployment_count == len(legal_layouts(model("llama-3.1-8b"), chip, engine, 4)) + len(experts)


def test_constraints_are_read_not_run() -> None:
    words = {"gpu": ("h100_sxm", "l40s")}
    columns = {"gpu": np.array(["h100_sxm", "l40s", "l40s"], dtype=object), "batch": np.array([1, 2, 8])}
    for text, holds in {
        "batch * 2 >= 4": [0, 1, 1],
        "1 < batch <= 2": [0, 1, 0],
        "gpu == 'l40s' and not batch > 4": [0, 1, 0],
        "gpu in ['h100_sxm'] or batch % 3 == 2": [1, 1, 1],
        "batch // 3 - 1 != -1": [0, 0, 1],
        "8 / (batch - 1) < 3": [0, 0, 1],  # 8 / 0 has no value
    }.items():
        assert Constraint(text, words, ("batch",)).holds(columns).tolist() == [bool(x) for x in holds], text
    for text in ("batch", "batch +", "__import__('os').system('true') == 0", "batch.real < 1", "batch ** 9 < 1",
                 "gpu < 'z'", "[x for x in (1,)] == batch", "batch == 'l40s'", "1 < 2", "batch[0] == 1", "gpu == batch",
                 "(lambda: 1)() == batch", "batch is 1", "batch in gpu"):  # fmt: skip
        with pytest.raises(kc.KernelcastError) as error:
            Constraint(text, words, ("batch",))
        assert "\n" not in str(error.value) and "where" in str(error.value), text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("models = 'x'", "unknown key 'models' (did you mean model"),
        ("inputlen = 3", "did you mean input_len"),
        ("model = 'lama-3.1-8b'", "did you mean llama-3.1-8b"),
        ("gpu = ['h2000']", "unknown gpu 'h2000'"),
        ("stack = 'vlm'", "did you mean vllm"),
        ("dtype = ['fp9']", "unknown dtype 'fp9' (did you mean fp8"),
        ("kv_dtype = 'int4'", "unknown kv_dtype 'int4'"),
        ("batch = 0", "batch is a whole number of 1 or more, not 0"),
        ("batch = true", "not True"),
        ("batch = []", "leaves nothing to sweep"),
        ("batch = { from = 1 }", "needs from and to"),
        ("batch = { from = 9, to = 1, factor = 2 }", "from 9 is more than to 1"),
        ("batch = { from = 1, to = 9 }", "needs one of steps"),
        ("batch = { from = 1, to = 9, stepps = 3 }", "did you mean steps, step"),
        ("batch = { from = 1, to = 9, steps = 3, scale = 'logg' }", "did you mean log"),
        ("where = ['bach < 8']", "did you mean batch"),
        ("where = ['gpu == \"h200\"']", "did you mean h200_sxm"),
        ("where = [3]", "a constraint in where is text"),
        ("layout = 'al'", 'layout is "all" or a list'),
        ("layout = [{ tpp = 2 }]", "did you mean"),
        ("layout = [{ tp = 2, ep = 3 }]", "ep 3 does not divide"),
        ("layout = 'all'\ntp = 2", "leave out tp"),
        ("max_gpus = 4", "belongs to layout"),
        ("samples = 0", "samples is a whole number of 1 or more"),
        ("skew = 'x'", "skew is a number"),
        ("batch = [1", "not readable as TOML"),
    ],
)
def test_a_slip_in_the_file_is_one_line(tmp_path: Path, line: str, said: str) -> None:
    lines = [f"{key} = '{value}'" for key, value in LEAST.items() if not line.startswith(f"{key} =")]
    path = tmp_path / "sweep.toml"
    path.write_text("\n".join([*lines, line]))
    with pytest.raises(kc.KernelcastError) as error:
        sweep_job(path, Conditions())
    assert said in str(error.value) and str(path) in str(error.value)


def test_what_is_missing_and_what_nothing_keeps(tmp_path: Path) -> None:
    with pytest.raises(kc.KernelcastError, match="gpu is missing"):
        sweep_of({"model": "llama-3.1-8b"})
    with pytest.raises(kc.KernelcastError, match="no file"):
        sweep_job(tmp_path / "none.toml", Conditions())
    assert work(SMALL, where=["gpus > 8"]).space.count == work(SMALL, where=["batch < 0"]).space.count == 0
