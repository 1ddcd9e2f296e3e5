"""Run the evaluation: fit on what a split allows, predict what it holds back, keep every score.

Scores go to a JSON file after each fit, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.evidence import EvidenceMatch
from kernelcast.forecast.features import KEEP
from kernelcast.forecast.learned import FamilyWeights, Learned
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.forecast.predictor import ByTime, Estimate, Generic, Predictor, PredictorInput
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import Score as Ranking
from kernelcast.ops.base import Configuration, Kernel
from kernelcast_lab.baselines import Neusight, Pipeweave, Roofline
from kernelcast_lab.evaluate.scores import Columns, Score, read_kept, scores, write_kept
from kernelcast_lab.evaluate.splits import KNOWN_TASKS, MAIN, SOURCES, SPLITS, TASK_NAMES, Protocol, Split, main_tables
from kernelcast_lab.fit.baselines import fit_neusight, fit_pipeweave
from kernelcast_lab.fit.fit import fit_rows, sampled
from kernelcast_lab.fit.recipes import Settings, changed, recipe

PREDICTORS = ("learned", "generic", "roofline", "pipeweave", "neusight")
GRID_TIME = np.linspace(0, 6, 61)  # log10 of microseconds
GRID_RATIO = np.linspace(-0.3, 0.3, 61)  # log10 of predicted over measured
# Beside the scores: predicted against measured, for plots; and what was done and gave no score.
DENSITY, EMPTY = "density.json", "empty.json"


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate, on how many rows of each fit and test: so few that two cores can run it.

    ``splits`` and ``tasks`` are of the main table. None given: all of them but the frontier's tasks, and the sources'
    own protocols.
    """

    splits: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    predictors: tuple[str, ...] = PREDICTORS
    settings: Settings | None = None  # of every fit; None: those of the family's recipe, in small
    rows: int = 200_000
    baseline_rows: int = 20_000
    baseline_epochs: int = 30
    test_rows: int = 20_000
    seed: int = 0
    row_passes: int = 4_000_000  # rows times epochs of a main network: few rows are passed more often

    def __post_init__(self) -> None:
        refuse_unknown("split", self.splits, SPLITS)
        refuse_unknown("task", self.tasks, KNOWN_TASKS)
        refuse_unknown("predictor", self.predictors, PREDICTORS)

    @property
    def protocols(self) -> list[Protocol]:
        result = main_tables(self.splits or tuple(SPLITS), self.tasks or TASK_NAMES)
        return result if self.splits or self.tasks else [*result, *SOURCES]

    def settings_for(self, family: str, rows: int) -> Settings:
        small = {"rows": self.rows, "seed": self.seed, "networks": 1, "transfer_networks": 2, "rows_left_out": 50_000}
        result = self.settings or changed(recipe(family).settings, batch=2048, **small)
        epochs = int(np.clip(self.row_passes / max(min(rows, result.rows or rows), 1), 15, 200))
        return changed(result, epochs=epochs)


@dataclass(frozen=True)
class Fitted:
    """Weights in memory, as a predictor."""

    weights: FamilyWeights
    name: str = "learned"
    keep: int = KEEP

    def score(self, target: Gpu) -> Ranking:
        return ByTime(target)

    def what_if_spread(self, family: str) -> tuple[float, float]:
        return 0.0, 0.0

    def estimate(self, question: PredictorInput) -> Estimate:
        return self.weights.estimate(question)

    def matches(self, kernel: type[Kernel], configuration: Configuration, target: Gpu) -> tuple[EvidenceMatch, ...]:
        return self.weights.matches(kernel, configuration, target)


@dataclass(frozen=True)
class Job:
    """One predictor on one split of one family's rows; ``tasks``: the test rows that are scored, by name."""

    protocol: str
    family: str
    split: Split
    columns: Columns
    tasks: Mapping[str, NDArray[np.bool_]]
    predictor: str

    @property
    def keys(self) -> set[tuple[str, ...]]:
        """What it gives, as kept scores say it."""
        return {(self.protocol, self.split.name, self.split.label, self.predictor, task) for task in self.tasks}


def evaluate(
    columns_of: Callable[[str], Columns],
    evaluation: Evaluation,
    out: Path,
    say: Callable[[str], None] = lambda text: None,
    workers: int = 1,
) -> list[Score]:
    """``columns_of`` gives the canonical columns of a family. Scores are kept in ``out``; those there are not redone.

    ``workers``: processes, each with one thread; fits do not share threads well.
    """
    jobs = [
        job for protocol in evaluation.protocols for job in _jobs(protocol, columns_of(protocol.family), evaluation)
    ]
    if not jobs:
        chosen = (
            f" of {', '.join(evaluation.splits + evaluation.tasks)}" if evaluation.splits or evaluation.tasks else ""
        )
        raise KernelcastError(f"no scores: there is no measured row{chosen}; `kernelcast data list DIR` shows what is")
    kept = [Score(**entry) for entry in read_kept(out, [])]
    empty = {tuple(key) for key in read_kept(out.with_name(EMPTY), [])}
    done = {(s.protocol, s.split, s.left_out, s.predictor, s.task) for s in kept} | empty
    for job, (result, densities) in _run([job for job in jobs if not job.keys <= done], evaluation, workers):
        say(f"{job.protocol}: {job.split.name} {job.split.label}, {job.family}, {job.predictor}")
        kept += result
        if result:
            write_kept(out, [asdict(score) for score in kept])
        else:
            empty |= job.keys
            write_kept(out.with_name(EMPTY), sorted(empty))
        if densities:
            write_kept(out.with_name(DENSITY), read_kept(out.with_name(DENSITY), {}) | densities)
    if not kept:
        raise KernelcastError(
            f"no scores: {', '.join(evaluation.predictors)} cannot be fitted on the rows of this folder"
        )
    return kept


def _jobs(protocol: Protocol, columns: Columns, evaluation: Evaluation) -> Iterator[Job]:
    keep = protocol.rows(columns) if len(columns["op"]) else np.zeros(0, dtype=bool)
    if not keep.any():
        return
    columns = {name: column[keep] for name, column in columns.items()}
    groups = protocol.groups(columns)
    for split in protocol.splits(columns):
        tested = {task: split.test & rows for task, rows in groups.items()}
        tasks = {task: rows for task, rows in tested.items() if rows.any()}
        if tasks:
            for predictor in evaluation.predictors:
                yield Job(protocol.name, protocol.family, split, columns, tasks, predictor)


Scored = tuple[list[Score], dict[str, Any]]  # and predicted against measured, as counts on a grid
_inherited: tuple[list[Job], Evaluation] | None = None  # of a worker: tables are too large to send


def _run(jobs: list[Job], evaluation: Evaluation, workers: int) -> Iterator[tuple[Job, Scored]]:
    """Each job's scores, as they come."""
    if workers <= 1 or len(jobs) <= 1:
        yield from ((job, _scored(job, evaluation)) for job in jobs)
        return
    global _inherited
    _inherited = (jobs, evaluation)
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), torch.set_num_threads, (1,)) as pool:
            running = {pool.submit(_in_worker, at): job for at, job in enumerate(jobs)}
            for future in as_completed(running):
                yield running[future], future.result()
    finally:
        _inherited = None


def _in_worker(at: int) -> Scored:
    assert _inherited is not None
    jobs, evaluation = _inherited
    return _scored(jobs[at], evaluation)


def _scored(job: Job, evaluation: Evaluation) -> Scored:
    job_scores: list[Score] = []
    densities: dict[str, Any] = {}
    predictor = _predictor(job, evaluation)
    if predictor is None:
        return job_scores, densities
    labels = {
        "protocol": job.protocol,
        "split": job.split.name,
        "left_out": job.split.label,
        "predictor": job.predictor,
    }
    for task, rows in job.tasks.items():
        at = sampled(np.flatnonzero(rows), evaluation.test_rows, evaluation.seed)
        test = {column: values[at] for column, values in job.columns.items()}
        results, bad = predict_columns(test, None, Conditions(predictor=predictor))
        if bad.messages:
            raise KernelcastError(bad.text())
        if job.predictor == "learned":
            label = f"{job.split.name}: {job.split.label}, {task}"
            densities[label] = _density(test["latency_us"], results["predicted_us"])
        intervals = job.predictor in ("learned", "generic")
        job_scores.extend(scores({**labels, "task": task}, test, results, intervals))
    return job_scores, densities


def _density(truth: NDArray[Any], predicted: NDArray[Any]) -> list[list[int]]:
    counts, _, _ = np.histogram2d(np.log10(truth), np.log10(predicted / truth), bins=(GRID_TIME, GRID_RATIO))
    return counts.astype(int).tolist()


def _predictor(job: Job, evaluation: Evaluation) -> Predictor | None:
    """A predictor fitted on the training rows; None where there are none, or the method has none for this family."""
    if job.predictor == "roofline":
        return Roofline()
    if job.predictor == "generic":
        return Generic()
    rows = np.flatnonzero(job.split.train)
    if job.predictor == "learned":
        shipped = Learned()
        has_weights = (shipped.folder / f"{job.family}.safetensors").exists()
        if job.protocol == MAIN and job.split.name == "shapes" and has_weights:
            return shipped  # its test shapes are these
        return (
            Fitted(fit_rows(job.columns, job.family, rows, evaluation.settings_for(job.family, len(rows))))
            if len(rows)
            else None
        )
    rows = sampled(rows, evaluation.baseline_rows, evaluation.seed)
    fit: Callable[..., Pipeweave | Neusight] = fit_pipeweave if job.predictor == "pipeweave" else fit_neusight
    try:
        return fit(job.columns, job.family, epochs=evaluation.baseline_epochs, seed=evaluation.seed, rows=rows)
    except KernelcastError:
        return None
