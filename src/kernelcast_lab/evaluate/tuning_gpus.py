"""How well configs are ranked on a GPU that was left out of the fit, by PipeWeave's table of swept configs.

That table lists, for each shape, the configs within 1% of its best (or the top 3) and no others, so that a correlation
over all configs cannot be had from it. What is known is the order of pairs: a listed config is faster than one that is
not listed for this shape but is for another shape of the same GPU, and so was in the space searched. The score is the
share of such pairs in the right order less the share in the wrong one: the rank-biserial correlation, 1 at best, 0 by
chance. ``both``, the geometric mean of the nameless networks and physics, is what ``tune`` ranks by where it was not
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernelcast.errors import refuse_unknown
from kernelcast.forecast.learned import FamilyWeights
from kernelcast.hardware import gpu
from kernelcast_lab.data import Measurements, merged
from kernelcast_lab.data.config_sweeps import slower_rows
from kernelcast_lab.data.folds import AT_LEAST
from kernelcast_lab.fit.dataset import Columns, Dataset, build
from kernelcast_lab.fit.families import fitting_columns
from kernelcast_lab.fit.fit import correction, sampled, twins
from kernelcast_lab.fit.recipes import changed, recipe
from kernelcast_lab.fit.train import encoder_of, train

_SHAPE = ("tokens", "experts", "topk", "k", "n")
_SHAPES = 72  # of a GPU's 288, drawn
_EPOCHS, _BATCH = 15, 2048  # of the main network


def rank_biserial(time_s: NDArray[np.float64], listed: NDArray[np.bool_]) -> float:
    """Share of (listed, other) pairs with the listed one predicted faster, less the share with it slower."""
    fast, slow = np.sort(time_s[listed]), np.sort(time_s[~listed])
    below = np.searchsorted(fast, slow, side="left").sum()  # listed ones strictly faster, for each other one
    above = len(fast) * len(slow) - np.searchsorted(fast, slow, side="right").sum()
    return float((below - above) / (len(fast) * len(slow)))


def known_order(columns: Columns, gpu_id: str) -> tuple[Dataset, NDArray[np.bool_], NDArray[np.intp]]:
    """Every listed and every other config of some shapes of one GPU; which are listed; the shape of each row."""
    here = (columns["gpu"] == gpu_id) & ~np.isnan(columns["block_m"]) & (columns["source"] == "pipeweave")
    here &= ~(columns[AT_LEAST] > 0)
    listed = {name: column[here] for name, column in columns.items() if name != AT_LEAST}
    others = slower_rows(listed, len(here))
    others.pop(AT_LEAST)
    both = merged([Measurements(listed, "listed"), Measurements(others, "others")]).columns
    _, shape = np.unique(np.stack([both[name] for name in _SHAPE], axis=1), axis=0, return_inverse=True)
    kept = np.isin(shape, sampled(np.arange(shape.max() + 1), _SHAPES, 0))
    is_listed = np.arange(len(shape)) < here.sum()
    data = build({name: column[kept] for name, column in both.items()}, "moe_gemm")
    return data, is_listed[kept][data.rows], shape[kept][data.rows]


def left_out(data: Dataset, gpu_id: str) -> FamilyWeights:
    """Networks fitted without a GPU and its twins; of nameless ones as many as the shipped weights have."""
    gone = np.array([twins(str(name), gpu_id) for name in data.choices["gpu"]])
    fitted = data.select(np.flatnonzero(~gone))
    encoder = encoder_of(fitted)
    settings = changed(recipe("moe_gemm").settings, epochs=_EPOCHS, batch=_BATCH)
    main = train(fitted, encoder, settings.main, "main")
    seeded = [replace(settings.transfer, seed=seed) for seed in range(settings.transfer_networks)]
    transfer = tuple(train(fitted, encoder, training, "transfer") for training in seeded)
    return FamilyWeights(encoder, (main,), transfer, main, {}, {})


def figures(
    roots: Sequence[Path] | None, gpus: Sequence[str] = (), say: Callable[[str], None] = lambda text: None
) -> dict[str, list[dict[str, Any]]]:
    """A line a GPU: the median over its shapes, and the lowest tenth, by each way to rank."""
    wanted = [gpu(name).id for name in gpus]
    columns = fitting_columns(roots, "moe_gemm")
    is_swept = (columns["source"] == "pipeweave") & (columns[AT_LEAST] > 0)
    swept = sorted({str(name) for name in columns["gpu"][is_swept]})
    refuse_unknown("GPU with configs that PipeWeave swept", wanted, swept)
    data = build(columns, "moe_gemm")
    lines = []
    for gpu_id in wanted or swept:
        tested, listed, shape = known_order(columns, gpu_id)
        weights, physics = left_out(data, gpu_id), tested.estimate_s
        named = physics * np.exp(correction(weights, tested)[:, 0])
        nameless = physics * np.exp(correction(replace(weights, nameless=True), tested)[:, 0])
        ways = {"named": named, "nameless": nameless, "physics": physics, "both": np.sqrt(nameless * physics)}
        line: dict[str, Any] = {"gpu": gpu_id, "shapes": len(np.unique(shape))}
        for name, time_s in ways.items():
            result = [rank_biserial(time_s[shape == i], listed[shape == i]) for i in np.unique(shape)]
            line |= {name: float(np.median(result)), f"{name}_lowest_tenth": float(np.quantile(result, 0.1))}
        lines.append(line)
        say(f"{gpu_id}: {line['both']:.3f} by both")
    return {"gpus_left_out": lines}
