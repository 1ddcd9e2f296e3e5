"""The prior of errors, learned: what made the errors of invented GPUs is found again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kernelcast.forecast.prior import CallPoints, Prior, plain_prior, sharers
from kernelcast_lab.fit import prior as learning
from kernelcast_lab.fit.dataset import Dataset
from kernelcast_lab.fit.prior import Task, learn_prior

NAMES = ("x0", "x1", "x2")
KINDS = tuple(
    sharers({"op": "gemm", "dtype": dtype, "stack": stack, "layout": layout})
    for dtype in ("bf16", "fp8")
    for stack in ("vllm", "torch")
    for layout in ("nn", "tn")
)


def true(biases: Any, smooth: Any, noise: float, metric: Any = (1.0, 1.0, 1.0)) -> Prior:
    plain = plain_prior(NAMES, np.zeros(3, dtype=np.float32), np.ones(3, dtype=np.float32))
    return plain.of([*biases, *smooth, 0.0, noise], np.tile(np.array(metric, dtype=np.float32), (3, 1)))


def task(known: Prior, generation: str, seed: int, rows: int = 700) -> Task:
    """A GPU whose errors were drawn from a prior."""
    rng = np.random.default_rng(seed)
    values, code = rng.standard_normal((rows, 3)), rng.integers(0, len(KINDS), rows)
    calls = CallPoints.of(values, np.zeros(rows), KINDS, code)
    factor = np.linalg.cholesky(known.covariance(calls, calls) + (known.noise + 1e-6) * np.eye(rows))
    data = Dataset(
        family="gemm",
        names=NAMES,
        values=values.astype(np.float32),
        choices={},
        estimate_s=np.ones(rows),
        bound_s=np.ones(rows),
        latency_s=np.ones(rows),
        rows=np.arange(rows),
        at_least=np.zeros(rows, dtype=bool),
        shared=np.array(["\t".join(KINDS[one]) for one in code], dtype=object),
    )
    return Task(generation, data, factor @ rng.standard_normal(rows), 0.1 * rng.standard_normal(rows))


def tasks(known: Prior, count: int = 4) -> list[Task]:
    return [task(known, f"{at}.0", at) for at in range(count)]


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Fewer steps of fewer calls: seconds, and enough for what is this plain."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_STEPS": 120, "_MEASURED": 96, "_TESTED": 64, "_EACH": 60}.items():
            patch.setattr(learning, name, value)
        yield


@pytest.fixture(scope="module")
def along(_small: None) -> Prior:
    """Learned of GPUs where calls of a kind err alike along the first feature, and of nothing else."""
    found = learn_prior(tasks(true((0.01,) * 4, (0.01, 0.01, 0.9), 0.05, (1.5, 0.02, 0.02))))
    assert found is not None
    return found


def test_the_feature_that_matters_is_found(along: Prior) -> None:
    kind = along.metric[2]
    assert kind[0] > 2 * max(kind[1:])
    assert along.smooth[2] == max(*along.biases, *along.smooth, along.noise)
    assert along.names == NAMES and min(*along.biases, *along.smooth, along.leaning, along.noise) > 0


def test_biases_are_found_as_biases() -> None:
    found = learn_prior(tasks(true((0.3, 0.2, 0.2, 0.2), (0.001,) * 3, 0.05), 8))
    assert found is not None
    assert sum(found.biases) > 2 * sum(found.smooth)


def test_the_same_seed_gives_the_same_prior(along: Prior) -> None:
    known = true((0.01,) * 4, (0.01, 0.01, 0.9), 0.05, (1.5, 0.02, 0.02))
    again = learn_prior(tasks(known))
    assert again is not None
    assert np.array_equal(again.metric, along.metric) and (again.biases, again.smooth, again.noise) == (
        along.biases, along.smooth, along.noise,
    )  # fmt: skip


def test_too_few_gpus_teach_nothing() -> None:
    known = true((0.1,) * 4, (0.1,) * 3, 0.1)
    assert learn_prior([]) is None
    assert learn_prior([task(known, "9.0", 0), task(known, "9.0", 1)]) is None  # of one generation
    assert learn_prior([task(known, "9.0", 0), task(known, "8.0", 1, rows=599)]) is None  # one has too few calls


def test_a_large_task_is_a_sample_of_itself() -> None:
    known = true((0.1,) * 4, (0.1,) * 3, 0.1)
    small = task(known, "9.0", 0)
    assert small.sample(0) is small
    repeated = np.tile(np.arange(700), 9)
    large = Task("9.0", small.data.select(repeated), small.error[repeated], small.leaning[repeated])
    found = large.sample(3)
    assert len(found.data) == len(found.error) == len(found.leaning) == 6000
    assert np.array_equal(found.error, small.error[found.data.rows])  # errors stay with their calls
