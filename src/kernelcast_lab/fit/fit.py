"""Fit one family: split off the test shapes, train its networks, evaluate them.

Rows of the test shapes (a tenth of all, by a hash of the shape alone) are never fitted on, so that the shipped weights
can be scored on them. Each main network leaves another tenth out, on which the evidence sees how wide
its interval should be. A run that was interrupted goes on after the last network that it finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast._version import __version__
from kernelcast.files import complete
from kernelcast.forecast.calibration import LEAST_WIDTH, REACH
from kernelcast.forecast.features import aligned
from kernelcast.forecast.learned import FamilyWeights, Spread, pack, softplus
from kernelcast.forecast.network import Encoder, Layers, read_tensors
from kernelcast.hardware import gpu
from kernelcast_lab.data import data_hash
from kernelcast_lab.data.folds import FOLDS, TEST_FOLD, shape_fold
from kernelcast_lab.fit.dataset import Columns, Dataset, build
from kernelcast_lab.fit.evidence import evidence_of
from kernelcast_lab.fit.prior import Task, learn_prior
from kernelcast_lab.fit.recipes import Settings, Training
from kernelcast_lab.fit.train import Progress, Role, encoder_of, train

_SAME_KERNELS = {"10.3": "10.0"}  # Blackwell and Blackwell Ultra: binaries for the family sm_100f run on both
TWINS = (("b200_sxm", "gb200"), ("h100_sxm", "h800_sxm"))
_UNTESTED = Spread(keep=1.0, low=0.4, high=0.7)  # a family measured on one GPU: as wide as the widest of the others
_LABELS = ("version", "rows", "data_hash", "gpus")  # of a family, in about.json
_LIKENESSES = (0.0, 1.0, 2.0)  # that are tried: from all known GPUs alike to mostly the nearest
_LEAST_LEFT_OUT = 40  # rows of a fold, for a network to leave it out
Report = Callable[[str], Progress | None]


def sampled(rows: NDArray[np.intp], count: int, seed: int) -> NDArray[np.intp]:
    """``count`` of the rows, in order; all when 0 or fewer than that."""
    if not count or count >= len(rows):
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))


def repeated(source: NDArray[Any], settings: Settings, least_share: float | None = None) -> NDArray[np.intp]:
    """Row numbers, those of small sources several times: else two million rows of one drown ten thousand of another."""
    share = settings.least_share if least_share is None else least_share
    result = [np.arange(len(source))]
    for name in sorted(set(source)):
        members = np.flatnonzero(source == name)
        times = int(np.clip(share * len(source) / len(members), 1, settings.most_repeats))
        result += [members] * (times - 1)
    return np.concatenate(result)


def fit_family(
    columns: Columns,
    family: str,
    settings: Settings,
    report: Report | None = None,
    partial: Path | None = None,
    again: Columns | None = None,
) -> FamilyWeights:
    """All networks of one family on the rows outside the test shapes, and the evidence on all rows. ``again``: calls
    that were measured a second time, elsewhere."""
    rows = np.flatnonzero(shape_fold(columns) != TEST_FOLD)
    return _fitted(columns, family, rows, settings, _Run(family, settings, report, partial), columns, again)


def fit_rows(columns: Columns, family: str, rows: NDArray[np.intp], settings: Settings) -> FamilyWeights:
    """All networks of one family on these rows, or on a sample of them, and the evidence on these rows alone."""
    seen = {name: column[rows] for name, column in columns.items()}
    return _fitted(columns, family, rows, settings, _Run(family, settings), seen)


def _fitted(
    columns: Columns, family: str, rows: NDArray[np.intp], settings: Settings, run: _Run, known: Columns,
    again: Columns | None = None,
) -> FamilyWeights:  # fmt: skip
    """Networks on these rows; ``known``: the rows that the evidence counts."""
    rows = sampled(rows, settings.rows, settings.seed)
    fitted = {name: column[rows] for name, column in columns.items()}
    run.data = data_hash(fitted)
    data = build(fitted, family, workers=settings.workers)
    encoder = encoder_of(data)
    source, fold = fitted["source"][data.rows], shape_fold(fitted)[data.rows]
    folds = _folds(fold, settings.networks)
    main = []
    for i in range(settings.networks):
        rest = np.flatnonzero(fold != folds[i]) if folds else np.arange(len(fold))
        net = run.network(f"main {i}", data.select(rest[repeated(source[rest], settings)]), encoder, "main", i)
        if settings.finetune:
            nearer = data.select(rest[repeated(source[rest], settings, settings.finetune_share)])
            net = run.network(f"finetune {i}", nearer, encoder, "finetune", i, net)
        main.append(net)
    balanced, measured = data.select(repeated(source, settings)), data.select(~data.at_least)
    count = range(settings.transfer_networks)
    family_spreads, tasks = spreads(data, run)
    transfer = tuple(run.network(f"transfer {i}", balanced, encoder, "transfer", i) for i in count)
    result = FamilyWeights(
        encoder=encoder,
        main=tuple(main),
        transfer=transfer,
        ceiling=run.network("ceiling", measured, encoder, "ceiling", 0),
        spreads=family_spreads,
        about=run.about(len(measured), encoder.vocabulary["gpu"]),
        prior=learn_prior(tasks, settings.seed, run.progress("prior")),
    )
    result = replace(result, evidence=evidence_of(known, family, result, folds, run.progress("evidence"), again))
    run.done()
    return result


def _folds(fold: NDArray[np.int64], networks: int) -> tuple[int, ...]:
    """The fold that each main network does not see; none where too few rows are in one of them."""
    members = tuple((TEST_FOLD + 1 + number % (FOLDS - 1)) % FOLDS for number in range(networks))
    return members if all((fold == each).sum() >= _LEAST_LEFT_OUT for each in members) else ()


@dataclass
class _Run:
    """Names, progress, and the networks that an interrupted run had finished."""

    family: str
    settings: Settings
    report: Report | None = None
    partial: Path | None = None
    data: str = ""  # hash of the rows

    def progress(self, name: str) -> Progress | None:
        return self.report(f"{self.family}: {name}") if self.report else None

    def network(
        self, name: str, data: Dataset, encoder: Encoder, role: Role, seed: int, start: Layers | None = None
    ) -> Layers:
        recipe = replace(getattr(self.settings, role), seed=self.settings.seed * 1000 + seed)
        path = self._path(name, recipe)
        if path and path.exists():
            with np.load(path) as arrays:
                return Layers.read(dict(arrays), "w", "b")
        net = train(data, encoder, recipe, role, self.progress(name), start)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            with complete(path) as part:
                np.savez(part, **net.tensors("w", "b"))  # type: ignore[arg-type]
        return net

    def _path(self, name: str, recipe: Training) -> Path | None:
        if self.partial is None:
            return None
        values = json.dumps([self.family, name, self.data, asdict(recipe), self.settings.rows], sort_keys=True)
        return self.partial / f"{self.family}-{hashlib.sha256(values.encode()).hexdigest()[:16]}.npz"

    def about(self, rows: int, gpus: Sequence[str]) -> dict[str, Any]:
        """What the weights say of themselves."""
        return {
            "kernelcast": __version__,
            "family": self.family,
            "rows": rows,
            "data_hash": self.data,
            "gpus": gpus,
            "settings": asdict(self.settings),
        }

    def done(self) -> None:
        """The partial results of a finished family are not needed."""
        if self.partial is not None:
            for path in self.partial.glob(f"{self.family}-*.npz"):
                path.unlink()


def spreads(data: Dataset, run: _Run) -> tuple[dict[str, Spread], list[Task]]:
    """Hold out one GPU (with its twin) or one generation at a time, and evaluate the networks on it.

    Without a GPU that has a sibling, "near" is as wide as "extrapolated". And those GPUs as tasks, on which the prior
    of a calibration is learned.
    """
    tasks: list[Task] = []
    generations: dict[str, list[str]] = {}
    for name in sorted({str(name) for name in data.choices["gpu"]}):
        generations.setdefault(generation(name), []).append(name)
    result = {"near": _UNTESTED, "extrapolated": _UNTESTED}
    groups = list(generations.values())
    if len(groups) > 1:
        (pooled, values), few = _left_out(data, groups, run, far=True), 1 + 1 / len(groups)
        tasks += values
        # the next generation differs from these as they do from one another, and they are few
        result["extrapolated"] = replace(pooled, low=round(pooled.low * few, 4), high=round(pooled.high * few, 4))
        result["near"] = replace(result["extrapolated"], keep=1.0)
    alone = [[name] for group in groups for name in group if any(_stands_in(other, name) for other in group)]
    if alone:
        near, values = _left_out(data, alone, run, far=False)
        result["near"] = near
        tasks += values
        far = result["extrapolated"]  # a new generation is never surer than a new GPU of a known one
        result["extrapolated"] = replace(far, low=max(far.low, near.low), high=max(far.high, near.high))
    return result, tasks


def generation(name: str) -> str:
    """GPUs whose kernels are alike: of one compute capability, of which 10.0 and 10.3 run the same."""
    capability = gpu(name).compute_capability
    return _SAME_KERNELS.get(capability, capability)


def _stands_in(each: str, other: str) -> bool:
    """Whether a GPU is forecast as another when it is held out alone."""
    return not twins(each, other) and gpu(each).compute_capability == gpu(other).compute_capability


def twins(each: str, other: str) -> bool:
    """Nearly the same GPU: measuring one is measuring the other."""
    return each == other or any(each in pair and other in pair for pair in TWINS)


def _left_out(data: Dataset, groups: list[list[str]], run: _Run, *, far: bool) -> tuple[Spread, list[Task]]:
    """The share of the correction, the weight of sibling GPUs and the interval width that fit held-out GPUs best.

    A GPU of a known generation gets the median of those, so that an outlier does not widen all the others. Generations
    are too few for that: they are pooled.
    """
    most, seed = run.settings.rows_left_out, run.settings.seed
    gpu_ids = data.choices["gpu"].astype(str)
    fits: list[tuple[FamilyWeights, Dataset]] = []
    for at, group in enumerate(groups):
        outside = np.isin(gpu_ids, [name for name in set(gpu_ids) if any(twins(name, member) for member in group)])
        fitted = data.select(sampled(np.flatnonzero(~outside), most, seed))
        tested = data.select(sampled(np.flatnonzero(outside & ~data.at_least), most // 4, seed))
        encoder = encoder_of(fitted)
        label = f"without {'+'.join(group)}"
        main = run.network(f"main {label}", fitted, encoder, "main", at)
        transfer = (run.network(f"transfer {label}", fitted, encoder, "transfer", at),) if far else ()
        fits.append((FamilyWeights(encoder, (main,), transfer, main, {}, {}), tested))
    truths = [tested.target for _, tested in fits]
    best = np.inf
    for likeness in _LIKENESSES if far else (0.0,):
        predicted = [correction(_with_likeness(weights, likeness), tested) for weights, tested in fits]
        for share in np.arange(0.5, 1.01, 0.05) if far else (1.0,):
            error = _mean_error([share * each[:, 0] for each in predicted], truths)
            if error < best:
                best, outs, keep, alike = error, predicted, float(share), likeness
    groups_off = [truth - keep * predicted[:, 0] for truth, predicted in zip(truths, outs, strict=True)]
    each = [np.quantile(off, [0.1, 0.9]) for off in ([np.concatenate(groups_off)] if far else groups_off)]
    low, high = np.median(each, axis=0)
    spread = Spread(round(keep, 3), round(max(0.0, -float(low)), 4), round(max(0.0, float(high)), 4), alike)
    return spread, [
        _task(group[0], tested, predicted, spread, far=far)
        for group, (_, tested), predicted in zip(groups, fits, outs, strict=True)
    ]


def _with_likeness(weights: FamilyWeights, likeness: float) -> FamilyWeights:
    return replace(weights, spreads={"extrapolated": Spread(likeness=likeness)})


def _mean_error(predicted: Sequence[NDArray[np.float64]], truths: Sequence[NDArray[np.float64]]) -> float:
    """Of groups that count alike, however many rows they have."""
    errors = [
        np.mean(np.abs(np.expm1(each - truth))) for each, truth in zip(predicted, truths, strict=True) if len(truth)
    ]
    return float(np.mean(errors)) if errors else 0.0


def _task(name: str, data: Dataset, predicted: NDArray[np.float64], spread: Spread, *, far: bool) -> Task:
    """Residuals of a held-out GPU, in units of the interval that it would get."""
    leaning = spread.keep * predicted[:, 0]
    reach = np.maximum(softplus(predicted[:, 1:]), [spread.low, spread.high])
    width = np.maximum(reach.sum(axis=1) / (2 * REACH), LEAST_WIDTH)
    return Task(generation(name) + (" new" if far else ""), data, (data.target - leaning) / width, leaning)


def correction(weights: FamilyWeights, data: Dataset) -> NDArray[np.float64]:
    """(rows, outputs) of the networks, evaluated as the shipped predictor does: rows of the same choices together."""
    values = aligned(data.names, data.values, weights.encoder.names)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for row, key in enumerate(zip(*data.choices.values(), strict=True)):
        alike.setdefault(key, []).append(row)
    out = np.zeros((len(data), 3))
    for key, rows in alike.items():
        choices = {
            name: None if choice is None else str(choice) for name, choice in zip(data.choices, key, strict=True)
        }
        out[rows] = weights.outputs(values[rows], gpu(str(choices.pop("gpu"))), choices)
    return out


def save(weights: FamilyWeights, folder: Path, version: str = "") -> Path:
    """Write one family's weights, of this version; a file is whole or not there."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors, meta = pack(replace(weights, about={**weights.about, "version": version}))
    path = folder / f"{weights.about['family']}.safetensors"
    with complete(path) as part:
        save_file(tensors, part, metadata=meta)
    return path


def save_about(folder: Path, version: str) -> list[str]:
    """What the weights in a folder are, as a whole, whichever run made them. The families of other versions."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {path.stem: read_tensors(path)[1]["about"] for path in sorted(folder.glob("*.safetensors"))}
    labels = {name: {key: each[key] for key in _LABELS if key in each} for name, each in result.items()}
    about = {"version": version, "families": labels}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return [name for name, each in result.items() if each.get("version") != version]
