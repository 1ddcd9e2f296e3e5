"""What fitted weights say of a dataset, as the shipped predictor would."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernelcast.efficiency.features import aligned
from kernelcast.efficiency.learned import FamilyWeights
from kernelcast.hardware import gpu
from kernelcast_lab.fit.dataset import Dataset


def correction(weights: FamilyWeights, data: Dataset) -> NDArray[np.float64]:
    """(rows, outputs) of the networks."""
    values = aligned(data.names, data.values, weights.encoder.names)
    out = np.zeros((len(data), 3))
    for words, rows in _same_words(data):
        out[rows] = weights.outputs(values[rows], gpu(str(words.pop("gpu"))), words)
    return out


def _same_words(data: Dataset) -> list[tuple[dict[str, str | None], NDArray[np.intp]]]:
    """Rows grouped by their words."""
    names = list(data.words)
    keys: dict[tuple[object, ...], int] = {}
    columns = zip(*data.words.values(), strict=True)
    codes = np.fromiter((keys.setdefault(key, len(keys)) for key in columns), dtype=np.intp, count=len(data))
    order = np.argsort(codes, kind="stable")
    edges = np.searchsorted(codes[order], np.arange(len(keys) + 1))
    return [
        (
            {name: None if word is None else str(word) for name, word in zip(names, key, strict=True)},
            order[edges[code] : edges[code + 1]],
        )
        for key, code in keys.items()
    ]
