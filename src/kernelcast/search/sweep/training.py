"""Sweeps of training jobs (``mode = "training"``): every combination of models, GPUs, precisions, layouts and batches.

A setting is numbered over the product of all keys, the model slowest; what no layout allows or does not fit is a row
with its reason, as in a sweep of batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError, refuse_unknown
from kernelcast.forecast.conditions import Conditions
from kernelcast.hardware import Gpu, gpu, gpu_ids
from kernelcast.models import model, model_ids
from kernelcast.models.architecture import Architecture
from kernelcast.search.sweep.constraint import Constraint
from kernelcast.search.sweep.file import Integers, SweepValues, looked_up, names_of
from kernelcast.search.sweep.rows import ILLEGAL, NO_ROOM, OK, TRAINING_COLUMNS, Columns, parquet
from kernelcast.search.sweep.space import Chunk
from kernelcast.search.training import job_layout
from kernelcast.stacks.training_stack import TrainingStack, training_stack, training_stack_ids
from kernelcast.training.job import Recompute, TrainingJob, TrainingPrecision, precision, precision_names
from kernelcast.training.job_memory import peak
from kernelcast.training.layout import TrainingLayout
from kernelcast.training.step import STEP
from kernelcast.training.training_forecast import TrainingForecast
from kernelcast.training.transformer_step import forecast_many

TEXTS = ("model", "gpu", "stack", "precision", "recompute")
# in the order that neighbours share the most kernels
SIZES = {"seq": 4096, "micro_batch": 1, "tp": 1, "cp": 1, "ep": 1, "expert_tp": 1, "pp": 1, "virtual_stages": 1,
         "zero": -1, "gpus": 8, "global_batch": 0}  # fmt: skip
KEYS = (*TEXTS, *SIZES, "where")
_LEAST = {"zero": 0}
_MOST = 10_000_000  # settings before constraints


@dataclass(frozen=True)
class TrainingSweep:
    models: tuple[Architecture, ...]
    gpus: tuple[Gpu, ...]
    stacks: tuple[TrainingStack, ...]
    precisions: tuple[TrainingPrecision, ...]
    recomputes: tuple[tuple[str, Recompute], ...]
    sizes: Mapping[str, SweepValues]
    where: tuple[str, ...]
    given: Mapping[str, Any]  # the keys of the file

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainingSweep:
        refuse_unknown("key of a training sweep", given, KEYS)
        for key, example in (("model", '"llama-3.1-8b"'), ("gpu", '"h100_sxm"'), ("global_batch", "512")):
            if key not in given:
                raise KernelcastError(f"{key} is missing: give one or more, as in {key} = [{example}]")
        sizes = {
            name: SweepValues.read(name, given[name], _LEAST.get(name, 1), sampled=False)
            if name in given
            else SweepValues((default,))
            for name, default in SIZES.items()
        }
        where, stacks = given.get("where", []), given.get("stack", "megatron")
        sweep = cls(
            looked_up("model", given["model"], model, model_ids, lambda each: each.name),
            looked_up("gpu", given["gpu"], gpu, gpu_ids, lambda each: each.id),
            looked_up("stack", stacks, training_stack, training_stack_ids, lambda each: each.id),
            looked_up("precision", given.get("precision", "bf16"), precision, precision_names, lambda each: each.id),
            tuple((name, _recompute(name)) for name in names_of("recompute", given.get("recompute", "none"))),
            sizes, tuple(where) if isinstance(where, list) else (where,), dict(given),
        )  # fmt: skip
        sweep.constraints()  # refuses what does not parse
        return sweep

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The values of each column of ``TEXTS``."""
        ids = (tuple(each.id for each in group) for group in (self.gpus, self.stacks, self.precisions))
        models = tuple(each.name for each in self.models)
        return dict(zip(TEXTS, (models, *ids, tuple(name for name, _ in self.recomputes)), strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """Values of each key, by TEXTS and SIZES."""
        return (*(len(values) for values in self.names.values()), *(each.count for each in self.sizes.values()))

    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(Constraint(text, self.names, tuple(SIZES)) for text in self.where)


def _recompute(name: str) -> Recompute:
    """none, full, selective, or modules with commas."""
    if name in ("none", "full", "selective"):
        return Recompute(name)  # type: ignore[arg-type]
    return Recompute("selective", modules=tuple(part.strip() for part in name.split(",")))


class TrainingSpace:
    """All settings of a training sweep, by number."""

    def __init__(self, sweep: TrainingSweep) -> None:
        self.sweep = sweep
        total = math.prod(sweep.counts)
        if total > _MOST:
            raise KernelcastError(f"{total:,} settings are more than a training sweep takes ({_MOST:,})")
        numbers = np.arange(total)
        constraints = sweep.constraints()
        if constraints:
            columns = self.columns(numbers)
            numbers = numbers[np.logical_and.reduce([each.holds(columns) for each in constraints])]
        self.numbers = numbers

    @property
    def count(self) -> int:
        return len(self.numbers)

    def codes(self, numbers: Integers) -> tuple[Integers, ...]:
        return np.unravel_index(numbers, self.sweep.counts)

    def columns(self, numbers: Integers) -> Columns:
        codes = self.codes(numbers)
        texts = self.sweep.names
        columns: Columns = {
            name: np.array(texts[name], dtype=object)[at] for name, at in zip(TEXTS, codes, strict=False)
        }
        sizes = zip(self.sweep.sizes.items(), codes[len(TEXTS) :], strict=True)
        return columns | {name: values.at(at) for (name, values), at in sizes}

    def chunks(self, size: int) -> Iterator[Chunk]:
        for at, start in enumerate(range(0, self.count, size)):
            stop = min(start + size, self.count)
            yield Chunk(at, start, stop, start, stop - start)


@dataclass(frozen=True)
class TrainingSweepJob:
    """The data of every worker, as ``SweepJob``."""

    sweep: TrainingSweep
    conditions: Conditions
    prices: Mapping[str, float]  # USD per GPU-hour by GPU id

    @cached_property
    def space(self) -> TrainingSpace:
        return TrainingSpace(self.sweep)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "space"}

    def rows(self, chunk: Chunk) -> bytes:
        """The chunk's rows: the same bytes on every executor."""
        space = self.space
        numbers = space.numbers[chunk.start : chunk.stop]
        columns = self._columns(space.columns(numbers), np.stack(space.codes(numbers)[: len(TEXTS)], axis=1))
        columns["setting"] = np.arange(chunk.first, chunk.first + chunk.count)
        return parquet({name: columns[name] for name in TRAINING_COLUMNS}, TRAINING_COLUMNS)

    def _columns(self, setting: Columns, codes: Integers) -> Columns:
        count = len(codes)
        columns: Columns = {
            name: np.full(count, None, dtype=object) if kind == "VARCHAR" else np.full(count, np.nan)
            for name, kind in TRAINING_COLUMNS.items()
        } | setting
        columns["zero"] = np.where(setting["zero"] < 0, np.nan, setting["zero"])
        columns["fits"] = np.full(count, None, dtype=object)
        asked: list[tuple[int, TrainingJob]] = []
        values = np.stack([setting[name] for name in SIZES], axis=1).tolist()
        for row, (chosen, sizes) in enumerate(zip(codes.tolist(), values, strict=True)):
            try:
                job = self._job(*chosen, **dict(zip(SIZES, sizes, strict=True)))
                memory = peak(job)
            except KernelcastError as error:
                columns["status"][row], columns["reason"][row] = ILLEGAL, str(error)
                continue
            layout = job.layout
            known = {"dp": layout.dp, "micro_batches": layout.micro_batches, "zero": layout.zero,
                     "memory_bytes": memory.peak_bytes, "available_bytes": job.gpu.dram_bytes - job.reserved_bytes,
                     "fits": memory.fits, "status": OK if memory.fits else NO_ROOM}  # fmt: skip
            for name, value in known.items():
                columns[name][row] = value
            if memory.fits:
                asked.append((row, job))
        steps = forecast_many([job for _, job in asked], replace(self.conditions, input_rotation=STEP.input_rotation))
        for (row, _), step in zip(asked, steps, strict=True):
            for name, value in _forecast(step, self.prices).items():
                columns[name][row] = value
        return columns

    def _job(self, model: int, gpu: int, stack: int, precision: int, recompute: int, *, gpus: int, global_batch: int,
             zero: int, seq: int, micro_batch: int, **sizes: int) -> TrainingJob:  # fmt: skip
        sweep = self.sweep
        run = sweep.stacks[stack]
        layout = job_layout(
            TrainingLayout(), gpus, global_batch, micro_batch, zero=run.zero if zero < 0 else zero, **sizes
        )
        return TrainingJob(
            model=sweep.models[model], gpu=sweep.gpus[gpu], layout=layout, seq=seq, micro_batch=micro_batch, stack=run,
            precision=sweep.precisions[precision], recompute=sweep.recomputes[recompute][1],
        )  # fmt: skip


def _forecast(step: TrainingForecast, prices: Mapping[str, float]) -> dict[str, Any]:
    interval, job = step.interval, step.job
    hourly = prices.get(job.gpu.id, math.nan) * job.gpus
    return {
        "step_s": step.time_s, "step_s_low": interval.low, "step_s_high": interval.high,
        "tokens_per_s": step.tokens_per_s, "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
        "tflops_per_gpu": step.model_tflops_per_gpu, "mfu": step.mfu, "support": step.support,
        "bubble_s": step.parts_s["bubble"], "usd_per_hour": hourly,
        "dollars_per_million_tokens": hourly / 3600.0 / step.tokens_per_s * 1e6,
    }  # fmt: skip
