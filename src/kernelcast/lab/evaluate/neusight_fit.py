"""A small fit for NeuSight's whole models alone: its training split and our own rows, no others.

``python -m kernelcast.lab.evaluate.neusight_fit --data DIR --own validation -o WEIGHTS``, then ``neusight_e2e --weights
WEIGHTS``: a check that needs a quarter of an hour on two cores where the fit of what ships needs many hours. Families
that it does not fit, physics answers for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.lab.fit.families import fitted_columns
from kernelcast.lab.fit.fit import Settings, fit_family, save, save_about
from kernelcast.lab.fit.train import Recipe

FAMILIES = ("gemm", "memory")
_SOURCES = ("neusight", "kernelcast")


def small(epochs: int) -> Settings:
    """One network, and only so much else that the weights are whole."""
    return Settings(
        networks=1,
        transfer_networks=1,
        main=Recipe(epochs=epochs),
        transfer=Recipe(hidden=(128, 128), epochs=6, batch=2048, weight_decay=0.1, noise=0.2),
        ceiling=Recipe(hidden=(32,), epochs=2),
        rows_left_out=15_000,
    )


def fit_small(roots: Sequence[Path], out: Path, epochs: int = 30) -> None:
    """Fit what is not in the folder yet."""
    for family in FAMILIES:
        if (out / f"{family}.safetensors").exists():
            continue
        columns = fitted_columns(roots, family)
        mine = np.isin(columns["source"].astype(str), _SOURCES)
        if not mine.any():
            raise KernelcastError(f"no rows of {' or '.join(_SOURCES)} for {family} in {', '.join(map(str, roots))}")
        weights = fit_family({name: column[mine] for name, column in columns.items()}, family, small(epochs))
        save(weights, out)
        print(f"{family}: {weights.about['rows']:,} rows", file=sys.stderr)
    save_about(out, "neusight-small", {})


def main(words: Sequence[str] | None = None) -> int:
    """Entry: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m kernelcast.lab.evaluate.neusight_fit", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of measured tables, NeuSight's among them")
    parser.add_argument("--own", type=Path, help="folder of our own rows: validation")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the weights")
    parser.add_argument("--epochs", type=int, default=30)
    given = parser.parse_args(words)
    try:
        fit_small([root for root in (given.data, given.own) if root], given.out, given.epochs)
    except KernelcastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
