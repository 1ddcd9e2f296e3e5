"""Run the evaluation: fit on what a split allows, predict what it holds back, keep every score.

Scores go to a JSON file after each fit, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.efficiency.baselines import Neusight, Pipeweave, Roofline
from kernelcast.efficiency.features import KEEP
from kernelcast.efficiency.generic import Generic, by_time
from kernelcast.efficiency.learned import FamilyWeights, Learned
from kernelcast.efficiency.predictor import Estimate, Predictor, Question
from kernelcast.errors import KernelcastError, unknown
from kernelcast.hardware import Gpu
from kernelcast.machine.analyse import Score as Ranking
from kernelcast.predict import Conditions
from kernelcast.tables import predict_columns
from kernelcast_lab.evaluate.scores import Score, scores
from kernelcast_lab.evaluate.sources import PROTOCOLS, Protocol
from kernelcast_lab.evaluate.splits import TASKS, Split, splits
from kernelcast_lab.fit.baselines import fit_neusight, fit_pipeweave
from kernelcast_lab.fit.families import family_columns
from kernelcast_lab.fit.fit import Settings, fit_rows, sampled
from kernelcast_lab.fit.train import Recipe

Columns = Mapping[str, NDArray[Any]]
PREDICTORS = ("learned", "generic", "roofline", "pipeweave", "neusight")
MAIN = "main table"
GRID_TIME = np.linspace(0, 6, 61)  # log10 of microseconds
GRID_RATIO = np.linspace(-0.3, 0.3, 61)  # log10 of predicted over measured


@dataclass(frozen=True)
class Plan:
    """What to evaluate, on how many rows of each fit and test."""

    splits: tuple[str, ...] = ("shapes", "gpu", "generation", "stack")
    protocols: bool = True
    predictors: tuple[str, ...] = PREDICTORS
    settings: Settings = field(default_factory=Settings)
    baseline_rows: int = 20_000
    baseline_epochs: int = 30
    test_rows: int = 20_000
    seed: int = 0
    row_passes: int = 4_000_000  # rows times epochs of a main network: few rows are passed more often

    def settings_for(self, rows: int) -> Settings:
        used = min(rows, self.settings.rows or rows)
        epochs = int(np.clip(self.row_passes / max(used, 1), 15, 200))
        return replace(self.settings, main=replace(self.settings.main, epochs=epochs))


@dataclass(frozen=True)
class Fitted:
    """Weights in memory, as a predictor."""

    weights: FamilyWeights
    name: str = "learned"
    keep: int = KEEP

    def score(self, target: Gpu) -> Ranking:
        return by_time(target)

    def estimate(self, question: Question) -> Estimate:
        return self.weights.estimate(question, question.features)


def evaluate(
    tables: Callable[[str], Columns],
    plan: Plan,
    out: Path,
    say: Callable[[str], None] = lambda text: None,
    workers: int = 1,
) -> list[Score]:
    """``tables`` gives the canonical columns of a family. Scores are kept in ``out``; those there are not redone.

    ``workers``: processes, each with one thread; fits do not share threads well.
    """
    kept = read_scores(out)
    done = {(s.protocol, s.split, s.left_out, s.predictor, s.task) for s in kept}
    for predictor in plan.predictors:
        if predictor not in PREDICTORS:
            raise unknown("predictor", predictor, PREDICTORS)
    jobs = list(_jobs(tables, plan))
    todo = [
        (at, predictor)
        for at, job in enumerate(jobs)
        for predictor in plan.predictors
        if not {(job.protocol, job.split.name, job.split.label, predictor, task) for task in job.tasks} <= done
    ]
    for (at, predictor), found in _run(jobs, todo, plan, workers):
        job = jobs[at]
        say(f"{job.protocol}: {job.split.name} {job.split.label}, {job.family}, {predictor}")
        kept += found.scores
        _keep_density(out.with_name("density.json"), found.density)
        write_scores(out, kept)
    return kept


def _keep_density(path: Path, found: Mapping[str, Any]) -> None:
    """Beside the scores, as they come: a run that goes on later does not make them again."""
    if found:
        earlier = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**earlier, **found}))


Task = tuple[int, str]  # which job, which predictor
_inherited: tuple[list[Job], Plan] | None = None  # of a worker: tables are too large to send


def _run(jobs: list[Job], todo: list[Task], plan: Plan, workers: int) -> Iterator[tuple[Task, Scored]]:
    """Each task's scores, as they come."""
    if workers <= 1 or len(todo) <= 1:
        yield from ((task, _scored(jobs[task[0]], task[1], plan)) for task in todo)
        return
    global _inherited
    _inherited = (jobs, plan)
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _one_thread) as pool:
            running = {pool.submit(_in_worker, task): task for task in todo}
            for future in as_completed(running):
                yield running[future], future.result()
    finally:
        _inherited = None


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _in_worker(task: Task) -> Scored:
    assert _inherited is not None
    jobs, plan = _inherited
    return _scored(jobs[task[0]], task[1], plan)


@dataclass(frozen=True)
class Job:
    """One split of one family's rows and the groups of test rows that are reported."""

    protocol: str
    family: str
    split: Split
    columns: Columns
    tasks: Mapping[str, NDArray[np.bool_]]


def _jobs(tables: Callable[[str], Columns], plan: Plan) -> Iterator[Job]:
    for family in dict.fromkeys(task.family for task in TASKS):
        columns = tables(family)
        if not len(columns["op"]):
            continue
        tasks = {task.name: task.rows(columns) for task in TASKS if task.family == family}
        keep = np.any(list(tasks.values()), axis=0)
        columns = {name: column[keep] for name, column in columns.items()}
        tasks = {name: rows[keep] for name, rows in tasks.items()}
        if keep.any():
            for split in splits(plan.splits, columns):
                yield Job(MAIN, family, split, columns, tasks)
    for protocol in PROTOCOLS if plan.protocols else ():
        yield from _protocol_jobs(protocol, tables(protocol.family))


def _protocol_jobs(protocol: Protocol, columns: Columns) -> Iterator[Job]:
    keep = protocol.rows(columns) if len(columns["op"]) else np.zeros(0, dtype=bool)
    if not keep.any():
        return
    columns = {name: column[keep] for name, column in columns.items()}
    tasks = protocol.groups(columns)
    for split in protocol.splits(columns):
        yield Job(protocol.name, protocol.family, split, columns, tasks)


@dataclass(frozen=True)
class Scored:
    """Of one predictor in one job. ``density``: predicted against measured, as counts on a grid."""

    scores: list[Score]
    density: dict[str, Any]


def _scored(job: Job, name: str, plan: Plan) -> Scored:
    found = Scored([], {})
    predictor = _predictor(job, name, plan)
    if predictor is None:
        return found
    for task, rows in job.tasks.items():
        at = sampled(np.flatnonzero(job.split.test & rows), plan.test_rows, plan.seed)
        if not len(at):
            continue
        test = {column: values[at] for column, values in job.columns.items()}
        results, bad = predict_columns(test, None, Conditions(predictor=predictor))
        if bad.found:
            raise KernelcastError(bad.text())
        told = {
            "protocol": job.protocol,
            "split": job.split.name,
            "left_out": job.split.label,
            "task": task,
            "predictor": name,
        }
        if name == "learned":
            label = f"{job.split.name}: {job.split.label}, {task}"
            found.density[label] = density(test["latency_us"], results["predicted_us"])
        found.scores.extend(scores(told, test, results, intervals=name in ("learned", "generic")))
    return found


def density(truth: NDArray[Any], predicted: NDArray[Any]) -> list[list[int]]:
    counts, _, _ = np.histogram2d(np.log10(truth), np.log10(predicted / truth), bins=(GRID_TIME, GRID_RATIO))
    return counts.astype(int).tolist()


def _predictor(job: Job, name: str, plan: Plan) -> Predictor | None:
    """A predictor fitted on the training rows; None where the method has none for this family."""
    rows = np.flatnonzero(job.split.train)
    if name == "roofline":
        return Roofline()
    if name == "generic":
        return Generic()
    if name == "learned":
        shipped = Learned()
        if (
            job.protocol == MAIN
            and job.split.name == "shapes"
            and (shipped.folder / f"{job.family}.safetensors").exists()
        ):
            return shipped  # its test shapes are these
        return Fitted(fit_rows(job.columns, job.family, rows, plan.settings_for(len(rows))))
    rows = sampled(rows, plan.baseline_rows, plan.seed)
    fit: Callable[..., Pipeweave | Neusight] = fit_pipeweave if name == "pipeweave" else fit_neusight
    try:
        return fit(job.columns, job.family, epochs=plan.baseline_epochs, seed=plan.seed, rows=rows)
    except KernelcastError:
        return None


def read_scores(path: Path) -> list[Score]:
    return [Score(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def write_scores(path: Path, kept: list[Score]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps([asdict(score) for score in kept], indent=0))
    scratch.replace(path)


def evaluate_tables(
    root: Path | None,
    out: Path,
    *,
    splits: tuple[str, ...] = (),
    predictors: tuple[str, ...] = PREDICTORS,
    rows: int = 200_000,
    seed: int = 0,
    workers: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> list[Score]:
    """Evaluate on a folder of measured tables, sub-sampled so that two cores can run it."""
    settings = Settings(
        rows=rows, networks=1, transfer_networks=2, main=Recipe(batch=2048), rows_left_out=8_000, seed=seed
    )
    plan = Plan(settings=settings, predictors=predictors, seed=seed)
    if splits:
        plan = replace(plan, splits=splits, protocols=False)
    loaded = functools.cache(lambda family: family_columns(root, family))
    return evaluate(loaded, plan, out / "scores.json", say, workers)
