"""How well a held-out GPU is forecast: from its datasheet, with measured specs, and after calibration calls.

One GPU with siblings in the data, or a whole generation, is left out. What is left fits the networks, without the test
shapes. The GPU is then forecast under an unknown id, on its test shapes alone:

- ``catalogue``: as its datasheet has it. What is only known by measuring (the sustained share of its peaks, the launch
  time) is the mean over the GPUs that the fit saw.
- ``specs``: with the measured numbers of the catalogue, which are what `kernelcast collect --specs` would measure.
- ``calls``: on top of that, calibrated by so many calls of each op and format, of other shapes than the test's.

A piece is one family and one left-out group, kept as a file, so that machines can share the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.collect.calibrate import calibrate, next_calls
from kernelcast.errors import KernelcastError
from kernelcast.forecast import Predictor
from kernelcast.forecast.conditions import Conditions
from kernelcast.forecast.learned import FamilyWeights, Learned, load
from kernelcast.forecast.predict_table import predict_columns
from kernelcast.hardware import Gpu, gpu_ids
from kernelcast.hardware import gpu as find_gpu
from kernelcast_lab.data.folds import TEST_FOLD, shape_fold
from kernelcast_lab.evaluate.run import Fitted
from kernelcast_lab.evaluate.scores import Columns, ErrorSummary, read_kept, write_kept
from kernelcast_lab.evaluate.splits import GENERATIONS, Mask, among, generation_out, gpu_out, of_generation
from kernelcast_lab.fit.fit import fit_rows, sampled, twins
from kernelcast_lab.fit.recipes import Settings, changed, recipe

Rows = NDArray[np.intp]
Say = Callable[[str], None]

SIBLINGS = ("h200_sxm", "gb300")  # GPUs that are left out alone
LEFT_OUT = (*SIBLINGS, *GENERATIONS)
CATALOGUE, SPECS, CALLS = "catalogue", "specs", "calls"
SHARED, NEW = "shared", "new"  # kernels that GPUs of the fit run too, and those that none does
RANDOM, INFORMATIVE = "random", "telling"  # how calls are drawn: by chance, or the most informative
# What is scored together, by family: number formats, or prefill and decode in all formats.
COLUMNS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gemm": {"GEMM bf16+fp8": ("bf16", "fp8"), "GEMM fp8_block": ("fp8_block",), "GEMM nvfp4": ("nvfp4",)},
    "attention": {"prefill": ("prefill",), "decode": ("decode",)},
    "moe": {"fused MoE": ("bf16", "fp8"), "MoE fp8_block": ("fp8_block",), "MoE nvfp4": ("nvfp4",)},
}
COLUMN_NAMES = tuple(name for columns in COLUMNS.values() for name in columns)
# Numbers of a GPU that no datasheet has
MEASURED = tuple(
    field.name
    for field in dataclasses.fields(Gpu)
    if "sustained" in field.name or field.name in ("long_tensor_fraction", "tensor_flops_per_j", "launch_floor_s")
)


@dataclass(frozen=True, kw_only=True)
class TransferPoint(ErrorSummary):
    """Errors on test shapes of one GPU that was left out."""

    family: str
    left_out: str  # a GPU, or a generation
    gpu: str
    column: str
    kernels: str  # shared with GPUs of the fit, or new
    knows: str  # catalogue, specs, or calls on top of specs
    calls: int  # of each op and format
    drawn: str  # how they were
    draw: int  # which time


@dataclass(frozen=True)
class TransferSettings:
    """Fits that take two minutes with a GPU; calls are drawn ``repeats`` times, since draws vary."""

    rows: int = 400_000
    epochs: int = 20
    counts: tuple[int, ...] = (10, 30, 100, 300)
    repeats: int = 3
    test_rows: int = 1500  # of a column and GPU
    source: str = "aiconfigurator"  # whose calls calibrate and test; every source is fitted on
    seed: int = 0
    weights: Path | None = None  # to score instead of fitting
    workers: int = 1
    fit: Settings | None = None  # None: the family's recipe, with these rows and epochs

    def fit_of(self, family: str) -> Settings:
        """As many networks as ship; a smaller batch, because there are fewer rows."""
        small = {"rows": self.rows, "rows_left_out": self.rows // 8, "seed": self.seed, "workers": self.workers}
        return self.fit or changed(recipe(family).settings, epochs=self.epochs, batch=2048, **small)

    @property
    def recorded(self) -> dict[str, Any]:
        """What a piece says that it was made with."""
        names = ("rows", "epochs", "counts", "repeats", "test_rows", "source", "seed")
        return {name: getattr(self, name) for name in names} | {"weights": self.weights and self.weights.name}


def transfer(
    columns_of: Callable[[str], Columns],
    families: Sequence[str],
    left_out: Sequence[str],
    settings: TransferSettings,
    out: Path,
    say: Say = lambda text: None,
) -> list[TransferPoint]:
    """Every piece that ``out`` lacks, each written when it is done; the points of all pieces.

    ``columns_of`` gives what a family is fitted on."""
    pieces = [(family, name, piece_path(out, family, name)) for family in families for name in left_out]
    for *_, path in pieces:
        _refuse_other_settings(path, settings)
    for family in families:
        missing = [(name, path) for members, name, path in pieces if members == family and not path.exists()]
        columns = columns_of(family) if missing else {}
        for name, path in missing:
            points = score_left_out(columns, family, name, settings, say)
            kept = [dataclasses.asdict(point) for point in points]
            write_kept(path, {"settings": settings.recorded, "points": kept})
            say(f"{family}, {name} left out: {len(points)} points -> {path}")
    points = [point for *_, path in pieces for point in read_piece(path)]
    if not points:
        raise KernelcastError(f"no {settings.source} call of {', '.join(families)} on {', '.join(left_out)} to test on")
    return points


def piece_path(out: Path, family: str, left_out: str) -> Path:
    return out / f"transfer-{family}-{left_out}.json"


def read_piece(path: Path) -> list[TransferPoint]:
    return [TransferPoint(**point) for point in read_kept(path, {"points": []})["points"]]


def _refuse_other_settings(path: Path, settings: TransferSettings) -> None:
    made = read_kept(path, {"settings": None})["settings"]
    now = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.recorded.items()}
    apart = [f"{name} {made[name]}, not {value}" for name, value in now.items() if made and made[name] != value]
    if apart:
        raise KernelcastError(f"{path} was made with {'; '.join(apart)}: remove it, or write to another folder")


# ---- one piece ----


def score_left_out(
    columns: Columns, family: str, left_out: str, settings: TransferSettings, say: Say = lambda text: None
) -> list[TransferPoint]:
    """Fit without a GPU or a generation, then forecast each of its GPUs; nothing where none of them has test rows."""
    split = generation_out(columns, left_out) if left_out in GENERATIONS else next(gpu_out(columns, left_out))
    test_shape = shape_fold(columns) == TEST_FOLD
    shared = among(columns["kernel_source"], set(columns["kernel_source"][split.train]))
    names = GENERATIONS.get(left_out, (left_out,))
    gpus = [_held_out_gpu(columns, family, name, test_shape, shared, settings) for name in names]
    gpus = [held_out for held_out in gpus if held_out.tests]
    if not gpus:
        say(f"{family}, {left_out} left out: no call to test on")
        return []
    weights, base = _predictor(columns, family, np.flatnonzero(split.train & ~test_shape), left_out, settings, say)
    seen = [find_gpu(name) for name in weights.encoder.vocabulary["gpu"]]
    points: list[TransferPoint] = []
    for held_out in gpus:
        labels = {"family": family, "left_out": left_out, "gpu": held_out.name}
        points += held_out.points(base, seen, gpus_out(left_out, gpu_ids()), labels, say)
    return points


def gpus_out(left_out: str, gpus: Collection[str]) -> list[str]:
    """Of these GPUs those that no fit may see: all of the generation, or the GPU and its twin."""
    return of_generation(left_out, gpus) if left_out in GENERATIONS else [g for g in gpus if twins(g, left_out)]


def _predictor(
    columns: Columns, family: str, train: Rows, left_out: str, settings: TransferSettings, say: Say
) -> tuple[FamilyWeights, Predictor]:
    """Weights that did not see the GPU: given ones, or a fit."""
    if settings.weights is not None:
        given = load(settings.weights, family)
        if given is None:
            raise KernelcastError(f"no weights of {family} in {settings.weights}")
        saw = gpus_out(left_out, given.encoder.vocabulary["gpu"])
        if saw:
            raise KernelcastError(f"the weights of {family} in {settings.weights} saw {', '.join(saw)}: give others")
        return given, Learned(settings.weights)
    if not len(train):
        raise KernelcastError(f"no measured call of {family} but on {left_out}: there is nothing to fit on")
    fit = settings.fit_of(family)
    rows = sampled(train, fit.rows, fit.seed)  # of the evidence too: looking at all rows takes longer than the fit
    say(f"{family}, {left_out} left out: a fit on {len(rows):,} rows of {len(set(columns['gpu'][rows]))} GPUs")
    weights = fit_rows(columns, family, rows, fit)
    return weights, Fitted(weights)


def as_catalogued(target: Gpu, seen: Sequence[Gpu], out: Collection[str]) -> Gpu:
    """A GPU as its datasheet has it, under an id of its own: measured specs are the mean of the GPUs of the fit, or of
    all that are not ``out`` where those have none."""
    others = [find_gpu(name) for name in gpu_ids() if name not in out]
    values = {name: _typical(name, target, seen) or _typical(name, target, others) for name in MEASURED}
    return dataclasses.replace(target, id=f"{target.id}_{CATALOGUE}", **values)  # type: ignore[arg-type]


def as_measured(target: Gpu) -> Gpu:
    """The same numbers under an id of its own: the catalogued one would be known by name."""
    return dataclasses.replace(target, id=f"{target.id}_{SPECS}")


def _typical(name: str, target: Gpu, gpus: Sequence[Gpu]) -> float | dict[str, float] | None:
    """The mean of a number over the GPUs that have it; of a table by dtype, for what this GPU multiplies."""
    result = [getattr(each, name) for each in gpus if getattr(each, name)]
    if not isinstance(getattr(target, name), Mapping):
        return float(np.mean(result)) if result else None
    dtypes = {dtype for table in result for dtype in table if dtype in target.tensor_flops_per_clk_sm}
    return {dtype: float(np.mean([table[dtype] for table in result if dtype in table])) for dtype in sorted(dtypes)}


@dataclass(frozen=True)
class _HeldOutGpu:
    """One GPU that was left out."""

    name: str
    columns: Columns
    settings: TransferSettings
    tests: Mapping[tuple[str, str], Rows]  # by column and kernels
    pool: Mapping[str, Rows]  # rows that may calibrate, by op and format

    def points(
        self, base: Predictor, seen: Sequence[Gpu], out: Collection[str], labels: Mapping[str, Any], say: Say
    ) -> Iterator[TransferPoint]:
        plain = Conditions(predictor=base)
        target = find_gpu(self.name)
        none = {**labels, "calls": 0, "drawn": "", "draw": 0}
        yield from self._scored(as_catalogued(target, seen, out), plain, {**none, "knows": CATALOGUE})
        measured = as_measured(target)
        yield from self._scored(measured, plain, {**none, "knows": SPECS})
        draws = [(RANDOM, draw, self.drawn(draw)) for draw in range(self.settings.repeats)]
        for drawn, draw, order in [*draws, (INFORMATIVE, 0, self.informative(measured, plain))]:
            for count in self.settings.counts:
                if count > max(map(len, order.values())):
                    continue  # all of the calls would be what a smaller number was
                rows = np.sort(np.concatenate([rows[:count] for rows in order.values()]))
                calibration, bad = calibrate(self._calls(rows), measured, plain, skip_bad=True)
                if bad.messages:
                    say(f"{self.name}, {count} calls: {len(bad.messages)} left out: {bad.text()}")
                conditions = Conditions(predictor=base, calibration=calibration)
                how = {"knows": CALLS, "calls": count, "drawn": drawn, "draw": draw}
                yield from self._scored(measured, conditions, {**labels, **how})

    def drawn(self, draw: int) -> dict[str, Rows]:
        """Of each op and format, calls in the order of measuring: a larger number contains the smaller."""
        most = max(self.settings.counts, default=0)
        rngs = (np.random.default_rng([self.settings.seed, draw, at]) for at in range(len(self.pool)))
        return {
            group: rng.choice(rows, min(most, len(rows)), replace=False)
            for (group, rows), rng in zip(self.pool.items(), rngs, strict=True)
        }

    def informative(self, target: Gpu, plain: Conditions) -> dict[str, Rows]:
        """Of each op and format, the most informative calls first, as `collect --for-calibration` has them."""
        most = max(self.settings.counts, default=0)
        return {
            group: rows[next_calls(self._calls(rows), most, target, plain).rows] for group, rows in self.pool.items()
        }

    def _calls(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """Without the GPU's name, by which it would be known."""
        return {name: column[rows] for name, column in self.columns.items() if name != "gpu"}

    def _scored(self, target: Gpu, conditions: Conditions, labels: Mapping[str, Any]) -> Iterator[TransferPoint]:
        calls = self._calls(np.concatenate(list(self.tests.values())))
        results, bad = predict_columns(calls, target, conditions)
        if bad.messages:
            raise KernelcastError(f"{self.name}: {bad.text()}")
        times = [calls["latency_us"], *(results[name] for name in ("predicted_us", "low_us", "high_us"))]
        start = 0
        for (column, kernels), rows in self.tests.items():
            part = slice(start, start + len(rows))
            yield TransferPoint.of(*(values[part] for values in times), **labels, column=column, kernels=kernels)
            start += len(rows)


def _held_out_gpu(
    columns: Columns, family: str, name: str, test_shape: Mask, shared: Mask, settings: TransferSettings
) -> _HeldOutGpu:
    members = np.flatnonzero((columns["gpu"] == name) & (columns["source"] == settings.source))
    group, column = _groups(columns, family, members)
    pool = {str(each): members[(group == each) & ~test_shape[members]] for each in np.unique(group[column != ""])}
    tests = {
        (label, kernels): sampled(
            members[(column == label) & (test_shape & which)[members]], settings.test_rows, settings.seed
        )
        for label in COLUMNS[family]
        for kernels, which in ((SHARED, shared), (NEW, ~shared))
    }
    return _HeldOutGpu(name, columns, settings, {key: rows for key, rows in tests.items() if len(rows)}, pool)


def _groups(columns: Columns, family: str, rows: Rows) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of each row its op and format, prefill and decode apart; and the column that it is scored in, empty for none."""
    dtype = columns["dtype"][rows].astype(str)
    op = columns["op"][rows].astype(str)
    if family == "attention":
        op = np.where(np.nan_to_num(columns["page_size"][rows].astype(float)) > 0, "decode", "prefill")
        group = np.array(
            [" ".join(map(str, cells)) for cells in zip(op, dtype, columns["kv_dtype"][rows], strict=True)]
        )
    else:
        group = np.array([f"{each} {form}" for each, form in zip(op, dtype, strict=True)])
    value = op if family == "attention" else np.where(op == family, dtype, "")
    column = np.full(len(rows), "", dtype=object)
    for name, values in COLUMNS[family].items():
        column[np.isin(value, values)] = name
    return group, column
